"""Compares training with optimizer state in files with that on the devices, bit for bit.

    python -m dev.optimizer_files FOLDER

Each row trains a small model for three steps on eight virtual CPU devices, with chunks of 4 KiB and buffers for three
of them, and prints how many arrays of the state differ in any bit. FOLDER is on a disk.
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np

from megajax.config import load_config
from megajax.config.checks import check_mesh
from megajax.mesh import build_mesh
from megajax.optim import streamed
from megajax.training.batches import to_global
from megajax.training.step import TrainProgram

MODEL = """
model: {hidden_size: 64, num_layers: 2, num_heads: 4, num_kv_heads: 2, ffn_hidden_size: 96, vocab_size: 128}
batch: {global_size: 16, sequence_length: 16}
data: {kind: synthetic}
run: {steps: 10}
"""
ROWS = (
    "mesh.data=8",
    "mesh.fsdp=4 mesh.tensor=2 batch.num_microbatches=2",
    "mesh.pipeline=2 mesh.data=4 batch.num_microbatches=4",
    "mesh.fsdp=8 optimizer.kind=ademamix optimizer.state=int8",
    "mesh.fsdp=4 mesh.tensor=2 optimizer.kind=muon optimizer.state=bfloat16",
    "mesh.fsdp=2 mesh.tensor=4 optimizer.kind=lion optimizer.master=split optimizer.ema_decay=0.9",
    "mesh.fsdp=8 optimizer.kind=soap",
)


def program(*overrides: str) -> TrainProgram:
    """The program of the model on all devices."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(MODEL)
        file.flush()
        config = load_config(file.name, overrides)
    return TrainProgram.build(config, build_mesh(check_mesh(config, 8), jax.devices()))


def batch(of: TrainProgram, seed: int) -> dict[str, jax.Array]:
    """Random tokens."""
    M, B, S = of.plan.batch_shape
    tokens = np.random.default_rng(seed).integers(0, 128, (M * B, S + 1), dtype=np.int32)
    positions, mask = np.broadcast_to(np.arange(S, dtype=np.int32), (M * B, S)), np.ones((M * B, S), np.float32)
    return to_global(
        of, {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "positions": positions, "loss_mask": mask}
    )


def main(folder: str) -> None:
    streamed.CHUNK = 4096
    files = ("optimizer.offload=1", f"optimizer.offload_dir={folder}", "optimizer.offload_buffers=1e-9")
    for row in ROWS:
        plain, filed = program(*row.split()), program(*row.split(), *files)
        expected, state = plain.init_state(), filed.init_state()
        for step in range(3):
            expected, _ = plain.train_step(expected, batch(plain, step))
            state, _ = filed.train_step(state, batch(filed, step))
        pairs = zip(jax.tree.leaves(expected), jax.tree.leaves(filed.with_files(state)), strict=True)
        equal = [np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs]
        assert filed.streamed is not None
        print(f"{row}: {equal.count(False)} of {len(equal)} arrays differ, {len(filed.streamed.files.sizes)} chunks")


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    main(sys.argv[1])
