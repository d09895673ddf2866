"""The keys of the section `lora`."""

import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from megajax.options.fp8_recipes import RECIPES
from megajax.schema.fields import BelowOne, Count, Positive, Section, Text
from megajax.schema.rules import Excludes, Needs, ReadIf

# Names of linear layers in the models of transformers, which PEFT has: those here.
OF_PEFT = {f"{name}_proj": [name] for name in ("gate", "up", "down")}
OF_PEFT |= {"q_proj": ["query"], "k_proj": ["key"], "v_proj": ["value"], "o_proj": ["output"]}
OF_PEFT |= dict.fromkeys(("c_attn", "qkv_proj", "query_key_value"), ["query", "key", "value"])
OF_PEFT |= {"gate_up_proj": ["gate", "up"], "c_fc": ["up"], "c_proj": ["output", "down"], "all-linear": []}
ALL = "leave lora.targets out, which means all linear layers"


def our_layers(names: Sequence[str]) -> list[str]:
    """Names of linear layers with ours in place of PEFT's; none for "all-linear"."""
    return list(dict.fromkeys(ours for name in names for ours in OF_PEFT.get(name, [name])))


def _no_text(value: Any) -> Any:
    if not isinstance(value, str) or not value:
        return value
    ours = our_layers(re.split(r"[\s,]+", value.strip()))
    raise ValueError(f"is not a list: {f'write [{",".join(ours)}]' if ours else ALL}")


class LoraConfig(Section):
    """Low-rank adapters of linear layers; all other weights, from `checkpoint.init_from`, are frozen."""

    rank: Annotated[
        Count | None,
        Needs(
            "checkpoint.init_from",
            what="the weights of a trained model",
            cure="set checkpoint.init_from to a run or to a Hugging Face folder",
        ),
        Excludes(
            "checkpoint.init_state",
            ("position", "all"),
            because="its training would not go on with new adapters",
            cure="set checkpoint.init_state=weights",
        ),
        Excludes("precision.fp8.recipe", lambda recipe: RECIPES[recipe].is_on, cure="set precision.fp8.recipe=none"),
    ] = Field(default=None, description="Rank of the adapters; null: train all weights.")
    alpha: Annotated[Positive | None, ReadIf("rank")] = Field(
        default=None,
        description="Multiplies an adapter's output, divided by rank.",
        json_schema_extra={"derived": "rank"},
    )
    targets: Annotated[
        Annotated[tuple[Text, ...], Field(strict=False, min_length=1)] | None, BeforeValidator(_no_text), ReadIf("rank")
    ] = Field(
        default=None,
        description="Linear layers with adapters: query, key, value, output, gate, up, down; of latent attention also"
        " query_down, key_value_down, rotary_key; of a shared expert shared_gate, shared_up, shared_down; null: all"
        " that the model has.",
    )
    dropout: Annotated[BelowOne, ReadIf("rank")] = Field(
        default=0.0, description="Dropout rate of the adapters' inputs."
    )

    @property
    def scale(self) -> float:
        """The factor of an adapter's output."""
        assert self.rank is not None and self.alpha is not None
        return self.alpha / self.rank
