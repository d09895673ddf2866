"""Speed and accuracy of the `blockwise` FP8 kernels beside cuBLASLt and the kernel with one scale a tensor.

    python dev/blockwise_bench.py            # on a Hopper GPU
    python dev/blockwise_bench.py --tiny     # on any machine: small shapes, interpreted

Each line is one matmul [M, K] x [K, N] by one kernel, in TFLOP/s. Errors are ‖found - expected‖ / ‖expected‖ and the
largest difference over the largest number, where expected is the emulated product of the same numbers.
"""

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from functools import partial
from typing import Any

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_triton_gemm=false"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from megajax.ops import (
    block_formats,
    blockwise_fp8_kernels,
    blockwise_kernel,
    expert_block_matmul,
    fp8_kernels,
    fp8_reference,
    grouped_blockwise_kernels,
)
from megajax.ops.block_formats import BlockOperand
from megajax.ops.block_matmul import BlockWeight
from megajax.ops.blockwise_fp8 import Blockwise
from megajax.ops.blockwise_fp8_kernels import ScaledOperand
from megajax.ops.grouped_matmul import GroupedImplementation
from megajax.ops.grouped_matmul_block import MatmulTiling

BF16, E4M3 = jnp.bfloat16, jnp.float8_e4m3fn
LAYERS = [(32768, 4096, 28672), (32768, 14336, 4096), (32768, 4096, 6144)]  # tokens, in, out
TINY = [(256, 128, 384)]
EXPERTS = [(8192, 2048, 2816, 16), (32768, 4096, 28672, 8), (98304, 2048, 2816, 64)]  # rows, in, out, experts
PARTS = ["check", "quantise", "variants", "experts", "speed"]


def seconds(function: Callable[[], Any], calls: int) -> float:
    """Time of one call, the median of three rounds."""
    jax.block_until_ready(function())
    rounds = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(calls):
            last = function()
        jax.block_until_ready(last)
        del last
        rounds.append((time.perf_counter() - start) / calls)
    return sorted(rounds)[1]


def report(title: str, work: float, unit: str, function: Callable, *arguments, calls: int = 10) -> float:
    """Prints and returns the speed for `work` in TFLOP or GB."""
    rate = 0.0
    try:
        rate = work / seconds(partial(jax.jit(function), *arguments), calls)
        speed = f"{rate:8.1f} {unit}"
    except Exception as error:  # one failure must not end the comparison
        speed = f"failed: {str(error).splitlines()[0][:150]}"
    print(f"{title:<64}{speed}", flush=True)
    return rate


def named(tiling: Any) -> str:
    return "x".join(str(int(value)) for value in astuple(tiling))


def matmuls(T: int, D: int, F: int):
    """(name, M, N, K, whether b is a weight) of a linear layer's three matmuls."""
    yield "forward", T, F, D, True
    yield "dx", T, D, F, True
    yield "dw", D, F, T, False


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def operands(M: int, N: int, K: int, square: bool):
    a, b = (jax.random.normal(jax.random.key(i), (size, K), jnp.bfloat16) for i, size in enumerate((M, N)))
    a = a * jnp.exp2(jnp.round(jax.random.normal(jax.random.key(2), (M, 1)))).astype(a.dtype)
    recipe = Blockwise()
    found = []
    for x, tensor in ((a, "input"), (b, "weight" if square else "gradient")):
        operand = recipe.quantised(x.astype(jnp.float32), tensor, None, None)
        values = jnp.pad(operand.values, ((0, 0), (0, -K % 128))).astype(E4M3)
        found.append(ScaledOperand(values, operand.scales.T))
    return found


def expected(a: ScaledOperand, b: ScaledOperand) -> jax.Array:
    """The emulated product in FP32."""
    square = b.scales.shape[1] != len(b.values)
    found = []
    for (values, scales), block in ((a, (1, 128)), (b, (128 if square else 1, 128))):
        numbers = values.astype(jnp.float32)
        found.append(BlockOperand(numbers, scales.T, None, block, block_formats.E4M3, None).numbers(jnp.bfloat16))
    return lax.dot_general(found[0], found[1], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


@jax.jit
def errors(found: jax.Array, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
    apart = found.astype(jnp.float32) - wanted
    return jnp.linalg.norm(apart) / jnp.linalg.norm(wanted), jnp.abs(apart).max() / jnp.abs(wanted).max()


def check(title: str, function: Callable, M: int, N: int, K: int, square: bool) -> None:
    try:
        given = operands(M, N, K, square)
        relative, largest = errors(jax.jit(function)(*given), jax.jit(expected)(*given))
        print(f"{title:<64}error {float(relative):.1e}, largest {float(largest):.1e}", flush=True)
    except Exception as error:
        print(f"{title:<64}failed: {str(error).splitlines()[0][:150]}", flush=True)


def quantisers(T: int, F: int, tiny: bool, warps: list[int]) -> None:
    x, gate_up = (jax.random.normal(jax.random.key(i), (T, n * F), jnp.bfloat16) for i, n in ((0, 1), (1, 2)))
    recipe = Blockwise()

    @jax.jit
    def wanted(x):
        found = []
        for v in (x, x.T):
            operand = recipe.quantised(v.astype(jnp.float32), "input", None, None)
            found.append((operand.values.astype(E4M3), operand.scales.T))
        return found

    try:
        got, want = blockwise_fp8_kernels.quantise(x, interpret=tiny), wanted(x)
        same = jax.tree.map(
            lambda a, b: float(jnp.mean(a.astype(jnp.float32) != b.astype(jnp.float32))),
            jax.tree.leaves(got),
            jax.tree.leaves(want),
        )
        print(f"quantise {T}x{F}: shares of q, scales, q_t, scales_t that differ {same}", flush=True)
    except Exception as error:
        print(f"quantise {T}x{F} failed: {str(error).splitlines()[0][:300]}", flush=True)
    size, scale = T * F / 1e9, jnp.float32(3.0)
    name = f"{T}x{F}"
    report(
        f"one scale: cast_transpose {name}",
        4 * size,
        "GB/s",
        partial(fp8_kernels.cast_transpose, dtype=E4M3, interpret=tiny),
        x,
        scale,
    )
    report(f"one scale: amax {name}", 2 * size, "GB/s", fp8_reference.amax, x)
    for n in warps:
        how = {"warps": n, "interpret": tiny}
        report(f"quantise {name} warps {n}", 4 * size, "GB/s", partial(blockwise_fp8_kernels.quantise, **how), x)
        for which in ("input", "gradient"):
            quantise = partial(blockwise_fp8_kernels.quantise_weight, which=which, **how)
            report(f"weight for {which} {name} warps {n}", 3 * size, "GB/s", quantise, x)
        report(
            f"swiglu {name} warps {n}", 6 * size, "GB/s", partial(blockwise_fp8_kernels.gated, "swiglu", **how), gate_up
        )
        report(
            f"swiglu backward {name} warps {n}",
            10 * size,
            "GB/s",
            partial(blockwise_fp8_kernels.gated_backward, "swiglu", **how),
            gate_up,
            x,
        )


def checks(blockwise: Mapping[str, Callable], tiny: bool) -> None:
    """Each kernel against sums in FP32."""
    shapes = (256, 512, 1024, True), (4096, 1000, 2064, False), (4096, 6144, 4096, True), (4096, 6144, 32768, False)
    for M, N, K, square in shapes:
        M, N, K = (M // 16, N // 4, K // 16) if tiny else (M, N, K)
        for name, kernel in blockwise.items():
            title = f"{M}x{N}x{K} {'squares' if square else 'rows'} {name} FP32"
            check(title, partial(kernel, dtype=jnp.float32), M, N, K, square)


def variants(blockwise: Mapping[str, Callable], T: int, D: int, F: int, calls: int) -> dict[bool, Callable]:
    """The speed of each kernel in the forward product and the weight's gradient; the fastest by form of the scales."""
    best = {}
    for name, M, N, K, square in matmuls(T, D, F):
        if name == "dx":
            continue
        given, work, rates = operands(M, N, K, square), 2e-12 * M * N * K, dict[str, float]()
        for tiling, kernel in blockwise.items():
            run = partial(kernel, dtype=BF16)
            rates[tiling] = report(f"{name} {M}x{K}x{N} {tiling}", work, "TFLOP/s", run, *given, calls=calls)
        fastest = max(rates, key=rates.__getitem__)
        best[square] = blockwise[fastest]
        print(f"fastest {'SQUARES' if square else 'ROWS'} {fastest}", flush=True)
        del given  # before those of the next product are made
    return best


def uneven(R: int, E: int) -> list[int]:
    """The sizes of E groups of R rows at most."""
    shares = np.random.default_rng(1).dirichlet(np.full(E, 8.0))
    return [int(share * R) for share in shares]


def speeds(best: Mapping[bool, Callable], T: int, D: int, F: int, calls: Sequence[int]) -> None:
    """The speed of the three products of a layer beside cuBLASLt with one scale, for each number of `calls`."""
    for name, M, N, K, square in matmuls(T, D, F):
        given, work, title = operands(M, N, K, square), 2e-12 * M * N * K, f"{name} {M}x{K}x{N}"
        ((a, _), (b, _)), one = given, jnp.float32(1)
        for many in calls:
            cublas, own = partial(fp8_kernels.matmul, dtype=BF16), partial(best[square], dtype=BF16)
            report(f"{title} cuBLASLt, one scale, {many} calls", work, "TFLOP/s", cublas, a, b, one, calls=many)
            report(f"{title} blockwise, {many} calls", work, "TFLOP/s", own, *given, calls=many)
        del given, a, b  # before those of the next product are made


def experts(R: int, D: int, N: int, sizes: Sequence[int], tiny: bool, how: dict) -> None:
    """Rows of groups: each product against emulation, then its speed, and that of the quantisers."""
    groups, keys = jnp.asarray(sizes, jnp.int32), jax.random.split(jax.random.key(0), 3)
    x, dy = (jax.random.normal(key, (R, size), BF16) for key, size in zip(keys, (D, N), strict=False))
    w = jax.random.normal(keys[2], (len(sizes), D, N), BF16) / 64
    weight, quantiser = BlockWeight(w, None, None, Blockwise(), "pallas"), {"interpret": tiny}
    emulation: GroupedImplementation = "reference" if tiny else "pallas"
    rows = partial(grouped_blockwise_kernels.quantise, group_sizes_e=groups, **quantiser)
    both, both_dy = jax.jit(rows)(x), jax.jit(rows)(dy)
    matrices = {
        which: jax.jit(partial(grouped_blockwise_kernels.quantise_weights, which=which, **quantiser))(w)
        for which in ("input", "gradient")
    }
    multiply = partial(blockwise_kernel.grouped_matmul, group_sizes_e=groups, dtype=BF16, rows=R, **how)
    gradient = partial(blockwise_kernel.grouped_weight_gradient, group_sizes_e=groups, dtype=BF16, **how)
    emulated = partial(expert_block_matmul.grouped_product, group_sizes_e=groups, max_over_devices=lambda a: a)
    cases = {
        "forward": (
            multiply,
            (both.rows, matrices["input"]),
            lambda: emulated(x, weight, which="input", implementation=emulation),
        ),
        "dx": (
            multiply,
            (both_dy.rows, matrices["gradient"]),
            lambda: emulated(dy, weight, which="gradient", implementation=emulation),
        ),
        "dw": (
            gradient,
            (both.columns, both_dy.columns),
            lambda: expert_block_matmul.grouped_weight_gradient(x, dy, weight, groups, lambda a: a, emulation).values,
        ),
    }
    for name, (kernel, given, wanted) in cases.items():
        title = f"{len(sizes)} experts, {name} {R}x{D}x{N}"
        if R <= 8192:  # emulation needs the memory of several copies
            relative, largest = errors(jax.jit(kernel)(*given), jax.jit(wanted)())
            print(f"{title:<64}error {float(relative):.1e}, largest {float(largest):.1e}", flush=True)
        report(title, 2e-12 * sum(sizes) * D * N, "TFLOP/s", kernel, *given, calls=1 if tiny else 10)
    report(f"quantise rows {R}x{D}", 4e-9 * R * D, "GB/s", rows, x)
    weights, F = jnp.abs(x[:, 0]).astype(jnp.float32), N // 2
    gated = partial(grouped_blockwise_kernels.gated, "swiglu", weights_r=weights, group_sizes_e=groups, **quantiser)
    report(f"swiglu {R}x{F}", 6e-9 * R * F, "GB/s", lambda up: gated(gate_up_rf=up), dy)
    backward = partial(grouped_blockwise_kernels.gated_backward, "swiglu", **quantiser)
    report(
        f"swiglu backward {R}x{F}", 10e-9 * R * F, "GB/s", lambda up, d: backward(up, weights, d, groups), dy, dy[:, :F]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--tilings", nargs="+", default=[""])
    args = parser.parse_args()
    tiny, parts = args.tiny, args.part or PARTS
    how: dict = {"blocks": 2, "interpret": plgpu.InterpretGPUParams(detect_races=False)} if tiny else {}
    tilings = [MatmulTiling(*map(int, text.split("x"))) if text else blockwise_kernel.TILING for text in args.tilings]
    if tiny:
        tilings = [MatmulTiling(64, 128, 2, 2)]
    layers, calls = TINY if tiny else LAYERS, 1 if tiny else 10
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {time.strftime('%Y-%m-%d')}", flush=True)
    blockwise = {named(t): partial(blockwise_kernel.matmul, tiling=t, **how) for t in tilings}
    if "check" in parts:
        checks(blockwise, tiny)
    if "quantise" in parts:
        for T, F in ((256, 384),) if tiny else ((32768, 4096), (32768, 14336)):
            quantisers(T, F, tiny, [4] if tiny else [4, 8, 16])
    best = {square: next(iter(blockwise.values())) for square in (True, False)}
    if "variants" in parts:
        best |= variants(blockwise, *layers[0], calls)
    if "experts" in parts and tiny:
        experts(300, 128, 256, (70, 0, 3, 207), tiny, how | {"tiling": tilings[0]})
    elif "experts" in parts:
        for R, D, N, E in EXPERTS:
            experts(R, D, N, uneven(R, E), tiny, how)
    for layer in layers if "speed" in parts else []:
        speeds(best, *layer, (calls, 100) if layer == layers[0] and not tiny else (calls,))


if __name__ == "__main__":
    main()
