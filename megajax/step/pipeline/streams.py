"""The streams that all stages of a pipeline read: an encoder runs before the first tick and after the last one.

Each stage computes 1/P of the microbatches: stage s those of index s, s + P, and so on. All stages then hold the
streams of all microbatches; the gradients, summed over the stages, return to the stage that made the stream.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from megajax.ops.barriers import not_before
from megajax.parallel import collectives
from megajax.step.graph import Graph
from megajax.step.microbatches import Sums, run_backward_nodes, run_forward_nodes, sum_over
from megajax.step.nodes import Arrays, Microbatch, Results, StepArrays, Streams, Table


class SharedStreams:
    """The nodes that run before the ticks (`InnerNode.PLACE`), and their streams `[M, T / tensor, D]`."""

    def __init__(self, graph: Graph, arrays: StepArrays, microbatches: int, microbatch: Callable[[Any], Microbatch]):
        """`microbatch` gives one by its index."""
        self.nodes = [node for node in graph.inner if node.PLACE == "before"]
        self.graph, self.arrays, self.microbatch, self.count = graph, arrays, microbatch, microbatches
        self.stages = graph.sizes["pipeline"]
        self.each = -(-microbatches // self.stages)  # microbatches of a stage; the last ones may repeat the last of all

    def forward(self, save: bool, batch: Arrays) -> tuple[Streams, Any, Arrays]:
        """(the streams of all microbatches, what `backward` needs, `batch` for the ticks that follow)."""
        if not self.nodes:
            return {}, None, batch

        def one(_: None, k: jax.Array) -> tuple[None, tuple[Streams, list[Any]]]:
            return None, run_forward_nodes(self.nodes, self.arrays, self.microbatch(self._index(k)), save)

        _, (own, saved) = lax.scan(one, None, jnp.arange(self.each))
        gathered = jax.tree.map(lambda x: collectives.all_gather(x, "pipeline", axis=1), own)  # [each, P, ...]
        streams = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[: self.count], gathered)
        streams, batch = not_before((streams, batch))  # no collective of the ticks beside those of the nodes
        return streams, saved, batch

    def backward(self, saved: Any, gradients: Arrays, table: Table) -> tuple[Table, Results]:
        """(`table` plus the gradients of the nodes' weights, other results), from this stage's `gradients`."""
        if not self.nodes:
            return table, Results()
        gradients, table = not_before((gradients, table))

        def of_stage(dx: jax.Array) -> jax.Array:
            dx = jnp.pad(dx, ((0, self.each * self.stages - self.count), *((0, 0) for _ in dx.shape[1:])))
            dx = dx.reshape(self.each, self.stages, *dx.shape[1:])
            return collectives.psum_scatter(dx, "pipeline", scatter_dimension=1)

        def one(table: Table, sums: Sums, k: jax.Array, saved: Any, own: Streams) -> tuple[Table, Results]:
            arrays, batch = self.arrays._replace(sums=sums), self.microbatch(self._index(k))
            return run_backward_nodes(self.nodes, arrays, saved, own, batch, table)[1:]

        loops = jnp.arange(self.each), saved, {n: of_stage(dx) for n, dx in gradients.items()}
        first, sums = jax.tree.map(lambda a: a[0], loops), self.graph.zero_sums(self.arrays, self.graph.before)
        traced = jax.make_jaxpr(one, return_shape=True)(table, sums, *first)
        return sum_over(self.graph, traced, table, sums, loops)

    def _index(self, k: jax.Array) -> jax.Array:
        return jnp.minimum(k * self.stages + lax.axis_index("pipeline"), self.count - 1)
