"""Compiling for GPUs that are not here: they are whole hosts, mistakes are sentences, and the parts of the memory.

A compiled step's memory, worked by hand: tests/parallel/test_pipeline_memory.py.
"""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from megajax.errors import InputError
from megajax.ops.grouped_matmul_triton import chosen_tiling, shared_memory
from megajax.tools.compile import _kinds, figures, main, verdict
from megajax.tools.plan import compile, targets
from megajax.tools.plan.rates import DEVICES
from megajax.tools.profile import hlo


def test_gpus_to_compile_for_are_whole_hosts():
    assert [compile.hosts_of(n) for n in (1, 4, 8, 16, 512)] == [(1, 1), (1, 4), (1, 8), (2, 8), (64, 8)]
    with pytest.raises(InputError, match="--gpus=12 is not a whole number of hosts of 8: use 8 or 16."):
        compile.hosts_of(12)
    with pytest.raises(InputError, match="--gpus=0 is below 1."):
        compile.hosts_of(0)


def test_without_the_cuda_plugin_a_sentence_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(compile, "find_spec", lambda name: None if name.startswith("jax_plugins.") else name)
    with pytest.raises(InputError, match=r"needs jax's CUDA plugin, which is not installed: pip install"):
        compile.require_plugin()
    with pytest.raises(InputError, match=r"needs jax's CUDA plugin"):
        compile.described_devices(1)


def test_a_run_takes_as_much_memory_as_the_description_of_an_h200_allows():
    assert targets.usable_bytes("h200") == 0.92 * 150_109_880_320


def test_an_output_in_a_donated_buffer_counts_once():
    sizes = {"argument_size_in_bytes": 100, "output_size_in_bytes": 90, "alias_size_in_bytes": 80}
    plan = SimpleNamespace(**sizes, temp_size_in_bytes=7)
    executable: Any = SimpleNamespace(memory_analysis=lambda: plan)
    assert compile.memory_of(executable) == {"argument": 100, "other output": 10, "temporary": 7, "whole": 117}


def test_a_stored_program_is_not_compiled_again(tmp_path):
    """The same program; another one, other flags or options of XLA, or another device have entries of their own."""
    compiled = []

    def lowered(text) -> Any:
        sizes = dict.fromkeys(["argument_size_in_bytes", "output_size_in_bytes", "alias_size_in_bytes"], 1)
        plan = SimpleNamespace(**sizes, temp_size_in_bytes=7)
        executable = SimpleNamespace(memory_analysis=lambda: plan, as_text=lambda: f"{text} compiled")

        def made(options) -> Any:
            compiled.append((text, options))
            return executable

        return SimpleNamespace(as_text=lambda **_: text, compile=made)

    for text in ("one", "two", "one"):
        found = compile.compiled(lowered(text), tmp_path / "store")
        assert found == (f"{text} compiled", {"argument": 1, "other output": 0, "temporary": 7, "whole": 8})
    assert compiled == [("one", None), ("two", None)]
    compile.compiled(lowered("one"), tmp_path / "store", {"xla_option": "1"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_other")
        compile.compiled(lowered("one"), tmp_path / "store")
    compile.compiled(lowered("one"), tmp_path / "store", device="b200")
    assert compiled[2:] == [("one", {"xla_option": "1"}), ("one", None), ("one", None)]
    assert len(list((tmp_path / "store").iterdir())) == 5


CHIP = ("core_count", "fpus_per_core", "threads_per_core_limit", "shared_memory_per_core", "l2_cache_size")
OF_CHIPS = {  # of XLA's own descriptions (xla/backends/gpu/target_config/specs), an L40S's of its data sheet
    "h100": (132, 128, 2048, 233472, 52428800),
    "a100": (108, 64, 2048, 167936, 41943040),
    "l40s": (142, 128, 1536, 102400, 96 * 2**20),
    "b200": (148, 128, 2048, 233472, 132644864),
}


def test_the_description_of_another_device_has_the_figures_of_its_chip():
    """Shared memory, in KiB: what a block can have, and with what is reserved for the system, of its data sheet."""
    h200 = targets.target("h200")
    for device, number, memory, shared in (
        ("h100", "9.0", 72.8, 227),
        ("a100", "8.0", 73.6, 163),
        ("l40s", "8.9", 41.4, 99),
        ("b200", "10.0", 164.0, 227),
    ):
        text = targets.target(device)
        found = dict(re.findall(r"(\w+): (\S+)", text))
        version = re.search(r"cuda_compute_capability \{\s*major: (\d+)\s*minor: (\d+)", text)
        assert version and DEVICES[device].capability == number == ".".join(version.groups())
        assert int(found["shared_memory_per_block_optin"]) == shared * 1024
        assert {key: int(found[key]) for key in CHIP} == dict(zip(CHIP, OF_CHIPS[device], strict=True))
        assert f'"NVIDIA {"L40" if device == "l40s" else device.upper()}"' in text
        assert targets.usable_bytes(device) / 2**30 == pytest.approx(memory)
        assert ("ACCELERATED_FEATURES" in text) == (number in ("9.0", "10.0"))
        assert "H200" not in text and found.keys() - {"minor"} <= dict(re.findall(r"(\w+): (\S+)", h200)).keys()
    a100, full = (dict(re.findall(r"(\w+): (\S+)", text)) for text in (targets.target("a100"), h200))
    assert int(a100["memory_bandwidth"]) / int(full["memory_bandwidth"]) == pytest.approx(2.039 / 4.8)


def test_every_device_with_rates_can_be_compiled_for():
    assert {"H200", *targets.CHIPS} == {rates.name for rates in DEVICES.values()}  # whose description is a file


def test_kernels_are_traced_for_the_shared_memory_of_a_gpu_that_does_not_exist():
    """The largest tile of experts that fits, of 16-bit numbers: 192, 144 and 96 KiB in flight."""
    for device, kib, stages in (("h200", 227, 4), ("a100", 163, 3), ("l40s", 99, 3)):
        mesh = jax.sharding.Mesh(np.array(compile.described_devices(1, device)), ("data",))
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            assert shared_memory() == kib * 1024
            assert chosen_tiling().stages == stages and chosen_tiling().shared_memory <= kib * 1024


def test_transfers_between_memories_stay_in_a_program_for_gpus_that_are_not_here():
    mesh = jax.sharding.Mesh(np.array(compile.described_devices(1)), ("data",))
    on_device = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def there_and_back(x: jax.Array) -> jax.Array:
        return jax.device_put(jax.device_put(2 * x, jax.memory.Space.Host), jax.memory.Space.Device) + 1

    program = jax.jit(there_and_back, in_shardings=on_device, out_shardings=on_device)
    with compile.no_gpu_needed():
        text = program.lower(jax.ShapeDtypeStruct((8,), "float32")).as_text()
    assert text.count("annotate_device_placement") == 2


def test_with_all_its_options_the_command_reads_the_config(tmp_path, capsys):
    options = ["--gpus", "1", "--device", "h100", "--text", str(tmp_path / "step.txt"), "--json"]
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path / "none.yaml"), *options])
    assert stopped.value.code == 2 and "none.yaml does not exist" in capsys.readouterr().err


def test_the_bytes_of_a_collective_are_those_of_the_whole_array():
    whole, part = (hlo.Array("f32", (rows, 256)) for rows in (1024, 256))
    for kind, operand, result in (
        ("reduce-scatter", whole, part),
        ("all-gather", part, whole),
        ("all-reduce", whole, whole),
    ):
        op = hlo.Op(kind, kind, (result,), (operand,), "", 0, frozenset(), 0)
        assert list(_kinds(op)) == [(kind, 2**20)]


def test_the_figures_of_a_compiled_step_are_its_own():
    segments = [
        SimpleNamespace(iterations=3, layers_per_iteration=2),
        SimpleNamespace(iterations=1, layers_per_iteration=1),
    ]
    graph = SimpleNamespace(layers=SimpleNamespace(segments=segments))
    program: Any = SimpleNamespace(graph=graph)
    step = compile.CompiledStep(program, "", {"whole": 7}, trace_seconds=1.0, lower_seconds=2.0, compile_seconds=4.0)
    assert step.seconds == 7.0
    found = figures(step)
    [kib] = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found.pop("compiler_memory") == pytest.approx(int(kib) * 1024, rel=0.01)
    seconds = {"lower_seconds": 3.0, "xla_seconds": 4.0}
    assert found == seconds | {"segments": [(3, 2), (1, 1)], "device_memory": {"whole": 7}}
    usable = 0.92 * 150_109_880_320
    assert verdict(int(usable), "h200") == "it fits: 128.6 GiB of the 128.6 GiB of an H200 that a run can use"
    assert verdict(int(usable) + 1, "h200").startswith("it does not fit: it needs 128.6 GiB of")
