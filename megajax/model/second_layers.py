"""Layers before the model's, over sequences of their own: those of an encoder (T5) and of a vision tower."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.config import ModelConfig
from megajax.layout.kinds import stacked_layers
from megajax.model.block import blocks_of
from megajax.model.comm import Comm, TokenPositions
from megajax.model.parameters import stack
from megajax.ops import PackedDocuments


class SecondLayers(nnx.Module):
    """The blocks of a second stack. In a pipeline all stages have all of its layers."""

    NAME: ClassVar[str]  # of the stream that it gives
    PREFIX: ClassVar[str]  # of its parameters' names in the whole model

    def __init__(self, model: ModelConfig, length: int):
        """`model` has the stack's layers as its own, `length` is that of a sequence."""
        self.config, self.length = model, length
        layers = stacked_layers(model)
        self.blocks = nnx.Dict({kind: stack(b, layers[kind], "modules") for kind, b in blocks_of(model).items()})

    def positions_of(self, shape: tuple[int, ...], comm: Comm, documents: PackedDocuments | None) -> TokenPositions:
        """The positions of this device's tokens `[B, length / context]`, which are consecutive."""
        (B, own), C = shape, comm.size("context")
        index = comm.index("context") * own + jnp.arange(own, dtype=jnp.int32)
        chunks = None if C == 1 else jnp.broadcast_to(jnp.arange(C, dtype=jnp.int32)[:, None, None] * own, (C, B, 1))
        return TokenPositions(jnp.broadcast_to(index, shape), documents, chunks)

    def token_ids_of(self, sequences: jax.Array, positions: TokenPositions, comm: Comm) -> jax.Array:
        """The index of each of this device's tokens among those of all `sequences`, for dropout."""
        first = sequences.astype(jnp.uint32)[:, None] * self.length
        return comm.local_tokens((first + positions.index.astype(jnp.uint32)).reshape(-1))
