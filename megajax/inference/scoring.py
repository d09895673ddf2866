"""Log-likelihoods of texts."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from megajax.data.images import PlacedPicture, SizedPicture
from megajax.inference.language_model import LanguageModel, Source
from megajax.inference.weights import ModelWeights

TOKENS_PER_BATCH = 16384
SHORTEST = 64
CHUNK_BYTES = 2**30  # limit of a chunk's FP32 logits


class ScoredWindow(NamedTuple):
    """A sequence of tokens, of which those from `start` on are predicted, each from all before it in the window."""

    tokens: Sequence[int]
    start: int  # 1 or more
    counted: np.ndarray | None = None  # which tokens from `start` on are scored, bool; None: all
    pictures: Sequence[PlacedPicture] = ()


class PictureTokens(NamedTuple):
    """The tokens of a picture in a text, from `first` to `stop`."""

    first: int
    stop: int
    sized: SizedPicture


class Score(NamedTuple):
    """The prediction of a window's tokens."""

    log_likelihood: float  # the sum of their log-probabilities, in nats
    is_greedy: bool  # whether each of them is the most likely token
    count: int


def windows(
    tokens: Sequence[int],
    length: int,
    start: int = 1,
    stop: int | None = None,
    pictures: Sequence[PictureTokens] = (),
) -> list[ScoredWindow]:
    """Windows of at most `length` + 1 tokens that together predict each token from `start` to `stop` once.

    A window begins with the last token of the one before it, the last window earlier, so that it is full too. These are
    the windows of lm-eval's rolling log-likelihood. A window never has a part of a picture: it begins behind it.
    """
    out, stop = [], len(tokens) if stop is None else stop
    for first in range(start, stop, length):
        end = min(first + length, stop)
        begin = max(0, end - length - 1)
        begin = next((min(each.stop, first - 1) for each in pictures if each.first < begin < each.stop), begin)
        out.append(ScoredWindow(tokens[begin:end], first - begin, pictures=_inside(pictures, begin, end)))
    return out


def _inside(pictures: Sequence[PictureTokens], begin: int, end: int) -> list[PlacedPicture]:
    return [PlacedPicture(each.sized, each.first - begin) for each in pictures if begin <= each.first < end]


def answer_windows(
    tokens: Sequence[int], counted: np.ndarray, length: int, pictures: Sequence[PictureTokens] = ()
) -> list[ScoredWindow]:
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
        out.append(ScoredWindow(tokens[:stop], start, counted[start:stop], _inside(pictures, 0, stop)))
    for start, stop in answers[len(shared) :]:
        out += windows(tokens, length, start, stop, pictures)
    return out


class Scorer:
    """Computes scores in batches of windows of similar lengths, which share compiled programs."""

    def __init__(self, model: LanguageModel, tokens_per_batch: int = TOKENS_PER_BATCH):
        model.check_has_no_encoder("scores of texts")
        model.check_has_no_prefix("scores of texts")
        model.check_is_causal("a score of texts, by each next token,")
        self.model, self.tokens_per_batch = model, tokens_per_batch
        self._program = jax.jit(self._predictions)

    def scores(self, all_windows: Sequence[ScoredWindow]) -> list[Score]:
        """The score of each window; one that is longer than the context is cut at its beginning."""
        limit = self.model.max_length
        windows = []
        for window in all_windows:
            tokens, start, counted, _ = window
            cut = max(0, len(tokens) - 1 - limit)
            assert not (cut and window.pictures)
            first = max(1, start - cut)
            counted = counted if counted is None else counted[first + cut - start :]
            windows.append(window._replace(tokens=tokens[cut:], start=first, counted=counted))
        out: list[Score | None] = [None] * len(windows)
        order = sorted(range(len(windows)), key=lambda i: (not windows[i].pictures, -len(windows[i].tokens)))
        with_pictures = sum(bool(window.pictures) for window in windows)
        for some in (order[:with_pictures], order[with_pictures:]):
            while some:
                length = self._padded(len(windows[some[0]].tokens) - 1)
                entries = self._entries([windows[i] for i in some])
                count = max(1, self.tokens_per_batch // max(length, entries))
                chosen, some = some[:count], some[count:]
                batch = [windows[i] for i in chosen]
                for i, score in zip(chosen, self._batch(batch, length, count, entries), strict=True):
                    out[i] = score
        return [score for score in out if score is not None]

    def _padded(self, length: int) -> int:
        """The next power of two, so that few programs are compiled."""
        return min(max(SHORTEST, 1 << max(0, length - 1).bit_length()), self.model.max_length)

    def _entries(self, windows: Sequence[ScoredWindow]) -> int:
        """The room for patches that each of these windows needs, by a power of two; 0 without pictures."""
        if not any(window.pictures for window in windows):
            return 0
        images = self.model.images
        most = max(sum(images.entries(placed.sized) for placed in window.pictures) for window in windows)
        pieces = -(-most // (SHORTEST * images.vision.block))
        return SHORTEST * images.vision.block << (pieces - 1).bit_length()

    def _batch(self, batch: Sequence[ScoredWindow], length: int, count: int, entries: int) -> list[Score]:
        inputs, targets = np.zeros((2, count, length), np.int32)
        for row, (tokens, *_) in enumerate(batch):
            inputs[row, : len(tokens) - 1], targets[row, : len(tokens) - 1] = tokens[:-1], tokens[1:]
        self.model.check_tokens(inputs)
        images = None
        if entries:
            whole, padding = np.array([length]), [()] * (count - len(batch))
            rows = [(pictures, whole) for pictures in (*(window.pictures for window in batch), *padding)]
            images = self.model.images.fields(rows, length, False, entries)
        found = self._program(self.model.weights, inputs, targets, images)
        likelihoods, greedy = (np.asarray(a) for a in found)
        out = []
        for row, (tokens, start, counted, _) in enumerate(batch):
            counted_tokens = np.arange(start - 1, len(tokens) - 1)
            counted_tokens = counted_tokens if counted is None else counted_tokens[counted]
            total = likelihoods[row, counted_tokens].sum(dtype=np.float64)
            out.append(Score(float(total), bool(greedy[row, counted_tokens].all()), counted_tokens.size))
        return out

    def _predictions(self, weights: ModelWeights, inputs, targets, images) -> tuple[jax.Array, jax.Array]:
        """(log-probability of each target `[B, S]`, whether it is the most likely token)."""
        model = self.model
        x = model.whole_sequences(weights, inputs, source=Source(images=images)).reshape(inputs.size, -1)
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
