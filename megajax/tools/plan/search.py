"""The search for the fastest way to run a config on N GPUs.

First every legal mesh and number of microbatches is timed with nothing and with everything recomputed. The fastest are
then tried with each pipeline schedule, number of virtual stages, layout, remat policy and axes of the experts. Memory
is estimated in the order of time, until enough of them fit: what is stored alone, or the time without recomputation,
rules out most candidates first. Nothing that changes numbers is varied: model, batch, sequence length, optimizer, and
precision unless FP8 is asked for.
"""

import copy
import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from megajax.config import Config, load_config
from megajax.config.checks import check_combinations, check_mesh
from megajax.config.load import read_tree
from megajax.config.sentences import value
from megajax.errors import ConfigError, InputError, counted
from megajax.ops.fp8 import ADA
from megajax.options.fp8_recipes import CURRENT, NONE
from megajax.options.remat import POLICIES
from megajax.schema.tree import Tree, read_override
from megajax.tools.plan.candidates import Candidate
from megajax.tools.plan.rates import Rates, hosts_of
from megajax.tools.plan.variations import FP8, LAYOUT, MICROBATCHES, NEUTRAL, VARIED, Settings, Variations, as_overrides

MESHES_EXPANDED = 24  # fastest pairs of mesh and microbatches of the first pass, of each remat policy
SMALLEST = 24  # candidates with the fewest bytes that are asked whether anything fits without a pinned key
SECTIONS = sorted({key.split(".")[0] for key in (*VARIED, FP8)})
ROUNDING = 1e-9  # of a lower limit of a time
SEQUENCE_LENGTH, SEQUENCES_OF_A_GPU = 4096, 4  # of a config that sets no batch


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
        hosts_of(self.gpus, self.rates.hosts_of)
        chosen = {key: value for override in self.pinned for key, value in _values_of(override).items()}
        self.fixed = {key: value for key, value in chosen.items() if key in VARIED and value != -1}
        # The config of everything else: pinned keys may be legal with other values of the varied keys only.
        self.kept = [each for override in self.pinned for each in _without_varied(override)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            policy = {k: v for k, v in self.fixed.items() if k == "remat.policy"}  # remat.group needs full
            written = read_tree(self.path, self.kept).values
            self.varied_sections = {name: written.get(name) or {} for name in SECTIONS}
            # The file's own values of the varied keys may be illegal with the pinned keys.
            neutral = {**NEUTRAL, **policy}
            if (batch := self.varied_sections["batch"]).get("schedule"):  # microbatches that divide each of its sizes
                neutral[MICROBATCHES] = batch.get("global_size", 1)
            self.base = load_config(self.path, [*self.kept, *as_overrides(neutral)])
            self.written = self.base.model_copy(update=self._sections(self.varied_sections))
        self.variations = Variations(self.base, self.fixed, self.gpus, self.rates.hosts_of)
        check_fp8(self.base, self.rates, self.fp8)
        where = self.base.where(FP8)
        if self.fp8 and where != "default":
            recipe = self.base.precision.fp8.recipe
            raise InputError(f"--fp8 tries {FP8}, but it is set to {recipe} ({where}): leave one of them out.")

    def best(self, count: int) -> list[Candidate]:
        """The fastest candidates that fit, at most `count`, one of each mesh and precision.

        With `fp8` the fastest without it follows if it is not among them. Raises InputError if there is none.
        """
        recipes = (NONE.name, CURRENT.name) if self.fp8 else (None,)
        found = [each for recipe in recipes for each in self._expanded(recipe, count)]
        if not found:
            raise InputError(self._no_mesh())
        if not any(each.fits for each in found):
            raise InputError(self._nothing_fits(self._smallest(found)))
        fitting: dict[tuple, Candidate] = {}
        for each in sorted(found, key=_seconds):
            enough = len(fitting) >= count and (each.in_fp8 or any(not other.in_fp8 for other in fitting.values()))
            if each.mesh not in fitting and not enough and each.fits:
                fitting[each.mesh] = each
        return list(fitting.values())

    def changed(self, found: Candidate) -> list[str]:
        """The overrides of a candidate without those that the config has anyway."""
        have = {key: value(self.written, key) for key in found.settings}
        have = {key: list(x) if isinstance(x, tuple) else x for key, x in have.items()}
        return as_overrides({key: new for key, new in found.settings.items() if have[key] != new})

    def usual(self) -> Candidate:
        """Megatron's habit: tensor over 8 GPUs, 8 stages, data over the rest, a sequence in a microbatch, 1F1B.

        With the least recomputation that fits. Raises ConfigError if it is not legal.
        """
        tensor = min(8, self.rates.hosts_of, self.gpus)
        pipeline = min(8, self.gpus // tensor)
        sizes = {"pipeline": pipeline, "data": -1, "fsdp": 1, "expert": 1, "context": 1, "tensor": tensor}
        microbatches = max(1, self.base.batch.global_size * tensor * pipeline // self.gpus)
        settings: Settings = {f"mesh.{axis}": size for axis, size in sizes.items()}
        settings |= {"batch.num_microbatches": microbatches, "pipeline.schedule": "1f1b", "pipeline.virtual_stages": 1}
        found, refused = None, None
        for policy in ("none", "selective", "full"):
            remat: Settings = {LAYOUT: None, "remat.policy": policy, "remat.layers": None}
            try:
                found = self._made(self.variations.varied({**settings, **remat}))
            except ConfigError as error:
                refused = refused or error
            if found and found.gib <= self.rates.memory_gib:
                break
        if found is None:
            assert refused
            raise refused
        return found

    def _no_mesh(self) -> str:
        """The sentence if no candidate is legal: the pinned key to blame, and the most frequent reason."""
        frequent = self.refusals.most_common(1)[0][0] if self.refusals else "choose another value, or leave it out."
        reason = self._refusal() or frequent
        for key in self.fixed:
            if next(self._without(key)._legal(), None):
                return f"{self._named(key)} rules out every mesh of {counted(self.gpus, 'GPU')}: {reason}"
        pinned = " ".join(as_overrides(self.fixed)) or f"batch.global_size={self.base.batch.global_size}"
        if self.fixed or not self.refusals:
            return f"{pinned} leaves no mesh of {counted(self.gpus, 'GPU')}: {reason}"
        return f"no mesh of {counted(self.gpus, 'GPU')} is possible; the most frequent reason: {frequent}"

    def _refusal(self) -> str | None:
        """The reason against the pinned sizes alone, which --explain gives too; None if these are legal."""
        stages, size = self.fixed.get("mesh.pipeline"), self.base.batch.global_size
        batch = {MICROBATCHES: size if self.base.batch.schedule else most_microbatches(stages, size)}
        settings = {**NEUTRAL, **batch, **self.fixed}
        try:
            explained(self.path, [*self.kept, *as_overrides(settings)], self.gpus, self.rates)
        except ConfigError as error:
            return str(error)
        return None

    def _nothing_fits(self, closest: Candidate) -> str:
        """The sentence if nothing fits: the closest, what it lacks, and a pinned key that rules out what would fit."""
        lacking, gpus = closest.gib - self.rates.memory_gib, counted(self.gpus, self.rates.name)
        needs = f"the closest needs {closest.gib:.1f} GiB, {lacking:.1f} more than a GPU has"
        for key in self.fixed:
            if any(each.fits for each in self._without(key)._probably_smallest()):
                return (
                    f"{self._named(key)} rules out every mesh of {gpus} that holds this: "
                    f"{needs}. Without it some fit: choose another value, or leave it out."
                )
        settings = " ".join(as_overrides({**self.fixed, **closest.settings}))
        return f"no mesh of {gpus} holds this: {needs} ({settings}): use more GPUs, or a smaller batch."

    def _without(self, key: str) -> "Search":
        """The same search with a pinned key varied."""
        fixed = {other: value for other, value in self.fixed.items() if other != key}
        return Search(self.path, [*self.kept, *as_overrides(fixed)], self.gpus, self.rates, self.fp8)

    def _named(self, key: str) -> str:
        return " ".join(as_overrides({key: self.fixed[key]}))

    def _legal(self) -> Iterator[Candidate]:
        """The legal candidates of the first pass, with the policy that recomputes most."""
        for policy in self.variations.values("remat.policy", ["full"]):
            yield from (found for settings in self.variations.first_pass(policy) if (found := self.evaluate(settings)))

    def _probably_smallest(self) -> list[Candidate]:
        """The legal candidates that probably need the least memory: by their weights and the inputs of their layers."""
        state, stream = 16, 2 * self.base.model.hidden_size * self.base.model.num_layers  # bytes

        def size(found: Candidate) -> float:
            plan, stored = found.plan, found.storage.state.parameters
            return state * stored.total() + stream * plan.tokens / plan.sizes["tensor"]

        return sorted(self._legal(), key=size)[:SMALLEST]

    def evaluate(self, settings: Settings) -> Candidate | None:
        """The candidate with these settings; None if it is refused, with the reason in `refusals`."""
        self.tried += 1
        self.tell(self.tried)
        try:
            return self._made(settings)
        except ConfigError as error:
            self.refusals[str(error)] += 1
            return None

    def _made(self, settings: Settings) -> Candidate:
        """The candidate with these settings. Raises ConfigError if it is not legal."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = self._config(as_overrides({**self.fixed, **settings}))
        return Candidate.of(config, check_mesh(config, self.gpus), self.rates, settings)

    def _sections(self, values: dict) -> dict:
        """The sections of a config, by name."""
        return {name: type(getattr(self.base, name)).model_validate(keys) for name, keys in values.items()}

    def _config(self, overrides: list[str]) -> Config:
        """The base with overrides of varied keys, as `load_config` makes it: only their sections are read again."""
        tree = Tree(copy.deepcopy(self.varied_sections))
        for override in overrides:
            tree.merge(read_override(override))
        try:
            sections = self._sections(tree.values)
        except ValidationError:  # a pinned value; the sentence on it
            return load_config(self.path, [*self.kept, *overrides])
        config = self.base.model_copy(update=sections)
        config._locations = self.base._locations | tree.locations
        check_combinations(config)
        return config

    def _expanded(self, recipe: str | None, count: int) -> list[Candidate]:
        """Candidates of the second pass with a recipe of FP8; None: that of the config.

        They are those among which the `count` fastest are that fit, one of each mesh; if none fits some that do not.
        """
        vary = self.variations
        ways = [
            ([first], policies_left)
            for settings in self._chosen(recipe)
            for experts, change in itertools.product(vary.experts_over(settings), vary.schedules(settings))
            if (first := next(policies_left := self._recomputing({**settings, **change, **experts}), None))
        ]
        may_fit = [first.storage_fits for [first], _ in ways]
        least = [first.least_seconds for [first], _ in ways]
        fitting, fastest, too_large = dict[int, Candidate](), dict[tuple, float](), list[Candidate]()
        for way in sorted((way for way in range(len(ways)) if may_fit[way]), key=lambda way: least[way]):
            if len(fastest) >= count and least[way] > (1 + ROUNDING) * sorted(fastest.values())[count - 1]:
                break
            for found in itertools.chain(*ways[way]):
                if found.fits:
                    fitting[way] = found
                    fastest[found.mesh] = min(found.time.total, fastest.get(found.mesh, math.inf))
                    break  # those that follow recompute more
                too_large.append(found)
        if fitting:
            return [fitting[way] for way in sorted(fitting)]
        skipped = (found for way, rows in enumerate(ways) if not may_fit[way] for found in itertools.chain(*rows))
        return [*too_large, *skipped]

    def _chosen(self, recipe: str | None) -> list[Settings]:
        """The meshes and numbers of microbatches of the second pass."""
        policies = self.variations.values("remat.policy", ["none", "full"])
        first: dict[str, list[Candidate]] = {policy: [] for policy in policies}
        for settings in zip(*(self.variations.first_pass(policy, recipe) for policy in policies), strict=True):
            for policy, of_policy in zip(policies, settings, strict=True):
                first[policy] += filter(None, [self.evaluate(of_policy)])
        chosen: dict[tuple, Settings] = {}
        for policy, of_policy in first.items():
            # The fastest that fit, and of those that may fit with some recomputation the fastest.
            some = [] if POLICIES[policy].keeps_input else sorted(of_policy, key=_seconds)[:MESHES_EXPANDED]
            stored = sorted((each for each in of_policy if each.storage_fits), key=_seconds)
            fitting = list(itertools.islice((each for each in stored if each.fits), MESHES_EXPANDED))
            for found in [*some, *(fitting or ([self._smallest(of_policy)] if of_policy else []))]:
                plan = found.plan
                chosen[*plan.sizes.values(), plan.batch_shape[0]] = found.settings
        return list(chosen.values())

    def _smallest(self, found: list[Candidate]) -> Candidate:
        """The candidate that needs the least memory, at least that of its storage."""
        smallest = None
        for each in sorted(found, key=lambda each: each.storage.bytes):
            if smallest and each.storage.bytes > smallest.memory.total:
                break
            smallest = min(filter(None, (smallest, each)), key=lambda each: each.gib)
        assert smallest
        return smallest

    def _recomputing(self, settings: Settings) -> Iterator[Candidate]:
        """The legal candidates with each remat policy, those that recompute least first."""
        for remat in self.variations.remats(settings):
            yield from filter(None, [self.evaluate({**settings, **remat})])


def _seconds(found: Candidate) -> float:
    return found.time.total


def _values_of(override: str) -> Settings:
    """The keys and values of an override: one, or those of a section in braces."""
    [(section, given)] = read_override(override).values.items()
    return {f"{section}.{name}": value for name, value in given.items()} if isinstance(given, dict) else {}


def _without_varied(override: str) -> list[str]:
    """The override without the keys that the search varies."""
    values = _values_of(override)
    unvaried = {key: value for key, value in values.items() if key not in VARIED}
    return [override] if len(unvaried) == len(values) else as_overrides(unvaried)


def check_fp8(config: Config, rates: Rates, asked: bool = False) -> None:
    """Raises InputError for FP8 on a GPU without it; `asked`: by --fp8."""
    recipe = config.precision.fp8.recipe
    if float(rates.capability) < ADA and (asked or config.precision.fp8.chosen.is_on):
        setting = "--fp8" if asked else f"{FP8}={recipe} ({config.where(FP8)})"
        raise InputError(f"{setting} needs a GPU with FP8, which an {rates.name} is not: leave it out.")


def most_microbatches(stages: object, global_size: int) -> int:
    """A number of microbatches for the reason why a mesh is refused: a pipeline needs several, other meshes one."""
    return 1 if stages in (None, 1) else global_size


def missing_settings(path: Path, overrides: Sequence[str], gpus: int) -> tuple[list[str], list[str]]:
    """Overrides for what a config must have but a plan does not need to know: data, and the size of a batch.

    The second list are lines that say what was assumed.
    """
    given = read_tree(path, overrides).values
    batch, added, lines = given.get("batch") or {}, [], []
    if not given.get("data"):
        added.append("data.kind=synthetic")
    for key, default in (("sequence_length", SEQUENCE_LENGTH), ("global_size", SEQUENCES_OF_A_GPU * gpus)):
        if batch.get(key) is None:
            added.append(f"batch.{key}={default}")
            lines.append(f"batch.{key} is not set: {default} is assumed.")
    return added, lines


def explained(path: Path, overrides: Sequence[str], gpus: int, rates: Rates) -> Candidate:
    """The candidate of the config's own mesh. Raises ConfigError if it is not legal."""
    config: Config = load_config(path, overrides)
    check_fp8(config, rates)
    return Candidate.of(config, check_mesh(config, gpus), rates)
