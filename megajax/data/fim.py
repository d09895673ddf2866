"""Fill-in-the-middle (arXiv:2207.14255): documents whose middle is moved to their end, behind special tokens.

Prefix-suffix-middle: `<prefix>` P `<suffix>` S `<middle>` M. Suffix-prefix-middle, in the paper's form that shares the
order of the special tokens: `<prefix>` `<suffix>` S `<middle>` P M.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megajax.data.special_tokens import known_end
from megajax.data.tokenizers import shared_tokenizer
from megajax.errors import InputError

if TYPE_CHECKING:
    from megajax.config import Config

STREAM = 2  # of the random numbers, beside the seed and the index of the sample
ADDED = 3  # special tokens


@dataclass(frozen=True)
class Infilling:
    """Moves the middle of a share `rate` of the documents of a sample, `spm_rate` of them suffix first.

    `tokens` are those of prefix, middle and suffix; `end` is the end-of-document token, which stays at the end, and
    `begin` the one that may begin a document, which stays first.
    """

    rate: float
    spm_rate: float
    tokens: tuple[int, ...]
    end: int | None
    seed: int
    begin: int | None = None

    def __call__(self, sample: np.ndarray, lengths: Iterable[int], index: int) -> np.ndarray:
        """Sample `index`, int32[S+1], whose documents have these lengths; each keeps its length.

        A function of seed and index.
        """
        out, start = sample.copy(), 0
        generator = np.random.Generator(np.random.PCG64((self.seed, STREAM, index)))
        for length in lengths:
            chosen, order, *shares = generator.random(4)
            after = start + int(length)
            first, stop = start + int(sample[start] == self.begin), after - int(sample[after - 1] == self.end)
            if chosen < self.rate and stop - first > ADDED:
                cuts = sorted(int(share * (stop - first - ADDED + 1)) for share in shares)
                out[first:stop] = rearranged(sample[first:stop], cuts, order < self.spm_rate, self.tokens)
            start = after
        return out


def rearranged(tokens: np.ndarray, cuts: list[int], suffix_first: bool, special: tuple[int, ...]) -> np.ndarray:
    """Tokens without the last three, with the middle, from cuts[0] to cuts[1], behind the rest: [len(tokens)]."""
    prefix, middle, suffix = np.split(tokens[: len(tokens) - ADDED], cuts)
    of_prefix, of_middle, of_suffix = ([token] for token in special)
    if suffix_first:
        return np.concatenate([of_prefix, of_suffix, suffix, of_middle, prefix, middle])
    return np.concatenate([of_prefix, prefix, of_suffix, suffix, of_middle, middle])


def open_infilling(config: "Config") -> Infilling | None:
    """The config's fill-in-the-middle, None without; InputError if the tokenizer does not have the tokens."""
    data = config.data
    if data.kind == "synthetic" or not data.fim_rate:
        return None
    assert data.tokenizer is not None  # checked with the config
    names = data.fim_tokens.model_dump()
    loaded = shared_tokenizer(data.tokenizer)
    tokens = []
    for part, name in names.items():
        token = loaded.token_id(name)
        if token is None:
            key = f"data.fim_tokens.{part}"
            raise InputError(
                f"{key}={name} ({config.where(key)}) is no token of data.tokenizer={data.tokenizer}: name one that it "
                "has, or add it to the tokenizer."
            )
        tokens.append(token)
    end = known_end(data, loaded)  # none is needed: the documents' lengths are known
    return Infilling(data.fim_rate, data.fim_spm_rate, tuple(tokens), end, config.run.seed, loaded.begin_of_text)
