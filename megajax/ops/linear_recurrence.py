"""What linear recurrences share: sequences in chunks, with documents, and the state before each chunk.

Within a chunk a recurrence is matmuls of tokens with tokens. From chunk to chunk a head's state [d, w] goes through a
linear map, so its final value is `transition @ initial + final`, where `final` has an initial state of zeros. Several
devices, each with consecutive tokens, combine these two.

Shape letters: B sequences, S tokens, n chunks of C tokens, N heads, d key width, w value width.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from megajax.ops import recurrent_kernel
from megajax.ops.mlp_activation import ElementwiseImplementation
from megajax.ops.numerics import wide

CHUNK = 64


class Recurrences(Protocol):
    """Kernels of the recurrences, as the module `ops.jla` has them."""

    @property
    def gated_delta_rule(self) -> Callable[..., tuple[jax.Array, jax.Array]]: ...
    @property
    def state_space(self) -> Callable[..., tuple[jax.Array, jax.Array]]: ...


LinearAttentionImplementation = Literal["jla", "reference"] | Recurrences
# (transition [B, N, d, d] or its diagonal [B, N, d], final state [B, N, d, w]) of a device's tokens → its initial state
StateBefore = Callable[[jax.Array, jax.Array], jax.Array]


# (queries, keys) of any tokens, by the last axis → those of the recurrence
Prepare = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


class ChunkMaps(NamedTuple):
    """The maps of the state from chunk to chunk: S → decay · S + keysᵀ (values − erased S)."""

    decay: jax.Array  # [n, B, N, d] or [n, B, N, 1]
    keys: jax.Array  # [n, B, N, C, d]
    values: jax.Array  # [n, B, N, C, w]
    erased: jax.Array | None  # [n, B, N, C, d]; None: nothing is taken out of the state but by its decay


class Documents(NamedTuple):
    """What a token of a chunk sees of its document, `[n, B, 1, C]` each, but for `same`."""

    same: jax.Array  # [n, B, 1, C, C], whether two tokens are in one document
    since_before: jax.Array  # whether the token's document began before the chunk
    until_end: jax.Array  # whether it goes on to the chunk's last token


class Decays(NamedTuple):
    """The factors by which tokens of a chunk see the state; 0 from another document. c is d, or 1 for all channels."""

    log: jax.Array  # [n, B, N, C, c], the tokens' logarithms
    visible: jax.Array  # [n, B, 1, C, C], whether token i sees token j
    between: jax.Array | None  # [n, B, N, C, C], from token j to token i; None: by channel
    from_before: jax.Array  # [n, B, N, C, c], from the state before the chunk
    to_end: jax.Array  # [n, B, N, C, c], to the chunk's last token

    @property
    def of_chunk(self) -> jax.Array:
        """`[n, B, N, c]`, of the state from before a chunk to its end."""
        return self.from_before[..., -1, :]

    def products(self, x: jax.Array, y: jax.Array, precision: lax.Precision) -> jax.Array:
        """x_i · y_j `[n, B, N, C, C]` of `[n, B, K, C, d]`, where y_j decays until token i."""
        group = self.log.shape[2] // x.shape[2]
        if self.between is not None:
            products = jnp.matmul(x, jnp.swapaxes(y, -1, -2), precision=precision)
            return self.between * jnp.repeat(products, group, axis=2)
        x, y = (jnp.repeat(a, group, axis=2) for a in (x, y))
        return jnp.where(self.visible, decayed_products(x, y, self.log, precision), 0)


def token_by_token(
    change: Callable[..., jax.Array],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    starts: jax.Array | None,
    initial: jax.Array | None,
    *others: jax.Array,
    count: jax.Array | None = None,
    prepare: Prepare | None = None,
    implementation: ElementwiseImplementation = "reference",
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The definition of a recurrence, by its tokens: S → a S + k changeᵀ and o = Sᵀ q, as `ops.gated_delta_rule`.

    `change(state, k, v, *others)` of one token `[B, N, ...]` sees the decayed state; `others` are `[B, S, N]`. The
    state is that after the first `count [B]` tokens of each sequence (None: after all). `prepare` is applied to each
    token's query and key. "pallas" reads and writes a state once where its kernel has these widths; it does not know
    documents, and `interpret` runs it on any device.
    """
    (B, _, N, w), d, dtype = v.shape, k.shape[-1], wide(v.dtype)
    decay = jnp.exp(log_decay.astype(dtype))
    initial = jnp.zeros((B, N, d, w), dtype) if initial is None else initial.astype(dtype)

    def token(state: jax.Array, *inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        q, k, v, decay, *others = (a.astype(dtype) for a in inputs)
        q, k = prepare(q, k) if prepare else (q, k)
        state = (decay[..., None] if log_decay.ndim == 4 else decay[..., None, None]) * state
        state = state + k[..., None] * change(state, k, v, *others)[..., None, :]
        return state, jnp.sum(state * q[..., None], axis=-2)

    if implementation == "pallas" and recurrent_kernel.fits(d, w):
        assert starts is None
        return recurrent_kernel.few_tokens(token, (q, k, v, decay, *others), initial, count, interpret=interpret)
    q, k = (jnp.repeat(a, N // a.shape[2], axis=2) for a in (q, k))
    if starts is not None:
        decay = jnp.where(jnp.expand_dims(starts, range(2, decay.ndim)), 0, decay)

    def step(states: tuple[jax.Array, ...], inputs: list[jax.Array]) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """The newest state and the one to keep, if they differ, go on by a token."""
        index, *inputs = inputs
        state, out = token(states[0], *inputs)
        if count is None:
            return (state,), out
        return (state, jnp.where((index < count)[:, None, None, None], state, states[1])), out

    tokens = [jnp.moveaxis(a, 1, 0) for a in (q, k, v, decay, *others)]
    carried = (initial,) if count is None else (initial, initial)
    states, out = lax.scan(step, carried, [jnp.arange(len(tokens[0])), *tokens])
    return jnp.moveaxis(out, 0, 1), states[-1]


def chunk_size(length: int) -> int:
    """The number of tokens in a chunk: CHUNK, or a smaller power of 2 for a short sequence."""
    return min(CHUNK, 1 << (length - 1).bit_length())


def to_chunks(x: jax.Array, size: int) -> jax.Array:
    """`[B, S, N, ...]` → `[n, B, N, C, ...]`; the last chunk is filled with zeros."""
    B, S, N, *rest = x.shape
    x = jnp.pad(x, [(0, 0), (0, -S % size), *[(0, 0)] * (x.ndim - 2)])
    return jnp.moveaxis(x.reshape(B, -1, size, N, *rest), (1, 3), (0, 2))


def from_chunks(x: jax.Array, length: int) -> jax.Array:
    """`[n, B, N, C, w]` → `[B, S, N, w]`."""
    n, B, N, C, w = x.shape
    return jnp.moveaxis(x, (0, 2), (1, 3)).reshape(B, n * C, N, w)[:, :length]


def documents(starts: jax.Array | None, shape: tuple[int, int], size: int) -> Documents:
    """`starts [B, S]` is True for the first token of each document; None: there is one."""
    if starts is None:
        starts = jnp.zeros(shape, bool)
    number = jnp.cumsum(to_chunks(starts[:, :, None].astype(jnp.int32), size), axis=-1)  # [n, B, 1, C]
    same = number[..., :, None] == number[..., None, :]
    return Documents(same, number == 0, number == number[..., -1:])


def by_channel(log_decay: jax.Array) -> jax.Array:
    """`[B, S, N, c]` of decays by channel, c = d, or by head, which have no last axis: c = 1."""
    return log_decay if log_decay.ndim == 4 else log_decay[..., None]


def decays(log_decay: jax.Array, seen: Documents) -> Decays:
    """The factors for the tokens' `log_decay [n, B, N, C, c]`."""
    total, index, between = jnp.cumsum(log_decay, axis=-2), jnp.arange(log_decay.shape[-2]), None
    visible = seen.same & (index[:, None] >= index)
    if total.shape[-1] == 1:
        between = jnp.exp(jnp.where(visible, total - jnp.swapaxes(total, -1, -2), -jnp.inf))
    from_before = jnp.where(seen.since_before[..., None], jnp.exp(total), 0)
    to_end = jnp.where(seen.until_end[..., None], jnp.exp(_sums_after(log_decay)), 0)
    return Decays(log_decay, visible, between, from_before, to_end)


def decayed_products(x: jax.Array, y: jax.Array, log_decay: jax.Array, precision: lax.Precision) -> jax.Array:
    """Σ_c x_ic y_jc exp(log_decay_{j+1,c} + … + log_decay_ic), `[n, ..., C, d]` each → `[n, ..., C, C]`, 0 for j > i.

    The second half of the tokens sees the first one by a matmul: y decays until their border, x from there. So no
    factor is more than 1, however strong the decays are, and none is a quotient. The halves are smaller problems.
    """
    if (C := x.shape[-2]) == 1:
        return jnp.sum(x * y, axis=-1, keepdims=True)
    halves = [(a[..., : C // 2, :], a[..., C // 2 :, :]) for a in (x, y, log_decay)]
    (_, second), (first, _), (until, since) = halves
    first, second = first * jnp.exp(_sums_after(until)), second * jnp.exp(jnp.cumsum(since, axis=-2))
    below = jnp.matmul(second, jnp.swapaxes(first, -1, -2), precision=precision)
    x, y, log_decay = (jnp.concatenate(pair) for pair in halves)
    upper, lower = jnp.split(decayed_products(x, y, log_decay, precision), 2)
    top = jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([below, lower], axis=-1)], axis=-2)


def _sums_after(x: jax.Array) -> jax.Array:
    """The sum of the later tokens' `x [..., C, c]` for each token."""
    later = jnp.pad(x[..., 1:, :], [*[(0, 0)] * (x.ndim - 2), (0, 1), (0, 0)])
    return lax.cumsum(later, axis=x.ndim - 2, reverse=True)


def states_before(
    maps: ChunkMaps, initial: jax.Array | None, state_before: StateBefore | None, precision: lax.Precision
) -> tuple[jax.Array, jax.Array]:
    """(the state before each chunk `[n, B, N, d, w]`, the final state `[B, N, d, w]`).

    With `state_before` the tokens are those of one device of several, and it gives their initial state.
    """
    _, B, N, _, d = maps.keys.shape
    zeros = jnp.zeros((B, N, d, maps.values.shape[-1]), maps.values.dtype)
    if state_before is not None:
        assert initial is None
        initial = state_before(*_transition(maps, zeros, precision))
    return _scan(maps, zeros if initial is None else initial.astype(zeros.dtype), precision)


def _transition(maps: ChunkMaps, zeros: jax.Array, precision: lax.Precision) -> tuple[jax.Array, jax.Array]:
    """(the transition of all chunks together, the final state after zeros)."""
    if maps.erased is None:
        _, final = _scan(maps, zeros, precision)
        return jnp.broadcast_to(jnp.prod(maps.decay, axis=0), zeros.shape[:-1]), final
    # The columns of the transition are the final states for those of an identity, without any values.
    d, w = zeros.shape[-2:]
    identity = jnp.broadcast_to(jnp.eye(d, dtype=zeros.dtype), (*zeros.shape[:-1], d))
    values = jnp.pad(maps.values, [*[(0, 0)] * 4, (0, d)])
    _, both = _scan(maps._replace(values=values), jnp.concatenate([zeros, identity], axis=-1), precision)
    return both[..., w:], both[..., :w]


def _scan(maps: ChunkMaps, initial: jax.Array, precision: lax.Precision) -> tuple[jax.Array, jax.Array]:
    def step(state: jax.Array, chunk: ChunkMaps) -> tuple[jax.Array, jax.Array]:
        values = chunk.values
        if chunk.erased is not None:
            values = values - jnp.matmul(chunk.erased, state, precision=precision)
        added = jnp.einsum("bncd,bncw->bndw", chunk.keys, values, precision=precision)
        return chunk.decay[..., None] * state + added, state

    final, states = lax.scan(step, initial, maps)
    return states, final


@jax.custom_vjp
def unit_lower_inverse(a: jax.Array) -> jax.Array:
    """(1 + a)⁻¹ of strictly lower triangular matrices `[..., C, C]`, by blocks; C is a power of 2.

    Each step is a block of forward substitution. Powers of `a` would need fewer steps, but they cancel.
    """
    C = a.shape[-1]
    if C > 16:
        half = C // 2
        first, second = unit_lower_inverse(jnp.stack([a[..., :half, :half], a[..., half:, half:]]))
        lower = -_exact(_exact(second, a[..., half:, :half]), first)
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        return jnp.concatenate([top, jnp.concatenate([lower, second], axis=-1)], axis=-2)
    inverse, size, index = jnp.broadcast_to(jnp.eye(C, dtype=a.dtype), a.shape), 1, jnp.arange(C)
    while size < C:  # from inverses of blocks of `size` to those of twice the size
        pair, block = index // (2 * size), index // size
        below = (pair[:, None] == pair) & (block[:, None] > block)
        inverse = inverse - _exact(_exact(inverse, jnp.where(below, a, 0)), inverse)
        size *= 2
    return inverse


def _inverse_gradient(inverse: jax.Array, cotangent: jax.Array) -> tuple[jax.Array]:
    transposed = jnp.swapaxes(inverse, -1, -2)
    return (-jnp.tril(_exact(_exact(transposed, cotangent), transposed), -1),)


def _inverse_forward(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse = unit_lower_inverse(a)
    return inverse, inverse


unit_lower_inverse.defvjp(_inverse_forward, _inverse_gradient)


def _exact(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)
