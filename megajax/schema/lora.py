"""The keys of the section `lora`."""

from typing import Annotated

from pydantic import Field

from megajax.schema.fields import BelowOne, Count, Positive, Section, Text


class LoraConfig(Section):
    """Low-rank adapters of linear layers; all other weights, from `checkpoint.init_from`, are frozen."""

    rank: Count | None = Field(default=None, description="Rank of the adapters; null: train all weights.")
    alpha: Positive | None = Field(
        default=None,
        description="Multiplies an adapter's output, divided by rank.",
        json_schema_extra={"derived": "rank"},
    )
    targets: Annotated[tuple[Text, ...], Field(strict=False, min_length=1)] | None = Field(
        default=None,
        description="Linear layers with adapters: query, key, value, output, gate, up, down; of a shared expert"
        " shared_gate, shared_up, shared_down; null: all that the model has.",
    )
    dropout: BelowOne = Field(default=0.0, description="Dropout rate of the adapters' inputs.")

    @property
    def scale(self) -> float:
        """The factor of an adapter's output."""
        assert self.rank is not None and self.alpha is not None
        return self.alpha / self.rank
