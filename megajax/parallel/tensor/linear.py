"""Linear layers on the mesh: the matmuls, their communication over `tensor`, and both gradients, in BF16 or FP8.

A column layer gathers its input's tokens and keeps its own columns of the output. A row layer sums its output over
`tensor` and keeps its own tokens (Shoeybi et al. 2019; sequence parallelism of Korthikanti et al. 2022). A layer of own
tokens does neither; its weight is replicated over `tensor`. If the matmul is wide enough to hide them, gather and sum
are cut into one piece per device of `tensor` (Wang et al. 2023, "Overlap Communication with Dependent Computation via
Decomposition"): the product of one device's tokens is computed while the next device's tokens arrive, and is sent while
the next product is computed.

In FP8 the quantised tensor is sent, and its transpose is saved for the backward pass. With a recipe in blocks tensors
are sent in the compute dtype, because each matmul quantises them along another dimension. They are saved in it too, or
with kernels of megajax's own in FP8, quantised along the tokens.

A weight with a low-rank adapter (`model.lora`) is three of these layers. Only their product of width R crosses devices:
a column layer multiplies its own tokens by A and gathers that product; a row layer sums it over `tensor` and multiplies
its own tokens by B.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from megajax.model.lora import Adapted
from megajax.model.sublayer import add_bias
from megajax.ops import block_matmul, blockwise_fp8, blockwise_fp8_kernels, fp8, mlp_kernel
from megajax.ops.barriers import not_before
from megajax.ops.block_matmul import BlockWeight, TokenPiece
from megajax.ops.blockwise_fp8_kernels import BothWays
from megajax.ops.expert_mlp import LinearWeight
from megajax.ops.fp8 import Fp8Weight, Operand
from megajax.ops.mlp_activation import ElementwiseImplementation, activate, activate_and_gradient
from megajax.parallel.tensor.ring import TensorRing

# A tensor of all tokens, in the order of TensorRing: arrays [T / tensor, F], in FP8 Operands, with blocks TokenPieces
# or BothWays
Pieces = Sequence[Any]


@dataclass(frozen=True)
class TensorParallel:
    """The collectives and kernels of the linear layers."""

    ring: TensorRing
    fp8: ModuleType  # its kernels
    elementwise: ElementwiseImplementation  # of the gradient of an MLP's activation
    max_over_devices: Callable[[jax.Array], jax.Array]  # of amaxes
    tied: bool  # whether `tie_gradients` has an effect
    frozen: bool = False  # whether the weights have no gradients, except adapters

    @property
    def of_adapters(self) -> "TensorParallel":
        return replace(self, frozen=False)

    def tie_gradients[Gradients](self, gradients: Gradients) -> Gradients:
        """Gradients of a linear layer's input and weights; if `tied`, none is available before all are.

        So the layer below hides the reduction of the weight gradients.
        """
        return not_before(gradients) if self.tied else gradients


def column_linear(tp: TensorParallel, x: jax.Array, w: LinearWeight | Adapted) -> jax.Array:
    """`[T / tensor, in]` → `[T, out]` with this device's share of `out`."""
    if not isinstance(w, Adapted):
        return _column(tp, x, w)
    own = tp.of_adapters
    return column_linear(tp, x, w.base) + column_linear(own, replicated_linear(own, _dropout(x, w), w.a), w.b)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _column(tp: TensorParallel, x: jax.Array, w: LinearWeight) -> jax.Array:
    return _column_forward(tp, x, w)[0]


def _column_forward(tp: TensorParallel, x: jax.Array, w: LinearWeight):
    xs, ys = _gathered_products(tp, x, w, "input", tp.ring.overlaps(_shape(w)[1]))
    return tp.ring.join(ys), (_kept(tp, xs), w)


def _column_backward(tp: TensorParallel, residuals, dy: jax.Array):
    xs, w = residuals
    dys = _operands(tp, tp.ring.split(dy, len(xs)), w, "gradient")
    dx = tp.ring.reduce_scatter_pieces(_products(tp, dys, w, "gradient", dy.dtype))
    return tp.tie_gradients((dx, _weight_gradient(tp, xs, dys, w, dy.dtype)))


_column.defvjp(_column_forward, _column_backward)


def row_linear(tp: TensorParallel, x: jax.Array, w: LinearWeight | Adapted) -> jax.Array:
    """`[T, in]` with this device's share of `in` → `[T / tensor, out]`."""
    if not isinstance(w, Adapted):
        return _row(tp, x, w)
    y, own = row_linear(tp, x, w.base), tp.of_adapters
    if w.token_ids is not None:
        first = lax.axis_index("tensor") * x.shape[1] if tp.ring.size > 1 else 0
        x = _dropout(x, replace(w, token_ids=tp.ring.all_gather_tokens(w.token_ids)), first)
    return y + replicated_linear(own, row_linear(own, x, w.a), w.b)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _row(tp: TensorParallel, x: jax.Array, w: LinearWeight) -> jax.Array:
    return _row_forward(tp, x, w)[0]


def _row_forward(tp: TensorParallel, x: jax.Array, w: LinearWeight):
    pieces = tp.ring.size if tp.ring.overlaps(_shape(w)[0]) else 1
    xs = _operands(tp, tp.ring.split(x, pieces), w, "input")
    return tp.ring.reduce_scatter_pieces(_products(tp, xs, w, "input", x.dtype)), (_kept(tp, xs), w)


def _row_backward(tp: TensorParallel, residuals, dy: jax.Array):
    xs, w = residuals
    dys, dxs = _gathered_products(tp, dy, w, "gradient", len(xs) > 1)
    return tp.tie_gradients((tp.ring.join(dxs), _weight_gradient(tp, xs, dys, w, dy.dtype)))


_row.defvjp(_row_forward, _row_backward)


def replicated_linear(tp: TensorParallel, x: jax.Array, w: LinearWeight | Adapted) -> jax.Array:
    """`[T / tensor, in]` → `[T / tensor, out]` for own tokens, with a replicated weight."""
    if not isinstance(w, Adapted):
        return _replicated(tp, x, w)
    y, own = replicated_linear(tp, x, w.base), tp.of_adapters
    return y + replicated_linear(own, replicated_linear(own, _dropout(x, w), w.a), w.b)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _replicated(tp: TensorParallel, x: jax.Array, w: LinearWeight) -> jax.Array:
    return _replicated_forward(tp, x, w)[0]


def _replicated_forward(tp: TensorParallel, x: jax.Array, w: LinearWeight):
    xs = _operands(tp, [x], w, "input")
    return _products(tp, xs, w, "input", x.dtype)[0], (_kept(tp, xs), w)


def _replicated_backward(tp: TensorParallel, residuals, dy: jax.Array):
    xs, w = residuals
    dys = _operands(tp, [dy], w, "gradient")
    dx = _products(tp, dys, w, "gradient", dy.dtype)[0]
    return tp.tie_gradients((dx, _weight_gradient(tp, xs, dys, w, dy.dtype)))


_replicated.defvjp(_replicated_forward, _replicated_backward)


def column_activation_row(
    tp: TensorParallel,
    activation: str,
    x: jax.Array,
    w_up: LinearWeight | Adapted,
    bias: jax.Array | None,
    w_down: LinearWeight | Adapted,
) -> jax.Array:
    """Column layer with an optional bias, activation and row layer: `[T / tensor, D]` → `[T / tensor, D]`.

    Without bias and adapters one function, for two reasons: pieces go from layer to layer without a join, and in FP8 a
    gated activation and its gradient are quantised by the kernel that computes them. In BF16 they would be written and
    read once more.
    """
    if bias is None and not isinstance(w_up, Adapted) and not isinstance(w_down, Adapted):
        return _activation_row(tp, activation, x, w_up, w_down)
    up = checkpoint_name(add_bias(column_linear(tp, x, w_up), bias), "gate_up")

    def down(up: jax.Array, w: LinearWeight | Adapted) -> jax.Array:
        return row_linear(tp, activate(activation, up), w)

    # The adapter needs the activation: recomputed, as without one, not kept.
    return (jax.checkpoint(down) if isinstance(w_down, Adapted) else down)(up, w_down)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _activation_row(
    tp: TensorParallel, activation: str, x: jax.Array, w_up: LinearWeight, w_down: LinearWeight
) -> jax.Array:
    return _activation_row_forward(tp, activation, x, w_up, w_down)[0]


def _activation_row_forward(
    tp: TensorParallel, activation: str, x: jax.Array, w_up: LinearWeight, w_down: LinearWeight
):
    xs, ups = _gathered_products(tp, x, w_up, "input", tp.ring.overlaps(_shape(w_down)[0]))
    ups = [checkpoint_name(up, "gate_up") for up in ups]
    acts = _activated(tp, activation, ups, w_down)
    y = tp.ring.reduce_scatter_pieces(_products(tp, acts, w_down, "input", x.dtype))
    # In BF16 the kernel of the activation's gradient recomputes the activation: a fifth less memory for 0.2 % of time.
    kept = _kept(tp, acts) if _has_kernels(w_down) else None
    return y, (_kept(tp, xs), ups, kept, w_up, w_down)


def _activation_row_backward(tp: TensorParallel, activation: str, residuals, dy: jax.Array):
    xs, ups, acts, w_up, w_down = residuals
    dys, dacts = _gathered_products(tp, dy, w_down, "gradient", len(xs) > 1)
    if acts is None:
        pairs = zip(ups, dacts, strict=True)
        both = [activate_and_gradient(activation, up, dact, tp.elementwise) for up, dact in pairs]
        acts, dups = _operands(tp, [act for act, _ in both], w_down, "input"), [dup for _, dup in both]
        dups = _operands(tp, dups, w_up, "gradient")
    else:
        dups = _activation_gradients(tp, activation, ups, dacts, w_up)
    dx = tp.ring.reduce_scatter_pieces(_products(tp, dups, w_up, "gradient", dy.dtype))
    d_up, d_down = _weight_gradient(tp, xs, dups, w_up, dy.dtype), _weight_gradient(tp, acts, dys, w_down, dy.dtype)
    return tp.tie_gradients((dx, d_up, d_down))


_activation_row.defvjp(_activation_row_forward, _activation_row_backward)


def _dropout(x: jax.Array, w: Adapted, first: jax.Array | int = 0) -> jax.Array:
    """`ops.dropout` for the columns of a wider array from `first` on: a number's mask depends on its token and column.

    So a layer whose input is divided over `tensor` has the same mask on every mesh.
    """
    if w.key is None or w.token_ids is None:
        return x
    columns, key = first + jnp.arange(x.shape[1], dtype=jnp.uint32), w.key

    def bits(token: jax.Array) -> jax.Array:
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, token), columns)
        return jax.random.key_data(keys)[:, 0]

    keep = jax.vmap(bits)(w.token_ids) >= jnp.uint32(w.dropout * 2**32)
    return jnp.where(keep, x * (1.0 / (1.0 - w.dropout)), 0).astype(x.dtype)


# Operands: the matmuls' inputs in pieces


def _operands(tp: TensorParallel, pieces: Sequence[jax.Array], w: LinearWeight, which: str) -> Pieces:
    """Pieces of a layer's "input" or output "gradient", quantised if its weight is quantised."""
    if isinstance(w, BlockWeight):
        makers = _in_blocks(tp, pieces, w, which, len(pieces), sum(map(len, pieces)))
        return [make(piece) for make, piece in zip(makers, pieces, strict=True)]
    if not isinstance(w, Fp8Weight):
        return pieces
    scale, dtype = _scale(tp, w, which, lambda: [fp8.amax(piece) for piece in pieces])
    return [Operand(q, t, 1 / scale, a) for q, t, a in (tp.fp8.cast_transpose(p, scale, dtype) for p in pieces)]


def _gathered_products(
    tp: TensorParallel, x: jax.Array, w: LinearWeight, which: str, overlap: bool
) -> tuple[Pieces, Pieces]:
    """`[T / tensor, F]` on each device → (the operands of all tokens, their products).

    With `overlap` the pieces are sent around the ring. Each product is tied to the arrival of the next piece, so that
    XLA's scheduler runs both at the same time.
    """
    if tp.ring.size == 1:
        xs = _operands(tp, [x], w, which)
        return xs, _products(tp, xs, w, which, x.dtype)
    scale, dtype = _scale(tp, w, which, lambda: [fp8.amax(x)]) if isinstance(w, Fp8Weight) else (None, None)
    size, count = tp.ring.size, tp.ring.size if overlap else 1
    in_blocks = _in_blocks(tp, [x], w, which, count, size * len(x)) if isinstance(w, BlockWeight) else None

    def operand(piece: jax.Array, step: int = 0) -> Any:
        if in_blocks is not None:
            return in_blocks[step](piece)
        return piece if scale is None else Operand(piece, piece.T, 1 / scale, fp8.amax(x))

    piece = x if scale is None else fp8.quantize(x, scale, dtype)
    if not overlap:
        xs = [operand(tp.ring.all_gather_tokens(piece))]
        return xs, _products(tp, xs, w, which, x.dtype)
    xs, ys = [], []
    for step in range(tp.ring.size):
        xs.append(operand(piece, step))
        [y] = _products(tp, xs[-1:], w, which, x.dtype)
        if step < tp.ring.size - 1:
            piece, y = not_before((tp.ring.receive(piece), y))
        ys.append(y)
    return xs, ys


def _activated(tp: TensorParallel, kind: str, ups: Sequence[jax.Array], w: LinearWeight) -> Pieces:
    """The activation of each piece, as input of the layer with weight `w`."""
    if not _has_kernels(w) or kind not in mlp_kernel.KINDS:
        return _operands(tp, [activate(kind, up) for up in ups], w, "input")
    if isinstance(w, BlockWeight):
        return [blockwise_fp8_kernels.gated(kind, up) for up in ups]
    assert isinstance(w, Fp8Weight)
    scale, dtype = _scale(tp, w, "input", lambda: [tp.fp8.gated_amax(kind, up) for up in ups])
    quantized = (tp.fp8.gated_cast_transpose(kind, up, scale, dtype) for up in ups)
    return [Operand(q, t, 1 / scale, amax) for q, t, amax in quantized]


def _activation_gradients(tp: TensorParallel, kind: str, ups, dacts: Sequence[jax.Array], w: LinearWeight) -> Pieces:
    """The gradient of the activation's input for each piece, as output gradient of the layer with weight `w`."""
    pairs, in_blocks = list(zip(ups, dacts, strict=True)), isinstance(w, BlockWeight)
    # Each half of a gated activation's input has blocks of its own in the kernel.
    if kind not in mlp_kernel.KINDS or (in_blocks and dacts[0].shape[1] % blockwise_fp8.BLOCK):
        return _operands(tp, [jax.vjp(partial(activate, kind), up)[1](dact)[0] for up, dact in pairs], w, "gradient")
    if in_blocks:
        return [blockwise_fp8_kernels.gated_backward(kind, *pair) for pair in pairs]
    assert isinstance(w, Fp8Weight)
    scale, dtype = _scale(tp, w, "gradient", lambda: [tp.fp8.gated_backward_amax(kind, *pair) for pair in pairs])
    quantized = (tp.fp8.gated_backward_cast_transpose(kind, *pair, scale, dtype) for pair in pairs)
    return [Operand(q, t, 1 / scale, amax) for q, t, amax in quantized]


def _in_blocks(
    tp: TensorParallel, here: Sequence[jax.Array], w: BlockWeight, which: str, count: int, tokens: int
) -> list[Callable[[jax.Array], TokenPiece | BothWays]]:
    """What makes `count` pieces, of so many `tokens`, of a tensor that this device has `here`, or the own part of."""
    if w.implementation == "pallas":
        return [blockwise_fp8_kernels.quantise] * count
    amax, ids = w.amax_of(here, tp.max_over_devices), [None] * count
    if which == "gradient" and w.noise is not None:
        own = w.noise.token_ids
        ids = tp.ring.split(own if len(own) == tokens else tp.ring.all_gather_tokens(own), count)
    return [partial(TokenPiece, amax=amax, token_ids=of_piece) for of_piece in ids]


def _scale(tp: TensorParallel, w: Fp8Weight, which: str, amaxes) -> tuple[jax.Array, Any]:
    """(scale, FP8 dtype) of a layer's input or output gradient; `amaxes()` is called with current scaling only."""
    return fp8.operand_scale(w, which, lambda: reduce(jnp.maximum, amaxes()), tp.max_over_devices)


def _kept(tp: TensorParallel, pieces: Pieces) -> Pieces:
    """A layer's input as the backward pass needs it for the weight's gradient: in FP8 only its transpose."""
    if tp.frozen:
        return [None for _ in pieces]
    return [piece.without_rows() if isinstance(piece, Operand | BothWays) else piece for piece in pieces]


def _has_kernels(w: LinearWeight) -> bool:
    """Whether kernels of megajax's own quantise the layer's tensors."""
    return isinstance(w, Fp8Weight) or (isinstance(w, BlockWeight) and w.implementation == "pallas")


# Matmuls


def _products(tp: TensorParallel, xs: Pieces, w: LinearWeight, which: str, dtype) -> list[jax.Array]:
    """For each piece `x @ w` of a layer's "input", or `dy @ w.T` of its output "gradient"."""
    if isinstance(w, BlockWeight):
        return [block_matmul.product(x, w, which, dtype) for x in xs]
    if not isinstance(w, Fp8Weight):
        return [jnp.einsum("ti,io->to" if which == "input" else "to,io->ti", x, w) for x in xs]
    other = w.transposed if which == "input" else w.values
    return [tp.fp8.matmul(x.values, other, x.inverse_scale * w.inverse_scale, dtype) for x in xs]


def _weight_gradient(tp: TensorParallel, xs: Pieces, dys: Pieces, w: LinearWeight, dtype) -> LinearWeight | None:
    """`x.T @ dy`, summed over the pieces; for FP8 in `Fp8Weight.gradient`, with the amaxes. None if frozen."""
    if tp.frozen:
        return None
    if isinstance(w, BlockWeight):
        return block_matmul.weight_gradient(xs, dys, w, dtype, tp.max_over_devices)
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


def _shape(w: LinearWeight) -> tuple[int, ...]:
    """The weight's shape, `[in, out]`."""
    return w.shape if isinstance(w, jax.Array) else w.values.shape
