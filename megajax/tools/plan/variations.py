"""The settings that a search varies: values of each key for a config on N GPUs."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megajax.config import Config
from megajax.config.sentences import divisors
from megajax.layout.stages import default_layout, layouts_to_try
from megajax.options.remat import POLICIES
from megajax.schema.tree import as_override

TENSOR, EXPERTS_OVER, LAYOUT, FP8 = "mesh.tensor", "mesh.experts_over", "pipeline.layout", "precision.fp8.recipe"
MICROBATCHES = "batch.num_microbatches"
FEWEST_TOKENS = 2048  # of a sequence on a device of `context`
MOST_TOKENS = 2**17  # of a microbatch on a device
MOST_EXPERT_SHARDS = 64
# Of a pipeline: virtual stages on a device; part of its layer slots that may be empty for more of them.
MOST_VIRTUAL_STAGES, EMPTY_SLOTS = 20, 0.1
VARIED = (
    *("mesh.pipeline", "mesh.data", "mesh.fsdp", "mesh.expert", "mesh.context", TENSOR, EXPERTS_OVER),
    *(MICROBATCHES, "pipeline.schedule", "pipeline.virtual_stages", LAYOUT, "remat.policy", "remat.layers"),
)
type Settings = dict[str, object]
NEUTRAL: Settings = {  # values that are legal with every value of the other keys
    **{f"mesh.{axis}": 1 for axis in ("pipeline", "fsdp", "expert", "context", "tensor")},
    "mesh.data": -1,
    MICROBATCHES: 1,
    "pipeline.virtual_stages": 1,
    LAYOUT: None,
    "remat.layers": None,
}


def as_overrides(settings: Settings) -> list[str]:
    """Settings for a command line, without spaces."""
    return [f"{key}={as_override(value).replace(', ', ',')}" for key, value in settings.items()]


@dataclass(frozen=True)
class Variations:
    """The variations of a config on `gpus` GPUs in hosts of `hosts_of`; keys in `fixed` have the values there."""

    config: Config
    fixed: Mapping[str, object]
    gpus: int
    hosts_of: int

    def first_pass(self, policy: str, recipe: str | None = None) -> Iterator[Settings]:
        """Meshes and numbers of microbatches, with the plainest schedule."""
        for mesh in self.meshes():
            sizes: Settings = {f"mesh.{axis}": size for axis, size in mesh.items()}
            layouts = self._layouts(sizes, int(str(self.fixed.get("pipeline.virtual_stages", 1))))
            for microbatches, layout in itertools.product(self._microbatches(mesh), layouts[:1]):
                settings: Settings = {
                    **sizes,
                    MICROBATCHES: microbatches,
                    "pipeline.schedule": "1f1b",
                    "pipeline.virtual_stages": 1,
                    LAYOUT: layout,
                    "remat.policy": policy,
                    "remat.layers": None,
                }
                yield self.varied(settings if recipe is None else {**settings, FP8: recipe})

    def meshes(self) -> Iterator[dict[str, int]]:
        """Sizes of all axes with the product `gpus`. `tensor` stays within a host."""
        config, gpus = self.config, self.gpus
        sizes = divisors(gpus)
        context = [n for n in sizes if n == 1 or config.batch.sequence_length // n >= FEWEST_TOKENS]
        experts = config.model.num_experts or 1
        choices = {
            "tensor": [n for n in sizes if n <= self.hosts_of],
            "context": [n for n in context if n <= 2 * self.hosts_of],
            "expert": [n for n in sizes if experts % n == 0 and n <= MOST_EXPERT_SHARDS],
            "pipeline": [n for n in sizes if n <= config.model.num_layers],
        }
        axes = {axis: self.values(f"mesh.{axis}", values) for axis, values in choices.items()}
        for tensor, context, expert, pipeline in itertools.product(*axes.values()):
            used = int(tensor) * int(context) * int(expert) * int(pipeline)
            if gpus % used:
                continue
            devices_left = gpus // used
            for fsdp in self.values("mesh.fsdp", _shares(devices_left, self.hosts_of // int(tensor))):
                if devices_left % int(fsdp) == 0:
                    mesh = {"pipeline": pipeline, "data": devices_left // int(fsdp), "fsdp": fsdp}
                    yield {
                        k: int(v) for k, v in {**mesh, "expert": expert, "context": context, "tensor": tensor}.items()
                    }

    def _microbatches(self, mesh: dict[str, int]) -> list[int]:
        """Numbers of microbatches with 1 to MOST_SEQUENCES sequences of each on a device."""
        shards = mesh["data"] * mesh["fsdp"] * mesh["expert"]
        per_device, beyond = divmod(self.config.batch.global_size, shards)
        most = MOST_TOKENS * mesh["context"] // self.config.batch.sequence_length
        counts = [] if beyond else [per_device // s for s in divisors(per_device) if s <= max(1, most)]
        return [int(n) for n in self.values(MICROBATCHES, counts)]

    def schedules(self, settings: Settings) -> Iterator[Settings]:
        """Schedules, virtual stages and layouts for a mesh."""
        stages = self._stages(settings)
        schedules = self.values("pipeline.schedule", ["1f1b", "zero_bubble"] if stages > 1 else ["1f1b"])
        virtual_stages = self.values("pipeline.virtual_stages", self._virtual_stages(stages))
        for schedule, number in itertools.product(schedules, virtual_stages):
            for layout in self._layouts(settings, number):
                change: Settings = {"pipeline.schedule": schedule, "pipeline.virtual_stages": number, LAYOUT: layout}
                yield {**settings, **self.varied(change)}

    def _virtual_stages(self, stages: int) -> list[int]:
        """Numbers of virtual stages of a device: for each number of layers in one the fewest that hold all layers."""
        layers = self.config.model.num_layers
        if stages == 1:
            return [1]
        fewest = -(-layers // stages)
        slots = {r: -(-layers // (stages * r)) for r in range(1, min(fewest, MOST_VIRTUAL_STAGES) + 1)}
        first = {slots[r]: r for r in reversed(slots)}.values()
        return sorted(r for r in first if r * slots[r] <= (1 + EMPTY_SLOTS) * fewest)

    def _layouts(self, settings: Settings, virtual_stages: int) -> list[list[int] | None]:
        """Layouts of the stages of a mesh; None for the default."""
        model, stages = self.config.model, self._stages(settings)
        if stages == 1 or LAYOUT in self.fixed:
            return [None]
        default = default_layout(model, stages * virtual_stages)
        return [
            None if layout == default else list(layout) for layout in layouts_to_try(model, stages * virtual_stages)
        ]

    def remats(self, settings: Settings) -> Iterator[Settings]:
        """Remat policies, those that recompute least first."""
        virtual_stages = int(str(settings.get("pipeline.virtual_stages", self.fixed.get("pipeline.virtual_stages", 1))))
        layers = -(-self.config.model.num_layers // (self._stages(settings) * virtual_stages))
        for policy in self.values("remat.policy", ["none", "selective", "full"]):
            some = (
                sorted({max(1, layers * k // 4) for k in (1, 2, 3)} - {layers}) if POLICIES[policy].keeps_input else []
            )
            for recomputed in self.values("remat.layers", [*some, None]):
                yield self.varied({"remat.policy": policy, "remat.layers": recomputed})

    def experts_over(self, settings: Settings) -> Iterator[Settings]:
        """Axes that divide the experts: `expert`, and with it one other axis of the mesh. Nothing for a dense model."""
        number, sizes = self.config.model.num_experts, {**self.fixed, **settings}
        if not number or EXPERTS_OVER in self.fixed:
            yield {}
            return
        yield {EXPERTS_OVER: ["expert"]}
        for axis in ("data", "fsdp", "context", "tensor"):
            size, experts = int(str(sizes[f"mesh.{axis}"])), int(str(sizes["mesh.expert"]))
            shards = size * experts
            if size > 1 and number % shards == 0 and shards <= MOST_EXPERT_SHARDS:
                yield {EXPERTS_OVER: ["expert", axis]}

    def _stages(self, settings: Settings) -> int:
        return int(str({**self.fixed, **settings}["mesh.pipeline"]))

    def values(self, key: str, values: list) -> list:
        """The values of a key to try: its own if it is pinned."""
        return [self.fixed[key]] if key in self.fixed else values

    def varied(self, settings: Settings) -> Settings:
        """The settings of keys that are not pinned."""
        return {key: value for key, value in settings.items() if key not in self.fixed}


def _shares(devices: int, local: int) -> list[int]:
    """Sizes of `fsdp`: none, the GPUs that are left in a host, and all."""
    return sorted({1, devices, *(n for n in (local, 2 * local, 8 * local) if n > 1 and devices % n == 0)})
