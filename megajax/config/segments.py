"""How a stage's layers are run: unrolled, or as loops, and then which layers a loop's body holds and how often it runs.

Unrolled layers keep what they save as values; a loop copies it into stacked arrays and out of them. But each unrolled
layer is compiled by itself. So layers are unrolled as far as compile time allows, else a loop's body is as small as it
can be: loops over many layers at a time compile slowly too, and need more memory than either.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megajax.config.kinds import LayerKind, layer_kinds, layer_windows
from megajax.config.schema import Config

# Seconds that XLA may take over the layers by default, on two cores; their traces and the rest of the step are extra.
COMPILE_SECONDS = 90
# Seconds that it takes over one layer, forward and backward: of 8 to 32 layers on 1 to 64 H200s, compiled on two cores
# (docs/performance.md). Over `tensor` a matmul is cut into a piece for each device.
DENSE_SECONDS, FP8_SECONDS, MOE_SECONDS, SECONDS_OF_PIECE = 0.3, 1.0, 3.5, 0.2
# A long loop is cut into so many: what a loop has saved is kept until its backward pass ends, beside its gradients.
LOOPS = 8


@dataclass(frozen=True)
class Segment:
    """Consecutive layers of one remat policy and precision, run as `loops` times a body of `unroll` layers."""

    start: int
    loops: int
    unroll: int
    group_size: int
    policy: str
    fp8: bool = False

    @property
    def count(self) -> int:
        return self.loops * self.unroll


class Unrolling(NamedTuple):
    """How many layers a loop's body may hold, and why."""

    most: int
    reason: str


def choose_unrolling(
    config: Config, platform: str, kinds: Sequence[LayerKind], sizes: Mapping[str, int] | None = None
) -> Unrolling:
    """All of these layers if XLA compiles them in COMPILE_SECONDS, else one; `kernels.scan_unroll` if it is set.

    On CPUs one: what is compiled there is tests, whose compile time matters more than their steps.
    """
    if config.kernels.scan_unroll:
        return Unrolling(config.kernels.scan_unroll, f"kernels.scan_unroll={config.kernels.scan_unroll}")
    if platform == "cpu":
        return Unrolling(1, "CPU")
    seconds = sum(layer_seconds(config, kind, sizes) for kind in kinds)
    if seconds <= COMPILE_SECONDS:
        return Unrolling(len(kinds), f"unrolled: about {max(seconds, 1):.0f} s of compilation")
    return Unrolling(1, f"looped: unrolled they would take about {seconds / 60:.0f} min to compile")


def layer_seconds(config: Config, kind: LayerKind, sizes: Mapping[str, int] | None = None) -> float:
    """Seconds that XLA takes over a layer on a mesh of `sizes` (default: one device), estimated for two cores.

    In a pipeline a layer stands in the program twice for every round: ticks in which stages run one operation, and
    ticks in which they run several, are compiled apart.
    """
    sizes = sizes or {}
    tensor, staged = sizes.get("tensor", 1), sizes.get("pipeline", 1) > 1
    own = MOE_SECONDS if kind.has_experts else FP8_SECONDS if config.fp8_layers else DENSE_SECONDS
    pieces = SECONDS_OF_PIECE * tensor if tensor > 1 else 0
    return (own + pieces) * (2 * config.pipeline.rounds if staged else 1)


def plan_segments(
    config: Config,
    platform: str,
    kinds: Sequence[LayerKind] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> tuple[Segment, ...]:
    """The segments of layers of these kinds, by default all, on a mesh of `sizes`, by default one device.

    A body holds whole periods of the kinds and whole remat groups.
    """
    kinds, remat = layer_kinds(config.model) if kinds is None else kinds, config.remat
    L, most = len(kinds), choose_unrolling(config, platform, kinds, sizes).most
    cut = platform != "cpu" and (sizes or {}).get("pipeline", 1) == 1
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
            for own in _even(loops, LOOPS if cut else 1):
                segments.append(Segment(start, own, unroll, group, policy, in_fp8))
                start += own * unroll
            rest = count - loops * unroll
            start += rest
            if rest:  # of a count that does not divide, or of a pattern that is no whole period
                segments.append(Segment(start - rest, 1, rest, group, policy, in_fp8))
    return tuple(segments)


def _even(loops: int, most: int) -> list[int]:
    """At most so many loops in place of one, each of two iterations or more."""
    parts = max(1, min(most, loops // 2))
    return [(i + 1) * loops // parts - i * loops // parts for i in range(parts)] if loops else []


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
