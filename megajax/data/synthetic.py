"""Random tokens, for benchmarks and tests that need no file."""

import numpy as np


class SyntheticSamples:
    """Sample i: int32[S+1] uniform over the vocabulary, a function of (i, seed, stream) alone."""

    def __init__(self, vocab_size: int, sequence_length: int, seed: int, stream: int = 0):
        self.vocab_size, self.sequence_length, self.key = vocab_size, sequence_length, (seed, stream)

    def __getitem__(self, index: int) -> np.ndarray:
        generator = np.random.Generator(np.random.PCG64((*self.key, index)))
        return generator.integers(0, self.vocab_size, self.sequence_length + 1, dtype=np.int32)
