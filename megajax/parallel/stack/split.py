"""A backward pass in two: gradients of inputs at once, gradients of weight matrices later (Qi et al. 2024).

The pass is traced, and its operations are divided by what they are for: what only the matrices' gradients need is
deferred, with the values that it takes from the first part. So every block can be split, whatever it computes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Literal, Var

INLINED = ("jit", "remat2", "closed_call")  # their parts are divided too
Environment = dict[Var, Any]


class SplitBackward:
    """Divides `backward(weights, saved, *rest) → (dx, gradients, extra)`.

    `saved` is a list of arrays; `gradients` is a tuple of dictionaries, of which matrices (two dimensions or more) are
    deferred. The arguments here are examples; later ones must have the same shapes.
    """

    def __init__(self, backward: Callable, weights: Any, saved: Sequence[jax.Array], *rest: Any):
        arguments = (weights, list(saved), *rest)
        leaves, self.structure = jax.tree.flatten(arguments)
        self.out_structure: Any = None  # known when `backward` has been traced

        def flat(*leaves):
            out, self.out_structure = jax.tree.flatten(backward(*jax.tree.unflatten(self.structure, leaves)))
            return out

        once = jax.make_jaxpr(flat)(*leaves)
        jaxpr = jax.make_jaxpr(lambda *leaves: _run(once, leaves))(*leaves)
        self.constants = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
        self.invars, self.outvars = jaxpr.jaxpr.invars, jaxpr.jaxpr.outvars
        _, gradients, _ = jax.tree.unflatten(self.out_structure, range(len(self.outvars)))
        positions = jax.tree.leaves(gradients)
        self.late = [i for i in positions if len(self.outvars[i].aval.shape) >= 2]
        early = [var for i, var in enumerate(self.outvars) if i not in self.late]
        self.early_equations = _needed(jaxpr.jaxpr.eqns, early)
        first = {id(equation) for equation in self.early_equations}
        others = [equation for equation in jaxpr.jaxpr.eqns if id(equation) not in first]
        self.late_equations = _needed(others, [self.outvars[i] for i in self.late])

        self.at_hand = self.invars[: len(jax.tree.leaves(weights))]  # the second part has the weights anyway
        made = {var for equation in self.late_equations for var in equation.outvars}
        read = [var for equation in self.late_equations for var in equation.invars]
        read += [self.outvars[i] for i in self.late]
        known = {*self.at_hand, *self.constants, *made}
        self.handed_on = list(dict.fromkeys(v for v in read if not isinstance(v, Literal) and v not in known))

    def inputs(self, weights: Any, saved: Sequence[jax.Array], *rest: Any):
        """(dx, gradients of vectors, extra, what `weights` needs later)."""
        leaves = jax.tree.leaves((weights, list(saved), *rest))
        values = {**self.constants, **dict(zip(self.invars, leaves, strict=True))}
        _evaluate(self.early_equations, values)
        out = [None if i in self.late else _value(var, values) for i, var in enumerate(self.outvars)]
        dx, gradients, extra = jax.tree.unflatten(self.out_structure, out)
        return dx, _present(gradients), extra, [values[var] for var in self.handed_on]

    def weights(self, weights: Any, handed_on: Sequence[jax.Array]):
        """Gradients of matrices."""
        values = {**self.constants, **dict(zip(self.at_hand, jax.tree.leaves(weights), strict=True))}
        values |= dict(zip(self.handed_on, handed_on, strict=True))
        _evaluate(self.late_equations, values)
        out = [_value(var, values) if i in self.late else None for i, var in enumerate(self.outvars)]
        return _present(jax.tree.unflatten(self.out_structure, out)[1])


def _present(gradients: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    return tuple({name: g for name, g in layer.items() if g is not None} for layer in gradients)


def _needed(equations: Sequence[JaxprEqn], results: Sequence[Any]) -> list[JaxprEqn]:
    """The equations that `results` depend on, in their order."""
    wanted, needed = {var for var in results if not isinstance(var, Literal)}, []
    for equation in reversed(equations):
        if wanted.intersection(equation.outvars):
            needed.append(equation)
            wanted.update(var for var in equation.invars if not isinstance(var, Literal))
    return needed[::-1]


def _run(closed: Any, arguments: Sequence[Any]) -> list[Any]:
    """A traced function's results, calls within it inlined."""
    values: Environment = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    values |= dict(zip(closed.jaxpr.invars, arguments, strict=True))
    _evaluate(closed.jaxpr.eqns, values)
    return [_value(var, values) for var in closed.jaxpr.outvars]


def _evaluate(equations: Sequence[JaxprEqn], values: Environment) -> None:
    """Compute `equations`, whose inputs are in `values`; their results join them."""
    for equation in equations:
        arguments = [_value(var, values) for var in equation.invars]
        with jax.named_scope(str(equation.source_info.name_stack)), equation.ctx.manager:
            if equation.primitive.name in INLINED:
                results = _run(equation.params["jaxpr"], arguments)
            else:
                params = equation.primitive.get_bind_params(equation.params)
                results = equation.primitive.bind(*arguments, **params)
                results = results if equation.primitive.multiple_results else [results]
        values |= dict(zip(equation.outvars, results, strict=True))


def _value(var: Any, values: Environment) -> Any:
    return var.val if isinstance(var, Literal) else values[var]
