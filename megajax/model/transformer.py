"""One Transformer: embedding → stack of blocks → norm → head.

Driven by the `model` section: GPT-2/GPT-3 (learned positions, LayerNorm, GELU, biases, tied embeddings) and the Llama
family (RoPE, RMSNorm, SwiGLU, grouped-query attention), with their options. Each module computes on the shapes that it
finds in its weights, so the same code runs on a whole model and on one device's share of heads and MLP width.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from megajax import ops
from megajax.config import ModelConfig
from megajax.model.comm import SingleDevice
from megajax.model.parameters import declare, stack

# What the remat policies `save_matmuls` and `offload` keep of a block.
SAVED_NAMES = ("query", "key", "value", "attention", "gate", "up", "leave")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockInputs:
    """What every block reads besides the residual stream."""

    positions: jax.Array  # [B, S] int32, position of each token in its document
    segment_ids: jax.Array | None  # [B, S] int32; tokens attend within their segment; None: one segment
    token_ids: jax.Array  # [T / tensor] uint32, index of each token in the global batch (dropout)
    dropout_key: jax.Array | None  # None: no dropout


def layer_windows(config: ModelConfig) -> tuple[int | None, ...]:
    """The sliding window of each layer of one period of `model.layer_pattern`."""
    if config.layer_pattern is None:
        return (config.sliding_window,)
    return tuple(config.sliding_window if kind == "local" else None for kind in config.layer_pattern)


def normalise(config: ModelConfig, x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
    """RMSNorm or LayerNorm, whichever the model has, over the last axis."""
    if config.norm == "rmsnorm":
        return ops.rms_norm(x, weight, config.norm_epsilon)
    return ops.layer_norm(x, weight, bias, config.norm_epsilon)


class Attention(nnx.Module):
    """Grouped-query causal self-attention with the norm before it: `[T, D]` → `[T, D]`."""

    def __init__(self, config: ModelConfig):
        D, N, K, H = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.config = config
        self.norm = declare((D,), ("norm",), "norm")
        self.norm_bias = declare((D,), ("norm",), "bias") if config.norm == "layernorm" else None
        self.query = declare((D, N, H), ("embed", "heads", "head"))
        self.key = declare((D, K, H), ("embed", "kv_heads", "head"))
        self.value = declare((D, K, H), ("embed", "kv_heads", "head"))
        self.output = declare((N, H, D), ("heads", "head", "embed"), scale=_residual_scale(config))
        self.query_norm = declare((H,), ("norm",), "norm") if config.qk_norm else None
        self.key_norm = declare((H,), ("norm",), "norm") if config.qk_norm else None
        bias = config.attention_bias
        self.query_bias = declare((N, H), ("heads", "head"), "bias") if bias else None
        self.key_bias = declare((K, H), ("kv_heads", "head"), "bias") if bias else None
        self.value_bias = declare((K, H), ("kv_heads", "head"), "bias") if bias else None
        self.output_bias = declare((D,), ("residual",), "bias") if bias else None

    def __call__(self, x: jax.Array, inputs: BlockInputs, *, comm: SingleDevice, window: int | None, recompute: bool):
        c, (B, S) = self.config, inputs.positions.shape
        h = comm.enter(normalise(c, x, self.norm[...], _array(self.norm_bias)))
        q = checkpoint_name(_project(h, self.query, self.query_bias), "query")
        k = checkpoint_name(_project(h, self.key, self.key_bias), "key")
        v = checkpoint_name(_project(h, self.value, self.value_bias), "value")
        q, k, v = (a.reshape(B, S, *a.shape[1:]) for a in (q, k, v))

        def core(q, k, v):
            if self.query_norm is not None and self.key_norm is not None:
                q = ops.rms_norm(q, self.query_norm[...], c.norm_epsilon)
                k = ops.rms_norm(k, self.key_norm[...], c.norm_epsilon)
            if c.position == "rope":
                scaling = c.rope_scaling.model_dump() if c.rope_scaling else None
                frequencies = ops.rope_frequencies(c.head_dim, c.rope_theta, c.rope_fraction, scaling)
                q, k = (ops.apply_rope(a, inputs.positions, frequencies) for a in (q, k))
            return comm.attend(q, k, v, window=window, segment_ids=inputs.segment_ids, softcap=c.attention_softcap)

        out = checkpoint_name((jax.checkpoint(core) if recompute else core)(q, k, v), "attention")
        y = jnp.einsum("tnh,nhd->td", out.reshape(B * S, *out.shape[2:]), self.output[...])
        y = checkpoint_name(comm.leave(y), "leave")
        return y if self.output_bias is None else y + self.output_bias[...]


class MLP(nnx.Module):
    """Gated or plain MLP with the norm before it: `[T, D]` → `[T, D]`."""

    def __init__(self, config: ModelConfig):
        D, F = config.hidden_size, config.ffn_hidden_size
        gated = config.activation in ("swiglu", "geglu")
        self.config = config
        self.norm = declare((D,), ("norm",), "norm")
        self.norm_bias = declare((D,), ("norm",), "bias") if config.norm == "layernorm" else None
        self.gate = declare((D, F), ("embed", "mlp")) if gated else None
        self.up = declare((D, F), ("embed", "mlp"))
        self.down = declare((F, D), ("mlp", "embed"), scale=_residual_scale(config))
        self.gate_bias = declare((F,), ("mlp",), "bias") if gated and config.mlp_bias else None
        self.up_bias = declare((F,), ("mlp",), "bias") if config.mlp_bias else None
        self.down_bias = declare((D,), ("residual",), "bias") if config.mlp_bias else None

    def __call__(self, x: jax.Array, *, comm: SingleDevice):
        h = comm.enter(normalise(self.config, x, self.norm[...], _array(self.norm_bias)))
        up = checkpoint_name(_project(h, self.up, self.up_bias), "up")
        gate = None if self.gate is None else checkpoint_name(_project(h, self.gate, self.gate_bias), "gate")
        y = ops.activate(self.config.activation, up, gate) @ self.down[...]
        y = checkpoint_name(comm.leave(y), "leave")
        return y if self.down_bias is None else y + self.down_bias[...]


class Block(nnx.Module):
    """Attention and MLP, each added to the residual stream; the contract every block kind keeps."""

    def __init__(self, config: ModelConfig):
        self.config = config
        self.attention = Attention(config)
        self.mlp = MLP(config)

    def __call__(self, x, inputs: BlockInputs, layer, state, *, comm, window: int | None, recompute_attention=False):
        """`x [T / tensor, D]` → (x, new state, metrics).

        `layer` is the layer's index (may be traced), `state` what a layer keeps that is not a parameter, `metrics`
        small sums; a dense block has neither.
        """
        y = self.attention(x, inputs, comm=comm, window=window, recompute=recompute_attention)
        x = x + self._dropout(y, inputs, layer, 0)
        y = self.mlp(x, comm=comm)
        return x + self._dropout(y, inputs, layer, 1), state, {}

    def _dropout(self, y, inputs: BlockInputs, layer, branch: int):
        if inputs.dropout_key is None:
            return y
        return ops.dropout(
            y,
            self.config.dropout,
            jax.random.fold_in(inputs.dropout_key, 2 * layer + branch + 1),
            inputs.token_ids,
        )


class Embedding(nnx.Module):
    """Token embedding `[V, D]` and, for learned positions, position embedding `[max_positions, D]`."""

    def __init__(self, config: ModelConfig):
        V, D = config.padded_vocab_size, config.hidden_size
        self.tokens = declare((V, D), ("vocab", "embed"), "embedding")
        length = config.max_positions or 0  # the config fills it in for learned positions
        learned = config.position == "learned"
        self.positions = declare((length, D), ("positions", "embed"), "embedding") if learned else None


class Transformer(nnx.Module):
    """The whole model: what its parameters are, and its logits on one device."""

    def __init__(self, config: ModelConfig):
        V, D = config.padded_vocab_size, config.hidden_size
        self.config = config
        self.embedding = Embedding(config)
        self.blocks = nnx.Dict(dense=stack(Block(config), config.num_layers))
        self.final_norm = declare((D,), ("norm",), "norm")
        self.final_norm_bias = declare((D,), ("norm",), "bias") if config.norm == "layernorm" else None
        self.head = None if config.tie_embeddings else declare((D, V), ("embed", "vocab"))

    def __call__(self, tokens_bs: jax.Array, comm: SingleDevice | None = None) -> jax.Array:
        """FP32 logits `[B, S, V]` (padded vocabulary cut off) of whole sequences, on one device."""
        c, (B, S) = self.config, tokens_bs.shape
        comm = comm or SingleDevice()
        positions = jnp.broadcast_to(jnp.arange(S), (B, S))
        inputs = BlockInputs(positions, None, jnp.arange(B * S, dtype=jnp.uint32), None)
        x = self.embedding.tokens[...][tokens_bs.reshape(-1)]
        if self.embedding.positions is not None:
            x = x + self.embedding.positions[...][positions.reshape(-1)]
        windows = layer_windows(c)
        for layer in range(c.num_layers):
            block = jax.tree.map(lambda w, layer=layer: w[layer], self.blocks["dense"])
            x, _, _ = block(x, inputs, layer, {}, comm=comm, window=windows[layer % len(windows)])
        x = normalise(c, x, self.final_norm[...], _array(self.final_norm_bias))
        head = self.embedding.tokens[...].T if self.head is None else self.head[...]
        logits = jnp.dot(x, head, preferred_element_type=jnp.float32)[:, : c.vocab_size]
        if c.logit_softcap is not None:
            logits = c.logit_softcap * jnp.tanh(logits / c.logit_softcap)
        return logits.reshape(B, S, c.vocab_size)


def _project(h_td: jax.Array, weight: nnx.Param, bias: nnx.Param | None) -> jax.Array:
    """`[T, D]` times `[D, ...]` → `[T, ...]`; the weight enters undisturbed, so that it is not saved a second time."""
    y = jnp.tensordot(h_td, weight[...], axes=1)
    return y if bias is None else y + bias[...]


def _array(parameter: nnx.Param | None) -> jax.Array | None:
    return None if parameter is None else parameter[...]


def _residual_scale(config: ModelConfig) -> float:
    """GPT-2's depth scaling of the projections that write to the residual stream (Radford et al. 2019)."""
    return 1 / math.sqrt(2 * config.num_layers) if config.depth_scaled_init else 1.0
