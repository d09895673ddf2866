"""One small adapter around orbax's CheckpointManager.

A checkpoint holds plain trees of canonical arrays and a JSON description; nothing about the mesh enters it. The
description is compared before any array is read, so that a checkpoint of another model is one sentence, not orbax's
thousand lines.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from megajax.config import ModelConfig
from megajax.config.tree import show
from megajax.errors import InputError

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


class Checkpoints:
    """The checkpoints of one run directory."""

    def __init__(self, run_dir: str | Path, keep: int, keep_every: int | None):
        logging.getLogger("absl").setLevel(logging.ERROR)  # orbax reports every file that it writes
        self.directory = (Path(run_dir) / SUBDIRECTORY).resolve()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, keep_period=keep_every, enable_async_checkpointing=True
        )
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    @property
    def latest_step(self) -> int | None:
        """The newest complete checkpoint's step; None if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, tree: Any, description: dict[str, Any]) -> None:
        """Write a tree of arrays and its description; returns as soon as the arrays are copied to the host."""
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(tree),  # type: ignore[call-arg]
            description=ocp.args.JsonSave(description),  # type: ignore[call-arg]
        )
        self._manager.save(step, args=args)

    def describe(self, step: int) -> dict[str, Any]:
        """The description of a checkpoint."""
        args = ocp.args.Composite(description=ocp.args.JsonRestore())  # type: ignore[call-arg]
        return self._manager.restore(step, args=args)["description"]

    def restore(self, step: int, abstract: Any) -> Any:
        """The tree of a checkpoint, in the shapes, dtypes and shardings of `abstract`."""
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))  # type: ignore[call-arg]
        return self._manager.restore(step, args=args)["state"]

    def wait(self) -> None:
        """Until the last save is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Finish and release."""
        self._manager.close()


def describe_model(model: ModelConfig) -> dict[str, Any]:
    """What makes two models the same network; rates of training may change from run to run."""
    training_only = {"dropout", "init_std", "depth_scaled_init", "z_loss"}
    description = model.model_dump(mode="json", exclude=training_only)
    router = description.pop("router")
    if model.num_experts is None:  # as checkpoints described dense models before there were others
        return {name: value for name, value in description.items() if "expert" not in name}
    return description | {f"router.{name}": router[name] for name in ROUTER_OF_NETWORK}


def has_checkpoint(run_dir: str | Path) -> bool:
    """Whether a run directory holds a complete checkpoint; nothing is created."""
    return any(path.name.isdigit() for path in (Path(run_dir) / SUBDIRECTORY).glob("*"))


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
            if theirs != ours:
                raise InputError(
                    f"{place} was saved with {key}.{name}={show(theirs)}, and this run has {show(ours)}: "
                    f"set {key}.{name}={show(theirs)}, or {other}."
                )


def restore_model(
    path: str,
    params: Mapping[str, jax.ShapeDtypeStruct],
    experts: Mapping[str, jax.ShapeDtypeStruct],
    model: ModelConfig,
    asker: str,
    place: str = "",
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Parameters and what layers keep besides, of the newest checkpoint of a run, or of one `RUN/checkpoints/STEP`.

    `asker` names the setting that `path` comes from, `place` where it was set. Raises InputError if there is none, or
    of another model.
    """
    given = Path(path)
    is_step = given.parent.name == SUBDIRECTORY and given.name.isdigit()
    run_dir, step = (given.parent.parent, int(given.name)) if is_step else (given, None)
    if not (run_dir / SUBDIRECTORY).is_dir():
        raise InputError(f"{asker}={path}{place} holds no {SUBDIRECTORY} directory: name a megajax run directory.")
    checkpoints = Checkpoints(run_dir, keep=2**31, keep_every=None)
    step = checkpoints.latest_step if step is None else step
    if step is None or not (checkpoints.directory / str(step)).is_dir():
        raise InputError(f"{asker}={path}{place} holds no complete checkpoint: name another run directory.")
    mine = {"model": describe_model(model)}
    compare_descriptions(checkpoints.describe(step), mine, f"{asker}={path}{place}", ("model",), "name another run")
    item = checkpoints.directory / str(step) / "state"
    abstract = {"params": params} | ({"experts": experts} if experts else {})
    with ocp.PyTreeCheckpointer() as reader:
        restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
        args = ocp.args.PyTreeRestore(abstract, restore_args=restore_args, partial_restore=True)  # type: ignore[call-arg]
        restored = reader.restore(item, args=args)
    checkpoints.close()
    return restored["params"], restored.get("experts", {})
