"""Checks between the processes of a run before anything is compiled: the same code, packages and config, and GPUs of
their own.

Each process posts its facts, a small JSON object; process 0 compares them and publishes one sentence
(`Cluster.agree`). A process costs two messages, so thousands of them are checked in seconds.
"""

import ctypes
import hashlib
import os
import platform
import socket
import uuid
import warnings
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax

from megajax import cluster
from megajax.config import Config
from megajax.config.extensions import file_of
from megajax.errors import ConfigError, counted
from megajax.schema.tree import leaves, show

ANSWER_SECONDS = 120.0  # all processes have joined before, and nothing watches them yet
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "megajax")


class ProcessFacts(NamedTuple):
    """One process: what it runs, and its GPUs by UUID (`gpus`: those that it uses, `visible`: those that CUDA has)."""

    host: str
    versions: dict[str, str]
    code: str
    config: dict[str, Any]
    gpus: list[str]
    visible: list[str]
    flags: list[str]  # of XLA, without those that may differ


def check_processes(config: Config) -> None:
    """Compare the processes of this run; call it after `start_processes`. One process has nothing to compare.

    Raises ConfigError, with the same sentence on every process.
    """
    here = cluster.current()
    if here.size > 1 and (problem := here.agree(own_facts(config), _problem_of_answers, seconds=ANSWER_SECONDS)):
        raise ConfigError(problem)


def own_facts(config: Config) -> ProcessFacts:
    """The facts of this process."""
    platforms = jax.config.values["jax_platforms"] or "cuda"
    visible = cuda_devices() if {"cuda", "gpu"} & set(platforms.split(",")) else []
    return ProcessFacts(
        host=socket.gethostname(),
        versions={"Python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        code=code_hash(extensions=config.run.extensions),
        config=config.model_dump(mode="json"),
        gpus=used_devices(visible, jax.config.values["jax_cuda_visible_devices"]),
        visible=visible,
        flags=sorted(flag for flag in os.environ.get("XLA_FLAGS", "").split() if not _may_differ(flag)),
    )


def _may_differ(flag: str) -> bool:
    """Whether a flag may differ between processes that run the same program: it names files, or counts devices."""
    return flag.startswith(("--xla_dump", "--xla_force_host_platform_device_count")) or "autotune_results" in flag


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # megajax from its source directory
        return "not installed"


def code_hash(package: Path = Path(__file__).parents[1], extensions: Sequence[str] = ()) -> str:
    """A short hash of the names and contents of a package's Python files, and of imported `run.extensions`."""
    total = hashlib.sha256()
    files = {path.relative_to(package).as_posix(): path for path in sorted(package.rglob("*.py"))}
    files |= {name: path for name in extensions if (path := file_of(name))}
    for name, path in files.items():
        content = path.read_bytes()
        total.update(f"{name} {len(content)} ".encode() + content)
    return total.hexdigest()[:12]


def used_devices(visible: Sequence[str], jax_visible: str) -> list[str]:
    """The devices that jax uses: jax_cuda_visible_devices is "all", or numbers of visible devices, comma-separated.

    `jax.distributed.initialize` sets it: from JAX_LOCAL_DEVICE_IDS; else, under Slurm and Open MPI, to the process's
    number on its host; else all processes use all devices.
    """
    if jax_visible == "all":
        return list(visible)
    return [visible[int(number)] for number in jax_visible.split(",") if int(number) < len(visible)]


def cuda_devices() -> list[str]:
    """UUIDs of the devices that CUDA shows this process, in its order; empty without CUDA.

    The driver itself is asked, because CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER, MIG and containers change the list.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count, device, identity = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(16)
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return []
    found = []
    for index in range(count.value):
        if cuda.cuDeviceGet(ctypes.byref(device), index) or cuda.cuDeviceGetUuid_v2(identity, device):
            return []
        found.append(f"GPU-{uuid.UUID(bytes=identity.raw)}")
    return found


def _problem_of_answers(answers: list[Any]) -> str:
    everyone = [ProcessFacts(*answer) for answer in answers]
    problem = find_problem(everyone)
    unused = "" if problem else unused_gpus(everyone)
    if unused:
        warnings.warn(unused, stacklevel=2)
    return problem


def find_problem(everyone: Sequence[ProcessFacts]) -> str:
    """The first difference between the processes that would stop the run or spoil it, as a sentence; or ""."""
    return (
        _other_code(everyone)
        or _other_config(everyone)
        or _other_flags(everyone)
        or _same_gpu(everyone)
        or _other_number(everyone)
    )


def _other_code(everyone: Sequence[ProcessFacts]) -> str:
    for package, version in everyone[0].versions.items():
        if different := [i for i, facts in enumerate(everyone) if facts.versions.get(package) != version]:
            other = everyone[different[0]].versions.get(package, "not installed")
            return (
                f"{package} is {other} in {_named(everyone, different)} and {version} in {_named(everyone, [0])}: "
                "install the same packages everywhere (constraints.txt)."
            )
    code = everyone[0].code
    if different := [i for i, facts in enumerate(everyone) if facts.code != code]:
        hashes = f"hashes {everyone[different[0]].code} and {code}"
        return (
            f"the code of megajax or of run.extensions in {_named(everyone, different)} differs from that in "
            f"{_named(everyone, [0])} ({hashes}): start all processes from the same files."
        )
    return ""


def _other_config(everyone: Sequence[ProcessFacts]) -> str:
    mine = dict(leaves(everyone[0].config))
    different = [i for i, facts in enumerate(everyone) if facts.config != everyone[0].config]
    if not different:
        return ""
    theirs = dict(leaves(everyone[different[0]].config))
    keys = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
    shown = [f"{key}={show(theirs.get(key))} instead of {show(mine.get(key))}" for key in keys[:8]]
    shown += [counted(len(keys) - 8, "more key")] if len(keys) > 8 else []
    return (
        f"{_named(everyone, different)} {'has' if len(different) == 1 else 'have'} another config than "
        f"{_named(everyone, [0])} ({'; '.join(shown)}): start every process with the same config and overrides."
    )


def _other_flags(everyone: Sequence[ProcessFacts]) -> str:
    mine = set(everyone[0].flags)
    unlike = [i for i, facts in enumerate(everyone) if set(facts.flags) != mine]
    if not unlike:
        return ""
    different = " ".join(sorted(set(everyone[unlike[0]].flags) ^ mine))
    return (
        f"XLA_FLAGS in {_named(everyone, unlike)} and in {_named(everyone, [0])} differ in {different}: set the same "
        "flags for every process, since all must run the same program."
    )


def _same_gpu(everyone: Sequence[ProcessFacts]) -> str:
    users: dict[str, list[int]] = {}
    for i, facts in enumerate(everyone):
        for gpu in facts.gpus:
            users.setdefault(gpu, []).append(i)
    shared = [gpu for gpu, found in users.items() if len(found) > 1]
    if not shared:
        return ""
    first, second = users[shared[0]][:2]
    return (
        f"process {first} and process {second} on {everyone[first].host} use the same GPU ({shared[0]}; "
        f"{len(shared)} of {len(users)} GPUs have two users): give each process its own with "
        "JAX_LOCAL_DEVICE_IDS or CUDA_VISIBLE_DEVICES, or start one process on a host."
    )


def _other_number(everyone: Sequence[ProcessFacts]) -> str:
    gpus = len(everyone[0].gpus)
    if unlike := [i for i, facts in enumerate(everyone) if len(facts.gpus) != gpus]:
        return (
            f"{_named(everyone, unlike)} {'has' if len(unlike) == 1 else 'have'} "
            f"{counted(len(everyone[unlike[0]].gpus), 'GPU')} and {_named(everyone, [0])} has {gpus}: use hosts with "
            "the same number of working GPUs, or give each process the same number with JAX_LOCAL_DEVICE_IDS."
        )
    hosts = [facts.host for facts in everyone]
    counts = {host: gpus * hosts.count(host) for host in dict.fromkeys(hosts)}
    odd = next((host for host in counts if counts[host] != counts[hosts[0]]), None)
    if odd is None:
        return ""
    return (
        f"the run uses {counted(counts[odd], 'GPU')} of host {odd} and {counts[hosts[0]]} of host {hosts[0]}: use "
        "the same number of GPUs, so of processes, on every host."
    )


def unused_gpus(everyone: Sequence[ProcessFacts]) -> str:
    """A warning about the first host with GPUs that CUDA shows and no process uses; or ""."""
    for host in dict.fromkeys(facts.host for facts in everyone):
        here = [facts for facts in everyone if facts.host == host]
        visible = {gpu for facts in here for gpu in facts.visible}
        used = {gpu for facts in here for gpu in facts.gpus}
        if visible - used:
            numbers = ",".join(map(str, range(len(here[0].visible))))
            return (
                f"host {host} has {counted(len(visible), 'GPU')} and the run uses {len(used)} of them: start a "
                f"process for each, or set JAX_LOCAL_DEVICE_IDS={numbers} for one process on a host."
            )
    return ""


def _named(everyone: Sequence[ProcessFacts], processes: Sequence[int]) -> str:
    """ "process 3 on host b and 2 more" """
    more = f" and {len(processes) - 1} more" if len(processes) > 1 else ""
    return f"process {processes[0]} on {everyone[processes[0]].host}{more}"
