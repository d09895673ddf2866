"""Newton–Schulz: matrices made orthogonal by polynomials of themselves, for Muon (Jordan et al. 2024)."""

import math
from collections.abc import Callable, Sequence
from functools import reduce

import jax
import jax.numpy as jnp

Product = Callable[[jax.Array, jax.Array], jax.Array]
Step = tuple[float, float, float]  # (a, b, c) of X ← aX + b(XXᵀ)X + c(XXᵀ)²X
EPSILON = 1e-7  # added to the norm, so that a matrix of zeros stays one

QUINTIC: tuple[Step, ...] = ((3.4445, -4.7750, 2.0315),)
# Amsel et al. 2025, for singular values from 1e-3 to 1. The last step converges to 1; those before are for values up
# to SAFETY, which rounding in BF16 may reach.
SAFETY = 1.01
POLAR_EXPRESS: tuple[Step, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
SIDE = 64  # rows and columns of `symmetric_matmul` are multiples of it
LEAST_ROWS = 1024

# Largest product of the coefficients a in a part of the steps; docs/records/log.md, 2026-11-25, has errors with others.
LARGEST_GROWTH = 12.0


def coefficients(named: str | Sequence[Step], count: int) -> list[Step]:
    """The steps of `quintic`, of `polar_express`, or the given ones; the last one is repeated up to `count`."""
    if named == "polar_express":
        *before, last = POLAR_EXPRESS
        first, *others = map(_for_larger_values, before)
        published = [_for_larger_values(first), *others, last]  # the first X is divided by SAFETY too
    else:
        published = QUINTIC if isinstance(named, str) else named
    return [published[min(step, len(published) - 1)] for step in range(count)]


def newton_schulz(x: jax.Array, steps: Sequence[Step], symmetric: Product | None = None) -> jax.Array:
    """The matrices `x [..., R, C]`, R ≤ C, with all singular values near 1; zeros stay zeros. In the dtype of `x`.

    `symmetric(a, b)` computes a bᵀ, a symmetric matrix, with half of the operations (`symmetric_matmul`).

    A step multiplies X by a polynomial P = aI + bG + cG² of G = XXᵀ. So the steps of a part need only R × R matrices:
    the next G is PGP, and X is multiplied by the product of the polynomials once. Sums and the norm are in FP32, all
    matmuls in the dtype of `x`; FP32 in full precision.
    """
    precision = "highest" if x.dtype == jnp.float32 else None
    identity = jnp.eye(x.shape[-2], dtype=jnp.float32)

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.matmul(a, b, precision=precision)

    of_symmetric = symmetric or (lambda a, b: product(a, b.mT))
    x = normalised(x)
    for part in parts(steps, *x.shape[-2:], halved=symmetric is not None):
        gram, polynomials = of_symmetric(x, x), []
        for a, b, c in part:
            if polynomials:
                gram = of_symmetric(of_symmetric(polynomials[-1], gram), polynomials[-1])
            terms = b * gram.astype(jnp.float32) + c * of_symmetric(gram, gram).astype(jnp.float32)
            polynomials.append((a * identity + terms).astype(x.dtype))
        x = product(reduce(of_symmetric, polynomials), x)
    return x


def has_kernel(rows: int, columns: int) -> bool:
    """Whether `symmetric_matmul` supports matrices of this size and is faster; whole products of small ones are not."""
    return rows >= LEAST_ROWS and rows % SIDE == columns % SIDE == 0


def normalised(x: jax.Array) -> jax.Array:
    """The matrices `x [..., R, C]` divided by their Frobenius norm, which is computed in FP32."""
    norm = jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=(-2, -1), keepdims=True))
    return (x / (norm + EPSILON)).astype(x.dtype)


def parts(steps: Sequence[Step], rows: int, columns: int, halved: bool) -> Sequence[Sequence[Step]]:
    """The steps in parts, each of which begins with XXᵀ: single ones, or long ones if they need fewer operations.

    `halved`: symmetric products need half of the operations. The rounding of a product of polynomials grows with the
    product of their coefficients a.
    """
    single, long = [[step] for step in steps], []
    while steps:  # from the last one
        count = max(n for n in range(1, len(steps) + 1) if n == 1 or _growth(steps[-n:]) <= LARGEST_GROWTH)
        long.insert(0, steps[-count:])
        steps = steps[:-count]
    return min(single, long, key=lambda found: _operations(found, rows, columns, halved))


def operations(steps: Sequence[Step], rows: int, columns: int, halved: bool) -> int:
    """Floating-point operations of `newton_schulz` for one matrix, rows ≤ columns; `halved` as in `parts`."""
    return _operations(parts(steps, rows, columns, halved), rows, columns, halved)


def _for_larger_values(step: Step) -> Step:
    """The step for an X that is divided by SAFETY."""
    a, b, c = step
    return a / SAFETY, b / SAFETY**3, c / SAFETY**5


def _operations(found: Sequence[Sequence[Step]], rows: int, columns: int, halved: bool) -> int:
    """XXᵀ and the product with X in each part; a square a step, and three more R × R products between two steps.

    All but the product with X are symmetric.
    """
    symmetric = sum(2 * rows**2 * columns + 2 * rows**3 * (4 * len(part) - 3) for part in found)
    return symmetric // (2 if halved else 1) + len(found) * 2 * rows**2 * columns


def _growth(steps: Sequence[Step]) -> float:
    return math.prod(abs(a) for a, _, _ in steps)
