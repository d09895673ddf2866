"""The search for the fastest way to run a config on N GPUs.

First every legal mesh and number of microbatches is timed with nothing and with everything recomputed. The fastest
are then tried with each pipeline schedule, number of rounds, remat policy and axes of the experts. Memory is estimated
in the order of time, until enough of them fit. Nothing that changes numbers is varied: model, batch, sequence length,
precision, optimizer.
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
from megajax.config.tree import read_override
from megajax.errors import ConfigError, InputError
from megajax.plan.candidates import Candidate
from megajax.plan.rates import GIB, Rates
from megajax.plan.step_time import StepTime

TENSOR, EXPERTS_OVER = "mesh.tensor", "mesh.experts_over"
MESHES_EXPANDED = 24  # fastest pairs of mesh and microbatches of the first pass, of each remat policy
FEWEST_TOKENS = 2048  # of a sequence on a device of `context`
MOST_TOKENS = 2**17  # of a microbatch on a device
MOST_EXPERT_SHARDS = 64
VARIED = (
    *("mesh.pipeline", "mesh.data", "mesh.fsdp", "mesh.expert", "mesh.context", TENSOR, EXPERTS_OVER),
    *("batch.num_microbatches", "pipeline.schedule", "pipeline.rounds", "remat.policy", "remat.layers"),
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
        return _as_overrides(self.settings)


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
        size = self.rates.hosts_of
        if self.gpus > size and self.gpus % size:
            near = self.gpus // size * size
            raise InputError(
                f"--gpus={self.gpus} is not a whole number of hosts of {size}: use {near} or {near + size}."
            )
        chosen = {key: value for override in self.pinned for key, value in _values_of(override).items()}
        self.fixed = {key: value for key, value in chosen.items() if key in VARIED and value != -1}
        # The config of everything else: pinned keys may be legal with other values of the varied keys only.
        self.kept = [override for override in self.pinned if not _values_of(override).keys() & set(VARIED)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.base = load_config(self.path, self.kept)

    def best(self, count: int) -> list[Found]:
        """The fastest candidates that fit, at most `count`, one of each mesh. Raises InputError if there is none."""
        found = sorted(self._expanded(), key=lambda each: each.time.total)
        if not found:
            if not self.refusals:
                pinned = " ".join(_as_overrides(self.fixed)) or f"batch.global_size={self.base.batch.global_size}"
                raise InputError(
                    f"{pinned} leaves no mesh of {self.gpus} GPUs: choose another number, or leave it out."
                )
            reason = self.refusals.most_common(1)[0][0]
            raise InputError(f"no mesh of {self.gpus} GPUs is possible; the most frequent reason: {reason}")
        fitting: dict[tuple[int, ...], Found] = {}
        for each in found:
            mesh = tuple(each.candidate.plan.sizes.values())
            if mesh not in fitting and each.gib <= self.rates.memory_gib:
                fitting[mesh] = each
                if len(fitting) == count:
                    break
        if not fitting:
            closest = min(found, key=lambda each: each.gib)
            lacking = closest.gib - self.rates.memory_gib
            raise InputError(
                f"no mesh of {self.gpus} {self.rates.name}s holds this: the closest needs {closest.gib:.1f} GiB, "
                f"{lacking:.1f} more than a GPU has ({' '.join(closest.overrides)}): use more GPUs, or a smaller batch."
            )
        return list(fitting.values())

    def evaluate(self, settings: Settings) -> Found | None:
        """The candidate with these settings; None if it is refused, with the reason in `refusals`."""
        self.tried += 1
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                config = load_config(self.path, [*self.kept, *_as_overrides({**self.fixed, **settings})])
            candidate = Candidate.of(config, check_mesh(config, self.gpus))
        except ConfigError as error:
            self.refusals[str(error)] += 1
            return None
        return Found(settings, candidate, candidate.time(self.rates))

    def _expanded(self) -> Iterator[Found]:
        """The candidates of the second pass."""
        chosen: dict[tuple, Settings] = {}
        for policy in self._values("remat.policy", ["none", "full"]):
            first = [found for settings in self._first_pass(policy) if (found := self.evaluate(settings))]
            first.sort(key=lambda each: each.time.total)
            # The fastest that fit, and of those that may fit with some recomputation the fastest.
            some = [] if policy == "full" else first[:MESHES_EXPANDED]
            for found in [*some, *self._fitting(first)]:
                plan = found.candidate.plan
                chosen[*plan.sizes.values(), plan.batch_shape[0]] = found.settings
        for settings in chosen.values():
            for experts, change in itertools.product(self._experts_over(settings), self._schedules(settings)):
                for remat in self._remats(change):
                    found = self.evaluate({**settings, **change, **experts, **remat})
                    if found:
                        yield found
                        if found.gib <= self.rates.memory_gib:
                            break  # those that follow recompute more

    def _fitting(self, found: list[Found]) -> list[Found]:
        """The first that fit, as many as are needed; if none fits the one that needs least."""
        fitting = list(itertools.islice((each for each in found if each.gib <= self.rates.memory_gib), MESHES_EXPANDED))
        return fitting or sorted(found, key=lambda each: each.gib)[:1]

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

    def _schedules(self, settings: Settings) -> Iterator[Settings]:
        """Schedules and rounds for a mesh."""
        stages = self._stages(settings)
        per_stage = -(-self.base.model.num_layers // stages)
        schedules = self._values("pipeline.schedule", ["1f1b", "zero_bubble"] if stages > 1 else ["1f1b"])
        rounds = self._values("pipeline.rounds", [r for r in (1, 2, 4, 8) if r <= per_stage] if stages > 1 else [1])
        for schedule, number in itertools.product(schedules, rounds):
            change: Settings = {"pipeline.schedule": schedule, "pipeline.rounds": number}
            yield {**settings, **self._varied(change)}

    def _remats(self, settings: Settings) -> Iterator[Settings]:
        """Remat policies, those that recompute least first."""
        rounds = int(str(settings.get("pipeline.rounds", self.fixed.get("pipeline.rounds", 1))))
        layers = -(-self.base.model.num_layers // (self._stages(settings) * rounds))
        for policy in self._values("remat.policy", ["none", "selective", "full"]):
            some = sorted({max(1, layers * k // 4) for k in (1, 2, 3)} - {layers}) if policy == "full" else []
            for recomputed in self._values("remat.layers", [*some, None]):
                yield self._varied({"remat.policy": policy, "remat.layers": recomputed})

    def _stages(self, settings: Settings) -> int:
        return int(str({**self.fixed, **settings}["mesh.pipeline"]))

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

    def _experts_over(self, settings: Settings) -> Iterator[Settings]:
        """Axes that divide the experts: `expert`, and with it one other axis of the mesh. Nothing for a dense model."""
        number, sizes = self.base.model.num_experts, {**self.fixed, **settings}
        if not number or EXPERTS_OVER in self.fixed:
            yield {}
            return
        yield {EXPERTS_OVER: "[expert]"}
        for axis in ("data", "fsdp", "context", "tensor"):
            size, experts = int(str(sizes[f"mesh.{axis}"])), int(str(sizes["mesh.expert"]))
            shards = size * experts
            if size > 1 and number % shards == 0 and shards <= MOST_EXPERT_SHARDS:
                yield {EXPERTS_OVER: f"[expert,{axis}]"}

    def _microbatches(self, mesh: dict[str, int]) -> list[int]:
        """Numbers of microbatches with 1 to MOST_SEQUENCES sequences of each on a device."""
        shards = mesh["data"] * mesh["fsdp"] * mesh["expert"]
        per_device, beyond = divmod(self.base.batch.global_size, shards)
        most = MOST_TOKENS * mesh["context"] // self.base.batch.sequence_length
        counts = [] if beyond else [per_device // s for s in divisors(per_device) if s <= max(1, most)]
        return [int(n) for n in self._values("batch.num_microbatches", counts)]

    def _values(self, key: str, values: list) -> list:
        """The values of a key to try: its own if it is pinned."""
        return [self.fixed[key]] if key in self.fixed else values

    def _varied(self, settings: Settings) -> Settings:
        """The settings of keys that are not pinned."""
        return {key: value for key, value in settings.items() if key not in self.fixed}


def _as_overrides(settings: Settings) -> list[str]:
    return [f"{key}={'null' if value is None else value}" for key, value in settings.items()]


def _values_of(override: str) -> Settings:
    """The keys and values of an override: one, or those of a section in braces."""
    [(section, own)] = read_override(override).values.items()
    return {f"{section}.{name}": value for name, value in own.items()} if isinstance(own, dict) else {}


def _shares(rest: int, local: int) -> list[int]:
    """Sizes of `fsdp`: none, the GPUs that are left in a host, and all."""
    return sorted({1, rest, *(n for n in (local, 2 * local, 8 * local) if n > 1 and rest % n == 0)})


def explained(path: Path, overrides: Sequence[str], gpus: int, rates: Rates) -> Found:
    """The candidate of the config's own mesh. Raises ConfigError if it is not legal."""
    config: Config = load_config(path, overrides)
    candidate = Candidate.of(config, check_mesh(config, gpus))
    return Found({}, candidate, candidate.time(rates))
