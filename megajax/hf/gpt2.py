"""GPT-2: config.json and tensors. Its linear layers are `[in, out]`, with queries, keys and values in one tensor."""

from megajax.config import ModelConfig
from megajax.hf.defaults import DEFAULTS, Json
from megajax.hf.llama import BIAS
from megajax.hf.tensors import Family, Tensor, side_by_side

NAMES = {
    "n_layer": "num_layers",
    "n_embd": "hidden_size",
    "n_head": "num_heads",
    "vocab_size": "vocab_size",
    "n_positions": "max_positions",
    "layer_norm_epsilon": "norm_epsilon",
}
# names of transformers, the first of which is written
ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact"}


class Gpt2(Family):
    """GPT-2."""

    model_type, architecture = "gpt2", "GPT2LMHeadModel"
    names = NAMES

    def read(self, config: Json) -> Json:
        config = DEFAULTS[self.model_type] | config
        if (activation := config["activation_function"]) not in ACTIVATIONS:
            raise ValueError(f"activation_function={activation} is not one of {', '.join(ACTIVATIONS)}")
        for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
            if config.get(key):
                raise ValueError(f"{key}=true")
        model = {ours: config[theirs] for theirs, ours in NAMES.items()}
        return model | {
            "ffn_hidden_size": config.get("n_inner") or 4 * config["n_embd"],
            "norm": "layernorm",
            "activation": ACTIVATIONS[activation],
            "position": "learned",
            "attention_bias": True,
            "mlp_bias": True,
            "tie_embeddings": config["tie_word_embeddings"],
            "attention_scale": None if config.get("scale_attn_weights", True) else 1.0,
        }

    def write(self, model: ModelConfig) -> Json:
        config = {theirs: getattr(model, ours) for theirs, ours in NAMES.items()}
        return config | {
            "model_type": self.model_type,
            "architectures": [self.architecture],
            "activation_function": next((n for n, a in ACTIVATIONS.items() if a == model.activation), "gelu_new"),
            "n_inner": model.ffn_hidden_size,
            "scale_attn_weights": model.attention_scale != 1.0,
            "tie_word_embeddings": model.tie_embeddings,
        }

    def tensors(self, model: ModelConfig) -> list[Tensor]:
        width = model.num_heads * model.head_dim
        attention, mlp, theirs = "blocks.dense.attention.", "blocks.dense.mlp.", "transformer.h.{layer}."
        three = ("query", "key", "value")
        matrices = {f"{attention}{name}": ("embed (heads head) -> embed heads head", width) for name in three}
        biases = {f"{attention}{name}_bias": (BIAS, width) for name in three}
        return [
            Tensor("embedding.tokens", "transformer.wte.weight"),
            Tensor("embedding.positions", "transformer.wpe.weight"),
            Tensor("final_norm", "transformer.ln_f.weight"),
            Tensor("final_norm_bias", "transformer.ln_f.bias"),
            *([] if model.tie_embeddings else [Tensor("head", "lm_head.weight", "out in -> in out")]),
            *side_by_side(f"{theirs}attn.c_attn.weight", 1, matrices),
            *side_by_side(f"{theirs}attn.c_attn.bias", 0, biases),
            Tensor(f"{attention}norm", f"{theirs}ln_1.weight"),
            Tensor(f"{attention}norm_bias", f"{theirs}ln_1.bias"),
            Tensor(f"{attention}output", f"{theirs}attn.c_proj.weight", "(heads head) embed -> heads head embed"),
            Tensor(f"{attention}output_bias", f"{theirs}attn.c_proj.bias"),
            Tensor(f"{mlp}norm", f"{theirs}ln_2.weight"),
            Tensor(f"{mlp}norm_bias", f"{theirs}ln_2.bias"),
            Tensor(f"{mlp}up", f"{theirs}mlp.c_fc.weight"),
            Tensor(f"{mlp}up_bias", f"{theirs}mlp.c_fc.bias"),
            Tensor(f"{mlp}down", f"{theirs}mlp.c_proj.weight"),
            Tensor(f"{mlp}down_bias", f"{theirs}mlp.c_proj.bias"),
        ]
