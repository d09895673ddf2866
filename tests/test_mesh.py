"""The mesh: axes, device order, and joining the other processes of a run."""

import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from megajax.errors import ConfigError
from megajax.mesh import (
    AXES,
    JOIN_SECONDS,
    axes_across,
    build_mesh,
    describe_hosts,
    hosts_of,
    mesh_sizes,
    neighbours_by_host,
    start_processes,
    within_processes,
)
from megajax.schema.fields import BATCH_AXES

ONE = dict.fromkeys(AXES, 1)


def test_axes_go_from_the_slowest_links_to_the_fastest():
    assert AXES == ("pipeline", "data", "fsdp", "expert", "context", "tensor")
    assert BATCH_AXES == ("data", "fsdp", "expert")


@pytest.mark.smoke
def test_neighbouring_devices_are_neighbours_on_tensor_first():
    mesh = build_mesh({**ONE, "data": 2, "fsdp": 2, "tensor": 2})
    ids = np.vectorize(lambda device: device.id)(mesh.devices)
    expected = np.array([device.id for device in jax.devices()]).reshape(1, 2, 2, 1, 1, 2)
    assert np.array_equal(ids, expected)
    assert ids[0, 1, 0, 0, 0].tolist() == [jax.devices()[4].id, jax.devices()[5].id]


def test_a_mesh_has_all_six_axes_whatever_their_sizes():
    mesh = build_mesh(ONE, jax.devices()[3:4])
    assert mesh.axis_names == AXES
    assert mesh_sizes(mesh) == ONE
    assert mesh.devices.flat[0] == jax.devices()[3]


def test_sizes_read_back_in_the_order_of_the_axes_however_they_were_given():
    sizes = {**ONE, "expert": 2, "context": 4}
    mesh = build_mesh(dict(reversed(sizes.items())))
    assert list(mesh_sizes(mesh).items()) == list(sizes.items())


@pytest.mark.parametrize("of_process", [1, 2, 8], ids="{} devices a process".format)
@pytest.mark.parametrize("hosts", ["host by host", "in turn"])
def test_inner_axes_lie_inside_a_host_however_processes_are_numbered(hosts, of_process):
    """Two hosts of eight devices. Slurm's --distribution=cyclic and mpirun --map-by node number processes in turn."""
    count = 16 // of_process
    names = [f"host {p % 2 if hosts == 'in turn' else p * of_process // 8}" for p in range(count)]
    devices = [SimpleNamespace(id=i, process_index=i // of_process) for i in range(16)]
    sizes: dict[str, int] = {**ONE, "data": 2, "expert": 2, "context": 2, "tensor": 2}
    grid = np.array(neighbours_by_host(devices, hosts_of(devices, names))).reshape([sizes[axis] for axis in AXES])
    assert all(len({names[d.process_index] for d in host.flat}) == 1 for host in (grid[:, 0], grid[:, 1]))
    placed = hosts_of(list(grid.flat), names)
    assert axes_across(sizes, placed) == ("data",)
    assert describe_hosts(sizes, placed) == [
        "hosts      2 with 8 devices each; between hosts: data; inside: expert, context, tensor"
    ]
    assert sorted(d.id for d in grid.flat) == list(range(16))


def test_tensor_between_hosts_is_named_with_a_warning():
    hosts = [0] * 8 + [1] * 8
    assert axes_across({"fsdp": 4, "tensor": 4}, hosts) == ("fsdp",)
    assert axes_across({"fsdp": 8, "tensor": 2}, hosts) == ("fsdp",)
    assert axes_across({"data": 2, "pipeline": 2, "context": 4}, hosts) == ("pipeline",)
    assert axes_across({"tensor": 3, "data": 4}, [i // 8 for i in range(12)]) == ("data", "tensor"), "6, 7 and 8"
    where, warning = describe_hosts({"tensor": 16}, hosts)
    assert where == "hosts      2 with 8 devices each; between hosts: tensor; inside: -"
    assert "mesh.tensor=16" in warning and "divides the 8 devices of a host" in warning
    assert describe_hosts({"tensor": 8}, [0] * 8) == []


def test_an_axis_lies_within_processes_if_no_line_along_it_leaves_one():
    hosts = [SimpleNamespace(process_index=i // 4) for i in range(8)]  # two with four devices each
    inner = SimpleNamespace(axis_names=("fsdp", "tensor"), shape={"fsdp": 2, "tensor": 4})
    inner.devices = np.array(hosts).reshape(2, 4)
    assert within_processes(inner, "tensor") and not within_processes(inner, "fsdp")  # type: ignore[arg-type]
    inner.devices = np.array(hosts[2:] + hosts[:2]).reshape(2, 4)
    assert not within_processes(inner, "tensor")  # type: ignore[arg-type]


def test_axes_are_automatic_outside_the_step():
    assert set(build_mesh({**ONE, "data": 8}).axis_types) == {AxisType.Auto}


def test_a_mesh_of_another_number_of_devices_is_our_own_mistake():
    with pytest.raises(AssertionError):
        build_mesh({**ONE, "data": 4})


# Start-up of several processes


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
    start_processes({**extra, **EXPLICIT})
    assert initialized == [(("host:1234", 4, 3), SETTINGS)]


@pytest.mark.parametrize(
    "address, more, bound",
    [
        ("localhost:1234", {}, "localhost:1234"),
        ("127.0.0.1:1234", {}, "127.0.0.1:1234"),
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
