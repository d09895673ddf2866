"""Multi-token prediction: the modules against the paper's formulas in float64, and the same on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.interpreters.partial_eval import dce_jaxpr
from mesh_models import MIXTRAL, MODELS, UNPACKED

from megajax.config import Config
from megajax.config.checks import check_mesh
from megajax.config.pipeline_checks import check_stages
from megajax.errors import ConfigError
from megajax.kernel_choice import HOPPER
from megajax.mesh import AXES, build_mesh
from megajax.model import parameters
from megajax.model.comm import Comm
from megajax.model.mtp_block import PredictionBlock
from megajax.reference import Reference
from megajax.step.gradients import gradient_function
from megajax.step.mtp import fields_of_modules
from megajax.step_plan import ExtraPlan, StepPlan
from megajax.training.batches import to_global
from megajax.training.step import TrainProgram

# A dense and a MoE layer: the modules have experts
MIXED = {
    "num_layers": 2,
    "first_dense_layers": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "ffn_hidden_size": 24,
    "vocab_size": 40,
    "vocab_multiple": 1,
    "position": "none",
    "num_experts": 4,
    "experts_per_token": 2,
    "expert_ffn_hidden_size": 12,
    "tie_embeddings": True,
    "z_loss": 0.01,
    "mtp_layers": 2,
    "mtp_loss_weight": 0.7,
}
ROWS, S, EPSILON = 2, 5, 1e-5
DOCUMENTS = [[4, 1], [5]]  # lengths, of S input tokens


def norm(x, scale):
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + EPSILON) * scale


def swiglu(x, gate, up, down):
    g = x @ gate
    return g / (1 + jnp.exp(-g)) * (x @ up) @ down


def block(w, x):
    """One block of one document `[T, D]`."""
    h, at = norm(x, w["attention.norm"]), np.arange(len(x))
    q, k, v = (jnp.einsum("td,dnh->nth", h, w[f"attention.{name}"]) for name in ("query", "key", "value"))
    scores = jnp.einsum("nqh,nkh->nqk", q, k) / np.sqrt(q.shape[-1])
    weights = jax.nn.softmax(jnp.where(at[:, None] >= at, scores, -jnp.inf))
    x = x + jnp.einsum("nqk,nkh,nhd->qd", weights, v, w["attention.output"])
    if "mlp.norm" in w:
        return x + swiglu(norm(x, w["mlp.norm"]), w["mlp.gate"], w["mlp.up"], w["mlp.down"])
    h = norm(x, w["moe.norm"])
    logits = h @ w["moe.router"]
    chosen = logits >= jnp.sort(logits, axis=-1)[:, -2:-1]
    weights = jax.nn.softmax(jnp.where(chosen, logits, -jnp.inf))
    outputs = jax.vmap(lambda *matrices: swiglu(h, *matrices))(w["moe.gate"], w["moe.up"], w["moe.down"])
    return x + jnp.einsum("te,etd->td", weights, outputs)


def losses(w, h, targets, mask):
    """(summed cross-entropy, summed squared log-sum-exp) of the shared head over normalised `h [T, D]`."""
    logits = h @ w["embedding.tokens"].T
    total = jax.nn.logsumexp(logits, axis=-1)
    return jnp.stack([((total - logits[np.arange(len(h)), targets]) * mask).sum(), (total**2 * mask).sum()])


def by_the_paper(w, tokens, mask):
    """(loss that is differentiated, language model's loss, modules' losses): each document by itself.

    `tokens [ROWS, S + 1]`; `mask [ROWS, S]` counts the predictions of tokens 1 to S.
    """
    depth = MIXED["mtp_layers"]
    sums, counts = [jnp.zeros(2)] * (depth + 1), np.zeros(depth + 1)

    def of(prefix, row):
        return {n.removeprefix(prefix): a[row] for n, a in w.items() if n.startswith(prefix)}

    for row, lengths in enumerate(DOCUMENTS):
        for start, length in zip(np.cumsum([0, *lengths]), lengths, strict=False):
            t, m = tokens[row, start : start + length + 1], mask[row, start : start + length]
            x = w["embedding.tokens"][t[:-1]]
            h = norm(block(of("blocks.moe.", 0), block(of("blocks.dense.", 0), x)), w["final_norm"])
            for k in range(min(depth + 1, length)):  # positions i with i + k in the document
                if k:
                    own, ahead = of("blocks.mtp.", k - 1), w["embedding.tokens"][t[k:-1]]
                    pair = [norm(ahead, own["join.embedding_norm"]), norm(h[:-1], own["join.stream_norm"])]
                    h = block(own, jnp.concatenate(pair, axis=-1) @ own["join.projection"])
                    h = norm(h, own["final_norm"])
                sums[k] += losses(w, h, t[k + 1 :], m[k:])
                counts[k] += m[k:].sum()
    means = [total / count for total, count in zip(sums, counts, strict=True)]
    weights = [1, *[MIXED["mtp_loss_weight"] / depth] * depth]
    total = sum(a * (mean[0] + MIXED["z_loss"] * mean[1]) for a, mean in zip(weights, means, strict=True))
    return total, (means[0][0], jnp.stack([mean[0] for mean in means[1:]]))


@pytest.mark.long
def test_losses_and_gradients_are_those_of_the_paper():
    settings = {
        "model": MIXED,
        "batch": {"global_size": ROWS, "sequence_length": S},
        "precision": {"compute": "float32"},
        "data": {"kind": "synthetic", "synthetic_documents": 3, "reset_attention": True},
    }
    program = TrainProgram.build(Config.model_validate(settings), build_mesh(dict.fromkeys(AXES, 1), jax.devices()[:1]))
    rng = np.random.default_rng(5)
    around = {name: 1.0 if name.endswith("norm") else 0.0 for name in program.placements}
    weights = {n: around[n] + rng.normal(0, 0.3, p.shape) for n, p in parameters(program.model).items()}
    tokens = rng.integers(0, MIXED["vocab_size"], (ROWS, S + 1))
    mask = rng.random((ROWS, S)) < 0.8
    fields = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "loss_mask": mask,
        "positions": np.broadcast_to(np.arange(S), (ROWS, S)),
        "segment_ids": np.array([np.repeat(np.arange(len(each)), each) for each in DOCUMENTS]),
    }
    params = {name: np.asarray(w, np.float32) for name, w in weights.items()}
    sums, found, *_ = jax.jit(gradient_function(program.graph, program.mesh))(
        params, {}, to_global(program, fields), np.int32(0), np.float32(1)
    )
    with jax.enable_x64(True):
        exact = {name: np.asarray(w, np.float64) for name, w in params.items()}
        run = jax.jit(jax.value_and_grad(lambda w: by_the_paper(w, tokens, mask), has_aux=True))
        (_, (loss, modules)), expected = jax.device_get(run(exact))
    np.testing.assert_allclose([sums["loss"], *sums["mtp_loss"]], [loss, *modules], rtol=1e-5)
    for name, gradient in expected.items():
        assert np.linalg.norm(found[name] - gradient) <= 1e-5 * np.linalg.norm(gradient), name


def test_targets_shift_within_a_document_and_nowhere_else():
    fields = {
        "targets": np.arange(1, 8)[None],
        "loss_mask": np.array([[1, 1, 1, 0, 1, 1, 1.0]]),
        "segment_ids": np.array([[0, 0, 0, 1, 1, 1, 1]]),
    }
    found = fields_of_modules(fields, 2)
    np.testing.assert_array_equal(found["mtp_targets"][0].T, [[2, 3, 0, 5, 6, 7, 0], [3, 0, 0, 6, 7, 0, 0]])
    np.testing.assert_array_equal(found["mtp_mask"][0].T, [[1, 1, 0, 1, 1, 1, 0], [1, 0, 0, 1, 1, 0, 0]])
    del fields["segment_ids"]
    found = fields_of_modules(fields, 1)
    np.testing.assert_array_equal(found["mtp_targets"][0, :, 0], [2, 3, 4, 5, 6, 7, 0])
    np.testing.assert_array_equal(found["mtp_mask"][0, :, 0], [1, 1, 0, 1, 1, 1, 0])


def test_both_norms_of_a_join_and_its_output_have_their_biases(table):
    """Those of layer norms, in NumPy."""
    block = PredictionBlock(table.make_config(MODELS["gpt2"] | {"mtp_layers": 1}).model, "mtp")
    rng = np.random.default_rng(3)
    w = {n: rng.standard_normal(p.shape).astype(np.float32) for n, p in parameters(block.join).items()}
    pair = rng.standard_normal((3, 2 * block.config.hidden_size)).astype(np.float32)

    def normalised(x, name):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * w[name] + w[f"{name}_bias"]

    halves = zip(np.split(pair, 2, axis=1), ("embedding_norm", "stream_norm"), strict=True)
    expected = np.concatenate([normalised(*half) for half in halves], axis=1) @ w["projection"]
    np.testing.assert_allclose(block.join(w, pair, Comm()), expected, rtol=1e-4, atol=1e-4)


# With `tensor` 2 three query heads a device: two stages cannot share them evenly
DENSE = {**MODELS["llama"], "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64}
DENSE |= {"num_heads": 6, "num_kv_heads": 2, "head_dim": 8, "attention_sinks": True}
PACKED = {"data": {"synthetic_documents": 5, "reset_attention": True, "reset_positions": True}}
PACKED |= {"batch": {"sequence_length": 48}, "objective": {"average": "microbatches"}}
EXPERTS = MIXTRAL | {"router": {"score_function": "sigmoid", "expert_bias": True, "sequence_loss": 0.05}}
# A stage has one of two KV heads, which two devices of a group share.
OF_TWO, HEADS_AND_RING = DENSE | {"num_heads": 8}, {"communication": {"context": "all_to_all+ring"}}
# model, depth, mesh, microbatches, other sections
MESHES = {
    "context and stages": (DENSE, 2, {"context": 2, "tensor": 2, "pipeline": 2}, 2, PACKED),
    "heads and ring": (OF_TWO, 1, {"context": 4, "pipeline": 2}, 2, HEADS_AND_RING),
}


@pytest.mark.long
@pytest.mark.parametrize("case", MESHES)
def test_the_modules_train_on_a_mesh_as_on_one_device(table, difference, case):
    model, depth, mesh, microbatches, sections = MESHES[case]
    settings = {"microbatches": microbatches, "steps": 2, "optimizer": "sgd", **sections}
    found = difference(table.make_config({**model, "mtp_layers": depth}, mesh, **settings))
    assert not found.problems(), found


PADDED_EXPERTS = (MIXTRAL, 1, {"fsdp": 4, "pipeline": 2}, 2, {"data": UNPACKED})


@pytest.mark.parametrize("case", [*MESHES.values(), PADDED_EXPERTS], ids=["sinks", "a key", "padding"])
def test_what_stages_share_fits_their_tokens(table, case):
    """The step can be traced; its numbers are the long tests'. Of the sublayer that reads what they share."""
    model, depth, mesh, microbatches, sections = case
    model = model | {"block_pattern": ["experts" if "num_experts" in model else "attention"]}
    sections = {"microbatches": microbatches, "optimizer": "sgd", **sections}
    config = table.make_config(model | {"mtp_layers": depth}, mesh, **sections)
    program = TrainProgram.build(config, build_mesh(check_mesh(config, 8), jax.devices()[:8]))
    _, metrics = jax.eval_shape(program.train_step, program.abstract_state, program.abstract_batch)
    assert metrics["mtp_loss"].shape == ()


def test_stages_must_divide_the_tokens_of_a_sequence(table):
    with pytest.raises(ConfigError, match=r"pipeline=4 does not divide the 6 tokens .* of batch.sequence_length=12"):
        model = DENSE | {"num_layers": 4, "mtp_layers": 1}
        config = table.make_config(model, batch={"sequence_length": 12}, microbatches=4)
        check_stages(config, dict.fromkeys(AXES, 1) | {"pipeline": 4, "context": 2})
    with pytest.raises(ConfigError, match=r"mesh.tensor=1 / mesh.pipeline=2 is 8 .*: change it, or set precision.fp8"):
        fp8 = {"compute": "bfloat16", "fp8": {"recipe": "current"}}
        model = MODELS["llama"] | {"head_dim": 16, "mtp_layers": 1}
        batch = {"sequence_length": 16, "global_size": 2}
        check_mesh(table.make_config(model, {"pipeline": 2}, batch=batch, microbatches=2, precision=fp8), 2)


def test_each_modules_embedding_has_a_dropout_mask_of_its_own(table):
    """The numbers that are folded into the step's key: 2^31 + 2 and the module (`step.mtp.DROPOUT`).

    And each weight, biases of norms too, is read.
    """
    sizes = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 32, "mtp_layers": 3, "dropout": 0.5}
    sizes |= {"norm": "layernorm", "block_pattern": ["mlp"]}
    config = {"model": sizes, "batch": {"global_size": 1, "sequence_length": 8}}
    config = Config.model_validate(config | {"optimizer": {"kind": "sgd"}})
    program = TrainProgram.build(config, build_mesh({}, jax.devices()[:1]))
    step = program.train_step.lower(program.abstract_state, program.abstract_batch).as_text()
    reference, fields = Reference(config, optax.identity()), next(table.make_batches(config))
    state = jax.eval_shape(reference.first_state)
    loss = jax.make_jaxpr(reference.loss)(state.weights, state.layers, fields, jax.random.key(0))
    assert all(str(2**31 + 2 + module) in text for text in (step, str(loss)) for module in range(3))
    _, read = dce_jaxpr(loss.jaxpr, [True] * len(loss.out_avals))
    assert [n for n, used in zip(sorted(state.weights), read, strict=False) if not used] == []


@pytest.mark.parametrize(("first", "last"), [(1, 0), (0, 1)])
def test_the_modules_have_the_precision_and_the_remat_policy_of_the_last_layer(table, first, last):
    precision = {"compute": "bfloat16", "fp8": {"recipe": "current"}}
    precision["fp8"] |= {"first_bf16_layers": first, "last_bf16_layers": last}
    sections = {"precision": precision, "remat": {"policy": "full", "layers": 1}}
    config = table.make_config(MODELS["llama"] | {"mtp_layers": 2}, **sections)
    modules = ExtraPlan.after(StepPlan.make(config, dict.fromkeys(AXES, 1), HOPPER)).segments
    assert [(each.policy.name, each.fp8) for each in modules] == [("none", not last)] * 2
