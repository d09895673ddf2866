"""Qwen3-Next: gated DeltaNet in three of four layers, gated attention in the others; config.json and tensors.

A key head's queries, keys, values and gates are beside each other in one tensor, and so are its two rates. A query and
its gate are beside each other in the queries' tensor.
"""

from dataclasses import replace

from megajax.config import ModelConfig
from megajax.hf.defaults import Json
from megajax.hf.llama import HEADS, INTO, LINEAR, Qwen3Moe
from megajax.hf.tensors import Selected, Tensor, side_by_side
from megajax.layout.kinds import BUILT_IN_BLOCKS, GATED_DELTANET, KIND_OF, MOE, extra_layers, extra_of, layer_kinds
from megajax.schema.fields import shortest_pattern

# config.json and `model.linear_attention`
SIZES = {f"linear_{name}": name for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")}
SIZES |= {"linear_conv_kernel_dim": "conv_kernel"}
MIXERS = {"linear_attention": GATED_DELTANET, "full_attention": "attention"}
# Of the one module of multi-token prediction, besides those of a layer
NORM = "(module embed) -> module embed"
MODULE = {
    "join.embedding_norm": ("mtp.pre_fc_norm_embedding.weight", NORM),
    "join.stream_norm": ("mtp.pre_fc_norm_hidden.weight", NORM),
    "join.projection": ("mtp.fc.weight", "(module out) in -> module in out"),
    "final_norm": ("mtp.norm.weight", NORM),
}
QKV = ("query", "key", "value")
CONVOLUTION = "(heads head) () window -> window heads head"


class Qwen3Next(Qwen3Moe):
    """Qwen3-Next 80B-A3B."""

    model_type, architecture = "qwen3_next", "Qwen3NextForCausalLM"
    partial_rotary = True
    modules = "num_nextn_predict_layers"

    def read_options(self, config: Json) -> Json:
        if config.get("attention_bias"):
            raise ValueError("attention_bias=true")
        if (modules := config[self.modules]) not in (0, 1):
            raise ValueError(f"{self.modules}={modules} is not 0 or 1")
        options = {
            "attention_gate": True,
            "qk_norm": True,
            "norm_zero_centred": True,
            "block_pattern": self.read_blocks(config),
            "linear_attention": {ours: config[theirs] for theirs, ours in SIZES.items()},
        }
        return options | ({"mtp_layers": modules} if modules else {}) | self.read_experts(config)

    def read_experts(self, config: Json) -> Json:
        normalised = config["norm_topk_prob"]
        return {
            "num_experts": config["num_experts"],
            "experts_per_token": config["num_experts_per_tok"],
            "expert_ffn_hidden_size": config["moe_intermediate_size"],
            "shared_expert_ffn_hidden_size": config["shared_expert_intermediate_size"],
            "shared_expert_gate": True,
            "router": {"pre_softmax": not normalised, "normalise": normalised},
        }

    def read_blocks(self, config: Json) -> list[str]:
        """`model.block_pattern`."""
        layers, interval = range(config["num_hidden_layers"]), config["full_attention_interval"]
        mixers = config.get("layer_types") or [
            "full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in layers
        ]
        plain, step = config.get("mlp_only_layers") or [], config["decoder_sparse_step"]
        blocks = []
        for layer, mixer in zip(layers, mixers, strict=True):
            if mixer not in MIXERS:
                raise ValueError(f"layer_types={mixer} is not {' or '.join(MIXERS)}")
            experts = layer not in plain and (layer + 1) % step == 0
            blocks.append(KIND_OF[MIXERS[mixer], MOE if experts else "mlp"])
        return list(shortest_pattern(tuple(blocks), len(blocks)))

    def write_options(self, model: ModelConfig) -> Json:
        kinds = [BUILT_IN_BLOCKS.get(kind.block, ("", "")) for kind in layer_kinds(model)]
        types = {mixer: theirs for theirs, mixer in MIXERS.items()}
        return {
            **{theirs: getattr(model.linear_attention, ours) for theirs, ours in SIZES.items()},
            "attention_bias": model.attention_bias,
            "layer_types": [types.get(mixer, mixer) for mixer, _ in kinds],
            "mlp_only_layers": [layer for layer, (_, own) in enumerate(kinds) if own != MOE],
            "decoder_sparse_step": 1,
            self.modules: len(extra_layers(model)),
            **self.write_experts(model),
        }

    def write_experts(self, model: ModelConfig) -> Json:
        return {
            "num_experts": model.num_experts,
            "num_experts_per_tok": model.experts_per_token,
            "moe_intermediate_size": model.expert_ffn_hidden_size,
            "shared_expert_intermediate_size": model.shared_expert_ffn_hidden_size,
            "norm_topk_prob": model.router.normalise and not model.router.pre_softmax,
        }

    def unused(self, config: Json) -> tuple[str, ...]:
        return ("mtp.",)

    def tensors(self, model: ModelConfig) -> list[Tensor]:
        """Those of the layers, and the module's: a layer like the last one, with numbers of its own."""
        out, last = super().tensors(model), f"blocks.{layer_kinds(model)[-1].block}."
        if (extra := extra_of(model)) is None:
            return out
        module = [
            replace(
                tensor,
                ours=tensor.ours.replace(last, f"blocks.{extra.name}."),
                theirs=tensor.theirs.replace("model.layers.", "mtp.layers."),
                first_layer=model.num_layers,
            )
            for tensor in out
            if tensor.ours.startswith(last)
        ]
        own = [Tensor(f"blocks.{extra.name}.{name}", *tensor) for name, tensor in MODULE.items()]
        return [*out, *module, *own]

    def attention(self, model: ModelConfig, ours: str) -> list[Tensor]:
        H, theirs = model.head_dim, "model.layers.{layer}.self_attn.q_proj.weight"
        others = [tensor for tensor in super().attention(model, ours) if tensor.ours != f"{ours}query"]
        halves = {"query": range(H), "gate": range(H, 2 * H)}
        return others + [
            Tensor(f"{ours}{name}", theirs, HEADS, selected=Selected("head", tuple(own), 2 * H))
            for name, own in halves.items()
        ]

    def gated_deltanet(self, model: ModelConfig, ours: str) -> list[Tensor]:
        theirs, widths = "model.layers.{layer}.linear_attn.", head_widths(model)
        return [
            *self.projections(model, ours, theirs),
            *side_by_side(
                f"{theirs}conv1d.weight",
                0,
                {
                    f"{ours}{name}_convolution": (CONVOLUTION, model.linear_attention.num_key_heads * widths[name])
                    for name in QKV
                },
            ),
            Tensor(f"{ours}decay_rate", f"{theirs}A_log"),
            Tensor(f"{ours}decay_bias", f"{theirs}dt_bias"),
            Tensor(f"{ours}output_norm", f"{theirs}norm.weight"),
            Tensor(f"{ours}output", f"{theirs}out_proj.weight", INTO),
        ]

    def projections(self, model: ModelConfig, ours: str, theirs: str) -> list[Tensor]:
        """Those of gated DeltaNet, and its rates."""
        group = model.linear_attention.num_value_heads // model.linear_attention.num_key_heads
        return [
            *_in_groups(ours, f"{theirs}in_proj_qkvz.weight", head_widths(model)),
            *_in_groups(ours, f"{theirs}in_proj_ba.weight", {"strength": group, "decay": group}),
        ]

    def moe(self, model: ModelConfig, ours: str) -> list[Tensor]:
        shared = "model.layers.{layer}.mlp.shared_expert"
        names = ("gate", "up", "down")
        return [
            *super().moe(model, ours),
            *(Tensor(f"{ours}shared_{name}", f"{shared}.{name}_proj.weight", LINEAR) for name in names),
            Tensor(f"{ours}shared_router", f"{shared}_gate.weight", "() embed -> embed"),
        ]


def head_widths(model: ModelConfig) -> dict[str, int]:
    """Numbers of each projection of gated DeltaNet for one key head."""
    c = model.linear_attention
    width = c.num_value_heads // c.num_key_heads * c.value_head_dim
    return {"query": c.key_head_dim, "key": c.key_head_dim, "value": width, "gate": width}


def _in_groups(ours: str, theirs: str, widths: dict[str, int]) -> list[Tensor]:
    """Parameters whose parts of one key head are beside each other in the tensor."""
    out, start, length = [], 0, sum(widths.values())
    for name, width in widths.items():
        own = Selected("head", tuple(range(start, start + width)), length)
        out.append(Tensor(f"{ours}{name}", theirs, HEADS, selected=own))
        start += width
    return out
