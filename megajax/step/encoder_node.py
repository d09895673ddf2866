"""The encoder in the step: an inner node before the layers; its weights are in the table."""

from collections.abc import Collection
from typing import Any

import jax

from megajax.model.encoder import Encoder
from megajax.options.registered import ENCODER_KIND
from megajax.parallel.mesh_comm import MeshComm
from megajax.sharding import ENCODER, below
from megajax.step.nodes import Arrays, Field, Microbatch, Results, StepArrays, Streams, Table, plus_weights
from megajax.step.stack.vjp import Residuals
from megajax.step_plan import StepPlan


class EncoderNode:
    """Computes the stream of `model.encoder`, and the gradients of the encoder's weights from the stream's."""

    PLACE = "before"

    def __init__(self, plan: StepPlan, encoder: Encoder, comm: MeshComm, trained: Collection[str]):
        """`trained` are the names of the parameters that have gradients."""
        self.NAME, self.encoder, self.comm, self.dtype = encoder.NAME, encoder, comm, plan.compute
        self.trained = sorted(name for name in trained if name.startswith(ENCODER))

    def fields(self) -> dict[str, Field]:
        own = self.encoder.fields().items()
        return {n: Field(dtype, ENCODER_KIND, tuple(extra), length=length) for n, (dtype, length, *extra) in own}

    def forward(self, arrays: StepArrays, streams: Streams, batch: Microbatch, save: bool) -> tuple[Streams, Any]:
        fields = {name: batch.fields[name] for name in self.fields()}
        trained, frozen = weights = self._weights(arrays.table)
        if not save:
            return {self.NAME: self._run(trained, frozen, fields)}, None
        stream, pull = jax.vjp(lambda trained: self._run(trained, frozen, fields), trained)
        return {self.NAME: stream}, Residuals.of(pull, weights)

    def backward(
        self, arrays: StepArrays, saved: Any, gradients: Streams, batch: Microbatch, table: Table
    ) -> tuple[Streams, Table, Results]:
        (own,) = saved.pull(self._weights(arrays.table))(gradients[self.NAME].astype(self.dtype))
        return {}, plus_weights(table, own), Results()

    def _weights(self, table: Arrays) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """(the encoder's weights that have gradients, the others) by canonical name."""
        own = {name: w for name, w in table.items() if name.startswith(ENCODER)}
        return {n: own[n] for n in self.trained}, {n: w for n, w in own.items() if n not in self.trained}

    @jax.named_scope("encoder")
    def _run(self, trained: Arrays, frozen: Arrays, fields: Arrays) -> jax.Array:
        return self.encoder.apply(below({**frozen, **trained}, ENCODER), fields, self.comm).astype(self.dtype)
