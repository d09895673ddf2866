"""The registered kinds of blocks: their parts, and the settings that a part must declare to support.

It does not import the parts, which need jax: `model.block.register` puts them here.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from megajax.config.kinds import DENSE, KINDS, MOE, block_layers, layer_kinds
from megajax.config.schema import Config
from megajax.config.sentences import fail, format_axis, format_keys
from megajax.config.stages import layer_slots, slot_kinds
from megajax.errors import ConfigError

BUILT_IN = (DENSE, MOE)
DECODING, DRAFTS = "decoding", "drafts"
# What a part can do, in the words of `Sublayer.SUPPORTS`: none of it by default.
ABILITIES = {
    "tensor": "its tokens and weights are divided over mesh.tensor, by the communication points",
    "context": "a device has some chunks of each sequence only, in any order; or it takes them by comm.in_order",
    "documents": "no token depends on another document of its sequence (inputs.token_positions)",
    "layer_pattern": "it follows the window and the positions of its layer (kind)",
    "empty_slots": "with weights of zero its output, its losses and their gradients are zero",
    "fp8": "all its matmuls are in LINEAR and run through the communication points, also in FP8",
    "lora": "all its matmuls are in LINEAR and run through the communication points, also with adapters",
    "qk_clip": "it has the metric MAX_SCORE and scales its weights by it (rescaled)",
    DECODING: "new tokens reach earlier ones by comm.attend or what comm.keep kept, or depend on no other token",
    DRAFTS: "what was kept of tokens may be replaced from any of them on, as comm.attend does",
}
EVERYTHING = frozenset(ABILITIES)


class Need(NamedTuple):
    """An ability that the parts of some kinds of blocks need, because of a setting."""

    ability: str
    key: str  # of the setting
    setting: str  # key=value
    cure: str
    kinds: Iterable[str]


def parts_of(kind: str) -> dict[str, type[Any]]:
    """The classes of a kind's sublayers by name. Raises ConfigError if it is not registered."""
    if kind not in KINDS:
        known = ", ".join(sorted({*KINDS, *BUILT_IN}))
        raise ConfigError(
            f"model.block_pattern has {kind!r}, which is not a kind of block: use {known}, or name the module that "
            "registers it in run.extensions."
        )
    return KINDS[kind]


def check_parts(config: Config, sizes: dict[str, int]) -> None:
    """Raise ConfigError for an unknown kind of block, and for a setting that a part of a block does not support."""
    registered = [kind for kind in block_layers(config.model) if kind not in BUILT_IN]
    for kind in registered:
        parts_of(kind)
    for need in _needs(config, sizes) if registered else ():
        for kind in (kind for kind in registered if kind in need.kinds):
            if part := lacking(kind, need.ability):
                problem = f"{need.setting} needs {need.ability}, which {part.__name__} (block {kind}) does not declare"
                cure = f"{need.cure}, or {how_to_declare(part, need.ability)}"
                fail(config, problem, cure, need.key, "model.block_pattern")
    last = layer_kinds(config.model)[-1].block
    if sizes["pipeline"] > 1 and config.model.mtp_layers and last in registered and takes_order(last):
        problem = f"{format_keys(config, 'model.mtp_layers')} in a pipeline divides every sequence over the stages"
        problem += f", but the last layer's kind {last} needs consecutive tokens (IN_ORDER)"
        fail(config, problem, "set mesh.pipeline=1 or model.mtp_layers=0", "mesh.pipeline", "model.mtp_layers")


def takes_order(kind: str) -> bool:
    """Whether a sublayer of a kind takes the tokens in the order of their sequences."""
    return kind not in BUILT_IN and any(part.IN_ORDER for part in parts_of(kind).values())


def read_streams(kind: str) -> dict[str, type[Any]]:
    """The streams that a kind reads besides the residual stream, each with the sublayer that reads it."""
    parts = () if kind in BUILT_IN else parts_of(kind).values()
    return {stream: part for part in parts for stream in part.STREAMS}


def lacking(kind: str, ability: str) -> type[Any] | None:
    """The first part of a kind of block that does not declare an ability."""
    return next((part for part in parts_of(kind).values() if ability not in part.SUPPORTS), None)


def how_to_declare(part: type[Any], ability: str) -> str:
    """The end of a sentence about an ability that a part does not declare."""
    return f"add {ability!r} to {part.__name__}.SUPPORTS if it can: {ABILITIES[ability]}"


def _needs(config: Config, sizes: dict[str, int]) -> Iterator[Need]:
    model, kinds, every = config.model, layer_kinds(config.model), block_layers(config.model)
    for axis in ("tensor", "context"):
        if sizes[axis] > 1:
            key = f"mesh.{axis}"
            yield Need(axis, key, format_axis(config, sizes, axis), f"set {key}=1", every)
    if sizes["pipeline"] > 1:
        setting, key = format_axis(config, sizes, "pipeline"), "mesh.pipeline"
        if model.mtp_layers:  # its stages share the tokens of the modules, each a part of every sequence
            both = f"{setting} with {format_keys(config, 'model.mtp_layers')}"
            yield Need("context", key, both, "set mesh.pipeline=1 or model.mtp_layers=0", (kinds[-1].block,))
        empty = _with_empty_slots(config, sizes["pipeline"])
        cure = "choose a pipeline.layout with the same kinds of blocks on each stage"
        yield Need("empty_slots", key, f"{setting}, which leaves stages without a layer in a slot,", cure, empty)
    packed = "data.pack" if config.data.kind == "chat" else "data.reset_attention"
    chosen = {
        "documents": (packed, config.data.reset_attention, "set it to false"),
        "lora": ("lora.rank", config.lora.rank is not None, "train all weights, without lora"),
        "qk_clip": ("model.qk_clip", model.qk_clip is not None, "remove it"),
    }
    for ability, (key, applies, cure) in chosen.items():
        if applies:
            yield Need(ability, key, format_keys(config, key), cure, every)
    if config.fp8_layers:
        key, own = "precision.fp8.recipe", {kinds[layer].block for layer in config.fp8_layers}
        yield Need("fp8", key, format_keys(config, key), f"set {key}=none", own)
    for key, own in (
        ("model.sliding_window", {kind.block for kind in kinds if kind.window is not None}),
        ("model.rope_pattern", {kind.block for kind in kinds if not kind.rope}),
    ):
        yield Need("layer_pattern", key, format_keys(config, key), "remove it", own)


def _with_empty_slots(config: Config, stages: int) -> set[str]:
    """The kinds of blocks with a slot that has no layer on some virtual stage."""
    slots = slot_kinds(config, stages)
    of_stages = [set(own) for own in layer_slots(config, stages)]
    return {kind.block for slot, kind in enumerate(slots) if any(slot not in own for own in of_stages)}
