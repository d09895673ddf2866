"""megajax/reference.py changes its state as the parallel step does, and refuses what it does not have.

Other tests of this folder hold losses and gradients of meshes to it, and test_plain_model.py both to NumPy.
"""

import jax
import numpy as np
import optax
import pytest
from mesh_models import DEEPSEEK

from megajax.config.checks import check_mesh
from megajax.errors import ConfigError
from megajax.mesh import build_mesh
from megajax.model import Transformer, parameters
from megajax.reference import Reference, adamw
from megajax.training.batches import to_global
from megajax.training.step import TrainProgram

RATE = 1e-2
# Every loss and every random number; norms and biases without weight decay, and scores that are clipped.
MODEL = DEEPSEEK | {
    "first_dense_layers": 1,
    "mtp_layers": 1,
    "norm": "layernorm",
    "attention_bias": True,
    "z_loss": 0.01,
    "qk_clip": 0.5,
}


@pytest.mark.long
def test_its_steps_change_weights_and_layer_state_as_a_mesh_does(table):
    documents = {"synthetic_documents": 4, "reset_attention": True, "reset_positions": True}
    sections = {"objective": {"label_smoothing": 0.1}, "data": documents, "batch": {"global_size": 8}}
    sections["schedule"] = {"kind": "constant", "learning_rate": RATE, "decay_steps": None}
    config = table.make_config(MODEL, {"fsdp": 2, "tensor": 2}, microbatches=2, steps=2, **sections)
    program = TrainProgram.build(config, build_mesh(check_mesh(config, 4), jax.devices()[:4]))
    weights = table.weights_of(config)
    state = table.first_state(program, weights)
    reference = Reference(config, adamw(config, RATE))
    step = jax.jit(reference.train_step)
    expected = reference.first_state(weights)
    for fields in table.make_batches(config):
        state, metrics = program.train_step(state, to_global(program, fields))
        expected, losses = step(expected, fields)
        for name in ("loss", "z_loss", "mtp_loss", "grad_norm"):
            own = losses["mtp_loss/module"].mean() if name == "mtp_loss" else losses[name]
            assert float(metrics[name]) == pytest.approx(float(own), rel=1e-5), name
    for name, w in table.canonical(program, state.params).items():
        if name not in table.zero_gradients(config):
            change = expected.weights[name] - weights[name]
            assert np.linalg.norm(w - expected.weights[name]) < 1e-3 * np.linalg.norm(change), name
    biases = {kind: own["moe.expert_bias"] for kind, own in expected.layers.items()}
    assert biases.keys() == {"moe", "mtp"}
    for kind, bias in biases.items():
        np.testing.assert_array_equal(state.layer_state[kind]["moe.expert_bias"], bias)


@pytest.mark.parametrize("causal", [True, False])
def test_to_attention_on_both_sides_padding_is_another_document(table, causal):
    objective = {"kind": "next_token" if causal else "masked_tokens"}
    config = table.make_config(table.MODELS["llama"] | {"causal": causal}, objective=objective)
    reference = Reference(config, optax.identity())
    fields = {name: np.zeros((2, 5), np.int32) for name in ("tokens", "positions")}
    found = reference.inputs(0, fields | {"is_real": np.arange(5) < [[3], [5]]}, None)
    assert np.array_equal(found.real.lengths, [3, 5]) and found.real.num_tokens == 8
    documents = found.token_positions.documents
    assert (documents is None) == causal
    if documents is not None:
        assert np.array_equal(documents.starts, [[0, 0, 0, 3, 3], [0] * 5])
        assert np.array_equal(documents.ends, [[3, 3, 3, 5, 5], [5] * 5])


@pytest.mark.long
def test_its_initial_weights_are_those_of_a_run(table):
    config = table.make_config("gpt2", {}, steps=1)
    program = TrainProgram.build(config, build_mesh(check_mesh(config, 1), jax.devices()[:1]))
    expected = program.init_state().params
    found = jax.jit(Reference(config, optax.identity()).first_state)().weights
    assert expected.keys() == found.keys()
    for name, w in table.canonical(program, expected).items():
        np.testing.assert_array_equal(found[name], w, err_msg=name)


@pytest.mark.parametrize("decayed", ["embedding", "norm", "bias"])
def test_weight_decay_is_of_matrices_and_of_the_roles_that_a_setting_names(table, decayed):
    """Without gradients only decay changes a weight, by rate · decay."""
    key = {"embedding": "decay_embeddings", "norm": "decay_norms", "bias": "decay_biases"}[decayed]
    settings = {f"decay_{name}": False for name in ("embeddings", "norms", "biases")} | {key: True}
    config = table.make_config("gpt2", {}, optimizer={"weight_decay": 0.5, **settings})
    roles = {name: parameter.role for name, parameter in parameters(Transformer(config.model)).items()}
    assert {"matrix", "embedding", "norm", "bias"} == {*roles.values()}
    ones = {name: np.ones(1, np.float32) for name in roles}
    update = adamw(config, RATE)
    changes, _ = update.update(jax.tree.map(np.zeros_like, ones), update.init(ones), ones)
    for name, role in roles.items():
        expected = -RATE * 0.5 if role in ("matrix", decayed) else 0
        np.testing.assert_allclose(changes[name], expected, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("key", "section"),
    [
        ("lora.rank", {"lora": {"rank": 2}, "checkpoint": {"init_from": "a run"}}),
        ("optimizer.kind", {"optimizer": {"kind": "lion"}}),
        ("optimizer.layer_decay", {"optimizer": {"layer_decay": 0.9}}),
        ("model.mup_base_width", {"model": {"mup_base_width": 32}}),
    ],
)
def test_what_it_does_not_have_is_a_sentence(table, key, section):
    config = table.make_config(table.MODELS["llama"] | section.pop("model", {}), **section)
    with pytest.raises(ConfigError, match=f"{key}=.* not part of megajax.reference.*TrainProgram"):
        Reference(config, adamw(config, RATE))
