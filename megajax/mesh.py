"""The mesh of six named axes, and the start of several processes."""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from megajax.config import AXES
from megajax.errors import ConfigError


def build_mesh(sizes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh with all six axes, slowest links first: `tensor` is innermost in device order.

    `sizes` are resolved (`config.checks.check_mesh`), 1 for axes that are not named; `devices` default to all devices
    of all processes.
    """
    devices = jax.devices() if devices is None else devices
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    assert math.prod(shape) == len(devices), (sizes, len(devices))
    return Mesh(np.array(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def named_mesh(sizes: str, setting: str) -> Mesh:
    """The mesh of a command's option, `tensor=2,fsdp=2`, on the first devices; ConfigError names `setting`."""
    found: dict[str, int] = {}
    for entry in sizes.split(","):
        axis, _, size = entry.strip().partition("=")
        if axis not in AXES or not size.isdigit() or int(size) < 1:
            raise ConfigError(
                f"{setting}={sizes} is not a mesh: give sizes of {', '.join(AXES)}, such as tensor=2,fsdp=2."
            )
        found[axis] = int(size)
    count, devices = math.prod(found.values()), jax.devices()
    if count > len(devices):
        raise ConfigError(f"{setting}={sizes} needs {count} devices and there are {len(devices)}: make it smaller.")
    return build_mesh(found, devices[:count])


def mesh_sizes(mesh: Mesh) -> dict[str, int]:
    """Axis sizes by name, in axis order."""
    return dict(zip(mesh.axis_names, mesh.devices.shape, strict=True))


def within_processes(mesh: Mesh, axis: str) -> bool:
    """Whether devices that differ only along `axis` belong to one process."""
    lines = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), -1).reshape(-1, mesh.shape[axis])
    return all(len({device.process_index for device in line}) == 1 for line in lines)


def start_processes(environment: Mapping[str, str] = os.environ) -> None:
    """Join the other processes of this run, if there are any (`jax.distributed`).

    Explicit variables have precedence (JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID), then Slurm's
    (SLURM_NTASKS > 1) and Open MPI's (OMPI_COMM_WORLD_SIZE > 1), which jax reads itself. One process needs nothing.
    """
    explicit = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    given = [name for name in explicit if name in environment]
    if given and len(given) < len(explicit):
        missing = ", ".join(name for name in explicit if name not in environment)
        raise ConfigError(f"{', '.join(given)} set, but not {missing}: set all three, or none for a single process.")
    if given:
        address, count, index = (environment[name] for name in explicit)
        if not (count.isdigit() and index.isdigit() and int(index) < int(count)):
            raise ConfigError(
                f"JAX_NUM_PROCESSES={count} and JAX_PROCESS_ID={index} do not fit: "
                "the ids are 0 to the number of processes - 1."
            )
        jax.distributed.initialize(address, int(count), int(index))
    elif int(environment.get("SLURM_NTASKS", "1")) > 1 or int(environment.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        try:
            jax.distributed.initialize()
        except (ValueError, RuntimeError) as error:
            raise ConfigError(
                f"the environment has several processes, but jax could not join them ({str(error).splitlines()[0]}): "
                f"start the processes with srun or mpirun, or set {', '.join(explicit)}."
            ) from None
