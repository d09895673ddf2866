"""What sublayers with a state share: consecutive tokens, those before a device's, and what generation keeps."""

import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from megajax import ops
from megajax.model.comm import Comm
from megajax.model.sublayer import LayerContext, Metrics, Sublayer, Weights, normalise
from megajax.options.remat import ATTENTION

DECAYS, STEPS = (1.0, 16.0), (1e-3, 0.1)  # the ranges of the initial A and softplus of its bias, as in Mamba-2
Kept = dict[str, Any]  # arrays [B, ...] by name, or several of them
Channels = tuple[jax.Array, slice]  # consecutive channels of an array [B, S, X]
Rule = Callable[..., tuple[jax.Array, jax.Array]]  # an op of queries, keys, values and rates → (outputs, states)


class RecurrentTokens:
    """This device's tokens as a recurrence sees them: consecutive in each sequence, in their documents.

    `kept` has the arrays from which the tokens that follow go on (`ContinuedTokens`).
    """

    def __init__(self, ctx: LayerContext):
        self.comm: Comm = ctx.comm
        tokens = ctx.inputs.token_positions
        self.position, self.is_real = self.comm.in_order((tokens.index_in_document, tokens.is_real))  # [B, S]
        self.starts = None if tokens.document_starts is None else self.position == 0
        self.kept = Kept()

    def joined(self, x: Channels, *rates: jax.Array) -> tuple[Any, ...]:
        """The convolution's inputs and the rates `[B, S, ...]` → `[B, L, ...]`: these tokens' and some before them."""
        (array, channels), self.dtype = x, x[0].dtype
        array, *numbers = self.comm.in_order((array, *rates))
        if count := self.comm.replaceable:
            self.kept["position"] = self.state_end
            self.kept["rates"] = tuple(rows(a, self.state_end, count) for a in numbers)
        return (array, channels), *numbers

    @cached_property
    def state_end(self) -> jax.Array:
        """The number of the prompts' tokens in the state that is kept, `[B]`."""
        assert self.is_real is not None
        return jnp.maximum(jnp.sum(self.is_real, axis=1, dtype=jnp.int32) - self.comm.replaced_first, 0)

    def convolved(
        self, x: Channels, widths: Sequence[int], weight: jax.Array, bias: jax.Array | None = None
    ) -> list[jax.Array]:
        """`ops.short_convolution` of x, the channels one after the other: `[B, L, width]` each."""
        (array, channels), count = x, len(weight) - 1
        inputs, starts = array[..., channels], [0, *accumulate(widths)]
        if self.comm.replaceable is not None:
            self.kept["window"] = rows(inputs, self.state_end - count, count + self.comm.replaceable)
        before = self._window(inputs, count)

        def part(start: int, end: int) -> jax.Array:
            earlier, added = (None if a is None else a[..., start:end] for a in (before, bias))
            how = channels.start + start, self.comm.elementwise
            return ops.short_convolution(array, weight[:, start:end], self.position, earlier, added, *how)

        return [part(start, end) for start, end in pairwise(starts)]

    def where_real(self, x: jax.Array) -> jax.Array:
        """x `[B, L, ...]`, and 0 for padding."""
        return x if self.is_real is None else jnp.where(self.is_real.reshape(*x.shape[:2], *[1] * (x.ndim - 2)), x, 0)

    def recur(
        self, rule: Rule, definition: Rule, *arguments: jax.Array, prepare: ops.Prepare | None = None
    ) -> jax.Array:
        """A recurrence of `prepare(q, k)`, v and rates `[B, L, heads, ...]` by its op: outputs `[B, L, N, w]`.

        Its FP32 matmuls have full precision in a step in FP32, else that of the device's fast ones.
        """
        precision = jax.lax.Precision.HIGHEST if self.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
        before = self._state_before if self.comm.size("context") > 1 else None
        how = {"state_before": before, "precision": precision, "implementation": self.comm.linear_attention}
        arguments = (*prepare(*arguments[:2]), *arguments[2:]) if prepare else arguments
        apply = partial(rule, starts=self.starts, **how)
        out, state = self.comm.recurrence(apply, arguments, {})
        if self.comm.replaced_first:  # the last tokens do not change the state without their keys and decays
            q, k, v, decay, *others = arguments
            in_state = jnp.arange(k.shape[1]) < self.state_end[:, None]
            k, decay = (jnp.where(in_state.reshape(*in_state.shape, *[1] * (a.ndim - 2)), a, 0) for a in (k, decay))
            _, state = self.comm.recurrence(apply, (q, k, v, decay, *others), {})
        if self.comm.replaceable is not None:
            self.kept["state"] = state
        return out

    def new(self, x: jax.Array) -> jax.Array:
        """Of the tokens `[B, L, ...]` those that the layer got, `[B, S, ...]`."""
        return x

    def _window(self, x: jax.Array, count: int) -> jax.Array | None:
        """The last `count` tokens of the device before this one."""
        if self.comm.size("context") == 1:
            return None
        index, ends = self.comm.index("context"), self.comm.gather(x[None, :, -count:], "context")
        return jnp.where(index == 0, 0, ends[jnp.maximum(index, 1) - 1])

    def _state_before(self, transition: jax.Array, final: jax.Array) -> jax.Array:
        """Every device's map applied to the state before it, as far as to this device."""
        everyone: Any = self.comm.gather((transition[None], final[None]), "context")
        index, state = self.comm.index("context"), jnp.zeros_like(final)
        for device, (own, end) in enumerate(zip(*everyone, strict=True)):
            if own.ndim == final.ndim:
                after = jnp.matmul(own, state, precision=jax.lax.Precision.HIGHEST) + end
            else:
                after = own[..., None] * state + end
            state = jnp.where(device < index, after, state)
        return state


class ContinuedTokens(RecurrentTokens):
    """New tokens of generation, after those of which `earlier` was kept.

    A step may replace the newest tokens before it: drafts that were not accepted. So with drafts `state` is the one
    before `position [B]`, and `rates` (arrays `[B, R, ...]`) and `window` have the inputs of R tokens from there on;
    `window` also has those before them that the convolution sees. A step computes these tokens again, up to the first
    that is replaced, then the new ones, and goes on to the state R tokens before their end. It reads and writes a state
    once.
    """

    def __init__(self, ctx: LayerContext, earlier: Kept):
        super().__init__(ctx)
        self.earlier, self.first = earlier, self.position[:, 0]  # [B], the first new position
        self.replaceable = earlier["rates"][0].shape[1] if "rates" in earlier else 0
        if self.replaceable:
            self.start = earlier["position"]
            self.position = self.start[:, None] + jnp.arange(self.position.shape[1] + self.replaceable)

    def joined(self, x: Channels, *rates: jax.Array) -> tuple[Any, ...]:
        window, new = self.earlier["window"], x[0][..., x[1]]
        count = window.shape[1] - self.replaceable
        if self.replaceable:
            both = self._after(window, new, self.start - count)
            rates = tuple(map(partial(self._after, start=self.start), self.earlier["rates"], rates))
            self.kept = {
                "position": self.start + self.state_end,
                "rates": tuple(rows(a, self.state_end, self.replaceable) for a in rates),
                "window": rows(both, self.state_end, count + self.replaceable),
            }
        else:
            both = jnp.concatenate([window, new], axis=1)
            self.kept = {"window": both[:, -count:]}
        self.before = both[:, :count]
        return (both[:, count:], slice(0, both.shape[2])), *rates

    @cached_property
    def state_end(self) -> jax.Array:
        """The number of tokens from `start` on that go into the state, `[B]`."""
        return jnp.maximum(self.first + self.position.shape[1] - 2 * self.replaceable - self.start, 0)

    def convolved(self, x, widths, weight, bias=None) -> list[jax.Array]:
        y = ops.short_convolution(x[0], weight, self.position, self.before, bias)
        return jnp.split(y, [*accumulate(widths)][:-1], axis=-1)

    def recur(
        self, rule: Rule, definition: Rule, *arguments: jax.Array, prepare: ops.Prepare | None = None
    ) -> jax.Array:
        state = {"initial": self.earlier["state"], "count": self.state_end if self.replaceable else None}
        apply = partial(definition, prepare=prepare, implementation=self.comm.few_tokens)
        out, self.kept["state"] = self.comm.recurrence(apply, arguments, state)
        return out

    def new(self, x: jax.Array) -> jax.Array:
        return rows(x, self.first - self.start, x.shape[1] - self.replaceable) if self.replaceable else x

    def _after(self, earlier: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
        """The tokens from the position `start [B]` on: `earlier [B, E, ...]` up to `first`, then the new ones."""
        both = jnp.concatenate([earlier, new], axis=1)
        position = start[:, None] + jnp.arange(both.shape[1])
        from_new = earlier.shape[1] + jnp.minimum(position - self.first[:, None], new.shape[1] - 1)
        index = jnp.where(position < self.first[:, None], jnp.arange(both.shape[1]), from_new)
        return jnp.take_along_axis(both, index.reshape(*index.shape, *[1] * (both.ndim - 2)), axis=1)


def recurrent_tokens(ctx: LayerContext, earlier: Kept | None) -> RecurrentTokens:
    """The tokens of a layer, after those of which generation kept `earlier` (`Comm.earlier`)."""
    return RecurrentTokens(ctx) if earlier is None else ContinuedTokens(ctx, earlier)


def rows(x: jax.Array, first: jax.Array, count: int) -> jax.Array:
    """`count` tokens of x `[B, L, ...]` from `first [B]` on; zeros before the first and after the last token."""
    index = first[:, None] + jnp.arange(count)
    inside = (index >= 0) & (index < x.shape[1])
    index, inside = (a.reshape(*a.shape, *[1] * (x.ndim - 2)) for a in (index, inside))
    return jnp.where(inside, jnp.take_along_axis(x, jnp.clip(index, 0, x.shape[1] - 1), axis=1), 0)


class Recurrent(Sublayer):
    """Projections, a convolution and a recurrence over tokens, then a gate and a norm: `[T, D]` → `[T, D]`."""

    IN_ORDER = True
    LINEAR = ("projections", "output")
    SAVED = ("projections", "rates", ATTENTION, "output")
    # The weight of all heads' rates. They are small, and computed for a device's own tokens before these are sent.
    RATES: ClassVar[str] = "rates"

    def apply(self, w: Weights, x: jax.Array, ctx: LayerContext) -> tuple[jax.Array, Metrics]:
        """Projections → convolution → recurrence → gate and norm → output."""
        comm = ctx.comm
        with jax.named_scope(self.NAME):
            projected, rates = self.project(w, x, ctx)
            # The recurrence keeps its inputs only: within chunks it has many times as many numbers.
            out, kept = jax.checkpoint(partial(self.mix, ctx))(w, projected, rates, comm.earlier())
            comm.keep(kept)
            out = checkpoint_name(out, ATTENTION)
            y = comm.row_linear(self.gated(comm, w, out, projected, rates), w["output"])
            return checkpoint_name(y, "output"), {}

    def project(self, w: Weights, x: jax.Array, ctx: LayerContext) -> tuple[jax.Array, jax.Array]:
        """`[T / tensor, D]` → (the projections `[T, F]`, all heads' rates `[T, numbers]`)."""

        def compute(x, norm, norm_bias, projections, small):
            h = normalise(self.config, x, norm, norm_bias)
            return ctx.comm.column_linear(h, projections), h @ small.reshape(len(small), -1)

        compute = jax.checkpoint(compute, prevent_cse=False) if "norms" in ctx.recompute else compute
        projected, rates = compute(x, w.get("norm"), w.get("norm_bias"), w["projections"], w[self.RATES])
        return checkpoint_name(projected, "projections"), checkpoint_name(ctx.comm.all_gather_tokens(rates), "rates")

    def mix(
        self, ctx: LayerContext, w: Weights, projected: jax.Array, rates: jax.Array, earlier: Kept | None
    ) -> tuple[jax.Array, Kept]:
        """Outputs of `project` → (the recurrence's output `[T, N·w]`, what generation keeps)."""
        raise NotImplementedError

    def gated(self, comm: Comm, w: Weights, out: jax.Array, projected: jax.Array, rates: jax.Array) -> jax.Array:
        """The norm of `out [T, N·w]`, times its gates."""
        raise NotImplementedError


def initial_convolution(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Uniform as in PyTorch: the mean square of the output is a third of the input's."""
    return jax.random.uniform(key, shape, minval=-(shape[0] ** -0.5), maxval=shape[0] ** -0.5)


def initial_decay_rate(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The logarithm of a uniform A."""
    return jnp.log(jax.random.uniform(key, shape, minval=DECAYS[0], maxval=DECAYS[1]))


def initial_decay_bias(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse softplus of steps between the limits, uniform in their logarithms."""
    low, high = map(math.log, STEPS)
    step = jnp.exp(jax.random.uniform(key, shape, minval=low, maxval=high))
    return step + jnp.log(-jnp.expm1(-step))
