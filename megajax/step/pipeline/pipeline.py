"""The pipeline: all stages run a schedule's ticks in one program inside the step's shard_map.

`runner.py` has the operations of a stage. `lockstep.py` runs schedules in which all stages do the same operations at a
tick, `one_operation.py` those in which each stage does one.
"""

import jax

from megajax.step.graph import Graph
from megajax.step.nodes import Arrays, Results, StepArrays
from megajax.step.pipeline.buffers import schedule_of
from megajax.step.pipeline.lockstep import LockstepRunner
from megajax.step.pipeline.one_operation import OneOperationRunner
from megajax.step.pipeline.schedules import check, make_schedule


class Pipeline:
    """Runs the microbatches of a batch through the stages."""

    def __init__(self, graph: Graph):
        self.graph, self.layers = graph, graph.layers
        self.schedule = schedule_of(graph.plan)
        check(self.schedule)

    def gradients(self, arrays: StepArrays, batch: Arrays) -> tuple[dict[str, jax.Array], Results]:
        """(gradients of the table, other results) of the batch `[M, B, S]`, summed over its microbatches."""
        kind = OneOperationRunner if self.schedule.parts_per_backward else LockstepRunner
        run = kind(self.graph, self.schedule, arrays, batch)
        carry, name = run.train(), self.layers.NAME
        gradients, metrics, amax = map(run.join_virtual_stages, (carry.layer_gradients, carry.metrics, carry.amax))
        table, found = run.shared_streams.backward(run.saved_streams, carry.streams, carry.table)
        own = Results({name: gradients}, {}, {name: metrics}, {name: amax})
        return table, carry.results.joined(own).joined(found)

    def evaluate(self, arrays: StepArrays, batch: Arrays) -> dict[str, jax.Array]:
        """This device's shares of the summed losses that evaluation reports: forward operations, without dropout."""
        P, M, R = self.schedule.stages, batch["tokens"].shape[0], self.schedule.virtual_stages
        return LockstepRunner(self.graph, make_schedule("gpipe", P, M, R), arrays, batch).evaluate()
