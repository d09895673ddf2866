"""The processes of a run as the environment describes them: jax's own variables, Slurm's and Open MPI's.

This module does not import jax, so the launcher and `runtime.py` read the same numbers.
"""

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from megajax.errors import ConfigError, shown
from megajax.files import is_number, whole_number

ADDRESS, COUNT, INDEX = EXPLICIT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
BIND, PORT, DEVICES = "JAX_COORDINATOR_BIND_ADDRESS", "JAX_COORDINATOR_PORT", "JAX_LOCAL_DEVICE_IDS"
LAST_PORT = 2**16 - 1
# (number of processes, index, index on the host, the job's number, from which jax derives the port)
SLURM = ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID")
TORCHRUN = "WORLD_SIZE"  # megajax does not read torchrun's variables
OPEN_MPI = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")


class Processes(NamedTuple):
    """Several processes of a run.

    address: HOST:PORT of the coordinator, None: jax finds it; bind: where it listens, None: not given; index: of this
    process.
    """

    count: int
    index: int
    address: str | None
    bind: str | None


def processes(environment: Mapping[str, str] = os.environ) -> Processes | None:
    """The processes that the environment describes; None: this one is alone.

    Explicit variables have precedence (JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID), then Slurm's
    (SLURM_NTASKS > 1) and Open MPI's (OMPI_COMM_WORLD_SIZE > 1). Raises ConfigError for values that cannot be meant,
    and for torchrun's WORLD_SIZE > 1 without any of these.
    """
    given = [name for name in EXPLICIT if name in environment]
    if given and len(given) < len(EXPLICIT):
        missing = ", ".join(name for name in EXPLICIT if name not in environment)
        raise ConfigError(f"{', '.join(given)} set, but not {missing}: set all three, or none for a single process.")
    found = _explicit(environment) if given else _of_scheduler(environment)
    if found is not None and (devices := environment.get(DEVICES)):
        if not all(is_number(device) for device in devices.split(",")):
            raise ConfigError(f"{DEVICES}={shown(devices)} is not a list of numbers: write it like 0,1.")
    return found


def process_index(environment: Mapping[str, str] = os.environ) -> int:
    """The index of this process, 0 if it is alone."""
    found = processes(environment)
    return 0 if found is None else found.index


def is_first_process(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process has index 0, is alone, or has an environment that is an error."""
    try:
        return process_index(environment) == 0
    except ConfigError:
        return True


def _explicit(environment: Mapping[str, str]) -> Processes:
    count, index = (whole_number(environment, name, 0) for name in (COUNT, INDEX))
    if index >= count:
        raise ConfigError(
            f"{COUNT}={count} and {INDEX}={index} do not fit: the ids are 0 to the number of processes - 1."
        )
    _check_address(environment[ADDRESS], ADDRESS)
    return Processes(count, index, environment[ADDRESS], _bind(environment))


def _of_scheduler(environment: Mapping[str, str]) -> Processes | None:
    for names in (SLURM, OPEN_MPI):
        count = whole_number(environment, names[0], 1)
        if count > 1:
            index, *_ = (whole_number(environment, name, 0) for name in names[1:])
            if index >= count:
                raise ConfigError(
                    f"{names[0]}={count} and {names[1]}={index} do not fit: start the processes with srun or mpirun."
                )
            if PORT in environment:
                _check_port(environment[PORT], PORT, environment[PORT])
            _bind(environment)  # jax reads it
            return Processes(count, index, None, None)
    if not any(names[0] in environment for names in (SLURM, OPEN_MPI)):
        _check_not_torchrun(environment)
    return None


def _check_not_torchrun(environment: Mapping[str, str]) -> None:
    """Each of torchrun's processes would train alone."""
    if whole_number(environment, TORCHRUN, 1) > 1:
        raise ConfigError(
            f"{TORCHRUN}={shown(environment[TORCHRUN])} is torchrun's variable, which megajax does not read: start "
            f"several processes with `megajax launch`, or set {', '.join(EXPLICIT)} for each; for one process unset it."
        )


def _bind(environment: Mapping[str, str]) -> str | None:
    if bind := environment.get(BIND):
        _check_address(bind, BIND)
    return bind or None


def _check_address(address: str, name: str) -> None:
    """Jax tries a wrong address for minutes, without a word."""
    host, _, port = address.rpartition(":")
    if not re.fullmatch(r"[\w.-]+|\[[\da-fA-F:.%\w]+\]", host, re.ASCII):
        raise ConfigError(
            f"{name}={shown(address)} is not HOST:PORT: write the name or the address of process 0's host and a free "
            "port, such as node1:1234, or [::1]:1234."
        )
    _check_port(port, name, address)


def _check_port(port: str, name: str, value: str) -> None:
    if not (is_number(port) and 0 < int(port) <= LAST_PORT):
        raise ConfigError(
            f"{name}={shown(value)} has no port from 1 to {LAST_PORT}: give a free one of process 0's host."
        )
