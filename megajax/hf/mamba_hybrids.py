"""Models with Mamba-2 and attention: Granite 4.0-H, Bamba and Falcon-H1; Mamba-2 alone. config.json and tensors.

The multipliers of Granite and Falcon-H1 are in the weights here (`model.multipliers`).
"""

from megajax.config import ModelConfig
from megajax.hf.defaults import Json
from megajax.hf.llama import EXPERTS, LINEAR, NAMES, Llama, check_fixed
from megajax.hf.mamba2 import (
    check_product,
    check_whole,
    expansion,
    mamba2_tensors,
    read_limits,
    read_mamba2,
    write_expanded,
    write_limits,
    write_mamba2,
)
from megajax.hf.nemotron_h import NemotronH
from megajax.hf.tensors import Tensor, side_by_side, with_factors
from megajax.layout.kinds import MAMBA2, block_layers, layer_kinds
from megajax.schema.fields import shortest_pattern
from megajax.schema.layer_sections import MultipliersConfig

MIXERS = {"linear_attention": MAMBA2, "mamba": MAMBA2, "full_attention": "attention", "attention": "attention"}
FOR_GRANITE = ("embedding_multiplier", "logits_scaling", "residual_multiplier")
LINEAR_ATTENTION, FULL_ATTENTION = "linear_attention", "full_attention"


def read_multipliers(config: Json, keys: tuple[str, ...]) -> Json:
    """`model.multipliers`."""
    found = {key: config[key] for key in keys if config.get(key) is not None}
    return {"multipliers": found} if found else {}


def write_multipliers(model: ModelConfig, keys: tuple[str, ...]) -> Json:
    return model.multipliers.model_dump(mode="json", include={*keys})


def of_ends(model: ModelConfig, embedding: float, logits: float) -> dict[str, float]:
    """Factors for multipliers of the embedding's output and of the logits; a tied head has the embedding's."""
    if model.tie_embeddings:
        return {"embedding.tokens": embedding, "final_norm": logits / embedding}
    return {"embedding.tokens": embedding, "head": logits}


class GraniteMoeHybrid(Llama):
    """Granite 4.0-H: Mamba-2 or attention, then experts and a shared one, or an MLP."""

    model_type, architecture = "granitemoehybrid", "GraniteMoeHybridForCausalLM"
    names = {theirs: ours for theirs, ours in NAMES.items() if theirs != "intermediate_size"}
    multipliers = FOR_GRANITE

    def read_rope(self, config: Json) -> Json:
        if config.get("position_embedding_type") != "rope":
            return {"position": "none"}
        return super().read_rope(config)

    def write_rope(self, model: ModelConfig) -> Json:
        if model.position == "none":
            return {"position_embedding_type": "nope"}
        return super().write_rope(model) | {"position_embedding_type": "rope"}

    def read_options(self, config: Json) -> Json:
        experts, layers = config["num_local_experts"], config["num_hidden_layers"]
        types = config.get("layer_types") or [LINEAR_ATTENTION] * layers
        if wrong := [found for found in types if found not in MIXERS]:
            raise ValueError(f"layer_types has {wrong[0]}, which is not one of {', '.join(MIXERS)}")
        kinds = {"attention": "moe" if experts else "dense", MAMBA2: f"{MAMBA2}_moe" if experts else f"{MAMBA2}_mlp"}
        blocks = tuple(kinds[MIXERS[found]] for found in types)
        options = {
            "block_pattern": list(shortest_pattern(blocks, layers)),
            **({"mamba2": read_mamba2(config)} if kinds[MAMBA2] in blocks else {}),
            **({"attention_bias": True} if config.get("attention_bias") else {}),
            **read_multipliers(config, self.multipliers),
        }
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        if (scale := config["attention_multiplier"]) != head_dim**-0.5:
            options["attention_scale"] = scale
        if not experts:
            return options | {"ffn_hidden_size": config["shared_intermediate_size"]}
        return options | {
            "num_experts": experts,
            "experts_per_token": config["num_experts_per_tok"],
            "expert_ffn_hidden_size": config["intermediate_size"],
            "shared_expert_ffn_hidden_size": config["shared_intermediate_size"],
        }

    def write_options(self, model: ModelConfig) -> Json:
        types = {kind: FULL_ATTENTION for kind in ("dense", "moe")}
        scale = model.attention_scale
        out = write_expanded(model) | write_multipliers(model, self.multipliers)
        out |= {
            "layer_types": [types.get(kind.block, LINEAR_ATTENTION) for kind in layer_kinds(model)],
            "attention_bias": model.attention_bias,
            "attention_multiplier": model.head_dim**-0.5 if scale is None else scale,
            "num_local_experts": model.num_experts or 0,
            "num_experts_per_tok": model.experts_per_token,
        }
        if model.num_experts is None:
            return out | {"num_experts_per_tok": 0, "shared_intermediate_size": model.ffn_hidden_size}
        return out | {
            "intermediate_size": model.expert_ffn_hidden_size,
            "shared_intermediate_size": model.shared_expert_ffn_hidden_size,
        }

    def tensors(self, model: ModelConfig) -> list[Tensor]:
        m = model.multipliers
        outputs = ("attention.output", "attention.output_bias", "mamba2.output", "mlp.down", "moe.down")
        factors = dict.fromkeys((*outputs, "moe.shared_down"), m.residual_multiplier)
        ends = of_ends(model, m.embedding_multiplier, 1 / m.logits_scaling)
        return with_factors(super().tensors(model), factors | ends)

    def mamba2(self, model: ModelConfig, ours: str) -> list[Tensor]:
        return mamba2_tensors(model, ours, "model.layers.{layer}.mamba.")

    def mlp(self, model: ModelConfig, ours: str) -> list[Tensor]:
        return _in_two(ours, "model.layers.{layer}.shared_mlp.", LINEAR, model.ffn_hidden_size)

    def moe(self, model: ModelConfig, ours: str) -> list[Tensor]:
        experts, width = "model.layers.{layer}.block_sparse_moe.", model.expert_ffn_hidden_size or 0
        shared = "model.layers.{layer}.shared_mlp."
        return [
            Tensor(f"{ours}router", f"{experts}router.layer.weight", LINEAR),
            *_in_two(ours, experts, EXPERTS, width),
            *_in_two(f"{ours}shared_", shared, LINEAR, model.shared_expert_ffn_hidden_size),
        ]


def _in_two(ours: str, theirs: str, pattern: str, width: int) -> list[Tensor]:
    """An MLP or experts whose gate and up are in one tensor."""
    parts = {f"{ours}{name}": (pattern, width) for name in ("gate", "up")}
    dimension = 1 if pattern == EXPERTS else 0
    down = Tensor(f"{ours}down", f"{theirs}output_linear.weight", pattern)
    return [*side_by_side(f"{theirs}input_linear.weight", dimension, parts), down]


class Bamba(Llama):
    """Bamba: Mamba-2 or attention, then an MLP."""

    model_type, architecture = "bamba", "BambaForCausalLM"
    partial_rotary = True
    norms = {"attention.norm": "input_layernorm", "mlp.norm": "pre_ff_layernorm"}
    final_norm, mlp_module = "model.final_layernorm", "feed_forward"

    def read_rope(self, config: Json) -> Json:
        return super().read_rope(config | {"partial_rotary_factor": 0.5})  # beside rope_parameters it does not count

    def read_options(self, config: Json) -> Json:
        attention, layers = config.get("attn_layer_indices") or [], config["num_hidden_layers"]
        blocks = tuple("dense" if layer in attention else f"{MAMBA2}_mlp" for layer in range(layers))
        options = {"mamba2": read_mamba2(config)} if f"{MAMBA2}_mlp" in blocks else {}
        pattern = list(shortest_pattern(blocks, layers))
        return super().read_options(config) | options | {"block_pattern": pattern}

    def write_options(self, model: ModelConfig) -> Json:
        attention = list(block_layers(model).get("dense", ()))
        out = super().write_options(model) | write_expanded(model)
        return out | {"attn_layer_indices": attention}

    def mamba2(self, model: ModelConfig, ours: str) -> list[Tensor]:
        return mamba2_tensors(model, ours, "model.layers.{layer}.mamba.")


class FalconH1(Bamba):
    """Falcon-H1: attention and Mamba-2 beside each other in all layers, then an MLP."""

    model_type, architecture = "falcon_h1", "FalconH1ForCausalLM"
    partial_rotary = False
    read_rope = Llama.read_rope
    multipliers = tuple(name for name in MultipliersConfig.model_fields if name not in FOR_GRANITE[1:])

    def read_options(self, config: Json) -> Json:
        check_fixed(config, {"projectors_bias": False})
        norm = "none"
        if config["mamba_rms_norm"]:
            norm = "before_gate" if config["mamba_norm_before_gate"] else "after_gate"
        return Llama.read_options(self, config) | {
            "block_pattern": ["attention_mamba2"],
            "mamba2": read_mamba2(config) | {"output_norm": norm},
            **read_multipliers(config, self.multipliers),
        }

    def write_options(self, model: ModelConfig) -> Json:
        c, out = model.mamba2, Llama.write_options(self, model) | write_mamba2(model)
        return (
            out
            | write_multipliers(model, self.multipliers)
            | {
                "mamba_d_ssm": c.num_heads * c.head_dim,
                "mamba_rms_norm": c.output_norm != "none",
                "mamba_norm_before_gate": c.output_norm == "before_gate",
                "projectors_bias": False,
            }
        )

    def tensors(self, model: ModelConfig) -> list[Tensor]:
        m, projections = model.multipliers, ("gate", "value", "key", "query", "step")
        (gate, down), attention, out = m.mlp_multipliers, m.attention_in_multiplier, m.attention_out_multiplier
        of_projections = zip(projections, m.ssm_multipliers, strict=True)
        factors = {
            **{f"mamba2.{name}": m.ssm_in_multiplier * number for name, number in of_projections},
            "mamba2.output": m.ssm_out_multiplier,
            **dict.fromkeys(("attention.query", "attention.value"), attention),
            "attention.key": attention * m.key_multiplier,
            "attention.key_bias": m.key_multiplier,
            **dict.fromkeys(("attention.output", "attention.output_bias"), out),
            **dict.fromkeys(("mlp.gate", "mlp.gate_bias"), gate),
            **dict.fromkeys(("mlp.down", "mlp.down_bias"), down),
        }
        ends = of_ends(model, m.embedding_multiplier, m.lm_head_multiplier)
        return with_factors(super().tensors(model), factors | ends)


class Mamba2Only(NemotronH):
    """Mamba-2 and Codestral Mamba: Mamba-2 alone."""

    model_type, architecture = "mamba2", "Mamba2ForCausalLM"
    names = {name: NAMES[name] for name in ("num_hidden_layers", "hidden_size", "vocab_size", "tie_word_embeddings")}
    names |= {"layer_norm_epsilon": "norm_epsilon"}
    activations, activation_key = {"silu": "swiglu"}, "hidden_act"  # of the convolution
    sizes = {"num_heads": "num_heads", "head_dim": "head_dim", "n_groups": "num_groups", "state_size": "state_dim"}
    sizes |= {"conv_kernel": "conv_kernel"}
    fixed: Json = {"use_bias": False, "use_conv_bias": True}

    def read_options(self, config: Json) -> Json:
        check_fixed(config, self.fixed)
        sizes = {ours: config[theirs] for theirs, ours in self.sizes.items()}
        check_whole(config, "expand", "num_heads", "head_dim")
        check_product(config, ("num_heads", "head_dim"), config["expand"] * config["hidden_size"])
        return {"num_heads": 1, "block_pattern": [MAMBA2], "mamba2": sizes | read_limits(config)}

    def write_options(self, model: ModelConfig) -> Json:
        sizes = {theirs: getattr(model.mamba2, ours) for theirs, ours in self.sizes.items()}
        return self.fixed | sizes | write_limits(model) | {"expand": expansion(model)}
