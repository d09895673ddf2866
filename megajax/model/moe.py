"""Mixture of experts."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from megajax import ops
from megajax.config import ModelConfig
from megajax.layout.kinds import is_gated
from megajax.layout.sublayers import EVERYTHING
from megajax.model.comm import Comm
from megajax.model.parameters import declare
from megajax.model.sublayer import (
    LayerContext,
    Metrics,
    State,
    Sublayer,
    Weights,
    add_bias,
    declare_norm,
    normalise,
    residual_scale,
)


class MoE(Sublayer):
    """Mixture of experts with the norm before it and an optional shared expert: `[T, D]` → `[T, D]`."""

    NAME = "moe"
    SUPPORTS = EVERYTHING
    HAS_EXPERTS = True
    FUSED = {
        "gate_up": ("gate", "up"),
        "gate_up_bias": ("gate_bias", "up_bias"),
        "shared_gate_up": ("shared_gate", "shared_up"),
    }
    LINEAR = ("gate_up", "down", "shared_gate_up", "shared_down")
    SAVED = ("gate_up", "routing", "dispatched", "output")
    METRICS = ("aux_loss", "router_z_loss", "router_entropy", "expert_counts", "dropped_tokens")
    LOSSES = ("aux_loss", "router_z_loss")
    READS_IS_REAL_LAYER = True  # a router of zeros would send all tokens to the same experts

    def __init__(self, config: ModelConfig):
        D, E, F = config.hidden_size, config.num_experts, config.expert_ffn_hidden_size
        assert E is not None and F is not None
        shared, scale = config.shared_expert_ffn_hidden_size, residual_scale(config)
        gated = is_gated(config)
        self.config = config
        self.norm, self.norm_bias = declare_norm(config, config.norm_placement != "after")
        self.router = declare((D, E), ("embed", "router"), muon=False)
        self.router_bias = declare((E,), ("router",), "bias") if config.router.logit_bias else None
        self.gate = declare((E, D, F), ("experts", "embed", "expert_mlp")) if gated else None
        self.up = declare((E, D, F), ("experts", "embed", "expert_mlp"))
        self.down = declare((E, F, D), ("experts", "expert_mlp", "embed"), scale=scale)
        biased = config.mlp_bias
        self.gate_bias = declare((E, F), ("experts", "expert_mlp"), "bias") if gated and biased else None
        self.up_bias = declare((E, F), ("experts", "expert_mlp"), "bias") if biased else None
        self.down_bias = declare((E, D), ("experts", "residual"), "bias") if biased else None
        self.shared_gate = declare((D, shared), ("embed", "mlp")) if gated and shared else None
        self.shared_up = declare((D, shared), ("embed", "mlp")) if shared else None
        self.shared_down = declare((shared, D), ("mlp", "embed"), scale=scale) if shared else None
        self.shared_router = declare((D,), ("embed",), muon=False) if config.shared_expert_gate else None

    @jax.named_scope("moe")
    def apply(self, w: Weights, x: jax.Array, ctx: LayerContext) -> tuple[jax.Array, Metrics]:
        comm = ctx.comm

        def compute(w: Weights, x: jax.Array):
            h = normalise(self.config, x, w.get("norm"), w.get("norm_bias"))
            experts, weights, metrics = self.route(w, h, ctx)
            biases = ops.Biases(w["gate_up_bias"], w["down_bias"]) if self.config.mlp_bias else None
            matrices = ops.ExpertMatrices(w["gate_up"], w["down"], biases)
            capacity = self.capacity(len(x) * comm.token_shards)
            y = comm.experts(self.config.activation, h, experts, weights, matrices, capacity)
            return self.add_shared(w, h, y, comm), metrics

        if "norms" in ctx.recompute:
            kept = jax.checkpoint_policies.save_only_these_names("gate_up", "routing", "dispatched")
            compute = jax.checkpoint(compute, prevent_cse=False, policy=kept)
        y, metrics = compute(w, x)
        return checkpoint_name(y, "output"), metrics

    @jax.named_scope("router")
    def route(self, w: Weights, h: jax.Array, ctx: LayerContext):
        """`h [T / tensor, D]` → (experts and their weights, both `[T / tensor, k]`; this device's metrics)."""
        c, r, k = self.config, self.config.router, self.config.experts_per_token
        assert c.num_experts is not None
        comm, inputs, state = ctx.comm, ctx.inputs, ctx.state
        training, real = inputs.has_metrics, inputs.real
        tokens = ctx.num_tokens(len(h))
        if inputs.jitter_key is not None:
            h = ops.router.jitter(h, r.jitter, jax.random.fold_in(inputs.jitter_key, ctx.layer), inputs.token_ids)
        logits = add_bias(ops.router.router_logits(h, w["router"], comm.elementwise), w.get("router_bias"))
        logits = checkpoint_name(logits, "routing")
        if r.force_balance:
            experts = ops.router.balanced_choice(inputs.token_ids, k, c.num_experts)
        elif r.sinkhorn and training:
            balanced = ops.router.sinkhorn(logits, tokens, comm.sum_over_tokens, real and real.is_real)
            experts = ops.router.choose(balanced, k)
        else:
            bias = state.get("expert_bias")
            values = ops.router.scores(logits, r.score_function)
            biased = values if bias is None else values + bias
            experts = ops.router.choose(biased, k, r.num_groups, r.groups_per_token, r.group_score)
        experts = checkpoint_name(experts, "routing")
        weights = ops.router.routing_weights(
            logits, experts, r.score_function, r.pre_softmax, r.normalise, r.scaling_factor
        )
        if real is not None:  # padding is sent to no expert
            experts = checkpoint_name(jnp.where(real.is_real[:, None], experts, c.num_experts), "routing")
        metrics = self.metrics(logits, experts, ctx, tokens) if training else {}
        if r.capacity_factor is not None:
            kept = self.within_capacity(experts, weights, ctx)
            experts = checkpoint_name(jnp.where(kept, experts, c.num_experts), "routing")
            if training:
                dropped = ~kept if real is None else real.is_real[:, None] & ~kept
                metrics["dropped_tokens"] = jnp.sum(dropped, dtype=jnp.int32)
        if "is_real_layer" in state:
            experts = checkpoint_name(jnp.where(state["is_real_layer"], experts, c.num_experts), "routing")
        return experts, weights, metrics

    def within_capacity(self, experts, weights, ctx: LayerContext) -> jax.Array:
        """Whether each assignment `[T / tensor, k]` is within its expert's capacity for the microbatch's real tokens.

        The others are dropped, and the weights of the remaining ones do not change. Losses and counts include dropped
        assignments; so do Megatron-LM's losses.
        """
        r, k, E = self.config.router, self.config.experts_per_token, self.config.num_experts
        comm, inputs = ctx.comm, ctx.inputs
        capacity: Any = self.capacity(len(experts) * comm.token_shards)
        assert E is not None and r.capacity_factor is not None
        if inputs.real is not None:
            of_real = ops.router.expert_capacity(r.capacity_factor, inputs.real.num_tokens, k, E)
            capacity = jnp.minimum(capacity, of_real)
        priorities = weights if r.drop_policy == "probability" else jnp.zeros_like(weights)
        return ops.router.within_capacity(experts, priorities, inputs.token_ids, E, capacity, comm.gather_all_tokens)

    def capacity(self, tokens: int) -> int | None:
        """The largest number of an expert's assignments in a microbatch of `tokens` tokens; None: no limit."""
        c, factor = self.config, self.config.router.capacity_factor
        if factor is None:
            return None
        assert c.num_experts is not None
        return ops.router.expert_capacity(factor, tokens, c.experts_per_token, c.num_experts)

    def metrics(self, logits, experts, ctx: LayerContext, tokens) -> dict[str, jax.Array]:
        """Assignments `[E]`, and this device's shares of the router's entropy and losses, means over all `tokens`."""
        r, k, E = self.config.router, self.config.experts_per_token, logits.shape[1]
        comm, (B, S), real = ctx.comm, ctx.inputs.positions.shape, ctx.inputs.real
        is_real = real and real.is_real
        counts, entropy = ops.router.count(experts, E), ops.router.entropy(logits, r.score_function, is_real)
        out = {"expert_counts": counts, "router_entropy": entropy / tokens}
        if r.counts_others:
            experts = ops.router.choose(ops.router.scores(logits, r.score_function), k)
            experts = experts if real is None else jnp.where(real.is_real[:, None], experts, E)
            counts = ops.router.count(experts, E)
        if r.global_loss > 0:
            total = comm.sum_over_tokens(counts).astype(jnp.float32)
            loss = ops.router.balance_loss(logits, total, r.score_function, k, tokens, is_real)
            out["aux_loss"] = r.global_loss / tokens * loss
        if r.sequence_loss > 0:
            sequences = comm.local_tokens(jnp.repeat(jnp.arange(B), S))
            totals = comm.sum(ops.router.count_by_sequence(experts, sequences, B, E), comm.sequence_axes)
            length: Any = comm.sequence_length(S)
            if real is not None:  # a sequence's weight in the mean does not depend on its length
                length = real.lengths[:, None]
                totals = totals * (tokens / (real.num_sequences * length))
                length = length[sequences]
            loss = ops.router.balance_loss(logits, totals[sequences], r.score_function, k, length, is_real)
            out["aux_loss"] = out.get("aux_loss", 0) + r.sequence_loss / tokens * loss
        if r.z_loss > 0:
            out["router_z_loss"] = r.z_loss / tokens * ops.router.z_loss(logits, is_real)
        return out

    def add_shared(self, w: Weights, h: jax.Array, y: jax.Array, comm: Comm) -> jax.Array:
        """`y` plus the output of the shared expert, which processes every token."""
        if not self.config.shared_expert_ffn_hidden_size:
            return y
        shared = comm.column_activation_row(self.config.activation, h, w["shared_gate_up"], None, w["shared_down"])
        if self.config.shared_expert_gate:
            gate = jax.nn.sigmoid((h @ w["shared_router"]).astype(jnp.float32))
            shared = (shared * gate[:, None]).astype(shared.dtype)
        return y + shared

    def linear_layers(self) -> tuple[str, ...]:
        shared = bool(self.config.shared_expert_ffn_hidden_size)
        return tuple(name for name in self.LINEAR if shared or not name.startswith("shared_"))

    def used_last(self) -> str:
        return "down"

    def losses(self) -> tuple[str, ...]:
        r = self.config.router
        are_on = r.global_loss > 0 or r.sequence_loss > 0, r.z_loss > 0
        return tuple(name for name, is_on in zip(self.LOSSES, are_on, strict=True) if is_on)

    def layer_state(self) -> dict[str, jax.ShapeDtypeStruct]:
        """`expert_bias [E]`, for load balancing without a loss (Wang et al. 2024), if the router has one."""
        c = self.config
        return {"expert_bias": jax.ShapeDtypeStruct((c.num_experts,), jnp.float32)} if c.router.expert_bias else {}

    def updated_state(self, state: State, metrics: State) -> dict[str, jax.Array]:
        rate = self.config.router.bias_update_rate
        return {n: ops.router.updated_bias(bias, metrics["expert_counts"], rate) for n, bias in state.items()}
