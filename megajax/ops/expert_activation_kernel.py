"""Gated activations of experts on the GPU, times each row's routing weight, only for the rows that hold tokens.

With experts on several devices the buffers have room for many more rows than arrive; XLA would read and write all.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from megajax.ops.mlp_kernel import FEATURES, NUM_WARPS, TOKENS, gated, gated_gradients

# This many rows after the last token are set to zero, because the matmuls read whole tiles. Later rows are not written.
ZEROS = 256


def activate(
    kind: str, gate_up_rf: jax.Array, weights_r: jax.Array, rows: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """gate_up [R, 2F] (gate first) and weights [R] → activation(gate) · up · weight [R, F] for the first `rows`."""

    def compute(gate, up, weight):
        return (gated(kind, gate, up, interpret) * weight,), ()

    F = gate_up_rf.shape[1] // 2
    (act,), _ = _over_rows(compute, gate_up_rf, weights_r, None, rows, (F,), 0, interpret, "expert_activation")
    return act


def activate_and_gradient(
    kind: str,
    gate_up_rf: jax.Array,
    weights_r: jax.Array,
    dact_rf: jax.Array,
    rows: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dact [R, F] → (the result of `activate`, the gradients of gate_up [R, 2F] and of the weights [R]) in one pass.

    The gradient of the weights is zero after the first `rows`.
    """

    def compute(gate, up, weight, dact):
        act, gradients = gated_gradients(kind, gate, up, dact, interpret)
        return (act * weight, *(g * weight for g in gradients)), (jnp.sum(act * dact, axis=1),)

    F = dact_rf.shape[1]
    outputs, sums = _over_rows(
        compute, gate_up_rf, weights_r, dact_rf, rows, (F, 2 * F), 1, interpret, "expert_activation_gradient"
    )
    dweights = jnp.where(jnp.arange(len(weights_r)) < rows, sums[0].sum(axis=0), 0)
    return outputs[0], outputs[1], dweights.astype(weights_r.dtype)


def _over_rows(compute, gate_up, weights, dact, rows, widths, num_sums, interpret, name):
    """`compute` on FP32 tiles → its outputs [R, width], and its sums over the features of a tile [F / tile, R]."""
    (R, F2), dtype = gate_up.shape, gate_up.dtype
    F = F2 // 2
    block_f = math.gcd(F, FEATURES)

    def kernel(count_ref, gate_up_ref, weights_ref, *refs) -> None:
        first, count = pl.program_id(1) * TOKENS, count_ref[0]

        @pl.when(first < count + ZEROS)
        def _some_rows():
            index = first + jax.lax.iota(jnp.int32, TOKENS)
            tile = (TOKENS, block_f)
            held, inside = (jnp.broadcast_to((index < end)[:, None], tile) for end in (count, R))

            def load(ref) -> jax.Array:
                return plgpu.load(ref, mask=held & inside, other=0.0).astype(jnp.float32)

            weight = plgpu.load(weights_ref, mask=(index < count) & (index < R), other=0.0).astype(jnp.float32)
            tiles = [load(gate_up_ref.at[:, np.int32(part)]) for part in (0, 1)] + [
                jnp.broadcast_to(weight[:, None], tile)
            ]
            inputs, outputs = (refs[:1], refs[1:]) if dact is not None else ((), refs)
            values, sums = compute(*tiles, *map(load, inputs))
            targets = [outputs[0]]
            if len(values) > 1:
                targets += [outputs[1].at[:, np.int32(part)] for part in (0, 1)]
            for ref, value in zip(targets, values, strict=True):
                plgpu.store(ref, value.astype(dtype), mask=inside)
            for ref, total in zip(outputs[len(widths) :], sums, strict=True):
                plgpu.store(ref, total, mask=index < R)

    pairs = pl.BlockSpec((TOKENS, 2, block_f), lambda f, t: (t, 0, f))
    single = pl.BlockSpec((TOKENS, block_f), lambda f, t: (t, f))
    by_row = pl.BlockSpec((TOKENS,), lambda f, t: (t,))
    tile_sums = pl.BlockSpec((None, TOKENS), lambda f, t: (f, t))
    shapes = [jax.ShapeDtypeStruct((R, 2, F) if width == F2 else (R, F), dtype) for width in widths]
    shapes += [jax.ShapeDtypeStruct((F // block_f, R), jnp.float32)] * num_sums
    found = pl.pallas_call(
        kernel,
        grid=(F // block_f, pl.cdiv(R, TOKENS)),
        in_specs=[pl.BlockSpec((1,), lambda f, t: (0,)), pairs, by_row] + ([] if dact is None else [single]),
        out_specs=[pairs if width == F2 else single for width in widths] + [tile_sums] * num_sums,
        out_shape=shapes,
        compiler_params=plgpu.CompilerParams(num_warps=NUM_WARPS),
        interpret=interpret,
        name=name,
    )(rows.reshape(1).astype(jnp.int32), gate_up.reshape(R, 2, F), weights, *([] if dact is None else [dact]))
    outputs = [a.reshape(R, width) for a, width in zip(found, widths, strict=False)]
    return outputs, found[len(widths) :]
