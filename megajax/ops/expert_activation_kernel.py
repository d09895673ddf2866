"""Gated activations of experts on the GPU, times each row's routing weight, only for the rows that hold tokens.

With experts on several devices the buffers have room for many more rows than arrive; XLA would read and write all. The
biases of the matrix before are added here, for the same reason.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from megajax.ops.grouped_rows import group_of_rows
from megajax.ops.mlp_kernel import NUM_WARPS, TOKENS, block_features, gated, gated_gradients, inside

# This many rows after the last token are set to zero, because the matmuls read whole tiles. Later rows are not written.
ZEROS = 256


def activate(
    kind: str,
    gate_up_rf: jax.Array,
    weights_r: jax.Array,
    group_sizes_e: jax.Array,
    bias_ef: jax.Array | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """gate_up [R, 2F] (gate first), plus the bias [E, 2F] of a row's group → activation(gate) · up · weight [R, F].

    Only for rows of groups, the first ones.
    """

    def compute(gate, up, weight):
        return (gated(kind, gate, up, interpret) * weight,), ()

    F = gate_up_rf.shape[1] // 2
    tensors = gate_up_rf, weights_r, None, group_sizes_e, bias_ef
    (act,), _ = _over_rows(compute, tensors, (F,), 0, interpret, "expert_activation")
    return act


def activate_and_gradient(
    kind: str,
    gate_up_rf: jax.Array,
    weights_r: jax.Array,
    dact_rf: jax.Array,
    group_sizes_e: jax.Array,
    bias_ef: jax.Array | None = None,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dact [R, F] → (the result of `activate`, the gradients of gate_up [R, 2F] and of the weights [R]) in one pass.

    The gradient of the weights is zero after the rows of groups.
    """

    def compute(gate, up, weight, dact):
        act, gradients = gated_gradients(kind, gate, up, dact, interpret)
        return (act * weight, *(g * weight for g in gradients)), (jnp.sum(act * dact, axis=1),)

    F = dact_rf.shape[1]
    tensors = gate_up_rf, weights_r, dact_rf, group_sizes_e, bias_ef
    outputs, sums = _over_rows(compute, tensors, (F, 2 * F), 1, interpret, "expert_activation_gradient")
    held = jnp.arange(len(weights_r)) < group_sizes_e.sum()
    return outputs[0], outputs[1], jnp.where(held, sums[0].sum(axis=0), 0).astype(weights_r.dtype)


def _over_rows(compute, tensors, widths, num_sums, interpret, name):
    """`compute` on FP32 tiles → its outputs [R, width], and its sums over the features of a tile [tiles, R]."""
    gate_up, weights, dact, group_sizes, bias = tensors
    (R, F2), dtype = gate_up.shape, gate_up.dtype
    F = F2 // 2
    block_f = block_features(F)

    def kernel(count_ref, gate_up_ref, weights_ref, *refs) -> None:
        first, part = pl.program_id(1) * TOKENS, pl.program_id(0)
        count = jnp.minimum(count_ref[0], R)

        @pl.when(first < count + ZEROS)
        def _some_rows():
            index = first + jax.lax.iota(jnp.int32, TOKENS)
            held = inside(index, count, F, block_f, part)
            stored, others = inside(index, R, F, block_f, part), list(refs)

            def load(ref) -> jax.Array:
                return plgpu.load(ref, mask=held, other=0.0).astype(jnp.float32)

            weight = plgpu.load(weights_ref, mask=index < count, other=0.0).astype(jnp.float32)
            gate, up = (load(gate_up_ref.at[:, np.int32(half)]) for half in (0, 1))
            inputs = [] if dact is None else [load(others.pop(0))]
            if bias is not None:
                group = plgpu.load(others.pop(0), mask=index < count, other=0)[:, None]
                features = (part * block_f + jax.lax.iota(jnp.int32, block_f))[None, :]
                bias_ref = others.pop(0)
                gate += load(bias_ref.at[group, features])
                up += load(bias_ref.at[group, features + np.int32(F)])
            values, sums = compute(gate, up, jnp.broadcast_to(weight[:, None], held.shape), *inputs)
            _store(others[: len(widths)], values, stored)
            for ref, total in zip(others[len(widths) :], sums, strict=True):
                plgpu.store(ref, total, mask=index < R)

    pairs = pl.BlockSpec((TOKENS, 2, block_f), lambda f, t: (t, 0, f))
    single = pl.BlockSpec((TOKENS, block_f), lambda f, t: (t, f))
    by_row = pl.BlockSpec((TOKENS,), lambda f, t: (t,))
    tile_sums = pl.BlockSpec((None, TOKENS), lambda f, t: (f, t))
    tiles = pl.cdiv(F, block_f)
    shapes = [jax.ShapeDtypeStruct((R, 2, F) if width == F2 else (R, F), dtype) for width in widths]
    shapes += [jax.ShapeDtypeStruct((tiles, R), jnp.float32)] * num_sums
    given = [] if dact is None else [(single, dact)]
    if bias is not None:
        whole = pl.BlockSpec(bias.shape, lambda f, t: (0, 0))
        given += [(by_row, group_of_rows(group_sizes, R)), (whole, bias)]
    found = pl.pallas_call(
        kernel,
        grid=(tiles, pl.cdiv(R, TOKENS)),
        in_specs=[pl.BlockSpec((1,), lambda f, t: (0,)), pairs, by_row, *(spec for spec, _ in given)],
        out_specs=[pairs if width == F2 else single for width in widths] + [tile_sums] * num_sums,
        out_shape=shapes,
        compiler_params=plgpu.CompilerParams(num_warps=NUM_WARPS),
        interpret=interpret,
        name=name,
    )(group_sizes.sum().reshape(1).astype(jnp.int32), gate_up.reshape(R, 2, F), weights, *(array for _, array in given))
    outputs = [a.reshape(R, width) for a, width in zip(found, widths, strict=False)]
    return outputs, found[len(widths) :]


def _store(refs, values, mask: jax.Array) -> None:
    """Tiles into the outputs: the activation, then the gradients of gate and up, which share an output."""
    targets = [refs[0], *(ref.at[:, np.int32(half)] for ref in refs[1:] for half in (0, 1))]
    for ref, value in zip(targets, values, strict=True):
        plgpu.store(ref, value.astype(ref.dtype), mask=mask)
