"""An adapter around orbax's CheckpointManager.

A checkpoint holds plain trees of canonical arrays and a JSON description, both independent of the mesh. The description
is compared before any array is read, so that the error for a checkpoint of another model is one sentence instead of
orbax's thousand lines.
"""

import contextlib
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy as policies

from megajax import cluster
from megajax.checkpoint import checksums
from megajax.checkpoint.arrays import check_shapes
from megajax.checkpoint.best import BestCheckpoints
from megajax.checkpoint.description import compare_models
from megajax.checkpoint.host_memory import own_copies
from megajax.checkpoint.orbax_internals import share_among_replicas
from megajax.checkpoint.storage import (
    SUBDIRECTORY,
    checkpoint_folder,
    complete_steps,
    is_in_bucket,
    read_description,
    remove_partial,
    store_errors,
)
from megajax.cluster.cluster import first_of
from megajax.config import ModelConfig
from megajax.console import command
from megajax.errors import InputError, UserError
from megajax.files import is_number
from megajax.json_files import Damaged
from megajax.layout.kinds import MOE, extra_layers, without_extra
from megajax.model.lora import is_adapter
from megajax.sharding import OBJECTIVE

EXPERTS = "experts"  # name of the MoE layers' state in a checkpoint
LONGEST_SAVE = 10**6  # seconds; orbax measures them by the clock, which may jump
LARGE_LAYER = 2**18  # bytes of a layer in one device's shard
REPLICA_SLICE = 2**20  # bytes; replicas write an array together if each writes as many

share_among_replicas(REPLICA_SLICE)


@dataclass(frozen=True)
class SaveOutcome:
    """The result of a save.

    size: bytes of arrays; seconds: from its start until it was on disk with its checksums; waited: the part of them in
    which training stood; error: reason of a failure; unverified: reason why a complete checkpoint has no checksums.
    """

    step: int
    size: int
    waited: float
    seconds: float = 0.0
    error: str | None = None
    unverified: str | None = None


class Checkpoints:
    """The checkpoints of one run directory."""

    def __init__(self, run_dir: str | Path, keep: int, keep_every: int | None, best: tuple[int, str] | None = None):
        """Open or make the directory.

        A save deletes all but the newest `keep`, every `keep_every`-th, and of `best` the number, by what it names.
        """
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax reports every file, and each failure many times
        asyncio_log = logging.getLogger("asyncio")
        asyncio_log.removeFilter(_is_news)
        asyncio_log.addFilter(_is_news)
        sys.unraisablehook = _report_unraisable
        self.directory, self._cluster = checkpoint_folder(run_dir), cluster.current()
        rules: list[Any] = [policies.LatestN(keep)]
        if keep_every:
            rules.append(policies.EveryNSteps(keep_every))
        self._best = BestCheckpoints(self.directory, *best) if best is not None else None
        if self._best is not None:
            rules.append(self._best)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy(rules),
            enable_async_checkpointing=True,
            async_options=ocp.AsyncOptions(timeout_secs=LONGEST_SAVE),  # type: ignore[call-arg]
        )
        with store_errors(self.directory):
            self._manager = ocp.CheckpointManager(self.directory, options=options)
        self._started: tuple[SaveOutcome, float] | None = None  # with the time of its start
        self._completing: Future[tuple[str | None, float]] | None = None

    @property
    def latest_step(self) -> int | None:
        """The newest complete checkpoint's step; None if there is none."""
        return self._manager.latest_step()

    def complete_steps(self) -> list[int]:
        """The steps of all complete checkpoints, oldest first."""
        return sorted(self._manager.all_steps())

    def reload(self) -> None:
        """Read the directory again after a change by others."""
        with store_errors(self.directory):
            self._manager.reload()

    @property
    def saving(self) -> int | None:
        """The step of a save that has not ended yet."""
        if self._started is None or self._completing is None or self._completing.done():
            return None
        return self._started[0].step

    def save(self, step: int, tree: Any, description: dict[str, Any]) -> None:
        """Start writing a tree of arrays and its description; returns as soon as the arrays are copied to the host.

        `outcome` has the result; it must have been called for the previous save. Raises InputError for a step that is
        not after the newest one.
        """
        assert self._started is None, "ask for the outcome of the last save first"
        newest = self.latest_step
        if newest is not None and newest >= step:
            cure = "restore that one and go on from it, or choose another run.dir"
            raise InputError(f"step {step} cannot be saved in {self.directory}, which has step {newest}: {cure}.")
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(own_copies(tree), jax.tree_util.tree_map_with_path(_storage, tree)),  # type: ignore[call-arg]
            description=ocp.args.JsonSave(description),  # type: ignore[call-arg]
        )
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
        start, error = time.perf_counter(), None
        if self._best is not None:
            with contextlib.suppress(Exception):  # of a full disk or a bucket: the save itself will report it
                self._best.forget(step)
        try:
            self._manager.save(step, args=args)
        except Exception as problem:  # any error of orbax or the file system
            error = reason(problem)
        self._started = SaveOutcome(step, size, time.perf_counter() - start, error=error), start
        thread = ThreadPoolExecutor(1)
        self._completing = thread.submit(self._complete, step, error)
        thread.shutdown(wait=False)

    def evaluated(self, step: int, numbers: Mapping[str, float]) -> None:
        """What an evaluation gave for the checkpoint of `step`, by which the best are chosen."""
        if self._best is not None:
            self._best.add(step, numbers)

    def _complete(self, step: int, error: str | None) -> tuple[str | None, float]:
        """Wait for orbax, and write the checksums; the reason if there are none, and the time.

        `error`: why this process could not start the save, for the others.
        """
        directory = self.directory / str(step)

        def write(found: list[Any]) -> str:
            error = first_of(answer["error"] for answer in found)
            try:
                return error or checksums.write(directory, [answer["share"] for answer in found])
            except Exception as problem:  # a bucket's client has errors of its own
                return reason(problem)

        answer = {"error": error or "", "share": []}
        try:
            self._manager.wait_until_finished()
            if error is None:
                answer["share"] = checksums.compute(directory, self._cluster.rank, self._cluster.size)
        except Exception as problem:  # every process answers, so that none waits for it
            answer["error"] = reason(problem)
        try:
            error = self._cluster.agree(answer, write, "checksums")
        except Exception as problem:  # also of jax's coordinator; the save itself is complete
            error = reason(problem)
        return error or None, time.perf_counter()

    def outcome(self, wait: bool = False) -> SaveOutcome | None:
        """The result of the last save, once; None while it runs (unless `wait`), or if there is no new result."""
        if self._started is None or (self.saving is not None and not wait):
            return None
        (result, begin), start = self._started, time.perf_counter()
        unverified, end = (None, start) if self._completing is None else self._completing.result()
        error = result.error
        try:
            self._manager.wait_until_finished()  # again, because orbax raises an error in each thread that waits
        except Exception as problem:
            error = error or reason(problem)
        self._started = self._completing = None
        if error is not None:
            if self._cluster.is_first:
                remove_partial(self.directory)  # otherwise it would keep filling the disk
            with contextlib.suppress(Exception) if is_in_bucket(self.directory) else contextlib.nullcontext():
                self._manager.reload()  # orbax has forgotten the old checkpoint that the failed save should replace
        waited = result.waited + time.perf_counter() - start
        return replace(result, waited=waited, seconds=end - begin, error=error, unverified=unverified)

    def damage(self, step: int, part: str = "") -> str:
        """The first damaged file of a checkpoint, among those whose names begin with `part`, and what is wrong with it.

        Empty if there is none, or if the checkpoint never had checksums. Each process reads a share of all files;
        process 0 those of a part, which are few.
        """
        directory, here = self.directory / str(step), self._cluster
        if part:
            return here.first_decides(lambda: checksums.damage(directory, part=part))
        return here.first_problem(lambda: checksums.damage(directory, here.rank, here.size))

    def has_checksums(self, step: int) -> bool:
        """Whether the files of a checkpoint can be verified."""
        directory = self.directory / str(step)
        with store_errors(directory):
            return checksums.exist(directory)

    def describe(self, step: int) -> dict[str, Any]:
        """The description of a checkpoint, which process 0 reads; all processes must call this.

        Raises ValueError with the reason if it is damaged.
        """

        def find() -> dict[str, Any]:
            try:
                return {"description": read_description(self.directory / str(step))}
            except Damaged as error:
                return {"damage": error.problem}

        found = self._cluster.first_decides(find)
        if "damage" in found:
            raise ValueError(found["damage"])
        return found["description"]

    def restore(self, step: int, abstract: Any) -> Any:
        """The tree of a checkpoint, in the shapes, dtypes and shardings of `abstract`. Errors as `check_shapes`."""
        check_shapes(self.directory / str(step) / "state", abstract)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))  # type: ignore[call-arg]
        return self._manager.restore(step, args=args)["state"]

    def wait(self) -> None:
        """Wait until the last save is on disk. Raises InputError if it failed."""
        outcome = self.outcome(wait=True)
        if outcome is not None and outcome.error is not None:
            cure = "check the bucket" if is_in_bucket(self.directory) else "free disk space there"
            raise InputError(
                f"the checkpoint of step {outcome.step} could not be saved in {self.directory} ({outcome.error}): "
                f"{cure}, or choose another run.dir."
            )

    def close(self) -> None:
        """Finish and release. Raises InputError if the last save failed."""
        try:
            self.wait()
        finally:
            self._manager.close()


def _storage(path: tuple[Any, ...], array: jax.Array) -> ocp.SaveArgs:
    """How an array is stored: the large layers of a block's parameter one by one.

    So a layer is read without decompressing the others, and layers are compressed in parallel.
    """
    in_block = any(str(getattr(key, "key", "")).startswith("blocks.") for key in path)
    layer = array.dtype.itemsize * math.prod(array.sharding.shard_shape(array.shape)[1:])
    return ocp.SaveArgs(shard_axes=(0,) if in_block and layer >= LARGE_LAYER else ())


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line of asyncio's log is not about a further failed part of a save."""
    return "exception was never retrieved" not in record.getMessage()


def _report_unraisable(unraisable: Any, report: Callable[[Any], object] = sys.unraisablehook) -> None:
    """Leaves out the traceback of each other part of a failed save, whose event loop orbax has closed."""
    if str(unraisable.exc_value) != "Event loop is closed":
        report(unraisable)


def reason(error: BaseException) -> str:
    """The short reason why a save or a restore failed."""
    text = str(error).strip() or type(error).__name__
    known = (
        "No space left on device",
        "File too large",
        "Disk quota exceeded",
        "Permission denied",
        "Read-only file system",
    )
    return next((reason for reason in known if reason in text), text.splitlines()[0][:200])


def agreed_steps(run_dir: str | Path) -> list[int]:
    """`complete_steps` as process 0 finds them; all processes must call this.

    The others do not ask a bucket, and see nothing that another writer changes meanwhile.
    """
    return cluster.current().first_decides(lambda: complete_steps(run_dir))


def newest_good(run_dir: str | Path, steps: Sequence[int]) -> int | None:
    """The newest of `steps` whose checkpoint has no damaged file, read by this process alone; None if there is none."""
    path = checkpoint_folder(run_dir)
    return next((step for step in sorted(steps, reverse=True) if not checksums.damage(path / str(step))), None)


def find_checkpoint(path: str | Path, setting: str, location: str = "") -> tuple[Path, int]:
    """(run directory, step) of one checkpoint `RUN/checkpoints/STEP`, or of the newest complete one of a run.

    `setting` is the key or argument that gave `path`, `location` where it was set. Raises InputError if there is none.
    """
    given, shown = Path(path), f"{setting}={path}{location}"
    one = given.parent.name == SUBDIRECTORY and is_number(given.name)
    run_dir = given.parent.parent if one else given
    if not (folder := run_dir / SUBDIRECTORY).exists():
        if folder.is_symlink():
            there = f"{folder.resolve()}, which does not exist on this machine"
            raise InputError(f"{shown} has its checkpoints in {there}: mount or restore that directory.")
        raise InputError(f"{shown} {_instead_of(given)}")
    steps = complete_steps(run_dir)
    if not steps:
        raise InputError(f"{shown} has no complete checkpoint: give another run.")
    if one and int(given.name) not in steps:
        raise InputError(f"{shown} does not exist: {run_dir} has checkpoints of steps {', '.join(map(str, steps))}.")
    return run_dir, int(given.name) if one else steps[-1]


def _instead_of(given: Path) -> str:
    """The end of the sentence about a path that is neither a run nor a Hugging Face folder."""
    if not given.exists():
        cure = f"give the directory of a run, RUN/{SUBDIRECTORY}/STEP, or a Hugging Face folder"
        return f"does not exist on this machine: {cure}; nothing is downloaded."
    if given.is_file():
        return f"is a file: give its folder, {given.parent}."
    if given.name == SUBDIRECTORY:
        return f"is a run's folder of checkpoints: give the run, {given.parent}, or {given / 'STEP'}."
    if snapshots := sorted(given.glob("snapshots/*/config.json")):
        return f"is a folder of Hugging Face's cache: give the model's files in it, {snapshots[-1].parent}."
    if any(given.glob("*.safetensors")) and not (given / "config.json").exists():
        return "has safetensors files, but no config.json: add the model's."
    return f"has no {SUBDIRECTORY}: give the directory of a run, or RUN/{SUBDIRECTORY}/STEP."


def restore_model(
    path: str,
    params: Mapping[str, jax.ShapeDtypeStruct],
    layer_state: Mapping[str, Mapping[str, jax.ShapeDtypeStruct]],
    model: ModelConfig,
    setting: str,
    location: str = "",
    allowed: Sequence[str] | None = None,
) -> tuple[dict[str, jax.Array], dict[str, dict[str, jax.Array]]]:
    """Parameters by name, and the layer state by kind of block and name.

    They are from the newest checkpoint of a run, or from `RUN/checkpoints/STEP`. `setting` is the setting that gave
    `path`, `location` where it was set; the settings `allowed` may differ (`compare_models`). The checkpoint's layers
    after the model's are left out if `model` has none.
    Raises InputError if there is no checkpoint, or if it is of another model.
    """
    (run_dir, step), source = find_checkpoint(path, setting, location), f"{setting}={path}{location}"
    checkpoints = Checkpoints(run_dir, keep=2**31, keep_every=None)
    item = checkpoints.directory / str(step) / "state"
    abstract = {"params": params} | saved_layer_state(layer_state)
    try:
        saved = checkpoints.describe(step)
        if saved.get("lora") and not any(map(is_adapter, params)):
            raise InputError(
                f"{source} has adapters only: write the merged model with "
                f"{command('hf', 'export', path, 'HF_FOLDER')}, and give that folder."
            )
        objective = saved.get("objective") or {}
        if objective and "head" in params:
            raise InputError(
                f"{source} was trained with objective.kind={objective['kind']}, which has parameters in place of the "
                "model's head: name another run."
            )
        if not extra_layers(model):
            saved = saved | {"model": saved["model"] | without_extra()}
        other, size, multiple = "name another run", saved["model"]["vocab_size"], saved["model"]["vocab_multiple"]
        if model.vocab_size > size or (model.vocab_size == size and model.vocab_multiple != multiple):
            other = f"for this vocabulary name the folder that {command('hf', 'export', path, 'HF_FOLDER')} writes"
        compare_models(saved, model, source, other, allowed)
        own = {name: [*p.shape] for name, p in params.items() if name.startswith(OBJECTIVE)}
        for name, mine in own.items():
            if (theirs := objective.get(name.removeprefix(OBJECTIVE), mine)) != mine:
                problem = f"{source} has {name} {theirs}, but this run has {mine}"
                raise InputError(f"{problem}: set objective.settings to those of that run, or name another run.")
        if problem := checkpoints.damage(step):
            raise ValueError(problem)
        check_shapes(item, abstract)
        with ocp.PyTreeCheckpointer() as reader:
            restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
            args = ocp.args.PyTreeRestore(abstract, restore_args=restore_args, partial_restore=True)  # type: ignore[call-arg]
            with store_errors(item):
                restored = reader.restore(item, args=args)
    except (UserError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:  # any error of orbax
        good = newest_good(run_dir, [other for other in complete_steps(run_dir) if other != step])
        cure = "name another run" if good is None else f"try {run_dir / SUBDIRECTORY / str(good)}"
        raise InputError(f"{source}: {item.parent} is damaged ({reason(error)}): {cure}.") from None
    finally:
        checkpoints.close()
    return restored.pop("params"), loaded_layer_state(restored)


def save_weights(
    run_dir: Path,
    params: Mapping[str, jax.Array],
    layer_state: Mapping[str, Mapping[str, jax.Array]],
    description: Mapping[str, Any],
) -> None:
    """Write the first checkpoint of a run directory, without optimizer state, and wait until it is on disk.

    `layer_state` is by kind of block and name; the description has the step. Raises OSError if it could not be written.
    """
    step = jax.device_put(np.int32(description["step"]), jax.devices("cpu")[0])
    tree = {"params": params, "step": step} | saved_layer_state(layer_state)
    checkpoints = Checkpoints(run_dir, keep=1, keep_every=None)
    checkpoints.save(description["step"], tree, {**description, "optimizer_state": False})
    outcome = checkpoints.outcome(wait=True)
    checkpoints.close()
    if outcome is not None and outcome.error is not None:
        raise OSError(outcome.error)


def saved_layer_state(state: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Layer state by kind of block and name → its form in checkpoints: MoE layers' under "experts", by bare name.

    Kinds without state are left out.
    """
    bare = {name.removeprefix("moe."): a for name, a in state.get(MOE, {}).items()}
    others = {kind: dict(arrays) for kind, arrays in state.items() if kind != MOE and arrays}
    # Blocks of experts alone are called "experts" too; their names are not bare.
    return others | ({EXPERTS: others.get(EXPERTS, {}) | bare} if bare else {})


def loaded_layer_state(saved: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The inverse of `saved_layer_state`."""
    alone = {name: a for name, a in saved.get(EXPERTS, {}).items() if name.startswith("moe.")}
    bare = {f"moe.{name}": a for name, a in saved.get(EXPERTS, {}).items() if name not in alone}
    return {kind: dict(arrays) for kind, arrays in {**saved, EXPERTS: alone, MOE: bare}.items() if arrays}
