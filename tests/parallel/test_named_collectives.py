"""The choices of communication.context and communication.experts send what their names say."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jaxpr_equations import equations

from megajax import ops
from megajax.model.comm import TokenPositions
from megajax.ops.partial_attention import Scores
from megajax.options.context import STRATEGIES
from megajax.options.dispatch import DISPATCHES
from megajax.parallel.context import context_attention
from megajax.parallel.experts import expert_parallel
from megajax.step_plan import Collectives

COLLECTIVES = {"ppermute", "all_gather", "all_to_all"}
CONTEXT = {
    "ring": {"ppermute"},
    "all_gather": {"all_gather"},
    "all_to_all": {"all_to_all"},
    "all_to_all+ring": {"all_to_all", "ppermute"},
}


def collectives(function, axis: str, *arguments) -> set[str]:
    """Those of a function on one of four devices that send tokens, not their numbers."""
    jaxpr = jax.make_jaxpr(function, axis_env=[(axis, 4)])(*arguments).jaxpr
    of_tokens = (each for each in equations(jaxpr) if each.outvars and each.outvars[0].aval.size > 64)
    return {each.primitive.name for each in of_tokens} & COLLECTIVES


@pytest.mark.parametrize("name", CONTEXT)
def test_attention_over_context_sends_by_its_name(name):
    strategy = STRATEGIES[name]
    strategy = replace(strategy, head_group=2) if strategy.goes_round else strategy

    def attend(q, k, v, index):
        attention = context_attention(strategy, 4)(4, Scores(0.5, None, "reference"), None, zigzag=True)
        return attention.attend(q, k, v, TokenPositions(index))[0]

    heads = jnp.zeros((1, 8, 4, 4))
    assert collectives(attend, "context", heads, heads, heads, jnp.zeros((1, 8), int)) == CONTEXT[name]


@pytest.mark.parametrize("name", ["all_gather", "all_to_all"])
def test_tokens_go_to_experts_by_the_name_of_the_choice(name):
    def experts(x, experts, weights, up, down):
        given = Collectives(dispatch=DISPATCHES[name], expert_shards=4)
        parallel = expert_parallel(given, ops.ExpertKernels(), lambda a: a)
        return parallel.apply("swiglu", x, experts, weights, ops.ExpertMatrices(up, down), None)

    arguments = (
        jnp.zeros((8, 4)),
        jnp.zeros((8, 2), int),
        jnp.zeros((8, 2)),
        jnp.zeros((2, 4, 12)),
        jnp.zeros((2, 6, 4)),
    )
    assert collectives(experts, "expert", *arguments) == {name}
