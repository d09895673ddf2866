"""`model.encoder.kind: layers`: a second stack of layers, with attention to both sides, over sequences of its own."""

from collections.abc import Mapping

import jax

from megajax import ops
from megajax.config import ModelConfig
from megajax.layout.kinds import ENCODER as STREAM
from megajax.model.comm import Comm
from megajax.model.cross_attention import END_OF_KEYS, FIRST_KEY
from megajax.model.second_layers import SecondLayers
from megajax.model.sublayer import RELATIVE_BIAS, BlockInputs, State, declare_norm, declare_relative_bias
from megajax.ops import PackedDocuments
from megajax.sharding import ENCODER

# Batch fields, `[rows, length]`: token ids; with data.reset_attention also the document of each, in the ids of
# `segment_ids`: negative ones, at the end, are padding
TOKENS, SEGMENTS = "encoder_tokens", "encoder_segment_ids"
STARTS, ENDS = "encoder_document_starts", "encoder_document_ends"  # made of SEGMENTS once a step
DROPOUT = 2**31 + 2**15  # folded into a step's key


class EncoderLayers(SecondLayers):
    """The parameters of the encoder's layers, of its norm and of its bias; it shares the model's table of tokens.

    Its stack is `model.of_encoder`, a model of its own.
    """

    NAME, PREFIX = STREAM, ENCODER

    def __init__(self, config: ModelConfig):
        """`config` is that of the whole model."""
        model, length = config.of_encoder, config.encoder.sequence_length
        assert model is not None and length is not None
        super().__init__(model, length)
        self.final_norm, self.final_norm_bias = declare_norm(model)
        self.relative_bias = declare_relative_bias(model)

    def inputs(
        self, fields: State, sequences: jax.Array, comm: Comm, key: jax.Array | None, streams: State
    ) -> BlockInputs:
        """The inputs of its layers, from this device's fields `[B, length / context]`; `key` is for dropout.

        `sequences [B]` are the indices of the sequences in the global batch.
        """
        documents = PackedDocuments(fields[STARTS], fields[ENDS]) if STARTS in fields else None
        positions = self.positions_of(fields[TOKENS].shape, comm, documents)
        return BlockInputs(
            positions.index,
            positions,
            self.token_ids_of(sequences, positions, comm),
            None if key is None else jax.random.fold_in(key, DROPOUT),
            streams=streams,
        )


def with_document_fields(fields: Mapping[str, jax.Array], of_tokens: jax.Array | None) -> dict[str, jax.Array]:
    """Fields `[B, ...]` of whole sequences of the encoder, with those that its layers and cross-attention read.

    `of_tokens [B, S]` are the documents of the model's tokens. Nothing is added without SEGMENTS.
    """
    if SEGMENTS not in fields or of_tokens is None:
        return dict(fields)
    documents, ranges = ops.documents_of(fields[SEGMENTS]), ops.same_documents(of_tokens, fields[SEGMENTS])
    own = {STARTS: documents.starts, ENDS: documents.ends}
    return {**fields, **own, FIRST_KEY: ranges[0], END_OF_KEYS: ranges[1]}


def bias_stream(weights: Mapping[str, jax.Array], prefix: str = "") -> dict[str, jax.Array]:
    """The stream RELATIVE_BIAS of a stack, from weights by canonical name; empty if it has none."""
    name = prefix + RELATIVE_BIAS
    return {RELATIVE_BIAS: weights[name]} if name in weights else {}
