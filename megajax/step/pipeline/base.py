"""The frozen base of adapters as a teacher: its forward pass through the stages, in ticks before all others.

The stages hold its layers, because they are the model's.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from megajax.ops.barriers import not_before
from megajax.parallel import collectives
from megajax.step.graph import Graph
from megajax.step.nodes import Arrays, Results, StepArrays, Streams
from megajax.step.pipeline.buffers import Carry
from megajax.step.pipeline.lockstep import LockstepRunner
from megajax.step.pipeline.schedules import Schedule, make_schedule
from megajax.step.teacher import Base


def forward_schedule(graph: Graph, batch: Arrays) -> Schedule:
    """The schedule of a pass that no backward pass follows."""
    return make_schedule("gpipe", graph.sizes["pipeline"], len(batch["tokens"]), graph.plan.pipeline.virtual_stages)


def streams_of_base(graph: Graph, arrays: StepArrays, batch: Arrays) -> tuple[Streams, Arrays]:
    """(the base's output `[M, T / tensor, D]`, if there is one, the same on all stages; `batch` for what follows)."""
    bases = [node for node in graph.inner if isinstance(node, Base)]
    streams = {base.NAME: BaseRunner(graph, base, arrays, batch).output() for base in bases}
    return not_before((streams, batch)) if streams else (streams, batch)  # no collective of theirs beside later ones


class BaseRunner(LockstepRunner):
    """Forward operations alone, whose last outputs are kept."""

    def __init__(self, graph: Graph, base: Base, arrays: StepArrays, batch: Arrays):
        schedule, self.base = forward_schedule(graph, batch), base
        own = replace(graph, inner=(base.embedding, base.stack), terminal=(), layers=base.stack)
        super().__init__(own, schedule, base.own_arrays(arrays), batch, {})

    def output(self) -> jax.Array:
        """The base's output of all microbatches `[M, T / tensor, D]`, the same on all stages."""
        x, count = self.empty_stream(), self.schedule.microbatches
        of_each = jax.eval_shape(self._output, x)
        streams = {self.base.NAME: jnp.zeros((count, *of_each.shape), of_each.dtype)}
        carry = self.loop(Carry(x, x, x[None][:0], [], [], {}, [], [], Results(), [], streams), lambda f: f.forward)
        return collectives.psum(carry.streams[self.base.NAME], "pipeline")

    def head(self, tick: jax.Array, carry: Carry, y: jax.Array) -> tuple[Carry, None]:
        """Keep the output of the microbatch that leaves the last virtual stage; zeros on the other stages."""
        index = jnp.asarray(self.schedule.forward.microbatch)[tick, self.schedule.stages - 1]
        own = jnp.where(self.last_stage, self._output(y), 0)
        kept = lax.dynamic_update_index_in_dim(carry.streams[self.base.NAME], own, index, 0)
        return carry._replace(streams={self.base.NAME: kept}), None

    def _output(self, x: jax.Array) -> jax.Array:
        return self.base.output(self.arrays.table, x)
