"""Packing of sequences into samples of one length."""

from bisect import bisect_left, insort

import numpy as np


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Best-fit decreasing: (the items, bin after bin; the end of each bin in that list, int64).

    Each item goes into the bin that it leaves the least room in, the longest items first; items of one length stay in
    order, and a tie goes to the bin that became so full last. Source: Johnson et al. 1974 (within 22 % of the fewest
    bins, plus a constant). Raises ValueError for an item longer than `capacity`.
    """
    if len(lengths) and int(np.max(lengths)) > capacity:
        raise ValueError(f"an item of length {int(np.max(lengths))} does not fit into {capacity}")
    bins: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # bins by what is left in them
    rooms: list[int] = []  # the keys of by_room, sorted
    for item in np.argsort(-np.asarray(lengths, np.int64), kind="stable").tolist():
        length = int(lengths[item])
        at = bisect_left(rooms, length)
        if at == len(rooms):
            bins.append([])
            chosen, room = len(bins) - 1, capacity
        else:
            room = rooms[at]
            chosen = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[at]
        bins[chosen].append(item)
        left = room - length
        if left not in by_room:
            by_room[left] = []
            insort(rooms, left)
        by_room[left].append(chosen)
    ends = np.cumsum([len(items) for items in bins], dtype=np.int64)
    return np.array([item for items in bins for item in items], np.int64), ends
