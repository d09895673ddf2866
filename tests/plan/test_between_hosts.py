"""Hosts of eight H200s: the compiled step's bytes between them, against the formula of docs/parallelism.md, and
tracing, which does not depend on their number.
"""

import cProfile
import pstats
from contextlib import nullcontext
from pathlib import Path

import jax
import pytest

from megajax.config import load_config
from megajax.config.checks import check_mesh
from megajax.mesh import build_mesh
from megajax.tools.plan.compile import compiled, described_devices, no_gpu_needed
from megajax.tools.profile import hlo
from megajax.training.step import TrainProgram

BF16, FP32 = 2, 4


def build(directory: Path, over: str, gpus: int) -> TrainProgram:
    """The step of a tiny model: `fsdp` in a host and `data` between hosts, or `data` over all GPUs."""
    path = directory / "model.yaml"
    path.write_text(
        f"""
run: {{name: model, steps: 1}}
model: {{num_layers: 1, hidden_size: 512, num_heads: 4, ffn_hidden_size: 1024, vocab_size: 1024}}
mesh: {{data: -1, fsdp: {8 if over == "fsdp" else 1}}}
batch: {{global_size: {gpus}, sequence_length: 128}}
data: {{kind: synthetic}}
"""
    )
    config = load_config(path, [])
    return TrainProgram.build(config, build_mesh(check_mesh(config, gpus), described_devices(gpus)))


@pytest.mark.long
@pytest.mark.parametrize(("over", "hosts"), [("fsdp", 8), ("data", 2)])
def test_a_host_sends_weights_and_gradients_once(tmp_path, h200_store, over, hosts):
    """HSDP: each shard passes a ring of the hosts. `data` alone: all of it passes a ring of all GPUs."""
    gpus = 8 * hosts
    with no_gpu_needed():
        program = build(tmp_path, over, gpus)
        lowered = program.train_step.lower(program.abstract_state, program.abstract_batch)
        text, _ = compiled(lowered, h200_store)
        ops = hlo.parse(text)
    sent = {kind: sum(op.between_hosts(8) for op in ops if op.kind == kind) for kind in hlo.COLLECTIVES}

    weights = {
        jax.tree_util.keystr(path): w.size
        for path, w in jax.tree.leaves_with_path(program.abstract_state.params)
        if w.ndim > 1
    }
    if program.plan.embedding_axes:  # its rows are sent, not the table
        weights = {name: size for name, size in weights.items() if "embedding" not in name}
    ring = hosts if over == "fsdp" else gpus
    parameters = sum(weights.values()) * (ring - 1) / ring
    assert sent["all-gather"] == pytest.approx(BF16 * parameters, rel=0.02)
    assert sent["reduce-scatter"] == pytest.approx(FP32 * parameters, rel=0.02)
    assert sum(sent.values()) == pytest.approx((BF16 + FP32) * parameters, rel=0.02)


def lowered(tmp_path, gpus, profile):
    jax.clear_caches()  # else a mesh that another test has traced takes fewer calls
    program = build(tmp_path, "fsdp", gpus)
    with profile:
        return program.train_step.lower(program.abstract_state, program.abstract_batch)


@pytest.mark.long
def test_tracing_does_not_grow_with_the_number_of_gpus(tmp_path):
    """The calls of Python functions, which a loaded machine does not change, and the size of the module."""
    calls, sizes = [], []
    with no_gpu_needed():
        lowered(tmp_path, 8, nullcontext())  # fills caches of Python
        for gpus in (16, 512):  # 512 still divide the weights
            profile = cProfile.Profile()
            sizes.append(len(lowered(tmp_path, gpus, profile).as_text()))
            calls.append(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]
    assert calls[1] == pytest.approx(calls[0], rel=0.02)
    assert sizes[1] == pytest.approx(sizes[0], rel=0.02)
