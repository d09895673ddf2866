"""Trainers whose steps a test decides. `next_batch`, `train_step` and `save` are public: a notebook calls them."""

import os
import signal

import jax

from megajax.training.loop import Trainer

METRICS = ("loss", "grad_norm", "learning_rate", "skipped", "skipped_in_row")


class QuickTrainer(Trainer):
    """Its steps change nothing and need no compilation."""

    stepped = False

    @property
    def is_compiled(self) -> bool:
        return self.stepped

    def compile(self) -> None:
        pass

    def train_step(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        self.step, self.stepped = self.step + 1, True
        return dict.fromkeys(METRICS, jax.numpy.ones(()))


class StoppedTrainer(Trainer):
    """SIGTERM comes after step `stop_at`."""

    stop_at = 1

    def train_step(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        metrics = super().train_step(batch)
        if self.step == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return metrics


class StoppedQuickTrainer(StoppedTrainer, QuickTrainer):
    """Both."""


class Killed(BaseException):
    """The end of a process, as far as one process can show it."""


class KilledTrainer(Trainer):
    """Its process is killed when it asks for the batch after step `killed_at`."""

    killed_at: int | None = None

    def next_batch(self) -> dict[str, jax.Array]:
        if self.step == self.killed_at:
            raise Killed
        return super().next_batch()


class KilledQuickTrainer(KilledTrainer, QuickTrainer):
    """Both."""
