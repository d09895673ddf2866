"""The lengths of span corruption (Raffel et al. 1910.10683), as in T5's `random_spans_helper`, for one denoiser."""

from typing import NamedTuple


class SpanLengths(NamedTuple):
    """Numbers of tokens of a sample."""

    tokens: int  # of the text
    noise: int  # of them in spans that are replaced
    spans: int
    inputs: int  # of the encoder: the other tokens, a sentinel for each span, and the end
    targets: int  # of the decoder: a sentinel before each span's tokens, and the end


def span_lengths(inputs: int, noise_density: float, mean_span_length: float | None) -> SpanLengths:
    """The longest text whose corrupted form has at most `inputs` tokens; without a mean length it has one span."""

    def of(tokens: int) -> SpanLengths:
        noise = min(max(round(tokens * noise_density), 1), tokens - 1)
        spans = 1 if mean_span_length is None else min(max(round(noise / mean_span_length), 1), tokens - noise)
        return SpanLengths(tokens, noise, spans, tokens - noise + spans + 1, noise + spans + 1)

    tokens = 2
    while of(tokens + 1).inputs <= inputs:
        tokens += 1
    return of(tokens)
