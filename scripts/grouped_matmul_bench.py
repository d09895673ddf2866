"""Speed and accuracy of the grouped matmul's kernels, for each of a set of tilings.

    python scripts/grouped_matmul_bench.py            # on a Hopper GPU
    python scripts/grouped_matmul_bench.py --tiny     # that it runs, anywhere: small shapes, interpreted

For every tiling and shape a line with TFLOP/s and ‖found - expected‖ / ‖expected‖ of the forward pass, the gradient of
x and that of w, where expected is computed in float32 group by group. Only rows of groups count as work. Then, for
every shape, the fastest tilings, and the public function with its own choice of them.
"""

import argparse
import faulthandler
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from megajax.ops import grouped_matmul_kernel as kernel
from megajax.ops.grouped_matmul import grouped_matmul
from megajax.ops.grouped_matmul_kernel import Tiling

PATIENCE = 100  # seconds without a new line after which a kernel is taken to hang
OPERATIONS = ("forward", "dx", "dw")


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
SQUARE = Tiling(128, 128, split="cols")  # a block has 128x256
TALL = Tiling(128, 128, split="rows")  # 256x128
WIDE = Tiling(64, 256, split="rows")  # 128x256
TILINGS = (
    SQUARE,
    WIDE,
    TALL,
    replace(SQUARE, in_flight=0),
    replace(WIDE, in_flight=0),
    replace(SQUARE, panel=4),
    replace(SQUARE, panel=16),
    replace(WIDE, panel=16),
    Tiling(64, 128, split="rows", stages=6),
    Tiling(64, 128, split="cols", stages=4),
    replace(SQUARE, pair=True),
    replace(WIDE, pair=True),
    replace(TALL, pair=True),
    replace(WIDE, pair=True, panel=16),
)
TINY_SHAPES = (Shape(4, 152, 64, 192, unused=20),)
TINY_TILINGS = (Tiling(64, 64, stages=2, split="rows"), Tiling(64, 64, stages=2, in_flight=0, pair=True))


def label(t: Tiling) -> str:
    flags = f"stages {t.stages}, panel {t.panel}, in flight {t.in_flight}{', pair' if t.pair else ''}"
    return f"{t.block_rows}x{t.block_cols} ({t.rows}x{t.cols}), {flags}"


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


def operation(name: str, tiling: Tiling, how: dict[str, Any]) -> Callable[..., jax.Array]:
    def run(x, w, dy, sizes):
        if name == "dw":
            return kernel.weight_gradient(x, dy, sizes, jnp.bfloat16, tiling=tiling, **how)
        rows = dy if name == "dx" else x
        return kernel.matmul(rows, w, sizes, transpose_w=name == "dx", tiling=tiling, **how)

    return run


def seconds(function: Callable, arguments: dict[str, jax.Array], calls: int) -> float:
    """Of one call, the median of three rounds."""
    jax.block_until_ready(function(**arguments))
    rounds = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready([function(**arguments) for _ in range(calls)][-1])
        rounds.append((time.perf_counter() - start) / calls)
    return sorted(rounds)[1]


def attempt(function: Callable) -> Any:
    """Its result, or the exception as one line."""
    try:
        return function()
    except Exception as e:
        return f"{type(e).__name__}: {str(e).strip().splitlines()[0] if str(e).strip() else ''}"[:200]


def measure(compiled: Any, shape: Shape, arrays: dict, wanted: jax.Array, calls: int) -> tuple[float, str]:
    """TFLOP/s (0 for a failure), and what to print."""

    def run() -> tuple[float, str]:
        wrong = float(error(compiled(**arrays), wanted))
        speed = shape.flops / seconds(compiled, arrays, calls) / 1e12
        return (speed if wrong < 1e-2 else 0.0), f"{speed:6.1f} ({wrong:.1e})"

    if isinstance(compiled, str):
        return 0.0, compiled
    result = attempt(run)
    return (0.0, result) if isinstance(result, str) else result


def summary(shape: Shape, arrays: dict, speeds: dict[tuple[str, Tiling], float], calls: int, tiny: bool) -> None:
    print(f"\n{shape}: the fastest tilings")
    slowness = 0.0
    for name in OPERATIONS:
        ranked = sorted(((s, label(t)) for (n, t), s in speeds.items() if n == name), reverse=True)[:3]
        slowness += 1.0 / max(ranked[0][0], 1e-9)
        print(f"  {name:8}" + "".join(f"{s:7.1f}  {text}\n" + 10 * " " for s, text in ranked).rstrip())
    print(f"  forward + backward, each with its fastest: {3 / slowness:.1f}")
    if tiny:
        return

    def train(x, w, dy, sizes):
        out, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, implementation="pallas"), x, w)
        return out, *pull(dy)

    speed = attempt(lambda: 3 * shape.flops / seconds(jax.jit(train), arrays, calls) / 1e12)
    print(f"  grouped_matmul, forward + backward as one: {speed if isinstance(speed, str) else f'{speed:.1f}'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    tiny = parser.parse_args().tiny
    shapes, tilings, calls = (TINY_SHAPES, TINY_TILINGS, 1) if tiny else (SHAPES, TILINGS, 10)
    device = jax.devices()[0]
    blocks = 2 if tiny else getattr(device, "core_count", kernel.MULTIPROCESSORS)
    how = {"blocks": blocks, "interpret": plgpu.InterpretGPUParams() if tiny else None}
    print(f"{device.device_kind}, jax {jax.__version__}, BF16, {time.strftime('%Y-%m-%d')}; TFLOP/s (error)\n")

    inputs = {}
    for shape in shapes:
        arrays, sizes = data(shape)
        inputs[shape] = arrays, expected(int(sizes.max()), **arrays)
        print(f"{shape}: groups of {sizes.min()} to {sizes.max()} rows, {shape.unused} rows of none", flush=True)

    def compile_one(name: str, tiling: Tiling, shape: Shape) -> Any:
        return attempt(lambda: jax.jit(operation(name, tiling, how)).lower(**inputs[shape][0]).compile())

    work = [(tiling, shape) for tiling in tilings for shape in shapes]
    start = time.perf_counter()
    with ThreadPoolExecutor(1 if tiny else os.cpu_count()) as pool:
        futures = {(n, *item): pool.submit(compile_one, n, *item) for item in work for n in OPERATIONS}
        compiled = {key: future.result() for key, future in futures.items()}
    print(f"{len(compiled)} kernels compiled in {time.perf_counter() - start:.0f} s", flush=True)

    speeds: dict[Shape, dict] = {shape: {} for shape in shapes}
    for tiling, shape in work:
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        if shape == shapes[0]:
            print(f"\n{label(tiling)}")
        arrays, wanted = inputs[shape]
        line = []
        for name in OPERATIONS:
            speed, text = measure(compiled[name, tiling, shape], shape, arrays, wanted[name], calls)
            speeds[shape][name, tiling] = speed
            line.append(f"{name} {text}")
        print(f"  {str(shape):<34}{'  '.join(line)}", flush=True)
    faulthandler.cancel_dump_traceback_later()
    for shape in shapes:
        summary(shape, inputs[shape][0], speeds[shape], calls, tiny)


if __name__ == "__main__":
    main()
