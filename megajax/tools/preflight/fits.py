"""Rates from timed sizes, by least squares of relative errors."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np


class Timing(NamedTuple):
    """One timed operation. kind: operations of a kind differ in size only. work: FLOPs, or bytes that move."""

    kind: str
    size: float
    work: float
    seconds: float


class Saturating(NamedTuple):
    """work / seconds = rate · size / (size + half)."""

    rate: float
    half: float


class Linear(NamedTuple):
    """seconds = latency + work / rate."""

    rate: float
    latency: float


def saturating_rate(timings: Sequence[Timing]) -> Saturating:
    """The rate of large sizes and the size at which half of it is reached.

    If the times do not follow that (a rate that falls with the size), the best measured rate, reached at any size.
    """
    found = _two_terms([(t.work, t.work / t.size) for t in timings], [t.seconds for t in timings])
    if found is None:
        return Saturating(_best(timings), 1.0)  # half at 1: files have positive numbers only
    return Saturating(1 / found[0], max(found[1] / found[0], 1.0))


def shared_half(by_kind: Mapping[int, Sequence[Timing]]) -> tuple[dict[int, float], float]:
    """(the rate of each kind, one half-rate for all of them: the median of the kinds')."""
    half = float(np.median([saturating_rate(timings).half for timings in by_kind.values()]))
    rates = {}
    for kind, timings in by_kind.items():
        # seconds = share · (1 / rate), with relative errors: the least-squares 1 / rate.
        share = np.array([t.work * (1 + half / t.size) / t.seconds for t in timings])
        rates[kind] = float(share @ share / share.sum())
    return rates, half


def linear_rate(timings: Sequence[Timing]) -> Linear:
    """The rate without the latency; if the times do not grow with the work, the best measured rate and no latency."""
    found = _two_terms([(t.work, 1.0) for t in timings], [t.seconds for t in timings])
    return Linear(_best(timings), 0.0) if found is None else Linear(1 / found[0], found[1])


def _two_terms(terms: Sequence[tuple[float, float]], seconds: Sequence[float]) -> tuple[float, float] | None:
    """The factors of two terms whose sum is `seconds`, with the least relative errors; None unless both are physical.

    The first must be positive, the second not negative.
    """
    if len(set(terms)) < 2:
        return None
    rows = np.array(terms) / np.array(seconds)[:, None]
    scale = rows.max(axis=0)  # FLOPs and 1 differ by many orders of magnitude
    first, second = np.linalg.lstsq(rows / scale, np.ones(len(rows)), rcond=None)[0] / scale
    return (float(first), float(second)) if first > 0 and second >= 0 else None


def _best(timings: Sequence[Timing]) -> float:
    return max(t.work / t.seconds for t in timings)
