"""T5, T5 1.1, FLAN-T5 and UL2: config.json and tensors. The first block of a stack has the bias of all."""

from megajax.config import ModelConfig
from megajax.hf.defaults import DEFAULTS, Json
from megajax.hf.llama import HEADS, INTO, LINEAR
from megajax.hf.tensors import Family, Tensor
from megajax.layout.kinds import DECODER, DENSE, is_gated
from megajax.schema.model import LAYERS

NAMES = {
    "num_decoder_layers": "num_layers",
    "d_model": "hidden_size",
    "num_heads": "num_heads",
    "d_kv": "head_dim",
    "d_ff": "ffn_hidden_size",
    "vocab_size": "vocab_size",
    "layer_norm_epsilon": "norm_epsilon",
    "relative_attention_num_buckets": "relative_buckets",
    "relative_attention_max_distance": "relative_max_distance",
    "tie_word_embeddings": "tie_embeddings",
}
# names of transformers, the first of which is written
ACTIVATIONS = {"gated-gelu": "geglu", "gated-gelu_new": "geglu", "gated-silu": "swiglu", "relu": "relu"}
LENGTH = 512  # of the sequences in the training of all of them, where config.json has no n_positions
PROJECTIONS = {"query": ("q", HEADS), "key": ("k", HEADS), "value": ("v", HEADS), "output": ("o", INTO)}
GATED, PLAIN = {"gate": "wi_0", "up": "wi_1", "down": "wo"}, {"up": "wi", "down": "wo"}


class T5(Family):
    """T5: an encoder and a decoder, relative positions, scores without a scale."""

    model_type, architecture = "t5", "T5ForConditionalGeneration"
    names = NAMES

    def read(self, config: Json) -> Json:
        config = DEFAULTS[self.model_type] | config
        config["num_decoder_layers"] = config.get("num_decoder_layers") or config["num_layers"]
        if (activation := config["feed_forward_proj"]) not in ACTIVATIONS:
            raise ValueError(f"feed_forward_proj={activation} is not {' or '.join(ACTIVATIONS)}")
        for key, known in (("is_encoder_decoder", True), ("is_decoder", False)):
            if config.get(key, known) is not known:
                raise ValueError(f"{key}={not known}".lower())
        encoder = {"kind": LAYERS, "num_layers": config["num_layers"]}
        encoder["sequence_length"] = config.get("n_positions") or LENGTH
        model = {ours: config[theirs] for theirs, ours in NAMES.items()}
        return model | {
            "activation": ACTIVATIONS[activation],
            "position": "relative",
            "attention_scale": 1.0,
            "scale_head": config.get("scale_decoder_outputs", config["tie_word_embeddings"]),
            "encoder": encoder,
        }

    def write(self, model: ModelConfig) -> Json:
        config = {theirs: getattr(model, ours) for theirs, ours in NAMES.items()}
        return config | {
            "model_type": self.model_type,
            "architectures": [self.architecture],
            "num_layers": model.encoder.num_layers,
            "n_positions": model.encoder.sequence_length,
            "feed_forward_proj": next((n for n, own in ACTIVATIONS.items() if own == model.activation), "gated-gelu"),
            "scale_decoder_outputs": model.scale_head,
            "is_encoder_decoder": True,
            "decoder_start_token_id": 0,
        }

    def unused(self, config: Json) -> tuple[str, ...]:
        return "encoder.embed_tokens.", "decoder.embed_tokens."  # in older folders: `shared` again

    def tensors(self, model: ModelConfig) -> list[Tensor]:
        out = [Tensor("embedding.tokens", "shared.weight")]
        if not model.tie_embeddings:
            out.append(Tensor("head", "lm_head.weight", LINEAR))
        for ours, theirs in (("", "decoder"), ("encoder.", "encoder")):
            bias = f"{theirs}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
            out.append(Tensor(f"{ours}relative_bias", bias, "buckets heads -> heads buckets"))
            out.append(Tensor(f"{ours}final_norm", f"{theirs}.final_layer_norm.weight"))
        matrices = GATED if is_gated(model) else PLAIN
        both = {"attention": "Self", "cross_attention": "EncDec"}
        out += _layer(f"blocks.{DECODER}.", "decoder", both, matrices)
        return out + _layer(f"encoder.blocks.{DENSE}.", "encoder", {"attention": "Self"}, matrices)


def _layer(ours: str, theirs: str, attention: dict[str, str], matrices: dict[str, str]) -> list[Tensor]:
    """The entries of a stack's layers: `attention` has their sublayers of attention in order, `matrices` the MLP's."""
    out, block = [], f"{theirs}.block.{{layer}}.layer."
    for i, (name, kind) in enumerate(attention.items()):
        out.append(Tensor(f"{ours}{name}.norm", f"{block}{i}.layer_norm.weight"))
        for own, (short, pattern) in PROJECTIONS.items():
            out.append(Tensor(f"{ours}{name}.{own}", f"{block}{i}.{kind}Attention.{short}.weight", pattern))
    last = len(attention)
    out.append(Tensor(f"{ours}mlp.norm", f"{block}{last}.layer_norm.weight"))
    for own, short in matrices.items():
        out.append(Tensor(f"{ours}mlp.{own}", f"{block}{last}.DenseReluDense.{short}.weight", LINEAR))
    return out
