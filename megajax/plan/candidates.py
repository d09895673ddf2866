"""One way to run a config on N GPUs, with its estimated memory and time."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from megajax.config import Config
from megajax.plan.memory import MemoryEstimate, estimate_memory
from megajax.plan.optimizer import declared, host_bytes, newton_schulz_flops
from megajax.plan.rates import Rates
from megajax.plan.step_time import StepTime, Stored, estimate_time
from megajax.sharding import BLOCKS, Placement, place_all, stored_rows
from megajax.step_plan import HOPPER, StepPlan


@dataclass(frozen=True)
class Candidate:
    """A checked config with the sizes of its mesh."""

    config: Config
    plan: StepPlan

    @classmethod
    def of(cls, config: Config, sizes: Mapping[str, int]) -> "Candidate":
        """The candidate of a config that `check_mesh` accepts on these sizes. ConfigError: a kernel cannot run."""
        return cls(config, StepPlan.make(config, sizes, HOPPER))

    @cached_property
    def placements(self) -> dict[str, Placement]:
        config, sizes = self.config, self.plan.sizes
        model, rows = declared(config.model, config.lora), stored_rows(config, sizes["pipeline"])
        return place_all(model, sizes, rows, config.mesh.experts_over)

    @cached_property
    def parameters(self) -> dict[tuple[str, ...], int]:
        """Number of parameters that a device stores, by the axes that shard them in storage only."""
        numbers: dict[tuple[str, ...], int] = {}
        for name, placement in self.placements.items():
            axes = placement.storage_axes
            numbers[axes] = numbers.get(axes, 0) + self.stored(name)
        return numbers

    def stored(self, name: str) -> int:
        """Number of elements of a parameter that a device stores."""
        placement = self.placements[name]
        shards = math.prod(n for axis, n in self.plan.sizes.items() if axis not in placement.replicated_axes)
        return math.prod(placement.stored_shape) // shards

    @cached_property
    def memory(self) -> MemoryEstimate:
        return estimate_memory(self.plan, self.placements)

    def time(self, rates: Rates) -> StepTime:
        """The estimated time of a step."""
        muon, host = newton_schulz_flops(self.plan, self.placements), host_bytes(self.plan, self.placements)
        in_layers = sum(self.stored(name) for name in self.placements if name.startswith(BLOCKS))
        return estimate_time(self.plan, rates, Stored(self.parameters, in_layers, muon, host))
