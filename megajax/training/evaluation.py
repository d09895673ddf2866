"""Evaluations of a run: the mean loss of each validation split."""

import itertools
from collections.abc import Callable, Iterable

import jax

from megajax.data.loader import Split
from megajax.data.samples import Samples
from megajax.data.whole import WholeSet
from megajax.sources import LayerState
from megajax.training.batches import batches
from megajax.training.hooks import Hook, RunView
from megajax.training.step import TrainProgram
from megajax.training.step_log import StepLog
from megajax.training.watch import Watch


class Evaluation(Hook):
    """Evaluates every `run.eval_interval` steps, and after the last one."""

    def __init__(self, splits: Iterable[Split], evaluate: Callable[..., float], log: StepLog, watch: Watch):
        """`evaluate(split, averaged)` gives the mean loss."""
        self._splits = [split for split in splits if split.partition("/")[0] == "valid"]
        self._evaluate, self._log, self._watch = evaluate, log, watch

    def on_step(self, run: RunView) -> None:
        settings = run.config.run
        due = bool(settings.eval_interval) and run.step % settings.eval_interval == 0
        if settings.eval_steps and (due or run.is_last):
            self._log.read_waiting(run)
            self._log.write(run)  # before the evaluation, which may fail
            if run.end is not None:
                return
            with self._watch.working("the evaluation"):
                self._report(run, "eval_loss", "evaluation loss", averaged=False)
                if run.config.optimizer.ema_decay:
                    self._report(run, "ema_eval_loss", "evaluation loss of the averaged weights", averaged=True)
        if due:
            self._log.restart(run.step)

    def _report(self, run: RunView, name: str, title: str, averaged: bool) -> None:
        if not self._splits:
            return
        losses = {split: self._evaluate(split, averaged) for split in self._splits}
        found = {name + split.removeprefix("valid"): loss for split, loss in losses.items()}
        for hook in run.hooks:
            hook.on_evaluate(run, found)
        self._log.write_line(run.step, found)
        named = (f"{split.partition('/')[2]} {loss:.4f}".strip() for split, loss in losses.items())
        run.note(f"step {run.step}  {title} {', '.join(named)}")


def mean_loss(
    program: TrainProgram,
    split: Split,
    samples: Samples,
    weights: dict[str, jax.Array],
    layer_state: LayerState,
    wait: Callable[[jax.Array], None],
) -> float:
    """Mean loss per token over `run.eval_steps` batches of a split, always the same ones; all: each sample once.

    `wait` keeps the host from running far ahead of a result.
    """
    steps, loss, tokens = program.config.run.eval_steps, 0.0, 0.0
    if not isinstance(steps, int):
        assert isinstance(samples, WholeSet)
        steps = -(-len(samples) // program.config.batch.global_size)
    source = batches(program, split, samples)
    for batch in itertools.islice(source, steps):
        batch_loss, batch_tokens = program.eval_step(weights, layer_state, batch)
        wait(batch_loss)
        loss, tokens = loss + batch_loss, tokens + batch_tokens
    source.close()  # ends the loader's threads too
    return float(loss / tokens)
