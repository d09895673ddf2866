"""One Transformer: embedding → stack of blocks → norm → head.

Driven by the `model` section: GPT-2/GPT-3 (learned positions, LayerNorm, GELU, biases, tied embeddings) and the Llama
family (RoPE, RMSNorm, SwiGLU, grouped-query attention), with their options. Each module computes on the shapes that it
finds in its weights, so the same code runs on a whole model and on one device's share of heads and MLP width.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from megajax import ops
from megajax.config import ModelConfig
from megajax.config.kinds import block_layers, layer_kinds
from megajax.model.comm import Place, SingleDevice
from megajax.model.parameters import declare, parameters, stack

Weights = Mapping[str, Any]  # by name within the block: arrays, or what a communication point's linear layers take

# What the remat policies `save_matmuls` and `offload` keep of a block.
SAVED_NAMES = ("qkv", "attention", "exchanged", "gate_up", "leave", "routing", "dispatched")
# Metrics of a block that are losses, added to the language model's.
ROUTER_LOSSES = ("aux_loss", "router_z_loss")
# Metrics that count assignments: to each expert, and those dropped.
COUNTS = ("expert_counts", "dropped_tokens")

# Parameters of a block that lie side by side in one matmul: the weight computed with → the parameters stored.
FUSED = {
    "attention.qkv": ("attention.query", "attention.key", "attention.value"),
    "attention.qkv_bias": ("attention.query_bias", "attention.key_bias", "attention.value_bias"),
    "mlp.gate_up": ("mlp.gate", "mlp.up"),
    "mlp.gate_up_bias": ("mlp.gate_bias", "mlp.up_bias"),
    "moe.gate_up": ("moe.gate", "moe.up"),
    "moe.shared_gate_up": ("moe.shared_gate", "moe.shared_up"),
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockInputs:
    """What every block reads besides the residual stream."""

    positions: jax.Array  # [B, S] int32, position of each token in its sequence, or in its document
    place: Place  # where the tokens stand in their sequences, and where their documents begin
    token_ids: jax.Array  # [T / tensor] uint32, index of each token in the global batch (dropout)
    dropout_key: jax.Array | None  # None: no dropout
    jitter_key: jax.Array | None = None  # None: no jitter of the routers' inputs
    balance_scale: jax.Array | None = None  # factor of the routers' losses; None: no training of experts


def linear_layers(config: ModelConfig) -> tuple[str, ...]:
    """The linear layers of all kinds of blocks that the model has, by the name of their weight; routers are none."""
    kinds, layers = block_layers(config), ["attention.qkv", "attention.output"]
    layers += ["mlp.gate_up", "mlp.down"] if "dense" in kinds else []
    layers += ["moe.gate_up", "moe.down"] if "moe" in kinds else []
    shared = "moe" in kinds and config.shared_expert_ffn_hidden_size
    return (*layers, *(["moe.shared_gate_up", "moe.shared_down"] if shared else []))


def layer_state(config: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """What the model's layers keep that is no parameter, zeros at first; `expert_bias [L, E]` of the L MoE layers."""
    if not config.num_experts or not config.router.expert_bias:
        return {}
    shape = (len(block_layers(config)["moe"]), config.num_experts)
    return {"expert_bias": jax.ShapeDtypeStruct(shape, jnp.float32)}


@jax.named_scope("norm")
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
        self.sinks = declare((N,), ("sinks",), "bias") if config.attention_sinks else None
        bias = config.attention_bias
        self.query_bias = declare((N, H), ("heads", "head"), "bias") if bias else None
        self.key_bias = declare((K, H), ("kv_heads", "head"), "bias") if bias else None
        self.value_bias = declare((K, H), ("kv_heads", "head"), "bias") if bias else None
        self.output_bias = declare((D,), ("residual",), "bias") if bias else None

    @jax.named_scope("attention")
    def __call__(
        self, w: Weights, x: jax.Array, inputs: BlockInputs, *, comm: SingleDevice, window, recompute: Collection[str]
    ):
        c, (B, S) = self.config, inputs.positions.shape

        def project(x, norm, norm_bias, weight):
            return comm.column_linear(normalise(c, x, norm, norm_bias), weight)

        project = jax.checkpoint(project, prevent_cse=False) if "norms" in recompute else project
        qkv = project(x, w["attention.norm"], w.get("attention.norm_bias"), w["attention.qkv"])
        qkv = _add_bias(qkv, w.get("attention.qkv_bias"))
        qkv = checkpoint_name(qkv, "qkv").reshape(B, S, -1, c.head_dim)
        N = qkv.shape[2] - 2 * comm.local_kv_heads(c.num_kv_heads)

        def core(qkv):
            q, k, v = jnp.split(qkv, (N, (N + qkv.shape[2]) // 2), axis=2)
            if c.qk_norm:
                q = ops.rms_norm(q, w["attention.query_norm"], c.norm_epsilon)
                k = ops.rms_norm(k, w["attention.key_norm"], c.norm_epsilon)
            if c.position == "rope":
                scaling = c.rope_scaling.model_dump() if c.rope_scaling else None
                frequencies = ops.rope_frequencies(c.head_dim, c.rope_theta, c.rope_fraction, scaling)
                q, k = (ops.apply_rope(a, inputs.positions, frequencies) for a in (q, k))
            sinks = w.get("attention.sinks")
            return comm.attend(q, k, v, inputs.place, window=window, softcap=c.attention_softcap, sinks=sinks)

        out = checkpoint_name((jax.checkpoint(core) if "attention" in recompute else core)(qkv), "attention")
        y = checkpoint_name(comm.row_linear(out.reshape(B * S, -1), w["attention.output"]), "leave")
        return _add_bias(y, w.get("attention.output_bias"))


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

    @jax.named_scope("mlp")
    def __call__(self, w: Weights, x: jax.Array, *, comm: SingleDevice, recompute: Collection[str]):
        def compute(x, norm, norm_bias, gate_up, bias, down):
            return comm.mlp(self.config.activation, normalise(self.config, x, norm, norm_bias), gate_up, bias, down)

        if "norms" in recompute:
            kept = jax.checkpoint_policies.save_only_these_names("gate_up")
            compute = jax.checkpoint(compute, prevent_cse=False, policy=kept)
        norms, weights = ("mlp.norm", "mlp.norm_bias"), ("mlp.gate_up", "mlp.gate_up_bias", "mlp.down")
        y = compute(x, *(w.get(name) for name in (*norms, *weights)))
        return _add_bias(checkpoint_name(y, "leave"), w.get("mlp.down_bias"))


class MoE(nnx.Module):
    """Mixture of experts with the norm before it, beside a shared expert or none: `[T, D]` → `[T, D]`."""

    def __init__(self, config: ModelConfig):
        D, E, F = config.hidden_size, config.num_experts, config.expert_ffn_hidden_size
        assert E is not None and F is not None
        shared, scale = config.shared_expert_ffn_hidden_size, _residual_scale(config)
        gated = config.activation in ("swiglu", "geglu")
        self.config = config
        self.norm = declare((D,), ("norm",), "norm")
        self.norm_bias = declare((D,), ("norm",), "bias") if config.norm == "layernorm" else None
        self.router = declare((D, E), ("embed", "router"))
        self.gate = declare((E, D, F), ("experts", "embed", "expert_mlp")) if gated else None
        self.up = declare((E, D, F), ("experts", "embed", "expert_mlp"))
        self.down = declare((E, F, D), ("experts", "expert_mlp", "embed"), scale=scale)
        self.shared_gate = declare((D, shared), ("embed", "mlp")) if gated and shared else None
        self.shared_up = declare((D, shared), ("embed", "mlp")) if shared else None
        self.shared_down = declare((shared, D), ("mlp", "embed"), scale=scale) if shared else None
        self.shared_router = declare((D,), ("embed",)) if config.shared_expert_gate else None

    @jax.named_scope("moe")
    def __call__(
        self, w: Weights, x: jax.Array, inputs: BlockInputs, layer, state, *, comm: SingleDevice, recompute
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        def compute(w: Weights, x: jax.Array):
            h = normalise(self.config, x, w["moe.norm"], w.get("moe.norm_bias"))
            experts, weights, metrics = self.route(w["moe.router"], h, inputs, layer, state, comm)
            matrices, capacity = (w["moe.gate_up"], w["moe.down"]), self.capacity(len(x) * comm.token_shards)
            y = comm.experts(self.config.activation, h, experts, weights, *matrices, capacity)
            return self.add_shared(w, h, y, comm), metrics

        if "norms" in recompute:
            kept = jax.checkpoint_policies.save_only_these_names("gate_up", "routing", "dispatched")
            compute = jax.checkpoint(compute, prevent_cse=False, policy=kept)
        y, metrics = compute({name: weight for name, weight in w.items() if name.startswith("moe.")}, x)
        return checkpoint_name(y, "leave"), metrics

    @jax.named_scope("router")
    def route(self, weight, h: jax.Array, inputs: BlockInputs, layer, state, comm: SingleDevice):
        """`h [T / tensor, D]` → (experts and their weights, `[T / tensor, k]` each; this device's metrics)."""
        c, r, k = self.config, self.config.router, self.config.experts_per_token
        assert c.num_experts is not None
        training, tokens = inputs.balance_scale is not None, h.shape[0] * comm.token_shards
        if inputs.jitter_key is not None:
            h = ops.router.jitter(h, r.jitter, jax.random.fold_in(inputs.jitter_key, layer), inputs.token_ids)
        logits = checkpoint_name(ops.router.router_logits(h, weight), "routing")
        if r.force_balance:
            experts = ops.router.balanced_choice(inputs.token_ids, k, c.num_experts)
        elif r.sinkhorn and training:
            experts = ops.router.choose(ops.router.sinkhorn(logits, tokens, comm.sum_over_tokens), k)
        else:
            bias = state.get("expert_bias")
            values = ops.router.scores(logits, r.score_function)
            values = values if bias is None else values + bias
            experts = ops.router.choose(values, k, r.num_groups, r.groups_per_token)
        experts = checkpoint_name(experts, "routing")
        weights = ops.router.routing_weights(
            logits, experts, r.score_function, r.pre_softmax, r.normalise, r.scaling_factor
        )
        metrics = self.metrics(logits, experts, inputs, comm, tokens) if training else {}
        if r.capacity_factor is not None:
            kept = self.within_capacity(experts, weights, inputs, comm, tokens)
            experts = checkpoint_name(jnp.where(kept, experts, c.num_experts), "routing")
            metrics |= {"dropped_tokens": jnp.sum(~kept, dtype=jnp.int32)} if training else {}
        if "filled" in state:
            experts = checkpoint_name(jnp.where(state["filled"], experts, c.num_experts), "routing")
        return experts, weights, metrics

    def within_capacity(self, experts, weights, inputs: BlockInputs, comm: SingleDevice, tokens: int) -> jax.Array:
        """Which assignments `[T / tensor, k]` the experts have room for, among all of a microbatch's `tokens` tokens.

        The others are no longer assigned to any expert, and the weights of what remains stay as they are. Losses and
        counts are of the choice before this, as Megatron-LM's losses are.
        """
        r, E, capacity = self.config.router, self.config.num_experts, self.capacity(tokens)
        assert E is not None and capacity is not None
        priorities = weights if r.drop_policy == "probability" else jnp.zeros_like(weights)
        return ops.router.within_capacity(experts, priorities, inputs.token_ids, E, capacity, comm.of_all_tokens)

    def capacity(self, tokens: int) -> int | None:
        """The most assignments that an expert takes of a microbatch's `tokens` tokens; None: all."""
        c, factor = self.config, self.config.router.capacity_factor
        if factor is None:
            return None
        assert c.num_experts is not None
        return ops.router.expert_capacity(factor, tokens, c.experts_per_token, c.num_experts)

    def metrics(self, logits, experts, inputs: BlockInputs, comm: SingleDevice, tokens: int) -> dict[str, jax.Array]:
        """Assignments `[E]` and this device's shares of the router's entropy and losses, means over all `tokens`."""
        r, k, E = self.config.router, self.config.experts_per_token, logits.shape[1]
        B, S = inputs.positions.shape
        counts = ops.router.count(experts, E)
        out = {"expert_counts": counts, "router_entropy": ops.router.entropy(logits, r.score_function) / tokens}
        if r.global_loss > 0:
            total = comm.sum_over_tokens(counts).astype(jnp.float32)
            loss = ops.router.balance_loss(logits, total, r.score_function, k, tokens)
            out["aux_loss"] = r.global_loss / tokens * loss
        if r.sequence_loss > 0:
            sequences = comm.own_tokens(jnp.repeat(jnp.arange(B), S))
            totals = comm.sum_over_sequence(ops.router.count_by_sequence(experts, sequences, B, E))
            length = S * comm.context_size
            loss = ops.router.balance_loss(logits, totals[sequences], r.score_function, k, length)
            out["aux_loss"] = out.get("aux_loss", 0) + r.sequence_loss / tokens * loss
        if r.z_loss > 0:
            out["router_z_loss"] = r.z_loss / tokens * ops.router.z_loss(logits)
        return out

    def add_shared(self, w: Weights, h: jax.Array, y: jax.Array, comm: SingleDevice) -> jax.Array:
        """`y` and the output of the shared expert, which computes every token."""
        if not self.config.shared_expert_ffn_hidden_size:
            return y
        shared = comm.mlp(self.config.activation, h, w["moe.shared_gate_up"], None, w["moe.shared_down"])
        if self.config.shared_expert_gate:
            gate = jax.nn.sigmoid((h @ w["moe.shared_router"]).astype(jnp.float32))
            shared = (shared * gate[:, None]).astype(shared.dtype)
        return y + shared


class Block(nnx.Module):
    """Attention and MLP or experts, each added to the residual stream; the contract every block kind keeps."""

    def __init__(self, config: ModelConfig, kind: str):
        self.config = config
        self.attention = Attention(config)
        self.mlp = MLP(config) if kind == "dense" else None
        self.moe = MoE(config) if kind == "moe" else None

    def __call__(
        self, weights: Weights, x, inputs: BlockInputs, layer, state, *, comm, window, recompute: Collection[str] = ()
    ):
        """`x [T / tensor, D]` → (x, new state, metrics).

        `weights` are as `fuse` makes them. `layer` is the layer's index (may be traced), `state` what a layer keeps
        that is not a parameter (`expert_bias [E]`; `filled`, whether it is a layer and not a pipeline's empty slot, of
        which no token goes to an expert), `metrics` this device's shares of small sums, with gradient those
        of ROUTER_LOSSES; a dense block has neither. The backward pass computes again what `recompute` names:
        "attention", from queries, keys and values; "norms".
        """
        y = self.attention(weights, x, inputs, comm=comm, window=window, recompute=recompute)
        x = x + self._dropout(y, inputs, layer, 0)
        metrics = {}
        if self.moe is not None:
            y, metrics = self.moe(weights, x, inputs, layer, state, comm=comm, recompute=recompute)
        else:
            assert self.mlp is not None
            y = self.mlp(weights, x, comm=comm, recompute=recompute)
        return x + self._dropout(y, inputs, layer, 1), state, metrics

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
        self.blocks = nnx.Dict({kind: stack(Block(config, kind), held) for kind, held in block_layers(config).items()})
        self.final_norm = declare((D,), ("norm",), "norm")
        self.final_norm_bias = declare((D,), ("norm",), "bias") if config.norm == "layernorm" else None
        self.head = None if config.tie_embeddings else declare((D, V), ("embed", "vocab"))

    def __call__(
        self, tokens_bs: jax.Array, comm: SingleDevice | None = None, state: Mapping[str, jax.Array] | None = None
    ) -> jax.Array:
        """FP32 logits `[B, S, V]` (padded vocabulary cut off) of whole sequences, on one device; `state` as trained."""
        c, (B, S) = self.config, tokens_bs.shape
        comm = comm or SingleDevice()
        positions = jnp.broadcast_to(jnp.arange(S), (B, S))
        inputs = BlockInputs(positions, Place(positions), jnp.arange(B * S, dtype=jnp.uint32), None)
        x = self.embedding.tokens[...][tokens_bs.reshape(-1)]
        if self.embedding.positions is not None:
            x = x + self.embedding.positions[...][positions.reshape(-1)]
        stacked = {kind: {n: p[...] for n, p in parameters(block).items()} for kind, block in self.blocks.items()}
        for layer, (kind, window) in enumerate(layer_kinds(c)):
            row = block_layers(c)[kind].index(layer)
            weights = fuse({name: w[row] for name, w in stacked[kind].items()})
            kept = {name: a[row] for name, a in (state or {}).items()} if kind == "moe" else {}
            x, _, _ = self.blocks[kind](weights, x, inputs, layer, kept, comm=comm, window=window)
        x = normalise(c, x, self.final_norm[...], _array(self.final_norm_bias))
        head = self.embedding.tokens[...].T if self.head is None else self.head[...]
        logits = jnp.dot(x, head, preferred_element_type=jnp.float32)[:, : c.vocab_size]
        if c.logit_softcap is not None:
            logits = c.logit_softcap * jnp.tanh(logits / c.logit_softcap)
        return logits.reshape(B, S, c.vocab_size)


def fuse(stored: Weights) -> dict[str, jax.Array]:
    """A block's parameters, or shards of them, by name → the weights that `Block` computes with.

    Heads are flattened and what shares its input lies side by side: `attention.qkv [D, (N + 2K)·H]`, `mlp.gate_up
    [D, 2F]` (`[D, F]` without a gate), `moe.gate_up [E, D, 2F]`, `attention.output [N·H, D]`; biases likewise. Leading
    dimensions are kept.
    """
    weights = dict(stored)
    for name in filter(weights.__contains__, (*FUSED["attention.qkv"], *FUSED["attention.qkv_bias"])):
        weights[name] = weights[name].reshape(*weights[name].shape[:-2], -1)
    if (output := weights.get("attention.output")) is not None:
        weights["attention.output"] = output.reshape(*output.shape[:-3], -1, output.shape[-1])
    for name, parts in FUSED.items():
        present = [weights.pop(part) for part in parts if part in weights]
        if present:
            weights[name] = jnp.concatenate(present, axis=-1)
    return weights


def _add_bias(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    return y if bias is None else y + bias


def _array(parameter: nnx.Param | None) -> jax.Array | None:
    return None if parameter is None else parameter[...]


def _residual_scale(config: ModelConfig) -> float:
    """GPT-2's depth scaling of the projections that write to the residual stream (Radford et al. 2019)."""
    return 1 / math.sqrt(2 * config.num_layers) if config.depth_scaled_init else 1.0
