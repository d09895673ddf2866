"""Dynamic context: which devices of `context` share each document of a row, for documents of very different lengths.

A pure function of the documents' lengths, in integers: the same on every machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from megajax.layout.attention_pairs import AttentionPairs, token_pairs
from megajax.schema.model import ModelConfig

EXCESS = 50  # a device has up to 1/50 more work than the mean of its row
SHORTEST = (8, 16, 32, 64, 128)  # numbers of the shortest documents that may fill a half to the last token


class Arranged(NamedTuple):
    """The documents of a row in the order in which devices get them, and the size of each device's group.

    A group is a block of 1, 2, 4, ... devices, which begins at a multiple of its size. Its documents are consecutive
    and fill its devices to the last token.
    """

    documents: list[int]
    sizes: list[int]


@dataclass(frozen=True)
class ContextGroups:
    """Divides documents among groups of the devices of `context`, a power of two."""

    devices: int
    pairs: AttentionPairs = AttentionPairs()
    linear: int = 0  # pairs of a query and a key that cost as much as everything else of a token

    @classmethod
    def of_model(cls, model: ModelConfig, devices: int) -> Self:
        """Those of a model."""
        return cls(devices, AttentionPairs.of_model(model), token_pairs(model))

    def arrange(self, lengths: Sequence[int]) -> Arranged:
        """Groups as small as tokens and work allow, for documents that fill a row.

        All devices start as one group, which is cut in two until that fails: each half needs documents with exactly its
        number of tokens, and no more than 1 + 1/`EXCESS` of the row's mean work for a device. Inside a group every
        document is cut among all its devices, which balances any lengths. Within a group documents keep their order.
        """
        tokens = sum(lengths)
        assert self.devices & (self.devices - 1) == 0 and tokens % self.devices == 0
        pairs, length = self.pairs.of(lengths).tolist(), tokens // self.devices
        mean = (sum(pairs) + self.linear * tokens) / self.devices
        most = mean + mean / EXCESS - self.linear * length  # of a device's pairs
        order, sizes = list[int](), list[int]()
        waiting = [(sorted(range(len(lengths)), key=lambda each: (-lengths[each], each)), self.devices)]
        while waiting:
            documents, devices = waiting.pop()
            halves = _halves(documents, lengths, devices // 2 * length) if devices > 1 else None
            if halves is None or max(sum(pairs[each] for each in half) for half in halves) > most * (devices // 2):
                order += sorted(documents)
                sizes += [devices] * devices
            else:
                waiting += [(half, devices // 2) for half in reversed(halves)]
        return Arranged(order, sizes)


def _halves(documents: list[int], lengths: Sequence[int], half: int) -> tuple[list[int], list[int]] | None:
    """Documents, the longest first, in two parts of exactly `half` tokens with about equal work; None: not found.

    Each of the long ones goes to the part with fewer squares of lengths, and the shortest ones fill the parts.
    """
    for count in (*(each for each in SHORTEST if each < len(documents)), len(documents)):
        long, short = documents[: len(documents) - count], documents[len(documents) - count :]
        parts, tokens, squares = (list[int](), list[int]()), [0, 0], [0, 0]
        for each in long:
            length, part = lengths[each], int(squares[1] < squares[0])
            part = part if tokens[part] + length <= half else 1 - part
            parts[part].append(each)
            tokens[part] += length
            squares[part] += length * length
        if max(tokens) <= half and (chosen := _with_sum([lengths[each] for each in short], half - tokens[0])):
            for each, is_first in zip(short, chosen, strict=True):
                parts[1 - is_first].append(each)
            return parts
    return None


def _with_sum(lengths: Sequence[int], total: int) -> list[bool] | None:
    """Which of `lengths` have this sum; None if no choice has it. Bit n of a number: some choice has the sum n."""
    sums = [1]
    for length in lengths:
        sums.append(sums[-1] | sums[-1] << length)
    if not sums[-1] >> total & 1:
        return None
    chosen = list[bool]()
    for length, before in zip(reversed(lengths), reversed(sums[:-1]), strict=True):
        chosen.append(not before >> total & 1)
        total -= length * chosen[-1]
    return chosen[::-1]


def document_runs(segment_ids: np.ndarray, is_real: np.ndarray | None = None) -> np.ndarray:
    """The lengths of a row's documents, `[S]` ids → in order, int64.

    Padding sees nothing that counts, so it is cut into parts of 1, 2, 4, ... tokens, which fill any gap.
    """
    changed = np.diff(segment_ids) != 0
    if is_real is not None:
        changed |= np.diff(is_real)
    starts = np.concatenate([[0], np.flatnonzero(changed) + 1])
    lengths = np.diff(starts, append=len(segment_ids))
    if is_real is None or is_real.all():
        return lengths
    return np.concatenate([[n] if is_real[start] else _powers(n) for start, n in zip(starts, lengths, strict=True)])


def _powers(total: int) -> list[int]:
    """1, 2, 4, ... and the rest of a sum: some of them have each smaller sum."""
    parts = list[int]()
    while total:
        parts.append(min(total, 1 << len(parts)))
        total -= parts[-1]
    return parts
