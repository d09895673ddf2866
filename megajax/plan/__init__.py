"""What a config costs: parameters, FLOPs and memory, without compiling anything."""

from megajax.plan.costs import (
    MemoryEstimate,
    active_parameter_count,
    estimate_memory,
    flops_per_token,
    parameter_count,
    peak_flops,
)

__all__ = [
    "MemoryEstimate",
    "active_parameter_count",
    "estimate_memory",
    "flops_per_token",
    "parameter_count",
    "peak_flops",
]
