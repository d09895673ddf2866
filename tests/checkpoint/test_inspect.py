"""The table of a run's checkpoints, and damage that it finds."""

import os
import time

import jax
import pytest

from megajax.checkpoint import inspect
from megajax.config import Config
from megajax.training.loop import Trainer

MODEL = {
    "num_layers": 1,
    "hidden_size": 8,
    "num_heads": 2,
    "num_kv_heads": 2,
    "ffn_hidden_size": 16,
    "vocab_size": 32,
    "vocab_multiple": 32,
}


@pytest.fixture
def run_dir(tmp_path):
    settings = {
        "run": {"dir": str(tmp_path / "run"), "eval_steps": 0},
        "model": MODEL,
        "mesh": {"fsdp": 2, "tensor": 2},
        "batch": {"global_size": 4, "sequence_length": 8},
        "optimizer": {"state": "bfloat16"},
        "data": {"kind": "synthetic"},
        "logging": {"tensorboard": False},
    }
    trainer = Trainer(Config.model_validate(settings), jax.devices()[:4])
    for step in (0, 3):
        trainer.step = step
        trainer.save()
    trainer.close()
    return tmp_path / "run"


@pytest.fixture
def in_india(monkeypatch):
    """Five and a half hours before UTC."""
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "IST-5:30")
        time.tzset()
        yield
    time.tzset()


def test_the_table_names_mesh_sizes_and_damage_and_one_step_its_arrays(run_dir, capsys, in_india):
    os.utime(run_dir / "checkpoints" / "3", (1_700_000_000, 1_700_000_000))  # 2023-11-14 22:13:20 UTC
    assert inspect.main([str(run_dir)]) == 0
    titles, first, last = capsys.readouterr().out.splitlines()
    assert titles.split()[:2] == ["step", "saved"]
    assert first.startswith("0 ") and last.startswith("3     2023-11-15 03:43:20  "), "in the user's time"
    # FP32 parameters and two moments of 16 bits: embedding and head 2·32·8, attention 4·8·8, MLP 3·8·16, norms 3·8; and
    # scalars.
    numbers = 2 * 32 * 8 + 4 * 8 * 8 + 3 * 8 * 16 + 3 * 8
    assert last.split()[4] == "kB" and float(last.split()[3]) == pytest.approx((4 + 2 + 2) * numbers / 1000, rel=0.01)
    assert last.endswith("fsdp 2 × tensor 2  with checksums, not verified")

    assert inspect.main([str(run_dir / "checkpoints" / "3"), "--verify", "--arrays"]) == 0
    _, line, _, *arrays = capsys.readouterr().out.splitlines()
    assert line.startswith("3 ") and line.endswith("  verified")
    (query,) = [array.split() for array in arrays if array.startswith("params.blocks.dense.attention.query ")]
    assert query[1:] == ["float32", "256", "B", "[1,", "8,", "2,", "4]"]

    damaged = max((run_dir / "checkpoints" / "0" / "state").rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    assert inspect.main([str(run_dir), "--verify"]) == inspect.DAMAGED
    _, first, last = capsys.readouterr().out.splitlines()
    assert "DAMAGED: " in first and damaged.name in first and last.endswith("  verified")
    assert inspect.main([str(run_dir)]) == 0, "without --verify no array is read"
    assert "  with checksums, not verified" in capsys.readouterr().out.splitlines()[1]
    # What the table itself reads of a checkpoint is checked without --verify too: its description, and its headers.
    for file, cell in (("description/metadata", "kB"), ("state/manifest.ocdbt", "?")):
        path = run_dir / "checkpoints" / "3" / file
        whole = path.read_bytes()
        path.write_bytes(b"x" * len(whole))
        assert inspect.main([str(run_dir)]) == inspect.DAMAGED, file
        line = capsys.readouterr().out.splitlines()[2]
        assert "DAMAGED: " in line and cell in line, file
        path.write_bytes(whole)
    assert inspect.main([str(run_dir)]) == 0
