"""The pipeline: all stages run a schedule's ticks in one program inside the step's shard_map.

`runner.py` has the operations of a stage. `lockstep.py` runs schedules in which all stages do the same operations at a
tick, `one_operation.py` those in which each stage does one. The functions are those of `microbatches.py`.
"""

import jax

from megajax.step.graph import Graph
from megajax.step.nodes import Arrays, Results, StepArrays, Table
from megajax.step.pipeline.base import forward_schedule, streams_of_base
from megajax.step.pipeline.buffers import schedule_of
from megajax.step.pipeline.lockstep import LockstepRunner
from megajax.step.pipeline.one_operation import OneOperationRunner
from megajax.step.pipeline.schedules import check


def train(graph: Graph, arrays: StepArrays, batch: Arrays) -> tuple[Table, Results]:
    """(gradients of the table, other results) of the batch `[M, B, S]`, summed over its microbatches."""
    schedule, name = schedule_of(graph.plan), graph.layers.NAME
    check(schedule)
    given, batch = streams_of_base(graph, arrays, batch)
    run = (OneOperationRunner if schedule.parts_per_backward else LockstepRunner)(graph, schedule, arrays, batch, given)
    carry = run.train()
    gradients, metrics, amax = map(run.join_virtual_stages, (carry.layer_gradients, carry.metrics, carry.amax))
    table, found = run.shared_streams.backward(run.saved_streams, carry.streams, carry.table)
    own = Results({name: gradients}, {}, {name: metrics}, {name: amax})
    return table, carry.results.joined(own).joined(found)


def evaluate(graph: Graph, arrays: StepArrays, batch: Arrays) -> dict[str, jax.Array]:
    """This device's shares of the summed losses that evaluation reports: forward operations, without dropout."""
    given, batch = streams_of_base(graph, arrays, batch)
    return LockstepRunner(graph, forward_schedule(graph, batch), arrays, batch, given).evaluate()
