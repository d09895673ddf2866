"""Kimi Linear: Kimi delta attention in three of four layers, latent attention without positions in the others, experts.

`config.json` as Moonshot publishes it has the layers and the heads of delta attention in `linear_attn_config`;
transformers writes keys of its own for them. Both are read, and both are written.
"""

from megajax.config import ModelConfig
from megajax.hf.deepseek import MATRICES, DeepseekV3
from megajax.hf.defaults import Json
from megajax.hf.llama import BIAS, HEADS, INTO, LINEAR, WithoutPositions, check_fixed
from megajax.hf.tensors import Tensor
from megajax.layout.kinds import ATTENTION, BUILT_IN_BLOCKS, KDA, KIND_OF, MLP, MOE, layer_kinds
from megajax.schema.fields import shortest_pattern

# Its names of DeepSeek-V3's keys
PUBLISHED = {
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
}
# `model.kda` in linear_attn_config and by transformers' keys
HEADS_OF_KDA = {
    "num_heads": ("num_heads", "linear_num_heads"),
    "head_dim": ("head_dim", "linear_head_dim"),
    "conv_kernel": ("short_conv_kernel_size", "linear_conv_kernel_dim"),
}
SECTION = "linear_attn_config"
# Lists of layers in it, which count from 1, and transformers' layer_types
MIXERS = {KDA: ("kda_layers", "linear_attention"), ATTENTION: ("full_attn_layers", "full_attention")}
FEED_FORWARDS = {MLP: "dense", MOE: "sparse"}  # mlp_layer_types
# Options that its models do not use
FIXED: Json = {
    "mla_use_nope": True,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "num_nextn_predict_layers": 0,
    "use_grouped_topk": True,
}
CONVOLUTION = "(heads head) () window -> window heads head"


class KimiLinear(WithoutPositions, DeepseekV3):
    """Kimi Linear 48B-A3B."""

    model_type, architecture = "kimi_linear", "KimiLinearForCausalLM"
    names = {PUBLISHED.get(theirs, theirs): ours for theirs, ours in DeepseekV3.names.items()}
    del names["first_k_dense_replace"]

    def read_options(self, config: Json) -> Json:
        check_fixed(config, FIXED)
        if type(config["moe_renormalize"]) is not bool:
            raise ValueError(f"moe_renormalize={config['moe_renormalize']} is not true or false")
        section, lists = config.get(SECTION) or {}, [name for name, _ in MIXERS.values()]
        known = {*lists, *(name for name, _ in HEADS_OF_KDA.values())}
        if others := [key for key, value in section.items() if key not in known and value]:
            raise ValueError(f"{SECTION}.{others[0]}={section[others[0]]}")
        blocks = self.read_blocks(config, section)
        as_deepseek = config | {theirs: config[published] for theirs, published in PUBLISHED.items()}
        return super().read_options(as_deepseek | {"topk_method": "noaux_tc"}) | {
            "block_pattern": list(shortest_pattern(tuple(blocks), len(blocks))),
            "kda": {ours: section.get(name, config[other]) for ours, (name, other) in HEADS_OF_KDA.items()},
        }

    def read_blocks(self, config: Json, section: Json) -> list[str]:
        """The kind of each layer."""
        layers, mixers = range(config["num_hidden_layers"]), config.get("layer_types")
        if mixers is None and all(name in section for name, _ in MIXERS.values()):
            mixers = [[theirs for name, theirs in MIXERS.values() if layer + 1 in section[name]] for layer in layers]
            if wrong := [layer + 1 for layer in layers if len(mixers[layer]) != 1]:
                raise ValueError(f"{SECTION} has layer {wrong[0]} in none or both of its lists")
            mixers = [own for (own,) in mixers]
        if mixers is None:
            mixers = [MIXERS[ATTENTION if layer and layer % 4 == 0 else KDA][1] for layer in layers]
        plain, others = config["first_k_dense_replace"], config.get("mlp_layer_types")
        others = others or [FEED_FORWARDS[MLP if layer < plain else MOE] for layer in layers]
        return [
            KIND_OF[_known(MIXERS_BY_TYPE, "layer_types", mixer), _known(BY_MLP_TYPE, "mlp_layer_types", other)]
            for mixer, other in zip(mixers, others, strict=True)
        ]

    def write_options(self, model: ModelConfig) -> Json:
        kinds = [BUILT_IN_BLOCKS.get(kind.block, ("", "")) for kind in layer_kinds(model)]
        if wrong := [kind for kind in kinds if len(kind) != 2 or {kind[0]} - {*MIXERS} or {kind[1]} - {*FEED_FORWARDS}]:
            raise ValueError(f"it has no layers of {wrong[0]}")
        layers = {name: [i for i, kind in enumerate(kinds, 1) if kind[0] == own] for own, (name, _) in MIXERS.items()}
        sizes = {names: getattr(model.kda, ours) for ours, names in HEADS_OF_KDA.items()}
        as_deepseek = super().write_options(model)
        return {
            **FIXED,
            **{published: as_deepseek[theirs] for theirs, published in PUBLISHED.items() if theirs in as_deepseek},
            **{key: as_deepseek[key] for key in ("topk_group", "routed_scaling_factor")},
            **{other: size for (_, other), size in sizes.items()},
            SECTION: {name: size for (name, _), size in sizes.items()} | layers,
            "layer_types": [MIXERS[mixer][1] for mixer, _ in kinds],
            "mlp_layer_types": [FEED_FORWARDS[other] for _, other in kinds],
            "first_k_dense_replace": next((i for i, kind in enumerate(kinds) if kind[1] != MLP), len(kinds)),
        }

    def kda(self, model: ModelConfig, ours: str) -> list[Tensor]:
        theirs, low_rank = "model.layers.{layer}.self_attn.", {"decay": "f", "gate": "g"}
        out = [
            Tensor(f"{ours}strength", f"{theirs}b_proj.weight", LINEAR),
            Tensor(f"{ours}decay_rate", f"{theirs}A_log", "() () heads () -> heads"),
            Tensor(f"{ours}decay_bias", f"{theirs}dt_bias", BIAS),
            Tensor(f"{ours}output_norm", f"{theirs}o_norm.weight"),
            Tensor(f"{ours}output", f"{theirs}o_proj.weight", INTO),
        ]
        for name in ("query", "key", "value"):
            out.append(Tensor(f"{ours}{name}", f"{theirs}{name[0]}_proj.weight", HEADS))
            out.append(Tensor(f"{ours}{name}_convolution", f"{theirs}{name[0]}_conv1d.weight", CONVOLUTION))
        for name, short in low_rank.items():
            out.append(Tensor(f"{ours}{name}_down", f"{theirs}{short}_a_proj.weight", LINEAR))
            out.append(Tensor(f"{ours}{name}_up", f"{theirs}{short}_b_proj.weight", HEADS))
        return out

    def moe(self, model: ModelConfig, ours: str) -> list[Tensor]:
        theirs = "model.layers.{layer}.block_sparse_moe."
        out = [
            Tensor(f"{ours}router", f"{theirs}gate.weight", LINEAR),
            Tensor(f"{ours}expert_bias", f"{theirs}gate.e_score_correction_bias"),
        ]
        for name, short in zip(MATRICES, ("w1", "w3", "w2"), strict=True):
            out.append(Tensor(f"{ours}{name}", f"{theirs}experts.{{expert}}.{short}.weight", LINEAR))
            if model.shared_expert_ffn_hidden_size:
                out.append(Tensor(f"{ours}shared_{name}", f"{theirs}shared_experts.{name}_proj.weight", LINEAR))
        return out


MIXERS_BY_TYPE = {theirs: mixer for mixer, (_, theirs) in MIXERS.items()}
BY_MLP_TYPE = {theirs: other for other, theirs in FEED_FORWARDS.items()}


def _known(kinds: dict[str, str], key: str, found: str) -> str:
    if found not in kinds:
        raise ValueError(f"{key}={found} is not {' or '.join(kinds)}")
    return kinds[found]
