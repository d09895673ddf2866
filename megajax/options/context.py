"""Context strategies: how attention is divided over `mesh.context`, declared once; all others ask these objects.

It does not import jax: parallel/context has what each strategy computes.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from megajax.options.registry import AUTO, Registry


@dataclass(frozen=True)
class ContextStrategy:
    """A context strategy, by its declarations."""

    name: str  # for `communication.context`
    divides_heads: bool = False  # during attention a device has some heads of all tokens; else all heads of its tokens
    goes_round: bool = False  # heads are divided over `head_group` devices only, and keys go around among the others
    head_group: int | None = None  # chosen for the heads of a model
    sends_latents: bool = False  # latents of latent attention can be sent instead of keys and values
    attention_rate: float = 1.0  # of attention's kernel, where 1 is its rate without `context`; fitted
    # Numbers per token that XLA keeps because the backward pass would compute them again, if nothing is recomputed. Of
    # (`key_shards`, numbers per token in attention's output, in its keys and values, whether the kernel takes chunks).
    kept: Callable[[int, float, float, bool], float] = lambda devices, output, keys, by_chunk: 0
    takes_bias: bool = False  # whether scores may have a bias (`model.position: relative`)
    repeats_output: bool = False  # whether attention's output is kept before and after its exchange
    permutes: bool = False  # whether keys or latents go around a ring by permutations
    in_groups: bool = False  # whether documents are divided among groups of devices (`layout/context_groups.py`)

    def head_shards(self, context: int) -> int:
        """The number of devices that share the heads, if a sequence is divided over `context` devices."""
        if self.head_group is not None:
            return math.gcd(self.head_group, context)
        return context if self.divides_heads else 1

    def key_shards(self, context: int) -> int:
        """The number of parts in which a device attends to the keys."""
        return context // self.head_shards(context)


UNROLLED_STEPS = 7  # of a ring; more run in a loop


def _kept_by_ring(devices: int, output: float, keys: float, by_chunk: bool) -> float:
    """The first keys and values that arrive, and half of the queries for each step and for the device's own keys.

    A loop around the ring keeps both halves, and those of the output and of its projection's input, which are prepared
    before it. A kernel that does not take chunks has the output in FP32 instead.
    """
    if devices - 1 > UNROLLED_STEPS:
        return 3 * output + keys
    return (devices / 2 if by_chunk else 2) * output + keys


def _kept_by_gather(devices: int, output: float, keys: float, by_chunk: bool) -> float:
    """The keys and values of whole sequences; for a kernel that takes chunks a copy for each, and another output."""
    return 2 * devices * keys + output if by_chunk else devices * keys


RING = ContextStrategy("ring", sends_latents=True, attention_rate=0.95, kept=_kept_by_ring, permutes=True)
ALL_GATHER = ContextStrategy(
    "all_gather", sends_latents=True, attention_rate=0.93, kept=_kept_by_gather, takes_bias=True
)
ALL_TO_ALL = ContextStrategy("all_to_all", divides_heads=True, takes_bias=True, repeats_output=True)
HEADS_AND_RING = ContextStrategy(
    "all_to_all+ring",
    divides_heads=True,
    goes_round=True,
    attention_rate=RING.attention_rate,
    kept=_kept_by_ring,
    repeats_output=True,
    permutes=True,
)
# The arrays of a group of all devices, which may come in any microbatch
DYNAMIC = replace(ALL_GATHER, name="dynamic", takes_bias=False, in_groups=True)
STRATEGIES = Registry("context strategy", RING, ALL_GATHER, ALL_TO_ALL, HEADS_AND_RING, DYNAMIC, words=(AUTO,))


def with_whole_heads() -> list[str]:
    """The names of the strategies for sequences of any kind in which each device has all heads of its tokens."""
    return [name for name, each in STRATEGIES.items() if not each.divides_heads and not each.in_groups]


def choose_context(
    name: str, devices: int, heads: Mapping[str, int], sends_latents: bool, has_bias: bool = False
) -> tuple[ContextStrategy, str]:
    """The strategy of `communication.context` for sequences divided over `devices`, and the reason.

    `heads`: the number of each kind on a device. `sends_latents`: keys and values can be sent as latents. `has_bias`:
    scores have a bias. Where all heads can be divided, dividing them was the fastest and needed the least memory
    (docs/records/log.md): each device sends a part of its heads once, while keys and values that visit all devices are
    sent `devices` - 1 times.
    """
    if name != AUTO:
        chosen, reason = STRATEGIES[name], f"communication.context={name}"
        if not chosen.goes_round:
            return chosen, reason
        group = math.gcd(devices, *heads.values())
        reason += f": the heads over {group} devices, keys and values around rings of {devices // group}"
        return replace(chosen, head_group=group), reason
    if sends_latents:
        return RING, "a token's latents are smaller than its heads"
    for kind, number in heads.items():
        if number % devices:
            return (
                ALL_GATHER if has_bias else RING,
                f"mesh.context={devices} does not divide the {kind} of a device, {number}",
            )
    return ALL_TO_ALL, f"mesh.context={devices} divides the {' and the '.join(heads)} of a device"
