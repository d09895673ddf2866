"""Linear layers on the mesh: the matmuls, their communication over `tensor`, and both gradients, in BF16 or FP8.

A column layer gathers its input's tokens and keeps its own columns of the output; a row layer sums its output over
`tensor` and keeps its own tokens (Shoeybi et al. 2019; sequence parallelism of Korthikanti et al. 2022); a layer of own
tokens does neither, with a weight that is whole on every device. Where the matmul is wide enough to hide them, gather
and sum are cut into one piece for each device of `tensor` (Wang et al. 2023, "Overlap Communication with Dependent
Computation via Decomposition"): the product of one device's tokens is computed while those of the next arrive, and
sent away while the next is computed.

In FP8 what travels is the quantised tensor, and what is saved for the backward pass is its transpose.
"""

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from megajax.ops import fp8
from megajax.ops.fp8 import Fp8Weight, Operand
from megajax.ops.mlp import GATED, activate, activate_and_gradient

Weight = jax.Array | Fp8Weight


# Tensors of all tokens are held in pieces. Without overlap there is one, in the order of the tokens. With overlap there
# is one for each device of `tensor`: the device's own tokens first, then those of the device before it, and so on;
# between a column and a row layer nothing puts them in order.
Pieces = Sequence[Any]  # arrays [T / tensor, F], in FP8 Operands


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def column_linear(comm: Any, x: jax.Array, w: Weight) -> jax.Array:
    """`[T / tensor, in]` → `[T, out]`, out this device's share."""
    return _column_forward(comm, x, w)[0]


def _column_forward(comm: Any, x: jax.Array, w: Weight):
    xs, ys = _gathered_products(comm, x, w, "input", comm.overlaps(_shape(w)[1]))
    return comm.join(ys), (_kept(xs), w)


def _column_backward(comm: Any, residuals, dy: jax.Array):
    xs, w = residuals
    dys = _operands(comm, comm.split(dy, len(xs)), w, "gradient")
    dx = _sum_over_tensor(comm, _products(comm, dys, w, "gradient", dy.dtype))
    return comm.tie_gradients((dx, _weight_gradient(comm, xs, dys, w, dy.dtype)))


column_linear.defvjp(_column_forward, _column_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def row_linear(comm: Any, x: jax.Array, w: Weight) -> jax.Array:
    """`[T, in]` → `[T / tensor, out]`, in this device's share."""
    return _row_forward(comm, x, w)[0]


def _row_forward(comm: Any, x: jax.Array, w: Weight):
    pieces = comm.tensor_size if comm.overlaps(_shape(w)[0]) else 1
    xs = _operands(comm, comm.split(x, pieces), w, "input")
    return _sum_over_tensor(comm, _products(comm, xs, w, "input", x.dtype)), (_kept(xs), w)


def _row_backward(comm: Any, residuals, dy: jax.Array):
    xs, w = residuals
    dys, dxs = _gathered_products(comm, dy, w, "gradient", len(xs) > 1)
    return comm.tie_gradients((comm.join(dxs), _weight_gradient(comm, xs, dys, w, dy.dtype)))


row_linear.defvjp(_row_forward, _row_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def own_linear(comm: Any, x: jax.Array, w: Weight) -> jax.Array:
    """`[T / tensor, in]` → `[T / tensor, out]`: the own tokens with all of a weight, which every device has."""
    return _own_forward(comm, x, w)[0]


def _own_forward(comm: Any, x: jax.Array, w: Weight):
    xs = _operands(comm, [x], w, "input")
    return _products(comm, xs, w, "input", x.dtype)[0], (_kept(xs), w)


def _own_backward(comm: Any, residuals, dy: jax.Array):
    xs, w = residuals
    dys = _operands(comm, [dy], w, "gradient")
    dx = _products(comm, dys, w, "gradient", dy.dtype)[0]
    return comm.tie_gradients((dx, _weight_gradient(comm, xs, dys, w, dy.dtype)))


own_linear.defvjp(_own_forward, _own_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def mlp(comm: Any, activation: str, x: jax.Array, w_up: Weight, w_down: Weight) -> jax.Array:
    """Column layer, activation and row layer: `[T / tensor, D]` → `[T / tensor, D]`.

    One function, so that tokens pass from layer to layer in pieces, and so that in FP8 a gated activation and its
    gradient are quantised where they are computed: as BF16 they would cross the memory twice more.
    """
    return _mlp_forward(comm, activation, x, w_up, w_down)[0]


def _mlp_forward(comm: Any, activation: str, x: jax.Array, w_up: Weight, w_down: Weight):
    xs, ups = _gathered_products(comm, x, w_up, "input", comm.overlaps(_shape(w_down)[0]))
    ups = [checkpoint_name(up, "gate_up") for up in ups]
    acts = _activated(comm, activation, ups, w_down)
    y = _sum_over_tensor(comm, _products(comm, acts, w_down, "input", x.dtype))
    # In BF16 the activation is computed again by the kernel of its gradient: a fifth less memory for 0.2 % of the time.
    kept = _kept(acts) if isinstance(w_down, Fp8Weight) else None
    return y, (_kept(xs), ups, kept, w_up, w_down)


def _mlp_backward(comm: Any, activation: str, residuals, dy: jax.Array):
    xs, ups, acts, w_up, w_down = residuals
    dys, dacts = _gathered_products(comm, dy, w_down, "gradient", len(xs) > 1)
    if acts is None:
        pairs = zip(ups, dacts, strict=True)
        both = [activate_and_gradient(activation, up, dact, comm.elementwise) for up, dact in pairs]
        acts, dups = [act for act, _ in both], [dup for _, dup in both]
    else:
        dups = _activation_gradients(comm, activation, ups, dacts, w_up)
    dx = _sum_over_tensor(comm, _products(comm, dups, w_up, "gradient", dy.dtype))
    d_up, d_down = _weight_gradient(comm, xs, dups, w_up, dy.dtype), _weight_gradient(comm, acts, dys, w_down, dy.dtype)
    return comm.tie_gradients((dx, d_up, d_down))


mlp.defvjp(_mlp_forward, _mlp_backward)


# Operands: pieces as the matmuls take them


def _operands(comm: Any, pieces: Sequence[jax.Array], w: Weight, which: str) -> Pieces:
    """Pieces of a layer's "input" or output "gradient", quantised if its weight is."""
    if not isinstance(w, Fp8Weight):
        return pieces
    scale, dtype = _scale(comm, w, which, lambda: [fp8.amax(piece) for piece in pieces])
    return [Operand(q, t, 1 / scale, a) for q, t, a in (comm.fp8.cast_transpose(p, scale, dtype) for p in pieces)]


def _gathered_products(comm: Any, x: jax.Array, w: Weight, which: str, overlap: bool) -> tuple[Pieces, list[jax.Array]]:
    """`[T / tensor, F]` on each device → (the operands of all tokens, their products).

    With overlap a ring hands the pieces on. Each product is tied to the arrival of the next piece: that is how XLA's
    scheduler comes to run the two side by side.
    """
    if comm.tensor_size == 1:
        xs = _operands(comm, [x], w, which)
        return xs, _products(comm, xs, w, which, x.dtype)
    scale, dtype = _scale(comm, w, which, lambda: [fp8.amax(x)]) if isinstance(w, Fp8Weight) else (None, None)

    def operand(piece: jax.Array) -> Any:
        return piece if scale is None else Operand(piece, piece.T, 1 / scale, fp8.amax(x))

    piece = x if scale is None else fp8.quantize(x, scale, dtype)
    if not overlap:
        xs = [operand(comm.enter(piece))]
        return xs, _products(comm, xs, w, which, x.dtype)
    xs, ys = [], []
    for step in range(comm.tensor_size):
        xs.append(operand(piece))
        [y] = _products(comm, xs[-1:], w, which, x.dtype)
        if step < comm.tensor_size - 1:
            piece, y = lax.optimization_barrier((comm.hand_on(piece), y))
        ys.append(y)
    return xs, ys


def _activated(comm: Any, kind: str, ups: Sequence[jax.Array], w: Weight) -> Pieces:
    """The activation of each piece, as the input of the layer with weight `w`."""
    if not isinstance(w, Fp8Weight) or kind not in GATED:
        return _operands(comm, [activate(kind, up) for up in ups], w, "input")
    scale, dtype = _scale(comm, w, "input", lambda: [comm.fp8.gated_amax(kind, up) for up in ups])
    quantized = (comm.fp8.gated_cast_transpose(kind, up, scale, dtype) for up in ups)
    return [Operand(q, t, 1 / scale, amax) for q, t, amax in quantized]


def _activation_gradients(comm: Any, kind: str, ups, dacts: Sequence[jax.Array], w: Fp8Weight) -> Pieces:
    """The gradient of each piece before the activation, as the output gradient of the layer with weight `w`."""
    pairs = list(zip(ups, dacts, strict=True))
    if kind not in GATED:
        return _operands(comm, [jax.vjp(partial(activate, kind), up)[1](dact)[0] for up, dact in pairs], w, "gradient")
    scale, dtype = _scale(comm, w, "gradient", lambda: [comm.fp8.gated_backward_amax(kind, *pair) for pair in pairs])
    quantized = (comm.fp8.gated_backward_cast_transpose(kind, *pair, scale, dtype) for pair in pairs)
    return [Operand(q, t, 1 / scale, amax) for q, t, amax in quantized]


def _scale(comm: Any, w: Fp8Weight, which: str, amaxes) -> tuple[jax.Array, Any]:
    """(scale, FP8 dtype) of a layer's input or output gradient; `amaxes()` are asked for with current scaling only."""
    return fp8.operand_scale(w, which, lambda: reduce(jnp.maximum, amaxes()), comm.max_over_devices)


def _kept(pieces: Pieces) -> Pieces:
    """What the backward pass needs of a layer's input."""
    return [piece._replace(values=None) if isinstance(piece, Operand) else piece for piece in pieces]


# Matmuls


def _products(comm: Any, xs: Pieces, w: Weight, which: str, dtype) -> list[jax.Array]:
    """Of each piece `x @ w` for a layer's "input", `dy @ w.T` for its output "gradient"."""
    if not isinstance(w, Fp8Weight):
        return [jnp.einsum("ti,io->to" if which == "input" else "to,io->ti", x, w) for x in xs]
    other = w.transposed if which == "input" else w.values
    return [comm.fp8.matmul(x.values, other, x.inverse_scale * w.inverse_scale, dtype) for x in xs]


def _weight_gradient(comm: Any, xs: Pieces, dys: Pieces, w: Weight, dtype) -> Weight:
    """`x.T @ dy`, summed over the pieces; for FP8 in the place that `Fp8Weight` has for it."""
    pairs = list(zip(xs, dys, strict=True))
    if not isinstance(w, Fp8Weight):
        return reduce(jnp.add, [jnp.einsum("td,tf->df", x, dy) for x, dy in pairs])
    inverse = xs[0].inverse_scale * dys[0].inverse_scale
    amax = [reduce(jnp.maximum, [piece.amax for piece in pieces]) for pieces in (xs, dys)]
    return Fp8Weight(
        *(None,) * 5,  # type: ignore[arg-type]
        gradient=reduce(jnp.add, [comm.fp8.matmul(x.transposed, dy.transposed, inverse, dtype) for x, dy in pairs]),
        amax=jnp.stack(amax),
        gradient_dtype=w.gradient_dtype,
    )


def _sum_over_tensor(comm: Any, pieces: list[jax.Array]) -> jax.Array:
    """Partial sums of all tokens, in pieces → the sums of the own tokens."""
    return comm.leave(pieces[0]) if len(pieces) == 1 else comm.scatter_pieces(pieces)


def _shape(w: Weight) -> tuple[int, ...]:
    """`[in, out]`."""
    return w.values.shape if isinstance(w, Fp8Weight) else w.shape
