"""Random tokens, for benchmarks and tests without files."""

import numpy as np

from megajax.data.samples import Samples


class SyntheticSamples(Samples):
    """Sample i: int32[S+1] uniform over the vocabulary, a function of (i, seed, stream).

    It is cut into `documents` of one token or more, at positions that are a function of the same numbers.
    """

    def __init__(self, vocab_size: int, sequence_length: int, seed: int, stream: int = 0, documents: int = 1):
        self.vocab_size, self.sequence_length, self.key = vocab_size, sequence_length, (seed, stream)
        self.documents = documents

    def __getitem__(self, index: int) -> np.ndarray:
        generator = np.random.Generator(np.random.PCG64((*self.key, index)))
        return generator.integers(0, self.vocab_size, self.sequence_length + 1, dtype=np.int32)

    def document_lengths(self, index: int) -> np.ndarray:
        generator = np.random.Generator(np.random.PCG64((*self.key, index, 1)))  # another stream than the tokens'
        borders = 1 + generator.choice(self.sequence_length, self.documents - 1, replace=False)
        return np.diff(np.sort([0, *borders, self.sequence_length + 1]))
