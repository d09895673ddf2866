"""The batches of a case: a function of the case and the step, in NumPy, so that both programs make the same ones."""

import numpy as np
from megatron_parity.case import Case

END = 0  # the token at the end of a document


def batch(case: Case, step: int) -> dict[str, np.ndarray]:
    """Fields `[batch, length]`: tokens, targets, loss_mask, positions and the number of each token's document.

    A token follows a fixed table in 80 % of the steps, so there is something to learn.
    """
    rows, S, V = case.batch, case.length, case.vocab
    table = np.random.default_rng(7).integers(1, V, V)
    random = np.random.default_rng([11, step])
    stream = np.empty((rows, S + 1), np.int64)
    stream[:, 0] = random.integers(1, V, rows)
    for i in range(S):
        follows = random.random(rows) < 0.8
        stream[:, i + 1] = np.where(follows, table[stream[:, i]], random.integers(1, V, rows))
    counted, documents = np.ones((rows, S), np.float32), np.zeros((rows, S), np.int32)
    positions = np.broadcast_to(np.arange(S, dtype=np.int32), (rows, S))
    if case.mask == "random":  # another share of the tokens counts in each row, and few in some microbatches
        share = random.random((rows, 1)) ** 2
        counted = (random.random((rows, S)) < share).astype(np.float32)
        counted[:, 0] = 1
    elif case.mask == "half":  # every second token: the same share in all microbatches
        counted[:, 1::2] = 0
    elif case.mask == "last target is 0":
        stream[:, -1] = 0
    elif case.mask == "documents":
        for row in stream:
            row[np.sort(random.choice(np.arange(2, S - 2), size=random.integers(0, 4), replace=False))] = END
        is_end = stream[:, :-1] == END
        documents = (np.cumsum(is_end, axis=1) - is_end).astype(np.int32)
        positions = positions - np.stack([np.searchsorted(own, own) for own in documents]).astype(np.int32)
        counted = (~is_end).astype(np.float32)  # --eod-mask-loss
    return {
        "tokens": stream[:, :-1],
        "targets": stream[:, 1:],
        "loss_mask": counted,
        "positions": positions,
        "documents": documents,
    }
