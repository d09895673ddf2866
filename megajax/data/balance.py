"""How evenly a batch's attention is divided, for each way to pack: what `megajax inspect` draws."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from megajax.data.loader import row_pairs, samples_of_step
from megajax.data.packing import RowPacking, imbalance
from megajax.data.samples import Samples
from megajax.errors import counted
from megajax.layout.context_groups import ContextGroups, document_runs
from megajax.options.context import DYNAMIC
from megajax.schema.batch_schedule import BatchSizes

if TYPE_CHECKING:
    from megajax.config import Config

METHODS = ("sequential", "first_fit", "balanced")
STEPS, MOST_ROWS = 8, 4096  # that are looked at, of a run
MOST_BARS, BAR = 16, 40


def step_pairs(samples: Samples, sizes: BatchSizes, step: int, packing: RowPacking) -> np.ndarray:
    """The pairs of a query and a key in each row of the step after the first `step` ones, int64 [G]."""
    return row_pairs(samples, samples_of_step(samples, sizes, step, packing), packing)


def steps_shown(sizes: BatchSizes, first: int = 0) -> range:
    """The steps from `first` on whose balance is told."""
    return range(first, first + max(1, min(STEPS, MOST_ROWS // sizes.size(first))))


def balance_lines(config: "Config", samples: Samples) -> list[str]:
    """For each packing max / mean of the attention of equal parts of a batch, and the parts of the first as bars.

    Nothing if all rows have the same attention, because their documents are not separate.
    """
    if not config.data.reset_attention:
        return []
    own, sizes = RowPacking.of(config), BatchSizes.of(config)
    size = sizes.size(0)
    parts = [count for count in range(1, size + 1) if size % count == 0]
    found = {}
    for method in METHODS:
        packing = replace(own, method=method)
        repacked = samples if method == own.method else samples.repacked(packing)
        if repacked is not samples or method == own.method:
            found[method] = [step_pairs(repacked, sizes, step, packing) for step in steps_shown(sizes)]
    shown = [count for count in parts if count in (*parts[:1], *parts[-7:])] if len(parts) > 8 else parts
    batches = f"{counted(len(steps_shown(sizes)), 'batch')} of {counted(size, 'sequence')}"
    lines = [
        f"attention of a device in a microbatch, max / mean, in the first {batches}",
        f"  {'sequences of a device':<21} {''.join(f'{size // count:>8,}' for count in shown)}",
    ]
    for method, rows in found.items():
        means = [np.mean([imbalance(each, count) for each in rows]) for count in shown]
        lines.append(f"  {method:<21} {''.join(f'{mean:>8.2f}' for mean in means)}")
    if own.method in found and found[own.method][0].any():  # a model of recurrences has none
        lines += _bars(found[own.method][0], max(count for count in parts if count <= MOST_BARS), own.method)
    return [*lines, *_group_lines(config, samples, sizes)]


def _group_lines(config: "Config", samples: Samples, sizes: BatchSizes) -> Iterator[str]:
    """The sizes of the groups of dynamic context, for the rows of the first steps."""
    devices = config.mesh.context
    if config.communication.context != DYNAMIC.name or devices < 2 or devices & (devices - 1):
        return
    groups, found = ContextGroups.of_model(config.model, devices), Counter[int]()
    rows = range(sum(sizes.size(step) for step in steps_shown(sizes)))
    for row in rows:
        lengths = samples.document_lengths(row)
        documents = np.repeat(np.arange(lengths.size), lengths)[:-1]
        is_real = np.arange(documents.size) <= documents.size - samples.padding(row)
        found.update(groups.arrange(document_runs(documents, is_real).tolist()).sizes)
    shares = ", ".join(f"{size}: {count / found.total():.0%}" for size, count in sorted(found.items()))
    yield f"devices of {devices} that share a document, in the first {counted(len(rows), 'sequence')}: {shares}"


def _bars(rows: np.ndarray, parts: int, method: str) -> Iterator[str]:
    """A bar for each part of a batch, as long as its attention."""
    sums, each = rows.reshape(parts, -1).sum(axis=1), len(rows) // parts
    yield f"attention of the first batch, {method}, in units of the mean"
    for part, work in enumerate(sums.tolist()):
        first, last = part * each, (part + 1) * each - 1
        name = f"row {first:,}" if each == 1 else f"rows {first:,} to {last:,}"
        yield f"  {name:>21} {work / sums.mean():>8.2f} {'#' * round(BAR * work / sums.max())}".rstrip()
