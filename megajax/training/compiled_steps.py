"""A run's compiled train steps, one for each number of microbatches, and the directory that keeps them."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from jax._src import compilation_cache

from megajax.config import Config
from megajax.config.sentences import counted
from megajax.errors import InputError
from megajax.plan.compile import memory_of
from megajax.training.shared_programs import SharedCompiler
from megajax.training.step import TrainProgram

GIB = 2**30


def compile_steps(
    program: TrainProgram, sizes: Sequence[int], note: Callable[[str], None], compiler: SharedCompiler
) -> dict[int, jax.stages.Compiled]:
    """The compiled steps for global batches of `sizes` sequences, by number of microbatches.

    They need no arrays, so another thread may read the state meanwhile. All are compiled before the first step, so that
    none fails in the middle of a run. Raises InputError if a later one needs more memory than the devices have.
    """
    steps = {}
    for size in sizes:
        of_size, named = program.by_size[size], f" for {counted(size, 'sequence')}" if len(sizes) > 1 else ""
        microbatches = of_size.plan.batch_shape[0]
        note(f"compiling{named}…")
        start = time.perf_counter()
        lowered = of_size.train_step.lower(program.abstract_state, of_size.abstract_batch)
        steps[microbatches] = compiler.compile(lowered, f"step of {size}")
        note(f"compiled{named} in {time.perf_counter() - start:.1f} s")
        if size != sizes[0]:
            check_memory(steps[microbatches], size, program)
    return steps


def remove_damaged_programs(config: Config) -> None:
    """Remove the files of `run.compilation_cache` that cannot be read, such as one whose writer was killed.

    jax ignores them, but would neither replace them nor stop warning.
    """
    for path in Path(config.run.compilation_cache).glob("*-cache"):
        try:
            compilation_cache.decompress_executable(path.read_bytes())
        except Exception:  # of the library that compresses
            path.unlink(missing_ok=True)


def check_memory(step: jax.stages.Compiled, size: int, program: TrainProgram) -> None:
    """Raise InputError if the step for global batches of `size` sequences does not fit into the devices' memory."""
    limit = (program.mesh.local_devices[0].memory_stats() or {}).get("bytes_limit")
    if limit is not None and (needed := memory_of(step)["whole"]) > limit:
        config = program.config
        raise InputError(
            f"batch.schedule={config.batch.schedule} ({config.where('batch.schedule')}): a step of "
            f"{counted(size, 'sequence')} needs {needed / GIB:.1f} GiB of memory per device, but there are "
            f"{limit / GIB:.1f}: raise batch.num_microbatches, or choose another remat.policy."
        )
