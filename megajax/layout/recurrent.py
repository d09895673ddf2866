"""The heads of the sublayers with a state, by the keys that have their sizes; checks ask without importing jax."""

from typing import NamedTuple

from megajax.layout.kinds import GATED_DELTANET, KDA, MAMBA2, has_sublayer
from megajax.schema.model import ModelConfig


class RecurrentHeads(NamedTuple):
    """The keys of one section of `model`."""

    section: str
    shared: str  # number of the keys, which `mesh.tensor` divides
    heads: str  # number of heads, a multiple of it
    widths: tuple[tuple[str, str], ...]  # (number, width) of the parts of the projections

    def key(self, name: str) -> str:
        """The full name of a key."""
        return f"model.{self.section}.{name}"


HEADS = {
    GATED_DELTANET: RecurrentHeads(
        "linear_attention",
        "num_key_heads",
        "num_value_heads",
        (("num_key_heads", "key_head_dim"), ("num_value_heads", "value_head_dim")),
    ),
    KDA: RecurrentHeads("kda", "num_heads", "num_heads", (("num_heads", "head_dim"),)),
    MAMBA2: RecurrentHeads(
        "mamba2", "num_groups", "num_heads", (("num_groups", "state_dim"), ("num_heads", "head_dim"))
    ),
}


def recurrent_heads(model: ModelConfig) -> list[RecurrentHeads]:
    """Those of the sublayers that the model has."""
    return [heads for name, heads in HEADS.items() if has_sublayer(model, name)]


def unused_sections(model: ModelConfig) -> list[RecurrentHeads]:
    """Those of the others."""
    return [heads for name, heads in HEADS.items() if not has_sublayer(model, name)]


def recurrent_widths(model: ModelConfig) -> dict[str, int]:
    """The widths of their heads' keys and values, by the full names of the model's keys."""
    heads = recurrent_heads(model)
    return {e.key(name): getattr(getattr(model, e.section), name) for e in heads for _, name in e.widths}


def channels_with_decays(model: ModelConfig) -> int:
    """Number of the channels that have decays of their own: those of KDA's heads."""
    return model.kda.num_heads * model.kda.head_dim if has_sublayer(model, KDA) else 0
