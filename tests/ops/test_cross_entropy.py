from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.ops import Vocabulary, chunk_log_probs, chunk_loss_and_grad

TOKENS, PADDED, TRUE = 13, 48, 41
OPTIONS: list[dict[str, float]] = [
    {},
    {"z_loss": 1e-2},
    {"softcap": 3.0},
    {"softcap": 3.0, "z_loss": 1e-2},
    {"smoothing": 0.2},  # a soft-cap would hide the gradient of padding, whose logits are beyond it
    {"softcap": 3.0, "z_loss": 1e-2, "smoothing": 0.2},
]


def numpy_per_token(logits, targets, mask, softcap=None, z_loss=0.0, smoothing=0.0):
    """The two terms of every token, weighted, before they are summed."""
    true = logits[:, :TRUE] if softcap is None else softcap * np.tanh(logits[:, :TRUE] / softcap)
    top = true.max(axis=1)
    lse = np.log(np.exp(true - top[:, None]).sum(axis=1)) + top
    target = (1 - smoothing) * true[np.arange(len(targets)), targets] + smoothing * true.mean(axis=1)
    return np.stack([mask * (lse - target), mask * z_loss * lse**2])


def numpy_cross_entropy(*batch, **options):
    return tuple(numpy_per_token(*batch, **options).sum(axis=1))


def numpy_gradient(logits, *rest, step=1e-5, **options):
    """Central differences column by column: a token's loss depends on its own row alone."""
    gradient = np.zeros_like(logits)
    for column in range(logits.shape[1]):
        moved = np.zeros_like(logits)
        moved[:, column] = step
        up, down = (numpy_per_token(logits + by * moved, *rest, **options).sum(axis=0) for by in (1, -1))
        gradient[:, column] = (up - down) / (2 * step)
    return gradient


@pytest.fixture
def batch(rng):
    """Logits whose padding is larger than any true logit, targets at both ends, a mask with holes."""
    logits = 3.0 * rng.normal(size=(TOKENS, PADDED))
    logits[:, TRUE:] = 50.0
    targets = rng.integers(0, TRUE, TOKENS)
    targets[:2] = 0, TRUE - 1
    mask = np.ones(TOKENS)
    mask[[3, 7]] = 0.0
    return logits, targets, mask


def vocabulary(z_loss=0.0, smoothing=0.0, **of_vocabulary: Any) -> dict[str, Any]:
    """The last three arguments of the op."""
    return {"vocabulary": Vocabulary(TRUE, **of_vocabulary), "z_loss": z_loss, "smoothing": smoothing}


def sharded(shards, logits, targets, mask, dtype="float32", **options):
    """The op on every shard of the vocabulary at once, with real reductions over a named axis."""
    width = logits.shape[1] // shards
    pieces = np.stack(np.split(np.asarray(logits), shards, axis=1))

    def one(piece, index):
        shard = vocabulary(
            start=index * width,
            reduce_max=lambda x: jax.lax.pmax(x, "vocab"),
            reduce_sum=lambda x: jax.lax.psum(x, "vocab"),
            **options,
        )
        return chunk_loss_and_grad(piece, jnp.asarray(targets), jnp.asarray(mask), 1.0, dtype, **shard)

    run = jax.jit(jax.vmap(one, axis_name="vocab"))
    loss, z_term, gradients = jax.device_get(run(pieces, np.arange(shards)))
    return loss, z_term, np.concatenate(list(gradients), axis=1)


@pytest.mark.smoke
@pytest.mark.parametrize("options", OPTIONS)
def test_losses_and_gradient_on_one_device(x64, error, batch, options):
    rest = {"scale": 1.0, "dtype": "float64", **vocabulary(**options)}
    run = jax.jit(lambda *a: chunk_loss_and_grad(*a, **rest))
    loss, z_term, gradient = run(*batch)
    assert (loss, z_term) == pytest.approx(numpy_cross_entropy(*batch, **options), rel=1e-12)
    assert error(gradient, numpy_gradient(*batch, **options)) < 1e-8


@pytest.mark.parametrize(("shards", "options"), [(2, OPTIONS[-1]), *((8, options) for options in OPTIONS)])
def test_any_sharding_of_the_vocabulary_gives_the_same(x64, error, batch, shards, options):
    """With 8 shards of 6 the last holds padding alone."""
    losses, z_terms, gradient = sharded(shards, *batch, dtype="float64", **options)
    loss, z_term = numpy_cross_entropy(*batch, **options)
    np.testing.assert_allclose(losses, np.full(shards, loss), rtol=1e-12)
    np.testing.assert_allclose(z_terms, np.full(shards, z_term), rtol=1e-12)
    assert error(gradient, numpy_gradient(*batch, **options)) < 1e-8


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_log_probabilities_of_targets_are_those_of_the_loss(x64, batch, softcap):
    logits, targets, _ = batch
    expected = -numpy_per_token(logits, targets, np.ones(TOKENS), softcap=softcap)[0]
    found = chunk_log_probs(jnp.asarray(logits), jnp.asarray(targets), Vocabulary(TRUE, softcap=softcap))
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_are_float32(error, batch, dtype):
    logits = np.asarray(batch[0], jnp.dtype(dtype))
    arguments = (np.asarray(logits, np.float64), *batch[1:])
    loss, z_term, gradient = sharded(2, logits, *batch[1:], z_loss=1e-2, softcap=5.0)
    assert loss.dtype == z_term.dtype == jnp.float32
    expected = numpy_cross_entropy(*arguments, z_loss=1e-2, softcap=5.0)
    assert (loss[0], z_term[0]) == pytest.approx(expected, rel=1e-6)
    assert error(gradient, numpy_gradient(*arguments, z_loss=1e-2, softcap=5.0)) < 1e-5


def test_padding_and_masked_tokens_get_no_gradient(batch):
    logits, targets, mask = batch
    targets[3] = -1
    targets[7] = PADDED + 100
    run = jax.jit(lambda *batch: chunk_loss_and_grad(*batch, 1.0, "float32", **vocabulary(softcap=4.0)))
    loss, _, gradient = map(np.asarray, run(np.asarray(logits, np.float32), targets, mask))
    assert np.isfinite(loss)
    assert not np.any(gradient[:, TRUE:]) and not np.any(gradient[mask == 0])
    assert np.all(np.any(gradient[mask == 1], axis=1))


def test_the_mask_weighs_tokens(error, batch, rng):
    logits, targets, _ = batch
    logits, weights = np.asarray(logits, np.float32), rng.uniform(0, 2, TOKENS)
    run = jax.jit(lambda *batch: chunk_loss_and_grad(*batch, 1.0, "float32", **vocabulary()))
    loss, _, gradient = run(logits, targets, weights)
    _, _, unweighted = run(logits, targets, np.ones(TOKENS, bool))
    assert loss == pytest.approx(numpy_cross_entropy(np.asarray(logits, np.float64), targets, weights)[0], rel=1e-6)
    assert error(gradient, np.asarray(unweighted) * weights[:, None]) < 1e-6


def test_scale_and_dtype_are_those_of_the_gradient(error, batch):
    @partial(jax.jit, static_argnames=("scale", "dtype"))
    def run(*batch, scale, dtype):
        return chunk_loss_and_grad(*batch, scale=scale, dtype=dtype, **vocabulary(z_loss=1e-2))

    batch = np.float32(batch[0]), *batch[1:]
    loss, z_term, gradient = run(*batch, scale=8.0, dtype="bfloat16")
    plain = jax.device_get(run(*batch, scale=1.0, dtype="float32"))
    assert (loss, z_term) == plain[:2]
    assert gradient.dtype == jnp.bfloat16
    assert error(gradient, 8.0 * plain[2]) < 4e-3


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_large_logits_neither_overflow_nor_vanish(batch, shift):
    logits, targets, mask = batch
    moved = np.asarray(np.round(logits) + shift, np.float32)
    loss, _, gradient = sharded(4, moved, targets, mask)
    still, _, gradient_still = sharded(4, np.asarray(np.round(logits), np.float32), targets, mask)
    np.testing.assert_allclose(loss, still, rtol=1e-6)
    np.testing.assert_allclose(gradient, gradient_still, rtol=1e-5, atol=1e-7)


def test_each_reduction_is_called_once(batch):
    calls = []

    def record(name):
        def reduce(x):
            calls.append((name, x.shape))
            return x

        return reduce

    reductions: dict[str, Any] = {"reduce_max": record("max"), "reduce_sum": record("sum")}
    run = partial(chunk_loss_and_grad, scale=1.0, dtype="float32", **vocabulary(z_loss=0.1, **reductions))
    jax.eval_shape(run, *batch)
    assert calls == [("max", (TOKENS,)), ("sum", (2, TOKENS))]
