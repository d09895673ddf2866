import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from mesh_models import MIXTRAL
from single_device import make_config

from megajax.config.checks import check_mesh
from megajax.errors import ConfigError
from megajax.kernel_choice import EMULATED, Hardware, Kernels, choose_grouped_matmul
from megajax.ops import grouped_matmul as op
from megajax.ops import grouped_matmul_kernel as kernel
from megajax.ops import grouped_matmul_triton as triton
from megajax.ops import grouped_matmul_xla as xla
from megajax.ops import grouped_rows
from megajax.options.fp8_recipes import RECIPES

T, D, F = 149, 64, 192
SIZES = {
    "uneven": (70, 0, 3, 76),
    "rows left over": (3, 66, 0, 50),
    "all in one": (0, 0, 149, 0),
    "nothing": (0, 0, 0, 0),
}
FEW = (66, 0, 3)  # more rows than a tile, an empty group before another one
# Tiles small enough for a short test; stages few enough for the ring to go round.
TILING = kernel.MatmulTiling(rows=64, cols=64, stages=2)


def tensors(rng, dtype, sizes, rows=T):
    x, w, dy = (rng.normal(size=s) for s in ((rows, D), (len(sizes), D, F), (rows, F)))
    return [np.asarray(a, jnp.dtype(dtype)) for a in (x, w, dy)]


def in_float64(x, w, dy, sizes):
    """The result and the gradients of x and w, group by group."""
    x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    out, dx, dw = np.zeros(dy.shape), np.zeros(x.shape), np.zeros(w.shape)
    start = 0
    for e, size in enumerate(sizes):
        rows = slice(start, start + size)
        out[rows], dx[rows], dw[e] = x[rows] @ w[e], dy[rows] @ w[e].T, x[rows].T @ dy[rows]
        start += size
    return out, dx, dw


def check(found, expected, tolerance):
    for a, b in zip(found, expected, strict=True):
        a = np.asarray(a, np.float64)
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)
        np.testing.assert_array_equal(a[b == 0], 0)  # unused rows and empty groups


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 3e-3)])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_reference(rng, sizes, dtype, tolerance):
    x, w, dy = tensors(rng, dtype, sizes)

    @jax.jit
    def run(x, w, dy, group_sizes_e):
        how = {"group_sizes_e": group_sizes_e, "implementation": "reference"}
        out = op.rows_times_weights(x, w.astype(jnp.float32), **how)
        dx = op.rows_times_weights(dy, w, transpose_w=True, **how)
        return out, dx, op.weight_gradient(x, dy, dtype=dtype, **how)

    out, dx, dw = run(x, w, dy, np.asarray(sizes, np.int32))
    assert out.dtype == dx.dtype == dw.dtype == x.dtype
    check((out, dx, dw), in_float64(x, w, dy, sizes), tolerance)


def test_the_gradient_of_the_weights_may_be_wider(rng):
    x, w, dy = tensors(rng, "bfloat16", SIZES["uneven"])
    sizes = np.asarray(SIZES["uneven"], jnp.int32)
    dw = jax.jit(lambda *a: op.weight_gradient(*a, jnp.float32, implementation="reference"))(x, dy, sizes)
    assert dw.dtype == jnp.float32
    check([dw], [in_float64(x, w, dy, SIZES["uneven"])[2]], 1e-6)


row_tiles = jax.jit(grouped_rows.row_tiles, static_argnums=(1, 2, 3))


@pytest.mark.parametrize(("height", "alignment"), [(64, 8), (128, 8), (64, 1)])
@pytest.mark.parametrize("seed", range(2))
def test_tiles_hold_every_row_once(seed, height, alignment):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, 200, size=11) * rng.integers(0, 2, size=11)
    total = int(sizes.sum() + rng.integers(0, 300))
    table = np.asarray(row_tiles(np.asarray(sizes, jnp.int32), total, height, alignment))
    assert table[0, 4] <= len(table)
    owners = np.full(total, -1)
    for start, group, first, last, _ in table[: table[0, 4]]:
        assert start % alignment == 0 and 0 <= first <= last <= height
        assert np.all(owners[start + first : start + last] == -1)
        owners[start + first : start + last] = group
    np.testing.assert_array_equal(owners, np.repeat(np.arange(12), [*sizes, total - sizes.sum()]))


@functools.cache
def compiled(name):
    """The three matmuls, kernels interpreted; compiled once for all sizes."""
    how: dict = {}
    if name == "xla":
        module = xla
    elif name == "pallas":
        module, interpret = kernel, plgpu.InterpretGPUParams(detect_races=False)
        how = {"tiling": TILING, "blocks": 2, "interpret": interpret}
    else:  # neither width is whole tiles
        module, how = triton, {"tiling": triton.GroupedTiling(32, 128, 128, 4, 1, panel=2), "interpret": True}

    @jax.jit
    def run(x, w, dy, group_sizes):
        out = module.matmul(x, w, group_sizes, **how)
        dx = module.matmul(dy, w, group_sizes, transpose_w=True, **how)
        return out, dx, module.weight_gradient(x, dy, group_sizes, jnp.float32, **how)

    return run


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *(("pallas", FEW), pytest.param("pallas", (0, 0, 0), marks=pytest.mark.long)),
        *(("triton", SIZES["rows left over"]), ("triton", SIZES["nothing"])),
        *(("xla", SIZES["uneven"]), ("xla", SIZES["nothing"])),
    ],
)
def test_kernels_agree_with_float64(rng, sizes, name):
    x, w, dy = tensors(rng, "bfloat16", sizes, 80 if name == "pallas" else T)  # it is interpreted tile by tile
    out, dx, dw = compiled(name)(x, w, dy, np.asarray(sizes, jnp.int32))
    expected = in_float64(x, w, dy, sizes)
    check((out, dx), expected[:2], 3e-3)
    check([dw], expected[2:], 1e-6)


@pytest.mark.parametrize("name", ["triton", "xla"])
def test_rows_after_the_last_group_are_not_read(rng, name):
    """They are not written where many more rows fit than arrive."""
    sizes = SIZES["rows left over"]
    x, w, dy = tensors(rng, "bfloat16", sizes)
    group_sizes = np.asarray(sizes, jnp.int32)
    correct = in_float64(x, w, dy, sizes)
    x[sum(sizes) :] = dy[sum(sizes) :] = np.nan  # as if not written
    for found, expected in zip(compiled(name)(x, w, dy, group_sizes), correct, strict=True):
        check([found], [expected], 3e-3)


# Of 16 groups and 64 steps of 128 rows: round(1.125 · 64 / 16) = 4 steps of each first, then tiles of 2 steps, or of 4
# for gradients, two a round. Sizes of the first groups; the tiles in use by group and first row; gradients' tiles.
SKEWED = {
    "within the first round": ((512, 0, 1, 511, *[512] * 12), [], []),
    "a few": (
        (2000, 0, 513, 512, 1025, 1),
        [(0, 512), (0, 768), (0, 1024), (0, 1280), (0, 1536), (0, 1792), (2, 512), (4, 512), (4, 768), (4, 1024)],
        [(0, 512), (0, 1024), (0, 1536), (2, 512), (4, 512), (4, 1024)],
    ),
    "an odd number": ((0, 513, 0, 0, 1024), [(1, 512), (4, 512), (4, 768)], [(1, 512), (4, 512)]),
    "all in the last": (
        (*[0] * 15, 8192),
        [(15, start) for start in range(512, 8192, 256)],
        [(15, start) for start in range(512, 8192, 512)],
    ),
}


@pytest.fixture(scope="module")
def skewed_products():
    def run(x, w, dy, aligned_x, aligned_dy, sizes):
        sums = xla.sum_over_steps(lambda *a: xla.dot_of_groups(*a, jnp.float32), aligned_x, aligned_dy, sizes, len(x))
        out, dx = xla.matmul(x, w, sizes), xla.matmul(dy, w, sizes, transpose_w=True)
        return out, dx, xla.weight_gradient(x, dy, sizes, jnp.float32), sums

    return jax.jit(run)


@pytest.mark.parametrize("case", SKEWED)
def test_later_rounds_multiply_only_the_tiles_that_are_left(rng, skewed_products, case):
    sizes, *expected = SKEWED[case]
    sizes = np.array([*sizes, *[0] * (16 - len(sizes))], np.int32)
    for height, tiles in zip((xla.TILE, xla.GRADIENT_TILE), expected, strict=True):
        rounds = xla.TileRounds.of(8192, 16, height)
        assert rounds == (512, int(512 * height), 2)
        number, tiles_of = rounds.later(jnp.asarray(sizes))
        found = [t for r in range(int(number)) for t in zip(*map(np.asarray, tiles_of(jnp.int32(r))[:2]), strict=True)]
        assert int(number) == (len(tiles) + 1) // 2 and found[: len(tiles)] == tiles
        assert all(group == 16 for group, _ in found[len(tiles) :])
    x, w, dy = (rng.normal(size=s).astype(np.float32) for s in ((8192, 8), (16, 8, 24), (8192, 24)))
    correct = in_float64(x, w, dy, sizes)
    aligned = [np.zeros((a.shape[1], grouped_rows.padded_rows(8192, 16)), np.float32) for a in (x, dy)]
    start = row = 0
    for size in sizes:
        for of, a in zip(aligned, (x, dy), strict=True):
            of[:, start : start + size] = a[row : row + size].T
        start, row = start + -(-size // 128) * 128, row + size
    x[sizes.sum() :] = dy[sizes.sum() :] = np.nan
    found = skewed_products(x, w, dy, (aligned[0],), (aligned[1],), sizes)
    check(found, (*correct, correct[2]), 1e-6)


def choose(requested, platform="gpu", capability="9.0", dtype="bfloat16", widths=(2048, 768), **others):
    return choose_grouped_matmul(requested, Hardware(platform, capability), dtype, widths, **others)


def test_hoppers_kernel_is_chosen_where_it_can_run_and_elsewhere_the_one_for_any_gpu():
    assert choose("auto")[0] == choose("pallas")[0] == "pallas"
    assert choose("reference")[0] == "reference"
    assert choose("auto", platform="cpu", capability=None)[0] == "reference"
    for capability in ("8.0", "8.9", "9.0", "10.0"):
        assert choose("triton", capability=capability)[0] == "triton"
        assert choose("xla", capability=capability)[0] == "xla"
    assert choose("xla", platform="cpu", capability=None) == ("xla", "kernels.grouped_matmul=xla")
    for obstacle, reason in (({"capability": "10.0"}, "this is 10.0"), ({"widths": (2048, 1000)}, "2048, 1000")):
        name, why = choose("auto", **obstacle)
        assert name == "triton" and reason in why
        with pytest.raises(ConfigError, match=f"grouped_matmul=pallas cannot run, .*{reason}"):
            choose("pallas", **obstacle)
    assert choose("auto", dtype="float32") == ("xla", "the kernel does not support float32")
    for requested in ("pallas", "triton"):
        with pytest.raises(
            ConfigError, match=f"={requested} cannot run, .* float32: .*, or use kernels.grouped_matmul=xla"
        ):
            choose(requested, dtype="float32")
    for requested in ("auto", "pallas", "triton", "xla"):
        with pytest.raises(ConfigError, match=f"kernels.grouped_matmul={requested} cannot run, .* 7.0"):
            choose(requested, capability="7.0")


def test_whole_experts_are_the_cure_for_a_width_that_tensor_divides():
    with pytest.raises(
        ConfigError, match="2880, 1440: add tensor to mesh.experts_over, or use kernels.grouped_matmul=xla"
    ):
        choose("pallas", widths=(2880, 1440), over_tensor=True)
    model = MIXTRAL | {"hidden_size": 128, "head_dim": 32, "num_experts": 8, "expert_ffn_hidden_size": 2880}
    for over, width in ((["expert"], 1440), (["expert", "tensor"], 2880)):
        config = make_config(model, {"expert": 2, "tensor": 2, "experts_over": over}, precision={"compute": "bfloat16"})
        chosen = Kernels.choose(config, check_mesh(config, 4), Hardware("gpu", "9.0"))
        assert chosen.grouped_matmul == ("triton" if width == 1440 else "pallas"), chosen.grouped_matmul_reason


@pytest.mark.parametrize("recipe", ["current", "mxfp8", "nvfp4", "blockwise"])
def test_what_hoppers_kernel_cannot_do_of_fp8_is_batched_by_xla(recipe):
    """But of `blockwise`, which nothing else multiplies."""
    chosen, narrow = RECIPES[recipe], {"widths": (2048, 192 if recipe == "blockwise" else 1440)}
    if recipe == "blockwise":
        for requested in ("auto", "xla"):
            with pytest.raises(ConfigError, match=f"={requested} cannot run, .*{EMULATED}"):
                choose(requested, recipe=chosen, **narrow)
        return
    name, why = choose("auto", recipe=chosen, capability="10.0")
    assert name == "xla" and "this is 10.0; the kernel for GPUs other than Hopper has no FP8" in why
    with pytest.raises(ConfigError, match="other than Hopper has no FP8: use kernels.grouped_matmul=xla"):
        choose("triton", recipe=chosen, capability="8.9")
    if recipe == "current":
        assert choose("auto", recipe=chosen)[0] == choose("auto", recipe=chosen, widths=(2880, 5760))[0] == "pallas"
        assert choose("auto", recipe=chosen, **narrow)[0] == "xla"
