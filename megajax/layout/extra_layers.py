"""Layers after the model's: each predicts a token further ahead, in training and for drafts.

Layer k reads the output of the one before it beside the embedding of the token k + 1 ahead, `[T, 2D]`, has the
attention and the feed-forward of the model's last layer, and predicts the token after that one with the model's head.
"""

from dataclasses import dataclass

from megajax.schema.model import ModelConfig


@dataclass(frozen=True)
class ExtraLayers:
    """A kind of such layers, by its declarations."""

    name: str  # the kind of their blocks, in the names of parameters and of metrics
    layers: str  # the key of the section `model` with their number
    loss_weight: str  # the key with the weight of the mean of their losses
    purpose: str  # in sentences

    @property
    def key(self) -> str:
        """The full name of the key with their number."""
        return f"model.{self.layers}"

    def count(self, model: ModelConfig) -> int:
        """The number of these layers."""
        return getattr(model, self.layers)

    def weight(self, model: ModelConfig) -> float:
        """The weight of the mean of their losses."""
        return getattr(model, self.loss_weight)
