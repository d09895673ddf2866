"""A config's train step compiled for GPUs on a machine without one: its text, its memory, and XLA's compile time.

XLA's GPU compiler needs no GPU, only a description of one (`targets`) and jax's CUDA plugin.
"""

import gzip
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypedDict
from unittest import mock

import jax
from jax.experimental import topologies

from megajax.config import Config
from megajax.config.checks import check_mesh
from megajax.errors import InputError, reading
from megajax.files import read_gzip
from megajax.json_files import parse
from megajax.kernel_choice import HOPPER
from megajax.mesh import build_mesh
from megajax.runtime import memory_of, prepare_environment
from megajax.tools.plan.rates import hosts_of, rates_of
from megajax.tools.plan.targets import target
from megajax.training.step import TrainProgram

CUDNN_VERSION = 91900  # 9.19, the version that the step is compiled for
JLA_KERNELS = ("scalar_gate", "scalar_gate_kb", "vector_gate_ops")  # modules that ask whether the GPU is a Hopper
HOST_MEMORY = "pinned_host"
NO_PLUGIN = (
    "compiling for GPUs needs jax's CUDA plugin, which is not installed: "
    "pip install --editable '.[dev]' --constraint constraints.txt"
)


@dataclass(frozen=True)
class CompiledStep:
    """A train step compiled for GPUs, and the seconds that each part of compiling took.

    text: the compiled module in XLA's text form. memory: bytes per device by part, as `memory_of` gives them.
    """

    program: TrainProgram
    text: str
    memory: dict[str, int]
    trace_seconds: float
    lower_seconds: float
    compile_seconds: float

    @property
    def seconds(self) -> float:
        """The seconds of all parts."""
        return self.trace_seconds + self.lower_seconds + self.compile_seconds


def compile_for_gpus(config: Config, gpus: int, store: Path | None = None, device: str = "h200") -> CompiledStep:
    """The compiled train step of a config, for a mesh of `gpus` of this device, which need not exist.

    Call it once per process, before jax starts: XLA reads its flags once, and they depend on the config. jax itself
    runs on the CPU. More than 8 GPUs form hosts of 8. `store` is a directory of results: a program that was compiled
    with it before, by the same XLA with the same flags, is not compiled again.

    Raises InputError if jax's CUDA plugin is not installed or `gpus` is not a whole number of hosts, ConfigError if the
    config does not fit that number.
    """
    require_plugin()
    hosts_of(gpus)  # raises before any setting is changed
    sizes = check_mesh(config, gpus)
    jax.config.update("jax_platforms", "cpu")  # for computations here; the compiler is the GPU's
    prepare_environment(config)
    with no_gpu_needed(device):
        program = TrainProgram.build(config, build_mesh(sizes, described_devices(gpus, device)))
        start = time.perf_counter()
        state = program.without_files(program.abstract_state)
        traced = program.step_program.trace(state, program.abstract_batch)
        traced_at = time.perf_counter()
        lowered = traced.lower()
        _place_on_host(lowered, [array.on_host for array in jax.tree.leaves(program.without_files(program.stored))])
        lowered_at = time.perf_counter()
        text, memory = compiled(lowered, store, device=device)
        end = time.perf_counter()
    return CompiledStep(program, text, memory, traced_at - start, lowered_at - traced_at, end - lowered_at)


def _place_on_host(lowered: jax.stages.Lowered, on_host: list[bool]) -> None:
    """Say in a lowered step which leaves of its state are in the host's memory.

    Shardings over devices that do not exist have no kind of memory.
    """
    if not any(on_host):
        return
    from megajax.jax_internals import ir

    module: Any = lowered.compiler_ir()
    main = ir.SymbolTable(module.operation)["main"]
    with module.context:
        for attributes in ("arg_attrs", "res_attrs"):
            dicts = [{a.name: a.attr for a in ir.DictAttr(each)} for each in ir.ArrayAttr(main.attributes[attributes])]
            for each, moves in zip(dicts, on_host, strict=False):  # the state comes first
                if moves:
                    each["mhlo.memory_kind"] = ir.StringAttr.get(HOST_MEMORY)
            main.attributes[attributes] = ir.ArrayAttr.get([ir.DictAttr.get(each) for each in dicts])


class StoredProgram(TypedDict):
    """A stored program."""

    text: str
    memory: dict[str, int]


def compiled(
    lowered: jax.stages.Lowered,
    store: Path | None,
    options: Mapping[str, str] | None = None,
    device: str = "h200",
) -> tuple[str, dict[str, int]]:
    """The text and memory of a program lowered for GPUs and compiled with XLA's `options`; from `store` if there.

    To be used inside `no_gpu_needed`. jax's own cache leaves out programs of devices that do not exist.
    """
    path = None
    if store is not None:
        compilers = [f"{each.name} {each.version}" for each in distributions() if each.name.startswith("jax")]
        names = set(re.findall(r'"([^"]+)"\(#loc', lowered.as_text(debug_info=True)))  # of scopes, not of source files
        flags = [os.environ.get("XLA_FLAGS", ""), jax.config.read("jax_disable_most_optimizations"), options]
        decides = [lowered.as_text(), sorted(names), sorted(compilers), flags, target(device)]
        path = store / f"{hashlib.sha256(json.dumps(decides).encode()).hexdigest()}.json.gz"
        if path.is_file():
            cure = "remove it, and the program is compiled again"
            with reading(path, cure):
                found = parse(read_gzip(path), str(path), StoredProgram, cure)
            return found["text"], found["memory"]
    executable = lowered.compile({**options} if options else None)
    text, memory = executable.as_text(), memory_of(executable)
    assert text is not None
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_bytes(gzip.compress(json.dumps({"text": text, "memory": memory}).encode(), 1))
        partial.rename(path)
    return text, memory


def described_devices(gpus: int, device: str = "h200") -> list[Any]:
    """jax devices that represent GPUs in a mesh and run nothing; compile for them inside `no_gpu_needed`.

    Raises InputError if jax's CUDA plugin is not installed or `gpus` is not a whole number of hosts.
    """
    require_plugin()
    hosts, gpus_of_host = hosts_of(gpus)
    with no_gpu_needed(device):
        return topologies.get_topology_desc(
            platform="cuda",
            target_config=target(device),
            topology=f"1x{hosts}x{gpus_of_host}",  # slices, hosts, GPUs
        ).devices


@contextmanager
def no_gpu_needed(device: str = "h200") -> Iterator[None]:
    """Patches functions of jax (issue 23971), and of jax-linear-attention, that need a running GPU without reason."""
    own = rates_of(device).hardware
    from megajax.jax_internals import fused_attention_stablehlo, pxla, xla_bridge

    with (
        ExitStack() as of_jla,
        # Else transfers between memories are dropped from a program whose arguments are all on the device.
        mock.patch.object(pxla, "are_all_shardings_default_mem_kind", lambda _: False),
        mock.patch.object(xla_bridge, "canonicalize_platform", lambda platform: platform),
        mock.patch.object(fused_attention_stablehlo, "check_cudnn_version", lambda: CUDNN_VERSION),
        mock.patch.object(
            fused_attention_stablehlo,
            "check_compute_capability",
            lambda least: float(least) <= float(own.capability or 0),
        ),
    ):
        for name in JLA_KERNELS if find_spec("jla") else ():
            of_jla.enter_context(
                mock.patch(f"jla.ops.mosaic_gpu.{name}.is_hopper", lambda: own.capability == HOPPER.capability)
            )
        yield


def require_plugin() -> None:
    """Raises InputError if jax's CUDA plugin, of CUDA 12 or 13, is not installed."""
    if not any(find_spec("jax_plugins") and find_spec(f"jax_plugins.xla_cuda{version}") for version in (12, 13)):
        raise InputError(NO_PLUGIN)
