"""The checks of the numbers of each step, and what follows from them: a warning, a rollback, or the end of the run."""

from collections.abc import Callable, Mapping, Sequence

import jax

from megajax.checkpoint import Checkpoints
from megajax.config.batch_schedule import BatchSizes
from megajax.console import BAD_NUMBERS
from megajax.training import replicas, spikes
from megajax.training.norms import Norms
from megajax.training.replicas import ReplicaCheck
from megajax.training.resuming import Start
from megajax.training.rollbacks import Rollback
from megajax.training.spikes import LossWatch
from megajax.training.step import TrainProgram, TrainState

type End = int | Rollback  # of some steps: the run's exit status, or the checkpoint at which it continues


class NumberChecks:
    """Keeps numbers of each step on the devices, and examines them at log points and before a save.

    losses: the LossWatch of the steps since `begin`. norms: the Norms that are logged.
    """

    def __init__(self, program: TrainProgram, note: Callable[[str], None], event: Callable[[str, int, str], None]):
        """`note` prints a line; `event(kind, step, text)` tells others of it."""
        self.config, self._note, self._event = program.config, note, event
        self._replicas, self.norms = ReplicaCheck(program), Norms(program)

    def begin(self, start: Start) -> None:
        """The run begins, or continues after a rollback, at the step of `start`."""
        self.losses, self._rollbacks = LossWatch(self.config, start.saved.get("losses")), start.rollbacks

    def compile(self, sizes: Sequence[int]) -> None:
        """Compile the programs that the options need for global batches of `sizes` sequences."""
        self._replicas.compile()
        self.norms.compile(sizes)

    def stepped(self, step: int, state: TrainState, metrics: Mapping[str, jax.Array], before_save: bool) -> None:
        """Keep the numbers of `step`, which led to `state`; the host does not wait."""
        self.losses.keep(step, metrics)
        self._replicas.start(step, state, before_save)

    def examine(self, step: int, sizes: BatchSizes, saved: Callable[[], Checkpoints]) -> End | None:
        """Report what is wrong in the steps up to `step`; the end, if they must not stand.

        `saved` gives the checkpoints after the last save has ended.
        """
        if damage := self._replicas.damage():
            self._note(replicas.sentence(*damage, saved().latest_step))
            return BAD_NUMBERS
        if not (bad := self.losses.examine(step)):
            return None
        rollback, line = self._rollbacks.plan(bad, sizes, saved)
        self._note(f"megajax: warning: {line}")
        self._event("spike" if rollback is None else "rollback", bad[0].step, line)
        return rollback

    def examine_row(self, skipped_in_row: int, checkpoints: Checkpoints) -> int | None:
        """BAD_NUMBERS after too many steps in a row with numbers that are not finite."""
        if skipped_in_row <= self.config.run.max_nonfinite_steps:
            return None
        self._note(spikes.nonfinite_sentence(skipped_in_row, self.config, checkpoints.latest_step))
        return BAD_NUMBERS
