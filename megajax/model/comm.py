"""The communication of a layer, as one device sees it: on one device here, on a mesh in parallel/mesh_comm.py."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from megajax import ops
from megajax.errors import ConfigError
from megajax.ops import AttentionSettings, PackedDocuments
from megajax.ops.partial_attention import Ranges, Scores
from megajax.schema.fields import BATCH_AXES


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenPositions:
    """The positions of a device's tokens in their sequences."""

    index: jax.Array  # [B, S] int32, each token's index in its sequence
    documents: PackedDocuments | None = None  # [B, S], those of packed sequences; None: each sequence is one
    chunks: jax.Array | None = None  # first index of each chunk of each device of `context`, if they vary
    is_real: jax.Array | None = None  # [B, S], False for padding; None: there is none
    two_sided_ends: jax.Array | None = None  # [B, S] int32, `ops.two_sided_ends`; None: no token sees one after it
    group_size: jax.Array | None = None  # [] int32, of this device's group of `context`; None: all are one

    @property
    def document_starts(self) -> jax.Array | None:
        """[B, S] int32, the first index of each token's document; None: each sequence is one."""
        return None if self.documents is None else self.documents.starts

    @property
    def index_in_document(self) -> jax.Array:
        """[B, S] int32, each token's index in its document, or in its sequence if that is one."""
        return self.index if self.documents is None else self.index - self.documents.starts


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


class Comm:
    """The linear layers, attention and experts of a layer, and sums and exchanges between devices; here of one device.

    The residual stream is flat, `[T / tensor, D]`. Between column and row layers a device holds all T tokens and its
    share of heads or MLP width; elsewhere it holds only its own tokens (sequence parallelism).
    """

    token_axes: tuple[str, ...] = ()  # the mesh axes that divide the tokens of the residual stream

    linear_attention: ops.LinearAttentionImplementation = "reference"
    elementwise: ops.ElementwiseImplementation = "reference"  # of what has fused kernels
    few_tokens: ops.ElementwiseImplementation = "reference"  # of a recurrence of new tokens

    # Of generation: as many of a sequence's newest tokens may be replaced by a later step, None if nothing is kept; and
    # as many of the prompts' last tokens are replaced by the first step
    replaceable: int | None = None
    replaced_first: int = 0

    # On named mesh axes: a subclass for a mesh has these

    def size(self, axes: str | Sequence[str]) -> int:
        """The number of devices along these axes."""
        return 1

    def index(self, axis: str) -> jax.Array | int:
        """This device's index on an axis."""
        return 0

    def sum[Arrays](self, x: Arrays, axes: str | Sequence[str]) -> Arrays:
        """The sums of arrays over the devices along these axes."""
        return x

    def max[Arrays](self, x: Arrays, axes: str | Sequence[str]) -> Arrays:
        """The maxima over the devices along these axes."""
        return x

    def gather[Arrays](self, x: Arrays, axes: str | Sequence[str], dim: int = 0) -> Arrays:
        """`[n, ...]` → `[devices · n, ...]`: those of all devices along these axes, by `dim`."""
        return x

    def in_order[Arrays](self, x: Arrays, back: bool = False) -> Arrays:
        """Arrays `[B, S, ...]` of this device's tokens → of as many consecutive tokens of each sequence; or `back`.

        Device i of `context` then has the i-th part of each sequence. A sublayer that calls it declares IN_ORDER.
        """
        return x

    # What generation keeps between its steps, for a sublayer with a state

    def earlier(self) -> Any | None:
        """What this layer kept for the tokens before, as it gave it to `keep`; None for the first tokens."""
        return None

    def keep(self, state: Any) -> None:
        """Keep arrays `[B, ...]` for the tokens that follow; as often as `earlier` is called, once or never."""

    def of_prompt(self, compute: Callable[[], tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, jax.Array]:
        """What `compute` gives for the prompts: keys and values of an encoder's stream, kept for the new tokens."""
        return compute()

    # Linear layers

    def column_linear(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """`x @ w`: `[T / tensor, D]` → `[T, F]`, F this device's share of heads or MLP width."""
        return x @ w

    def row_linear(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """`x @ w`: `[T, F]` → `[T / tensor, D]`, summed over `tensor`."""
        return x @ w

    def replicated_linear(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """`x @ w` for own tokens, `w` replicated (a low-rank projection): `[T / tensor, D]` → `[T / tensor, R]`."""
        return x @ w

    def column_activation_row(self, activation: str, x: jax.Array, w_up, bias: jax.Array | None, w_down) -> jax.Array:
        """Column layer with an optional bias, activation and row layer: `[T / tensor, D]` → `[T / tensor, D]`."""
        up = self.column_linear(x, w_up)
        up = checkpoint_name(up if bias is None else up + bias, "gate_up")
        return self.row_linear(ops.activate(activation, up), w_down)

    def all_gather_tokens(self, x: jax.Array) -> jax.Array:
        """`[T / tensor, F]` → `[T, F]`: the tokens of all devices of `tensor`, differentiated."""
        return x

    # Experts and attention

    def experts(
        self, activation: str, x, experts, weights, matrices: ops.ExpertMatrices, capacity: int | None
    ) -> jax.Array:
        """The sum of each token's experts: `x [T / tensor, D]` → `[T / tensor, D]`.

        `experts` and `weights` `[T / tensor, k]` are those of own tokens. `matrices` are those of this device's
        experts, or its share of them. No expert has more assignments than `capacity`.
        """
        route = ops.SortedRoute.of(experts, matrices.num_experts, capacity)
        return ops.apply_experts(ops.ExpertMlp(activation), route, x, weights, matrices)

    @jax.named_scope("core_attention")
    def attend(
        self, q, k, v, positions: TokenPositions, settings: AttentionSettings
    ) -> tuple[jax.Array, jax.Array | None]:
        """Attention of queries `[B, S, N, H]` to the whole sequence.

        The second result bounds the largest score of each head over this device's real tokens, if it is wanted
        (`ops.partial_attention.largest_score`): `[N]` FP32, 0 for heads that another device has.
        """
        masks = {"documents": positions.documents, "is_real": positions.is_real}
        masks["two_sided_ends"] = positions.two_sided_ends
        return ops.attention(q, k, v, settings, implementation="reference", **masks)

    @jax.named_scope("core_attention")
    def attend_to(self, q, k, v, ranges: Ranges | None, scale: float | None) -> jax.Array:
        """Attention of queries `[B, S, N, H]` to another sequence's keys and values, this device's part of them.

        `ranges` [B, S] are of keys in the whole of that sequence, as in `ops.cross_attention`; None: all.
        """
        return ops.cross_attention(q, k, v, ranges, Scores(scale or q.shape[-1] ** -0.5, None, "reference"))

    def attend_latent(
        self, q, keys: LatentKeys, positions: TokenPositions, settings: AttentionSettings
    ) -> tuple[jax.Array, jax.Array | None]:
        """`attend` to keys and values that are computed from latents: `[B, S, N, H]` → `[B, S, N, W]`."""
        return self.attend(q, *keys.heads(self.column_linear), positions, settings)

    def recurrence(
        self, rule: Callable[..., Any], tokens: Sequence[jax.Array], state: Mapping[str, jax.Array | None]
    ) -> tuple[jax.Array, jax.Array]:
        """`rule(*tokens, **state)`, a linear recurrence: arrays `[B, S, heads, ...]` and states → (outputs, states)."""
        return rule(*tokens, **state)

    # What follows from these

    @property
    def sequence_axes(self) -> tuple[str, ...]:
        """Those of `token_axes` that divide a sequence."""
        return tuple(axis for axis in self.token_axes if axis not in BATCH_AXES)

    @property
    def token_shards(self) -> int:
        """The number of devices that hold different tokens."""
        return self.size(self.token_axes)

    def sequence_length(self, own: int) -> int:
        """The length of a sequence of which this device has `own` tokens."""
        return own * self.size([axis for axis in self.sequence_axes if axis != "tensor"])

    def local_heads(self, x: jax.Array) -> jax.Array:
        """`[N, ...]` or `[K, ...]` of all query or KV heads → the part of this device's heads."""
        devices = self.size("tensor")
        if devices == 1:
            return x
        heads = len(x)  # fewer KV heads than devices: several devices have the same one
        start = self.index("tensor") * heads // devices
        return lax.dynamic_slice_in_dim(x, start, max(1, heads // devices), 0)

    def padded_to_all_heads(self, x: jax.Array, num_heads: int) -> jax.Array:
        """Values of this device's query heads → those of all heads `[num_heads]`, 0 for heads of other devices."""
        if self.size("tensor") == 1:
            return x
        first = self.index("tensor") * len(x)
        return lax.dynamic_update_slice_in_dim(jnp.zeros(num_heads, x.dtype), x, first, 0)

    def mean_over_heads(self, x: jax.Array) -> jax.Array:
        """A mean over this device's heads → the mean over all heads, differentiated."""
        devices = self.size("tensor")
        return self.sum(x, "tensor") / devices if devices > 1 else x

    def local_tokens(self, x: jax.Array) -> jax.Array:
        """`[T, ...]` → `[T / tensor, ...]`: the tokens whose residual stream this device holds.

        Raises ConfigError if `tensor` does not divide them, as an encoder's of an extension.
        """
        devices = self.size("tensor")
        if devices == 1:
            return x
        if x.shape[0] % devices:
            problem = f"mesh.tensor={devices} does not divide the {x.shape[0]} positions of a microbatch on a device"
            raise ConfigError(
                f"{problem}: give the sequences another length, or set batch.num_microbatches or mesh.tensor."
            )
        own = x.shape[0] // devices
        return lax.dynamic_slice_in_dim(x, self.index("tensor") * own, own, 0)

    def gather_all_tokens[Arrays](self, x: Arrays) -> Arrays:
        """Arrays `[T / tensor, ...]` of own tokens → arrays of all tokens of a microbatch, in the devices' order."""
        return self.gather(x, self.token_axes)

    def sum_over_tokens[Arrays](self, x: Arrays) -> Arrays:
        """Sum over the devices that hold different tokens of a microbatch, not differentiated."""
        return self.sum(x, self.token_axes)
