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
from megajax.optim.slots import OptimizerSlots
from megajax.sharding import BLOCKS
from megajax.step_plan import StepPlan
from megajax.tools.plan.rates import GIB, H200, Rates
from megajax.tools.plan.step_time import StepTime, StoredState, estimate_time
from megajax.tools.plan.variations import Settings, as_overrides


@dataclass(frozen=True)
class Candidate:
    """The plan of a config on a mesh of GPUs; `settings` are its values of the keys that a search varies."""

    plan: StepPlan
    rates: Rates
    settings: Settings

    @classmethod
    def of(
        cls, config: Config, sizes: Mapping[str, int], rates: Rates = H200, settings: Settings | None = None
    ) -> "Candidate":
        """The candidate of a config that `check_mesh` accepts on these sizes. ConfigError: a kernel cannot run."""
        return cls(StepPlan.make(config, sizes, rates.hardware), rates, settings or {})

    @property
    def config(self) -> Config:
        return self.plan.config

    @property
    def overrides(self) -> list[str]:
        """The settings for a command line."""
        return as_overrides(self.settings)

    @property
    def in_fp8(self) -> bool:
        return self.config.precision.fp8.chosen.is_on

    @property
    def mesh(self) -> tuple:
        """The precision and the sizes of the mesh: a table has one row of each."""
        return (self.in_fp8, *self.plan.sizes.values())

    @cached_property
    def storage(self) -> "Storage":
        config, sizes = self.config, self.plan.sizes
        stages = (config.pipeline.virtual_stages, config.pipeline.layout) if sizes["pipeline"] > 1 else None
        sections = config.model, config.lora, config.optimizer, config.precision, config.objective, config.teacher
        return _storage(_Stored((*sections, stages, config.mesh.experts_over, *sizes.values()), self.plan))

    @property
    def storage_fits(self) -> bool:
        return self.storage.bytes <= self.rates.memory_gib * GIB

    @cached_property
    def fits(self) -> bool:
        """Whether it fits by the estimate; most that do not are ruled out early."""
        return self.storage_fits and all(peak.total <= self.rates.memory_gib * GIB for peak in peaks(self.plan))

    @cached_property
    def memory(self) -> MemoryEstimate:
        return estimate_memory(self.plan)

    @property
    def gib(self) -> float:
        """Estimated memory of a GPU."""
        return self.memory.total / GIB

    @cached_property
    def time(self) -> StepTime:
        """The estimated time of a step."""
        return estimate_time(self.plan, self.rates, self.storage.state)

    @property
    def least_seconds(self) -> float:
        """No remat policy makes the step faster than this.

        Recomputation hides more collectives of weights, but less of their time than it takes.
        """
        return estimate_time(self.plan, self.rates, self.storage.state, recomputes=False).total


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
