import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.ops import short_convolution_kernel as kernel
from megajax.ops.short_convolution import short_convolution


@pytest.mark.parametrize(
    ("length", "channels", "first", "has_before"),
    [(37, 24, 8, True), (64, 16, 0, False), (5, 40, 3, True), (2, 16, 4, True)],
)
def test_the_kernel_is_the_convolution(length, channels, first, has_before):
    """Outputs and gradients against those of the reference, with documents that begin anywhere."""
    (B, W), rng = (2, 4), np.random.default_rng(length)

    def drawn(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    x, weight, bias = drawn(B, length, first + channels + 2), drawn(W, channels), drawn(channels)
    before = drawn(B, W - 1, channels) if has_before else None
    position = np.arange(length) + (np.array([[5], [1]]) if has_before else np.zeros((2, 1), int))
    for row, start in ((0, length // 2), (1, 3), (1, 4)):  # two sequences, with documents of one token
        if start < length:
            position[row, start:] = np.arange(length - start)
    position = jnp.asarray(position, jnp.int32)

    @jax.jit
    def reference(dy, *arguments):
        y, pull = jax.vjp(lambda x, w, bias: short_convolution(x, w, position, before, bias, first), *arguments)
        return y, pull(dy)

    dy = drawn(B, length, channels)
    expected, gradients_of_reference = reference(dy, x, weight, bias)
    operands, tiling = kernel.ConvolutionOperands(x, weight, bias, position, before, first), kernel.Tiling(8, 4, 16, 1)
    np.testing.assert_allclose(kernel.convolve(operands, tiling, interpret=True), expected, rtol=1e-5, atol=1e-5)
    dx, *others = kernel.gradients(operands, dy, tiling, interpret=True)
    gradients = np.pad(dx, ((0, 0), (0, 0), (first, 2))), *others
    for found, expected in zip(gradients, gradients_of_reference, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
