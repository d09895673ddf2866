"""FP8 tensors: scales, quantisation, matmuls (Micikevicius et al. 2022, "FP8 Formats for Deep Learning").

A tensor is scaled so that its largest magnitude (amax) meets the format's largest number, and rounded to E4M3 (weights,
activations) or E5M2 (gradients). Hopper's FP8 tensor cores read both operands along the dimension that is summed over,
so a tensor is quantised together with its transpose: one for the forward and input-gradient matmuls, one for the
weight gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from megajax.errors import ConfigError
from megajax.ops import fp8_kernels, fp8_reference, transformer_engine
from megajax.ops.fp8_reference import amax, quantize

__all__ = [
    "E4M3",
    "E5M2",
    "Fp8Weight",
    "Implementation",
    "Operand",
    "amax",
    "choose",
    "kernels",
    "operand_scale",
    "quantize",
    "scale_for",
]

Implementation = Literal["reference", "pallas", "transformer_engine"]
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Fp8Weight:
    """A linear layer's weight, quantised, and what its two operands need: what `fp8` linear layers take for `w`.

    `jax.vjp` with respect to it returns the weight's gradient in `gradient` and the largest magnitudes of the layer's
    input and output gradient in `amax`; both hold zeros on the way in. Experts' matrices are in one, [E, in, out].
    """

    values: jax.Array  # [in, out] E4M3
    transposed: jax.Array | None  # [out, in] E4M3; None as long as it lies in shards
    inverse_scale: jax.Array  # FP32
    input_scale: jax.Array | None  # FP32; None: from the input itself (current scaling)
    gradient_scale: jax.Array | None
    gradient: jax.Array | None  # [in, out] in the compute dtype; None as long as the weight is not in use
    amax: jax.Array | None  # [2] FP32
    gradient_dtype: Any = field(metadata={"static": True})


class Operand(NamedTuple):
    """A tensor in FP8, as matmuls take it; of experts' rows grouped matmuls, with groups in steps in the transpose."""

    values: jax.Array | None  # [T, F]; None: only the transpose is kept, for the backward pass
    transposed: jax.Array  # [F, T]
    inverse_scale: jax.Array
    amax: jax.Array  # on this device


def operand_scale(
    w: Fp8Weight, which: str, amax: Callable[[], jax.Array], max_over_devices: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, Any]:
    """(scale, FP8 dtype) of a layer's "input" or output "gradient"; `amax()` is asked for with current scaling only."""
    given, dtype = (w.input_scale, E4M3) if which == "input" else (w.gradient_scale, w.gradient_dtype)
    return (scale_for(max_over_devices(amax()), dtype) if given is None else given), dtype


def scale_for(amax: jax.Array, dtype: Any, margin: float = 0) -> jax.Array:
    """The factor that takes `amax` to the largest FP8 number / 2^margin; 1 where that is too large or amax is 0.

    NaN where amax is not finite: quantised with it a tensor is NaN, and the step is seen to have gone bad.
    """
    scale = float(jnp.finfo(dtype).max) / 2.0**margin / amax
    usable = jnp.where((amax > 0) & jnp.isfinite(scale), scale, 1.0)
    return jnp.where(jnp.isfinite(amax), usable, jnp.nan).astype(jnp.float32)


def choose(backend: str, platform: str, compute_capability: str | None) -> Implementation:
    """Whose kernels quantise and multiply for `precision.fp8.backend` (xla, transformer_engine) on a device.

    Raises ConfigError where they cannot run: before Hopper, or where Transformer Engine cannot be imported.
    """
    on_gpu = platform in ("gpu", "cuda")
    if on_gpu and compute_capability is not None and float(compute_capability) < 9.0:
        raise ConfigError(
            f"precision.fp8.recipe needs Hopper GPUs or newer, and this one has compute capability "
            f"{compute_capability}: set it to none."
        )
    if backend == "xla":
        return "pallas" if on_gpu else "reference"
    if not on_gpu:
        raise ConfigError(f"precision.fp8.backend={backend} needs a GPU and this is {platform}: use xla.")
    transformer_engine.check_installed()
    return "transformer_engine"


def kernels(implementation: Implementation) -> ModuleType:
    """The module that has them; `fp8_reference` has the same functions plainly."""
    return {"pallas": fp8_kernels, "transformer_engine": transformer_engine, "reference": fp8_reference}[implementation]
