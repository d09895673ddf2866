"""The lines of a run's metrics.jsonl: `training/logs.py` writes them, and all readers have them from here."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Required, TypedDict

from pydantic import ConfigDict, Field

from megajax.errors import file_reader
from megajax.json_files import Count, Damaged, Finite, parse, read_lines

CURE = "remove the line"
TAIL_BYTES = 2**20

Number = Finite | None  # null: it was not finite


class MetricsLine(TypedDict, total=False):
    """A logged step, an evaluation, a save or a rollback; it may have further values."""

    __pydantic_config__ = ConfigDict(extra="allow")  # pyright: ignore

    step: Required[Count]
    time: Finite
    tokens: Count
    loss: Number
    eval_loss: Number
    learning_rate: Number
    grad_norm: Number
    step_seconds: Number
    tokens_per_second_per_device: Number
    checkpoint_step: Count
    rollback: Count
    expert_load: list[Annotated[float, Field(ge=0, le=1e6)]]  # of each layer with experts
    expert_load_max: Number


@file_reader("path", cure=CURE)
def read(path: Path) -> Iterator[tuple[bytes, MetricsLine]]:
    """(line, its values) of a file, as `json_files.read_lines`; a warning names the first damaged line and the number.

    A killed process leaves a torn line, after which the resumed run may go on.
    """
    bad: list[Damaged] = []
    yield from read_lines(path, MetricsLine, CURE, bad)
    if bad:
        warnings.warn(f"lines of metrics are left out, {len(bad)} in all; the first: {bad[0]}", stacklevel=2)


@file_reader("path", cure=CURE)
def read_tail(path: Path) -> Iterator[MetricsLine]:
    """The last lines of a file, if there is one; the first may be cut, and the last is being written."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        for line in file.read(2 * TAIL_BYTES).splitlines():
            try:
                yield parse(line, str(path), MetricsLine, CURE)
            except Damaged:
                continue
