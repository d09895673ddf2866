"""A kind of block from outside the package, one class and one line, trains on any mesh as on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_models import MODELS

from megajax.checkpoint import Checkpoints
from megajax.config.checks import check_mesh
from megajax.errors import ConfigError
from megajax.mesh import build_mesh
from megajax.model import Part, Transformer, declare, register
from megajax.model.attention import Attention
from megajax.model.block import KINDS
from megajax.model.parts import PartSizes
from megajax.plan import estimate_memory, flops_per_token
from megajax.training.batches import to_global
from megajax.training.saving import StateSaver
from megajax.training.step import TrainProgram

STEPS = 3


class Squared(Part):
    """(x · up)² · down, divided by 1 + a running mean of its output.

    `up` is wider than a dense MLP's of the same name. What it gives is measured, and is a loss.
    """

    NAME = "mlp"
    LINEAR = ("up", "down")
    USED_FIRST, USED_LAST = "up", "down"
    METRICS = LOSSES = ("power",)

    def __init__(self, config):
        self.config = config
        self.up = declare((config.hidden_size, 2 * config.ffn_hidden_size), ("embed", "mlp"))
        self.gain = declare((config.hidden_size,), ("norm",), "norm")
        self.down = declare((2 * config.ffn_hidden_size, config.hidden_size), ("mlp", "embed"))

    def __call__(self, w, x, inputs, layer, state, *, comm, kind, recompute):
        y = comm.row_linear(jnp.square(comm.column_linear(x, w["up"])), w["down"])
        y = y * w["gain"] / (1 + state["mean_power"])
        if inputs.layer_loss_scale is None:
            return y, {}
        tokens = len(x) * comm.token_shards
        return y, {"power": jnp.sum(jnp.square(y)) / tokens}

    def losses(self):
        return self.LOSSES

    def layer_state(self):
        return {"mean_power": jax.ShapeDtypeStruct((), jnp.float32)}

    def updated_state(self, state, metrics):
        return {"mean_power": 0.5 * state["mean_power"] + 0.5 * metrics["power"]}

    def matmul_parameters(self):
        return 4 * self.config.hidden_size * self.config.ffn_hidden_size

    def sizes(self, shares):
        width = 2 * self.config.ffn_hidden_size
        return PartSizes(width / shares.tensor, width)


@pytest.fixture(autouse=True)
def kinds(monkeypatch):
    monkeypatch.setattr("megajax.model.block.KINDS", dict(KINDS))
    register("squared", Attention, Squared)


def make(table, mesh, microbatches=1, model=None, **sections):
    model = MODELS["llama"] | {"num_layers": 4, "block_pattern": ["dense", "squared"]} | (model or {})
    return table.make_config(model, mesh, microbatches=microbatches, steps=STEPS, optimizer="sgd", **sections)


def build(config, devices):
    return TrainProgram.build(config, build_mesh(check_mesh(config, devices), jax.devices()[:devices]))


def train(table, program):
    """(metrics of each step, last weights, last layer state)."""
    state, steps = table.first_state(program, table.weights_of(program.config)), []
    for fields in table.make_batches(program.config):
        state, metrics = program.train_step(state, to_global(program, fields))
        steps.append({name: float(value) for name, value in metrics.items()})
    return steps, table.canonical(program, state.params), state


@pytest.fixture(scope="module")
def expected(table):
    patch = pytest.MonkeyPatch()
    patch.setitem(KINDS, "squared", (Attention, Squared))
    yield train(table, build(make(table, {}), 1))
    patch.undo()


@pytest.mark.parametrize(
    ("mesh", "microbatches"), [({"fsdp": 2, "tensor": 2}, 1), ({"pipeline": 2}, 2)], ids=["fsdp2-tensor2", "pipeline2"]
)
def test_it_trains_as_on_one_device(table, expected, tmp_path, mesh, microbatches):
    config = make(table, mesh, microbatches, run={"dir": str(tmp_path)})
    program = build(config, int(np.prod(list(mesh.values()))))
    steps, weights, state = train(table, program)
    for found, wanted in zip(steps, expected[0], strict=True):
        assert found.keys() == wanted.keys() >= {"loss", "grad_norm", "power"}
        for name, value in wanted.items():
            assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name
    for name, w in expected[1].items():
        np.testing.assert_allclose(weights[name], w, rtol=1e-4, atol=1e-5, err_msg=name)
    kept = {"squared": {"mlp.mean_power": expected[2].layer_state["squared"]["mlp.mean_power"]}}
    assert kept["squared"]["mlp.mean_power"].shape == (2,) and np.all(kept["squared"]["mlp.mean_power"] > 0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), state.layer_state, kept)

    checkpoints = Checkpoints(tmp_path, keep=1, keep_every=None)
    StateSaver(program).save(checkpoints, STEPS, state)
    checkpoints.wait()
    restored = StateSaver(program).restore(checkpoints, STEPS)
    checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, restored.layer_state, state.layer_state)


def test_its_state_and_its_loss_decide(table, expected):
    """The numbers above would agree if neither reached the weights."""
    steps, (first, *_) = expected[0], expected[0]
    assert first["power"] > 0.01 and steps[-1]["power"] != pytest.approx(first["power"], rel=1e-3)
    program = build(make(table, {}), 1)
    batch = to_global(program, next(table.make_batches(program.config)))
    state = table.first_state(program, table.weights_of(program.config))
    loss = [
        float(program.eval_step(state.params, kept, batch)[0]) for kept in (state.layer_state, expected[2].layer_state)
    ]
    assert loss[0] != pytest.approx(loss[1], rel=1e-5)


def test_it_says_what_it_costs(table):
    """FLOPs by hand: the head, two dense layers, two of the kind; the memory of its `up` is twice a dense MLP's."""
    config = make(table, {})
    m, S = config.model, config.batch.sequence_length
    D, F, N, K, H = m.hidden_size, m.ffn_hidden_size, m.num_heads, m.num_kv_heads, m.head_dim
    attention = D * H * (2 * N + 2 * K)
    matmuls = 4 * attention + 2 * 3 * D * F + 2 * 2 * D * 2 * F + D * m.padded_vocab_size
    assert flops_per_token(config) == 6 * matmuls + 4 * 12 * S / 2 * N * H
    saved = []
    for width in (F, 2 * F):
        config = make(table, {}, model={"ffn_hidden_size": width}, kernels={"scan_unroll": 4})
        program = build(config, 1)
        saved.append(estimate_memory(program.plan.on_gpus(), program.placements).activations)
    # The compute dtype's 4 bytes of each token: gate and up of two dense layers, `up` of two of the kind
    tokens = config.batch.global_size * S
    assert saved[1] - saved[0] == 4 * tokens * F * (2 * 2 + 2 * 2)


def test_an_unknown_kind_is_a_sentence(table):
    model = MODELS["llama"] | {"block_pattern": ["dense", "cubed"]}
    with pytest.raises(ConfigError, match=r"model.block_pattern has 'cubed'.*: use dense, moe, squared\."):
        Transformer(table.make_config(model).model)
