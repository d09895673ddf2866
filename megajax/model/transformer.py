"""One Transformer: embedding → stack of blocks → norm → head.

The config section `model` selects GPT-2/GPT-3 (learned positions, LayerNorm, GELU, biases, tied embeddings), the Llama
family (RoPE, RMSNorm, SwiGLU, grouped-query attention) and their options. Each module takes shapes from its weights, so
the same code runs on a whole model and on one device's share of heads and MLP width.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.config import ModelConfig
from megajax.config.kinds import block_layers, layer_kinds
from megajax.model.block import Block
from megajax.model.comm import SingleDevice, TokenPositions
from megajax.model.parameters import declare, parameters, stack
from megajax.model.parts import BlockInputs, State, normalise


class Embedding(nnx.Module):
    """Token embedding `[V, D]` and, for learned positions, position embedding `[max_positions, D]`."""

    def __init__(self, config: ModelConfig):
        V, D = config.padded_vocab_size, config.hidden_size
        self.tokens = declare((V, D), ("vocab", "embed"), "embedding")
        length = config.max_positions or 0  # the config always sets it for learned positions
        learned = config.position == "learned"
        self.positions = declare((length, D), ("positions", "embed"), "embedding") if learned else None


class Transformer(nnx.Module):
    """The whole model: its parameters, and its logits on one device."""

    def __init__(self, config: ModelConfig):
        V, D = config.padded_vocab_size, config.hidden_size
        self.config = config
        self.embedding = Embedding(config)
        self.blocks = nnx.Dict({kind: stack(Block(config, kind), held) for kind, held in block_layers(config).items()})
        self.final_norm = declare((D,), ("norm",), "norm")
        self.final_norm_bias = declare((D,), ("norm",), "bias") if config.norm == "layernorm" else None
        self.head = None if config.tie_embeddings else declare((D, V), ("embed", "vocab"))

    def __call__(self, tokens_bs: jax.Array, state: Mapping[str, State] | None = None) -> jax.Array:
        """FP32 logits `[B, S, V]` of whole sequences on one device, without the vocabulary's padding.

        `state` is the trained state of the layers, by kind of block and name, `[L, ...]`.
        """
        c, (B, S) = self.config, tokens_bs.shape
        positions = jnp.broadcast_to(jnp.arange(S), (B, S))
        inputs = BlockInputs(positions, TokenPositions(positions), jnp.arange(B * S, dtype=jnp.uint32), None)
        x = self.embedding.tokens[...][tokens_bs.reshape(-1)]
        if self.embedding.positions is not None:
            x = x + self.embedding.positions[...][positions.reshape(-1)]
        stacked = {kind: {n: p[...] for n, p in parameters(block).items()} for kind, block in self.blocks.items()}
        for layer, (kind, window) in enumerate(layer_kinds(c)):
            row = block_layers(c)[kind].index(layer)
            weights = self.blocks[kind].fuse({name: w[row] for name, w in stacked[kind].items()})
            kept = {name: a[row] for name, a in (state or {}).get(kind, {}).items()}
            x, _ = self.blocks[kind](weights, x, inputs, layer, kept, comm=SingleDevice(), window=window)
        x = normalise(c, x, self.final_norm[...], _array(self.final_norm_bias))
        head = self.embedding.tokens[...].T if self.head is None else self.head[...]
        logits = jnp.dot(x, head, preferred_element_type=jnp.float32)[:, : c.vocab_size]
        if c.logit_softcap is not None:
            logits = c.logit_softcap * jnp.tanh(logits / c.logit_softcap)
        return logits.reshape(B, S, c.vocab_size)


def _array(parameter: nnx.Param | None) -> jax.Array | None:
    return None if parameter is None else parameter[...]
