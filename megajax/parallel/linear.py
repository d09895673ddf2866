"""Linear layers on the mesh: the matmul, its communication over `tensor`, and both gradients, in BF16 or FP8.

A column layer gathers its input's tokens and keeps its own columns of the output; a row layer sums its output over
`tensor` and keeps its own tokens (Shoeybi et al. 2019; sequence parallelism of Korthikanti et al. 2022). In FP8 what is
gathered is the quantised tensor, and what is saved for the backward pass is its transpose.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from megajax.ops import fp8
from megajax.ops.fp8 import Fp8Weight


class Quantized(NamedTuple):
    """A tensor of all tokens in FP8, as the matmuls take it."""

    values: jax.Array  # [T, F]
    transposed: jax.Array  # [F, T]
    inverse_scale: jax.Array
    amax: jax.Array  # on this device


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def linear(comm: Any, row: bool, x: jax.Array, w: jax.Array | Fp8Weight) -> jax.Array:
    """Column layer: `[T / tensor, in]` → `[T, out]`; row layer: `[T, in]` → `[T / tensor, out]`."""
    return _linear_forward(comm, row, x, w)[0]


def _linear_forward(comm: Any, row: bool, x: jax.Array, w: jax.Array | Fp8Weight):
    if isinstance(w, Fp8Weight):
        q = _quantize(comm, x, w.input_scale, fp8.E4M3, gather=not row)
        y, kept = _output(q, w, x.dtype), q._replace(values=None)
    else:
        kept = x if row else comm.enter(x)
        y = kept @ w
    return (comm.leave(y) if row else y), (kept, w)


def _linear_backward(comm: Any, row: bool, residuals, dy: jax.Array):
    kept, w = residuals
    if isinstance(w, Fp8Weight):
        dq = _quantize(comm, dy, w.gradient_scale, w.gradient_dtype, gather=row)
        dx, dw = _input_gradient(dq, w, dy.dtype), _weight_gradient(kept, dq, w, dy.dtype)
    else:
        dy = comm.enter(dy) if row else dy
        dx = jnp.einsum("tf,df->td", dy, w)
        dw = jnp.einsum("td,tf->df", kept, dy)
    return (dx if row else comm.leave(dx)), dw


linear.defvjp(_linear_forward, _linear_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gated_mlp(comm: Any, kind: str, x: jax.Array, w_up: Fp8Weight, w_down: Fp8Weight) -> jax.Array:
    """Column layer, gated activation and row layer in FP8: `[T / tensor, D]` → `[T / tensor, D]`.

    One function, so that the activation and its gradient are quantised where they are computed: in BF16 they would
    cross the memory twice more.
    """
    return _mlp_forward(comm, kind, x, w_up, w_down)[0]


def _mlp_forward(comm: Any, kind: str, x: jax.Array, w_up: Fp8Weight, w_down: Fp8Weight):
    q = _quantize(comm, x, w_up.input_scale, fp8.E4M3, gather=True)
    gate_up = checkpoint_name(_output(q, w_up, x.dtype), "gate_up")
    scale = w_down.input_scale
    if scale is None:
        scale = _current_scale(comm, comm.fp8.gated_amax(kind, gate_up), fp8.E4M3)
    values, transposed, amax = comm.fp8.gated_cast_transpose(kind, gate_up, scale, fp8.E4M3)
    act = Quantized(values, transposed, 1 / scale, amax)
    y = comm.leave(_output(act, w_down, x.dtype))
    return y, (q._replace(values=None), gate_up, act._replace(values=None), w_up, w_down)


def _mlp_backward(comm: Any, kind: str, residuals, dy: jax.Array):
    x, gate_up, act, w_up, w_down = residuals
    dq = _quantize(comm, dy, w_down.gradient_scale, w_down.gradient_dtype, gather=True)
    dact = _input_gradient(dq, w_down, dy.dtype)
    dtype, scale = w_up.gradient_dtype, w_up.gradient_scale
    if scale is None:
        scale = _current_scale(comm, comm.fp8.gated_backward_amax(kind, gate_up, dact), dtype)
    values, transposed, amax = comm.fp8.gated_backward_cast_transpose(kind, gate_up, dact, scale, dtype)
    dup = Quantized(values, transposed, 1 / scale, amax)
    dx = comm.leave(_input_gradient(dup, w_up, dy.dtype))
    return dx, _weight_gradient(x, dup, w_up, dy.dtype), _weight_gradient(act, dq, w_down, dy.dtype)


gated_mlp.defvjp(_mlp_forward, _mlp_backward)


def _output(x: Quantized, w: Fp8Weight, dtype) -> jax.Array:
    return fp8.matmul(x.values, w.transposed, x.inverse_scale * w.inverse_scale, dtype)


def _input_gradient(dy: Quantized, w: Fp8Weight, dtype) -> jax.Array:
    return fp8.matmul(dy.values, w.values, dy.inverse_scale * w.inverse_scale, dtype)


def _weight_gradient(x: Quantized, dy: Quantized, w: Fp8Weight, dtype) -> Fp8Weight:
    """What `jax.vjp` returns for the weight."""
    return Fp8Weight(
        *(None,) * 5,  # type: ignore[arg-type]
        gradient=fp8.matmul(x.transposed, dy.transposed, x.inverse_scale * dy.inverse_scale, dtype),
        amax=jnp.stack([x.amax, dy.amax]),
        gradient_dtype=w.gradient_dtype,
    )


def _current_scale(comm: Any, amax: jax.Array, dtype) -> jax.Array:
    return fp8.scale_for(comm.max_over_devices(amax), dtype)


def _quantize(comm: Any, x: jax.Array, scale: jax.Array | None, dtype, gather: bool) -> Quantized:
    """`x` in FP8, of all tokens if `gather`: then it travels in FP8."""
    if scale is None:
        scale = _current_scale(comm, fp8.amax(x), dtype)
    if gather and comm.tensor_size > 1:
        values = comm.enter(fp8.quantize(x, scale, dtype))
        return Quantized(values, values.T, 1 / scale, fp8.amax(x))
    values, transposed, amax = comm.fp8.cast_transpose(x, scale, dtype)
    return Quantized(values, transposed, 1 / scale, amax)
