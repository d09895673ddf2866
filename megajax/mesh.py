"""The mesh of six named axes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from megajax import cluster
from megajax.config import AXES, Config
from megajax.config.mesh_checks import read_mesh
from megajax.config.sentences import fail
from megajax.errors import ConfigError, counted, shown


def build_mesh(sizes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh with all six axes, slowest links first: `tensor` is innermost, and hosts follow each other.

    `sizes` are resolved (`config.checks.check_mesh`), 1 for axes that are not named; `devices` default to all devices
    of all processes. Each host's devices are neighbours, whatever the numbers of its processes, so inner axes whose
    product divides a host's devices lie inside hosts.
    """
    devices = device_list(devices)
    if not isinstance(sizes, Mapping) or not {*sizes} <= {*AXES}:
        raise ConfigError(f"sizes={shown(sizes)} are no sizes of axes: give config.checks.check_mesh(config, devices).")
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    if (needed := math.prod(shape)) != len(devices):
        problem = f"a mesh of the sizes {shown(dict(sizes))} has {counted(needed, 'device')}, not {len(devices)}"
        raise ConfigError(f"{problem}: give build_mesh that number, such as jax.devices()[:{needed}].")
    by_host = neighbours_by_host(devices, hosts_of(devices))
    return Mesh(np.array(by_host).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def require_mesh(config: Config, mesh: Any) -> None:
    """Raise ConfigError for what is no mesh of all axes, and for one of other sizes than the config's."""
    if getattr(mesh, "axis_names", None) != AXES:
        raise ConfigError(f"mesh={shown(mesh)} is no mesh of all axes: give megajax.build_mesh(sizes).")
    for axis, size in mesh_sizes(mesh).items():
        if (wanted := getattr(config.mesh, axis)) not in (-1, size):
            problem = f"mesh.{axis}={wanted}, but the mesh has the size {size} along it"
            cure = f"give build_mesh(check_mesh(config, DEVICES)), or set mesh.{axis}={size}"
            fail(config, problem, cure, f"mesh.{axis}")


def device_list(devices: Sequence[Any] | None) -> list[Any]:
    """The devices, by default all of all processes. Raises ConfigError for others than a list of different ones."""
    if devices is None:
        return jax.devices()
    found = list(devices) if isinstance(devices, (Sequence, np.ndarray)) and not isinstance(devices, str) else []
    if not found or len({*found}) < len(found):
        raise ConfigError(f"devices={shown(devices)} is no list of different devices: give one, such as jax.devices().")
    return found


def neighbours_by_host(devices: Sequence[Any], hosts: Sequence[int]) -> list[Any]:
    """The devices, those of each host together; `hosts`: of each device."""
    return [devices[i] for i in sorted(range(len(devices)), key=hosts.__getitem__)]


def hosts_of(devices: Sequence[Any], names: Sequence[str] | None = None) -> list[int]:
    """The host of each device, numbered as they first occur; `names`: the host of each process of this run."""
    names = cluster.current().hosts if names is None else names
    # In a run of one process other ones' devices are those of a topology, which has one process on a host.
    host_of_device = [names[d.process_index] if len(names) > 1 else d.process_index for d in devices]
    numbers = {host: number for number, host in enumerate(dict.fromkeys(host_of_device))}
    return [numbers[host] for host in host_of_device]


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
