"""Attention over `context`: outputs and gradients against plain float64 attention, and training on such meshes."""

import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from mesh_models import GPT2, HYBRID, MAMBA

from megajax.config.checks import check_mesh
from megajax.jax_internals import fused_attention_stablehlo
from megajax.layout.context_groups import ContextGroups
from megajax.mesh import build_mesh
from megajax.model.comm import LatentKeys
from megajax.ops.partial_attention import Scores
from megajax.options.context import choose_context
from megajax.parallel.context import context_attention, token_order
from megajax.parallel.context.ring_attention import Ring, RingWork
from megajax.training.step import TrainProgram

B, S, H = 2, 48, 8
SPEC = P(None, "context")


def plain_scores(q, k, *, window=None, segments=None, softcap=None, causal=True, runs=None):
    """exp(scores) `[B, N, S, S]` of q `[B, S, N, H]` and k `[B, S, K, H]` in float64, 0 where a key is not seen."""
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    scores = np.einsum("bqnh,bknh->bnqk", q, k) / np.sqrt(q.shape[-1])
    scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
    behind = np.arange(q.shape[1])[:, None] - np.arange(q.shape[1])
    visible = ((behind >= 0) | (not causal)) & (np.abs(behind) < (window or S))
    visible = np.broadcast_to(visible, scores.shape).copy()
    if runs is not None:
        visible |= ((runs[:, :, None] == runs[:, None, :]) & (runs[:, :, None] > 0))[:, None]
    if segments is not None:
        visible &= (segments[:, :, None] == segments[:, None, :])[:, None]
    return np.where(visible, np.exp(scores), 0)


def plain_attention(q, k, v, sinks=None, **how):
    """In NumPy and float64, all scores at once: q `[B, S, N, H]`, k and v `[B, S, K, H]`, sinks `[N]`."""
    weights, v = plain_scores(q, k, **how), np.repeat(v, q.shape[2] // v.shape[2], axis=2)
    total = weights.sum(-1, keepdims=True) + (0 if sinks is None else np.exp(sinks)[:, None, None])
    return np.einsum("bnqk,bknh->bqnh", weights / total, v)


def numbers(heads: int, kv_heads: int, value_width: int = H) -> tuple[np.ndarray, ...]:
    """q, k, v and the output's gradient."""
    rng, widths = np.random.default_rng(0), (H, H, value_width, value_width)
    shapes = zip((heads, kv_heads, kv_heads, heads), widths, strict=True)
    return tuple(rng.standard_normal((B, S, n, width)) for n, width in shapes)


def gradients_of(function, arguments, dout, epsilon=1e-6):
    """Directional derivatives of `sum(function · dout)` by central differences, one for each argument."""
    rng = np.random.default_rng(1)
    directions = [rng.standard_normal(a.shape) for a in arguments]
    slopes = []
    for i, direction in enumerate(directions):
        ends = [
            np.sum(dout * function(*(a + sign * epsilon * direction if j == i else a for j, a in enumerate(arguments))))
            for sign in (1, -1)
        ]
        slopes.append((ends[0] - ends[1]) / (2 * epsilon))
    return directions, slopes


def on_devices(
    strategy, size, scores: Scores, window, q, k, v, sinks, dout, segments=None, balanced=True, causal=True, runs=None
):
    """(each head's largest score, output, dq, dk, dv) of FP32 attention on `size` devices; and dsinks, if any.

    The tokens are in the order of the sequence.

    Chunks of packed documents are `balanced` by work, or in zig-zag like those of whole sequences.
    """
    mesh = Mesh(np.array(jax.devices()[:size]), ("context",))
    index, fields = None, {}
    order = np.broadcast_to(token_order.stored_order(S, size), (B, S))
    if strategy == "dynamic":
        order, fields = token_order.grouped_order({"segment_ids": segments}, ContextGroups(size, linear=10**6), causal)
        groups = np.take_along_axis(fields[token_order.GROUP_SIZE], order, axis=1).reshape(B, size, -1)
        assert groups.max(axis=(0, 2)).tolist() == [4, 4, 4, 4, 1, 1, 2, 2]
    elif segments is not None and balanced and strategy != "all_to_all":
        order = index = token_order.balanced_order(segments, size, causal)

    def reorder(a, order):
        return np.take_along_axis(a, order.reshape(B, S, *(1,) * (a.ndim - 2)), axis=1)

    stored = [jnp.asarray(reorder(a, order), jnp.float32) for a in (q, k, v, dout)]
    documents = None if segments is None else jnp.asarray(reorder(fields.get("segment_ids", segments), order))
    index = reorder(fields["order"], order) if fields else index
    sizes = reorder(fields[token_order.GROUP_SIZE], order) if fields else None
    logits = None if sinks is None else jnp.asarray(sinks, jnp.float32)

    flags = None if runs is None else jnp.asarray(reorder(runs > 0, order))

    def local(q, k, v, dout, documents, index, sizes, flags, sinks):
        fields = {"tokens": q[..., 0, 0], "segment_ids": documents, "order": index, token_order.GROUP_SIZE: sizes}
        fields = {name: field[None] for name, field in fields.items() if field is not None}
        batch, _ = token_order.add_token_positions(fields, size, causal=causal)
        positions = token_order.token_positions_of({name: field[0] for name, field in batch.items()}, size)
        if flags is not None:
            ends = token_order.two_sided_ends(flags[None], fields.get("order"), size)[0]
            positions = replace(positions, two_sided_ends=ends)

        def attention(q, k, v, sinks):
            chosen, _ = choose_context(strategy, size, {"query heads": q.shape[2], "KV heads": k.shape[2]}, False)
            over_context = context_attention(chosen, size)(size, scores, window, positions.chunks is None, causal)
            return over_context.attend(q, k, v, positions, sinks)

        out, pull, largest = jax.vjp(attention, q, k, v, sinks, has_aux=True)
        return largest[None], out, *pull(dout)

    def unless_none(a, spec):
        return None if a is None else spec

    of_tokens = documents, index, sizes, flags
    specs = (*[SPEC] * 4, *(unless_none(a, SPEC) for a in of_tokens), unless_none(logits, P()))
    out_specs = (P("context"), *[SPEC] * 4, P("context"))  # of sinks each device's share, one after the other
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False))
    with jax.default_matmul_precision("highest"):
        largest, *found, shares = run(*stored, *of_tokens, logits)
    found = [np.max(largest, axis=0), *(reorder(np.asarray(a), np.argsort(order, axis=1)) for a in found)]
    return found if shares is None else [*found, np.asarray(shares).reshape(size, -1).sum(axis=0)]


# Odd lengths, of one token too, ends inside chunks and at their borders; each sequence has its own.
DOCUMENTS = np.stack([np.repeat(np.arange(6), (5, 1, 13, 17, 9, 3)), np.repeat(np.arange(3), (31, 5, 12))]).astype(
    np.int32
)
# Of groups of 1, 2 and 4 devices: halves, quarters and eighths of these rows are whole documents in another order.
GROUPED = np.stack([np.repeat(np.arange(5), (7, 24, 6, 5, 6)), np.repeat(np.arange(5), (24, 9, 6, 3, 6))])
# Prefixes of documents, whose tokens see each other on both sides, by their numbers: all of a document but two tokens
PREFIXES = np.where(
    np.stack([np.arange(S) < np.searchsorted(row, row, "right") - 2 for row in DOCUMENTS]), DOCUMENTS + 1, 0
)
SINKS = np.linspace(-2, 3, 8)
OPTIONS = {
    "groups, with sinks, window on both sides, soft-cap": {
        "segments": GROUPED,
        "sinks": SINKS,
        "window": 11,
        "softcap": 2.0,
        "causal": False,
    },
    # Four devices have a divisor in common with the KV heads, but do not divide them.
    "packed, with sinks": {
        "segments": DOCUMENTS,
        "sinks": np.linspace(-2, 3, 12),
        "heads": (12, 6),
        "runs": PREFIXES,
    },
    "packed, in zig-zag": {"segments": DOCUMENTS},
    "narrow window": {"window": 3},
    "window, with sinks": {"window": 11, "sinks": SINKS},
    "narrow values": {"value_width": 5},
    "packed, window, soft-cap, wide values": {
        "segments": DOCUMENTS,
        "window": 17,
        "softcap": 2.0,
        "value_width": 11,
    },
    "in zig-zag, window, soft-cap, wide values, with sinks": {
        "segments": DOCUMENTS,
        "window": 17,
        "softcap": 2.0,
        "value_width": 11,
        "sinks": SINKS,
    },
    "packed, with sinks, on both sides": {"segments": DOCUMENTS, "sinks": SINKS, "causal": False},
    "packed, window on both sides": {"segments": DOCUMENTS, "window": 17, "causal": False},
}
CASES = [
    # ("all_to_all+ring", 4) has this order of the chunks.
    pytest.param("ring", 4, "packed, in zig-zag", marks=pytest.mark.long),
    ("ring", 3, "packed, window, soft-cap, wide values"),
    # The row before has a window too, sinks have the next row of "ring" and ("all_to_all+ring", 2).
    pytest.param("ring", 4, "window, with sinks", marks=pytest.mark.long),
    ("all_gather", 8, "packed, with sinks"),
    ("ring", 3, "packed, with sinks, on both sides"),
    ("all_gather", 4, "packed, window on both sides"),
    ("all_to_all", 4, "packed, with sinks"),
    ("dynamic", 8, "groups, with sinks, window on both sides, soft-cap"),
    # 2 KV heads: pairs of devices share the heads
    ("all_to_all+ring", 4, "packed, in zig-zag"),
    # "ring" has these options, and the next row a window with pairs.
    pytest.param("all_to_all+ring", 8, "packed, window, soft-cap, wide values", marks=pytest.mark.long),
    # Each of 2 devices has a KV head: "all_to_all".
    ("all_to_all+ring", 2, "in zig-zag, window, soft-cap, wide values, with sinks"),
]


@pytest.mark.parametrize(("strategy", "size", "name"), CASES)
def test_attention_and_its_gradients_are_those_of_plain_attention(strategy, size, name):
    options = OPTIONS[name]
    # Fewer KV heads than devices, also where the devices share the heads.
    q, k, v, dout = numbers(*options.get("heads", (8, 2)), options.get("value_width", H))
    names = ("segments", "window", "softcap", "sinks", "runs")
    segments, window, softcap, sinks, runs = map(options.get, names)
    causal = options.get("causal", True)
    arguments = (q, k, v) if sinks is None else (q, k, v, sinks)

    how = {"window": window, "segments": segments, "softcap": softcap, "causal": causal, "runs": runs}
    plain, scores = partial(plain_attention, **how), Scores(H**-0.5, softcap, "reference", wants_largest=True)
    given = q, k, v, sinks, dout, segments, "zig-zag" not in name, causal, runs
    largest, out, *gradients = on_devices(strategy, size, scores, window, *given)
    # QK-clip's bound of each head's scores, of the head's own number
    of_heads = np.log(plain_scores(q, k, **how).sum(-1)).max(axis=(0, 2))
    assert np.ptp(of_heads) > 0.1 and of_heads.min() > 0
    np.testing.assert_allclose(largest, of_heads, rtol=1e-5)
    np.testing.assert_allclose(out, plain(*arguments), rtol=1e-5, atol=1e-5)
    directions, slopes = gradients_of(plain, arguments, dout)
    for gradient, direction, slope in zip(gradients, directions, slopes, strict=True):
        # A sum of thousands of terms of either sign: against their magnitude.
        magnitude = np.sqrt(np.sum((gradient * direction) ** 2))
        assert abs(np.sum(gradient * direction) - slope) < 1e-5 * magnitude


def library_scores(q, k, scale, mask, keys):
    """Scores `[B, N, Sq, Sk]` of cuDNN's masks; `keys [B]`: the visible keys of PADDING."""
    scores = scale * jnp.einsum("bqnh,bknh->bnqk", q, jnp.repeat(k, q.shape[2] // k.shape[2], axis=2))
    index = jnp.arange(k.shape[1])
    visible = jnp.ones(scores.shape, bool)
    if mask == fused_attention_stablehlo.MaskType.CAUSAL:
        visible &= jnp.arange(q.shape[1])[:, None] >= index
    if mask == fused_attention_stablehlo.MaskType.PADDING:
        visible &= index < keys[:, None, None, None]
    return jnp.where(visible, scores, -jnp.inf)


def library_forward(
    q, k, v, *, scale, mask_type, sliding_window_length, return_residual, q_seqlen=None, kv_seqlen=None
):
    assert sliding_window_length is None and return_residual
    scores = library_scores(q, k, scale, mask_type, kv_seqlen)
    v = jnp.repeat(v, q.shape[2] // v.shape[2], axis=2)
    return jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(scores), v), jax.nn.logsumexp(scores, axis=-1)


def library_backward(q, k, v, _, q_seqlen, kv_seqlen, *rest, scale, mask_type, **others):
    """From the log-sum-exp and the output of all keys; gradients of invisible keys are undefined."""
    *_, lse, out, dout = rest
    groups, own = q.shape[2] // k.shape[2], (k.shape[0], k.shape[1], k.shape[2])
    p = jnp.exp(library_scores(q, k, scale, mask_type, kv_seqlen) - lse[..., None])
    dp = jnp.einsum("bqnh,bknh->bnqk", dout, jnp.repeat(v, groups, axis=2))
    ds = scale * p * (dp - jnp.sum(dout * out, axis=-1).swapaxes(1, 2)[..., None])
    dq = jnp.einsum("bnqk,bknh->bqnh", ds, jnp.repeat(k, groups, axis=2))
    dk, dv = (jnp.einsum("bnqk,bqnh->bknh", a, b).reshape(*own, groups, -1).sum(3) for a, b in ((ds, q), (p, dout)))
    if mask_type == fused_attention_stablehlo.MaskType.PADDING:
        seen = (jnp.arange(k.shape[1]) < kv_seqlen[:, None])[..., None, None]
        dk, dv = (jnp.where(seen, g, jnp.nan) for g in (dk, dv))
    return dq, dk, dv


def replace_library(monkeypatch):
    """At its interface by plain arithmetic: the choice of blocks and masks is the GPU's."""
    monkeypatch.setattr(fused_attention_stablehlo, "dot_product_attention", library_forward)
    bound = SimpleNamespace(bind=library_backward)
    monkeypatch.setattr(fused_attention_stablehlo, "_dot_product_attention_bwd_p_wrapper", bound)


@pytest.mark.parametrize(
    ("strategy", "size", "name"),
    [
        ("ring", 3, "narrow values, both sides"),
        ("all_gather", 4, "both sides"),
        ("all_to_all+ring", 4, "with sinks"),
    ],
)
def test_parts_of_cudnn_add_up_to_plain_attention(monkeypatch, strategy, size, name):
    replace_library(monkeypatch)
    q, k, v, dout = numbers(8, 2, 5 if "narrow values" in name else H)
    sinks = SINKS if name == "with sinks" else None
    arguments, causal = (q, k, v) if sinks is None else (q, k, v, sinks), "both sides" not in name
    scores, plain = Scores(H**-0.5, None, "cudnn", wants_largest=True), partial(plain_attention, causal=causal)
    _, out, *gradients = on_devices(strategy, size, scores, None, q, k, v, sinks, dout, causal=causal)
    np.testing.assert_allclose(out, plain(*arguments), rtol=1e-5, atol=1e-5)
    directions, slopes = gradients_of(plain, arguments, dout)
    for gradient, direction, slope in zip(gradients, directions, slopes, strict=True):
        magnitude = np.sqrt(np.sum((gradient * direction) ** 2))
        assert abs(np.sum(gradient * direction) - slope) < 1e-5 * magnitude


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_latents_in_parts_of_cudnn_have_the_gradients_of_plain_attention(monkeypatch, strategy):
    """Each device sends latents and rotary keys, and applies the up-projection to those of the others too."""
    replace_library(monkeypatch)
    size, N, rank, nope, rotary, width = 2, 2, 6, 5, 3, 4
    rng, order = np.random.default_rng(2), np.broadcast_to(token_order.stored_order(S, 2), (B, S))
    shapes = (B, S, N, rotary + nope), (B, S, rank), (B, S, rotary), (rank, N * (nope + width)), (B, S, N, width)
    q, latent, turned, up, dout = (rng.standard_normal(shape) for shape in shapes)

    def plain(q, latent, turned, up):
        k, v = np.split(latent @ up, [N * nope], axis=-1)
        k = np.concatenate([np.repeat(turned[:, :, None], N, axis=2), k.reshape(B, S, N, nope)], axis=-1)
        return plain_attention(q, k, v.reshape(B, S, N, width))

    def local(q, latent, turned, dout, up):
        batch, _ = token_order.add_token_positions({"tokens": q[None, ..., 0, 0]}, size)
        positions = token_order.token_positions_of({name: field[0] for name, field in batch.items()}, size)
        scores = Scores((rotary + nope) ** -0.5, None, "cudnn")
        chosen, _ = choose_context(strategy, size, {}, True)
        over_context = context_attention(chosen, size)(size, scores, None, True, True)

        def attention(q, latent, turned, up):
            keys = LatentKeys(latent.reshape(-1, rank), turned, up, nope, width)
            return over_context.attend_latent(jnp.matmul, q, keys, positions)[0]

        out, pull = jax.vjp(attention, q, latent, turned, up)
        return out, *pull(dout)

    mesh = Mesh(np.array(jax.devices()[:size]), ("context",))
    specs = {"in_specs": (*[SPEC] * 4, P()), "out_specs": (*[SPEC] * 4, P("context"))}
    stored = (jnp.asarray(np.take(a, order[0], axis=1), jnp.float32) for a in (q, latent, turned, dout))
    with jax.default_matmul_precision("highest"):
        run = jax.jit(jax.shard_map(local, mesh=mesh, check_vma=False, **specs))
        *found, shares = run(*stored, jnp.asarray(up, jnp.float32))
    out, *gradients = (np.asarray(a)[:, np.argsort(order[0])] for a in found)
    arguments = q, latent, turned, up
    np.testing.assert_allclose(out, plain(*arguments), rtol=1e-5, atol=1e-5)
    gradients.append(np.asarray(shares).reshape(size, *up.shape).sum(axis=0))
    for gradient, direction, slope in zip(gradients, *gradients_of(plain, arguments, dout), strict=True):
        magnitude = np.sqrt(np.sum((gradient * direction) ** 2))
        assert abs(np.sum(gradient * direction) - slope) < 1e-5 * magnitude


@pytest.mark.parametrize("causal", [True, False])
def test_the_logged_imbalance_is_the_busiest_devices_keys_over_those_of_a_mean_one(causal):
    """Both summed over two microbatches of one sequence; in NumPy."""
    order = np.broadcast_to(token_order.stored_order(S, 2), DOCUMENTS.shape)
    fields = {"tokens": 0 * order, "segment_ids": np.take_along_axis(DOCUMENTS, order, axis=1), "order": order}

    def found(batch):
        return token_order.add_token_positions(batch, 2, causal=causal)[1]["attention_imbalance"]

    mesh, spec = Mesh(np.array(jax.devices()[:2]), ("context",)), P(None, None, "context")
    run = jax.jit(jax.shard_map(found, mesh=mesh, in_specs=spec, out_specs=P(), check_vma=False))
    starts, ends = (np.array([np.searchsorted(row, row, side) for row in DOCUMENTS]) for side in ("left", "right"))
    seen = (np.arange(1, S + 1) if causal else ends) - starts
    work = np.take_along_axis(seen, order, axis=1).reshape(2, 2, -1).sum(-1)
    expected = work.max(1).sum() / work.mean(1).sum()
    assert expected > 1.05
    assert float(run({name: jnp.asarray(a[:, None], jnp.int32) for name, a in fields.items()})) == pytest.approx(
        expected
    )


@pytest.mark.parametrize(
    ("window", "zigzag", "near", "two_sided_ends"),
    [
        *((None, True, 7, None), (1, True, 0, None), (3, True, 1, None), (4, True, 2, None), (1, False, 7, None)),
        *((6, True, 3, None), (8, True, 7, None)),  # the largest window of two ways, and the first of one way
        (3, True, 7, np.full((1, 4), 20)),
    ],
)
def test_the_ring_visits_every_device_that_a_query_can_see_and_returns(window, zigzag, near, two_sided_ends):
    """Coded by rank: a device gets the code of each such device once, and adds its own code to each sum.

    A query of the 2 tokens of a chunk sees keys of chunks up to `near` away; without zigzag, or those of its own prefix
    or image, they may be anywhere.
    """
    size, chunk = 8, 2
    mesh = Mesh(np.array(jax.devices()[:size]), ("context",))
    ring = Ring(size, Scores(1.0, None, "reference"), window, zigzag)
    positions = SimpleNamespace(index=np.zeros((1, 2 * chunk)), two_sided_ends=two_sided_ends)

    def local(codes):
        work = RingWork(
            own=lambda: codes,
            start=lambda own: (own, own),
            compute=lambda other, codes: (other, codes),
            combine=lambda other, results, added, seen: (added + codes, seen + 100.0 * results[1]),
        )
        return ring.go_round(ring._sweeps(positions), codes, work)

    codes = 2.0 ** np.arange(size)  # a sum identifies its devices
    specs = {"in_specs": P("context"), "out_specs": P("context")}
    added, seen = jax.jit(jax.shard_map(local, mesh=mesh, check_vma=False, **specs))(codes)
    for rank in range(size):
        others = [other for other in range(size) if 0 < min((rank - other) % size, (other - rank) % size) <= near]
        assert seen[rank] == codes[rank] + 100 * codes[others].sum()
        assert added[rank] == codes[rank] + codes[others].sum()


# Training

SMALL = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "vocab_size": 250, "init_std": 0.05}
MODELS = {
    "attention": {
        **SMALL,
        "num_layers": 1,
        "block_pattern": ["attention"],
        "num_heads": 8,
        "num_kv_heads": 4,
        "attention_sinks": True,
    },
    "gpt2": {**SMALL, **GPT2, "num_heads": 8, "dropout": 0.2},
    "recurrent": {
        **SMALL,
        "num_heads": 4,
        "mamba2": MAMBA["mamba2"],
        "linear_attention": HYBRID["linear_attention"],
        "block_pattern": ["attention_mamba2", "gated_deltanet"],
    },
}
PACKED = {"synthetic_documents": 4, "reset_attention": True, "reset_positions": True}
SHORT = PACKED | {"synthetic_documents": 9}  # groups of all sizes
MESHES = [
    pytest.param(
        "gpt2",
        {"context": 4, "pipeline": 2},
        2,
        "dynamic",
        {"pipeline": {"schedule": "gpipe"}, "remat": {"policy": "save_matmuls"}, "data": SHORT},
        marks=pytest.mark.long,
    ),
    ("attention", {"context": 4, "tensor": 2}, 1, "all_to_all+ring", {"data": PACKED}),
    # States of more devices: test_recurrence.py
    ("recurrent", {"context": 2, "tensor": 2}, 1, "dynamic", {"data": SHORT}),
]


@pytest.mark.parametrize(("model", "mesh", "microbatches", "strategy", "sections"), MESHES)
def test_a_mesh_with_context_trains_as_one_device_does(table, reference, model, mesh, microbatches, strategy, sections):
    config = table.make_config(
        MODELS[model],
        mesh,
        microbatches=microbatches,
        steps=2,
        optimizer="sgd",
        communication={"context": strategy},
        **sections,
    )
    weights = table.weights_of(config)
    # Sinks that start anywhere, so that it shows which head has which
    weights = {name: 20 * w if name.endswith("sinks") else w for name, w in weights.items()}
    difference = table.compare(table.train(config, weights), reference(config, weights))
    assert not difference.problems(), difference


@pytest.mark.parametrize("strategy", ["ring", pytest.param("all_to_all", marks=pytest.mark.long)])
def test_keeping_attention_is_enough_for_its_backward_pass(table, strategy):
    """The policy keeps the sum over the parts: keys are sent again for the backward pass only."""

    def transfers(policy: str) -> int:
        sections = {"communication": {"context": strategy}, "remat": {"policy": policy}}
        config = table.make_config(MODELS["attention"], {"context": 2}, steps=1, optimizer="sgd", **sections)
        program = TrainProgram.build(config, build_mesh(check_mesh(config, 2), jax.devices()[:2]))
        text = program.train_step.lower(program.abstract_state, program.abstract_batch).as_text()
        return len(re.findall(r"stablehlo\.(?:collective_permute|all_gather|all_to_all)\b", text))

    assert transfers("none") == transfers("save_matmuls") < transfers("selective")
