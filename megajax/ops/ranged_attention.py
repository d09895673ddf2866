"""Attention with a range of visible keys per query, forward and backward, in Pallas kernels for Hopper GPUs.

A range is [first, end); both bounds never decrease along the queries. Causal attention, packed documents, sliding
windows and prefixes are such ranges, and so are their parts when the keys are distributed over devices. Tiles of keys
that no query of a tile sees are not loaded, and only tiles that contain a bound are masked.

The kernels are FlashAttention (Dao et al. 2022; Shah et al. 2024 for Hopper): one warpgroup loads tiles while the
others compute. There are three deterministic kernels: for the output, for dq, and for dk and dv. A warpgroup has 64
rows, because Hopper multiplies 64 rows at a time: rows of queries, in the last kernel of keys.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from megajax.ops import ranged_attention_kernels as kernels
from megajax.ops.query_ranges import Options, Ranges, of_queries, padded_ranges, seen_by
from megajax.ops.ranged_attention_gradients import KeyValueGradient, QueryGradient

WIDTHS = ((64, 64), (128, 128), (192, 128))  # of keys and values


@partial(jax.jit, static_argnames="options")  # it compiles the kernels of equal layers once
def attend(q: jax.Array, k: jax.Array, v: jax.Array, ranges: Ranges, options: Options) -> tuple[jax.Array, jax.Array]:
    """softmax(softcap(scale · q·k)) v over the keys [first, end) → (out in q's dtype, log-sum-exp `[B, N, Sq]` FP32).

    q is `[B, Sq, N, H]`, k `[B, Sk, K, H]` and v `[B, Sk, K, W]` in BF16 or FP16; query head n reads KV head
    n // (N/K). (H, W) that are not in WIDTHS are padded to the next ones that are. `ranges` are `first` and `end`,
    `[B, Sq]` int32, and never decrease along Sq; they are clipped to 0…Sk. A query without keys has an output of 0 and
    a log-sum-exp of -inf.
    """
    _check(q, k, v)
    width, (q, k, v) = v.shape[-1], _widened(q, k, v)
    B, Sq, N, H = q.shape
    W = v.shape[-1]
    kernel = kernels.Forward(options, N // k.shape[2], (H, W))
    q, first, end = _pad_queries(kernels.BLOCK_ROWS, q, k, ranges)
    k, v = (_pad(a, kernel.columns) for a in (k, v))
    shape = (B, q.shape[1], N, W)
    out_shape = [jax.ShapeDtypeStruct(shape, q.dtype), jax.ShapeDtypeStruct((B, N, q.shape[1]), jnp.float32)]
    out, lse = _launch(kernel, "ranged_attention", (q, k, v, first, end), out_shape, q.shape[1])
    return out[:, :Sq, :, :width], lse[:, :, :Sq]


@partial(jax.jit, static_argnames="options")
def attend_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    ranges: Ranges,
    whole: tuple[jax.Array, jax.Array],
    dout: jax.Array,
    options: Options,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients (dq, dk, dv) of `attend`, each in its input's dtype; `whole` is what it returned.

    If k and v are a part of the keys, `whole` is that of all parts, and dq is this part's share.
    """
    delta, log2_sum = of_queries(whole, dout)
    widths, (q, k, v) = (q.shape[-1], v.shape[-1]), _widened(q, k, v)
    dout = _pad(dout, v.shape[-1], 3)
    (_, Sq, N, H), (_, Sk, K, W) = q.shape, v.shape
    dout = dout.astype(q.dtype)

    kernel, block = QueryGradient(options, N // K, (H, W)), kernels.BLOCK_ROWS
    rows = _pad_queries(block, q, k, ranges)
    arrays = (rows[0], _pad(k, kernel.columns), _pad(v, kernel.columns), *rows[1:], _pad(dout, block))
    arrays += (_pad(log2_sum, block, 2), _pad(delta, block, 2))
    [dq] = _launch(kernel, "ranged_attention_dq", arrays, [rows[0]], rows[0].shape[1])

    kernel = KeyValueGradient(options, N // K, (H, W))
    block = kernel.columns
    rows = _pad_queries(block, q, k, ranges)
    keys = tuple(_pad(a, kernels.BLOCK_ROWS) for a in (k, v))
    arrays = (rows[0], *keys, *rows[1:], seen_by(*rows[1:], keys[0].shape[1], kernels.ROWS), _pad(dout, block))
    arrays += (_pad(log2_sum, block, 2), _pad(delta, block, 2))
    dk, dv = _launch(kernel, "ranged_attention_dkv", arrays, keys, keys[0].shape[1])
    return dq[:, :Sq, :, : widths[0]], dk[:, :Sk, :, : widths[0]], dv[:, :Sk, :, : widths[1]]


def padded_widths(keys: int, values: int) -> tuple[int, int] | None:
    """The widths of WIDTHS that heads of these widths are padded to; None if there are none so wide."""
    return next((widths for widths in WIDTHS if keys <= widths[0] and values <= widths[1]), None)


def _check(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    if q.dtype not in (jnp.bfloat16, jnp.float16) or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}: make all bfloat16 or all float16.")
    if padded_widths(q.shape[-1], v.shape[-1]) is None:
        raise ValueError(f"Keys are {q.shape[-1]} wide and values {v.shape[-1]}: this kernel has up to {WIDTHS[-1]}.")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{k.shape[2]} KV heads do not divide {q.shape[2]} query heads.")


def _widened(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values with zeros up to the widths of a kernel: the scores are the same."""
    widths = padded_widths(q.shape[-1], v.shape[-1])
    assert widths is not None
    return _pad(q, widths[0], 3), _pad(k, widths[0], 3), _pad(v, widths[1], 3)


def _pad(a: jax.Array, multiple: int, axis: int = 1) -> jax.Array:
    """Appends zeros along an axis up to a multiple."""
    missing = -a.shape[axis] % multiple
    return jnp.pad(a, [(0, missing if i == axis else 0) for i in range(a.ndim)]) if missing else a


def _pad_queries(multiple: int, q, k, ranges: Ranges) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(q, first, end), padded to a multiple of queries with queries that see no key; ranges are clipped to the keys."""
    return _pad(q, multiple), *padded_ranges(multiple, ranges, q.shape[1], k.shape[1])


def _launch(kernel: Any, name: str, arrays: tuple, outputs: Sequence[Any], length: int) -> list[jax.Array]:
    """The kernel's outputs, with one block per tile of `length`, sequence and head; `arrays` starts with q and k."""
    q, k = arrays[:2]
    grid = kernel.grid(length, q.shape[0], k.shape[2])
    return plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct(o.shape, o.dtype) for o in outputs],
        scratch_types=kernel.scratch(q.dtype),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=kernels.WARPGROUPS + 1,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams() if kernel.options.interpret else None,
    )(*arrays)
