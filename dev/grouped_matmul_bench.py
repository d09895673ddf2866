"""Speed and accuracy of the kernels of experts: grouped matmuls in BF16 and FP8, quantisation to FP8, the whole MLP.

    python dev/grouped_matmul_bench.py               # on a Hopper GPU
    python dev/grouped_matmul_bench.py --tiny        # on any machine: runs small shapes, interpreted
    python dev/grouped_matmul_bench.py --compile     # on any machine: only compiles for an H200

Each line has one operation with one tiling. Matmuls: TFLOP/s and ‖found - expected‖ / ‖expected‖, where expected is
computed in float32, group by group, from the same operands; all three in one program with the first tiling only.
Quantisation: GB/s read and written, and the share of FP8 numbers that differ from the reference, or the amax's error.
MLP: TFLOP/s of forward and backward pass. Only rows of groups count as work.

Tilings are ROWSxCOLSxSTAGESxSLOTSxPANEL of `grouped_matmul_kernel.MatmulTiling`, and TOKENSxFEATURESxWARPS of
`fp8_kernels.CastTiling`. `--only` is a regular expression for titles, such as "FP8 matmul.*32768" or "quantisation".
"""

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
if "--compile" in sys.argv:
    os.environ["JAX_PLATFORMS"] = "cpu"  # for computations here; the compiler is the GPU's

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from megajax.ops import (
    ExpertKernels,
    ExpertMatrices,
    ExpertMlp,
    fp8_kernels,
    grouped_fp8_kernels,
    grouped_fp8_reference,
    grouped_matmul_triton,
)
from megajax.ops import grouped_matmul_kernel as kernel
from megajax.ops.expert_mlp import Route, expert_mlp
from megajax.ops.fp8 import E4M3, E5M2, Fp8Weight
from megajax.ops.grouped_rows import STEP
from megajax.tools.plan.compile import described_devices, no_gpu_needed

SCALE = 0.5  # of whatever is scaled

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """x [T, D], w [E, D, F]; in the MLP F is the width after the activation."""

    E: int
    T: int
    D: int
    F: int
    unused: int = 0  # rows after the last group

    @property
    def flops(self) -> float:
        return 2.0 * (self.T - self.unused) * self.D * self.F

    def __str__(self) -> str:
        return f"{self.E} experts {self.T}x{self.D}x{self.F}"


MATMULS = (
    Shape(8, 16384, 4096, 14336),
    Shape(64, 32768, 2048, 1024, unused=333),
    Shape(128, 65536, 2048, 768),
    Shape(8, 32768, 4096, 28672),
    Shape(8, 32768, 14336, 4096),
    Shape(128, 131072, 2048, 1536),
    Shape(128, 131072, 768, 2048),
    Shape(32, 65536, 2880, 5760),
)
LAYERS = (Shape(8, 32768, 4096, 14336), Shape(128, 131072, 2048, 768))
TINY = (Shape(4, 152, 128, 256, unused=20),)


@dataclass(frozen=True)
class Section:
    """Operations on the same arguments."""

    title: str
    unit: str
    make: Callable[[], Arguments]  # the arguments
    lines: dict[tuple[str, str], Callable[..., Any]]  # (tiling, name) → an operation on the arguments
    work: Callable[[str], float]  # of an operation, in TFLOP or GB
    judge: Callable[[Arguments], Callable[[str, Any], str]]  # arguments → the text for an operation's result


def group_sizes(shape: Shape) -> np.ndarray:
    """Uneven sizes of groups; the second is 0."""
    shares = np.random.default_rng(0).gamma(4.0, size=shape.E)
    shares[1] = 0.0
    bounds = np.floor(np.cumsum(shares) / shares.sum() * (shape.T - shape.unused)).astype(np.int32)
    bounds[-1] = shape.T - shape.unused
    return np.diff(bounds, prepend=0)


def normal(**shapes: tuple[int, ...]) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {n: jax.random.normal(k, s, jnp.bfloat16) for k, (n, s) in zip(keys, shapes.items(), strict=True)}


def named(tiling: Any) -> str:
    return "x".join(map(str, astuple(tiling)))


# Matmuls


def operands(shape: Shape, in_fp8: bool) -> Arguments:
    """In FP8 x and w are E4M3 and dy is E5M2, with their transposes."""
    arrays = normal(x=(shape.T, shape.D), w=(shape.E, shape.D, shape.F), dy=(shape.T, shape.F))
    sizes = jnp.asarray(group_sizes(shape))
    if not in_fp8:
        return arrays | {"sizes": sizes}
    quantise, one = grouped_fp8_reference.cast_transpose, jnp.float32(1)
    x, x_t, _ = quantise(arrays["x"], sizes, one, E4M3)
    dy, dy_t, _ = quantise(arrays["dy"], sizes, one, E5M2)
    w = arrays["w"].astype(E4M3)
    return {"x": x, "x_t": x_t, "dy": dy, "dy_t": dy_t, "w": w, "w_t": jnp.swapaxes(w, 1, 2), "sizes": sizes}


@partial(jax.jit, static_argnums=0)
def products(largest: int, x: jax.Array, w: jax.Array, dy: jax.Array, sizes: jax.Array) -> dict[str, jax.Array]:
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
def relative_error(found: jax.Array, wanted: jax.Array, factor: float) -> jax.Array:
    wanted = wanted * factor
    return jnp.linalg.norm((found.astype(jnp.float32) - wanted).ravel()) / jnp.linalg.norm(wanted.ravel())


def multiplications(in_fp8: bool, tiling: kernel.MatmulTiling, tiny: bool) -> dict[str, Callable[..., jax.Array]]:
    how: Any = {
        "blocks": 2 if tiny else getattr(jax.devices()[0], "core_count", kernel.MULTIPROCESSORS),
        "tiling": tiling,
        "interpret": plgpu.InterpretGPUParams() if tiny else None,
    }
    if not in_fp8:
        return {
            "forward": lambda x, w, sizes, **_: kernel.matmul(x, w, sizes, **how),
            "dx": lambda dy, w, sizes, **_: kernel.matmul(dy, w, sizes, transpose_w=True, **how),
            "dw": lambda x, dy, sizes, **_: kernel.weight_gradient(x, dy, sizes, jnp.bfloat16, **how),
        }
    scale, dtype = jnp.float32(SCALE), jnp.bfloat16
    return {
        "forward": lambda x, w_t, sizes, **_: kernel.fp8_matmul(x, w_t, scale, sizes, dtype, **how),
        "dx": lambda dy, w, sizes, **_: kernel.fp8_matmul(dy, w, scale, sizes, dtype, **how),
        "dw": lambda x_t, dy_t, sizes, **_: kernel.fp8_weight_gradient(x_t, dy_t, scale, sizes, dtype, **how),
    }


def any_gpu(tiny: bool) -> dict[str, Callable[..., jax.Array]]:
    """The BF16 products by the kernels for any GPU."""
    how: Any = {"tiling": grouped_matmul_triton.GroupedTiling(64, 64, 64, 4, 1), "interpret": True} if tiny else {}
    return {
        "forward": lambda x, w, sizes, **_: grouped_matmul_triton.matmul(x, w, sizes, **how),
        "dx": lambda dy, w, sizes, **_: grouped_matmul_triton.matmul(dy, w, sizes, transpose_w=True, **how),
        "dw": lambda x, dy, sizes, **_: grouped_matmul_triton.weight_gradient(x, dy, sizes, jnp.bfloat16, **how),
    }


def judge_products(shape: Shape, factor: float, arguments: Arguments) -> Callable[[str, Any], str]:
    wanted = products(int(group_sizes(shape).max()), *(arguments[name] for name in ("x", "w", "dy", "sizes")))

    def say(op: str, found: Any) -> str:
        return "" if op == "as one" else f"error {float(relative_error(found, wanted[op], factor)):.1e}"

    return say


def matmul_sections(tilings: list[kernel.MatmulTiling], tiny: bool) -> Iterator[Section]:
    def all_at_once(functions, **arguments):
        return [function(**arguments) for function in functions]

    for shape in TINY if tiny else MATMULS:
        for name, in_fp8, factor in (("BF16", False, 1.0), ("FP8", True, SCALE)):
            lines: dict[tuple[str, str], Callable[..., Any]] = {}
            for tiling in tilings:
                functions = multiplications(in_fp8, tiling, tiny)
                lines |= {(named(tiling), op): function for op, function in functions.items()}
            if not in_fp8:
                lines |= {("any GPU", op): function for op, function in any_gpu(tiny).items()}
            first = multiplications(in_fp8, tilings[0], tiny).values()
            lines[named(tilings[0]), "as one"] = partial(all_at_once, list(first))
            yield Section(
                f"{name} matmul, {shape}",
                "TFLOP/s",
                partial(operands, shape, in_fp8),
                lines,
                lambda op, shape=shape: (3 if op == "as one" else 1) * shape.flops / 1e12,
                partial(judge_products, shape, factor),
            )


# Quantisation


def activations(shape: Shape) -> Arguments:
    arrays = normal(x=(shape.T, shape.D), up=(shape.T, 2 * shape.F), dact=(shape.T, shape.F), weights=(shape.T,))
    return arrays | {"weights": arrays["weights"].astype(jnp.float32), "sizes": jnp.asarray(group_sizes(shape))}


def quantisers(module: Any, **how: Any) -> dict[str, Callable[..., Any]]:
    scale, kind = jnp.float32(SCALE), "swiglu"

    def gradient(up, weights, dact, sizes, **_):
        return module.gated_backward_cast_transpose(kind, up, weights, dact, sizes, scale, E5M2, **how)

    return {
        "cast": lambda x, sizes, **_: module.cast_transpose(x, sizes, scale, E4M3, **how),
        "gated": lambda up, weights, sizes, **_: module.gated_cast_transpose(
            kind, up, weights, sizes, scale, E4M3, **how
        ),
        "gradient": gradient,
        "gated amax": lambda up, weights, sizes, **_: module.gated_amax(kind, up, weights, sizes, **how),
        "gradient amax": lambda up, weights, dact, sizes, **_: module.gated_backward_amax(
            kind, up, weights, dact, sizes, **how
        ),
    }


@jax.jit
def differences(found: Any, wanted: Any, sizes: jax.Array) -> jax.Array:
    """The share of FP8 numbers that differ, in q and in q_t, and the relative error of the amax and of dweights."""
    if not isinstance(found, tuple):
        return jnp.abs(found / wanted - 1)[None]
    (q, q_t, amax, *dweights), (q_wanted, q_t_wanted, amax_wanted, *dweights_wanted) = found, wanted
    rows, columns = sizes.sum(), (-(-sizes // STEP) * STEP).sum()

    def share(a, b, used):
        differ = lax.bitcast_convert_type(a, jnp.uint8)[: b.shape[0], : b.shape[1]] != lax.bitcast_convert_type(
            b, jnp.uint8
        )
        return jnp.sum(differ & used, dtype=jnp.float32) / jnp.sum(jnp.broadcast_to(used, b.shape), dtype=jnp.float32)

    used_rows, used_columns = jnp.arange(q_wanted.shape[0])[:, None] < rows, jnp.arange(q_t_wanted.shape[1]) < columns
    errors = [share(q, q_wanted, used_rows), share(q_t, q_t_wanted, used_columns), jnp.abs(amax / amax_wanted - 1)]
    return jnp.stack(errors + [relative_error(a, b, 1.0) for a, b in zip(dweights, dweights_wanted, strict=True)])


def judge_quantised(arguments: Arguments) -> Callable[[str, Any], str]:
    def say(op: str, found: Any) -> str:
        wanted = jax.jit(quantisers(grouped_fp8_reference)[op])(**arguments)
        return "differ " + " ".join(f"{x:.1e}" for x in differences(found, wanted, arguments["sizes"]))

    return say


def quantisation_sections(tilings: list[fp8_kernels.CastTiling], tiny: bool) -> Iterator[Section]:
    for shape in TINY if tiny else LAYERS:
        lines: dict[tuple[str, str], Callable[..., Any]] = {}
        for tiling in tilings:
            functions = quantisers(grouped_fp8_kernels, tiling=tiling, interpret=tiny)
            lines |= {(named(tiling), op): function for op, function in functions.items()}
        bytes_of_a_row = {
            "cast": 4 * shape.D,
            "gated": 6 * shape.F,
            "gradient": 10 * shape.F,
            "gated amax": 4 * shape.F,
            "gradient amax": 6 * shape.F,
        }
        traffic = {op: (shape.T - shape.unused) * size / 1e9 for op, size in bytes_of_a_row.items()}
        make = partial(activations, shape)
        yield Section(f"quantisation, {shape}", "GB/s", make, lines, traffic.__getitem__, judge_quantised)


# The MLP


def layer_arguments(shape: Shape, recipe: str) -> Arguments:
    E, T, D, F = shape.E, shape.T, shape.D, shape.F
    arrays: Arguments = dict(normal(rows=(T, D), dy=(T, D), up=(E, D, 2 * F), down=(E, F, D), weights=(T,)))
    arrays |= {"weights": arrays["weights"].astype(jnp.float32), "group_sizes": jnp.asarray(group_sizes(shape))}
    if recipe != "BF16":
        given = jnp.float32(SCALE) if recipe == "FP8 delayed" else None
        for name in ("up", "down"):
            w = arrays[name].astype(E4M3)
            arrays[name] = Fp8Weight(w, jnp.swapaxes(w, 1, 2), jnp.float32(1), given, given, None, None, E5M2)
    return arrays


def layer(tiny: bool, rows, weights, up, down, group_sizes, dy):
    """The result and the gradients of everything."""
    kernels = ExpertKernels("reference", "reference") if tiny else ExpertKernels("pallas", "pallas")
    mlp = ExpertMlp("swiglu", kernels)
    if isinstance(up, Fp8Weight):
        up, down = (
            replace(w, gradient=jnp.zeros(w.values.shape, dy.dtype), amax=jnp.zeros(2, jnp.float32)) for w in (up, down)
        )
    matrices = ExpertMatrices(up, down)
    y, pull = jax.vjp(partial(expert_mlp, mlp, Route(group_sizes)), rows, weights, matrices)
    drows, dweights, (*gradients, _) = pull(dy)
    gradients = [(w.gradient, w.amax) if isinstance(w, Fp8Weight) else w for w in gradients]
    return y, drows, dweights, gradients


def layer_sections(tiny: bool) -> Iterator[Section]:
    for shape in TINY if tiny else LAYERS:
        for recipe in ("BF16", "FP8 delayed", "FP8 current"):
            yield Section(
                f"{recipe} MLP, {shape}",
                "TFLOP/s",
                partial(layer_arguments, shape, recipe),
                {("", "forward and backward"): partial(layer, tiny)},
                lambda op, shape=shape: 9 * shape.flops / 1e12,
                lambda arguments: lambda op, found: "",
            )


# Running


def seconds(function: Callable[[], Any], calls: int) -> float:
    """Time of one call, the median of three rounds."""
    jax.block_until_ready(function())
    rounds = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready([function() for _ in range(calls)][-1])
        rounds.append((time.perf_counter() - start) / calls)
    return sorted(rounds)[1]


def measure(section: Section, tiny: bool) -> None:
    arguments = jax.jit(section.make)()
    say = section.judge(arguments)
    for (tiling, op), operation in section.lines.items():
        run = partial(jax.jit(operation), **arguments)
        try:
            verdict = say(op, run())
            speed = f"{section.work(op) / seconds(run, 1 if tiny else 10):7.1f} {section.unit}  {verdict}"
        except Exception as error:  # a tiling that does not fit must not end the comparison
            speed = f"failed: {str(error).splitlines()[0]}"
        print(f"{section.title:<44} {tiling:<16} {op:<14} {speed}", flush=True)


def lowered_for_h200(section: Section) -> Iterator[tuple[str, str, jax.stages.Lowered]]:
    """Each tiling and operation of a section, lowered for an H200; to be used inside `no_gpu_needed`."""
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh, whole = Mesh(np.array(described_devices(1)), ("data",)), PartitionSpec()
    with_sharding = partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, whole))
    shapes = jax.tree.map(lambda a: with_sharding(a.shape, a.dtype), jax.eval_shape(section.make))
    for (tiling, op), operation in section.lines.items():
        local = jax.shard_map(
            lambda arguments, f=operation: f(**arguments),
            mesh=mesh,
            in_specs=whole,
            out_specs=whole,
            check_vma=False,
        )
        yield tiling, op, jax.jit(local).lower(shapes)


def compile_for_h200(section: Section) -> None:
    with no_gpu_needed():
        for tiling, op, lowered in lowered_for_h200(section):
            lowered.compile()
            print(f"{section.title:<44} {tiling:<16} {op:<14} compiled", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--tilings", nargs="+", default=[])
    parser.add_argument("--quantise-tilings", nargs="+", default=[])
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    tilings = [kernel.MatmulTiling(*map(int, text.split("x"))) for text in args.tilings]
    tilings = tilings or [kernel.MatmulTiling(64, 64, stages=2) if args.tiny else kernel.MatmulTiling()]
    quantise_tilings = [fp8_kernels.CastTiling(*map(int, text.split("x"))) for text in args.quantise_tilings]
    quantise_tilings = quantise_tilings or [fp8_kernels.CastTiling()]
    sections = [
        *matmul_sections(tilings, args.tiny),
        *quantisation_sections(quantise_tilings, args.tiny),
        *layer_sections(args.tiny),
    ]
    if not args.compile:
        print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {time.strftime('%Y-%m-%d')}", flush=True)
    for section in sections:
        if re.search(args.only, section.title):
            compile_for_h200(section) if args.compile else measure(section, args.tiny)


if __name__ == "__main__":
    main()
