"""The frozen teacher of an objective: an inner node that gives the stream of its output."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from megajax.model.sublayer import normalise, scale_head
from megajax.ops.barriers import not_merged
from megajax.parallel.mesh_comm import MeshComm
from megajax.sharding import below
from megajax.step.embedding import Embedding
from megajax.step.head import LossHead
from megajax.step.nodes import HIDDEN, Arrays, Field, Microbatch, Results, StepArrays, Streams, Table
from megajax.step.stack.layers import LayerStack
from megajax.step_plan import BasePlan, StepPlan, TeacherPlan
from megajax.weights.adapters import without_adapters
from megajax.weights.table import block_weights
from megajax.weights.weight import WeightDtypes

STREAM = "teacher"


class Teacher:
    """The teacher's layers, forward only: `tokens` → its output after the final norm, `[T / tensor, D']`."""

    NAME, PLACE = STREAM, "before"

    def __init__(self, step: StepPlan, plan: TeacherPlan):
        """The plans of the step and of the teacher."""
        blocks, dtypes = dict(plan.transformer.blocks), WeightDtypes(plan.compute, plan.compute)
        comm = MeshComm(step.sizes, plan.kernels, plan.collectives, plan.deterministic)
        weights = block_weights(step, blocks, dtypes, plan.prefix)
        self.plan, self.embedding = plan, Embedding(plan, comm)
        self.stack = LayerStack(STREAM, plan, comm, blocks, weights, False, plan.prefix)

    def fields(self) -> dict[str, Field]:
        return {"tokens": Field(jnp.int32)}

    def forward(self, arrays: StepArrays, streams: Streams, batch: Microbatch, save: bool) -> tuple[Streams, None]:
        arrays, nothing = self.own_arrays(arrays), dict.fromkeys(("dropout_key", "jitter_key", "adapter_key"))
        inputs = replace(batch.inputs, **nothing, layer_loss_scale=None)
        x = self.embedding.embed(arrays.table, batch.fields, inputs)
        own, _ = self.stack.forward(arrays, {HIDDEN: x}, batch._replace(inputs=inputs), save=False)
        return {STREAM: self.output(arrays.table, own[HIDDEN])}, None

    def own_arrays(self, arrays: StepArrays) -> StepArrays:
        """A step's arrays → those of the teacher, under the names of its own model."""
        return StepArrays(below(arrays.table, self.plan.prefix), arrays.stacks)

    def output(self, table: Table, x: jax.Array) -> jax.Array:
        """The residual stream after the last layer → the teacher's output."""
        return normalise(self.plan.model, x, table.get("final_norm"), table.get("final_norm_bias"))

    def backward(
        self, arrays: StepArrays, saved: Any, gradients: Streams, batch: Microbatch, table: Table
    ) -> tuple[Streams, Table, Results]:
        return {}, table, Results()


class Base(Teacher):
    """The frozen base of adapters as a teacher: the model's own layers and what is around them, without adapters."""

    PLACE = "own ticks"

    def __init__(self, plan: BasePlan, layers: LayerStack):
        """`layers` are the model's, whose weights it computes with."""
        self.plan, self.embedding = plan, Embedding(plan, layers.comm)
        self.stack = LayerStack(layers.NAME, plan, layers.comm, layers.blocks, layers.weights.weights, False)

    def own_arrays(self, arrays: StepArrays) -> StepArrays:
        # Else XLA would merge its gathers with those of the model's pass, and keep the weights of all layers until then
        base = not_merged(without_adapters(arrays.stacks[self.stack.NAME]))
        return StepArrays(arrays.table, {self.stack.NAME: base})


class TeacherHead:
    """What the teacher predicts of some tokens."""

    def __init__(self, plan: TeacherPlan | BasePlan, comm: MeshComm):
        self.head, self.prefix = LossHead(plan, comm, before=()), plan.prefix

    def logits(self, table: Arrays, h: jax.Array) -> jax.Array:
        """The teacher's output `[c, D']`, the same on all devices of `tensor` → FP32 logits `[c, V]`."""
        return self.head.whole_logits(below(table, self.prefix), scale_head(self.head.model, h))

    def log_probs(self, table: Arrays, h: jax.Array, targets: jax.Array) -> jax.Array:
        """This device's share `[T / tensor, D']` of the teacher's output → log-probabilities of targets `[T]`."""
        return self.head.log_probs(below(table, self.prefix), h, targets)
