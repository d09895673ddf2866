"""Parameters from the tensors of a Hugging Face folder, onto the devices that hold them."""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from megajax.config import ModelConfig
from megajax.errors import InputError, file_reader, shown
from megajax.hf.folder import HEADS
from megajax.hf.tensors import Slices, Tensor, tensor_names, whole_shape
from megajax.layout.kinds import extra_of

PIECE_BYTES = 2**28  # of a piece in FP32
READERS = 4  # pieces that are read at the same time
CLASSIFIER_HEADS = ("score.", "classifier.", "classification_head.")  # of transformers' models
# Buffers of older folders, and the scales of engines' queries and caches, which are no parameters.
UNUSED = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias", "attn.q_scale", "attn.k_scale", "attn.v_scale")
VOCABULARY_DIM = {"embedding.tokens": 0, "head": -1, "head_bias": 0}  # the padded dimension


class NamedTensors(Protocol):
    """The tensors of a folder, by name: `FolderTensors`, or those of another format."""

    folder: Path
    described_by: str  # what says the shapes that are expected
    files: dict[str, str]  # the file of each tensor

    def shape(self, name: str) -> tuple[int, ...]: ...

    def itemsize(self, name: str) -> float: ...

    def read(self, name: str, slices: Slices) -> np.ndarray: ...


class Reader:
    """Reads blocks of one parameter from the tensors that hold it.

    `model` is the folder's. The `new_tokens` of a vocabulary that is larger than the folder's start with the mean of
    the others. Of the tensors `copies` those that the folder has must be equal to the parameter's only tensor.
    """

    def __init__(
        self,
        weights: NamedTensors,
        tensor: Tensor,
        model: ModelConfig,
        padded: Sequence[int],
        new_tokens: range = range(0),
        copies: Iterable[str] = (),
    ):
        self.weights, self.tensor = weights, tensor
        self.new_tokens = new_tokens if tensor.ours in VOCABULARY_DIM else range(0)
        self.padded, self.shape = tuple(padded), unpadded(tensor.ours, padded, model)
        self.names = tensor_names(tensor, model)
        self._extra, self._copies = extra_of(model), [copy for copy in copies if copy in weights.files]
        self.rest = self.shape[tensor.stacked :]  # of the part in one tensor
        self._widths: dict[Slices, tuple[int, float]] = {}  # of stacked dimensions: number of tensors, bytes a number

    def on_devices(self, sharding: jax.sharding.Sharding, dtype: Any) -> jax.Array:
        """The whole parameter on the devices of this process."""
        indices = sharding.addressable_devices_indices_map(self.padded)
        shards: dict[Slices, jax.Array] = {}  # each is read once, for all devices that hold it
        arrays = []
        with ThreadPoolExecutor(READERS) as pool:
            for device, index in indices.items():
                bounds = tuple(slice(*s.indices(n)[:2]) for s, n in zip(index or (), self.padded, strict=True))
                if bounds not in shards:
                    shards[bounds] = self._on_device(device, bounds, dtype, pool)
                arrays.append(jax.device_put(shards[bounds], device))
        array = jax.make_array_from_single_device_arrays(self.padded, sharding, arrays)
        return self._with_new_tokens(array) if self.new_tokens else array

    def cost(self, bounds: Slices) -> tuple[int, int]:
        """(bytes, number) of the pieces of the shard `bounds` of the padded parameter."""
        stacked, wanted = self._held(bounds)
        if stacked not in self._widths:
            names = [name for _, name in self._tensors(stacked)]
            self._widths[stacked] = len(names), sum(map(self.weights.itemsize, names))
        count, width = self._widths[stacked]
        cuts = [self.tensor.their_slices(self.rest, part) for part in self._cuts(wanted)]
        elements = sum(math.prod(s.stop - s.start for s in block) for block in cuts)
        return int(width * elements), count * len(cuts)

    def blocks(self) -> Iterator[tuple[str, tuple[int | slice, ...], np.ndarray]]:
        """The whole parameter in pieces: (tensor, index in the parameter, the tensor's numbers there in its dtype)."""
        for piece in self._pieces([slice(0, size) for size in self.padded]):
            yield piece.name, (*piece.start[: self.tensor.stacked], *piece.wanted), self._read_ours(piece)

    def part(self, at: tuple[int, ...]) -> np.ndarray:
        """The part of the parameter in one tensor, whose stacked indices are `at`, with padding, FP32."""
        out = np.zeros(self.padded[len(at) :], np.float32)
        bounds = (*(slice(i, i + 1) for i in at), *(slice(0, size) for size in self.padded[len(at) :]))
        for piece in self._pieces(bounds):
            out[piece.wanted] = self.tensor.multiplied(self._read_ours(piece))
        if self.new_tokens:
            dim = VOCABULARY_DIM[self.tensor.ours] % out.ndim
            new = slice(self.new_tokens.start, self.new_tokens.stop)
            out[(*(slice(None),) * dim, new)] = np.expand_dims(self._mean_token(), dim)
        return out

    def _on_device(self, device: Any, bounds: Slices, dtype: Any, pool: ThreadPoolExecutor) -> jax.Array:
        """One device's shard. A large one is read in pieces, which the device casts and transposes.

        The host then holds READERS pieces of at most PIECE_BYTES; a transpose there would take longer than the read.
        """
        shape = [s.stop - s.start for s in bounds]
        pieces = [*self._pieces(bounds)]
        if 4 * math.prod(shape) <= PIECE_BYTES:
            out = np.zeros(shape, dtype)
            for piece in pieces:
                where = tuple(map(slice, piece.start, np.add(piece.start, piece.lengths)))
                out[where] = self.tensor.multiplied(self._read_ours(piece)).reshape(piece.lengths)
            return jax.device_put(out, device)
        shard = jnp.zeros(shape, dtype, device=device)
        waiting = deque(pool.submit(self._read, piece) for piece in pieces[:READERS])
        for i, piece in enumerate(pieces):
            block = jax.device_put(waiting.popleft().result(), device)
            if i + READERS < len(pieces):
                waiting.append(pool.submit(self._read, pieces[i + READERS]))
            how = self.tensor.conversion, self.rest, self.tensor.without_starts(piece.wanted), piece.lengths
            shard = _with_piece(shard, block, np.array(piece.start), *how)
            shard.block_until_ready()  # or the host would keep blocks whose transfer waits
        return shard

    def _with_new_tokens(self, array: jax.Array) -> jax.Array:
        dim, tokens = VOCABULARY_DIM[self.tensor.ours] % array.ndim, self.new_tokens

        def change(array: jax.Array, row: jax.Array) -> jax.Array:
            index = lax.broadcasted_iota(jnp.int32, array.shape, dim)
            new = (index >= tokens.start) & (index < tokens.stop)
            return jnp.where(new, jnp.expand_dims(row, dim).astype(array.dtype), array)

        return jax.jit(change, donate_argnums=0, out_shardings=array.sharding)(array, self._mean_token())

    def _mean_token(self) -> np.ndarray:
        """The mean of the tokens' rows, FP32.

        Every process reads and adds the same blocks of rows, so that the mean is the same on any mesh.
        """
        [name] = self.names.values()
        rows, *width = self.weights.shape(name)
        total, step = np.zeros(width), max(1, PIECE_BYTES // (8 * math.prod(width)))
        for start in range(0, rows, step):
            block = (slice(start, min(start + step, rows)), *(slice(0, size) for size in width))
            total += self.weights.read(name, block).astype(np.float64).sum(axis=0)
        return self.tensor.multiplied((total / rows).astype(np.float32))

    def _read(self, piece: "TensorPiece") -> np.ndarray:
        slices = self.tensor.their_slices(self.rest, piece.wanted)
        block = self.weights.read(piece.name, slices)
        for copy in self._copies:
            if self.weights.shape(copy) != self.weights.shape(piece.name) or not np.array_equal(
                self.weights.read(copy, slices), block
            ):
                assert (extra := self._extra) is not None
                raise InputError(
                    f"{self.weights.folder}: {copy} differs from {piece.name}, but modules for "
                    f"{extra.purpose} share it: set {extra.key}=0, or copy the whole model again."
                )
        return block

    def _read_ours(self, piece: "TensorPiece") -> np.ndarray:
        return self.tensor.to_ours(self._read(piece), self.rest, piece.wanted)

    def _pieces(self, bounds: Sequence[slice]) -> Iterator["TensorPiece"]:
        """The blocks of tensors that hold a shard, without the vocabulary's padding."""
        stacked, wanted = self._held(bounds)
        for at, name in self._tensors(stacked):
            for part in self._cuts(wanted):
                starts = (s.start - b.start for s, b in zip(part, bounds[len(at) :], strict=True))
                lengths = (s.stop - s.start for s in part)
                yield TensorPiece(name, part, (*at, *starts), (*(1 for _ in at), *lengths))

    def _held(self, bounds: Sequence[slice]) -> tuple[Slices, Slices]:
        """`bounds` without the padding: of the dimensions that are spread over tensors, and of the others."""
        held = tuple(slice(s.start, min(s.stop, size)) for s, size in zip(bounds, self.shape, strict=True))
        return held[: self.tensor.stacked], held[self.tensor.stacked :]

    def _tensors(self, stacked: Slices) -> Iterator[tuple[tuple[int, ...], str]]:
        """The tensors of a shard, with their positions in it."""
        for at in np.ndindex(*(s.stop - s.start for s in stacked)):
            yield at, self.names[tuple(i + s.start for i, s in zip(at, stacked, strict=True))]

    def _cuts(self, wanted: Slices) -> Iterator[Slices]:
        """The pieces of one tensor's part `wanted` of the parameter, each of at most PIECE_BYTES if its rows are."""
        if any(s.start >= s.stop for s in wanted):
            return
        cut = self.tensor.leading_axis
        row = 4 * math.prod(s.stop - s.start for s in wanted) // (wanted[cut].stop - wanted[cut].start)
        step = max(1, PIECE_BYTES // row)
        for start in range(wanted[cut].start, wanted[cut].stop, step):
            piece = slice(start, min(start + step, wanted[cut].stop))
            yield (*wanted[:cut], piece, *wanted[cut + 1 :])


def on_devices(
    readers: Mapping[str, Reader],
    params: Mapping[str, jax.ShapeDtypeStruct],
    layer_state: Mapping[str, Mapping[str, jax.ShapeDtypeStruct]],
) -> tuple[dict[str, jax.Array], dict[str, dict[str, jax.Array]]]:
    """(the parameters, the layers' state) that are wanted, in their dtypes and shardings.

    `readers` are by name, those of the state as in `state_by_name`.
    """

    def read(name: str, array: jax.ShapeDtypeStruct) -> jax.Array:
        return readers[name].on_devices(array.sharding, array.dtype)

    states = {
        kind: {name: read(f"blocks.{kind}.{name}", array) for name, array in arrays.items()}
        for kind, arrays in layer_state.items()
    }
    return {name: read(name, array) for name, array in params.items()}, states


class TensorPiece(NamedTuple):
    """A block of one tensor, and where it belongs in a device's shard."""

    name: str  # of the tensor
    wanted: tuple[slice, ...]  # in the parameter, without its stacked dimensions
    start: tuple[int, ...]  # in the shard
    lengths: tuple[int, ...]


@partial(jax.jit, donate_argnums=0, static_argnums=(3, 4, 5, 6))
def _with_piece(shard, block, start, tensor: Tensor, rest, wanted, lengths) -> jax.Array:
    piece = tensor.multiplied(tensor.to_ours(block, rest, wanted)).astype(shard.dtype).reshape(lengths)
    return lax.dynamic_update_slice(shard, piece, tuple(start))


@file_reader("weights.folder")
def check_tensors(weights: NamedTensors, readers: Sequence[Reader], unused: tuple[str, ...]) -> None:
    """Raise InputError for tensors that are missing, have another shape, or that no parameter needs.

    Tensors whose names begin with one of `unused` are allowed.
    """
    parts: dict[str, list[tuple[Tensor, Sequence[int]]]] = {}
    for reader in readers:
        for name in reader.names.values():
            parts.setdefault(name, []).append((reader.tensor, reader.rest))
    expected = {name: whole_shape(pieces) for name, pieces in parts.items()}
    extra = [n for n in weights.files if n not in expected and not n.startswith(unused) and not n.endswith(UNUSED)]
    for name, shape in expected.items():
        if name not in weights.files:
            instead = f", but {shown(', '.join(extra))}, which no parameter needs" if extra else ""
            cure = "copy the whole language model"
            if any(each.startswith(CLASSIFIER_HEADS) for each in extra):
                cure = "it is a classifier, and only an objective with parameters of its own starts from one"
            raise InputError(f"{weights.folder} has no tensor {name}{instead}: {cure}.")
        if (found := weights.shape(name)) != shape:
            raise InputError(
                f"{weights.folder / weights.files[name]}: {name} has the shape {list(found)}, but by "
                f"{weights.described_by} it has {[*shape]}: give both of the same model."
            )
    extra = [name for name in extra if name not in HEADS]  # equal to the embedding, or it were a parameter
    if extra:
        raise InputError(f"{weights.folder} has the tensor {extra[0]}, which the model does not have: give its own.")


def unread_head(tensors: Sequence[Tensor], model: ModelConfig) -> tuple[str, ...]:
    """The names of a head's tensors, where an objective has parameters in its place."""
    assert all(tensor.ours.startswith("head") for tensor in tensors), tensors
    return tuple(name for tensor in tensors for name in tensor_names(tensor, model).values())


def unpadded(name: str, shape: Sequence[int], model: ModelConfig) -> tuple[int, ...]:
    """The shape of a parameter without the padding of the vocabulary."""
    sizes = list(shape)
    if name in VOCABULARY_DIM:
        sizes[VOCABULARY_DIM[name]] = model.vocab_size
    return tuple(sizes)
