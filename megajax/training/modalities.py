"""Tokens of text and of images a second, of models with a vision tower."""

from typing import Any

from megajax.data.loader import samples_of_step
from megajax.data.packing import RowPacking
from megajax.data.samples import Samples
from megajax.training.hooks import Hook, RunView

SPEED = "tokens_per_second_per_device"


class Modalities(Hook):
    """Divides the speed of a logged step by its tokens: of images, of text, and of padding, which is not logged."""

    def __init__(self, train: Samples):
        self._train = train

    def on_log(self, run: RunView, step: int, values: dict[str, Any]) -> None:
        vision = run.config.model.vision
        if vision is None:
            return
        indices = samples_of_step(self._train, run.sizes, step - 1, RowPacking.of(run.config)).tolist()
        patches = sum(sized.rows * sized.columns for i in indices for sized, _ in self._train.pictures(i))
        padding = sum(max(0, self._train.padding(i) - 1) for i in indices)  # a sample has one token more
        tokens, image = len(indices) * run.config.batch.sequence_length, patches // vision.merge**2
        for name, count in (("image", image), ("text", tokens - padding - image)):
            values[f"{name}_{SPEED}"] = values[SPEED] * count / tokens
