"""Bytes that the compiled step sends between hosts of eight H200s, against the formula of docs/parallelism.md."""

import jax
import pytest

from megajax.config import load_config
from megajax.config.checks import check_mesh
from megajax.mesh import build_mesh
from megajax.plan.compile import h200_devices, no_gpu_needed
from megajax.profile import hlo
from megajax.training.step import TrainProgram

BF16, FP32 = 2, 4


@pytest.mark.parametrize(("over", "hosts"), [("fsdp", 2), ("fsdp", 8), ("data", 8)])
def test_a_host_sends_weights_and_gradients_once(tmp_path, over, hosts):
    """`fsdp` in a host and `data` between hosts: each shard passes a ring of the hosts. `data` alone: a ring of all."""
    gpus = 8 * hosts
    path = tmp_path / "model.yaml"
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
    with no_gpu_needed():
        program = TrainProgram.build(config, build_mesh(check_mesh(config, gpus), h200_devices(gpus)))
        lowered = program.train_step.lower(program.abstract_state, program.abstract_batch)
        ops = hlo.parse(lowered.compile().as_text() or "")
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
