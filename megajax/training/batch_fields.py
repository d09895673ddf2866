"""The fields that a batch must have, and their shapes and values."""

import math
from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from megajax.config import Config, ModelConfig
from megajax.config.sentences import format_keys, listed
from megajax.errors import InputError, counted
from megajax.step.nodes import Field


def check_fields(config: Config, known: Mapping[str, Field], batch: Any, own: str | None = None) -> None:
    """Raise InputError for a batch that lacks one of the `known` fields, or has another one.

    `own`: what has made a batch that `training.batches.to_global` gets; by default it is one that a step gets.
    """
    if not isinstance(batch, Mapping):
        problem = f"{own or 'the batch'} is of the type {type(batch).__name__}"
        raise InputError(f"{problem}: give a dictionary with an array for the name of each field.")
    found = {*batch}
    optional = {name for name, field in known.items() if field.optional or (own and field.of_row)}
    fields = [name for name, field in known.items() if name not in optional and (own is None or not field.derived)]
    if wrong := sorted((found - optional).symmetric_difference(fields), key=str):
        name = wrong[0]
        key = known[name].setting if name in known else "data.reset_attention" if name == "segment_ids" else ""
        setting = f" and {format_keys(config, key)}" if key else ""
        problem = f"the batch {'has' if name in found else 'has no'} {name}{setting}"
        raise InputError(f"{problem}: give {listed(fields, 'and')}, and no other fields.")
    if own is None and len(shape := jnp.shape(batch["tokens"])) != 3:
        problem = f"the batch has tokens of the shape {[*shape]}, not [microbatches, sequences, tokens]"
        raise InputError(f"{problem}: give what megajax.training.batches.to_global returns.")


def check_microbatches(batch: Mapping[str, Any], numbers: Collection[int]) -> None:
    """Raise InputError for a step's batch whose number of microbatches is not one of `numbers`."""
    if (count := len(batch["tokens"])) not in numbers:
        problem = f"the batch has {counted(count, 'microbatch')}, but batch.num_microbatches={listed(numbers)}"
        cure = "give a batch of this program, or call the program of its size (TrainProgram.by_size)"
        raise InputError(f"{problem}: {cure}.")


def arrays_of(fields: Mapping[str, Any], source: str) -> dict[str, np.ndarray]:
    """The fields as arrays of numbers. Raises InputError, with `source`, for what is none."""
    arrays = {}
    for name, field in fields.items():
        try:
            arrays[name] = np.asarray(field)
        except ValueError:  # of lists of unequal lengths
            raise InputError(f"{source} has rows of unequal lengths in {name}: pad them to one length.") from None
        if not (jnp.issubdtype(arrays[name].dtype, jnp.number) or arrays[name].dtype == bool):
            raise InputError(f"{source} has {name} of the type {arrays[name].dtype}: give an array of numbers.")
    return arrays


def check_values(
    known: Mapping[str, Field],
    model: ModelConfig,
    rows: int,
    length: int,
    fields: Mapping[str, np.ndarray],
    source: str,
) -> None:
    """Raise InputError, with `source`, for shapes or numbers that a step of `rows` here of `length` cannot use."""
    for name, d in known.items():
        if name not in fields:  # derived or optional
            continue
        shape = (rows, d.length or length, *d.extra)
        if (found := fields[name].shape) != shape:
            wanted = f"{counted(shape[0], 'row')} of {counted(shape[1], 'token')}"
            problem = f"{source} has {name} of the shape {[*found]}, but this process has {wanted}"
            raise InputError(f"{problem}: give {[*shape]}.")
        if np.issubdtype(d.dtype, np.integer) and not np.issubdtype(fields[name].dtype, np.integer):
            if np.any(np.mod(fields[name], 1)):
                raise InputError(f"{source} holds numbers with a fraction in {name}: give integers.")
        if d.setting == "objective.kind" and not (finite := np.isfinite(fields[name])).all():
            wrong = fields[name][~finite][0]
            raise InputError(f"{source} holds {wrong} in {name}: give finite numbers, also where loss_mask=0.")
    limits = {"tokens": model.vocab_size, "targets": model.vocab_size, "positions": math.inf}
    if model.position == "learned":
        limits["positions"] = model.max_positions or 0
    for name, limit in limits.items():
        least, most = int(np.min(fields[name])), int(np.max(fields[name]))
        if most >= limit:
            noun, key = ("position", "max_positions") if name == "positions" else ("token id", "vocab_size")
            problem = f"{source} holds {noun} {most}, but model.{key}={limit}"
            raise InputError(f"{problem}: set model.{key}={most + 1} or larger.")
        if least < 0:
            raise InputError(f"{source} holds {least} in {name}: give 0 or more; loss_mask=0 leaves a target out.")
    for name, field in known.items():
        if field.limit is not None:
            least, most = int(np.min(fields[name])), int(np.max(fields[name]))
            if least < field.least or most >= field.limit:
                wrong = most if most >= field.limit else least
                reason = ", the sequences of a microbatch," if field.setting == "objective.kind" else ""
                limits = f"give numbers below {field.limit}{reason} and {field.least} or more"
                raise InputError(f"{source} holds {wrong} in {name}: {limits}.")
    if not (least := np.min(fields["loss_mask"])) >= 0:  # NaN too
        raise InputError(f"{source} holds {least} in loss_mask: give 0 or more.")
