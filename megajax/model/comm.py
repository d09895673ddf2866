"""The communication points of the model, on one device: all of them identities.

parallel/comm.py has the same points on a mesh; the model calls these and knows of no mesh.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from megajax import ops


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenPositions:
    """Where a device's tokens stand in their sequences."""

    index: jax.Array  # [B, S] int32, of each token
    document_starts: jax.Array | None = None  # [B, S] int32, the first index of its document; None: all are one
    chunks: jax.Array | None = None  # the first indices of the chunks that each device of `context` has, if they vary


class SingleDevice:
    """Communication points where nothing communicates.

    The residual stream is flat, `[T / tensor, D]`: between `enter` and `leave` a device holds all T tokens and its
    share of heads or MLP width; outside it holds its share of the tokens (sequence parallelism).
    """

    def __init__(self, attention: ops.Implementation = "reference", experts: ops.ExpertKernels | None = None):
        self.attention: ops.Implementation = attention
        self.expert_kernels = experts or ops.ExpertKernels()
        self.tensor_size = self.context_size = 1
        self.token_shards = 1  # devices that hold different tokens

    def enter(self, x: jax.Array) -> jax.Array:
        """`[T / tensor, D]` → `[T, D]`: all tokens of this device's sequences."""
        return x

    def leave(self, y: jax.Array) -> jax.Array:
        """`[T, D]` partial sums → `[T / tensor, D]`: summed over `tensor`, own tokens kept."""
        return y

    def column_linear(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """`enter(x) @ w`: `[T / tensor, D]` → `[T, F]`, F this device's share of heads or MLP width."""
        return x @ w

    def row_linear(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """`leave(x @ w)`: `[T, F]` → `[T / tensor, D]`."""
        return x @ w

    def own_linear(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """`x @ w` of own tokens: `[T / tensor, D]` → `[T / tensor, R]`, such as a low-rank projection; `w` is whole."""
        return x @ w

    def mlp(
        self, activation: str, x: jax.Array, w_up: jax.Array, bias: jax.Array | None, w_down: jax.Array
    ) -> jax.Array:
        """A column layer with a bias or none, the activation and a row layer: `[T / tensor, D]` → `[T / tensor, D]`."""
        up = self.column_linear(x, w_up)
        up = checkpoint_name(up if bias is None else up + bias, "gate_up")
        return self.row_linear(ops.activate(activation, up), w_down)

    def experts(
        self, activation: str, x: jax.Array, experts: jax.Array, weights: jax.Array, w_up, w_down, capacity: int | None
    ) -> jax.Array:
        """Tokens through their experts: `x [T / tensor, D]` → `[T / tensor, D]`.

        `experts` and `weights` `[T / tensor, k]` are those of the own tokens, `w_up [E, D, 2F]` and `w_down [E, F, D]`
        the experts that this device holds, or its share of them. No expert has more assignments than `capacity`.
        """
        arguments = (activation, x, experts, weights, w_up, w_down, capacity, self.expert_kernels)
        return ops.apply_experts(*arguments, self.max_over_devices)

    def local_kv_heads(self, num_kv_heads: int) -> int:
        """How many of the model's KV heads this device works on."""
        return num_kv_heads

    def own_tokens(self, x: jax.Array) -> jax.Array:
        """`[T, ...]` → `[T / tensor, ...]`: the tokens whose residual stream this device holds."""
        return x

    def attend(
        self,
        q,
        k,
        v,
        positions: TokenPositions,
        *,
        window: int | None,
        softcap: float | None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """Causal attention of `[B, S, N, H]` queries over the whole sequence; `sinks [N]` are of their heads."""
        return ops.attention(
            q,
            k,
            v,
            window=window,
            document_starts=positions.document_starts,
            softcap=softcap,
            sinks=sinks,
            implementation=self.attention,
        )

    def vocabulary_start(self, local_size: int) -> jax.Array | int:
        """The first vocabulary row that this device holds, of `local_size` rows a device."""
        return 0

    def max_over_tensor(self, x: jax.Array) -> jax.Array:
        return x

    def sum_over_tensor(self, x: jax.Array) -> jax.Array:
        return x

    def max_over_devices[Arrays](self, x: Arrays) -> Arrays:
        """The largest over all devices that share the model's tensors, of each array."""
        return x

    def sequence_ids(self, num_sequences: int) -> jax.Array:
        """The index of each of this device's sequences in the microbatch over all devices, `[B]`."""
        return jnp.arange(num_sequences)

    def sum_over_tokens[Arrays](self, x: Arrays) -> Arrays:
        """Sum over the devices that hold different tokens of a microbatch; no gradient goes through."""
        return x

    def of_all_tokens[Arrays](self, x: Arrays) -> Arrays:
        """Arrays `[T / tensor, ...]` of own tokens → those of all tokens of a microbatch, in the devices' order."""
        return x

    def sum_over_sequence(self, x: jax.Array) -> jax.Array:
        """Sum over the devices that hold different tokens of the same sequences; no gradient goes through."""
        return x
