"""Attention over `context`: the class of each strategy of `communication.context`, in a file of its own."""

from megajax.options.context import ALL_GATHER, ALL_TO_ALL, DYNAMIC, RING, STRATEGIES, ContextStrategy
from megajax.parallel.context.dynamic import DynamicContext
from megajax.parallel.context.gathered_keys import GatheredContext
from megajax.parallel.context.heads import OverHeads
from megajax.parallel.context.ring_attention import Ring
from megajax.parallel.context.strategy import ContextAttention

# By the name of the declaration in `options/context.py`
IMPLEMENTATIONS: dict[str, type[ContextAttention]] = {
    RING.name: Ring,
    ALL_GATHER.name: GatheredContext,
    ALL_TO_ALL.name: OverHeads,
    DYNAMIC.name: DynamicContext,
}


def register_context(strategy: ContextStrategy, attention: type[ContextAttention]) -> None:
    """Register an extension's strategy for `communication.context`. Raises ConfigError for a name that is taken."""
    STRATEGIES.add(strategy)
    IMPLEMENTATIONS[strategy.name] = attention


def context_attention(strategy: ContextStrategy, devices: int) -> type[ContextAttention]:
    """Attention over this number of devices."""
    return IMPLEMENTATIONS[strategy.name] if devices > 1 else ContextAttention
