"""Collectives over `tensor`: for all tokens at once, or for pieces around a ring."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import jax
import jax.numpy as jnp
from jax import lax

from megajax.parallel import collectives
from megajax.parallel.collectives import as_bytes, gather_tiles


@dataclass(frozen=True)
class TensorRing:
    """The devices of `tensor`, in a ring.

    A tensor of all tokens is a list of pieces. Either one piece in the order of the tokens, or one piece per device:
    first the own tokens, then those of the previous device, and so on.
    """

    size: int
    copied: bool  # copy engines send the pieces

    # On H200s a piece's matmul in BF16 takes as long as its transfer by NCCL (152 GB/s) at about 3500 columns, and by a
    # copy engine (343 GB/s) at 1600. In FP8 both are faster by the same factor. With copy engines overlap also helps
    # narrower layers.
    overlap_width, overlap_width_of_copies = 3072, 1024

    def overlaps(self, width: int) -> bool:
        """Whether a layer with `width` columns (row layer: rows) on this device hides its transfers."""
        return self.size > 1 and width >= (self.overlap_width_of_copies if self.copied else self.overlap_width)

    def all_gather_tokens(self, x: jax.Array) -> jax.Array:
        """`[T / tensor, D]` → `[T, D]`: all tokens of this device's sequences."""
        return gather_tiles(x, ("tensor",), 0) if self.size > 1 else x

    def reduce_scatter_tokens(self, y: jax.Array) -> jax.Array:
        """`[T, D]` partial sums → `[T / tensor, D]`: summed over `tensor`, own tokens kept."""
        return collectives.psum_scatter(y, "tensor", scatter_dimension=0, tiled=True) if self.size > 1 else y

    def reduce_scatter_pieces(self, pieces: Sequence[jax.Array]) -> jax.Array:
        """`reduce_scatter_tokens` of partial sums in pieces: each is summed in FP32 on the device of its tokens."""
        if len(pieces) == 1:
            return self.reduce_scatter_tokens(pieces[0])
        steps = range(1, self.size)
        received = [collectives.ppermute(pieces[step], "tensor", self._pairs(self.size - step)) for step in steps]
        total = reduce(jnp.add, [piece.astype(jnp.float32) for piece in (pieces[0], *received)])
        return total.astype(pieces[0].dtype)

    def receive(self, x: jax.Array) -> jax.Array:
        """The previous device's `x`."""
        return as_bytes(lambda x: collectives.ppermute(x, "tensor", self._pairs(1)), x)

    def _pairs(self, step: int) -> list[tuple[int, int]]:
        """(source, destination) of each device, `step` ranks further."""
        return [(rank, (rank + step) % self.size) for rank in range(self.size)]

    def join(self, pieces: Sequence[jax.Array]) -> jax.Array:
        """Pieces → `[T, F]` in the order of the tokens."""
        if len(pieces) == 1:
            return pieces[0]
        own, rank = pieces[0].shape[0], lax.axis_index("tensor")
        joined = jnp.zeros((own * len(pieces), *pieces[0].shape[1:]), pieces[0].dtype)
        for step, piece in enumerate(pieces):
            start = (rank - step) % self.size * own
            joined = lax.dynamic_update_slice_in_dim(joined, piece, start, 0)
        return joined

    def split(self, x: jax.Array, count: int) -> list[jax.Array]:
        """`[T, F]` in the order of the tokens → `count` pieces."""
        if count == 1:
            return [x]
        own, rank = x.shape[0] // count, lax.axis_index("tensor")
        return [lax.dynamic_slice_in_dim(x, (rank - step) % count * own, own, 0) for step in range(count)]
