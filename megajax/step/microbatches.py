"""The microbatches of a step without a pipeline: the graph's nodes, forward, in turn, and backward."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from megajax.step.graph import Graph
from megajax.step.nodes import Arrays, Results, StepArrays, Table, run_backward_nodes, run_forward_nodes
from megajax.step.stack.layers import LayerStack
from megajax.step.stack.stack_weights import ByGroup, GroupWeights
from megajax.step.stack.vjp import replayed


def train(graph: Graph, arrays: StepArrays, batch: Arrays) -> tuple[Table, Results]:
    """(gradients of the table, other results) of the batch `[M, B, S]`, summed over its microbatches.

    Gradients accumulate in place. A single microbatch runs without a loop, and nothing is added.
    """

    def microbatch(arrays: StepArrays, table: Table, index: Any, fields: Arrays) -> tuple[Table, Results]:
        at = graph.microbatch(fields, index, arrays)
        streams, saved = run_forward_nodes(graph.inner, arrays, at, save=True)
        gradients, table, results = graph.turn(arrays, streams, at, table)
        _, table, found = run_backward_nodes(graph.inner, arrays, saved, gradients, at, table)
        return table, results.joined(found)

    zeros = graph.table.zero_gradients(arrays.table)
    if len(batch["tokens"]) == 1:
        return microbatch(arrays, zeros, 0, {name: field[0] for name, field in batch.items()})

    loops = (jnp.arange(len(batch["tokens"])), dict(batch))
    return sum_over(graph, arrays, (graph.layers, *graph.before), microbatch, zeros, loops)


def sum_over(
    graph: Graph,
    arrays: StepArrays,
    stacks: Sequence[LayerStack],
    microbatch: Callable[..., tuple[Table, Results]],
    zeros: Table,
    loops: Any,
) -> tuple[Table, Results]:
    """`microbatch(arrays, table, *one of loops)` for all of `loops`: its table after the last, the sum of its results.

    The layers of `stacks` add their gradients in place, one after the other: the newest never exist all at once.
    """
    sums = {stack.NAME: stack.zero_sums(arrays.stacks[stack.NAME]) for stack in stacks}

    def one(table: Table, sums: Mapping[str, ByGroup[GroupWeights]], *loop: Any) -> tuple[Table, Results]:
        return microbatch(arrays._replace(sums=sums), table, *loop)

    traced = jax.make_jaxpr(one, return_shape=True)(zeros, sums, *jax.tree.map(lambda a: a[0], loops))
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
