"""A second stack of layers in the step, before the model's: an encoder's (T5) or a vision tower's.

It is a second `LayerStack` with a plan of its own. In a pipeline all stages have all of its layers, and each runs them
for 1/P of the microbatches before the first tick and after the last one (`pipeline/streams.py`): so no stage waits for
another one's, and its stages need not be balanced against those of the model.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import jax

from megajax.model.second_layers import SecondLayers
from megajax.model.sublayer import BlockInputs
from megajax.parallel.mesh_comm import MeshComm
from megajax.sharding import below
from megajax.step.nodes import HIDDEN, Arrays, Field, Microbatch, Results, StepArrays, Streams, Table, plus_weights
from megajax.step.stack.layers import LayerStack
from megajax.step_plan import StepPlan
from megajax.weights.table import block_weights
from megajax.weights.weight import WeightDtypes


class SecondStack:
    """Fields of the batch → a stream `[T' / tensor, D']`. A subclass has the parts before and after the layers."""

    PLACE = "before"
    AFTER: ClassVar[tuple[str, ...]]  # beginnings of the names, within the stack, of the weights that `after` reads

    def __init__(self, plan_of_step: StepPlan, plan: StepPlan, layers: SecondLayers, dtypes: WeightDtypes):
        """The plans of the step and of this stack."""
        self.NAME, self.prefix, self.plan_of_step = layers.NAME, layers.PREFIX, plan_of_step
        self.is_trained = plan.trains_layers  # or only the weights that `after` reads have gradients, or none
        settings = plan_of_step.sizes, plan.kernels, plan.collectives, plan.deterministic
        self.comm, of_layers = MeshComm(*settings), MeshComm(*settings, frozen=not self.is_trained)
        blocks, sums = dict(layers.blocks), plan_of_step.sums_gradients
        weights = block_weights(plan_of_step, blocks, dtypes, self.prefix)
        self.stack = LayerStack(self.NAME, plan, of_layers, blocks, weights, not sums, self.prefix)
        self.outputs = (HIDDEN, *self.stack.between.values())  # the streams that `after` reads, in order

    # A subclass has these

    def fields(self) -> dict[str, Field]:
        """The batch fields that it reads."""
        raise NotImplementedError

    def add_derived_fields(self, batch: Arrays) -> dict[str, jax.Array]:
        """Fields `[M, B, ...]` of this device that are made once a step from those of the batch."""
        raise NotImplementedError

    def inputs(self, table: Arrays, batch: Microbatch) -> BlockInputs:
        """The inputs of its layers."""
        raise NotImplementedError

    def before(self, table: Arrays, batch: Microbatch, inputs: BlockInputs) -> jax.Array:
        """The residual stream `[T / tensor, D]` that enters its layers."""
        raise NotImplementedError

    def before_gradients(
        self, table: Arrays, batch: Microbatch, inputs: BlockInputs, dx: Streams, sums: Table
    ) -> Table:
        """`sums` plus the gradients of the weights that `before` and `inputs` read."""
        raise NotImplementedError

    def after(self, weights: Arrays, x: jax.Array, *between: jax.Array) -> jax.Array:
        """The output of its layers, and those of `LayerStack.between` → its stream.

        `weights` by the names within the stack.
        """
        raise NotImplementedError

    # The node

    def forward(self, arrays: StepArrays, streams: Streams, batch: Microbatch, save: bool) -> tuple[Streams, Any]:
        inputs = self.inputs(arrays.table, batch)
        x = self.before(arrays.table, batch, inputs)
        given, own = {HIDDEN: x, **inputs.streams}, Microbatch(inputs.fields, inputs)
        found, (_, values) = self.stack.forward(arrays, given, own, save=save and self.is_trained)
        outputs = [found[name] for name in self.outputs]
        stream = self.after(self.weights(arrays.table, after=True), *outputs)
        return {self.NAME: stream}, (outputs, values) if save else None

    def backward(
        self, arrays: StepArrays, saved: Any, gradients: Streams, batch: Microbatch, table: Table
    ) -> tuple[Streams, Table, Results]:
        (outputs, values), inputs = saved, self.inputs(arrays.table, batch)
        dy = gradients[self.NAME].astype(outputs[0].dtype)
        table, *dx = self.add_gradients(self.after, arrays.table, dy, table, *outputs)
        if not self.is_trained:
            return {}, table, Results()
        given, own = dict(zip(self.outputs, dx, strict=True)), Microbatch(inputs.fields, inputs)
        of_streams, _, results = self.stack.backward(arrays, (inputs, values), given, own, {})
        return {}, self.before_gradients(arrays.table, batch, inputs, of_streams, table), results

    # For subclasses

    def add_gradients(
        self, function: Callable[..., jax.Array], table: Arrays, dy: jax.Array, sums: Table, *x: jax.Array
    ) -> tuple[Any, ...]:
        """(`sums` plus the gradients of the weights that `function(weights, *x)` reads, the gradients of `x`).

        The function is `after`, or reads the other weights.
        """
        own = self.weights(table, after=function == self.after)
        trained = {name: w for name, w in own.items() if self.prefix + name in sums}
        _, pull = jax.vjp(lambda trained, *x: function({**own, **trained}, *x), trained, *x)
        of_weights, *of_x = pull(dy)
        return plus_weights(sums, {self.prefix + name: gradient for name, gradient in of_weights.items()}), *of_x

    def own(self, whole: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """A field of whole sequences, as from `whole` → this device's part, of `shape` `[M, B, length / context]`."""
        first = self.comm.index("context") * shape[2]
        return jax.lax.dynamic_slice_in_dim(whole, first, shape[2], 1).reshape(shape)

    def whole(self, field: jax.Array) -> jax.Array:
        """A field of this device `[M, B, length / context, ...]` → of whole sequences `[M·B, length, ...]`."""
        gathered = self.comm.gather(field, "context", dim=2)
        return gathered.reshape(-1, *gathered.shape[2:])

    def weights(self, table: Arrays, after: bool) -> dict[str, jax.Array]:
        """The stack's weights of the table, those that `after` reads or the others, by the names within the stack."""
        return {name: w for name, w in below(table, self.prefix).items() if name.startswith(self.AFTER) == after}
