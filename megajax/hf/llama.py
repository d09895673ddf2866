"""Llama 2, 3, 3.1 and 3.2, Mistral, Qwen2, Qwen2.5, Qwen3, Mixtral and Qwen3-MoE: config.json and tensors.

They differ in options, in the names of config.json and in the names of the experts' tensors.
"""

from dataclasses import replace

from megajax.config import ModelConfig
from megajax.hf.defaults import DEFAULTS, Json
from megajax.hf.rope_scaling import read_rope, write_rope
from megajax.hf.tensors import Family, Tensor
from megajax.layout.kinds import BUILT_IN_BLOCKS, block_layers, is_gated, layer_kinds

LINEAR, HEADS = "out in -> in out", "(heads head) embed -> embed heads head"
INTO, BIAS = "embed (heads head) -> heads head embed", "(heads head) -> heads head"
EXPERTS = "expert out in -> expert in out"

# config.json and the section `model`, where they differ in names only
NAMES = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "ffn_hidden_size",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "norm_epsilon",
    "tie_word_embeddings": "tie_embeddings",
}


def check_fixed(config: Json, fixed: Json) -> None:
    """Raise ValueError for an option that has another value than the only one that is known."""
    for key, known in fixed.items():
        if config.get(key, known) != known:
            raise ValueError(f"{key}={config[key]} is not {known}")


class WithoutPositions:
    """The methods of a family whose attention has no positions; the first of its bases."""

    def read_rope(self, config: Json) -> Json:
        return {"position": "none"}

    def write_rope(self, model: ModelConfig) -> Json:
        if model.position != "none":
            raise ValueError("it has no positions")
        return {}


class Llama(Family):
    """Llama 2, 3, 3.1 and 3.2."""

    model_type, architecture = "llama", "LlamaForCausalLM"
    names = NAMES
    activations = {"silu": "swiglu", "swish": "swiglu"}  # names of transformers, the first of which is written
    activation_key = "hidden_act"
    partial_rotary = False
    norms = {"attention.norm": "input_layernorm", "mlp.norm": "post_attention_layernorm"}
    final_norm, mlp_module = "model.norm", "mlp"

    def read(self, config: Json) -> Json:
        config = DEFAULTS[self.model_type] | config
        if (activation := config[self.activation_key]) not in self.activations:
            raise ValueError(f"{self.activation_key}={activation} is not {next(iter(self.activations))}")
        model = {ours: config[theirs] for theirs, ours in self.names.items() if config.get(theirs) is not None}
        if self.activations[activation] != "swiglu":
            model["activation"] = self.activations[activation]
        rope = self.read_rope(config)
        if "rope_fraction" in rope and not self.partial_rotary:
            raise ValueError(f"partial_rotary_factor={rope['rope_fraction']}")
        return model | rope | self.read_options(config)

    def read_rope(self, config: Json) -> Json:
        return read_rope(config)

    def read_options(self, config: Json) -> Json:
        """The options of this family."""
        biases = {key: bool(config.get(key, False)) for key in ("attention_bias", "mlp_bias")}
        return {key: True for key, present in biases.items() if present}

    def write(self, model: ModelConfig) -> Json:
        config = {theirs: getattr(model, ours) for theirs, ours in self.names.items()}
        config |= {"model_type": self.model_type, "architectures": [self.architecture]}
        config[self.activation_key] = next(iter(self.activations))
        return config | self.write_rope(model) | self.write_options(model)

    def write_rope(self, model: ModelConfig) -> Json:
        return write_rope(model, self.partial_rotary)

    def write_options(self, model: ModelConfig) -> Json:
        return {"attention_bias": model.attention_bias, "mlp_bias": model.mlp_bias}

    def tensors(self, model: ModelConfig) -> list[Tensor]:
        out = [Tensor("embedding.tokens", "model.embed_tokens.weight"), *norm(model, "final_norm", self.final_norm)]
        if not model.tie_embeddings:
            out.append(Tensor("head", "lm_head.weight", LINEAR))
        for kind in block_layers(model):
            mixer, *_, feed_forward = BUILT_IN_BLOCKS[kind]
            for ours, theirs in self.norms.items():
                ours = ours.replace("attention", mixer).replace("mlp", feed_forward)
                out += norm(model, f"blocks.{kind}.{ours}", f"model.layers.{{layer}}.{theirs}")
            for name in BUILT_IN_BLOCKS[kind]:
                out += getattr(self, name)(model, f"blocks.{kind}.{name}.")
        return out

    def attention(self, model: ModelConfig, ours: str) -> list[Tensor]:
        theirs = "model.layers.{layer}.self_attn."
        out = [Tensor(f"{ours}output", f"{theirs}o_proj.weight", INTO)]
        for name, short in (("query", "q"), ("key", "k"), ("value", "v")):
            out.append(Tensor(f"{ours}{name}", f"{theirs}{short}_proj.weight", HEADS))
            if model.attention_bias:
                out.append(Tensor(f"{ours}{name}_bias", f"{theirs}{short}_proj.bias", BIAS))
        if model.attention_bias is True:
            out.append(Tensor(f"{ours}output_bias", f"{theirs}o_proj.bias"))
        if model.qk_norm:
            out += [Tensor(f"{ours}{name}_norm", f"{theirs}{name[0]}_norm.weight") for name in ("query", "key")]
        return out

    def mlp(self, model: ModelConfig, ours: str) -> list[Tensor]:
        out, theirs = [], f"model.layers.{{layer}}.{self.mlp_module}."
        for name in ("gate", "up", "down") if is_gated(model) else ("up", "down"):
            out.append(Tensor(f"{ours}{name}", f"{theirs}{name}_proj.weight", LINEAR))
            if model.mlp_bias:
                out.append(Tensor(f"{ours}{name}_bias", f"{theirs}{name}_proj.bias"))
        return out

    def moe(self, model: ModelConfig, ours: str) -> list[Tensor]:
        return []


class Mistral(Llama):
    """Mistral: windows in all layers."""

    model_type, architecture = "mistral", "MistralForCausalLM"

    def read_options(self, config: Json) -> Json:
        window = config.get("sliding_window")
        return {} if window is None else {"sliding_window": window}

    def write_options(self, model: ModelConfig) -> Json:
        return {"sliding_window": model.sliding_window}


class Mixtral(Mistral):
    """Mixtral: the best of softmax's scores, normalised."""

    model_type, architecture = "mixtral", "MixtralForCausalLM"
    experts, router = "block_sparse_moe.experts.{expert}.", "block_sparse_moe.gate.weight"
    expert_names = {"gate": "w1", "up": "w3", "down": "w2"}

    def read_options(self, config: Json) -> Json:
        counts = {"num_experts": config["num_local_experts"], "experts_per_token": config["num_experts_per_tok"]}
        return super().read_options(config) | counts

    def write(self, model: ModelConfig) -> Json:
        if model.num_experts is None:
            raise ValueError("it has experts")
        return super().write(model)

    def write_options(self, model: ModelConfig) -> Json:
        counts = {"num_local_experts": model.num_experts, "num_experts_per_tok": model.experts_per_token}
        return super().write_options(model) | counts | {"intermediate_size": model.expert_ffn_hidden_size}

    def moe(self, model: ModelConfig, ours: str) -> list[Tensor]:
        theirs = "model.layers.{layer}."
        out = [Tensor(f"{ours}router", theirs + self.router, LINEAR)]
        for name, short in self.expert_names.items():
            out.append(Tensor(f"{ours}{name}", f"{theirs}{self.experts}{short}.weight", LINEAR))
        return out


class Qwen2(Llama):
    """Qwen2 and Qwen2.5: biases of queries, keys and values, windows in the layers that `layer_types` lists."""

    model_type, architecture = "qwen2", "Qwen2ForCausalLM"

    def read_options(self, config: Json) -> Json:
        return {"attention_bias": "qkv"} | self.read_windows(config)

    def read_windows(self, config: Json) -> Json:
        if not config.get("use_sliding_window"):
            return {}
        kinds = config.get("layer_types")
        if kinds is None:  # the older layout: from this layer on
            first = config.get("max_window_layers", config["num_hidden_layers"])
            kinds = ["sliding_attention" if i >= first else "" for i in range(config["num_hidden_layers"])]
        return windows(kinds, config.get("sliding_window"))

    def write_options(self, model: ModelConfig) -> Json:
        kinds = layer_types(model)
        local = [kind == "sliding_attention" for kind in kinds]
        return {
            "use_sliding_window": any(local),
            "sliding_window": model.sliding_window,
            "max_window_layers": next((i for i, is_local in enumerate(local) if is_local), len(local)),
            "layer_types": kinds,
        }


class Qwen3(Qwen2):
    """Qwen3: norms of queries and keys."""

    model_type, architecture = "qwen3", "Qwen3ForCausalLM"

    def read_options(self, config: Json) -> Json:
        if config.get("attention_bias"):
            raise ValueError("attention_bias=true")
        return {"qk_norm": True} | self.read_windows(config)

    def write_options(self, model: ModelConfig) -> Json:
        return super().write_options(model) | {"attention_bias": False}


class Qwen3Moe(Qwen3, Mixtral):
    """Qwen3-MoE: experts in every n-th layer, but not in `mlp_only_layers`."""

    model_type, architecture = "qwen3_moe", "Qwen3MoeForCausalLM"
    experts, router = "mlp.experts.{expert}.", "mlp.gate.weight"
    expert_names = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}

    def read_windows(self, config: Json) -> Json:
        """A window in all layers: older versions of transformers begin at `max_window_layers`, newer ones at 0."""
        if not config.get("use_sliding_window") or config.get("sliding_window") is None:
            return {}
        if first := config.get("max_window_layers", 28):
            raise ValueError(f"use_sliding_window=true with max_window_layers={first}")
        return {"sliding_window": config["sliding_window"]}

    def read_options(self, config: Json) -> Json:
        plain = sorted(config.get("mlp_only_layers") or [])
        if plain != [*range(len(plain))]:
            raise ValueError(f"mlp_only_layers={plain} are not the first layers")
        normalised = config.get("norm_topk_prob", False)
        options = Qwen3.read_options(self, config) | {
            "num_experts": config["num_local_experts"],
            "experts_per_token": config["num_experts_per_tok"],
            "expert_ffn_hidden_size": config["moe_intermediate_size"],
            "router": {"pre_softmax": not normalised, "normalise": normalised},
        }
        if plain:
            options["first_dense_layers"] = len(plain)
        if (interval := config.get("decoder_sparse_step", 1)) != 1:
            options["moe_layer_interval"] = interval
        return options

    def write_options(self, model: ModelConfig) -> Json:
        return Qwen3.write_options(self, model) | {
            "num_experts": model.num_experts,  # the older name; transformers 5 writes the newer one
            "num_local_experts": model.num_experts,
            "num_experts_per_tok": model.experts_per_token,
            "moe_intermediate_size": model.expert_ffn_hidden_size,
            "norm_topk_prob": model.router.normalise and not model.router.pre_softmax,
            "decoder_sparse_step": model.moe_layer_interval,
            "mlp_only_layers": [*range(model.first_dense_layers)],
        }

    def alternatives(self, model: ModelConfig) -> list[Tensor]:
        """All experts of a layer in one tensor, as Qwen3.5 is published."""
        width, out = model.expert_ffn_hidden_size or 0, []
        for tensor in self.tensors(model):
            layer, experts, name = tensor.theirs.partition("experts.{expert}.")
            where = {"down_proj.weight": ("down_proj", 0), "gate_proj.weight": ("gate_up_proj", 0)}
            where |= {"up_proj.weight": ("gate_up_proj", width)}
            if experts:
                theirs, start = where[name]
                fused = 1 if theirs == "gate_up_proj" else None
                packed = replace(tensor, theirs=f"{layer}experts.{theirs}", pattern=EXPERTS, fused=fused, start=start)
                out.append(packed)
        return out


def norm(model: ModelConfig, ours: str, theirs: str) -> list[Tensor]:
    """The weight of a norm, and the bias of a LayerNorm."""
    out = [Tensor(ours, f"{theirs}.weight")]
    return out if not model.has_norm_bias else [*out, Tensor(f"{ours}_bias", f"{theirs}.bias")]


def windows(kinds: list[str], window: int | None) -> Json:
    """transformers' `layer_types` → windows in the section `model`; no pattern if all layers have them."""
    local = ["local" if kind == "sliding_attention" else "global" for kind in kinds]
    if "local" not in local or not window:
        return {}
    return {"sliding_window": window} | ({"layer_pattern": local} if "global" in local else {})


def layer_types(model: ModelConfig) -> list[str]:
    """The section `model` → transformers' `layer_types`."""
    return ["full_attention" if kind.window is None else "sliding_attention" for kind in layer_kinds(model)]
