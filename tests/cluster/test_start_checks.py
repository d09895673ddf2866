"""Checks between processes: each of them names the difference, with process and host, before a step is compiled."""

import os
import platform
import shutil
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import megajax
from megajax import Config
from megajax.cluster.start_checks import ProcessFacts, code_hash, find_problem, own_facts, unused_gpus, used_devices

FOUR = ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]


def processes(*gpus: list[str], hosts: tuple[str, ...] = ("one", "two"), visible: list[str] | None = None) -> list:
    """A process for each list of GPUs, the first half of them on the first host."""
    return [
        ProcessFacts(
            host=hosts[i * len(hosts) // len(gpus)],
            versions={"Python": "3.12.1", "jax": "0.11.2"},
            code="0123456789ab",
            config={"mesh": {"tensor": 2}, "run": {"seed": 1}, "lora": {}},
            gpus=mine,
            visible=mine if visible is None else visible,
            flags=["--xla_gpu_autotune_level=4"],
        )
        for i, mine in enumerate(gpus)
    ]


@pytest.mark.smoke
def test_equal_processes_with_gpus_of_their_own_have_no_problem():
    assert not find_problem(processes(["GPU-a"], ["GPU-b"], ["GPU-c"], ["GPU-d"]))
    assert not find_problem(processes([], []))  # CPUs


def test_a_shared_gpu_is_named_with_both_processes():
    problem = find_problem(processes(FOUR[:2], FOUR[:2], hosts=("one",)))
    assert problem.startswith("process 0 and process 1 on one use the same GPU (GPU-a; 2 of 2 GPUs have two users)")
    assert "JAX_LOCAL_DEVICE_IDS" in problem


@pytest.mark.parametrize(
    ("gpus", "hosts", "sentence"),
    [
        ((FOUR[:2], FOUR[2:3]), ("one", "two"), "process 1 on two has 1 GPU and process 0 on one has 2"),
        (([gpu] for gpu in FOUR), ("one", "one", "one", "two"), "uses 1 GPU of host two and 3 of host one"),
        ((FOUR[:2], FOUR[2:], ["GPU-e", "GPU-f"]), ("one", "one", "two"), "uses 2 GPUs of host two and 4 of host one"),
        ((FOUR, []), ("one", "two"), "process 1 on two has 0 GPUs"),
    ],
)
def test_hosts_with_different_numbers_of_gpus_are_named(gpus, hosts, sentence):
    assert sentence in find_problem(processes(*gpus, hosts=hosts))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"flags": ["--xla_gpu_autotune_level=0"]}, "differ in --xla_gpu_autotune_level=0 --xla_gpu_autotune_level=4"),
        ({"versions": {"Python": "3.12.1", "jax": "0.11.1"}}, "jax is 0.11.1 in process 1 on one and 0.11.2"),
        ({"versions": {"Python": "3.12.1"}}, "jax is not installed in process 1 on one"),
        ({"code": "ba9876543210"}, "the code of megajax or of run.extensions in process 1 on one differs"),
        (
            {"config": {"mesh": {"tensor": 4}, "run": {"seed": 1}, "lora": {}}},
            "process 1 on one has another config than process 0 on one (mesh.tensor=4 instead of 2): start",
        ),
        (
            {"config": {"mesh": {"tensor": 2}, "run": {"seed": 1, "steps": 9}, "lora": {}}},  # a key that 0 lacks
            "process 1 on one has another config than process 0 on one (run.steps=9 instead of ",
        ),
    ],
)
def test_other_packages_code_and_config_are_named_with_process_and_host(change, sentence):
    everyone = processes(*([gpu] for gpu in FOUR))
    everyone[1] = everyone[1]._replace(**change)
    assert sentence in find_problem(everyone)
    everyone[3] = everyone[3]._replace(**change)
    assert "process 1 on one and 1 more" in find_problem(everyone)


@pytest.mark.parametrize("name", ["jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"])
def test_the_packages_that_a_step_and_its_checkpoint_depend_on_are_compared(name):
    model = {"num_layers": 1, "hidden_size": 8, "num_heads": 1, "vocab_size": 8}
    config = Config.model_validate({"model": model, "batch": {"global_size": 1, "sequence_length": 8}})
    assert own_facts(config).versions[name] == metadata.version(name)
    assert own_facts(config).versions["Python"] == platform.python_version()


def test_flags_of_xla_are_compared_but_for_those_with_files_and_numbers_of_devices(monkeypatch):
    """A deterministic run gives each process files of its own (runtime.xla_flags)."""
    own = ("--xla_gpu_dump_autotune_results_to=autotune-1.new", "--xla_gpu_load_autotune_results_from=autotune-1.txt")
    own += ("--xla_dump_to=x1", "--xla_force_host_platform_device_count=2")
    monkeypatch.setenv("XLA_FLAGS", " ".join(["--xla_gpu_b=1", *own, "--xla_gpu_a=2"]))
    model = {"num_layers": 1, "hidden_size": 8, "num_heads": 1, "vocab_size": 8}
    config = Config.model_validate({"model": model, "batch": {"global_size": 1, "sequence_length": 8}})
    assert own_facts(config).flags == ["--xla_gpu_a=2", "--xla_gpu_b=1"]


def test_gpus_that_no_process_uses_are_a_warning():
    assert "host one has 4 GPUs and the run uses 1" in unused_gpus(processes(FOUR[:1], hosts=("one",), visible=FOUR))
    assert not unused_gpus(processes(FOUR[:2], FOUR[2:], hosts=("one",), visible=FOUR))


@pytest.mark.parametrize(("chosen", "used"), [("all", FOUR), ("1", FOUR[1:2]), ("0,3", [FOUR[0], FOUR[3]]), ("7", [])])
def test_the_gpus_of_a_process_are_those_that_jax_was_told_to_use(chosen, used):
    assert used_devices(FOUR, chosen) == used


def test_the_hash_of_the_code_changes_with_a_name_or_a_byte(tmp_path):
    shutil.copytree(Path(megajax.__file__).parent, tmp_path / "copy", ignore=shutil.ignore_patterns("__pycache__"))
    assert code_hash(tmp_path / "copy") == code_hash()
    (tmp_path / "copy/svg.py").rename(tmp_path / "copy/svh.py")  # in the same place of the order
    renamed = code_hash(tmp_path / "copy")
    data = (tmp_path / "copy/svh.py").read_bytes()
    (tmp_path / "copy/svh.py").write_bytes(data.replace(b"a", b"b", 1))
    assert len({code_hash(), renamed, code_hash(tmp_path / "copy"), code_hash(extensions=["json"])}) == 4


# Real processes


def start(code: str, index: int, port: int, *arguments: str) -> subprocess.Popen:
    variables = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(index)}
    return subprocess.Popen(
        [sys.executable, *code.split(" ", 1), *arguments],
        env={**os.environ, **variables, "XLA_FLAGS": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.long
def test_every_process_says_that_the_configs_differ_and_writes_nothing(tmp_path, port):
    config = tmp_path / "tiny.yaml"
    config.write_text(
        f"run: {{dir: {tmp_path / 'run'}}}\nmodel: {{num_layers: 1, hidden_size: 8, num_heads: 1, vocab_size: 9}}\n"
        "batch: {global_size: 2, sequence_length: 4}\ndata: {kind: synthetic}\n"
    )
    started = [start("-m megajax.train", i, port, str(config), f"run.seed={i}") for i in range(2)]
    outputs = [process.communicate(timeout=100)[0] for process in started]
    assert [process.returncode for process in started] == [2, 2], outputs
    for output in outputs:
        host = socket.gethostname()
        problem = f"process 1 on {host} has another config than process 0 on {host} (run.seed=1 instead of 0)"
        assert f"megajax: error: {problem}: start every process with the same config" in output
    assert not (tmp_path / "run").exists()


def test_a_process_that_does_not_come_is_named(port):
    join = (
        "import megajax.cluster.joining as joining, megajax.console\njoining.JOIN_SECONDS = 1\n"
        "with megajax.console.user_errors(): joining.start_processes()"
    )
    alone = start(f"-c {join}", 0, port)
    output = alone.communicate(timeout=60)[0]
    assert alone.returncode == 2, output
    assert f"megajax: error: process 1 of 2 did not come to 127.0.0.1:{port} within 1 s" in output
