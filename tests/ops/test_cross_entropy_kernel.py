"""The cross-entropy kernel, interpreted, against the plain function in float64."""

from dataclasses import replace
from functools import cache, partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from megajax.ops import CHUNK_LOSSES, LossImplementation, Vocabulary, chunk_loss_and_grad, cross_entropy_kernel
from megajax.ops.cross_entropy_kernel import RowTiling

# 7 whole steps of two vectors and a rest: of two vectors, the last one cut off.
ROWS, COLUMNS, TRUE = 5, 7 * 32 + 21, 7 * 32 + 7
TILING = RowTiling(lanes=16, unroll=2, interpret=True)
SCALE = 0.125
OPTIONS: list[dict[str, float]] = [{}, {"z_loss": 1e-2}, {"softcap": 3.0, "z_loss": 1e-2, "smoothing": 0.2}]


def divided(options):
    """Options by name → the vocabulary, and the others."""
    of_vocabulary = {name: value for name, value in options.items() if name in ("size", "start", "softcap")}
    others = {name: options[name] for name in options.keys() - of_vocabulary}
    return Vocabulary(**of_vocabulary), others


@cache
def compiled(function, **options):
    """Compiled once for all batches."""
    vocabulary, others = divided(options)
    return jax.jit(partial(function, vocabulary=vocabulary, **others))


def run_kernel(*batch, dtype="float32", tiling=TILING, **options):
    run = compiled(cross_entropy_kernel.chunk_loss_and_grad, dtype=dtype, tiling=tiling, **options)
    return jax.device_get(run(*batch, scale=np.float32(SCALE)))


def run_reference(logits, *batch, **options):
    with jax.enable_x64(True):
        run = compiled(chunk_loss_and_grad, scale=SCALE, dtype="float64", **options)
        return [np.asarray(a) for a in run(np.asarray(logits, np.float64), *batch)]


def check(error, found, expected, tolerance=1e-5):
    np.testing.assert_allclose(found[:2], expected[:2], rtol=1e-6)
    assert error(found[2], expected[2]) < tolerance


def test_each_implementation_has_its_function():
    functions = {"reference": chunk_loss_and_grad, "pallas": cross_entropy_kernel.chunk_loss_and_grad}
    assert functions == CHUNK_LOSSES and {*get_args(LossImplementation)} == {*functions}


@pytest.fixture
def batch(rng):
    """Logits whose padding is larger than any true logit, targets at both ends, weights in the mask with holes."""
    logits = 3.0 * rng.normal(size=(ROWS, COLUMNS))
    logits[:, TRUE:] = 50.0
    targets = rng.integers(0, TRUE, ROWS)
    targets[:3] = 0, TRUE - 1, -1
    mask = rng.uniform(0.5, 2.0, ROWS)
    mask[2] = 0.0
    return np.asarray(logits, jnp.float32), targets, mask


@pytest.mark.smoke
@pytest.mark.parametrize("options", OPTIONS)
def test_losses_and_gradient_with_padding(error, batch, options):
    found = run_kernel(*batch, size=TRUE, **options)
    check(error, found, run_reference(*batch, size=TRUE, **options))
    assert not np.any(found[2][:, TRUE:]) and not np.any(found[2][2])


@pytest.mark.parametrize(
    ("tiling", "columns"), [({}, 16), ({}, 256), ({"lanes": 64}, 208), ({"lanes": 32, "unroll": 1}, 32)]
)
def test_rows_shorter_and_longer_than_a_step(error, batch, tiling, columns):
    logits, targets, mask = batch
    arguments = logits[:, :columns], targets % 16, mask
    found = run_kernel(*arguments, size=columns, tiling=RowTiling(**tiling, interpret=True))
    check(error, found, run_reference(*arguments, size=columns))


# One device has the kernel without these options and with each; what crosses devices is the same with all of them.
@pytest.mark.parametrize(
    "options", [*(pytest.param(each, marks=pytest.mark.long) for each in OPTIONS[:-1]), OPTIONS[-1]]
)
@pytest.mark.parametrize(("shards", "width"), [(8, 48)])
def test_any_sharding_of_the_vocabulary_gives_the_same(error, batch, options, shards, width):
    """On a mesh, as the step calls it. Of 8 shards the last three hold padding alone."""
    logits, targets, mask = batch
    logits = np.pad(logits, ((0, 0), (0, shards * width - COLUMNS)), constant_values=50.0)

    def shard(logits, targets, mask):
        vocabulary, others = divided(options | {"size": TRUE, "start": jax.lax.axis_index("vocab") * width})
        reductions = {"reduce_max": partial(jax.lax.pmax, axis_name="vocab")}
        reductions["reduce_sum"] = partial(jax.lax.psum, axis_name="vocab")
        loss, z_term, gradient = cross_entropy_kernel.chunk_loss_and_grad(
            logits, targets, mask, SCALE, "float32", replace(vocabulary, **reductions), **others, tiling=TILING
        )
        return loss[None], z_term[None], gradient

    whole, split, pieces = PartitionSpec(), PartitionSpec(None, "vocab"), PartitionSpec("vocab")
    mesh = Mesh(np.array(jax.devices()[:shards]), ("vocab",))
    run = jax.shard_map(
        shard, mesh=mesh, in_specs=(split, whole, whole), out_specs=(pieces, pieces, split), check_vma=False
    )
    losses, z_terms, gradient = jax.device_get(jax.jit(run)(logits, targets, mask))
    assert len(set(losses.tolist())) == len(set(z_terms.tolist())) == 1
    check(error, (losses[0], z_terms[0], gradient), run_reference(logits, targets, mask, size=TRUE, **options))


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_large_logits_neither_overflow_nor_vanish(error, batch, shift):
    logits, *rest = batch
    logits = np.round(logits) + np.float32(shift)
    check(error, run_kernel(logits, *rest, size=TRUE), run_reference(logits, *rest, size=TRUE))


def test_logits_far_apart(error, batch):
    logits, targets, mask = batch
    logits[:, ::3], logits[0, 100], logits[1, 5], targets[0] = -1e4, 1e4, -np.inf, 3
    found, expected = (run(logits, targets, mask, size=TRUE) for run in (run_kernel, run_reference))
    check(error, found, expected)


def test_logits_and_gradient_in_bfloat16(error, batch):
    logits, *rest = batch
    batch = logits.astype(jnp.bfloat16), *rest
    loss, z_term, gradient = run_kernel(*batch, dtype="bfloat16", size=TRUE, z_loss=1e-2)
    assert gradient.dtype == jnp.bfloat16 and loss.dtype == z_term.dtype == jnp.float32
    check(error, (loss, z_term, gradient), run_reference(*batch, size=TRUE, z_loss=1e-2), 4e-3)


def test_a_logit_that_is_no_number_shows(batch):
    logits, *rest = batch
    logits[0, 40] = np.nan
    loss, _, gradient = run_kernel(logits, *rest, size=TRUE)
    assert np.isnan(loss) and np.all(np.isnan(gradient[0, :TRUE])) and np.all(np.isfinite(gradient[1:]))
