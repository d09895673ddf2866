"""Other frameworks' names for values: every choice has a table, whose values are its choices, and errors use it."""

import re
from typing import Any, Literal, get_args, get_origin

import pytest

from megajax.config import load_config
from megajax.config.load import keys
from megajax.config.other_values import OTHER_VALUES, choice_cure, plain
from megajax.errors import ConfigError
from megajax.options.registry import Registry
from megajax.schema.tree import NAMED


def choices(annotation: Any, key: str) -> dict[str, list[str]]:
    """The choices in a key's type, and those of the items of a list by the key with N."""
    if get_origin(annotation) is Literal:
        return {key: list(get_args(annotation))}
    found: dict[str, list[str]] = {}
    for item in get_args(annotation):
        found |= choices(item, f"{key}.N" if get_origin(annotation) is tuple else key)
    if key in found and bool in get_args(annotation):
        found[key] += ["true", "false"]
    return found


CHOICES = {name: values for key, field in keys() for name, values in choices(field.annotation, key).items()}
CHOICES |= {key: registry.choices for key, field in keys() if (registry := Registry.of(field)) is not None}
del CHOICES["run.eval_steps"]  # a number or all, with a sentence of its own


def test_every_choice_has_a_table_of_names_that_are_none_of_its_own():
    assert OTHER_VALUES.keys() == CHOICES.keys()
    for key, table in OTHER_VALUES.items():
        names = [plain(name) for row in table for name in row.names]
        assert not set(names) & set(map(plain, CHOICES[key])), key
        assert len(names) == len(set(names)), (key, sorted(name for name in names if names.count(name) > 1))
        for row in table:
            assert row.ours in CHOICES[key] if row.ours else row.note, (key, row)
            for name in row.names:
                cure = choice_cure(key, name, CHOICES[key])
                assert cure.startswith((f"did you mean {row.ours}?", f"use {row.ours},", row.note or "-")), (key, name)


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("model.activation=silu", "use swiglu, which is gated by SiLU; the choices are swiglu, geglu, "),
        ("precision.compute=bf16", "did you mean bfloat16? The choices are bfloat16, float16 and float32."),
        ("precision.compute=torch.float16", "did you mean float16?"),
        ("optimizer.kind=adam", "did you mean adamw?"),
        ("optimizer.kind=adamw_bnb_8bit", "use adamw, with optimizer.state=int8;"),
        ("optimizer.kind=adafactor", "it does not exist here; use adamw, ademamix, sgd, lion, muon or soap."),
        ("optimizer.kind=mun", "did you mean muon?"),  # near
        ("optimizer.kind=quasi_newton", "use adamw, ademamix, sgd, lion, muon or soap,"),
        ("data.kind=dpo", "DPO is an example in docs/extensions.md"),
        ("remat.policy=false", "did you mean none?"),
        ("model.qk_norm=olmo2", "did you mean all_heads? The choices are true, false, all_heads and layernorm."),
        ("model.layer_pattern=[global, full_attention]", "did you mean global?"),
        ("mesh.experts_over=[tp]", "did you mean tensor?"),
        ("optimizer.muon.coefficients=jordan", "did you mean quintic?"),
        ("model.rope_scaling.kind=su", "did you mean longrope?"),  # as the reader of config.json takes it
    ],
)
def test_a_value_of_another_framework_is_answered_with_ours(override: str, answer: str):
    with pytest.raises(ConfigError) as error:
        load_config(NAMED / "quickstart.yaml", [override])
    key, _, value = override.partition("=")
    problem, _, cure = str(error.value).partition(f"({'the command line'}: {override}): ")
    assert cure.startswith(answer) and problem.startswith(key) and " is not a choice " in problem
    assert problem.partition("=")[2].startswith(value) or value.startswith("[")


# Whole lists of choices of other frameworks, each with its meaning here; None: megajax does not have it.
OF_FRAMEWORKS: dict[str, dict[str, dict[str, str | None]]] = {
    "transformers' SchedulerType": {
        "schedule.kind": dict.fromkeys(("cosine_with_restarts", "reduce_lr_on_plateau"))
        | dict.fromkeys(("linear", "polynomial"), "linear")
        | dict.fromkeys(("cosine", "cosine_with_min_lr"), "cosine")
        | dict.fromkeys(("constant", "constant_with_warmup"), "constant")
        | {"inverse_sqrt": "inverse_sqrt", "warmup_stable_decay": "wsd"}
    },
    "transformers' OptimizerNames": {
        "optimizer.kind": dict.fromkeys(("adafactor", "adagrad", "rmsprop", "galore_adamw"))
        | dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_apex_fused", "adamw_hf"), "adamw")
        | dict.fromkeys(("adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit", "paged_adamw"), "adamw")
        | dict.fromkeys(("lion_8bit", "lion_32bit", "paged_lion"), "lion")
        | {"sgd": "sgd"}
    },
    "transformers' ACT2FN": {
        "model.activation": {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu", "silu": "swiglu"}
        | {"swish": "swiglu", "relu2": "relu2", "tanh": None, "mish": None, "leaky_relu": None, "sigmoid": None}
    },
    "transformers' layer_types and rope_type": {
        "model.layer_pattern.N": {
            "full_attention": "global",
            "sliding_attention": "local",
            "chunked_attention": "local",
        },
        "model.rope_scaling.kind": {"linear": "linear", "dynamic": "dynamic", "yarn": "yarn", "longrope": "longrope"}
        | {"llama3": "llama3", "default": None},
    },
    "torchtitan's pipeline_parallel_schedule": {
        "pipeline.schedule": dict.fromkeys(("1F1B", "Interleaved1F1B"), "1f1b")
        | dict.fromkeys(("GPipe", "LoopedBFS"), "gpipe")
        | dict.fromkeys(("InterleavedZeroBubble", "ZBVZeroBubble"), "zero_bubble")
        | {"DualPipeV": None}
    },
    "torchtitan's activation_checkpoint": {
        "remat.policy": {"none": "none", "full": "full", "selective": "selective", "memory_budget": "save_matmuls"}
    },
    "MaxText's remat_policy": {
        "remat.policy": {"full": "full", "minimal": "save_matmuls", "save_qkv_proj": "save_matmuls"}
        | {"minimal_offloaded": "offload", "save_dot_with_context_except_mlp": "offload"}
    },
    "MaxText's attention": {
        "kernels.attention": {"autoselected": "auto", "dot_product": "reference", "flash": "auto"}
        | {"cudnn_flash_te": "cudnn", "cudnn_flash_jax": "cudnn"}
    },
    "Megatron-LM's choices": {
        "schedule.kind": {"constant": "constant", "linear": "linear", "cosine": "cosine", "WSD": "wsd"}
        | {"inverse-square-root": "inverse_sqrt"},
        "schedule.wsd_decay_style": {n: n for n in ("exponential", "linear", "cosine", "minus_sqrt")},
        "model.position": {"learned_absolute": "learned", "rope": "rope", "yarn": "rope", "none": "none"}
        | {"relative": "relative", "mrope": "rope"},
        "communication.context": {"p2p": "ring", "a2a": "all_to_all", "all_gather": "all_gather"},
        "communication.experts": {"alltoall": "all_to_all", "allgather": "all_gather", "flex": "all_to_all"},
        "model.router.drop_policy": {"probs": "probability", "position": "position"},
        "precision.fp8.recipe": {"delayed": "delayed", "tensorwise": "current", "mxfp8": "mxfp8", "custom": None}
        | {"blockwise": "blockwise", "nvfp4": "nvfp4"},
        "precision.fp8.format": {"e4m3": "e4m3", "hybrid": "hybrid"},
        "precision.fp8.amax_algorithm": {"most_recent": "most_recent", "max": "max"},
        "optimizer.kind": {"adam": "adamw", "sgd": "sgd", "muon": "muon", "dist_muon": "muon", "lion": "lion"}
        | {"soap": "soap"},
        "model.norm": {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"},
    },
    # topk_method and scoring_func of DeepSeek's config.json: V2 takes the best expert of a group, V3 the sum of two
    # V3 counts the load by the scores without the bias of the choice, V2 by the chosen experts
    "DeepSeek's routers": {
        "model.router.loss_counts": {"deepseek_v2": "chosen", "deepseek_v3": "top_scores"},
        "model.router.group_score": {"group_limited_greedy": "max", "noaux_tc": "sum"},
        "model.router.score_function": {"softmax": "softmax", "sigmoid": "sigmoid", "noaux_tc": "sigmoid"},
    },
    # norm_before_gate, and its default, in mamba_ssm's RMSNormGated
    "the order of Mamba-2's gate and norm": {
        "model.mamba2.output_norm": dict.fromkeys(("norm_before_gate", "gate_after_norm"), "before_gate")
        | dict.fromkeys(("norm_after_gate", "gate_before_norm"), "after_gate")
    },
    "NumPy's and PyTorch's dtypes": {
        key: dict.fromkeys(("bf16", "torch.bfloat16"), "bfloat16")
        | dict.fromkeys(("fp32", "torch.float32", "tf32"), "float32")
        | dict.fromkeys(("fp64", "float64"))
        for key in ("precision.compute", "precision.gradients", "precision.accumulation", "checkpoint.export_hf.dtype")
    },
    "TRL's and torchtune's data": {
        "data.kind": dict.fromkeys(("sft", "instruct", "conversation", "alpaca", "sharegpt"), "chat")
        | {"json": "text", "parquet": "text", "mmap": "indexed"},
        "data.packing": {"bfd": "first_fit", "wrapped": "sequential"},
        "data.too_long": {"keep_start": "truncate", "keep_end": None, "discard": "drop"},
    },
    # √max(1, out / in) is emerging_optimizers' shape_scaling and torch.optim.Muon's original; unit_rms_norm is
    # √(out / in), and torch's match_rms_adamw 0.2·√max(in, out)
    "Muon's": {
        "optimizer.muon.scale": dict.fromkeys(("shape_scaling", "original", "unit_rms_norm"), "spectral")
        | {"match_rms_adamw": "match_adamw"},
        "optimizer.muon.coefficients": {"jordan": "quintic", "polar": "polar_express"},
    },
    "published models'": {
        "model.qk_norm": {"qwen3": "true", "olmo2": "all_heads"},
        "model.attention_bias": {"qwen2": "qkv", "add_qkv_bias": "qkv"},
        "model.norm_placement": {"pre_norm": "before", "post_norm": "after"}
        | dict.fromkeys(("sandwich", "peri"), "both"),
        "model.rope_pattern.N": {"rotary": "rope", "nope": "none"},
        "model.vision.activation": {"gelu_pytorch_tanh": "gelu", "gelu_erf": "gelu_exact", "silu": "swiglu"},
        "model.vision.norm": {"rms": "rmsnorm", "ln": "layernorm"},
        "model.vision.projector": {"mlp2x_gelu": "mlp", "avg_pool": "average"},
    },
    # --calculate-per-token-loss, without which Megatron averages microbatches; --finetune and --no-load-optim
    "what Megatron-LM's flags decide": {
        "objective.average": {"per_token": "tokens", "megatron": "microbatches"},
        "checkpoint.init_state": {"finetune": "weights", "no_load_optim": "position", "resume": "all"},
        "data.order": {"mcore": "megatron", "random": "shuffled", "false": "sequential"},
    },
    "short names of mesh axes": {
        "mesh.experts_over.N": {"dp": "data", "ddp": "data", "zero3": "fsdp", "ep": "expert", "cp": "context"}
        | {"sp": "context", "tp": "tensor", "etp": "tensor"}
    },
    "formats of optimizer states and exports": {
        "optimizer.state": {"8bit": "int8", "bf16": "bfloat16", "fp32": "float32", "fp64": None},
        "optimizer.master": {"fp32": "float32", "kahan": "split", "bf16": "split"},
        "checkpoint.export_hf.quantization": dict.fromkeys(("deepseek", "finegrained_fp8"), "fp8_block")
        | {"per_channel": "fp8_channel", "per_tensor": "fp8_tensor", "gpt_oss": "mxfp4", "off": "none", "awq": None},
    },
    "libraries of kernels": {
        "kernels.linear_attention": {"fla": "jla", "mamba_ssm": "jla", "torch": "reference"},
        "kernels.grouped_matmul": {"megablox": "auto", "bmm": "xla", "ragged_dot": "reference"},
        "precision.fp8.backend": {"te": "transformer_engine", "native": "xla", "simulated": "emulated"},
    },
}


def test_every_table_of_names_has_meanings_from_elsewhere():
    assert {key for key, table in OTHER_VALUES.items() if table} == {
        key for each in OF_FRAMEWORKS.values() for key in each
    }


@pytest.mark.parametrize("framework", OF_FRAMEWORKS)
def test_every_choice_of_another_framework_has_its_meaning(framework):
    for key, meanings in OF_FRAMEWORKS[framework].items():
        own = {plain(choice): choice for choice in CHOICES[key]}
        for name, ours in meanings.items():
            if plain(name) in own:  # the same name
                assert own[plain(name)] == ours, (key, name)
                continue
            cure = choice_cure(key, name, CHOICES[key])
            chosen = re.match(r"did you mean (\w+)\?|use (\w+), .*; the choices are", cure)
            assert (chosen and (chosen[1] or chosen[2])) == ours, (key, name, cure)
    assert "optimizer.state=int8" in choice_cure("optimizer.kind", "adamw_bnb_8bit", CHOICES["optimizer.kind"])


@pytest.mark.parametrize("key", ["precision.compute", "precision.gradients", "precision.accumulation"])
def test_a_format_of_fp8_as_a_dtype_is_answered_with_its_setting(key):
    for name in ("fp8", "float8", "e4m3", "float8_e4m3fn"):
        assert "precision.fp8.recipe" in choice_cure(key, name, CHOICES[key]), name


@pytest.mark.parametrize("value", ["-1", "whole", "null", "0.5"])
def test_a_number_or_all_is_no_choice(value):
    with pytest.raises(ConfigError, match=rf"^run\.eval_steps={value} is not a number .*: use 0 or more, or all\.$"):
        load_config(NAMED / "quickstart.yaml", [f"run.eval_steps={value}"])


def test_a_list_in_place_of_a_choice_is_a_wrong_list():
    key, steps = "optimizer.muon.coefficients", "[[3.4, -4.8, 2.0], [2, -1.5, 0.5]]"
    with pytest.raises(ConfigError, match=rf"{key}\.0=1 is not a list .*: write it in brackets"):
        load_config(NAMED / "quickstart.yaml", [f"{key}=[1, 2]"])
    config = load_config(NAMED / "quickstart.yaml", [f"{key}={steps}", "optimizer.kind=muon"])
    assert config.optimizer.muon.coefficients == ((3.4, -4.8, 2.0), (2.0, -1.5, 0.5))
