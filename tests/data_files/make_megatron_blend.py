"""Writes megatron_blend.txt: the first 1,000 samples of a blend of three data sets in Megatron's order.

Plain loops over tokens, independent of megajax's code. Token i of the three data sets together is the number i.
"""

import math
from pathlib import Path

import numpy as np

SEED, LENGTH, WANTED = 1234, 16, 1000  # several epochs of each data set
WEIGHTS = [0.5, 0.3, 0.2]
PLACES_PER_LINE = 10


def order_of(sizes: list[int], wanted: int) -> list[tuple[int, int]]:
    """The (sequence, token in it) at which each sample of a data set begins."""
    tokens, epochs = sum(sizes), 1
    while epochs * tokens < wanted * LENGTH + 1:
        epochs += 1
    assert epochs > 2
    before = ((epochs - 1) * tokens - 1) // LENGTH
    separate = wanted - before < int(0.8 * ((tokens - 1) // LENGTH))
    random, sequences = np.random.RandomState(SEED), []
    for count in [epochs - 1, 1] if separate else [epochs]:
        part = np.array([i for _ in range(count) for i in range(len(sizes))], np.int32)
        random.shuffle(part)
        sequences += part.tolist()
    stream = [(sequence, token) for sequence in sequences for token in range(sizes[sequence])]
    samples, shuffled = (len(stream) - 1) // LENGTH, []
    for first, last in [(0, before), (before, samples)] if separate else [(0, samples)]:
        part = np.array(range(first, last), np.uint32)
        random.shuffle(part)
        shuffled += part.tolist()
    return [stream[k * LENGTH] for k in shuffled]


def main() -> None:
    """Choose the sizes, and write them and the samples."""
    random = np.random.RandomState(0)
    sets = [random.randint(1, 90, count).tolist() for count in (30, 17, 23)]
    needed = [math.ceil(WANTED * weight) for weight in WEIGHTS]
    orders = [order_of(sizes, math.ceil(count * 1.005)) for sizes, count in zip(sets, needed, strict=True)]
    taken, places = [0, 0, 0], []
    for step in range(WANTED):
        behind = [weight * max(float(step), 1.0) - taken[d] for d, weight in enumerate(WEIGHTS)]
        d = behind.index(max(behind))
        places.append(f"{d},{','.join(map(str, orders[d][taken[d]]))}")
        taken[d] += 1
    lines = [f"seed {SEED} sequence_length {LENGTH} weights {' '.join(map(str, WEIGHTS))}"]
    lines += [f"sequences {' '.join(map(str, sizes))}" for sizes in sets]
    lines += [" ".join(places[i : i + PLACES_PER_LINE]) for i in range(0, WANTED, PLACES_PER_LINE)]
    Path("tests/data_files/megatron_blend.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
