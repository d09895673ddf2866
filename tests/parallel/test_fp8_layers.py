"""Which matmuls of a step are in FP8: three for each linear layer of the chosen blocks, and nothing else."""

from collections import Counter

import jax
import pytest
from jaxpr_equations import equations

from megajax.config import Config
from megajax.config.checks import check_mesh
from megajax.layout.segments import plan_segments
from megajax.mesh import build_mesh
from megajax.training.step import TrainProgram

L, D, T, VOCABULARY = 4, 64, 128, 256
QKV = (4 + 2 * 2) * 16  # of 4 query and 2 KV heads; no other matmul of the forward pass is so wide
MODEL = {
    "num_layers": L,
    "hidden_size": D,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "ffn_hidden_size": 160,
    "vocab_size": VOCABULARY,
}
LINEAR_LAYERS = 4  # of a block


def make_config(recipe="current", first=0, last=0, gradient_format="hybrid", **sections) -> Config:
    fp8 = {"recipe": recipe, "format": gradient_format, "first_bf16_layers": first, "last_bf16_layers": last}
    settings = {
        "model": MODEL,
        "batch": {"global_size": 4, "sequence_length": T // 4},
        "data": {"kind": "synthetic"},
        "kernels": {"scan_unroll": L},
        "precision": {"fp8": fp8},
    }
    return Config.model_validate({**settings, **sections})


def matmuls(config: Config) -> list[tuple[tuple[str, str], tuple[int, ...]]]:
    """Of each matmul of the train step on one device, in order: its operands' dtypes and its shape."""
    program = TrainProgram.build(config, build_mesh(check_mesh(config, 1), jax.devices()[:1]))
    step = jax.make_jaxpr(program.train_step)(program.abstract_state, program.abstract_batch)
    found = [e for e in equations(step.jaxpr) if e.primitive.name == "dot_general"]
    return [(tuple(v.aval.dtype.name for v in e.invars), e.outvars[0].aval.shape) for e in found]


def fp8_counts(found) -> Counter:
    return Counter(dtypes for dtypes, _ in found if any(dtype.startswith("float8") for dtype in dtypes))


@pytest.fixture(scope="module")
def plain():
    """The matmuls of a step without FP8."""
    return matmuls(make_config("none"))


# recipe, first and last layers in BF16 → the layers in FP8
CASES = [
    ("current", 0, 2, [0, 1]),
    ("delayed", 2, 1, [2]),
]


@pytest.mark.smoke
@pytest.mark.parametrize(("recipe", "first", "last", "layers"), CASES)
def test_exactly_the_chosen_layers_multiply_in_fp8(plain, recipe, first, last, layers):
    found = matmuls(make_config(recipe, first, last))
    linear_layers = LINEAR_LAYERS * len(layers)
    e4m3, e5m2 = "float8_e4m3fn", "float8_e5m2"
    assert fp8_counts(found) == {(e4m3, e4m3): linear_layers, (e5m2, e4m3): linear_layers, (e4m3, e5m2): linear_layers}
    forward = [dtypes[0] for dtypes, shape in found if shape == (T, QKV)]
    assert forward == [e4m3 if layer in layers else "bfloat16" for layer in range(L)]
    backward = [dtypes[1] for dtypes, shape in found if shape == (D, QKV)]
    assert backward[::-1] == [e5m2 if layer in layers else "bfloat16" for layer in range(L)]
    # Every FP8 matmul replaces one in BF16; attention, embedding and head keep theirs.
    assert len(found) == len(plain) and not fp8_counts(plain)
    head = [dtypes for dtypes, shape in found if VOCABULARY in shape]
    assert head and set(head) == {dtypes for dtypes, shape in plain if VOCABULARY in shape}


def test_with_the_e4m3_format_gradients_are_in_e4m3_too():
    found = matmuls(make_config(gradient_format="e4m3"))
    assert fp8_counts(found) == {("float8_e4m3fn", "float8_e4m3fn"): 3 * LINEAR_LAYERS * L}


def test_a_layer_that_is_recomputed_multiplies_in_fp8_once_more():
    found = fp8_counts(matmuls(make_config(remat={"policy": "full"})))
    assert found["float8_e4m3fn", "float8_e4m3fn"] == 2 * LINEAR_LAYERS * L
    assert found.total() == 4 * LINEAR_LAYERS * L


def plan(platform="gpu", first=0, last=0, **sections):
    model = MODEL | {"num_layers": 5}
    config = make_config(first=first, last=last, **{"kernels": {}, "model": model, **sections})
    return [
        (s.start, s.iterations, s.layers_per_iteration, s.policy.name, s.fp8) for s in plan_segments(config, platform)
    ]


@pytest.mark.smoke
def test_layers_of_another_precision_are_loops_of_their_own():
    assert plan() == [(0, 1, 5, "none", True)]
    assert plan(first=1, last=1) == [(0, 1, 1, "none", False), (1, 1, 3, "none", True), (4, 1, 1, "none", False)]
    assert plan("cpu", last=2) == [(0, 3, 1, "none", True), (3, 2, 1, "none", False)]
    remat = {"policy": "full", "layers": 3}
    assert plan(first=1, remat=remat) == [(0, 1, 1, "full", False), (1, 1, 2, "full", True), (3, 1, 2, "none", True)]
    assert plan(last=2, remat=remat) == [(0, 1, 3, "full", True), (3, 1, 2, "none", False)]
    assert plan(precision={}) == [(0, 1, 5, "none", False)]
