"""The optimization barrier of XLA, under names that say what it prevents. No other file uses it."""

from jax import lax


def not_merged[Values](values: Values) -> Values:
    """A recomputation begins with `values`: XLA does not use the forward pass's results instead, and so keep them."""
    return lax.optimization_barrier(values)


def not_repeated[Values](values: Values) -> Values:
    """`values` are computed once, as they are: not again by each reader, with another rounding, layout or fusion."""
    return lax.optimization_barrier(values)


def not_before[Values](values: Values) -> Values:
    """None of `values` is available before all are: what reads one does not begin, or allocate, while another is made.

    So independent collectives do not overlap, which devices might order differently, and copies arrive in turn.
    """
    return lax.optimization_barrier(values)


def not_dropped[Values](values: Values) -> Values:
    """jax computes all of `values` while one is read."""
    return lax.optimization_barrier(values)
