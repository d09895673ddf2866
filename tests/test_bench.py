"""Arguments of the benchmark: configs by path and by name, and mistakes."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jaxlib
import pytest

from dev import gpu_rows
from megajax import jax_internals
from megajax.config import load_config
from megajax.config.extensions import import_extensions
from megajax.estimate import costs
from megajax.tools import bench


def test_configs_are_found_by_path_and_by_name(tmp_path):
    named = bench.synthetic_config("llama3_8b_l8", ["run.steps=3"], str(tmp_path))
    assert (named.run.name, named.run.steps, named.data.kind) == ("llama3_8b_l8", 3, "synthetic")
    (tmp_path / "mine.yaml").write_text(named.to_yaml())
    assert bench.synthetic_config(str(tmp_path / "mine.yaml"), [], str(tmp_path)) == named
    own = "run: {epochs: 2, eval_steps: all}\nbatch: {schedule: '0: 8, 1M: 16', global_size: 16}\nlora: {rank: 2}\n"
    own += "data: {kind: text, train: x.txt, valid: y.txt, tokenizer: byte}\ncheckpoint: {init_from: there}\n"
    (tmp_path / "own.yaml").write_text(f"include: {tmp_path}/mine.yaml\n{own}")
    found = bench.synthetic_config(str(tmp_path / "own.yaml"), [], str(tmp_path / "run"))
    assert (found.data.kind, found.run.dir, found.checkpoint.init_from) == ("synthetic", str(tmp_path / "run"), None)
    assert (found.run.epochs, found.run.eval_steps, found.batch.schedule) == (None, 1, None)
    assert not found.logging.tensorboard and found.lora.rank == 2
    pairs = [
        "data.kind=chat",
        "data.train=p.jsonl",
        "data.tokenizer=byte",
        "data.packing=pairs",
        "objective.kind=dpo",
        "lora.rank=2",
        "teacher.base=true",
    ]
    import_extensions(["docs/examples/dpo.py"])
    (tmp_path / "pairs.yaml").write_text(load_config("llama3_8b_l8", [*pairs, "checkpoint.init_from=sft"]).to_yaml())
    found = bench.synthetic_config(str(tmp_path / "pairs.yaml"), [], str(tmp_path / "run"))
    assert (found.data.kind, found.data.packing, found.objective.kind) == ("synthetic", None, "dpo")
    assert bench.split_runs(["a", "b", "x=1", "y=2"]) == [["a"], ["b", "x=1", "y=2"]]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["llama3_8b_l9"], "config file llama3_8b_l9 does not exist: "),
        (["nowhere/x.yaml"], "config file nowhere/x.yaml does not exist: give the path of a YAML file"),
        (["run.steps=3", "llama3_1b"], "no config precedes the override run.steps=3 (the command line)"),
        (["llama3_1b", "model.num_layer=3"], "did you mean model.num_layers?"),
        ([], "python -m megajax.tools.bench --help lists the arguments."),
    ],
)
def test_mistakes_are_a_sentence_before_anything_runs(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(arguments)
    printed = capsys.readouterr()
    assert (stopped.value.code, printed.out) == (2, "")
    assert printed.err.startswith("megajax: error: ") and sentence in printed.err


def test_each_process_has_a_row_and_one_that_is_killed_is_named_with_the_signal(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    found = {"config": "quickstart", "overrides": ["x=1"], "mesh": "fsdp 2", "tokens_per_second_per_device": 1234.4}
    found |= {"tflops_per_second_per_device": 2.04, "mfu": 0.125, "step_ms": [3.0, 2.0, 5.0], "peak_memory_gib": 1.0}
    found |= {"compile_seconds": 7.4}
    for name, ends in (
        ("stop", "os.kill(os.getpid(), 9)"),
        ("done", f"print({json.dumps(found)!r}, flush=True)\n    os._exit(0)"),
    ):
        (tmp_path / f"{name}.py").write_text(f"import os, sys\nif '--one' in sys.argv:\n    {ends}\n")
    runs = [*("quickstart", "run.extensions=[stop.py]"), *("quickstart", "run.extensions=[done.py]")]
    assert bench.main(runs) == 1
    printed, errors = capfd.readouterr()
    assert "quickstart run.extensions=[stop.py]: the process was ended by SIGKILL; " in errors
    result, _, _, *rows = printed.splitlines()
    assert json.loads(result) == found
    assert rows == [
        f"| quickstart run.extensions=[stop.py] | failed |{' – |' * 6}",
        "| quickstart x=1 | fsdp 2 | 1,234 | 2.0 | 12.5% | 3.0 (2.0–5.0) | 1.0 | 7 |",
    ]


@pytest.mark.long
@pytest.mark.parametrize("gpus", gpu_rows.FILES)
def test_the_rows_for_gpus_of_one_host_are_legal_and_have_names_of_their_own(gpus):
    rows = gpu_rows.read_rows(gpus, tiny=False)
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert bool(row.config) + bool(row.train) + bool(row.peer) == 1, row
        if not row.peer:
            assert 0 < gpu_rows.prediction(row)["gib"] < gpu_rows.rates_of("h100").memory_gib, row


def test_figures_are_of_one_device_and_belong_together(tmp_path, monkeypatch):
    """8 sequences of 16 tokens on eight virtual devices."""
    path = tmp_path / "small.yaml"
    path.write_text(
        "model: {num_layers: 1, hidden_size: 8, num_heads: 2, ffn_hidden_size: 8, vocab_size: 50, vocab_multiple: 1}\n"
        "batch: {global_size: 8, sequence_length: 16}\n"
    )
    timed, start = 3, time.time()
    monkeypatch.setattr(bench, "process_start_time", lambda: start)
    monkeypatch.setattr(costs, "peak_flops", lambda kind: {"cpu": 2e9}[kind])
    found = bench.bench(str(path), ["mesh.fsdp=-1"], warmup=1, timed=timed)
    assert 0 < found["first_step_seconds"] < time.time() - start - timed * found["step_ms"][1] / 1e3
    assert found["devices"] == "8 × cpu" and found["mesh"] == "fsdp 8"
    median, least, most = found["step_ms"]
    assert 0 < least <= median <= most
    speed = found["tokens_per_second_per_device"]
    assert speed == pytest.approx(8 * 16 / (median / 1e3) / 8)
    flops = 6 * (4 * 8 * 8 + 3 * 8 * 8 + 50 * 8 + 16 * 8)  # a token's matmuls with the head, and its half of all pairs
    assert found["tflops_per_second_per_device"] == pytest.approx(speed * flops / 1e12)
    assert found["mfu"] == pytest.approx(speed * flops / 2e9) and f"| {speed:,.0f} |" in bench.row(found)
    assert bench.row(found | {"mfu": None}) != bench.row(found)  # a device without a data sheet


def test_all_steps_after_the_warm_up_are_timed():
    finished = [10.0, 11.0, 13.0, 16.0, 20.0]
    assert bench.step_seconds(finished, 1) == [1, 2, 3, 4] and bench.step_seconds(finished, 3) == [3, 4]


def program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("script", ["exit 9", "", None])
def test_a_host_without_a_gpu_has_no_driver(script, tmp_path, monkeypatch):
    """nvidia-smi fails, lists no GPU, or is not installed."""
    if script is not None:
        program(tmp_path / "nvidia-smi", script)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bench.driver_version() is None


@pytest.mark.parametrize(
    ("cuda", "cudnn", "shown"),
    [(13000, 91400, ("13.0", "9.14.0")), (12060, 90501, ("12.6", "9.5.1")), (0, 0, (None, None))],
)
def test_versions_are_written_as_nvidia_writes_them(cuda, cudnn, shown, tmp_path, monkeypatch):
    """CUDA's number is 1000 x major + 10 x minor, cuDNN 9's 10000 x major + 100 x minor + patch."""
    numbers = SimpleNamespace(cuda_runtime_get_version=lambda: cuda, cudnn_get_version=lambda: cudnn)
    monkeypatch.setattr(jax_internals, "cuda_versions", numbers)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    program(tmp_path / "nvidia-smi", "echo 580.95.05; echo 580.95.05")
    monkeypatch.setenv("PATH", str(tmp_path))
    found = bench.versions()
    assert (found["jax"], found["jaxlib"]) == (jax.__version__, jaxlib.__version__)
    assert (found["cuda"], found["cudnn"], found["driver"]) == (*shown, "580.95.05")
