"""The model's communication points on a mesh; they run inside the step's shard_map, manual over all axes."""

import math
from collections.abc import Mapping
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax import lax

from megajax import ops
from megajax.config.fields import BATCH_AXES
from megajax.model.comm import SingleDevice, TokenPositions
from megajax.ops import fp8
from megajax.ops.fp8 import Fp8Weight
from megajax.ops.partial_attention import Scores
from megajax.parallel.context import attention as over_context
from megajax.parallel.experts import dispatch as over_experts
from megajax.parallel.tensor import linear
from megajax.parallel.weights.exchange import as_bytes, gather_tiles

TOKEN_AXES = (*BATCH_AXES, "context", "tensor")  # that the tokens of a microbatch lie over, between the blocks


class MeshComm(SingleDevice):
    """The communication points as collectives; where an axis has size 1, the identity."""

    # On H200s a piece's matmul in BF16 takes as long as its transfer by NCCL (152 GB/s) at about 3500 columns, and by a
    # copy engine (343 GB/s) at 1600. In FP8 both are faster alike. Narrower ones gain by copy engines all the same.
    overlap_width, overlap_width_of_copies = 3072, 1024

    def __init__(
        self,
        sizes: Mapping[str, int],
        attention: ops.Implementation,
        deterministic: bool = False,
        context_strategy: str = "ring",
        fp8_implementation: fp8.Implementation = "reference",
        elementwise: ops.ElementwiseImplementation = "reference",
        dispatch: str = "all_gather",
        ragged: bool = False,
        experts_over: tuple[str, ...] = ("expert",),
        grouped: ops.GroupedImplementation = "reference",
        copied: bool = False,  # pieces travel by copy engines
        tied: bool = False,
    ):
        # The reference of grouped matmuls reads rows that the kernel of the activation leaves unwritten.
        of_experts: ops.ElementwiseImplementation = elementwise if grouped == "pallas" else "reference"
        super().__init__(attention, ops.ExpertKernels(grouped, of_experts))
        self.fp8 = fp8.kernels(fp8_implementation)
        self.dispatch, self.ragged = dispatch, ragged  # how tokens meet experts, and whether by ragged all-to-all
        self.experts_over = experts_over
        self.expert_size = math.prod(sizes[axis] for axis in experts_over)
        self.elementwise: ops.ElementwiseImplementation = elementwise
        self.deterministic, self.attend_calls = deterministic, 0
        self.sizes, self.context_strategy = sizes, context_strategy
        self.copied, self.tied = copied, tied
        self.tensor_size, self.context_size = sizes["tensor"], sizes["context"]
        self.token_shards = math.prod(sizes[axis] for axis in TOKEN_AXES)

    def enter(self, x: jax.Array) -> jax.Array:
        return gather_tiles(x, ("tensor",), 0) if self.tensor_size > 1 else x

    def leave(self, y: jax.Array) -> jax.Array:
        return lax.psum_scatter(y, "tensor", scatter_dimension=0, tiled=True) if self.tensor_size > 1 else y

    def column_linear(self, x: jax.Array, w: jax.Array | Fp8Weight) -> jax.Array:
        return linear.column_linear(self, x, w)

    def row_linear(self, x: jax.Array, w: jax.Array | Fp8Weight) -> jax.Array:
        return linear.row_linear(self, x, w)

    def own_linear(self, x: jax.Array, w: jax.Array | Fp8Weight) -> jax.Array:
        return linear.own_linear(self, x, w)

    def mlp(self, activation, x, w_up, bias, w_down) -> jax.Array:
        if bias is not None:
            return super().mlp(activation, x, w_up, bias, w_down)
        return linear.mlp(self, activation, x, w_up, w_down)

    def experts(self, activation, x, experts, weights, w_up, w_down, capacity) -> jax.Array:
        strategy = super().experts
        if self.expert_size > 1:
            strategy = partial(over_experts.gathered if self.dispatch == "all_gather" else over_experts.exchanged, self)
        if "tensor" in self.experts_over:  # whole experts, so each device sends its own tokens
            return strategy(activation, x, experts, weights, w_up, w_down, capacity)
        x, experts, weights = (self.enter(a) for a in (x, experts, weights))
        return self.leave(strategy(activation, x, experts, weights, w_up, w_down, capacity))

    def tie_gradients[Gradients](self, gradients: Gradients) -> Gradients:
        """Of a linear layer's input and weights, none before all if `tied`: the layer below hides the reduction."""
        return lax.optimization_barrier(gradients) if self.tied else gradients

    def hand_on(self, x: jax.Array) -> jax.Array:
        """The array of the device before, on a ring over `tensor`."""
        return as_bytes(lambda x: lax.ppermute(x, "tensor", self._to_rank_after(1)), x)

    def scatter_pieces(self, pieces: list[jax.Array]) -> jax.Array:
        """Each piece of partial sums back to the device that it belongs to → `[T / tensor, F]`, summed in FP32."""
        sent = [(pieces[step], self._to_rank_after(self.tensor_size - step)) for step in range(1, self.tensor_size)]
        received = [lax.ppermute(piece, "tensor", where) for piece, where in sent]
        total = reduce(jnp.add, [piece.astype(jnp.float32) for piece in (pieces[0], *received)])
        return total.astype(pieces[0].dtype)

    def _to_rank_after(self, step: int) -> list[tuple[int, int]]:
        return [(rank, (rank + step) % self.tensor_size) for rank in range(self.tensor_size)]

    def join(self, pieces: list[jax.Array]) -> jax.Array:
        """Pieces → `[T, F]` in the order of the tokens."""
        if len(pieces) == 1:
            return pieces[0]
        own, rank = pieces[0].shape[0], lax.axis_index("tensor")
        joined = jnp.zeros((own * len(pieces), *pieces[0].shape[1:]), pieces[0].dtype)
        for step, piece in enumerate(pieces):
            start = (rank - step) % self.tensor_size * own
            joined = lax.dynamic_update_slice_in_dim(joined, piece, start, 0)
        return joined

    def split(self, x: jax.Array, count: int) -> list[jax.Array]:
        """`[T, F]` in the order of the tokens → `count` pieces: one, or one for each device of `tensor`."""
        if count == 1:
            return [x]
        own, rank = x.shape[0] // count, lax.axis_index("tensor")
        return [lax.dynamic_slice_in_dim(x, (rank - step) % count * own, own, 0) for step in range(count)]

    def overlaps(self, width: int) -> bool:
        """Whether a layer with so many columns (a row layer: rows) on this device hides its transfers."""
        return self.tensor_size > 1 and width >= (self.overlap_width_of_copies if self.copied else self.overlap_width)

    def local_kv_heads(self, num_kv_heads: int) -> int:
        return max(1, num_kv_heads // self.tensor_size)

    def attend(self, q, k, v, positions: TokenPositions, *, window, softcap, sinks=None) -> jax.Array:
        scale = q.shape[-1] ** -0.5
        if self.deterministic and self.attention == "cudnn":
            # XLA (jaxlib 0.11.2) fails at run time on two equal cuDNN calls of the deterministic backward pass. The
            # kernel takes the scale in FP32, which does not see this difference.
            self.attend_calls += 1
            scale *= 1 + self.attend_calls * 2**-40
        if self.sizes["context"] > 1:
            if window is not None and window >= q.shape[1] * self.sizes["context"]:
                window = None  # every earlier token is inside
            scores = Scores(scale, softcap, self.attention)
            strategy, size = self.context_strategy, self.sizes["context"]
            return over_context.attention(strategy, size, scores, window, q, k, v, positions, sinks)
        return ops.attention(
            q,
            k,
            v,
            window=window,
            document_starts=positions.document_starts,
            softcap=softcap,
            scale=scale,
            sinks=sinks,
            implementation=self.attention,
        )

    @property
    def attention_is_fused(self) -> bool:
        """Whether a layer's attention is one call of cuDNN."""
        whole = self.sizes["context"] == 1 or self.context_strategy == "all_to_all"
        return self.attention == "cudnn" and whole

    def own_tokens(self, x: jax.Array) -> jax.Array:
        if self.tensor_size == 1:
            return x
        own = x.shape[0] // self.tensor_size
        return lax.dynamic_slice_in_dim(x, lax.axis_index("tensor") * own, own, 0)

    def vocabulary_start(self, local_size: int) -> jax.Array | int:
        return lax.axis_index("tensor") * local_size if self.tensor_size > 1 else 0

    def max_over_tensor(self, x: jax.Array) -> jax.Array:
        return lax.pmax(x, "tensor") if self.tensor_size > 1 else x

    def sum_over_tensor(self, x: jax.Array) -> jax.Array:
        return lax.psum(x, "tensor") if self.tensor_size > 1 else x

    def max_over_devices[Arrays](self, x: Arrays) -> Arrays:
        axes = tuple(axis for axis, size in self.sizes.items() if size > 1 and axis != "pipeline")
        return lax.pmax(x, axes) if axes else x

    def sum_over_tokens[Arrays](self, x: Arrays) -> Arrays:
        return self._sum(x, TOKEN_AXES)

    def of_all_tokens[Arrays](self, x: Arrays) -> Arrays:
        axes = tuple(axis for axis in TOKEN_AXES if self.sizes[axis] > 1)
        return jax.tree.map(lambda a: lax.all_gather(a, axes, tiled=True), x) if axes else x

    def sum_over_sequence(self, x: jax.Array) -> jax.Array:
        return self._sum(x, ("context", "tensor"))

    def _sum[Arrays](self, x: Arrays, axes: tuple[str, ...]) -> Arrays:
        axes = tuple(axis for axis in axes if self.sizes[axis] > 1)
        return lax.psum(x, axes) if axes else x

    def sequence_ids(self, num_sequences: int) -> jax.Array:
        return lax.axis_index(BATCH_AXES) * num_sequences + jnp.arange(num_sequences)
