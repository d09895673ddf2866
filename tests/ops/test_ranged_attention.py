"""The kernels of attention to ranges of keys, for Hopper and for any GPU, interpreted, against NumPy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.ops import (
    AttentionSettings,
    attention,
    documents_of,
    partial_attention,
    ranged_attention,
    ranged_attention_triton,
)
from megajax.ops.query_ranges import Options
from megajax.ops.ranged_attention import attend
from megajax.ops.ranged_attention_triton import AttentionTiling, AttentionTilings

SQ, SK, H = 150, 300, 64  # neither queries nor keys are whole tiles; these are more than a ring holds
SCALE = 0.2
# Neither whole tiles here, nor the same tiles in all kernels
SMALL = AttentionTilings(AttentionTiling(32, 64, 4, 1), AttentionTiling(64, 32, 4, 1), AttentionTiling(64, 32, 4, 1))
KERNELS = {"pallas": (ranged_attention, {}), "triton": (ranged_attention_triton, {"tilings": SMALL})}
both_kernels = pytest.mark.parametrize("kernels", KERNELS)
kernel_of_any_gpu = pytest.mark.parametrize("kernels", [pytest.param("pallas", marks=pytest.mark.long), "triton"])


def ranges(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """first and end, [SQ]."""
    at = np.arange(SQ)
    match kind:
        case "documents":  # of 7, 61, 1 and 81 tokens
            return np.repeat([0, 7, 68, 69], [7, 61, 1, 81]), at + 1
        case "window":
            return at - 20, at + 1
        case "gaps":  # queries between others that see nothing, and first ones, whose range ends before the keys
            ends = np.where(at < 10, at - 39, np.where(at < 30, 25, np.where(at < 64, 64, 310)))
            # 64 queries see a whole tile of keys, and beyond all keys. The second block of queries sees nothing.
            first = np.where(at < 60, -140, np.where(at < 64, 90, np.where(at < 128, 100, 310)))
            return first, ends
        case "late":  # the first block of queries sees nothing, and the second one no first tile of keys
            return np.where(at < 128, 0, 130), np.where(at < 128, 0, at + 1)
    raise AssertionError(kind)


def expected(q, k, v, first, end, softcap, dout, whole_lse=None, whole_out=None):
    """(out, lse, dq, dk, dv) in float64; with the whole's lse and out the gradients are those of a part."""
    q, k, v, dout = (np.asarray(a, np.float64) for a in (q, k, v, dout))
    first, end = (np.expand_dims(np.atleast_2d(a), (1, 3)) for a in (first, end))
    K, G = k.shape[2], q.shape[2] // k.shape[2]
    k, v = (np.repeat(a, G, axis=2) for a in (k, v))
    s, slope = np.einsum("bqnh,bknh->bnqk", q, k) * SCALE, 1.0
    if softcap is not None:
        s, slope = softcap * np.tanh(s / softcap), 1 - np.tanh(s / softcap) ** 2
    keys = np.arange(k.shape[1])
    s = np.where((keys >= first) & (keys < end), s, -np.inf)
    with np.errstate(divide="ignore"):
        lse = np.log(np.exp(s).sum(-1))
    p = np.exp(s - np.where(np.isneginf(lse), 0, lse)[..., None])
    out = np.einsum("bnqk,bknh->bqnh", p, v)
    if whole_lse is not None:
        p, out_of_all = np.exp(s - whole_lse[..., None]), np.asarray(whole_out, np.float64)
    else:
        out_of_all = out
    delta = np.einsum("bqnh,bqnh->bnq", out_of_all, dout)
    ds = p * (np.einsum("bqnh,bknh->bnqk", dout, v) - delta[..., None]) * slope * SCALE
    dk, dv = (np.einsum("bnqk,bqnh->bknh", *pair) for pair in ((ds, q), (p, dout)))
    dk, dv = (a.reshape(*a.shape[:2], K, G, a.shape[-1]).sum(3) for a in (dk, dv))
    return out, lse, np.einsum("bnqk,bknh->bqnh", ds, k), dk, dv


def tensors(rng, N=1, K=1, SK=SK, H=H, W=H, B=1) -> list[np.ndarray]:
    """q, k, v and dout; values are W wide."""
    shapes = (SQ, N, H), (SK, K, H), (SK, K, W), (SQ, N, W)
    return [np.asarray(rng.normal(size=(B, *shape)), jnp.bfloat16) for shape in shapes]


@functools.cache
def compiled(softcap, kernels) -> tuple:
    """attend and attend_backward, interpreted; compiled once for all ranges."""
    module, how = KERNELS[kernels]
    how = how | {"options": Options(SCALE, softcap, interpret=True)}
    return tuple(jax.jit(functools.partial(f, **how)) for f in (module.attend, module.attend_backward))


def as_arrays(first, end) -> tuple[np.ndarray, np.ndarray]:
    return np.atleast_2d(first).astype(np.int32), np.atleast_2d(end).astype(np.int32)


@both_kernels
def test_queries_see_their_range_and_keys_get_its_gradients(rng, error, kernels):
    """Of two sequences; windows and documents have tests below."""
    first, end = map(np.stack, zip(*map(ranges, ("gaps", "late")), strict=True))
    check(tensors(rng, B=2), error, first, end, None, kernels)


@pytest.mark.long  # the test of sinks has Hopper's kernel
@both_kernels
def test_query_heads_share_kv_heads_and_scores_may_have_a_softcap(rng, error, kernels):
    q, k, v, dout = tensors(rng, N=4, K=2, H=40, W=24)  # padded to the widths of a kernel
    first, end = ranges("window")
    short = q[:, :90], k[:, :100], v[:, :100], dout[:, :90]  # a block, for four heads
    check(short, error, first[:90], end[:90], 1.5, kernels)


@kernel_of_any_gpu
def test_keys_may_be_wider_than_values_as_in_latent_attention(rng, error, kernels):
    first, end = (bound[60:] for bound in ranges("documents"))
    q, k, v, dout = tensors(rng, SK=SQ, H=192, W=128)
    check((q[:, 60:], k, v, dout[:, 60:]), error, first, end, None, kernels)  # one block of queries


def test_heads_may_have_sinks(rng, error, monkeypatch):
    """And share KV heads, with a soft-cap, a window in two documents, and widths that are padded to a kernel's."""
    monkeypatch.setattr(partial_attention, "Options", functools.partial(Options, interpret=True))
    q, k, v, dout = (a[:, :60] for a in tensors(rng, N=4, K=2, H=40, W=24))
    sinks = np.array([-1.0, 2.0, 0.5, 1.0])
    found = gradients(q, k, v, sinks, dout, "pallas")
    assert [a.dtype for a in found] == [jnp.bfloat16] * 4 + [jnp.float32]
    with jax.enable_x64(True):
        right = gradients(*(np.asarray(a, jnp.float64) for a in (q, k, v, sinks, dout)), "reference")
    for one, other in zip(found, right, strict=True):
        assert error(one, other) < 1e-2


DOCUMENTS = np.repeat([0, 1], [35, 25])[None]


@functools.partial(jax.jit, static_argnames="implementation")
def gradients(q, k, v, sinks, dout, implementation) -> tuple[jax.Array, ...]:
    """The output and the gradients of q, k, v and sinks."""

    def attended(q, k, v, sinks):
        settings, documents = AttentionSettings(21, 1.5, SCALE, sinks), documents_of(jnp.asarray(DOCUMENTS))
        return attention(q, k, v, settings, implementation=implementation, documents=documents)[0]

    out, pull = jax.vjp(attended, q, k, v, sinks)
    return out, *pull(dout)


def check(tensors, error, first, end, softcap, kernels) -> None:
    q, k, v, dout = tensors
    forward, backward = compiled(softcap, kernels)
    out, lse = whole = jax.device_get(forward(q, k, v, as_arrays(first, end)))
    gradients = jax.device_get(backward(q, k, v, as_arrays(first, end), whole, dout))
    assert out.dtype == q.dtype and lse.dtype == jnp.float32 and lse.shape == (len(q), *q.shape[2:0:-1])
    expected_out, expected_lse, *expected_gradients = expected(q, k, v, first, end, softcap, dout)
    seen = np.isfinite(expected_lse)
    np.testing.assert_array_equal(np.isneginf(lse), ~seen)
    np.testing.assert_allclose(lse[seen], expected_lse[seen], atol=1e-4)
    for found, right in zip((out, *gradients), (expected_out, *expected_gradients), strict=True):
        if right.any():
            assert error(found, right) < 1e-2
        else:
            assert not found.any()


@kernel_of_any_gpu
def test_a_part_of_the_keys_has_its_share_of_the_gradients_of_all(rng, error, kernels):
    """Gradients of parts add up, as sums over keys do. Some ranges reach over the part's keys on both sides."""
    q, k, v, dout = tensors(rng, SK=2 * SK, B=2)
    first, end = np.arange(SQ), np.arange(SQ) + 350
    at, part = 100, slice(100, 100 + SK)
    assert ((first < at) & (end > at + SK)).any()
    _, backward = compiled(None, kernels)
    out, lse, *_ = expected(q, k, v, first, end, None, dout)
    whole, bounds = (np.asarray(out, q.dtype), np.asarray(lse, jnp.float32)), (first - at, end - at)
    both = (np.repeat(a, 2, axis=0) for a in as_arrays(*bounds))
    found = backward(q, k[:, part], v[:, part], tuple(both), whole, dout)
    _, _, *right = expected(q, k[:, part], v[:, part], *bounds, None, dout, lse, out)
    assert all(error(one, other) < 1e-2 for one, other in zip(found, right, strict=True))


def test_what_the_kernels_do_not_take_is_refused(rng):
    q, k, v, _ = tensors(rng, N=4, K=2)
    seen, options = as_arrays(*ranges("documents")), Options(SCALE)
    with pytest.raises(ValueError, match="float32"):
        attend(q.astype(np.float32), k, v, seen, options)
    with pytest.raises(ValueError, match="64 wide and values 256"):
        attend(q, k, np.concatenate([v] * 4, axis=-1), seen, options)
    with pytest.raises(ValueError, match="3 query heads"):
        attend(q[:, :, :3], k, v, seen, options)
