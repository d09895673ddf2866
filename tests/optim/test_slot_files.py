"""Files of optimizer state: what is read is what was written, in any order of the threads; and bad folders."""

import errno
import gc
import os
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from megajax.errors import InputError
from megajax.optim import slot_files
from megajax.optim.slot_files import ALIGNMENT, SlotFile, SlotFiles, aligned

SIZES = (5000, 1, 8192, 4096, 700)  # bytes of chunks


@pytest.fixture(autouse=True)
def on_a_disk(monkeypatch):
    """The tests' files are in memory, which the kernel does not tell here."""
    monkeypatch.setattr(slot_files, "MOUNTS", Path("/nothing"))


def numbers(update, chunk, device):
    """The bytes of a chunk after some updates."""
    return np.random.default_rng((update, chunk, device)).integers(0, 256, SIZES[chunk], dtype=np.uint8)


def one_update(files, update):
    """Check each chunk against those of the last update, and write the next one's."""
    for chunk, size in enumerate(SIZES):
        for device, found in enumerate(files.take()):
            expected = numbers(update, chunk, device) if update else np.zeros(size, np.uint8)
            np.testing.assert_array_equal(found, expected, err_msg=f"update {update}, chunk {chunk} of {device}")
        files.free()
        files.write(chunk, [numbers(update + 1, chunk, device) for device in range(files.devices)])


def make_writes_slow(monkeypatch):
    own = SlotFile.write

    def slow(self, data, position):  # a write that is late is read too early if nothing waits for it
        time.sleep(0.002)
        own(self, data, position)

    monkeypatch.setattr(SlotFile, "write", slow)


@pytest.mark.parametrize("memory", [0, 8 * 8192, 2**20], ids=["three chunks", "four chunks", "all chunks"])
def test_each_update_reads_what_the_last_one_wrote(tmp_path, memory, monkeypatch):
    make_writes_slow(monkeypatch)
    files = SlotFiles(tmp_path, SIZES, 2, memory)
    assert files.slots == {0: 3, 8 * 8192: 4, 2**20: len(SIZES)}[memory]
    for update in range(4):
        one_update(files, update)
    files.flush()
    np.testing.assert_array_equal(files.load(2, 1), numbers(4, 2, 1))


def test_a_restart_forgets_what_was_read_ahead(tmp_path, monkeypatch):
    make_writes_slow(monkeypatch)
    files = SlotFiles(tmp_path, SIZES, 1, 2**20)
    one_update(files, 0)
    files.read_ahead()
    files.restart()
    for chunk in range(len(SIZES)):
        files.store(chunk, 0, numbers(7, chunk, 0))
    one_update(files, 7)
    one_update(files, 8)
    files.clear()
    one_update(files, 0)


def test_a_restart_waits_for_reads_whose_memory_the_next_ones_take(tmp_path, monkeypatch):
    files, own, begun = SlotFiles(tmp_path, SIZES, 1, 0), SlotFile.read, threading.Semaphore(0)

    def late(self, data, position):
        begun.release()
        time.sleep(0.02)
        own(self, data, position)

    with monkeypatch.context() as patch:
        patch.setattr(SlotFile, "read", late)
        one_update(files, 0)  # each chunk that it frees is read ahead of the next update
        assert all(begun.acquire(timeout=20) for _ in range(len(SIZES) + files.slots))
    files.restart()
    [found] = files.take()
    time.sleep(0.03)
    np.testing.assert_array_equal(found, numbers(1, 0, 0))


def test_the_files_have_no_names_and_all_of_their_room(tmp_path):
    files = SlotFiles(tmp_path, SIZES, 2, 0)
    assert [*tmp_path.iterdir()] == []  # a process that is killed leaves nothing
    for file in files.files:
        status = os.fstat(file._file)
        assert status.st_size == status.st_blocks * 512 == file.size == sum(map(aligned, SIZES))


def test_two_processes_in_a_folder_have_files_of_their_own(tmp_path):
    first, second = (SlotFiles(tmp_path, SIZES, 1, 0) for _ in range(2))
    one_update(first, 0)
    one_update(second, 0)
    one_update(first, 1)


@pytest.mark.parametrize("changes_chunk", [0, len(SIZES) - 1])
def test_a_disk_that_fails_ends_the_update_with_a_sentence(tmp_path, monkeypatch, changes_chunk):
    def fail(file, data, position):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    files, others = (SlotFiles(tmp_path, SIZES, 1, 0, "the command line") for _ in range(2))
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        with pytest.raises(InputError, match=r"cannot be read from \(Input/output error\).* the same command again"):
            others.take()
    monkeypatch.setattr(os, "pwritev", fail)
    sentence = f"optimizer.offload_dir={tmp_path} (the command line) cannot be written to (Input/output error), so the"
    with pytest.raises(InputError, match=re.escape(sentence)):
        for _ in range(2):
            for chunk in range(len(SIZES)):
                files.take()
                files.free()
                if chunk == changes_chunk:
                    files.write(chunk, [numbers(1, chunk, 0)])
                else:
                    files._changed += 1


def test_short_transfers_go_on(tmp_path, monkeypatch):
    own_read, own_write = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda file, into, position: own_read(file, [into[0][:ALIGNMENT]], position))
    monkeypatch.setattr(os, "pwritev", lambda file, data, position: own_write(file, [data[0][:ALIGNMENT]], position))
    files = SlotFiles(tmp_path, SIZES, 1, 0)
    one_update(files, 0)
    one_update(files, 1)


def test_folders_that_cannot_be_used_are_refused(tmp_path, monkeypatch):
    def refused(folder, sentence, size=ALIGNMENT):
        with pytest.raises(InputError, match=sentence):
            SlotFile(folder, size, "config.yaml, line 3")

    refused(
        tmp_path / "missing", r"missing \(config.yaml, line 3\) cannot be used \(No such file.*: make it, or choose"
    )
    (tmp_path / "file").touch()
    refused(tmp_path / "file", r"file \(config.yaml, line 3\) cannot be used \(Not a directory\): choose another one")
    refused(
        tmp_path, r"has no room for 536870912 GiB of .* each device, and .* are free \(.*\): .* a larger disk", 2**59
    )
    mounts, at = tmp_path / "mounts", os.stat(tmp_path).st_dev
    monkeypatch.setattr(slot_files, "MOUNTS", mounts)
    for kind in ("tmpfs", "ramfs", "devtmpfs"):
        mounts.write_text(f"22 27 {os.major(at)}:{os.minor(at)} / /dev/shm rw shared:3 - {kind} {kind} rw\n")
        refused(tmp_path, rf"is in the host's memory \({kind}\): choose a folder on a disk")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("megajax")]


def test_a_file_system_without_direct_transfers_goes_through_the_page_cache(tmp_path, monkeypatch):
    own = os.open

    def without_direct(path, flags, *mode):
        descriptor = own(path, flags & ~os.O_DIRECT, *mode)
        if flags & os.O_DIRECT:
            os.close(descriptor)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return descriptor

    monkeypatch.setattr(os, "open", without_direct)
    files = SlotFiles(tmp_path, SIZES, 1, 0)
    assert not files.files[0].is_direct
    one_update(files, 0)
    one_update(files, 1)


def test_the_descriptors_and_threads_end_with_the_files(tmp_path):
    def opened() -> int:
        """The descriptors of this test's files; others' may end at any moment."""
        folder = Path("/proc/self/fd")
        links = [os.path.realpath(link) for link in folder.iterdir()]
        return sum(link.startswith(f"{tmp_path}/") for link in links)

    gc.freeze()  # of the objects of all earlier tests nothing is looked for
    before = {*threading.enumerate()}
    files = SlotFiles(tmp_path, SIZES, 2, 0)
    one_update(files, 0)
    files.flush()
    made = {*threading.enumerate()} - before
    assert opened() == 2
    del files
    gc.collect()
    gc.unfreeze()
    for thread in made:
        thread.join(20)
        assert not thread.is_alive()
    assert opened() == 0
