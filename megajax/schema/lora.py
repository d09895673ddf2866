"""The keys of the section `lora`."""

from typing import Annotated

from pydantic import Field

from megajax.options.fp8_recipes import RECIPES
from megajax.schema.fields import BelowOne, Count, Positive, Section, Text
from megajax.schema.rules import Excludes, Needs, ReadIf


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
    targets: Annotated[Annotated[tuple[Text, ...], Field(strict=False, min_length=1)] | None, ReadIf("rank")] = Field(
        default=None,
        description="Linear layers with adapters: query, key, value, output, gate, up, down; of a shared expert"
        " shared_gate, shared_up, shared_down; null: all that the model has.",
    )
    dropout: Annotated[BelowOne, ReadIf("rank")] = Field(
        default=0.0, description="Dropout rate of the adapters' inputs."
    )

    @property
    def scale(self) -> float:
        """The factor of an adapter's output."""
        assert self.rank is not None and self.alpha is not None
        return self.alpha / self.rank
