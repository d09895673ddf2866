"""One way to run a config on N GPUs, with its estimated memory and time."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from megajax.config import Config
from megajax.estimate.memory import MemoryEstimate, estimate_memory, peaks
from megajax.estimate.optimizer_memory import matrix_operations, shards, state_bytes
from megajax.kernel_choice import HOPPER, Hardware
from megajax.optim.slots import OptimizerSlots
from megajax.sharding import BLOCKS
from megajax.step_plan import StepPlan
from megajax.tools.plan.rates import Rates
from megajax.tools.plan.step_time import StepTime, StoredState, estimate_time


@dataclass(frozen=True)
class Candidate:
    """A checked config with the sizes of its mesh."""

    config: Config
    plan: StepPlan

    @classmethod
    def of(cls, config: Config, sizes: Mapping[str, int], hardware: Hardware = HOPPER) -> "Candidate":
        """The candidate of a config that `check_mesh` accepts on these sizes. ConfigError: a kernel cannot run."""
        return cls(config, StepPlan.make(config, sizes, hardware))

    @cached_property
    def storage(self) -> "Storage":
        config, sizes = self.config, self.plan.sizes
        stages = (config.pipeline.virtual_stages, config.pipeline.layout) if sizes["pipeline"] > 1 else None
        sections = config.model, config.lora, config.optimizer, config.precision, config.objective, config.teacher
        return _storage(_Stored((*sections, stages, config.mesh.experts_over, *sizes.values()), self.plan))

    def fits(self, limit: float) -> bool:
        """Whether the estimated memory is at most `limit` bytes; most that do not fit are ruled out early."""
        if self.storage.bytes > limit:
            return False
        return all(peak.total <= limit for peak in peaks(self.plan))

    @cached_property
    def memory(self) -> MemoryEstimate:
        return estimate_memory(self.plan)

    def time(self, rates: Rates) -> StepTime:
        """The estimated time of a step."""
        return estimate_time(self.plan, rates, self.storage.state)

    def least_seconds(self, rates: Rates) -> float:
        """No remat policy makes the step faster than this.

        Recomputation hides more collectives of weights, but less of their time than it takes.
        """
        return estimate_time(self.plan, rates, self.storage.state, recomputes=False).total


@dataclass(frozen=True)
class Storage:
    """The weights and the optimizer's state on a device."""

    state: StoredState
    bytes: int  # of all steps with this storage, at any time


@dataclass(frozen=True)
class _Stored:
    """The settings that decide a storage."""

    settings: tuple[Any, ...]
    plan: StepPlan = field(compare=False)


@lru_cache(maxsize=2048)  # many candidates of a search differ in their microbatches, schedule or recomputation only
def _storage(stored: _Stored) -> Storage:
    plan, placements = stored.plan, stored.plan.placements
    count = {name: math.prod(p.stored_shape) // shards(plan, p) for name, p in placements.items()}
    by_axes, trained = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
    for name, placement in placements.items():
        by_axes[placement.storage_axes] += count[name]
        trained[placement.storage_axes] += count[name] * plan.is_trained(name)
    in_layers = sum(number for name, number in count.items() if name.startswith(BLOCKS))
    slots = OptimizerSlots.of(plan, plan.trained, placements)
    state = state_bytes(plan, slots)
    stored_state = StoredState(by_axes, trained, in_layers, matrix_operations(slots), state.on_host)
    return Storage(stored_state, state.weights + state.optimizer)
