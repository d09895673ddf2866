"""The segments of a stage's layers: unrolled layers, or loops with a number of iterations and of layers in their body.

Unrolled layers save their residuals as values; a loop copies residuals into stacked arrays and out of them. But XLA
compiles each unrolled layer separately. So layers are unrolled if compile time allows. Otherwise a loop's body has the
smallest possible size: loops with large bodies compile slowly too, and need the most memory.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megajax.layout.kinds import LayerKind, attention_kinds, layer_kinds
from megajax.options.remat import NONE, RematPolicy
from megajax.schema.config import Config

# Seconds that XLA may need to compile all layers by default, without tracing and the rest of the step.
COMPILE_SECONDS = 90
# Seconds that XLA needs for one layer, forward and backward (docs/performance.md): dense ones measured with 8 to 32
# layers for 1 to 64 H200s on two cores; those with experts, with 8 to 27 layers, on the 32 cores of a host with two
# H200s. Without a GPU those take two to four times as long: each sort has ten kernels then. FP8 comes on top. With
# `tensor` a matmul has one piece per device.
DENSE_SECONDS, MOE_SECONDS, SECONDS_OF_FP8, SECONDS_OF_PIECE = 0.3, 1.8, 0.7, 0.2
# Number of parts of a long loop: the residuals of a loop live until its backward pass ends, beside its gradients.
LOOPS = 8


@dataclass(frozen=True)
class LayerSegment:
    """Consecutive layers of one remat policy and precision: a loop with some layers in each iteration."""

    start: int
    iterations: int  # 1: no loop
    layers_per_iteration: int
    group_size: int
    policy: RematPolicy
    fp8: bool = False

    @property
    def count(self) -> int:
        return self.iterations * self.layers_per_iteration


class Unrolling(NamedTuple):
    """The largest number of layers in a loop's body, and the reason."""

    most: int
    reason: str


def choose_unrolling(
    config: Config, platform: str, kinds: Sequence[LayerKind], sizes: Mapping[str, int] | None = None
) -> Unrolling:
    """`kernels.scan_unroll` if it is set; else all layers if XLA compiles them in COMPILE_SECONDS; else one.

    On CPUs one, because tests run there, and their compile time matters more than their step time.
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
    """Estimated seconds that XLA needs for a layer on a mesh of `sizes` (default: one device), on a GPU's host.

    In a pipeline the program contains a layer twice per virtual stage: once for ticks with one operation, and
    once for ticks in which they run several. Two microbatches side by side have it twice too.
    """
    sizes = sizes or {}
    tensor, staged = sizes.get("tensor", 1), sizes.get("pipeline", 1) > 1
    matmuls = MOE_SECONDS if kind.has_experts else DENSE_SECONDS
    matmuls += SECONDS_OF_FP8 if config.fp8_layers else 0
    pieces = SECONDS_OF_PIECE * tensor if tensor > 1 else 0
    copies = 2 * config.pipeline.virtual_stages if staged else config.communication.microbatches_at_once
    return (matmuls + pieces) * copies


def plan_segments(
    config: Config,
    platform: str,
    kinds: Sequence[LayerKind] | None = None,
    sizes: Mapping[str, int] | None = None,
    ends: Sequence[int] = (),
) -> tuple[LayerSegment, ...]:
    """The segments of layers of these `kinds` (default: all layers) on a mesh of `sizes` (default: one device).

    A body contains whole periods of the kinds and whole remat groups. Segments end at `ends` too.
    """
    kinds, remat = layer_kinds(config.model) if kinds is None else kinds, config.remat
    L, most = len(kinds), choose_unrolling(config, platform, kinds, sizes).most
    cut = platform != "cpu" and (sizes or {}).get("pipeline", 1) == 1
    covered = L if remat.layers is None else remat.layers
    if remat.chosen.recomputes_nothing:
        covered = 0
    fp8_layers = config.fp8_layers
    if len(fp8_layers) == config.model.num_layers:
        fp8_layers = range(L)
    edges = sorted({0, covered, L, fp8_layers.start, fp8_layers.stop, *ends})
    segments = []
    for start, end in itertools.pairwise(edges):
        policy, group = (remat.chosen, remat.group) if start < covered else (NONE, 1)
        in_fp8 = start in fp8_layers
        for count, period in _stretches(config, kinds[start:end], group, most):
            step = math.lcm(period, group)
            # The largest body that divides the layers and is near the target; else even bodies and a rest.
            periods, target = count // step, max(most // step, 1)
            loops = next(
                (periods // n for n in range(target, target // 2, -1) if periods % n == 0), -(-periods // target)
            )
            unroll = periods // loops * step if loops else 0
            for iterations in _even(loops, LOOPS if cut else 1):
                segments.append(LayerSegment(start, iterations, unroll, group, policy, in_fp8))
                start += iterations * unroll
            rest = count - loops * unroll
            start += rest
            if rest:  # the count does not divide, or the pattern ends inside a period
                segments.append(LayerSegment(start - rest, 1, rest, group, policy, in_fp8))
    return tuple(segments)


def _even(loops: int, most: int) -> list[int]:
    """The iterations of at most `most` loops that replace one loop, each with two iterations or more."""
    parts = max(1, min(most, loops // 2))
    return [(i + 1) * loops // parts - i * loops // parts for i in range(parts)] if loops else []


def _stretches(config: Config, kinds: Sequence[LayerKind], group: int, most: int) -> Sequence[tuple[int, int]]:
    """(layers, period) of each part of `kinds` with a repeated pattern; periods are whole remat groups.

    Layers with the same parameters repeat `model.layer_pattern` and `model.rope_pattern`. Layers of several kinds are
    one part if one body can hold all of them.
    """
    period = len(attention_kinds(config.model))
    if all(kind == kinds[i % period] for i, kind in enumerate(kinds)):
        return [(len(kinds), period)]
    if len(kinds) <= most:
        return [(len(kinds), len(kinds))]
    groups = [tuple(kinds[i : i + group]) for i in range(0, len(kinds), group)]
    return [(count * group, period * group) for count, period in repeated(tuple(groups))]


@functools.lru_cache(maxsize=256)  # the planner asks for the same ones many times
def repeated(groups: tuple[Any, ...]) -> tuple[tuple[int, int], ...]:
    """Cuts a sequence into parts, each a repeated pattern: (length, length of the pattern) of each part.

    The partition has the smallest total pattern length; ties go to the one with fewer parts.
    """
    # For each start the best partition of the rest: (total pattern length, number of parts, parts)
    best: list[tuple[int, int, tuple[tuple[int, int], ...]]] = [(0, 0, ())] * (len(groups) + 1)

    def cuts(start: int) -> Iterator[tuple[int, int, tuple[tuple[int, int], ...]]]:
        for period in range(1, len(groups) - start + 1):
            pattern, end = groups[start : start + period], start
            while groups[end : end + period] == pattern:
                end += period
                lengths, parts, others = best[end]
                yield period + lengths, 1 + parts, ((end - start, period), *others)

    for start in reversed(range(len(groups))):
        best[start] = min(cuts(start))
    return best[0][2]
