"""The mesh of six named axes, and the start of several processes."""

import contextlib
import functools
import ipaddress
import math
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import distributed
from jax.sharding import AxisType, Mesh
from jaxlib import _jax  # type: ignore[attr-defined]

from megajax import cluster, threads
from megajax.cluster import Processes
from megajax.config import AXES
from megajax.config.mesh_text import read_mesh
from megajax.config.sentences import counted
from megajax.console import hide_native_lines
from megajax.coordinator import through_a_relay
from megajax.errors import ConfigError, shown
from megajax.messages import SLOWEST, gather
from megajax.runtime import has_nvidia_driver

JOIN_SECONDS = 300  # all processes of a run start within this time
SILENT_SECONDS = 5.0  # of the start, before a line says what it waits for
JAX_HEARTBEAT_TIMEOUT = 600  # seconds, at least


def build_mesh(sizes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh with all six axes, slowest links first: `tensor` is innermost, and hosts follow each other.

    `sizes` are resolved (`config.checks.check_mesh`), 1 for axes that are not named; `devices` default to all devices
    of all processes. Each host's devices are neighbours, whatever the numbers of its processes, so inner axes whose
    product divides a host's devices lie inside hosts.
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    assert math.prod(shape) == len(devices), (sizes, len(devices))
    by_host = neighbours_by_host(devices, hosts_of(devices))
    return Mesh(np.array(by_host).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def neighbours_by_host(devices: Sequence[Any], hosts: Sequence[int]) -> list[Any]:
    """The devices, those of each host together; `hosts`: of each device."""
    return [devices[i] for i in sorted(range(len(devices)), key=hosts.__getitem__)]


def hosts_of(devices: Sequence[Any], names: Sequence[str] | None = None) -> list[int]:
    """The host of each device, numbered as they first occur; `names`: the host of each process of this run."""
    names = process_hosts() if names is None else names
    # In a run of one process other ones' devices are those of a topology, which has one process on a host.
    own = [names[d.process_index] if len(names) > 1 else d.process_index for d in devices]
    numbers = {host: number for number, host in enumerate(dict.fromkeys(own))}
    return [numbers[host] for host in own]


@functools.cache
def process_hosts() -> list[str]:
    """The name of each process's host. All processes must make the first call."""
    return gather("hosts", socket.gethostname(), SLOWEST)


def axes_across(sizes: Mapping[str, int], owners: Sequence[int] | np.ndarray) -> tuple[str, ...]:
    """The axes along which neighbours have different owners, such as hosts; `owners`: of each device, in mesh order."""
    grid = np.asarray(owners).reshape([sizes.get(axis, 1) for axis in AXES])
    return tuple(axis for i, axis in enumerate(AXES) if (grid != grid.take([0], i)).any())


def describe_hosts(sizes: Mapping[str, int], hosts: Sequence[int] | np.ndarray) -> list[str]:
    """Lines on the axes between and inside hosts, with a warning if `tensor` is between them; none for one host.

    `hosts`: of each device, in mesh order.
    """
    numbers, counts = np.unique(np.asarray(hosts), return_counts=True)
    if len(numbers) == 1:
        return []
    between = axes_across(sizes, hosts)
    inside = [axis for axis in AXES if sizes.get(axis, 1) > 1 and axis not in between]
    least, most = int(counts.min()), int(counts.max())
    of = counted(most, "device") if least == most else f"{least} to {most} devices"
    axes = f"between hosts: {', '.join(between)}; inside: {', '.join(inside) or '-'}"
    lines = [f"hosts      {len(numbers)} with {of} each; {axes}"]
    if "tensor" in between:
        lines.append(
            f"warning    groups of mesh.tensor={sizes['tensor']} are on several hosts, so every layer waits for the "
            f"network: choose a size that divides the {counted(least, 'device')} of a host"
        )
    return lines


def named_mesh(sizes: str, setting: str) -> Mesh:
    """The mesh of a command's option, `tensor=2,fsdp=2`, on the first devices; ConfigError names `setting`."""
    found = read_mesh(sizes, setting)
    count, devices = math.prod(found.values()), jax.devices()
    if count > len(devices):
        raise ConfigError(
            f"{setting}={sizes} needs {count} devices, more than the {len(devices)} here: make it smaller."
        )
    return build_mesh(found, devices[:count])


def mesh_sizes(mesh: Mesh) -> dict[str, int]:
    """Axis sizes by name, in axis order."""
    return dict(zip(mesh.axis_names, mesh.devices.shape, strict=True))


def within_processes(mesh: Mesh, axis: str) -> bool:
    """Whether devices that differ only along `axis` belong to one process."""
    return axis not in axes_across(mesh_sizes(mesh), [device.process_index for device in mesh.devices.flat])


def bind_address(coordinator: str) -> str | None:
    """The address on which the coordinator at HOST:PORT listens; None: jax's choice, all interfaces of the host.

    The other processes reach an IP address of this host, or localhost, on that interface only, so no other one is
    opened. A name may mean another address on other hosts.
    """
    host = coordinator.rpartition(":")[0]
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host.strip("[]"))
        with socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6) as probe:
            probe.bind((str(address), 0))
    except (OSError, ValueError):  # a name, or the address of a service in front of this host
        return None
    return coordinator


def start_processes(
    environment: Mapping[str, str] = os.environ,
    peer_timeout: float | None = None,
    silent_seconds: float = SILENT_SECONDS,
) -> None:
    """Join the other processes of this run, if there are any (`jax.distributed`).

    `peer_timeout`: seconds after which `training/watch.py` ends a process whose peer is lost; jax's own reaction, which
    is an abort, then has to come later. None: leave it to jax. After `silent_seconds` a line says what it waits for.
    `cluster.processes` says which ones. Raises ConfigError for variables that do not fit, and if a process does not
    come within JOIN_SECONDS.
    """
    found = cluster.processes(environment)
    if found is None:
        return
    try:
        with _names_what_it_waits_for(found, silent_seconds):
            if found.address is None:
                _join(peer_timeout)
            else:
                bound = found.bind or bind_address(found.address)
                _join(peer_timeout, found.address, found.count, found.index, bound=bound)
    except ConfigError:
        raise
    except (ValueError, RuntimeError) as error:
        if found.address is not None:
            cure = "give an address of process 0's host with a free port"
            raise ConfigError(f"{cluster.ADDRESS}={found.address} cannot be used ({shown(error)}): {cure}.") from None
        raise ConfigError(
            f"the environment has several processes, but jax could not join them ({shown(error)}): "
            f"start the processes with srun or mpirun, or set {', '.join(cluster.EXPLICIT)}."
        ) from None


@contextlib.contextmanager
def _names_what_it_waits_for(own: Processes, silent_seconds: float) -> Iterator[None]:
    """Around the start: jax waits for minutes without a word, also for a host that no process reaches."""
    joined = threading.Event()

    def name() -> None:
        if not joined.wait(silent_seconds):
            address = distributed.global_state.coordinator_address or own.address
            reason = _problem_of(address) if address else "its address is not known yet"
            if not joined.is_set():
                print(
                    f"megajax: process {own.index} of {own.count} waits for the others, up to {JOIN_SECONDS} s; "
                    f"the coordinator of process 0 is at {address}: {reason}",
                    file=sys.stderr,
                    flush=True,
                )

    threads.start("the line about the start", name)
    try:
        yield
    finally:
        joined.set()


def _problem_of(address: str) -> str:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
    except socket.gaierror as error:
        return f"its host has no address here ({error.strerror})"
    except OSError as error:
        return f"it does not answer ({error.strerror or error})"
    return "it answers, and waits for other processes"


def _join(peer_timeout: float | None, *arguments: Any, bound: str | None = None) -> None:
    """`jax.distributed.initialize(*arguments)`, whose coordinator listens at `bound`; ConfigError if a process does not
    come.
    """
    if os.environ.get("JAX_PLATFORMS") == "cpu" or not has_nvidia_driver():
        hide_native_lines(b"[Gloo] Rank")  # a line for each connection of CPU devices
    state = distributed.global_state
    settings: Any = {"initialization_timeout": JOIN_SECONDS + 5, "coordinator_bind_address": bound}
    relayed = contextlib.nullcontext()
    if peer_timeout is not None:
        settings["heartbeat_timeout_seconds"] = max(JAX_HEARTBEAT_TIMEOUT, 3 * int(peer_timeout))
        relayed = through_a_relay()
    try:
        with _timeouts_are_errors(), relayed:
            jax.distributed.initialize(*arguments, **settings)
    except RuntimeError:
        if state.client is None:  # before the processes tried to meet
            raise
        reason = ""
        try:
            state.client.shutdown()
        except jax.errors.JaxRuntimeError as error:
            reason = str(error)
        state.client = None  # else jax shuts it down again at exit, with a traceback
        jax.distributed.shutdown()
        missing = re.search(r"timed out task names:\s*((?:\d+\s+)+)", reason)
        who = ", ".join(sorted(missing[1].split(), key=int)) if missing else "0, or another one,"
        raise ConfigError(
            f"process {who} of {state.num_processes} did not come to {state.coordinator_address} within "
            f"{JOIN_SECONDS} s: look at its output, and at the address and port, which every host must reach."
        ) from None


@contextlib.contextmanager
def _timeouts_are_errors() -> Iterator[None]:
    """Make jax raise an error that names the missing processes; by default it aborts this process with a C++ trace.

    The coordinator knows who is missing, so its time ends before that of the processes that wait for it.
    """
    service, client = _jax.get_distributed_runtime_service, _jax.get_distributed_runtime_client
    _jax.get_distributed_runtime_service = functools.partial(service, cluster_register_timeout=JOIN_SECONDS)
    _jax.get_distributed_runtime_client = functools.partial(client, missed_heartbeat_callback=lambda *_: None)
    try:
        yield
    finally:
        _jax.get_distributed_runtime_service, _jax.get_distributed_runtime_client = service, client
