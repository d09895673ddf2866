"""Rotary position embedding, Hugging Face's half-split convention: element i is paired with i + R/2."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from megajax.errors import ConfigError
from megajax.ops.numerics import wide


def rope_frequencies(
    head_dim: int, theta: float, fraction: float = 1.0, scaling: Mapping[str, Any] | None = None
) -> np.ndarray:
    """Angles per position, float32 [R/2], for the first R = head_dim · fraction elements of a head.

    `scaling` is Llama 3's: a mapping with factor, low_freq_factor, high_freq_factor, original_max_positions.
    """
    rotary_dim = round(head_dim * fraction)
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise ConfigError(
            f"model.rope_fraction={fraction} of model.head_dim={head_dim} rotates {rotary_dim} elements: "
            "choose them so that this is an even number from 2 to model.head_dim."
        )
    frequencies = theta ** -(np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    if scaling is not None:
        frequencies = _llama3_scaling(frequencies, scaling)
    return frequencies.astype(np.float32)


def _llama3_scaling(frequencies: np.ndarray, scaling: Mapping[str, Any]) -> np.ndarray:
    """Frequencies of few turns within the original length are divided by factor, the middle ones blended."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_positions"] * frequencies / (2 * np.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling["factor"])


def apply_rope(x_bsnh: jax.Array, positions_bs: jax.Array, frequencies: np.ndarray | jax.Array) -> jax.Array:
    """Rotates the first R elements of every head by position · frequency: [B, S, N, H] -> as x.

    positions [B, S] (integers), frequencies [R/2]; angles and rotation in float32 (float64 for float64 x).
    """
    dtype = wide(x_bsnh.dtype)
    rotary = 2 * frequencies.shape[0]
    angles = positions_bs.astype(dtype)[:, :, None, None] * jnp.asarray(frequencies, dtype)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    cos, sin = jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)
    x = x_bsnh[..., :rotary].astype(dtype)
    # The other half of each pair by reversing the two halves: for XLA a matter of indices, where slices joined again
    # are a slow kernel in the backward pass.
    swapped = lax.rev(x.reshape(*x.shape[:-1], 2, -1), (x.ndim - 1,)).reshape(x.shape)
    rotated = (x * cos + swapped * sin).astype(x_bsnh.dtype)
    if rotary == x_bsnh.shape[-1]:
        return rotated
    return jnp.concatenate([rotated, x_bsnh[..., rotary:]], axis=-1)
