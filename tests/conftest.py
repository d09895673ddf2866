"""Eight virtual CPU devices for every test, set before jax starts, compiled programs kept from run to run, and
temporary files in memory.
"""

import gc
import os
import shutil
import signal
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import virtual_devices
from hypothesis.internal.conjecture import providers

CACHE_BYTES = 2**30
FREE_BYTES = 4 * 2**30

# Else each process, children too, would compile megajax's sources again: a second of four until it has imported all.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell that starts the tests in the background makes them, and their children, ignore a Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Collect garbage seldom, and never among the modules: by default it took 2.6 of 36 CPU seconds of mesh tests, and an
# eighth of the time of their collection.
gc.set_threshold(300_000, 20, 100)

os.environ.update(virtual_devices.ENVIRONMENT)
# Programs for GPUs have the same operations without it, and compile in half the time.
os.environ["XLA_FLAGS"] = WITH_FLAGS = f"{os.environ['XLA_FLAGS']} --xla_gpu_autotune_level=0"
# Hypothesis would parse all modules of megajax and of the tests, for their constants: three seconds in each process.
providers._get_local_constants = lambda: providers._local_constants
# Source lines in programs took a tenth of the time of tracing and compiling; names of scopes stay.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"


def _size_of(caches: Path) -> int:
    """Bytes of the cached programs, 0 while another run deletes them."""
    try:
        return sum(path.stat().st_size for path in caches.rglob("*-cache"))
    except FileNotFoundError:
        return 0


def keep_compiled_programs() -> None:
    """Share a cache with all processes of all test runs: a run that finds its programs takes a third of the time.

    jax names an entry by the program, the flags and the processor, so a changed test or model never uses an old entry.
    JAX_ENABLE_COMPILATION_CACHE=false does without.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "megajax-tests")
    cache = caches / f"jaxlib-{version('jaxlib')}"
    if "PYTEST_XDIST_WORKER" not in os.environ:
        # Not by jax's own limit, which reads the whole directory at every entry that it writes.
        if _size_of(caches) > CACHE_BYTES:
            shutil.rmtree(caches, ignore_errors=True)
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # a home that is read-only: every run compiles
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    # To write and read one of the thousands that compile in milliseconds takes longer than to compile it.
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


keep_compiled_programs()


def keep_files_in_memory() -> None:
    """Write the tests' files to a file system in memory where there is one: thousands of small ones, soon deleted.

    On a disk, deleting those of an older run took 40 seconds at the end of a run.
    """
    memory = "/dev/shm"
    if os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > FREE_BYTES:
        if not os.statvfs(memory).f_flag & os.ST_NOEXEC:  # some tests write programs
            os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", memory)


keep_files_in_memory()

REUSED = pytest.StashKey()  # the ReusedPrograms of the process
# Directories and files; the directory "tests" itself has those of commands and of the library.
OF_RUNS = {
    "tests",
    "training",
    "checkpoint",
    "data",
    "hf",
    "inference",
    "faults",
    "profile",
    "megatron",
    "verify",
    "test_teacher.py",
    "test_registered_optimizers.py",
}
# Their programs draw the first weights, which other tests get from `reused_programs.first_weights`.
OF_FIRST_WEIGHTS = {"test_initial_weights.py", "test_reference.py", "test_mesh_table.py", "test_pipeline.py"}

# Files that take longest, the longest first: started last, one would keep a worker busy after all others are done.
LONGEST = (
    "test_processes.py",
    "test_faults.py",
    "test_plain_model.py",
    "test_transformers_references.py",
    "test_context.py",
    "test_generation.py",
    "test_ranged_attention.py",
    "test_pipeline.py",
    "test_step.py",
    "test_resume.py",
    "test_run_directory.py",
    "test_hlo_facts.py",
    "test_verify.py",
    "test_linear_recurrences.py",
    "test_lora.py",
    "test_memory.py",
    "test_checkpoint.py",
    "test_fp8_scaling.py",
    "test_convert.py",
    "test_nonfinite.py",
    "test_experts.py",
    "test_scoring.py",
    "test_local_saves.py",
    "test_vision.py",
    "test_block_kinds.py",
    "test_mesh_table.py",
    "test_teacher.py",
    "test_initial_weights.py",
    "test_going_on.py",
    "test_grouped_fp8.py",
    "test_value_head.py",
    "test_objectives.py",
    "test_search.py",
    "test_generate.py",
    "test_hybrids.py",
    "test_blockwise_kernels.py",
    "test_commands.py",
    "test_cross_entropy_kernel.py",
    "test_muon.py",
    "test_profile_command.py",
    "test_fp8_recipes.py",
    "test_masked_tokens.py",
    "test_passes.py",
    "test_fp8_experts.py",
    "test_loop.py",
    "test_adapters.py",
    "test_grouped_matmul.py",
    "test_chat_command.py",
    "test_attention.py",
    "test_encoder_layers.py",
    "test_saving.py",
    "test_deepseek.py",
    "test_spikes.py",
    "test_readers.py",
    "test_loader.py",
    "test_qk_clip.py",
    "test_t5.py",
    "test_fp8_resume.py",
    "test_every_key.py",
    "test_comm.py",
    "test_masters.py",
    "test_limits.py",
    "test_registered_options.py",
    "test_lm_eval.py",
    "test_fp8_kernels.py",
    "test_jla.py",
    "test_tokenizer_trial.py",
    "test_extensions.py",
    "test_dispatch.py",
    "test_expert_mlp.py",
    "test_docs.py",
    "test_mixed_layers.py",
    "test_prefix_lm.py",
    "test_export.py",
)
ORDER = {name: index for index, name in enumerate(LONGEST)}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Files are distributed over the workers (`--dist loadfile`); a crash of one does not hang the run."""
    if config.getvalue("dist") == "loadfile":
        from file_scheduling import FileScheduling

        return FileScheduling(config, log)  # pyright: ignore[reportArgumentType]
    return None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Any:
    """Every second process collects files from the last one on: in a new checkout each then compiles half of them."""
    report = yield
    if isinstance(collector, pytest.Dir) and os.environ.get("PYTEST_XDIST_WORKER", "gw0")[-1] in "13579":
        report.result.reverse()
    return report


def pytest_collection_modifyitems(items: list) -> None:
    """The longest files first, the others by path; the order within a file stays."""
    items.sort(key=lambda item: (ORDER.get(item.path.name, len(LONGEST)), item.path))


def pytest_sessionfinish() -> None:
    """Pytest collects garbage five times at the end, which takes seconds with the programs of a whole run."""
    gc.freeze()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave the modules out of the collection of garbage, and find the programs that tests reuse."""
    gc.freeze()
    if "megajax.training.step" in sys.modules or "megajax.inference.generation" in sys.modules:  # of a test module
        from reused_inference import share_inference
        from reused_programs import ReusedPrograms

        from megajax.training.step import TrainProgram

        session.stash[REUSED] = reused = ReusedPrograms(TrainProgram)
        share_inference(reused)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests of runs reuse each other's programs."""
    if reused := item.session.stash.get(REUSED, None):
        reused.draws = item.path.name not in OF_FIRST_WEIGHTS
        reused.active = bool({item.path.parent.name, item.path.name} & OF_RUNS)


@pytest.fixture(scope="session")
def h200_store() -> Path | None:
    """Directory of programs compiled for H200s, kept from run to run as other compiled programs are."""
    kept = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    return Path(kept) / "h200" if kept else None


@pytest.fixture(autouse=True)
def flags_of_all_tests() -> None:
    """Commands change the flags of their process; the processes of later tests would get them."""
    os.environ["XLA_FLAGS"] = WITH_FLAGS
