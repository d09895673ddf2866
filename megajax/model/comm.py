"""The communication points of the model, and their implementation on one device; parallel/comm.py has the mesh's."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from megajax import ops


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenPositions:
    """The positions of a device's tokens in their sequences."""

    index: jax.Array  # [B, S] int32, each token's index in its sequence
    document_starts: jax.Array | None = None  # [B, S] int32, first index of its document; None: one document
    chunks: jax.Array | None = None  # first index of each chunk of each device of `context`, if they vary
    is_real: jax.Array | None = None  # [B, S], False for padding; None: there is none


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentKeys:
    """Keys and values in the form of latent attention: a latent, and a rotated part that all heads share."""

    latent: jax.Array  # [T / tensor, R], normalised
    rotary: jax.Array  # [B, S, rotary width], rotated
    up: jax.Array  # weight [R, N·(nope + W)]: keys without positions of this device's heads, then their values
    nope: int = field(metadata={"static": True})  # width of a key's part without positions
    value: int = field(metadata={"static": True})  # width of a value, W

    def heads(self, column_linear: Callable[[jax.Array, jax.Array], jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Keys `[B, S, N, rotary + nope]` and values `[B, S, N, W]` of this device's heads."""
        B, S, rotary = self.rotary.shape
        up = checkpoint_name(column_linear(self.latent, self.up), "keys_values")
        N = up.shape[-1] // (self.nope + self.value)
        key, value = jnp.split(up, (N * self.nope,), axis=-1)
        shared = jnp.broadcast_to(self.rotary[:, :, None], (B, S, N, rotary))
        return jnp.concatenate([shared, key.reshape(B, S, N, -1)], axis=-1), value.reshape(B, S, N, -1)


class Comm(Protocol):
    """The points where the model may communicate, as one device sees them.

    The residual stream is flat, `[T / tensor, D]`. Between column and row layers a device holds all T tokens and its
    share of heads or MLP width; elsewhere it holds only its own tokens (sequence parallelism).
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
        """`x @ w` for own tokens, `w` replicated (a low-rank projection): `[T / tensor, D]` → `[T / tensor, R]`."""
        ...

    def mlp(self, activation: str, x: jax.Array, w_up, bias: jax.Array | None, w_down) -> jax.Array:
        """Column layer with an optional bias, activation and row layer: `[T / tensor, D]` → `[T / tensor, D]`."""
        up = self.column_linear(x, w_up)
        up = checkpoint_name(up if bias is None else up + bias, "gate_up")
        return self.row_linear(ops.activate(activation, up), w_down)

    def experts(
        self, activation: str, x, experts, weights, w_up, w_down, capacity: int | None, biases: ops.Biases | None = None
    ) -> jax.Array:
        """The sum of each token's experts: `x [T / tensor, D]` → `[T / tensor, D]`.

        `experts` and `weights` `[T / tensor, k]` are those of own tokens. `w_up [E, D, 2F]` and `w_down [E, F, D]` are
        this device's experts, or its share of them, and so are `biases`. No expert has more assignments than
        `capacity`.
        """
        ...

    def attend(
        self,
        q,
        k,
        v,
        positions: TokenPositions,
        *,
        window: int | None,
        softcap: float | None,
        scale: float | None = None,
        sinks=None,
        measured: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Causal attention of queries `[B, S, N, H]` to the whole sequence; `sinks [N]` are for the same heads.

        `scale` multiplies the scores; None: `H ** -0.5`. If `measured`, the second result bounds the largest score of
        each head over this device's real tokens (`ops.partial_attention.largest_score`), `[N]` FP32, 0 for heads that
        another device has; else None.
        """
        ...

    def attend_latent(
        self,
        q,
        keys: LatentKeys,
        positions: TokenPositions,
        *,
        window: int | None,
        softcap: float | None,
        scale: float,
        measured: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        """`attend` to keys and values that are computed from latents: `[B, S, N, H]` → `[B, S, N, W]`."""
        settings = {"window": window, "softcap": softcap, "scale": scale, "measured": measured}
        return self.attend(q, *keys.heads(self.column_linear), positions, **settings)

    def enter(self, x: jax.Array) -> jax.Array:
        """`[T / tensor, F]` → `[T, F]`: the tokens of all devices of `tensor`, differentiated."""
        ...

    def local_kv_heads(self, num_kv_heads: int) -> int:
        """The number of the model's KV heads on this device."""
        ...

    def sequence_length(self, own: int) -> int:
        """The length of a sequence of which this device has `own` tokens."""
        ...

    def own_heads(self, x: jax.Array) -> jax.Array:
        """`[N, ...]` or `[K, ...]` of all query or KV heads → the part of this device's heads."""
        ...

    def among_all_heads(self, x: jax.Array, num_heads: int) -> jax.Array:
        """Values of this device's query heads → those of all heads `[num_heads]`, 0 for heads of other devices."""
        ...

    def mean_over_heads(self, x: jax.Array) -> jax.Array:
        """A mean over this device's heads → the mean over all heads, differentiated."""
        ...

    def own_tokens(self, x: jax.Array) -> jax.Array:
        """`[T, ...]` → `[T / tensor, ...]`: the tokens whose residual stream this device holds."""
        ...

    def of_all_tokens[Arrays](self, x: Arrays) -> Arrays:
        """Arrays `[T / tensor, ...]` of own tokens → arrays of all tokens of a microbatch, in the devices' order."""
        ...

    def sum_over_tokens[Arrays](self, x: Arrays) -> Arrays:
        """Sum over the devices that hold different tokens of a microbatch, not differentiated."""
        ...

    def sum_over_sequence(self, x: jax.Array) -> jax.Array:
        """Sum over the devices that hold different tokens of the same sequences, not differentiated."""
        ...


class SingleDevice(Comm):
    """One device, without communication."""

    context_size = token_shards = 1

    def column_linear(self, x, w) -> jax.Array:
        return x @ w

    row_linear = own_linear = column_linear

    def experts(self, activation, x, experts, weights, w_up, w_down, capacity, biases=None) -> jax.Array:
        arguments = activation, x, experts, weights, w_up, w_down, capacity, biases
        return ops.apply_experts(*arguments, kernels=ops.ExpertKernels(), max_over_devices=lambda amax: amax)

    @jax.named_scope("core_attention")
    def attend(self, q, k, v, positions, *, window, softcap, scale=None, sinks=None, measured=False):
        settings = {"window": window, "softcap": softcap, "scale": scale, "sinks": sinks, "implementation": "reference"}
        settings |= {"document_starts": positions.document_starts, "is_real": positions.is_real}
        return ops.measured_attention(q, k, v, **settings, measured=measured)

    def among_all_heads(self, x, num_heads) -> jax.Array:
        return x

    def local_kv_heads(self, num_kv_heads: int) -> int:
        return num_kv_heads

    def sequence_length(self, own: int) -> int:
        return own

    def own_tokens[Arrays](self, x: Arrays) -> Arrays:
        return x

    enter = of_all_tokens = sum_over_tokens = sum_over_sequence = own_heads = mean_over_heads = own_tokens
