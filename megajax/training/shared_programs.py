"""Programs of all processes: process 0 compiles them, and the others read them from the compilation cache.

So a host with a process for each GPU compiles once, and all processes run the same kernels. Where the cache is not
shared, every process compiles as by itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock
from uuid import uuid4

import jax
from jax._src import cache_key

from megajax.config import Config
from megajax.messages import SLOWEST, Messages, from_first_process, gather, next_name

# By default XLA distributes the measurements of kernels over all processes, and each waits for the others' results.
ALONE: dict[str, Any] = {"xla_gpu_shard_autotuning": False}


class SharedCompiler:
    """Compiles programs that all processes run, each of them in the same order."""

    def __init__(self, config: Config):
        """All processes must call this in their main threads.

        A deterministic run does not share: its processes have flags of their own, with the file of their measurements.
        """
        self._name = next_name("compiled")
        alone = Messages("compiled").count == 1 or config.run.deterministic
        self.shares = not alone and _all_see(jax.config.jax_compilation_cache_dir, self._name)

    def compile(self, lowered: jax.stages.Lowered, name: str) -> jax.stages.Compiled:
        """The compiled program `name`, which each process lowers; the others wait until process 0 has it."""
        if not self.shares:
            return lowered.compile()
        messages = Messages(f"{self._name}/{name}")
        if messages.index:
            messages.wait("done")
        try:
            with _same_key():
                return lowered.compile(ALONE if jax.default_backend() == "gpu" else None)
        finally:
            if messages.index == 0:  # also after an error: the others then find it too
                messages.post("done", "", again=True)


def _all_see(directory: str | None, call: str) -> bool:
    """Whether all processes see a file that process 0 writes in its compilation cache, where jax alone writes."""
    mark: Path | None = None

    def write() -> str:
        nonlocal mark
        if directory is None:
            return ""
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
            mark = Path(directory) / f"seen-{uuid4().hex}"
            mark.touch()
        except OSError:  # jax warns when it keeps a program there
            return ""
        return mark.name

    name = from_first_process(write)
    sees = bool(name and directory and (Path(directory) / name).exists())
    all_see = all(gather(f"{call} is seen", sees, SLOWEST))
    if mark is not None:
        mark.unlink(missing_ok=True)
    return all_see


@contextmanager
def _same_key() -> Iterator[None]:
    """Within it a program of CPUs has the same name in the cache on every process, as one of GPUs has.

    jax adds a hash of the process's own CPUs; their kind, instead, is its own choice for devices without such a hash.
    """
    if jax.default_backend() != "cpu":
        yield
        return
    with mock.patch.object(cache_key, "_hash_accelerator_config", cache_key._hash_devices):
        yield
