"""Speed and accuracy of the grouped matmul's kernels.

    python scripts/grouped_matmul_bench.py            # on a Hopper GPU
    python scripts/grouped_matmul_bench.py --tiny     # that it runs, anywhere: small shapes, interpreted

For every shape TFLOP/s and ‖found - expected‖ / ‖expected‖ of the forward pass, the gradient of x and that of w, where
expected is computed in float32 group by group; then TFLOP/s of all three in one program. Only rows of groups count as
work.
"""

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from megajax.ops import grouped_matmul_kernel as kernel
from megajax.ops.grouped_matmul import grouped_matmul


@dataclass(frozen=True)
class Shape:
    E: int
    T: int
    D: int
    F: int
    unused: int = 0  # rows after the last group

    @property
    def flops(self) -> float:
        return 2.0 * (self.T - self.unused) * self.D * self.F

    def __str__(self) -> str:
        return f"{self.E:>3} experts {self.T}x{self.D}x{self.F}"


SHAPES = (Shape(8, 16384, 4096, 14336), Shape(64, 32768, 2048, 1024, unused=333), Shape(128, 65536, 2048, 768))
TINY_SHAPES = (Shape(4, 152, 64, 192, unused=20),)


def data(shape: Shape) -> tuple[dict[str, jax.Array], np.ndarray]:
    """Random x, w, dy and uneven group sizes, the second of them 0; and the sizes on the host."""
    rng = np.random.default_rng(0)
    shares = rng.gamma(4.0, size=shape.E)
    shares[1] = 0.0
    bounds = np.floor(np.cumsum(shares) / shares.sum() * (shape.T - shape.unused)).astype(np.int32)
    bounds[-1] = shape.T - shape.unused
    sizes = np.diff(bounds, prepend=0)
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"x": (shape.T, shape.D), "w": (shape.E, shape.D, shape.F), "dy": (shape.T, shape.F)}
    arrays = {n: jax.random.normal(k, s, jnp.bfloat16) for k, (n, s) in zip(keys, shapes.items(), strict=True)}
    return arrays | {"sizes": jnp.asarray(sizes)}, sizes


@partial(jax.jit, static_argnums=0)
def expected(largest: int, x: jax.Array, w: jax.Array, dy: jax.Array, sizes: jax.Array) -> dict[str, jax.Array]:
    """The result and both gradients in float32, group by group; no group has more than `largest` rows."""
    x, dy = (jnp.pad(a.astype(jnp.float32), ((0, largest), (0, 0))) for a in (x, dy))
    T, dot = x.shape[0] - largest, partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    starts = jnp.cumsum(sizes) - sizes

    def add(e, sums):
        out, dx, dw = sums
        rows = jnp.arange(largest)[:, None] < sizes[e]
        own_x, own_dy = (jnp.where(rows, lax.dynamic_slice_in_dim(a, starts[e], largest), 0) for a in (x, dy))
        own_w = w[e].astype(jnp.float32)

        def added(total, part):
            before = lax.dynamic_slice_in_dim(total, starts[e], largest)
            return lax.dynamic_update_slice_in_dim(total, before + part, starts[e], 0)

        return added(out, dot(own_x, own_w)), added(dx, dot(own_dy, own_w.T)), dw.at[e].set(dot(own_x.T, own_dy))

    zeros = jnp.zeros_like(dy), jnp.zeros_like(x), jnp.zeros(w.shape, jnp.float32)
    out, dx, dw = lax.fori_loop(0, sizes.shape[0], add, zeros)
    return {"forward": out[:T], "dx": dx[:T], "dw": dw}


@jax.jit
def error(found: jax.Array, wanted: jax.Array) -> jax.Array:
    return jnp.linalg.norm((found.astype(jnp.float32) - wanted).ravel()) / jnp.linalg.norm(wanted.ravel())


def operations(tiny: bool) -> dict[str, Callable[..., jax.Array]]:
    blocks = 2 if tiny else getattr(jax.devices()[0], "core_count", kernel.MULTIPROCESSORS)
    tiling = kernel.Tiling(64, 64, stages=2) if tiny else kernel.Tiling()
    how = {"blocks": blocks, "tiling": tiling, "interpret": plgpu.InterpretGPUParams() if tiny else None}
    return {
        "forward": lambda x, w, dy, sizes: kernel.matmul(x, w, sizes, **how),
        "dx": lambda x, w, dy, sizes: kernel.matmul(dy, w, sizes, transpose_w=True, **how),
        "dw": lambda x, w, dy, sizes: kernel.weight_gradient(x, dy, sizes, jnp.bfloat16, **how),
    }


def train(x: jax.Array, w: jax.Array, dy: jax.Array, sizes: jax.Array) -> tuple[jax.Array, ...]:
    out, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, implementation="pallas"), x, w)
    return out, *pull(dy)


def seconds(function: Callable, arguments: dict[str, jax.Array], calls: int) -> float:
    """Of one call, the median of three rounds."""
    jax.block_until_ready(function(**arguments))
    rounds = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready([function(**arguments) for _ in range(calls)][-1])
        rounds.append((time.perf_counter() - start) / calls)
    return sorted(rounds)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    tiny = parser.parse_args().tiny
    calls = 1 if tiny else 10
    device = jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}, BF16, {time.strftime('%Y-%m-%d')}; TFLOP/s (error)", flush=True)
    for shape in TINY_SHAPES if tiny else SHAPES:
        arrays, sizes = data(shape)
        wanted = expected(int(sizes.max()), **arrays)
        line = []
        for name, operation in operations(tiny).items():
            function = jax.jit(operation)
            wrong = float(error(function(**arrays), wanted[name]))
            line.append(f"{name} {shape.flops / seconds(function, arrays, calls) / 1e12:6.1f} ({wrong:.1e})")
        if not tiny:
            line.append(f"as one {3 * shape.flops / seconds(jax.jit(train), arrays, calls) / 1e12:6.1f}")
        print(f"{str(shape):<34}{'  '.join(line)}", flush=True)
        print(f"    groups of {sizes.min()} to {sizes.max()} rows, {shape.unused} rows of none", flush=True)


if __name__ == "__main__":
    main()
