"""The encoder's layers (`model.encoder.kind: layers`) in the step, and the bias of scores that layers share."""

from typing import Any

import jax
import jax.numpy as jnp

from megajax.model.cross_attention import END_OF_KEYS, FIRST_KEY
from megajax.model.encoder_layers import ENDS, SEGMENTS, STARTS, TOKENS, EncoderLayers, bias_stream
from megajax.model.sublayer import RELATIVE_BIAS, BlockInputs, normalise
from megajax.ops import documents_of, same_documents
from megajax.options.registered import ENCODER_KIND
from megajax.sharding import ENCODER
from megajax.step.embedding import TOKENS as TABLE
from megajax.step.embedding import Embedding
from megajax.step.nodes import HIDDEN, Arrays, Field, Microbatch, Results, StepArrays, Streams, Table, plus_weights
from megajax.step.second_stack import SecondStack
from megajax.step_plan import StepPlan
from megajax.weights.weight import WeightDtypes

SEGMENTS_KEY = "data.reset_attention"


class EncoderStack(SecondStack):
    """Tokens of the encoder → its stream `[T' / tensor, D]`, normalised."""

    AFTER = ("final_norm",)

    def __init__(self, plan_of_step: StepPlan, plan: StepPlan, encoder: EncoderLayers, dtypes: WeightDtypes):
        """The plans of the step and of the encoder."""
        super().__init__(plan_of_step, plan, encoder, dtypes)
        self.encoder, self.embedding = encoder, Embedding(plan_of_step, self.comm)

    def fields(self) -> dict[str, Field]:
        fields = {TOKENS: Field(jnp.int32, ENCODER_KIND, limit=self.encoder.config.vocab_size)}
        if self.plan_of_step.is_packed:
            fields[SEGMENTS] = Field(jnp.int32, SEGMENTS_KEY)
        return {name: field._replace(length=self.encoder.length) for name, field in fields.items()}

    def add_derived_fields(self, batch: Arrays) -> dict[str, jax.Array]:
        """Those of `encoder_layers.with_document_fields`."""
        if SEGMENTS not in batch:
            return {}
        shape, of_tokens, ids = batch[SEGMENTS].shape, batch["segment_ids"], self.whole(batch[SEGMENTS])
        documents = documents_of(ids)
        fields = {STARTS: documents.starts, ENDS: documents.ends}
        fields = {name: self.own(a, shape) for name, a in fields.items() if a is not None}
        ranges = same_documents(of_tokens.reshape(-1, of_tokens.shape[2]), ids)
        return fields | {n: a.reshape(of_tokens.shape) for n, a in zip((FIRST_KEY, END_OF_KEYS), ranges, strict=True)}

    def inputs(self, table: Arrays, batch: Microbatch) -> BlockInputs:
        assert batch.sequences is not None
        key, streams = batch.inputs.dropout_key, bias_stream(table, ENCODER)
        return self.encoder.inputs(batch.fields, batch.sequences, self.comm, key, streams)

    def before(self, table: Arrays, batch: Microbatch, inputs: BlockInputs) -> jax.Array:
        return self.embedding.embed(_rows(table), _tokens(batch), inputs)

    def before_gradients(
        self, table: Arrays, batch: Microbatch, inputs: BlockInputs, dx: Streams, sums: Table
    ) -> Table:
        rows = _rows(sums)
        sums = sums | self.embedding.add_gradients(rows, _rows(table), _tokens(batch), inputs, dx[HIDDEN])
        return plus_weights(sums, {ENCODER + name: gradient for name, gradient in dx.items() if name != HIDDEN})

    def after(self, weights: Arrays, x: jax.Array, *between: jax.Array) -> jax.Array:
        return normalise(self.encoder.config, x, weights["final_norm"], weights.get("final_norm_bias"))


class RelativeBias:
    """The stream that is the model's table of `model.position: relative`."""

    NAME, PLACE = RELATIVE_BIAS, "before"

    def fields(self) -> dict[str, Field]:
        return {}

    def forward(self, arrays: StepArrays, streams: Streams, batch: Microbatch, save: bool) -> tuple[Streams, Any]:
        return bias_stream(arrays.table), None

    def backward(
        self, arrays: StepArrays, saved: Any, gradients: Streams, batch: Microbatch, table: Table
    ) -> tuple[Streams, Table, Results]:
        return {}, plus_weights(table, {RELATIVE_BIAS: gradients[RELATIVE_BIAS]}), Results()


def _rows(table: Arrays) -> dict[str, jax.Array]:
    """The weights of the encoder's embedding: the model's table of tokens."""
    return {TABLE: table[TABLE]}


def _tokens(batch: Microbatch) -> dict[str, jax.Array]:
    return {"tokens": batch.fields[TOKENS]}
