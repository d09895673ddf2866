"""Timed matmuls, collectives and files, the groups of devices that communicate, and the report on slow ones."""

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megajax import cluster
from megajax.console import aligned

if TYPE_CHECKING:
    import jax

OPERATIONS = ("all-reduce", "all-gather", "all-to-all")
CALLS, ROUNDS = 5, 3  # the best round counts: other work on the machine only makes a round slower
BLOCK = 8 * 2**20  # bytes written at a time
DISK = "disk"  # begins the kinds of samples of disks


class Sample(NamedTuple):
    """One measured rate; samples of a `kind` are equals. `where` names the device, group of devices or host."""

    kind: str
    where: str
    rate: float
    unit: str


class DeviceGroup(NamedTuple):
    """Devices that communicate, in order; `kind` names their class of links."""

    kind: str
    where: str
    devices: list[Any]


# The report


def report(samples: Sequence[Sample], threshold: float, virtual: bool = False) -> tuple[str, list[str]]:
    """(a table with a row per kind, a line for each sample below `threshold` times the median of its kind).

    `virtual` devices share the cores of their host, so they are no equals: only disks are compared then.
    """
    rows, outliers = [("", "measured", "median", "lowest", "")], []
    for kind in dict.fromkeys(sample.kind for sample in samples):
        equals = [sample for sample in samples if sample.kind == kind]
        median = statistics.median(sample.rate for sample in equals)
        lowest = min(equals, key=lambda sample: sample.rate)
        limit = 0.0 if virtual and not kind.startswith(DISK) else threshold * median
        slow = sorted((sample for sample in equals if sample.rate < limit), key=lambda sample: sample.rate)
        outliers += [
            f"{kind}, {sample.where}: {_rate(sample)} is {sample.rate / median:.0%} of the median {median:.3g}"
            for sample in slow
        ]
        note = f"{lowest.where}{'  <-- slow' if slow else ''}" if len(equals) > 1 else lowest.where
        rows.append((kind, str(len(equals)), f"{median:.3g} {lowest.unit}", _rate(lowest), note))
    return "\n".join(aligned(rows, right=(1, 2, 3))), outliers


def _rate(sample: Sample) -> str:
    return f"{sample.rate:.3g} {sample.unit}"


# Groups of devices


def groups(devices: Sequence[Any], hosts: Sequence[str], mesh: Any = None) -> list[DeviceGroup]:
    """The groups to measure, in an order that keeps no process waiting for more than one other group at a time.

    `hosts`: the host of each process; `mesh`: with it the lines of its axes too.
    """
    by_host = devices_by_host(devices, hosts)
    names, first = list(by_host), next(iter(by_host.values()))
    found = [DeviceGroup(f"within a host ({len(here)})", host, here) for host, here in by_host.items() if len(here) > 1]
    for host, here in by_host.items():
        if len(here) > 2:
            found += [
                DeviceGroup("pair within a host", f"{host} devices {i} and {i + 1}", [here[i], here[i + 1]])
                for i in _even_first(len(here) - 1)
            ]
    if len(names) > 1 and len({len(here) for here in by_host.values()}) == 1:
        found += [
            DeviceGroup(
                f"between hosts ({len(names)})", f"device {i} of each host", [here[i] for here in by_host.values()]
            )
            for i in range(len(first))
        ]
    if len(names) > 2:
        found += [
            DeviceGroup("pair of hosts", f"{names[i]} and {names[i + 1]}", by_host[names[i]] + by_host[names[i + 1]])
            for i in _even_first(len(names) - 1)
        ]
    return found + (_axis_groups(mesh) if mesh is not None else [])


def devices_by_host(devices: Sequence[Any], hosts: Sequence[str]) -> dict[str, list[Any]]:
    """The devices of each host; `hosts`: the host of each process."""
    by_host: dict[str, list[Any]] = {}
    for device in devices:
        by_host.setdefault(hosts[int(device.process_index)], []).append(device)
    return by_host


def _even_first(count: int) -> list[int]:
    """Neighbouring pairs share a device, so every other one is measured at the same time."""
    return [*range(0, count, 2), *range(1, count, 2)]


def _axis_groups(mesh: Any) -> list[DeviceGroup]:
    import numpy as np

    found = []
    for index, axis in enumerate(mesh.axis_names):
        size = mesh.devices.shape[index]
        if size > 1:
            for line in np.moveaxis(mesh.devices, index, -1).reshape(-1, size).tolist():
                found.append(DeviceGroup(f"mesh.{axis}={size}", f"devices {', '.join(str(d.id) for d in line)}", line))
    return found


# Measurements


type Timer = Callable[[Callable[[Any], Any], Any], float]


def seconds_per_call(function: Callable[[Any], Any], argument: Any) -> float:
    """The shortest of ROUNDS mean times of CALLS calls, after a first one that compiles."""
    import jax

    jax.block_until_ready(function(argument))
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(CALLS):
            result = function(argument)
        jax.block_until_ready(result)
        rounds.append((time.perf_counter() - start) / CALLS)
    return min(rounds)


def matmul_rates(host: str, size: int, seconds_per_call: Timer = seconds_per_call) -> list[Sample]:
    """The rate of a square matmul on each device of this process: BF16 on GPUs, FP32 on CPUs."""
    import jax
    import jax.numpy as jnp

    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    product = jax.jit(lambda x: x @ x)
    samples = []
    for device in jax.local_devices():
        x = jax.random.normal(jax.random.key(0), (size, size), dtype).block_until_ready()
        seconds = seconds_per_call(product, jax.device_put(x, device))
        where = f"{host} device {device.id}"
        samples.append(Sample(f"matmul {dtype.__name__} {size}", where, 2e-12 * size**3 / seconds, "TFLOP/s"))
    return samples


def collective(operation: str, devices: Sequence[Any], elements: int) -> tuple[Callable[[Any], Any], "jax.Array"]:
    """(the compiled collective over `devices`, its argument f32[devices * devices, elements // devices]).

    A device's part of the argument is [devices, elements // devices]; of the argument of all-gather, one of its rows.
    Row r holds the number r. The results have the parts of all devices side by side along the first dimension.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    n, mesh = len(devices), Mesh(np.array(devices), ("devices",))
    local = {
        "all-reduce": lambda x: lax.psum(x, "devices"),
        "all-gather": lambda x: lax.all_gather(x, "devices", tiled=True),
        "reduce-scatter": lambda x: lax.psum_scatter(x, "devices", tiled=True),
        "all-to-all": lambda x: lax.all_to_all(x, "devices", 0, 0, tiled=True),
        "permute": lambda x: lax.ppermute(x, "devices", [(i, (i + 1) % n) for i in range(n)]),
    }[operation]
    function = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("devices"), out_specs=P("devices"), check_vma=False))
    shape = (n if operation == "all-gather" else n * n, elements // n)

    @partial(jax.jit, out_shardings=NamedSharding(mesh, P("devices")))
    def rows() -> jax.Array:
        return lax.broadcasted_iota(jnp.float32, shape, 0)

    return function, rows()


def sent_bytes(operation: str, devices: int, buffer: float) -> float:
    """The bytes that a device must send: for an all-reduce 2 (n - 1) / n times its buffer, for a permutation all of it,
    else half of the first (NVIDIA's nccl-tests call it bus bandwidth).
    """
    if operation == "permute":
        return buffer
    return (2 if operation == "all-reduce" else 1) * (1 - 1 / devices) * buffer


def link_rates(
    found: Iterable[DeviceGroup], megabytes: int, seconds_per_call: Timer = seconds_per_call
) -> list[Sample]:
    """GB/s per device of the collectives of the groups that this process takes part in; the group's first one reports.

    `megabytes`: a device's buffer. The rate counts `sent_bytes`.
    """

    samples, me = [], cluster.current().rank
    for group in found:
        if all(device.process_index != me for device in group.devices):
            continue
        for operation in OPERATIONS[: 1 if group.kind.startswith("pair") else None]:
            function, argument = collective(operation, group.devices, megabytes * 2**20 // 4)
            seconds = seconds_per_call(function, argument)
            sent = sent_bytes(operation, len(group.devices), megabytes * 2**20)
            if group.devices[0].process_index == me:
                samples.append(Sample(f"{group.kind} {operation}", group.where, 1e-9 * sent / seconds, "GB/s"))
    return samples


def disk_rates(host: str, directory: Path, megabytes: int) -> list[Sample]:
    """The rates of writing a file in `directory`, on the disk at the end, and of reading it without the page cache."""
    is_new = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"preflight-{host}-{os.getpid()}.tmp"
    data, blocks = os.urandom(BLOCK), max(1, megabytes * 2**20 // BLOCK)  # compression would not help
    try:
        start = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            for _ in range(blocks):
                file.write(data)
            os.fsync(file.fileno())
        written = time.perf_counter() - start
        with path.open("rb", buffering=0) as file:
            with contextlib.suppress(AttributeError, OSError):  # not on every system
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter()
            while file.read(BLOCK):
                pass
        read = time.perf_counter() - start
    finally:
        path.unlink(missing_ok=True)
        if is_new:
            with contextlib.suppress(OSError):  # another host has its file there
                directory.rmdir()
    size = 1e-9 * BLOCK * blocks
    return [Sample(f"{DISK} write", host, size / written, "GB/s"), Sample(f"{DISK} read", host, size / read, "GB/s")]
