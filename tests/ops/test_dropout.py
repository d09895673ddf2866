import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from megajax import ops

IDS = np.arange(1000, 1000 + 64, dtype=np.int32)
dropout = jax.jit(ops.dropout, static_argnums=1)


@pytest.fixture
def key():
    return jax.random.key(3)


@pytest.mark.smoke
def test_any_slice_or_order_of_tokens_draws_the_mask_of_the_whole(key, rng):
    x = np.asarray(rng.normal(size=(64, 40)), jnp.float32)
    whole = np.asarray(dropout(x, 0.3, key, IDS))
    np.testing.assert_array_equal(dropout(x[17:30], 0.3, key, IDS[17:30]), whole[17:30])
    order = rng.permutation(64)
    np.testing.assert_array_equal(dropout(x[order], 0.3, key, IDS[order]), whole[order])


def test_the_mask_is_the_same_on_a_mesh(key, rng):
    x = np.asarray(rng.normal(size=(64, 40)), jnp.float32)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    sharded = dropout(jax.device_put(x, rows), 0.3, key, jax.device_put(IDS, rows))
    np.testing.assert_array_equal(sharded, dropout(x, 0.3, key, IDS))


def test_tokens_and_keys_draw_different_masks(key):
    x = np.ones((64, 40), np.float32)
    mask = np.asarray(dropout(x, 0.5, key, IDS))
    assert len(np.unique(mask, axis=0)) == 64
    assert not np.array_equal(mask, dropout(x, 0.5, jax.random.key(4), IDS))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_survivors_are_scaled_and_their_share_is_right(key, dtype):
    x = np.ones((500, 200), jnp.dtype(dtype))
    out = dropout(x, 0.2, key, np.arange(500))
    assert out.dtype == x.dtype
    assert set(np.unique(np.asarray(out, np.float32))) == {0.0, np.float32(np.asarray(1.25, x.dtype))}
    assert np.mean(np.asarray(out) != 0) == pytest.approx(0.8, abs=6 * 0.4 / 100_000**0.5)


def test_the_gradient_is_the_scaled_mask(x64, key, rng):
    x, cotangent = np.asarray(rng.normal(size=(2, 64, 8)))
    gradient = jax.jit(jax.grad(lambda x: jnp.vdot(dropout(x, 0.25, key, IDS), cotangent)))(x)
    mask = np.asarray(dropout(np.ones_like(x), 0.25, key, IDS)) != 0
    np.testing.assert_allclose(gradient, np.where(mask, cotangent / 0.75, 0.0), rtol=1e-14)
