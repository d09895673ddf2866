"""DeepSeek-V2 and V3, and the models with V3's architecture (Moonlight, Kimi-K2): config.json and tensors.

Latent attention (`model.latent_attention`) has each head's rotated part first, with pairs (i, i + R/2); in the folders
it is last, with pairs (2i, 2i + 1). A head's key and value are in one tensor, and so are the latent of keys and values
and the rotary key.
"""

from dataclasses import replace

from megajax.config import ModelConfig
from megajax.hf.defaults import Json
from megajax.hf.llama import HEADS, INTO, LINEAR, NAMES, Llama
from megajax.hf.tensors import Selected, Tensor
from megajax.layout.kinds import extra_layers, extra_of, layer_kinds

LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
MOE = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
MATRICES = ("gate", "up", "down")
# Of modules of multi-token prediction, which are stored as layers after the last
MODULE = {
    "join.embedding_norm": ("enorm.weight", ""),
    "join.stream_norm": ("hnorm.weight", ""),
    "join.projection": ("eh_proj.weight", LINEAR),
    "final_norm": ("shared_head.norm.weight", ""),
}


class DeepseekV2(Llama):
    """DeepSeek-V2 and V2-Lite: softmax over all experts, groups of experts by their largest score."""

    model_type, architecture = "deepseek_v2", "DeepseekV2ForCausalLM"
    names = {theirs: ours for theirs, ours in NAMES.items() if theirs != "head_dim"} | {
        **{name: name for name in LATENT},
        "n_routed_experts": "num_experts",
        "num_experts_per_tok": "experts_per_token",
        "moe_intermediate_size": "expert_ffn_hidden_size",
        "first_k_dense_replace": "first_dense_layers",
    }
    score_function = "softmax"

    def read_options(self, config: Json) -> Json:
        known_values = {"attention_bias": False, "mlp_bias": False, "moe_layer_freq": 1, "rope_interleave": True}
        known_values |= {"scoring_func": self.score_function, "num_key_value_heads": config["num_attention_heads"]}
        for key, known in known_values.items():
            if config.get(key) not in (None, known):
                raise ValueError(f"{key}={config[key]} is not {known}")
        if missing := [name for name in (*LATENT[1:], *MOE) if config[name] is None]:
            raise ValueError(f"{missing[0]}=null")
        shared = (config.get("n_shared_experts") or 0) * config["moe_intermediate_size"]
        return {"shared_expert_ffn_hidden_size": shared, "router": self.read_router(config)}

    def read_router(self, config: Json) -> Json:
        """config.json → the section `model.router`."""
        method = config["topk_method"]
        if method not in ("greedy", "group_limited_greedy"):
            raise ValueError(f"topk_method={method} is not greedy or group_limited_greedy")
        if config.get("norm_topk_prob"):  # the authors' program normalises, transformers does not
            raise ValueError("norm_topk_prob=true")
        groups = read_groups(config) if method == "group_limited_greedy" else {}
        groups |= {"group_score": "max"} if groups else {}
        factor = config.get("routed_scaling_factor", 1.0)
        return {"pre_softmax": True, "normalise": False, "scaling_factor": factor} | groups

    def write_options(self, model: ModelConfig) -> Json:
        return {
            "attention_bias": False,
            "moe_layer_freq": 1,
            "n_shared_experts": model.shared_expert_ffn_hidden_size // (model.expert_ffn_hidden_size or 1),
            "n_group": model.router.num_groups,
            "topk_group": model.router.groups_per_token,
            "routed_scaling_factor": model.router.scaling_factor,
            "scoring_func": self.score_function,
        } | self.write_router(model)

    def write_router(self, model: ModelConfig) -> Json:
        """The section `model` → the router's keys that only this family has."""
        method = "greedy" if model.router.num_groups == 1 else "group_limited_greedy"
        return {"mlp_bias": False, "norm_topk_prob": False, "topk_method": method}

    def attention(self, model: ModelConfig, ours: str) -> list[Tensor]:
        theirs, down = "model.layers.{layer}.self_attn.", "kv_a_proj_with_mqa.weight"
        latent, nope = model.kv_lora_rank or 0, model.qk_nope_head_dim or 0
        rotary, value = model.qk_rope_head_dim or 0, model.value_dim
        pairs = (*range(0, rotary, 2), *range(1, rotary, 2))  # the order of the rotated elements
        query = Selected("head", (*(nope + i for i in pairs), *range(nope)), nope + rotary)
        key = Selected("head", tuple(range(nope)), nope + value)
        values = Selected("head", tuple(range(nope, nope + value)), nope + value)
        out = [
            Tensor(f"{ours}output", f"{theirs}o_proj.weight", INTO),
            Tensor(f"{ours}key_value_down", theirs + down, LINEAR, 0),
            Tensor(f"{ours}rotary_key", theirs + down, LINEAR, 0, latent, selected=Selected("out", pairs, rotary)),
            Tensor(f"{ours}key_value_norm", f"{theirs}kv_a_layernorm.weight"),
            Tensor(f"{ours}key", f"{theirs}kv_b_proj.weight", HEADS, selected=key),
            Tensor(f"{ours}value", f"{theirs}kv_b_proj.weight", HEADS, selected=values),
        ]
        if not model.q_lora_rank:
            return [*out, Tensor(f"{ours}query", f"{theirs}q_proj.weight", HEADS, selected=query)]
        return [
            *out,
            Tensor(f"{ours}query_down", f"{theirs}q_a_proj.weight", LINEAR),
            Tensor(f"{ours}query_norm", f"{theirs}q_a_layernorm.weight"),
            Tensor(f"{ours}query", f"{theirs}q_b_proj.weight", HEADS, selected=query),
        ]

    def moe(self, model: ModelConfig, ours: str) -> list[Tensor]:
        theirs = "model.layers.{layer}.mlp."
        out = [Tensor(f"{ours}router", f"{theirs}gate.weight", LINEAR)]
        out += [Tensor(f"{ours}{name}", f"{theirs}experts.{{expert}}.{name}_proj.weight", LINEAR) for name in MATRICES]
        if model.shared_expert_ffn_hidden_size:
            shared = f"{theirs}shared_experts."
            out += [Tensor(f"{ours}shared_{name}", f"{shared}{name}_proj.weight", LINEAR) for name in MATRICES]
        if model.router.expert_bias:
            out.append(Tensor(f"{ours}expert_bias", f"{theirs}gate.e_score_correction_bias"))
        return out


class DeepseekV3(DeepseekV2):
    """DeepSeek-V3 and R1, Moonlight: sigmoid scores with a bias for the choice, groups by their two best scores."""

    model_type, architecture = "deepseek_v3", "DeepseekV3ForCausalLM"
    score_function = "sigmoid"

    def read_router(self, config: Json) -> Json:
        if (method := config["topk_method"]) != "noaux_tc":
            raise ValueError(f"topk_method={method} is not noaux_tc")
        groups, chosen, of_groups = read_groups(config), config["num_experts_per_tok"], config["topk_group"]
        if groups and (not of_groups or max(chosen // of_groups, 1) != 2):
            raise ValueError(f"num_experts_per_tok={chosen} is not twice topk_group={of_groups}")
        normalised = bool(config["norm_topk_prob"])
        if normalised and chosen == 1:
            raise ValueError("norm_topk_prob=true with num_experts_per_tok=1")
        options: Json = {"score_function": "sigmoid", "normalise": normalised, "expert_bias": True}
        options["loss_counts"] = "top_scores"
        return options | {"scaling_factor": config["routed_scaling_factor"]} | groups

    def read_options(self, config: Json) -> Json:
        modules = config.get("num_nextn_predict_layers")
        return super().read_options(config) | ({"mtp_layers": modules} if modules else {})

    def unused(self, config: Json) -> tuple[str, ...]:
        """Modules that a run does not have, and their copies of embedding and head."""
        first, count = config["num_hidden_layers"], config.get("num_nextn_predict_layers") or 0
        return tuple(f"model.layers.{layer}." for layer in range(first, first + count))

    def tensors(self, model: ModelConfig) -> list[Tensor]:
        out, last = super().tensors(model), f"blocks.{layer_kinds(model)[-1].block}."
        if (extra := extra_of(model)) is None:
            return out
        prefix = f"blocks.{extra.name}."
        modules = [replace(t, ours=t.ours.replace(last, prefix)) for t in out if t.ours.startswith(last)]
        for ours, (theirs, pattern) in MODULE.items():
            modules.append(Tensor(f"{prefix}{ours}", f"model.layers.{{layer}}.{theirs}", pattern))
        return out + modules

    def copies(self, model: ModelConfig) -> list[Tensor]:
        out = []
        for layer in extra_layers(model):
            module, head = f"model.layers.{layer}.", "embedding.tokens" if model.tie_embeddings else "head"
            out.append(Tensor("embedding.tokens", f"{module}embed_tokens.weight"))
            out.append(Tensor(head, f"{module}shared_head.head.weight", "" if model.tie_embeddings else LINEAR))
        return out

    def write_router(self, model: ModelConfig) -> Json:
        return {
            "norm_topk_prob": model.router.normalise,
            "num_nextn_predict_layers": len(extra_layers(model)),
            "rope_interleave": True,
            "topk_method": "noaux_tc",
        }


class KimiK2(DeepseekV3):
    """Kimi-K2: V3's architecture under its own name, which transformers does not have."""

    model_type = "kimi_k2"

    def write(self, model: ModelConfig) -> Json:
        return DeepseekV3().write(model)


def read_groups(config: Json) -> Json:
    """Keys of `model.router` for groups of experts; none for one group."""
    if (config.get("n_group") or 1) == 1:
        return {}
    return {"num_groups": config["n_group"], "groups_per_token": config["topk_group"]}
