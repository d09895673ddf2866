"""Batches of a config's data: opens and checks the files, and reads ahead with grain."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from megajax import cluster
from megajax.config.extensions import import_extensions
from megajax.data.chat_samples import ChatSamples, open_chat
from megajax.data.contents import template_of
from megajax.data.fim import open_infilling
from megajax.data.images import Images, open_images
from megajax.data.index_cache import cache_directory
from megajax.data.indexed import IndexedDataset, open_checked
from megajax.data.masking import open_masking
from megajax.data.megatron import MegatronSamples, open_samples, split_sequences
from megajax.data.packing import SEQUENTIAL, RowPacking, spread
from megajax.data.registered import RegisteredDataset
from megajax.data.samples import (
    BlendedSamples,
    Changes,
    DocumentSamples,
    Packing,
    Samples,
    StagedSamples,
    make_batch,
    sources_in,
    split_documents,
)
from megajax.data.spans import open_spans
from megajax.data.special_tokens import check_ends, document_end
from megajax.data.synthetic import SyntheticImages, SyntheticSamples
from megajax.data.text import TextDataset, open_text
from megajax.data.tokenizers import load_tokenizer
from megajax.data.whole import WholeSet
from megajax.data.workers import end_with_parent
from megajax.errors import InputError, counted
from megajax.options.data_kinds import is_registered
from megajax.schema.batch_schedule import BatchSizes, samples_before
from megajax.schema.data import is_remote, sources_of

if TYPE_CHECKING:
    import grain

    from megajax.config import Config

Documents = IndexedDataset | TextDataset | RegisteredDataset
Split = str  # one of SPLITS, or "valid/NAME" of an entry of data.valid_sets
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
CHECKED_TOKENS = 1_000_000  # of each file
ENDLESS = 1 << 40  # steps


def open_datasets(config: "Config") -> dict[Split, Samples]:
    """Opens every split of the config and checks it before the start.

    Synthetic data has all three splits. Raises InputError for a missing or damaged file, a split without documents or
    with less than one sample, a tokenizer larger than the model's vocabulary, or a token id outside it; only the first
    million ids of each file are checked. Of several processes, which must all call this, the first one checks.
    """
    present: list[Split] = [split for split in SPLITS if _is_given(config, split)]
    files: dict[str, Documents] = {}
    if config.data.kind != "synthetic":
        present += [f"valid/{each.name}" for each in config.data.valid_sets]
        _check_tokenizer(config)
        _check_template(config)
        for opens in (open_spans, open_infilling, open_masking):  # they check settings and tokens
            opens(config)
    opened: dict[Split, Samples] = {split: open_split(config, split, files) for split in present}
    cluster.current().first_decides(lambda: [_check_token_ids(config, dataset) for dataset in files.values()])
    return opened


def open_split(config: "Config", split: Split, files: dict[str, Documents] | None = None) -> Samples:
    """The samples of one split of the config; checks the files' structure, not the token ids.

    `files` are the open files by prefix; newly opened ones are added.
    """
    data, files = config.data, {} if files is None else files
    if data.kind == "synthetic":
        documents, length, seed = data.synthetic_documents or 1, config.sample_length, config.run.seed
        vocabulary, vision = config.model.vocab_size, config.model.vision
        return SyntheticSamples(vocabulary, length, seed, SPLITS.index(split), documents, vision)
    name, whole = split.partition("/")[2], config.reads_whole(split)
    key: Split = "valid_sets" if name else "train" if data.split is not None else split
    blend = next(each.prefix for each in data.valid_sets if each.name == name) if name else getattr(data, key)
    with _reading(config, f"data.{key}"):
        parts = sources_of(blend)
        if whole and key != "train" and any(weight is not None for _, weight in parts[1:]):
            raise InputError("has weights, but run.eval_steps=all reads each sample once: remove the weights.")
        opened = _open_blend(config, split, parts, files)
        if whole:
            return WholeSet(sources_in(opened), config.batch.sequence_length)
    return _with_stages(config, opened, files) if split == "train" and data.stages else opened


@contextmanager
def _reading(config: "Config", key: str) -> Iterator[None]:
    """Around the reading of files that a key names: an error begins with the key and its place."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{key} ({config.where(key)}): {error}") from None


def _open_blend(
    config: "Config",
    split: Split,
    parts: Sequence[tuple[str, float | None]],
    files: dict[str, Documents],
) -> Samples:
    """The samples of a blend of (path, weight)."""
    if config.data.order == "megatron":
        weights = [weight for _, weight in parts if weight is not None] or None
        ranges: list[Any] = [_opened_range(config, split, path, files) for path, _ in parts]  # no text
        opened = open_samples(config, split, ranges, weights, _end_of_document(config, [data for data, _ in ranges]))
        for source in sources_in(opened):
            _check_size(split, source)
        return opened
    if len(parts) > 1 and config.data.reads_pairs:
        reason = f"names {len(parts)} sources, but data.packing=pairs keeps rows beside each other within one"
        raise InputError(f"{reason}: give one file, or a glob such as pairs-*.jsonl.")
    sources = [_open_source(config, split, path, files) for path, _ in parts]
    return sources[0] if len(sources) == 1 else BlendedSamples(sources, _weights(parts, sources))


def _weights(parts: Sequence[tuple[str, float | None]], sources: Sequence[Any]) -> list[float]:
    """The weight of each source, or its samples (of chats) or tokens in an epoch."""
    sizes = [len(source) if isinstance(source, ChatSamples) else source.num_tokens for source in sources]
    return [float(size) if weight is None else weight for (_, weight), size in zip(parts, sizes, strict=True)]


def _open_source(
    config: "Config", split: Split, path: str, files: dict[str, Documents]
) -> ChatSamples | DocumentSamples:
    """The samples of one path, in megajax's own orders."""
    if config.data.kind == "chat":
        return open_chat(config, path)
    dataset, documents = _opened_range(config, split, path, files)
    whole = config.reads_whole(split)
    order, packing = ("sequential", SEQUENTIAL) if whole else (config.data.order, RowPacking.of(config))
    source = DocumentSamples(dataset, documents, config.sample_length, config.run.seed, order, packing)
    if config.span_lengths and source.num_tokens < source.sequence_length:
        problem = (
            f"{dataset.token_file} has {counted(source.num_tokens, 'token')} for {split}, but a sample of corrupted"
        )
        cure = "shorten model.encoder.sequence_length, or give more text"
        raise InputError(f"{problem} spans takes {source.sequence_length}: {cure}.")
    if not config.span_lengths and (not whole or source.num_tokens < 2):
        _check_size(split, source)
    return source


def _opened_range(
    config: "Config", split: Split, path: str, files: dict[str, Documents]
) -> tuple[Documents, tuple[int, int]]:
    """The open files of a path, and their documents that belong to a split."""
    if path not in files:
        files[path] = _open_files(config, path)
    return files[path], _range(config, split, files[path])


def _with_stages(config: "Config", first: Samples, files: dict[str, Documents]) -> StagedSamples:
    """The samples of train with its later stages; `first` are those of the first one.

    A path is the same source in all stages; one that a blend names twice is two sources.
    """
    parts = sources_of(config.data.train)
    opened = sources_in(first)
    sources = dict(zip(_numbered(parts), opened, strict=True))
    stages = [(0, dict(zip(sources, _weights(parts, opened), strict=True)))]
    for i, stage in enumerate(config.data.stages or ()):
        parts = sources_of(stage.train)
        names = _numbered(parts)
        with _reading(config, f"data.stages.{i}.train"):
            sources |= {new: _open_source(config, "train", new[0], files) for new in names if new not in sources}
        weights = _weights(parts, [sources[name] for name in names])
        stages.append((samples_before(config, stage.from_step), dict(zip(names, weights, strict=True))))
    shares = [(start, [weights.get(source, 0.0) for source in sources]) for start, weights in stages]
    return StagedSamples(list(sources.values()), shares, samples_before(config, config.run.steps))


def _numbered(parts: Sequence[tuple[str, float | None]]) -> list[tuple[str, int]]:
    """Each path of a blend, with the number of its earlier entries."""
    paths = [path for path, _ in parts]
    return [(path, paths[:i].count(path)) for i, path in enumerate(paths)]


def _open_files(config: "Config", prefix: str) -> Documents:
    if is_registered(config.data.kind):
        return RegisteredDataset(config.data.kind, prefix, config.run.extensions)
    if config.data.kind == "text":
        return open_text(config, prefix)
    [dataset] = open_checked([prefix], cache_directory(config) if is_remote(prefix) else None)
    return dataset


def make_loader(
    config: "Config",
    *,
    split: Split,
    rows: np.ndarray,
    start_step: int = 0,
    samples: Samples | None = None,
    sizes: BatchSizes | None = None,
) -> "grain.DatasetIterator[dict[str, np.ndarray]]":
    """Endless batches from `start_step` on: `rows` of the fields of `make_batch`, each [len(rows), S].

    Row r of step t is sample `samples_of_step(...)[r]`, for any number of processes, threads and workers; a step has
    those of `rows` that are below its number of sequences. `sizes` are by default `batch_sizes(config, split)`.
    `samples` is the split if `open_datasets` has already opened it. Evaluation starts at sample 0 and reads in threads,
    because starting `data.workers` for a few batches takes longer than reading them.
    """
    assert split == "train" or start_step == 0, "evaluation always reads from sample 0"
    import grain

    samples = open_split(config, split) if samples is None else samples
    data, prefetch = config.data, config.data.prefetch
    sizes = sizes or batch_sizes(config, split)
    rows = np.asarray(rows, np.int64)
    reading = grain.ReadOptions(num_threads=prefetch, prefetch_buffer_size=prefetch)
    infilling, spans, masking = open_infilling(config), open_spans(config), open_masking(config)
    changes = Changes(infilling, config.pads_samples(split), spans, masking, find_images(config))
    source = BatchSource(samples, rows, sizes, start_step, RowPacking.of(config), Packing.of(config), changes)
    batches = grain.MapDataset.source(source).to_iter_dataset(reading)
    if split == "train" and data.workers:
        from absl import flags

        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()  # grain passes its flags to the workers and requires parsed ones
        ahead = -(-max(prefetch, 1) // data.workers)
        options = grain.MultiprocessingOptions(data.workers, per_worker_buffer_size=ahead)
        batches = batches.mp_prefetch(options, worker_init_fn=partial(_start_worker, config.run.extensions))
    return iter(batches)


def find_images(config: "Config") -> Images | None:
    """What a config makes of pictures, also of synthetic ones; None without a vision tower."""
    images = open_images(config)
    return SyntheticImages(**vars(images)) if images and config.data.kind == "synthetic" else images


def samples_of_step(samples: Samples, sizes: BatchSizes, step: int, packing: RowPacking) -> np.ndarray:
    """The samples of the step after the first `step` ones, row by row of the global batch, int64.

    They are the next ones, in their order or, if the packing balances, in that of `packing.spread`.
    """
    indices = sizes.samples_before(step) + np.arange(sizes.size(step))
    return indices[spread(row_pairs(samples, indices, packing))] if packing.balances else indices


def row_pairs(samples: Samples, indices: Sequence[int] | np.ndarray, packing: RowPacking) -> np.ndarray:
    """The pairs of a query and a key of samples whose documents are separate, int64 [len(indices)]."""
    lengths = [samples.document_lengths(int(index)) for index in indices]
    firsts = np.cumsum([0, *(each.size for each in lengths[:-1])])
    return np.add.reduceat(packing.pairs.of(np.concatenate(lengths)), firsts)


def batch_sizes(config: "Config", split: Split) -> BatchSizes:
    """The numbers of sequences of a config's steps; an evaluation's are equal, so that its loss is comparable."""
    return BatchSizes.of(config) if split == "train" else BatchSizes.constant(config.batch.global_size)


def _start_worker(extensions: tuple[str, ...], worker: int, num_workers: int) -> None:
    """Runs in a worker: Slurm signals every process of a step, but the trainer needs data until it has saved."""
    del worker, num_workers
    end_with_parent()
    import_extensions(extensions)
    for request in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(request, signal.SIG_IGN)


@dataclass(frozen=True, eq=False)
class BatchSource:
    """grain's data source: batch i holds `rows` i64[rows] of the step after the first `start_step` + i ones."""

    samples: Samples
    rows: np.ndarray
    sizes: BatchSizes
    start_step: int
    row_packing: RowPacking
    packing: Packing
    changes: Changes

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        step = self.start_step + index
        indices = samples_of_step(self.samples, self.sizes, step, self.row_packing)
        rows = self.rows[self.rows < len(indices)]
        return make_batch(self.samples, indices[rows], self.packing, self.changes)


def _is_given(config: "Config", split: Split) -> bool:
    if config.data.kind == "synthetic":
        return True
    if config.data.split is not None:
        return _shares(config)[SPLITS.index(split)] > 0
    return getattr(config.data, split) is not None


def _shares(config: "Config") -> list[float]:
    """`data.split` as numbers, one for each of SPLITS."""
    assert config.data.split is not None
    return [float(share) for share in config.data.split.split(",")]


def _range(config: "Config", split: Split, dataset: Documents) -> tuple[int, int]:
    """The documents of a data set that belong to a split; in Megatron's order its sequences."""
    megatron = config.data.order == "megatron"
    count = len(dataset) if megatron else dataset.num_documents
    if config.data.split is None or split not in SPLITS:
        return 0, count
    divide = split_sequences if megatron else split_documents
    first, last = divide(count, _shares(config))[SPLITS.index(split)]
    if first == last:
        raise InputError(
            f"{dataset.prefix} has {counted(count, 'sequence' if megatron else 'document')}, and "
            f'data.split="{config.data.split}" leaves none for {split}: give {split} a larger share, or 0.'
        )
    return first, last


def _end_of_document(config: "Config", files: Sequence[IndexedDataset]) -> int | None:
    """The token at which documents end in files that Megatron's tools wrote; None if nothing depends on documents."""
    data = config.data
    if Packing.of(config) == Packing() and not data.fim_rate:
        return None
    if data.tokenizer is None:
        raise InputError(
            "data.order=megatron finds the ends of documents by their token, for data.reset_attention and the like: "
            "set data.tokenizer, and data.end_of_document if the tokenizer has another name for it."
        )
    tokenizer = load_tokenizer(data.tokenizer)
    end = document_end(data, tokenizer)
    for dataset in files:
        check_ends(dataset, tokenizer, end)
    return end


def _check_size(split: Split, source: Samples) -> None:
    """Raise InputError if a split is shorter than a sample: it would repeat tokens, easy to copy."""
    assert isinstance(source, DocumentSamples)
    tokens, needed, padded = source.num_tokens, source.sequence_length + 1, ""
    if isinstance(source, MegatronSamples) and not source.drop_last:
        if source.one_epoch and tokens > 1:
            return  # a padded sample
        padded = " (data.drop_last_validation_sample=false pads the last sample only, after the tokens are repeated)"
    if tokens < needed:
        shorter = f"set batch.sequence_length={tokens - 1} or less, or " if tokens > 1 else ""
        raise InputError(
            f"{source.dataset.token_file} has {counted(tokens, 'token')} for {split}, but a sample of "
            f"batch.sequence_length={needed - 1} takes {needed}{padded}: {shorter}give more text."
        )


def _check_tokenizer(config: "Config") -> None:
    if config.data.tokenizer is None:
        return
    with _reading(config, "data.tokenizer"):
        size = cluster.current().first_decides(lambda: load_tokenizer(str(config.data.tokenizer)).vocab_size)
    if size > config.model.vocab_size:
        raise InputError(
            f"data.tokenizer={config.data.tokenizer} has {size} tokens, more than model.vocab_size="
            f"{config.model.vocab_size} ({config.where('model.vocab_size')}): set model.vocab_size={size} or "
            "larger."
        )


def _check_template(config: "Config") -> None:
    if config.data.kind != "chat":
        return
    with _reading(config, "data.tokenizer" if config.data.chat_template is None else "data.chat_template"):
        cluster.current().first_decides(lambda: (found := template_of(config.data)) and found.check())


def _check_token_ids(config: "Config", dataset: Documents) -> None:
    tokens = dataset.tokens[:CHECKED_TOKENS]
    for worst in (int(tokens.max()), int(tokens.min())):
        if not 0 <= worst < config.model.vocab_size:
            size = f"model.vocab_size={config.model.vocab_size} ({config.where('model.vocab_size')})"
            if worst < 0:
                raise InputError(f"{dataset.token_file} holds the negative token id {worst}: write the file again.")
            raise InputError(
                f"{dataset.token_file} holds token id {worst}, outside {size}: set model.vocab_size={worst + 1} or "
                "larger, preferably the vocabulary size of the tokenizer that wrote the file."
            )
