"""Newton–Schulz with fewer operations, speed and accuracy: `python dev/newton_schulz_bench.py` on one GPU.

- published: three products a step, X ← aX + (bG + cG²)X with G = X·Xᵀ.
- 4 blocks: X·Xᵀ and its square are symmetric. Of 4 × 4 blocks only those on and below the diagonal are computed, and
  the others are their transposes.
- used: `ops.newton_schulz`, which computes X once for several steps if that needs fewer operations.

The first table has ms a matrix for all steps, and the same in TFLOP/s of the operations of `published`. The second one
has ‖Y - W‖ / ‖W‖ of the result Y, where W is that of `published` in FP32, and Y's largest singular value, for matrices
with some distributions of singular values. All else is in BF16. Without a GPU the first table's matrices are tiny, and
its times are meaningless.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from grouped_matmul_bench import seconds

from megajax.ops.newton_schulz import coefficients, newton_schulz, normalised

# Rows and columns of Llama 3 8B's matrices, rows ≤ columns: MLP, queries and output, keys and values.
SHAPES = ((4096, 14336), (4096, 4096), (1024, 4096))
TINY, OF_ACCURACY = ((32, 80),), (512, 1792)
AT_ONCE, CALLS = (1, 3), 10
STEPS = coefficients("quintic", 5)


def symmetric(a: jax.Array, b: jax.Array, blocks: int) -> jax.Array:
    """`a [..., R, C]` times `b [..., C, R]`, where the product is symmetric; `blocks` divides R."""
    size = a.shape[-2] // blocks
    lower = [a[..., i * size : (i + 1) * size, :] @ b[..., : (i + 1) * size] for i in range(blocks)]

    def block(i: int, j: int) -> jax.Array:
        return lower[i][..., j * size : (j + 1) * size] if j <= i else block(j, i).mT

    rows = [[lower[i], *(block(i, j) for j in range(i + 1, blocks))] for i in range(blocks)]
    return jnp.concatenate([jnp.concatenate(row, axis=-1) for row in rows], axis=-2)


def published(product_of_symmetric: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    x = normalised(x)
    for a, b, c in STEPS:
        gram = product_of_symmetric(x, x.mT)
        x = a * x + (b * gram + c * product_of_symmetric(gram, gram)) @ x
    return x


METHODS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "published": partial(published, jnp.matmul),
    "4 blocks": partial(published, partial(symmetric, blocks=4)),
    "used": partial(newton_schulz, steps=STEPS),
}


def print_speed(shapes: tuple[tuple[int, int], ...]) -> None:
    print("| rows × columns | at once | method | ms a matrix | TFLOP/s |\n|---|---|---|---|---|")
    for rows, columns in shapes:
        operations = len(STEPS) * (4 * rows**2 * columns + 2 * rows**3)
        for count in AT_ONCE:
            x = jax.random.normal(jax.random.key(0), (count, rows, columns), jnp.bfloat16)
            for name, method in METHODS.items():
                each = seconds(partial(jax.jit(method), x), CALLS) / count
                figures = f"{1e3 * each:.3f} | {operations / each / 1e12:.1f}"
                print(f"| {rows} × {columns} | {count} | {name} | {figures} |", flush=True)


def with_singular_values(values: np.ndarray, columns: int) -> jax.Array:
    """A random matrix `[len(values), columns]` with these singular values."""
    rng, rows = np.random.default_rng(0), len(values)
    left, _ = np.linalg.qr(rng.standard_normal((rows, rows)))
    right, _ = np.linalg.qr(rng.standard_normal((columns, rows)))
    return jnp.asarray(left * values @ right.T, jnp.float32)


def print_accuracy(rows: int, columns: int) -> None:
    i = np.arange(rows)
    matrices = {
        "normal numbers": jax.random.normal(jax.random.key(0), (rows, columns), jnp.float32),
        "1 / i": with_singular_values(1 / (1 + i), columns),
        "1 / i²": with_singular_values(1 / (1 + i) ** 2, columns),
        "exp(-i / 40)": with_singular_values(np.exp(-i / 40), columns),
        "20 are 1, the others 1e-3": with_singular_values(np.where(i < 20, 1, 1e-3), columns),
    }
    print(f"\n| singular values, {rows} × {columns} | method | difference | largest |\n|---|---|---|---|")
    for title, x in matrices.items():
        with jax.default_matmul_precision("highest"):
            expected = jax.jit(METHODS["published"])(x)
        for name, method in METHODS.items():
            found = jax.jit(method)(x.astype(jnp.bfloat16)).astype(jnp.float32)
            difference = jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected)
            largest = np.linalg.norm(np.asarray(found), 2)
            print(f"| {title} | {name} | {float(difference):.3f} | {largest:.2f} |", flush=True)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {time.strftime('%Y-%m-%d')}\n")
    print_speed(SHAPES if jax.default_backend() == "gpu" else TINY)
    print_accuracy(*OF_ACCURACY)


if __name__ == "__main__":
    main()
