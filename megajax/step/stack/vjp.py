"""Operations on traced functions: select and store the residuals of a `jax.vjp`, split one in two, call one again.

`Residuals` are the leaves that a remat group keeps from its forward pass. `ResidualLayout` stores them in stacked
arrays. `SplitBackward` splits a backward pass. `with_policy` selects the values that a remat policy saves. This module
does not depend on layers or meshes, and its functions have no side effects outside their results.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from megajax.jax_internals import ClosedJaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from megajax.options.remat import ATTENTION, RematPolicy

VIEWS = ("name", "reshape", "squeeze")  # primitives that do not change the numbers of their operand
INLINED = ("jit", "remat2")  # calls that `SplitBackward` inlines, to split their operations too
Environment = dict[Var, Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Residuals:
    """The residuals of a `jax.vjp` function: its leaves without the arrays that the backward pass gets again.

    It gets the group's weights and the block's other inputs again.
    """

    saved: list[jax.Array]
    treedef: Any = field(metadata={"static": True})
    sources: tuple[int, ...] = field(metadata={"static": True})  # for each leaf its index in [*saved, *given]

    @classmethod
    def of(cls, pull: Callable, given: Any) -> "Residuals":
        """Find by identity the leaves that are in `given`; keep each other leaf once."""
        leaves, treedef = jax.tree.flatten(pull)
        given_ids = {id(a) for a in jax.tree.leaves(given)}
        saved = {id(leaf): leaf for leaf in leaves if id(leaf) not in given_ids}
        index = {key: i for i, key in enumerate([*saved, *map(id, jax.tree.leaves(given))])}
        return cls(list(saved.values()), treedef, tuple(index[id(leaf)] for leaf in leaves))

    def pull(self, given: Any) -> Callable:
        """The vjp function, rebuilt with the arrays of `given`."""
        arrays = [*self.saved, *jax.tree.leaves(given)]
        return jax.tree.unflatten(self.treedef, [arrays[i] for i in self.sources])


class ResidualLayout:
    """The layout of residuals in stacked arrays or buffers: each array once, even if it occurs in several shapes."""

    def __init__(self, forward: Callable, *arguments: Any):
        """`forward(*arguments)` returns the residuals; the arguments are examples."""
        closed, shapes = jax.make_jaxpr(forward, return_shape=True)(*arguments)
        leaves, self.structure = jax.tree.flatten(shapes)
        made_by = {var: equation for equation in closed.jaxpr.eqns for var in equation.outvars}

        def source(var: Any) -> Any:
            while not isinstance(var, Literal) and var in made_by and made_by[var].primitive.name in VIEWS:
                var = made_by[var].invars[0]
            return id(var)

        sources = [source(var) for var in closed.jaxpr.outvars]
        self.first = [sources.index(key) for key in sources]  # for each leaf the first leaf with the same numbers
        self.stored = sorted(set(self.first))
        self.shapes = [leaf.shape for leaf in leaves]

    def store(self, residuals: Any) -> list[jax.Array]:
        """Residuals → the arrays to store."""
        leaves = jax.tree.leaves(residuals)
        return [leaves[i] for i in self.stored]

    def restore(self, values: Sequence[jax.Array]) -> Any:
        """Stored arrays → residuals."""
        stored = dict(zip(self.stored, values, strict=True))
        leaves = [stored[i].reshape(shape) for i, shape in zip(self.first, self.shapes, strict=True)]
        return jax.tree.unflatten(self.structure, leaves)


def with_policy(run: Callable, policy: RematPolicy, names: Iterable[str], attention_is_fused: bool) -> Callable:
    """`run` with a `jax.checkpoint` policy that saves those of these `checkpoint_name`s that `policy` keeps.

    `run` itself if all residuals are kept.
    """
    if policy.keeps_all:
        return run
    # cuDNN's residuals, which include attention's output, are inside its custom_vjp, where names have no effect. If
    # they were not saved, its forward pass would run twice.
    fused_is_kept = attention_is_fused and policy.keeps(ATTENTION)
    names = [name for name in policy.of_names(names) if not (name == ATTENTION and attention_is_fused)]
    policies = jax.checkpoint_policies
    named = policies.save_only_these_names(*names)
    if policy.on_host:
        named = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=names,
            offload_src="device",
            offload_dst="pinned_host",
        )

    def keep(prim, *args, **params):
        fused = fused_is_kept and "dot_product_attention_fwd" in str(prim)
        return True if fused else named(prim, *args, **params)

    return jax.checkpoint(run, policy=keep)


class SplitBackward:
    """A backward pass in two parts: input gradients first, deferred gradients of weight matrices (Qi et al. 2024).

    `backward(weights, saved, *rest) → (dx, gradients, extra)` is traced. Operations that only gradients of matrices
    (two dimensions or more) need go to the second part; their operands from the first part are stored. So every block
    can be split, whatever it computes. `saved` is a list of arrays, `gradients` a tuple of dictionaries. The arguments
    here are examples, arrays or shapes; the arguments of `inputs` and `weights` must have the same shapes.
    """

    def __init__(self, backward: Callable, weights: Any, saved: Sequence[jax.Array], *rest: Any):
        arguments = (weights, list(saved), *rest)
        once, shapes = jax.make_jaxpr(backward, return_shape=True)(*arguments)
        self.out_structure = jax.tree.structure(shapes)
        jaxpr = jax.make_jaxpr(lambda *leaves: _run(once, leaves))(*jax.tree.leaves(arguments))
        self.constants = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
        self.invars, self.outvars = jaxpr.jaxpr.invars, jaxpr.jaxpr.outvars
        _, gradients, _ = jax.tree.unflatten(self.out_structure, range(len(self.outvars)))
        indices = jax.tree.leaves(gradients)
        self.deferred_outputs = [i for i in indices if len(self.outvars[i].aval.shape) >= 2]
        undeferred = [var for i, var in enumerate(self.outvars) if i not in self.deferred_outputs]
        self.first_equations = _needed(jaxpr.jaxpr.eqns, undeferred)
        first = {id(equation) for equation in self.first_equations}
        later = [equation for equation in jaxpr.jaxpr.eqns if id(equation) not in first]
        self.deferred_equations = _needed(later, [self.outvars[i] for i in self.deferred_outputs])

        self.weight_vars = self.invars[: len(jax.tree.leaves(weights))]  # the second part gets the weights again
        made = {var for equation in self.deferred_equations for var in equation.outvars}
        read = [var for equation in self.deferred_equations for var in equation.invars]
        read += [self.outvars[i] for i in self.deferred_outputs]
        known = {*self.weight_vars, *self.constants, *made}
        self.deferred = list(dict.fromkeys(v for v in read if not isinstance(v, Literal) and v not in known))

    def inputs(self, weights: Any, saved: Sequence[jax.Array], *rest: Any):
        """(dx, gradients of vectors, extra, arrays for `weights`)."""
        leaves = jax.tree.leaves((weights, list(saved), *rest))
        values = {**self.constants, **dict(zip(self.invars, leaves, strict=True))}
        _evaluate(self.first_equations, values)
        out = [None if i in self.deferred_outputs else _value(var, values) for i, var in enumerate(self.outvars)]
        dx, gradients, extra = jax.tree.unflatten(self.out_structure, out)
        return dx, _present(gradients), extra, [values[var] for var in self.deferred]

    def weights(self, weights: Any, deferred: Sequence[jax.Array]):
        """The deferred gradients of matrices, from the arrays that `inputs` returned last."""
        values = {**self.constants, **dict(zip(self.weight_vars, jax.tree.leaves(weights), strict=True))}
        values |= dict(zip(self.deferred, deferred, strict=True))
        _evaluate(self.deferred_equations, values)
        out = [_value(var, values) if i in self.deferred_outputs else None for i, var in enumerate(self.outvars)]
        return _present(jax.tree.unflatten(self.out_structure, out)[1])


def replayed(jaxpr: ClosedJaxpr, shapes: Any) -> Callable:
    """The function of which `jax.make_jaxpr(function, return_shape=True)` gave these; its Python code never runs again.

    With `jax.eval_shape`, which throws the trace away, loops in loops would double the tracing time each.
    """
    flat, structure = jaxpr_as_fun(jaxpr), jax.tree.structure(shapes)
    return lambda *arguments: jax.tree.unflatten(structure, flat(*jax.tree.leaves(arguments)))


def _present(gradients: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    return tuple({name: g for name, g in layer.items() if g is not None} for layer in gradients)


def _needed(equations: Sequence[JaxprEqn], results: Sequence[Any]) -> list[JaxprEqn]:
    """The equations that `results` depend on, in order."""
    wanted, needed = {var for var in results if not isinstance(var, Literal)}, []
    for equation in reversed(equations):
        if wanted.intersection(equation.outvars):
            needed.append(equation)
            wanted.update(var for var in equation.invars if not isinstance(var, Literal))
    return needed[::-1]


def _run(closed: Any, arguments: Sequence[Any]) -> list[Any]:
    """The results of a traced function; calls within it are inlined."""
    values: Environment = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    values |= dict(zip(closed.jaxpr.invars, arguments, strict=True))
    _evaluate(closed.jaxpr.eqns, values)
    return [_value(var, values) for var in closed.jaxpr.outvars]


def _evaluate(equations: Sequence[JaxprEqn], values: Environment) -> None:
    """Compute `equations` from `values`, and add their results to `values`."""
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
