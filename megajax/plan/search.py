"""The search for the fastest way to run a config on N GPUs.

First every legal mesh and number of microbatches is timed with nothing and with everything recomputed. The fastest
are then tried with each pipeline schedule, number of rounds, layout, remat policy and axes of the experts. Memory is
estimated in the order of time, until enough of them fit. Nothing that changes numbers is varied: model, batch, sequence
length, optimizer, and precision unless FP8 is asked for.
"""

import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megajax.config import Config, load_config
from megajax.config.checks import check_mesh
from megajax.config.sentences import divisors, value
from megajax.config.stages import default_layout, layouts_to_try
from megajax.config.tree import Dumper, read_file, read_override
from megajax.errors import ConfigError, InputError
from megajax.plan.candidates import Candidate
from megajax.plan.rates import GIB, Rates
from megajax.plan.step_time import StepTime

TENSOR, EXPERTS_OVER, LAYOUT, FP8 = "mesh.tensor", "mesh.experts_over", "pipeline.layout", "precision.fp8.recipe"
MESHES_EXPANDED = 24  # fastest pairs of mesh and microbatches of the first pass, of each remat policy
FEWEST_TOKENS = 2048  # of a sequence on a device of `context`
MOST_TOKENS = 2**17  # of a microbatch on a device
MOST_EXPERT_SHARDS = 64
MOST_ROUNDS, EMPTY_SLOTS = 20, 0.1  # of a pipeline: rounds; part of its layer slots that may be empty for more rounds
SMALLEST = 24  # candidates with the fewest bytes that are asked whether anything fits without a pinned key
VARIED = (
    *("mesh.pipeline", "mesh.data", "mesh.fsdp", "mesh.expert", "mesh.context", TENSOR, EXPERTS_OVER),
    *("batch.num_microbatches", "pipeline.schedule", "pipeline.rounds", LAYOUT, "remat.policy", "remat.layers"),
)
WITHOUT_FP8 = ("A100",)
SEQUENCE_LENGTH, SEQUENCES_OF_A_GPU = 4096, 4  # of a config that sets no batch
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

    @property
    def in_fp8(self) -> bool:
        return self.candidate.config.precision.fp8.recipe != "none"


@dataclass
class Search:
    """A search for one config and number of GPUs; keys of `pinned` overrides are not varied.

    `fp8`: try FP8 too, which changes the training. Raises InputError for GPUs that are no whole hosts, and for `fp8` if
    the recipe is set.
    """

    path: Path
    pinned: Sequence[str]
    gpus: int
    rates: Rates
    fp8: bool = False
    tell: Callable[[int], None] = lambda tried: None  # gets the number of candidates so far
    tried: int = 0
    refusals: Counter = field(default_factory=Counter)

    def __post_init__(self):
        check_hosts(self.gpus, self.rates)
        chosen = {key: value for override in self.pinned for key, value in _values_of(override).items()}
        self.fixed = {key: value for key, value in chosen.items() if key in VARIED and value != -1}
        # The config of everything else: pinned keys may be legal with other values of the varied keys only.
        self.kept = [each for override in self.pinned for each in _without_varied(override)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            policy = {
                key: value for key, value in self.fixed.items() if key == "remat.policy"
            }  # remat.group needs full
            self.given = settings_in(self.path, ())
            self.base = load_config(self.path, [*self.kept, f"{LAYOUT}=null", *_as_overrides(policy)])
        check_fp8(self.base, self.rates, self.fp8)
        where = self.base.where(FP8)
        if self.fp8 and where != "default":
            recipe = self.base.precision.fp8.recipe
            raise InputError(f"--fp8 tries {FP8}, but it is set to {recipe} ({where}): leave one of them out.")

    def best(self, count: int) -> list[Found]:
        """The fastest candidates that fit, at most `count`, one of each mesh and precision.

        With `fp8` the fastest without it is one of them. Raises InputError if there is none.
        """
        found = sorted(self._expanded(), key=lambda each: each.time.total)
        if not found:
            raise InputError(self._no_mesh())
        fitting: dict[tuple, Found] = {}
        for each in found:
            mesh = (each.in_fp8, *each.candidate.plan.sizes.values())
            enough = len(fitting) >= count and (each.in_fp8 or any(not other.in_fp8 for other in fitting.values()))
            if mesh not in fitting and not enough and each.gib <= self.rates.memory_gib:
                fitting[mesh] = each
        if not fitting:
            raise InputError(self._nothing_fits(min(found, key=lambda each: each.gib)))
        return list(fitting.values())

    def changed(self, found: Found) -> list[str]:
        """The overrides of a candidate without those that the config has anyway."""
        layout = self.given.get("pipeline", {}).get("layout")
        have = {key: layout if key == LAYOUT else value(self.base, key) for key in found.settings}
        have = {key: list(own) if isinstance(own, tuple) else own for key, own in have.items()}
        return _as_overrides({key: new for key, new in found.settings.items() if have[key] != new})

    def usual(self) -> Found | None:
        """Megatron's habit: tensor over 8 GPUs, 8 stages, data over the rest, a sequence in a microbatch, 1F1B.

        With the least recomputation that fits. None if it is not legal.
        """
        tensor = min(8, self.rates.hosts_of, self.gpus)
        pipeline = min(8, self.gpus // tensor)
        sizes = {"pipeline": pipeline, "data": -1, "fsdp": 1, "expert": 1, "context": 1, "tensor": tensor}
        microbatches = max(1, self.base.batch.global_size * tensor * pipeline // self.gpus)
        settings: Settings = {f"mesh.{axis}": size for axis, size in sizes.items()}
        settings |= {"batch.num_microbatches": microbatches, "pipeline.schedule": "1f1b", "pipeline.rounds": 1}
        found = None
        for policy in ("none", "selective", "full"):
            remat: Settings = {LAYOUT: None, "remat.policy": policy, "remat.layers": None}
            found = self.evaluate(self._varied({**settings, **remat})) or found
            if found and found.gib <= self.rates.memory_gib:
                break
        return found

    def _no_mesh(self) -> str:
        """The sentence if no candidate is legal: the pinned key to blame, and the most frequent reason."""
        reason = self.refusals.most_common(1)[0][0] if self.refusals else "choose another value, or leave it out."
        for key in self.fixed:
            if next(self._without(key)._legal(), None):
                return f"{self._named(key)} rules out every mesh of {self.gpus} GPUs: {reason}"
        pinned = " ".join(_as_overrides(self.fixed)) or f"batch.global_size={self.base.batch.global_size}"
        if self.fixed or not self.refusals:
            return f"{pinned} leaves no mesh of {self.gpus} GPUs: {reason}"
        return f"no mesh of {self.gpus} GPUs is possible; the most frequent reason: {reason}"

    def _nothing_fits(self, closest: Found) -> str:
        """The sentence if nothing fits: the closest, what it lacks, and a pinned key that rules out what would fit."""
        lacking = closest.gib - self.rates.memory_gib
        needs = f"the closest needs {closest.gib:.1f} GiB, {lacking:.1f} more than a GPU has"
        for key in self.fixed:
            other = self._without(key)
            if any(each.gib <= self.rates.memory_gib for each in other._smallest()):
                return (
                    f"{self._named(key)} rules out every mesh of {self.gpus} {self.rates.name}s that holds this: "
                    f"{needs}. Without it some fit: choose another value, or leave it out."
                )
        settings = " ".join(_as_overrides({**self.fixed, **closest.settings}))
        return (
            f"no mesh of {self.gpus} {self.rates.name}s holds this: {needs} ({settings}): "
            "use more GPUs, or a smaller batch."
        )

    def _without(self, key: str) -> "Search":
        """The same search with a pinned key varied."""
        fixed = {other: value for other, value in self.fixed.items() if other != key}
        return Search(self.path, [*self.kept, *_as_overrides(fixed)], self.gpus, self.rates, self.fp8)

    def _named(self, key: str) -> str:
        return " ".join(_as_overrides({key: self.fixed[key]}))

    def _legal(self) -> Iterator[Found]:
        """The legal candidates of the first pass, with the policy that recomputes most."""
        for policy in self._values("remat.policy", ["full"]):
            yield from (found for settings in self._first_pass(policy) if (found := self.evaluate(settings)))

    def _smallest(self) -> list[Found]:
        """The legal candidates that probably need the least memory: by their weights and the inputs of their layers."""
        state, stream = 16, 2 * self.base.model.hidden_size * self.base.model.num_layers  # bytes

        def size(found: Found) -> float:
            plan = found.candidate.plan
            return state * sum(found.candidate.parameters.values()) + stream * plan.tokens / plan.sizes["tensor"]

        return sorted(self._legal(), key=size)[:SMALLEST]

    def evaluate(self, settings: Settings) -> Found | None:
        """The candidate with these settings; None if it is refused, with the reason in `refusals`."""
        self.tried += 1
        self.tell(self.tried)
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
        for recipe in ("none", "current") if self.fp8 else (None,):
            yield from self._expanded_in(recipe)

    def _expanded_in(self, recipe: str | None) -> Iterator[Found]:
        """The candidates of the second pass with a recipe of FP8; None: that of the config."""
        chosen: dict[tuple, Settings] = {}
        for policy in self._values("remat.policy", ["none", "full"]):
            first = [found for settings in self._first_pass(policy, recipe) if (found := self.evaluate(settings))]
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

    def _first_pass(self, policy: str, recipe: str | None = None) -> Iterator[Settings]:
        """Meshes and numbers of microbatches, with the plainest schedule."""
        for mesh in self._meshes():
            sizes: Settings = {f"mesh.{axis}": size for axis, size in mesh.items()}
            layouts = self._layouts(sizes, int(str(self.fixed.get("pipeline.rounds", 1))))
            for microbatches, layout in itertools.product(self._microbatches(mesh), layouts[:1]):
                settings: Settings = {
                    **sizes,
                    "batch.num_microbatches": microbatches,
                    "pipeline.schedule": "1f1b",
                    "pipeline.rounds": 1,
                    LAYOUT: layout,
                    "remat.policy": policy,
                    "remat.layers": None,
                }
                yield self._varied(settings if recipe is None else {**settings, FP8: recipe})

    def _schedules(self, settings: Settings) -> Iterator[Settings]:
        """Schedules, rounds and layouts for a mesh."""
        stages = self._stages(settings)
        schedules = self._values("pipeline.schedule", ["1f1b", "zero_bubble"] if stages > 1 else ["1f1b"])
        rounds = self._values("pipeline.rounds", self._rounds(stages))
        for schedule, number in itertools.product(schedules, rounds):
            for layout in self._layouts(settings, number):
                change: Settings = {"pipeline.schedule": schedule, "pipeline.rounds": number, LAYOUT: layout}
                yield {**settings, **self._varied(change)}

    def _rounds(self, stages: int) -> list[int]:
        """Numbers of rounds: for each size of a virtual stage the fewest rounds that hold all layers."""
        layers = self.base.model.num_layers
        if stages == 1:
            return [1]
        fewest = -(-layers // stages)
        slots = {r: -(-layers // (stages * r)) for r in range(1, min(fewest, MOST_ROUNDS) + 1)}
        first = {slots[r]: r for r in reversed(slots)}.values()
        return sorted(r for r in first if r * slots[r] <= (1 + EMPTY_SLOTS) * fewest)

    def _layouts(self, settings: Settings, rounds: int) -> list[list[int] | None]:
        """Layouts of the stages of a mesh; None for the default."""
        model, stages = self.base.model, self._stages(settings)
        if stages == 1 or LAYOUT in self.fixed:
            return [None]
        default = default_layout(model, stages * rounds)
        return [None if layout == default else list(layout) for layout in layouts_to_try(model, stages * rounds)]

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
        yield {EXPERTS_OVER: ["expert"]}
        for axis in ("data", "fsdp", "context", "tensor"):
            size, experts = int(str(sizes[f"mesh.{axis}"])), int(str(sizes["mesh.expert"]))
            shards = size * experts
            if size > 1 and number % shards == 0 and shards <= MOST_EXPERT_SHARDS:
                yield {EXPERTS_OVER: ["expert", axis]}

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
    """Settings for a command line, without spaces."""

    def shown(value: object) -> str:
        text = yaml.dump(value, Dumper=Dumper, default_flow_style=True, width=10**6, sort_keys=False)
        return text.removesuffix("\n").removesuffix("\n...").replace(", ", ",")

    return [f"{key}={shown(value)}" for key, value in settings.items()]


def _values_of(override: str) -> Settings:
    """The keys and values of an override: one, or those of a section in braces."""
    [(section, own)] = read_override(override).values.items()
    return {f"{section}.{name}": value for name, value in own.items()} if isinstance(own, dict) else {}


def _without_varied(override: str) -> list[str]:
    """The override without the keys that the search varies."""
    values = _values_of(override)
    others = {key: value for key, value in values.items() if key not in VARIED}
    return [override] if len(others) == len(values) else _as_overrides(others)


def _shares(rest: int, local: int) -> list[int]:
    """Sizes of `fsdp`: none, the GPUs that are left in a host, and all."""
    return sorted({1, rest, *(n for n in (local, 2 * local, 8 * local) if n > 1 and rest % n == 0)})


def check_hosts(gpus: int, rates: Rates) -> None:
    """Raises InputError for more GPUs than a host has that are no whole hosts."""
    size = rates.hosts_of
    if gpus > size and gpus % size:
        near = gpus // size * size
        raise InputError(f"--gpus={gpus} is not a whole number of hosts of {size}: use {near} or {near + size}.")


def check_fp8(config: Config, rates: Rates, asked: bool = False) -> None:
    """Raises InputError for FP8 on a GPU without it; `asked`: by --fp8."""
    recipe = config.precision.fp8.recipe
    if rates.name in WITHOUT_FP8 and (asked or recipe != "none"):
        setting = "--fp8" if asked else f"{FP8}={recipe} ({config.where(FP8)})"
        raise InputError(f"{setting} needs a GPU with FP8, which an {rates.name} is not: leave it out.")


def settings_in(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """The sections of a config file with overrides, as they are written, without defaults."""
    tree = read_file(path)
    for override in overrides:
        tree.merge(read_override(override))
    return tree.values


def missing_settings(path: Path, overrides: Sequence[str], gpus: int) -> tuple[list[str], list[str]]:
    """Overrides for what a config must have but a plan does not need to know: data, and the size of a batch.

    The second list are lines that say what was assumed.
    """
    given = settings_in(path, overrides)
    batch, added, lines = given.get("batch") or {}, [], []
    if not given.get("data"):
        added.append("data.kind=synthetic")
    for key, default in (("sequence_length", SEQUENCE_LENGTH), ("global_size", SEQUENCES_OF_A_GPU * gpus)):
        if batch.get(key) is None:
            added.append(f"batch.{key}={default}")
            lines.append(f"batch.{key} is not set: {default} is assumed.")
    return added, lines


def explained(path: Path, overrides: Sequence[str], gpus: int, rates: Rates) -> Found:
    """The candidate of the config's own mesh. Raises ConfigError if it is not legal."""
    config: Config = load_config(path, overrides)
    check_fp8(config, rates)
    candidate = Candidate.of(config, check_mesh(config, gpus))
    return Found({}, candidate, candidate.time(rates))
