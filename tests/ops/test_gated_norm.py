import jax
import numpy as np
import pytest

from megajax.ops import gated_norm_kernel as kernel
from megajax.ops.gated_norm import GatedNorm, gated_norm


def numpy_gated_norm(x, gate, weight, norm):
    """Group by group."""
    y = np.zeros_like(x)
    for group, factor in enumerate(np.broadcast_to(weight, (x.shape[1] // weight.shape[1], weight.shape[1]))):
        columns = slice(group * len(factor), (group + 1) * len(factor))
        opened = gate[:, columns] / (1 + np.exp(-gate[:, columns]))
        values = x[:, columns] * opened if norm.gate_first else x[:, columns]
        values = factor * values / np.sqrt(np.mean(values**2, axis=1, keepdims=True) + norm.epsilon)
        y[:, columns] = values if norm.gate_first else values * opened
    return y


@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("tokens", [24, 7])
def test_the_gated_norm_and_its_kernel(tokens, gate_first):
    rng, norm, (G, w), first = np.random.default_rng(tokens), GatedNorm(1e-3, gate_first), (3, 16), 16
    x, dy = rng.normal(size=(2, tokens, G * w))
    gate, weight = rng.normal(size=(tokens, 5 * w)), rng.normal(size=(G if gate_first else 1, w))
    expected = numpy_gated_norm(x, gate[:, first:], weight, norm)
    x, dy, gate, weight = (np.asarray(a, np.float32) for a in (x, dy, gate, weight))

    @jax.jit
    def reference(dy, *args):
        y, pull = jax.vjp(lambda *args: gated_norm(*args, norm, first), *args)
        return y, pull(dy)

    y, gradients = reference(dy, x, gate, weight)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)

    @jax.jit
    def kernels(x, gate, weight, dy):
        operands = kernel.GatedNormOperands(x, gate, weight, first)
        found = kernel.normalise(operands, norm, interpret=True)
        return found, *kernel.gradients(operands, norm, dy, interpret=True)

    found, dx, dgate, dweight = kernels(x, gate, weight, dy)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    dgate = np.pad(dgate, ((0, 0), (first, w)))
    for found, correct in zip((dx, dgate, dweight), gradients, strict=True):
        np.testing.assert_allclose(found, correct, rtol=1e-4, atol=1e-5)
