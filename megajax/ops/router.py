"""The router of a mixture of experts, in float32 (float64 for float64 inputs): scores, choice, weights, balance.

Top-k routing is Shazeer et al. 2017, the balancing loss Fedus et al. 2021 (Switch Transformers), the z-loss Zoph et al.
2022 (ST-MoE), groups and loss-free balancing by a bias DeepSeek-V3 (2024). Whatever counts assignments takes
counts that the caller has summed over all devices.
"""

import math
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from megajax.ops.numerics import wide

ScoreFunction = Literal["softmax", "sigmoid"]
PRIORITY_BITS = 10


def router_logits(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x [T, D]` times `weight [D, E]`, in float32 on GPUs too."""
    dtype = wide(x.dtype)
    return jnp.dot(x.astype(dtype), weight.astype(dtype), precision=lax.Precision.HIGHEST)


def jitter(x: jax.Array, amount: float, key: jax.Array, token_ids: jax.Array) -> jax.Array:
    """`x [T, D]` times numbers around 1, up to `amount` away; they follow from `key` and each token's id alone."""

    def factors(token_id: jax.Array) -> jax.Array:
        token_key = jax.random.fold_in(key, token_id)
        return jax.random.uniform(token_key, x.shape[1:], jnp.float32, 1 - amount, 1 + amount)

    return (x.astype(wide(x.dtype)) * jax.vmap(factors)(token_ids)).astype(x.dtype)


def scores(logits: jax.Array, function: ScoreFunction) -> jax.Array:
    """`[T, E]` → `[T, E]`: each expert's score, for the choice and for balancing."""
    return jax.nn.softmax(logits, axis=-1) if function == "softmax" else jax.nn.sigmoid(logits)


def choose(values: jax.Array, k: int, num_groups: int = 1, groups_per_token: int = 1) -> jax.Array:
    """`values [T, E]` → the k experts of each token, best first, `[T, k]` int32; the lower index where two are equal.

    With groups, experts are chosen from the `groups_per_token` groups whose best k / groups_per_token add up to most.
    """
    values = lax.stop_gradient(values)
    if num_groups > 1:
        tokens, experts = values.shape
        in_groups = values.reshape(tokens, num_groups, -1)
        best = lax.top_k(in_groups, max(k // groups_per_token, 1))[0].sum(axis=-1)
        groups = lax.top_k(best, groups_per_token)[1]
        allowed = (groups[..., None] == jnp.arange(num_groups)).any(axis=1)
        values = jnp.where(allowed[..., None], in_groups, -jnp.inf).reshape(tokens, experts)
    return lax.top_k(values, k)[1].astype(jnp.int32)


def balanced_choice(token_ids: jax.Array, k: int, num_experts: int) -> jax.Array:
    """Experts in turn, `[T, k]` int32: the same number of tokens for each, for benchmarks."""
    first = (token_ids.astype(jnp.uint32) * k)[:, None]
    return ((first + jnp.arange(k, dtype=jnp.uint32)) % num_experts).astype(jnp.int32)


def of_chosen(values: jax.Array, experts: jax.Array) -> jax.Array:
    """Of `values [T, E]` those of the chosen `experts [T, k]`; a masked sum, whose gradient is no scatter."""
    chosen = experts[..., None] == jnp.arange(values.shape[-1])
    return jnp.sum(jnp.where(chosen, values[:, None, :], 0), axis=-1)


def routing_weights(
    logits: jax.Array,
    experts: jax.Array,
    function: ScoreFunction,
    pre_softmax: bool = False,
    normalise: bool = True,
    scaling_factor: float = 1.0,
) -> jax.Array:
    """What each token's chosen experts count, `[T, k]`.

    softmax: over all experts if `pre_softmax`, else over the chosen. `normalise` divides by the sum of the chosen.
    """
    if function == "softmax" and not pre_softmax:
        weights = jax.nn.softmax(of_chosen(logits, experts), axis=-1)
    else:
        weights = of_chosen(scores(logits, function), experts)
        if normalise and experts.shape[-1] > 1:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return weights * scaling_factor


def expert_capacity(factor: float, tokens: int, k: int, num_experts: int) -> int:
    """How many of `tokens` tokens' assignments an expert takes: `factor` times its even share, rounded up."""
    return math.ceil(factor * tokens * k / num_experts)


def rounded(priorities: jax.Array) -> jax.Array:
    """The nearest numbers with PRIORITY_BITS bits of mantissa, so that priorities that should be equal are equal.

    The last bits of a routing weight depend on the mesh and on the row of the matmul, also for identical tokens, whose
    weights are equal in exact arithmetic. Compared as they are, another mesh drops other tokens. Rounding cannot remove
    this completely: identical tokens still differ where the exact value is within the error (about 1e-6 of it) of the
    middle between two rounded numbers. That holds for a few of 1,000 groups of identical tokens, and matters only for
    an expert that takes part of such a group. Rounding is to nearest because 1/k and 1, the weights of equal or single
    scores, are rounded numbers; with bits cut off instead, they would lie on a border.

    Scores are not rounded for `choose`: those of different experts are close only by chance. There rounding moves the
    border between two choices and makes a difference between meshes no rarer, but chooses experts with lower scores.
    """
    return lax.reduce_precision(priorities, jnp.finfo(priorities.dtype).nexp, PRIORITY_BITS)


def within_capacity(
    experts: jax.Array, priorities: jax.Array, token_ids: jax.Array, num_experts: int, capacity: int, of_all_tokens
) -> jax.Array:
    """Which of these tokens' assignments `[T, k]` are among the first `capacity` of their experts; bool.

    The first are those with the largest `priorities [T, k]`, rounded to PRIORITY_BITS bits; among equal ones those with
    the lowest `token_ids [T]`. This is over the tokens of all devices, whose arrays `of_all_tokens` concatenates.
    Routing weights as priorities drop as Megatron-LM's policy `probs` does, equal priorities as its `position` does,
    which look at the tokens of one device only.

    Every device sorts all assignments: three numbers each, of all devices' T·k. A token's experts must differ.
    """
    # One value for the sort and for the comparison: XLA might compute it twice, and round it differently.
    priorities = lax.optimization_barrier(rounded(lax.stop_gradient(priorities)))
    all_experts, all_priorities, all_ids = of_all_tokens((experts, priorities, token_ids))
    ids = jnp.repeat(all_ids, experts.shape[1])
    _, negated, ids = lax.sort((all_experts.reshape(-1), -all_priorities.reshape(-1), ids), num_keys=3)
    counts = count(all_experts, num_experts)
    # The last that each expert takes, `[E]`; nobody asks for that of an expert without assignments.
    last = jnp.cumsum(counts) - counts + jnp.minimum(counts, capacity) - 1
    least, last_id = -negated[last][experts], ids[last][experts]
    return (priorities > least) | ((priorities == least) & (token_ids[:, None] <= last_id))


def count(experts: jax.Array, num_experts: int) -> jax.Array:
    """How many assignments each expert has, `[E]` int32."""
    return (experts[..., None] == jnp.arange(num_experts)).sum(axis=(0, 1), dtype=jnp.int32)


def count_by_sequence(experts: jax.Array, sequences: jax.Array, num_sequences: int, num_experts: int) -> jax.Array:
    """The same for each sequence, `[B, E]` float32; `sequences [T]` says which one a token is of."""
    chosen = (experts[..., None] == jnp.arange(num_experts)).any(axis=1).astype(jnp.float32)
    member = (sequences == jnp.arange(num_sequences)[:, None]).astype(jnp.float32)
    return jnp.dot(member, chosen, precision=lax.Precision.HIGHEST)


def balance_loss(logits: jax.Array, counts: jax.Array, function: ScoreFunction, k: int, tokens: jax.Array | int):
    """Σ over these tokens of E / (k · tokens) · Σ_e counts_e · p_e: `logits [T, E]` → a number.

    p are the scores divided by their sum, `counts` (`[E]`, or `[T, E]` for each token's sequence) the assignments among
    `tokens` tokens. The mean over those is 1 when balanced. Counts have no gradient.
    """
    probabilities = scores(logits, function)
    probabilities = probabilities / probabilities.sum(axis=-1, keepdims=True)
    fractions = lax.stop_gradient(counts) * (logits.shape[-1] / (k * tokens))
    return jnp.sum(probabilities * fractions)


def z_loss(logits: jax.Array) -> jax.Array:
    """Σ over these tokens of the squared log-normaliser, which keeps logits small."""
    return jnp.sum(jnp.square(jax.nn.logsumexp(logits, axis=-1)))


def entropy(logits: jax.Array, function: ScoreFunction) -> jax.Array:
    """Σ over these tokens of the entropy of their scores, in nats; without gradient."""
    probabilities = scores(lax.stop_gradient(logits), function)
    probabilities = probabilities / probabilities.sum(axis=-1, keepdims=True)
    return -jnp.sum(jax.scipy.special.xlogy(probabilities, probabilities))


def sinkhorn(logits: jax.Array, tokens: int, sum_over_tokens, iterations: int = 20) -> jax.Array:
    """Scores `[T, E]` scaled until every token and every expert has its even share (Clark et al. 2022).

    `sum_over_tokens` adds `[E]` over all devices, which together have `tokens` tokens. Without gradient.
    """
    cost = jax.nn.softmax(lax.stop_gradient(logits), axis=-1)
    experts, multiply = logits.shape[-1], partial(jnp.dot, precision=lax.Precision.HIGHEST)

    def scale(_, by_expert: jax.Array) -> jax.Array:
        by_token = 1 / (tokens * multiply(cost, by_expert) + 1e-8)
        return 1 / (experts * (sum_over_tokens(multiply(by_token, cost))) + 1e-8)

    by_expert = lax.fori_loop(0, iterations, scale, jnp.ones(experts, cost.dtype))
    return cost * by_expert


def updated_bias(bias: jax.Array, counts: jax.Array, rate: float) -> jax.Array:
    """`bias [..., E]` a step of `rate` nearer to balance, by the assignments `counts [..., E]` of a whole batch.

    Loss-free balancing (Wang et al. 2024, DeepSeek-V3): up for experts with less than the mean, down for those with
    more.
    """
    counts = counts.astype(jnp.float32)
    return bias + rate * jnp.sign(counts.mean(axis=-1, keepdims=True) - counts)
