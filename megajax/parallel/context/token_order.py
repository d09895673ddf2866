"""The tokens of a sequence that each device of `context` holds, and the keys that its queries see.

A sequence is cut into chunks. Every device has the same number of chunks, in the order of the sequence. Causal
attention to whole sequences is load-balanced if device r of C has chunks r and 2C - 1 - r of 2C ("zig-zag"). With
packed documents the work of a chunk depends on the ends of the documents, so finer chunks are distributed by work.
Where nothing attends to a part of the keys, each device can have consecutive tokens, one chunk.

With groups of devices (`communication.context: dynamic`) the documents of a row are first put into another order, that
of the groups. A token's index in its sequence is then the one in that order; only random numbers follow the first one.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from megajax import ops
from megajax.layout.context_groups import ContextGroups, document_runs
from megajax.model.comm import TokenPositions
from megajax.ops import PackedDocuments
from megajax.ops.partial_attention import Ranges
from megajax.parallel import collectives

TWO_SIDED_ENDS = "two_sided_ends"  # a field that is made once a step: the function of that name
MOST_CHUNKS = 8  # per device, if chunks are distributed by work
# Fields of groups of devices: the size of the group of each token's device, and the token's index in the batch's row
GROUP_SIZE, ROW_INDEX = "group_size", "row_index"
IMBALANCE, GROUP_SHARES = "attention_imbalance", "context_groups"  # metrics; the latter by the size of a group


def chunk_order(context: int) -> np.ndarray:
    """The chunks of a sequence in the order in which the devices of `context` hold them: 0, 2C-1, 1, 2C-2, …"""
    if context == 1:
        return np.arange(1)
    return np.stack([np.arange(context), 2 * context - 1 - np.arange(context)], axis=1).reshape(-1)


def stored_order(length: int, context: int) -> np.ndarray:
    """The sequence's token indices in the order in which devices hold them, `[S]`."""
    chunks = chunk_order(context)
    return np.arange(length).reshape(len(chunks), -1)[chunks].reshape(-1)


def balanced_order(segment_ids: np.ndarray, context: int, causal: bool = True) -> np.ndarray:
    """The token indices in the order in which devices hold them, `[rows, S]`, with about equal work on each device.

    The chunks of a sequence are distributed in order of decreasing work, each to the device that has the least work so
    far and is not full (Graham's longest processing time first).
    """
    rows, S = segment_ids.shape
    each = _chunks_of_device(S // context)
    index = np.arange(S)
    changed = np.diff(segment_ids, axis=1, prepend=segment_ids[:, :1]) != 0
    starts = np.maximum.accumulate(np.where(changed, index, 0), axis=1)
    seen = index + 1 - starts
    if not causal:  # each token of a document sees all of it
        last = np.roll(changed, -1, axis=1)
        seen = np.minimum.accumulate(np.where(last, index + 1, S)[:, ::-1], axis=1)[:, ::-1] - starts
    work = seen.reshape(rows, context * each, -1).sum(axis=2)
    total, held, owner = np.zeros((rows, context)), np.zeros((rows, context), int), np.zeros_like(work)
    every = np.arange(rows)
    for chunk in np.argsort(-work, axis=1, kind="stable").T:
        device = np.where(held < each, total, np.inf).argmin(axis=1)
        total[every, device] += work[every, chunk]
        held[every, device] += 1
        owner[every, chunk] = device
    chunks = np.argsort(owner, axis=1, kind="stable")  # by device, then in the order of the sequence
    return index.reshape(context * each, -1)[chunks].reshape(rows, S)


def grouped_order(
    fields: Mapping[str, np.ndarray], groups: ContextGroups, causal: bool = True, consecutive: bool = False
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(the rows' token indices in the order in which devices hold them, fields of the tokens), all `[rows, S]`.

    `fields` has `segment_ids`, and `is_real` if some tokens are padding. Among the results is a new `segment_ids`:
    documents that become neighbours may have had the same id. Inside a group chunks are distributed by work, unless
    each device gets `consecutive` tokens; else the field `order` has the tokens' indices in the order of the groups.
    """
    segments, is_real = fields["segment_ids"], fields.get("is_real")
    (number, S), length = segments.shape, segments.shape[1] // groups.devices
    sequence, ids, sizes = (np.empty((number, S), np.int32) for _ in range(3))  # in the order of the groups
    for row in range(number):
        lengths = document_runs(segments[row], None if is_real is None else is_real[row])
        arranged, ends = groups.arrange(lengths.tolist()), np.cumsum(lengths)
        sequence[row] = np.concatenate([np.arange(ends[d] - lengths[d], ends[d]) for d in arranged.documents])
        ids[row] = np.repeat(arranged.documents, lengths[arranged.documents])
        sizes[row] = np.repeat(arranged.sizes, length)
    stored = np.tile(np.arange(S), (number, 1))  # of `sequence`
    for size in () if consecutive else np.unique(sizes[sizes > 1]).tolist():
        blocks = sizes.reshape(-1, size * length)  # of this size only if all of it is
        at = np.flatnonzero(blocks[:, 0] == size)
        inside = balanced_order(ids.reshape(blocks.shape)[at], size, causal)
        stored.reshape(blocks.shape)[at] = np.take_along_axis(stored.reshape(blocks.shape)[at], inside, axis=1)
    index = np.argsort(sequence, axis=1)  # of each token of a row in the order of the groups
    found = {"segment_ids": np.take_along_axis(ids, index, 1), GROUP_SIZE: np.take_along_axis(sizes, index, 1)}
    found[ROW_INDEX] = np.broadcast_to(np.arange(S), segments.shape)
    return np.take_along_axis(sequence, stored, axis=1), found if consecutive else {**found, "order": index}


def own_index(length: int, context: int, consecutive: bool = False) -> jax.Array:
    """The sequence indices of this device's `length` tokens in zig-zag order, or consecutive ones, int32."""
    if context == 1 or consecutive:
        first = lax.axis_index("context") * length if context > 1 else 0
        return first + jnp.arange(length, dtype=jnp.int32)
    rank, within = lax.axis_index("context"), jnp.arange(length // 2, dtype=jnp.int32)
    first = _zigzag(rank, length // 2, context)
    return (first[:, None] + within).reshape(-1)


def add_token_positions(
    batch: Mapping[str, jax.Array], context: int, consecutive: bool = False, causal: bool = True
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """(the batch with the fields for `token_positions_of`, metrics of this device), fields `[M, B, S]`.

    The metrics are the `imbalance` of the work, if tokens are distributed by work, and with groups the share of this
    device's microbatches in a group of each size. Without `causal` padding is a document too, so that no other token
    attends to it. Runs once per step, before the layers. Independent collectives must not overlap the layers'; on CPUs
    devices may order them differently.
    """
    fields, metrics = dict(batch), dict[str, jax.Array]()
    segments = fields.pop("segment_ids", None)
    if (sizes := fields.get(GROUP_SIZE)) is not None:  # one for the rows of a microbatch: the largest contains others
        fields[GROUP_SIZE] = sizes = sizes.max(axis=(1, 2))
        for size in (1 << power for power in range(context.bit_length())):
            metrics[f"{GROUP_SHARES}/{size}"] = (sizes == size).mean(dtype=jnp.float32)
    if not causal and "is_real" in batch and GROUP_SIZE not in batch:  # there parts of padding have ids of their own
        segments = jnp.where(batch["is_real"], 0 if segments is None else segments, -1)
    if segments is None:
        return fields, metrics
    M, B, length = segments.shape
    segments = segments.reshape(M * B, length)

    def of_documents(documents: PackedDocuments, *at: jax.Array) -> dict[str, jax.Array]:
        found = {"document_starts": documents.starts, "document_ends": None if causal else documents.ends}
        return {name: (a[at] if at else a).reshape(M, B, length) for name, a in found.items() if a is not None}

    if context == 1:
        return fields | of_documents(ops.documents_of(segments)), metrics
    order = batch.get("order")
    own = jnp.broadcast_to(own_index(length, context, consecutive), segments.shape)
    own = own if order is None else order.reshape(M * B, -1)
    both = collectives.all_gather(jnp.stack([own, segments]), "context", axis=2, tiled=True)
    indices, segments = both  # [M·B, S] as stored
    rows = jnp.arange(M * B)[:, None]
    documents = ops.documents_of(jnp.zeros_like(segments).at[rows, indices].set(segments, unique_indices=True))
    fields |= of_documents(documents, rows, own)
    if order is None:
        return fields, metrics
    chunks = indices.reshape(M, B, context, _chunks_of_device(length), -1)[..., 0]
    fields["chunks"] = chunks.swapaxes(1, 2)  # [M, context, B, chunks]
    ends = indices + 1 if causal or documents.ends is None else documents.ends[rows, indices]
    seen = (ends - documents.starts[rows, indices]).astype(jnp.float32)
    metrics[IMBALANCE] = imbalance(seen.reshape(M, B, context, length).sum(axis=(1, 3)))
    return fields, metrics


def two_sided_ends(
    is_two_sided: jax.Array, order: jax.Array | None, context: int, consecutive: bool = False
) -> jax.Array:
    """`ops.two_sided_ends` of this device's tokens, `[M, B, S / context]`; `order` is the field of that name.

    Runs once per step, before the layers.
    """
    M, B, length = is_two_sided.shape
    flags = is_two_sided.reshape(M * B, length)
    if context == 1:
        return ops.two_sided_ends(flags).reshape(is_two_sided.shape)
    own = jnp.broadcast_to(own_index(length, context, consecutive), flags.shape)
    own = own if order is None else order.reshape(M * B, -1)
    both = collectives.all_gather(jnp.stack([own, flags.astype(own.dtype)]), "context", axis=2, tiled=True)
    indices, flags = both  # [M·B, S] as stored
    rows = jnp.arange(M * B)[:, None]
    of_sequence = jnp.zeros(flags.shape, bool).at[rows, indices].set(flags > 0, unique_indices=True)
    return ops.two_sided_ends(of_sequence)[rows, own].reshape(is_two_sided.shape)


def layout_metrics(sums: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Those of a step's numbers that are metrics of `add_token_positions`."""
    return {name: value for name, value in sums.items() if name.partition("/")[0] in (IMBALANCE, GROUP_SHARES)}


def imbalance(work: jax.Array) -> jax.Array:
    """Largest work of a device divided by the mean work, both summed over microbatches; `work` is `[M, devices]`."""
    return work.max(axis=1).sum() / work.mean(axis=1).sum()


def token_positions_of(fields: Mapping[str, jax.Array], context: int, consecutive: bool = False) -> TokenPositions:
    """The positions of one microbatch's tokens, from fields of `add_token_positions`, `[B, S / context]`."""
    (B, length), index = fields["tokens"].shape, fields.get("order")
    own = jnp.broadcast_to(own_index(length, context, consecutive), (B, length)) if index is None else index
    starts, ends, chunks, is_real = map(fields.get, ("document_starts", "document_ends", "chunks", "is_real"))
    if consecutive and context > 1:
        chunks = jnp.broadcast_to(jnp.arange(context, dtype=jnp.int32)[:, None, None] * length, (context, B, 1))
    documents = None if starts is None else PackedDocuments(starts, ends)
    return TokenPositions(own, documents, chunks, is_real, fields.get(TWO_SIDED_ENDS), fields.get(GROUP_SIZE))


def to_consecutive(a: jax.Array, context: int) -> jax.Array:
    """`[B, S / C, ...]` in zig-zag order → the same number of consecutive tokens: device d gets chunks 2d and 2d + 1.

    Each device has one chunk with an even number and one with an odd number, and gets one of each: two permutations.
    """
    first, second = jnp.split(a, 2, axis=1)
    even = lax.axis_index("context") % 2 == 0  # device r has chunk r first, then 2C - 1 - r
    pieces = jnp.where(even, first, second), jnp.where(even, second, first)
    sent = [collectives.ppermute(piece, "context", _moves(context, odd)) for odd, piece in enumerate(pieces)]
    return jnp.concatenate(sent, axis=1)


def from_consecutive(a: jax.Array, context: int) -> jax.Array:
    """Inverse of `to_consecutive`."""

    def send(piece: jax.Array, odd: int) -> jax.Array:
        moves = [(source, target) for target, source in _moves(context, odd)]
        return collectives.ppermute(piece, "context", moves)

    evens, odds = (send(piece, odd) for odd, piece in enumerate(jnp.split(a, 2, axis=1)))
    even = lax.axis_index("context") % 2 == 0
    return jnp.concatenate([jnp.where(even, evens, odds), jnp.where(even, odds, evens)], axis=1)


def _moves(context: int, odd: int) -> list[tuple[int, int]]:
    """(device that has it in zig-zag order, device that has it in the order of the sequence) of even or odd chunks."""
    return [(min(chunk, 2 * context - 1 - chunk), chunk // 2) for chunk in range(odd, 2 * context, 2)]


def as_sequence(a: jax.Array, context: int) -> jax.Array:
    """Whole sequences `[B, S, ...]` in the devices' order → in the order of the sequence."""
    return _take_chunks(a, np.argsort(chunk_order(context)))


def as_stored(a: jax.Array, context: int) -> jax.Array:
    """Inverse of `as_sequence`."""
    return _take_chunks(a, chunk_order(context))


def _take_chunks(a: jax.Array, chunks: np.ndarray) -> jax.Array:
    pieces = jnp.split(a, len(chunks), axis=1)
    return jnp.concatenate([pieces[chunk] for chunk in chunks], axis=1)


def chunk_starts(chunks: jax.Array) -> jax.Array:
    """`TokenPositions.chunks` of some devices, `[devices, B, n]` → those of each sequence, `[B, devices · n]`."""
    return chunks.swapaxes(0, 1).reshape(chunks.shape[1], -1)


def take_by_sequence(a: jax.Array, chunks: jax.Array) -> jax.Array:
    """The chunks of `[B, S, ...]` in each sequence's own order `[B, chunks]`."""
    pieces = a.reshape(*chunks.shape, -1)
    return jnp.take_along_axis(pieces, chunks[..., None], axis=1).reshape(a.shape)


def sequence_ranges(positions: TokenPositions, window: int | None, context: int, causal: bool) -> Ranges:
    """The keys that this device's queries see, among the keys of the whole sequence in order."""
    length = None if causal else positions.index.shape[1] * context
    return ops.visible_ranges(positions.index, positions.documents, window, length, positions.two_sided_ends)


def key_ranges(positions: TokenPositions, window: int | None, context: int, causal: bool, rank: jax.Array) -> Ranges:
    """The keys that this device's queries see, among the keys of device `rank` of `context`."""
    B, length = positions.index.shape
    if positions.chunks is None:
        chunks = _zigzag(rank, length // 2, context)[None]
    else:
        chunks = lax.dynamic_index_in_dim(positions.chunks, rank, keepdims=False)
    size = length // chunks.shape[1]

    def held_before(index: jax.Array) -> jax.Array:
        return jnp.clip(index[:, :, None] - chunks[:, None, :], 0, size).sum(-1, dtype=jnp.int32)

    first, end = sequence_ranges(positions, window, context, causal)
    return held_before(first), held_before(end)


def _chunks_of_device(length: int) -> int:
    """The number of chunks per device, if chunks are distributed by work; a device has `length` tokens per sequence."""
    return next(n for n in range(MOST_CHUNKS, 0, -1) if length % n == 0)


def _zigzag(rank: jax.Array | int, chunk: int, context: int) -> jax.Array:
    """The first indices of a device's two chunks."""
    return jnp.stack([jnp.int32(rank), jnp.int32(2 * context - 1 - rank)]) * chunk
