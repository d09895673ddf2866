"""GPT-OSS: config.json and tensors. All experts of a layer are in one tensor, with gate and up columns in turns."""

from megajax.config import ModelConfig
from megajax.hf.defaults import Json
from megajax.hf.llama import LINEAR, Llama, layer_types
from megajax.hf.tensors import Tensor, in_turns
from megajax.ops.mlp_kernel import CLAMP_LIMIT, CLAMP_SLOPE

# Of a config.json that says nothing of it, as in transformers.
DEFAULT_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False}
DEFAULT_ROPE |= {"original_max_position_embeddings": 4096}


class GptOss(Llama):
    """GPT-OSS: attention sinks, windows in some layers, experts with biases and a clamped SwiGLU."""

    model_type, architecture = "gpt_oss", "GptOssForCausalLM"

    def read(self, config: Json) -> Json:
        given = config.get("rope_parameters") or config.get("rope_scaling")
        return super().read(config if given else config | {"rope_parameters": DEFAULT_ROPE})

    def read_options(self, config: Json) -> Json:
        for key, known in (("swiglu_alpha", CLAMP_SLOPE), ("swiglu_limit", CLAMP_LIMIT)):
            if config.get(key, known) != known:
                raise ValueError(f"{key}={config[key]} is not {known}")
        kinds = config.get("layer_types") or ["sliding_attention", "full_attention"]
        window = config["sliding_window"]
        local = ["local" if window and kind == "sliding_attention" else "global" for kind in kinds]
        return {
            "activation": "clamped_swiglu",
            "attention_bias": config.get("attention_bias", True),
            "attention_sinks": True,
            "mlp_bias": True,
            "sliding_window": window,
            "layer_pattern": local,
            "num_experts": config["num_local_experts"],
            "experts_per_token": config["num_experts_per_tok"],
            "router": {"logit_bias": True},
        }

    def write_options(self, model: ModelConfig) -> Json:
        return {
            "attention_bias": model.attention_bias,
            "sliding_window": model.sliding_window,
            "layer_types": layer_types(model),
            "num_local_experts": model.num_experts,
            "num_experts_per_tok": model.experts_per_token,
            "intermediate_size": model.expert_ffn_hidden_size,
            "swiglu_alpha": CLAMP_SLOPE,
            "swiglu_limit": CLAMP_LIMIT,
        }

    def attention(self, model: ModelConfig, ours: str) -> list[Tensor]:
        return [*super().attention(model, ours), Tensor(f"{ours}sinks", "model.layers.{layer}.self_attn.sinks")]

    def moe(self, model: ModelConfig, ours: str) -> list[Tensor]:
        theirs = "model.layers.{layer}."
        experts = f"{theirs}mlp.experts."
        return [
            Tensor(f"{ours}router", f"{theirs}mlp.router.weight", LINEAR),
            Tensor(f"{ours}router_bias", f"{theirs}mlp.router.bias"),
            *in_turns(f"{experts}gate_up_proj", 2, [f"{ours}gate", f"{ours}up"]),
            *in_turns(f"{experts}gate_up_proj_bias", 1, [f"{ours}gate_bias", f"{ours}up_bias"]),
            Tensor(f"{ours}down", f"{experts}down_proj"),
            Tensor(f"{ours}down_bias", f"{experts}down_proj_bias"),
        ]
