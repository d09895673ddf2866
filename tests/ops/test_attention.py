import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.config import AXES, load_config
from megajax.errors import ConfigError
from megajax.kernel_choice import AttentionShape, Hardware, Kernels, choose_attention
from megajax.ops import (
    AttentionSettings,
    attention,
    cached_attention,
    cross_attention,
    documents_of,
    same_documents,
    visible_ranges,
)
from megajax.ops.attention import _whole
from megajax.ops.partial_attention import Scores
from megajax.ops.relative_bias import bias_of_pairs, distance_buckets, relative_bias
from megajax.tools.plan.compile import no_gpu_needed

S = 37
# Three documents in the first row, borders aligned with nothing; two in the second, ids not ascending.
SEGMENTS = np.stack([np.repeat([1, 2, 3], [11, 19, 7]), np.repeat([5, 0], [30, 7])])


def numpy_attention(q, k, v, sinks=None, *, window=None, segment_ids=None, softcap=None, scale=None, causal=True):
    """Of each row and head a softmax over the keys that a query may see, and the head's sink."""
    out = np.zeros((*q.shape[:3], v.shape[-1]), q.dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    i, j = np.ogrid[: q.shape[1], : q.shape[1]]
    seen = np.full((len(i), len(i)), True)
    seen &= (j <= i) if causal else True
    seen &= True if window is None else abs(i - j) < window
    for b, n in np.ndindex(q.shape[0], q.shape[2]):
        kv = n * k.shape[2] // q.shape[2]
        visible = seen if segment_ids is None else seen & (segment_ids[b][:, None] == segment_ids[b])
        scores = scale * q[b, :, n] @ k[b, :, kv].T
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.where(visible, np.exp(scores), 0)
        total = weights.sum(1, keepdims=True) + (0 if sinks is None else np.exp(sinks[n]))
        out[b, :, n] = weights / total @ v[b, :, kv]
    return out


@pytest.fixture
def qkv(rng):
    def make(N, K, H, batch=2):
        return [rng.normal(size=(batch, S, heads, H)) for heads in (N, K, K)]

    return make


CASES = {
    "causal": {},
    "window": {"window": 5},
    "window longer than the sequence": {"window": 100},
    "segments": {"segment_ids": SEGMENTS},
    "window across segments": {"segment_ids": SEGMENTS, "window": 9},
    "soft-cap": {"softcap": 1.5},
    "scale": {"scale": 0.7},
    "both sides": {"causal": False},
    "all at once on both sides": {"segment_ids": SEGMENTS, "window": 9, "softcap": 2.0, "scale": 0.5, "causal": False},
    "all at once": {"segment_ids": SEGMENTS, "window": 9, "softcap": 2.0, "scale": 0.5},
}


def attended(q, k, v, implementation, segment_ids=None, **settings):
    documents = None if segment_ids is None else documents_of(jnp.asarray(segment_ids))
    return attention(q, k, v, AttentionSettings(**settings), implementation=implementation, documents=documents)


def by_reference(q, k, v, **options):
    return attended(q, k, v, "reference", **options)[0]


@pytest.mark.parametrize("case", CASES)
def test_value_and_gradients_with_grouped_heads(check_op, qkv, case):
    options: dict[str, Any] = CASES[case]
    check_op(
        lambda q, k, v: by_reference(q, k, v, **options),
        lambda q, k, v: numpy_attention(q, k, v, **options),
        qkv(N=6, K=2, H=8),
        thorough=False,  # the test below is, with all of these
    )


@pytest.mark.parametrize("case", ["causal", "all at once"])
def test_value_and_gradients_with_sinks(check_op, qkv, rng, case):
    options: dict[str, Any] = CASES[case]
    check_op(
        lambda q, k, v, sinks: by_reference(q, k, v, sinks=sinks, **options),
        lambda *args: numpy_attention(*args, **options),
        [*qkv(N=6, K=2, H=8), rng.normal(size=6)],
        thorough=case == "all at once",
    )


@pytest.mark.parametrize("case", ["all at once", "all at once on both sides"])
def test_sinks_are_added_to_what_kernels_compute_without_them(check_op, qkv, rng, case):
    """As with cuDNN and our own kernels, but in float64: one part that gives its log-sum-exp, and corrections."""
    options: dict[str, Any] = CASES[case]

    def op(q, k, v, sinks):
        index = jnp.broadcast_to(jnp.arange(S), (2, S))
        length = None if options.get("causal", True) else S
        ranges = visible_ranges(index, documents_of(jnp.asarray(SEGMENTS)), options["window"], length)
        scores = Scores(options["scale"], options["softcap"], "reference")
        return _whole(scores, "causal", None, (q, k, v), ranges, sinks, None)[0]

    arguments = [*qkv(N=6, K=2, H=8), rng.normal(size=6)]
    check_op(op, lambda *args: numpy_attention(*args, **options), arguments, thorough=False)


@pytest.mark.smoke
@pytest.mark.parametrize(("N", "K", "H"), [(3, 3, 40), (3, 1, 8)])
def test_value_and_gradients_for_other_head_counts_and_widths(check_op, qkv, N, K, H):
    check_op(by_reference, numpy_attention, qkv(N, K, H, batch=1), thorough=N == K)


@pytest.mark.parametrize("width", [3, 12])
def test_values_may_be_of_another_width_than_keys(check_op, rng, width):
    """Materialised, and as one part of the keys, whose backward pass is written out."""
    q, k, v = (rng.normal(size=(1, S, heads, H)) for heads, H in ((4, 8), (2, 8), (2, width)))
    check_op(by_reference, numpy_attention, [q, k, v], thorough=width > 8)
    ranges = visible_ranges(np.arange(S)[None], None, None, None)
    scores = Scores(8**-0.5, None, "reference")
    whole = lambda *qkv: _whole(scores, "causal", None, qkv, ranges, None, None)[0]  # noqa: E731
    check_op(whole, numpy_attention, [q, k, v], thorough=False)


def test_scores_and_softmax_are_float32_for_bfloat16_inputs(error, qkv):
    q, k, v = (np.asarray(a, jnp.bfloat16) for a in qkv(2, 2, 40))
    wide_q, wide_k, wide_v = (np.asarray(a, np.float64) for a in (8 * q, k, v))
    exact = numpy_attention(wide_q, wide_k, wide_v)
    # One rounding of the result (relative 2^-9 at worst); bfloat16 scores of this size would be off by 2^-4.
    assert error(jax.jit(by_reference)(8 * q, k, v), exact) < 2.0**-9


def test_a_window_of_one_token_sees_the_query_alone(qkv):
    q, k, v = (np.asarray(a, jnp.float32) for a in qkv(6, 2, 8))
    out = jax.jit(lambda *qkv: by_reference(*qkv, window=1))(q, k, v)
    np.testing.assert_array_equal(out, np.repeat(v, 3, axis=2))


def test_a_window_without_tokens_is_refused(qkv):
    q, k, v = (np.asarray(a) for a in qkv(2, 2, 8))
    with pytest.raises(ValueError, match="window=0 is not a positive number of tokens"):
        by_reference(q, k, v, window=0)


@pytest.fixture
def lowered_for_cuda():
    """The StableHLO of loss and gradients through cuDNN attention, made without a GPU."""

    def lower(dtype="bfloat16", S=64, H=64, W=None, **options) -> str:
        def loss(q, k, v):
            out, _ = attended(q, k, v, implementation="cudnn", **options)
            return out.astype(jnp.float32).sum()

        q, k = (jax.ShapeDtypeStruct((2, S, heads, H), dtype) for heads in (6, 2))
        v = jax.ShapeDtypeStruct((*k.shape[:-1], W or H), dtype)
        traced = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).trace(q, k, v)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    with no_gpu_needed():
        yield lower


def cudnn_calls(text: str) -> tuple[int, int]:
    return text.count("@__cudnn$fmhaSoftmax("), text.count("@__cudnn$fmhaSoftmaxBackward(")


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_cudnn_is_one_forward_and_one_backward_call_and_no_scores(lowered_for_cuda, dtype):
    text = lowered_for_cuda(dtype)
    assert cudnn_calls(text) == (1, 1)
    assert text.count("stablehlo.custom_call") == 2
    assert "64x64x64" not in text and "dot_general" not in text
    assert text.count("CAUSAL") == 2 and text.count("\\22sliding_window_length\\22: 0") == 2


def test_cudnn_counts_the_query_itself_in_the_window(lowered_for_cuda):
    # cuDNN's length L means positions (i-L, i].
    text = lowered_for_cuda(window=16)
    assert cudnn_calls(text) == (1, 1)
    assert text.count("\\22sliding_window_length\\22: 16") == 2


@pytest.mark.parametrize("options", [{"window": 16}, {}], ids=str)
def test_cudnn_computes_the_same_with_sinks_as_without(lowered_for_cuda, options):
    def calls(**sinks):
        return re.findall(
            r"custom_call @__cudnn\S+\(.*backend_config = \"(.*?)\"", lowered_for_cuda(**options, **sinks)
        )

    with_sinks = calls(sinks=np.ones(6, np.float32))
    assert len(with_sinks) == 2 and with_sinks == calls()


def test_cudnn_gets_no_window_that_holds_the_whole_sequence(lowered_for_cuda):
    assert lowered_for_cuda(window=64) == lowered_for_cuda()


def test_documents_begin_and_end_where_the_id_changes():
    starts, ends = jax.jit(documents_of)(np.array([[3, 3, 1, 1, 1, 2], [0, 1, 1, 0, 0, 0]]))
    assert starts.tolist() == [[0, 0, 2, 2, 2, 5], [0, 1, 1, 3, 3, 3]]
    assert ends.tolist() == [[2, 2, 5, 5, 5, 6], [1, 3, 3, 6, 6, 6]]


@pytest.mark.parametrize("causal", [True, False])
def test_cudnn_takes_a_bias_and_gives_its_gradient(causal):
    def loss(q, k, v, table):
        out, _ = attended(q, k, v, "cudnn", causal=causal, bias_table=table)
        return out.astype(jnp.float32).sum()

    q, table = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((2, 64, 6, 64), (6, 32)))
    with no_gpu_needed():
        traced = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3))).trace(q, q, q, table)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    forward, backward = re.findall(r"custom_call @(\S+)\(.*-> (.*)", text)
    assert forward[0] == "__cudnn$fmhaScaleBiasSoftmax" and backward[0] == f"{forward[0]}Backward"
    assert "tensor<1x6x64x64xbf16>" in backward[1] and text.count("CAUSAL") == 2 * causal


def test_cross_attention_is_to_the_keys_of_the_same_document(check_op, rng):
    """One query at a time; the last document has no keys, and negative ids are padding at the end."""
    queries, keys = np.array([[0, 0, 1, 1, 2]]), np.array([[0, 0, 0, 1, -1, -1]])
    ranges = jax.jit(same_documents)(queries, keys)

    def plain(q, k, v):
        out = np.zeros(q.shape)
        for i, n in np.ndindex(q.shape[1:3]):
            if (seen := np.flatnonzero(keys[0] == queries[0, i])).size:
                weights = np.exp(0.3 * k[0, seen, n // 2] @ q[0, i, n])
                out[0, i, n] = weights / weights.sum() @ v[0, seen, n // 2]
        return out

    arguments = [rng.normal(size=shape) for shape in ((1, 5, 4, 8), (1, 6, 2, 8), (1, 6, 2, 8))]
    scores = Scores(0.3, None, "reference")
    check_op(lambda q, k, v: cross_attention(q, k, v, ranges, scores), plain, arguments)
    halves = [np.asarray(a, jnp.bfloat16) for a in arguments]

    def gradients(*qkv):
        out, pull = jax.vjp(lambda q, k, v: cross_attention(q, k, v, ranges, scores), *qkv)
        return out, *pull(out)

    assert {str(a.dtype) for a in jax.eval_shape(gradients, *halves)} == {"bfloat16"}
    queries, keys = 0 * queries, 0 * keys  # one document
    check_op(lambda q, k, v: cross_attention(q, k, v, None, scores), plain, arguments)


def test_buckets_of_distances():
    """Worked from the formula: with 32 buckets up to 128, 16 are one distance each, the others grow by a factor."""
    causal, both = (dict(zip(range(-200, 201), distance_buckets(201, 32, 128, c), strict=True)) for c in (True, False))
    assert [causal[-d] for d in (0, 1, 15, 16, 18, 19, 63, 64, 127, 200)] == [0, 1, 15, 16, 16, 17, 26, 26, 31, 31]
    assert all(causal[d] == 0 for d in range(1, 201))
    assert [both[-d] for d in (0, 1, 7, 8, 11, 12, 64, 200)] == [0, 1, 7, 8, 8, 9, 14, 15]
    assert all(both[d] == both[-d] + 16 for d in range(1, 201))


def test_the_bias_of_a_query_and_a_key_is_that_of_their_distance(rng):
    table, length = rng.standard_normal((3, 8)).astype(np.float32), 40
    bucket = dict(zip(range(1 - length, length), distance_buckets(length, 8, 16, True), strict=True))
    expected = np.array([[table[:, bucket[key - query]] for key in range(length)] for query in range(length)])
    found = jax.jit(lambda table: relative_bias(table, length, 16, causal=True))(table)
    np.testing.assert_array_equal(found, expected.transpose(2, 0, 1))
    query, key = np.array([[5, 39], [17, 18]]), np.array([[0, 3, 5], [2, 16, 17]])
    found = jax.jit(lambda table: bias_of_pairs(table, query, key, 16, length))(table)
    np.testing.assert_array_equal(found, expected[query[..., None], key[:, None]].transpose(0, 3, 1, 2))


def test_cudnn_takes_the_scale_and_any_multiple_of_8(lowered_for_cuda):
    text = lowered_for_cuda(S=38, H=40, scale=0.25)
    assert cudnn_calls(text) == (1, 1) and text.count("fmha_scale\\22: 0.25") == 2


def test_cudnn_takes_the_widths_of_latent_attention(lowered_for_cuda):
    text = lowered_for_cuda(H=192, W=128)
    assert cudnn_calls(text) == (1, 1) and "64x64x64" not in text
    assert re.search(r"tensor<2x64x6x192xbf16>, tensor<2x64x2x192xbf16>, tensor<2x64x2x128xbf16>", text)


def test_jax_still_refuses_to_train_on_odd_lengths(lowered_for_cuda):
    """If this fails, the even-length rule of choose_attention can go."""
    with pytest.raises(NotImplementedError, match="Unsupported sequence length"):
        lowered_for_cuda(S=37)


def test_cudnn_refuses_what_it_cannot_do(lowered_for_cuda):
    with pytest.raises(ValueError, match="document mask"):
        lowered_for_cuda(segment_ids=np.zeros((2, 64), int))
    with pytest.raises(ValueError, match="window on both sides"):
        lowered_for_cuda(window=3, causal=False)
    with pytest.raises(ValueError, match="softcap=30"):
        lowered_for_cuda(softcap=30.0)


FITS: dict[str, Any] = {
    "platform": "gpu",
    "capability": "8.0",
    "dtype": "bfloat16",
    "head_dim": 128,
    "softcap": None,
    "packed": False,
    "sequence_length": 8192,
    "parts_with": (),
}


def choose(requested: str, platform: str, capability: str, **settings: Any):
    shape = AttentionShape(**{"value_dim": settings["head_dim"], **settings})
    return choose_attention(requested, Hardware(platform, capability), shape)


# What cuDNN cannot do, the reason, and what auto takes instead on an A100
OBSTACLES = [
    ({"platform": "cpu"}, "needs a GPU", "reference"),
    ({"dtype": jnp.float32}, "float32", "reference"),
    ({"head_dim": 100}, "model.head_dim=100", "triton"),
    ({"head_dim": 264}, "model.head_dim=264", "reference"),
    ({"head_dim": 192, "value_dim": 128}, "cuDNN needs a GPU of compute capability 9.0 for values of 128", "triton"),
    ({"sequence_length": 37}, "batch.sequence_length=37", "triton"),
    ({"softcap": 50.0}, "model.attention_softcap=50.0", "triton"),
    ({"packed": True}, "packed documents", "triton"),
    ({"packed": True, "capability": "7.0"}, "packed documents", "reference"),
    ({"two_sided_window": 64}, "model.causal=false with model.sliding_window=64", "triton"),
    (
        {"parts_with": ("model.position=relative",), "has_bias": True},
        "does not support model.position=relative",
        "reference",
    ),
    ({"padded": True}, "model.causal=false with padded sequences", "triton"),
    ({"parts_with": ("model.sliding_window=64",)}, "does not support model.sliding_window=64", "triton"),
]


HOPPER_LATENT = {"capability": "9.0", "head_dim": 192, "value_dim": 128}
OTHER_WIDTHS = {"capability": "9.0", "head_dim": 96, "value_dim": 64}


@pytest.mark.parametrize("change", [{}, {"platform": "cuda"}, {"dtype": jnp.float16}, {"head_dim": 40}, OTHER_WIDTHS])
def test_auto_takes_cudnn_where_it_fits(change: dict[str, Any]):
    assert choose("auto", **FITS | change)[0] == "cudnn"
    assert choose("cudnn", **FITS | change)[0] == "cudnn"


@pytest.mark.parametrize(("change", "reason", "instead"), OBSTACLES)
def test_auto_falls_back_with_the_reason_and_cudnn_by_name_is_refused(change, reason, instead):
    name, why = choose("auto", **FITS | change)
    assert name == instead and reason in why
    with pytest.raises(ConfigError, match=reason) as refused:
        choose("cudnn", **FITS | change)
    assert str(refused.value).startswith("kernels.attention=cudnn cannot run") and "\n" not in str(refused.value)


@pytest.mark.parametrize(("lengths", "expected"), [((32, 16), "cudnn"), ((16, 15), "triton"), ((15, 16), "triton")])
def test_an_odd_length_on_either_side_of_cross_attention_rules_cudnn_out(lengths, expected):
    length, of_encoder = lengths
    encoder = f"model.encoder={{kind: layers, num_layers: 1, sequence_length: {of_encoder}}}"
    overrides = [encoder, f"batch.sequence_length={length}", "precision.compute=bfloat16"]
    kernels = Kernels.choose(load_config("quickstart", overrides), dict.fromkeys(AXES, 1), Hardware("gpu", "8.0"))
    assert kernels.cross_attention == expected


@pytest.mark.parametrize(("causal", "expected"), [(True, "cudnn"), (False, "triton")])
def test_padding_at_the_end_rules_cudnn_out_only_where_tokens_see_later_ones(causal, expected):
    overrides = ["data={kind: text, train: a, valid: b, tokenizer: byte}", "run.eval_steps=all"]
    overrides += ["precision.compute=bfloat16", f"model.causal={json.dumps(causal)}"]
    overrides += [] if causal else ["objective={kind: masked_tokens, masking: {mask_token: a}}"]
    kernels = Kernels.choose(load_config("quickstart", overrides), dict.fromkeys(AXES, 1), Hardware("gpu", "8.0"))
    assert kernels.attention == expected


@pytest.mark.parametrize(
    ("causal", "window", "expected"), [(True, 8, "cudnn"), (False, 8, "triton"), (False, 16, "cudnn")]
)
def test_a_window_within_the_sequence_rules_cudnn_out_only_on_both_sides(causal, window, expected):
    overrides = ["data={kind: synthetic}", "precision.compute=bfloat16", "batch.sequence_length=16"]
    overrides += [f"model.sliding_window={window}", f"model.causal={json.dumps(causal)}"]
    overrides += [] if causal else ["objective.kind=masked_tokens"]
    kernels = Kernels.choose(load_config("quickstart", overrides), dict.fromkeys(AXES, 1), Hardware("gpu", "8.0"))
    assert kernels.attention == expected


def test_a_prefix_that_sees_itself_rules_cudnn_out():
    def chosen(*overrides: str) -> str:
        config = load_config("quickstart", ["precision.compute=bfloat16", *overrides])
        return Kernels.choose(config, dict.fromkeys(AXES, 1), Hardware("gpu", "9.0")).attention

    assert (chosen(), chosen("model.prefix_lm=true")) == ("cudnn", "pallas")


def test_cudnn_gets_whole_sequences_where_it_cannot_attend_to_parts():
    def chosen(context: int, strategy: str) -> str:
        overrides = [f"mesh.context={context}", f"communication.context={strategy}", "model.sliding_window=64"]
        config, sizes = load_config("llama3_8b", overrides), dict.fromkeys(AXES, 1) | {"context": context}
        return Kernels.choose(config, sizes, Hardware("gpu", "8.0")).attention

    assert chosen(1, "auto") == chosen(2, "all_to_all") == "cudnn"
    assert chosen(2, "ring") == chosen(2, "all_gather") == "triton"


@pytest.mark.parametrize(
    ("change", "capability", "expected"),
    [((), "9.0", "pallas"), ((), "8.0", "triton"), (("model.position=relative",), "9.0", "cudnn")],
)
def test_a_deterministic_run_does_without_the_scores_of_cudnn_where_another_kernel_fits(change, capability, expected):
    encoder = "model.encoder={kind: layers, num_layers: 1, sequence_length: 32}"
    overrides = ["precision.compute=bfloat16", "run.deterministic=true", *(change or [encoder])]
    kernels = Kernels.choose(load_config("quickstart", overrides), dict.fromkeys(AXES, 1), Hardware("gpu", capability))
    assert kernels.attention == expected
    assert change or kernels.cross_attention == expected
    assert change or "cuDNN's deterministic gradients need the scores" in kernels.attention_reason


def test_a_deterministic_run_with_cudnn_by_name_gets_it_in_whole_sequences_only():
    by_name = ("llama3_8b", ["run.deterministic=true", "kernels.attention=cudnn", "mesh.context=2"])
    sizes, hardware = dict.fromkeys(AXES, 1) | {"context": 2}, Hardware("gpu", "9.0")
    config, ring = (
        load_config(by_name[0], [*by_name[1], f"communication.context={c}"]) for c in ("all_to_all", "ring")
    )
    assert Kernels.choose(config, sizes, hardware).attention == "cudnn"
    with pytest.raises(ConfigError, match=r"run\.deterministic for a part of the keys: set .*all_to_all"):
        Kernels.choose(ring, sizes, hardware)


@pytest.mark.parametrize("change", [{"head_dim": 264}, {"packed": True, "dtype": "float32"}])
def test_long_sequences_are_not_left_to_the_reference(change):
    short: dict[str, Any] = FITS | change
    assert choose("auto", **short)[0] == "reference"
    long: dict[str, Any] = short | {"sequence_length": 16384}
    with pytest.raises(ConfigError, match="scores of all pairs of batch.sequence_length=16384") as refused:
        choose("auto", **long)
    assert str(refused.value).endswith("or set kernels.attention=reference if they fit.")
    assert choose("reference", **long)[0] == "reference"
    assert choose("auto", **long | {"platform": "cpu"})[0] == "reference"


PACKED_LATENT = HOPPER_LATENT | {"packed": True}


@pytest.mark.parametrize(
    "change",
    [
        {"softcap": 50.0},
        {"packed": True},
        {"packed": True, "head_dim": 80, "value_dim": 80},  # padded
        {"two_sided": "model.vision"},
        PACKED_LATENT,
        {"parts_with": ("run.deterministic",)},
    ],
)
def test_what_cudnn_cannot_do_is_our_own_kernels_on_hopper(change):
    hopper: dict[str, Any] = FITS | change | {"capability": "9.0", "sequence_length": 131072}
    name, why = choose("auto", **hopper)
    assert name == "pallas" and "cuDNN" in why
    assert choose("auto", **FITS | {"capability": "9.0"})[0] == "cudnn"
    assert choose("pallas", **hopper)[0] == "pallas"
    assert (
        choose("auto", **hopper | {"head_dim": 256, "value_dim": 256})[0] == "triton"
    )  # wider than our own for Hopper
    assert choose("triton", **hopper)[0] == "triton"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"capability": "10.0"}, "compute capability 9.0 and this is 10.0"),
        ({"head_dim": 200}, "model.head_dim=200"),
        ({"head_dim": 224, "value_dim": 64}, "qk_rope_head_dim=224 with model.v_head_dim=64"),
        ({"dtype": jnp.float32}, "float32"),
        ({"platform": "cpu"}, "needs a GPU"),
    ],
)
def test_our_own_kernel_by_name_is_refused_where_it_cannot_run(change, reason):
    with pytest.raises(ConfigError, match=reason) as refused:
        choose("pallas", **FITS | {"capability": "9.0"} | change)
    assert str(refused.value).startswith("kernels.attention=pallas cannot run") and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"capability": "7.5"}, "compute capability 8.0 or newer and this is 7.5"),
        ({"head_dim": 264}, "up to 256/256 and the model has model.head_dim=264"),
        ({"dtype": jnp.float32}, "float32"),
        ({"has_bias": True}, "model.position=relative"),
        ({"platform": "cpu"}, "needs a GPU"),
    ],
)
def test_the_kernel_for_any_gpu_by_name_is_refused_where_it_cannot_run(change, reason):
    with pytest.raises(ConfigError, match=reason) as refused:
        choose("triton", **FITS | change)
    assert str(refused.value).startswith("kernels.attention=triton cannot run") and "\n" not in str(refused.value)


def test_latent_attention_takes_our_own_kernel_on_hopper():
    name, why = choose("auto", **FITS | HOPPER_LATENT)
    assert name == "pallas" and "faster than cuDNN for keys and values of widths 192 and 128" in why
    assert choose("cudnn", **FITS | HOPPER_LATENT)[0] == "cudnn"


def test_heads_up_to_256_need_cudnn_by_name_before_hopper():
    wide: dict[str, Any] = FITS | {"head_dim": 256}
    assert choose("auto", **wide)[0] == "triton"
    assert choose("cudnn", **wide)[0] == choose("auto", **wide | {"capability": "9.0"})[0] == "cudnn"


def test_reference_by_name_runs_anywhere():
    assert choose("reference", **FITS) == ("reference", "kernels.attention=reference")


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("heads", [(6, 2), (4, 4)], ids=str)
def test_the_last_tokens_attend_to_a_cache_as_to_the_whole_sequence(qkv, rng, new, heads):
    """With sinks and a soft-cap; as speculation does with its drafts, several tokens of each head at once."""
    q, k, v = qkv(*heads, 8)
    sinks = rng.normal(size=heads[0])
    caches = (np.asarray(a.swapaxes(1, 2), jnp.float32) for a in (k, v))
    visible = np.arange(S) <= np.arange(S - new, S)[:, None]
    visible = np.asarray(np.broadcast_to(visible, (2, new, S)))
    settings = AttentionSettings(softcap=2.0, sinks=np.asarray(sinks, jnp.float32))
    run = jax.jit(lambda q, k, v: cached_attention(q, k, v, visible, settings))
    found = run(np.asarray(q[:, -new:], jnp.float32), *caches)
    np.testing.assert_allclose(found, numpy_attention(q, k, v, sinks, softcap=2.0)[:, -new:], rtol=1e-4, atol=1e-5)
