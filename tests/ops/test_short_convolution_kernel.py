from functools import partial

import jax
import numpy as np
import pytest

from megajax.ops import short_convolution_kernel as kernel
from megajax.ops.short_convolution import short_convolution


@pytest.mark.parametrize(
    ("length", "channels", "first", "has_before"),
    [(64, 16, 0, False), (5, 40, 3, True)],
)
def test_the_kernel_is_the_convolution(monkeypatch, length, channels, first, has_before):
    """Outputs and gradients against those of the reference, with documents that begin anywhere."""
    (B, W), rng = (2, 4), np.random.default_rng(length)

    def drawn(*shape):
        return np.asarray(rng.normal(size=shape), np.float32)

    x, weight, bias = drawn(B, length, first + channels + 2), drawn(W, channels), drawn(channels)
    before = drawn(B, W - 1, channels) if has_before else None
    position = np.arange(length) + (np.array([[5], [1]]) if has_before else np.zeros((2, 1), int))
    for row, start in ((0, length // 2), (1, 3), (1, 4)):  # two sequences, with documents of one token
        if start < length:
            position[row, start:] = np.arange(length - start)
    position = np.asarray(position, np.int32)

    tiling = kernel.Tiling(8, 4, 16, 1)
    for name in ("convolve", "gradients"):
        monkeypatch.setattr(kernel, name, partial(getattr(kernel, name), tiling=tiling, interpret=True))
    monkeypatch.setattr(kernel, "fits", lambda width: True)

    def passes(implementation):
        def run(x, w, bias, before):
            return short_convolution(x, w, position, before, bias, first, implementation)

        y, pull = jax.vjp(run, x, weight, bias, before)
        return y, *pull(dy)

    dy = drawn(B, length, channels)
    run = jax.jit(passes, static_argnums=0)
    for found, expected in zip(run("pallas"), run("reference"), strict=True):
        if expected is not None:
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
