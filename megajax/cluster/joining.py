"""The start of a run of several processes: they join at the coordinator of process 0."""

import contextlib
import errno
import functools
import ipaddress
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import jax

from megajax import threads
from megajax.cluster import environment as env
from megajax.cluster.relay import relay
from megajax.console import hide_native_lines
from megajax.errors import ConfigError, shown
from megajax.jax_internals import distributed, native
from megajax.runtime import has_nvidia_driver

JOIN_SECONDS = 300  # all processes of a run start within this time
SILENT_SECONDS = 5.0  # of the start, before a line says what it waits for
JAX_HEARTBEAT_TIMEOUT = 600  # seconds, at least


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


def _check_port_is_free(found: env.Processes, bound: str) -> None:
    """Raise ConfigError if somebody listens where the coordinator will: gRPC would share the port, and both wait."""
    host, _, port = bound.rpartition(":")
    host = "127.0.0.1" if host == "localhost" else host.strip("[]")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an ended process do not count
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"{env.ADDRESS}={found.address} has a port that another process listens on, perhaps a second one "
                    f"with {env.INDEX}=0, or one of an earlier run: give each process its own number, end the other "
                    "one, or give a free port."
                ) from None


def start_processes(
    environment: Mapping[str, str] = os.environ,
    peer_timeout: float | None = None,
    silent_seconds: float = SILENT_SECONDS,
) -> None:
    """Join the other processes of this run, if there are any (`jax.distributed`).

    `peer_timeout`: seconds after which `training/watch.py` ends a process whose peer is lost; jax's own reaction, which
    is an abort, then has to come later. None: leave it to jax. After `silent_seconds` a line says what it waits for.
    `environment.processes` says which ones. Raises ConfigError for variables that do not fit, and if a process does not
    come within JOIN_SECONDS.
    """
    found = env.processes(environment)
    if found is None:
        return
    try:
        with _names_what_it_waits_for(found, silent_seconds):
            if found.address is None:
                _join(peer_timeout)
            else:
                bound = found.bind or bind_address(found.address)
                if found.index == 0:
                    _check_port_is_free(found, bound or f":{found.address.rpartition(':')[2]}")
                _join(peer_timeout, found.address, found.count, found.index, bound=bound)
    except ConfigError:
        raise
    except (ValueError, RuntimeError) as error:
        if found.address is not None:
            cure = "give an address of process 0's host with a free port"
            raise ConfigError(f"{env.ADDRESS}={found.address} cannot be used ({shown(error)}): {cure}.") from None
        alone = next(names[0] for names in (env.SLURM, env.OPEN_MPI) if env.whole_number(environment, names[0], 1) > 1)
        raise ConfigError(
            f"{alone}={found.count} says that there are several processes, but jax could not join them "
            f"({shown(error)}): start them with srun or mpirun, or set {', '.join(env.EXPLICIT)}; for one process, as "
            f"in the shell of an allocation, unset {alone}."
        ) from None


@contextlib.contextmanager
def _names_what_it_waits_for(given: env.Processes, silent_seconds: float) -> Iterator[None]:
    """Around the start: jax waits for minutes without a word, also for a host that no process reaches."""
    joined = threading.Event()

    def name() -> None:
        if not joined.wait(silent_seconds):
            address = distributed.global_state.coordinator_address or given.address
            reason = _problem_of(address) if address else "its address is not known yet"
            if not joined.is_set():
                print(
                    f"megajax: process {given.index} of {given.count} waits for the others, up to {JOIN_SECONDS} s; "
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
    if peer_timeout is not None:
        settings["heartbeat_timeout_seconds"] = max(JAX_HEARTBEAT_TIMEOUT, 3 * int(peer_timeout))
    try:
        with _own_makers(relayed=peer_timeout is not None):
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
        raise ConfigError(_why_not_joined(state, reason)) from None


def _why_not_joined(state: Any, reason: str) -> str:
    """A sentence on a failed start, by the coordinator's reason."""
    at, number = state.coordinator_address, f"process {state.process_id} of {state.num_processes}"
    if "newer incarnation" in reason:
        return (
            f"{number} is not the only one with this number at {at}: give each process its own {env.INDEX}, or start "
            "them with srun or mpirun, and end those of an earlier start."
        )
    if "Unexpected task" in reason:
        cure = f"give all processes the same {env.COUNT}"
        return f"{number} is not one of those that process 0 at {at} waits for: {cure}."
    missing = re.search(r"timed out task names:\s*((?:\d+\s+)+)", reason)
    who = ", ".join(sorted(missing[1].split(), key=int)) if missing else "0, or another one,"
    return (
        f"process {who} of {state.num_processes} did not come to {at} within {JOIN_SECONDS} s: look at its output, and "
        "at the address and port, which every host must reach."
    )


@contextlib.contextmanager
def _own_makers(relayed: bool) -> Iterator[None]:
    """Within it jax makes the coordinator's service and client with what `initialize` has no option for.

    Jax raises an error that names the missing processes; by default it aborts this process with a C++ trace. The
    coordinator knows who is missing, so its time ends before that of the processes that wait for it.

    relayed: processes other than 0 reach the coordinator through a relay. With jax's mutual TLS the client connects
    directly, because it compares the certificate with the address.
    """
    make_service, make_client = native.get_distributed_runtime_service, native.get_distributed_runtime_client

    def client(address: str, process: int, **options: Any) -> Any:
        tls = any(value for name, value in options.items() if name.startswith("mtls_"))
        through = relay(address) if relayed and process > 0 and not tls else address
        return make_client(through, process, missed_heartbeat_callback=lambda *_: None, **options)

    service = functools.partial(make_service, cluster_register_timeout=JOIN_SECONDS)
    makers = {"get_distributed_runtime_service": service, "get_distributed_runtime_client": client}
    with mock.patch.multiple(native, **makers):
        yield
