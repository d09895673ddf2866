"""One small adapter around orbax's CheckpointManager.

A checkpoint holds plain trees of canonical arrays and a JSON description; nothing about the mesh enters it. The
description is compared before any array is read, so that a checkpoint of another model is one sentence, not orbax's
thousand lines.
"""

import logging
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from megajax.config import ModelConfig
from megajax.config.fields import shortest_pattern
from megajax.config.kinds import MOE
from megajax.config.tree import show
from megajax.errors import InputError, UserError

EXPERTS = "experts"  # what MoE layers keep, in a checkpoint
SUBDIRECTORY = "checkpoints"
# What of the router makes it another network; the rest balances it in training.
ROUTER_OF_NETWORK = (
    "score_function",
    "pre_softmax",
    "normalise",
    "scaling_factor",
    "num_groups",
    "groups_per_token",
    "expert_bias",
)


@dataclass(frozen=True)
class SaveOutcome:
    """How a save ended: its step, bytes of arrays, seconds that training waited for it; why it failed."""

    step: int
    size: int
    waited: float
    error: str | None = None


class Checkpoints:
    """The checkpoints of one run directory."""

    def __init__(self, run_dir: str | Path, keep: int, keep_every: int | None):
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax reports every file, and each failure many times
        asyncio_log = logging.getLogger("asyncio")
        asyncio_log.removeFilter(_is_news)
        asyncio_log.addFilter(_is_news)
        self.directory = (Path(run_dir) / SUBDIRECTORY).resolve()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, keep_period=keep_every, enable_async_checkpointing=True
        )
        self._manager = ocp.CheckpointManager(self.directory, options=options)
        self._started: SaveOutcome | None = None

    @property
    def latest_step(self) -> int | None:
        """The newest complete checkpoint's step; None if there is none."""
        return self._manager.latest_step()

    def reload(self) -> None:
        """Look at the directory again, after others changed it."""
        self._manager.reload()

    def save(self, step: int, tree: Any, description: dict[str, Any]) -> None:
        """Start writing a tree of arrays and its description; returns as soon as the arrays are copied to the host.

        `outcome` tells how it ended, and must have been asked after the save before.
        """
        assert self._started is None, "ask for the outcome of the last save first"
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(tree),  # type: ignore[call-arg]
            description=ocp.args.JsonSave(description),  # type: ignore[call-arg]
        )
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
        start, error = time.perf_counter(), None
        try:
            if not self._manager.save(step, args=args):
                error = f"a checkpoint of step {self.latest_step} stands already"
        except Exception as problem:  # whatever orbax and the file system raise
            error = reason(problem)
        self._started = SaveOutcome(step, size, time.perf_counter() - start, error)

    def outcome(self, wait: bool = False) -> SaveOutcome | None:
        """How the last save ended, once; None while it is under way (unless `wait`), or if there is nothing to tell."""
        if self._started is None:
            return None
        if not wait and self._started.error is None and self._manager.is_saving_in_progress():
            return None
        started, self._started, error = self._started, None, self._started.error
        start = time.perf_counter()
        try:
            self._manager.wait_until_finished()
        except Exception as problem:
            error = error or reason(problem)
        waited = started.waited + time.perf_counter() - start
        if error is not None:
            if jax.process_index() == 0:
                for part in self.directory.glob(f"{started.step}.orbax-checkpoint-tmp*"):
                    shutil.rmtree(part, ignore_errors=True)  # or it would go on filling the disk
            self._manager.reload()  # orbax has forgotten the checkpoint that the failed one was to replace
        return SaveOutcome(started.step, started.size, waited, error)

    def describe(self, step: int) -> dict[str, Any]:
        """The description of a checkpoint."""
        args = ocp.args.Composite(description=ocp.args.JsonRestore())  # type: ignore[call-arg]
        return self._manager.restore(step, args=args)["description"]

    def restore(self, step: int, abstract: Any) -> Any:
        """The tree of a checkpoint, in the shapes, dtypes and shardings of `abstract`."""
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))  # type: ignore[call-arg]
        return self._manager.restore(step, args=args)["state"]

    def wait(self) -> None:
        """Until the last save is on disk. Raises InputError if it failed."""
        outcome = self.outcome(wait=True)
        if outcome is not None and outcome.error is not None:
            raise InputError(
                f"the checkpoint of step {outcome.step} could not be saved in {self.directory} ({outcome.error}): "
                "make room there, or choose another run.dir."
            )

    def close(self) -> None:
        """Finish and release. Raises InputError if the last save failed."""
        try:
            self.wait()
        finally:
            self._manager.close()


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line of asyncio's log is about anything but the parts of a save that fail after the first."""
    return "exception was never retrieved" not in record.getMessage()


def reason(error: BaseException) -> str:
    """Why a save or a restore failed, in a few words."""
    text = str(error).strip() or type(error).__name__
    known = (
        "No space left on device",
        "File too large",
        "Disk quota exceeded",
        "Permission denied",
        "Read-only file system",
    )
    return next((reason for reason in known if reason in text), text.splitlines()[0][:200])


def describe_model(model: ModelConfig) -> dict[str, Any]:
    """What makes two models the same network; rates of training may change from run to run."""
    training_only = {"dropout", "init_std", "depth_scaled_init", "z_loss"}
    description = model.model_dump(mode="json", exclude=training_only)
    router = description.pop("router")
    if model.num_experts is None:  # as checkpoints described dense models before there were others
        return {name: value for name, value in description.items() if "expert" not in name}
    return description | {f"router.{name}": router[name] for name in ROUTER_OF_NETWORK}


def complete_steps(run_dir: str | Path) -> list[int]:
    """The steps of a run directory's complete checkpoints, oldest first; nothing is created."""
    return sorted(int(path.name) for path in (Path(run_dir) / SUBDIRECTORY).glob("*") if path.name.isdigit())


def find_checkpoint(path: str | Path, asker: str, place: str = "") -> tuple[Path, int]:
    """(run directory, step) of one checkpoint `RUN/checkpoints/STEP`, or of the newest complete one of a run.

    `asker` names the setting that `path` comes from, `place` where it was set. Raises InputError if there is none.
    """
    given = Path(path)
    one = given.parent.name == SUBDIRECTORY and given.name.isdigit()
    run_dir = given.parent.parent if one else given
    if not (run_dir / SUBDIRECTORY).is_dir():
        raise InputError(
            f"{asker}={path}{place} has no {SUBDIRECTORY}: give the directory of a run, or RUN/{SUBDIRECTORY}/STEP."
        )
    steps = complete_steps(run_dir)
    if not steps:
        raise InputError(f"{asker}={path}{place} has no complete checkpoint: give another run.")
    if one and int(given.name) not in steps:
        raise InputError(
            f"{asker}={path}{place} does not exist: {run_dir} has checkpoints of steps {', '.join(map(str, steps))}."
        )
    return run_dir, int(given.name) if one else steps[-1]


def compare_descriptions(
    saved: dict[str, Any], mine: dict[str, Any], place: str, keys: tuple[str, ...], other: str
) -> None:
    """Raise InputError where a checkpoint's description differs from this run's under one of `keys`.

    `place` says which checkpoint, `other` what else than changing the key would help.
    """
    # A checkpoint from before a model key existed had what is its default today.
    defaults = {"model": {name: field.default for name, field in ModelConfig.model_fields.items()}}
    for key in keys:
        for name in {**saved[key], **mine[key]}:
            theirs, ours = saved[key].get(name, defaults.get(key, {}).get(name)), mine[key].get(name)
            if name == "layer_pattern" and theirs:  # saved as it was written, before patterns were shortened
                theirs = list(shortest_pattern(tuple(theirs), saved[key]["num_layers"]))
            if theirs != ours:
                raise InputError(
                    f"{place} was saved with {key}.{name}={show(theirs)}, and this run has {show(ours)}: "
                    f"set {key}.{name}={show(theirs)}, or {other}."
                )


def restore_model(
    path: str,
    params: Mapping[str, jax.ShapeDtypeStruct],
    layer_state: Mapping[str, Mapping[str, jax.ShapeDtypeStruct]],
    model: ModelConfig,
    asker: str,
    place: str = "",
) -> tuple[dict[str, jax.Array], dict[str, dict[str, jax.Array]]]:
    """Parameters and what layers keep besides, by kind of block and name.

    Of the newest checkpoint of a run, or of one `RUN/checkpoints/STEP`. `asker` names the setting that `path` comes
    from, `place` where it was set. Raises InputError if there is none, or of another model.
    """
    run_dir, step = find_checkpoint(path, asker, place)
    checkpoints = Checkpoints(run_dir, keep=2**31, keep_every=None)
    mine = {"model": describe_model(model)}
    item = checkpoints.directory / str(step) / "state"
    abstract = {"params": params} | saved_layer_state(layer_state)
    try:
        saved = checkpoints.describe(step)
        compare_descriptions(saved, mine, f"{asker}={path}{place}", ("model",), "name another run")
        with ocp.PyTreeCheckpointer() as reader:
            restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
            args = ocp.args.PyTreeRestore(abstract, restore_args=restore_args, partial_restore=True)  # type: ignore[call-arg]
            restored = reader.restore(item, args=args)
    except (UserError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:  # whatever orbax raises
        older = [good for good in complete_steps(run_dir) if good < step]
        cure = f"try {run_dir / SUBDIRECTORY / str(older[-1])}" if older else "name another run"
        raise InputError(f"{asker}={path}{place}: {item.parent} is damaged ({reason(error)}): {cure}.") from None
    finally:
        checkpoints.close()
    return restored.pop("params"), loaded_layer_state(restored)


def saved_layer_state(state: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What layers keep, by kind of block and name → as checkpoints have it: MoE layers' under "experts", by bare name.

    Kinds without any are left out.
    """
    bare = {name.removeprefix("moe."): a for name, a in state.get(MOE, {}).items()}
    others = {kind: dict(own) for kind, own in state.items() if kind != MOE and own}
    return others | ({EXPERTS: bare} if bare else {})


def loaded_layer_state(saved: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The way back."""
    others = {kind: dict(own) for kind, own in saved.items() if kind != EXPERTS}
    experts = {f"moe.{name}": a for name, a in saved.get(EXPERTS, {}).items()}
    return others | ({MOE: experts} if experts else {})
