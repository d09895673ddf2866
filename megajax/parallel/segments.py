"""How the loops over a stage's layers are cut: which layers a loop's body holds, and how often it runs."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megajax.config import Config
from megajax.config.kinds import LayerKind, layer_kinds, layer_windows


@dataclass(frozen=True)
class Segment:
    """Consecutive layers of one remat policy and precision, run as `loops` times a body of `unroll` layers."""

    start: int
    loops: int
    unroll: int
    group: int
    policy: str
    fp8: bool = False

    @property
    def count(self) -> int:
        return self.loops * self.unroll


# A long loop is cut into so many: what a loop has saved is kept until its backward pass ends, beside its gradients.
LOOPS = 8


def plan_segments(
    config: Config, platform: str, kinds: Sequence[LayerKind] | None = None, stages: int = 1
) -> tuple[Segment, ...]:
    """The loops over layers of these kinds, by default all, that `remat` and `kernels.scan_unroll` ask for.

    A body holds whole periods of the kinds and whole remat groups. Unrolled layers keep their residuals as values
    instead of slices of stacked arrays: faster and smaller on GPUs, but slower to compile; so by default up to 16
    layers on GPUs, and as few as possible elsewhere.
    """
    kinds, remat = layer_kinds(config.model) if kinds is None else kinds, config.remat
    L, most = len(kinds), config.kernels.scan_unroll or (16 if platform != "cpu" else 1)
    covered = L if remat.layers is None else remat.layers
    if remat.policy == "none":
        covered = 0
    fp8_layers = config.fp8_layers
    if len(fp8_layers) == config.model.num_layers:
        fp8_layers = range(L)
    edges = sorted({0, covered, L, fp8_layers.start, fp8_layers.stop})
    segments = []
    for start, end in itertools.pairwise(edges):
        policy, group = (remat.policy, remat.group) if start < covered else ("none", 1)
        in_fp8 = start in fp8_layers
        for count, period in _stretches(config, kinds[start:end], group, most):
            step = math.lcm(period, group)
            # The largest body that divides the layers, if it is near the target; else even ones, and a rest.
            periods, target = count // step, max(most // step, 1)
            loops = next(
                (periods // n for n in range(target, target // 2, -1) if periods % n == 0), -(-periods // target)
            )
            unroll = periods // loops * step if loops else 0
            parts = min(LOOPS, loops // 2) if loops > 1 and platform != "cpu" and stages == 1 else 1
            for i in range(parts if loops else 0):
                own = (i + 1) * loops // parts - i * loops // parts
                segments.append(Segment(start, own, unroll, group, policy, in_fp8))
                start += own * unroll
            start, rest = start + count - loops * unroll, count - loops * unroll
            if rest:  # of a count that does not divide, or of a pattern that is no whole period
                segments.append(Segment(start - rest, 1, rest, group, policy, in_fp8))
    return tuple(segments)


def _stretches(config: Config, kinds: Sequence[LayerKind], group: int, most: int) -> Sequence[tuple[int, int]]:
    """(layers, period) of each part of `kinds` that repeats a pattern of its own; periods are whole remat groups.

    Layers with the same parameters repeat `model.layer_pattern`. Those of several kinds are one part if a body can hold
    them all.
    """
    period = len(layer_windows(config.model))
    if all(kind == kinds[i % period] for i, kind in enumerate(kinds)):
        return [(len(kinds), period)]
    if len(kinds) <= most:
        return [(len(kinds), len(kinds))]
    units = [tuple(kinds[i : i + group]) for i in range(0, len(kinds), group)]
    return [(count * group, period * group) for count, period in repeated(units)]


def repeated(units: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    """Cuts a sequence into parts that repeat a pattern, each (length, length of the pattern).

    Of all ways to cut it one with the shortest patterns in all, and with the fewest parts of these.
    """
    # For each start what is best from there on: (lengths of the patterns, number of parts, parts)
    best: list[tuple[int, int, tuple[tuple[int, int], ...]]] = [(0, 0, ())] * (len(units) + 1)

    def cuts(start: int) -> Iterator[tuple[int, int, tuple[tuple[int, int], ...]]]:
        for period in range(1, len(units) - start + 1):
            pattern, end = units[start : start + period], start
            while units[end : end + period] == pattern:
                end += period
                lengths, parts, others = best[end]
                yield period + lengths, 1 + parts, ((end - start, period), *others)

    for start in reversed(range(len(units))):
        best[start] = min(cuts(start))
    return best[0][2]
