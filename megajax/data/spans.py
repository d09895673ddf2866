"""Span corruption (Raffel et al. 1910.10683): the text without some spans for the encoder, the spans for the decoder.

As in T5's code: a sample's tokens are divided at random into as many spans that stay as spans that are noise, in turn,
the last one noise. Inputs are the tokens that stay with a sentinel in place of each noise span, targets the noise spans
behind the same sentinels; both end with the token that ends a text. The decoder reads its targets one token later, from
token 0 on. Of a mixture of denoisers (UL2, Tay et al. 2205.05131) each sample has one, and perhaps a token before its
inputs that says which.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megajax.config.sentences import fail, format_keys, value
from megajax.data.blend import normalise_weights
from megajax.data.special_tokens import document_end
from megajax.data.tokenizers import load_tokenizer
from megajax.schema.spans import SpanLengths

if TYPE_CHECKING:
    from megajax.config import Config

STREAM = 3  # of the random numbers, beside the seed and the index of the sample
START = 0  # the decoder's first token: T5's padding
SYNTHETIC_END = 1
SENTINEL = "<extra_id_{}>"  # T5's names


class Noise(NamedTuple):
    """A denoiser: the lengths of its samples, the token before the encoder's sequence, and its share."""

    lengths: SpanLengths
    token: int | None
    share: float

    @property
    def inputs(self) -> int:
        """The length of the encoder's sequence."""
        return self.lengths.inputs + (self.token is not None)


@dataclass(frozen=True)
class SpanCorruption:
    """Pairs of sequences for an encoder and for a decoder, whose length may be more than that of the targets."""

    mixture: tuple[Noise, ...]
    sentinels: tuple[int, ...]  # of the first span, the second, ...
    end: int
    decoder_length: int
    seed: int

    def __call__(self, sample: np.ndarray, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(inputs, targets) of sample `index`, whose first tokens are used; a function of seed and index."""
        generator = np.random.Generator(np.random.PCG64((self.seed, STREAM, index)))
        which = generator.choice(len(self.mixture), p=[n.share for n in self.mixture]) if len(self.mixture) > 1 else 0
        lengths, token, _ = self.mixture[which]
        noise = _segments(generator, lengths.noise, lengths.spans)
        kept = _segments(generator, lengths.tokens - lengths.noise, lengths.spans)
        pieces = np.split(sample[: lengths.tokens], np.cumsum(np.stack([kept, noise], axis=1).reshape(-1))[:-1])
        inputs, targets = [np.array([] if token is None else [token])], list[np.ndarray]()
        for span, sentinel in enumerate(self.sentinels[: lengths.spans]):
            inputs += [pieces[2 * span], np.array([sentinel])]
            targets += [np.array([sentinel]), pieces[2 * span + 1]]
        return tuple(np.concatenate([*parts, [self.end]]).astype(np.int32) for parts in (inputs, targets))  # type: ignore[return-value]

    def fields(self, samples: Sequence[np.ndarray], indices: Sequence[int]) -> dict[str, np.ndarray]:
        """The fields of a batch."""
        pairs = [self(sample, index) for sample, index in zip(samples, indices, strict=True)]
        rows, length = len(pairs), self.decoder_length
        targets = np.stack([np.pad(targets, (0, length - len(targets))) for _, targets in pairs])
        ends = np.array([len(targets) for _, targets in pairs])
        return {
            "encoder_tokens": np.stack([inputs for inputs, _ in pairs]),
            "tokens": np.concatenate([np.full((rows, 1), START, np.int32), targets[:, :-1]], axis=1),
            "targets": targets,
            "loss_mask": (np.arange(length) < ends[:, None]).astype(np.float32),
            "positions": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
        }


def _segments(generator: np.random.Generator, items: int, segments: int) -> np.ndarray:
    """The lengths of `segments` non-empty parts of `items`, all divisions being equally likely."""
    begins = generator.permutation(np.arange(items - 1) < segments - 1)
    return np.bincount(np.concatenate([[0], np.cumsum(begins)]), minlength=segments)


def open_spans(config: "Config") -> SpanCorruption | None:
    """The span corruption of a config with an encoder of layers; None without one.

    Raises ConfigError for settings that it does not have, and if the tokenizer lacks sentinels.
    """
    lengths, data = config.span_lengths, config.data
    if not lengths:
        return None
    encoder = "model.encoder.kind"
    others = {
        "data.kind": data.kind == "chat",
        "data.order": data.order == "megatron",
        "data.packing": data.row_packing != "sequential",
        "data.fim_rate": data.fim_rate > 0,
        "data.reset_attention": data.reset_attention,
        "run.eval_steps": config.run.eval_steps == "all",
    }
    for key in (key for key, found in others.items() if found):
        problem = (
            f"{format_keys(config, encoder)} trains on corrupted spans, which {format_keys(config, key)} does not have"
        )
        fail(config, problem, f"change {key}, or train from your own loop (docs/custom_loop.md)", key, encoder)
    each = zip(lengths, data.mixture, strict=True)
    needs = {
        "batch.sequence_length": max(own.targets for own in lengths),
        "model.encoder.sequence_length": max(own.inputs + (denoiser.token is not None) for own, denoiser in each),
    }
    for key, needed in needs.items():
        if value(config, key) < needed:
            problem = f"{format_keys(config, key)} is too short for corrupted spans, which have {needed} tokens"
            fail(config, problem, f"set it to {needed} or more", key)
    sentinels, tokens, end = _special_tokens(config, max(own.spans for own in lengths))
    shares = normalise_weights([denoiser.weight for denoiser in data.mixture])
    mixture = tuple(Noise(*own) for own in zip(lengths, tokens, shares, strict=True))
    return SpanCorruption(mixture, sentinels, end, config.batch.sequence_length, config.run.seed)


def _special_tokens(config: "Config", spans: int) -> tuple[tuple[int, ...], list[int | None], int]:
    """(the sentinels of `spans` spans, the token of each denoiser, the token that ends a sequence)."""
    data, names = config.data, [denoiser.token for denoiser in config.data.mixture]
    if data.kind == "synthetic":
        last = config.model.vocab_size - 1 - spans
        tokens = [None if name is None else last - names.index(name) for name in names]
        return tuple(range(last + spans, last, -1)), tokens, SYNTHETIC_END
    if data.tokenizer is None:
        encoder = "model.encoder.kind"
        problem = f"{format_keys(config, encoder)} replaces spans of text by tokens of data.tokenizer, which is not set"
        fail(config, problem, "set it to the tokenizer that wrote the data, with <extra_id_0> and so on", encoder)
    tokenizer = load_tokenizer(data.tokenizer)
    found = [tokenizer.token_id(SENTINEL.format(span)) for span in range(spans)]
    if None in found:
        lacking = SENTINEL.format(found.index(None))
        problem = f"{format_keys(config, 'data.tokenizer')} has no {lacking}, but a sample has {spans} spans"
        cure = "use T5's tokenizer, raise data.mean_span_length, or shorten model.encoder.sequence_length"
        fail(config, problem, cure, "data.tokenizer")
    tokens = [None if name is None else tokenizer.token_id(name) for name in names]
    for name in (name for name, token in zip(names, tokens, strict=True) if name is not None and token is None):
        problem = f"{format_keys(config, 'data.tokenizer')} has no token {name}, which data.denoisers names"
        fail(config, problem, "add it to the tokenizer, or name another", "data.tokenizer", "data.denoisers")
    return tuple(token for token in found if token is not None), tokens, document_end(data, tokenizer)
