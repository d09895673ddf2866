"""The contract of a context strategy, and the backward pass by hand of those that attend to a part of the keys at a
time.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from megajax import ops
from megajax.model.comm import LatentKeys, TokenPositions
from megajax.ops.partial_attention import Part, Scores, add_sinks, backward_with_sinks, largest_score

Keys = tuple[jax.Array, jax.Array]  # keys and values
Sent = tuple[jax.Array, jax.Array]  # the same, or latents and rotary keys
Attended = tuple[jax.Array, jax.Array | None]  # output, and `largest_score`: 0 for heads of other devices
Linear = Callable[[jax.Array, jax.Array], jax.Array]  # `Comm.column_linear`


@dataclass(frozen=True)
class ContextAttention:
    """Attention of one layer over `context`: here over one device, in a subclass over several.

    Each of them has some chunks of each sequence (token_order.py), and its queries see keys of the others.
    """

    devices: int  # of `context`
    scores: Scores
    window: int | None  # None: all tokens, before a token or on both sides
    zigzag: (
        bool  # whether each device has one early and one late chunk; with all tokens of a head, else consecutive ones
    )
    causal: bool = True

    def attend(
        self,
        q,
        k,
        v,
        positions: TokenPositions,
        sinks: jax.Array | None = None,
        bias_table: jax.Array | None = None,
        bias_distance: int = 0,
    ) -> Attended:
        """Attention of this device's queries: `q [B, S / context, N, H]`, `k` and `v` `[B, S / context, K, H]`.

        Values may have another width, except with "pallas". `sinks [N]` and the `bias_table` of
        `ops.AttentionSettings` are the same on all devices; each device returns its share of their gradients.
        """
        scores, masks = self.scores, {"documents": positions.documents, "is_real": positions.is_real}
        masks["two_sided_ends"] = positions.two_sided_ends
        of_scores = scores.softcap, scores.scale, sinks, scores.wants_largest
        settings = ops.AttentionSettings(self.window, *of_scores, self.causal, bias_table, bias_distance)
        return ops.attention(q, k, v, settings, implementation=scores.implementation, **masks)

    def attend_latent(self, linear: Linear, q, keys: LatentKeys, positions: TokenPositions) -> Attended:
        """The same, but the collectives send latents and rotary keys, not keys and values of all heads.

        A token of DeepSeek-V3 is then 576 numbers instead of 40,960. Each device applies the up-projection `keys.up`,
        an array, to the tokens of the others too, and once more in the backward pass: with 4096 tokens on a device this
        is an eighth of the time of their attention, and far less than the larger messages take.
        """
        raise NotImplementedError  # only with `ContextStrategy.sends_latents`


class ToParts(ContextAttention):
    """Attention to a part of the keys at a time; a subclass has both passes, each with the keys of all devices."""

    def attend(self, q, k, v, positions, sinks=None, bias_table=None, bias_distance=0) -> Attended:
        assert bias_table is None, f"{type(self).__name__} has no bias of the scores"
        return _attend(self.scores, self.forward, self.backward, q, (k, v), positions, sinks)

    def attend_latent(self, linear, q, keys, positions) -> Attended:
        passes = (partial(run, linear) for run in (self.forward_latent, self.backward_latent))
        return _attend(self.scores, *passes, q, keys, positions, None)

    def forward(self, q, kv: Keys, positions: TokenPositions) -> Part:
        raise NotImplementedError

    def backward(self, q, kv: Keys, positions: TokenPositions, whole: Part, dout) -> tuple[jax.Array, Keys]:
        """The gradients of `q` and `kv`, in any dtype; `whole` is the result of `forward`, with sinks."""
        raise NotImplementedError

    def forward_latent(self, linear: Linear, q, keys: LatentKeys, positions: TokenPositions) -> Part:
        raise NotImplementedError

    def backward_latent(
        self, linear: Linear, q, keys: LatentKeys, positions: TokenPositions, whole: Part, dout
    ) -> tuple[jax.Array, LatentKeys]:
        raise NotImplementedError


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend(scores: Scores, forward: Callable, backward: Callable, q, keys: Any, positions: TokenPositions, sinks):
    return _attend_forward(scores, forward, backward, q, keys, positions, sinks)[0]


def _attend_forward(scores, forward, backward, q, keys, positions, sinks):
    out, lse = forward(q, keys, positions)
    largest = largest_score(scores, lse, positions.is_real)
    if sinks is not None:
        out, lse = add_sinks((out, lse), sinks)
    # The remat policies that keep attention keep these residuals by name.
    out, lse = (checkpoint_name(a, "attention") for a in (out.astype(q.dtype), lse))
    return (out, largest), (q, keys, positions, sinks, out, lse)


def _attend_backward(scores, forward, backward, saved, gradients):
    q, keys, positions, sinks, *whole = saved
    run = partial(backward, q, keys, positions)
    gradients, dsinks = backward_with_sinks(run, sinks, tuple(whole), gradients[0])
    dq, dkeys = jax.tree.map(lambda g, a: g.astype(a.dtype), gradients, (q, keys))
    return dq, dkeys, None, dsinks


_attend.defvjp(_attend_forward, _attend_backward)


def heads_of(linear: Linear, keys: LatentKeys, sent: Sent, up: jax.Array) -> Keys:
    """Keys and values of the tokens of some device, from what it `sent`."""
    latent, rotary = sent
    return replace(keys, latent=latent, rotary=rotary, up=up).heads(linear)


def latent_gradients(keys: LatentKeys, sent: Sent, up: jax.Array) -> LatentKeys:
    """The gradients of `keys`, in their dtypes."""
    latent, rotary = sent
    return jax.tree.map(lambda g, a: g.astype(a.dtype), replace(keys, latent=latent, rotary=rotary, up=up), keys)
