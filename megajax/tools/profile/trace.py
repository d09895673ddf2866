"""Reads the trace that a run or `megajax profile` has written: kernels by device, and the compiled module.

A GPU's kernels are the events of its streams in the profiler's XSpace. A virtual CPU device's are the operations that
XLA's threads ran for it.
"""

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

import jax
from pydantic import Field

from megajax import json_files
from megajax.config import Config, load_config
from megajax.errors import InputError, file_reader, reading
from megajax.files import CONFIG, read_gzip
from megajax.tools.profile import hlo
from megajax.training.profiling import FACTS, FOLDER, MODULE

CURE = "set logging.profile_start in the run, or give a config: megajax profile CONFIG --save FOLDER"


@dataclass(frozen=True)
class Kernel:
    """What one device ran; times in ms."""

    device: str
    name: str
    op: str  # the operation that launched it; empty if the trace does not name it
    module: str  # that operation's module; empty likewise
    start: float
    end: float
    launched: float | None = None  # when the host had launched it, if the trace has that


@dataclass(frozen=True)
class Trace:
    """Some steps of a run."""

    config: Config
    kernels: dict[str, list[Kernel]]  # by device, in order of their start
    module: str
    ops: dict[str, hlo.Op]  # of the module, by the names that kernels have
    steps: int
    devices: int  # of the mesh
    device_kind: str


class TraceFacts(TypedDict):
    """The content of `trace.json`; the other facts are not needed here."""

    steps: Annotated[int, Field(ge=1, lt=2**31)]
    devices: Annotated[int, Field(ge=1, lt=2**31)]
    device_kind: str


@file_reader("folder", cure=CURE)
def read(folder: Path) -> Trace:
    """The newest trace in a run directory. Raises InputError if there is none."""
    traces, facts = newest(folder / FOLDER), folder / FOLDER / FACTS
    for file in (facts, folder / FOLDER / MODULE, folder / CONFIG):
        if not file.is_file():
            raise InputError(f"{file} is missing, which megajax writes with a trace: {CURE}.")
    kernels = read_files(traces, folder / FOLDER)
    if not kernels:
        raise InputError(f"{folder / FOLDER} has no operation of a device: {CURE}.")
    known = json_files.read(facts, TraceFacts, CURE)
    with reading(folder / FOLDER / MODULE, CURE):
        text = read_gzip(folder / FOLDER / MODULE).decode()
        ops = named(hlo.parse(text))
    with warnings.catch_warnings(action="ignore"):  # the run has printed them
        config = load_config(folder / CONFIG, run_dir=folder)
    found = re.match(r"HloModule ([\w.-]+)", text)
    return Trace(config, by_device(kernels), found[1] if found else "", ops, **known)


def named(ops: Iterable[hlo.Op]) -> dict[str, hlo.Op]:
    """Operations by the names that traces have for them."""
    return {name: op for op in ops for name in (op.name, op.inner) if name}


def read_files(traces: Sequence[Path], folder: Path) -> list[Kernel]:
    """The kernels of a folder's traces, one of each host. Raises InputError if there is none, or one is damaged."""
    if not traces:
        raise InputError(f"{folder} has no trace (no *.xplane.pb): {CURE}.")
    kernels: list[Kernel] = []
    for file in traces:
        try:
            data = jax.profiler.ProfileData.from_file(str(file))
            kernels += read_kernels(data, f"{file.name.removesuffix('.xplane.pb')} " if len(traces) > 1 else "")
        except (RuntimeError, ValueError, OSError) as error:
            raise InputError(f"{file} is no trace of jax.profiler ({error}): {CURE}.") from None
    return kernels


def newest(folder: Path) -> list[Path]:
    """The newest file of each host."""
    by_host = {path.name: path for path in sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)}
    return sorted(by_host.values())


def by_device(kernels: Iterable[Kernel]) -> dict[str, list[Kernel]]:
    """Each device's kernels in order of their start, devices by number."""
    found: dict[str, list[Kernel]] = {}
    for kernel in sorted(kernels, key=lambda kernel: (kernel.start, -kernel.end)):
        found.setdefault(kernel.device, []).append(kernel)
    return dict(sorted(found.items(), key=lambda item: (len(item[0]), item[0])))


def read_kernels(data: Any, host: str = "") -> list[Kernel]:
    """The kernels of a host's devices, from its `jax.profiler.ProfileData`; `host` precedes their names."""
    planes = {plane.name: plane for plane in data.planes}
    gpus = {name: found[1] for name in planes if (found := re.fullmatch(r"/device:GPU:(\d+)", name))}
    events = [
        _Event(event) for name in planes if name not in gpus for line in planes[name].lines for event in line.events
    ]
    if not gpus:
        return list(_of_cpus(events, host))
    launches = _launches(events)
    kernels = []
    for name, number in gpus.items():
        # The other lines of a GPU repeat its streams, grouped by operation, module and step.
        for line in planes[name].lines:
            if line.name.startswith("Stream"):
                kernels += [_Event(event).kernel(f"{host}GPU {number}", launches) for event in line.events]
    return kernels


class _Event:
    """An event of an XSpace, with times in ms."""

    def __init__(self, event: Any):
        with warnings.catch_warnings(action="ignore"):  # of jax's own type
            self.stats: Mapping[str, Any] = dict(event.stats)
        self.name, self.start = event.name, event.start_ns / 1e6
        self.end = self.start + event.duration_ns / 1e6

    def kernel(self, device: str, launches: Mapping[int, float], by: str = "correlation_id") -> Kernel:
        op, module = str(self.stats.get("hlo_op", "")), str(self.stats.get("hlo_module", ""))
        return Kernel(device, self.name, op, module, self.start, self.end, launches.get(self.stats.get(by, -1)))


def _launches(events: Iterable[_Event]) -> dict[int, float]:
    """The ends of CUDA's calls by the number that they share with the kernels that they launched."""
    return {event.stats["correlation_id"]: event.end for event in events if "correlation_id" in event.stats}


def _of_cpus(events: list[_Event], host: str) -> Iterator[Kernel]:
    starts: dict[int, float] = {}  # of the host's calls that run a program
    for event in events:
        if "run_id" in event.stats and "hlo_op" not in event.stats:
            starts[event.stats["run_id"]] = min(event.start, starts.get(event.stats["run_id"], event.start))
    for event in events:
        if "hlo_op" in event.stats and "device_ordinal" in event.stats:
            yield event.kernel(f"{host}CPU {event.stats['device_ordinal']}", starts, "run_id")
