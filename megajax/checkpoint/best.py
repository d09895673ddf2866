"""The checkpoints with the lowest evaluation loss, which `checkpoint.keep_best` keeps.

A step is saved before it is evaluated, so that nothing that fails in an evaluation loses it. Hence the losses are in a
file beside the checkpoints.
"""

import contextlib
import json
import math
from collections.abc import Sequence
from typing import Any

from orbax.checkpoint.checkpoint_managers import preservation_policy as policies

from megajax import cluster
from megajax.checkpoint.storage import Folder, write_text
from megajax.files import read_bytes
from megajax.json_files import parse

NAME = "eval_losses.json"


class BestByLoss(policies.PreservationPolicy):
    """Orbax's policy that keeps the `count` checkpoints with the lowest loss; one without a loss is not among them."""

    def __init__(self, folder: Folder, count: int):
        """All processes call this together."""
        self._path, self._count = folder / NAME, count
        self._losses: dict[str, float] = cluster.current().first_decides(self._read)  # by step

    def _read(self) -> dict[str, float]:
        with contextlib.suppress(FileNotFoundError):
            return parse(read_bytes(self._path), str(self._path), dict[str, float], "remove it")
        return {}

    def forget(self, step: int) -> None:
        """The checkpoint of `step` is written again: an older one's loss is not its own, nor after a restart."""
        if self._losses.pop(str(step), None) is not None:
            self._write()

    def set(self, step: int, loss: float) -> None:
        """The evaluation loss of the checkpoint of `step`; all processes call this."""
        self._losses[str(step)] = loss
        self._write()

    def _write(self) -> None:
        if cluster.current().is_first:
            write_text(self._path, json.dumps(self._losses))

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Whether each of some checkpoints is among the best."""
        losses = {c.step: self._losses[str(c.step)] for c in checkpoints if str(c.step) in self._losses}
        best = sorted(losses, key=lambda step: math.inf if math.isnan(losses[step]) else losses[step])[: self._count]
        return [checkpoint.step in best for checkpoint in checkpoints]
