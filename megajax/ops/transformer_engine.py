"""NVIDIA Transformer Engine's FP8 kernels: casts with transpose, gated activations, matmuls.

The kernels are called through the `impl` of the JAX primitives in transformer_engine.jax.cpp_extensions, below its
quantizers and its partitioning. They take one device's arrays and must be inside a `jax.shard_map` that is manual over
all mesh axes. They have no derivatives; the callers are `custom_vjp` rules. A tensor has one given scale, which
Transformer Engine calls delayed scaling.

On Hopper no primitive writes both a gated activation's FP8 result and its transpose, so XLA transposes it, as in
Transformer Engine's own JAX layers. Transformer Engine is imported on first use and is optional.
"""

import functools
import inspect
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from megajax.errors import ConfigError
from megajax.extras import loading
from megajax.ops.fp8_reference import gated_amax, gated_backward_amax

__all__ = [
    "cast_transpose",
    "gated_amax",
    "gated_backward_amax",
    "gated_backward_cast_transpose",
    "gated_cast_transpose",
    "matmul",
]

_ACTIVATIONS = {"swiglu": ("silu", "linear"), "geglu": ("gelu", "linear")}
_KEY = "precision.fp8.backend=transformer_engine"
_OTHERWISE = "use precision.fp8.backend=xla"


@functools.cache
def _te() -> SimpleNamespace:
    """The parts of Transformer Engine that this module uses. Raises ConfigError if it cannot be imported."""
    with loading("te", _KEY, _OTHERWISE, ConfigError):
        from transformer_engine.jax.cpp_extensions import activation, quantization  # pyright: ignore
        from transformer_engine.jax.cpp_extensions.gemm import CollectiveOp, GemmPrimitive  # pyright: ignore
        from transformer_engine.jax.quantize import QuantizeLayout, ScalingMode  # pyright: ignore
    return SimpleNamespace(
        ActivationEnum=activation.ActivationEnum,
        ActivationParams=activation.ActivationParams,
        AmaxScope=activation.AmaxScope,
        CollectiveOp=CollectiveOp,
        QuantizeLayout=QuantizeLayout,
        ScalingMode=ScalingMode,
        activation=activation.ActLuPrimitive.impl,
        activation_backward=activation.BaseDActLuDBiasQuantizePrimitive.impl,
        gemm=GemmPrimitive.impl,
        quantize=quantization.BaseDBiasQuantizePrimitive.impl,
    )


def check_installed() -> None:
    """Raises ConfigError if Transformer Engine cannot be imported."""
    _te()


def _scalar_type(dtype: Any) -> Any:
    """The jnp scalar type, such as jnp.float8_e4m3fn; Transformer Engine does not accept a NumPy dtype."""
    return getattr(jnp, jnp.dtype(dtype).name)


def cast_transpose(x_tf: jax.Array, scale: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`x · scale` [T,F] in an FP8 `dtype`, clipped to its range; its transpose [F,T]; amax of x (FP32), in one kernel.

    `scale` is an FP32 scalar; `dtype` is float8_e4m3fn or float8_e5m2.
    """
    te = _te()
    q_tf, q_ft, _, _, amax, _ = te.quantize(
        x_tf,
        scale.reshape(1),
        jnp.zeros(1, jnp.float32),  # amax: the kernel takes the maximum with it
        jnp.empty(0, jnp.uint32),  # the next three are only for NVFP4
        jnp.zeros(1, jnp.float32),
        jnp.empty((1, 1), jnp.bfloat16),
        out_dtype=_scalar_type(dtype),
        scaling_mode=te.ScalingMode.DELAYED_TENSOR_SCALING.value,
        q_layout=te.QuantizeLayout.ROWWISE_COLWISE,
        flatten_axis=1,
        scale_dtype=jnp.float32,
        is_dbias=False,
        is_outer=False,
        stochastic_rounding=False,
        use_rht=False,
    )
    return q_tf, q_ft, amax.reshape(())


def gated_cast_transpose(
    kind: str, gate_up: jax.Array, scale: jax.Array, dtype: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`cast_transpose` of the gated activation of gate_up [T,2F], gate in columns :F -> [T,F], [F,T], amax.

    "swiglu": silu(gate) · up; "geglu": gelu(gate) · up, the tanh approximation.
    """
    te = _te()
    T, F = gate_up.shape[0], gate_up.shape[1] // 2
    q_tf, _, _, _, amax = te.activation(
        gate_up.reshape(T, 2, F),
        scale.reshape(1),
        jnp.zeros(1, jnp.float32),
        **_activation_arguments(te, kind, dtype),
    )
    return q_tf, q_tf.T, amax.reshape(())


def gated_backward_cast_transpose(
    kind: str, gate_up: jax.Array, dact: jax.Array, scale: jax.Array, dtype: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`cast_transpose` of the gradient of gate_up [T,2F], from dact [T,F], in gate_up's dtype.

    Returns [T,2F], [2F,T] and the gradient's amax.
    """
    te = _te()
    T, F = dact.shape
    q, _, _, _, amax, _ = te.activation_backward(
        dact,
        gate_up.reshape(T, 2, F),
        scale.reshape(1),
        jnp.zeros(1, jnp.float32),
        is_dbias=False,
        **_activation_arguments(te, kind, dtype),
    )
    q_tf = q.reshape(T, 2 * F)
    return q_tf, q_tf.T, amax.reshape(())


def _activation_arguments(te: SimpleNamespace, kind: str, dtype: Any) -> dict[str, Any]:
    """The common arguments of Transformer Engine's forward and backward activation primitives."""
    if kind not in _ACTIVATIONS:
        raise ValueError(f'"{kind}" is not a gated activation: use one of {", ".join(_ACTIVATIONS)}.')
    return {
        "out_dtype": _scalar_type(dtype),
        "act_enum": te.ActivationEnum[_ACTIVATIONS[kind]].value,
        "act_len": 2,
        "scaling_mode": te.ScalingMode.DELAYED_TENSOR_SCALING.value,
        "quantize_layout": te.QuantizeLayout.ROWWISE,
        "scale_dtype": jnp.float32,
        "act_params": te.ActivationParams(),
        "amax_scope": te.AmaxScope.LOCAL,
        "transpose_batch_sequence": False,
        "output_amax_when_no_scaling": False,
        "is_outer": False,
    }


def matmul(a_mk: jax.Array, b_nk: jax.Array, inverse_scale: jax.Array, dtype: Any) -> jax.Array:
    """`a @ b.T · inverse_scale` [M,N] in `dtype` (BF16, FP16 or FP32) of FP8 operands [M,K] and [N,K], by cuBLASLt.

    `inverse_scale` (FP32 scalar) is the product of the operands' inverse scales; M, N and K are multiples of 16.
    """
    te = _te()
    empty = jnp.empty(0, dtype)
    arguments = {
        "lhs": a_mk,
        "lhs_scale_inv": inverse_scale.reshape(1),
        "rhs": b_nk,
        "rhs_scale_inv": jnp.ones(1, jnp.float32),
        "bias": empty,
        "gelu_input": empty,
        "alpha": jnp.ones(1, jnp.float32),
        "beta": jnp.zeros(1, jnp.float32),
        "out_dtype": _scalar_type(dtype),
        "contracting_dims": ((1,), (1,)),
        "scaling_mode": te.ScalingMode.DELAYED_TENSOR_SCALING,
        "fuse_bias": False,
        "fuse_gelu": False,
        "grad": False,
        "use_split_accumulator": False,
        "transpose_batch_sequence": False,
        "sequence_dim": -1,
        "is_outer": False,
        "collective_op": te.CollectiveOp.NONE,
    }
    # Versions after 2.12 do not fuse GELU and have fewer arguments.
    accepted = inspect.signature(te.gemm).parameters
    return te.gemm(**{name: arguments[name] for name in accepted})[0]
