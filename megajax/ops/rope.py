"""Rotary position embedding in Hugging Face's half-split convention: element i is paired with i + R/2."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from megajax.errors import ConfigError
from megajax.ops.numerics import wide


def rope_frequencies(
    head_dim: int,
    theta: float,
    fraction: float = 1.0,
    scaling: Mapping[str, Any] | None = None,
    length: int = 1,
) -> np.ndarray:
    """Angles per position, float32 [R/2], for the first R = head_dim · fraction elements of a head.

    `scaling` has the keys of the config section `model.rope_scaling`. Its kinds:
    - linear: all frequencies divided by `factor` (Chen et al. 2023, position interpolation);
    - dynamic: a larger theta if `length`, the sequence length in tokens, exceeds `original_max_positions` (NTK-aware
      scaling; transformers' rule);
    - llama3: low frequencies divided by `factor` (Llama 3.1);
    - yarn: the same with limits in turns (Peng et al. 2023); see also `rope_attention_factor`.
    - longrope: each divided by its own factor; one list is for a `length` up to `original_max_positions`, one for a
      longer one (Ding et al. 2024).
    Raises ConfigError for a fraction that rotates no even part of the head.
    """
    rotary_dim = round(head_dim * fraction)
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise ConfigError(
            f"model.rope_fraction={fraction} of model.head_dim={head_dim} rotates {rotary_dim} elements: "
            "change them to get an even number from 2 to model.head_dim."
        )
    kind = scaling["kind"] if scaling else None
    if scaling and kind == "dynamic":
        excess = max(length / scaling["original_max_positions"] - 1, 0)
        theta *= (1 + scaling["factor"] * excess) ** (rotary_dim / (rotary_dim - 2))
    frequencies = theta ** -(np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    if scaling and kind in ("linear", "llama3", "yarn"):
        kept = {"linear": lambda *_: 0.0, "llama3": _kept_by_llama3, "yarn": _kept_by_yarn}[kind]
        share = kept(frequencies, theta, scaling)
        frequencies = frequencies * (share + (1.0 - share) / scaling["factor"])
    if scaling and kind == "longrope":
        long = length > scaling["original_max_positions"]
        frequencies = frequencies / np.array(scaling["long_factors" if long else "short_factors"])
    return frequencies.astype(np.float32)


def rope_attention_factor(scaling: Mapping[str, Any] | None) -> float:
    """Factor of the rotated elements of queries and keys: YaRN's or LongRoPE's, by a rule if it is not set; else 1."""
    if scaling is None or scaling["kind"] not in ("yarn", "longrope"):
        return 1.0
    if scaling["attention_factor"]:
        return scaling["attention_factor"]
    if scaling["kind"] == "yarn":
        above, below = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if above and below:
            return _mscale(scaling, above) / _mscale(scaling, below)
        return _mscale(scaling, 1)
    return math.sqrt(1 + math.log(scaling["factor"]) / math.log(scaling["original_max_positions"]))


def rope_score_factor(scaling: Mapping[str, Any] | None) -> float:
    """Factor of latent attention's scores: with YaRN the square of the factor for all elements (DeepSeek-V2)."""
    if scaling is None or scaling["kind"] != "yarn" or not scaling.get("mscale_all_dim"):
        return 1.0
    return _mscale(scaling, scaling["mscale_all_dim"]) ** 2


def _mscale(scaling: Mapping[str, Any], weight: float) -> float:
    return 0.1 * weight * math.log(scaling["factor"]) + 1


def _kept_by_llama3(frequencies: np.ndarray, theta: float, scaling: Mapping[str, Any]) -> np.ndarray:
    """The share of each frequency that is not divided: 0 for few turns in the original length, 1 for many."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_positions"] * frequencies / (2 * np.pi)
    return np.clip((turns - low) / (high - low), 0.0, 1.0)


def _kept_by_yarn(frequencies: np.ndarray, theta: float, scaling: Mapping[str, Any]) -> np.ndarray:
    """The same, linear in the frequency's index between the indices with beta_fast and beta_slow turns."""
    rotary_dim = 2 * len(frequencies)

    def index(turns: float) -> float:
        most = scaling["original_max_positions"] / (2 * math.pi * turns)
        return rotary_dim * math.log(most) / (2 * math.log(theta))

    low, high = index(scaling["beta_fast"]), index(scaling["beta_slow"])
    if scaling["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    high += 0.001 if low == high else 0  # transformers' step instead of a division by zero
    return 1.0 - np.clip((np.arange(len(frequencies)) - low) / (high - low), 0.0, 1.0)


def apply_rope(
    x_bsnh: jax.Array,
    positions: jax.Array,
    frequencies: np.ndarray,
    factor: float = 1.0,
    axes: tuple[int, ...] | None = None,
) -> jax.Array:
    """Rotates the first R elements of every head by position · frequency, times `factor`: [B, S, N, H] -> as x.

    positions [B, S] (integers), frequencies [R/2]; angles and rotation in float32 (float64 for float64 x). With
    `axes`, positions are [B, S, A], and each frequency turns with that of its axis, `section_axes`.
    """
    return _rotate((tuple(map(float, frequencies)), factor, axes), x_bsnh, positions)


def section_axes(sections: Sequence[int], interleaved: bool = False) -> tuple[int, ...]:
    """The axis of each rotated pair, for the number of pairs of each axis.

    One section after the other (Wang et al. 2024, Qwen2-VL). Interleaved (Qwen3-VL): the pairs take turns, those of an
    axis with none left are of the first one.
    """
    if not interleaved:
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    turns = ((i % len(sections), i // len(sections)) for i in range(sum(sections)))
    return tuple(axis if turn < sections[axis] else 0 for axis, turn in turns)


Rotation = tuple[tuple[float, ...], float, tuple[int, ...] | None]  # frequencies, factor and axes


def _angles(rotation: Rotation, positions: jax.Array, dtype) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines `[B, S, 1, R/2]`; the backward pass recomputes them, because each layer would save its own."""
    frequencies, factor, axes = rotation
    own = positions[..., None] if axes is None else positions[..., np.array(axes)]
    angles = own.astype(dtype)[:, :, None] * np.asarray(frequencies, dtype)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return (cos, sin) if factor == 1 else (cos * factor, sin * factor)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rotate(rotation: Rotation, x: jax.Array, positions: jax.Array) -> jax.Array:
    cos, sin = _angles(rotation, positions, wide(x.dtype))
    half = cos.shape[-1]
    first, second = (x[..., i * half : (i + 1) * half].astype(cos.dtype) for i in (0, 1))
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*(part.astype(x.dtype) for part in rotated), x[..., 2 * half :]], axis=-1)


def _rotate_forward(rotation: Rotation, x: jax.Array, positions: jax.Array):
    return _rotate(rotation, x, positions), positions


def _rotate_backward(rotation: Rotation, positions: jax.Array, dy: jax.Array):
    """The transposed rotation. The halves are swapped by a reversal, which XLA fuses as index arithmetic.

    The next operation concatenates the gradients of queries, keys and values, and XLA's kernel is slow for a
    concatenation of concatenations.
    """
    cos, sin = _angles(rotation, positions, wide(dy.dtype))
    rotary = 2 * cos.shape[-1]
    cos, sin = jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([sin, -sin], axis=-1)
    turned = dy[..., :rotary].astype(cos.dtype)
    swapped = lax.rev(turned.reshape(*turned.shape[:-1], 2, -1), (turned.ndim - 1,)).reshape(turned.shape)
    dx = (turned * cos + swapped * sin).astype(dy.dtype)
    return (dx if rotary == dy.shape[-1] else jnp.concatenate([dx, dy[..., rotary:]], axis=-1)), None


_rotate.defvjp(_rotate_forward, _rotate_backward)
