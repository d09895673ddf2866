"""Prefix-LM: prefixes of samples, restated in loops, and what their tokens attend to."""

import jax.numpy as jnp
import numpy as np
import pytest

from megajax import ops
from megajax.data.prefixes import Prefixes
from megajax.data.samples import Packing, Samples, make_batch

LENGTHS = [5, 1, 3]


class Stream(Samples):
    """Nine tokens of three documents; answers are two tokens of the first and one of the last."""

    def __getitem__(self, index: int) -> np.ndarray:
        return np.arange(9, dtype=np.int32) + 100 * index

    def document_lengths(self, index: int) -> np.ndarray:
        return np.array(LENGTHS)

    def counted(self, index: int) -> np.ndarray:
        return np.array([0, 0, 0, 1, 1, 0, 0, 0, 1], bool)


@pytest.mark.smoke
@pytest.mark.parametrize(("of_chats", "separate"), [(False, False), (False, True), (True, True)])
def test_prefixes_are_a_function_of_seed_and_index(of_chats, separate):
    samples, seen = Stream(), set()
    packing = Packing(separate, prefixes=Prefixes(7, of_chats, separate))
    batch = make_batch(samples, range(200), packing)
    for row in range(200):
        generator, expected = np.random.Generator(np.random.PCG64((7, 4, row))), []
        for length, start in zip(LENGTHS, (0, 5, 6), strict=True) if separate else [(9, 0)]:
            size = 0 if of_chats else int(generator.integers(length))
            if of_chats and samples.counted(row)[start : start + length].any():
                while not samples.counted(row)[start + size]:
                    size += 1
            seen.add((start, size))
            expected += [i < size for i in range(length)]
        assert batch["is_prefix"][row].tolist() == expected[:-1]
        counted = [samples.counted(row)[i] and not expected[i] for i in range(1, 9)]
        assert batch["loss_mask"][row].tolist() == counted
    every = {(start, size) for start, length in ((0, 5), (5, 1), (6, 3)) for size in range(length)}
    assert seen == ({(0, 3), (5, 0), (6, 2)} if of_chats else every if separate else {(0, n) for n in range(9)})


@pytest.mark.smoke
def test_tokens_of_a_prefix_attend_to_all_of_it():
    """Of two documents, of seven and five tokens, with prefixes of four and two."""
    is_prefix, document = [i % 7 < 4 - 2 * (i // 7) for i in range(12)], [i // 7 for i in range(12)]
    documents = ops.documents_of(jnp.array([document]))
    first, end = ops.visible_ranges(
        jnp.arange(12)[None], documents, None, None, ops.two_sided_ends(jnp.array([is_prefix]))
    )
    for i in range(12):
        seen = [j for j in range(12) if document[i] == document[j] and (j <= i or (is_prefix[i] and is_prefix[j]))]
        assert list(range(int(first[0, i]), int(end[0, i]))) == seen
