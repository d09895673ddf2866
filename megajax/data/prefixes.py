"""Prefix-LM (Raffel et al. 1910.10683): the tokens of a sample that attend to each other on both sides.

Of a chat they are all tokens before the first answer. Of other data they are as many as a random number says, less than
all: each number is equally likely. The loss does not count them.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from megajax.config import Config

STREAM = 4  # of the random numbers, beside the seed and the index of the sample


@dataclass(frozen=True)
class Prefixes:
    """The prefixes of samples: one in each document if they are `separate`, else one."""

    seed: int
    of_chats: bool
    separate: bool

    @classmethod
    def of(cls, config: "Config") -> "Prefixes | None":
        """Those of a config; None without `model.prefix_lm`."""
        of_chats = config.data.kind == "chat"
        separate = of_chats or config.data.reset_attention
        return cls(config.run.seed, of_chats, separate) if config.model.prefix_lm else None

    def __call__(self, lengths: np.ndarray, counted: np.ndarray, index: int) -> np.ndarray:
        """Whether each token of sample `index` is one of a prefix, bool[S+1]; a function of seed and index.

        `lengths` are those of its documents, `counted` bool[S+1] whether the loss would count each token.
        """
        lengths = lengths if self.separate else np.array([counted.size])
        starts = np.cumsum(lengths) - lengths
        if self.of_chats:
            answers = [counted[start : start + length] for start, length in zip(starts, lengths, strict=True)]
            sizes = np.array([answer.argmax() for answer in answers])  # 0 without an answer
        else:
            sizes = np.random.Generator(np.random.PCG64((self.seed, STREAM, index))).integers(lengths)
        within = np.arange(counted.size) - np.repeat(starts, lengths)
        return within < np.repeat(sizes, lengths)
