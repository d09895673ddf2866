"""The one place that knows how a config becomes the programs of its train and evaluation step."""

import contextlib
import math
import os
import re
import shlex
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from dev.programs.cases import Case

DEVICES = 8


def prepare() -> None:
    """Eight virtual devices; before jax starts."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = (
        "0"  # GPU kernels are stored with the source locations of their code
    )
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"


def lowered(case: Case) -> dict[str, Callable[[], Any]]:
    """The functions that lower the steps "train" and "eval". Edit this, and only this, when megajax's doors change."""
    import jax

    import megajax
    from megajax.config.checks import check_mesh
    from megajax.runtime import xla_flags
    from megajax.tools.plan.compile import described_devices

    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "case.yaml")
        path.write_text(case.yaml, encoding="utf-8")
        config = megajax.load_config(path, shlex.split(case.overrides))
    count = math.prod(int(size) for size in re.findall(r"mesh\.\w+=(\d+)", case.overrides))
    sizes = check_mesh(config, count)
    if case.on_gpus:
        os.environ["XLA_FLAGS"] = " ".join(f"--{name}={value}" for name, value in xla_flags(config).items())
    devices = described_devices(count) if case.on_gpus else jax.devices()[:count]
    program = megajax.TrainProgram.build(config, megajax.build_mesh(sizes, devices))
    state, batch = program.abstract_state, program.abstract_batch
    return {
        "train": lambda: program.train_step.lower(state, batch),
        "eval": lambda: program.eval_step.lower(state.weights, state.layer_state, batch),
    }


def modules(case: Case) -> dict[str, Any]:
    """The MLIR modules of the steps."""

    from megajax.jax_internals import source_info_util
    from megajax.tools.plan.compile import no_gpu_needed

    with (
        warnings.catch_warnings(),
        # A program has the kernels for GPUs in a form with source locations, which are no part of it.
        mock.patch.object(source_info_util, "user_frame", lambda _: None),
        no_gpu_needed() if case.on_gpus else contextlib.nullcontext(),
    ):
        warnings.simplefilter("ignore")  # of a setting that a small mesh does not use
        return {kind: lower().compiler_ir() for kind, lower in lowered(case).items()}
