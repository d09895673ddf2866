"""Whether the devices have the memory that a compiled step needs, and which settings would need less."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from megajax import cluster
from megajax.config import Config
from megajax.config.checks import check_mesh
from megajax.config.sentences import counted, listed
from megajax.errors import ConfigError, InputError
from megajax.estimate.memory import estimate_memory
from megajax.options.remat import POLICIES
from megajax.runtime import memory_of
from megajax.step_plan import StepPlan
from megajax.training.step import TrainProgram

GIB, WAYS, REMAT = 2**30, 3, "remat.policy="


def check_memory(step: jax.stages.Compiled, size: int, program: TrainProgram) -> None:
    """Raise InputError if the step for global batches of `size` sequences does not fit into the devices' memory.

    It has XLA's figure of the program, and the settings that fit, with less memory by the estimate.
    """
    limit = (program.mesh.local_devices[0].memory_stats() or {}).get("bytes_limit")
    if limit is None or (needed := memory_of(step)["whole"]) <= limit:
        return
    raise InputError(
        f"a step of {counted(size, 'sequence')} needs {needed / GIB:.1f} GiB of memory on each device, as compiled, "
        f"but there are {limit / GIB:.1f}: {_cure(program, needed, limit)}."
    )


def out_of_memory(error: Exception, step: jax.stages.Compiled, program: TrainProgram) -> InputError:
    """The sentence for a step that found too little memory when it ran."""
    needed, used = memory_of(step)["whole"], (program.mesh.local_devices[0].memory_stats() or {}).get("bytes_in_use", 0)
    return InputError(
        f"the devices have too little memory for a step: it needs {needed / GIB:.1f} GiB as compiled, and "
        f"{used / GIB:.1f} GiB are in use ({str(error).splitlines()[0]}): {_cure(program, needed, needed - 1)}."
    )


def _cure(program: TrainProgram, needed: int, limit: int) -> str:
    """The first settings with which a step fits, by an estimate that is scaled to what this one needs."""
    plan, devices, found = program.plan, program.mesh.size, []
    scale = needed / estimate_memory(plan).total
    for settings, config in _cheaper(plan.config, plan.sizes):
        if (estimate := _estimate(config, program)) is not None and scale * estimate <= limit:
            found.append((settings, f"{settings} (about {scale * estimate / GIB:.1f} GiB)", estimate))
    # The more is kept for the backward pass, the less is computed again.
    found.sort(key=lambda each: -each[2] if each[0].startswith(REMAT) else -math.inf)
    fastest = f"`megajax plan CONFIG --gpus {devices}` finds the fastest settings that fit"
    return (
        f"set {listed([text for _, text, _ in found[:WAYS]])}; {fastest}" if found else f"use more devices; {fastest}"
    )


def _cheaper(config: Config, sizes: Mapping[str, int]) -> Iterator[tuple[str, Config]]:
    """Settings that need less memory, as text and as a config; recomputation, which costs most time, last."""

    def changed(section: str, **values: Any) -> Config:
        return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})

    if sizes["data"] > 1:
        shards = sizes["data"] * sizes["fsdp"]
        yield f"mesh.data=1 mesh.fsdp={shards}", changed("mesh", data=1, fsdp=shards)
    for count in (2, 4):
        count *= config.batch.num_microbatches
        yield f"batch.num_microbatches={count}", changed("batch", num_microbatches=count)
    for policy in POLICIES:
        yield f"{REMAT}{policy}", changed("remat", policy=policy, layers=None)


def _estimate(config: Config, program: TrainProgram) -> int | None:
    """The estimated memory of a config on these devices; None if it cannot run on them."""
    hardware = program.plan.hardware
    try:
        sizes = check_mesh(config, program.mesh.size, cluster.current().size, hardware.platform)
        return estimate_memory(StepPlan.make(config, sizes, hardware)).total
    except ConfigError:
        return None
