"""A config's parameters, FLOPs and memory, without compilation; `plan.compile` compiles its step for H200s."""

from megajax.plan.costs import (
    active_parameter_count,
    adapter_parameter_count,
    flops_per_token,
    parameter_count,
    peak_flops,
)
from megajax.plan.memory import MemoryEstimate, estimate_memory

__all__ = [
    "MemoryEstimate",
    "active_parameter_count",
    "adapter_parameter_count",
    "estimate_memory",
    "flops_per_token",
    "parameter_count",
    "peak_flops",
]
