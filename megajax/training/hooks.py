"""Hooks: all that happens beside the steps of a run, and what hooks see of the run."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import jax

from megajax.config import Config
from megajax.config.extensions import settings_of_hook
from megajax.config.sentences import listed
from megajax.errors import ConfigError, InputError, accepts, check_methods, shown
from megajax.options.registered import HOOKS
from megajax.schema.batch_schedule import BatchSizes
from megajax.training.spikes import Rollback
from megajax.training.step import TrainProgram, TrainState

SAVED = "hooks"  # of a checkpoint's description
type StopReason = int | Rollback  # the run's exit status, or the checkpoint at which it continues


class RunView:
    """A run as its hooks see it: they read it, and act on it only by `log`, `note`, `stop` and `end_with`.

    config, program: its settings, mesh and compiled functions; metrics: those of the newest step, still on the devices;
    sizes: the sequences of each step; asked_to_stop: a hook of this process has called `stop`; stopping: a stop was
    requested, so the run saves and ends after this step; end: how the run ends, once that is known; hooks: all, in the
    order in which they are called.
    """

    def __init__(
        self,
        program: TrainProgram,
        step: Callable[[], int],
        state: Callable[[], TrainState],
        note: Callable[[str], None],
        log: Callable[[int, Mapping[str, Any]], None],
    ):
        """`step` and `state` give the newest ones; `note` prints a line; `log` takes numbers of a step."""
        self.program, self.config, self.note = program, program.config, note
        self._step, self._state, self._log = step, state, log
        self.ask: Callable[[bool], None] = lambda done: None  # what takes the requests of `stop`
        self.asked_to_stop = False
        self.hooks, self.is_running, self.sizes = list[Hook](), False, BatchSizes.of(program.config)
        self.metrics, self.stopping, self.end = dict[str, jax.Array](), False, cast("StopReason | None", None)

    def begin(self, sizes: BatchSizes) -> None:
        """The run begins, or continues after a rollback; `sizes` are the sequences of each step."""
        self.is_running, self.sizes, self.metrics, self.stopping, self.end = True, sizes, {}, False, None
        for hook in self.hooks:
            hook.on_start(self)

    @property
    def step(self) -> int:
        """The number of steps that have been started."""
        return self._step()

    @property
    def state(self) -> TrainState:
        """The state after `step`; the next step takes its memory, so keep results, not its arrays."""
        return self._state()

    @property
    def is_last(self) -> bool:
        """Whether the newest step is the last one of the config."""
        return self.step == self.config.run.steps

    @property
    def is_ending(self) -> bool:
        """Whether the run saves and ends after this step."""
        return self.is_last or self.stopping

    def log(self, values: Mapping[str, Any]) -> None:
        """Add numbers, or arrays on the devices, to the line of the newest step in metrics.jsonl and all services.

        Arrays are read one step late, so the devices do not wait for the host. Of a step that is not logged, the
        numbers are a line of their own.
        """
        if not isinstance(values, Mapping) or not all(isinstance(name, str) and name for name in values):
            raise InputError(f'run.log({shown(repr(values))}) has no numbers by name: give {{"NAME": NUMBER, ...}}.')
        self._log(self.step, values)

    def stop(self, done: bool = False) -> None:
        """Request a stop with a checkpoint, as a signal does; one more step, or a few of several processes, come first.

        `done`, on all processes: the run is complete then, as after its last step.
        """
        self.asked_to_stop = True
        self.ask(done)

    def end_with(self, end: StopReason) -> None:
        """End the run without a checkpoint, or let it go back; the first end counts."""
        self.end = end if self.end is None else self.end


def user_hooks(config: Config, given: Iterable["Hook"]) -> list["Hook"]:
    """Those of `run.hooks` and the `given` ones, which have checked the config. Raises ConfigError or InputError."""
    if isinstance(given, Hook) or not isinstance(given, Iterable):
        raise InputError(f"hooks={shown(given)} is no list: give [{shown(type(given).__name__)}(...)].")
    made = [*(make_hook(config, name) for name in config.run.hooks), *given]
    for hook in made:
        check_hook(hook)
        hook.check(config)
    return made


def make_hook(config: Config, name: str) -> Any:
    """The hook that is registered by `name`, made with its settings, if it has some."""
    make, settings = HOOKS[name].make, settings_of_hook(config, name)
    given = [] if settings is None else [settings]
    if not callable(make) or not accepts(make, *given):
        takes = "its settings alone, __init__(self, settings)" if given else "no arguments, or declare a class Settings"
        raise ConfigError(f"the hook {name} ({shown(make)}) cannot be made: let it take {takes}.")
    return make(*given)


def check_hook(hook: Any) -> None:
    """Raise InputError for a hook that is none, that no run would call, or that takes other arguments."""
    name = type(hook).__name__
    if not isinstance(hook, Hook):
        is_class = isinstance(hook, type) and issubclass(hook, Hook)
        cure = f"give one that is made, {hook.__name__}(...)" if is_class else "derive its class from megajax.Hook"
        raise InputError(f"the hook {shown(hook)} is of the type {name}, not a Hook: {cure}.")
    if not isinstance(hook.every, int) or hook.every < 1:
        raise InputError(f"the hook {name} has every={shown(repr(hook.every))}: set it to a number of 1 or more.")
    known = [method for method in vars(Hook) if callable(getattr(Hook, method)) and not method.startswith("__")]
    if unknown := sorted(each for each in dir(hook) if each.startswith("on_") and each not in known):
        raise InputError(f"the hook {name} has {unknown[0]}, which no run calls: use {listed(known, 'or')}.")
    check_methods(type(hook), Hook)


def saved_of_hooks(hooks: Sequence["Hook"]) -> dict[str, Any]:
    """The entry of a checkpoint's description with what hooks keep; InputError for what JSON does not have."""
    found = dict[str, list[Any]]()
    for hook in hooks:
        state = hook.state_dict()
        try:
            json.dumps(state, allow_nan=False)
        except (TypeError, ValueError) as error:
            problem = (
                f"state_dict of the hook {type(hook).__name__} gives {shown(repr(state))}, which JSON does not have"
            )
            raise InputError(f"{problem} ({error}): give numbers, texts, lists and dictionaries of them.") from None
        found.setdefault(type(hook).__name__, []).append(state)
    kept = {name: each for name, each in found.items() if any(state is not None for state in each)}
    return {SAVED: kept} if kept else {}


def restore_hooks(hooks: Sequence["Hook"], description: Mapping[str, Any]) -> None:
    """Give hooks what a checkpoint of this description kept of them: those of one class in their order."""
    for name, kept in description.get(SAVED, {}).items():
        same = [hook for hook in hooks if type(hook).__name__ == name]
        for hook, state in zip(same, kept, strict=False):  # another one may have come or gone
            if state is not None:
                hook.load_state_dict(state)


class Hook:
    """What happens beside the steps of a run, on every process; by default each method does nothing.

    `on_step` is called for each `every`-th step, whose numbers are still on the devices; `on_log` for each logged step,
    with its numbers, after the next step has been started (at a save, an evaluation and the run's end at once);
    `examine` before each `on_log` and each save, for hooks that keep arrays of every step to read them later.
    """

    every = 1  # `on_step` is called after the steps that are multiples of it

    def check(self, config: Config) -> None:
        """Raise ConfigError for a config with which the hook cannot run; nothing is compiled yet."""

    def state_dict(self) -> Any:
        """What checkpoints keep of this hook, as JSON has it; None: nothing. That of process 0 counts."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """The run goes on from a checkpoint that kept this, before `on_start`."""

    def on_start(self, run: RunView) -> None:
        """The run begins at `run.step`, or continues there after a rollback."""

    def before_step(self, run: RunView, batch: dict[str, jax.Array]) -> None:
        """The next step will train `run.state` on `batch`."""

    def on_step(self, run: RunView) -> None:
        """A step has been started: the devices may still compute it, and whoever reads an array waits for them."""

    def examine(self, run: RunView, step: int) -> None:
        """Read what was kept of the steps up to `step`: they are finished, or a save will wait for them."""

    def on_log(self, run: RunView, step: int, values: dict[str, Any]) -> None:
        """The numbers of the logged step `step` have been read; more can be added to its line.

        By then `run.step` is one more, except before saves and evaluations.
        """

    def on_save(self, run: RunView, step: int) -> None:
        """The checkpoint of `step` is complete."""

    def before_removal(self, run: RunView) -> None:
        """Checkpoints may be removed or moved after this: finish reading them."""

    def on_evaluate(self, run: RunView, losses: Mapping[str, float]) -> None:
        """The model of `run.step` was evaluated.

        The losses, and the objective's METRICS beside them, have their names in metrics.jsonl.
        """

    def on_end(self, run: RunView) -> None:
        """The run ends, in order or with an error; no step follows."""
