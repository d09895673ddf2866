"""Parameters from the tensors of a Hugging Face folder, onto the devices that hold them."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from megajax.config import ModelConfig
from megajax.config.kinds import block_layers
from megajax.errors import InputError
from megajax.hf.folder import Weights
from megajax.hf.tensors import Tensor, names
from megajax.sharding import BLOCKS

PIECE_BYTES = 2**28  # of a piece in FP32
# Buffers of older folders, which are no parameters.
UNUSED = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias")
VOCABULARY_DIM = {"embedding.tokens": 0, "head": -1}  # the padded dimension


class Reader:
    """Reads blocks of one parameter from the tensors that hold it."""

    def __init__(self, weights: Weights, tensor: Tensor, model: ModelConfig, padded: Sequence[int]):
        self.weights, self.tensor = weights, tensor
        self.padded, self.shape = tuple(padded), unpadded(tensor.ours, padded, model)
        self.names = tensor_names(tensor, model)
        self.rest = self.shape[tensor.stacked :]  # of the part in one tensor

    @cached_property
    def dtype(self) -> np.dtype:
        """The tensors' dtype; FP32 if they have several."""
        found = {self.weights.dtype(name) for name in self.names.values()}
        return np.dtype(found.pop() if len(found) == 1 else np.float32)

    def on_devices(self, sharding: jax.sharding.Sharding) -> jax.Array:
        """The whole parameter, FP32, on the devices of this process.

        Pieces of at most PIECE_BYTES are read, one ahead, in the tensors' dtype, and cast on the device. So no shard is
        ever whole in the host's memory.
        """
        indices = sharding.addressable_devices_indices_map(self.padded)
        with ThreadPoolExecutor(1) as pool:
            shards = [self._on_device(device, index or (), pool) for device, index in indices.items()]
        return jax.make_array_from_single_device_arrays(self.padded, sharding, shards)

    def _on_device(self, device: Any, index: tuple[slice, ...], pool: ThreadPoolExecutor) -> jax.Array:
        bounds = [slice(*s.indices(size)[:2]) for s, size in zip(index, self.padded, strict=True)]
        shape = [s.stop - s.start for s in bounds]
        rows = max(1, PIECE_BYTES // max(1, 4 * math.prod(shape[1:])))
        starts = range(bounds[0].start, bounds[0].stop, rows)
        pieces = [[slice(start, min(start + rows, bounds[0].stop)), *bounds[1:]] for start in starts]
        if len(pieces) == 1:
            return jax.device_put(self.block(pieces[0]).astype(np.float32), device)
        shard = jax.device_put(jnp.zeros(shape, jnp.float32, device=device), device)
        ahead = pool.submit(self.block, pieces[0])
        for i, piece in enumerate(pieces):
            block = ahead.result()
            if i + 1 < len(pieces):
                ahead = pool.submit(self.block, pieces[i + 1])
            shard = _with_piece(shard, jax.device_put(block, device), piece[0].start - bounds[0].start)
            shard.block_until_ready()  # or the host would hold many pieces whose transfer waits
        return shard

    def block(self, bounds: Sequence[slice]) -> np.ndarray:
        """A block of the parameter in the tensors' dtype; rows of the vocabulary's padding are zeros."""
        out = np.zeros([s.stop - s.start for s in bounds], self.dtype)
        held = [slice(s.start, min(s.stop, size)) for s, size in zip(bounds, self.shape, strict=True)]
        stacked, wanted = held[: self.tensor.stacked], tuple(held[self.tensor.stacked :])
        if any(s.start >= s.stop for s in held):
            return out
        target, slices = tuple(slice(s.stop - s.start) for s in wanted), self.tensor.their_slices(self.rest, wanted)
        for at in np.ndindex(*(s.stop - s.start for s in stacked)):
            name = self.names[tuple(i + s.start for i, s in zip(at, stacked, strict=True))]
            out[(*at, *target)] = self.tensor.to_ours(self.weights.read(name, slices), self.rest, wanted)
        return out


@partial(jax.jit, donate_argnums=0)
def _with_piece(shard: jax.Array, piece: jax.Array, start: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(shard, piece.astype(shard.dtype), start, 0)


def check_tensors(weights: Weights, readers: Sequence[Reader]) -> None:
    """Raise InputError for tensors that are missing, have another shape, or that no parameter needs."""
    expected: dict[str, list[int]] = {}
    for reader in readers:
        tensor, part = reader.tensor, reader.tensor.their_shape(reader.rest)
        for name in reader.names.values():
            shape = expected.setdefault(name, list(part))
            if tensor.fused is not None:
                shape[tensor.fused] = max(shape[tensor.fused], tensor.start + part[tensor.fused])
    for name, shape in expected.items():
        if name not in weights.files:
            raise InputError(f"{weights.folder} has no tensor {name}: copy the whole model.")
        if (found := weights.shape(name)) != tuple(shape):
            raise InputError(
                f"{weights.folder / weights.files[name]}: {name} has the shape {list(found)}, but by config.json "
                f"it has {shape}: copy both files of the same model."
            )
    extra = [n for n in weights.files if n not in expected and not n.endswith(UNUSED) and n != "lm_head.weight"]
    if extra:
        raise InputError(f"{weights.folder} has the tensor {extra[0]}, which its model_type does not have.")


def tensor_names(tensor: Tensor, model: ModelConfig) -> dict[tuple[int, ...], str]:
    """The tensors of a parameter, by the indices (row, expert) of the dimensions that are spread over tensors."""
    layers = block_layers(model)[tensor.ours.split(".")[1]] if tensor.ours.startswith(BLOCKS) else ()
    return names(tensor, layers, model.num_experts or 0)


def unpadded(name: str, shape: Sequence[int], model: ModelConfig) -> tuple[int, ...]:
    """The shape of a parameter without the padding of the vocabulary."""
    sizes = list(shape)
    if name in VOCABULARY_DIM:
        sizes[VOCABULARY_DIM[name]] = model.vocab_size
    return tuple(sizes)
