"""Masked language modelling (Devlin et al. 2018, arXiv:1810.04805): the tokens that are hidden and predicted."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megajax.data.special_tokens import known_end
from megajax.data.tokenizers import Tokenizer, shared_tokenizer
from megajax.errors import InputError
from megajax.options.registered import MASKED_TOKENS

if TYPE_CHECKING:
    from megajax.config import Config

STREAM = 3  # of the random numbers, beside the seed and the index of the sample
NAMES = ("[MASK]", "<mask>")  # of a tokenizer's mask token
KEY = "objective.masking.mask_token"


@dataclass(frozen=True)
class Masking:
    """Chooses a share `rate` of the tokens, and hides them: `masked` of them by the mask token, `random` by any token.

    The others of them stay as they are. Tokens of `kept` are never chosen.
    """

    rate: float
    masked: float
    random: float
    mask_token: int
    vocab_size: int  # any token is below it
    kept: tuple[int, ...]
    seed: int

    def __call__(self, tokens: np.ndarray, counted: np.ndarray, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Sample `index`, int32[S], and the positions that may be chosen → (the input tokens, the chosen positions).

        A function of seed and index.
        """
        generator = np.random.Generator(np.random.PCG64((self.seed, STREAM, index)))
        draws, change = generator.random((2, tokens.size))
        others = generator.integers(self.vocab_size, size=tokens.size, dtype=np.int32)
        chosen = (draws < self.rate) & counted & ~np.isin(tokens, self.kept)
        hidden = np.where(change < self.masked, self.mask_token, others)
        return np.where(chosen & (change < self.masked + self.random), hidden, tokens).astype(tokens.dtype), chosen


def open_masking(config: "Config") -> Masking | None:
    """The config's masking, None with another objective; InputError if nothing says which token is the mask."""
    own, data, size = config.objective.masking, config.data, config.model.vocab_size
    if config.objective.kind != MASKED_TOKENS:
        return None
    tokenizer = shared_tokenizer(data.tokenizer) if data.tokenizer and data.kind != "synthetic" else None
    mask = _mask_token(config, tokenizer)
    kept = {mask}
    if tokenizer is not None:
        size = tokenizer.vocab_size
        ids = [tokenizer.token_id(name) for name in tokenizer.special_tokens]
        kept |= {token for token in (*ids, known_end(data, tokenizer), tokenizer.begin_of_text) if token is not None}
    return Masking(own.rate, own.masked, own.random, mask, size, tuple(sorted(kept)), config.run.seed)


def _mask_token(config: "Config", tokenizer: Tokenizer | None) -> int:
    given, size, data = config.objective.masking.mask_token, config.model.vocab_size, config.data
    place = f"{KEY}={given} ({config.where(KEY)})"
    if isinstance(given, int):
        if given >= size:
            raise InputError(f"{place} is not below model.vocab_size={size}: give a token that the model has.")
        return given
    if data.kind == "synthetic" and given is None:
        return size - 1
    if tokenizer is None:
        raise InputError(f"objective.kind={MASKED_TOKENS} without data.tokenizer: set {KEY} to the id of a token.")
    names = NAMES if given is None else (given,)
    found = [token for token in map(tokenizer.token_id, names) if token is not None]
    if not found:
        what = f"data.tokenizer={data.tokenizer} has no token {' or '.join(names)}"
        raise InputError(f"{what}: set {KEY} to the name or the id of a token that no text has.")
    return found[0]
