"""`checkpoint.upcycle`: experts begin as copies of a dense model's MLPs, and the model with the dense one's loss."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_models import EVERY_SECOND, HYBRID, MIXTRAL

from megajax.checkpoint.description import describe_model
from megajax.checkpoint.manager import save_weights
from megajax.config import ModelConfig
from megajax.config.checks import check_mesh
from megajax.errors import ConfigError, InputError
from megajax.layout.kinds import KINDS
from megajax.mesh import build_mesh
from megajax.model import Transformer, bind, parameters
from megajax.model.attention import Attention
from megajax.model.moe import MoE
from megajax.ops.router import choose, routing_weights
from megajax.sources import initial_weights
from megajax.training.batches import to_global
from megajax.training.saving import StateSaver
from megajax.training.step import TrainProgram


def without_experts(model):
    of_experts = ("router", "moe_layer_interval")
    return {name: value for name, value in model.items() if "expert" not in name and name not in of_experts}


DENSE = without_experts(MIXTRAL)
PLAIN = {"ffn_hidden_size": 64, "activation": "gelu", "mlp_bias": True, "mtp_layers": 1}
SIGMOID = {"score_function": "sigmoid", "expert_bias": True, "logit_bias": True}
# The dense model, that with experts, and for each stack of the latter the stack and the rows that it begins with.
MODELS = {
    "every second": (
        without_experts(EVERY_SECOND) | PLAIN,
        EVERY_SECOND | PLAIN | {"expert_ffn_hidden_size": 64, "experts_per_token": 3, "router": SIGMOID},
        {"dense": ("dense", [0, 2]), "moe": ("dense", [1, 3]), "mtp": ("mtp", [0])},
    ),
    "hybrid": (
        without_experts(HYBRID) | {"block_pattern": ["gated_deltanet"] * 3 + ["dense"]},
        HYBRID | {"expert_ffn_hidden_size": HYBRID["ffn_hidden_size"]},
        {
            "gated_deltanet_moe": ("gated_deltanet", [0, 2]),
            "gated_deltanet": ("gated_deltanet", [1]),
            "moe": ("dense", [0]),
        },
    ),
}
COPIED = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")


def start(table, folder, dense, model, mesh=None, **more):
    """(the config with experts, the dense model's weights, which a run in `folder` has)."""
    own = table.make_config(dense)
    weights = table.weights_of(own)
    params = {name: jnp.asarray(weight) for name, weight in weights.items()}
    save_weights(folder, params, {}, {"format": 1, "step": 0, "model": describe_model(own.model)})
    checkpoint = {"init_from": str(folder), "upcycle": True} | more
    return table.make_config(model, mesh, checkpoint=checkpoint), weights


def saver_of(config, devices=1):
    return StateSaver(TrainProgram.build(config, build_mesh(check_mesh(config, devices), jax.devices()[:devices])))


@pytest.mark.parametrize("name", MODELS)
def test_each_expert_is_the_dense_mlp_of_its_layer(table, tmp_path, name):
    dense, model, stacks = MODELS[name]
    config, weights = start(table, tmp_path, dense, model)
    assert str(initial_weights(config)) == f"{tmp_path / 'checkpoints/0'}, each expert a copy of its layer's MLP"
    params, state = saver_of(config).restore_weights(str(tmp_path))
    for parameter, array in params.items():
        expected = weights.get(parameter)
        if parameter.startswith("blocks."):
            _, stack, *rest = parameter.split(".")
            origin, rows = stacks[stack]
            expected = weights[f"blocks.{origin}.{'.'.join(rest).replace('moe.', 'mlp.')}"][rows]
            if rest[0] == "moe" and rest[1] in COPIED:
                expected = np.stack([expected] * 8, axis=1)
        np.testing.assert_array_equal(array, expected, err_msg=parameter)
    declared = parameters(Transformer(config.model)).keys()
    assert declared - params.keys() == {n for n in declared if n.endswith((".router", ".router_bias"))} and not state


def test_on_a_mesh_the_first_loss_is_the_dense_models(table, tmp_path):
    """With its routers random, as always, and other random numbers for each layer."""
    config, weights = start(table, tmp_path, DENSE, MIXTRAL, {"fsdp": 2, "expert": 2})
    saver, fields = saver_of(config, 4), next(table.make_batches(config))
    state = saver.first_state()
    dense = Transformer(ModelConfig.model_validate(DENSE))
    logits = jax.jit(lambda weights, tokens: bind(dense, weights)(tokens))(weights, fields["tokens"])
    logits = np.asarray(logits, np.float64)[..., : DENSE["vocab_size"]]
    chosen = np.take_along_axis(logits, fields["targets"][..., None], axis=-1)[..., 0]
    losses = np.log(np.exp(logits).sum(axis=-1)) - chosen
    expected = np.average(losses, weights=fields["loss_mask"])
    sums, tokens = saver.program.eval_step(state.weights, state.layer_state, to_global(saver.program, fields))
    assert float(sums["loss"] / tokens) == pytest.approx(expected, rel=table.PLAIN_VALUE)

    router = table.canonical(saver.program, state.params)["blocks.moe.moe.router"]
    assert router.std(axis=(1, 2)) == pytest.approx([MIXTRAL["init_std"]] * 2, rel=0.15)  # 256 numbers: 3 sigma
    assert np.abs(router[0] - router[1]).min() > 0


ROUTERS = [
    {"score_function": function, "pre_softmax": pre, "normalise": normalise, "scaling_factor": factor}
    for function, pre in (("softmax", False), ("softmax", True), ("sigmoid", False))
    for normalise, factor in ((True, 1.0), (True, 2.0), (False, 1.0))
    if normalise or pre or function == "sigmoid"
]


@pytest.mark.parametrize("router", ROUTERS, ids=lambda router: " ".join(map(str, router.values())))
def test_weights_that_do_not_add_up_to_1_are_warned_about(table, router):
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(5, 4)), jnp.float32)
    for k in (1, 2):
        if k == 1 and router["score_function"] == "softmax" and not router["pre_softmax"]:
            continue  # refused with any weights: no gradient
        sums = routing_weights(logits, choose(logits, k), *router.values()).sum(axis=-1)
        model = MIXTRAL | {"experts_per_token": k, "router": router}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            table.make_config(model, checkpoint={"init_from": "a run", "upcycle": True})
        assert bool(caught) == (np.abs(sums - 1).max() > 1e-5)
        for warning in caught:
            assert re.search(r"^checkpoint\.upcycle=true and model\.\S+=.*: set model\.\S+=", str(warning.message))


REFUSED = {
    "no key": ({}, {"upcycle": False}, "init_from=.* has no experts, but .*num_experts=8: set checkpoint.upcycle=true"),
    "another width": ({"hidden_size": 64}, {}, "init_from=.*restore them.*hidden_size=32, but this run has 64"),
    "another function": ({"rope_theta": 9.0}, {}, "allow_changes.*rope_theta=10000.0, but this run has 9.0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_another_model_is_refused_with_the_key(table, tmp_path, case):
    changes, checkpoint, sentence = REFUSED[case]
    config, _ = start(table, tmp_path, DENSE, MIXTRAL | changes, **checkpoint)
    with pytest.raises(InputError, match=re.compile(sentence, re.DOTALL)):
        saver_of(config).restore_weights(str(tmp_path))


def test_experts_of_a_registered_block_have_no_mlp_to_copy(table, monkeypatch):
    monkeypatch.setitem(KINDS, "routed", {"attention": Attention, "moe": MoE})
    with pytest.raises(ConfigError, match=r"upcycle=true .*block_pattern=\[routed\].*: use moe there"):
        table.make_config(MIXTRAL | {"block_pattern": ["routed"]}, checkpoint={"init_from": "a run", "upcycle": True})


def test_a_model_with_experts_is_no_dense_one(table, tmp_path):
    config, _ = start(table, tmp_path, MIXTRAL, MIXTRAL)
    with pytest.raises(InputError, match=r"upcycle=true reads a dense model.*restore them.*\n.*num_experts=8"):
        saver_of(config).restore_weights(str(tmp_path))
