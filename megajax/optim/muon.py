"""Muon: heavy-ball momentum whose matrices are made orthogonal (Jordan et al. 2024).

The mathematics of one matrix; `parallel.weights.matrices` brings whole matrices to devices.
"""

import math

import jax
import jax.numpy as jnp

from megajax.config.optimizer_schema import Coefficients, MuonConfig

EPSILON = 1e-7  # added to the norm, so that a matrix of zeros stays one

QUINTIC: tuple[Coefficients, ...] = ((3.4445, -4.7750, 2.0315),)
# Amsel et al. 2025, for singular values from 1e-3 to 1. The last step converges to 1; those before are for values up
# to SAFETY, which rounding in BF16 may reach.
SAFETY = 1.01
POLAR_EXPRESS: tuple[Coefficients, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)


def coefficients(config: MuonConfig) -> list[Coefficients]:
    """(a, b, c) of each step of Newton–Schulz."""
    if config.coefficients == "polar_express":
        *before, last = POLAR_EXPRESS
        published = (*((a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in before), last)
    else:
        published = QUINTIC if config.coefficients == "quintic" else config.coefficients
    return [published[min(step, len(published) - 1)] for step in range(config.steps)]


def newton_schulz(x: jax.Array, config: MuonConfig) -> jax.Array:
    """The matrices `x [..., R, C]`, R ≤ C, with all singular values near 1; zeros stay zeros. In the dtype of `x`.

    A step costs 4R²C + 2R³ operations. The norm is computed in FP32, all matmuls in the dtype of `x`; FP32 in full
    precision.
    """
    precision = "highest" if x.dtype == jnp.float32 else None

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.matmul(a, b, precision=precision)

    norm = jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=(-2, -1), keepdims=True))
    norm *= SAFETY if config.coefficients == "polar_express" else 1.0
    x = (x / (norm + EPSILON)).astype(x.dtype)
    for a, b, c in coefficients(config):
        gram = product(x, x.mT)
        x = a * x + product(b * gram + c * product(gram, gram), x)
    return x


def update_scale(config: MuonConfig, inputs: int, outputs: int) -> float:
    """The factor of an orthogonal update of a matrix `[inputs, outputs]`.

    `match_adamw` is that of Moonlight (Liu et al. 2025): the mean square of the update is then 0.2², as AdamW's is.
    """
    if config.scale == "spectral":
        return math.sqrt(max(1.0, outputs / inputs))
    return 0.2 * math.sqrt(max(inputs, outputs))
