"""Megatron-LM's arguments for a model: the inverse of `from_megatron`, by which they are checked."""

import math
from functools import reduce
from operator import getitem
from typing import Any

import numpy as np

from megajax.checkpoint.description import describe_model
from megajax.config import Config, ModelConfig
from megajax.config.megatron_flags import DEFAULTS
from megajax.console import command
from megajax.errors import InputError
from megajax.layout.kinds import MOE, extra_of, layer_kinds
from megajax.ops import rope_attention_factor
from megajax.schema.layer_sections import RopeScaling
from megajax.schema.tree import show
from megajax.tools.from_megatron.arguments import from_mapping
from megajax.tools.from_megatron.experts import translate_experts
from megajax.tools.from_megatron.model import CLAMPED, translate_model
from megajax.tools.from_megatron.translation import Translation, nested

Values = dict[str, Any]
DIVISIBLE_BY = 128  # Megatron's default of --make-vocab-size-divisible-by
# Attributes of latent attention's configuration that no flag sets; flags with these names, after yarn_, set the others'
OF_YARN = {
    "original_max_position_embeddings": "original_max_positions",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}
# Megatron's values where they are not the flags' words
PARSED = {"moe_layer_freq": 1, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.0}
PARSED |= {"exit_signal": 15, "fim_eod_token": "<|endoftext|>"}
# Several settings that together say the kind of each layer
OF_LAYERS = ("block_pattern", "first_dense_layers", "moe_layer_interval", "layer_pattern", "rope_pattern")


def arguments_for(config: Config, step: int, samples: int, sizes: tuple[int, int, int]) -> Values:
    """All arguments of Megatron-LM by name, those that the model does not need with Megatron's defaults.

    They have the position of the run, `step` and `samples`, and the parallel `sizes`: tensor, pipeline, expert. Raises
    InputError for a model that no arguments describe, and for sizes that do not divide it.
    """
    model, extra, (tensor, pipeline, expert) = config.model, extra_of(config.model), sizes
    _check_sizes(model, tensor, pipeline, expert)
    values = {**DEFAULTS, **PARSED, **_attention(model), **_mlp(model), **_positions(config), **_experts(model)}
    values |= {
        "num_layers": model.num_layers,
        "encoder_num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "normalization": "LayerNorm" if model.norm == "layernorm" else "RMSNorm",
        "layernorm_epsilon": model.norm_epsilon,
        "norm_epsilon": model.norm_epsilon,
        "layernorm_zero_centered_gamma": model.norm_zero_centred,
        "apply_layernorm_1p": model.norm_zero_centred,
        "untie_embeddings_and_output_weights": not model.tie_embeddings,
        "hidden_dropout": model.dropout,
        "attention_dropout": 0.0,
        "init_method_std": model.init_std,
        **({"mtp_num_layers": extra.count(model), "mtp_loss_scaling_factor": extra.weight(model)} if extra else {}),
        **_vocabulary(model, tensor),
        **_training(config, step, samples),
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "expert_model_parallel_size": expert,
        "world_size": tensor * pipeline * expert,
        "data_parallel_size": expert,
    }
    _check(model, values)
    del values["attention_backend"]  # an enumeration of Megatron's; its default is the same
    return values


def _check_sizes(model: ModelConfig, tensor: int, pipeline: int, expert: int) -> None:
    widths = {"num_heads": model.num_heads, "ffn_hidden_size": model.ffn_hidden_size}
    if expert > 1 and not model.num_experts:
        raise InputError(f"--ep={expert} needs experts, but model.num_experts is null: leave it out.")
    for option, size, counts in (
        ("--tp", tensor, widths),
        ("--pp", pipeline, {"num_layers": model.num_layers}),
        ("--ep", expert, {"num_experts": model.num_experts or 1}),
    ):
        for key, count in counts.items():
            if count % size:
                most = math.gcd(count, size)
                raise InputError(f"{option}={size} does not divide model.{key}={count}: {most} does.")


def _vocabulary(model: ModelConfig, tensor: int) -> Values:
    """The padded size, of which Megatron's embedding and softmax have all: as here if the sizes allow it."""
    own = model.vocab_multiple // tensor if model.vocab_multiple % tensor == 0 else DIVISIBLE_BY
    multiple = own * tensor
    return {
        "vocab_size": model.vocab_size,
        "make_vocab_size_divisible_by": own,
        "padded_vocab_size": -(-model.vocab_size // multiple) * multiple,
    }


def _training(config: Config, step: int, samples: int) -> Values:
    """The position of the run, and no state of an optimizer."""
    dtype = config.precision.compute
    return {
        "iteration": step,
        "consumed_train_samples": samples,
        "skipped_train_samples": 0,
        "consumed_valid_samples": 0,
        "train_iters": config.run.steps,
        "global_batch_size": config.batch.global_size,
        "micro_batch_size": 1,
        "lr": config.schedule.learning_rate,
        "seed": config.run.seed,
        "mock_data": config.data.kind == "synthetic",
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
        "params_dtype": np.dtype(dtype),
        "no_save_optim": True,
        "no_save_rng": True,
        "use_dist_ckpt": True,
        "dist_ckpt_format": "torch_dist",
    }


def _attention(model: ModelConfig) -> Values:
    values: Values = {
        "num_attention_heads": model.num_heads,
        "kv_channels": model.head_dim,
        "add_qkv_bias": model.attention_bias == "qkv",
        "softmax_type": "learnable" if model.attention_sinks else "vanilla",
        "qk_layernorm": bool(model.qk_norm) or model.is_latent,
        "qk_clip": model.qk_clip is not None,
        "qk_clip_threshold": model.qk_clip or DEFAULTS["qk_clip_threshold"],
    }
    if model.is_latent:
        values |= {"multi_latent_attention": True, "kv_lora_rank": model.kv_lora_rank, "q_lora_rank": model.q_lora_rank}
        values |= {"qk_head_dim": model.qk_nope_head_dim, "qk_pos_emb_head_dim": model.qk_rope_head_dim}
        values |= {"v_head_dim": model.v_head_dim}
    elif model.num_kv_heads != model.num_heads:
        values |= {"group_query_attention": True, "num_query_groups": model.num_kv_heads}
    kinds = layer_kinds(model)
    if any(kind.window for kind in kinds):
        values["window_size"] = ((model.sliding_window or 0) - 1, 0)
        if model.layer_pattern:
            values["window_attn_skip_freq"] = [int(kind.window is not None) for kind in kinds]
    if not all(kind.rope for kind in kinds):
        values["no_rope_freq"] = [int(not kind.rope) for kind in kinds]
    return values


def _mlp(model: ModelConfig) -> Values:
    values: Values = {
        "ffn_hidden_size": model.ffn_hidden_size,
        "add_bias_linear": model.mlp_bias,
        "swiglu": model.activation == "swiglu",
        "squared_relu": model.activation == "relu2",
        "openai_gelu": model.activation == "gelu" and not model.mlp_bias,  # fused with a bias it is this one anyway
        "bias_gelu_fusion": model.activation == "gelu" and model.mlp_bias,
    }
    if model.activation == "clamped_swiglu":
        values |= {"quick_geglu": True, "glu_linear_offset": CLAMPED[0], "activation_func_clamp_value": CLAMPED[1]}
    return values


def _positions(config: Config) -> Values:
    model, length = config.model, config.batch.sequence_length
    kind = {"learned": "learned_absolute"}.get(model.position, model.position)
    values: Values = {
        "seq_length": length,
        "encoder_seq_length": length,
        "max_position_embeddings": model.max_positions if model.position == "learned" else length,
        "rotary_base": int(model.rope_theta),
        "rotary_percent": model.rope_fraction,
        "rotary_interleaved": False,
        "rope_type": "rope",
    }
    scaling = model.rope_scaling
    if scaling is not None and scaling.kind == "yarn":
        values |= {"rotary_scaling_factor": scaling.factor, "mscale_all_dim": scaling.mscale_all_dim or 0.0}
        values |= {"mscale": _mscale(scaling), "yarn_correction_range_round_to_int": scaling.truncate}
        of_yarn = {theirs: getattr(scaling, ours) for theirs, ours in OF_YARN.items()}
        if model.is_latent:
            values |= {"rope_type": "yarn", **of_yarn}
        else:
            kind = "yarn"
            values |= {f"yarn_{theirs}": value for theirs, value in of_yarn.items()}
    elif scaling is not None and scaling.kind == "llama3":
        values |= {"use_rope_scaling": True, "rope_scaling_factor": scaling.factor}
    elif scaling is not None:
        values["rotary_seq_len_interpolation_factor"] = int(scaling.factor)
    return values | {"position_embedding_type": kind}


def _mscale(scaling: RopeScaling) -> float:
    """Megatron's `mscale`, by which 0.1 mscale ln(factor) + 1 is the factor of rotated queries and keys."""
    if scaling.mscale_all_dim and scaling.mscale and scaling.attention_factor is None:
        return scaling.mscale
    factor = rope_attention_factor(scaling.model_dump())
    return round((factor - 1) / (0.1 * math.log(scaling.factor)), 12) if scaling.factor > 1 else 1.0


def _experts(model: ModelConfig) -> Values:
    if not model.num_experts:
        return {}
    router, kinds = model.router, [int(kind.block == MOE) for kind in layer_kinds(model)]
    losses = {"aux_loss": router.global_loss, "seq_aux_loss": router.sequence_loss}
    losses = {kind: weight for kind, weight in losses.items() if weight} or {"none": 0.0}
    if router.sinkhorn:
        losses = {"sinkhorn": 0.0}
    names, weights = ([*values] if len(losses) > 1 else next(iter(values)) for values in (losses, losses.values()))
    return {
        "num_experts": model.num_experts,
        "moe_router_topk": model.experts_per_token,
        "moe_ffn_hidden_size": model.expert_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": model.shared_expert_ffn_hidden_size or None,
        "moe_shared_expert_gate": model.shared_expert_gate,
        "moe_layer_freq": 1 if all(kinds) else kinds,
        "moe_router_score_function": router.score_function,
        "moe_router_pre_softmax": router.pre_softmax,
        "moe_router_topk_scaling_factor": None if router.scaling_factor == 1 else router.scaling_factor,
        "moe_router_num_groups": router.num_groups if router.num_groups > 1 else None,
        "moe_router_group_topk": router.groups_per_token if router.num_groups > 1 else None,
        "moe_router_enable_expert_bias": router.expert_bias,
        "moe_router_bias_update_rate": router.bias_update_rate,
        "moe_router_load_balancing_type": names,
        "moe_aux_loss_coeff": weights,
        "moe_z_loss_coeff": router.z_loss or None,
        "moe_input_jitter_eps": router.jitter or None,
        "moe_expert_capacity_factor": router.capacity_factor,
        "moe_token_drop_policy": "position" if router.drop_policy == "position" else "probs",
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": True,
    }


def _check(model: ModelConfig, values: Values) -> None:
    """Raise InputError, with a setting, unless the arguments mean this model when they are translated back."""
    back = Translation(from_mapping(values, "the arguments of Megatron-LM"), 1)
    translate_model(back)
    translate_experts(back, 1)
    section: Values = nested({key: setting.value for key, setting in back.settings.items()})["model"]
    section |= {"vocab_size": model.vocab_size, "vocab_multiple": model.vocab_multiple}
    if model.is_latent and section.get("rope_scaling"):
        section["rope_scaling"] |= {ours: values[theirs] for theirs, ours in OF_YARN.items()}
    found = ModelConfig.model_validate(section)
    mine, theirs = _described(model), _described(found)
    if different := [name for name in mine if mine[name] != theirs.get(name)]:
        name = different[0]
        written = (each.model_dump(mode="json") for each in (model, found))  # not as `_described` writes it
        ours, nearest = (show(reduce(getitem, name.split("."), values)) for values in written)
        problem = f"model.{name}={ours} with the other settings has no arguments of Megatron-LM"
        raise InputError(f"{problem}, which become {nearest}: export it with {command('hf')} export.")


def _described(model: ModelConfig) -> Values:
    """The description of a network; what can be written in several ways is written in one."""
    others = {name: value for name, value in describe_model(model).items() if name not in OF_LAYERS}
    described = {"block_pattern": [list(kind) for kind in layer_kinds(model)], **others}
    if model.position != "rope":
        described = {name: value for name, value in described.items() if not name.startswith("rope_")}
    elif scaling := described["rope_scaling"]:
        described["rope_scaling"] = scaling | {
            "attention_factor": round(rope_attention_factor(scaling), 9),
            "mscale": None,
            "mscale_all_dim": scaling["mscale_all_dim"] if model.is_latent else None,
        }
    return described
