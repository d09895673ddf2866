"""Attention to ranges of keys, on one Hopper GPU: `PYTHONPATH=. python scripts/attention_bench.py`.

First the kernels' errors against FP32 arithmetic; then the time of every tile configuration; then, with the fastest,
a table beside cuDNN. TFLOP/s count 4 · H · N for each visible pair of positions, and 2.5 times that backward. Without
a GPU the kernels are interpreted, on tiny shapes: the figures then mean nothing.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megajax.ops.ranged_attention import Tiling, attend, attend_backward
from megajax.ops.ranged_attention_kernels import Tiles

INTERPRET = jax.default_backend() == "cpu"
TOLERANCE = 1e-2
SECONDS_OF_A_MEASUREMENT = 0.0 if INTERPRET else 0.15

FORWARD = {
    "128x2": Tiles(128, 2),
    "128x2 no turns": Tiles(128, 2, take_turns=False),
    "128x2 tiles first": Tiles(128, 2, tiles_first=True),
    "64x4": Tiles(64, 4),
    "128x2 of 3": Tiles(128, 2, warpgroups=3),
    "64x3 of 3": Tiles(64, 3, warpgroups=3),
}
DQ = {
    "64x2": Tiles(64, 2),
    "64x2 no overlap": Tiles(64, 2, overlap=False),
    "64x2 tiles first": Tiles(64, 2, tiles_first=True),
    "64x3": Tiles(64, 3),
    "128x2": Tiles(128, 2),
    "64x2 of 3": Tiles(64, 2, warpgroups=3),
}
DKV = {
    "64x2": Tiles(64, 2),
    "64x2 no overlap": Tiles(64, 2, overlap=False),
    "64x2 tiles first": Tiles(64, 2, tiles_first=True),
    "64x3": Tiles(64, 3),
    "64x3 no overlap": Tiles(64, 3, overlap=False),
    "128x2": Tiles(128, 2),
}
if INTERPRET:
    FORWARD, DQ, DKV = ({name: kind[name] for name in list(kind)[:2]} for kind in (FORWARD, DQ, DKV))


@dataclass(frozen=True)
class Shape:
    B: int
    S: int
    N: int
    K: int
    H: int

    def __str__(self) -> str:
        return f"B{self.B} S{self.S} N{self.N} K{self.K} H{self.H}"


TINY = Shape(1, 256, 2, 1, 64)
TUNED = [TINY] if INTERPRET else [Shape(1, 32768, 32, 8, 128), Shape(4, 4096, 32, 8, 64)]
TABLE = [
    Shape(4, 4096, 32, 8, 64),
    Shape(4, 4096, 32, 8, 128),
    Shape(2, 8192, 32, 8, 128),
    Shape(1, 32768, 32, 8, 128),
    Shape(1, 131072, 8, 2, 128),
]
TABLE = [TINY] if INTERPRET else TABLE


BASE = Tiling()


def tensors(shape: Shape) -> list[jax.Array]:
    """q, k, v and the output's gradient."""
    keys = jax.random.split(jax.random.key(0), 4)
    heads = shape.N, shape.K, shape.K, shape.N
    return [
        jax.random.normal(key, (shape.B, shape.S, n, shape.H), jnp.bfloat16) for key, n in zip(keys, heads, strict=True)
    ]


@functools.cache
def jitted(H: int, tiling: Tiling, softcap: float | None = None) -> tuple[Callable, Callable]:
    """attend and attend_backward."""
    settings: dict[str, Any] = {"scale": H**-0.5, "softcap": softcap, "tiling": tiling, "interpret": INTERPRET}
    return jax.jit(functools.partial(attend, **settings)), jax.jit(functools.partial(attend_backward, **settings))


def ranges(kind: str, S: int) -> tuple[np.ndarray, np.ndarray]:
    """first and end, [S]."""
    at = np.arange(S)
    match kind.split():
        case ["document"]:
            return 0 * at, at + 1
        case [number, "documents"]:
            cuts = np.random.default_rng(0).choice(np.arange(1, S), int(number) - 1, replace=False)
            starts = np.concatenate([[0], np.sort(cuts)])
            return starts[np.searchsorted(starts, at, side="right") - 1], at + 1
        case ["window", width]:
            return np.maximum(at - int(width) + 1, 0), at + 1
        case ["prefix"]:
            return 0 * at, 0 * at + S // 2
        case ["later"]:  # the first third sees nothing
            return 0 * at, np.maximum(at - S // 3, 0)
        case ["nothing"]:
            return 0 * at, 0 * at
    raise ValueError(kind)


def as_arrays(first: np.ndarray, end: np.ndarray, B: int) -> tuple[jax.Array, jax.Array]:
    first, end = (np.broadcast_to(a.astype(np.int32), (B, len(a))) for a in (first, end))
    return jnp.asarray(first), jnp.asarray(end)


# Errors.


@functools.partial(jax.jit, static_argnames=("scale", "softcap"))
def reference(q, k, v, first, end, dout, scale: float, softcap: float | None):
    """(out, lse, dq, dk, dv) in FP32, scores of all pairs at once."""

    def output(q, k, v):
        k, v = (jnp.repeat(a, q.shape[2] // a.shape[2], axis=2) for a in (k, v))
        s = jnp.einsum("bqnh,bknh->bnqk", q, k) * scale
        s = s if softcap is None else softcap * jnp.tanh(s / softcap)
        keys = jnp.arange(k.shape[1])
        visible = ((keys >= first[..., None]) & (keys < end[..., None]))[:, None]
        p = jnp.where(visible, jnp.exp(s), 0)  # scores are small here
        total = p.sum(-1)
        return jnp.einsum("bnqk,bknh->bqnh", p / jnp.where(total == 0, 1, total)[..., None], v), jnp.log(total)

    q, k, v, dout = (a.astype(jnp.float32) for a in (q, k, v, dout))
    with jax.default_matmul_precision("highest"):
        out, pull, lse = jax.vjp(output, q, k, v, has_aux=True)
        return out, lse, *pull(dout)


def relative_error(found: Any, expected: Any) -> float:
    """‖found - expected‖ / ‖expected‖ of what is finite; infinite if something else is not."""
    found, expected = (np.asarray(a, np.float64) for a in (found, expected))
    finite = np.isfinite(expected)
    if (np.isfinite(found) != finite).any():
        return np.inf
    return float(np.linalg.norm(found[finite] - expected[finite]) / max(np.linalg.norm(expected[finite]), 1e-30))


def check(label: str, shape: Shape, kind: str, softcap: float | None = None, tiling: Tiling = BASE, parts=1) -> None:
    """Prints errors; with several parts, the keys are divided, and gradients are those of parts, given the whole."""
    forward, backward = jitted(shape.H, tiling, softcap)
    q, k, v, dout = tensors(shape)
    first, end = as_arrays(*ranges(kind, shape.S), shape.B)
    expected = reference(q, k, v, first, end, dout, shape.H**-0.5, softcap)
    out, lse = forward(q, k, v, first, end)
    shares, width = [], shape.S // parts
    for start in range(0, shape.S, width):
        part = slice(start, start + width)
        shares.append(backward(q, k[:, part], v[:, part], first - start, end - start, out, lse, dout))
    dq = sum(share[0].astype(jnp.float32) for share in shares)
    dk, dv = (jnp.concatenate([share[i] for share in shares], axis=1) for i in (1, 2))
    errors = [relative_error(*pair) for pair in zip((out, lse, dq, dk, dv), expected, strict=True)]
    verdict = "ok" if max(errors) < TOLERANCE else "WRONG"
    names = ("out", "lse", "dq", "dk", "dv")
    print(f"  {label:<34}", *(f"{n} {e:.1e} " for n, e in zip(names, errors, strict=True)), verdict, flush=True)


def check_all() -> None:
    print(f"Relative errors, below {TOLERANCE} each:")
    S = 250 if INTERPRET else 1000
    for H in (64,) if INTERPRET else (64, 128):
        shape = Shape(1 if INTERPRET else 2, S, 4, 2, H)
        for kind in ("document", "9 documents", "window 100", "prefix", "later", "nothing"):
            attempt(f"{kind} H{H}", check, shape, kind)
        attempt(f"softcap H{H}", check, shape, "9 documents", softcap=2.0)
        attempt(f"two parts H{H}", check, shape, "document", parts=2)
    if INTERPRET:
        return
    long = Shape(1, 8192, 4, 1, 128)
    for kind in ("document", "window 1000"):
        attempt(f"{kind} {long}", check, long, kind)
    # Every configuration once: what is fast must be right.
    for name, tiles in FORWARD.items():
        attempt(f"forward {name}", check, Shape(1, 2048, 4, 1, 128), "9 documents", tiling=Tiling(forward=tiles))
    for name in dict.fromkeys([*DQ, *DKV]):
        tiling = Tiling(dq=DQ.get(name, BASE.dq), dkv=DKV.get(name, BASE.dkv))
        attempt(f"backward {name}", check, Shape(1, 2048, 4, 1, 128), "9 documents", tiling=tiling)


def attempt(label: str, function: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """function(label, ...); None and a line of output if it fails."""
    try:
        return function(label, *arguments, **settings)
    except Exception as error:  # one bad configuration must not cost the others
        print(f"  {label:<34} FAILED {type(error).__name__}: {' '.join(str(error).split())[:160]}", flush=True)
        return None


# Times.


def milliseconds(function: Callable[..., Any], *arguments: Any) -> float:
    """Of one call, the best of three runs of several."""
    jax.block_until_ready(function(*arguments))
    start = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    calls = max(1, int(SECONDS_OF_A_MEASUREMENT / 3 / (time.perf_counter() - start)))
    runs = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(calls):
            result = function(*arguments)
        jax.block_until_ready(result)
        runs.append((time.perf_counter() - start) / calls)
    return min(runs) * 1e3


def teraflops(shape: Shape, kind: str) -> float:
    """Of the forward pass, in units of TFLOP."""
    first, end = ranges(kind, shape.S)
    return 4 * shape.H * shape.N * shape.B * float(np.maximum(end - first, 0).sum()) / 1e12


def kinds(shape: Shape) -> list[str]:
    if INTERPRET:
        return ["document", "4 documents"]
    return ["document", "64 documents", "window 4096"] if shape.S == 32768 else ["document"]


def tune(shape: Shape) -> Tiling:
    """Prints the time of every configuration, one kernel changed at a time; returns the fastest for one document."""
    q, k, v, dout = tensors(shape)
    inputs = {kind: (q, k, v, *as_arrays(*ranges(kind, shape.S), shape.B)) for kind in kinds(shape)}
    forward, _ = jitted(shape.H, BASE)
    whole = {kind: forward(*arrays) for kind, arrays in inputs.items()}

    def measure(label: str, tiling: Tiling, backward: bool) -> float:
        function, texts, times = jitted(shape.H, tiling)[backward], [], []
        for kind, arrays in inputs.items():
            times.append(milliseconds(function, *arrays, *((*whole[kind], dout) if backward else ())))
            rate = teraflops(shape, kind) * (2.5 if backward else 1) / times[-1] * 1e3
            texts.append(f"{kind}: {times[-1]:8.3f} ms {rate:4.0f}")
        print(f"  {label:<34}", "   ".join(texts), flush=True)
        return times[0]

    print(f"Tile configurations at {shape}, ms and TFLOP/s (columns x stages; backward with the other kernel's first):")
    best = BASE
    for field, options in (("forward", FORWARD), ("dq", DQ), ("dkv", DKV)):
        found = {}
        for name, tiles in options.items():
            tiling = replace(BASE, **{field: tiles})
            if ms := attempt(f"{field} {name}", measure, tiling, field != "forward"):
                found[name] = ms
        if found:
            best = replace(best, **{field: options[min(found, key=lambda name: found[name])]})
    return best


def table_rows(label: str, shape: Shape, tiling: Tiling) -> None:
    q, k, v, dout = tensors(shape)
    forward, backward = jitted(shape.H, tiling)

    def row(name: str, kind: str, forward_ms: float, both_ms: float) -> None:
        work = teraflops(shape, kind) * 1e3
        rates = f"{work / forward_ms:6.0f} | {3.5 * work / both_ms:6.0f}"
        print(f"| {label} | {kind} | {name} | {forward_ms:.3f} | {both_ms:.3f} | {rates} |", flush=True)

    for kind in kinds(shape):
        arrays = (q, k, v, *as_arrays(*ranges(kind, shape.S), shape.B))
        out, lse = forward(*arrays)
        forward_ms = milliseconds(forward, *arrays)
        row("ranged", kind, forward_ms, forward_ms + milliseconds(backward, *arrays, out, lse, dout))
    cudnn = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    both = jax.jit(lambda q, k, v, dout: jax.vjp(cudnn, q, k, v)[1](dout))
    row("cuDNN", "document", milliseconds(jax.jit(cudnn), q, k, v), milliseconds(both, q, k, v, dout))


def main() -> None:
    begin = time.perf_counter()
    print(jax.devices()[0].device_kind, "jax", jax.__version__, flush=True)
    check_all()
    best = {}
    for shape in TUNED:
        best[shape.H] = attempt(str(shape), lambda _, shape=shape: tune(shape)) or BASE
        print(f"  fastest for one document, H{shape.H}: {best[shape.H]}", flush=True)
    print("| shape | sees | kernel | forward ms | forward+backward ms | forward TFLOP/s | forward+backward TFLOP/s |")
    print("|---|---|---|---|---|---|---|")
    for shape in TABLE:
        attempt(str(shape), table_rows, shape, best[shape.H])
    print(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
