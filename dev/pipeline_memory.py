"""Memory per device by pipeline schedule and number of microbatches, compiled for H200s without a GPU.

    python dev/pipeline_memory.py CONFIG [section.key=value ...] --gpus N [--microbatches M ...] [--json]

The size of a microbatch is the config's, so `batch.global_size` grows with their number. Prints a Markdown table: the
saved activations (the buffers of a few slots), the buffers of deferred weight gradients, all temporary memory including
these, and the arguments (weights, optimizer state, batch). Needs jax's CUDA plugin, like hlo_counts.py.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from megajax.config import load_config
from megajax.console import user_errors
from megajax.options.pipeline_schedules import KINDS
from megajax.step.pipeline.buffers import schedule_of
from megajax.step.pipeline.schedules import assign_buffer_slots
from megajax.tools.plan.compile import compile_for_gpus
from megajax.tools.profile import hlo


@dataclass(frozen=True)
class Row:
    """One compiled step; sizes in bytes."""

    schedule: str
    microbatches: int
    slots: int  # microbatches that a stage keeps at once, those of every virtual stage
    saved: int  # buffers of these slots
    deferred: int  # buffers for weight operations
    temporary: int
    arguments: int
    copies: tuple[str, ...]  # operations that write a whole one of these buffers instead of a slot
    operations: int  # of the compiled step, those in a loop once

    @property
    def markdown(self) -> str:
        sizes = " | ".join(f"{n / 2**30:.1f}" for n in (self.saved, self.deferred, self.temporary, self.arguments))
        return f"| {self.schedule} | {self.microbatches} | {self.slots} | {sizes} |"


TITLE = """| schedule | microbatches | slots | saved, GiB | deferred, GiB | temporary, GiB | arguments, GiB |
|---|---:|---:|---:|---:|---:|---:|"""


def measure(path: str, overrides: list[str], gpus: int, schedule: str, microbatches: int, store: Path | None) -> Row:
    """Compiles the config's step with this schedule and number of microbatches of the config's size."""
    batch = load_config(path, overrides).batch
    own = [
        f"pipeline.schedule={schedule}",
        f"batch.num_microbatches={microbatches}",
        f"batch.global_size={batch.global_size // batch.num_microbatches * microbatches}",
    ]
    config = load_config(path, [*overrides, *own])
    step = compile_for_gpus(config, gpus, store)
    ops, memory = hlo.parse(step.text), step.memory
    slots = assign_buffer_slots(schedule_of(step.program.plan))
    saved = [array for op in ops if op.target == "AllocateBuffer" for array in op.results]
    deferred = buffers(ops, slots.deferred_slots) if slots.deferred_slots else []
    return Row(
        schedule=schedule,
        microbatches=microbatches,
        slots=slots.activation_slots,
        saved=sum(array.bytes for array in saved),
        deferred=sum(array.bytes for array in deferred),
        temporary=memory["temporary"],
        arguments=memory["argument"],
        copies=tuple(op.name for op in whole_copies(ops, {*saved, *deferred})),
        operations=len(ops),
    )


def buffers(ops: list[hlo.Op], slots: int) -> list[hlo.Array]:
    """The buffers with `slots` slots in the carry of the loop over ticks. All layers must be in one loop's body."""
    carried = [[a for a in op.results if len(a.dims) > 1 and a.dims[0] == slots] for op in ops if op.kind == "while"]
    return max(carried, key=lambda arrays: sum(array.bytes for array in arrays), default=[])


def whole_copies(ops: list[hlo.Op], buffers: set[hlo.Array]) -> Iterator[hlo.Op]:
    """Operations in the loops whose result is a whole buffer and is not an update in place.

    A buffer of one slot may be written as a whole, but not by a copy.
    """
    for op in ops:
        updates = op.kind in (*hlo.CALLERS, *hlo.UPDATES) or op.fused & set(hlo.UPDATES)
        for array in buffers.intersection(op.results) if op.loops else ():
            if op.only_moves if array.dims[0] == 1 else not updates:
                yield op


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="path of a config")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--schedules", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--store", type=Path, help="directory of compiled steps, which are not compiled again")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line instead")
    args = parser.parse_intermixed_args(arguments)
    with user_errors():
        if not args.json:
            print(TITLE)
        for schedule in args.schedules:
            for microbatches in args.microbatches:
                row = measure(args.config, args.overrides, args.gpus, schedule, microbatches, args.store)
                print(json.dumps(asdict(row)) if args.json else row.markdown, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
