"""The model's communication points in use: whole sequences, and new tokens with a cache of keys and values.

XLA partitions everything else; attention and experts are divided by hand, so that GPUs run the kernels of training.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax import ops
from megajax.kernel_choice import Kernels
from megajax.mesh import mesh_sizes
from megajax.model.comm import Comm, LatentKeys, TokenPositions
from megajax.ops import AttentionSettings
from megajax.sharding import EXPERT_AXES, SHARED_AXES, dividing


class LayerCache(NamedTuple):
    """Keys and values of one layer. Position p of a sequence is in slot p mod W.

    A window's layer keeps a window, and as many positions more as a step may write after its first.
    Latent attention keeps the rotary key and the latent of a token as one head's key; its values are the latents.
    """

    keys: jax.Array  # [B, K, W, H]
    values: jax.Array | None  # [B, K, W, H of the values]

    def attend(
        self, settings: AttentionSettings, q, k, v, positions, shared: int = 0, length: int = 0
    ) -> "tuple[jax.Array, LayerCache]":
        """Puts new tokens into the cache and attends to it: q [B, S, N, H], positions [B, S] -> ([B, S, N, ·], cache).

        Without values in the cache they are the keys from the element `shared` on. `length` is the model's context.
        """
        width = self.keys.shape[2]
        rows, slots = jnp.arange(len(q))[:, None], positions % width
        keys, values = self.keys.at[rows, :, slots].set(k), self.values
        if values is not None:
            values = values.at[rows, :, slots].set(v)
        stored = newest_position(jnp.arange(width), positions[:, -1])[:, None]
        of_query = jnp.maximum(positions, 0)[
            ..., None
        ]  # a token before the first is never read, but must not become NaN
        visible = (stored >= 0) & (stored <= of_query)
        if settings.window is not None:
            visible &= stored > of_query - settings.window
        read = keys[..., shared:] if values is None else values
        bias = None
        if settings.bias_table is not None:
            at = jnp.maximum(of_query[..., 0], 0), jnp.maximum(stored[:, 0], 0)
            bias = ops.bias_of_pairs(settings.bias_table, *at, settings.bias_distance, length)
        return ops.cached_attention(q, keys, read, visible, settings, bias), LayerCache(keys, values)


class WholeSequences(Comm):
    """Whole sequences of tokens, divided over the devices as far as their number allows it."""

    def __init__(self, mesh: Mesh, kernels: Kernels, max_length: int):
        self.mesh, self.kernels, self.sizes = mesh, kernels, mesh_sizes(mesh)
        self.max_length = max_length  # of the model's context
        self.linear_attention, self.few_tokens = kernels.linear_attention, kernels.elementwise  # in `recurrence`
        self.elementwise = kernels.elementwise if mesh.size == 1 else "reference"  # XLA does not partition kernels
        self.caches: list[Any] = []  # what the layers keep, in their order

    def keep(self, state: Any) -> None:
        self.caches.append(state)

    def token_positions(self, positions: jax.Array, two_sided_ends: jax.Array | None = None) -> TokenPositions:
        """The tokens at these positions `[B, S]`."""
        return TokenPositions(positions, two_sided_ends=two_sided_ends)

    def sequence_length(self, local: int) -> int:
        return self.max_length  # new tokens have the rotary positions of those in the cache

    def attend(self, q, k, v, positions, settings: AttentionSettings):
        def attention(q, k, v, sinks, bias_table, two_sided_ends):
            how = replace(settings, sinks=sinks, wants_largest=False, bias_table=bias_table)
            return ops.attention(q, k, v, how, implementation=self.kernels.attention, two_sided_ends=two_sided_ends)[0]

        rows, heads = self.sequences(len(q)), P(self.heads(k.shape[2]))
        whole = P(rows, None, *heads)
        others = settings.sinks, settings.bias_table, positions.two_sided_ends
        return self.divided(attention, (whole, whole, whole, heads, heads, P(rows)), whole)(q, k, v, *others), None

    def attend_to(self, q, k, v, ranges, scale) -> jax.Array:
        placed = P(self.sequences(len(q)), None, self.heads(k.shape[2]))
        return super().attend_to(q, self.place(k, placed), self.place(v, placed), ranges, scale)

    def experts(self, activation, x, experts, weights, matrices, capacity) -> jax.Array:
        over = dividing(matrices.num_experts, EXPERT_AXES, self.sizes)
        token_axes = tuple(axis for axis in SHARED_AXES if axis not in over)

        def apply(x, experts, weights, matrices):
            count = matrices.num_experts
            first = lax.axis_index(over) * count
            local_experts = jnp.where((experts >= first) & (experts < first + count), experts - first, count)
            mlp = ops.ExpertMlp(activation, self.kernels.experts)
            route = ops.SortedRoute.of(local_experts, count, capacity)
            y = ops.apply_experts(mlp, route, x, weights, matrices)
            return lax.psum(y.astype(jnp.float32), over).astype(y.dtype) if over else y

        tokens = P(dividing(len(x), token_axes, self.sizes))
        return self.divided(apply, (tokens, tokens, tokens, P(over)), tokens)(x, experts, weights, matrices)

    def recurrence(self, rule, tokens, state):
        rows, heads = self.sequences(len(tokens[0])), self.heads(tokens[0].shape[2])
        token, stored = P(rows, None, heads), P(rows, heads)
        of_state = {name: stored if name == "initial" else P(rows) for name in state}
        function = lambda tokens, state: rule(*tokens, **state)  # noqa: E731
        return self.divided(function, (token, of_state), (token, stored))(tokens, state)

    def divided(self, function, in_specs: Sequence[Any], out_specs):
        """`function` on each device's part of its arguments."""
        return jax.shard_map(function, mesh=self.mesh, in_specs=tuple(in_specs), out_specs=out_specs, check_vma=False)

    def sequences(self, count: int) -> tuple[str, ...]:
        """The axes that divide `count` sequences."""
        return dividing(count, SHARED_AXES, self.sizes)

    def heads(self, num_kv_heads: int) -> tuple[str, ...]:
        """The axes that divide the heads."""
        return dividing(num_kv_heads, ("tensor",), self.sizes)

    def token_spec(self, count: int) -> P:
        """The placement of the residual stream `[T, D]` of `count` sequences."""
        return P(self.sequences(count))

    def place(self, x: jax.Array, spec: P) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))


class Prefill(WholeSequences):
    """Whole prompts, padded at their end; `caches` has each layer's keys and values afterwards.

    `lengths [B]` are the prompts' lengths; the caches have as many `slots`, or those of a window for steps that write
    `new` tokens, more than one of them with drafts.
    """

    def __init__(self, mesh: Mesh, kernels: Kernels, max_length: int, lengths: jax.Array, slots: int, new: int):
        super().__init__(mesh, kernels, max_length)
        self.lengths, self.slots, self.new = lengths, slots, new
        self.replaceable = new if new > 1 else 0

    def token_positions(self, positions: jax.Array, two_sided_ends: jax.Array | None = None) -> TokenPositions:
        return TokenPositions(positions, is_real=positions < self.lengths[:, None], two_sided_ends=two_sided_ends)

    def attend(self, q, k, v, positions, settings: AttentionSettings):
        self.keep(LayerCache(self.cached(k, settings.window), self.cached(v, settings.window)))
        return super().attend(q, k, v, positions, settings)

    def attend_latent(self, q, keys: LatentKeys, positions, settings: AttentionSettings):
        self.keep(LayerCache(self.cached(_as_one_head(keys), settings.window), None))
        return super().attend(q, *keys.heads(self.column_linear), positions, settings)

    def of_prompt(self, compute):
        found = compute()
        self.keep(found)
        return found

    def cached(self, x: jax.Array, window: int | None) -> jax.Array:
        """Keys or values `[B, S, K, H]` of the prompts as the cache keeps them, `[B, K, W, H]`."""
        slots = jnp.arange(min(self.slots, window + self.new - 1) if window else self.slots)
        newest = newest_position(slots, self.lengths - 1)  # [B, W]; negative in slots that are still empty
        newest_tokens = jnp.take_along_axis(x, jnp.maximum(newest, 0)[:, :, None, None], axis=1)
        return self.place(newest_tokens.transpose(0, 2, 1, 3), P(self.sequences(len(x)), self.heads(x.shape[2])))


class Decode(WholeSequences):
    """New tokens of each sequence, at consecutive positions; `caches` of all layers are replaced by those with them.

    Tokens that the caches already have at these positions, or after them, are overwritten or not attended to.
    """

    def __init__(self, mesh: Mesh, kernels: Kernels, max_length: int, caches: Sequence[Any]):
        super().__init__(mesh, kernels, max_length)
        self.before = iter(caches)

    def earlier(self) -> Any:
        return next(self.before)

    def of_prompt(self, compute):
        found = self.earlier()
        self.keep(found)
        return found

    def token_spec(self, count: int) -> P:
        return P()  # so few tokens are on all devices, with a part of the weights on each

    def attend(self, q, k, v, positions, settings: AttentionSettings):
        cache = self.earlier()
        how, length = replace(settings, sinks=None, bias_table=None), self.max_length

        def attention(q, k, v, cache, index, sinks, bias_table):
            own = replace(how, sinks=sinks, bias_table=bias_table)
            return cache.attend(own, q, k, v, index, length=length)

        heads = self.heads(k.shape[2])
        rows = self.sequences(len(q))
        token, stored = P(rows, None, heads), P(rows, heads)
        specs = (token, token, token, stored, P(rows), P(heads), P(heads))
        of_heads = settings.sinks, settings.bias_table
        out, cache = self.divided(attention, specs, (token, stored))(q, k, v, cache, positions.index, *of_heads)
        self.keep(cache)
        return out, None

    def attend_latent(self, q, keys: LatentKeys, positions, settings: AttentionSettings):
        """The up-projection of the keys is applied to the queries, and that of the values to the output.

        So the cache is read as one head, and no key or value of an earlier token is computed again (DeepSeek-V2).
        """
        cache = self.earlier()
        N, (R, _) = q.shape[2], keys.up.shape
        up_keys, up_values = jnp.split(keys.up, (N * keys.nope,), axis=-1)
        rotary, nope = jnp.split(q, (q.shape[-1] - keys.nope,), axis=-1)
        absorbed = jnp.einsum("bsnh,rnh->bsnr", nope, up_keys.reshape(R, N, -1))
        q = jnp.concatenate([rotary, absorbed.astype(q.dtype)], axis=-1)
        shared = rotary.shape[-1]

        def attention(q, k, cache, index):
            return cache.attend(settings, q, k, None, index, shared=shared)

        token, stored = P(self.sequences(len(q)), None, self.heads(N)), P(self.sequences(len(q)))
        specs = (token, stored, stored, P(self.sequences(len(q))))
        arguments = q, _as_one_head(keys), cache, positions.index
        out, cache = self.divided(attention, specs, (token, stored))(*arguments)
        self.keep(cache)
        return jnp.einsum("bsnr,rnh->bsnh", out, up_values.reshape(R, N, -1)).astype(q.dtype), None


def _as_one_head(keys: LatentKeys) -> jax.Array:
    """The rotary keys and latents of whole sequences, side by side, `[B, S, 1, rotary + R]`."""
    return jnp.concatenate([keys.rotary, keys.latent.reshape(*keys.rotary.shape[:2], -1)], axis=-1)[:, :, None]


def newest_position(slots: jax.Array, last: jax.Array) -> jax.Array:
    """The newest position up to `last [B]` in each of all W `slots` of a cache, `[B, W]`; negative: none yet."""
    return last[:, None] - (last[:, None] - slots) % len(slots)
