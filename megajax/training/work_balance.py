"""How evenly the work of documents of different lengths is divided: a line of the summary, two numbers of each log."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from megajax import cluster
from megajax.config import Config
from megajax.data.balance import step_pairs, steps_shown
from megajax.data.packing import RowPacking, imbalance
from megajax.data.samples import Samples
from megajax.estimate.costs import row_flops
from megajax.schema.batch_schedule import BatchSizes
from megajax.training.hooks import Hook, RunView
from megajax.training.step import TrainProgram

NAME = "work_imbalance"


class WorkBalance(Hook):
    """Logs max / mean of the FLOPs over devices and microbatches: of the step, and with its documents in sequence."""

    def __init__(self, config: Config, train: Samples):
        self._ways = ways(config, train)

    def on_log(self, run: RunView, step: int, values: dict[str, Any]) -> None:
        if cluster.current().is_first:
            for method, (samples, packing) in self._ways.items():
                name = NAME if packing == RowPacking.of(run.config) else f"{NAME}_{method}"
                values[name] = round(_of_step(run.program, run.sizes, step - 1, samples, packing), 4)


def ways(config: Config, train: Samples) -> Mapping[str, tuple[Samples, RowPacking]]:
    """The samples in sequence, and as the run packs them; nothing if all rows have equal work.

    Synthetic samples, and those in Megatron's order, are in one form only.
    """
    if not config.data.reset_attention:
        return {}
    own = RowPacking.of(config)
    found = {own.method: (train, own)}
    if own.method != "sequential":
        sequential = replace(own, method="sequential")
        if (repacked := train.repacked(sequential)) is not train:
            found = {"sequential": (repacked, sequential), **found}
    return found


def balance_lines(program: TrainProgram, train: Samples, sizes: BatchSizes, first: int = 0) -> Iterator[str]:
    """The summary's line about the steps from `first` on, if several devices or microbatches share a batch."""
    steps = [step for step in steps_shown(sizes, first) if _parts(program, sizes.size(step)) > 1]
    of_way = partial(_of_step, program, sizes)
    means = {
        method: np.mean([of_way(step, *way) for step in steps])
        for method, way in ways(program.config, train).items()
        if steps
    }
    if means:
        figures = ", ".join(f"{method} {mean:.3f}" for method, mean in means.items())
        yield f"work of a device in a microbatch, max / mean in the first steps by data.packing: {figures}"


def _of_step(program: TrainProgram, sizes: BatchSizes, step: int, samples: Samples, packing: RowPacking) -> float:
    flops = row_flops(program.config, step_pairs(samples, sizes, step, packing))
    return imbalance(flops, _parts(program, sizes.size(step)))


def _parts(program: TrainProgram, size: int) -> int:
    """The parts of a batch of `size` sequences: microbatches times the devices that divide their sequences."""
    return size // program.by_size[size].plan.sequences
