"""The start of a run: from its newest checkpoint, from other weights, or from new ones."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from megajax.checkpoint import Checkpoints, complete_steps, reason
from megajax.checkpoint.description import Difference, has_optimizer_state
from megajax.config.batch_schedule import BatchSizes
from megajax.errors import InputError, UserError
from megajax.training import run_record
from megajax.training.saving import StateSaver, Weights
from megajax.training.step import TrainState


class Start:
    """The checkpoint from which a run resumes, if there is one, and the first state.

    resumed_step: the checkpoint's step or None; step: the same or 0; sizes: the sequences of each step from `step` on;
    seen: the steps of all complete checkpoints at the time of `find`; allowed: the settings that changed since the
    checkpoint and that `checkpoint.allow_changes` names.
    """

    def __init__(self, saver: StateSaver, checkpoints: Callable[[], Checkpoints]):
        """Find and compare the checkpoint, and read the weights of `checkpoint.init_from` if the run needs them.

        `checkpoints` opens those of the run directory. Raises InputError for a checkpoint of another run, or a damaged
        one, before any of its arrays is read.
        """
        self.saver, self.config, self._checkpoints = saver, saver.program.config, checkpoints
        self.run_dir = Path(self.config.run.dir)
        self.find()
        self._weights = self._other_weights()

    @property
    def step(self) -> int:
        return self.resumed_step or 0

    def find(self) -> None:
        """Choose the checkpoint, and compare it with this run."""
        self.seen = complete_steps(self.run_dir)
        self.resumed_step, self.sizes = self._step_to_resume(), BatchSizes.of(self.config)
        self.allowed: list[Difference] = []
        if self.resumed_step is None:
            return
        with self._damage_reported(self.resumed_step):
            if self.step < self.config.run.steps:  # else there is nothing to do
                self.saver.require_optimizer_state(self._checkpoints(), self.resumed_step)
            position, self.allowed = self.saver.compare(self._checkpoints(), self.resumed_step)
            self.sizes = BatchSizes.of(self.config, position)

    def state(self) -> TrainState:
        """The first state; what was read for it is given away, so this may be called once."""
        weights, self._weights = self._weights, None
        if self.resumed_step is not None:
            with self._damage_reported(self.resumed_step):
                state = self.saver.restore(self._checkpoints(), self.resumed_step)
            if self.config.lora.rank and weights is not None:  # the base of its adapters
                state = self.saver.with_weights(state, (weights[0], {}))
                self.saver.compare_base(self._checkpoints(), self.resumed_step)
            return state
        program = self.saver.program
        if weights is None:
            return program.init_state()
        return self.saver.with_weights(program.init_state(params=False), weights)

    def _step_to_resume(self) -> int | None:
        steps, wanted = self.seen, self.config.checkpoint.resume_step
        before = run_record.previous_config(self.run_dir).get("checkpoint", {}).get("resume_step")
        step = steps[-1] if steps else None
        if wanted is not None and wanted != before:  # an earlier start with the same setting went back already
            if wanted not in steps:
                raise InputError(
                    f"checkpoint.resume_step={wanted} ({self.config.where('checkpoint.resume_step')}): {self.run_dir} "
                    f"has {'checkpoints of steps ' + ', '.join(map(str, steps)) if steps else 'no checkpoints'}: "
                    "choose one of them, or unset it."
                )
            step = wanted
        return step

    def _other_weights(self) -> Weights | None:
        """Weights from elsewhere, read before this run writes anything; None if this run resumes, except with LoRA."""
        resumes = self.resumed_step is not None and self.config.lora.rank is None
        if self.config.checkpoint.init_from is None or resumes:
            return None
        return self.saver.restore_weights(self.config.checkpoint.init_from)

    @contextlib.contextmanager
    def _damage_reported(self, step: int) -> Iterator[None]:
        """Turns orbax's errors about a damaged checkpoint into a sentence that names the newest readable one."""
        try:
            yield
        except (UserError, jax.errors.JaxRuntimeError):  # the latter: for example, out of memory
            raise
        except Exception as error:
            older = (good for good in reversed(complete_steps(self.run_dir)) if good < step and self._reads(good))
            good = next(older, None)
            cure = "choose another run.dir, or remove that directory to start from step 0"
            if good is not None:
                cure = f"set checkpoint.resume_step={good} to resume from the newest readable one"
            path = self._checkpoints().directory / str(step)
            raise InputError(f"the checkpoint {path} is damaged ({reason(error)}): {cure}.") from None

    def _reads(self, step: int) -> bool:
        try:
            if not has_optimizer_state(self._checkpoints().describe(step)):
                return False
            self.saver.restore(self._checkpoints(), step)
        except (UserError, jax.errors.JaxRuntimeError):
            raise
        except Exception:
            return False
        return True
