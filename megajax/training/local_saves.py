"""The saves of a run to `checkpoint.local_dir`, and the newest of them at a start."""

import hashlib
import json
import uuid
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megajax import cluster
from megajax.checkpoint.local_tier import LocalCheckpoint, LocalTier
from megajax.config.sentences import located
from megajax.console import size
from megajax.errors import InputError
from megajax.files import replace_text
from megajax.mesh import mesh_sizes
from megajax.training import logs
from megajax.training.saving import StateSaver
from megajax.training.step import TrainProgram, TrainState

RUN_ID = "run_id"  # file in the run directory; a new run in the same directory is another one


class LocalSaves:
    """The local checkpoints of a run: all processes call each method at the same step."""

    def __init__(self, saver: StateSaver, note: Callable[[str], None]):
        """`note` prints a line. Call it only with `checkpoint.local_dir` set."""
        program = saver.program
        self.config, self._saver, self._note = program.config, saver, note
        self._abstract = replace(program.abstract_state, frozen={})
        self._layout = _layout(program)
        self._tier: LocalTier | None = None
        self._told = self._warned = False

    def newest(self, durable: int | None) -> LocalCheckpoint | None:
        """The local checkpoint to resume from, if it is newer than the durable one; a line gives the reason if not."""
        if (tier := self._find_tier()) is None:
            return None
        found, why = tier.newest(-1 if durable is None else durable, self._abstract)
        if why:
            other = "the run begins again" if durable is None else f"the run resumes from step {durable}"
            logs.say(f"a local checkpoint is newer, but {why}: {other}")
        return found

    def restore(self, checkpoint: LocalCheckpoint) -> TrainState:
        """The state of a checkpoint that `newest` gave, without frozen weights."""
        return checkpoint.tree(self._abstract)

    def begin(self, keep: int | None) -> None:
        """Prepare the directory for a run that goes on from the local checkpoint of step `keep`, or from another one.

        Raises InputError if it cannot be written.
        """
        path = Path(self.config.run.dir) / RUN_ID
        cluster.current().first_decides(lambda: None if path.exists() else replace_text(path, uuid.uuid4().hex))
        tier = self._find_tier()
        assert tier is not None
        try:
            tier.prepare(keep)
        except OSError as error:
            raise InputError(
                f"{located(self.config, 'checkpoint.local_dir')}: {tier.directory} cannot be written "
                f"({error.strerror}): choose a directory that you may write to."
            ) from None

    def is_due(self, step: int) -> bool:
        """Whether the state after `step` is saved."""
        interval = self.config.checkpoint.local_interval
        return interval is not None and step % interval == 0

    def save(self, step: int, state: TrainState, samples: int, **more: Any) -> None:
        """Start a save of the state after `step`, which has read `samples`; it waits for the save before it.

        `more` are further entries of its description.
        """
        assert self._tier is not None
        self.report()
        if self._tier.is_writing and not self._warned:
            self._warned = True
            key = located(self.config, "checkpoint.local_interval")
            self._note(
                f"megajax: warning: {key} is too short: at step {step} the last local checkpoint is not written yet, "
                "so training waits for it: set it higher"
            )
        self.report(wait=True)
        self._tier.save(step, replace(state, frozen={}), self._saver.description(step, samples) | more)

    def report(self, wait: bool = False) -> None:
        """Report the end of a save: the first one with its speed, and every failure on its own process."""
        if self._tier is None or (done := self._tier.outcome(wait)) is None:
            return
        if done.error is not None:
            problem = f"the local checkpoint of step {done.step} could not be saved in {self._tier.directory}"
            warnings.warn(f"{problem} ({done.error}); training continues.", stacklevel=2)
        elif not self._told:
            self._told = True
            written = f"{size(done.size)} in {done.seconds:.1f} s beside training"
            self._note(f"saved step {done.step} in {self._tier.directory} ({written})")

    def end(self, step: int, durable: int | None) -> None:
        """At the end of a run at `step`: remove the local checkpoints if the newest durable one is of that step."""
        self.report(wait=True)
        if self._tier is not None and durable == step:
            self._tier.remove()

    def _find_tier(self) -> LocalTier | None:
        """The run's directory in `checkpoint.local_dir`; None if the run has none yet."""
        run_dir = Path(self.config.run.dir).resolve()
        path = run_dir / RUN_ID
        run_id = cluster.current().first_decides(lambda: path.read_text(encoding="utf-8") if path.is_file() else "")
        if run_id and self._tier is None:
            assert self.config.checkpoint.local_dir is not None
            self._tier = LocalTier(self.config.checkpoint.local_dir, tier_name(run_dir, run_id), self._layout)
        return self._tier if run_id else None


def tier_name(run_dir: Path, run_id: str) -> str:
    """The name of a run's directory in `checkpoint.local_dir`; `run_dir` is resolved."""
    # A copy of a run directory has the same id and another path.
    digest = hashlib.sha256(f"{run_id} {run_dir}".encode()).hexdigest()[:16]
    return f"{run_dir.name}-{digest}"


def _layout(program: TrainProgram) -> str:
    """What decides the meaning of stored shards besides their shapes and slices."""
    placements = {name: repr(placement) for name, placement in program.placements.items()}
    split = {"master": "split"} if program.config.optimizer.master == "split" else {}
    return json.dumps(
        {
            **split,
            "optimizer": "slots",  # the names of its arrays
            "mesh": mesh_sizes(program.mesh),
            "processes": cluster.current().size,
            "compute": program.config.precision.compute,  # the loss scale is of it
            "placements": hashlib.sha256(json.dumps(placements).encode()).hexdigest(),
        }
    )
