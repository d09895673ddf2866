"""A run's compiled train steps, one for each number of microbatches, and the directory that keeps them.

Process 0 compiles for all processes, and the others read from the compilation cache. So a host with a process for each
GPU compiles once, and all processes run the same kernels. Where the cache is not shared, every process compiles as by
itself.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock
from uuid import uuid4

import jax

from megajax import cluster, threads
from megajax.config import Config
from megajax.errors import counted
from megajax.jax_internals import cache_key, compilation_cache
from megajax.runtime import keep_autotuning
from megajax.training.batch_fields import check_microbatches
from megajax.training.memory_check import check_memory, out_of_memory
from megajax.training.step import TrainProgram

# By default XLA distributes the measurements of kernels over all processes, and each waits for the others' results.
ALONE: dict[str, Any] = {"xla_gpu_shard_autotuning": False}


class CompiledSteps:
    """The steps of a run, compiled in a thread before the first one, so that none fails in the middle of a run.

    They need no arrays, so the state and the first batch can be read meanwhile. seconds: those for which the first step
    has waited.
    """

    def __init__(self, program: TrainProgram, note: Callable[[str], None]):
        """`note` prints a line."""
        self._program, self._note, self.seconds = program, note, 0.0
        self._steps: dict[int, jax.stages.Compiled] = {}  # by number of microbatches
        self._compiling: Future[dict[int, jax.stages.Compiled]] | None = None
        self._running: jax.stages.Compiled | None = None

    @property
    def is_ready(self) -> bool:
        """Whether a step can start without waiting for its compilation."""
        return bool(self._steps)

    @property
    def has_started(self) -> bool:
        return self._compiling is not None

    def start(self, sizes: Sequence[int], also: Callable[[], object]) -> ThreadPoolExecutor:
        """Compile the steps of `sizes` sequences, then call `also`, in the thread that is returned.

        The first step raises InputError if one of them needs more memory than the devices have.
        """
        # The reader's library, now: it replaces Python's __import__ while it is loaded, and a trace imports too.
        import grain  # noqa: F401

        thread = ThreadPoolExecutor(1)
        self._compiling = thread.submit(self._compile, sizes, are_shared(self._program.config))
        threads.watched(thread.submit(also), "the compilation of the checks")
        thread.shutdown(wait=False)
        return thread

    def _compile(self, sizes: Sequence[int], shared: bool) -> dict[int, jax.stages.Compiled]:
        steps, program = {}, self._program
        for size in sizes:
            of_size, named = program.by_size[size], f" for {counted(size, 'sequence')}" if len(sizes) > 1 else ""
            microbatches, start = of_size.plan.num_microbatches, time.perf_counter()
            self._note(f"compiling{named}…")
            lowered = of_size.step_program.lower(program.without_files(program.abstract_state), of_size.abstract_batch)
            steps[microbatches] = compiled(lowered, f"step of {size}", shared)
            self._note(f"compiled{named} in {time.perf_counter() - start:.1f} s")
            check_memory(steps[microbatches], size, of_size)
        return steps

    def wait(self) -> None:
        """Wait for the compilation."""
        start = time.perf_counter()
        assert self._compiling is not None
        self._steps = self._compiling.result()
        self.seconds = time.perf_counter() - start
        keep_autotuning(self._program.config)

    def run(self, state: Any, batch: dict[str, jax.Array]) -> tuple[Any, dict[str, jax.Array]]:
        """A step: (new state, metrics)."""
        check_microbatches(batch, self._steps)
        self._running = self._steps[len(batch["tokens"])]
        try:
            return self._program.finish(*self._running(state, batch))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise out_of_memory(error, self._running, self._program) from error

    def text(self) -> str:
        """The compiled module of the last step, in XLA's text form; empty before the first step."""
        return (self._running.as_text() or "") if self._running is not None else ""


def remove_damaged_programs(config: Config) -> None:
    """Remove the files of `run.compilation_cache` that cannot be read, such as one whose writer was killed.

    jax ignores them, but would neither replace them nor stop warning.
    """
    for path in Path(config.run.compilation_cache).glob("*-cache"):
        try:
            compilation_cache.decompress_executable(path.read_bytes())
        except Exception:  # of the library that compresses
            path.unlink(missing_ok=True)


def are_shared(config: Config) -> bool:
    """Whether the processes read programs that process 0 has compiled; all of them call this in their main threads.

    Not in a deterministic run: its processes have flags of their own, with the file of their measurements.
    """
    alone = cluster.current().size == 1 or config.run.deterministic
    return not alone and _all_see(jax.config.jax_compilation_cache_dir)


def compiled(lowered: jax.stages.Lowered, name: str, shared: bool) -> jax.stages.Compiled:
    """The compiled program `name`, which each process lowers; if `shared` the others wait until process 0 has it."""
    if not shared:
        return lowered.compile()
    with cluster.current().first_goes_ahead(f"compiled/{name}"), _same_key():
        return lowered.compile(ALONE if jax.default_backend() == "gpu" else None)


def _all_see(directory: str | None) -> bool:
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

    name = cluster.current().first_decides(write)
    sees = bool(name and directory and (Path(directory) / name).exists())
    all_see = all(cluster.current().gather(sees))
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
