"""Relatives of Llama with other norms, positions or tensors: Gemma 2 and 3, Phi-3, OLMo 2, Nemotron, SmolLM3."""

from megajax.config import ModelConfig
from megajax.hf.defaults import DEFAULTS, Json
from megajax.hf.llama import HEADS, INTO, LINEAR, NAMES, Llama, Mistral, Qwen2, layer_types, windows
from megajax.hf.rope_scaling import read_rope
from megajax.hf.tensors import Tensor, side_by_side
from megajax.layout.kinds import layer_kinds

LOCAL, GLOBAL = "sliding_attention", "full_attention"


class Gemma2(Llama):
    """Gemma 2: norms before and after the parts, soft-caps, a window in every second layer."""

    model_type, architecture = "gemma2", "Gemma2ForCausalLM"
    names = NAMES | {"final_logit_softcapping": "logit_softcap", "attn_logit_softcapping": "attention_softcap"}
    activations = {"gelu_pytorch_tanh": "geglu"}
    activation_key = "hidden_activation"
    norms = {
        "attention.norm": "input_layernorm",
        "attention.post_norm": "post_attention_layernorm",
        "mlp.norm": "pre_feedforward_layernorm",
        "mlp.post_norm": "post_feedforward_layernorm",
    }

    def read_options(self, config: Json) -> Json:
        if config.get("use_bidirectional_attention"):
            raise ValueError("use_bidirectional_attention=true")
        options = super().read_options(config)
        options |= {"norm_placement": "both", "norm_zero_centred": True, "scale_embeddings": True}
        if config["query_pre_attn_scalar"] != config["head_dim"]:
            options["attention_scale"] = config["query_pre_attn_scalar"] ** -0.5
        kinds, period = config.get("layer_types"), config["sliding_window_pattern"]
        if kinds is None:
            if self.model_type == "gemma2" and period != 2:  # transformers 4 reads it, 5 does not
                raise ValueError(f"sliding_window_pattern={period} without layer_types")
            kinds = [LOCAL if (i + 1) % period else GLOBAL for i in range(config["num_hidden_layers"])]
        return options | windows(kinds, config["sliding_window"])

    def write_options(self, model: ModelConfig) -> Json:
        scale = model.attention_scale
        return {
            "attention_bias": model.attention_bias,
            "query_pre_attn_scalar": model.head_dim if scale is None else round(scale**-2),
            "sliding_window": model.sliding_window
            or DEFAULTS[self.model_type]["sliding_window"],  # transformers reads it always
            "layer_types": layer_types(model),
        }


class Gemma3Text(Gemma2):
    """Gemma 3's language model: norms of queries and keys, and another RoPE base in the layers with windows."""

    model_type, architecture = "gemma3_text", "Gemma3ForCausalLM"

    def read_options(self, config: Json) -> Json:
        if (softcap := config["attn_logit_softcapping"]) is not None:  # transformers does not use it
            raise ValueError(f"attn_logit_softcapping={softcap} is not null")
        return super().read_options(config) | {"qk_norm": True}

    def read_rope(self, config: Json) -> Json:
        """`rope_parameters` by kind of layer; without them `rope_theta` and the older `rope_local_base_freq`.

        `rope_scaling` is of global layers, also beside `rope_parameters`.
        """
        by_kind, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
        if (by_kind and not {GLOBAL, LOCAL} <= by_kind.keys()) or GLOBAL in scaling:  # transformers ignores them
            raise ValueError(f"rope_parameters without {GLOBAL} and {LOCAL}, or rope_scaling with them")
        local = {"rope_theta": config.get("rope_local_base_freq", 10000.0)} | (by_kind.get(LOCAL) or {})
        everywhere = {"rope_theta": config["rope_theta"]} | (by_kind.get(GLOBAL) or {}) | scaling
        model = read_rope(config | {"rope_scaling": everywhere})
        if local == everywhere:
            return model
        if local.get("rope_type", "default") != "default":
            raise ValueError(f"rope_parameters.{LOCAL}.rope_type={local['rope_type']}")
        return model | {"rope_local_theta": local.get("rope_theta", 10000.0)}

    def write_rope(self, model: ModelConfig) -> Json:
        out = super().write_rope(model)
        everywhere = out["rope_parameters"]
        local = {"rope_type": "default", "rope_theta": model.rope_local_theta}
        by_kind = {LOCAL: local if model.rope_local_theta else everywhere, GLOBAL: everywhere}
        return out | {"rope_local_base_freq": by_kind[LOCAL]["rope_theta"], "rope_parameters": by_kind}


class Phi3(Mistral):
    """Phi-3, Phi-3.5 and Phi-4: queries, keys and values in one tensor, gate and up in one; partly rotated heads."""

    model_type, architecture = "phi3", "Phi3ForCausalLM"
    partial_rotary = True

    def write_rope(self, model: ModelConfig) -> Json:
        if model.rope_scaling and model.rope_scaling.kind != "longrope":
            raise ValueError("its only scaling is longrope")
        return super().write_rope(model)

    def attention(self, model: ModelConfig, ours: str) -> list[Tensor]:
        theirs, heads = "model.layers.{layer}.self_attn.", {"query": model.num_heads}
        heads |= {"key": model.num_kv_heads, "value": model.num_kv_heads}
        parts = {f"{ours}{name}": (HEADS, count * model.head_dim) for name, count in heads.items()}
        output = Tensor(f"{ours}output", f"{theirs}o_proj.weight", INTO)
        return [*side_by_side(f"{theirs}qkv_proj.weight", 0, parts), output]

    def mlp(self, model: ModelConfig, ours: str) -> list[Tensor]:
        theirs = "model.layers.{layer}.mlp."
        parts = {f"{ours}{name}": (LINEAR, model.ffn_hidden_size) for name in ("gate", "up")}
        down = Tensor(f"{ours}down", f"{theirs}down_proj.weight", LINEAR)
        return [*side_by_side(f"{theirs}gate_up_proj.weight", 0, parts), down]


class Olmo2(Llama):
    """OLMo 2: norms after the parts only, and norms of all heads' queries and keys together."""

    model_type, architecture = "olmo2", "Olmo2ForCausalLM"
    norms = {"attention.post_norm": "post_attention_layernorm", "mlp.post_norm": "post_feedforward_layernorm"}

    def read_options(self, config: Json) -> Json:
        if config.get("mlp_bias"):  # transformers has none
            raise ValueError("mlp_bias=true")
        return super().read_options(config) | {"norm_placement": "after", "qk_norm": "all_heads"}


class Nemotron(Llama):
    """Nemotron-4 and Minitron: zero-centred LayerNorm, squared ReLU, half of each head rotated."""

    model_type, architecture = "nemotron", "NemotronForCausalLM"
    names = {theirs: ours for theirs, ours in NAMES.items() if theirs != "rms_norm_eps"} | {"norm_eps": "norm_epsilon"}
    activations = {"relu2": "relu2"}
    partial_rotary = True

    def read_options(self, config: Json) -> Json:
        return super().read_options(config) | {"norm": "layernorm", "norm_zero_centred": True}


class SmolLm3(Qwen2):
    """SmolLM3: no RoPE in the layers that `no_rope_layers` marks with 0."""

    model_type, architecture = "smollm3", "SmolLM3ForCausalLM"

    def read_options(self, config: Json) -> Json:
        if LOCAL in (config.get("layer_types") or ()) and not config.get("use_sliding_window"):
            raise ValueError(f"use_sliding_window=false with {LOCAL} in layer_types")  # some kernels use the window
        layers, interval = range(config["num_hidden_layers"]), config["no_rope_layer_interval"]
        rotated = config.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in layers]
        options = Llama.read_options(self, config)
        if not all(rotated):
            options["rope_pattern"] = ["rope" if one else "none" for one in rotated]
        if config.get("use_sliding_window"):
            kinds = config.get("layer_types") or [GLOBAL if one else LOCAL for one in rotated]
            options |= windows(kinds, config.get("sliding_window"))
        return options

    def write_options(self, model: ModelConfig) -> Json:
        rotated = [int(kind.rope) for kind in layer_kinds(model)]
        return Qwen2.write_options(self, model) | Llama.write_options(self, model) | {"no_rope_layers": rotated}
