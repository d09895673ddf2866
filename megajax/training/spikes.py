"""Loss spikes: the loss of every step is compared with the median of the steps before it."""

import math
import statistics
import warnings
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from megajax.config import Config
from megajax.errors import counted
from megajax.json_files import Count, Finite


class BadStep(NamedTuple):
    """A step whose loss is a spike, or with `run.max_rollbacks` the first of too many in a row that are not finite."""

    step: int
    loss: float
    median: float | None  # of the losses before a spike; None: not finite


class Rollback(NamedTuple):
    """The `number`-th rollback, because of `bad_step`: training continues at `step` with sample `samples` of the data.

    `left_out_samples` would have come next at the checkpoint of `step`. `bad_loss` is None if it was not finite, and
    `loss_median` if the step was not a spike.
    """

    number: Count
    step: Count
    samples: Count
    bad_step: Count
    bad_loss: Finite | None
    loss_median: Finite | None
    left_out_samples: Count


class LossWatch:
    """Examines the loss of every step, not only of logged ones; the losses stay on the devices until `examine`.

    A spike is a loss above `run.spike_factor` times the median of the last `run.spike_window` good steps, those whose
    loss and gradient were finite; of a negative median, above it by as much as of a positive one of its size. The
    median hardly depends on single spikes, and includes them: so after a lasting rise, such as at other data, the steps
    are spikes for half a window, and not for ever. Before the window is full nothing is a spike. Losses are equal on
    all processes, and so are the decisions.

    Without `run.spike_factor` and `run.max_rollbacks` nothing is kept and nothing is found.
    """

    def __init__(self, config: Config, history: Mapping[str, Any] | None = None):
        """`history` is that of an earlier LossWatch, as checkpoints hold it."""
        history = history or {"last": [], "spikes": 0}
        self.config = config
        self.is_on = config.run.spike_factor is not None or config.run.max_rollbacks > 0  # every loss is examined
        self.spikes: int = history["spikes"]  # found so far
        self._last = deque[float](history["last"], maxlen=config.run.spike_window)
        self._pending: list[tuple[int, jax.Array, jax.Array]] = []

    def saved(self, step: int) -> dict[str, Any]:
        """The entry of the description of the checkpoint of `step`; empty if nothing is watched.

        A bad step that nobody has examined is a warning: a notebook may save after an interrupted run.
        """
        if not self.is_on:
            return {}
        if bad := self.examine(step):
            warnings.warn(f"{explain(bad, self.config)}.", stacklevel=2)
        return {"losses": self.history}

    @property
    def history(self) -> dict[str, Any]:
        """What a resumed run needs to find the same spikes, for JSON: the last losses, and the number of spikes."""
        assert not self._pending, "examine the steps first"
        return {"last": list(self._last), "spikes": self.spikes}

    def keep(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        """Keep the loss of `step` for `examine`."""
        if self.is_on:
            self._pending.append((step, metrics["loss"], metrics["skipped_in_row"]))

    def examine(self, step: int) -> list[BadStep]:
        """The bad steps among those kept up to `step`; waits for them."""
        ready = [entry for entry in self._pending if entry[0] <= step]
        self._pending = self._pending[len(ready) :]
        found = (self._judged(*entry) for entry in jax.device_get(ready))
        return [bad for bad in found if bad is not None]

    def _judged(self, step: int, loss: Any, skipped_in_row: Any) -> BadStep | None:
        run, value = self.config.run, float(loss)
        if skipped_in_row or not math.isfinite(value):
            ends = run.max_rollbacks and skipped_in_row == run.max_nonfinite_steps + 1
            return BadStep(step, value, None) if ends else None
        full = len(self._last) == run.spike_window
        median = statistics.median(self._last) if full else math.inf
        self._last.append(value)
        if run.spike_factor is None or value <= _bound(run.spike_factor, median):
            return None
        self.spikes += 1
        return BadStep(step, value, median)


def _bound(factor: float, median: float) -> float:
    """The largest loss that is no spike: `factor` times the median if that is positive."""
    return median + (factor - 1) * abs(median)


def explain_nonfinite(in_row: int, config: Config, newest: int | None) -> str:
    """The error about too many steps in a row that are not finite; `newest` is the newest checkpoint's step."""
    saved = "no checkpoint was saved" if newest is None else f"the checkpoint of step {newest} is from before"
    weights = " and the weights of checkpoint.init_from" if config.checkpoint.init_from is not None else ""
    return (
        f"megajax: error: {counted(in_row, 'step')} in a row had a loss or gradient that is not finite, more than "
        f"run.max_nonfinite_steps={config.run.max_nonfinite_steps}; {saved}: "
        f"lower schedule.learning_rate or inspect the data of these steps{weights}, then start again."
    )


def explain(found: list[BadStep], config: Config) -> str:
    """The problem with the first of the bad steps that were found together."""
    (step, loss, median), run = found[0], config.run
    if median is None:
        count = run.max_nonfinite_steps + 1
        return f"{counted(count, 'step')} in a row, up to step {step}, had a loss or gradient that is not finite"
    assert run.spike_factor is not None
    more = f"; {len(found) - 1} more up to step {found[-1].step}" if len(found) > 1 else ""
    return (
        f"loss spike at step {step}: {loss:.4f} is above {_bound(run.spike_factor, median):.4f}, the bound of "
        f"run.spike_factor={run.spike_factor:g} and the median {median:.4f} of the last {run.spike_window} steps{more}"
    )
