"""Linear layers on the mesh: the matmul, its communication over `tensor`, and both gradients, in BF16 or FP8.

A column layer gathers its input's tokens and keeps its own columns of the output; a row layer sums its output over
`tensor` and keeps its own tokens (Shoeybi et al. 2019; sequence parallelism of Korthikanti et al. 2022). In FP8 what is
gathered is the quantised tensor, and what is saved for the backward pass is its transpose.
"""

from functools import partial

import jax
import jax.numpy as jnp

from megajax.model.comm import SingleDevice
from megajax.ops import fp8
from megajax.ops.fp8 import Fp8Weight


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def linear(comm: SingleDevice, row: bool, x: jax.Array, w: jax.Array | Fp8Weight) -> jax.Array:
    """Column layer: `[T / tensor, in]` → `[T, out]`; row layer: `[T, in]` → `[T / tensor, out]`."""
    return _forward(comm, row, x, w)[0]


def _forward(comm: SingleDevice, row: bool, x: jax.Array, w: jax.Array | Fp8Weight):
    if isinstance(w, Fp8Weight):
        q, q_t, inverse, amax = _quantize(comm, x, w.input_scale, fp8.E4M3, gather=not row)
        y = fp8.matmul(q, w.transposed, inverse * w.inverse_scale, x.dtype)
        kept = q_t, inverse, amax
    else:
        kept = x if row else comm.enter(x)
        y = kept @ w
    return (comm.leave(y) if row else y), (kept, w)


def _backward(comm: SingleDevice, row: bool, residuals, dy: jax.Array):
    kept, w = residuals
    if isinstance(w, Fp8Weight):
        x_t, x_inverse, x_amax = kept
        q, q_t, inverse, amax = _quantize(comm, dy, w.gradient_scale, w.gradient_dtype, gather=row)
        dx = fp8.matmul(q, w.values, inverse * w.inverse_scale, dy.dtype)
        dw = Fp8Weight(
            *(None,) * 5,  # type: ignore[arg-type]
            gradient=fp8.matmul(x_t, q_t, inverse * x_inverse, dy.dtype),
            amax=jnp.stack([x_amax, amax]),
            gradient_dtype=w.gradient_dtype,
        )
    else:
        dy = comm.enter(dy) if row else dy
        dx = jnp.einsum("tf,df->td", dy, w)
        dw = jnp.einsum("td,tf->df", kept, dy)
    return (dx if row else comm.leave(dx)), dw


linear.defvjp(_forward, _backward)


def _quantize(comm: SingleDevice, x: jax.Array, scale: jax.Array | None, dtype, gather: bool):
    """(`x` in FP8, its transpose, its inverse scale, its amax on this device), of all tokens if `gather`."""
    amax = fp8.largest(x)
    if scale is None:
        scale = fp8.scale_for(comm.max_over_devices(amax), dtype)
    if gather and comm.tensor_size > 1:
        q = comm.enter(fp8.quantize(x, scale, dtype))
        q_t = q.T
    else:
        q, q_t, _ = fp8.cast_transpose(x, scale, dtype)
    return q, q_t, 1 / scale, amax
