"""The model's communication points on a mesh; they run inside the step's shard_map, manual over all axes."""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from megajax import ops
from megajax.kernel_choice import Kernels
from megajax.model.comm import Comm, LatentKeys, TokenPositions
from megajax.ops import AttentionSettings, fp8
from megajax.ops.partial_attention import Ranges, Scores
from megajax.parallel import collectives
from megajax.parallel.context import ContextAttention, context_attention
from megajax.parallel.context.token_order import from_consecutive, to_consecutive
from megajax.parallel.experts import expert_parallel
from megajax.parallel.tensor import linear
from megajax.parallel.tensor.linear import TensorParallel
from megajax.parallel.tensor.ring import TensorRing
from megajax.schema.fields import BATCH_AXES
from megajax.step_plan import Collectives

TOKEN_AXES = (*BATCH_AXES, "context", "tensor")  # axes that divide the tokens of the residual stream


class AttentionScales:
    """The scale of the scores for each attention call; with `distinct` they differ by less than FP32 resolves.

    XLA (jaxlib 0.11.2) fails at run time if two cuDNN calls of the deterministic backward pass are equal. The kernel
    takes the scale in FP32, so the results are the same.
    """

    def __init__(self, distinct: bool):
        self.distinct, self.calls = distinct, 0

    def next(self, scale: float) -> float:
        self.calls += self.distinct
        return scale * (1 + self.calls * 2**-40)


class MeshComm(Comm):
    """The communication points as collectives, and those only for `parallel/`; the identity for axes of size 1."""

    token_axes: tuple[str, ...] = TOKEN_AXES

    def __init__(
        self,
        sizes: Mapping[str, int],
        kernels: Kernels,
        collectives: Collectives,
        deterministic: bool,
        frozen: bool = False,
    ):
        """`frozen`: the linear layers' weights have no gradients, except adapters."""
        self.sizes, self.kernels, self.collectives, self.deterministic = sizes, kernels, collectives, deterministic
        self.tensor_size, self.context_size = sizes["tensor"], sizes["context"]
        self.attention_scales = AttentionScales(distinct=deterministic and kernels.attention == "cudnn")
        ring, fp8_kernels = TensorRing(self.tensor_size, collectives.copied), fp8.kernels(kernels.fp8)
        how = fp8_kernels, kernels.elementwise, self.max_over_devices, collectives.tied, frozen
        self.set_tensor_parallel(TensorParallel(ring, *how))
        self.context_attention = context_attention(collectives.context, self.context_size)
        self.linear_attention, self.elementwise = kernels.linear_attention, kernels.elementwise
        self.expert_parallel = expert_parallel(collectives, kernels.experts, self.max_over_devices)

    def set_tensor_parallel(self, tp: TensorParallel) -> None:
        """The linear layers, and the collectives of tokens over `tensor`."""
        self.tensor_parallel = tp
        self.all_gather_tokens, self.reduce_scatter_tokens = tp.ring.all_gather_tokens, tp.ring.reduce_scatter_tokens
        self.column_linear, self.row_linear = partial(linear.column_linear, tp), partial(linear.row_linear, tp)
        self.replicated_linear = partial(linear.replicated_linear, tp)
        self.column_activation_row = partial(linear.column_activation_row, tp)

    def experts(self, activation, x, experts, weights, matrices, capacity) -> jax.Array:
        apply, biases = self.expert_parallel.apply, matrices.biases
        if "tensor" in self.collectives.experts_over:  # experts are whole, so each device sends its own tokens
            return apply(activation, x, experts, weights, matrices, capacity)
        x, experts, weights = (self.all_gather_tokens(a) for a in (x, experts, weights))
        if matrices.token_ids is not None:
            matrices = matrices.with_ids(self.all_gather_tokens(matrices.token_ids))
        if biases is not None and self.tensor_size > 1:  # the sum over `tensor` has the output's bias once
            first = jnp.where(lax.axis_index("tensor") == 0, biases.down, 0)
            matrices = matrices._replace(biases=biases._replace(down=first))
        return self.reduce_scatter_tokens(apply(activation, x, experts, weights, matrices, capacity))

    @jax.named_scope("core_attention")
    def attend(self, q, k, v, positions: TokenPositions, settings: AttentionSettings):
        attention = self._over_context(q, positions, settings)
        if settings.bias_table is None:
            return attention.attend(q, k, v, positions, settings.sinks)
        return attention.attend(q, k, v, positions, settings.sinks, settings.bias_table, settings.bias_distance)

    @jax.named_scope("core_attention")
    def attend_to(self, q, k, v, ranges: Ranges | None, scale: float | None) -> jax.Array:
        scores = Scores(self.attention_scales.next(scale or q.shape[-1] ** -0.5), None, self.kernels.cross_attention)
        return ops.cross_attention(q, *self.gather((k, v), "context", dim=1), ranges, scores)

    def attend_latent(self, q, keys: LatentKeys, positions: TokenPositions, settings: AttentionSettings):
        if not self.collectives.latents:
            return super().attend_latent(q, keys, positions, settings)
        return self._over_context(q, positions, settings).attend_latent(self.column_linear, q, keys, positions)

    def _over_context(self, q, positions: TokenPositions, settings: AttentionSettings) -> ContextAttention:
        """Attention of these queries over `context`."""
        scale, window = self.attention_scales.next(settings.scale or q.shape[-1] ** -0.5), settings.window
        scores = Scores(scale, settings.softcap, self.kernels.attention, settings.wants_largest)
        if window is not None and window >= q.shape[1] * self.context_size:
            window = None  # it includes every token
        zigzag = positions.chunks is None
        return self.context_attention(self.context_size, scores, window, zigzag, settings.causal)

    @property
    def attention_is_fused(self) -> bool:
        """Whether a layer's attention is one cuDNN call."""
        return self.kernels.attention == "cudnn" and self.collectives.context.key_shards(self.context_size) == 1

    # On named axes

    def size(self, axes: str | Sequence[str]) -> int:
        return math.prod(self.sizes[axis] for axis in self._named(axes))

    def index(self, axis: str) -> jax.Array | int:
        return lax.axis_index(axis) if self.sizes[axis] > 1 else 0

    def sum[Arrays](self, x: Arrays, axes: str | Sequence[str]) -> Arrays:
        present = self._present(axes)
        return collectives.psum(x, present) if present else x

    def max[Arrays](self, x: Arrays, axes: str | Sequence[str]) -> Arrays:
        present = self._present(axes)
        return collectives.pmax(x, present) if present else x

    def gather[Arrays](self, x: Arrays, axes: str | Sequence[str], dim: int = 0) -> Arrays:
        present = self._present(axes)
        return jax.tree.map(lambda a: collectives.all_gather(a, present, axis=dim, tiled=True), x) if present else x

    def in_order[Arrays](self, x: Arrays, back: bool = False) -> Arrays:
        if self.context_size == 1 or self.collectives.consecutive:
            return x
        return jax.tree.map(lambda a: (from_consecutive if back else to_consecutive)(a, self.context_size), x)

    def _named(self, axes: str | Iterable[str]) -> Iterable[str]:
        return (axes,) if isinstance(axes, str) else axes

    def _present(self, axes: str | Iterable[str]) -> tuple[str, ...]:
        return tuple(axis for axis in self._named(axes) if self.sizes[axis] > 1)

    # Only for `parallel/` and `step/`, besides `all_gather_tokens` and `reduce_scatter_tokens`

    def sequence_ids(self, num_sequences: int) -> jax.Array:
        """The index of each of this device's sequences in the microbatch over all devices, `[B]`."""
        return lax.axis_index(BATCH_AXES) * num_sequences + jnp.arange(num_sequences)

    def max_over_devices[Arrays](self, x: Arrays) -> Arrays:
        """The maximum of each array over all devices; other pipeline stages only if they share the tokens."""
        return self.max(x, [axis for axis in self.sizes if axis != "pipeline" or axis in self.token_axes])
