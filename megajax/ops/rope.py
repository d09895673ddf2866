"""Rotary position embedding in Hugging Face's half-split convention: element i is paired with i + R/2."""

from collections.abc import Mapping
from functools import partial
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
            "change them to get an even number from 2 to model.head_dim."
        )
    frequencies = theta ** -(np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    if scaling is not None:
        frequencies = _llama3_scaling(frequencies, scaling)
    return frequencies.astype(np.float32)


def _llama3_scaling(frequencies: np.ndarray, scaling: Mapping[str, Any]) -> np.ndarray:
    """Divides low frequencies, which make few turns in the original length, by `factor`; blends the middle ones."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_positions"] * frequencies / (2 * np.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling["factor"])


def apply_rope(x_bsnh: jax.Array, positions_bs: jax.Array, frequencies: np.ndarray) -> jax.Array:
    """Rotates the first R elements of every head by position · frequency: [B, S, N, H] -> as x.

    positions [B, S] (integers), frequencies [R/2]; angles and rotation in float32 (float64 for float64 x).
    """
    return _rotate(tuple(map(float, frequencies)), x_bsnh, positions_bs)


def _angles(frequencies: tuple[float, ...], positions: jax.Array, dtype) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines `[B, S, 1, R/2]`; the backward pass recomputes them, because each layer would save its own."""
    angles = positions.astype(dtype)[:, :, None, None] * np.asarray(frequencies, dtype)
    return jnp.cos(angles), jnp.sin(angles)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rotate(frequencies: tuple[float, ...], x: jax.Array, positions: jax.Array) -> jax.Array:
    cos, sin = _angles(frequencies, positions, wide(x.dtype))
    half = cos.shape[-1]
    first, second = (x[..., i * half : (i + 1) * half].astype(cos.dtype) for i in (0, 1))
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*(part.astype(x.dtype) for part in rotated), x[..., 2 * half :]], axis=-1)


def _rotate_forward(frequencies: tuple[float, ...], x: jax.Array, positions: jax.Array):
    return _rotate(frequencies, x, positions), positions


def _rotate_backward(frequencies: tuple[float, ...], positions: jax.Array, dy: jax.Array):
    """The inverse rotation. The halves are swapped by a reversal, which XLA fuses as index arithmetic.

    The next operation concatenates the gradients of queries, keys and values, and XLA's kernel is slow for a
    concatenation of concatenations.
    """
    cos, sin = _angles(frequencies, positions, wide(dy.dtype))
    rotary = 2 * cos.shape[-1]
    cos, sin = jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([sin, -sin], axis=-1)
    turned = dy[..., :rotary].astype(cos.dtype)
    swapped = lax.rev(turned.reshape(*turned.shape[:-1], 2, -1), (turned.ndim - 1,)).reshape(turned.shape)
    dx = (turned * cos + swapped * sin).astype(dy.dtype)
    return (dx if rotary == dy.shape[-1] else jnp.concatenate([dx, dy[..., rotary:]], axis=-1)), None


_rotate.defvjp(_rotate_forward, _rotate_backward)
