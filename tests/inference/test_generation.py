"""Generated tokens are transformers', on one device and on meshes; sampling is that of a plain NumPy loop."""

import copy
import json
import os
import re
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_models import COMMON, HYBRID, LATENT_MODELS, MAMBA, MIXTRAL
from models_in_use import build

import megajax
from megajax.errors import InputError
from megajax.inference.comm import Decode, Prefill
from megajax.inference.generation import Generator, continue_texts, generator
from megajax.inference.language_model import choose_kernels
from megajax.inference.load import for_inference
from megajax.inference.sampling import Sampling, choose, remaining
from megajax.inference.weights import abstract_parameters, abstract_state, from_parameters
from megajax.kernel_choice import Hardware
from megajax.model import Transformer, bind
from megajax.schema.model import ModelConfig

GREEDY = Sampling(temperature=0)


def mesh(**sizes: int) -> jax.sharding.Mesh:
    return megajax.build_mesh(sizes, jax.devices()[: int(np.prod([*sizes.values()]))])


def last(pieces):
    """All tokens, from the last piece."""
    return [*pieces][-1]


def long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("tiny_mistral", {"fsdp": 2, "tensor": 2}),  # two query heads of each KV head on a device; three KV heads
        ("tiny_nemotron_h", {"data": 2, "expert": 2, "tensor": 2}),  # states beside a cache
        long("tiny_qwen3_local", {"pipeline": 2, "fsdp": 2, "tensor": 2}),
        long("tiny_gpt_oss", {"data": 2, "expert": 2, "tensor": 2}),
        long("tiny_kimi_linear", {"fsdp": 2, "tensor": 2}),  # beside a cache of latent attention
        long("tiny_falcon_h1", {"fsdp": 2, "tensor": 2}),  # both in a layer
    ],
)
def test_a_mesh_generates_the_tokens_of_transformers(references, folder_of, name, sizes):
    model, expected = megajax.from_hf(folder_of(name), mesh(**sizes)), references[name]
    four = [*expected["prompts"], expected["prompts"][0]]  # divided over `fsdp` or `data`
    assert last(Generator(model, GREEDY).tokens(four, 50)) == [*expected["tokens"], expected["tokens"][0]]
    matrices = [w for layer in model.weights.layers for name, w in layer.items() if name.endswith(("down", "output"))]
    assert all(w.addressable_data(0).size < w.size for w in matrices), "each device holds a part"


OF_TWO = """
import json, sys
from megajax.cluster.joining import start_processes
start_processes(peer_timeout=60)
import jax, megajax
from megajax.inference.generation import Generator
from megajax.inference.sampling import Sampling
model = megajax.from_hf(sys.argv[1], megajax.build_mesh({"fsdp": 2, "tensor": 2}, jax.devices()))
*_, tokens = Generator(model, Sampling(temperature=0)).tokens(json.loads(sys.argv[2]), 50, chunk=20)
print(json.dumps([jax.process_count(), tokens]))
"""


@pytest.mark.long
def test_two_processes_generate_the_tokens_of_transformers(references, folder_of):
    """Each has all tokens, though half of the sequences are on its devices."""
    expected = references["tiny_llama"]
    prompts = [*expected["prompts"], expected["prompts"][0]]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    variables = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    variables |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
    command = [sys.executable, "-c", OF_TWO, str(folder_of("tiny_llama")), json.dumps(prompts)]
    processes = [
        subprocess.Popen(command, env=variables | {"JAX_PROCESS_ID": str(index)}, stdout=subprocess.PIPE, text=True)
        for index in range(2)
    ]
    for process in processes:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0
        assert json.loads(output.splitlines()[-1]) == [2, [*expected["tokens"], expected["tokens"][0]]]


@pytest.fixture(scope="module")
def llama(folder_of):
    """Tests that set its tokenizer, by `monkeypatch`, share its programs."""
    return megajax.from_hf(folder_of("tiny_llama"))


@pytest.fixture(scope="module")
def one_layer(letters_folder):
    return changed(megajax.from_hf(letters_folder), max_length=512)


def test_the_likeliest_tokens_are_those_of_transformers(references, llama):
    expected = references["tiny_llama"]
    pieces = [*generator(llama, GREEDY).tokens(expected["prompts"], 50, chunk=20)]
    assert pieces[-1] == expected["tokens"]
    assert [max(map(len, piece)) for piece in pieces] == [1, 21, 41, 50]  # the first token is the prompt's


def test_logits_from_caches_are_those_of_the_plain_model():
    """Those of a prompt, of one token and of three at once, with a large sink of each head, windows and a soft-cap."""
    settings = COMMON | {"num_layers": 2, "num_kv_heads": 4, "attention_sinks": True, "attention_softcap": 4.0}
    settings |= {"sliding_window": 4, "layer_pattern": ["global", "local"]}
    tokens, plain = np.random.default_rng(0).integers(250, size=(4, 14)), {}

    def with_sinks(weights):
        sinks = 4 * jax.random.normal(jax.random.key(1), weights["blocks.dense.attention.sinks"].shape)
        plain.update({name: jnp.asarray(w) for name, w in (weights | {"blocks.dense.attention.sinks": sinks}).items()})
        return plain

    model = build(settings, {"fsdp": 2, "tensor": 2}, with_sinks)

    @jax.jit
    def cached(weights, tokens):
        common, longest = (model.mesh, model.kernels, model.max_length), 3
        comm = Prefill(*common, jnp.full(4, 10), 64, longest)
        outputs = [model.whole_sequences(weights, tokens[:, :10], comm)]
        for first, last in ((10, 11), (11, 11 + longest)):
            comm = Decode(*common, comm.caches)
            outputs.append(model.new_tokens(weights, tokens[:, first:last], jnp.full(4, first), comm))
        return model.model.logits(weights.outer, jnp.concatenate(outputs, axis=1))

    expected = jax.jit(bind(model.model, plain))(tokens)
    np.testing.assert_allclose(cached(model.weights, tokens), expected, atol=2e-5)


def test_padding_behind_a_prompt_leaves_no_trace_in_what_a_delta_rule_keeps():
    """A sequence goes on from the state and from the window of the convolution. Nemotron-H's mesh has Mamba-2's."""
    model = build(HYBRID | {"num_layers": 1, "block_pattern": ["gated_deltanet"]}, {})

    @jax.jit
    def kept(weights, tokens):
        comm = Prefill(model.mesh, model.kernels, model.max_length, jnp.array([7, 3]), 8, 1)
        model.whole_sequences(weights, tokens, comm)
        return comm.caches

    tokens = np.random.default_rng(0).integers(250, size=(2, 7))
    padded = np.where(np.arange(7) < 3, tokens, tokens[:, ::-1] + 1)
    for one, other in zip(*(jax.tree.leaves(kept(model.weights, rows)) for rows in (tokens, padded)), strict=True):
        np.testing.assert_array_equal(one[1], other[1])
        assert one[0].any() and not np.array_equal(one[0], other[0])


def changed(model, **values):
    """The model with other values for some of its attributes."""
    found = copy.copy(model)
    for name, value in values.items():
        setattr(found, name, value)
    return found


def test_a_sample_depends_on_the_seed_only(references, one_layer):
    """At this temperature nothing but the noise counts, of which each position of each sequence has its own."""
    prompts, drawing = references["tiny_llama"]["prompts"], Generator(one_layer, Sampling(temperature=1e9))
    together = last(drawing.tokens(prompts, 12, seed=3))
    for row, prompt in enumerate(prompts):
        keys = [jax.random.fold_in(jax.random.fold_in(jax.random.key(3), row), len(prompt) + i) for i in range(12)]
        assert (
            together[row]
            == jax.vmap(lambda key: jax.random.gumbel(key, (99,)).argmax())(jax.numpy.stack(keys)).tolist()
        )
    others = [prompts[0], prompts[2], prompts[1]]
    assert last(drawing.tokens(others, 12, seed=3))[0] == together[0], "beside other prompts"
    assert last(drawing.tokens(prompts, 12, seed=4)) != together
    *others, third = last(drawing.tokens(prompts[2:] * 3, 12, seed=3))
    assert third == together[2] and third not in others and others[0] != others[1], "each of equal prompts has its own"


@pytest.mark.long
def test_growing_prompts_share_programs(references, one_layer):
    prompts, settings = references["tiny_llama"]["prompts"], Sampling(temperature=1.0, top_k=20)
    growing = Generator(one_layer, settings, multiple=8)
    for length in (9, 17):
        last(growing.tokens([prompts[2][:length]], 12, seed=3, growing=True))
    with jax.no_tracing():
        for length in (16, 12):
            last(growing.tokens([prompts[2][:length]], 12, seed=3, growing=True))
    alone = last(Generator(one_layer, settings).tokens(prompts[:1], 12, seed=3))
    assert last(growing.tokens(prompts[:1], 12, seed=3, growing=True)) == alone


def test_a_stop_token_and_the_context_end_each_sequence_by_itself(references, llama):
    expected, prompts = references["tiny_llama"]["tokens"], references["tiny_llama"]["prompts"]
    never = next(token for token in range(99) if token not in expected[0])
    stop = expected[0][4]
    assert not {never, stop} & {*expected[1][:11], *expected[2][:3]}
    short = changed(llama, stop_tokens=(never, stop), max_length=20)  # the second of two
    assert (llama.prefix_token, short.prefix_token) == (None, never)  # a text is scored behind the end of another
    ending = Generator(short, GREEDY, multiple=8)
    stopped = expected[0][: expected[0].index(stop)]
    for count, chunk, is_cut in ((10, None, False), (14, None, True), (14, 4, True)):
        found = last(ending.tokens(prompts, count, chunk=chunk))
        assert found == [stopped, expected[1][: min(count, 11)], expected[2][:3]]
        assert ending.cut.tolist() == [False, is_cut, True]
    with pytest.raises(InputError, match="a prompt has 17 tokens, which leaves no room in the model's context of 17"):
        last(Generator(changed(llama, max_length=17), GREEDY).tokens(prompts[2:], 10))
    with pytest.raises(InputError, match="token 99 is not in the vocabulary: give ids from 0 to 98"):
        last(Generator(llama, GREEDY).tokens([[3, 99]], 10))


# Of each token: half of them begin a word, 24 and 3 are the two bytes of é.
PIECES = [(" " * (i % 2 == 0) + chr(32 + i)).encode() for i in range(99)]
PIECES[24], PIECES[3] = b"\xc3", b"\xa9"


class Pieces:
    """A tokenizer as SentencePiece's, which decodes the first word without its space."""

    special_tokens: list[str] = []
    vocab_size, end_of_document, begin_of_text, adds_begin = 99, None, None, False

    def decode(self, ids: list[int]) -> str:
        return b"".join(PIECES[i] for i in ids).decode(errors="replace").removeprefix(" ")


class Halves(Pieces):
    """Each token is one of the two bytes of é."""

    def decode(self, ids: list[int]) -> str:
        return b"".join(b"\xc3\xa9"[i % 2 : i % 2 + 1] for i in ids).decode(errors="replace")


def test_stop_texts_end_a_text_and_a_single_text_is_streamed(references, llama, monkeypatch):
    """A text is what its tokens add to the prompt's text: with its first space, and with characters of two tokens."""
    monkeypatch.setattr(llama, "tokenizer", Pieces())
    prompts = references["tiny_llama"]["prompts"]
    tokens = references["tiny_llama"]["tokens"]
    whole = [b"".join(PIECES[i] for i in row).decode(errors="replace") for row in tokens]
    assert all(text.startswith(" ") for text in whole) and "é" in whole[2]
    assert continue_texts(llama, prompts, 50, GREEDY) == whole
    stop = whole[0][20:23]
    cut = [text.partition(stop)[0] for text in whole]
    assert continue_texts(llama, prompts, 50, GREEDY, stop=[stop]) == cut
    for prompt, text, ends in ((prompts[0], cut[0], [stop]), (prompts[2], whole[2], [])):
        pieces: list[str] = []
        assert continue_texts(llama, [prompt], 50, GREEDY, stop=ends, on_text=pieces.append) == [text]
        assert "".join(pieces) == text and len(pieces) > 2 and (pieces[-2] or not ends)  # no step after it
    for first in range(8, 24):  # some of these texts begin in one piece and end in the next
        ends, pieces = [whole[0][first : first + 4], "\0"], []
        text = whole[0].partition(ends[0])[0]
        assert continue_texts(llama, prompts[:1], 50, GREEDY, stop=ends, on_text=pieces.append) == [text]
        assert "".join(pieces) == text
    monkeypatch.setattr(llama, "tokenizer", Halves())  # most pieces end in the first half of a character
    for prompt in prompts:
        pieces = []
        text = continue_texts(llama, [prompt], 50, GREEDY, on_text=pieces.append)[0]
        assert "".join(pieces) == text and "é" in text and len(pieces) > 2


def test_a_special_token_without_a_text_ends_a_text(references, llama, monkeypatch):
    """`stop` names it: a text of `--stop`, or of lm-eval's `until`."""
    prompts, tokens = references["tiny_llama"]["prompts"], references["tiny_llama"]["tokens"]
    end = tokens[0][30]
    assert tokens[0].index(end) == 30 and end not in tokens[2]

    class Named(Pieces):
        special_tokens = ["<end>"]

        def token_id(self, name: str) -> int | None:
            return {"<end>": end}.get(name)

    monkeypatch.setattr(llama, "tokenizer", Named())
    ids = [row[: row.index(end)] if end in row else row for row in tokens]
    texts = [b"".join(PIECES[i] for i in row).decode(errors="replace") for row in ids]
    pieces: list[str] = []
    for stop in ("<end>", "<end>\n"):
        assert continue_texts(llama, prompts, 50, GREEDY, stop=[stop]) == texts
        assert continue_texts(llama, prompts[:1], 50, GREEDY, stop=[stop], on_text=pieces.append) == texts[:1]
    assert "".join(pieces) == 2 * texts[0]


@pytest.mark.parametrize("name", Sampling._fields)
def test_a_number_of_the_sampling_outside_its_range_is_refused(name):
    for good in (0, 1):
        Sampling()._replace(**{name: good}).check()
    for bad in (-1, float("nan"), float("inf"), *((1.5,) if name in ("top_p", "min_p") else ())):
        with pytest.raises(InputError, match=f"^--{name.replace('_', '-')}={bad} is not a number of 0 "):
            Sampling()._replace(**{name: bad}).check()


def plain_remaining(logits: np.ndarray, sampling: Sampling) -> set[int]:
    """The tokens that remain, by a loop over the tokens from the likeliest."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    if sampling.top_k:
        order = order[: sampling.top_k]
    weights = np.exp(logits[order] - logits.max())
    probabilities, total, kept = weights / weights.sum(), 0.0, []
    for token, probability in zip(order, probabilities, strict=True):
        if total >= sampling.top_p:
            break
        if probability >= sampling.min_p * probabilities[0]:
            kept.append(token)
        total += probability
    return set(kept or order[:1])


@pytest.mark.smoke
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, top_k=5),
        Sampling(1.0, top_p=0.7),
        Sampling(1.0, min_p=0.2),
        Sampling(1.0, top_k=30, top_p=0.5, min_p=0.05),
        Sampling(1.0, top_p=1e-9),
        Sampling(1.0, top_p=0.0),
        Sampling(1.0, min_p=1.0),
    ],
)
def test_top_k_top_p_and_min_p_keep_the_tokens_of_a_plain_loop(sampling):
    logits = np.random.default_rng(0).normal(0, 2, (4, 97)).astype(np.float32)
    found = np.asarray(remaining(logits, sampling))
    for row, kept in zip(logits, found, strict=True):
        assert set(np.flatnonzero(np.isfinite(kept))) == plain_remaining(row.astype(np.float64), sampling)
        np.testing.assert_array_equal(kept[np.isfinite(kept)], row[np.isfinite(kept)])


def test_samples_follow_the_distribution():
    """4,000 samples, against the softmax of the logits over the remaining tokens."""
    logits = np.random.default_rng(1).normal(0, 1, 99).astype(np.float32)
    keys = jax.random.split(jax.random.key(0), 4000)
    found = choose(jax.numpy.broadcast_to(logits, (4000, 99)), Sampling(temperature=0.5, top_k=4), keys)
    expected = np.where(logits >= np.sort(logits)[-4], np.exp(logits / 0.5), 0)
    counts = np.bincount(np.asarray(found), minlength=99)
    assert np.abs(counts / 4000 - expected / expected.sum()).max() < 0.03


@pytest.mark.smoke
def test_experts_that_the_gpus_kernel_does_not_support_use_the_reference_with_a_warning():
    model = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 64, "num_experts": 4}
    batch, data = {"global_size": 1, "sequence_length": 8}, {"kind": "synthetic"}
    content = {"model": model, "mesh": {"data": 1}, "batch": batch, "data": data}
    with pytest.warns(UserWarning, match="experts run slowly here, by kernels.grouped_matmul=reference: .* is 7.0"):
        kernels = choose_kernels(megajax.Config.model_validate(content), Hardware("gpu", "7.0"))
    assert kernels.grouped_matmul == "reference"


@pytest.mark.parametrize("model", [COMMON | {"attention_sinks": True}, MIXTRAL, HYBRID, MAMBA, LATENT_MODELS["v3"]])
def test_a_model_in_bfloat16_has_norms_routers_and_decays_in_float32(model):
    found = abstract_parameters(Transformer(ModelConfig.model_validate(model)), mesh(), jnp.bfloat16)
    in_fp32 = {name for name, array in found.items() if array.dtype == jnp.float32}
    pattern = r"norm(_bias)?|\.sinks|moe\.router|\.decay_(rate|bias)|mamba2\.(skip|step_bias)"
    assert in_fp32 == {name for name in found if re.search(f"({pattern})$", name)} and len(in_fp32) < len(found)


@pytest.mark.smoke
def test_the_trainings_kernels_are_not_asked_for():
    """They may not run here, as those of a Hopper GPU."""
    model = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 64, "block_pattern": ["gated_deltanet"]}
    content = {"model": model, "batch": {"global_size": 1, "sequence_length": 8}, "data": {"kind": "synthetic"}}
    asked = {"kernels": {"attention": "cudnn", "linear_attention": "jla"}}
    config = for_inference(megajax.Config.model_validate(content | asked), "bfloat16", 0)
    kernels = choose_kernels(config, Hardware("cpu"))
    assert (kernels.attention, kernels.linear_attention) == ("reference", "reference")
    # Nor FP8, nor attention within documents: a prompt is one.
    model |= {"hidden_size": 128, "num_heads": 1, "num_layers": 2, "block_pattern": ["dense"]}
    trained = content | {"model": model, "data": {"kind": "synthetic", "reset_attention": True}}
    trained |= {"precision": {"fp8": {"recipe": "current"}}, "batch": {"global_size": 1, "sequence_length": 512}}
    for hardware in (Hardware("cpu"), Hardware("gpu", "8.0"), Hardware("gpu", "9.0")):
        used, plain = (
            for_inference(megajax.Config.model_validate(each), "bfloat16", 0)
            for each in (trained, trained | {"precision": {}, "data": {"kind": "synthetic"}})
        )
        assert choose_kernels(used, hardware) == choose_kernels(plain, hardware)
        assert not used.precision.fp8.chosen.is_on


@pytest.mark.smoke
def test_experts_have_no_capacity_that_padding_would_use_up():
    model = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 64, "num_experts": 2}
    model |= {"router": {"capacity_factor": 1.0, "z_loss": 0.5}}
    content = {"model": model, "batch": {"global_size": 1, "sequence_length": 8}, "data": {"kind": "synthetic"}}
    router = for_inference(megajax.Config.model_validate(content), "bfloat16", 0).model.router
    assert (router.capacity_factor, router.z_loss) == (None, 0.5)


def test_each_layer_gets_its_own_balancing_bias():
    """The layers with experts are counted from the first of them, not from the model's first."""
    sizes = {"num_layers": 4, "hidden_size": 8, "num_heads": 1, "vocab_size": 16, "num_experts": 2}
    config = ModelConfig.model_validate({**sizes, "first_dense_layers": 2, "router": {"expert_bias": True}})
    model, one = Transformer(config), mesh(fsdp=1)
    arrays = {name: jnp.zeros(x.shape) for name, x in abstract_parameters(model, one, jnp.float32).items()}
    [(kind, names)] = [(kind, names) for kind, names in abstract_state(model, one).items() if names]
    [name] = names
    weights = from_parameters(model, arrays, {kind: {name: jnp.array([[1.0, 2.0], [3.0, 4.0]])}}, one)
    assert [[*map(float, state[name])] if state else [] for state in weights.state] == [[], [], [1, 2], [3, 4]]
