"""Packed samples of conversations (`data.kind: chat`): tokens, packing and pictures are stored once."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from megajax import cluster
from megajax.data.chat import encode_files
from megajax.data.contents import template_of, tokenizer_digest
from megajax.data.images import Images, PictureTable, PlacedPicture, open_images
from megajax.data.index_cache import cache_directory, cached, file_digest, folder_of, storage_errors
from megajax.data.json_lines import check_inputs, matching_files
from megajax.data.packing import PatchRoom, RowPacking, pack
from megajax.data.picture_checks import warn_of_pictures
from megajax.data.samples import Samples
from megajax.data.shards import is_shard
from megajax.data.tokenizers import load_tokenizer
from megajax.data.workers import shared_cache
from megajax.schema.data import is_remote

if TYPE_CHECKING:
    from megajax.config import Config

VERSION = 8  # of the encoding, part of the key of the stored tokens
ARRAYS = ("tokens", "counted", "starts", "order", "ends", "figures")
PICTURE_ARRAYS = tuple(f"picture_{name}" for name in PictureTable._fields)


class ChatSamples(Samples):
    """Conversations of files, packed into samples of `sequence_length` + 1 tokens, in a new order in each epoch.

    The rest of a sample is token 0, which the loss does not count. Of pairs (`data.packing`) samples 2i and 2i + 1 are
    the chosen and the rejected answer of a line.
    """

    def __init__(
        self,
        path: str,
        arrays: Sequence[np.ndarray],
        sequence_length: int,
        seed: int,
        shuffled: bool,
        images: Images | None = None,
        pairs: bool = False,
    ):
        self._arguments = (path, arrays, sequence_length, seed, shuffled, images, pairs)
        self._together = 2 if pairs else 1
        self.path, self.sequence_length, self.seed, self.shuffled = path, sequence_length, seed, shuffled
        self.tokens, self.counts, self.starts, self.order, self.ends, figures = arrays[: len(ARRAYS)]
        self.table = None if images is None else PictureTable(*arrays[len(ARRAYS) :])
        self.conversations, self.dropped, self.cut, self.rendered = map(int, figures)
        self._epoch = shared_cache(2, self._make_epoch)

    def __reduce__(self) -> Any:
        return ChatSamples, self._arguments

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> np.ndarray:
        return self._filled(self.tokens, index, np.int32)

    def counted(self, index: int) -> np.ndarray:
        return self._filled(self.counts, index, bool)

    def document_lengths(self, index: int) -> np.ndarray:
        lengths = [self._length(item) for item in self._items(index)]
        rest = self.sequence_length + 1 - sum(lengths)
        return np.array(lengths + [rest] * (rest > 0))

    def padding(self, index: int) -> int:
        return self.sequence_length + 1 - sum(self._length(item) for item in self._items(index))

    def pictures(self, index: int) -> list[PlacedPicture]:
        found, filled = list[PlacedPicture](), 0
        if self.table is None:
            return found
        for item in self._items(index):
            found += [placed._replace(first=filled + placed.first) for placed in self.table.pictures(item)]
            filled += self._length(item)
        return found

    def repacked(self, packing: RowPacking) -> Samples:
        path, (tokens, counts, starts, _, _, *others), length, seed, shuffled, images, _ = self._arguments
        packed = _packed(np.diff(starts), length + 1, packing, images, self.table)
        return ChatSamples(path, (tokens, counts, starts, *packed, *others), length, seed, shuffled, images)

    def _length(self, item: int) -> int:
        return int(self.starts[item + 1] - self.starts[item])

    def _filled(self, values: np.ndarray, index: int, dtype: Any) -> np.ndarray:
        out, filled = np.zeros(self.sequence_length + 1, dtype), 0
        for item in self._items(index):
            start, stop = int(self.starts[item]), int(self.starts[item + 1])
            out[filled : filled + stop - start] = values[start:stop]
            filled += stop - start
        return out

    def _items(self, index: int) -> list[int]:
        """The conversations of a row, in order."""
        epoch, place = divmod(index, len(self))
        number = int(self._epoch(epoch)[place]) if self.shuffled else place
        return self.order[int(self.ends[number - 1]) if number else 0 : int(self.ends[number])].tolist()

    def _make_epoch(self, epoch: int) -> np.ndarray:
        groups = np.arange(len(self)).reshape(-1, self._together)
        return np.random.Generator(np.random.PCG64((self.seed, epoch))).permutation(groups).reshape(-1)


def _packed(
    lengths: np.ndarray, capacity: int, packing: RowPacking, images: Images | None, table: PictureTable | None
) -> tuple[np.ndarray, np.ndarray]:
    """`pack` of samples that also share the room of a row for patches."""
    if images is None or table is None:
        return pack(lengths, capacity, packing)
    return pack(lengths, capacity, packing, PatchRoom(table.entries(images), images.vision.patches_per_row))


def open_chat(config: "Config", path: str) -> ChatSamples:
    """The samples of a file or of all files of a glob; tokens and packing are stored in `data.index_cache`."""
    data, length = config.data, config.batch.sequence_length
    assert data.tokenizer is not None  # checked with the config

    images = open_images(config)

    def find() -> list[Any]:
        paths = matching_files(path)
        check_inputs([each for each in paths if not (is_shard(each) and is_remote(each))])
        content = [images.files.identity(each) if images and is_shard(each) else file_digest(each) for each in paths]
        return [paths, "_".join(content), tokenizer_digest(str(data.tokenizer))]

    paths, content, of_tokenizer = cluster.current().first_decides(find)
    template, packing = template_of(data), RowPacking.of(config)
    key = {
        "kind": "chat",
        "version": VERSION,
        "file": content,
        "tokenizer": of_tokenizer,
        "end_of_document": data.end_of_document,
        "template": None if template is None else [template.sources, template.arguments],
        "sequence_length": length,
        "too_long": data.too_long,
        "packing": [packing.method, [packing.pairs.layers, packing.pairs.causal] if packing.balances else None],
    } | ({} if images is None else {"images": images.key, "paths": paths})  # pictures are relative to them

    def build() -> Sequence[np.ndarray]:
        tokenizer = load_tokenizer(str(data.tokenizer))
        found = encode_files(paths, data, tokenizer, template, length + 1, images)
        packed = _packed(np.diff(found.starts), length + 1, packing, images, found.pictures)
        return found.tokens, found.counted, found.starts, *packed, found.figures, *(found.pictures or ())

    cache, names = cache_directory(config), ARRAYS if images is None else (*ARRAYS, *PICTURE_ARRAYS)
    arrays = cached(cache, key, names, build)
    with storage_errors(folder_of(cache, key)):
        _check_fit(arrays[: len(ARRAYS)], length + 1)
        shuffled = data.order == "shuffled"
        samples = ChatSamples(path, arrays, length, config.run.seed, shuffled, images, data.reads_pairs)
        bad = samples.table and samples.table.left_out
    if bad:
        warn_of_pictures(paths, bad, folder_of(cache, key))
    return samples


def _check_fit(arrays: Sequence[np.ndarray], capacity: int) -> None:
    """Raise ValueError for stored arrays that are not those of one packing, as damage leaves them."""
    tokens, counted, starts, order, ends, figures = arrays
    fit = all(array.ndim == 1 and array.dtype.kind in "biu" and array.size for array in arrays)
    if fit and tokens.size == counted.size == starts[-1] and starts[0] == 0 and figures.size == 4:
        lengths, firsts = np.diff(starts), np.concatenate([[0], ends[:-1]])
        if lengths.min(initial=1) > 0 and 0 <= order.min() <= order.max() < lengths.size and ends[-1] == order.size:
            if (ends > firsts).all() and np.add.reduceat(lengths[order], firsts).max() <= capacity:
                return
    raise ValueError("its arrays do not fit each other")
