"""A backward pass in two parts: the result of one pass, each matmul once, the matrices' gradients in part two."""

from collections import Counter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import partial_eval
from jax.sharding import PartitionSpec as P

from megajax.config.checks import check_mesh
from megajax.mesh import build_mesh
from megajax.step.nodes import HIDDEN, StepArrays
from megajax.step.stack.remat_groups import StreamGradients
from megajax.step.stack.vjp import ResidualLayout, SplitBackward
from megajax.step_plan import StepPlan
from megajax.training.step import TrainProgram

COLLECTIVES = {
    "psum",
    "psum_invariant",
    "all_gather",
    "reduce_scatter",
    "psum_scatter",
    "ppermute",
    "all_to_all",
    "pmax",
}


def primitives(closed) -> Counter:
    """How often each operation is needed, calls within counted too."""
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))

    def within(jaxpr) -> Counter:
        found = Counter()
        for equation in jaxpr.eqns:
            inner = [sub for value in equation.params.values() for sub in _jaxprs(value)]
            found += sum(map(within, inner), Counter()) if inner else Counter([equation.primitive.name])
        return found

    return within(jaxpr)


def _jaxprs(value):
    """Jaxprs among an operation's parameters."""
    for item in value if isinstance(value, (tuple, list)) else [value]:
        inner = getattr(item, "jaxpr", item)
        if hasattr(inner, "eqns"):
            yield inner


# A small block: two matrices and a vector for one layer, two matrices for another.


def layer(weights, x):
    h = jax.nn.gelu(x @ weights["up"] + weights["bias"])
    return x + h @ weights["down"]


RUNS = {
    "plain": lambda run: run,
    "in a jit": jax.jit,
    "recomputed": jax.checkpoint,
    "recomputed in a jit": lambda run: jax.jit(jax.checkpoint(run)),
    "jits in a recomputed one": lambda run: jax.checkpoint(jax.jit(jax.jit(run))),
}


@pytest.fixture
def block():
    rng = np.random.default_rng(0)

    def array(*shape):
        return np.asarray(0.3 * rng.standard_normal(shape), np.float32)

    weights = tuple({"up": array(8, 12), "bias": array(12), "down": array(12, 8)} for _ in range(2))
    return SimpleNamespace(weights=weights, x=array(5, 8), dy=array(5, 8))


def backward_of(run):
    """The backward pass of two layers, recomputed from their input."""

    def backward(weights, saved, dy):
        def both(weights, x):
            return run(weights[1], run(weights[0], x))

        gradient, dx = jax.vjp(both, weights, saved[0])[1](dy)
        return dx, gradient, {"largest": jnp.abs(dy).max()}

    return backward


def assert_close(found, expected):
    assert np.linalg.norm(found - expected) < 1e-5 * np.linalg.norm(expected)


@pytest.mark.smoke
@pytest.mark.parametrize("run", RUNS)
def test_both_parts_together_have_the_result_of_one_pass(block, run):
    backward = backward_of(RUNS[run](layer))

    @jax.jit
    def both(weights, x, dy):
        split = SplitBackward(backward, weights, [x], dy)
        *inputs, later = split.inputs(weights, [x], dy)
        return backward(weights, [x], dy), inputs, split.weights(weights, later)

    found = both(block.weights, block.x, block.dy)
    (dx, gradients, extra), (found_dx, vectors, found_extra), matrices = jax.device_get(found)
    assert [set(v) for v in vectors] == [{"bias"}] * 2
    assert [set(m) for m in matrices] == [{"up", "down"}] * 2
    assert_close(found_dx, dx)
    assert found_extra == extra
    for expected, *parts in zip(gradients, vectors, matrices, strict=True):
        for name, gradient in (parts[0] | parts[1]).items():
            assert_close(gradient, expected[name])


@pytest.mark.parametrize("run", RUNS)
def test_the_matrices_products_are_in_the_second_part_and_no_product_is_in_both(block, run):
    backward = backward_of(RUNS[run](layer))
    split = SplitBackward(backward, block.weights, [block.x], block.dy)
    arguments = (block.weights, [block.x], block.dy)
    later = split.inputs(*arguments)[3]
    first = primitives(jax.make_jaxpr(split.inputs)(*arguments))["dot_general"]
    second = primitives(jax.make_jaxpr(split.weights)(block.weights, later))["dot_general"]
    assert first + second == primitives(jax.make_jaxpr(backward)(*arguments))["dot_general"]
    assert second == 4, "one for each matrix"


VIEWS = {
    "shape": lambda a: a.reshape(-1),
    "fewer dimensions": lambda a: jax.lax.squeeze(a, (0,)),
    "name": lambda a: checkpoint_name(a, "kept"),
}


@pytest.mark.parametrize("view", VIEWS)
def test_an_array_that_is_kept_in_several_forms_is_stored_once(view):
    def forward(x):
        return {"one": (kept := 2 * x), "other": VIEWS[view](kept), "negative": -kept}

    x = jnp.arange(6.0).reshape(1, 2, 3)
    layout = ResidualLayout(forward, x)
    stored = layout.store(expected := forward(x))
    assert len(stored) == 2
    jax.tree.map(np.testing.assert_array_equal, layout.restore(stored), expected)


def test_a_matrix_that_the_first_part_needs_is_handed_to_the_second():
    """Its gradient `x.T dy`, of which `extra` is the sum of squares, is computed once."""

    def backward(weights, saved, dy):
        gradient = saved[0].T @ dy
        return dy @ weights[0]["up"].T, ({"up": gradient},), jnp.sum(gradient**2)

    x, dy = jnp.arange(6.0).reshape(3, 2), jnp.arange(12.0).reshape(3, 4) - 5
    weights = ({"up": jnp.ones((2, 4))},)
    split = SplitBackward(backward, weights, [x], dy)
    dx, vectors, extra, later = split.inputs(weights, [x], dy)
    expected = np.asarray(x).T @ np.asarray(dy)
    np.testing.assert_array_equal(split.weights(weights, later)[0]["up"], expected)
    np.testing.assert_array_equal(dx, np.tile(np.asarray(dy).sum(1, keepdims=True), 2))
    assert float(extra) == (expected**2).sum() and vectors == ({},)


@pytest.mark.smoke
def test_the_arguments_of_its_construction_are_only_examples(block):
    backward = backward_of(layer)
    split = SplitBackward(backward, block.weights, [block.x], block.dy)
    weights, x, dy = jax.tree.map(lambda a: 2 * a - 1, (block.weights, block.x, block.dy))

    @jax.jit
    def run(weights, x, dy):
        later = split.inputs(weights, [x], dy)[3]
        return split.weights(weights, later), backward(weights, [x], dy)[1]

    for found, layer_gradients in zip(*jax.device_get(run(weights, x, dy)), strict=True):
        for name, gradient in found.items():
            assert_close(gradient, layer_gradients[name])


@pytest.mark.smoke
def test_a_gradient_may_be_an_input_or_equal_another_gradient():
    def backward(weights, saved, dy):
        both = dy.T @ saved[0]
        return 2 * dy, ({"same": dy, "twin": both, "other": both, "constant": jnp.ones((2, 2))},), {}

    dy, x = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(4, dtype=np.float32).reshape(2, 2)

    @jax.jit
    def run(x, dy):
        split = SplitBackward(backward, (), [x], dy)
        dx, vectors, _, later = split.inputs((), [x], dy)
        return dx, vectors, split.weights((), later), backward((), [x], dy)[1]

    dx, vectors, (found,), (expected,) = run(x, dy)
    np.testing.assert_array_equal(dx, 2 * dy)
    assert vectors == ({},) and found.keys() == expected.keys()
    for name, gradient in expected.items():
        np.testing.assert_array_equal(found[name], gradient)


# The model's blocks, on a mesh

MATRICES = 4  # query, key and value in one; output; gate and up in one, or up; down
# What the matrices' gradients alone need is recomputed with them: the gathered inputs of attention and of the MLP.
IN_THE_SECOND = {"save_matmuls": {"all_gather": 2}}


@pytest.mark.parametrize(
    ("model", "policy"),
    [("llama", "full"), ("gpt2", "selective")],
)
def test_a_block_of_the_model_is_split_in_two(table, monkeypatch, model, policy):
    """The second part has only the matrices' products, and only the communication that they need."""
    monkeypatch.setattr(StepPlan, "ties_gradients", False)  # as in a pipeline, where alone a pass is split
    config = table.make_config(model, {"fsdp": 2, "tensor": 2}, remat={"policy": policy})
    program = TrainProgram.build(config, build_mesh(check_mesh(config, 4), jax.devices()[:4]))
    graph, counts = program.graph, {}
    stack, segment = graph.layers, graph.layers.segments[0]

    def compare(params, batch):
        fields = {name: field[0] for name, field in batch.items()}
        at = graph.microbatch(fields, 0)
        given, _ = graph.inner[0].forward(StepArrays(graph.table.gather(params), {}), {}, at, save=True)
        x, inputs = given[HIDDEN], at.inputs
        group = stack.weights.select_group(stack.weights.gather_per_step(params, {}, {})[0][0], segment, 0)
        at = stack.groups.at(segment, 0, 0)
        y, saved, _ = stack.groups.forward(at, group, x, inputs, True)
        leaves, structure = jax.tree.flatten(saved)
        dy = StreamGradients(y)

        def backward(group, leaves, ddy, inputs):
            return stack.groups.backward(at, group, jax.tree.unflatten(structure, leaves), ddy, inputs)

        split = SplitBackward(backward, group, leaves, dy, inputs)
        dx, vectors, _, later = split.inputs(group, leaves, dy, inputs)
        matrices = split.weights(group, later)
        counts["whole"] = primitives(jax.make_jaxpr(backward)(group, leaves, dy, inputs))
        counts["first"] = primitives(jax.make_jaxpr(split.inputs)(group, leaves, dy, inputs))
        counts["second"] = primitives(jax.make_jaxpr(split.weights)(group, later))
        expected_dx, gradients, _ = backward(group, leaves, dy, inputs)
        pairs = [(dx.x, expected_dx.x)]
        for expected, *parts in zip(gradients, vectors, matrices, strict=True):
            together = parts[0] | parts[1]
            assert together.keys() == expected.keys()
            assert len(parts[1]) == MATRICES and not parts[0].keys() & parts[1].keys()
            pairs += [(together[name], expected[name]) for name in expected]
        worst = jnp.stack([jnp.linalg.norm(a - b) / jnp.linalg.norm(b) for a, b in pairs])
        return jax.lax.pmax(worst.max(), tuple(program.mesh.axis_names))

    specs = {name: placement.spec for name, placement in program.placements.items()}
    run = jax.shard_map(
        compare, mesh=program.mesh, in_specs=(specs, program.batch_sharding.spec), out_specs=P(), check_vma=False
    )
    rng = np.random.default_rng(0)
    abstract = program.abstract_state.params
    params = {n: np.asarray(0.1 * rng.standard_normal(w.shape), np.float32) for n, w in abstract.items()}
    tokens = np.asarray(rng.integers(0, 250, program.plan.batch_shape), np.int32)
    batch = {name: tokens for name in program.abstract_batch}
    assert jax.jit(run)(params, {**batch, "positions": tokens % 16}) < 1e-5

    assert counts["first"]["dot_general"] + counts["second"]["dot_general"] == counts["whole"]["dot_general"]
    assert counts["second"]["dot_general"] == MATRICES
    communication = {
        part: {name: number for name, number in counts[part].items() if name in COLLECTIVES} for part in counts
    }
    assert communication["second"] == IN_THE_SECOND.get(policy, {})
    assert Counter(communication["first"]) + Counter(communication["second"]) == communication["whole"] != {}
