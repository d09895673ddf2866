"""The MLP of experts: grouped matmuls, and between them the activation times each row's routing weight, in BF16 or FP8.

In FP8 each tensor is quantised together with its transpose where it is computed, with one scale for all experts or, in
`blockwise`, with scales of blocks. The backward pass keeps the transposes, and the activation's input in BF16. Tokens
and gradients that have one scale are quantised before they are sent to their experts: half as many bytes, and the same
numbers.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from megajax.ops import (
    blockwise_kernel,
    fp8,
    grouped_blockwise_kernels,
    grouped_fp8_kernels,
    grouped_fp8_reference,
    mlp_kernel,
)
from megajax.ops.barriers import not_before
from megajax.ops.block_matmul import BlockWeight, MaxOverDevices
from megajax.ops.blockwise_fp8_kernels import BothWays
from megajax.ops.expert_block_matmul import grouped_product, grouped_weight_gradient
from megajax.ops.fp8 import Fp8Weight, Operand
from megajax.ops.grouped_matmul import (
    GroupedImplementation,
    fp8_rows_times_weights,
    fp8_weight_gradient,
    rows_times_weights,
    weight_gradient,
)
from megajax.ops.grouped_rows import bias_of_rows
from megajax.ops.mlp_activation import (
    ElementwiseImplementation,
    activate_weighted,
    activate_weighted_and_gradient,
)
from megajax.ops.numerics import added, wide

LinearWeight = jax.Array | Fp8Weight | BlockWeight  # as a layer uses it


class Biases(NamedTuple):
    """The biases of the experts' matrices."""

    up: jax.Array  # [E, 2F], without a gate [E, F]
    down: jax.Array  # [E, D]


class ExpertMatrices(NamedTuple):
    """The matrices of E experts, both of one form; in FP8 `values [E, in, out]`, `transposed [E, out, in]`."""

    up: LinearWeight  # [E, D, 2F], without a gate [E, D, F]
    down: LinearWeight  # [E, F, D]
    biases: Biases | None = None  # added to the matrices' outputs, that of `down` times the routing weight

    @property
    def num_experts(self) -> int:
        return (self.up if isinstance(self.up, jax.Array) else self.up.values).shape[0]

    @property
    def token_ids(self) -> jax.Array | None:
        """The ids `[T]` of the tokens, which the gradients' random rounding needs; None: there is none."""
        return self.up.noise.token_ids if isinstance(self.up, BlockWeight) and self.up.noise is not None else None

    def with_ids(self, ids: jax.Array) -> "ExpertMatrices":
        """With other ids: of the tokens of all devices, or of rows."""
        up, down = (w.with_rows(ids) if isinstance(w, BlockWeight) else w for w in (self.up, self.down))
        return ExpertMatrices(up, down, self.biases)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Route:
    """The way of tokens to the rows of their experts and back; in this class the tokens are these rows already.

    `numbers` are arrays with one number for each assignment of a token to an expert.
    """

    group_sizes: jax.Array  # [E] int32: the rows of each expert; those of all are before the others

    def send(self, x: jax.Array, *numbers: jax.Array) -> tuple[jax.Array, ...]:
        """Tokens `[T, D]` of any dtype → rows `[R, D]`, and the numbers of each row `[R]`."""
        return x, *numbers

    def back(self, rows: jax.Array, *numbers: jax.Array) -> tuple[jax.Array, ...]:
        """The transpose of `send`: the sum of each token's rows, and the numbers of each assignment."""
        return rows, *numbers

    def rows(self, tokens: int) -> int:
        """R for this number of tokens."""
        return tokens

    def has_expert(self, tokens: int) -> jax.Array:
        """Whether each token is sent to an expert, `[T]`; the others may be non-finite."""
        return jnp.arange(tokens) < self.group_sizes.sum()

    @property
    def rounds(self) -> jax.Array | None:
        """The number of rounds in which the rows of all tokens are computed; this is the first. None: there is one."""
        return None

    def round(self, index: jax.Array) -> "Route":
        """The way of the rows of a later round."""
        raise NotImplementedError


class ExpertKernels(NamedTuple):
    """The implementations of the experts' matmuls and activations."""

    grouped_matmul: GroupedImplementation = "reference"
    elementwise: ElementwiseImplementation = "reference"

    @property
    def multiply_unused_rows(self) -> bool:
        """Whether rows without a token cost as much time as the others."""
        return self.grouped_matmul == "xla"


@dataclass(frozen=True)
class ExpertMlp:
    """The computation of an expert, besides its matrices."""

    activation: str
    kernels: ExpertKernels = ExpertKernels()
    max_over_devices: MaxOverDevices = lambda amax: amax  # in FP8 with current scaling: amaxes over all devices
    defers: bool = False  # whether the gradients of matrices may be computed later than the others


def expert_mlp(mlp: ExpertMlp, route: Route, x: jax.Array, weights: jax.Array, matrices: ExpertMatrices) -> jax.Array:
    """Tokens `[T, D]` → `[T, D]`: the sum of weight · MLP of the expert over a token's assignments.

    The weight of each assignment multiplies the activation, so the backward pass does not need the output. Rows after
    the last group are zeros, and so are their gradients and those of their weights. In FP8 the gradient and the amaxes
    are returned in their fields of `Fp8Weight`.
    """
    return _mlp(_quantised_steps(mlp, matrices.up), mlp, route, x, weights, matrices)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _mlp(steps: "type[_Steps] | None", mlp, route, x, weights, matrices):
    return _mlp_forward(steps, mlp, route, x, weights, matrices)[0]


def _mlp_forward(steps, mlp: ExpertMlp, route: Route, x, weights, matrices):
    """The first round's residuals are kept; the backward pass computes those of the others again."""
    forward, _ = _passes(steps)
    y, saved = forward(mlp, route, x, weights, matrices)
    if (rounds := route.rounds) is None:
        return y, (saved, None)
    if steps is not None or isinstance(matrices.up, BlockWeight):  # devices may agree on scales in every round
        rounds = checkpoint_name(mlp.max_over_devices(rounds), "routing")

    def add_round(r: jax.Array, y: jax.Array) -> jax.Array:
        return added(y, forward(mlp, route.round(r), x, weights, matrices)[0])

    return lax.fori_loop(1, rounds, add_round, y), (saved, (rounds, route, x, weights, matrices))


def _mlp_backward(steps, mlp: ExpertMlp, residuals, dy):
    (forward, backward), (saved, later) = _passes(steps), residuals
    *of_tokens, of_matrices = backward(mlp, saved, dy)
    if later is None:
        return None, *of_tokens, of_matrices
    rounds, route, *arguments = later

    def add_rounds(total: Any, dy: jax.Array, part: slice) -> Any:
        """`total`, the part of (dx, dweights, gradients of matrices), with that of the later rounds."""

        def add_round(r: jax.Array, total: Any) -> Any:
            gradients = backward(mlp, forward(mlp, route.round(r), *arguments)[1], dy)
            return _sum_of_gradients(total, gradients[part])

        return lax.fori_loop(1, rounds, add_round, total)

    if not mlp.defers:
        return None, *add_rounds((*of_tokens, of_matrices), dy, slice(3))
    of_tokens = add_rounds((*of_tokens,), dy, slice(2))
    of_tokens, dy_after = not_before((of_tokens, dy))  # devices might exchange rows of both loops in other orders
    return None, *of_tokens, *add_rounds((of_matrices,), dy_after, slice(2, 3))


_mlp.defvjp(_mlp_forward, _mlp_backward)


def _passes(steps: "type[_Steps] | None") -> tuple[Callable, Callable]:
    """Forward and backward pass of one round."""
    if steps is None:
        return _bf16_forward, _bf16_backward
    return partial(_fp8_forward, steps), partial(_fp8_backward, steps)


def _sum_of_gradients[Gradients](total: Gradients, new: Gradients) -> Gradients:
    """Gradients of two rounds added; the amaxes in an `Fp8Weight` are the larger ones."""

    def one(total: Any, new: Any) -> Any:
        if not isinstance(total, Fp8Weight):
            return jax.tree.map(added, total, new)
        assert total.amax is not None and total.gradient is not None
        return replace(total, gradient=added(total.gradient, new.gradient), amax=jnp.maximum(total.amax, new.amax))

    return jax.tree.map(one, total, new, is_leaf=lambda a: isinstance(a, Fp8Weight))


def _quantised_steps(mlp: ExpertMlp, w: LinearWeight) -> "type[_Steps] | None":
    """The steps of an MLP whose tensors are quantised together with their transposes; None in BF16 and emulated."""
    if isinstance(w, Fp8Weight):
        return _Fp8
    in_kernels = isinstance(w, BlockWeight) and w.implementation == mlp.kernels.grouped_matmul == "pallas"
    return _Blockwise if in_kernels else None


def _bf16_forward(mlp, route: Route, x, weights, matrices):
    ids, group_sizes = matrices.token_ids, route.group_sizes
    rows, weights, *ids = route.send(x, weights, *([] if ids is None else [ids]))
    rows, weights = checkpoint_name(rows, "dispatched"), checkpoint_name(weights, "routing")
    if ids:
        matrices = matrices.with_ids(checkpoint_name(ids[0], "routing"))
    multiply = partial(_product, mlp, group_sizes, "input")
    up, bias = checkpoint_name(multiply(rows, matrices.up), "gate_up"), matrices.biases and matrices.biases.up
    act = activate_weighted(mlp.activation, up, weights, group_sizes, mlp.kernels.elementwise, bias)
    y = _plus_down(multiply(act, matrices.down), matrices.biases, weights, group_sizes)
    return route.back(y)[0], (route, rows, weights, up, matrices)


def _bf16_backward(mlp, residuals, dy):
    """It recomputes the activation."""
    route, rows, weights, up, (w_up, w_down, biases) = residuals
    group_sizes = route.group_sizes
    multiply, gradient = partial(_product, mlp, group_sizes, "gradient"), partial(_weight_gradient, mlp, group_sizes)
    (dy,) = route.send(dy)
    dact = multiply(dy, w_down)
    act, dup, dweights = activate_weighted_and_gradient(
        mlp.activation, up, weights, dact, group_sizes, mlp.kernels.elementwise, biases and biases.up
    )
    dw_down = gradient(act, dy, w_down)
    drows = multiply(dup, w_up)
    dw_up = gradient(rows, dup, w_up)
    dweights, dbiases = _bias_gradients(mlp, biases, weights, dweights, dup, dy, group_sizes)
    return *route.back(drows, dweights), ExpertMatrices(dw_up, dw_down, dbiases)


def _product(mlp: ExpertMlp, group_sizes: jax.Array, which: str, x: jax.Array, w: jax.Array | BlockWeight) -> jax.Array:
    """`x @ w` of each expert for an "input", `dy @ w.T` for a "gradient"."""
    implementation = mlp.kernels.grouped_matmul
    if isinstance(w, BlockWeight):
        return grouped_product(x, w, group_sizes, which, mlp.max_over_devices, implementation)
    return rows_times_weights(x, w, group_sizes, transpose_w=which == "gradient", implementation=implementation)


def _weight_gradient(mlp: ExpertMlp, group_sizes: jax.Array, x: jax.Array, dy: jax.Array, w: jax.Array | BlockWeight):
    """`x.T @ dy` of each expert."""
    implementation = mlp.kernels.grouped_matmul
    if isinstance(w, BlockWeight):
        return grouped_weight_gradient(x, dy, w, group_sizes, mlp.max_over_devices, implementation)
    return weight_gradient(x, dy, group_sizes, w.dtype, implementation=implementation)


def _fp8_forward(steps: "type[_Steps]", mlp, route: Route, x, weights, matrices):
    run, (w_up, w_down, biases) = steps(mlp, route, route.rows(len(x)), x.dtype), matrices
    group_sizes = route.group_sizes
    rows, weights = run.sent(x, w_up, "input", weights)
    weights = checkpoint_name(weights, "routing")
    up = checkpoint_name(_plus_up(run.product(rows, w_up, "input"), biases, group_sizes), "gate_up")
    act = run.activated(up, weights, w_down)
    transposed = (operand.without_rows() for operand in (rows, act))
    y = _plus_down(run.product(act, w_down, "input"), biases, weights, group_sizes)
    return route.back(y)[0], (*transposed, up, route, weights, matrices)


def _fp8_backward(steps: "type[_Steps]", mlp, residuals, dy):
    rows, act, up, route, weights, (w_up, w_down, biases) = residuals
    run, group_sizes = steps(mlp, route, route.rows(len(dy)), dy.dtype), route.group_sizes
    if biases is None:
        (dys,) = run.sent(dy, w_down, "gradient")
    else:  # their gradients are those of numbers that are not quantised
        (dy,) = route.send(dy)
        dys = run.quantised(dy, w_down, "gradient")
    dact = run.product(dys, w_down, "gradient")
    if biases is None and mlp.activation in mlp_kernel.KINDS:
        dup, dweights = run.gated_gradient(up, weights, dact, w_up)
        dbiases = None
    else:
        how = group_sizes, mlp.kernels.elementwise
        _, dup, dweights = activate_weighted_and_gradient(mlp.activation, up, weights, dact, *how)
        dweights, dbiases = _bias_gradients(mlp, biases, weights, dweights, dup, dy, group_sizes)
        dup = run.quantised(dup, w_up, "gradient")
    drows = run.product(dup, w_up, "gradient")
    gradients = run.weight_gradient(rows, dup, w_up), run.weight_gradient(act, dys, w_down)
    return *route.back(drows, dweights), ExpertMatrices(*gradients, dbiases)


@dataclass(frozen=True)
class _Steps(ABC):
    """The steps of the MLP in FP8; `which` is a matrix's "input" or its output's "gradient"."""

    mlp: ExpertMlp
    route: Route
    rows: int
    dtype: Any  # of results

    @property
    def group_sizes(self) -> jax.Array:
        return self.route.group_sizes

    def sent(self, x: jax.Array, w: Any, which: str, *numbers: jax.Array) -> tuple[Any, *tuple[jax.Array, ...]]:
        """The quantised rows of tokens, and the numbers of each row."""
        rows, *numbers_of_rows = self.route.send(x, *numbers)
        return self.quantised(checkpoint_name(rows, "dispatched"), w, which), *numbers_of_rows

    @abstractmethod
    def quantised(self, rows: jax.Array, w: Any, which: str) -> Any: ...

    @abstractmethod
    def activated(self, up: jax.Array, weights: jax.Array, w: Any) -> Any:
        """The activation times the weights of rows."""

    @abstractmethod
    def gated_gradient(self, up: jax.Array, weights: jax.Array, dact: jax.Array, w: Any) -> tuple[Any, jax.Array]:
        """The gradients of a gated activation's input `up` and of the weights."""

    @abstractmethod
    def product(self, x: Any, w: Any, which: str) -> jax.Array:
        """`x @ w` of each expert for an "input", `dy @ w.T` for a "gradient"."""

    @abstractmethod
    def weight_gradient(self, x: Any, dy: Any, w: Any) -> Any:
        """`x.T @ dy` of each expert."""

    def weighted(self, up: jax.Array, weights: jax.Array) -> jax.Array:
        """The weighted activation, not quantised."""
        how = self.group_sizes, self.mlp.kernels.elementwise
        return activate_weighted(self.mlp.activation, up, weights, *how)


@dataclass(frozen=True)
class _Fp8(_Steps):
    """With one scale for a tensor of all experts."""

    @property
    def quantisers(self) -> Any:
        return grouped_fp8_kernels if self.mlp.kernels.elementwise == "pallas" else grouped_fp8_reference

    def scale(self, w: Fp8Weight, which: str, amax: Callable[[], jax.Array]) -> tuple[jax.Array, Any]:
        return fp8.operand_scale(w, which, amax, self.mlp.max_over_devices)

    def sent(self, x: jax.Array, w: Fp8Weight, which: str, *numbers: jax.Array) -> tuple[Any, *tuple[jax.Array, ...]]:
        """The amax and the scale are those of the rows: each token that has an expert is in one of them."""
        x = jnp.where(self.route.has_expert(len(x))[:, None], x, 0)
        amax = fp8.amax(x)
        scale, dtype = self.scale(w, which, lambda: amax)
        as_bytes = jax.lax.bitcast_convert_type(fp8.quantize(x, scale, dtype), jnp.uint8)
        sent, *numbers_of_rows = self.route.send(as_bytes, *numbers)
        # Bytes, because jax rounds the floats that a policy keeps, and takes 240 for the largest E4M3, which is 448.
        rows = jax.lax.bitcast_convert_type(checkpoint_name(sent, "dispatched"), dtype)
        transposed = self.quantisers.transpose(rows, self.group_sizes)
        return Operand(rows, transposed, 1 / scale, amax), *numbers_of_rows

    def quantised(self, rows: jax.Array, w: Fp8Weight, which: str) -> Operand:
        scale, dtype = self.scale(w, which, lambda: self.quantisers.amax(rows, self.group_sizes))
        q, q_t, amax = self.quantisers.cast_transpose(rows, self.group_sizes, scale, dtype)
        return Operand(q, q_t, 1 / scale, amax)

    def activated(self, up: jax.Array, weights: jax.Array, w: Fp8Weight) -> Operand:
        if self.mlp.activation not in mlp_kernel.KINDS:
            return self.quantised(self.weighted(up, weights), w, "input")
        tensors = self.mlp.activation, up, weights
        scale, dtype = self.scale(w, "input", lambda: self.quantisers.gated_amax(*tensors, self.group_sizes))
        q, q_t, amax = self.quantisers.gated_cast_transpose(*tensors, self.group_sizes, scale, dtype)
        return Operand(q, q_t, 1 / scale, amax)

    def gated_gradient(
        self, up: jax.Array, weights: jax.Array, dact: jax.Array, w: Fp8Weight
    ) -> tuple[Operand, jax.Array]:
        tensors = self.mlp.activation, up, weights, dact, self.group_sizes
        scale, dtype = self.scale(w, "gradient", lambda: self.quantisers.gated_backward_amax(*tensors))
        q, q_t, amax, dweights = self.quantisers.gated_backward_cast_transpose(*tensors, scale, dtype)
        return Operand(q, q_t, 1 / scale, amax), dweights

    def product(self, x: Operand, w: Fp8Weight, which: str) -> jax.Array:
        other = w.transposed if which == "input" else w.values
        assert x.values is not None and other is not None
        return fp8_rows_times_weights(
            x.values,
            other,
            x.inverse_scale * w.inverse_scale,
            self.group_sizes,
            self.dtype,
            rows=self.rows,  # values may have more
            implementation=self.mlp.kernels.grouped_matmul,
        )

    def weight_gradient(self, x: Operand, dy: Operand, w: Fp8Weight) -> Fp8Weight:
        """`x.T @ dy` of each expert and the amaxes, in their fields of `Fp8Weight`."""
        inverse, implementation = x.inverse_scale * dy.inverse_scale, self.mlp.kernels.grouped_matmul
        tensors = x.transposed, dy.transposed, inverse, self.group_sizes
        gradient = fp8_weight_gradient(*tensors, self.dtype, implementation=implementation)
        amax = jnp.stack([x.amax, dy.amax])
        return Fp8Weight(*(None,) * 5, gradient=gradient, amax=amax, gradient_dtype=w.gradient_dtype)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Blockwise(_Steps):
    """With scales of blocks; a device needs no other's magnitudes."""

    def quantised(self, rows: jax.Array, w: BlockWeight, which: str) -> BothWays:
        return grouped_blockwise_kernels.quantise(rows, self.group_sizes)

    def activated(self, up: jax.Array, weights: jax.Array, w: BlockWeight) -> BothWays:
        if self.mlp.activation not in mlp_kernel.KINDS:
            return self.quantised(self.weighted(up, weights), w, "input")
        return grouped_blockwise_kernels.gated(self.mlp.activation, up, weights, self.group_sizes)

    def gated_gradient(
        self, up: jax.Array, weights: jax.Array, dact: jax.Array, w: BlockWeight
    ) -> tuple[BothWays, jax.Array]:
        tensors = up, weights, dact, self.group_sizes
        return grouped_blockwise_kernels.gated_backward(self.mlp.activation, *tensors)

    def product(self, x: BothWays, w: BlockWeight, which: str) -> jax.Array:
        assert x.rows is not None
        matrices = grouped_blockwise_kernels.quantise_weights(w.values, which)
        return blockwise_kernel.grouped_matmul(x.rows, matrices, self.group_sizes, self.dtype, self.rows)

    def weight_gradient(self, x: BothWays, dy: BothWays, w: BlockWeight) -> BlockWeight:
        tensors = x.columns, dy.columns, self.group_sizes
        return w.with_gradient(blockwise_kernel.grouped_weight_gradient(*tensors, self.dtype))


# Biases. That of `up` is added within the activation, except in FP8.

ONES = 128  # equal columns of a gradient of biases, as wide as the kernels' narrowest tile


def _plus_up(up: jax.Array, biases: Biases | None, group_sizes: jax.Array) -> jax.Array:
    return up if biases is None else up + bias_of_rows(biases.up, up, group_sizes)


def _plus_down(y: jax.Array, biases: Biases | None, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """The weights multiply the output's bias too."""
    if biases is None:
        return y
    bias = bias_of_rows(biases.down, y, group_sizes).astype(wide(y.dtype))
    return (y + bias * weights[:, None]).astype(y.dtype)


def _bias_gradients(
    mlp: ExpertMlp, biases: Biases | None, weights, dweights, dup: jax.Array, dy: jax.Array, group_sizes: jax.Array
) -> tuple[jax.Array, Biases | None]:
    """(`dweights` with the share of the output's bias, the gradients of both biases).

    A bias is the matrix of an input that is 1, or here the routing weight, so its gradient is a weight's: the grouped
    matmul reads the rows of groups only.
    """
    if biases is None:
        return dweights, None
    exact = dy.astype(wide(dy.dtype))
    dweights += jnp.sum(exact * bias_of_rows(biases.down, exact, group_sizes), axis=-1).astype(dweights.dtype)

    def gradient(inputs: jax.Array, of_outputs: jax.Array, bias: jax.Array) -> jax.Array:
        columns = jnp.broadcast_to(inputs.astype(of_outputs.dtype)[:, None], (len(inputs), ONES))
        how = {"dtype": bias.dtype, "implementation": mlp.kernels.grouped_matmul}
        return weight_gradient(columns, of_outputs, group_sizes, **how)[:, 0]

    up = gradient(jnp.ones_like(weights), dup, biases.up)
    return dweights, Biases(up, gradient(weights, dy, biases.down))
