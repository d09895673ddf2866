"""The communication points of the model, and their form on one device; parallel/comm.py has them on a mesh."""

from dataclasses import dataclass
from typing import Protocol

import jax
from jax.ad_checkpoint import checkpoint_name

from megajax import ops


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenPositions:
    """Where a device's tokens stand in their sequences."""

    index: jax.Array  # [B, S] int32, of each token
    document_starts: jax.Array | None = None  # [B, S] int32, the first index of its document; None: all are one
    chunks: jax.Array | None = None  # the first indices of the chunks that each device of `context` has, if they vary


class Comm(Protocol):
    """The points where the model may communicate, from one device's view.

    The residual stream is flat, `[T / tensor, D]`: between column and row layers a device holds all T tokens and its
    share of heads or MLP width; elsewhere it holds its own tokens only (sequence parallelism).
    """

    context_size: int
    token_shards: int  # devices that hold different tokens

    def column_linear(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """`x @ w`: `[T / tensor, D]` → `[T, F]`, F this device's share of heads or MLP width."""
        ...

    def row_linear(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """`x @ w`: `[T, F]` → `[T / tensor, D]`, summed over `tensor`."""
        ...

    def own_linear(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """`x @ w` of own tokens: `[T / tensor, D]` → `[T / tensor, R]`, such as a low-rank projection; `w` is whole."""
        ...

    def mlp(self, activation: str, x: jax.Array, w_up, bias: jax.Array | None, w_down) -> jax.Array:
        """A column layer with a bias or none, the activation and a row layer: `[T / tensor, D]` → `[T / tensor, D]`."""
        up = self.column_linear(x, w_up)
        up = checkpoint_name(up if bias is None else up + bias, "gate_up")
        return self.row_linear(ops.activate(activation, up), w_down)

    def experts(self, activation: str, x, experts, weights, w_up, w_down, capacity: int | None) -> jax.Array:
        """Tokens through their experts: `x [T / tensor, D]` → `[T / tensor, D]`.

        `experts` and `weights` `[T / tensor, k]` are those of the own tokens, `w_up [E, D, 2F]` and `w_down [E, F, D]`
        the experts that this device holds, or its share of them. No expert has more assignments than `capacity`.
        """
        ...

    def attend(
        self, q, k, v, positions: TokenPositions, *, window: int | None, softcap: float | None, sinks=None
    ) -> jax.Array:
        """Causal attention of `[B, S, N, H]` queries over the whole sequence; `sinks [N]` are of their heads."""
        ...

    def local_kv_heads(self, num_kv_heads: int) -> int:
        """How many of the model's KV heads this device works on."""
        ...

    def own_tokens(self, x: jax.Array) -> jax.Array:
        """`[T, ...]` → `[T / tensor, ...]`: the tokens whose residual stream this device holds."""
        ...

    def of_all_tokens[Arrays](self, x: Arrays) -> Arrays:
        """Arrays `[T / tensor, ...]` of own tokens → those of all tokens of a microbatch, in the devices' order."""
        ...

    def sum_over_tokens[Arrays](self, x: Arrays) -> Arrays:
        """Sum over the devices that hold different tokens of a microbatch; no gradient goes through."""
        ...

    def sum_over_sequence(self, x: jax.Array) -> jax.Array:
        """Sum over the devices that hold different tokens of the same sequences; no gradient goes through."""
        ...


class SingleDevice(Comm):
    """One device, where nothing communicates."""

    context_size = token_shards = 1

    def column_linear(self, x, w) -> jax.Array:
        return x @ w

    row_linear = own_linear = column_linear

    def experts(self, activation, x, experts, weights, w_up, w_down, capacity) -> jax.Array:
        arguments = activation, x, experts, weights, w_up, w_down, capacity
        return ops.apply_experts(*arguments, kernels=ops.ExpertKernels(), max_over_devices=lambda amax: amax)

    def attend(self, q, k, v, positions, *, window, softcap, sinks=None) -> jax.Array:
        settings = {"window": window, "softcap": softcap, "sinks": sinks, "implementation": "reference"}
        return ops.attention(q, k, v, document_starts=positions.document_starts, **settings)

    def local_kv_heads(self, num_kv_heads: int) -> int:
        return num_kv_heads

    def own_tokens[Arrays](self, x: Arrays) -> Arrays:
        return x

    of_all_tokens = sum_over_tokens = sum_over_sequence = own_tokens
