"""Whether the devices have the memory that a compiled step needs, and which settings would need less."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax

from megajax import cluster
from megajax.config import Config
from megajax.config.checks import check_mesh
from megajax.config.sentences import listed
from megajax.errors import ConfigError, InputError, counted
from megajax.estimate.memory import estimate_memory
from megajax.options.remat import POLICIES
from megajax.runtime import memory_of
from megajax.step_plan import StepPlan
from megajax.training.step import TrainProgram

GIB, WAYS = 2**30, 3


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
    """Settings with which a step fits, by an estimate that is scaled to what this one needs."""
    devices, found = program.mesh.size, []
    scale = needed / estimate_memory(program.plan).total
    for ways in _cheaper(program.config, program.plan.sizes):
        estimates = [(scale * estimate, text) for text, config in ways if (estimate := _estimate(config, program))]
        if fitting := [each for each in estimates if each[0] <= limit]:
            # The more memory is used, the less is computed again, and the fewer microbatches are there.
            found.append(f"{max(fitting)[1]} (about {max(fitting)[0] / GIB:.1f} GiB)")
    fastest = f"`megajax plan CONFIG --gpus {devices}` finds the fastest settings that fit"
    return f"set {listed(found[:WAYS])}; {fastest}" if found else f"use more devices; {fastest}"


def _cheaper(config: Config, sizes: Mapping[str, int]) -> Iterator[list[tuple[str, Config]]]:
    """Settings that need less memory, as text and as a config, by kind; what costs most time last."""

    def changed(before: Config, section: str, **values: Any) -> Config:
        return before.model_copy(update={section: getattr(before, section).model_copy(update=values)})

    shards, rows = sizes["data"] * sizes["fsdp"], config.batch.global_size
    if sizes["data"] > 1:
        yield [(f"mesh.data=1 mesh.fsdp={shards}", changed(config, "mesh", data=1, fsdp=shards))]
    counts = [2**k * config.batch.num_microbatches for k in range(1, rows.bit_length())]
    divided = [(f"batch.num_microbatches={n}", changed(config, "batch", num_microbatches=n)) for n in counts]
    yield divided
    recomputing = [(f"remat.policy={name}", {"policy": name, "layers": None}) for name in POLICIES]
    yield [(text, changed(config, "remat", **values)) for text, values in recomputing]
    yield [
        (f"{text} {also}", changed(smaller, "remat", **values))
        for text, smaller in divided
        for also, values in recomputing
    ]


def _estimate(config: Config, program: TrainProgram) -> int | None:
    """The estimated memory of a config on these devices; None if it cannot run on them."""
    hardware = program.plan.hardware
    try:
        sizes = check_mesh(config, program.mesh.size, cluster.current().size, hardware.platform)
        return estimate_memory(StepPlan.make(config, sizes, hardware)).total
    except ConfigError:
        return None
