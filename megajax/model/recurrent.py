"""What sublayers with a state share: consecutive tokens, those before a device's, and what generation keeps."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from megajax import ops
from megajax.config import ModelConfig
from megajax.model.comm import Comm
from megajax.model.sublayer import LayerContext, Weights, normalise

DECAYS, STEPS = (1.0, 16.0), (1e-3, 0.1)  # the ranges of the initial A and softplus of its bias, as in Mamba-2
Kept = dict[str, jax.Array]  # arrays [B, ...] by name


class RecurrentTokens:
    """This device's tokens as a recurrence sees them: consecutive in each sequence, in their documents.

    `earlier` is what the layer kept for the tokens before (`Comm.earlier`), None in training; `kept` has the arrays for
    those that follow.
    """

    def __init__(self, ctx: LayerContext, earlier: Kept | None):
        self.comm: Comm = ctx.comm
        tokens = ctx.inputs.token_positions
        index = tokens.index if tokens.document_starts is None else tokens.index - tokens.document_starts
        self.position, self.is_real = self.comm.in_order((index, tokens.is_real))  # [B, S], in the document
        self.starts = None if tokens.document_starts is None else self.position == 0
        self.earlier, self.kept = earlier, Kept()

    def convolved(self, x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        """`ops.short_convolution` of x `[B, S, F]`."""
        count = len(weight) - 1
        before = self._window(x, count) if self.earlier is None else self.earlier["window"]
        lengths = None if self.is_real is None else jnp.sum(self.is_real, axis=1, dtype=jnp.int32)
        self.kept["window"] = ops.last_tokens(x, count, lengths, before)
        return ops.short_convolution(x, weight, self.position, before, bias)

    def where_real(self, x: jax.Array) -> jax.Array:
        """x `[B, S, ...]`, and 0 for padding."""
        return x if self.is_real is None else jnp.where(self.is_real.reshape(*x.shape[:2], *[1] * (x.ndim - 2)), x, 0)

    def options(self, dtype: jnp.dtype) -> dict[str, Any]:
        """How a recurrence runs on these tokens in a step of `dtype`: its keyword arguments.

        Its FP32 matmuls have full precision in a step in FP32, else that of the device's fast ones.
        """
        precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT
        before = self._state_before if self.comm.size("context") > 1 else None
        return {"state_before": before, "precision": precision, "implementation": self.comm.linear_attention}

    def _window(self, x: jax.Array, count: int) -> jax.Array | None:
        """The last `count` tokens of the device before this one."""
        if self.comm.size("context") == 1:
            return None
        index, ends = self.comm.index("context"), self.comm.gather(x[None, :, -count:], "context")
        return jnp.where(index == 0, 0, ends[jnp.maximum(index, 1) - 1])

    def _state_before(self, transition: jax.Array, final: jax.Array) -> jax.Array:
        """Every device's map applied to the state before it, as far as to this device."""
        everyone: Any = self.comm.gather((transition[None], final[None]), "context")
        index, state = self.comm.index("context"), jnp.zeros_like(final)
        for device, (own, end) in enumerate(zip(*everyone, strict=True)):
            if own.ndim == final.ndim:
                after = jnp.matmul(own, state, precision=jax.lax.Precision.HIGHEST) + end
            else:
                after = own[..., None] * state + end
            state = jnp.where(device < index, after, state)
        return state


def project_with_rates(
    config: ModelConfig, w: Weights, x: jax.Array, ctx: LayerContext, rates: str
) -> tuple[jax.Array, jax.Array]:
    """`[T / tensor, D]` → (the projections `[T, F]`, all heads' rates `[T, numbers]` by the weight of this name)."""

    def compute(x, norm, norm_bias, projections, small):
        h = normalise(config, x, norm, norm_bias)
        return ctx.comm.column_linear(h, projections), h @ small.reshape(len(small), -1)

    compute = jax.checkpoint(compute, prevent_cse=False) if "norms" in ctx.recompute else compute
    projected, numbers = compute(x, w.get("norm"), w.get("norm_bias"), w["projections"], w[rates])
    return checkpoint_name(projected, "projections"), checkpoint_name(ctx.comm.all_gather_tokens(numbers), "rates")


def initial_convolution(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Uniform as in PyTorch: the mean square of the output is a third of the input's."""
    return jax.random.uniform(key, shape, minval=-(shape[0] ** -0.5), maxval=shape[0] ** -0.5)


def initial_decay_rate(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The logarithm of a uniform A."""
    return jnp.log(jax.random.uniform(key, shape, minval=DECAYS[0], maxval=DECAYS[1]))


def initial_decay_bias(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse softplus of steps between the limits, uniform in their logarithms."""
    low, high = map(math.log, STEPS)
    step = jnp.exp(jax.random.uniform(key, shape, minval=low, maxval=high))
    return step + jnp.log(-jnp.expm1(-step))
