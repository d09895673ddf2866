"""Attention over `context`: the class of each strategy of `communication.context`, in a file of its own."""

from collections.abc import Callable
from functools import partial

from megajax.options.context import (
    ALL_GATHER,
    ALL_TO_ALL,
    DYNAMIC,
    HEADS_AND_RING,
    RING,
    STRATEGIES,
    ContextStrategy,
)
from megajax.parallel.context.dynamic import DynamicContext
from megajax.parallel.context.gathered_keys import GatheredContext
from megajax.parallel.context.heads import OverHeads
from megajax.parallel.context.heads_and_ring import HeadsAndRing
from megajax.parallel.context.ring_attention import Ring
from megajax.parallel.context.strategy import ContextAttention

# By the name of the declaration in `options/context.py`
IMPLEMENTATIONS: dict[str, Callable[..., ContextAttention]] = {
    RING.name: Ring,
    ALL_GATHER.name: GatheredContext,
    ALL_TO_ALL.name: OverHeads,
    HEADS_AND_RING.name: HeadsAndRing,
    DYNAMIC.name: DynamicContext,
}


def register_context(strategy: ContextStrategy, attention: type[ContextAttention]) -> None:
    """Register an extension's strategy for `communication.context`. Raises ConfigError for a name that is taken."""
    STRATEGIES.add(strategy, attention)
    IMPLEMENTATIONS[strategy.name] = attention


def context_attention(strategy: ContextStrategy, devices: int) -> Callable[..., ContextAttention]:
    """Attention over this number of devices: a function of the fields of `ContextAttention`."""
    if devices == 1:
        return ContextAttention
    if strategy.goes_round and (group := strategy.head_shards(devices)) in (1, devices):
        return Ring if group == 1 else OverHeads
    chosen = IMPLEMENTATIONS[strategy.name]
    return partial(chosen, group=strategy.head_group) if strategy.goes_round else chosen
