"""What is set before jax starts."""

import atexit
import os
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import jax
import pytest

from megajax.config import load_config
from megajax.runtime import (
    has_nvidia_driver,
    keep_autotuning,
    kept_autotuning,
    permutations_are_copied,
    prepare_environment,
)


@pytest.fixture
def config(tmp_path):
    """(overrides...) → a config with its run directory in tmp_path/run."""
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {num_layers: 1, hidden_size: 16, num_heads: 2, vocab_size: 10}\n"
        "batch: {global_size: 8, sequence_length: 8}\n"
        "data: {kind: synthetic}\n"
    )
    return lambda *overrides: load_config(path, [f"run.dir={tmp_path / 'run'}", *overrides])


@pytest.fixture
def fresh(monkeypatch):
    """A process in which nobody has imported jax or set anything."""
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION")
    monkeypatch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "")
    monkeypatch.delenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    monkeypatch.delitem(sys.modules, "jax")


def environment_flags() -> dict[str, str]:
    return dict(flag.removeprefix("--").split("=", 1) for flag in os.environ["XLA_FLAGS"].split())


@pytest.mark.smoke
def test_flags_are_set_and_returned(config, fresh):
    flags = prepare_environment(config())
    assert os.environ["XLA_FLAGS"].split() == flags
    assert environment_flags()["xla_gpu_enable_latency_hiding_scheduler"] == "true"
    assert float(os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"]) > 0.9
    assert ("JAX_SKIP_CUDA_CONSTRAINTS_CHECK" in os.environ) != has_nvidia_driver()


def test_flags_of_the_user_win(config, fresh, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_latency_hiding_scheduler=false --xla_dump_to=here")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    returned = prepare_environment(config())
    assert os.environ["XLA_FLAGS"].count("latency_hiding") == 1
    assert environment_flags()["xla_gpu_enable_latency_hiding_scheduler"] == "false"
    assert environment_flags()["xla_dump_to"] == "here"
    assert "latency_hiding" not in " ".join(returned)
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.5"


COMBINED = {f"xla_gpu_{name}_combine_threshold_bytes" for name in ("all_gather", "reduce_scatter", "all_reduce")}
COMPONENTS, COPIED = "xla_gpu_collective_permute_connected_components", "xla_gpu_collective_permute_mode"
OVERLAP = "xla_gpu_experimental_parallel_collective_overlap_limit"
REDUCTIONS = "xla_gpu_enable_pipelined_reduce_scatter"
ORDER, HOST = "CUDA_DEVICE_MAX_CONNECTIONS", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


@pytest.mark.parametrize(
    ("overrides", "added"),
    [
        ("mesh.data=2", COMBINED),
        ("mesh.expert=2 model.num_experts=2", COMBINED),
        ("mesh.expert=2 model.num_experts=2 communication.overlap_experts=true", COMBINED | {ORDER}),
        ("mesh.fsdp=-1", COMBINED | {REDUCTIONS}),
        ("mesh.context=2", COMBINED | {OVERLAP, ORDER}),
        ("mesh.tensor=2", COMBINED | {COMPONENTS, COPIED, ORDER}),
        ("mesh.pipeline=2", set()),
        ("mesh.pipeline=2 mesh.fsdp=2", COMBINED),
        ("mesh.pipeline=2 mesh.tensor=2 pipeline.virtual_stages=2", COMBINED | {COMPONENTS, ORDER}),
        ("mesh.pipeline=2 mesh.context=2", COMBINED | {COMPONENTS, OVERLAP, ORDER}),
        ("optimizer.offload=1", {HOST}),
    ],
)
def test_each_mesh_has_its_flags_and_variables(config, fresh, overrides, added):
    sizes = ("model.num_layers=4", "batch.num_microbatches=2")

    def names(*overrides):
        os.environ["XLA_FLAGS"] = ""
        return {flag.removeprefix("--").split("=")[0] for flag in prepare_environment(config(*sizes, *overrides))}

    plain = names()
    assert names(*overrides.split()) == plain | added


def test_permutations_over_tensor_travel_by_copy_engines(config, fresh):
    assert not any("permute" in flag for flag in prepare_environment(config("mesh.context=2")))
    os.environ["XLA_FLAGS"] = ""
    prepare_environment(config("mesh.tensor=2"))
    assert environment_flags()["xla_gpu_collective_permute_mode"] == "peer" and permutations_are_copied()
    assert environment_flags()["xla_gpu_collective_permute_connected_components"] == "true"
    os.environ["XLA_FLAGS"] = "--xla_gpu_collective_permute_mode=private"
    prepare_environment(config("mesh.tensor=2"))
    assert not permutations_are_copied(), "the user's flag wins"


def test_transfers_over_tensor_start_in_the_order_of_their_launch(config, fresh):
    assert not any("CONNECTIONS" in flag for flag in prepare_environment(config("mesh.data=2")))
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in prepare_environment(config("mesh.tensor=2"))
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_a_variable_of_the_user_wins(config, fresh, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    assert not any("CONNECTIONS" in flag for flag in prepare_environment(config("mesh.tensor=2")))
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"


def test_virtual_devices_have_threads_that_may_wait(config, fresh, monkeypatch):
    """A device may wait in two collectives: with a thread for each device all wait for each other."""
    monkeypatch.delenv("NPROC", raising=False)
    prepare_environment(config())
    assert "NPROC" not in os.environ
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=64"
    assert "NPROC=256" in prepare_environment(config())
    assert os.environ["NPROC"] == "256"


def test_the_flags_of_a_deterministic_run(config, fresh, monkeypatch):
    """XLA fails at a compilation if the directory of its new results is not there: `bench` makes no run directory."""
    at_exit = []
    monkeypatch.setattr(atexit, "register", lambda work, **settings: at_exit.append(partial(work, **settings)))
    assert "deterministic" not in " ".join(prepare_environment(config()))
    os.environ["XLA_FLAGS"] = ""
    prepare_environment(config("run.deterministic=true"))
    flags = environment_flags()
    assert flags["xla_gpu_exclude_nondeterministic_ops"] == "true"
    new = Path(flags["xla_gpu_dump_autotune_results_to"])
    assert new.parent.is_dir()
    new.touch()
    for work in at_exit * 2:  # XLA may have written none
        work()
    assert not new.exists()


def test_every_flag_is_one_that_xla_knows_and_a_machine_without_gpus_is_not_told_that_cuda_is_missing(config, fresh):
    """Nothing on stderr, also where jax's CUDA plugin is installed to compile for GPUs."""
    flags = prepare_environment(config("mesh.fsdp=-1", "run.deterministic=true"))
    # XLA ends the process at an unknown flag.
    code = "from megajax.runtime import accept_missing_cuda; accept_missing_cuda(); import jax; jax.devices()"
    unset = ("JAX_PLATFORMS", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment["XLA_FLAGS"] = " ".join(flags)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.smoke
def test_when_jax_has_started_on_a_gpu_a_warning_names_the_flags(config, monkeypatch):
    jax.devices()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false")
    with pytest.warns(UserWarning, match="xla_gpu_enable_latency_hiding_scheduler=true") as caught:
        assert prepare_environment(config()) == []
    assert len(caught) == 1 and "triton" not in str(caught[0].message)
    assert os.environ["XLA_FLAGS"] == "--xla_gpu_enable_triton_gemm=false"


def test_when_jax_has_started_on_a_cpu_nothing_is_said(config):
    jax.devices()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert prepare_environment(config()) == []


def test_autotuning_results_are_kept_whole_and_loaded_at_the_next_start(config, fresh, tmp_path):
    deterministic = config("run.deterministic=true")
    prepare_environment(deterministic)
    assert "xla_gpu_load_autotune_results_from" not in environment_flags()
    written = Path(environment_flags()["xla_gpu_dump_autotune_results_to"])
    kept_autotuning(deterministic).parent.mkdir(parents=True)
    written.write_text("results")  # as XLA does
    keep_autotuning(deterministic)
    written.unlink()
    os.environ["XLA_FLAGS"] = ""
    prepare_environment(deterministic)
    loaded = Path(environment_flags()["xla_gpu_load_autotune_results_from"])
    assert loaded == kept_autotuning(deterministic) and loaded.read_text() == "results"
