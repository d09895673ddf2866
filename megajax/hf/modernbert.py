"""ModernBERT (arXiv:2412.13663) with its head of masked language modelling: config.json and tensors."""

from megajax.config import ModelConfig
from megajax.hf.defaults import DEFAULTS, Json
from megajax.hf.families import GLOBAL, LOCAL
from megajax.hf.llama import BIAS, HEADS, INTO, LINEAR, check_fixed, layer_types, norm, windows
from megajax.hf.tensors import Family, Tensor, side_by_side
from megajax.layout.kinds import FIRST, block_layers

NAMES = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_heads",
    "intermediate_size": "ffn_hidden_size",
    "vocab_size": "vocab_size",
    "norm_eps": "norm_epsilon",
    "norm_bias": "norm_bias",
    "attention_bias": "attention_bias",
    "mlp_bias": "mlp_bias",
    "decoder_bias": "head_bias",
    "tie_word_embeddings": "tie_embeddings",
}
FIXED = {"classifier_bias": False, "classifier_activation": "gelu"}
ACTIVATIONS = {"gelu": "geglu_exact", "gelu_pytorch_tanh": "geglu", "silu": "swiglu"}
WHOLE: Json = {"norm": "layernorm", "causal": False, "embedding_norm": True, "prediction_head": True}
THREE = ("query", "key", "value")


class ModernBert(Family):
    """ModernBERT."""

    model_type, architecture = "modernbert", "ModernBertForMaskedLM"
    names = NAMES

    def read(self, config: Json) -> Json:
        config = DEFAULTS[self.model_type] | config
        check_fixed(config, FIXED)
        if (activation := config["hidden_activation"]) not in ACTIVATIONS:
            raise ValueError(f"hidden_activation={activation} is not one of {', '.join(ACTIVATIONS)}")
        model = {ours: config[theirs] for theirs, ours in NAMES.items()} | WHOLE
        every = config["global_attn_every_n_layers"]
        kinds = config.get("layer_types") or [
            LOCAL if i % every else GLOBAL for i in range(config["num_hidden_layers"])
        ]
        model |= windows(kinds, config["local_attention"] // 2 + 1)  # on each side
        return model | {"activation": ACTIVATIONS[activation]} | self._read_rope(config, "sliding_window" in model)

    def _read_rope(self, config: Json, has_local: bool) -> Json:
        """`rope_parameters` by kind of layer, or the older keys."""
        by_kind = config.get("rope_parameters") or {}
        if config.get("rope_scaling") or not by_kind.keys() <= {GLOBAL, LOCAL}:
            raise ValueError(f"rope_scaling, or rope_parameters of other kinds than {GLOBAL} and {LOCAL}")
        theta = {}
        for kind, older in ((GLOBAL, "global_rope_theta"), (LOCAL, "local_rope_theta")):
            own = by_kind.get(kind) or {}
            check_fixed(own, {"rope_type": "default"})
            theta[kind] = own.get("rope_theta", config[older])
        return {"rope_theta": theta[GLOBAL]} | ({"rope_local_theta": theta[LOCAL]} if has_local else {})

    def write(self, model: ModelConfig) -> Json:
        config: Json = {theirs: getattr(model, ours) for theirs, ours in NAMES.items()} | FIXED
        window, local = model.sliding_window, model.rope_local_theta or model.rope_theta
        theta = {GLOBAL: model.rope_theta, LOCAL: local}
        return config | {
            "model_type": self.model_type,
            "architectures": [self.architecture],
            "hidden_activation": next((n for n, own in ACTIVATIONS.items() if own == model.activation), "gelu"),
            "layer_types": layer_types(model),
            "local_attention": 2 * (window - 1) if window else DEFAULTS[self.model_type]["local_attention"],
            # The first two are transformers' older layout
            "global_rope_theta": theta[GLOBAL],
            "local_rope_theta": theta[LOCAL],
            "rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in theta.items()},
        }

    def tensors(self, model: ModelConfig) -> list[Tensor]:
        out = [
            Tensor("embedding.tokens", "model.embeddings.tok_embeddings.weight"),
            *norm(model, "embedding.norm", "model.embeddings.norm"),
            *norm(model, "final_norm", "model.final_norm"),
            Tensor("head_dense", "head.dense.weight", LINEAR),
            *norm(model, "head_norm", "head.norm"),
        ]
        if model.head_bias:
            out.append(Tensor("head_bias", "decoder.bias"))
        if not model.tie_embeddings:
            out.append(Tensor("head", "decoder.weight", LINEAR))
        for kind in block_layers(model):
            ours, theirs = f"blocks.{kind}.", "model.layers.{layer}."
            out += self._attention(model, f"{ours}attention.", f"{theirs}attn.")
            out += self._mlp(model, f"{ours}mlp.", f"{theirs}mlp.")
            out += [] if kind == FIRST else norm(model, f"{ours}attention.norm", f"{theirs}attn_norm")
            out += norm(model, f"{ours}mlp.norm", f"{theirs}mlp_norm")
        return out

    def _attention(self, model: ModelConfig, ours: str, theirs: str) -> list[Tensor]:
        width = model.num_heads * model.head_dim
        out = side_by_side(f"{theirs}Wqkv.weight", 0, {f"{ours}{name}": (HEADS, width) for name in THREE})
        out.append(Tensor(f"{ours}output", f"{theirs}Wo.weight", INTO))
        if model.attention_bias:
            biases = {f"{ours}{name}_bias": (BIAS, width) for name in THREE}
            out += [*side_by_side(f"{theirs}Wqkv.bias", 0, biases), Tensor(f"{ours}output_bias", f"{theirs}Wo.bias")]
        return out

    def _mlp(self, model: ModelConfig, ours: str, theirs: str) -> list[Tensor]:
        width = model.ffn_hidden_size
        out = side_by_side(f"{theirs}Wi.weight", 0, {f"{ours}{name}": (LINEAR, width) for name in ("gate", "up")})
        out.append(Tensor(f"{ours}down", f"{theirs}Wo.weight", LINEAR))
        if model.mlp_bias:
            out += side_by_side(f"{theirs}Wi.bias", 0, {f"{ours}{name}_bias": ("", width) for name in ("gate", "up")})
            out.append(Tensor(f"{ours}down_bias", f"{theirs}Wo.bias"))
        return out
