"""Samples in Megatron-Core's order: its splits, its shuffled epochs and its blends (`data.order: megatron`)."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megajax.data.blend import blend_indices, exhaustive_indices, normalise_weights
from megajax.data.index_cache import cache_directory, cached, digest
from megajax.data.indexed import IndexedDataset
from megajax.data.megatron_order import GptIndices, gpt_indices
from megajax.data.packing import RowPacking
from megajax.data.samples import BlendedSamples, DocumentSamples, Samples
from megajax.errors import InputError, counted
from megajax.schema.batch_schedule import samples_before

if TYPE_CHECKING:
    from megajax.config import Config

SURPLUS = 1.005  # members of a blend have this many times the samples that it should take from them
VERSION = 1  # of the algorithms, part of the key of stored indices


def wanted_samples(config: "Config", split: str) -> int:
    """The samples that a run reads of a split; they decide its order."""
    run = config.run
    if split == "train":
        return config.data.train_samples or samples_before(config, run.steps)
    assert run.eval_steps != "all"  # an epoch
    evaluations = 1 if split == "test" else 1 + (run.steps // run.eval_interval if run.eval_interval else 0)
    return evaluations * run.eval_steps * config.batch.global_size


def member_samples(weights: Sequence[float], num_samples: int) -> list[int]:
    """The samples that a blend of `num_samples` takes of each member, for weights with sum 1."""
    return [math.ceil(num_samples * weight) for weight in weights]


def split_sequences(count: int, shares: Sequence[float]) -> list[tuple[int, int]]:
    """Ranges of a data set's sequences for splits in proportion to `shares`, rounded as Python rounds."""
    total = sum(shares)
    ends = [round(end * count) for end in accumulate((share / total for share in shares), initial=0.0)]
    return list(zip(ends, ends[1:], strict=False))


class MegatronOrder:
    """The token positions of samples; `starts` i64[sequences + 1] are those of the split's consecutive sequences."""

    def __init__(self, starts: np.ndarray, indices: GptIndices):
        self.starts, self.indices = starts, indices

    def pieces(self, index: int) -> Iterator[tuple[int, int]]:
        """As in `SampleOrder`; after the last sample the first one follows again, for the loader that reads ahead."""
        documents, rows, shuffle = self.indices
        row = int(shuffle[index % len(shuffle)])
        (first, skipped), (last, end) = rows[row : row + 2].tolist()
        for at in range(first, last + 1):
            sequence = int(documents[at])
            start, stop = int(self.starts[sequence]), int(self.starts[sequence + 1])
            start, stop = start + (skipped if at == first else 0), start + end + 1 if at == last else stop
            if start < stop:
                yield start, stop


class OrderSettings(NamedTuple):
    """What decides the order of samples besides the lengths of the sequences; `num_samples` None: one epoch."""

    num_samples: int | None
    sequence_length: int
    seed: int
    drop_last: bool = True


class MegatronSamples(DocumentSamples):
    """The samples of sequences first..last-1 of a data set, at least `num_samples` of `order`, or one epoch.

    Without its `drop_last` the rest of the tokens is a sample too; after it come zeros, which the loss does not count.

    With `end_of_document` documents end at this token, as with Megatron's --reset-attention-mask, else with their
    sequence. `num_documents` is the number of sequences. Raises InputError when there are no tokens or they are not
    integers, and if the indices cannot be stored in `cache`.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        sequences: tuple[int, int],
        order: OrderSettings,
        cache: Path,
        end_of_document: int | None,
    ):
        self._arguments = (dataset, sequences, order, cache, end_of_document)
        self.drop_last, self.one_epoch = order.drop_last, order.num_samples is None
        self.dataset, self.sequence_length, self.end_of_document = dataset, order.sequence_length, end_of_document
        lengths = dataset.lengths[slice(*sequences)]
        self.num_documents, self.num_tokens = len(lengths), int(lengths.sum(dtype=np.int64))
        self.check_tokens()
        first = int(dataset.offsets[sequences[0]]) // dataset.dtype.itemsize
        starts = first + np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        key = {"kind": "gpt", "version": VERSION, "lengths": digest(lengths), "samples": order.num_samples}
        key |= {"sequence_length": order.sequence_length, "seed": order.seed}
        key |= {} if order.drop_last else {"drop_last": False}
        build = partial(gpt_indices, lengths, *order[:3], drop_last=order.drop_last)
        arrays = cached(cache, key, GptIndices._fields, build)
        self._order = MegatronOrder(starts, GptIndices(*arrays))

    def __reduce__(self) -> Any:
        return MegatronSamples, self._arguments  # a reader process maps the stored indices

    def __len__(self) -> int:
        return len(self._order.indices.shuffle)

    def repacked(self, packing: RowPacking) -> Samples:
        return self

    def padding(self, index: int) -> int:
        if self.drop_last:
            return 0
        return self.sequence_length + 1 - sum(stop - start for start, stop in self._order.pieces(index))

    def counted(self, index: int) -> np.ndarray | None:
        if self.drop_last:
            return None
        size = self.sequence_length + 1
        return np.arange(size) < size - self.padding(index)

    def document_lengths(self, index: int) -> np.ndarray:
        padding = self.padding(index)
        if self.end_of_document is None:
            lengths = super().document_lengths(index)
        else:
            sample = self[index]
            size = len(sample) - padding
            ends = np.flatnonzero(sample[:size] == self.end_of_document) + 1
            lengths = np.diff(np.unique(np.concatenate([[0], ends, [size]])))
        return np.append(lengths, padding) if padding else lengths


class MegatronBlend(BlendedSamples):
    """Samples of several sources, in the order of Megatron's blend of `num_samples`; `weights` have sum 1.

    Without weights they are in proportion to the numbers of the sources' samples, and each sample comes at most once.
    """

    def __init__(
        self,
        sources: Sequence[MegatronSamples],
        weights: Sequence[float] | None,
        num_samples: int,
        cache: Path,
    ):
        self._arguments = (sources, weights, num_samples, cache)
        self.sources, sizes = sources, [len(source) for source in sources]
        shares = normalise_weights(sizes) if weights is None else list(weights)
        self.weights = np.asarray(shares)
        size = num_samples if weights is None else sum(member_samples(shares, num_samples))
        key = {"kind": "blend", "version": VERSION, "weights": shares, "samples": size}
        build = partial(blend_indices, shares, size)
        if weights is None and size >= sum(sizes):
            key, build = {"kind": "exhaustive", "version": VERSION, "sizes": sizes}, partial(exhaustive_indices, sizes)
        self.datasets, self.samples = cached(cache, key, ("datasets", "samples"), build)

    def __reduce__(self) -> Any:
        return MegatronBlend, self._arguments

    def __len__(self) -> int:
        return len(self.datasets)

    def locate(self, index: int) -> tuple[int, int]:
        index %= len(self.datasets)
        return int(self.datasets[index]), int(self.samples[index])


def open_samples(
    config: "Config",
    split: str,
    ranges: Sequence[tuple[IndexedDataset, tuple[int, int]]],
    weights: Sequence[float] | None,
    end_of_document: int | None,
) -> Samples:
    """The samples of a split from data sets and the ranges of their sequences, one of each weight.

    Without weights a blend has one epoch. Raises InputError if the run reads more of it.
    """
    cache = cache_directory(config)
    whole = config.reads_whole(split)
    drop_last = config.data.drop_last_validation_sample or split.partition("/")[0] != "valid"
    wanted = 1 if whole else max(1, wanted_samples(config, split))
    length, seed = config.batch.sequence_length, config.run.seed
    counts: list[int | None] = [wanted]
    if whole or (len(ranges) > 1 and weights is None):
        counts = [None] * len(ranges)
    elif len(ranges) > 1:
        weights = normalise_weights(weights or ())
        counts = [math.ceil(count * SURPLUS) for count in member_samples(weights, wanted)]
    sources = [
        MegatronSamples(dataset, sequences, OrderSettings(count, length, seed, drop_last), cache, end_of_document)
        for (dataset, sequences), count in zip(ranges, counts, strict=True)
    ]
    if len(sources) == 1 or whole:
        return sources[0] if len(sources) == 1 else BlendedSamples(sources, [len(source) for source in sources])
    there, needed = sum(map(len, sources)), samples_before(config, config.run.steps)
    if weights is None and split == "train" and needed > there:
        raise InputError(
            f"the {len(sources)} sources without weights have {counted(there, 'sample')}, each read once, but the "
            f"run reads {needed}: give them weights, with which they are repeated, or lower run.steps."
        )
    return MegatronBlend(sources, weights, wanted, cache)
