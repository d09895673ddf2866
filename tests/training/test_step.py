"""One step: the optimizers against plain NumPy, master weights, donation, and the metrics."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.config.checks import check_mesh
from megajax.errors import ConfigError
from megajax.mesh import build_mesh
from megajax.optim.ademamix import Ademamix
from megajax.step.gradients import gradient_function
from megajax.training.batches import to_global
from megajax.training.step import TrainProgram, _train_step

WHOLE = "model.block_pattern=null"  # layers with attention
GPT = (
    WHOLE,
    "model.norm=layernorm",
    "model.position=learned",
    "model.activation=gelu",
    "model.attention_bias=true",
    "model.mlp_bias=true",
    "model.qk_norm=true",
    "model.num_kv_heads=4",
)
SCHEDULE = (
    "schedule.kind=linear",
    "schedule.learning_rate=1e-2",
    "schedule.min_learning_rate=0",
    "schedule.warmup_steps=2",
    "schedule.decay_steps=4",
)
RATES = [5e-3, 1e-2, 5e-3]  # of steps 1 to 3 of this schedule


@pytest.fixture
def make_program(make_config):
    def make(*overrides, devices=1, **sizes):
        config = make_config(*overrides, *(f"mesh.{axis}={size}" for axis, size in sizes.items()))
        return TrainProgram.build(config, build_mesh(check_mesh(config, devices), jax.devices()[:devices]))

    return make


def random_batch(program, seed):
    """A global batch of random tokens, a tenth of them left out of the loss."""
    M, B, S = program.plan.batch_shape
    random = np.random.default_rng(seed)
    tokens = random.integers(0, program.config.model.vocab_size, (M * B, S + 1), dtype=np.int32)
    fields = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "loss_mask": (random.random((M * B, S)) > 0.1).astype(np.float32),
        "positions": np.broadcast_to(np.arange(S, dtype=np.int32), (M * B, S)),
    }
    return to_global(program, fields)


def to_numpy(arrays):
    return {name: np.asarray(array, np.float64) for name, array in arrays.items()}


def decays(name: str, norms: bool, biases: bool, embeddings: bool) -> bool:
    """Whether weight decay applies, told by the name alone."""
    last = name.split(".")[-1]
    if last.endswith("_bias"):
        return biases
    if last.endswith("norm"):
        return norms
    return embeddings if name.startswith("embedding.") else True


class AdamW:
    """Loshchilov and Hutter 2019, algorithm 2, with the decay times the learning rate."""

    def __init__(self, beta1=0.8, beta2=0.9, epsilon=1e-6):
        self.beta1, self.beta2, self.epsilon, self.m, self.v = beta1, beta2, epsilon, 0.0, 0.0

    def __call__(self, g, t):
        self.m = self.beta1 * self.m + (1 - self.beta1) * g
        self.v = self.beta2 * self.v + (1 - self.beta2) * g * g
        m, v = self.m / (1 - self.beta1**t), self.v / (1 - self.beta2**t)
        return m / (np.sqrt(v) + self.epsilon)


class AdEMAMix(AdamW):
    """Pagliardini et al. 2024, algorithm 1, with beta3 0.95, alpha 4, and both schedules over 3 steps."""

    slow = 0.0

    def __call__(self, g, t):
        share = min(t / 3, 1.0)
        first, last = np.log(self.beta1), np.log(0.95)
        beta3 = min(np.exp(first * last / ((1 - share) * last + share * first)), 0.95)
        self.slow = beta3 * self.slow + (1 - beta3) * g
        adam = super().__call__(g, t)
        return adam + share * 4 * self.slow / (np.sqrt(self.v / (1 - self.beta2**t)) + self.epsilon)


class Lion:
    """Chen et al. 2023, algorithm 2."""

    def __init__(self, beta1=0.8, beta2=0.9):
        self.beta1, self.beta2, self.m = beta1, beta2, 0.0

    def __call__(self, g, t):
        direction = np.sign(self.beta1 * self.m + (1 - self.beta1) * g)
        self.m = self.beta2 * self.m + (1 - self.beta2) * g
        return direction


class Momentum:
    """Heavy ball: the momentum is a sum, not a mean."""

    def __init__(self, beta1=0.8):
        self.beta1, self.m = beta1, 0.0

    def __call__(self, g, t):
        self.m = self.beta1 * self.m + g
        return self.m


BETAS = ("optimizer.beta1=0.8", "optimizer.beta2=0.9", "optimizer.epsilon=1e-6")
OPTIMIZERS = {
    "adamw": (AdamW, BETAS),
    "ademamix": (AdEMAMix, (*BETAS, "optimizer.ademamix={beta3: 0.95, alpha: 4.0, warmup_steps: 3}")),
    "lion": (Lion, BETAS[:2]),
    "sgd": (Momentum, BETAS[:1]),
}


@pytest.fixture(scope="module")
def gpt_gradients():
    """(program of the model GPT) → its gradients, traced once: they do not depend on the optimizer."""
    functions = []

    def gradients_of(program):
        if not functions:
            functions.append(jax.jit(gradient_function(program.graph, program.mesh)))
        return functions[0]

    return gradients_of


def updates(program):
    """`train_step` of a third argument, the gradients: that of AdamW has them of its own, and takes twice as long."""
    step = jax.jit(lambda state, batch, results: _train_step(program, lambda *_: results, state, batch))
    own = program.config.optimizer.kind == "adamw"
    return (lambda state, batch, _: program.train_step(state, batch)) if own else step


@pytest.mark.parametrize("kind, clip", [("adamw", 0.5), ("ademamix", 0.5), ("lion", 0.5), ("sgd", 0.0)])
def test_three_steps_equal_plain_numpy(make_program, gpt_gradients, kind, clip):
    reference, settings = OPTIMIZERS[kind]
    flags = {"norms": clip > 0, "biases": clip == 0, "embeddings": clip == 0}
    program = make_program(
        *GPT,
        *SCHEDULE,
        *settings,
        f"optimizer.kind={kind}",
        f"optimizer.clip_norm={clip}",
        "optimizer.weight_decay=0.3",
        *(f"optimizer.decay_{name}={str(value).lower()}" for name, value in flags.items()),
    )
    gradients_of, step = gpt_gradients(program), updates(program)
    state = program.init_state()
    # Norms and biases start at one and zero: moved, so that decay shows on them.
    rng = np.random.default_rng(7)
    moved = {n: np.asarray(w) + np.float32(0.05 * rng.standard_normal(w.shape)) for n, w in state.params.items()}
    params = {n: jax.device_put(w, state.params[n].sharding) for n, w in moved.items()}
    state = replace(state, params=params)
    weights = to_numpy(state.params)
    directions = {name: reference() for name in weights}
    for t, rate in enumerate(RATES, start=1):
        batch = random_batch(program, t)
        results = gradients_of(state.params, {}, batch, state.step, state.loss_scale)
        gradients = to_numpy(results.gradients)
        norm = np.sqrt(sum(np.sum(g * g) for g in gradients.values()))
        assert norm > 1  # or else nothing is clipped
        factor = min(1.0, clip / norm) if clip else 1.0
        for name, g in gradients.items():
            decay = 0.3 * decays(name, **flags) * weights[name]
            weights[name] = weights[name] - rate * (directions[name](factor * g, t) + decay)
        state, metrics = step(state, batch, results)
        assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-5)
        assert float(metrics["learning_rate"]) == pytest.approx(rate, rel=1e-6)
        assert int(state.step) == t
        for name, found in to_numpy(state.params).items():
            np.testing.assert_allclose(found, weights[name], rtol=1e-4, atol=1e-6, err_msg=f"{name}, step {t}")
            weights[name] = found  # each step on its own: small differences do not add up


@pytest.mark.parametrize(("warmup", "length"), [("3", 3), ("null", 6), ("0", 1)])
def test_without_a_first_mean_the_slow_ones_half_life_rises_from_zero(make_program, warmup, length):
    """Over the steps of the run if no number of them is set; 0 has all of alpha and beta3 from the first step on."""
    slow_mean = f"{{beta3: 0.95, alpha: 4, warmup_steps: {warmup}}}"
    settings = f"optimizer={{kind: ademamix, beta1: 0, beta2: 0.9, ademamix: {slow_mean}}}"
    optimizer = Ademamix(make_program(settings, "run.steps=6").plan).transformation()
    one = {"w": np.float32(1)}
    state, slow = optimizer.init(one), 0.0
    for t in (1, 2, 3):
        share = min(t / length, 1)
        beta3 = 0.95 ** (1 / share)  # a half-life of this share of the last one
        slow = beta3 * slow + (1 - beta3)
        found, state = optimizer.update(one, state)
        assert float(found["w"]) == pytest.approx(1 + share * 4 * slow, rel=1e-5)


@pytest.mark.parametrize("compute", [pytest.param("bfloat16", marks=pytest.mark.smoke), "float16"])
def test_half_precision_keeps_fp32_masters_that_move_by_less_than_half_precision_sees(make_program, compute):
    program = make_program(f"precision.compute={compute}", "schedule.learning_rate=1e-6", "optimizer.weight_decay=0.0")
    state = program.init_state()
    before = {name: np.asarray(w) for name, w in state.params.items()}
    state, metrics = program.train_step(state, random_batch(program, 0))
    assert np.isfinite(metrics["loss"]) and not metrics["skipped"]
    if compute == "bfloat16":
        assert "loss_scale" not in metrics and float(state.loss_scale) == 1
    floats = [leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert {str(leaf.dtype) for leaf in floats} == {"float32"}
    name = "blocks.mlp.mlp.up"
    moved = np.asarray(state.params[name]) - before[name]
    assert np.mean(np.abs(moved) > 0.5e-6) > 0.9
    half = [np.asarray(w).astype(jnp.dtype(compute)) for w in (state.params[name], before[name])]
    assert np.mean(half[0] == half[1]) > 0.9
    # It computes in half precision and stays near single.
    single = make_program("precision.compute=float32")
    sums, tokens = single.eval_step(single.init_state().params, {}, random_batch(single, 0))
    assert float(metrics["loss"]) != float(sums["loss"] / tokens)
    near = {"bfloat16": 1e-2, "float16": 1e-3}[compute]
    assert float(metrics["loss"]) == pytest.approx(float(sums["loss"] / tokens), rel=near)


@pytest.mark.smoke
def test_the_state_is_donated_and_keeps_its_place(make_program):
    program = make_program(devices=4, data=2, tensor=2)
    state = program.init_state()
    leaves = jax.tree.leaves(state)
    places = [leaf.sharding for leaf in leaves]
    batch = random_batch(program, 0)
    step = program.train_step.lower(state, batch).compile()
    state, _ = step(state, batch)
    assert all(leaf.is_deleted() for leaf in leaves)
    assert not any(field.is_deleted() for field in batch.values())
    assert [leaf.sharding for leaf in jax.tree.leaves(state)] == places
    stored = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
    assert step.memory_analysis().alias_size_in_bytes >= stored  # every array is written where it was read


def test_averages_of_weights_forget_the_first_ones_sooner(make_program):
    program = make_program("optimizer.ema_decay=0.3", devices=4, fsdp=2, tensor=2)
    state = program.init_state()
    averages = to_numpy(state.params)
    for t, rate in enumerate((2 / 11, 3 / 12, 0.3), start=1):  # (1 + t) / (10 + t), up to 0.3
        state, _ = program.train_step(state, random_batch(program, t))
        for name, weight in to_numpy(state.params).items():
            averages[name] = rate * averages[name] + (1 - rate) * weight
    for name, found in to_numpy(state.ema).items():
        np.testing.assert_allclose(found, averages[name], rtol=1e-5, atol=1e-7, err_msg=name)


def test_offloaded_moments_and_averages_are_on_the_host_and_change_no_number(make_program):
    programs = [
        make_program("optimizer.ema_decay=0.3", f"optimizer.offload={share}", devices=4, fsdp=2, tensor=2)
        for share in (0, 0.6)
    ]
    [together], [*alone, others] = (program.update.turns for program in programs)
    assert {len(turn) for turn in alone} == {1} and len(alone) + len(others) == len(together)
    plain, offloaded = (program.init_state() for program in programs)
    for step in range(2):
        batch = random_batch(programs[0], step)
        plain, offloaded = (
            program.train_step(state, batch)[0] for program, state in zip(programs, (plain, offloaded), strict=True)
        )
    moments = jax.tree.leaves((offloaded.optimizer, offloaded.ema))
    on_host = sum(leaf.nbytes for leaf in moments if leaf.sharding.memory_kind == "pinned_host")
    assert 0.5 < on_host / sum(leaf.nbytes for leaf in moments) <= 0.6
    assert not any(leaf.sharding.memory_kind == "pinned_host" for leaf in offloaded.params.values())
    for expected, found in zip(jax.tree.leaves(plain), jax.tree.leaves(offloaded), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "overrides, ties",
    [("", 0), pytest.param("optimizer.offload=1", 1, marks=pytest.mark.long), ("optimizer.state=int8", 1)],
)
def test_small_moments_tie_the_weight_gradients_of_each_layer_to_it(make_program, overrides, ties):
    def barriers(layers):
        program = make_program(
            f"model.num_layers={layers}", f"kernels.scan_unroll={layers}", *overrides.split(), devices=1
        )
        text = program.train_step.lower(program.abstract_state, program.abstract_batch).as_text()
        return text.count("stablehlo.optimization_barrier")

    assert barriers(2) - barriers(1) == ties


def test_a_share_too_small_for_any_array_is_refused(make_program):
    with pytest.raises(
        ConfigError, match="optimizer.offload=0.001 moves no array to the host .*: raise it to at least"
    ):
        _ = make_program("optimizer.offload=0.001", devices=1).abstract_state
    with pytest.raises(ConfigError, match="moves no array to the host .*: remove it, or keep moments"):
        _ = make_program("optimizer.kind=sgd", "optimizer.beta1=0", "optimizer.offload=1", devices=1).abstract_state


def test_the_logged_loss_is_the_language_model_loss_alone(make_program):
    plain, weighted = (make_program(f"model.z_loss={z}") for z in (0.0, 0.1))
    losses = []
    for program in (plain, weighted):
        state, batch = program.init_state(), random_batch(program, 0)
        sums, tokens = program.eval_step(state.params, {}, batch)
        assert float(tokens) == float(batch["loss_mask"].sum())
        of_nothing = program.eval_step(state.params, {}, batch | {"loss_mask": jnp.zeros_like(batch["loss_mask"])})
        assert jax.tree.map(float, of_nothing) == ({"loss": 0}, 0), "a batch that adds nothing to a mean"
        metrics = program.train_step(state, batch)[1]
        assert float(metrics["loss"]) == pytest.approx(float(sums["loss"] / tokens), rel=1e-5)
        losses.append(float(metrics["loss"]))
        assert ("z_loss" in metrics) == (program is weighted)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.dropout=0.1",),
        ("model.num_experts=2", "model.router.jitter=0.1"),
        ("lora.rank=2", "lora.dropout=0.1", "checkpoint.init_from=a_folder"),
        ("precision.fp8.recipe=nvfp4", "model.hidden_size=32"),  # gradients are rounded at random
    ],
    ids=str,
)
def test_all_that_is_random_in_a_step_gives_it_a_key_that_differs_from_step_to_step(make_program, overrides):
    keys = [make_program(WHOLE, *overrides, "run.seed=5").graph.random_key(jnp.int32(step)) for step in (0, 0, 1)]
    first, again, later = (jax.random.key_data(key).tolist() for key in keys)
    assert first == again != later
    assert (
        make_program(WHOLE, "model.num_experts=2", "lora.rank=2", "checkpoint.init_from=a_folder").graph.random_key(
            jnp.int32(0)
        )
        is None
    )


def test_random_weights_in_place_of_those_of_init_from_are_made_only_if_asked_for(make_program):
    program = make_program("lora.rank=2", "checkpoint.init_from=a_folder")
    with pytest.raises(ConfigError, match=r"checkpoint\.init_from .*first_state\(\).*random_state\(\)"):
        program.init_state()


def test_dropout_differs_from_step_to_step_and_repeats_for_a_step(make_program):
    program = make_program("model.dropout=0.3")
    batch = random_batch(program, 0)
    first, again, later = (
        float(program.train_step(replace(program.init_state(), step=jnp.int32(step)), batch)[1]["loss"])
        for step in (0, 0, 1)
    )
    assert first == again != later
