"""The microbatches of a step without a pipeline: the graph's nodes, forward, in turn, and backward.

A pipeline runs parts of the list with the same functions, `run_forward_nodes` and `run_backward_nodes`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from megajax.ops.barriers import not_before
from megajax.step.graph import Graph
from megajax.step.nodes import Arrays, InnerNode, Microbatch, Results, StepArrays, Streams, Table
from megajax.step.stack.stack_weights import ByGroup, GroupWeights
from megajax.step.stack.vjp import replayed

type Sums = dict[str, ByGroup[GroupWeights]]  # `StepArrays.sums`


def train(graph: Graph, arrays: StepArrays, batch: Arrays) -> tuple[Table, Results]:
    """(gradients of the table, other results) of the batch `[M, B, S]`, summed over its microbatches.

    Gradients accumulate in place. A single microbatch runs without a loop, and nothing is added.
    """

    def microbatch(table: Table, sums: Sums, index: Any, fields: Arrays) -> tuple[Table, Results]:
        of_step, at = arrays._replace(sums=sums), graph.microbatch(fields, index, arrays)
        streams, saved = run_forward_nodes(graph.inner, of_step, at, save=True)
        gradients, table, results = graph.turn(of_step, streams, at, table)
        _, table, found = run_backward_nodes(graph.inner, of_step, saved, gradients, at, table)
        return table, results.joined(found)

    zeros, loops = graph.table.zero_gradients(arrays.table), (jnp.arange(len(batch["tokens"])), dict(batch))
    first = jax.tree.map(lambda a: a[0], loops)
    if len(batch["tokens"]) == 1:
        return microbatch(zeros, {}, 0, first[1])
    sums = graph.zero_sums(arrays, (graph.layers, *graph.before))
    return sum_over(graph, jax.make_jaxpr(microbatch, return_shape=True)(zeros, sums, *first), zeros, sums, loops)


def sum_over(graph: Graph, traced: Any, zeros: Table, sums: Sums, loops: Any) -> tuple[Table, Results]:
    """`microbatch(table, sums, *one of loops)` for all of `loops`: its table after the last, the sum of its results.

    `traced` is what `jax.make_jaxpr(microbatch, return_shape=True)` gives. The layers of the stacks in `sums` add their
    gradients in place, one after the other: the newest never exist all at once.
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
        if node.PLACE == "before":  # the next node need not read its streams, but their collectives must not overlap
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
        if node.PLACE == "before":
            gradients, table = not_before((gradients, table))
        own, table, found = node.backward(arrays, of_node, gradients, batch, table)
        gradients, results = gradients | own, results.joined(found)
    return gradients, table, results
