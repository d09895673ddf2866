"""Each token of an evaluation's data once."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from megajax.data.chat_samples import ChatSamples
from megajax.data.megatron import MegatronSamples
from megajax.data.samples import BlendedSamples, DocumentSamples


class WholeSet(BlendedSamples):
    """The samples of the sources one after the other, without repetition; after the last one come rows of padding.

    Text in sequential order is cut every S tokens, and padding follows its last token.
    """

    def __init__(self, sources: Sequence[Any], sequence_length: int):
        """`sources` are ChatSamples, MegatronSamples of an epoch, or DocumentSamples in order."""
        sizes = [len(s) if isinstance(s, ChatSamples | MegatronSamples) else cut(s) for s in sources]
        super().__init__(sources, sizes)
        self._ends, self._width = np.cumsum(sizes), sequence_length + 1

    def __len__(self) -> int:
        return int(self._ends[-1])

    def first(self, count: int) -> "WholeSet":
        """The same with its first `count` samples only."""
        fewer = copy.copy(self)
        fewer._ends = np.minimum(self._ends, count)
        return fewer

    def locate(self, index: int) -> tuple[int, int]:
        index %= len(self)  # rows of padding have the tokens of the first ones
        source = int(np.searchsorted(self._ends, index, side="right"))
        return source, index - int(self._ends[source - 1]) * bool(source)

    def padding(self, index: int) -> int:
        if index >= len(self):
            return self._width
        source, rank = self.locate(index)
        samples = self.sources[source]
        if isinstance(samples, ChatSamples | MegatronSamples):
            return samples.padding(rank)
        assert isinstance(samples, DocumentSamples)
        return max(0, rank * samples.sequence_length + self._width - samples.num_tokens)

    def counted(self, index: int) -> np.ndarray:
        if (counted := super().counted(index)) is not None:
            return counted & (index < len(self))
        return np.arange(self._width) < self._width - self.padding(index)


def cut(samples: DocumentSamples) -> int:
    """The number of samples that predict each token but the first once, in sequential order."""
    return -(-(samples.num_tokens - 1) // samples.sequence_length)
