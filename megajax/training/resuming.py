"""The start of a run: from its newest checkpoint, from other weights, or from new ones."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from megajax import cluster
from megajax.checkpoint import Checkpoints, agreed_steps, newest_good, reason
from megajax.checkpoint.description import SettingDifference
from megajax.checkpoint.elsewhere import link_checkpoints
from megajax.checkpoint.local_tier import LocalCheckpoint
from megajax.checkpoint.storage import store_errors
from megajax.config.sentences import located
from megajax.errors import InputError, UserError
from megajax.schema.batch_schedule import BatchSizes, Position, samples_before
from megajax.sources import Weights, initial_weights
from megajax.training import run_record
from megajax.training.continuing import ContinuedTraining
from megajax.training.local_saves import LocalSaves
from megajax.training.rollbacks import Rollback, Rollbacks
from megajax.training.saving import StateSaver
from megajax.training.step import TrainState

RESUME_STEP = "checkpoint.resume_step"


class ResumePoint:
    """The checkpoint from which a run resumes, if there is one, and the first state.

    resumed_step: the checkpoint's step or None; continued: another program's training, with which a run that has no
    checkpoint goes on, or None; step: the step of either, or 0; sizes: the sequences of each step from `step` on; seen:
    the steps of all complete checkpoints at the time of `find`; allowed: the settings that changed since the checkpoint
    and that `checkpoint.allow_changes` names; saved: its description; name: its name in messages; local: it, if it is
    in `checkpoint.local_dir`; rollbacks: those of the run so far.
    """

    def __init__(self, saver: StateSaver, checkpoints: Callable[[], Checkpoints], local: LocalSaves | None = None):
        """Find and compare the checkpoint, and read the weights of `checkpoint.init_from` if the run needs them.

        `checkpoints` opens those of the run directory, `local` those of `checkpoint.local_dir`. Raises InputError for a
        checkpoint of another run, or a damaged one, before any of its arrays is read.
        """
        self.saver, self.config, self._checkpoints = saver, saver.program.config, checkpoints
        self._local_saves = local
        self.run_dir = Path(self.config.run.dir)
        if self.config.checkpoint.dir is not None:
            cluster.current().first_decides(lambda: link_checkpoints(self.config))
        self.find()
        self._weights, self._teacher = self._other_weights(), saver.restore_teacher()

    @property
    def step(self) -> int:
        first = 0 if self.continued is None else self.continued.position.step
        return first if self.resumed_step is None else self.resumed_step

    def find(self) -> None:
        """Choose the checkpoint, and compare it with this run."""
        self.seen = agreed_steps(self.run_dir)
        # Whether `checkpoint.resume_step` is new: an earlier start with the same setting went back already.
        last = cluster.current().first_decides(lambda: run_record.previous_config(self.run_dir).get("checkpoint", {}))
        self._goes_back = self.config.checkpoint.resume_step not in (None, last.get("resume_step"))
        self._choose(self._step_to_resume())

    def _choose(self, step: int | None) -> None:
        """Resume from the checkpoint of `step`, a newer local one, or an older one if its description is damaged.

        None: there is none.
        """
        self.resumed_step, self.allowed = step, list[SettingDifference]()
        self.continued, self.sizes = None, BatchSizes.of(self.config)
        self.rollbacks = Rollbacks(self.config)
        self.saved: dict[str, Any] = {}
        self._local = self._newer_local_one()
        self.local_step = None if self._local is None else self._local.step
        if self._local is not None:
            self.resumed_step, self.saved = self._local.step, self._local.description
            self._compare(f"the local checkpoint of step {self.step} in {self._local.directory.parent}")
        elif step is not None:
            problem = self._checkpoints().damage(step, "description") or self._problem(lambda: self._describe(step))
            if problem:
                self._choose(self._older(step, problem))
        elif (continued := ContinuedTraining.of(self.saver)) is not None:
            self.continued, self.allowed = continued, continued.allowed
            self.sizes = BatchSizes.of(self.config, continued.position)

    def _describe(self, step: int) -> None:
        if step < self.config.run.steps:  # else there is nothing to do
            self.saver.require_optimizer_state(self._checkpoints(), step)
        self.saved = self._checkpoints().describe(step)
        self._compare(f"the checkpoint of step {step} in {self._checkpoints().directory}")

    def _compare(self, name: str) -> None:
        self.name = name
        position, self.allowed = self.saver.compare(self.saved, name)
        if not self.rollbacks.past:
            self._compare_epochs(position)
        self.sizes = BatchSizes.of(self.config, self.rollbacks.position(position))

    def _compare_epochs(self, position: Position) -> None:
        """Raise InputError if `run.epochs` are another number of steps, since earlier steps had another size."""
        config = self.config
        if config.run.epochs is not None and position.samples != samples_before(config, position.step):
            raise InputError(
                f"{self.name} was saved with another size of the batch, so {located(config, 'run.epochs')} says no "
                "number of steps: write the change as batch.schedule, keep the size, or set run.steps instead."
            )

    def _newer_local_one(self) -> LocalCheckpoint | None:
        if self._local_saves is None or self._goes_back:
            return None
        return self._local_saves.newest(self.resumed_step)

    def go_back(self, rollback: Rollback, frozen: dict[str, jax.Array]) -> TrainState:
        """The state from which a run continues after a rollback; `frozen` are the frozen weights of its last state.

        Later checkpoints and the metrics are set aside. A process that is killed meanwhile starts at the same position,
        or repeats the steps that led to the rollback.
        """
        step = rollback.step
        if self._local_saves is not None:
            self._local_saves.report(wait=True)
            self._local_saves.begin(None)  # removes the later ones
        later = [each for each in agreed_steps(self.run_dir) if each > step]
        cluster.current().first_decides(lambda: run_record.set_aside(self.run_dir, step, later))
        self.rollbacks.add(rollback)
        self._checkpoints().reload()
        self.resumed_step, self.local_step = step, None
        self.saved = self._checkpoints().describe(step)
        self.sizes = BatchSizes.of(self.config, Position(step, rollback.samples))
        cluster.current().first_decides(lambda: run_record.write_config(self.run_dir, self.config, step))
        state, problem = self._read(step)
        if state is None:
            raise InputError(
                f"the checkpoint {self._checkpoints().directory / str(step)} is damaged ({problem}), so the run can't "
                "go back to it: start the same command again to resume from an older one."
            )
        return replace(state, frozen=frozen)

    def state(self, say: Callable[[str], None] = lambda _: None) -> TrainState:
        """The first state; what was read for it is given away, so this may be called once.

        The files of the checkpoint are verified before they are read. If it is damaged, `step` and `sizes` are
        afterwards those of the newest good one before it. `say` tells the user which one is read.
        """
        weights, teacher = self._weights, self._teacher
        self._weights, self._teacher = None, {}
        state = self._without_teacher(weights, say)
        return replace(state, frozen=state.frozen | teacher)

    def _without_teacher(self, weights: Weights | None, say: Callable[[str], None]) -> TrainState:
        if self.resumed_step is not None:
            state = self._restored(say)
            if self.config.lora.rank and weights is not None:  # the base of its adapters
                state = self.saver.with_weights(state, (weights[0], {}))
                self.saver.compare_base(self.saved, self.name)
            return state
        state = self.saver.begun(weights)
        if self.continued is None:
            if weights is not None:
                say(f"starting with the weights of {initial_weights(self.config)}")
            return state
        say(str(self.continued))
        return self.continued.into(state)

    def _restored(self, say: Callable[[str], None]) -> TrainState:
        """The state of the newest good checkpoint, from `resumed_step` backwards."""
        while self._local is None:
            checkpoints = self._checkpoints()
            verified = "" if checkpoints.has_checksums(self.step) else ", which has no checksums, so it is not verified"
            say(f"resuming from {self.name}{verified}")
            state, problem = self._read(self.step)
            if state is not None:
                return state
            self._choose(self._older(self.step, problem))
        assert self._local_saves is not None
        say(f"resuming from {self.name}")
        state, self._local = self._local_saves.restore(self._local), None  # its file would stay mapped
        return state

    def _read(self, step: int) -> tuple[TrainState | None, str]:
        """The state of a checkpoint whose files have no damage on any process; or None and the problem."""
        checkpoints, states = self._checkpoints(), []
        if problem := checkpoints.damage(step):
            return None, problem
        problem = self._problem(lambda: states.append(self.saver.restore(checkpoints, step)))
        if problem and self.config.run.extensions and checkpoints.has_checksums(step):  # their arrays may have changed
            raise InputError(
                f"the checkpoint {checkpoints.directory / str(step)} cannot be read by this run ({problem}), but its "
                "files are as they were saved: bring back the code of run.extensions that saved it, or choose another "
                "run.dir."
            )
        return (None, problem) if problem else (states[0], "")

    def _older(self, step: int, problem: str) -> int:
        """The checkpoint before a damaged one. Raises InputError if there is none, or if the user chose `step`."""
        damaged = f"the checkpoint {self._checkpoints().directory / str(step)} is damaged ({problem})"
        if self._goes_back:
            good = newest_good(self.run_dir, [other for other in self.seen if other != step])
            cure = "choose another run.dir" if good is None else f"set it to {good}, the newest good one"
            raise InputError(f"{located(self.config, RESUME_STEP)}: {damaged}: {cure}.")
        older = [other for other in self.seen if other < step]
        if not older:
            cure = "choose another run.dir, or remove that directory to start from step 0"
            raise InputError(f"{damaged}, and there is no older one: {cure}.")
        warnings.warn(f"{damaged}: the run resumes from an older one.", stacklevel=2)
        return older[-1]

    def _step_to_resume(self) -> int | None:
        steps, wanted = self.seen, self.config.checkpoint.resume_step
        if not self._goes_back:
            return steps[-1] if steps else None
        if wanted not in steps:
            there = f"checkpoints of steps {', '.join(map(str, steps))}" if steps else "no checkpoints"
            key = located(self.config, RESUME_STEP)
            raise InputError(f"{key}: {self.run_dir} has {there}: choose one of them, or unset it.")
        return wanted

    def _other_weights(self) -> Weights | None:
        """Weights from elsewhere, read before this run writes anything; None if this run resumes, except with LoRA."""
        resumes = self.resumed_step is not None and self.config.lora.rank is None
        if self.config.checkpoint.init_from is None or resumes:
            return None
        if self.continued is not None:
            return self.continued.weights()
        return self.saver.restore_weights(self.config.checkpoint.init_from)

    def _problem(self, action: Callable[[], None]) -> str:
        """The reason why `action` fails on any process because of a damaged checkpoint; empty if it succeeds."""

        def find() -> str:
            try:
                with store_errors(self._checkpoints().directory):
                    action()
            except (UserError, jax.errors.JaxRuntimeError):  # the latter: for example, out of memory
                raise
            except Exception as error:  # any error of orbax
                return reason(error)
            return ""

        return cluster.current().first_problem(find)
