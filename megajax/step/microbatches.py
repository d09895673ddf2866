"""The microbatches of a step without a pipeline: the graph's nodes, forward, in turn, and backward."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from megajax.step.graph import Graph
from megajax.step.nodes import Arrays, Results, StepArrays, Table, run_backward_nodes, run_forward_nodes
from megajax.step.stack.vjp import replayed


def train(graph: Graph, arrays: StepArrays, batch: Arrays) -> tuple[Table, Results]:
    """(gradients of the table, other results) of the batch `[M, B, S]`, summed over its microbatches.

    Gradients of the table accumulate in place. A single microbatch runs without a loop, and nothing is added.
    """

    def microbatch(table: Table, index: Any, fields: Arrays) -> tuple[Table, Results]:
        at = graph.microbatch(fields, index, arrays)
        streams, saved = run_forward_nodes(graph.inner, arrays, at, save=True)
        gradients, table, results = graph.turn(arrays, streams, at, table)
        _, table, found = run_backward_nodes(graph.inner, arrays, saved, gradients, at, table)
        return table, results.joined(found)

    zeros = graph.table.zero_gradients(arrays.table)
    if len(batch["tokens"]) == 1:
        return microbatch(zeros, 0, {name: field[0] for name, field in batch.items()})

    loops = (jnp.arange(len(batch["tokens"])), dict(batch))
    one = jax.make_jaxpr(microbatch, return_shape=True)(zeros, *jax.tree.map(lambda a: a[0], loops))
    run, (_, shapes) = replayed(*one), one[1]

    def body(carry, loop):
        table, total = carry
        table, results = run(table, *loop)
        return (table, total.plus(results)), None

    carry, _ = lax.scan(body, (zeros, graph.zero_results(shapes)), loops)
    return carry


def evaluate(graph: Graph, arrays: StepArrays, batch: Arrays) -> dict[str, jax.Array]:
    """This device's shares of the summed losses that evaluation reports, without dropout."""

    def microbatch(losses, fields: Arrays):
        at = graph.microbatch(fields, 0)
        streams, _ = run_forward_nodes(graph.inner, arrays, at, save=False)
        return jax.tree.map(jnp.add, losses, graph.evaluate(arrays, streams, at)), None

    return lax.scan(microbatch, graph.zero_losses(), dict(batch))[0]
