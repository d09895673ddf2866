"""The microbatches of a step without a pipeline: the graph's nodes, forward, in turn, and backward.

A pipeline runs parts of the list with the same functions, `run_forward_nodes` and `run_backward_nodes`.
What divides losses is computed before the first forward, in `Graph`.
"""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from megajax.ops.barriers import not_before
from megajax.ops.numerics import wide
from megajax.step.graph import Graph
from megajax.step.nodes import Arrays, InnerNode, Microbatch, Results, StepArrays, Streams, Table
from megajax.step.stack.pairs import PairedStack, of_each, pair_of
from megajax.step.stack.stack_weights import ByGroup, GroupWeights
from megajax.step.stack.vjp import replayed

APART = ("before", "own ticks")  # places of nodes that finish before others begin
type Sums = dict[str, ByGroup[GroupWeights]]  # `StepArrays.sums`


def train(graph: Graph, arrays: StepArrays, batch: Arrays) -> tuple[Table, Results]:
    """(gradients of the table, other results) of the batch `[M, B, S]`, summed over its microbatches.

    Gradients accumulate in place. What runs once has no loop, and nothing is added.
    """
    train_next, loops = _train_one, (jnp.arange(len(batch["tokens"])), dict(batch))
    if graph.plan.microbatches_at_once > 1:
        train_next, loops = _train_pair, jax.tree.map(lambda a: a.reshape(-1, 2, *a.shape[1:]), loops)

    zeros, (index, fields) = graph.table.zero_gradients(arrays.table), jax.tree.map(lambda a: a[0], loops)
    if len(loops[0]) == 1:
        return train_next(graph, arrays, index, fields, zeros)
    sums = graph.zero_sums(arrays, (graph.layers, *graph.before))

    def run(table: Table, sums: Sums, index: Any, fields: Arrays) -> tuple[Table, Results]:
        return train_next(graph, arrays._replace(sums=sums), index, fields, table)

    return sum_over(graph, jax.make_jaxpr(run, return_shape=True)(zeros, sums, index, fields), zeros, sums, loops)


def _train_one(graph: Graph, arrays: StepArrays, index: Any, fields: Arrays, table: Table) -> tuple[Table, Results]:
    """(`table` plus gradients, other results) of a microbatch with the fields `[B, S]`."""
    at = graph.microbatch(fields, index, arrays)
    streams, saved = run_forward_nodes(graph.inner, arrays, at, save=True)
    gradients, table, results = graph.turn(arrays, streams, at, table)
    _, table, found = run_backward_nodes(graph.inner, arrays, saved, gradients, at, table)
    return table, results.joined(found)


def _train_pair(graph: Graph, arrays: StepArrays, index: Any, fields: Arrays, table: Table) -> tuple[Table, Results]:
    """(`table` plus gradients, other results) of two microbatches with the fields `[2, B, S]`.

    They pass the layers side by side (`stack/pairs.py`). The other nodes run for one microbatch after the other.
    """
    each = [{name: a[i] for name, a in fields.items()} for i in range(2)]
    batches: Any = [graph.microbatch(own, index[i], arrays) for i, own in enumerate(each)]
    others = [node for node in graph.inner if node is not graph.layers]  # all run before the layers
    streams, saved = zip(*(run_forward_nodes(others, arrays, at, save=True) for at in batches), strict=True)
    layers, gradients = PairedStack(graph.layers), list[Streams]()
    of_turns, of_others = list[Results](), list[Results]()
    given, saved_layers = layers.forward(arrays, pair_of(*streams), batches, save=True)
    for own, new, at in zip(streams, of_each(given), batches, strict=True):
        dx, table, results = graph.turn(arrays, own | new, at, table)
        gradients.append(dx)
        of_turns.append(results)
    dx, _, results = layers.backward(arrays, saved_layers, pair_of(*gradients), batches, {})
    for of_nodes, own, new, at in zip(saved, gradients, of_each(dx), batches, strict=True):
        _, table, found = run_backward_nodes(others, arrays, of_nodes, own | new, at, table)
        arrays = arrays._replace(sums={name: found.gradients.get(name, a) for name, a in arrays.sums.items()})
        of_others.append(found)
    return table, _of_both(of_turns, arrays.sums).joined(results).joined(_of_both(of_others, arrays.sums))


def _of_both(results: Sequence[Results], in_place: Collection[str]) -> Results:
    """The results of two microbatches; gradients that are not `in_place` are added in FP32."""
    one, other = results
    apart = {name: own for name, own in one.gradients.items() if name not in in_place}
    exact = jax.tree.map(lambda g: g.astype(wide(g.dtype)), apart)
    return one._replace(gradients={**one.gradients, **exact}).plus(other, in_place)


def sum_over(graph: Graph, traced: Any, zeros: Table, sums: Sums, loops: Any) -> tuple[Table, Results]:
    """(The table after the last microbatch, the sum of the results) of a scan over `loops`.

    `traced` is `jax.make_jaxpr(run, return_shape=True)` of the function `run(table, sums, index, fields)` for one
    microbatch, or two. The gradients in the carry are its `sums`; each layer adds its own to them in place, and its
    results have the new sums. So a microbatch's gradients never exist all at once.
    """
    run, (_, shapes) = replayed(*traced), traced[1]

    def body(carry: tuple[Table, Results], loop: Any) -> tuple[tuple[Table, Results], None]:
        table, total = carry
        table, results = run(table, {name: total.gradients[name] for name in sums}, *loop)
        return (table, total.plus(results, sums)), None

    return lax.scan(body, (zeros, graph.zero_results(shapes)), loops)[0]


def evaluate(graph: Graph, arrays: StepArrays, batch: Arrays) -> dict[str, jax.Array]:
    """This device's shares of the summed losses that evaluation reports, without dropout."""

    def microbatch(losses, fields: Arrays):
        at = graph.microbatch(fields, 0)
        streams, _ = run_forward_nodes(graph.inner, arrays, at, save=False)
        return jax.tree.map(jnp.add, losses, graph.evaluate(arrays, streams, at)), None

    return lax.scan(microbatch, graph.zero_losses(), dict(batch))[0]


def run_forward_nodes(
    nodes: Sequence[InnerNode], arrays: StepArrays, batch: Microbatch, save: bool, given: Arrays | None = None
) -> tuple[Streams, list[Any]]:
    """The nodes in order → (all their streams, what each one's `backward` needs); `given` are streams before them."""
    streams, saved = dict(given or {}), []
    for node in nodes:
        new, of_node = node.forward(arrays, streams, batch, save)
        streams |= new
        saved.append(of_node)
        if node.PLACE in APART:  # the next node need not read its streams, but their collectives must not overlap
            streams, table = not_before((streams, arrays.table))
            arrays = arrays._replace(table=table)
    return streams, saved


def run_backward_nodes(
    nodes: Sequence[InnerNode],
    arrays: StepArrays,
    saved: Sequence[Any],
    gradients: Streams,
    batch: Microbatch,
    table: Table,
) -> tuple[Streams, Table, Results]:
    """The nodes in reverse order, from the gradients of their streams.

    Returns (gradients of all streams, `table` plus their weights', results).
    """
    results = Results()
    for node, of_node in reversed([*zip(nodes, saved, strict=True)]):
        if node.PLACE in APART:
            gradients, table = not_before((gradients, table))
        own, table, found = node.backward(arrays, of_node, gradients, batch, table)
        gradients, results = gradients | own, results.joined(found)
    return gradients, table, results
