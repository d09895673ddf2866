"""Context strategies: how attention is divided over `mesh.context`, declared once; all others ask these objects.

It does not import jax: parallel/context has what each strategy computes.
"""

from dataclasses import dataclass

from megajax.config.registry import Registry


@dataclass(frozen=True)
class ContextStrategy:
    """A context strategy, by its declarations."""

    name: str  # for `kernels.context`
    divides_heads: bool = False  # during attention a device has some heads of all tokens; else all heads of its tokens
    sends_latents: bool = False  # latents of latent attention can be sent instead of keys and values
    attention_rate: float = 1.0  # of attention's kernel, where 1 is its rate without `context`; fitted
    unrolled_steps: int = 0  # where keys are sent from device to device: with more steps, they run in a loop

    def head_shards(self, context: int) -> int:
        """The number of devices that share the heads, if a sequence is divided over `context` devices."""
        return context if self.divides_heads else 1

    def key_shards(self, context: int) -> int:
        """The number of parts in which a device attends to the keys."""
        return context // self.head_shards(context)


RING = ContextStrategy("ring", sends_latents=True, attention_rate=0.95, unrolled_steps=7)
ALL_GATHER = ContextStrategy("all_gather", sends_latents=True, attention_rate=0.93)
ALL_TO_ALL = ContextStrategy("all_to_all", divides_heads=True)
STRATEGIES = Registry("context strategy", RING, ALL_GATHER, ALL_TO_ALL)
