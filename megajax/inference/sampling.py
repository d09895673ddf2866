"""The choice of the next token."""

import math
from argparse import Namespace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from megajax.errors import InputError


class Sampling(NamedTuple):
    """Settings of the choice. As in transformers: temperature, then top-k, then top-p and min-p of what is left."""

    temperature: float = 0.8  # 0: the most likely token
    top_k: int = 0  # the number of most likely tokens that remain; 0: all
    top_p: float = 1.0  # the smallest set of most likely tokens with at least this probability remains
    min_p: float = 0.0  # tokens with at least this multiple of the largest probability remain

    def check(self) -> None:
        """Raises InputError, naming the command's option, for a value out of its range."""
        ranges = {"temperature": math.inf, "top_k": math.inf, "top_p": 1.0, "min_p": 1.0}
        for name, largest in ranges.items():
            value, option = getattr(self, name), name.replace("_", "-")
            if not (0 <= value <= largest and math.isfinite(value)):
                limit = "0 or more" if largest == math.inf else "0 to 1"
                raise InputError(
                    f"--{option}={value} is not a number of {limit}: give one such as {Sampling._field_defaults[name]}."
                )


DEFAULT = Sampling()


def chosen_sampling(options: Namespace) -> Sampling:
    """The sampling of a command's arguments (`console.add_sampling_arguments`), whose numbers are checked."""
    if options.tokens < 1:
        raise InputError(f"--tokens={options.tokens} is not a positive number: give at least 1.")
    if options.seed < 0:
        raise InputError(f"--seed={options.seed} is not a number of 0 or more: give one such as 0.")
    if "" in options.stop:
        raise InputError("--stop='' is in every text, so each would end at once: give a text, or leave it out.")
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.min_p)
    sampling.check()
    return sampling


def choose(logits_bv: jax.Array, sampling: Sampling, keys_b: jax.Array) -> jax.Array:
    """The next token of each sequence, `[B]` int32, from FP32 logits and a random key per sequence."""
    if sampling.temperature == 0:
        return jnp.argmax(logits_bv, axis=-1).astype(jnp.int32)
    logits = remaining(logits_bv / sampling.temperature, sampling)
    return jax.vmap(jax.random.categorical)(keys_b, logits).astype(jnp.int32)


def remaining(logits_bv: jax.Array, sampling: Sampling) -> jax.Array:
    """`logits` with -inf for the tokens that top-k, top-p (Holtzman et al. 2020) and min-p (Nguyen et al. 2024) remove.

    Tokens of equal probability are removed together or not at all.
    """
    if not sampling.top_k and sampling.top_p >= 1 and not sampling.min_p:
        return logits_bv
    ordered = -jnp.sort(-logits_bv, axis=-1)
    if sampling.top_k:
        ordered = jnp.where(jnp.arange(ordered.shape[-1]) < sampling.top_k, ordered, -jnp.inf)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    keep = (before < sampling.top_p) & (probabilities >= sampling.min_p * probabilities[:, :1]) & jnp.isfinite(ordered)
    smallest = jnp.min(jnp.where(keep.at[:, 0].set(True), ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits_bv >= smallest, logits_bv, -jnp.inf)


def distribution(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """The probabilities `[..., V]` with which `choose` takes each token: float32, of FP32 logits."""
    if sampling.temperature == 0:
        return jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=jnp.float32)
    remaining_logits = remaining(logits.reshape(-1, logits.shape[-1]) / sampling.temperature, sampling)
    return jax.nn.softmax(remaining_logits, axis=-1).reshape(logits.shape)


def verify(p: jax.Array, q: jax.Array, drafts: jax.Array, uniform: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Speculative sampling (Leviathan et al. 2023): (number of accepted drafts `[B]`, distribution of the next token).

    Drafts `[B, N]` were drawn from `q [B, N, V]`; `p [B, N + 1, V]` are the model's distributions at their positions
    and after them, `uniform [B, N]` random numbers from [0, 1). A draft is accepted with probability min(1, p / q), if
    those before it were. The next token `[B, V]` is from the normalised max(p - q, 0), or p after the last draft.
    """
    drawn = [jnp.take_along_axis(a, drafts[..., None], axis=2)[..., 0] for a in (p[:, :-1], q)]
    accepted = jnp.cumprod(uniform * drawn[1] < drawn[0], axis=1).sum(axis=1)
    rows = jnp.arange(len(p))
    model, draft = p[rows, accepted], jnp.pad(q, ((0, 0), (0, 1), (0, 0)))[rows, accepted]
    residual = jnp.maximum(model - draft, 0)
    residual = jnp.where(residual.sum(-1, keepdims=True) > 0, residual, model)  # p = q up to rounding
    return accepted, residual / residual.sum(-1, keepdims=True)
