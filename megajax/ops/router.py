"""The router of a mixture of experts, in float32 (float64 for float64 inputs): scores, choice, weights, balance.

Top-k routing is Shazeer et al. 2017, the balancing loss Fedus et al. 2021 (Switch Transformers), the z-loss Zoph et al.
2022 (ST-MoE), groups and loss-free balancing by a bias DeepSeek-V3 (2024). Arguments named `counts` are sums over all
devices. `is_real [T]` is False for padding, which adds nothing to sums over tokens; None: there is none.
"""

import math
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from megajax.ops.barriers import not_repeated
from megajax.ops.mlp_activation import ElementwiseImplementation
from megajax.ops.numerics import wide

ScoreFunction = Literal["softmax", "sigmoid"]
GroupScore = Literal["sum", "max"]
PRIORITY_BITS = 10


def router_logits(
    x: jax.Array, weight: jax.Array, implementation: ElementwiseImplementation = "reference"
) -> jax.Array:
    """`x [T, D]` times `weight [D, E]`, in float32 on GPUs too; with "pallas" x in BF16 is not made wider."""
    dtype = wide(x.dtype)
    if x.dtype == jnp.bfloat16 and implementation == "pallas":
        return _narrow_times_wide(x, weight.astype(dtype))
    return jnp.dot(x.astype(dtype), weight.astype(dtype), precision=lax.Precision.HIGHEST)


@jax.custom_vjp
def _narrow_times_wide(x: jax.Array, weight: jax.Array) -> jax.Array:
    """BF16 `x [T, D]` times FP32 `weight [D, E]` with BF16 matrix units: FP32 products, FP32 sums.

    The sum of three BF16 matrices is the weight, and a product of two BF16 numbers is exact in FP32. On an H100 this
    takes a quarter of the time of a product of FP32 matrices, which has no matrix units.
    """
    return _sum_of_parts(_matmul(x, jnp.concatenate(_parts(weight), axis=1)))


def _narrow_forward(x, weight):
    return _narrow_times_wide(x, weight), (x, weight)


def _narrow_backward(kept, d):
    x, weight = kept
    of_weight = _sum_of_parts(_matmul(x.T, jnp.concatenate(_parts(d), axis=1)))
    # x's gradient is BF16: products below 2^-16 of the largest do not count.
    (d, less), (w, small) = _parts(d)[:2], _parts(weight)[:2]
    of_x = _matmul(jnp.concatenate((less, d, d), axis=1), jnp.concatenate((w, small, w), axis=1).T)
    return of_x.astype(x.dtype), of_weight


_narrow_times_wide.defvjp(_narrow_forward, _narrow_backward)


def _parts(x: jax.Array) -> list[jax.Array]:
    """Three BF16 arrays whose sum is the FP32 array x, the largest first."""
    parts = []
    for _ in range(3):
        rounded = lax.reduce_precision(x, 8, 7)  # XLA would leave out a conversion there and back
        parts.append(rounded.astype(jnp.bfloat16))
        x = x - rounded
    return parts


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _sum_of_parts(x: jax.Array) -> jax.Array:
    """`[·, 3 E]` → `[·, E]`, the smallest first."""
    large, middle, small = jnp.split(x, 3, axis=1)
    return large + (middle + small)


def jitter(x: jax.Array, amount: float, key: jax.Array, token_ids: jax.Array) -> jax.Array:
    """`x [T, D]` times factors in 1 ± `amount`, which depend only on `key` and each token's id."""

    def factors(token_id: jax.Array) -> jax.Array:
        token_key = jax.random.fold_in(key, token_id)
        return jax.random.uniform(token_key, x.shape[1:], jnp.float32, 1 - amount, 1 + amount)

    return (x.astype(wide(x.dtype)) * jax.vmap(factors)(token_ids)).astype(x.dtype)


def scores(logits: jax.Array, function: ScoreFunction) -> jax.Array:
    """`[T, E]` → `[T, E]`: the scores of the experts, for the choice and for balancing."""
    return jax.nn.softmax(logits, axis=-1) if function == "softmax" else jax.nn.sigmoid(logits)


def choose(
    values: jax.Array, k: int, num_groups: int = 1, groups_per_token: int = 1, group_score: GroupScore = "sum"
) -> jax.Array:
    """`values [T, E]` → the k experts of each token, best first, `[T, k]` int32; of equal values the lower index.

    With groups, experts are chosen from the `groups_per_token` groups with the largest scores: the sum of a group's
    best k / groups_per_token values (DeepSeek-V3), or its largest value (DeepSeek-V2).
    """
    values = lax.stop_gradient(values)
    if num_groups > 1:
        tokens, experts = values.shape
        in_groups = values.reshape(tokens, num_groups, -1)
        counted = 1 if group_score == "max" else max(k // groups_per_token, 1)
        best = lax.top_k(in_groups, counted)[0].sum(axis=-1)
        groups = lax.top_k(best, groups_per_token)[1]
        allowed = (groups[..., None] == jnp.arange(num_groups)).any(axis=1)
        values = jnp.where(allowed[..., None], in_groups, -jnp.inf).reshape(tokens, experts)
    return lax.top_k(values, k)[1].astype(jnp.int32)


def balanced_choice(token_ids: jax.Array, k: int, num_experts: int) -> jax.Array:
    """Experts in turn, `[T, k]` int32: the same number of tokens for each, for benchmarks."""
    first = (token_ids.astype(jnp.uint32) * k)[:, None]
    return ((first + jnp.arange(k, dtype=jnp.uint32)) % num_experts).astype(jnp.int32)


def select_chosen(values: jax.Array, experts: jax.Array) -> jax.Array:
    """The chosen `experts [T, k]` of `values [T, E]`, `[T, k]`; a masked sum, so the gradient needs no scatter."""
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
    """The weights of each token's chosen experts, `[T, k]`.

    softmax: over all experts if `pre_softmax`, else over the chosen ones. `normalise` divides by the chosen ones' sum.
    """
    if function == "softmax" and not pre_softmax:
        weights = jax.nn.softmax(select_chosen(logits, experts), axis=-1)
    else:
        weights = select_chosen(scores(logits, function), experts)
        if normalise and experts.shape[-1] > 1:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return weights * scaling_factor


def expert_capacity(factor: float, tokens: Any, k: int, num_experts: int) -> Any:
    """The largest number of assignments of an expert for `tokens` tokens: `factor` times the even share, rounded up.

    `tokens` is an int or an int32 array. A millionth above an integer is a rounding error and is not rounded up.
    """
    share = tokens * (factor * k / num_experts) * (1 - 2**-20)
    return math.ceil(share) if isinstance(tokens, int) else jnp.ceil(share).astype(jnp.int32)


def rounded(priorities: jax.Array) -> jax.Array:
    """The nearest numbers with PRIORITY_BITS bits of mantissa, which makes the priorities of identical tokens equal.

    The last bits of a routing weight depend on the mesh and on the row of the matmul, even for identical tokens.
    Without rounding, another mesh would drop other tokens. Rounding does not remove this completely: identical tokens
    still differ if the exact value is within the error (about 1e-6 of it) of the middle between two rounded numbers.
    This happens for a few of 1,000 groups of identical tokens, and matters only if an expert takes part of such a
    group. Rounding is to nearest, because 1/k and 1, the weights of equal or single scores, are rounded numbers;
    truncation would put them on a border.

    `choose` does not round scores: those of different experts are close only by chance. Rounding would move the border
    between two choices, not make differences between meshes rarer, and choose experts with lower scores.
    """
    return lax.reduce_precision(priorities, jnp.finfo(priorities.dtype).nexp, PRIORITY_BITS)


def within_capacity(
    experts: jax.Array,
    priorities: jax.Array,
    token_ids: jax.Array,
    num_experts: int,
    capacity: int | jax.Array,
    gather_all_tokens,
) -> jax.Array:
    """Whether each assignment `[T, k]` of these tokens is among the first `capacity` of its expert; bool.

    For assignments to no expert (E), which take no capacity, the result is not defined.
    The order is by decreasing `priorities [T, k]`, rounded to PRIORITY_BITS bits, then by increasing `token_ids [T]`,
    over the tokens of all devices, whose arrays `gather_all_tokens` concatenates. Routing weights as priorities are
    Megatron-LM's policy `probs`, equal priorities its policy `position`, but Megatron-LM looks at one device's tokens.

    Each device sorts the T·k assignments of all devices, three numbers each. A token's experts must differ.
    """
    # The barrier makes the sort and the comparison use one value: XLA might compute it twice, with different rounding.
    priorities = not_repeated(rounded(lax.stop_gradient(priorities)))
    all_experts, all_priorities, all_ids = gather_all_tokens((experts, priorities, token_ids))
    ids = jnp.repeat(all_ids, experts.shape[1])
    _, negated, ids = lax.sort((all_experts.reshape(-1), -all_priorities.reshape(-1), ids), num_keys=3)
    counts = count(all_experts, num_experts)
    # The last assignment within each expert's capacity, `[E]`; not used for experts without assignments.
    last = jnp.cumsum(counts) - counts + jnp.minimum(counts, capacity) - 1
    least, last_id = -negated[last][experts], ids[last][experts]
    return (priorities > least) | ((priorities == least) & (token_ids[:, None] <= last_id))


def count(experts: jax.Array, num_experts: int) -> jax.Array:
    """The number of assignments of each expert, `[E]` int32."""
    return (experts[..., None] == jnp.arange(num_experts)).sum(axis=(0, 1), dtype=jnp.int32)


def count_by_sequence(experts: jax.Array, sequences: jax.Array, num_sequences: int, num_experts: int) -> jax.Array:
    """`count` for each sequence, `[B, E]` float32; `sequences [T]` is the sequence of each token."""
    chosen = (experts[..., None] == jnp.arange(num_experts)).any(axis=1).astype(jnp.float32)
    member = (sequences == jnp.arange(num_sequences)[:, None]).astype(jnp.float32)
    return jnp.dot(member, chosen, precision=lax.Precision.HIGHEST)


def _sum_of_real(values: jax.Array, is_real: jax.Array | None) -> jax.Array:
    """The sum of `values [T, ...]`; those of padding, where `is_real [T]` is False, do not count."""
    if is_real is not None:
        values = jnp.where(is_real.reshape(-1, *[1] * (values.ndim - 1)), values, 0)
    return jnp.sum(values)


def balance_loss(
    logits: jax.Array,
    counts: jax.Array,
    function: ScoreFunction,
    k: int,
    tokens: jax.Array | int,
    is_real: jax.Array | None = None,
) -> jax.Array:
    """Σ over these tokens of E / (k · tokens) · Σ_e counts_e · p_e: `logits [T, E]` → a number.

    p are the scores divided by their sum; `counts` (`[E]`, or `[T, E]` for each token's sequence) are the numbers of
    assignments of `tokens` tokens. The loss per token is 1 if balanced. Counts have no gradient.
    """
    probabilities = scores(logits, function)
    probabilities = probabilities / probabilities.sum(axis=-1, keepdims=True)
    fractions = lax.stop_gradient(counts) * (logits.shape[-1] / (k * tokens))
    return _sum_of_real(probabilities * fractions, is_real)


def z_loss(logits: jax.Array, is_real: jax.Array | None = None) -> jax.Array:
    """Σ over these tokens of the squared log-normaliser, which keeps logits small."""
    return _sum_of_real(jnp.square(jax.nn.logsumexp(logits, axis=-1)), is_real)


def entropy(logits: jax.Array, function: ScoreFunction, is_real: jax.Array | None = None) -> jax.Array:
    """Σ over these tokens of the entropy of their scores, in nats; without gradient."""
    probabilities = scores(lax.stop_gradient(logits), function)
    probabilities = probabilities / probabilities.sum(axis=-1, keepdims=True)
    return -_sum_of_real(jax.scipy.special.xlogy(probabilities, probabilities), is_real)


def sinkhorn(
    logits: jax.Array,
    tokens: jax.Array | int,
    sum_over_tokens,
    is_real: jax.Array | None = None,
    iterations: int = 20,
) -> jax.Array:
    """Scores `[T, E]` scaled until all tokens and all experts have equal sums (Clark et al. 2022).

    `sum_over_tokens` adds `[E]` over all devices, which have `tokens` real tokens in total; padding has scores of 0.
    Without gradient.
    """
    cost = jax.nn.softmax(lax.stop_gradient(logits), axis=-1)
    cost = cost if is_real is None else jnp.where(is_real[:, None], cost, 0)
    experts, multiply = logits.shape[-1], partial(jnp.dot, precision=lax.Precision.HIGHEST)

    def scale(_, by_expert: jax.Array) -> jax.Array:
        by_token = 1 / (tokens * multiply(cost, by_expert) + 1e-8)
        return 1 / (experts * (sum_over_tokens(multiply(by_token, cost))) + 1e-8)

    by_expert = lax.fori_loop(0, iterations, scale, jnp.ones(experts, cost.dtype))
    return cost * by_expert


def updated_bias(bias: jax.Array, counts: jax.Array, rate: float) -> jax.Array:
    """`bias [..., E]` after a step of `rate` towards balance, from the assignments `counts [..., E]` of a whole batch.

    Loss-free balancing (Wang et al. 2024, DeepSeek-V3): up for experts below the mean, down for those above it.
    """
    # In integers: a compiled mean is a product with 1 / E, which may lie beside the count that it equals.
    mean, rest = jnp.divmod(counts.sum(axis=-1, keepdims=True), counts.shape[-1])
    below, above = counts < mean, counts > mean
    direction = jnp.where(below, 1, jnp.where(above, -1, rest > 0))
    return bias + rate * direction.astype(jnp.float32)
