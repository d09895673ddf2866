"""Speculation: the tokens and their distribution are the model's own, and the drafts are the modules' predictions."""

import itertools
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_models import COMMON, HYBRID, LATENT_MODELS, MAMBA
from models_in_use import build, greedy_tokens
from single_device import weights_of

import megajax
from megajax.config import Config, ModelConfig
from megajax.hf.convert import export, load, read_model
from megajax.hf.quantising import StoredForm
from megajax.inference import speculation
from megajax.inference.generation import GenerationState, Generator
from megajax.inference.language_model import block_inputs
from megajax.inference.sampling import Sampling, distribution, verify
from megajax.inference.speculation import Drafter, Drafts, DraftWindow, Verified
from megajax.kernel_choice import Kernels
from megajax.layout.kinds import extra_kind
from megajax.mesh import build_mesh
from megajax.model.comm import Comm
from megajax.model.sublayer import LayerContext

PROMPTS, NEW = [[3, 5, 9, 11, 17], [100, 7], [1] * 9, [8]], 14
LATENT = LATENT_MODELS["v3"] | {"num_layers": 2, "mtp_layers": 2}
WINDOWS = COMMON | {"num_layers": 2, "num_kv_heads": 4, "mtp_layers": 1}
WINDOWS |= {"sliding_window": 6, "layer_pattern": ["global", "local"]}
# States in the layers and in both modules, whose steps begin before the newest token
STATES = HYBRID | {"num_layers": 2, "block_pattern": ["dense", "gated_deltanet"], "mtp_layers": 2}
NEMOTRON = MAMBA | {"block_pattern": ["mamba2", "experts", "mamba2", "attention"], "mtp_layers": 1}
BATCH = {"batch": {"global_size": 1, "sequence_length": 64}, "data": {"kind": "synthetic"}}
CASES = {"latent": (LATENT, 3), "windows": (WINDOWS, 2), "states": (STATES, 3)}


def agreeing(params):
    """Larger embeddings: the newest token decides most, for the model and for its modules, which often agree."""
    params = {name: np.array(array) for name, array in params.items()}
    params["embedding.tokens"] *= 20
    projections = params["blocks.mtp.join.projection"]
    projections[:, : projections.shape[2]] += 3 * np.eye(projections.shape[2])
    return params


@pytest.mark.long
@pytest.mark.parametrize(("settings", "drafts"), [*CASES.values(), (NEMOTRON, 2)], ids=[*CASES, "nemotron"])
def test_greedy_tokens_are_those_without_drafts(settings, drafts):
    expected = greedy_tokens(build(settings, {}, agreeing), PROMPTS, NEW)
    model = build(settings, {"fsdp": 2, "tensor": 2}, agreeing, drafts)
    generator = Generator(model, Sampling(temperature=0))
    assert [*generator.tokens(PROMPTS, NEW)][-1] == expected
    steps, accepted = generator.verified
    tokens = len(PROMPTS) * (NEW - 1)
    assert 0 < accepted[-1] < accepted[0] < steps, "all drafts of a step are accepted, none, and some"
    assert tokens <= steps + accepted.sum() <= tokens + drafts * len(PROMPTS), "a last step may go beyond NEW"

    if settings is not WINDOWS:  # stopping does not depend on the kind of attention
        return
    generator.stop = np.array([expected[0][5], -1])  # in the middle of a step's tokens or at its end
    cut = [tokens[: tokens.index(expected[0][5])] if expected[0][5] in tokens else tokens for tokens in expected]
    generator._decode.clear_cache()
    assert [*generator.tokens(PROMPTS, NEW)][-1] == cut


def module_outputs(model, k: int, outputs, tokens):
    """Module k on one device: outputs `[S, D]` of the one before, the tokens `[S]` after theirs → its outputs."""
    layer, transformer = model.config.num_layers + k, model.model
    pair = jnp.concatenate([transformer.embed_tokens(model.weights.outer, tokens), outputs], axis=1)
    inputs = block_inputs(jnp.arange(len(tokens))[None])
    block, weights, state = transformer.blocks["mtp"], model.weights.layers[layer], model.weights.state[layer]
    ctx = LayerContext(Comm(), inputs, layer, extra_kind(model.config), state=state)
    return block.apply(weights, pair, ctx)[0]


def draft_distributions(model, programs, text: list[int], drafts: list[int], sampling) -> list[np.ndarray]:
    """The distribution of each of the `drafts` after `text`, from modules that run on whole sequences."""
    size, found = 40, []

    def padded(tokens):
        return np.array(tokens + [0] * (size - len(tokens)))

    whole, modules = programs
    last, following, y = len(text) - 2, text[1:], whole(model.weights, padded(text)[None])[0]
    x = y
    for i in range(len(drafts)):
        k = min(i, len(modules) - 1)
        if i > k:  # the last module moves on by a token, with its own output in place of one that is not known
            following, last = [*following, drafts[i - 1]], last + 1
            x = x.at[last].set(y[last - 1])
        elif i:
            following, x = [*following[1:], drafts[i - 1]], y
        y = modules[k](x, padded(following))
        found.append(np.asarray(distribution(model.model.logits(model.weights.outer, y[last]), sampling)))
    return found


@pytest.mark.long
@pytest.mark.parametrize("case", ["latent", "states"])  # windows: their greedy tokens
def test_drafts_are_the_predictions_of_modules_on_whole_sequences(case):
    """After each step, with random weights: caches, positions and rejected drafts leave no trace."""
    settings, drafts = CASES[case]
    sampling, states = Sampling(temperature=1.0, top_k=50), []
    model = build(settings, {}, None, drafts)
    generator = Generator(model, sampling, multiple=1)  # without room to spare
    decode, prefill = generator._decode, generator._prefill

    def recorded(program):
        def run(*arguments, **settings):
            progress = program(*arguments, **settings)
            states.append(jax.device_get((progress.tokens, progress.count, progress.drafts)))
            return progress

        return run

    generator._prefill, generator._decode = recorded(prefill), recorded(decode)
    assert len([*generator.tokens(PROMPTS, 8, chunk=1)][-1][0]) == 8
    modules = [
        jax.jit(lambda x, tokens, k=k: module_outputs(model, k, x, tokens)) for k in range(settings["mtp_layers"])
    ]
    programs = jax.jit(model.whole_sequences), modules
    assert len(states) > 4
    for tokens, count, state in states:
        for row, prompt in enumerate(PROMPTS):
            if count[row] > tokens.shape[1]:  # its last step went beyond the tokens that were asked for
                continue
            text = [*prompt, *tokens[row, : count[row]].tolist()]
            expected = draft_distributions(model, programs, text, state.tokens[row].tolist(), sampling)
            for draft in range(drafts):
                np.testing.assert_allclose(state.distributions[row, draft], expected[draft], atol=2e-5)


@pytest.mark.smoke
def test_verified_drafts_have_the_distribution_of_the_model():
    """Exactly, by all drafts and all random numbers in eighths: two drafts of three tokens."""
    p1, p2, p3 = np.array([4, 3, 1]) / 8, np.array([[2, 2, 4], [1, 7, 0], [8, 0, 0]]) / 8, np.array([1, 0, 7]) / 8
    q1, q2 = np.array([2, 4, 2]) / 8, np.array([[4, 2, 2], [2, 2, 4], [4, 4, 0]]) / 8
    rows = [*itertools.product(range(3), range(3), range(8), range(8))]
    drafts = np.array([row[:2] for row in rows])
    uniform = (np.array([row[2:] for row in rows]) + 0.5) / 8
    first, second = drafts.T
    weight = q1[first] * q2[first, second] / 64
    p = np.stack([np.broadcast_to(p1, (len(rows), 3)), p2[first], np.broadcast_to(p3, (len(rows), 3))], axis=1)
    q = np.stack([np.broadcast_to(q1, (len(rows), 3)), q2[first]], axis=1)
    accepted, rest = (np.asarray(a) for a in verify(*map(jnp.asarray, (p, q, drafts, uniform))))

    # The first token: the accepted draft, or one from the rest. The second likewise, where the first was accepted.
    one = np.eye(3)
    tokens = np.where((accepted > 0)[:, None], one[first], rest)
    np.testing.assert_allclose(weight @ tokens, p1, atol=1e-6)
    for token in range(3):
        here = (accepted > 0) & (first == token)
        tokens = np.where((accepted > 1)[here, None], one[second[here]], rest[here])
        np.testing.assert_allclose(weight[here] @ tokens / weight[here].sum(), p2[token], atol=1e-6)
    np.testing.assert_allclose(rest[accepted == 2], np.broadcast_to(p3, ((accepted == 2).sum(), 3)), atol=1e-6)
    np.testing.assert_allclose(weight @ (accepted > 0), np.minimum(p1, q1).sum(), atol=1e-6)


def test_steps_of_ended_sequences_count_neither_tokens_nor_drafts():
    """Of four sequences 2, 1, 0 and 2 drafts are accepted; the last one has had all of its tokens before."""
    accepted, rows = jnp.array([2, 1, 0, 2]), jnp.arange(4)
    drafts = Drafts(jnp.array([[11, 12]] * 4), *(jnp.zeros(4) for _ in range(3)))
    drafter = SimpleNamespace(
        count=2,
        verify=lambda *_: (accepted, 20 + rows, None),
        draft=lambda *_: (drafts._replace(tokens=-drafts.tokens), ()),
    )
    generator = object.__new__(Generator)
    generator.model = SimpleNamespace(mesh=build_mesh({}, jax.devices()[:1]), kernels=Kernels(), max_length=16)
    generator.stop = np.array([-1])
    state = GenerationState((), jnp.full((4, 8), -1), rows + 1, rows + 5, jnp.zeros(4, bool), rows)
    state = state._replace(drafts=drafts, verified=Verified(jnp.int32(0), jnp.zeros(2, int)))
    after = jax.jit(partial(generator._speculative_step, drafter))(jnp.array([8, 8, 8, 4]), None, state)
    assert after.count.tolist() == [1 + 3, 2 + 2, 3 + 1, 4]
    assert after.tokens[:3, :6].tolist() == [
        [-1, 11, 12, 20, -1, -1],
        [-1, -1, 11, 21, -1, -1],
        [-1, -1, -1, 22, -1, -1],
    ]
    assert after.drafts.tokens[:, 0].tolist() == [-11, -11, -11, 11] and (after.tokens[3] == -1).all()
    assert after.verified.steps == 3 and after.verified.accepted.tolist() == [2, 1]
    drafts = "speculation: 2.00 tokens per step; drafts 1 to 2 were accepted in 67%, 33% of 3 steps."
    assert after.verified.explain() == drafts
    one = "speculation: 1.25 tokens per step; the draft was accepted in 25% of 4 steps."
    assert Verified(jnp.int32(4), jnp.array([1])).explain() == one


@pytest.mark.parametrize("modules", [1, 2])
def test_each_draft_is_drawn_with_the_key_of_its_position(monkeypatch, modules):
    """Modules draft three tokens: the window ends at position 5 + 2, and the newest token is the one after it.

    Each reads the window and the tokens after its own, the last one at each next position the draft before.
    """
    drawn, read = [], []
    drafter = object.__new__(Drafter)
    drafter.model = SimpleNamespace(mesh=None, kernels=None, max_length=16)
    drafter.count, drafter.modules = 3, modules
    drafter._module = lambda weights, k, x, tokens, positions, comm: read.append(positions.tolist()) or x
    drafter._choose = lambda weights, h, keys, at: drawn.append(at.tolist()) or (jnp.array([at[0]]), jnp.zeros((1, 2)))
    monkeypatch.setattr(speculation, "Decode", lambda *_: SimpleNamespace(caches=(None,)))
    window = DraftWindow(jnp.zeros((1, 4, 2)), jnp.zeros((1, 4), int), jnp.array([5]), jnp.array([2]))
    drafts, _ = drafter.draft(None, window, jnp.array([1]), None, SimpleNamespace(caches=(None,) * modules))
    assert read == [*[[[5, 6, 7, 8]]] * modules, [[8]], [[9]]][:3]
    assert drawn == [[9], [10], [11]] and drafts.tokens.tolist() == [[9, 10, 11]]


@pytest.mark.smoke
def test_equal_distributions_accept_every_draft():
    p = jnp.array([[[0.25, 0.75], [1.0, 0.0], [0.5, 0.5]]])
    accepted, rest = verify(p, p[:, :2], jnp.array([[1, 0]]), jnp.full((1, 2), 1 - 2**-24))
    assert accepted.tolist() == [2] and rest.tolist() == [[0.5, 0.5]]
    greedy = distribution(jnp.array([[1.0, 3.0, 2.0]]), Sampling(temperature=0))
    assert greedy.tolist() == [[0, 1, 0]]


@pytest.mark.smoke
def test_drafts_are_drawn_at_the_temperature_of_the_command():
    logits = np.array([[[1.0, 3.0, 2.0, -4.0]]], np.float32)
    shares = np.where(logits > 1.5, np.exp(logits / 2), 0)
    found = jax.jit(partial(distribution, sampling=Sampling(temperature=2.0, top_k=2)))(logits)
    np.testing.assert_allclose(found, shares / shares.sum(), rtol=1e-6)


@pytest.mark.long
def test_qwen3_next_drafts_with_its_module(references, folder_of, tmp_path):
    """A published folder has a module that transformers leaves out; this one's is random."""
    folder, expected = folder_of("tiny_qwen3_next"), references["tiny_qwen3_next"]
    model = ModelConfig.model_validate(read_model(folder) | {"mtp_layers": 1, "vocab_multiple": 1})
    weights = weights_of(Config.model_validate({"model": model.model_dump() | {"init_std": 0.3}, **BATCH}))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    published = {n: w for n, w in weights.items() if not n.startswith("blocks.mtp.")}
    wanted = {n: jax.ShapeDtypeStruct(w.shape, np.float32, sharding=device) for n, w in published.items()}
    own, _ = load(folder, wanted, {}, model.model_copy(update={"mtp_layers": 0}), "folder")
    export({n: np.asarray(w) for n, w in (weights | own).items()}, model, tmp_path, StoredForm("float32"))
    generator = Generator(megajax.from_hf(tmp_path, speculate=2), Sampling(temperature=0))
    assert [*generator.tokens(expected["prompts"], 50)][-1] == expected["tokens"]
    steps, accepted = generator.verified
    assert steps < 3 * 49 and accepted[0] > 0
