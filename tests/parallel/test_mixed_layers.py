"""Models of dense and MoE layers train on any mesh as on one device, also where a pipeline's slots are empty."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from mesh_models import EVERY_SECOND, FIRST_DENSE

from megajax.checkpoint import Checkpoints
from megajax.checkpoint.manager import loaded_layer_state, saved_layer_state
from megajax.config import Config
from megajax.config.checks import check_mesh
from megajax.layout.kinds import LayerKind
from megajax.mesh import AXES, build_mesh
from megajax.model import Transformer, init_parameters, parameters
from megajax.model.comm import Comm, TokenPositions
from megajax.model.parameters import declare, stack
from megajax.model.sublayer import BlockInputs, LayerContext
from megajax.sharding import EMPTY, stored_rows
from megajax.training.batches import to_global
from megajax.training.saving import StateSaver
from megajax.training.step import TrainProgram

STEPS = 2


def build(config) -> TrainProgram:
    count = int(np.prod([getattr(config.mesh, axis) for axis in AXES]))
    return TrainProgram.build(config, build_mesh(check_mesh(config, count), jax.devices()[:count]))


def make(table, model, mesh, microbatches, **sections):
    return table.make_config(model, mesh, microbatches=microbatches, steps=STEPS, optimizer="sgd", **sections)


def train(table, program):
    """What `table.train` does, and the last state."""
    state, steps, gradients = table.first_state(program, table.weights_of(program.config)), [], {}
    initial = table.canonical(program, state.params)
    for fields in table.make_batches(program.config):
        state, metrics = program.train_step(state, to_global(program, fields))
        steps.append(jax.device_get(metrics))
        gradients = gradients or table.first_gradients(program, state, float(steps[0]["grad_norm"]))
    found = {name: np.array([step[name] for step in steps]) for name in steps[0]}
    router = {name: found[name] for name in table.ROUTER_METRICS & found.keys()}
    return table.Trace(program.config, found["loss"], found["grad_norm"], initial, gradients, router), state


def test_an_empty_slot_sends_no_token_to_an_expert(table):
    """The result equals that of zero experts: with a zero router all tokens choose the same experts."""
    model = Transformer(make(table, EVERY_SECOND, {}, 1).model)
    rng, (B, S) = np.random.default_rng(0), (2, 8)
    shapes = {name: p.shape[1:] for name, p in parameters(model.blocks["moe"]).items()}
    weights = {name: np.float32(rng.standard_normal(shape)) for name, shape in shapes.items()}
    x = np.float32(rng.standard_normal((B * S, 32)))

    @jax.jit
    def run(weights, filled):
        block, state = model.blocks["moe"], {"moe.is_real_layer": filled}
        at, ids = jnp.broadcast_to(jnp.arange(S), (B, S)), jnp.arange(B * S)
        inputs = BlockInputs(at, TokenPositions(at), ids, None, layer_loss_scale=jnp.float32(1))
        ctx = LayerContext(Comm(), inputs, 1, LayerKind("moe", None), state=state)
        return block.apply(block.fuse(weights), x, ctx)[0]

    without = np.asarray(run(weights | {"moe.down": 0 * weights["moe.down"]}, True))
    np.testing.assert_array_equal(run(weights, False), without)
    assert np.abs(run(weights, True) - without).max() > 1


@pytest.mark.long
def test_a_remat_group_may_hold_layers_of_both_kinds(table, reference):
    """They are recomputed together; and the evaluation's loss is the first step's."""
    config = make(table, EVERY_SECOND, {"fsdp": 2}, 1, remat={"policy": "full", "group": 2})
    program, expected = build(config), reference(config)
    (segment,) = program.graph.layers.segments
    assert (segment.iterations, segment.layers_per_iteration, segment.group_size) == (2, 2, 2)

    params = table.first_state(program, table.weights_of(config)).params
    sums, tokens = program.eval_step(params, {}, to_global(program, next(table.make_batches(config))))
    assert float(sums["loss"] / tokens) == pytest.approx(expected.losses[0], rel=table.SCALAR_TOLERANCE)
    difference = table.compare(train(table, program)[0], expected)
    assert not difference.problems(), difference


def test_initial_numbers_are_those_of_the_layer_in_the_model(table):
    """Whatever rows hold it: two stages' here, two virtual stages each."""
    config = make(table, FIRST_DENSE, {"pipeline": 2}, 2, pipeline={"virtual_stages": 2})
    model, rows = nnx.Dict({"blocks": nnx.Dict({"moe": Few()})}), stored_rows(config, 2)["moe"]
    draw = jax.jit(lambda: [init_parameters(model, 7, 0.1, held) for held in ({}, {"blocks.moe.few": rows})])
    (plain,), (stored,) = (initial.values() for initial in jax.device_get(draw()))
    for row, layer in enumerate(rows):
        expected = np.zeros(3) if layer == EMPTY else plain[layer - 1]
        np.testing.assert_array_equal(stored[row], expected)


class Few(nnx.Module):
    """A stacked parameter of five layers, 1 to 5, as FIRST_DENSE has it."""

    def __init__(self):
        self.few = declare((3,), ("embed",))
        stack(self, (1, 2, 3, 4, 5))


def test_any_stages_load_any_checkpoint(table, tmp_path):
    """From four stages to one device and to two virtual stages of two stages, weights and biases exactly.

    Biases of blocks of experts alone, as Nemotron-H's are, and of two kinds of blocks.
    """
    both = {"moe": {"moe.expert_bias": 1}, "experts": {"moe.expert_bias": 2}, "dense": {"mlp.mean": 3}}
    assert loaded_layer_state(saved_layer_state(both)) == both
    run, model = {"run": {"dir": str(tmp_path)}}, {n: v for n, v in FIRST_DENSE.items() if "shared" not in n}
    model |= {"first_dense_layers": 0, "block_pattern": ["mlp", *["experts"] * 5]}
    first = build(make(table, model, {"pipeline": 4}, 4, **run))
    weights, bias = table.weights_of(first.config), np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)
    state = table.first_state(first, weights)
    kept = state.layer_state["experts"]
    kept["moe.expert_bias"] = jax.device_put(bias, kept["moe.expert_bias"].sharding)

    checkpoints = Checkpoints(tmp_path, keep=3, keep_every=None)
    StateSaver(first).save(checkpoints, 1, state)
    others = [({}, {}), ({"pipeline": 2}, {"pipeline": {"virtual_stages": 2}})]
    for step, (mesh, sections) in enumerate(others, start=1):
        checkpoints.wait()
        program = build(make(table, model, mesh, 4, **run, **sections))
        saver = StateSaver(program)
        begun = saver.with_weights(table.first_state(program, weights), saver.restore_weights(str(tmp_path)))
        np.testing.assert_array_equal(begun.layer_state["experts"]["moe.expert_bias"], bias)  # by init_from
        state = saver.restore(checkpoints, step)
        np.testing.assert_array_equal(state.layer_state["experts"]["moe.expert_bias"], bias)
        for name, w in table.canonical(program, state.params).items():
            np.testing.assert_array_equal(w, weights[name], err_msg=name)
        saver.save(checkpoints, step + 1, state)
    checkpoints.close()


def test_weights_in_fp8_are_measured_in_the_slots_of_their_layers():
    """Attention's in all, a dense MLP's where there is one. (FP8 with experts is refused before this yet.)"""
    model = EVERY_SECOND | {"num_layers": 3, "head_dim": 16}
    settings = {"model": model, "batch": {"global_size": 1, "sequence_length": 16}, "data": {"kind": "synthetic"}}
    program = build(Config.model_validate(settings | {"precision": {"fp8": {"recipe": "current"}}}))
    rng = np.random.default_rng(0)
    params = {n: rng.standard_normal(p.shape).astype(np.float32) for n, p in program.placements.items()}
    measure = jax.shard_map(
        program.graph.layers.weights.weight_amax, mesh=program.mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    found = jax.jit(measure)(params)

    def largest(name: str) -> np.ndarray:
        return np.abs(params[name]).reshape(len(params[name]), -1).max(axis=1)

    dense, moe = (largest(f"blocks.{kind}.attention.output") for kind in ("dense", "moe"))
    np.testing.assert_array_equal(found["attention.output"], [dense[0], moe[0], dense[1]])
    down = largest("blocks.dense.mlp.down")
    np.testing.assert_array_equal(found["mlp.down"], [down[0], 0, down[1]])
