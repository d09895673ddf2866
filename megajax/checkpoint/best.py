"""The checkpoints with the best evaluations, which `checkpoint.keep_best` keeps.

A step is saved before it is evaluated, so that nothing that fails in an evaluation loses it. Hence the numbers are in a
file beside the checkpoints; all of them, since a run may go on with another `checkpoint.best_by`.
"""

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from orbax.checkpoint.checkpoint_managers import preservation_policy as policies

from megajax import cluster
from megajax.checkpoint.storage import Folder, write_text
from megajax.files import read_bytes
from megajax.json_files import parse

NAME = "evaluations.json"
OLD_NAME = "eval_losses.json"  # of runs from before there was `checkpoint.best_by`
Numbers = dict[str, dict[str, float]]  # of each step, by their names in metrics.jsonl


class BestCheckpoints(policies.PreservationPolicy):
    """Orbax's policy that keeps the `count` best checkpoints; one without the number that counts is not among them."""

    def __init__(self, folder: Folder, count: int, by: str):
        """`by`: "lowest NAME" or "highest NAME". All processes call this together."""
        order, self._name = by.split()
        self._folder, self._count, self._sign = folder, count, -1 if order == "highest" else 1
        self._numbers: Numbers = cluster.current().first_decides(self._read)

    def _read(self) -> Numbers:
        with contextlib.suppress(FileNotFoundError):
            return self._parsed(NAME, Numbers)
        with contextlib.suppress(FileNotFoundError):
            losses = self._parsed(OLD_NAME, dict[str, float])
            return {step: {"eval_loss": loss} for step, loss in losses.items()}
        return {}

    def _parsed(self, name: str, kind: Any) -> Any:
        path = self._folder / name
        return parse(read_bytes(path), str(path), kind, "remove it")

    def forget(self, step: int) -> None:
        """The checkpoint of `step` is written again: an older one's numbers are not its own, nor after a restart."""
        if self._numbers.pop(str(step), None) is not None:
            self._write()

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """What an evaluation gave for the checkpoint of `step`; all processes call this."""
        self._numbers.setdefault(str(step), {}).update(numbers)
        self._write()

    def _write(self) -> None:
        if cluster.current().is_first:
            write_text(self._folder / NAME, json.dumps(self._numbers))

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Whether each of some checkpoints is among the best."""
        found = {c.step: self._numbers.get(str(c.step), {}).get(self._name) for c in checkpoints}
        places = {
            step: math.inf if math.isnan(number) else self._sign * number
            for step, number in found.items()
            if number is not None
        }
        best = sorted(places, key=places.__getitem__)[: self._count]
        return [checkpoint.step in best for checkpoint in checkpoints]
