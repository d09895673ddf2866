"""Megatron-Core's order of GPT samples, number for number.

A data set's sequences are repeated for as many epochs as the samples need, shuffled, joined to one stream, cut every S
tokens, and the samples are shuffled again. Everything is drawn from one `numpy.random.RandomState`: the order depends
on the seed, the lengths, S and the number of samples, and on nothing else.
"""

from typing import NamedTuple

import numpy as np

EXTRA = 1  # tokens that a sample has beyond its S inputs: the last target
SEPARATE_BELOW = 0.8  # the last epoch is shuffled apart if it gives less than this share of an epoch's samples
CHUNK = 1 << 24  # sequences whose ends are in memory at a time


class GptIndices(NamedTuple):
    """Arrays that together locate every sample."""

    documents: np.ndarray  # int32 [E · sequences]: the sequences of the stream, in order
    rows: np.ndarray  # [n + 1, 2]: (index into `documents`, token in the sequence): the samples' beginnings, the end
    shuffle: np.ndarray  # [n]: the row at which the i-th sample begins


class Epochs(NamedTuple):
    """The passes over a data set that some samples need."""

    count: int
    separated: bool  # whether the last one is shuffled apart
    samples_before_last: int  # meaningful if separated
    samples: int  # in all of them


def count_epochs(num_tokens: int, num_samples: int | None, sequence_length: int, drop_last: bool) -> Epochs:
    """The epochs for `num_samples` samples (None: one epoch) of a data set with `num_tokens` tokens an epoch.

    Without `drop_last` the rest of the tokens is a shorter sample.
    """
    count = 1
    if num_samples is not None:
        count = max(1, -(-(num_samples * sequence_length + EXTRA) // num_tokens))
    inputs = count * num_tokens - EXTRA
    samples = inputs // sequence_length
    if not drop_last:  # Megatron rounds in float32
        samples = min(-(-inputs // sequence_length), int(np.ceil(np.float32(inputs) / np.float32(sequence_length))))
    if count == 1 or num_samples is None:
        return Epochs(count, False, samples, samples)
    before_last = ((count - 1) * num_tokens - EXTRA) // sequence_length
    of_an_epoch = (num_tokens - EXTRA) // sequence_length
    separated = num_samples - before_last < int(SEPARATE_BELOW * of_an_epoch)
    return Epochs(count, separated, before_last, samples)


def gpt_indices(
    lengths: np.ndarray,
    num_samples: int | None,
    sequence_length: int,
    seed: int,
    *,
    drop_last: bool = True,
    chunk: int = CHUNK,
) -> GptIndices:
    """The order of the samples of S = `sequence_length` tokens from sequences of `lengths`, for at least `num_samples`.

    `lengths` are those of the split's sequences, any integer dtype; `num_samples` None is one epoch. Without
    `drop_last` the last row's sample is the rest of the tokens, shorter than the others. Source: the
    algorithm of Megatron-Core's GPTDataset. The ends of `chunk` sequences are computed at a time, so the memory
    is that of the result. Raises ValueError if the sequences have no tokens.
    """
    lengths = np.asarray(lengths)
    num_tokens = int(lengths.sum(dtype=np.int64))
    if num_tokens == 0:
        raise ValueError("the sequences have no tokens")
    epochs = count_epochs(num_tokens, num_samples, sequence_length, drop_last)
    generator = np.random.RandomState(seed)
    documents = _shuffled_documents(len(lengths), epochs, generator)
    if epochs.samples * sequence_length + EXTRA > epochs.count * num_tokens:
        rows = _rows(lengths, documents, epochs.samples - 1, sequence_length, chunk)
        end = [[len(documents) - 1, int(lengths[documents[-1]]) - EXTRA]]
        rows = np.concatenate([rows, np.array(end, rows.dtype)])
    else:
        rows = _rows(lengths, documents, epochs.samples, sequence_length, chunk)
    return GptIndices(documents, rows, _shuffled_samples(epochs, generator))


def _shuffled_documents(count: int, epochs: Epochs, generator: np.random.RandomState) -> np.ndarray:
    """All sequences of each epoch: shuffled over all epochs together, or the last epoch by itself."""
    if epochs.separated:
        parts = [_repeated(count, epochs.count - 1), _repeated(count, 1)]
        for part in parts:
            generator.shuffle(part)
        return np.concatenate(parts)
    documents = _repeated(count, epochs.count)
    generator.shuffle(documents)
    return documents


def _repeated(count: int, times: int) -> np.ndarray:
    return np.tile(np.arange(count, dtype=np.int32), times)


def _rows(lengths: np.ndarray, documents: np.ndarray, samples: int, sequence_length: int, chunk: int) -> np.ndarray:
    """The index into `documents`, and the token in that sequence, of every `sequence_length`-th token of the stream."""
    largest = max(len(documents), int(lengths.max()))
    rows = np.empty((samples + 1, 2), np.int32 if largest <= np.iinfo(np.int32).max else np.int64)
    position = filled = 0  # tokens before the piece, rows that are done
    for first in range(0, len(documents), chunk):
        lengths_of_chunk = lengths[documents[first : first + chunk]].astype(np.int64)
        ends = position + np.cumsum(lengths_of_chunk)
        last = min(samples, (int(ends[-1]) - 1) // sequence_length)
        if last >= filled:
            tokens = np.arange(filled, last + 1, dtype=np.int64) * sequence_length
            at = np.searchsorted(ends, tokens, side="right")
            rows[filled : last + 1, 0] = first + at
            rows[filled : last + 1, 1] = tokens - (ends[at] - lengths_of_chunk[at])
            filled = last + 1
        position = int(ends[-1])
    assert filled == samples + 1, (filled, samples)
    return rows


def _shuffled_samples(epochs: Epochs, generator: np.random.RandomState) -> np.ndarray:
    """The rows of all samples: shuffled together, or those of the last epoch by themselves."""
    dtype = np.uint32 if epochs.samples < np.iinfo(np.uint32).max - 1 else np.int64
    first = epochs.samples_before_last if epochs.separated else epochs.samples
    parts = [np.arange(first, dtype=dtype), np.arange(first, epochs.samples, dtype=dtype)]
    for part in parts:
        if len(part):
            generator.shuffle(part)
    return np.concatenate(parts)
