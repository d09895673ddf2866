"""Log-likelihoods of texts."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from megajax.inference.language_model import LanguageModel
from megajax.inference.weights import ModelWeights

TOKENS_PER_BATCH = 16384
SHORTEST = 64
CHUNK_BYTES = 2**30  # limit of a chunk's FP32 logits


class ScoredWindow(NamedTuple):
    """A sequence of tokens, of which those from `start` on are predicted, each from all before it in the window."""

    tokens: Sequence[int]
    start: int  # 1 or more
    counted: np.ndarray | None = None  # which tokens from `start` on are scored, bool; None: all


class Score(NamedTuple):
    """The prediction of a window's tokens."""

    log_likelihood: float  # the sum of their log-probabilities, in nats
    is_greedy: bool  # whether each of them is the most likely token
    count: int


def windows(tokens: Sequence[int], length: int, start: int = 1, stop: int | None = None) -> list[ScoredWindow]:
    """Windows of at most `length` + 1 tokens that together predict each token from `start` to `stop` once.

    A window begins with the last token of the one before it, the last window earlier, so that it is full too. These are
    the windows of lm-eval's rolling log-likelihood.
    """
    out, stop = [], len(tokens) if stop is None else stop
    for first in range(start, stop, length):
        end = min(first + length, stop)
        begin = max(0, end - length - 1)
        out.append(ScoredWindow(tokens[begin:end], first - begin))
    return out


def answer_windows(tokens: Sequence[int], counted: np.ndarray, length: int) -> list[ScoredWindow]:
    """Windows of at most `length` + 1 tokens that together predict each token of a chat that is `counted` once.

    Answers that end in the first window share it. Each later one has its own, which ends with it, so that it is
    predicted from as much of the chat before it as there is room for.
    """
    edges = np.flatnonzero(np.diff(counted.astype(np.int8), prepend=0, append=0)).tolist()
    answers = list(zip(edges[::2], edges[1::2], strict=True))
    shared = [answer for answer in answers if answer[1] <= length + 1]
    out = []
    if shared:
        start, stop = shared[0][0], shared[-1][1]
        out.append(ScoredWindow(tokens[:stop], start, counted[start:stop]))
    for start, stop in answers[len(shared) :]:
        out += windows(tokens, length, start, stop)
    return out


class Scorer:
    """Computes scores in batches of windows of similar lengths, which share compiled programs."""

    def __init__(self, model: LanguageModel, tokens_per_batch: int = TOKENS_PER_BATCH):
        model.check_has_no_encoder("scores of texts")
        model.check_is_causal("a score of texts, by each next token,")
        self.model, self.tokens_per_batch = model, tokens_per_batch
        self._program = jax.jit(self._predictions)

    def scores(self, all_windows: Sequence[ScoredWindow]) -> list[Score]:
        """The score of each window; one that is longer than the context is cut at its beginning."""
        limit = self.model.max_length
        windows = []
        for tokens, start, counted in all_windows:
            cut = max(0, len(tokens) - 1 - limit)
            first = max(1, start - cut)
            windows.append(
                ScoredWindow(tokens[cut:], first, counted if counted is None else counted[first + cut - start :])
            )
        out: list[Score | None] = [None] * len(windows)
        order = sorted(range(len(windows)), key=lambda i: -len(windows[i].tokens))
        while order:
            length = self._padded(len(windows[order[0]].tokens) - 1)
            count = max(1, self.tokens_per_batch // length)
            chosen, order = order[:count], order[count:]
            for i, score in zip(chosen, self._batch([windows[i] for i in chosen], length, count), strict=True):
                out[i] = score
        return [score for score in out if score is not None]

    def _padded(self, length: int) -> int:
        """The next power of two, so that few programs are compiled."""
        return min(max(SHORTEST, 1 << max(0, length - 1).bit_length()), self.model.max_length)

    def _batch(self, batch: Sequence[ScoredWindow], length: int, count: int) -> list[Score]:
        inputs, targets = np.zeros((2, count, length), np.int32)
        for row, (tokens, *_) in enumerate(batch):
            inputs[row, : len(tokens) - 1], targets[row, : len(tokens) - 1] = tokens[:-1], tokens[1:]
        self.model.check_tokens(inputs)
        found = self._program(self.model.weights, inputs, targets)
        likelihoods, greedy = (np.asarray(a) for a in found)
        out = []
        for row, (tokens, start, counted) in enumerate(batch):
            counted_tokens = np.arange(start - 1, len(tokens) - 1)
            counted_tokens = counted_tokens if counted is None else counted_tokens[counted]
            total = likelihoods[row, counted_tokens].sum(dtype=np.float64)
            out.append(Score(float(total), bool(greedy[row, counted_tokens].all()), counted_tokens.size))
        return out

    def _predictions(self, weights: ModelWeights, inputs, targets) -> tuple[jax.Array, jax.Array]:
        """(log-probability of each target `[B, S]`, whether it is the most likely token)."""
        model = self.model
        x = model.whole_sequences(weights, inputs).reshape(inputs.size, -1)
        tokens, vocabulary = len(x), model.config.padded_vocab_size
        pieces = -(-tokens * vocabulary * 4 // CHUNK_BYTES)
        while tokens % pieces:
            pieces += 1

        def piece(x, targets):
            logits = model.model.logits(weights.outer, x)
            of_targets = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
            return of_targets - jax.nn.logsumexp(logits, axis=1), jnp.argmax(logits, axis=1) == targets

        cut = partial(jnp.reshape, shape=(pieces, tokens // pieces, -1))
        found = lax.map(lambda part: piece(*part), (cut(x), cut(targets)[..., 0]))
        likelihoods, greedy = (a.reshape(inputs.shape) for a in found)
        return likelihoods, greedy
