"""Attention to ranges of keys, by the kernels for Hopper and for any GPU, on one: `python dev/attention_bench.py`.

Prints the kernels' errors against FP32 arithmetic, then a table that compares them with cuDNN. TFLOP/s count the five
matmuls of a visible pair of positions: 2 · (H + W) · N forward and 2 · (3 H + 2 W) · N backward, for keys of width H
and values of width W. Without a GPU the kernels are interpreted, on tiny
shapes: then the figures are meaningless.
"""

import argparse
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megajax.ops import attention, ranged_attention, ranged_attention_triton
from megajax.ops.query_ranges import Options
from megajax.ops.ranged_attention import WIDTHS

KERNELS = {"Hopper's": ranged_attention, "any GPU's": ranged_attention_triton}
TOLERANCE = 1e-2
SECONDS_OF_A_MEASUREMENT = 0.15
HEAD = "| shape | sees | kernel | forward ms | forward+backward ms | forward TFLOP/s | forward+backward TFLOP/s |"


@dataclass(frozen=True)
class Shape:
    B: int
    S: int
    N: int
    K: int
    H: int  # of keys
    W: int  # of values

    def __str__(self) -> str:
        return f"B{self.B} S{self.S} N{self.N} K{self.K} {self.widths}"

    @property
    def widths(self) -> str:
        return f"H{self.H}" if self.H == self.W else f"H{self.H}/{self.W}"


TINY_TABLE = [Shape(1, 256, 2, 1, 64, 64)]
TABLE = [Shape(4, 4096, 32, 8, 64, 64)] + [Shape(B, S, 32, 8, 128, 128) for B, S in ((4, 4096), (2, 8192), (1, 32768))]
TABLE += [Shape(1, 131072, 8, 2, 128, 128), Shape(4, 4096, 16, 16, 192, 128), Shape(2, 4096, 128, 128, 192, 128)]
TABLE += [Shape(1, 32768, 16, 16, 192, 128)]
KINDS = {4096: ["document", "16 documents"], 32768: ["document", "64 documents", "window 4096"]}  # by length


@functools.cache
def on_cpu() -> bool:
    """Whether kernels are interpreted, on tiny shapes. Starts jax."""
    return jax.default_backend() == "cpu"


def tensors(shape: Shape) -> list[jax.Array]:
    """q, k, v and the output's gradient."""
    B, S, N, K, H, W = shape.B, shape.S, shape.N, shape.K, shape.H, shape.W
    shapes = (B, S, N, H), (B, S, K, H), (B, S, K, W), (B, S, N, W)
    return [jax.random.normal(jax.random.key(i), s, jnp.bfloat16) for i, s in enumerate(shapes)]


@functools.cache
def jitted(name: str, H: int, softcap: float | None = None) -> tuple[Callable, ...]:
    """attend and attend_backward."""
    options, module = Options(H**-0.5, softcap, on_cpu()), KERNELS[name]
    return tuple(jax.jit(functools.partial(run, options=options)) for run in (module.attend, module.attend_backward))


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
    return jnp.asarray([first] * B, jnp.int32), jnp.asarray([end] * B, jnp.int32)


@functools.partial(jax.jit, static_argnames=("scale", "softcap"))
def reference(q, k, v, seen, dout, scale: float, softcap: float | None):
    """(out, lse, dq, dk, dv) in FP32, scores of all pairs at once."""
    first, end = seen

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
    """‖found - expected‖ / ‖expected‖ of the finite numbers; infinite if `found` has other non-finite numbers."""
    found, expected = (np.asarray(a, np.float64) for a in (found, expected))
    finite = np.isfinite(expected)
    if (np.isfinite(found) != finite).any():
        return np.inf
    return float(np.linalg.norm(found[finite] - expected[finite]) / max(np.linalg.norm(expected[finite]), 1e-30))


def check(label: str, shape: Shape, kind: str, softcap: float | None = None, parts: int = 1) -> None:
    """Prints errors; several parts divide the keys, and each part's gradients use the output of the whole."""
    q, k, v, dout = arrays = tensors(shape)
    seen = as_arrays(*ranges(kind, shape.S), shape.B)
    expected = reference(q, k, v, seen, dout, shape.H**-0.5, softcap)
    for name in KERNELS:
        check_kernel(f"{label} {name}", jitted(name, shape.H, softcap), arrays, seen, expected, parts)


def check_kernel(label: str, kernel: tuple[Callable, ...], arrays: list, seen: Any, expected: Any, parts: int) -> None:
    (forward, backward), (q, k, v, dout), (first, end) = kernel, arrays, seen
    out, lse = forward(q, k, v, seen)
    shares, width = [], k.shape[1] // parts
    for start in range(0, k.shape[1], width):
        part = slice(start, start + width)
        shares.append(backward(q, k[:, part], v[:, part], (first - start, end - start), (out, lse), dout))
    dq = sum(share[0].astype(jnp.float32) for share in shares)
    dk, dv = (jnp.concatenate([share[i] for share in shares], axis=1) for i in (1, 2))
    names, found = ("out", "lse", "dq", "dk", "dv"), (out, lse, dq, dk, dv)
    errors = {name: relative_error(*pair) for name, *pair in zip(names, found, expected, strict=True)}
    verdict = "ok" if max(errors.values()) < TOLERANCE else "WRONG"
    print(f"  {label:<46}", *(f"{name} {e:.1e} " for name, e in errors.items()), verdict, flush=True)


def check_all() -> None:
    print(f"Relative errors, below {TOLERANCE} each:")
    S = 250 if on_cpu() else 1000
    for H, W in ((64, 64),) if on_cpu() else WIDTHS:
        shape = Shape(1 if on_cpu() else 2, S, 4, 2, H, W)
        for kind in ("document", "9 documents", "window 100", "prefix", "later", "nothing"):
            check(f"{kind} {shape.widths}", shape, kind)
        check(f"softcap {shape.widths}", shape, "9 documents", softcap=2.0)
        check(f"two parts {shape.widths}", shape, "document", parts=2)
    if not on_cpu():
        long = Shape(1, 8192, 4, 1, 128, 128)
        for kind in ("document", "window 1000"):
            check(f"{kind} {long}", long, kind)


def milliseconds(function: Callable[..., Any], *arguments: Any) -> float:
    """Time of one call: the best of three rounds of several calls."""
    jax.block_until_ready(function(*arguments))

    def seconds(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            result = function(*arguments)
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / calls

    calls = 1 if on_cpu() else max(1, int(SECONDS_OF_A_MEASUREMENT / 3 / seconds(1)))
    return min(seconds(calls) for _ in range(3)) * 1e3


def teraflops(shape: Shape, kind: str) -> tuple[float, float]:
    """Operations of the forward pass, and of both, in TFLOP."""
    first, end = ranges(kind, shape.S)
    pairs = shape.N * shape.B * float(np.maximum(end - first, 0).sum()) / 1e12
    forward, backward = 2 * (shape.H + shape.W), 2 * (3 * shape.H + 2 * shape.W)
    return forward * pairs, (forward + backward) * pairs


def table_rows(shape: Shape) -> None:
    q, k, v, dout = tensors(shape)

    def row(name: str, kind: str, forward_ms: float, both_ms: float) -> None:
        one, both = teraflops(shape, kind)
        rates = f"{one * 1e3 / forward_ms:6.0f} | {both * 1e3 / both_ms:6.0f}"
        print(f"| {shape} | {kind} | {name} | {forward_ms:.3f} | {both_ms:.3f} | {rates} |", flush=True)

    for kind in KINDS.get(shape.S, ["document"]):
        arrays = (q, k, v, as_arrays(*ranges(kind, shape.S), shape.B))
        for name in KERNELS:
            forward, backward = jitted(name, shape.H)
            whole = forward(*arrays)
            forward_ms = milliseconds(forward, *arrays)
            row(name, kind, forward_ms, forward_ms + milliseconds(backward, *arrays, whole, dout))
    if on_cpu():
        return

    def cudnn(q, k, v):
        return attention(q, k, v, implementation="cudnn")[0]

    both = jax.jit(lambda q, k, v, dout: jax.vjp(cudnn, q, k, v)[1](dout))
    row("cuDNN", "document", milliseconds(jax.jit(cudnn), q, k, v), milliseconds(both, q, k, v, dout))


def main() -> None:
    """Print errors and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    begin = time.perf_counter()
    print(jax.devices()[0].device_kind, "jax", jax.__version__, flush=True)
    check_all()
    print(HEAD, "|---|---|---|---|---|---|---|", sep="\n")
    for shape in TINY_TABLE if on_cpu() else TABLE:
        table_rows(shape)
    print(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
