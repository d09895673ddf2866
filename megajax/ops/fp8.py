"""FP8 tensors: scales, quantisation, matmuls (Micikevicius et al. 2022, "FP8 Formats for Deep Learning").

A tensor is scaled so that its largest magnitude (amax) becomes the format's largest number, and rounded to E4M3
(weights, activations) or E5M2 (gradients). Hopper's FP8 tensor cores read both operands along the summed dimension. So
a tensor is quantised together with its transpose: one is for the forward and input-gradient matmuls, the other for the
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
from megajax.options.fp8_recipes import Fp8Recipe

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

Implementation = Literal["reference", "pallas", "transformer_engine", "emulated", "cudnn"]
# The least compute capabilities with FP8 matmuls as these kernels need them, and with block-scaled ones
ADA, HOPPER, BLACKWELL = 8.9, 9.0, 10.0
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Fp8Weight:
    """A quantised weight with the scales of the layer's input and output gradient: the `w` of an FP8 linear layer.

    `jax.vjp` with respect to it returns the weight's gradient in `gradient` and the amaxes of the layer's input and
    output gradient in `amax`; both are zeros in the forward pass. Experts' matrices are stacked, [E, in, out].
    """

    values: jax.Array  # [in, out] E4M3
    transposed: jax.Array | None  # [out, in] E4M3; None before the weight is gathered
    inverse_scale: jax.Array  # FP32
    input_scale: jax.Array | None  # FP32; None: computed from the input (current scaling)
    gradient_scale: jax.Array | None
    gradient: jax.Array | None  # [in, out] in the compute dtype; None outside the layer
    amax: jax.Array | None  # [2] FP32
    gradient_dtype: Any = field(metadata={"static": True})


class Operand(NamedTuple):
    """An FP8 operand of a matmul; in the transpose of experts' rows, groups are aligned to steps (`grouped_rows`)."""

    values: jax.Array | None  # [T, F]; None if only the transpose is kept, for the backward pass
    transposed: jax.Array  # [F, T]
    inverse_scale: jax.Array
    amax: jax.Array  # on this device

    def without_rows(self) -> "Operand":
        """What the weight's gradient needs."""
        return self._replace(values=None)


def operand_scale(
    w: Fp8Weight, which: str, amax: Callable[[], jax.Array], max_over_devices: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, Any]:
    """(scale, FP8 dtype) of a layer's "input" or output "gradient"; `amax()` is called only with current scaling."""
    given, dtype = (w.input_scale, E4M3) if which == "input" else (w.gradient_scale, w.gradient_dtype)
    return (scale_for(max_over_devices(amax()), dtype) if given is None else given), dtype


def scale_for(amax: jax.Array, dtype: Any, margin: float = 0) -> jax.Array:
    """The factor from `amax` to the largest FP8 number / 2^margin; 1 if that overflows or amax is 0.

    NaN if amax is not finite: the quantised tensor is then NaN, so the step counts as non-finite and is skipped.
    """
    scale = float(jnp.finfo(dtype).max) / 2.0**margin / amax
    usable = jnp.where((amax > 0) & jnp.isfinite(scale), scale, 1.0)
    return jnp.where(jnp.isfinite(amax), usable, jnp.nan).astype(jnp.float32)


def choose(recipe: Fp8Recipe, backend: str, platform: str, compute_capability: str | None) -> Implementation:
    """The implementation of a recipe's quantisation and matmuls for `precision.fp8.backend`.

    Raises ConfigError if it cannot run: on GPUs without its kernels, or without Transformer Engine.
    """
    on_gpu = platform in ("gpu", "cuda")
    capability = None if compute_capability is None or not on_gpu else float(compute_capability)
    if recipe.in_blocks:
        return _choose_for_blocks(recipe, backend, on_gpu, capability)
    if capability is not None and capability < ADA:
        raise ConfigError(
            f"precision.fp8.recipe needs Ada GPUs or newer, and this one has compute capability "
            f"{compute_capability}: set it to none."
        )
    if backend == "xla":
        return "pallas" if on_gpu else "reference"
    if not on_gpu:
        raise ConfigError(f"precision.fp8.backend={backend} needs a GPU and this is {platform}: use xla.")
    transformer_engine.check_installed()
    return "transformer_engine"


def _choose_for_blocks(recipe: Fp8Recipe, backend: str, on_gpu: bool, capability: float | None) -> Implementation:
    """On GPUs nothing is emulated that is not asked for, because it is slower than BF16."""
    if not on_gpu or backend == "emulated":
        return "emulated"
    here = f"and this one has compute capability {capability}"
    if not recipe.has_block_scaled_dot and not recipe.has_hopper_kernels:
        problem = "has no kernels for GPUs"
    elif recipe.has_hopper_kernels and capability not in (None, HOPPER):
        problem = f"has kernels for Hopper GPUs only, {here}"
    elif recipe.has_block_scaled_dot and capability is not None and capability < BLACKWELL:
        problem = f"needs Blackwell GPUs or newer, {here}"
    else:
        return "pallas" if recipe.has_hopper_kernels else "cudnn"
    other = "none" if capability is not None and capability < ADA else "current"
    raise ConfigError(
        f"precision.fp8.recipe={recipe.name} {problem}: set precision.fp8.backend=emulated, which computes its numbers "
        f"and multiplies them in precision.compute, slower than without FP8; or precision.fp8.recipe={other}."
    )


def kernels(implementation: Implementation) -> ModuleType:
    """The module of an implementation; all have the functions of `fp8_reference`."""
    return {"pallas": fp8_kernels, "transformer_engine": transformer_engine}.get(implementation, fp8_reference)
