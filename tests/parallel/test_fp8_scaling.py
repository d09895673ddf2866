"""Amax histories of delayed scaling: by hand, and as train steps keep them."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.config import Config
from megajax.config.checks import check_mesh
from megajax.kernel_choice import Hardware
from megajax.mesh import build_mesh
from megajax.model.block import linear_layers
from megajax.schema.fields import AXES
from megajax.step.gradients import gradient_function
from megajax.step_plan import StepPlan
from megajax.training.batches import to_global
from megajax.training.step import TrainProgram, TrainState
from megajax.weights.scaling import Scaling

L, LENGTH = 2, 3
MODEL = {"num_layers": L, "hidden_size": 32, "num_heads": 2, "head_dim": 16, "ffn_hidden_size": 48, "vocab_size": 60}
E4M3_MAX, E5M2_MAX = 448.0, 57344.0


def make_config(recipe="delayed", **fp8) -> Config:
    fp8 = {"recipe": recipe, "amax_history_length": LENGTH, **fp8}
    return Config.model_validate(
        {
            "model": {**MODEL, "init_std": 0.25},
            "batch": {"global_size": 4, "sequence_length": 16},
            "precision": {"compute": "float32", "fp8": fp8},
            "optimizer": {"kind": "sgd"},
            "schedule": {"kind": "constant", "learning_rate": 1e-2},
            "data": {"kind": "synthetic"},
        }
    )


def scaling_of(config) -> Scaling:
    return Scaling(StepPlan.make(config, dict.fromkeys(AXES, 1), Hardware("cpu")))


def first_history(scaling: Scaling) -> dict[str, jax.Array]:
    return {name: jnp.zeros(shape.shape, shape.dtype) for name, shape in scaling.histories.items()}


LINEAR = linear_layers(make_config().model)


# By hand

# The amaxes of layer 0's inputs in five steps; layer 1's are ten times as large, gradients a hundredth.
AMAX = [4.0, 7.0, 1.0, 2.0, 0.5]
# The history after each step, newest first; three steps are kept.
HISTORIES = [[4.0, 0.0, 0.0], [7.0, 4.0, 0.0], [1.0, 7.0, 4.0], [2.0, 1.0, 7.0], [0.5, 2.0, 1.0]]
# What the next step's scale follows from.
CHOSEN = {"max": [4.0, 7.0, 7.0, 7.0, 2.0], "most_recent": AMAX}


@pytest.mark.smoke
@pytest.mark.parametrize(("gradient_format", "gradient_max"), [("hybrid", E5M2_MAX), ("e4m3", E4M3_MAX)])
@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize("algorithm", CHOSEN)
def test_five_steps_of_a_history_by_hand(algorithm, margin, gradient_format, gradient_max):
    config = make_config(amax_algorithm=algorithm, margin=margin, format=gradient_format)
    scaling = scaling_of(config)
    history = first_history(scaling)
    by_layer = np.float32([1.0, 10.0])

    @jax.jit
    def recorded(history, weights, pairs):
        history = scaling.record(history, weights, pairs)
        return history, scaling.scales(history, {})

    for amax, after, chosen in zip(AMAX, HISTORIES, CHOSEN[algorithm], strict=True):
        inputs = amax * by_layer
        pairs = {name: np.stack([inputs, inputs / 100], axis=1) for name in LINEAR}
        history, scales = recorded(history, {name: 3 * inputs for name in LINEAR}, pairs)
        for name in LINEAR:
            for tensor, factor, most in (
                ("input", 1.0, E4M3_MAX),
                ("weight", 3.0, E4M3_MAX),
                ("gradient", 0.01, gradient_max),
            ):
                expected = factor * by_layer[:, None] * np.array(after)
                np.testing.assert_allclose(history[f"{name}.{tensor}"], expected, rtol=1e-6)
                expected = most / 2**margin / (factor * by_layer * chosen)
                np.testing.assert_allclose(scales[name][tensor], expected, rtol=1e-6)


def test_each_linear_layer_has_a_history_of_its_own():
    scaling = scaling_of(make_config())
    weights = {name: np.full(L, 100.0 + i, np.float32) for i, name in enumerate(LINEAR)}
    pairs = {name: np.full((L, 2), [10.0 + i, 20.0 + i], np.float32) for i, name in enumerate(LINEAR)}
    history = jax.device_get(jax.jit(scaling.record)(first_history(scaling), weights, pairs))
    newest = {name: float(values[0, 0]) for name, values in history.items()}
    first = {"input": 10, "gradient": 20, "weight": 100}
    assert newest == {f"{name}.{t}": first[t] + i for i, name in enumerate(LINEAR) for t in first}


def test_an_empty_history_gives_a_first_guess_for_each_tensor():
    scaling = scaling_of(make_config(margin=1))
    history = first_history(scaling)
    assert all(values.shape == (L, LENGTH) and not values.any() for values in history.values())
    # init_std is 0.25, and a batch has 64 tokens.
    guesses = {"input": 16.0, "weight": 2.0, "gradient": 64 / 64}
    largest = {"input": E4M3_MAX, "weight": E4M3_MAX, "gradient": E5M2_MAX}
    for scales in jax.jit(lambda history: scaling.scales(history, {}))(history).values():
        for tensor, guess in guesses.items():
            np.testing.assert_allclose(scales[tensor], [largest[tensor] / 2 / guess] * L, rtol=1e-6)


def test_with_most_recent_a_step_of_zeros_leaves_the_scale_of_the_steps_before():
    scaling = scaling_of(make_config(amax_algorithm="most_recent"))
    history = {name: np.tile(np.float32([0.0, 5.0, 0.0]), (L, 1)) for name in scaling.names}
    before = {name: np.tile(np.float32([5.0, 0.0, 0.0]), (L, 1)) for name in scaling.names}
    scales = jax.jit(lambda history: scaling.scales(history, {}))
    jax.tree.map(np.testing.assert_array_equal, scales(history), scales(before))


@pytest.mark.parametrize("loss_scale", [1.0, 2.0**16])
def test_the_histories_know_nothing_of_the_loss_scale(loss_scale):
    scaling = scaling_of(make_config())
    empty = {name: jnp.zeros((L, 3)) for name in scaling.names}
    weights = {name: jnp.float32([3.0, 3.0]) for name in LINEAR}
    others = {name: jnp.float32([[4.0, 2.0 * loss_scale], [4.0, 2.0 * loss_scale]]) for name in LINEAR}
    new = scaling.record(empty, weights, others, loss_scale)
    assert new["mlp.down.gradient"][:, 0].tolist() == [2.0, 2.0]
    assert new["mlp.down.input"][:, 0].tolist() == [4.0, 4.0]
    for history in (empty, new):  # the guess is scaled as well
        scaled, plain = scaling.scales(history, {}, loss_scale), scaling.scales(history, {})
        np.testing.assert_allclose(scaled["mlp.down"]["gradient"] * loss_scale, plain["mlp.down"]["gradient"])
        np.testing.assert_array_equal(scaled["mlp.down"]["input"], plain["mlp.down"]["input"])


def test_current_scaling_keeps_no_history_and_scales_weights_by_themselves():
    scaling = scaling_of(make_config("current"))
    assert scaling.histories == {}
    amax = {name: jnp.float32([7.0, 14.0]) for name in LINEAR}
    assert scaling.record({}, amax, {}) == {}
    for scales in scaling.scales({}, amax).values():
        assert list(scales) == ["weight"]
        np.testing.assert_allclose(scales["weight"], [64.0, 32.0], rtol=1e-6)
    assert scaling_of(make_config("none")).histories == {}


# Train steps


@dataclass(frozen=True)
class Steps:
    """A program, and its state and batch before each of some steps."""

    program: TrainProgram
    states: list[TrainState]  # on the host
    batches: list[dict[str, jax.Array]]


BAD = 3  # the step whose loss is not finite


@pytest.fixture(scope="module")
def steps() -> Steps:
    """Six steps; the fourth is skipped."""
    program = build(make_config(first_bf16_layers=1))
    rng = np.random.default_rng(11)
    state, states, batches = program.init_state(), [], []
    for step in range(6):
        tokens = rng.integers(0, 60, (4, 17))
        mask = np.ones((4, 16), np.float32)
        positions = np.broadcast_to(np.arange(16), (4, 16))
        fields = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "loss_mask": mask, "positions": positions}
        batch = to_global(program, fields)
        batches.append(batch | {"loss_mask": batch["loss_mask"].at[0, -1, -1].set(jnp.nan)} if step == BAD else batch)
        states.append(jax.tree.map(np.array, state))
        state, _ = program.train_step(state, batches[-1])
    return Steps(program, [*states, jax.tree.map(np.array, state)], batches)


def build(config: Config) -> TrainProgram:
    return TrainProgram.build(config, build_mesh(check_mesh(config, 1), jax.devices()[:1]))


def largest_weights(params, *parts: str) -> np.ndarray:
    """The largest magnitude of a linear layer's parameters in each layer."""
    stacked = [params[f"blocks.dense.{part}"].reshape(L, -1) for part in parts]
    return np.abs(np.concatenate(stacked, axis=1)).max(axis=1)


def test_each_step_records_the_largest_weights_that_it_began_with(steps):
    parts = {
        "attention.qkv": ("attention.query", "attention.key", "attention.value"),
        "attention.output": ("attention.output",),
        "mlp.gate_up": ("mlp.gate", "mlp.up"),
        "mlp.down": ("mlp.down",),
    }
    for name in LINEAR:
        seen = [largest_weights(state.params, *parts[name]) for state in steps.states]
        assert len(np.unique(seen)) > 2 * L, "the weights hardly change: it tests little"
        for step, after in enumerate(steps.states[1:]):
            if step != BAD:
                np.testing.assert_array_equal(after.layer_state["fp8"][f"{name}.weight"][:, 0], seen[step])


def test_a_history_shifts_by_one_with_each_step_but_a_skipped_one(steps):
    assert [int(state.skipped) for state in steps.states] == [0, 0, 0, 0, 1, 1, 1]
    for step, (before, after) in enumerate(zip(steps.states[:-1], steps.states[1:], strict=True)):
        assert list(before.layer_state["fp8"]) == list(after.layer_state["fp8"]) and len(after.layer_state["fp8"]) == 12
        for name, history in after.layer_state["fp8"].items():
            if step == BAD:
                np.testing.assert_array_equal(history, before.layer_state["fp8"][name])
            else:
                np.testing.assert_array_equal(history[:, 1:], before.layer_state["fp8"][name][:, :-1])
                assert np.all(history[1, 0] > 0)


def test_a_step_with_an_infinite_amax_is_skipped_though_its_loss_and_gradients_are_finite(steps):
    """Quantisation clips an infinite weight to the largest of the history, so nothing else shows it."""
    kept, name = steps.states[2], "blocks.dense.mlp.down"
    weight = np.array(kept.params[name])
    weight[1, 0, 0] = np.inf
    kept = replace(kept, params=kept.params | {name: weight})
    before = jax.device_put(kept, steps.program.state_shardings)  # or else the step is compiled again
    compute = jax.jit(gradient_function(steps.program.graph, steps.program.mesh))
    sums, gradients, *_ = compute(before.weights, before.layer_state, steps.batches[2], before.step, before.loss_scale)
    assert np.isfinite(sums["loss"]) and all(np.isfinite(gradient).all() for gradient in gradients.values())
    after, metrics = steps.program.train_step(before, steps.batches[2])
    assert metrics["skipped"] == 1 and not np.isfinite(metrics["grad_norm"])
    jax.tree.map(np.testing.assert_array_equal, (after.params, after.layer_state), (kept.params, kept.layer_state))


def test_only_layers_in_fp8_record_inputs_and_gradients(steps):
    last = steps.states[-1].layer_state["fp8"]
    for name, history in last.items():
        assert history[1].all()
        assert history[0].any() == name.endswith(".weight")


@pytest.mark.parametrize("algorithm", CHOSEN)
def test_a_step_is_scaled_by_what_its_algorithm_reads_of_the_history(steps, algorithm):
    program = build(make_config(first_bf16_layers=1, amax_algorithm=algorithm))
    state, batch = steps.states[3], steps.batches[2]

    def loss(change):
        history = {name: change(values) for name, values in state.layer_state["fp8"].items()}
        return float(program.eval_step(state.params, {"fp8": history}, batch)[0]["loss"])

    def with_columns(*factors):
        return loss(lambda values: values.max(axis=1, keepdims=True) * np.float32(factors))

    plain = with_columns(1.0, 0.1, 0.1)
    assert np.isfinite(plain)
    swapped, grown = with_columns(0.1, 1.0, 0.1), with_columns(1.0, 3.0, 0.1)
    if algorithm == "max":
        assert swapped == plain != grown
    else:
        assert swapped != plain == grown


def test_amaxes_are_the_largest_of_all_microbatches_and_devices():
    """Of four rows, in two microbatches on two devices each: the largest amax of steps with one row in all places."""
    config = make_config()
    sizes = {"mesh": {"data": 2}, "batch": {**config.batch.model_dump(), "num_microbatches": 2}}
    sizes["model"] = config.model.model_dump() | {"block_pattern": ["mlp"]}
    config = Config.model_validate(config.model_dump() | sizes)
    program = TrainProgram.build(config, build_mesh(check_mesh(config, 2), jax.devices()[:2]))
    first = jax.tree.map(np.array, program.init_state())
    tokens, places = np.random.default_rng(5).integers(0, 60, (4, 17)), range(4)
    found = {}
    for chosen in (*((row,) * 4 for row in places), tuple(places)):
        rows = tokens[[*chosen]]
        fields = {"tokens": rows[:, :-1], "targets": rows[:, 1:], "loss_mask": np.ones((4, 16), np.float32)}
        fields["positions"] = np.broadcast_to(np.arange(16), (4, 16))
        state, _ = program.train_step(jax.device_put(first, program.state_shardings), to_global(program, fields))
        history = state.layer_state["fp8"]
        found[chosen] = {name: np.asarray(values)[:, 0] for name, values in history.items() if "weight" not in name}
    alone = {name: np.stack([found[(row,) * 4][name] for row in places]) for name in found[0, 1, 2, 3]}
    jax.tree.map(np.testing.assert_array_equal, found[0, 1, 2, 3], {name: a.max(0) for name, a in alone.items()})
    for tensor in ("input", "gradient"):  # else one microbatch, or one device, would do
        largest = np.concatenate([a.argmax(0) for name, a in alone.items() if name.endswith(tensor)])
        assert {*(largest // 2)} == {*(largest % 2)} == {0, 1}
