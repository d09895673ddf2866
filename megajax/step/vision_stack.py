"""The vision tower (`model.vision`) in the step: patches of images → image embeddings."""

import jax
import jax.numpy as jnp

from megajax.model.sublayer import BlockInputs
from megajax.model.vision import PATCHES, POSITIONS, SEGMENTS, VisionTower
from megajax.step.nodes import HIDDEN, Arrays, Field, Microbatch, Streams, Table
from megajax.step.second_stack import SecondStack
from megajax.step_plan import StepPlan
from megajax.weights.weight import WeightDtypes

SETTING = "model.vision"


class VisionStack(SecondStack):
    """Patches → image embeddings `[T' / tensor, D]`, of the width of the model's residual stream."""

    AFTER = ("final_norm", "projector.")

    def __init__(self, plan_of_step: StepPlan, plan: StepPlan, tower: VisionTower, dtypes: WeightDtypes):
        """The plans of the step and of the tower."""
        super().__init__(plan_of_step, plan, tower, dtypes)
        self.tower = tower

    def fields(self) -> dict[str, Field]:
        vision = self.tower.vision
        fields = {
            PATCHES: Field(jnp.float32, SETTING, (vision.patch_dim,)),
            SEGMENTS: Field(jnp.int32, SETTING),
            POSITIONS: Field(jnp.int32, SETTING, (2,), limit=vision.fixed_grid, least=-1),  # of a class entry
        }
        return {name: field._replace(length=self.tower.length) for name, field in fields.items()}

    def add_derived_fields(self, batch: Arrays) -> dict[str, jax.Array]:
        """Those of `VisionTower.documents`."""
        found = self.tower.documents(self.whole(batch[SEGMENTS]), self.whole(batch[POSITIONS]))
        return {name: self.own(a, batch[SEGMENTS].shape) for name, a in found.items()}

    def inputs(self, table: Arrays, batch: Microbatch) -> BlockInputs:
        assert batch.sequences is not None
        return self.tower.inputs(batch.fields, batch.sequences, self.comm)

    def before(self, table: Arrays, batch: Microbatch, inputs: BlockInputs) -> jax.Array:
        return self.tower.embed(self.weights(table, after=False), batch.fields, self.comm)

    def before_gradients(
        self, table: Arrays, batch: Microbatch, inputs: BlockInputs, dx: Streams, sums: Table
    ) -> Table:
        def embed(weights: Arrays) -> jax.Array:
            return self.tower.embed(weights, batch.fields, self.comm)

        return self.add_gradients(embed, table, dx[HIDDEN], sums)[0]

    def after(self, weights: Arrays, x: jax.Array, *between: jax.Array) -> jax.Array:
        return self.tower.project(weights, x, between, self.comm)
