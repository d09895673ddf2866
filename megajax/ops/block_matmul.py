"""The three matmuls of a linear layer with operands that are quantised in blocks along the summed dimension of each.

With kernels of megajax's own ("pallas") a tensor is quantised along both dimensions at once, before its first product.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from megajax.ops import blockwise_fp8_kernels, blockwise_kernel, fp8_reference
from megajax.ops.block_formats import BlockOperand, BlockRecipe, Implementation, multiply, random_bits
from megajax.ops.blockwise_fp8_kernels import BothWays

MaxOverDevices = Callable[[jax.Array], jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RoundingNoise:
    """What random bits of a layer's output gradient depend on: the step, the layer, and each number's indices."""

    seeds: jax.Array  # [2] uint32: for the input's gradient, for the weight's
    token_ids: jax.Array  # [T / tensor] uint32, in the global batch; of experts [R], of their rows
    columns: jax.Array  # [out] uint32: the columns of the whole weight that this device has

    def bits(self, token_ids: jax.Array, use: int) -> jax.Array:
        """`[tokens, out]`."""
        return random_bits(self.seeds[use], token_ids, self.columns)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockWeight:
    """The weight `[in, out]` of such a layer, in the compute dtype; experts' are stacked, `[E, in, out]`."""

    values: jax.Array
    amax: jax.Array | None  # over all devices, if the recipe has a factor
    noise: RoundingNoise | None  # if the recipe is stochastic, in training
    recipe: BlockRecipe = field(metadata={"static": True})
    implementation: Implementation = field(metadata={"static": True})

    def quantised(self, which: str) -> BlockOperand:
        """`[out, in]` for the product with a layer's "input", `[in, out]` for that with its output "gradient"."""
        return self.quantise(self.values.T if which == "input" else self.values, "weight", self.amax)

    def quantise(
        self, x: jax.Array, tensor: str, amax: jax.Array | None, bits: jax.Array | None = None
    ) -> BlockOperand:
        return self.recipe.quantised(x.astype(jnp.float32), tensor, amax, bits)

    def transformed(self, x: jax.Array) -> jax.Array:
        """An operand `[tokens, F]` of the weight's gradient → `[F, tokens]` FP32, before it is quantised."""
        return self.recipe.transformed(x.astype(jnp.float32).T)

    def amax_of(self, tensors: Sequence[jax.Array], max_over_devices: MaxOverDevices) -> jax.Array | None:
        """The amax of a tensor in pieces over all devices, if the recipe has a factor."""
        if not self.recipe.has_factor:
            return None
        return max_over_devices(reduce(jnp.maximum, map(fp8_reference.amax, tensors)))

    def with_amax(self, values: jax.Array, max_over_devices: MaxOverDevices) -> "BlockWeight":
        """This weight with the amax of its `values`."""
        return replace(self, amax=self.amax_of([values], max_over_devices))

    def with_rows(self, ids: jax.Array) -> "BlockWeight":
        """This weight of experts with the ids `[R]` of their rows."""
        return self if self.noise is None else replace(self, noise=replace(self.noise, token_ids=ids))

    def with_gradient(self, gradient: jax.Array) -> "BlockWeight":
        """The cotangent of this weight."""
        return BlockWeight(gradient, None, None, self.recipe, self.implementation)


class TokenPiece(NamedTuple):
    """Some tokens of a layer's input or output gradient, in the compute dtype."""

    values: jax.Array  # [T, F]
    amax: jax.Array | None  # of the whole tensor, as `BlockWeight.amax_of`
    token_ids: jax.Array | None = None  # [T] uint32, of a gradient that is rounded at random


def product(x: TokenPiece | BothWays, w: BlockWeight, which: str, dtype: Any) -> jax.Array:
    """`x @ w` of a layer's "input", or `dy @ w.T` of its output "gradient"."""
    if isinstance(x, BothWays):
        assert x.rows is not None
        return blockwise_kernel.matmul(x.rows, blockwise_fp8_kernels.quantise_weight(w.values, which), dtype)
    bits = None if w.noise is None or x.token_ids is None else w.noise.bits(x.token_ids, 0)
    return multiply(w.quantise(x.values, which, x.amax, bits), w.quantised(which), dtype, w.implementation)


def weight_gradient(
    xs: Sequence[Any], dys: Sequence[Any], w: BlockWeight, dtype: Any, max_over_devices: MaxOverDevices
) -> BlockWeight:
    """`x.T @ dy`, summed over the pieces, which are as in `product`."""
    if w.implementation == "pallas":
        pairs = zip(xs, dys, strict=True)
        products = [blockwise_kernel.matmul(x.columns, dy.columns, dtype) for x, dy in pairs]
        return w.with_gradient(reduce(jnp.add, products))
    inputs, gradients = ([w.transformed(piece.values) for piece in pieces] for pieces in (xs, dys))
    amaxes = [w.amax_of(operands, max_over_devices) for operands in (inputs, gradients)]
    total = None
    for x, dy, piece in zip(inputs, gradients, dys, strict=True):
        bits = None if w.noise is None or piece.token_ids is None else w.noise.bits(piece.token_ids, 1).T
        operands = w.quantise(x, "input", amaxes[0]), w.quantise(dy, "gradient", amaxes[1], bits)
        found = multiply(*operands, dtype, w.implementation)
        total = found if total is None else total + found
    assert total is not None
    return w.with_gradient(total)
