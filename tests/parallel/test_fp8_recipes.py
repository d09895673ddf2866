"""FP8 and FP4 in blocks, and recipes of extensions: matmuls against NumPy, training on meshes as on one device."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import single_device as table
from first_gradients import EXPERTS, MODEL, build, difference, first_gradients, make
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from megajax.config import Fp8Recipe, load_config, register_fp8
from megajax.config.checks import check_mesh
from megajax.config.extensions import import_extensions
from megajax.errors import ConfigError
from megajax.kernel_choice import HOPPER, Hardware, Kernels
from megajax.mesh import AXES
from megajax.model.comm import TokenPositions
from megajax.model.sublayer import BlockInputs
from megajax.ops import blockwise_fp8_kernels, blockwise_kernel, fp8, nvfp4
from megajax.ops.block_matmul import BlockWeight, RoundingNoise
from megajax.ops.block_recipes import IMPLEMENTATIONS, block_recipe
from megajax.ops.expert_block_matmul import grouped_product, grouped_weight_gradient
from megajax.ops.grouped_matmul_block import MatmulTiling
from megajax.options.fp8_recipes import RECIPES
from megajax.parallel.mesh_comm import MeshComm
from megajax.parallel.tensor.linear import TensorParallel, column_linear, row_linear
from megajax.parallel.tensor.ring import TensorRing
from megajax.step_plan import Collectives
from megajax.training.batches import to_global
from megajax.training.summary import summary
from megajax.weights.block_weights import BlockWeights

BLACKWELL = Hardware("gpu", "10.0")


@pytest.fixture(scope="module", autouse=True)
def recipes():
    before = dict(RECIPES)
    register_fp8(Fp8Recipe("four_bits", rounded=in_four_bits))
    import_extensions(["docs/examples/int8_rows.py"])
    yield
    RECIPES.clear()
    RECIPES.update(before)


def in_four_bits(x, tensor):
    """Blocks of 32 along the axis that is summed over, in multiples of a seventh of their largest number."""
    blocks = x.reshape(-1, 32)
    step = jnp.abs(blocks).max(-1, keepdims=True) / 7
    return (jnp.round(blocks / step) * step).reshape(x.shape)


def four_bits_by_hand(x: np.ndarray, axis: int) -> np.ndarray:
    rows, out = (x if axis == 1 else x.T), []
    for row in rows:
        steps = [np.abs(row[i : i + 32]).max() / 7 for i in range(0, len(row), 32)]
        out.append([np.round(value / steps[i // 32]) * steps[i // 32] for i, value in enumerate(row)])
    return np.array(out) if axis == 1 else np.array(out).T


def products(layer, recipe, rng, implementation="emulated"):
    """x, w, dy, and the output and both gradients of a linear layer on one device."""
    x, w, dy = (rng.standard_normal(shape).astype(np.float32) for shape in ((64, 96), (96, 128), (64, 128)))
    linear = getattr(MeshComm(dict.fromkeys(AXES, 1), Kernels(), Collectives(), deterministic=False), layer)

    def apply(x, w):
        used = BlockWeight(w, None, None, recipe, implementation)
        return linear(x, used.with_amax(jax.lax.stop_gradient(w), lambda amax: amax))

    @jax.jit
    def run(x, w, dy):
        y, pull = jax.vjp(apply, x, w)
        return y, *pull(dy)

    with jax.default_matmul_precision("highest"):
        return (x, w, dy), jax.device_get(run(x, w, dy))


@pytest.mark.parametrize("layer", ["column_linear", "row_linear", "replicated_linear"])
def test_blocks_lie_along_the_axis_that_each_matmul_sums_over(layer):
    (x, w, dy), (y, dx, dw) = products(layer, block_recipe(RECIPES["four_bits"]), np.random.default_rng(1))
    hand, close = four_bits_by_hand, {"rtol": 1e-4, "atol": 1e-4}
    np.testing.assert_allclose(y, hand(x, 1) @ hand(w, 0), **close)
    np.testing.assert_allclose(dx, hand(dy, 1) @ hand(w, 1).T, **close)
    np.testing.assert_allclose(dw, hand(x, 0).T @ hand(dy, 0), **close)


@pytest.fixture
def interpreted(monkeypatch):
    """Kernels run without a GPU."""
    for name in ("quantise", "quantise_weight", "gated", "gated_backward"):
        function = partial(getattr(blockwise_fp8_kernels, name), interpret=True)
        monkeypatch.setattr(blockwise_fp8_kernels, name, function)
    how = {"blocks": 1, "interpret": plgpu.InterpretGPUParams(detect_races=False)}
    how["tiling"] = MatmulTiling(rows=64, cols=64, stages=2)
    monkeypatch.setattr(blockwise_kernel, "matmul", partial(blockwise_kernel.matmul, **how))


@cache
def rounding(name: str) -> Callable:
    """x, w, dy → numbers of blocks, and their factor, of every operand of a layer's matmuls."""
    recipe, turned = IMPLEMENTATIONS[name], nvfp4.hadamard if name == "nvfp4" else lambda x: x

    def rounded(x, tensor):
        blocks = recipe.quantised(x, tensor, jnp.abs(x).max(), None)
        return blocks.numbers(jnp.float32), blocks.factor

    def all_rounded(x, w, dy):
        tensors = (x, "input"), (w.T, "weight"), (dy, "gradient"), (w, "weight")
        tensors += (turned(x.T), "input"), (turned(dy.T), "gradient")
        return [rounded(*each) for each in tensors]

    return jax.jit(all_rounded)


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        *((name, "emulated") for name in IMPLEMENTATIONS),
        *(("mxfp8", "cudnn"), ("nvfp4", "cudnn"), ("blockwise", "pallas")),
    ],
)
def test_a_layer_multiplies_the_numbers_of_the_format(name, implementation, interpreted):
    """Those of test_block_formats.py; FP4's gradients here to the nearest number."""
    (x, w, dy), found = products("column_linear", IMPLEMENTATIONS[name], np.random.default_rng(2), implementation)

    def numbers(of_blocks, factor):
        return np.asarray(of_blocks, np.float64) * (1 if factor is None else np.asarray(factor))

    by_rows, w_t, dy_rows, by_inputs, x_t, dy_t = (numbers(*each) for each in rounding(name)(x, w, dy))
    expected = by_rows @ w_t.T, dy_rows @ by_inputs.T
    for own, by_hand, exact in zip(found, (*expected, x_t @ dy_t.T), (x @ w, dy @ w.T, x.T @ dy), strict=True):
        assert np.linalg.norm(own - by_hand) < 1e-6 * np.linalg.norm(by_hand)
        assert 0.01 < np.linalg.norm(own - exact) / np.linalg.norm(exact) < (0.2 if name == "nvfp4" else 0.05)


# Tokens of each expert; some need rounds.
SIZES = np.array([17, 0, 301, 129, 1])
OTHERS_AMAX = 1.3  # of the numbers on other devices, as a multiple of this one's
ROWS_OF = [slice(end - size, end) for end, size in zip(np.cumsum(SIZES), SIZES, strict=True)]


@cache
def experts_by_hand(name: str):
    """x, dy and w, and (y, dx, dw) of each expert as a layer of its own, with the numbers of the format."""
    recipe, rng, count = IMPLEMENTATIONS[name], np.random.default_rng(3), SIZES.sum()
    x, dy = (rng.standard_normal((512, F)).astype(jnp.bfloat16).astype(np.float32) for F in (64, 96))
    x[count:] = dy[count:] = np.nan  # rows of nobody
    w = rng.standard_normal((5, 64, 96)).astype(np.float32)

    @partial(jax.jit, static_argnums=1)
    def numbers(x, tensor, amax):
        blocks = recipe.quantised(x, tensor, amax, None)
        return blocks.numbers(jnp.float32) * (1 if blocks.factor is None else blocks.factor)

    def by_hand(x, tensor, amax):
        """Of one shape, so that few programs are compiled; blocks of zeros are zeros."""
        return np.asarray(numbers(filled(x), tensor, amax), np.float64)[: len(x), : x.shape[1]]

    def filled(x):
        out = np.zeros((384, 384), np.float32)
        out[: len(x), : x.shape[1]] = x
        return out

    turn = jax.jit(jax.vmap(lambda rows: recipe.transformed(rows.T)))
    operands = {"input": x, "gradient": dy}
    turned = {t: np.asarray(turn(np.stack([filled(a[r]) for r in ROWS_OF]))) for t, a in operands.items()}
    turned = {t: a[:, : operands[t].shape[1]] for t, a in turned.items()}
    largest = {t: OTHERS_AMAX * np.abs(a).max() for t, a in turned.items()}
    amaxes, expected = [OTHERS_AMAX * np.abs(a[:count]).max() for a in (x, dy)], []
    for e, r in enumerate(ROWS_OF):
        of_x, of_dy = by_hand(x[r], "input", amaxes[0]), by_hand(dy[r], "gradient", amaxes[1])
        of_w, transposed = (by_hand(each, "weight", np.abs(w).max()) for each in (w[e], w[e].T))
        across = [by_hand(turned[t][e], t, largest[t]) for t in operands]
        expected.append((of_x @ transposed.T, of_dy @ of_w.T, across[0] @ across[1].T))
    return x, dy, w, expected


@pytest.mark.parametrize("implementation", ["emulated", "cudnn"])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_experts_multiply_the_numbers_of_the_format(name, implementation):
    """Each expert as a layer of its own, whose blocks of tokens begin with its first row."""
    recipe, (x, dy, w, expected), sizes = IMPLEMENTATIONS[name], experts_by_hand(name), SIZES

    @jax.jit
    def run(x, w, dy, sizes):
        used = BlockWeight(w, None, None, recipe, implementation).with_amax(w, lambda amax: amax)
        how = lambda amax: OTHERS_AMAX * amax, "xla" if implementation == "cudnn" else "pallas"  # which has no FP32
        products = (grouped_product(*each, *how) for each in ((x, used, sizes, "input"), (dy, used, sizes, "gradient")))
        return *products, grouped_weight_gradient(x, dy, used, sizes, *how).values

    with jax.default_matmul_precision("highest"):
        y, dx, dw = jax.device_get(run(x, w, dy, jnp.asarray(sizes)))
    if implementation == "cudnn" and recipe.has_factor:  # in BF16 the same numbers, rounded once
        used = BlockWeight(w, np.abs(w).max(), None, recipe, implementation)
        product = jax.jit(lambda *each: grouped_product(*each, "input", lambda amax: OTHERS_AMAX * amax, "xla"))
        np.testing.assert_array_equal(product(x.astype(jnp.bfloat16), used, sizes), y.astype(jnp.bfloat16))

    for e, r in enumerate(ROWS_OF):
        for own, hand in zip((y[r], dx[r], dw[e]), expected[e], strict=True):
            assert np.linalg.norm(own - hand) <= 1e-6 * np.linalg.norm(hand)
    assert not y[sizes.sum() :].any() and not dx[sizes.sum() :].any()


# dev/fp8_mesh_table.py has more. By name: recipe, model, mesh, microbatches, the largest difference.
MESHES = {
    "nvfp4, fsdp 2 x tensor 2": ("nvfp4", MODEL, {"fsdp": 2, "tensor": 2}, 1, 0.2),
    "mxfp8, pipeline 2": ("mxfp8", MODEL, {"pipeline": 2}, 2, 0.05),
    "nvfp4, expert 2": ("nvfp4", EXPERTS, {"expert": 2}, 1, 0.2),
}


@pytest.mark.long
@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_rounds_every_number_as_one_device_does(name):
    """Also at random: with other random bits the worst gradient of NVFP4 is 0.4 away, and each matrix's more than 0.2.

    Where the last bit of an FP32 sum differs, a number may round to another one, and then many: not in all three runs.
    """
    recipe, model, mesh, microbatches, largest = MESHES[name]
    expected = first_gradients(make(recipe, model, microbatches=microbatches))
    found = first_gradients(make(recipe, model, mesh, microbatches))
    np.testing.assert_allclose([loss for loss, _ in found], [loss for loss, _ in expected], rtol=1e-5)
    apart = [difference(own[1], other[1]) for own, other in zip(found, expected, strict=True)]
    assert min(apart) < 2e-6 and max(apart) < largest


def test_random_rounding_is_the_same_in_the_pieces_of_a_ring(monkeypatch):
    """Of two devices; gradients of whole tensors have the same numbers in another order of sums."""
    rng, recipe, most = np.random.default_rng(4), IMPLEMENTATIONS["nvfp4"], partial(lax.pmax, axis_name="tensor")
    x, w, dy = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 16, 32), (2, 32, 32), (2, 32, 32)))
    ids, columns = (jnp.arange(size, dtype=jnp.uint32).reshape(2, -1) for size in (32, 64))
    tp = TensorParallel(TensorRing(2, False), fp8.kernels("reference"), "reference", most, False)

    def gradients(x, w, dy, ids, columns):
        weight = BlockWeight(w, None, RoundingNoise(jnp.array([3, 4], jnp.uint32), ids, columns), recipe, "emulated")

        def apply(linear, x, w):
            return linear(tp, x, replace(weight, values=w).with_amax(lax.stop_gradient(w), most))

        of_column = jax.vjp(partial(apply, column_linear), x, w)[1](dy)
        return *of_column, *jax.vjp(partial(apply, row_linear), dy, w)[1](x)  # of the same shapes the other way round

    def on_devices():
        return jax.jit(jax.vmap(lambda *each: gradients(*each), axis_name="tensor"))(x, w, dy, ids, columns)

    whole = on_devices()
    monkeypatch.setattr(TensorRing, "overlap_width", 1)
    for found, expected in zip(on_devices(), whole, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_in_training_each_layer_and_weight_has_random_bits_of_its_own():
    program = build(make("nvfp4"))
    declared, zeros = program.graph.layers.weights.weights["dense"], jnp.zeros((16, 16))
    weights, tokens = BlockWeights(program.plan, lambda amax: amax), jnp.arange(8, dtype=jnp.uint32)
    used = dict.fromkeys(("attention.qkv", "mlp.down"), zeros)

    def noise(layer, key):
        inputs = BlockInputs(tokens, TokenPositions(tokens), tokens, None, rounding_key=key)
        return {name: weight.noise for name, weight in weights.of(used, declared, inputs, layer).items()}

    found = [noise(layer, jax.random.key(step)) for layer in (0, 1) for step in (0, 1)]
    assert len({tuple(own.seeds.tolist()) for each in found for own in each.values()}) == 8
    assert all(own.token_ids is tokens for each in found for own in each.values())
    assert [*noise(0, None).values()] == [None, None]  # in evaluation


def test_each_step_rounds_the_gradients_of_experts_at_random():
    """Of their rows too, which go on to the embedding. No other layer has random numbers; equal steps are equal."""
    program = build(config := make("nvfp4", EXPERTS | {"num_layers": 1, "block_pattern": ["experts"]}))
    weights, [fields] = table.weights_of(config), table.make_batches(config)
    batch, found, of_rows = to_global(program, fields), [], []
    for step in (0, 0, 1):
        state = replace(table.first_state(program, weights), step=jnp.int32(step))
        state, metrics = program.train_step(state, batch)
        found.append([float(metrics[name]) for name in ("loss", "grad_norm")])
        of_rows.append(table.first_gradients(program, state, found[-1][1])["embedding.tokens"])
    assert found[0] == found[1] and found[0][0] == found[2][0] and found[0][1] != found[2][1]
    assert np.array_equal(*of_rows[:2]) and np.linalg.norm(of_rows[2] - of_rows[0]) > 1e-3 * np.linalg.norm(of_rows[0])


def test_it_is_emulated_and_says_so():
    assert "nvfp4 emulated in layers 1 to" in summary(build(make("nvfp4", first_bf16_layers=1)), [])


def test_an_extension_rounds_rows_to_integers():
    (x, w, dy), (y, dx, dw) = products("column_linear", block_recipe(RECIPES["int8_rows"]), np.random.default_rng(3))

    def by_hand(x):
        return np.stack([np.round(row / (np.abs(row).max() / 127)) * (np.abs(row).max() / 127) for row in x])

    for own, a, b in ((y, x, w.T), (dx, dy, w), (dw, x.T, dy.T)):
        expected = by_hand(a) @ by_hand(b).T
        assert np.linalg.norm(own - expected) < 1e-5 * np.linalg.norm(expected)
        assert np.linalg.norm(own - a @ b.T) > 1e-3 * np.linalg.norm(expected)


KERNELS = [
    ("nvfp4", "xla", Hardware("cpu"), "emulated"),
    ("blockwise", "xla", Hardware("cpu"), "emulated"),
    ("mxfp8", "emulated", HOPPER, "emulated"),
    ("mxfp8", "xla", BLACKWELL, "cudnn"),
    ("nvfp4", "xla", BLACKWELL, "cudnn"),
    (
        "nvfp4",
        "xla",
        HOPPER,
        "nvfp4 needs Blackwell GPUs or newer, and this one has compute capability 9.0: set",
    ),
    ("blockwise", "xla", HOPPER, "pallas"),
    (
        "blockwise",
        "xla",
        BLACKWELL,
        "blockwise has kernels for Hopper GPUs only, and this one has compute capability 10.0: set",
    ),
    ("int8_rows", "xla", HOPPER, "int8_rows has no kernels for GPUs"),
]


@pytest.mark.parametrize(("recipe", "backend", "hardware", "expected"), KERNELS)
def test_nothing_is_emulated_on_a_gpu_unless_it_is_asked_for(recipe, backend, hardware, expected):
    def choose():
        return fp8.choose(RECIPES[recipe], backend, hardware.platform, hardware.capability)

    if " " not in expected:
        assert choose() == expected
        return
    with pytest.raises(ConfigError) as error:
        choose()
    assert expected in str(error.value) and "backend=emulated" in str(error.value)


def test_experts_in_blocks_need_whole_blocks_and_the_hopper_kernel():
    def choose(*overrides):
        overrides = ["precision.fp8.recipe=blockwise", "mesh.data=1", *overrides]
        return Kernels.choose(load_config("mixtral_l2", overrides), dict.fromkeys(AXES, 1), HOPPER)

    assert (choose().fp8, choose().grouped_matmul) == ("pallas", "pallas")
    narrow = "model.expert_ffn_hidden_size=1472"
    needs = "kernel of this FP8 recipe needs widths that are multiples of 128 and these are 4096, 1472"
    with pytest.raises(ConfigError, match=f"{needs}: set precision.fp8.backend=emulated or use kernels"):
        choose(narrow)
    emulated = choose(narrow, "precision.fp8.backend=emulated")
    assert (emulated.fp8, emulated.grouped_matmul) == ("emulated", "pallas")
    with pytest.raises(ConfigError, match="matmul=triton cannot run, .* has no FP8: set precision.fp8.backend=e"):
        choose("kernels.grouped_matmul=triton")


def test_experts_have_block_scaled_matmuls_on_blackwell():
    config = load_config("mixtral_l2", ["precision.fp8.recipe=nvfp4", "mesh.data=1"])
    kernels = Kernels.choose(config, dict.fromkeys(AXES, 1), BLACKWELL)
    assert (kernels.fp8, kernels.grouped_matmul) == ("cudnn", "xla")


def test_one_scale_for_each_tensor_has_kernels_since_ada():
    assert fp8.choose(RECIPES["current"], "xla", "gpu", "8.9") == "pallas"
    with pytest.raises(
        ConfigError, match="needs Ada GPUs or newer, and this one has compute capability 8.0: set it to"
    ):
        fp8.choose(RECIPES["current"], "xla", "gpu", "8.0")


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ValueError, match="'none', 'current', 'delayed', 'blockwise', 'mxfp8', 'nvfp4', "):
        make("blockwize")
    with pytest.raises(ConfigError, match="backend=transformer_engine cannot be combined with precision.fp8.recipe=mx"):
        make("mxfp8", backend="transformer_engine")
    with pytest.raises(ConfigError, match="backend=emulated cannot be combined with precision.fp8.recipe=current"):
        make("current", backend="emulated")
    narrow = make("mxfp8", MODEL | {"ffn_hidden_size": 96}, {"tensor": 2})
    with pytest.raises(ConfigError, match="mxfp8 needs multiples of 32, but model.ffn_hidden_size=96 / .* is 48"):
        check_mesh(narrow, 2)
    check_mesh(make("blockwise", MODEL | {"ffn_hidden_size": 96}, {"tensor": 2}), 2)
    with pytest.raises(ConfigError, match="current exists already"):
        register_fp8(Fp8Recipe("current", rounded=in_four_bits))
    with pytest.raises(ConfigError, match="mine has no function `rounded`"):
        register_fp8(Fp8Recipe("mine"))
