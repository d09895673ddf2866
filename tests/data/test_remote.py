"""Token files at a URL give the samples of local ones; what fails on the way is retried, then a sentence."""

import hashlib
import pickle
import re
import shutil
import struct
import sys
import threading
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.spec import AbstractFileSystem

from megajax.config import DataConfig
from megajax.data import contents, remote
from megajax.data.contents import data_contents
from megajax.data.indexed import IndexedDataset, IndexedWriter
from megajax.data.inspect import main as inspect_main
from megajax.data.loader import make_loader, open_datasets, open_split
from megajax.data.preprocess import preprocess
from megajax.data.remote import RemoteFile
from megajax.errors import InputError

DOCUMENTS = [list(range(start, start + 7)) for start in range(0, 700, 7)]


class Store(AbstractFileSystem):
    """A store that notes the blocks that are read, and has the problem that a test gives it."""

    protocol = "store"
    files: ClassVar[dict[str, bytes]] = {}
    sizes: ClassVar[dict[str, int]] = {}  # that it gives instead of the right ones
    reads: ClassVar[list[tuple[int, int]]] = []
    version: ClassVar[str] = "etag"  # the name under which it tells that a file has changed
    problem = staticmethod(lambda attempt: None)

    def info(self, path, **_):
        if path not in self.files:
            raise FileNotFoundError(path)
        size = self.sizes.get(path, len(self.files[path]))
        return {"size": size, self.version: hashlib.md5(self.files[path]).hexdigest()}

    def cat_file(self, path, start=None, end=None, **_):
        if path.endswith("idx"):
            return self.files[path][start:end]
        self.reads.append((start, end))
        come = self.problem(self.reads.count((start, end)))  # bytes; None: all
        return self.files[path][start:end][:come]


@pytest.fixture
def upload(write_documents, monkeypatch):
    """Puts a token file into the store; returns (local prefix, URL)."""
    fsspec.register_implementation("store", Store, clobber=True)
    monkeypatch.setattr(remote, "BLOCK_BYTES", 64)
    monkeypatch.setattr(remote, "PIECE_BYTES", 100)
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.0)
    Store.reads, Store.sizes, Store.problem = [], {}, staticmethod(lambda _: None)

    def upload(documents=DOCUMENTS, name="tokens"):
        prefix = write_documents(documents, name)
        Store.files |= {f"{name}.{ending}": Path(f"{prefix}.{ending}").read_bytes() for ending in ("bin", "idx")}
        return prefix, f"store://{name}"

    return upload


@pytest.fixture
def make_remote(make_config, tmp_path):
    def make(**settings):
        defaults = {"index_cache": str(tmp_path / "cache"), "train_samples": None, "end_of_document": None}
        config = make_config(**(defaults | settings))
        config.run.dir, config.run.eval_interval = str(tmp_path / "run"), 4
        return config

    return make


@pytest.mark.parametrize("order", ["shuffled", "megatron"])
def test_samples_are_those_of_local_files(upload, make_remote, order):
    (a, url_a), (b, url_b) = upload(), upload([[900 + i] * 20 for i in range(10)], "other")
    batches = []
    for first, second in ((a, b), (url_a, url_b)):
        blend = [SimpleNamespace(prefix=first, weight=2.0), SimpleNamespace(prefix=second, weight=1.0)]
        config = make_remote(train=blend, order=order, split="80,20,0")
        loader = make_loader(config, split="train", rows=np.arange(4), start_step=2)
        batches.append([batch["tokens"].tolist() for batch in islice(loader, 8)])
        batches[-1].append(open_datasets(config)["valid"][1].tolist())
        loader.close()
    assert batches[0] == batches[1]


def test_a_block_is_read_once_and_a_changed_file_again(upload, tmp_path):
    prefix, url = upload()
    local, opened = IndexedDataset(prefix), IndexedDataset(url, cache=tmp_path / "cache")
    for document in (0, 99, 50, 0):
        assert opened.document(document).tolist() == local.document(document).tolist() == DOCUMENTS[document]
    assert len(set(Store.reads)) == len(Store.reads) <= 5
    before = len(Store.reads)
    again = IndexedDataset(url, cache=tmp_path / "cache")
    assert again.document(99).tolist() == DOCUMENTS[99] and len(Store.reads) == before
    assert opened.tokens[3:3].tolist() == [] and opened.tokens[-2:].tolist() == [698, 699]
    shutil.rmtree(tmp_path / "cache")  # while it is in use
    assert opened.document(99).tolist() == DOCUMENTS[99] and len(Store.reads) > before
    upload([[9, 8], *DOCUMENTS[1:]])
    assert IndexedDataset(url, cache=tmp_path / "cache").document(0).tolist() == [9, 8]


@pytest.mark.parametrize("name", "ETag etag md5Hash crc32c generation mtime LastModified last_modified created".split())
def test_a_changed_file_of_the_same_size_is_read_again_from_every_kind_of_store(upload, tmp_path, monkeypatch, name):
    """The names of S3, of Google's and Azure's stores, and of file systems over SFTP and the like."""
    monkeypatch.setattr(Store, "version", name)
    for first in (1, 2):
        _, url = upload([[first, *DOCUMENTS[0][1:]], *DOCUMENTS[1:]])
        assert IndexedDataset(url, cache=tmp_path / "cache").document(0)[0] == first


def test_files_of_one_size_and_version_are_not_each_others(upload, tmp_path, monkeypatch):
    """Some stores say of a version only a time, and it may be that of several files."""
    monkeypatch.setattr(Store, "version", "of no name that is known")
    for first in (1, 2):
        _, url = upload([[first, *DOCUMENTS[0][1:]], *DOCUMENTS[1:]], f"tokens{first}")
        assert IndexedDataset(url, cache=tmp_path / "cache").document(0)[0] == first


def test_a_file_of_another_size_at_the_same_url_is_read_again(upload, tmp_path, monkeypatch):
    """Also from a store that says nothing of versions."""
    monkeypatch.setattr(Store, "version", "of no name that is known")
    for count in (100, 99, 101):
        _, url = upload([[count] * 7] * count)
        assert IndexedDataset(url, cache=tmp_path / "cache").document(count - 1).tolist() == [count] * 7


def test_a_batch_waits_for_all_its_blocks_at_once(upload, make_remote):
    """20 rows of several documents each: the reads wait until 16 of them run."""
    _, url = upload([[i] * 40 for i in range(100)])
    config = make_remote(train=url, global_size=20, sequence_length=100)
    samples = open_split(config, "train")  # without a look at the token ids
    running, most, changed = 0, 0, threading.Condition()

    def wait(_):
        nonlocal running, most
        with changed:
            running, most = running + 1, max(most, running + 1)
            changed.notify_all()
            changed.wait_for(lambda: most >= 16, timeout=5)
            running -= 1

    Store.problem = staticmethod(wait)
    next(make_loader(config, split="train", rows=np.arange(20), samples=samples))
    assert most >= 16


@pytest.mark.parametrize("come", [None, 0, 62], ids=["reset", "no bytes", "too few"])
def test_an_interrupted_connection_is_tried_again(upload, tmp_path, come):
    """Also one that ends as if the file did: a block of 64 bytes without the last token would stay for ever."""
    prefix, url = upload()
    opened = IndexedDataset(url, cache=tmp_path / "cache")

    def fail(attempt):
        if attempt < 3 and come is None:
            raise ConnectionResetError("reset by peer")
        return come if attempt < 3 else None

    Store.problem = staticmethod(fail)
    assert opened.tokens[:].tolist() == IndexedDataset(prefix).tokens.tolist()


def sentence_of(url, cache):
    with pytest.raises(InputError) as caught:
        _ = IndexedDataset(url, cache=cache).tokens[:5]
    return str(caught.value)


def test_what_cannot_be_read_is_a_sentence(upload, tmp_path, monkeypatch):
    (prefix, url), cache = upload(), tmp_path / "cache"

    def fail_with(error):
        def fail(_):
            raise error

        Store.problem = staticmethod(fail)

    fail_with(TimeoutError("no answer"))
    assert sentence_of(url, cache) == (
        "store://tokens.bin cannot be read after 5 attempts (TimeoutError: no answer): check the connection and the "
        "credentials, then start again."
    )
    fail_with(PermissionError("Forbidden"))
    assert sentence_of(url, cache) == (
        "store://tokens.bin cannot be read (Forbidden): give this machine the credentials of the store."
    )
    assert not [*cache.rglob("*.*")], "no file of a block that did not come"
    Store.problem = staticmethod(lambda _: None)
    assert sentence_of("store://no", cache) == "store://no.idx does not exist: correct the prefix."
    (tmp_path / "file").touch()
    assert re.fullmatch(
        f"{tmp_path}/file/cache/remote-[0-9a-f]+ cannot be written or read .Not a directory., for store://tokens.idx: "
        "free space there, correct its permissions, or set data.index_cache to another directory.",
        sentence_of(url, tmp_path / "file" / "cache"),
    )
    assert sentence_of("no://tokens", cache) == (
        "no://tokens.idx cannot be opened (Protocol not known: no): correct the URL."
    )
    Store.files["tokens.bin"] = Path(f"{prefix}.bin").read_bytes()[:-2]
    assert sentence_of(url, cache) == (
        "store://tokens.bin has 1398 bytes, but store://tokens.idx says 1400: the two do not belong together or one is "
        "damaged; write both again."
    )
    monkeypatch.setitem(sys.modules, "fsspec", None)  # import raises ModuleNotFoundError
    assert sentence_of(url, cache) == (
        "store://tokens.idx, which is remote, needs fsspec, which is not installed: pip install 'megajax[remote]'."
    )


def bytes_in(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_room_for_the_bytes_that_are_fetched_is_enough(upload, tmp_path, monkeypatch):
    """A block of 64 bytes from the middle of a file."""
    _, url = upload()
    opened = IndexedDataset(url, cache=tmp_path / "cache")
    monkeypatch.setattr(remote.shutil, "disk_usage", lambda _: SimpleNamespace(free=64))
    assert opened.document(50).tolist() == DOCUMENTS[50]


def test_a_size_that_the_store_invents_fills_no_disk(upload, tmp_path):
    (_, url), cache = upload(), tmp_path / "cache"
    Store.sizes = {"tokens.idx": 2**60}
    assert "tokens.idx has 1152921504606" in sentence_of(url, cache) and bytes_in(cache) <= 64
    # An index whose header fits that size needs more space than there is.
    count = 2**56
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, count, count + 1)
    Store.files["tokens.idx"] = header + Store.files["tokens.idx"][len(header) :]
    Store.sizes = {"tokens.idx": len(header) + 12 * count + 8 * (count + 1)}
    assert re.search(r"store://tokens.idx: [\d,]{20,} bytes are needed .* free space there", sentence_of(url, cache))
    assert bytes_in(cache) <= 128
    upload()
    Store.sizes = {"tokens.bin": 2**60}
    assert "tokens.bin has 1152921504606846976 bytes, but" in sentence_of(url, cache)
    Store.sizes = {"tokens.bin": -2}
    assert "tokens.bin has -2 bytes by its store" in sentence_of(url, cache)


def test_errors_of_the_cache_are_not_those_of_the_store(upload, tmp_path):
    (_, url), cache = upload(), tmp_path / "cache"

    Store.problem = staticmethod(lambda _: shutil.rmtree(cache))
    assert "cannot be written or read (No such file or directory), for store://tokens.bin: free" in sentence_of(
        url, cache
    )
    Store.problem = staticmethod(lambda _: None)
    Store.sizes = {"tokens.idx": None}  # HTTP without Content-Length
    assert sentence_of(url, cache) == (
        "store://tokens.idx: the store does not give its size: copy the file to this machine."
    )


def test_only_token_files_are_read_from_a_url_and_none_are_written(tmp_path):
    with pytest.raises(InputError, match="^s3://a/b.jsonl is remote, but only token files and shards can be: copy"):
        preprocess(["s3://a/b.jsonl"], str(tmp_path / "p"), "byte")
    with pytest.raises(InputError, match="^s3://a/b: token files are written to local paths only: write them here"):
        IndexedWriter("s3://a/b", np.uint16)
    with pytest.raises(InputError, match="^s3://a/b is remote, but is needed on this machine: copy the files first"):
        IndexedDataset("s3://a/b")


def test_remote_files_have_the_sizes_and_hashes_of_local_ones_and_are_opened_once(upload, make_remote, monkeypatch):
    prefix, url = upload()
    local = data_contents(make_remote(train=prefix))
    opened: list[str] = []
    monkeypatch.setattr(contents, "RemoteFile", lambda path, cache: opened.append(path) or RemoteFile(path, cache))
    found = data_contents(make_remote(train=url))
    assert [size for _, size in found["files"]] == [size for _, size in local["files"]]
    assert [*found["digests"].values()] == [*local["digests"].values()]
    assert sorted(opened) == [f"{url}.bin", f"{url}.idx"]


def test_a_remote_file_is_described_by_its_index(upload, capsys):
    _, url = upload()
    assert inspect_main([url]) == 0
    out = capsys.readouterr().out
    assert out.startswith("store://tokens: 100 documents, 100 sequences, 700 tokens, uint16\n")
    assert out.endswith("  the documents' first and last tokens are not read, because the file is remote\n")
    assert Store.reads == []


def test_the_cache_has_an_effect_for_urls():
    for paths in (
        {"train": "s3://a/b"},
        {"valid": "0.5 gs://a 0.5 b"},
        {"valid_sets": [{"name": "x", "prefix": "s3://c"}]},
    ):
        assert DataConfig(**{"train": "a", **paths}).is_remote
    assert not DataConfig(train="a", valid="b").is_remote


def test_a_reader_process_opens_the_files_again(write_documents, make_remote):
    """With file://, which fsspec has too."""
    samples = open_split(make_remote(train=f"file://{write_documents(DOCUMENTS)}"), "train")
    assert samples.is_remote()
    assert pickle.loads(pickle.dumps(samples))[5].tolist() == samples[5].tolist()
