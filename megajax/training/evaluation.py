"""Evaluations of a run: the mean loss of each validation split, and the means of the objective's METRICS."""

import itertools
from collections.abc import Callable, Iterable

import jax

from megajax.config import Config
from megajax.config.sentences import located
from megajax.data.loader import Split
from megajax.data.samples import Samples
from megajax.data.whole import WholeSet
from megajax.errors import ConfigError
from megajax.options.registered import own_metrics
from megajax.sources import LayerState
from megajax.training import logs
from megajax.training.batches import batches
from megajax.training.hooks import Hook, RunView
from megajax.training.step import TrainProgram
from megajax.training.step_log import StepLog
from megajax.training.watch import Watch


class Evaluation(Hook):
    """Evaluates every `run.eval_interval` steps, and after the last one."""

    def __init__(self, splits: Iterable[Split], evaluate: Callable[..., dict[str, float]], log: StepLog, watch: Watch):
        """`evaluate(split, averaged)` gives the means by name."""
        self._splits = _evaluated(splits)
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
                self._report(run, "eval_", "evaluation loss", averaged=False)
                if run.config.optimizer.ema_decay:
                    self._report(run, "ema_eval_", "evaluation loss of the averaged weights", averaged=True)
        if due:
            self._log.restart(run.step)

    def _report(self, run: RunView, prefix: str, title: str, averaged: bool) -> None:
        if not self._splits:
            return
        by_split = {split: self._evaluate(split, averaged) for split in self._splits}
        found = {
            _logged(prefix, name, split): mean
            for split, of_split in by_split.items()
            for name, mean in of_split.items()
        }
        for hook in run.hooks:
            hook.on_evaluate(run, found)
        self._log.write_line(run.step, found)
        own = own_metrics(run.config.objective.kind)
        named = (
            " ".join([split.partition("/")[2], f"{of_split['loss']:.4f}", *logs.named_numbers(of_split, own)]).strip()
            for split, of_split in by_split.items()
        )
        run.note(f"step {run.step}  {title} {', '.join(named)}")


def _evaluated(splits: Iterable[Split]) -> list[Split]:
    return [split for split in splits if split.partition("/")[0] == "valid"]


def _logged(prefix: str, name: str, split: Split) -> str:
    """The name in metrics.jsonl, such as eval_loss, or eval_loss/code of one of `data.valid_sets`."""
    return f"{prefix}{name}{split.removeprefix('valid')}"


def check_best(config: Config, splits: Iterable[Split]) -> None:
    """Raises ConfigError if the evaluations do not give what `checkpoint.keep_best` chooses by."""
    if config.checkpoint.keep_best is None:
        return
    if not (evaluated := _evaluated(splits)):
        problem = f"{located(config, 'checkpoint.keep_best')} needs evaluations, but there is no data.valid"
        raise ConfigError(f"{problem}: set it, or data.split.")
    prefixes = ("eval_", "ema_eval_") if config.optimizer.ema_decay else ("eval_",)
    parts = itertools.product(prefixes, ("loss", *own_metrics(config.objective.kind)), evaluated)
    names = [_logged(*each) for each in parts]
    if config.checkpoint.best_by.split()[1] not in names:
        problem = f"{located(config, 'checkpoint.best_by')} names nothing that this run's evaluations give"
        raise ConfigError(f"{problem}: write lowest or highest before one of {', '.join(names)}.")


def means(
    program: TrainProgram,
    split: Split,
    samples: Samples,
    weights: dict[str, jax.Array],
    layer_state: LayerState,
    wait: Callable[[jax.Array], None],
) -> dict[str, float]:
    """The mean `loss`, and those of the objective's METRICS, over `run.eval_steps` batches of a split.

    They are always the same ones; all: each sample once. `wait` keeps the host from running far ahead of a result.
    """
    config, count = program.config, 0.0
    steps, sums = config.run.eval_steps, dict.fromkeys(("loss", *own_metrics(config.objective.kind)), 0.0)
    if not isinstance(steps, int):
        assert isinstance(samples, WholeSet)
        steps = -(-len(samples) // config.batch.global_size)
    source = batches(program, split, samples)
    for batch in itertools.islice(source, steps):
        of_batch, counted = program.eval_step(weights, layer_state, batch)
        wait(of_batch["loss"])
        sums, count = {name: total + of_batch[name] for name, total in sums.items()}, count + counted
    source.close()  # ends the loader's threads too
    return {name: float(total / count) for name, total in sums.items()}
