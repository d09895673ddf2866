"""What traces of a layer say: what it keeps for its backward pass, where XLA runs no operation again; its experts."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from mesh_models import MIXTRAL

from megajax.config import LoraConfig, ModelConfig
from megajax.estimate.shapes import Shards, kernel
from megajax.estimate.traces import LayerForm, Traces
from megajax.layout.kinds import KINDS
from megajax.model import EVERYTHING, Sublayer, declare
from megajax.options.remat import POLICIES

D = 16
MODEL = {"num_layers": 1, "hidden_size": D, "num_heads": 2, "vocab_size": 32, "block_pattern": ["one_operation"]}


@jax.custom_vjp
def with_rule(a):
    return jnp.sin(a)


with_rule.defvjp(lambda a: (jnp.sin(a), a), lambda a, g: (g * jnp.cos(a),))

COSTLY: dict[str, Callable[[jax.Array], jax.Array]] = {
    "a product": lambda a: a @ jnp.ones((D, D)),
    "a kernel": lambda a: a + kernel.bind(jax.lax.stop_gradient(a), results=((a.shape, a.dtype),))[0],
    "a function with a rule": lambda a: a + with_rule(jax.lax.stop_gradient(a)),
    "sorting": lambda a: a + jnp.sort(jax.lax.stop_gradient(a), axis=0),
    "sums so far": lambda a: jnp.cumsum(a, axis=0),
    "joining": lambda a: jnp.concatenate([a[1:], a[:1]]),
}
RUN_AGAIN = {"a sign": jnp.negative, "a call": jax.nn.silu, "a view": lambda a: a.reshape(-1, 1, D).squeeze(1)}


def kept(monkeypatch, operation) -> float:
    """Numbers per token in the compute dtype, BF16; the operation has an FP32 result."""

    class OneOperation(Sublayer):
        NAME, SUPPORTS, LINEAR = "one", EVERYTHING, ("weight",)

        def __init__(self, config):
            self.config, self.weight = config, declare((D, D), ("mlp", "embed"))

        def apply(self, w, x, ctx):
            wide = operation(x.astype(jnp.float32))
            return ctx.comm.row_linear(jnp.exp(wide * wide).astype(x.dtype), w["weight"]), {}

    monkeypatch.setitem(KINDS, "one_operation", {"one": OneOperation})
    traces = Traces(ModelConfig.model_validate(MODEL), LoraConfig(), 8, "bfloat16")
    return traces.of("one_operation").saved(POLICIES["none"], copied=False)


@pytest.mark.parametrize("name", [*COSTLY, *RUN_AGAIN])
def test_an_fp32_result_is_kept_if_xla_does_not_run_its_operation_again(monkeypatch, name):
    """Of each of D numbers then the result and its exponential, 4 bytes each, and that in BF16; else BF16 alone."""
    found = kept(monkeypatch, (COSTLY | RUN_AGAIN)[name])
    assert found == D * (5 if name in COSTLY else 2)


@pytest.mark.parametrize(
    ("shards", "parts"),
    [
        (Shards(experts=4), 4),
        (Shards(tensor=2, experts=4), 8),  # and a half of each one's width
        (Shards(tensor=2, experts=4, experts_over_tensor=True), 4),
    ],
)
def test_a_device_has_its_share_of_the_experts(shards, parts):
    traces = Traces(ModelConfig.model_validate(MIXTRAL), LoraConfig(), 16, "float32")

    def numbers(shards):
        trace = traces.of("moe", LayerForm(shards))
        return sum(a.size for a, (_, p) in zip(trace.arguments, trace.weights, strict=False) if "experts" in p.axes)

    assert numbers(Shards()) == parts * numbers(shards) > 0
