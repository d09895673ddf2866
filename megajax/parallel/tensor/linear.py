"""Linear layers on the mesh: the matmuls, their communication over `tensor`, and both gradients, in BF16 or FP8.

A column layer gathers its input's tokens and keeps its own columns of the output; a row layer sums its output over
`tensor` and keeps its own tokens (Shoeybi et al. 2019; sequence parallelism of Korthikanti et al. 2022); a layer of own
tokens does neither, with a weight that is whole on every device. Where the matmul is wide enough to hide them, gather
and sum are cut into one piece for each device of `tensor` (Wang et al. 2023, "Overlap Communication with Dependent
Computation via Decomposition"): the product of one device's tokens is computed while those of the next arrive, and
sent away while the next is computed.

In FP8 what travels is the quantised tensor, and what is saved for the backward pass is its transpose.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from megajax.ops import fp8
from megajax.ops.fp8 import Fp8Weight, Operand
from megajax.ops.mlp import GATED, ElementwiseImplementation, activate, activate_and_gradient
from megajax.parallel.tensor.ring import TensorRing

Weight = jax.Array | Fp8Weight
Pieces = Sequence[Any]  # of a tensor of all tokens, as a TensorRing has them: arrays [T / tensor, F], in FP8 Operands


@dataclass(frozen=True)
class TensorParallel:
    """The collectives and kernels of the linear layers."""

    ring: TensorRing
    fp8: ModuleType  # its kernels
    elementwise: ElementwiseImplementation  # of the gradient of an MLP's activation
    max_over_devices: Callable[[jax.Array], jax.Array]  # of amaxes
    tied: bool  # `tie_gradients` ties them

    def tie_gradients[Gradients](self, gradients: Gradients) -> Gradients:
        """Of a linear layer's input and weights, none before all if `tied`: the layer below hides the reduction."""
        return lax.optimization_barrier(gradients) if self.tied else gradients


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def column_linear(tp: TensorParallel, x: jax.Array, w: Weight) -> jax.Array:
    """`[T / tensor, in]` → `[T, out]`, out this device's share."""
    return _column_forward(tp, x, w)[0]


def _column_forward(tp: TensorParallel, x: jax.Array, w: Weight):
    xs, ys = _gathered_products(tp, x, w, "input", tp.ring.overlaps(_shape(w)[1]))
    return tp.ring.join(ys), (_kept(xs), w)


def _column_backward(tp: TensorParallel, residuals, dy: jax.Array):
    xs, w = residuals
    dys = _operands(tp, tp.ring.split(dy, len(xs)), w, "gradient")
    dx = tp.ring.leave_pieces(_products(tp, dys, w, "gradient", dy.dtype))
    return tp.tie_gradients((dx, _weight_gradient(tp, xs, dys, w, dy.dtype)))


column_linear.defvjp(_column_forward, _column_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def row_linear(tp: TensorParallel, x: jax.Array, w: Weight) -> jax.Array:
    """`[T, in]` → `[T / tensor, out]`, in this device's share."""
    return _row_forward(tp, x, w)[0]


def _row_forward(tp: TensorParallel, x: jax.Array, w: Weight):
    pieces = tp.ring.size if tp.ring.overlaps(_shape(w)[0]) else 1
    xs = _operands(tp, tp.ring.split(x, pieces), w, "input")
    return tp.ring.leave_pieces(_products(tp, xs, w, "input", x.dtype)), (_kept(xs), w)


def _row_backward(tp: TensorParallel, residuals, dy: jax.Array):
    xs, w = residuals
    dys, dxs = _gathered_products(tp, dy, w, "gradient", len(xs) > 1)
    return tp.tie_gradients((tp.ring.join(dxs), _weight_gradient(tp, xs, dys, w, dy.dtype)))


row_linear.defvjp(_row_forward, _row_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def own_linear(tp: TensorParallel, x: jax.Array, w: Weight) -> jax.Array:
    """`[T / tensor, in]` → `[T / tensor, out]`: the own tokens with all of a weight, which every device has."""
    return _own_forward(tp, x, w)[0]


def _own_forward(tp: TensorParallel, x: jax.Array, w: Weight):
    xs = _operands(tp, [x], w, "input")
    return _products(tp, xs, w, "input", x.dtype)[0], (_kept(xs), w)


def _own_backward(tp: TensorParallel, residuals, dy: jax.Array):
    xs, w = residuals
    dys = _operands(tp, [dy], w, "gradient")
    dx = _products(tp, dys, w, "gradient", dy.dtype)[0]
    return tp.tie_gradients((dx, _weight_gradient(tp, xs, dys, w, dy.dtype)))


own_linear.defvjp(_own_forward, _own_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def mlp(tp: TensorParallel, activation: str, x: jax.Array, w_up: Weight, w_down: Weight) -> jax.Array:
    """Column layer, activation and row layer: `[T / tensor, D]` → `[T / tensor, D]`.

    One function, so that tokens pass from layer to layer in pieces, and so that in FP8 a gated activation and its
    gradient are quantised where they are computed: as BF16 they would cross the memory twice more.
    """
    return _mlp_forward(tp, activation, x, w_up, w_down)[0]


def _mlp_forward(tp: TensorParallel, activation: str, x: jax.Array, w_up: Weight, w_down: Weight):
    xs, ups = _gathered_products(tp, x, w_up, "input", tp.ring.overlaps(_shape(w_down)[0]))
    ups = [checkpoint_name(up, "gate_up") for up in ups]
    acts = _activated(tp, activation, ups, w_down)
    y = tp.ring.leave_pieces(_products(tp, acts, w_down, "input", x.dtype))
    # In BF16 the activation is computed again by the kernel of its gradient: a fifth less memory for 0.2 % of the time.
    kept = _kept(acts) if isinstance(w_down, Fp8Weight) else None
    return y, (_kept(xs), ups, kept, w_up, w_down)


def _mlp_backward(tp: TensorParallel, activation: str, residuals, dy: jax.Array):
    xs, ups, acts, w_up, w_down = residuals
    dys, dacts = _gathered_products(tp, dy, w_down, "gradient", len(xs) > 1)
    if acts is None:
        pairs = zip(ups, dacts, strict=True)
        both = [activate_and_gradient(activation, up, dact, tp.elementwise) for up, dact in pairs]
        acts, dups = [act for act, _ in both], [dup for _, dup in both]
    else:
        dups = _activation_gradients(tp, activation, ups, dacts, w_up)
    dx = tp.ring.leave_pieces(_products(tp, dups, w_up, "gradient", dy.dtype))
    d_up, d_down = _weight_gradient(tp, xs, dups, w_up, dy.dtype), _weight_gradient(tp, acts, dys, w_down, dy.dtype)
    return tp.tie_gradients((dx, d_up, d_down))


mlp.defvjp(_mlp_forward, _mlp_backward)


# Operands: pieces as the matmuls take them


def _operands(tp: TensorParallel, pieces: Sequence[jax.Array], w: Weight, which: str) -> Pieces:
    """Pieces of a layer's "input" or output "gradient", quantised if its weight is."""
    if not isinstance(w, Fp8Weight):
        return pieces
    scale, dtype = _scale(tp, w, which, lambda: [fp8.amax(piece) for piece in pieces])
    return [Operand(q, t, 1 / scale, a) for q, t, a in (tp.fp8.cast_transpose(p, scale, dtype) for p in pieces)]


def _gathered_products(tp: TensorParallel, x: jax.Array, w: Weight, which: str, overlap: bool) -> tuple[Pieces, Pieces]:
    """`[T / tensor, F]` on each device → (the operands of all tokens, their products).

    With overlap a ring hands the pieces on. Each product is tied to the arrival of the next piece: that is how XLA's
    scheduler comes to run the two side by side.
    """
    if tp.ring.size == 1:
        xs = _operands(tp, [x], w, which)
        return xs, _products(tp, xs, w, which, x.dtype)
    scale, dtype = _scale(tp, w, which, lambda: [fp8.amax(x)]) if isinstance(w, Fp8Weight) else (None, None)

    def operand(piece: jax.Array) -> Any:
        return piece if scale is None else Operand(piece, piece.T, 1 / scale, fp8.amax(x))

    piece = x if scale is None else fp8.quantize(x, scale, dtype)
    if not overlap:
        xs = [operand(tp.ring.enter(piece))]
        return xs, _products(tp, xs, w, which, x.dtype)
    xs, ys = [], []
    for step in range(tp.ring.size):
        xs.append(operand(piece))
        [y] = _products(tp, xs[-1:], w, which, x.dtype)
        if step < tp.ring.size - 1:
            piece, y = lax.optimization_barrier((tp.ring.hand_on(piece), y))
        ys.append(y)
    return xs, ys


def _activated(tp: TensorParallel, kind: str, ups: Sequence[jax.Array], w: Weight) -> Pieces:
    """The activation of each piece, as the input of the layer with weight `w`."""
    if not isinstance(w, Fp8Weight) or kind not in GATED:
        return _operands(tp, [activate(kind, up) for up in ups], w, "input")
    scale, dtype = _scale(tp, w, "input", lambda: [tp.fp8.gated_amax(kind, up) for up in ups])
    quantized = (tp.fp8.gated_cast_transpose(kind, up, scale, dtype) for up in ups)
    return [Operand(q, t, 1 / scale, amax) for q, t, amax in quantized]


def _activation_gradients(tp: TensorParallel, kind: str, ups, dacts: Sequence[jax.Array], w: Fp8Weight) -> Pieces:
    """The gradient of each piece before the activation, as the output gradient of the layer with weight `w`."""
    pairs = list(zip(ups, dacts, strict=True))
    if kind not in GATED:
        return _operands(tp, [jax.vjp(partial(activate, kind), up)[1](dact)[0] for up, dact in pairs], w, "gradient")
    scale, dtype = _scale(tp, w, "gradient", lambda: [tp.fp8.gated_backward_amax(kind, *pair) for pair in pairs])
    quantized = (tp.fp8.gated_backward_cast_transpose(kind, *pair, scale, dtype) for pair in pairs)
    return [Operand(q, t, 1 / scale, amax) for q, t, amax in quantized]


def _scale(tp: TensorParallel, w: Fp8Weight, which: str, amaxes) -> tuple[jax.Array, Any]:
    """(scale, FP8 dtype) of a layer's input or output gradient; `amaxes()` are asked for with current scaling only."""
    return fp8.operand_scale(w, which, lambda: reduce(jnp.maximum, amaxes()), tp.max_over_devices)


def _kept(pieces: Pieces) -> Pieces:
    """What the backward pass needs of a layer's input."""
    return [piece._replace(values=None) if isinstance(piece, Operand) else piece for piece in pieces]


# Matmuls


def _products(tp: TensorParallel, xs: Pieces, w: Weight, which: str, dtype) -> list[jax.Array]:
    """Of each piece `x @ w` for a layer's "input", `dy @ w.T` for its output "gradient"."""
    if not isinstance(w, Fp8Weight):
        return [jnp.einsum("ti,io->to" if which == "input" else "to,io->ti", x, w) for x in xs]
    other = w.transposed if which == "input" else w.values
    return [tp.fp8.matmul(x.values, other, x.inverse_scale * w.inverse_scale, dtype) for x in xs]


def _weight_gradient(tp: TensorParallel, xs: Pieces, dys: Pieces, w: Weight, dtype) -> Weight:
    """`x.T @ dy`, summed over the pieces; for FP8 in the place that `Fp8Weight` has for it."""
    pairs = list(zip(xs, dys, strict=True))
    if not isinstance(w, Fp8Weight):
        return reduce(jnp.add, [jnp.einsum("td,tf->df", x, dy) for x, dy in pairs])
    inverse = xs[0].inverse_scale * dys[0].inverse_scale
    amax = [reduce(jnp.maximum, [piece.amax for piece in pieces]) for pieces in (xs, dys)]
    return Fp8Weight(
        *(None,) * 5,  # type: ignore[arg-type]
        gradient=reduce(jnp.add, [tp.fp8.matmul(x.transposed, dy.transposed, inverse, dtype) for x, dy in pairs]),
        amax=jnp.stack(amax),
        gradient_dtype=w.gradient_dtype,
    )


def _shape(w: Weight) -> tuple[int, ...]:
    """`[in, out]`."""
    return w.values.shape if isinstance(w, Fp8Weight) else w.shape
