"""Muon against plain NumPy, on meshes; dev/muon_table.py has all meshes and more steps."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from mesh_models import LATENT_MODELS
from muon import muon_cases, orthogonal

from megajax.config import ModelConfig, load_config
from megajax.kernel_choice import HOPPER, Hardware, Kernels
from megajax.model import Transformer, parameters
from megajax.ops.newton_schulz import coefficients, newton_schulz, operations, parts
from megajax.ops.symmetric_matmul import symmetric_matmul, triangle
from megajax.schema.fields import AXES

STEPS = 3
# Rows of the table: padded storage, uneven stages in rounds, experts over other axes,
# latent attention with stages that share a prediction module.
MESHES = [
    ("llama", {"data": 3, "tensor": 2}),
    ("five layers", {"pipeline": 2, "context": 2}),
    ("mixtral", {"fsdp": 4, "tensor": 2, "experts_over": ["fsdp", "tensor"]}),
    pytest.param("latent", {"pipeline": 2, "tensor": 2}, marks=pytest.mark.long),
]


@pytest.mark.parametrize("model, mesh", MESHES, ids=str)
def test_a_mesh_updates_weights_as_numpy_does(model, mesh):
    *_, case = [case for case in muon_cases() if case.model == model and mesh.items() <= case.mesh.items()]
    assert case.difference(STEPS) < 1e-5


@pytest.mark.parametrize("named", ["quintic", "polar_express"])
@pytest.mark.parametrize(("columns", "several"), [(224, True), (64, False)])
def test_newton_schulz_is_numpys_in_parts_of_one_or_several_steps(named, columns, several):
    """In FP32; in BF16 its error is less than twice that of the published form in NumPy, for many singular values."""
    random, steps, i = np.random.default_rng(0), coefficients(named, 5), 1 + np.arange(64)
    assert (len(parts(steps, 64, columns, halved=False)) < 5) == several
    left, _ = np.linalg.qr(random.standard_normal((64, 64)))
    right, _ = np.linalg.qr(random.standard_normal((columns, 64)))
    values = 1 / i, 1 / i**2, np.exp(-i / 5), np.where(i < 3, 1, 3e-3), np.where(i < 3, 1, 3e-2)
    x = np.stack([random.standard_normal((64, columns)), *((left * own) @ right.T for own in values)])
    expected, compute = np.stack([orthogonal(matrix, named) for matrix in x]), jax.jit(newton_schulz, static_argnums=1)
    found = compute(np.asarray(x, np.float32), tuple(steps))
    np.testing.assert_allclose(found, expected, atol=3e-5)
    found = np.asarray(compute(np.asarray(x, jnp.bfloat16), tuple(steps))).astype(np.float32)
    for matrix, own, exact in zip(x, found, expected, strict=True):
        rounded = orthogonal_in_bf16(matrix, steps)
        assert np.linalg.norm(own - exact) < 2 * np.linalg.norm(rounded - exact) < 0.6 * np.linalg.norm(exact)
        assert np.linalg.norm(own, 2) < 1.03 * max(np.linalg.norm(rounded, 2), np.linalg.norm(exact, 2))


def orthogonal_in_bf16(x, steps):
    """The published program, with every result rounded to BF16."""

    def rounded(array):
        return array.astype(jnp.bfloat16).astype(np.float64)

    x = rounded(x / np.linalg.norm(x))
    for a, b, c in steps:
        gram = rounded(x @ x.T)
        x = rounded(a * x + rounded(rounded(b * gram + c * rounded(gram @ gram)) @ x))
    return x


@pytest.mark.parametrize("columns", [256, 64])
def test_operations_are_those_of_the_compiled_program(columns):
    steps = tuple(coefficients("quintic", 5))
    x = jnp.zeros((64, columns), jnp.bfloat16)
    cost = jax.jit(newton_schulz, static_argnums=1).lower(x, steps).compile().cost_analysis()
    assert cost is not None
    assert cost["flops"] == pytest.approx(
        operations(steps, 64, columns, halved=False), rel=0.05
    )  # it counts sums and factors too


@pytest.mark.parametrize("side", range(1, 18))
def test_a_triangle_has_each_square_or_its_mirror_once(side):
    tiles = triangle(side, panel=4)
    squares = [{(max(row, column), min(row, column)) for column in columns} for row, *columns in tiles.tolist()]
    assert sorted(square for tile in squares for square in tile) == [
        (row, column) for row in range(side) for column in range(row + 1)
    ]
    if side % 4 in (0, 3):
        assert len(tiles) == side * (side + 1) / 4


def test_a_kernel_halves_the_symmetric_products():
    """Interpreted. 3 × 2 squares of 64, the last tile of a row with one square; other operands than a matrix itself."""
    interpret = plgpu.InterpretGPUParams(detect_races=False)
    run = partial(symmetric_matmul, square=64, blocks=2, interpret=interpret)

    def product(a, b):
        """The kernel's, whose callbacks can wait for ever beside another operation, and that in float64."""
        found = jax.block_until_ready(run(a, b))
        return np.asarray(found, np.float64), np.float64(a) @ np.float64(b).swapaxes(1, 2)

    x = np.random.default_rng(0).standard_normal((2, 192, 128)).astype(jnp.bfloat16)
    found, exact = product(x, x)
    np.testing.assert_allclose(found, exact, rtol=2**-8, atol=1e-3)
    np.testing.assert_array_equal(found, found.swapaxes(1, 2))
    gram = exact[:1, :128, :128].astype(jnp.bfloat16)
    found, exact = product(gram, (np.float64(gram) @ np.float64(gram)).astype(jnp.bfloat16))
    assert np.linalg.norm(found - exact) < 0.003 * np.linalg.norm(exact)


def test_half_of_each_symmetric_product_suffices():
    """P·G is G·P for polynomials of G."""

    def mirrored(a, b):
        half = jnp.tril(jnp.matmul(a, b.mT))
        return half + jnp.tril(half, -1).mT

    x, steps = np.random.default_rng(0).standard_normal((2, 64, 128)).astype(jnp.bfloat16), coefficients("quintic", 2)
    halved, whole = jax.device_get(jax.jit(lambda x: [newton_schulz(x, steps, own) for own in (mirrored, None)])(x))
    halved, whole = halved.astype(np.float32), whole.astype(np.float32)
    assert 0 < np.linalg.norm(halved - whole) < 0.01 * np.linalg.norm(whole)
    assert operations(steps, 64, 64, halved=True) == 2 * (2 * 64**3 + 2 * 64**3 // 2 * 2)  # of 3 products 2 are halved


@pytest.mark.parametrize(
    ("hardware", "expected"),
    [(Hardware("cpu"), "reference"), (Hardware("gpu", "8.0"), "reference"), (HOPPER, "pallas")],
    ids=["cpu", "ampere", "hopper"],
)
def test_the_kernel_for_symmetric_products_is_that_of_hopper(hardware, expected):
    """Elementwise kernels and the loss's run on every GPU."""
    kernels = Kernels.choose(load_config("llama3_8b"), dict.fromkeys(AXES, 1), hardware)
    assert kernels.symmetric_matmul == expected
    assert kernels.loss == kernels.elementwise == ("pallas" if hardware.platform == "gpu" else "reference")


def test_the_singular_values_of_an_update_are_near_one():
    random, values = np.random.default_rng(0), np.logspace(-2, 0, 8)
    u, v = (np.linalg.qr(random.standard_normal((size, 8)))[0] for size in (8, 20))
    x = jnp.array((u * values) @ v.T, jnp.float32)[None]
    for settings, tolerance in ((("quintic", 5), 0.35), (("polar_express", 8), 1e-3)):
        found = np.linalg.svd(newton_schulz(x, coefficients(*settings))[0], compute_uv=False)
        np.testing.assert_allclose(found, 1, atol=tolerance)
    own = coefficients([(1.5, -0.5, 0.0)], 20)  # cubic Newton–Schulz, whose limit is exact
    np.testing.assert_allclose(newton_schulz(x, own)[0], u @ v.T, atol=1e-3)


SMALL = {"num_layers": 1, "hidden_size": 32, "num_heads": 4, "vocab_size": 64}
TOWER = {"image_token": 1, "num_layers": 1, "hidden_size": 32, "num_heads": 4, "patch_size": 2, "grid": 4}
HEADS = {"num_heads": 8, "head_dim": 4}
# Of each model the last parts of the names of matrices that AdamW updates (docs/optimizers.md, docs/hybrids.md)
OF_ADAMW = [
    (LATENT_MODELS["v3"] | {"mtp_layers": 1}, {"head", "router", "projection"}),
    (SMALL | {"vision": TOWER | {"deepstack_layers": [0]}}, {"head", "patch", "up", "down"}),
    (SMALL | {"vision": TOWER | {"projector": "average"}}, {"head", "patch", "matrix"}),
    (SMALL | {"block_pattern": ["kda"], "kda": HEADS}, {"head", "strength"}),
    (SMALL | {"block_pattern": ["mamba2"], "mamba2": HEADS | {"num_groups": 2, "state_dim": 4}}, {"head", "step"}),
    (
        SMALL | {"block_pattern": ["gated_deltanet"], "linear_attention": {"num_key_heads": 2, "num_value_heads": 4}},
        {"head", "strength", "decay"},
    ),
]


@pytest.mark.parametrize(
    ("model", "names"), OF_ADAMW, ids=["prediction", "deepstack", "average", "kda", "mamba2", "gated_deltanet"]
)
def test_some_matrices_are_adamws(model, names):
    declared = parameters(Transformer(ModelConfig.model_validate(model)))
    assert {name.split(".")[-1] for name, p in declared.items() if p.role == "matrix" and not p.muon} == names


def test_a_matrix_of_zeros_stays_zero():
    compute = jax.jit(newton_schulz, static_argnums=1)
    assert not np.any(compute(np.zeros((2, 4, 20), jnp.bfloat16), tuple(coefficients("quintic", 5))))
