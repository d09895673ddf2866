"""The search for the fastest way to run a config on N GPUs.

First every legal mesh and number of microbatches is timed with nothing and with everything recomputed. The fastest
are then tried with each pipeline schedule, number of rounds and remat policy. Memory is estimated in the order of time,
until enough of them fit. Nothing that changes numbers is varied: model, batch, sequence length, precision, optimizer.
"""

import itertools
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megajax.config import Config, load_config
from megajax.config.checks import check_mesh
from megajax.config.sentences import divisors
from megajax.errors import ConfigError, InputError
from megajax.plan.candidates import Candidate
from megajax.plan.rates import GIB, Rates
from megajax.plan.step_time import StepTime

TENSOR = "mesh.tensor"
MESHES_EXPANDED = 24  # fastest pairs of mesh and microbatches of the first pass, of each remat policy
FEWEST_TOKENS = 2048  # of a sequence on a device of `context`
MOST_SEQUENCES = 8  # of a microbatch on a device
MOST_EXPERT_SHARDS = 64
VARIED = (
    *("mesh.pipeline", "mesh.data", "mesh.fsdp", "mesh.expert", "mesh.context", TENSOR, "batch.num_microbatches"),
    *("pipeline.schedule", "pipeline.rounds", "remat.policy", "remat.layers"),
)
type Settings = dict[str, object]


@dataclass(frozen=True)
class Found:
    """A legal candidate; `settings` are its values of the varied keys."""

    settings: Settings
    candidate: Candidate
    time: StepTime

    @property
    def gib(self) -> float:
        """Estimated memory of a GPU."""
        return self.candidate.memory.total / GIB

    @property
    def overrides(self) -> list[str]:
        """The settings for a command line."""
        return [f"{key}={'null' if value is None else value}" for key, value in self.settings.items()]


@dataclass
class Search:
    """A search for one config and number of GPUs; keys of `pinned` overrides are not varied."""

    path: Path
    pinned: Sequence[str]
    gpus: int
    rates: Rates
    tried: int = 0
    refusals: Counter = field(default_factory=Counter)

    def __post_init__(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.base = load_config(self.path, self.pinned)
        if self.gpus > self.rates.hosts_of and self.gpus % self.rates.hosts_of:
            near = self.gpus // self.rates.hosts_of * self.rates.hosts_of
            size = self.rates.hosts_of
            raise InputError(
                f"--gpus={self.gpus} is not a whole number of hosts of {size}: use {near} or {near + size}."
            )
        self.fixed = {key for key in VARIED if any(override.startswith(f"{key}=") for override in self.pinned)}

    def best(self, count: int) -> list[Found]:
        """The fastest candidates that fit, at most `count`. Raises InputError if there is none."""
        found = sorted(self._expanded(), key=lambda each: each.time.total)
        if not found:
            [(reason, _)] = self.refusals.most_common(1) or [("no mesh was tried", 0)]
            raise InputError(f"no mesh of {self.gpus} GPUs is possible; the most frequent reason: {reason}")
        fitting: list[Found] = []
        for each in found:
            if each.gib <= self.rates.memory_gib:
                fitting.append(each)
                if len(fitting) == count:
                    break
        if not fitting:
            closest = min(found, key=lambda each: each.gib)
            lacking = closest.gib - self.rates.memory_gib
            raise InputError(
                f"no mesh of {self.gpus} {self.rates.name}s holds this: the closest needs {closest.gib:.1f} GiB, "
                f"{lacking:.1f} more than a GPU has ({' '.join(closest.overrides)}): use more GPUs, or a smaller batch."
            )
        return fitting

    def evaluate(self, settings: Settings) -> Found | None:
        """The candidate with these settings; None if it is refused, with the reason in `refusals`."""
        self.tried += 1
        overrides = [f"{key}={'null' if value is None else value}" for key, value in settings.items()]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                config = load_config(self.path, [*self.pinned, *overrides])
            candidate = Candidate.of(config, check_mesh(config, self.gpus))
        except ConfigError as error:
            self.refusals[str(error)] += 1
            return None
        return Found(settings, candidate, candidate.time(self.rates))

    def _expanded(self) -> Iterator[Found]:
        """The candidates of the second pass."""
        chosen: dict[tuple, Settings] = {}
        for policy in dict.fromkeys((self._values("remat.policy", ["none"])[0], "full")):
            first = [found for settings in self._first_pass(policy) if (found := self.evaluate(settings))]
            if policy == "full":  # what does not fit with all recomputed does not fit at all
                first = self._fitting(first)
            for found in sorted(first, key=lambda each: each.time.total)[:MESHES_EXPANDED]:
                chosen[tuple(found.settings.items())[: len(VARIED) - 4]] = found.settings
        for settings in chosen.values():
            for change in self._second_pass(settings):
                if found := self.evaluate({**settings, **change}):
                    yield found

    def _fitting(self, found: list[Found]) -> list[Found]:
        """The fastest that fit, as many as are needed; all if none fits."""
        fitting: list[Found] = []
        for each in sorted(found, key=lambda each: each.time.total):
            if each.gib <= self.rates.memory_gib:
                fitting.append(each)
                if len(fitting) == MESHES_EXPANDED:
                    break
        return fitting or found

    def _first_pass(self, policy: str) -> Iterator[Settings]:
        """Meshes and numbers of microbatches, with the plainest schedule."""
        for mesh in self._meshes():
            for microbatches in self._microbatches(mesh):
                yield self._varied(
                    {
                        **{f"mesh.{axis}": size for axis, size in mesh.items()},
                        "batch.num_microbatches": microbatches,
                        "pipeline.schedule": "1f1b",
                        "pipeline.rounds": 1,
                        "remat.policy": policy,
                        "remat.layers": None,
                    }
                )

    def _second_pass(self, settings: Settings) -> Iterator[Settings]:
        """Schedules, rounds and remat policies for a mesh."""
        stages, layers = int(str(settings.get("mesh.pipeline", self.base.mesh.pipeline))), self.base.model.num_layers
        schedules = self._values("pipeline.schedule", ["1f1b", "zero_bubble"] if stages > 1 else ["1f1b"])
        per_stage = -(-layers // stages)
        rounds = self._values("pipeline.rounds", [r for r in (1, 2, 4, 8) if r <= per_stage] if stages > 1 else [1])
        policies = self._values("remat.policy", ["none", "selective", "full"])
        for schedule, r, policy in itertools.product(schedules, rounds, policies):
            of_stage = -(-per_stage // int(str(r)))
            some = sorted({max(1, of_stage * k // 4) for k in (1, 2, 3)} - {of_stage}) if policy == "full" else []
            for recomputed in self._values("remat.layers", [None, *some]):
                change = {
                    "pipeline.schedule": schedule,
                    "pipeline.rounds": r,
                    "remat.policy": policy,
                    "remat.layers": recomputed,
                }
                yield self._varied(change)

    def _meshes(self) -> Iterator[dict[str, int]]:
        """Sizes of all axes with the product `gpus`. `tensor` stays within a host."""
        config, gpus = self.base, self.gpus
        sizes = divisors(gpus)
        context = [n for n in sizes if n == 1 or config.batch.sequence_length // n >= FEWEST_TOKENS]
        experts = config.model.num_experts or 1
        choices = {
            "tensor": [n for n in sizes if n <= self.rates.hosts_of],
            "context": [n for n in context if n <= 2 * self.rates.hosts_of],
            "expert": [n for n in sizes if experts % n == 0 and n <= MOST_EXPERT_SHARDS],
            "pipeline": [n for n in sizes if n <= config.model.num_layers],
        }
        axes = {axis: self._values(f"mesh.{axis}", values) for axis, values in choices.items()}
        for tensor, context, expert, pipeline in itertools.product(*axes.values()):
            used = int(tensor) * int(context) * int(expert) * int(pipeline)
            if gpus % used:
                continue
            rest = gpus // used
            for fsdp in self._values("mesh.fsdp", _shares(rest, self.rates.hosts_of // int(tensor))):
                if rest % int(fsdp) == 0:
                    mesh = {"pipeline": pipeline, "data": rest // int(fsdp), "fsdp": fsdp}
                    yield {
                        k: int(v) for k, v in {**mesh, "expert": expert, "context": context, "tensor": tensor}.items()
                    }

    def _microbatches(self, mesh: dict[str, int]) -> list[int]:
        """Numbers of microbatches with 1 to MOST_SEQUENCES sequences of each on a device."""
        shards = mesh["data"] * mesh["fsdp"] * mesh["expert"]
        per_device, beyond = divmod(self.base.batch.global_size, shards)
        counts = [] if beyond else [per_device // s for s in divisors(per_device) if s <= MOST_SEQUENCES]
        return [int(n) for n in self._values("batch.num_microbatches", counts)]

    def _values(self, key: str, values: list) -> list:
        """The values of a key to try: the config's own if it is pinned, and not -1."""
        if key not in self.fixed:
            return values
        section, _, name = key.partition(".")
        own = getattr(getattr(self.base, section), name)
        return values if own == -1 else [own]

    def _varied(self, settings: Settings) -> Settings:
        """Without pinned keys, except axes of -1, and without keys that have no effect."""
        return {key: value for key, value in settings.items() if key not in self.fixed or value is None}


def _shares(rest: int, local: int) -> list[int]:
    """Sizes of `fsdp`: none, the GPUs that are left in a host, and all."""
    return sorted({1, rest, *(n for n in (local, 2 * local, 8 * local) if n > 1 and rest % n == 0)})


def explained(path: Path, overrides: Sequence[str], gpus: int, rates: Rates) -> Found:
    """The candidate of the config's own mesh. Raises ConfigError if it is not legal."""
    config: Config = load_config(path, overrides)
    candidate = Candidate.of(config, check_mesh(config, gpus))
    return Found({}, candidate, candidate.time(rates))
