"""Checks of the settings that a sublayer must declare to support."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from megajax.config.extensions import check_sublayer_settings
from megajax.config.sentences import fail, format_axis, format_keys
from megajax.layout.kinds import BUILT_IN_BLOCKS, block_layers, extra_of, layer_kinds
from megajax.layout.stages import layer_slots, slot_kinds
from megajax.layout.sublayers import ABILITIES, lacking, parts_of, takes_order
from megajax.schema.config import Config


class Need(NamedTuple):
    """An ability that the parts of some kinds of blocks need, because of a setting."""

    ability: str
    key: str  # of the setting
    setting: str  # key=value
    cure: str
    kinds: Iterable[str]


def check_parts(config: Config, sizes: dict[str, int]) -> None:
    """Raise ConfigError for an unknown kind of block, and for a setting that a part of a block does not support."""
    kinds = block_layers(config.model)
    for kind in (kind for kind in kinds if kind not in BUILT_IN_BLOCKS):
        parts_of(kind)
    check_sublayer_settings(config)
    limited = [kind for kind in kinds if any(lacking(kind, ability) for ability in ABILITIES)]
    for need in _needs(config, sizes) if limited else ():
        for kind in (kind for kind in limited if kind in need.kinds):
            if lack := lacking(kind, need.ability):
                cure = f"{need.cure}, or {lack.cure}" if lack.cure else need.cure
                problem = f"{need.setting} needs {need.ability}, {lack.what}"
                fail(config, problem, cure, need.key, "model.block_pattern")
    last, extra = layer_kinds(config.model)[-1].block, extra_of(config.model)
    if sizes["pipeline"] > 1 and extra and takes_order(last):
        problem = f"{format_keys(config, extra.key)} in a pipeline divides every sequence over the stages"
        problem += f", but the last layer's kind {last} needs consecutive tokens (IN_ORDER)"
        fail(config, problem, f"set mesh.pipeline=1 or {extra.key}=0", "mesh.pipeline", extra.key)


def _needs(config: Config, sizes: dict[str, int]) -> Iterator[Need]:
    model, kinds, every = config.model, layer_kinds(config.model), block_layers(config.model)
    for axis in ("tensor", "context"):
        if sizes[axis] > 1:
            key = f"mesh.{axis}"
            yield Need(axis, key, format_axis(config, sizes, axis), f"set {key}=1", every)
    if sizes["pipeline"] > 1:
        setting, key = format_axis(config, sizes, "pipeline"), "mesh.pipeline"
        if extra := extra_of(model):  # its stages share the tokens of these layers, each a part of every sequence
            both = f"{setting} with {format_keys(config, extra.key)}"
            yield Need("context", key, both, f"set mesh.pipeline=1 or {extra.key}=0", (kinds[-1].block,))
        empty = _with_empty_slots(config, sizes["pipeline"])
        cure = "choose a pipeline.layout with the same kinds of blocks on each stage"
        yield Need("empty_slots", key, f"{setting}, which leaves stages without a layer in a slot,", cure, empty)
    packed, alone = "data.reset_attention", "set it to false"
    if config.data.kind == "chat":
        packed, alone = "data.packing", "set it to none"
    both_sides = "model.prefix_lm" if model.prefix_lm else "model.causal"
    chosen = {
        "documents": (packed, config.data.reset_attention, alone),
        "lora": ("lora.rank", config.lora.rank is not None, "train all weights, without lora"),
        "bidirectional": (both_sides, model.prefix_lm or not model.causal, "let tokens see those before them only"),
        "qk_clip": ("model.qk_clip", model.qk_clip is not None, "remove it"),
    }
    for ability, (key, applies, cure) in chosen.items():
        if applies:
            yield Need(ability, key, format_keys(config, key), cure, every)
    if config.fp8_layers:
        key, blocks = "precision.fp8.recipe", {kinds[layer].block for layer in config.fp8_layers}
        yield Need("fp8", key, format_keys(config, key), f"set {key}=none", blocks)
    for key, blocks, cure in (
        (
            "model.sliding_window",
            {kind.block for kind in kinds if kind.window is not None},
            "make its layers global in model.layer_pattern",
        ),
        ("model.rope_pattern", {kind.block for kind in kinds if not kind.rope}, "write rope for its layers there"),
    ):
        yield Need("layer_pattern", key, format_keys(config, key), f"{cure}, or remove it", blocks)


def _with_empty_slots(config: Config, stages: int) -> set[str]:
    """The kinds of blocks with a slot that has no layer on some virtual stage."""
    slots = slot_kinds(config, stages)
    of_stages = [set(filled) for filled in layer_slots(config, stages)]
    return {kind.block for slot, kind in enumerate(slots) if any(slot not in filled for filled in of_stages)}
