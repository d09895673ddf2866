"""Gated activations on the GPU: their formulas for Pallas kernels, and the backward pass of the BF16 MLP.

All but one are gate · sigmoid(u) · up: SwiGLU with u = gate, GeGLU (tanh GELU) with a cubic u, GPT-OSS's clamped SwiGLU
with u = 1.702 · gate, gate and up clamped, and up + 1. The exact GeGLU has the normal distribution's function instead
of the sigmoid. jax 0.11 calls Pallas's Triton backend deprecated; its other one, Mosaic GPU, would need its own
kernels.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

TOKENS, FEATURES, NUM_WARPS = 4, 1024, 4  # of a block, of which there are at most so many features
NARROWEST = 128  # features, from which on such a kernel is faster than XLA's
KINDS = "swiglu", "geglu", "geglu_exact", "clamped_swiglu"  # the activations that have formulas here
CLAMP_LIMIT, CLAMP_SLOPE = 7.0, 1.702  # of the clamped SwiGLU


def fits(width: int) -> bool:
    """Whether a kernel for this number of features is faster than XLA's."""
    return width >= NARROWEST


def block_features(width: int) -> int:
    """The features of a block, a power of two: one that divides the width, or, as for 2880, the last block is cut."""
    divisor = math.gcd(width, FEATURES)
    return divisor if divisor >= NARROWEST else min(FEATURES, pl.next_power_of_2(width))


def inside(rows: jax.Array, limit: int | jax.Array, width: int, block_f: int, part: int | jax.Array) -> jax.Array:
    """Whether rows `[r]` and the features of block `part` are below `limit` and `width`: `[r, block_f]`."""
    features = part * block_f + jax.lax.iota(jnp.int32, block_f)
    return (rows < limit)[:, None] & (features < width)[None, :]


def activate_and_gradient(
    kind: str, gate_up_tf: jax.Array, dact_tf: jax.Array, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """gate_up [T, 2F] (gate first) and dact [T, F] → (the gradient of gate_up, the activation [T, F]) in one pass.

    The gradient of the next weight needs the activation: here it costs one write, elsewhere a kernel.
    """
    (T, F), dtype = dact_tf.shape, gate_up_tf.dtype
    block_f = block_features(F)

    def kernel(gate_up_ref, dact_ref, gradient_ref, act_ref) -> None:
        rows = pl.program_id(1) * TOKENS + jax.lax.iota(jnp.int32, TOKENS)
        is_whole = T % TOKENS == 0 and F % block_f == 0
        mask = None if is_whole else inside(rows, T, F, block_f, pl.program_id(0))
        other = None if mask is None else 0.0

        def load(ref) -> jax.Array:
            return plgpu.load(ref, mask=mask, other=other).astype(jnp.float32)

        gate, up = (load(gate_up_ref.at[:, np.int32(part)]) for part in (0, 1))
        act, gradients = gated_gradients(kind, gate, up, load(dact_ref), interpret)
        plgpu.store(act_ref, act.astype(dtype), mask=mask)
        for part, gradient in enumerate(gradients):
            plgpu.store(gradient_ref.at[:, np.int32(part)], gradient.astype(dtype), mask=mask)

    pairs = pl.BlockSpec((TOKENS, 2, block_f), lambda f, t: (t, 0, f))
    single = pl.BlockSpec((TOKENS, block_f), lambda f, t: (t, f))
    gradient, act = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(F, block_f), pl.cdiv(T, TOKENS)),
        in_specs=[pairs, single],
        out_specs=[pairs, single],
        out_shape=[jax.ShapeDtypeStruct((T, 2, F), dtype), jax.ShapeDtypeStruct((T, F), dtype)],
        compiler_params=plgpu.CompilerParams(num_warps=NUM_WARPS),
        interpret=interpret,
        name="gated_backward",
    )(gate_up_tf.reshape(T, 2, F), dact_tf)
    return gradient.reshape(T, 2 * F), act


def gated(kind: str, gate: jax.Array, up: jax.Array, interpret: bool) -> jax.Array:
    """activation(gate) · up of FP32 tiles."""
    gate, up = _clamped(kind, gate, up)
    return gate * _opening(kind, gate, interpret)[0] * up


def gated_gradients(
    kind: str, gate: jax.Array, up: jax.Array, dact: jax.Array, interpret: bool
) -> tuple[jax.Array, Sequence[jax.Array]]:
    """(activation(gate) · up, its gradients of gate and up) of FP32 tiles."""
    inputs = gate, up
    gate, up = _clamped(kind, gate, up)
    opening, change = _opening(kind, gate, interpret)
    activated = gate * opening
    act = activated * up
    gradients = dact * up * (opening + change), dact * activated
    return act, _unclamped(kind, *inputs, *gradients)


def _clamped(kind: str, gate: jax.Array, up: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The factors of gate · sigmoid(u) · up."""
    if kind != "clamped_swiglu":
        return gate, up
    return jnp.minimum(gate, CLAMP_LIMIT), jnp.clip(up, -CLAMP_LIMIT, CLAMP_LIMIT) + 1.0


def _unclamped(
    kind: str, gate: jax.Array, up: jax.Array, dgate: jax.Array, dup: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Gradients of the factors → gradients of `gate` and `up`."""
    if kind != "clamped_swiglu":
        return dgate, dup
    return jnp.where(gate > CLAMP_LIMIT, 0.0, dgate), jnp.where(jnp.abs(up) > CLAMP_LIMIT, 0.0, dup)


def _opening(kind: str, gate: jax.Array, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """The factor of activation(gate) = gate · factor, and gate times the factor's derivative."""
    if kind == "geglu_exact":
        return _normal(gate)
    argument, slope = _sigmoid_argument(kind, gate)
    opening = sigmoid(argument, interpret)
    return opening, gate * opening * (1.0 - opening) * slope


def _normal(gate: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The normal distribution's function at `gate`, and `gate` times its density.

    Triton has no erf: 7.1.26 of Abramowitz and Stegun's handbook, whose error is below 1.5e-7.
    """
    bell = jnp.exp(gate * gate * -0.5)
    t, series = 1.0 / (1.0 + 0.3275911 * math.sqrt(0.5) * jnp.abs(gate)), 0.0
    for factor in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = (series + factor) * t
    tail = 0.5 * series * bell
    return jnp.where(gate < 0, tail, 1.0 - tail), gate * bell * (1.0 / math.sqrt(2.0 * math.pi))


def _sigmoid_argument(kind: str, gate: jax.Array) -> tuple[jax.Array, jax.Array | float]:
    """The u of activation(gate) = gate · sigmoid(u), and its derivative."""
    if kind == "swiglu":
        return gate, 1.0
    if kind == "geglu":
        c = 2.0 * math.sqrt(2.0 / math.pi)
        square = gate * gate
        return gate * (c + 0.044715 * c * square), c + 3.0 * 0.044715 * c * square
    if kind == "clamped_swiglu":
        return CLAMP_SLOPE * gate, CLAMP_SLOPE
    raise ValueError(f'"{kind}" is not a gated activation: use one of {", ".join(KINDS)}.')


def sigmoid(x: jax.Array, interpret: bool) -> jax.Array:
    """1 / (1 + exp(-x)) to a few units in the last place, by the GPU's instructions for exp2 and reciprocal.

    The library's exp and division also handle ranges that do not matter here, with three times the instructions.
    """
    if interpret:
        return jax.nn.sigmoid(x)
    [result] = plgpu.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1; add.ftz.f32 $0, $0, 0f3F800000; rcp.approx.ftz.f32 $0, $0;",
        args=[x * -math.log2(math.e)],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return result
