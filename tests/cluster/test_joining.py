"""The start of a run of several processes: what jax is told, and what a start that waits says."""

import re
import socket
import threading
import time

import jax
import pytest

from megajax.cluster import joining
from megajax.cluster.joining import JOIN_SECONDS, start_processes
from megajax.errors import ConfigError
from megajax.jax_internals import distributed, native


@pytest.fixture
def initialized(monkeypatch):
    """The calls of jax.distributed.initialize, which is replaced and does nothing."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **kwargs: calls.append((args, kwargs)))
    return calls


SETTINGS = {"initialization_timeout": JOIN_SECONDS + 5, "coordinator_bind_address": None}
EXPLICIT = {"JAX_COORDINATOR_ADDRESS": "host:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}


@pytest.mark.parametrize("extra", [{}, {"SLURM_NTASKS": "9"}, {"OMPI_COMM_WORLD_SIZE": "9"}], ids=str)
def test_explicit_variables_name_the_coordinator_and_win(initialized, extra):
    before = threading.enumerate()
    start_processes({**extra, **EXPLICIT})
    assert initialized == [(("host:1234", 4, 3), SETTINGS)]
    for thread in {*threading.enumerate()}.difference(before):
        if thread.name == "the line about the start":  # a start that has ended needs none
            thread.join(5)
            assert not thread.is_alive()


def ipv6_loopback() -> str:
    """The host of an address; many containers have no IPv6: 127.0.0.1 there."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return "127.0.0.1"
    return "[::1]"


IPV6 = ipv6_loopback()


def listen(host: str) -> socket.socket:
    return socket.create_server((host.strip("[]"), 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


@pytest.mark.parametrize(
    "address, more, bound",
    [
        ("localhost:1234", {}, "localhost:1234"),
        ("127.0.0.1:1234", {}, "127.0.0.1:1234"),
        (f"{IPV6}:1234", {}, f"{IPV6}:1234"),
        ("192.0.2.1:1234", {}, None),  # no address of this host: a service in front of it
        ("127.0.0.1:1234", {"JAX_COORDINATOR_BIND_ADDRESS": "0.0.0.0:9"}, "0.0.0.0:9"),
    ],
)
def test_the_coordinator_listens_on_its_own_address_only(initialized, address, more, bound):
    start_processes(EXPLICIT | {"JAX_COORDINATOR_ADDRESS": address} | more)
    assert initialized == [((address, 4, 3), SETTINGS | {"coordinator_bind_address": bound})]


@pytest.mark.parametrize("environment", [{"SLURM_NTASKS": "2"}, {"OMPI_COMM_WORLD_SIZE": "2"}], ids=str)
def test_slurm_and_open_mpi_are_left_to_jax(initialized, environment):
    start_processes(environment)
    assert initialized == [((), SETTINGS)]


@pytest.mark.parametrize("name", ["SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"])
def test_the_shell_of_an_allocation_is_told_how_to_be_one_process(monkeypatch, name):
    def initialize(*_: object, **__: object) -> None:
        raise ValueError("coordinator_address should be defined.")  # jax finds no step of srun

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(ConfigError, match=f"^{name}=8 says .* srun .*; for one process, .* unset {name}"):
        start_processes({name: "8"})


@pytest.mark.parametrize(
    "environment", [{}, {"SLURM_NTASKS": "1"}, {"OMPI_COMM_WORLD_SIZE": "1"}, {"SLURM_JOB_ID": "7"}], ids=str
)
def test_a_single_process_starts_nothing(initialized, environment):
    start_processes(environment)
    assert not initialized


@pytest.mark.parametrize("value", ["two", "2(x3)", "-1", "99999999999", "9" * 5000])
@pytest.mark.parametrize("name", ["SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"])
def test_a_variable_of_a_cluster_that_is_no_number_is_named(initialized, name, value):
    with pytest.raises(ConfigError, match=f"{name}={re.escape(value[:100])}.* is not a whole number") as error:
        start_processes({name: value})
    assert len(str(error.value)) < 400 and not initialized


@pytest.mark.parametrize("missing", EXPLICIT)
def test_explicit_variables_come_together(initialized, missing):
    with pytest.raises(ConfigError, match=f"not {missing}: set all three") as error:
        start_processes({name: value for name, value in EXPLICIT.items() if name != missing})
    assert all(name in str(error.value) for name in EXPLICIT)
    assert not initialized


@pytest.mark.parametrize(
    "wrong",
    [
        *({"JAX_PROCESS_ID": "4"}, {"JAX_PROCESS_ID": "-1"}, {"JAX_NUM_PROCESSES": "four"}),
        *({"JAX_NUM_PROCESSES": "٤"}, {"JAX_PROCESS_ID": "²"}),  # digits of which int() reads some
        *({"JAX_COORDINATOR_ADDRESS": address} for address in ("host", "host:port", "host:99999", "host:0")),
    ],
    ids=str,
)
def test_a_process_number_counts_up_to_their_number(initialized, wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigError, match=f"{name}={value}"):
        start_processes(EXPLICIT | wrong)
    assert not initialized


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", IPV6])
def test_a_port_that_another_process_zero_listens_on_is_refused(initialized, host):
    """gRPC would share it, and both would wait for the others."""
    with listen("127.0.0.1" if host == "localhost" else host) as listener:
        given = EXPLICIT | {"JAX_COORDINATOR_ADDRESS": f"{host}:{listener.getsockname()[1]}"}
        start_processes(given)
        with pytest.raises(ConfigError, match=rf"JAX_COORDINATOR_ADDRESS={re.escape(host)}:.* JAX_PROCESS_ID=0"):
            start_processes(given | {"JAX_PROCESS_ID": "0"})
        client = socket.create_connection(listener.getsockname()[:2])
        listener.accept()[0].close()  # the side that closes first keeps the port for a minute
        client.close()
    start_processes(given | {"JAX_PROCESS_ID": "0"})
    assert len(initialized) == 2


@pytest.mark.parametrize(
    ("reason", "variable"),
    [
        ("ALREADY_EXISTS: Aborted connect attempt as there is a request from a newer incarnation.", "JAX_PROCESS_ID"),
        ("INVALID_ARGUMENT: Unexpected task registered with task=3", "JAX_NUM_PROCESSES"),
    ],
)
def test_a_process_that_the_coordinator_turns_away_is_told_which_variable_is_wrong(monkeypatch, reason, variable):
    """jax's error is std::bad_cast; the coordinator's reason comes with the end of its client."""

    class Client:
        def shutdown(self):
            raise jax.errors.JaxRuntimeError(reason)

    def initialize(*_: object, **__: object) -> None:
        state.client, state.process_id, state.num_processes, state.coordinator_address = Client(), 3, 4, "host:1234"
        raise RuntimeError("std::bad_cast")

    state = distributed.global_state
    for name in ("client", "process_id", "num_processes", "coordinator_address"):
        monkeypatch.setattr(state, name, None)
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(jax.distributed, "shutdown", lambda: None)
    with pytest.raises(ConfigError, match=f"process 3 of 4 .*host:1234.*{variable}"):
        start_processes(EXPLICIT)


@pytest.fixture
def slow_start(monkeypatch):
    """A start that waits for half a second."""
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: time.sleep(0.5))


@pytest.mark.parametrize(
    ("host", "listens", "reason"),
    [(IPV6, True, "it answers"), ("127.0.0.1", False, "it does not answer (Connection refused)")],
)
def test_a_start_that_waits_says_for_what(slow_start, capsys, host, listens, reason):
    with listen(host) as listener:
        address = f"{host}:{listener.getsockname()[1]}"
        if not listens:
            listener.close()
        start_processes(EXPLICIT | {"JAX_COORDINATOR_ADDRESS": address}, silent_seconds=0.05)
    (line,) = capsys.readouterr().err.splitlines()
    assert "process 3 of 4 waits" in line and f"at {address}: {reason}" in line


@pytest.mark.parametrize(
    ("process", "options", "target"),
    [
        (0, {}, "host:1"),
        (1, {"init_timeout": 5}, "relayed"),
        (1, {"mtls_key": ""}, "relayed"),
        (2, {"mtls_key": "k"}, "host:1"),
    ],
)
def test_other_processes_reach_the_coordinator_through_a_relay_without_tls(monkeypatch, process, options, target):
    found = []
    monkeypatch.setattr(native, "get_distributed_runtime_client", lambda *own, **more: found.append((own, more)))
    monkeypatch.setattr(joining, "relay", lambda address: "relayed")
    initialize = lambda *_, **__: native.get_distributed_runtime_client("host:1", process, **options)  # noqa: E731
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    start_processes(EXPLICIT, peer_timeout=60)
    [((address, number), more)] = found
    assert (address, number) == (target, process) and options.items() <= more.items()
    more["missed_heartbeat_callback"]("a process is lost")  # by default it ends this process
