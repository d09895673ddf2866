"""Nemotron-H and Nemotron 3: layers of one sublayer, Mamba-2, attention, an MLP or experts; config.json and tensors."""

from dataclasses import replace

from megajax.config import ModelConfig
from megajax.hf.deepseek import read_groups
from megajax.hf.defaults import Json
from megajax.hf.llama import LINEAR, NAMES, Llama, WithoutPositions, check_fixed
from megajax.hf.mamba2 import mamba2_tensors
from megajax.hf.tensors import Tensor
from megajax.layout.kinds import ATTENTION, BUILT_IN_BLOCKS, MAMBA2, MLP, block_layers, layer_kinds
from megajax.schema.fields import shortest_pattern

# Kinds of blocks by the letter of hybrid_override_pattern, and the names of layers_block_type, newest first
LETTERS = {"M": MAMBA2, "*": ATTENTION, "-": MLP, "E": "experts"}
TYPES = {
    MAMBA2: ("linear_attention", "mamba"),
    ATTENTION: ("full_attention", "attention"),
    MLP: ("mlp",),
    "experts": ("moe",),
}
# config.json and `model.mamba2`
SIZES = {
    "mamba_num_heads": "num_heads",
    "mamba_head_dim": "head_dim",
    "n_groups": "num_groups",
    "ssm_state_size": "state_dim",
    "conv_kernel": "conv_kernel",
    "time_step_min": "min_step",
}
# Options that its models do not use
FIXED: Json = {
    "mamba_hidden_act": "silu",
    "use_conv_bias": True,
    "n_shared_experts": 1,
    "num_nextn_predict_layers": 0,
    **dict.fromkeys(("use_bias", "mamba_proj_bias", "attention_bias", "mlp_bias", "residual_in_fp32"), False),
    **dict.fromkeys(("moe_latent_size", "sliding_window"), None),
}


class NemotronH(WithoutPositions, Llama):
    """Nemotron-H, Nemotron Nano 2 and Nemotron 3 Nano."""

    model_type, architecture = "nemotron_h", "NemotronHForCausalLM"
    names = {theirs: ours for theirs, ours in NAMES.items() if theirs not in ("rms_norm_eps", "num_hidden_layers")}
    names |= {"layer_norm_epsilon": "norm_epsilon"}
    activations, activation_key = {"relu2": "relu2"}, "mlp_hidden_act"

    def read_options(self, config: Json) -> Json:
        check_fixed(config, FIXED)
        if missing := [key for key in ("n_group", "topk_group") if config[key] is None]:
            raise ValueError(f"{missing[0]}=null")
        blocks = self.read_blocks(config)
        if config.get("num_hidden_layers", len(blocks)) != len(blocks):
            raise ValueError(f"num_hidden_layers={config['num_hidden_layers']} with {len(blocks)} layers")
        options = {
            "num_layers": len(blocks),
            "block_pattern": list(shortest_pattern(tuple(blocks), len(blocks))),
            "mamba2": {ours: config[theirs] for theirs, ours in SIZES.items()},
        }
        if "experts" not in blocks:
            return options
        router = {"score_function": "sigmoid", "expert_bias": True, "loss_counts": "top_scores"}
        router |= {"normalise": config["norm_topk_prob"], "scaling_factor": config["routed_scaling_factor"]}
        return options | {
            "num_experts": config["n_routed_experts"],
            "experts_per_token": config["num_experts_per_tok"],
            "expert_ffn_hidden_size": config["moe_intermediate_size"],
            "shared_expert_ffn_hidden_size": config["moe_shared_expert_intermediate_size"],
            "router": router | read_groups(config),
        }

    def read_blocks(self, config: Json) -> list[str]:
        """The kind of each layer."""
        key, kinds = "layers_block_type", {theirs: kind for kind, names in TYPES.items() for theirs in names}
        if config.get(key) is None:
            key, kinds = "hybrid_override_pattern", LETTERS
        if wrong := [found for found in config[key] or [None] if found not in kinds]:
            raise ValueError(f"{key} has {wrong[0]}, which is not one of {', '.join(kinds)}")
        return [kinds[found] for found in config[key]]

    def write_options(self, model: ModelConfig) -> Json:
        blocks = [kind.block for kind in layer_kinds(model)]
        letters = {kind: letter for letter, kind in LETTERS.items()}
        out: Json = FIXED | {"num_hidden_layers": model.num_layers}
        out |= {theirs: getattr(model.mamba2, ours) for theirs, ours in SIZES.items()}
        out["layers_block_type"] = [TYPES.get(kind, (kind,))[0] for kind in blocks]
        out["hybrid_override_pattern"] = "".join(letters.get(kind, "?") for kind in blocks)
        if model.num_experts is None:
            return out
        return out | {
            "n_routed_experts": model.num_experts,
            "num_experts_per_tok": model.experts_per_token,
            "moe_intermediate_size": model.expert_ffn_hidden_size,
            "moe_shared_expert_intermediate_size": model.shared_expert_ffn_hidden_size,
            "norm_topk_prob": model.router.normalise,
            "routed_scaling_factor": model.router.scaling_factor,
            "n_group": model.router.num_groups,
            "topk_group": model.router.groups_per_token,
        }

    def tensors(self, model: ModelConfig) -> list[Tensor]:
        out = [Tensor("embedding.tokens", "backbone.embeddings.weight"), Tensor("final_norm", "backbone.norm_f.weight")]
        if not model.tie_embeddings:
            out.append(Tensor("head", "lm_head.weight", LINEAR))
        for kind in block_layers(model):
            (sublayer,) = BUILT_IN_BLOCKS[kind]
            ours = f"blocks.{kind}.{sublayer}."
            out.append(Tensor(f"{ours}norm", "backbone.layers.{layer}.norm.weight"))
            out += getattr(self, sublayer)(model, ours)
        return out

    def attention(self, model: ModelConfig, ours: str) -> list[Tensor]:
        return _in_mixer(super().attention(model, ours), "self_attn")

    def mlp(self, model: ModelConfig, ours: str) -> list[Tensor]:
        return _in_mixer(super().mlp(model, ours), "mlp")

    def moe(self, model: ModelConfig, ours: str) -> list[Tensor]:
        theirs = "backbone.layers.{layer}.mixer."
        out = [
            Tensor(f"{ours}router", f"{theirs}gate.weight", LINEAR),
            Tensor(f"{ours}expert_bias", f"{theirs}gate.e_score_correction_bias"),
        ]
        for name in ("up", "down"):
            out.append(Tensor(f"{ours}{name}", f"{theirs}experts.{{expert}}.{name}_proj.weight", LINEAR))
            out.append(Tensor(f"{ours}shared_{name}", f"{theirs}shared_experts.{name}_proj.weight", LINEAR))
        return out

    def mamba2(self, model: ModelConfig, ours: str) -> list[Tensor]:
        return mamba2_tensors(model, ours, "backbone.layers.{layer}.mixer.")


def _in_mixer(tensors: list[Tensor], module: str) -> list[Tensor]:
    """Llama's entries under the names of Nemotron-H."""
    theirs, renamed = f"model.layers.{{layer}}.{module}.", "backbone.layers.{layer}.mixer."
    return [replace(tensor, theirs=tensor.theirs.replace(theirs, renamed)) for tensor in tensors]
