"""The rows that a process reads, and their conversion to global arrays."""

import itertools
import re
from collections.abc import Callable, Generator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from megajax.config import Config
from megajax.config.sentences import fail, format_keys
from megajax.data import loader
from megajax.data.samples import Samples
from megajax.errors import InputError, LostReaderError, accepts, shown
from megajax.options.registered import ENCODER_KIND
from megajax.parallel.context.token_order import balanced_order, grouped_order, stored_order
from megajax.schema.batch_schedule import BatchSizes
from megajax.training.batch_fields import arrays_of, check_fields, check_values
from megajax.training.step import TrainProgram

# The numbers of the samples that a process reads in a step → their fields `[rows, S]`, in the same order
BatchOf = Callable[[np.ndarray], Mapping[str, np.ndarray]]


def rows_of_process(sharding: NamedSharding, shape: tuple[int, int, int]) -> np.ndarray:
    """The rows of the global batch that this process's devices hold: row `m·B + b` is `[m, b]` of `[M, B, S]`."""
    M, B, _ = shape
    held = np.zeros(B, bool)
    for _, rows, _ in sharding.addressable_devices_indices_map(shape).values():  # type: ignore[misc]
        held[rows] = True
    return (np.arange(M)[:, None] * B + np.flatnonzero(held)[None]).reshape(-1)


def to_global(
    program: TrainProgram, fields: Mapping[str, np.ndarray], source: str = "the batch"
) -> dict[str, jax.Array]:
    """Fields `[rows, S]` of this process's rows → global arrays `[M, B, S]` by name, for the train step.

    All data come here, so they are checked here. Raises InputError, with `source`, for other fields, shapes or values
    than a step can use.

    With `context` each device gets some chunks of a sequence (`parallel/context/token_order.py`), so the tokens are in
    another order along S; if the order depends on the documents, fields hold it. The fields that nodes
    derive from others are added, and those that number the rows.
    """
    known, sharding, shape = program.graph.fields, program.batch_sharding, program.plan.batch_shape
    M, B, S = shape
    check_fields(program.config, known, fields, source)
    held = rows_of_process(sharding, shape)
    by_row = np.broadcast_to((held % B)[:, None], (len(held), S))
    fields = {name: by_row for name, field in known.items() if field.of_row} | arrays_of(fields, source)
    check_values(known, program.config.model, len(held), S, fields, source)
    fields = {**fields, **program.graph.derived_fields(fields)}
    size, rows = sharding.mesh.shape["context"], len(next(iter(fields.values())))
    plan, consecutive = program.plan, program.plan.has_consecutive_tokens
    if plan.context_groups is not None:
        order, of_groups = grouped_order(fields, plan.context_groups, plan.model.causal, consecutive)
        fields = {**fields, **of_groups}
    elif plan.balances_context:
        order = balanced_order(fields["segment_ids"], size, plan.model.causal)
        fields = {**fields, "order": np.broadcast_to(np.arange(S), (rows, S))}
    else:
        order = np.broadcast_to(np.arange(S) if consecutive else stored_order(S, size), (rows, S))
    held = held[: len(held) // M]  # of the first microbatch; all microbatches have the same
    local_row = np.zeros(B, int)
    local_row[held] = np.arange(len(held))

    def field(name: str) -> jax.Array:
        given = stored = fields[name]
        if known[name].length is None:
            lead = order.reshape(*order.shape, *(1,) * (given.ndim - 2))
            stored = np.take_along_axis(given, lead, axis=1)
        local = stored.astype(known[name].dtype).reshape(M, len(held), *given.shape[1:])
        whole = (M, B, *given.shape[1:])
        return jax.make_array_from_callback(whole, sharding, lambda index: _part(local, local_row, index))

    return {name: field(name) for name in fields}


def own_batches(
    program: TrainProgram, batch_of: BatchOf, start_step: int, sizes: BatchSizes
) -> Generator[dict[str, jax.Array]]:
    """Endless global batches of `batch_of` from `start_step` on, as `batches` gives those of the loader."""
    rows = rows_of_process(program.batch_sharding, program.plan.batch_shape)
    for step in itertools.count(start_step):
        size, before = sizes.size(step), sizes.samples_before(step)
        yield to_global(program.by_size[size], batch_of(before + rows[rows < size]), "batch_of")


def check_batch_of(config: Config, batch_of: BatchOf) -> None:
    """Raise InputError if `batch_of` is no function of samples; ConfigError if the config names data beside it."""
    if not callable(batch_of) or not accepts(batch_of, np.arange(1)):
        problem = f"batch_of={shown(batch_of)} is no function of the samples' numbers"
        raise InputError(f"{problem}: give one that returns their fields, batch_of(samples).")
    for key, read, cure in (
        ("data.kind", config.data.kind != "synthetic", "synthetic"),
        ("run.eval_steps", bool(config.run.eval_steps), "0, and evaluate in a hook"),
    ):
        if read:
            problem = f"{format_keys(config, key)} reads data of the config, but batch_of makes the batches"
            fail(config, problem, f"set {key}={cure}", key)


def check_own_fields(program: TrainProgram) -> None:
    """Raise ConfigError if the objective or the encoder reads batch fields that the loader does not make."""
    for name, field in sorted(program.graph.fields.items()):
        # Chats have one segment in a row (`check_objective`), and of random tokens any division will do.
        in_rows = field.of_row and program.config.data.kind in ("chat", "synthetic")
        made = in_rows or program.config.span_lengths
        if (key := field.setting) in ("objective.kind", ENCODER_KIND) and not made:
            problem = f"{format_keys(program.config, key)} reads the batch field {name}, which data.train does not give"
            cure = "make the batches by Trainer's batch_of (docs/custom_loop.md)"
            if field.of_row:
                cure = f"set data.kind=chat, with one conversation in a row (docs/extensions.md), or {cure}"
            fail(program.config, problem, cure, key)


def _part(local: np.ndarray, local_row: np.ndarray, index: Any) -> np.ndarray:
    """One device's part of a field: the slices `index` of the global shape `[M, B, S]`."""
    return local[:, local_row[index[1]], index[2]]


def batches(
    program: TrainProgram,
    split: loader.Split,
    samples: Samples,
    start_step: int = 0,
    sizes: BatchSizes | None = None,
) -> Generator[dict[str, jax.Array]]:
    """Endless global batches of a split from `start_step` on, on the devices.

    `sizes` are the numbers of sequences of the steps, by default those of the config. Raises InputError for a token
    outside the vocabulary, and LostReaderError if a process of `data.workers` is killed.
    """
    rows, config = rows_of_process(program.batch_sharding, program.plan.batch_shape), program.config
    sizes = sizes or loader.batch_sizes(config, split)
    fields = loader.make_loader(config, split=split, rows=rows, start_step=start_step, samples=samples, sizes=sizes)
    try:
        for step, local in enumerate(fields, start_step):
            yield to_global(program.by_size[sizes.size(step)], local, f"data.{split}")
    except RuntimeError as error:
        if not (found := re.search(r"Worker process was terminated .*(exit code -?\d+)", str(error))):  # grain's words
            raise
        raise LostReaderError(
            f"a process of {format_keys(config, 'data.workers')} was ended ({found[1]}), perhaps because the host had "
            "no memory left: start the same command again to resume, with fewer of them if so."
        ) from None
    finally:
        fields.close()  # type: ignore[attr-defined]
