"""Dynamic context: which devices share each sequence of a step, for sequences of very different lengths.

A pure function of lengths and costs. A simulation of steps uses it (`dev/context_groups.py`); the trainer divides each
row among all devices of `context`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

Seconds = Callable[
    [int, int], float
]  # (tokens of a sequence, devices that share it) → seconds of each of these devices
PRECISION = 0.002  # of the solver's limit for a device's seconds


class SequenceGroup(NamedTuple):
    """A sequence on the devices first .. first + degree - 1 in one microbatch."""

    sequence: int
    microbatch: int
    first: int
    degree: int


@dataclass(frozen=True)
class Assignment:
    """The groups of a step in the order in which devices run them: the largest first, so that none waits inside."""

    groups: list[SequenceGroup]
    seconds: np.ndarray  # [M, devices]: the work of each device
    tokens: np.ndarray  # [M, devices]

    @property
    def step_seconds(self) -> float:
        """The devices wait for the slowest of each microbatch."""
        return float(self.seconds.max(axis=1).sum())

    @property
    def waiting(self) -> float:
        """The share of the devices' time in which they wait."""
        return 1 - float(self.seconds.mean(axis=1).sum()) / self.step_seconds


def assign(
    lengths: Sequence[int], devices: int, microbatches: int, capacity: int, seconds: Seconds
) -> Assignment | None:
    """Divide sequences among devices and microbatches; None if they do not fit.

    Each gets a block of 1, 2, 4, ... devices, which begins at a multiple of its size, in one microbatch. No device has
    more than `capacity` tokens there. The largest work of a device in a microbatch is made small: a search over limits
    finds the least one for which this placement succeeds. With a limit each sequence takes the fewest devices on which
    it needs no more; those with more devices come first, then those that take longer, each to the block with the least
    work. Blocks of one size are equal inside when they are used, since larger groups came before, so a group starts at
    the same time on all its devices. `devices` is a power of two.
    """
    assert devices & (devices - 1) == 0
    degrees = [1 << k for k in range(devices.bit_length())]
    costs = [[seconds(length, degree) for degree in degrees] for length in lengths]
    fits = [[-(-length // degree) <= capacity for degree in degrees] for length in lengths]
    if not all(map(any, fits)):
        return None
    least = max(
        max(min(c for c, fit in zip(*each, strict=True) if fit) for each in zip(costs, fits, strict=True)),
        sum(map(min, ([c * d for c, d in zip(each, degrees, strict=True)] for each in costs))) / devices / microbatches,
    )
    limit, found = least, None
    for _ in range(20):  # doubled until it succeeds; it never does if the tokens do not fit
        found = _placed(lengths, (devices, microbatches, capacity), costs, limit)
        if found is not None or limit > sum(map(max, costs)):
            break
        limit *= 2
    if found is None:
        return None
    low, high = max(least, limit / 2), limit
    while high - low > PRECISION * low:
        middle = (low + high) / 2
        better = _placed(lengths, (devices, microbatches, capacity), costs, middle)
        if better is None:
            low = middle
        else:
            found, high = better, middle
    return found


def _placed(
    lengths: Sequence[int], room: tuple[int, int, int], costs: Sequence[Sequence[float]], limit: float
) -> Assignment | None:
    """The placement for which no device works longer than `limit` in a microbatch; None if it fails."""
    devices, microbatches, capacity = room
    chosen: list[tuple[int, float, int]] = []  # (-degree, -seconds, sequence)
    for sequence, (length, each) in enumerate(zip(lengths, costs, strict=True)):
        for k, cost in enumerate(each):
            if cost <= limit and -(-length // (1 << k)) <= capacity:
                chosen.append((-(1 << k), -cost, sequence))
                break
        else:
            return None
    work, tokens, groups = (
        np.zeros((microbatches, devices)),
        np.zeros((microbatches, devices), int),
        list[SequenceGroup](),
    )
    for negative, cost, sequence in sorted(chosen):
        degree, needed = -negative, -(-lengths[sequence] // -negative)
        block_work, block_tokens = work[:, ::degree], tokens[:, ::degree]  # equal inside
        usable = (block_tokens + needed <= capacity) & (block_work - cost <= limit)
        if not usable.any():
            return None
        at = np.unravel_index(np.argmin(np.where(usable, block_work, np.inf)), block_work.shape)
        microbatch, first = int(at[0]), int(at[1]) * degree
        work[microbatch, first : first + degree] -= cost
        tokens[microbatch, first : first + degree] += needed
        groups.append(SequenceGroup(sequence, microbatch, first, degree))
    return Assignment(groups, work, tokens)
