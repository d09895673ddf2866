"""The objective of training: a terminal node."""

import jax
import jax.numpy as jnp

from megajax.parallel.comm import MeshComm
from megajax.step.head import LossHead
from megajax.step.nodes import HIDDEN, Arrays, Field, Microbatch, Results, StepArrays, Streams, Table, plus
from megajax.step_plan import StepPlan


class NextToken:
    """The objective of next-token prediction: its terminal node."""

    NAME = "loss"
    EVALUATED = ("loss",)
    reads_positions = False

    def __init__(self, plan: StepPlan, comm: MeshComm):
        self.head, self.z_loss = LossHead(plan, comm), plan.config.model.z_loss

    def fields(self) -> dict[str, Field]:
        return {"targets": Field(jnp.int32), "loss_mask": Field(jnp.float32)}

    def counts(self, batch: Arrays) -> dict[str, jax.Array]:
        return {"loss": batch["loss_mask"].astype(jnp.float32).sum()}

    def scale(self, loss_scale: jax.Array, counts: Arrays) -> jax.Array:
        return loss_scale / counts["loss"]

    def turn(
        self, arrays: StepArrays, streams: Streams, gradients: Streams, batch: Microbatch, table: Table
    ) -> tuple[Streams, Table, Results]:
        losses, dx, table = self.head.losses_and_gradients(
            arrays.table, streams[HIDDEN], *_targets(batch), arrays.scales[self.NAME], table
        )
        return plus(gradients, {HIDDEN: dx}), table, Results(losses=losses)

    def evaluate(self, arrays: StepArrays, streams: Streams, batch: Microbatch) -> dict[str, jax.Array]:
        return {"loss": self.head.losses(arrays.table, streams[HIDDEN], *_targets(batch))}

    def metrics(self, losses: Arrays) -> dict[str, jax.Array]:
        return {"loss": losses["loss"], **({"z_loss": losses["z_loss"]} if self.z_loss else {})}


def _targets(batch: Microbatch) -> tuple[jax.Array, jax.Array]:
    """Targets and mask, `[T]`."""
    return batch.fields["targets"].reshape(-1), batch.fields["loss_mask"].reshape(-1)
