"""Which documents or conversations share a row (`data.packing`), and the order of a batch's rows.

Work is attention: pairs of a query and a key, exact integers. The rest of a row's work depends on its tokens, and all
rows have the same number of them, so equal attention is equal work.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megajax.layout.attention_pairs import AttentionPairs

if TYPE_CHECKING:
    from megajax.config import Config

LOOK_AHEAD = 512  # rows of a stream of documents that are packed together


class Piece(NamedTuple):
    """`length` tokens of an item, from its token `start` on."""

    item: int
    start: int
    length: int


@dataclass(frozen=True)
class RowPacking:
    """How rows are filled: `data.packing`, or what its null stands for; `pairs` are the model's."""

    method: str = "sequential"
    pairs: AttentionPairs = AttentionPairs()

    @classmethod
    def of(cls, config: "Config") -> "RowPacking":
        """The packing that a config sets."""
        return cls(config.data.row_packing, AttentionPairs.of_model(config.model))

    @property
    def balances(self) -> bool:
        """Whether rows, and the parts of a batch, get equal work."""
        return self.method == "balanced"


SEQUENTIAL = RowPacking()


class FirstFit:
    """Chooses rows for items that come the longest first: the first row with room.

    By a tree whose nodes have the most room below them.
    """

    def __init__(self, rows: int, capacity: int):
        self.size = 1 << (rows - 1).bit_length()
        self.room = [0] * self.size + [capacity] * rows + [0] * (self.size - rows)
        for node in range(self.size - 1, 0, -1):
            self.room[node] = max(self.room[2 * node], self.room[2 * node + 1])

    def find(self, length: int) -> int | None:
        """A row with room for `length` tokens; None: there is none."""
        room, node = self.room, 1
        if room[1] < length:
            return None
        while node < self.size:
            node *= 2
            if room[node] < length:
                node += 1
        return node - self.size

    def roomiest(self) -> tuple[int, int]:
        """(row, room) of a row with the most room, after `find` found none."""
        row = self.find(self.room[1])
        assert row is not None
        return row, self.room[1]

    def put(self, row: int, length: int, work: int) -> None:
        """An item was put into the row that was found last."""
        room, node = self.room, row + self.size
        room[node] -= length
        while node > 1:
            node //= 2
            most = max(room[2 * node], room[2 * node + 1])
            if room[node] == most:
                return
            room[node] = most


class LeastWork:
    """A row of the pair of rows with the least work: of those with room the one with less work, then fewer tokens.

    Rows 2n and 2n+1 are a pair. So a row that one long item fills has short ones beside it, and the two together have
    as much work as other pairs, which a single row cannot have. The work of a row without another one counts twice. The
    methods are those of `FirstFit`.
    """

    def __init__(self, rows: int, capacity: int):
        self.capacity, self.tokens, self.work = capacity, [0] * rows, [0] * rows
        self.pairs = [range(first, min(first + 2, rows)) for first in range(0, rows, 2)]
        self.pair_of = [row // 2 for row in range(rows)]
        self.pair_work = [0] * len(self.pairs)
        self.open = [(0, pair) for pair in range(len(self.pairs))]  # heap of (work, pair)
        self.narrow: list[tuple[int, int]] = []  # heap of (-room, pair): too little room for the item before

    def find(self, length: int) -> int | None:
        while self.narrow and -self.narrow[0][0] >= length:
            _, pair = heappop(self.narrow)
            heappush(self.open, (self.pair_work[pair], pair))
        while self.open:
            _, pair = heappop(self.open)
            rows = self.pairs[pair]
            if fitting := [row for row in rows if self.capacity - self.tokens[row] >= length]:
                return min(fitting, key=lambda row: (self.work[row], self.tokens[row]))
            heappush(self.narrow, (min(self.tokens[row] for row in rows) - self.capacity, pair))
        return None

    def roomiest(self) -> tuple[int, int]:
        room, pair = heappop(self.narrow)
        return min(self.pairs[pair], key=lambda row: self.tokens[row]), -room

    def put(self, row: int, length: int, work: int) -> None:
        pair = self.pair_of[row]
        self.tokens[row] += length
        self.work[row] += work
        self.pair_work[pair] += work * (3 - len(self.pairs[pair]))
        heappush(self.open, (self.pair_work[pair], pair))

    def add_row(self) -> int:
        """A new row, to put an item into."""
        row = len(self.tokens)
        self.tokens.append(0)
        self.work.append(0)
        self.pair_of.append(len(self.pairs))
        self.pairs.append(range(row, row + 1))
        self.pair_work.append(0)
        return row


def fill_rows(lengths: np.ndarray, rows: int, capacity: int, packing: RowPacking) -> list[list[Piece]]:
    """Items of rows · capacity tokens in all, as pieces of rows that they fill to the last token.

    The longest item comes first. One that fits into no row is cut: the row with the most room takes its beginning. The
    pieces of a row are in the order of the items, and no two are of the same item. `first_fit` is first-fit decreasing
    (Johnson et al. 1974); `balanced` looks for the least work, as longest processing time first does (Graham 1969).
    """
    assert int(np.sum(lengths)) == rows * capacity
    chooser = LeastWork(rows, capacity) if packing.balances else FirstFit(rows, capacity)
    cuts = [
        Piece(item, start, min(capacity, length - start))
        for item, length in enumerate(np.asarray(lengths).tolist())
        for start in range(0, length, capacity)
    ]
    work = packing.pairs.of([piece.length for piece in cuts]).tolist()
    queue = [(-piece.length, piece.item, piece.start, each) for piece, each in zip(cuts, work, strict=True)]
    heapify(queue)
    filled: list[list[Piece]] = [[] for _ in range(rows)]
    while queue:
        negative, item, start, each = heappop(queue)
        length, row = -negative, chooser.find(-negative)
        if row is None:
            row, room = chooser.roomiest()
            rest = length - room
            heappush(queue, (-rest, item, start + room, int(packing.pairs.of([rest])[0])))
            length, each = room, int(packing.pairs.of([room])[0])
        chooser.put(row, length, each)
        filled[row].append(Piece(item, start, length))
    return [sorted(row) for row in filled]


class PatchRoom(NamedTuple):
    """The patches that each item takes, int64 [items], and those that a row holds."""

    patches: np.ndarray
    capacity: int


def pack(
    lengths: np.ndarray, capacity: int, packing: RowPacking, room: PatchRoom | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Whole items in rows of at most `capacity` tokens: (items, row after row; the end of each row in it, int64).

    `none` and `pairs`: one in a row; `sequential`: in order, and one that does not fit begins a row; `first_fit` and
    `balanced` as in `fill_rows`, the latter in as many rows as the former needs, or more if an item finds no room. With
    a `room` for patches the larger of an item's shares of a row's tokens and patches is its length. Raises
    ValueError for an item longer than `capacity`.
    """
    lengths = np.asarray(lengths, np.int64)
    if lengths.size and int(lengths.max()) > capacity:
        raise ValueError(f"an item of length {int(lengths.max())} does not fit into {capacity}")
    sizes, full = lengths, capacity
    if room is not None:
        sizes, full = np.maximum(lengths * room.capacity, room.patches * capacity), capacity * room.capacity
    if packing.method in ("none", "pairs"):
        rows = [[item] for item in range(lengths.size)]
    elif packing.method == "sequential":
        rows = _in_order(sizes.tolist(), full)
    else:
        work = packing.pairs.of(lengths)
        rows = _longest_first(sizes, work, FirstFit(lengths.size, full))
        if packing.balances:
            rows = _longest_first(sizes, work, LeastWork(len(rows), full))
    ends = np.cumsum([len(items) for items in rows], dtype=np.int64)
    return np.array([item for items in rows for item in items], np.int64), ends


def _in_order(lengths: Iterable[int], capacity: int) -> list[list[int]]:
    rows, room = list[list[int]](), 0
    for item, length in enumerate(lengths):
        if length > room or not rows:
            rows.append([])
            room = capacity
        rows[-1].append(item)
        room -= length
    return rows


def _longest_first(lengths: np.ndarray, work: np.ndarray, chooser: FirstFit | LeastWork) -> list[list[int]]:
    rows = dict[int, list[int]]()
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        row = chooser.find(length)
        if row is None:
            assert isinstance(chooser, LeastWork)  # as many rows as items are enough for the first fit
            row = chooser.add_row()
        chooser.put(row, length, int(work[item]))
        rows.setdefault(row, []).append(item)
    return [rows[row] for row in sorted(rows)]


def spread(work: Sequence[int] | np.ndarray) -> np.ndarray:
    """The order, int64 [G], of a batch's rows with this work: equal sums for devices and microbatches.

    Row m · D + d of a batch is of device d in microbatch m, or several consecutive rows are, whatever the mesh. So
    parts of consecutive rows have equal sums, from small to large ones: with G = p · q · r, the largest prime first,
    rows are joined to G / p parts of p rows, these to G / pq parts, and so on. The heaviest goes first, to the lightest
    part with less than its number. The hierarchy has each part of 2^k rows if G is a power of two, and with G = 3 · 2^k
    each of 3 · 2^j: the parts of all meshes whose devices and microbatches are powers of two. Of two parts that are
    joined the second may have halves exchanged, so that heavy rows of different microbatches are of different devices.
    """
    work = np.asarray(work, np.int64)
    parts = [(each, np.array([row])) for row, each in enumerate(work.tolist())]
    for factor in reversed(_primes(len(work))):
        parts = _joined(parts, factor, work)
    return parts[0][1]


def _joined(parts: Sequence[tuple[int, np.ndarray]], factor: int, work: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Parts (work, rows) joined to larger ones of `factor` each, of equal work as far as possible."""
    count = len(parts) // factor
    sums, members = [0] * count, [list[np.ndarray]() for _ in range(count)]
    lightest = [(0, number) for number in range(count)]
    for each, rows in sorted(parts, key=lambda part: (-part[0], part[1][0])):
        _, number = heappop(lightest)
        members[number].append(rows)
        sums[number] += each
        if len(members[number]) < factor:
            heappush(lightest, (sums[number], number))
    if factor == 2:
        members = [[first, _exchanged(first, second, work)] for first, second in members]
    return [(each, np.concatenate(rows)) for each, rows in zip(sums, members, strict=True)]


def _exchanged(first: np.ndarray, second: np.ndarray, work: np.ndarray) -> np.ndarray:
    """`second` with the halves of all its parts of some sizes exchanged, so that heavy rows meet light ones of `first`.

    Rows that are D apart are of one device, for each D = 2^k. A size is exchanged if the sums of the devices become
    more equal, the smallest first; parts of consecutive rows keep their work.
    """
    blocks = len(second) & -len(second)  # the power of two in its number
    if blocks == 1:
        return second
    found = second.reshape(blocks, -1)
    sizes = [1 << k for k in range(blocks.bit_length() - 1)]

    def most(rows: np.ndarray) -> int:
        """The sum over D of D times the work of the most loaded device."""
        both = work[first] + work[rows.reshape(-1)]
        apart = [len(both) // blocks * 2 * size for size in sizes]
        return sum(int(each) * int(both.reshape(-1, each).sum(axis=0).max()) for each in apart)

    for size in sizes:
        other = found[np.arange(blocks) ^ size]
        if most(other) < most(found):
            found = other
    return found.reshape(-1)


def _primes(number: int) -> list[int]:
    """The prime factors of a number, ascending."""
    found, factor = [], 2
    while factor * factor <= number:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return [*found, number] if number > 1 else found


def imbalance(work: np.ndarray | Sequence[float], parts: int) -> float:
    """Max / mean of the sums of `parts` parts of consecutive rows; 1: equal."""
    sums = np.asarray(work, np.float64).reshape(parts, -1).sum(axis=1)
    return float(sums.max() / sums.mean()) if sums.any() else 1.0
