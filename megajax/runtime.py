"""The environment that jax needs before it starts: XLA's flags and the share of GPU memory.

The user's flags have precedence. This module does not import jax.
"""

import atexit
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megajax.cluster.environment import process_index
from megajax.config import Config
from megajax.config.extensions import jax_has_started
from megajax.config.sentences import require_config
from megajax.files import replace_copy

LAYER_BYTES = 512 * 2**20  # combine collectives up to about a layer's weights
PERMUTATIONS = "xla_gpu_collective_permute_mode"
# GB of pinned memory that jax may take; its default of 64 is too little for moments. The host's memory is the limit.
HOST_MEMORY_LIMIT = "16384"
CPU_DEVICES = "--xla_force_host_platform_device_count"  # the flag for virtual ones
THREADS_OF_DEVICE = 4
MEMORY_FRACTION = "0.92"  # jax's default of 0.75 causes unnecessary out-of-memory errors


def xla_flags(config: Config) -> dict[str, str]:
    """The XLA flags for this config, by name; all are valid without a GPU too."""
    flags = {
        "xla_gpu_enable_latency_hiding_scheduler": "true",
        "xla_gpu_enable_triton_gemm": "false",  # cuBLAS is faster for training's shapes
    }
    if not has_nvidia_driver():
        # LLVM's highest level takes four times as long to compile the initial weights, and steps are not faster.
        flags["xla_backend_optimization_level"] = "2"
    mesh = config.mesh
    if any(size != 1 for size in (mesh.data, mesh.fsdp, mesh.expert, mesh.context, mesh.tensor)):
        for collective in ("all_gather", "reduce_scatter", "all_reduce"):
            flags[f"xla_gpu_{collective}_combine_threshold_bytes"] = str(LAYER_BYTES)
    if mesh.tensor != 1 or (mesh.pipeline != 1 and mesh.context != 1):
        # A permutation over `tensor` (in a pipeline, where stages run different rounds and slots, also over `context`)
        # concerns only the devices that share it. Without this flag XLA makes all devices wait for each other there.
        flags["xla_gpu_collective_permute_connected_components"] = "true"
    if mesh.tensor != 1 and mesh.pipeline == 1:
        # Use the copy engines if the devices belong to one process: from GPU to GPU they move 343 GB/s, NCCL's kernels
        # 152 to 256, and they do not occupy multiprocessors. With `context` alone this was no faster; in a pipeline,
        # whose stages run different programs, it was not tried.
        flags[PERMUTATIONS] = "peer"
    if mesh.context != 1:
        # Keys, values and their gradients are sent at the same time, during one block of attention.
        flags["xla_gpu_experimental_parallel_collective_overlap_limit"] = "4"
    if mesh.fsdp != 1 and mesh.pipeline == 1:
        # By default XLA moves the reduction of a loop's last layer into the next iteration: with `remat.policy: full` a
        # loop over layers then needs a tenth more memory, and a loop over microbatches compiles a third longer.
        flags["xla_gpu_enable_pipelined_reduce_scatter"] = "false"
    if config.run.deterministic:
        flags["xla_gpu_exclude_nondeterministic_ops"] = "true"
        # Another autotuning result means another kernel and another rounding, so the first start's results are kept.
        flags["xla_gpu_dump_autotune_results_to"] = str(new_autotuning())
        if (kept := kept_autotuning(config)).exists():
            flags["xla_gpu_load_autotune_results_from"] = str(kept)
    return flags


def permutations_are_copied() -> bool:
    """Whether the current flags make copy engines execute permutations within a process."""
    return f"--{PERMUTATIONS}=peer" in os.environ.get("XLA_FLAGS", "").split()


def variables(config: Config) -> dict[str, str]:
    """Environment variables for this config besides XLA's flags."""
    found = {}
    if config.mesh.tensor > 1 or config.mesh.context > 1 or config.communication.overlap_experts:
        # Kernels start in launch order: a transfer gets its multiprocessors before the kernel that hides it takes all
        # of them. Otherwise it would wait for the end of the matmul. Megatron sets this variable for the same reason.
        found["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if config.optimizer.offload:
        found["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"] = HOST_MEMORY_LIMIT
    if not has_nvidia_driver() and (devices := virtual_devices()):
        found |= threads_of(devices)
    return found


def virtual_devices(environment: Mapping[str, str] = os.environ) -> int:
    """The number of CPU devices that XLA's flags ask for, of two flags the last one; 0 if they ask for none."""
    return int(["0", *re.findall(rf"{CPU_DEVICES}=(\d+)", environment.get("XLA_FLAGS", ""))][-1])


def threads_of(devices: int) -> dict[str, str]:
    """The variable that lets XLA have four threads for each of so many virtual CPU devices.

    By default it has one for each, or for each core. A collective that waits for another device holds a thread, and a
    device may wait in a second one that does not depend on it: then all wait until XLA ends the process.
    """
    return {"NPROC": str(max(os.cpu_count() or 1, THREADS_OF_DEVICE * devices))}


def kept_autotuning(config: Config) -> Path:
    """The file of this process's autotuning results in a deterministic run."""
    return Path(config.run.dir).resolve() / f"autotune-{process_index()}.txt"


def new_autotuning() -> Path:
    """The file that XLA writes them to. Not in the run directory: others than training do not write there."""
    return Path(tempfile.gettempdir()) / f"megajax-autotune-{os.getpid()}.txt"


def keep_autotuning(config: Config) -> None:
    """Copy the results that XLA has written so far, because XLA may be killed while it overwrites its file."""
    if config.run.deterministic and (new := new_autotuning()).exists():
        replace_copy(new, kept_autotuning(config))


def keep_compiled(config: Config) -> None:
    """Keep compiled programs in `run.compilation_cache`, for restarts; call it before jax starts.

    jax names a program by its HLO, the flags and the versions, so another config never gets an older program.
    """
    if config.run.compilation_cache != "none" and not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        _set_jax("JAX_COMPILATION_CACHE_DIR", str(Path(config.run.compilation_cache).absolute()))
        if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
            _set_jax("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", 0.1)


def prepare_environment(config: Config) -> list[str]:
    """Set the flags and variables that the user has not set, and return them as `--flag=value` and `NAME=value`.

    If jax has already started, they can no longer be set: a warning names them.
    """
    require_config(config)
    given = os.environ.get("XLA_FLAGS", "")
    names = {flag.removeprefix("--").split("=")[0] for flag in given.split()}
    flags = [f"--{name}={value}" for name, value in xla_flags(config).items() if name not in names]
    missing = {name: value for name, value in variables(config).items() if name not in os.environ}
    added = [*flags, *(f"{name}={value}" for name, value in missing.items())]
    if jax_has_started():
        if added and _on_gpu():
            warnings.warn(
                f"jax started before megajax could set these XLA flags and variables: {' '.join(added)}; put them into "
                "XLA_FLAGS and the environment, or call megajax.runtime.prepare_environment(config) before the first "
                "use of jax.",
                stacklevel=2,
            )
        return []
    if config.run.deterministic:
        atexit.register(new_autotuning().unlink, missing_ok=True)
    os.environ["XLA_FLAGS"] = " ".join([given, *flags]).strip()
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", MEMORY_FRACTION)
    os.environ |= missing
    accept_missing_cuda()
    return added


def process_start_time() -> float:
    """The start time of this process, as of time.time(); now if the system has no such figure."""
    try:
        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return time.time()


def accept_missing_cuda() -> None:
    """Without an NVIDIA driver, prevent the traceback of jax's CUDA plugin about missing CUDA libraries.

    On such machines the plugin is installed only to compile for GPUs.
    """
    if not has_nvidia_driver():
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


def use_cpu() -> None:
    """Keep jax from reserving the memory of GPUs."""
    import jax

    accept_missing_cuda()
    jax.config.update("jax_platforms", "cpu")


def _set_jax(name: str, value: str | float) -> None:
    """Set a variable of jax, also if it is imported, as by `run.extensions`: then it has read the environment."""
    os.environ[name] = str(value)
    if "jax" in sys.modules:
        sys.modules["jax"].config.update(name.lower(), value)


def has_nvidia_driver() -> bool:
    """Whether this machine has one, and so perhaps a GPU."""
    # The second path is for containers that hide the first, the third for Windows.
    return any(Path(path).exists() for path in ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg"))


def _on_gpu() -> bool:
    import jax

    return jax.default_backend() == "gpu"


def memory_of(executable: Any) -> dict[str, int]:
    """Bytes per device that a `jax.stages.Compiled` needs: argument, other output, temporary, and whole (their sum).

    The buffer of a donated argument is reused for an output; "other output" is the rest of the output.
    """
    plan = executable.memory_analysis()
    assert plan is not None
    parts = {
        "argument": plan.argument_size_in_bytes,
        "other output": plan.output_size_in_bytes - plan.alias_size_in_bytes,
        "temporary": plan.temp_size_in_bytes,
    }
    return {**parts, "whole": sum(parts.values())}
