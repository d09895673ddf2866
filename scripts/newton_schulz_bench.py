"""Newton–Schulz with whole and with symmetric products, on one GPU: `python scripts/newton_schulz_bench.py`.

X·Xᵀ and its square are symmetric. With n blocks only the n (n + 1) / 2 blocks on and below the diagonal of n × n are
computed, and the others are their transposes; 1 is what `optim.muon` does. Prints a line for each shape, number of
matrices at once and number of blocks: ms a matrix for all steps, the same in TFLOP/s of whole products, and the
largest difference from whole products as a part of the largest element. Without a GPU the matrices are tiny, and the
times are meaningless.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from megajax.config.optimizer_schema import MuonConfig
from megajax.optim.muon import EPSILON, coefficients, newton_schulz

# Rows and columns of Llama 3 8B's matrices, rows ≤ columns: MLP, queries and output, keys and values.
SHAPES = ((4096, 14336), (4096, 4096), (1024, 4096))
TINY = ((32, 80),)
AT_ONCE, BLOCKS, ROUNDS, CALLS = (1, 3), (1, 2, 4), 3, 10
HEAD = "| rows × columns | at once | blocks | ms a matrix | TFLOP/s | difference |\n|---|---|---|---|---|---|"


def symmetric(a: jax.Array, b: jax.Array, blocks: int) -> jax.Array:
    """`a [..., R, C]` times `b [..., C, R]`, where the product is symmetric; `blocks` divides R."""
    size = a.shape[-2] // blocks
    lower = [a[..., i * size : (i + 1) * size, :] @ b[..., : (i + 1) * size] for i in range(blocks)]

    def block(i: int, j: int) -> jax.Array:
        return lower[i][..., j * size : (j + 1) * size] if j <= i else block(j, i).mT

    rows = [[lower[i], *(block(i, j) for j in range(i + 1, blocks))] for i in range(blocks)]
    return jnp.concatenate([jnp.concatenate(row, axis=-1) for row in rows], axis=-2)


def by_blocks(x: jax.Array, config: MuonConfig, blocks: int) -> jax.Array:
    """`newton_schulz` with symmetric products."""
    norm = jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=(-2, -1), keepdims=True))
    x = (x / (norm + EPSILON)).astype(x.dtype)
    for a, b, c in coefficients(config):
        gram = symmetric(x, x.mT, blocks)
        x = a * x + (b * gram + c * symmetric(gram, gram, blocks)) @ x
    return x


def seconds(function: Callable[[], jax.Array]) -> float:
    """Time of one call, the median of several rounds."""
    function().block_until_ready()
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready([function() for _ in range(CALLS)])
        rounds.append((time.perf_counter() - start) / CALLS)
    return sorted(rounds)[ROUNDS // 2]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    config, has_gpu = MuonConfig(), jax.default_backend() == "gpu"
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {time.strftime('%Y-%m-%d')}, BF16\n\n{HEAD}")
    for rows, columns in SHAPES if has_gpu else TINY:
        operations = config.steps * (4 * rows**2 * columns + 2 * rows**3)
        for count in AT_ONCE:
            x = jax.random.normal(jax.random.key(0), (count, rows, columns), jnp.bfloat16)
            whole = newton_schulz(x, config).astype(jnp.float32)
            for blocks in BLOCKS:
                method = newton_schulz if blocks == 1 else partial(by_blocks, blocks=blocks)
                run = jax.jit(partial(method, config=config))
                difference = jnp.max(jnp.abs(run(x).astype(jnp.float32) - whole)) / jnp.max(jnp.abs(whole))
                each = seconds(partial(run, x)) / count
                figures = f"{1e3 * each:.3f} | {operations / each / 1e12:.1f} | {float(difference):.1e}"
                print(f"| {rows} × {columns} | {count} | {blocks} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
