"""The canonical text of a program: equal however its code is cut and named, different where the program is."""

import jax
import jax.numpy as jnp
import pytest

from dev.programs.__main__ import difference
from dev.programs.canonical import canonical_text, function_count


def text_of(function, *arguments):
    return canonical_text(jax.jit(function).lower(*arguments).compiler_ir())


def whole(weights, x):
    def layer(carry, _):
        total, x = carry
        hidden = jnp.tanh(x @ weights["up"])
        return (total + hidden.sum(), x + hidden @ weights["down"]), None

    (total, x), _ = jax.lax.scan(layer, (jnp.float32(0), x), length=3)
    return {"x": x * 2, "total": total}


def in_parts(x, matrices):
    """The same with other names, in inner functions, with values in another order, and with dead code."""

    @jax.jit
    def project(x):
        jnp.cos(x)
        return jnp.tanh(x @ matrices["a_up"])

    def layer(carry, _):
        x, total = carry
        hidden = jax.jit(lambda x: project(x))(x)
        total = total + hidden.sum()
        return (x + hidden @ matrices["a_down"], total), None

    x, total = jax.lax.scan(layer, (x, jnp.float32(0)), length=3)[0]
    return {"a_total": total, "b_x": jax.jit(lambda x: x * 2)(x)}


X, UP, DOWN = jnp.ones((4, 8)), jnp.ones((8, 16)), jnp.ones((16, 8))


@pytest.mark.smoke
def test_names_the_cut_into_functions_and_the_order_of_arrays_do_not_count():
    weights, matrices = {"up": UP, "down": DOWN}, {"a_up": UP, "a_down": DOWN}
    lowered = jax.jit(in_parts).lower(X, matrices).compiler_ir()
    assert function_count(lowered) > function_count(jax.jit(whole).lower(weights, X).compiler_ir())
    assert text_of(whole, weights, X) == canonical_text(lowered)


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        (lambda x: jnp.sin(x) + jnp.cos(x), "the same operations in another order"),
        (lambda x: jnp.cos(x) + jnp.cos(x), "other operations"),
        (lambda x: jnp.cos(x) - jnp.sin(x), "other operations"),
        (lambda x: (cosine := jnp.cos(x)) + jnp.sin(cosine), "the same operations with other operands"),
    ],
)
def test_operations_their_order_and_their_operands_count(changed, kind):
    before, after = text_of(lambda x: jnp.cos(x) + jnp.sin(x), X), text_of(changed, X)
    assert before != after
    assert difference("step", before, after)[0].startswith(f"step: {kind}")


def test_a_sharding_and_a_donated_argument_count():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.NamedSharding(mesh, jax.P("data"))
    abstract, sharded = (
        jax.ShapeDtypeStruct((4, 8), jnp.float32),
        jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=spec),
    )
    donated = jax.jit(lambda x: x * 2, donate_argnums=0).lower(abstract).compiler_ir()
    texts = {text_of(lambda x: x * 2, abstract), text_of(lambda x: x * 2, sharded), canonical_text(donated)}
    assert len(texts) == 3
