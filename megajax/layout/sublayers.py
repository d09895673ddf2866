"""What the sublayers of a kind of block can do.

It does not import the sublayers, which need jax: those of built-in kinds are in `DECLARED`, and
`model.block.register_block` puts the classes of the others into `KINDS`.
"""

from typing import Any, NamedTuple

from megajax.errors import ConfigError
from megajax.layout.kinds import BUILT_IN_BLOCKS, DECLARED, KINDS, block_layers
from megajax.schema.model import ModelConfig

DECODING, DRAFTS = "decoding", "drafts"
# What a part can do, in the words of `Sublayer.SUPPORTS`: none of it by default.
ABILITIES = {
    "tensor": "its tokens and weights are divided over mesh.tensor, by the communication points",
    "context": "a device has some chunks of each sequence only, in any order; or it takes them by comm.in_order",
    "documents": "no token depends on another document of its sequence (inputs.token_positions)",
    "bidirectional": "with model.causal=false, or in a prefix, a token depends on those after it too",
    "layer_pattern": "it follows the window and the positions of its layer (kind)",
    "empty_slots": "with weights of zero its output, its losses and their gradients are zero",
    "fp8": "all its matmuls are in LINEAR and run through the communication points, also in FP8",
    "lora": "all its matmuls are in LINEAR and run through the communication points, also with adapters",
    "qk_clip": "it has the metric MAX_SCORE and scales its weights by it (rescaled)",
    DECODING: "new tokens reach earlier ones by comm.attend or what comm.keep kept, or depend on no other token",
    DRAFTS: "what was kept of tokens may be replaced from any of them on, as comm.attend does",
}
EVERYTHING = frozenset(ABILITIES)


def supported(name: str) -> frozenset[str]:
    """The abilities of a built-in sublayer."""
    return EVERYTHING - DECLARED[name].lacks


def parts_of(kind: str) -> dict[str, type[Any]]:
    """The classes of a kind's sublayers by name. Raises ConfigError if it is not registered."""
    if kind not in KINDS:
        known = ", ".join(sorted({*KINDS, *BUILT_IN_BLOCKS}))
        raise ConfigError(
            f"model.block_pattern has {kind!r}, which is not a kind of block: use {known}, or name the module that "
            "registers it in run.extensions."
        )
    return KINDS[kind]


def registered_parts(model: ModelConfig) -> dict[str, type[Any]]:
    """The sublayers by name of the model's kinds of block that are not built in."""
    kinds = [kind for kind in block_layers(model) if kind not in BUILT_IN_BLOCKS]
    return {name: part for kind in kinds for name, part in parts_of(kind).items()}


def takes_order(kind: str) -> bool:
    """Whether a sublayer of a kind takes the tokens in the order of their sequences."""
    if kind in BUILT_IN_BLOCKS:
        return any(DECLARED[name].in_order for name in BUILT_IN_BLOCKS[kind])
    return any(part.IN_ORDER for part in parts_of(kind).values())


def read_streams(kind: str) -> dict[str, str]:
    """The streams of encoders that a kind reads, each with the sublayer that reads it."""
    if kind in BUILT_IN_BLOCKS:
        return {stream: name for name in BUILT_IN_BLOCKS[kind] for stream in DECLARED[name].streams}
    return {stream: part.__name__ for part in parts_of(kind).values() for stream in part.STREAMS}


class Lack(NamedTuple):
    """An ability that a sublayer of a kind of block does not have."""

    what: str  # the end of a sentence: "which ... does not have"
    cure: str | None  # how to declare it, for a sublayer that is not built in


def lacking(kind: str, ability: str) -> Lack | None:
    """The first sublayer of a kind of block without an ability."""
    if kind in BUILT_IN_BLOCKS:
        found = next((name for name in BUILT_IN_BLOCKS[kind] if ability in DECLARED[name].lacks), None)
        return Lack(f"which {found} (block {kind}) does not have: {ABILITIES[ability]}", None) if found else None
    part = next((part for part in parts_of(kind).values() if ability not in part.SUPPORTS), None)
    if part is None:
        return None
    cure = f"add {ability!r} to {part.__name__}.SUPPORTS if it can: {ABILITIES[ability]}"
    return Lack(f"which {part.__name__} (block {kind}) does not declare", cure)
