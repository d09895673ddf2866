"""GPT samples: S+1 tokens cut from an endless stream of documents, and weighted blends of several data sets.

A sample depends only on its index and the seed. A `SampleOrder` determines its token positions, and `DocumentSamples`
reads the tokens there. A new order needs an entry in `ORDERS`; `PackedOrder` packs the documents of any of them.
"""

import copy
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from megajax.data.fim import Infilling
from megajax.data.indexed import IndexedDataset, check_integers, id_range
from megajax.data.masking import Masking
from megajax.data.packing import LOOK_AHEAD, SEQUENTIAL, RowPacking, fill_rows
from megajax.data.prefixes import Prefixes
from megajax.data.remote import RemoteTokens
from megajax.data.spans import SpanCorruption
from megajax.data.workers import shared_cache
from megajax.errors import InputError, counted

if TYPE_CHECKING:
    from megajax.config import Config
    from megajax.data.images import Images, PlacedPicture
    from megajax.data.registered import RegisteredDataset
    from megajax.data.text import TextDataset

CACHED = 3  # epochs: a sample may span two while another thread is one ahead
WINDOWS = 128  # that stay packed: rows of large batches, read ahead in an order of their own, come from many


class Samples(Protocol):
    """An endless sequence of samples, int32[S+1] each: tokens 0 to S-1 are the inputs, 1 to S the targets."""

    def __getitem__(self, index: int) -> np.ndarray: ...

    def document_lengths(self, index: int) -> np.ndarray:
        """Number of tokens that a sample has from each of its documents, in order: positive, with sum S+1."""
        ...

    def counted(self, index: int) -> np.ndarray | None:
        """Whether the loss counts the prediction of each token, bool[S+1]; None: of all."""
        return None

    def padding(self, index: int) -> int:
        """The number of tokens at the end of a sample that are no text."""
        return 0

    def pictures(self, index: int) -> "Sequence[PlacedPicture]":
        """The pictures of a sample, in order."""
        del index
        return ()

    def repacked(self, packing: RowPacking) -> "Samples":
        """The same documents in rows of another packing; itself if there is only one."""
        del packing
        return self

    def is_remote(self) -> bool:
        """Whether some tokens are read over the network."""
        return False

    def fetch(self, indices: Sequence[int]) -> list[Future[None]]:
        """Starts to read remote tokens of these samples, all at the same time; they are here when all results are."""
        return []


class SampleOrder(Protocol):
    """The token positions of each sample."""

    def pieces(self, index: int) -> Iterator[tuple[int, int]]:
        """The ranges (start, stop) of token positions of sample `index`, in order, S+1 tokens in all.

        Each range lies within one document, and the next range begins another document.
        """
        ...


@dataclass(frozen=True)
class Packing:
    """Separation of the documents of a sequence: the keys with these names in the config's section `data`.

    And the prefixes in them, of `model.prefix_lm`.
    """

    reset_attention: bool = False
    reset_positions: bool = False
    mask_end_of_document_loss: bool = False
    prefixes: Prefixes | None = None

    @classmethod
    def of(cls, config: "Config") -> "Packing":
        """The separation that a config sets."""
        data = config.data
        separation = data.reset_attention, data.reset_positions, data.mask_end_of_document_loss
        return cls(*separation, Prefixes.of(config))


@dataclass(frozen=True)
class Changes:
    """What a batch has besides its samples and the next token of each, or in place of them."""

    infilling: Infilling | None = None
    pads_samples: bool = False  # samples may be padded
    spans: SpanCorruption | None = None
    masking: Masking | None = None
    images: "Images | None" = None


def make_batch(
    samples: Samples,
    indices: Sequence[int] | np.ndarray,
    packing: Packing = Packing(),
    changes: Changes = Changes(),
) -> dict[str, np.ndarray]:
    """The fields of a batch, each [len(indices), S]: `loss_mask` float32, the others int32.

    Targets are the next tokens, or with `masking` the tokens themselves, of which some are hidden in `tokens`. With
    `reset_attention` there are also `segment_ids`: 0, 1, ... by document of the sequence. If samples may be padded,
    `is_real` bool: False for padding; with prefixes `is_prefix` bool. With `spans` the fields are those of an encoder
    and a decoder, with `images` also those of the pictures.
    """
    if samples.is_remote():
        for coming in samples.fetch([int(index) for index in indices]):
            coming.result()
    infilling, masking, images = changes.infilling, changes.masking, changes.images
    rows = [samples[int(index)] for index in indices]
    if changes.spans is not None:
        return changes.spans.fields(rows, [int(index) for index in indices])
    if infilling is not None:
        rows = [infilling(row, samples.document_lengths(int(i)), int(i)) for row, i in zip(rows, indices, strict=True)]
    block = np.stack(rows)
    shape = (block.shape[0], block.shape[1] - 1)
    of_samples = [samples.counted(int(index)) for index in indices]
    counted = np.stack([np.ones(block.shape[1], bool) if mask is None else mask for mask in of_samples])
    fields = {
        "tokens": np.ascontiguousarray(block[:, :-1]),
        "targets": np.ascontiguousarray(block[:, 1:]),
        "loss_mask": counted[:, 1:].astype(np.float32),
        "positions": np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1)),
    }
    if masking is not None:
        of_rows = zip(block[:, :-1], counted[:, :-1], indices, strict=True)
        hidden, chosen = zip(*(masking(tokens, may, int(index)) for tokens, may, index in of_rows), strict=True)
        fields |= {"tokens": np.stack(hidden), "targets": fields["tokens"], "loss_mask": np.float32(np.stack(chosen))}
    if images is not None:
        of_rows = [(samples.pictures(int(index)), samples.document_lengths(int(index))) for index in indices]
        fields |= images.fields(of_rows, shape[1], packing.reset_positions)
    if changes.pads_samples:
        lengths = np.array([block.shape[1] - samples.padding(int(index)) for index in indices])
        fields["is_real"] = np.arange(shape[1]) < lengths[:, None]
    if packing != Packing():
        _separate(fields, packing, [samples.document_lengths(int(index)) for index in indices], counted, indices)
    return fields


def _separate(
    fields: dict[str, np.ndarray], packing: Packing, lengths: Sequence[np.ndarray], counted: np.ndarray, indices: Any
) -> None:
    """Change and add fields for rows whose documents have these `lengths`."""
    documents = np.stack([np.repeat(np.arange(each.size, dtype=np.int32), each) for each in lengths])  # [rows, S+1]
    if packing.reset_attention:
        fields["segment_ids"] = np.ascontiguousarray(documents[:, :-1])
    if packing.reset_positions:
        starts = np.stack([np.repeat(np.cumsum(each) - each, each) for each in lengths])
        fields["positions"] -= starts[:, :-1].astype(np.int32)
    if packing.mask_end_of_document_loss:
        fields["loss_mask"] *= documents[:, :-1] == documents[:, 1:]
    if packing.prefixes is not None:
        of_rows = zip(lengths, counted, indices, strict=True)
        is_prefix = np.stack([packing.prefixes(each, mask, int(index)) for each, mask, index in of_rows])
        fields["is_prefix"] = np.ascontiguousarray(is_prefix[:, :-1])
        fields["loss_mask"] *= ~is_prefix[:, 1:]


@dataclass(frozen=True)
class Epoch:
    """One pass over the documents: their order and ends in the stream, and the order of the samples."""

    documents: np.ndarray | None
    ends: np.ndarray
    first_sample: int
    samples: np.ndarray | None


class StreamOrder:
    """Documents joined to an endless stream, epoch after epoch, and cut every S tokens.

    A sample overlaps the next by one token and may span two epochs. `shuffled` permutes the documents of an epoch, and
    the samples that start in it. `starts` i64[documents+1]: positions of consecutive documents in the file, and the end
    of the last.
    """

    def __init__(self, starts: np.ndarray, sequence_length: int, seed: int, *, shuffled: bool):
        self.starts, self.sequence_length, self.seed, self.shuffled = starts, sequence_length, seed, shuffled
        self.num_tokens = int(starts[-1] - starts[0])
        self._epoch = shared_cache(CACHED, self._make_epoch)

    def pieces(self, index: int) -> Iterator[tuple[int, int]]:
        group = self._epoch(index * self.sequence_length // self.num_tokens)
        if group.samples is not None:
            index = group.first_sample + int(group.samples[index - group.first_sample])
        yield from self.ranges(index * self.sequence_length, self.sequence_length + 1)

    def ranges(self, position: int, needed: int) -> Iterator[tuple[int, int]]:
        """The ranges, as of `pieces`, of `needed` tokens of the stream from `position` on."""
        while needed:
            epoch_index, offset = divmod(position, self.num_tokens)
            epoch = self._epoch(epoch_index)
            rank = int(np.searchsorted(epoch.ends, offset, side="right"))
            while needed and offset < self.num_tokens:
                document = rank if epoch.documents is None else int(epoch.documents[rank])
                end = int(epoch.ends[rank])
                taken = min(needed, end - offset)
                stop = int(self.starts[document + 1]) - (end - offset) + taken
                if taken:
                    yield stop - taken, stop
                offset, position, needed, rank = offset + taken, position + taken, needed - taken, rank + 1

    def _make_epoch(self, epoch: int) -> Epoch:
        first, last = (-(-e * self.num_tokens // self.sequence_length) for e in (epoch, epoch + 1))
        if not self.shuffled:
            return Epoch(None, self.starts[1:] - self.starts[0], first, None)
        generator = np.random.Generator(np.random.PCG64((self.seed, epoch)))
        documents = generator.permutation(_arange(self.starts.size - 1))
        ends = np.cumsum(np.diff(self.starts)[documents])
        return Epoch(documents, ends, first, generator.permutation(_arange(last - first)))


class PackedOrder:
    """Windows of a stream of documents, each packed by itself into rows of S+1 tokens without padding.

    A window has `LOOK_AHEAD` rows, or as many as an epoch fills, so a sample depends on its index, the seed and the
    lengths of the documents alone. Each token of the stream is in one row. Rows of a window are in an order of their
    own, or with a stream that is not shuffled in that of their first documents.
    """

    def __init__(self, stream: StreamOrder, packing: RowPacking):
        self.stream, self.packing, self.capacity = stream, packing, stream.sequence_length + 1
        self.rows = min(LOOK_AHEAD, max(1, stream.num_tokens // self.capacity))
        self._window = shared_cache(WINDOWS, self._make_window)

    def pieces(self, index: int) -> Iterator[tuple[int, int]]:
        window, row = divmod(index, self.rows)
        ranges, ends = self._window(window)
        yield from map(tuple, ranges[ends[row] : ends[row + 1]].tolist())

    def _make_window(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        """(the ranges of all rows, int64 [ranges, 2]; where each row begins in them, and the end of the last)."""
        tokens = self.rows * self.capacity
        documents = list(self.stream.ranges(window * tokens, tokens))
        lengths = np.array([stop - start for start, stop in documents])
        rows = fill_rows(lengths, self.rows, self.capacity, self.packing)
        order = np.argsort([row[0].item for row in rows], kind="stable")
        if self.stream.shuffled:
            order = np.random.Generator(np.random.PCG64((self.stream.seed, window, 1))).permutation(self.rows)
        pieces = [piece for row in order.tolist() for piece in rows[row]]
        starts = [documents[piece.item][0] + piece.start for piece in pieces]
        ranges = [(start, start + piece.length) for start, piece in zip(starts, pieces, strict=True)]
        return np.array(ranges, np.int64), np.cumsum([0, *(len(rows[row]) for row in order.tolist())])


def _arange(length: int) -> np.ndarray:
    return np.arange(length, dtype=np.int32 if length < 2**31 else np.int64)


ORDERS: dict[str, Callable[[np.ndarray, int, int], StreamOrder]] = {
    "shuffled": lambda starts, length, seed: StreamOrder(starts, length, seed, shuffled=True),
    "sequential": lambda starts, length, seed: StreamOrder(starts, length, seed, shuffled=False),
}


class DocumentSamples(Samples):
    """Samples of the documents first..last-1 of an indexed data set, in the named order.

    `num_documents` and `num_tokens` are those of an epoch, `tokens_per_sample` those that a sample takes of it. Raises
    InputError when there are no tokens or they are not integers.
    """

    def __init__(
        self,
        dataset: "IndexedDataset | TextDataset | RegisteredDataset",
        documents: tuple[int, int],
        sequence_length: int,
        seed: int,
        order: str,
        packing: RowPacking = SEQUENTIAL,
    ):
        self._arguments = (dataset, documents, sequence_length, seed, order, packing)
        self.dataset, self.sequence_length = dataset, sequence_length
        starts = dataset.document_starts(*documents)
        self.num_documents, self.num_tokens = documents[1] - documents[0], int(starts[-1] - starts[0])
        self.check_tokens()
        stream = ORDERS[order](starts, sequence_length, seed)
        self._order = stream if packing.method == "sequential" else PackedOrder(stream, packing)

    @property
    def tokens_per_sample(self) -> int:
        return self._order.capacity if isinstance(self._order, PackedOrder) else self.sequence_length

    def repacked(self, packing: RowPacking) -> Samples:
        return DocumentSamples(*self._arguments[:-1], packing)

    def check_tokens(self) -> None:
        """Raises InputError when there are no tokens or they are not integers."""
        check_integers(self.dataset)
        if not self.num_tokens:
            documents = self.num_documents
            which = f"{counted(documents, 'document')}, without any token" if documents else "no documents"
            raise InputError(f"{self.dataset.prefix}.bin has {which}: write it again from text that is not empty.")

    def __reduce__(self) -> Any:
        return DocumentSamples, self._arguments  # a reader process builds its own order instead of copying it

    def __getitem__(self, index: int) -> np.ndarray:
        sample = np.zeros(self.sequence_length + 1, np.int32)
        filled, is_wide = 0, self.dataset.dtype.itemsize > sample.itemsize
        for start, stop in self._order.pieces(index):
            tokens = self.dataset.tokens[start:stop]
            if is_wide:  # the others fit; `to_global` compares with the vocabulary
                id_range(tokens, self.dataset.token_file, start)
            sample[filled : filled + stop - start] = tokens
            filled += stop - start
        return sample

    def document_lengths(self, index: int) -> np.ndarray:
        return np.array([stop - start for start, stop in self._order.pieces(index)])

    def is_remote(self) -> bool:
        return isinstance(self.dataset.tokens, RemoteTokens)

    def fetch(self, indices: Sequence[int]) -> list[Future[None]]:
        if not isinstance(self.dataset.tokens, RemoteTokens):
            return []
        return self.dataset.tokens.fetch(piece for index in indices for piece in self._order.pieces(index))


class BlendedSamples(Samples):
    """Each sample comes from the source that is furthest behind its weight.

    This source has the smallest (samples taken + 1/2) / weight; ties go to the earlier source. So sample n is the n-th
    of the merged sequences (k + 1/2) / weight, k = 0, 1, ..., and can be computed without its predecessors.
    """

    def __init__(self, sources: Sequence[Samples], weights: Sequence[float]):
        assert len(sources) == len(weights) and min(weights) > 0
        self.sources = sources
        self.weights = np.asarray(weights, np.float64) / np.sum(weights)

    def locate(self, index: int) -> tuple[int, int]:
        """The source of sample `index`, and its index there."""
        source, rank = self._from(index)[1:]
        return int(source[0]), int(rank[0])

    def taken(self, index: int) -> np.ndarray:
        """The number of samples of each source before sample `index`, int64 [sources]."""
        before, _, _ = self._from(index)
        return before

    def _from(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(samples of each source before `index`, source and rank of some samples from `index` on, in order)."""
        # Before time t, source d has taken t·weight ± 1/2 samples, all D sources t ± D/2 in total. So the time of
        # sample n is in n+1-D/2 .. n+D/2. The candidates include one more sample on both sides, because of rounding.
        half = len(self.sources) / 2
        first = np.maximum(np.floor((index - half) * self.weights - 1.5), 0).astype(np.int64)
        last = np.ceil((index + half + 1) * self.weights + 1.5).astype(np.int64)
        source = np.repeat(np.arange(len(self.sources)), last - first)
        rank = np.arange(source.size) - np.repeat(np.cumsum(last - first) - last, last - first)
        times = (rank + 0.5) / self.weights[source]
        order, known = np.lexsort((source, times)), index - int(first.sum())
        before = first + np.bincount(source[order[:known]], minlength=first.size)
        return before, source[order[known:]], rank[order[known:]]

    def __getitem__(self, index: int) -> np.ndarray:
        source, rank = self.locate(index)
        return self.sources[source][rank]

    def document_lengths(self, index: int) -> np.ndarray:
        source, rank = self.locate(index)
        return self.sources[source].document_lengths(rank)

    def counted(self, index: int) -> np.ndarray | None:
        source, rank = self.locate(index)
        return self.sources[source].counted(rank)

    def padding(self, index: int) -> int:
        source, rank = self.locate(index)
        return self.sources[source].padding(rank)

    def pictures(self, index: int) -> "Sequence[PlacedPicture]":
        source, rank = self.locate(index)
        return self.sources[source].pictures(rank)

    def repacked(self, packing: RowPacking) -> Samples:
        sources = [source.repacked(packing) for source in self.sources]
        if all(new is old for new, old in zip(sources, self.sources, strict=True)):
            return self
        blend = copy.copy(self)
        blend.sources = sources
        return blend

    def is_remote(self) -> bool:
        return any(source.is_remote() for source in self.sources)

    def fetch(self, indices: Sequence[int]) -> list[Future[None]]:
        located = map(self.locate, indices)
        return [coming for source, rank in located for coming in self.sources[source].fetch([rank])]


class StagedSamples(BlendedSamples):
    """Blends one after the other; a source continues where it ended in the earlier blends.

    `stages` are (first sample, weight of each source, 0 for one that the stage does not read), the first from sample 0
    on. `weights` are the shares of the sources in the first `num_samples` samples.
    """

    def __init__(self, sources: Sequence[Samples], stages: Sequence[tuple[int, Sequence[float]]], num_samples: int):
        self.sources = sources
        self.starts = [start for start, _ in stages]
        self.numbers = [np.flatnonzero(weights) for _, weights in stages]
        self.blends = [
            BlendedSamples([sources[int(i)] for i in used], [weights[int(i)] for i in used])
            for used, (_, weights) in zip(self.numbers, stages, strict=True)
        ]
        self.before = [np.zeros(len(sources), np.int64)]  # samples of each source before each stage
        for start in self.starts[1:]:
            self.before.append(self.taken(start))
        self.weights = self.taken(num_samples) / num_samples

    def taken(self, index: int) -> np.ndarray:
        stage = bisect_left(self.starts, index, lo=1, hi=len(self.before)) - 1
        counts = self.before[stage].copy()
        counts[self.numbers[stage]] += self.blends[stage].taken(index - self.starts[stage])
        return counts

    def locate(self, index: int) -> tuple[int, int]:
        stage = bisect_right(self.starts, index) - 1
        member, rank = self.blends[stage].locate(index - self.starts[stage])
        source = int(self.numbers[stage][member])
        return source, int(self.before[stage][source]) + rank


def sources_in(samples: Samples) -> Sequence[Samples]:
    """The sources of a blend; samples that are no blend are their only source."""
    return samples.sources if isinstance(samples, BlendedSamples) else [samples]


def split_documents(num_documents: int, fractions: Sequence[float]) -> list[tuple[int, int]]:
    """Contiguous ranges (first, last) that cover all documents, in proportion to `fractions`."""
    ends = np.rint(np.cumsum([0.0, *fractions]) / np.sum(fractions) * num_documents).astype(int).tolist()
    return list(zip(ends, ends[1:], strict=False))
