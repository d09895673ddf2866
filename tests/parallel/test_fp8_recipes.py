"""FP8 recipes in reference arithmetic: the matmuls against NumPy, training on meshes as on one device."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from mesh_models import MIXTRAL

from megajax.config import Fp8Recipe, register_fp8
from megajax.config.checks import check_mesh
from megajax.config.extensions import import_extensions
from megajax.errors import ConfigError
from megajax.kernel_choice import Kernels
from megajax.mesh import AXES, build_mesh
from megajax.options.fp8_recipes import RECIPES
from megajax.parallel.mesh_comm import MeshComm
from megajax.parallel.tensor.linear import Rounded
from megajax.step_plan import Collectives
from megajax.training.batches import to_global
from megajax.training.step import TrainProgram
from megajax.training.summary import summary


def to_e4m3(x, axis, tensor):
    """With one scale for all numbers: where a block begins has no influence, so each mesh rounds in the same way."""
    scale = 2.0**13 if tensor == "gradient" else 2.0**3
    return jnp.clip(x * scale, -448, 448).astype(jnp.float8_e4m3fn).astype(x.dtype) / scale


@pytest.fixture(scope="module", autouse=True)
def recipes():
    before = dict(RECIPES)
    register_fp8(Fp8Recipe("test_e4m3", rounded=to_e4m3))
    import_extensions(["docs/examples/blockwise_fp8.py"])
    yield
    RECIPES.clear()
    RECIPES.update(before)


def blocks_by_hand(x: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Each block scaled by the largest power of two that keeps it in E4M3, rounded, scaled back."""
    out = np.empty_like(x, np.float32)
    for i in range(0, len(x), rows):
        for j in range(0, x.shape[1], columns):
            block = x[i : i + rows, j : j + columns].astype(np.float32)
            scale = 2.0 ** math.floor(math.log2(448 / np.abs(block).max()))
            rounded = (block * scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
            out[i : i + rows, j : j + columns] = rounded / scale
    return out


def test_a_layer_rounds_the_operands_of_its_three_matmuls():
    rng, sizes = np.random.default_rng(0), dict.fromkeys(AXES, 1)
    x, w, dy = (rng.standard_normal(shape).astype(np.float32) for shape in ((192, 256), (256, 384), (192, 384)))
    comm = MeshComm(sizes, Kernels(), Collectives(), deterministic=False)
    with jax.default_matmul_precision("highest"):
        y, pull = jax.vjp(lambda x, w: comm.column_linear(x, Rounded(w, RECIPES["blockwise"].rounded)), x, w)
        dx, dw = pull(dy)
    weight = blocks_by_hand(w, 128, 128)
    np.testing.assert_allclose(y, blocks_by_hand(x, 1, 128) @ weight, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dx, blocks_by_hand(dy, 1, 128) @ weight.T, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(dw, blocks_by_hand(x, 128, 1).T @ blocks_by_hand(dy, 128, 1), rtol=1e-4, atol=1e-3)


def in_four_bits(x, axis, tensor):
    """Blocks of 32 along the axis that is summed over, in multiples of a seventh of their largest number."""
    blocks = jnp.moveaxis(x, axis, -1).reshape(-1, 32)
    step = jnp.abs(blocks).max(-1, keepdims=True) / 7
    moved = (jnp.round(blocks / step) * step).reshape(jnp.moveaxis(x, axis, -1).shape)
    return jnp.moveaxis(moved, -1, axis)


def four_bits_by_hand(x: np.ndarray, axis: int) -> np.ndarray:
    rows, out = (x if axis == 1 else x.T), []
    for row in rows:
        steps = [np.abs(row[i : i + 32]).max() / 7 for i in range(0, len(row), 32)]
        out.append([np.round(value / steps[i // 32]) * steps[i // 32] for i, value in enumerate(row)])
    return np.array(out) if axis == 1 else np.array(out).T


@pytest.mark.parametrize("layer", ["column_linear", "row_linear", "replicated_linear"])
def test_blocks_lie_along_the_axis_that_each_matmul_sums_over(layer):
    rng, sizes = np.random.default_rng(1), dict.fromkeys(AXES, 1)
    x, w, dy = (rng.standard_normal(shape).astype(np.float32) for shape in ((64, 96), (96, 128), (64, 128)))
    linear = getattr(MeshComm(sizes, Kernels(), Collectives(), deterministic=False), layer)
    with jax.default_matmul_precision("highest"):
        y, pull = jax.vjp(lambda x, w: linear(x, Rounded(w, in_four_bits)), x, w)
        dx, dw = pull(dy)
    hand, close = four_bits_by_hand, {"rtol": 1e-4, "atol": 1e-4}
    np.testing.assert_allclose(y, hand(x, 1) @ hand(w, 0), **close)
    np.testing.assert_allclose(dx, hand(dy, 1) @ hand(w, 1).T, **close)
    np.testing.assert_allclose(dw, hand(x, 0).T @ hand(dy, 0), **close)


def make(table, mesh, microbatches=1, recipe="test_e4m3", model="llama", **settings):
    precision = {"compute": "float32", "fp8": {"recipe": recipe, **settings}}
    return table.make_config(model, mesh, microbatches=microbatches, steps=2, optimizer="sgd", precision=precision)


def build(config):
    count = math.prod(getattr(config.mesh, axis) for axis in AXES)
    return TrainProgram.build(config, build_mesh(check_mesh(config, count), jax.devices()[:count]))


def first_steps(table, config):
    program = build(config)
    state, losses = table.first_state(program, table.weights_of(config)), []
    for fields in table.make_batches(config):
        state, metrics = program.train_step(state, to_global(program, fields))
        losses.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    assert np.isfinite(losses).all()
    return np.array(losses)


@pytest.fixture(scope="module")
def expected(table):
    return first_steps(table, make(table, {}))


MESHES = [({"fsdp": 2, "tensor": 2}, 1), ({"context": 2, "fsdp": 2}, 1), ({"pipeline": 2}, 2)]


@pytest.mark.parametrize(("mesh", "microbatches"), MESHES, ids=str)
def test_it_trains_as_on_one_device(table, expected, mesh, microbatches):
    np.testing.assert_allclose(first_steps(table, make(table, mesh, microbatches)), expected, rtol=2e-3)


def test_it_rounds(table, expected):
    """The comparison above would pass without rounding, and so would a recipe that rounds nothing."""
    plain = first_steps(table, make(table, {}, recipe="none"))
    assert 1e-5 < abs(expected[0, 1] / plain[0, 1] - 1) < 0.2
    assert "rounded by test_e4m3 in layers 1 to" in summary(build(make(table, {}, first_bf16_layers=1)), [])


def test_what_it_cannot_do_is_refused(table):
    with pytest.raises(
        ConfigError,
        match="recipe=test_e4m3 cannot be combined with model.num_experts=8, because experts have no reference",
    ):
        make(table, {}, model=MIXTRAL)
    with pytest.raises(ValueError, match="'none', 'current', 'delayed', .*'blockwise'"):
        make(table, {}, recipe="blockwize")
    with pytest.raises(ConfigError, match="current exists already"):
        register_fp8(Fp8Recipe("current", rounded=to_e4m3))
    with pytest.raises(ConfigError, match="mine has no function `rounded`"):
        register_fp8(Fp8Recipe("mine"))
