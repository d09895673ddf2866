"""The frozen teacher of an objective: an inner node that gives the stream of its output."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from megajax.model.sublayer import normalise, scale_head
from megajax.parallel.mesh_comm import MeshComm
from megajax.sharding import TEACHER, below
from megajax.step.embedding import Embedding
from megajax.step.head import LossHead
from megajax.step.nodes import HIDDEN, Arrays, Field, Microbatch, Results, StepArrays, Streams, Table
from megajax.step.stack.layers import LayerStack
from megajax.step_plan import StepPlan
from megajax.weights.table import block_weights
from megajax.weights.weight import WeightDtypes

STREAM = "teacher"


class Teacher:
    """The teacher's layers, forward only: `tokens` → its output after the final norm, `[T / tensor, D']`."""

    NAME, PLACE = STREAM, "before"

    def __init__(self, step: StepPlan, plan: StepPlan):
        """The plans of the step and of the teacher."""
        blocks, dtypes = dict(plan.transformer.blocks), WeightDtypes(plan.compute, plan.compute)
        self.model = plan.model
        self.comm = MeshComm(step.sizes, plan.kernels, plan.collectives, plan.deterministic)
        weights = block_weights(step, blocks, dtypes, TEACHER)
        self.embedding = Embedding(plan, self.comm)
        self.stack = LayerStack(STREAM, plan, self.comm, blocks, weights, False, TEACHER)

    def fields(self) -> dict[str, Field]:
        return {"tokens": Field(jnp.int32)}

    def forward(self, arrays: StepArrays, streams: Streams, batch: Microbatch, save: bool) -> tuple[Streams, None]:
        table, nothing = below(arrays.table, TEACHER), dict.fromkeys(("dropout_key", "jitter_key", "adapter_key"))
        inputs = replace(batch.inputs, **nothing, layer_loss_scale=None)
        x = self.embedding.embed(table, batch.fields, inputs)
        own, _ = self.stack.forward(arrays, {HIDDEN: x}, batch._replace(inputs=inputs), save=False)
        return {STREAM: normalise(self.model, own[HIDDEN], table.get("final_norm"), table.get("final_norm_bias"))}, None

    def backward(
        self, arrays: StepArrays, saved: Any, gradients: Streams, batch: Microbatch, table: Table
    ) -> tuple[Streams, Table, Results]:
        return {}, table, Results()


class TeacherHead:
    """What the teacher predicts of some tokens."""

    def __init__(self, plan: StepPlan, comm: MeshComm):
        self.head = LossHead(plan, comm, before=())

    def logits(self, table: Arrays, h: jax.Array) -> jax.Array:
        """The teacher's output `[c, D']`, the same on all devices of `tensor` → FP32 logits `[c, V]`."""
        return self.head.whole_logits(below(table, TEACHER), scale_head(self.head.model, h))

    def log_probs(self, table: Arrays, h: jax.Array, targets: jax.Array) -> jax.Array:
        """This device's share `[T / tensor, D']` of the teacher's output → log-probabilities of targets `[T]`."""
        return self.head.log_probs(below(table, TEACHER), h, targets)
