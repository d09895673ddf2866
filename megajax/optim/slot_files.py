"""Optimizer state in files on a disk (`optimizer.offload_dir`): one file a device, read ahead and written behind.

A file has its full size from the start and no name: it is removed from its folder as soon as it is open. So nothing is
left of it when the process ends, however it ends, and no two processes use the same one. It is a list of chunks, which
each update reads and writes in their order. Threads read the next chunks while the device computes, up to a number of
bytes of host memory, and write the changed ones behind. A chunk is read again only after it is written.
"""

import errno
import mmap
import os
import queue
import threading
import uuid
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from megajax.console import memory_size
from megajax.errors import InputError

KEY = "optimizer.offload_dir"
ALIGNMENT = 4096  # bytes; of positions, lengths and memory in direct transfers
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
THREADS = 4  # that read for a device, and as many that write
TAKEN = 3  # chunks that a caller takes before it frees the first of them, at most
ON_DEVICE = 4  # changed chunks on a device that wait for their copy to the host
MOUNTS = Path("/proc/self/mountinfo")


def aligned(size: int) -> int:
    """`size` rounded up to whole blocks."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class SlotFile:
    """A file of `size` bytes without a name in `directory`, all zeros. Transfers bypass the page cache if they can.

    Raises InputError if the folder is missing, in memory, full, or cannot be written.
    """

    def __init__(self, directory: Path, size: int, where: str):
        """`where`: the place at which the folder is set."""
        self.size, self._directory, self._where = size, directory, where
        if (kind := file_system(directory)) in IN_MEMORY:
            self._fail(f"is in the host's memory ({kind})", "choose a folder on a disk, or leave it out")
        self.is_direct = True
        try:
            self._file = self._open(os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                cure = "make it, or choose another one" if error.errno == errno.ENOENT else "choose another one"
                self._fail(f"cannot be used ({error.strerror})", cure)
            self.is_direct, self._file = False, self._open(0)
        weakref.finalize(self, os.close, self._file)
        self.clear()

    def _open(self, flags: int) -> int:
        path = self._directory / f"megajax-{uuid.uuid4().hex}"
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | flags, 0o600)
        finally:  # a file system may refuse the flag after it has made the file
            path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Make all bytes zero."""
        try:
            os.ftruncate(self._file, 0)
            if self.size:
                os.posix_fallocate(self._file, 0, self.size)
        except OSError as error:
            disk = os.statvfs(self._directory)
            free = f"and {memory_size(disk.f_bavail * disk.f_frsize)} are free"
            problem = f"has no room for {memory_size(self.size)} of optimizer state of each device, {free}"
            self._fail(f"{problem} ({error.strerror})", "choose a folder on a larger disk, or lower optimizer.offload")

    def read(self, into: memoryview, position: int) -> None:
        """Fill `into`, whole blocks of aligned memory. Raises InputError if the disk fails."""
        self._transfer("read from", os.preadv, into, position)

    def write(self, data: memoryview, position: int) -> None:
        """Write whole blocks of aligned memory. Raises InputError if the disk fails."""
        self._transfer("written to", os.pwritev, data, position)

    def _transfer(self, how: str, transfer: Callable[..., int], data: memoryview, position: int) -> None:
        done = 0
        try:
            while done < len(data):
                moved = transfer(self._file, [data[done:]], position + done)
                if not moved:
                    raise OSError(errno.EIO, "the file has ended")
                done += moved
        except OSError as error:
            problem = f"cannot be {how} ({error.strerror}), so the optimizer's state is lost"
            self._fail(problem, "start the same command again to resume, with a folder on another disk")

    def _fail(self, problem: str, cure: str) -> None:
        raise InputError(f"{KEY}={self._directory} ({self._where}) {problem}: {cure}.") from None


def file_system(directory: Path) -> str:
    """The kind of the file system of a folder; "" if the kernel does not tell."""
    try:
        number, mounts = directory.stat().st_dev, MOUNTS.read_text(encoding="utf-8")
    except OSError:
        return ""
    name = f"{os.major(number)}:{os.minor(number)}"
    lines = (line.split() for line in mounts.splitlines())
    return next((fields[fields.index("-") + 1] for fields in lines if fields[2] == name), "")


class SlotFiles:
    """The files of this process's devices, all with chunks of the same sizes.

    `take` gives the chunks in their order, again and again; the caller then calls `free` for each, and `write` when it
    has changed. A chunk is read again only after it is written.
    """

    def __init__(self, directory: Path, sizes: Sequence[int], devices: int, memory: int, where: str = ""):
        """`sizes`: bytes of each chunk. `memory`: bytes of host memory for each device, half before and half after.

        `where`: the place at which the folder is set.
        """
        self.sizes, self.devices = [*sizes], devices
        *self._starts, size = [0, *accumulate(map(aligned, sizes))]
        self._largest = max(map(aligned, sizes))
        self.files = [SlotFile(directory, size, where) for _ in range(devices)]
        self.slots = min(
            len(sizes), max(TAKEN, memory // (2 * self._largest))
        )  # chunks in memory, before and after each
        self._readers, self._writers = (ThreadPoolExecutor(THREADS * devices) for _ in range(2))
        self._fetchers = ThreadPoolExecutor(2 * devices)
        self._before = [[self._buffer() for _ in range(devices)] for _ in range(self.slots)]
        self._after: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for _ in range(self.slots * devices):
            self._after.put(self._buffer())
        self._on_device = threading.Semaphore(ON_DEVICE * devices)
        self._reading: dict[int, list[Future[np.ndarray]]] = {}  # by number since the restart
        self._written: dict[tuple[int, int], Future[Future[None]]] = {}  # the last write, by chunk and device
        self._submitted = self._taken = self._freed = self._changed = 0  # chunks since the restart

    def read_ahead(self) -> None:
        """Start to read as many chunks as there is memory for."""
        while self._submitted < min(self._freed + self.slots, self._changed + len(self.sizes)):
            number = self._submitted
            self._reading[number] = [self._readers.submit(self._read, number, d) for d in range(self.devices)]
            self._submitted += 1

    def take(self) -> list[np.ndarray]:
        """The next chunk of each device, uint8; valid until `free`."""
        self.read_ahead()
        found = [future.result() for future in self._reading.pop(self._taken)]
        self._taken += 1
        return found

    def free(self) -> None:
        """The memory of the oldest chunk that `take` gave may be used again."""
        self._freed += 1
        self.read_ahead()

    def write(self, chunk: int, arrays: Sequence[Any]) -> None:
        """Write a chunk of each device behind; the arrays are on the devices, and a few may wait there."""
        for device, array in enumerate(arrays):
            self._on_device.acquire()
            self._written[chunk, device] = self._fetchers.submit(self._fetch, chunk, device, array)
        self._changed += 1

    def flush(self) -> None:
        """Wait until everything is written. Raises the first error."""
        for future in self._written.values():
            future.result().result()
        self._written.clear()

    def restart(self) -> None:
        """Begin again with the first chunk, and forget what was read ahead."""
        for future in [each for futures in self._reading.values() for each in futures]:
            future.exception()
        self._reading = {}
        self._submitted = self._taken = self._freed = self._changed = 0
        self.flush()

    def load(self, chunk: int, device: int) -> np.ndarray:
        """A chunk, uint8, after `flush`."""
        buffer = self._buffer()[: aligned(self.sizes[chunk])]
        self.files[device].read(buffer, self._starts[chunk])
        return np.frombuffer(buffer, np.uint8)[: self.sizes[chunk]]

    def store(self, chunk: int, device: int, array: Any) -> None:
        """Write a chunk now, between `restart` and the first `take`."""
        self._store(chunk, device, _filled(self._buffer(), array))

    def clear(self) -> None:
        """Make all chunks zeros, and begin again."""
        self.restart()
        for file in self.files:
            file.clear()

    def _read(self, number: int, device: int) -> np.ndarray:
        slot, chunk = number % self.slots, number % len(self.sizes)
        if (written := self._written.get((chunk, device))) is not None:
            written.result().result()
        buffer = self._before[slot][device][: aligned(self.sizes[chunk])]
        self.files[device].read(buffer, self._starts[chunk])
        return np.frombuffer(buffer, np.uint8)[: self.sizes[chunk]]

    def _fetch(self, chunk: int, device: int, array: Any) -> Future[None]:
        """Copy a chunk to the host, where it is written in its turn."""
        buffer = self._after.get()
        try:
            _filled(buffer, array)
        finally:
            self._on_device.release()
        return self._writers.submit(self._write, chunk, device, buffer)

    def _write(self, chunk: int, device: int, buffer: memoryview) -> None:
        try:
            self._store(chunk, device, buffer)
        finally:
            self._after.put(buffer)

    def _store(self, chunk: int, device: int, buffer: memoryview) -> None:
        self.files[device].write(buffer[: aligned(self.sizes[chunk])], self._starts[chunk])

    def _buffer(self) -> memoryview:
        return memoryview(mmap.mmap(-1, self._largest))


def _filled(buffer: memoryview, array: Any) -> memoryview:
    """`buffer` with the bytes of an array at its begin."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    np.frombuffer(buffer, np.uint8)[: len(data)] = data
    return buffer
