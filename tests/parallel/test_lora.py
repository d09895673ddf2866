"""Low-rank adapters: gradients of the plain formula, the same on every mesh, and nothing for what is frozen."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from megajax.config import LoraConfig
from megajax.config.checks import check_mesh
from megajax.errors import ConfigError
from megajax.estimate.costs import flops_per_token
from megajax.estimate.memory import estimate_memory
from megajax.kernel_choice import Kernels
from megajax.mesh import AXES, build_mesh
from megajax.model import Transformer, bind
from megajax.model.lora import A, Adapted, B, adapters
from megajax.parallel.mesh_comm import MeshComm
from megajax.step_plan import Collectives
from megajax.training.batches import to_global
from megajax.training.step import TrainProgram
from megajax.weights.adapters import adapted

BASE = {"checkpoint": {"init_from": "a run"}}
LLAMA = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_hidden_size": 48, "init_std": 0.1}
LLAMA |= {"vocab_size": 250}
DENSE_AND_MOE = LLAMA | {"num_experts": 4, "first_dense_layers": 1, "expert_ffn_hidden_size": 16}
DENSE_AND_MOE |= {"shared_expert_ffn_hidden_size": 16, "router": {"global_loss": 0.1}}
ALL = {"rank": 3, "alpha": 12.0, "dropout": 0.2}
# Not all members of fused weights.
SOME = ALL | {"targets": ["query_down", "value", "output", "up", "shared_up", "shared_down"]}
DENSE_AND_LATENT_MOE = {name: value for name, value in DENSE_AND_MOE.items() if name != "num_kv_heads"}
DENSE_AND_LATENT_MOE |= {
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}


def one_device(config) -> TrainProgram:
    return TrainProgram.build(config, build_mesh(check_mesh(config, 1), jax.devices()[:1]))


@pytest.fixture(scope="module")
def steps(table) -> SimpleNamespace:
    """One step on four devices in FP32, without dropout, and the loss of the merged weights in plain jax.

    Two devices share a KV head.
    """
    lora = ALL | {"dropout": 0.0, "targets": ["query", "value", "down"]}
    config = table.make_config(LLAMA, {"tensor": 4}, lora=lora, **BASE)
    program = TrainProgram.build(config, build_mesh(check_mesh(config, 4), jax.devices()[:4]))
    weights = table.weights_of(config)
    fields = next(table.make_batches(config))
    batch = to_global(program, fields)
    state, metrics = program.train_step(table.first_state(program, weights), batch)
    gradients = table.first_gradients(program, state, float(metrics["grad_norm"]))
    model = Transformer(config.model)

    def loss(trained):
        logits = bind(model, table.merged(weights | trained, ALL["alpha"] / ALL["rank"]))(fields["tokens"])
        each = -jnp.take_along_axis(jax.nn.log_softmax(logits), fields["targets"][..., None], -1)[..., 0]
        return jnp.sum(each * fields["loss_mask"]) / fields["loss_mask"].sum()

    expected = jax.jit(jax.value_and_grad(loss))
    return SimpleNamespace(**locals())


def test_loss_and_gradients_are_those_of_the_merged_weights(steps):
    loss, expected = jax.device_get(steps.expected({n: w for n, w in steps.weights.items() if n.endswith((A, B))}))
    assert float(steps.metrics["loss"]) == pytest.approx(float(loss), rel=1e-5)
    assert steps.gradients.keys() == expected.keys() and len(expected) == 6
    for name, gradient in expected.items():
        error = np.linalg.norm(steps.gradients[name] - gradient) / np.linalg.norm(gradient)
        assert error < 1e-4, f"{name}: {error:.1e}"


def test_the_adapted_model_is_the_base_model_at_first(steps):
    frozen = steps.table.first_state(steps.program, steps.weights).frozen
    state = replace(steps.program.random_state(params=False), frozen=frozen)
    first = {name: np.asarray(w) for name, w in state.params.items()}
    assert all(w.any() != name.endswith(B) for name, w in first.items())
    assert first["blocks.dense.mlp.down_lora_a"].std() == pytest.approx((3 * 48) ** -0.5, rel=0.1)
    loss, _ = steps.expected({name: np.zeros_like(w) for name, w in first.items()})
    _, metrics = steps.program.train_step(state, steps.batch)
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-5)


def test_a_step_keeps_frozen_weights_bit_for_bit_and_has_no_moments_of_them(steps):
    state, weights = steps.state, steps.weights
    assert set(state.params) == {name for name in weights if name.endswith((A, B))} == weights.keys() - state.frozen
    for name, w in state.frozen.items():
        np.testing.assert_array_equal(w, weights[name], err_msg=name)
    assert all((np.asarray(w) != weights[name]).any() for name, w in state.params.items())
    sizes = {a.shape for a in jax.tree.leaves(state.optimizer) if a.ndim}
    assert sizes == {w.shape for w in state.params.values()}


def test_no_gradient_of_a_frozen_weight_is_computed(steps):
    text = steps.program.train_step.lower(steps.state, steps.batch).compile().as_text()
    D, F, V = 32, 48, 256
    qkv, gate_up = 3 * 8, 2 * F // 4  # of a device: one head of each
    shapes = (f"{D},{qkv}", f"{D // 4},{D}", f"{D},{gate_up}", f"{F // 4},{D}", f"{D},{V // 4}")
    frozen = {f"f32[{shape}]" for shape in shapes}
    made = [line.split(" dot(")[0].split("=")[1].split("{")[0].strip() for line in text.splitlines() if " dot(" in line]
    assert f"f32[{D},6]" in made and not frozen.intersection(made)  # the first matrices of query and value have one


@pytest.mark.long
@pytest.mark.parametrize(
    "model, mesh, options",
    [
        # Two devices share a KV head. The stages of a pipeline hold adapters as they hold the weights beside them.
        (LLAMA, {"pipeline": 2, "tensor": 4}, {"lora": ALL, "microbatches": 2}),
        (DENSE_AND_LATENT_MOE, {"expert": 2, "fsdp": 2}, {"lora": SOME}),
    ],
    ids=["pipeline 2 × tensor 4", "expert 2 × fsdp 2"],
)
def test_steps_on_a_mesh_equal_those_on_one_device(table, model, mesh, options):
    config = table.make_config(model, mesh, steps=2, optimizer="sgd", **options, **BASE)
    single = table.reference_config(config)
    weights = table.weights_of(single)
    assert not table.compare(table.train(config, weights), table.train(single, weights)).problems()


def test_the_dropout_of_an_adapter_is_the_same_in_every_process():
    """Its key is made from the layer and the weight's CRC-32; Python's hash differs between processes."""
    weights = {name: np.ones((2, 2), np.float32) for name in ("mlp.down", "mlp.down_lora_a", "mlp.down_lora_b")}
    fused: Any = {"mlp.down": SimpleNamespace(columns={"mlp.down": slice(0, 2)})}
    inputs: Any = SimpleNamespace(adapter_key=jax.random.key(0), token_ids=np.arange(2))
    found = adapted(weights, fused, LoraConfig(**ALL), inputs, layer=5)["mlp.down"].key
    expected = jax.random.fold_in(jax.random.fold_in(inputs.adapter_key, 5), 0x2AB29F11)
    assert found == expected


# Of the input, the weight, the adapter's two matrices and the output: which dimensions `tensor` divides.
TOKENS, COLUMNS = P("tensor"), P(None, "tensor")
DIVIDED = {
    "column_linear": (TOKENS, COLUMNS, P(), COLUMNS, COLUMNS),
    "row_linear": (COLUMNS, P("tensor"), P("tensor"), P(), TOKENS),
    "replicated_linear": (TOKENS, P(), P(), P(), TOKENS),
}


@pytest.fixture(scope="module")
def draws() -> tuple:
    """(a key, eight tokens' numbers, the bits of each number of their inputs `[8, 6]`)."""
    key, tokens = jax.random.key(7), np.array([3, 9, 11, 200, 4, 70, 1, 8], np.uint32)

    def draw(token, column):
        return jax.random.key_data(jax.random.fold_in(jax.random.fold_in(key, token), column))[0]

    of_all = jax.jit(jax.vmap(jax.vmap(draw, (None, 0)), (0, None)))
    return key, tokens, np.asarray(of_all(tokens, np.arange(6)))


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("layer", DIVIDED)
def test_each_kind_of_layer_drops_the_inputs_of_its_adapter_alone(draws, layer, tensor):
    """By the documented rule: a number is dropped by the bits of its token's and its column's key."""
    rng, rate, (key, tokens, bits) = np.random.default_rng(0), 0.4, draws
    x, base, a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((8, 6), (6, 4), (6, 2), (2, 4)))
    sizes = dict.fromkeys(AXES, 1) | {"tensor": tensor}
    comm = MeshComm(sizes, Kernels(), Collectives(), deterministic=False, frozen=True)
    *specs, out = DIVIDED[layer]

    def local(tokens, x, *w):
        return getattr(comm, layer)(x, Adapted(*w, key, tokens, rate))

    mesh = build_mesh(sizes, jax.devices()[:tensor])
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(TOKENS, *specs), out_specs=out, check_vma=False))
    with jax.default_matmul_precision("highest"):
        found = run(tokens, x, base, a, b)
    kept = bits >= np.uint32(rate * 2**32)
    assert 0 < kept.sum() < kept.size
    np.testing.assert_allclose(found, x @ base + np.where(kept, x / (1 - rate), 0) @ a @ b, rtol=1e-4, atol=1e-5)


def test_the_plan_knows_what_is_frozen(steps, table):
    sizes = {name: w.size for name, w in steps.weights.items()}
    adapted = sum(size for name, size in sizes.items() if name.endswith((A, B)))
    base = sum(sizes.values()) - adapted
    on_one = one_device(table.make_config(LLAMA, lora=steps.lora, **BASE))
    memory = estimate_memory(on_one.plan)
    assert (memory.parameters, memory.optimizer) == (4 * (base + adapted), 8 * adapted)
    lora = {"rank": 3, "targets": ["up"]}
    half = one_device(table.make_config(LLAMA, precision={"compute": "bfloat16"}, lora=lora, **BASE))
    dtypes = {(w.dtype.name, "norm" in name) for name, w in half.abstract_state.frozen.items()}
    assert dtypes == {("bfloat16", False), ("float32", True)}
    memory, own, norms = estimate_memory(half.plan), 2 * 3 * (32 + 48), 5 * 32
    assert memory.parameters == 4 * (own + norms) + 2 * (base - norms)
    matrices = base - norms - 256 * 32  # with the head, without the embedding
    difference = flops_per_token(table.make_config(LLAMA)) - flops_per_token(on_one.config)
    assert difference == 2 * matrices - 6 * adapted


# PEFT's names of a Llama's linear layers
OF_PEFT = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "output"}
OF_PEFT |= {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


@pytest.mark.parametrize(
    "lora, problem",
    [
        *(
            (
                {"targets": [theirs]},
                f"has {theirs}, which is not a linear layer that can have an adapter (default): write "
                f"lora.targets=[{ours}]; ",
            )
            for theirs, ours in OF_PEFT.items()
        ),
        ({"targets": ["v_proj", "query", "c_proj"]}, "(default): write lora.targets=[value,query,output,down]; the"),
        ({"targets": ["all-linear"]}, "leave lora.targets out, which means all linear layers."),
        ({"targets": ["q_proj", "lm_head"]}, "has lm_head, which is not a linear layer that can have an adapter"),
        ({"rank": 33}, "lora.rank=33 is above the width 32 of query (default): use 32 or less."),
        *(
            ({"rank": width + 1, "targets": [name]}, f"is above the width {width} of {name} (default): use {width} or")
            for name, width in (("value", 16), ("up", 32), ("down", 32))  # [32, 16], [32, 48] and [48, 32]
        ),
    ],
)
def test_targets_that_the_model_does_not_have_are_refused(table, lora, problem):
    config = table.make_config(LLAMA, lora={"rank": 2, **lora}, **BASE)
    with pytest.raises(ConfigError) as error:
        one_device(config)
    assert problem in str(error.value)
    if "lm_head" in lora.get("targets", []):
        assert str(error.value).endswith("use down, gate, key, output, query, up or value.")


def test_a_rank_may_be_the_width_of_the_layer(table):
    config = table.make_config(LLAMA, lora={"rank": 32, "targets": ["query"]}, **BASE)
    shapes = {name: p.shape for name, p in one_device(config).plan.declared.items()}
    (name,) = adapters(shapes)
    assert (shapes[name + A][-1], shapes[name + B][1]) == (32, 32)


def test_experts_are_no_targets(table):
    config = table.make_config(DENSE_AND_MOE | {"first_dense_layers": 0}, lora={"rank": 2, "targets": ["up"]}, **BASE)
    with pytest.raises(ConfigError, match=r"\(experts cannot\) \(default\): use key, output, query, shared_down"):
        one_device(config)
