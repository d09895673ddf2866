"""The figures of the summary, worked out by hand."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from megajax import Config
from megajax.config.checks import check_mesh
from megajax.config.extensions import import_extensions
from megajax.console import memory_size
from megajax.estimate.memory import estimate_memory
from megajax.mesh import build_mesh
from megajax.training.step import TrainProgram
from megajax.training.summary import summary

V, D, H = 250, 32, 8
DENSE = {"num_layers": 8, "hidden_size": D, "num_heads": 4, "num_kv_heads": 1, "ffn_hidden_size": 64, "vocab_size": V}
DENSE |= {"vocab_multiple": 1}
EXPERTS = {"num_layers": 4, "moe_layer_interval": 2, "num_experts": 8, "experts_per_token": 2}
EXPERTS |= {"expert_ffn_hidden_size": 48}
# A run on GPUs sets these (docs/), and they do nothing on CPUs.
OF_GPUS = ("--xla_gpu_flag=1", "CUDA_DEVICE_MAX_CONNECTIONS=1", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=9")
ATTENTION = D * H * (4 + 2 * 1) + 4 * H * D  # with one KV head


def make(model: dict, mesh: dict, microbatches: int, **sections: dict) -> TrainProgram:
    """A program on eight devices; 16 sequences of 64 tokens in a step."""
    batch = {"global_size": 16, "num_microbatches": microbatches, "sequence_length": 64, **sections.pop("batch", {})}
    config = Config.model_validate(
        {"model": model, "mesh": mesh, "batch": batch, "data": {"kind": "synthetic"}, **sections}
    )
    return TrainProgram.build(config, build_mesh(check_mesh(config, 8), jax.devices()[:8]))


def lines(*arguments, **sections: dict) -> dict[str, str]:
    """The lines of the summary by their first word."""
    program = make(*arguments, **sections)
    found = [line.partition(" ") for line in summary(program, [*OF_GPUS, "VARIABLE=1"]).splitlines()]
    return {word: text.strip() for word, _, text in reversed(found)}  # of two lines the first


def test_experts_a_ramp_up_and_chunks_of_context():
    mesh = {"data": 2, "expert": 2, "context": 2, "experts_over": ["expert", "data"]}
    found = lines(DENSE | EXPERTS, mesh, 4, batch={"schedule": "0: 8, 1K: 16"})
    assert found["mesh"] == "data 2 × expert 2 × context 2"
    assert "4 microbatches of 1 sequence per device" in found["batch"]  # of 4 on 2 · 2 devices
    # 2 steps of 8 · 64 tokens are the first to reach 1000.
    assert found["ramp-up"].startswith(
        "8 sequences in 2 microbatches, from step 3 (1,024 tokens) on 16 sequences in 4 "
    )
    assert found["experts"].startswith("2 per device, divided over data × expert;")  # of 8 on 2 · 2 devices
    assert "two chunks of 16 tokens" in found["context"]  # of 64 on 2 devices
    assert "warning" not in found
    assert found["context"].startswith("ring (") and "the KV heads of a device, 1" in found["context"]
    expert, norms = 3 * D * 48, 2 * D
    whole = 2 * V * D + D + 4 * (ATTENTION + norms) + 2 * 3 * D * 64 + 2 * (8 * D + 8 * expert)
    assert (
        f"{whole:,} parameters, {whole - 2 * 6 * expert:,} active per token (2 of 8 experts in 2 of 4 layers"
        in (found["model"])
    )
    # Six for each weight of a matmul that a token meets, and for scores and values half of the tokens.
    matmuls = V * D + 4 * ATTENTION + 2 * 3 * D * 64 + 2 * (8 * D + 2 * expert)
    assert f"{6 * (matmuls + 4 * 64 * 4 * H) / 1e3:.0f} kFLOP per token" in found["model"]
    assert found["set"] == "VARIABLE=1"  # not the flags of GPUs


def test_on_gpus_their_flags_are_shown():
    program, gpu = make(DENSE, {"fsdp": 8}, 1), SimpleNamespace(platform="gpu", device_kind="H200", process_index=0)
    axes, gpus = program.mesh.axis_names, np.full(program.mesh.devices.shape, gpu)
    mesh: Any = SimpleNamespace(axis_names=axes, devices=gpus, size=8)
    shown = summary(replace(program, mesh=mesh), ["--xla_gpu_flag", "VARIABLE=1"]).splitlines()
    assert "devices    8 × H200, 1 process" in shown and "set        --xla_gpu_flag VARIABLE=1" in shown
    assert any(line.startswith("warning    the reference attention is slow") for line in shown)


def test_stages_and_virtual_stages_of_a_pipeline():
    mesh = {"pipeline": 2, "fsdp": 2, "tensor": 2}
    found = lines(DENSE | {"mtp_layers": 1}, mesh, 4, pipeline={"virtual_stages": 2})
    names = [f"blocks.{kind}.attention.{name}" for kind in ("dense", "mtp") for name in ("key", "value")]
    assert found["replicated"].endswith(": " + ", ".join(names))
    P, R, M = 2, 2, 4
    assert f"each of {M} microbatches" in found["note"] and found["modules"].startswith("1 for ")
    assert f"{P} stages × {R} virtual stages of 2 layers, idle for {(P - 1) / (M * R + P - 1):.1%}" in found["pipeline"]
    assert f"at most {(R * P + P - 1) / R:g} of {M} microbatches" in found["pipeline"]
    assert found["pipeline"].endswith("; a forward and a backward operation a tick, because pipeline.virtual_stages=2")
    found = lines(DENSE | {"num_kv_heads": 2}, {"pipeline": 2, "data": 4}, 4, precision={"fp8": {"recipe": "current"}})
    assert "FP8 matmuls in all layers: current scaling" in found["precision"]
    halves = found["pipeline"]
    assert f"of 4 layers, idle for {1 / 5:.1%}" in halves and f"at most 2 of {M} microbatches" in halves
    assert halves.endswith("; one operation a tick, backward in two parts")


def test_recomputed_layers_halves_of_weights_and_padding():
    found = lines(
        DENSE | {"hidden_size": 36, "head_dim": H},
        {"fsdp": 8},
        2,
        remat={"policy": "full", "layers": 3},
        optimizer={"master": "split"},
    )
    assert "layers: 3 × 1 (full), 5 × 1 (none)" in found["kernels"]
    assert "master weights in two halves" in found["precision"] and "ramp-up" not in found
    assert "embedding.tokens" in found["stored"] and "final_norm" not in found["stored"]


def test_slots_of_a_stage_layers_in_fp8_and_in_several_loops_by_hand():
    """Of three slots for d m | m m the first stage leaves one MoE slot empty, the second one the dense one."""
    mixed = DENSE | EXPERTS | {"moe_layer_interval": 1, "first_dense_layers": 1}
    found = lines(mixed, {"pipeline": 2, "expert": 4}, 4, precision={"gradients": "bfloat16"})
    assert found["slots"].startswith("3 per virtual stage (1 dense, 2 MoE), 1 of them empty;")
    uneven = lines(DENSE, {"pipeline": 4, "data": 2}, 8, pipeline={"layout": [1, 2, 2, 3]})
    assert uneven["slots"].startswith("3 per virtual stage, 0 to 2 of them empty;")
    assert "layers: 3 × 1 (none)" in found["kernels"]
    assert "gradients summed over microbatches in float32, reduced in bfloat16" in found["precision"]
    fp8 = {"recipe": "current", "first_bf16_layers": 1, "last_bf16_layers": 2}
    found = lines(DENSE | {"num_kv_heads": 2}, {"fsdp": 8}, 1, precision={"fp8": fp8}, kernels={"scan_unroll": 1})
    assert "FP8 matmuls in layers 1 to 5: current scaling" in found["precision"]
    assert "gradients reduced in float32" in found["precision"]  # no sums: one microbatch
    assert "layers: 8 × 1 (none) in 2 loops; kernels.scan_unroll=1" in found["kernels"]  # 1, and loops of 5 and 2


def test_several_modules_a_teacher_adapters_and_consecutive_tokens():
    small = {"num_key_heads": 2, "num_value_heads": 2, "key_head_dim": 8, "value_head_dim": 8}
    heads = {"block_pattern": ["gated_deltanet"], "linear_attention": small | {"conv_kernel": 2}, "mtp_layers": 2}
    found = lines(DENSE | {"num_layers": 1} | heads, {"fsdp": 4, "context": 2}, 2)
    assert found["modules"].startswith("2 for ") and "; 0.3 × the mean of their losses" in found["modules"]
    assert found["context"].endswith("; per sequence and device 32 consecutive tokens")  # of 64 on 2 devices
    documents = {"kind": "synthetic", "synthetic_documents": 16, "reset_attention": True}
    found = lines(DENSE, {"fsdp": 2, "context": 4}, 2, data=documents, communication={"context": "dynamic"})
    assert "in groups of 1 to 4 devices" in found["context"]
    lora = {"rank": 2, "alpha": 16, "targets": ["query", "output"]}
    found = lines(DENSE, {"fsdp": 8}, 1, lora=lora, checkpoint={"init_from": "base"})
    count = 8 * (2 * (D + 4 * H) + 2 * (4 * H + D))  # of 8 layers: D → 2 → 4 heads, and back
    adapters = f"rank 2, alpha 16, {count:,} trained parameters in adapters of output, query"
    assert found["lora"] == f"{adapters}; base: base"
    import_extensions(["docs/examples/distillation.py"])
    learning = {"objective": {"kind": "distillation"}, "teacher": {"base": True}}
    found = lines(DENSE, {"fsdp": 8}, 1, lora=lora, checkpoint={"init_from": "base"}, **learning)
    assert found["teacher"] == "the base of the adapters, without weights of its own"
    teacher = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "ffn_hidden_size": 24, "vocab_size": V}
    learning = {"objective": {"kind": "distillation"}, "teacher": {"model": teacher | {"vocab_multiple": 1}}}
    found = lines(DENSE, {"fsdp": 8}, 1, **learning)
    count = 16 * 16 * 4 + 3 * 16 * 24 + 2 * 16 + 2 * V * 16 + 16
    assert found["teacher"] == f"{count:,} frozen parameters; weights: new weights"
    learning["teacher"] |= {"source": "of/teacher"}
    found = lines(DENSE, {"data": 8}, 2, checkpoint={"init_from": "of/student"}, **learning)
    assert found["teacher"] == f"{count:,} frozen parameters; weights: of/teacher"


def test_each_part_of_the_memory_stands_under_its_name():
    mesh, model = {"fsdp": 4, "tensor": 2}, DENSE | {"num_kv_heads": 2, "vocab_size": 4096}
    program = make(model, mesh, 2)
    memory = estimate_memory(program.plan.on_gpus())
    names = {"weights": "gathered weights", "working": "working buffers"}
    parts = {names.get(name, name): size for name, size in vars(memory).items()} | {"total": memory.total}
    assert len(set(parts.values())) == 7, "else two could change places"
    shown = ", ".join(f"{name} {memory_size(size)}" for name, size in parts.items())
    assert lines(model, mesh, 2)["memory"] == f"estimate per device: {shown}"


def test_an_encoder_and_a_tower_have_their_layers_and_the_length_of_their_rows():
    tower = {"image_token": 1, "num_layers": 2, "hidden_size": 16, "num_heads": 2, "patch_size": 2, "grid": 5}
    found = lines(DENSE | {"vision": tower}, {"fsdp": 8}, 2)
    assert found["vision"].startswith("2 layers over 25 patches of a row; attention: ")
    encoder = {"kind": "layers", "num_layers": 3, "sequence_length": 24}
    found = lines(DENSE | {"encoder": encoder}, {"fsdp": 8}, 2)
    assert found["encoder"].startswith("3 layers over sequences of 24 tokens; attention: ")
    assert "; cross-attention: " in found["encoder"]
