"""`model.encoder.kind: layers`: a second stack of layers, with attention to both sides, over sequences of its own."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from megajax import ops
from megajax.config import ModelConfig
from megajax.layout.kinds import ENCODER, stacked_layers
from megajax.model.block import blocks_of
from megajax.model.comm import Comm, TokenPositions
from megajax.model.cross_attention import END_OF_KEYS, FIRST_KEY
from megajax.model.parameters import stack
from megajax.model.sublayer import RELATIVE_BIAS, BlockInputs, State, declare_norm, declare_relative_bias
from megajax.ops import PackedDocuments

# Batch fields, `[rows, length]`: token ids; with data.reset_attention also the document of each, in the ids of
# `segment_ids`: negative ones, at the end, are padding
TOKENS, SEGMENTS = "encoder_tokens", "encoder_segment_ids"
STARTS, ENDS = "encoder_document_starts", "encoder_document_ends"  # made of SEGMENTS once a step
DROPOUT = 2**31 + 2**15  # folded into a step's key


class EncoderLayers(nnx.Module):
    """The parameters of the encoder's layers, of its norm and of its bias; it shares the model's table of tokens.

    Its stack is `model.of_encoder`, a model of its own. In a pipeline all stages have all of its layers.
    """

    NAME = ENCODER

    def __init__(self, config: ModelConfig):
        """`config` is that of the whole model."""
        model, length = config.of_encoder, config.encoder.sequence_length
        assert model is not None and length is not None
        self.config, self.length = model, length
        layers = stacked_layers(model)
        self.blocks = nnx.Dict({kind: stack(b, layers[kind], "modules") for kind, b in blocks_of(model).items()})
        self.final_norm, self.final_norm_bias = declare_norm(model)
        self.relative_bias = declare_relative_bias(model)

    def inputs(
        self, fields: State, sequences: jax.Array, comm: Comm, key: jax.Array | None, streams: State
    ) -> BlockInputs:
        """The inputs of its layers, from this device's fields `[B, length / context]`; `key` is for dropout.

        `sequences [B]` are the indices of the sequences in the global batch. Tokens are consecutive over `context`.
        """
        (B, own), C = fields[TOKENS].shape, comm.size("context")
        index = comm.index("context") * own + jnp.arange(own, dtype=jnp.int32)
        index = jnp.broadcast_to(index, (B, own))
        documents = PackedDocuments(fields[STARTS], fields[ENDS]) if STARTS in fields else None
        chunks = None if C == 1 else jnp.broadcast_to(jnp.arange(C, dtype=jnp.int32)[:, None, None] * own, (C, B, 1))
        token_ids = (sequences.astype(jnp.uint32)[:, None] * (own * C) + index.astype(jnp.uint32)).reshape(-1)
        return BlockInputs(
            index,
            TokenPositions(index, documents, chunks),
            comm.local_tokens(token_ids),
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
