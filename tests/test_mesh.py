"""The mesh: axes and device order."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from megajax.errors import ConfigError
from megajax.mesh import (
    AXES,
    axes_across,
    build_mesh,
    describe_hosts,
    hosts_of,
    mesh_sizes,
    named_mesh,
    neighbours_by_host,
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
    assert named_mesh("context=4,expert=2", "--mesh") == mesh  # of all devices


def test_a_mesh_of_more_devices_than_there_are_is_refused():
    with pytest.raises(ConfigError, match="--mesh=data=3,fsdp=3 needs 9 devices, more than the 8 here"):
        named_mesh("data=3,fsdp=3", "--mesh")


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
    where, *_ = describe_hosts({"fsdp": 12}, [0] * 4 + [1] * 8)
    assert where.startswith("hosts      2 with 4 to 8 devices each;")


def test_an_axis_lies_within_processes_if_no_line_along_it_leaves_one():
    hosts = [SimpleNamespace(process_index=i // 4) for i in range(8)]  # two with four devices each
    inner = SimpleNamespace(axis_names=("fsdp", "tensor"), shape={"fsdp": 2, "tensor": 4})
    inner.devices = np.array(hosts).reshape(2, 4)
    assert within_processes(inner, "tensor") and not within_processes(inner, "fsdp")  # type: ignore[arg-type]
    inner.devices = np.array(hosts[2:] + hosts[:2]).reshape(2, 4)
    assert not within_processes(inner, "tensor")  # type: ignore[arg-type]


def test_axes_are_automatic_outside_the_step():
    assert set(build_mesh({**ONE, "data": 8}).axis_types) == {AxisType.Auto}
