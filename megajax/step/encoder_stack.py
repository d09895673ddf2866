"""The encoder's layers (`model.encoder.kind: layers`) in the step, and the bias of scores that layers share.

The encoder is a second `LayerStack` with a plan of its own. In a pipeline all stages have all of its layers, and each
runs them for 1/P of the microbatches before the first tick and after the last one (`pipeline/streams.py`): so no stage
waits for another one's encoder, and its stages need not be balanced against those of the model.
"""

from typing import Any

import jax
import jax.numpy as jnp

from megajax.layout.kinds import ENCODER as STREAM
from megajax.model.cross_attention import END_OF_KEYS, FIRST_KEY
from megajax.model.encoder_layers import ENDS, SEGMENTS, STARTS, TOKENS, EncoderLayers, bias_stream
from megajax.model.sublayer import RELATIVE_BIAS, BlockInputs, normalise
from megajax.ops import documents_of, same_documents
from megajax.options.registered import ENCODER_KIND
from megajax.parallel.mesh_comm import MeshComm
from megajax.sharding import ENCODER
from megajax.step.embedding import TOKENS as TABLE
from megajax.step.embedding import Embedding
from megajax.step.nodes import Arrays, Field, Microbatch, Results, StepArrays, Streams, Table
from megajax.step.stack.layers import LayerStack
from megajax.step.stack.remat_groups import StreamGradients
from megajax.step_plan import StepPlan
from megajax.weights.sums import added
from megajax.weights.table import block_weights
from megajax.weights.weight import WeightDtypes

NORMS = (f"{ENCODER}final_norm", f"{ENCODER}final_norm_bias")
SEGMENTS_KEY = "data.reset_attention"


class EncoderStack:
    """Tokens of the encoder → its stream `[T' / tensor, D]`, normalised."""

    NAME, PLACE = STREAM, "before"

    def __init__(self, step: StepPlan, plan: StepPlan, dtypes: WeightDtypes):
        """The plans of the step and of the encoder."""
        encoder = step.transformer.encoder
        assert isinstance(encoder, EncoderLayers)
        self.step, self.encoder, blocks = step, encoder, dict(encoder.blocks)
        self.comm = MeshComm(step.sizes, plan.kernels, plan.collectives, plan.deterministic)
        self.embedding = Embedding(step, self.comm)
        weights = block_weights(step, blocks, dtypes, ENCODER)
        self.stack = LayerStack(STREAM, plan, self.comm, blocks, weights, not step.sums_gradients, ENCODER)

    def fields(self) -> dict[str, Field]:
        fields = {TOKENS: Field(jnp.int32, ENCODER_KIND, limit=self.encoder.config.vocab_size)}
        if self.step.is_packed:
            fields[SEGMENTS] = Field(jnp.int32, SEGMENTS_KEY)
        return {name: field._replace(length=self.encoder.length) for name, field in fields.items()}

    def add_document_fields(self, batch: Arrays, of_tokens: jax.Array) -> dict[str, jax.Array]:
        """`[M, B, ...]` fields with those of `encoder_layers.with_document_fields`; `of_tokens` as there."""
        M, B, own = batch[SEGMENTS].shape
        ids = self.comm.gather(batch[SEGMENTS], "context", dim=2).reshape(M * B, -1)
        documents, first = documents_of(ids), self.comm.index("context") * own
        fields = {STARTS: documents.starts, ENDS: documents.ends}
        fields = {name: jax.lax.dynamic_slice_in_dim(a, first, own, 1) for name, a in fields.items()}
        ranges = same_documents(of_tokens.reshape(M * B, -1), ids)
        fields |= dict(zip((FIRST_KEY, END_OF_KEYS), ranges, strict=True))
        return {name: a.reshape(M, B, -1) for name, a in fields.items()}

    def forward(self, arrays: StepArrays, streams: Streams, batch: Microbatch, save: bool) -> tuple[Streams, Any]:
        inputs = self._inputs(arrays, batch)
        x = self.embedding.embed(_rows(arrays.table), {"tokens": batch.fields[TOKENS]}, inputs)
        x, results = self.stack.run_forward(arrays.stacks[STREAM], x, inputs, save=save)
        saved = (x, [values for _, values in results]) if save else None
        return {STREAM: self._normalise(_norms(arrays.table), x)}, saved

    def backward(
        self, arrays: StepArrays, saved: Any, gradients: Streams, batch: Microbatch, table: Table
    ) -> tuple[Streams, Table, Results]:
        (x, values), inputs, out = saved, self._inputs(arrays, batch), dict(table)
        residuals, metrics = zip(*values, strict=True)
        _, pull = jax.vjp(self._normalise, _norms(arrays.table), x)
        dnorms, dx = pull(gradients[STREAM].astype(x.dtype))
        of_streams = {name: jnp.zeros(a.shape, jnp.float32) for name, a in inputs.streams.items()}
        dx, found = self.stack.run_backward(arrays.stacks[STREAM], StreamGradients(dx, of_streams), inputs, residuals)
        of_weights, amax = zip(*(values for _, values in found), strict=True)
        if RELATIVE_BIAS in dx.streams:
            dnorms[ENCODER + RELATIVE_BIAS] = dx.streams[RELATIVE_BIAS]
        out |= {name: added(out[name], gradient) for name, gradient in dnorms.items()}
        tokens = {"tokens": batch.fields[TOKENS]}
        out |= self.embedding.add_gradients({TABLE: out[TABLE]}, _rows(arrays.table), tokens, inputs, dx.x)
        return {}, out, Results({STREAM: [*of_weights]}, {}, {STREAM: [*metrics]}, {STREAM: [*amax]})

    def _inputs(self, arrays: StepArrays, batch: Microbatch) -> BlockInputs:
        key, streams = batch.inputs.dropout_key, bias_stream(arrays.table, ENCODER)
        assert batch.sequences is not None
        return self.encoder.inputs(batch.fields, batch.sequences, self.comm, key, streams)

    def _normalise(self, norms: Arrays, x: jax.Array) -> jax.Array:
        return normalise(self.encoder.config, x, *map(norms.get, NORMS))


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
        return {}, table | {RELATIVE_BIAS: added(table[RELATIVE_BIAS], gradients[RELATIVE_BIAS])}, Results()


def _rows(table: Arrays) -> dict[str, jax.Array]:
    """The weights of the encoder's embedding: the model's table of tokens."""
    return {TABLE: table[TABLE]}


def _norms(table: Arrays) -> dict[str, jax.Array]:
    return {name: table[name] for name in NORMS if name in table}
