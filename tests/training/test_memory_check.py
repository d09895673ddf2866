"""A step that the devices have no memory for is a sentence, before it runs and when it runs."""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from megajax.config.checks import check_mesh
from megajax.errors import InputError
from megajax.estimate.memory import estimate_memory
from megajax.mesh import build_mesh
from megajax.step_plan import StepPlan
from megajax.training.compiled_steps import CompiledSteps
from megajax.training.memory_check import check_memory
from megajax.training.step import TrainProgram

GIB = 2**30
# Deep and wide enough for weights and activations to count: nothing is compiled.
MODEL = ("model.num_layers=16", "model.hidden_size=512", "model.num_heads=8", "model.ffn_hidden_size=2048")
BATCH = ("batch.global_size=8", "batch.num_microbatches=1", "batch.sequence_length=256", "mesh.data=2")


def of_gib(**sizes: int) -> Any:
    """A compiled step with this memory."""
    found = {f"{name}_size_in_bytes": gib * GIB for name, gib in sizes.items()}
    return SimpleNamespace(memory_analysis=lambda: SimpleNamespace(**found))


STEP = of_gib(argument=3, output=3, alias=2, temp=4)  # 8 GiB: an output of 2 takes the memory of an argument


@pytest.fixture
def program(make_config) -> Any:
    """(GiB of each device, overrides...) → a program on two devices."""

    def of(limit: float | None, *overrides: str, count: int = 2) -> TrainProgram:
        config = make_config(*MODEL, *BATCH, *overrides)
        built = TrainProgram.build(config, build_mesh(check_mesh(config, count), jax.devices()[:count]))
        stats = limit and {"bytes_limit": limit * GIB, "bytes_in_use": GIB}
        device = SimpleNamespace(memory_stats=lambda: stats)
        return replace(built, mesh=SimpleNamespace(size=count, local_devices=[device]))  # type: ignore[arg-type]

    return of


def gib_of(built: TrainProgram, section: str = "batch", **values: Any) -> float:
    """The estimate with other values of a section, where that of the program itself counts 8 GiB."""
    config = built.config.model_copy(update={section: getattr(built.config, section).model_copy(update=values)})
    plan = StepPlan.make(config, built.plan.sizes, built.plan.hardware)
    return 8 * estimate_memory(plan).total / estimate_memory(built.plan).total


@pytest.mark.parametrize("limit", [8, None])  # CPUs tell no limit
def test_a_step_that_fits_runs(program, limit):
    check_memory(STEP, 8, program(limit))


def test_a_step_that_does_not_fit_names_what_would(program):
    built = program(7.9)
    half = gib_of(built, num_microbatches=2)
    with pytest.raises(InputError) as error:
        check_memory(STEP, 8, built)
    assert str(error.value).startswith("a step of 8 sequences needs 8.0 GiB of memory on each device, as compiled, but")
    found = str(error.value).split(" (about ")
    assert half < 7.9 and f"or batch.num_microbatches=2 (about {half:.1f} GiB)" in str(error.value).replace(
        ", ", " or "
    )
    assert found[0].endswith("there are 7.9: set mesh.data=1 mesh.fsdp=2") and "remat.policy=" in found[2]
    assert str(error.value).endswith("`megajax plan CONFIG --gpus 2` finds the fastest settings that fit.")


@pytest.mark.parametrize(
    ("limit", "given"), [(7.9, ()), (7.0, ()), (6.0, ()), (7.5, ("remat.policy=full", "remat.layers=4"))]
)
def test_the_memory_of_a_remat_policy_is_its_own(program, limit, given):
    """That of all layers, whichever are recomputed now."""
    built = program(limit, *given)
    with pytest.raises(InputError) as error:
        check_memory(STEP, 8, built)
    found = re.search(r"(?:set|,|or) remat.policy=(\w+) \(about ([\d.]+) GiB\)", str(error.value))
    assert found and f"{gib_of(built, 'remat', policy=found[1], layers=None):.1f}" == found[2]


def test_weights_are_sharded_over_all_devices_that_divide_the_batch(program):
    with pytest.raises(InputError, match=": set mesh.data=1 mesh.fsdp=8 .about .* --gpus 8` finds the fastest"):
        check_memory(STEP, 8, program(7.9, "mesh.data=4", "mesh.fsdp=2", count=8))


def test_as_many_microbatches_as_it_takes_and_recomputation_beside_them(program):
    built = program(7.9)
    least = gib_of(built, num_microbatches=4)
    with pytest.raises(InputError, match=re.escape(f"batch.num_microbatches=4 (about {least:.1f} GiB)")):
        check_memory(STEP, 8, program(least + 0.01))
    with pytest.raises(InputError, match=": set .*batch.num_microbatches=4 remat.policy="):
        check_memory(STEP, 8, program(least - 0.01))


def test_recomputation_is_named_where_the_batch_cannot_be_divided(program):
    with pytest.raises(InputError, match="there are 7.5: set remat.policy=[a-z_]+ [^=]*;"):
        check_memory(STEP, 2, program(7.5, "batch.global_size=2", "mesh.data=1", "mesh.fsdp=2"))


def test_more_devices_are_the_cure_where_nothing_fits(program):
    with pytest.raises(InputError, match="but there are 0.1: use more devices; `megajax plan"):
        check_memory(STEP, 8, program(0.1))


@pytest.mark.parametrize(("limit", "used"), [(9, 1), (None, 0)])  # CPUs tell nothing
def test_too_little_memory_when_a_step_runs_is_the_same_sentence(program, limit, used):
    def run(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 5.0GiB.\nbuffer 1")

    steps = CompiledSteps(program(limit), print)
    steps._steps = {1: type("Step", (), {"__call__": run, "memory_analysis": lambda _: STEP.memory_analysis()})()}
    with pytest.raises(InputError) as error:
        steps.run(None, {"tokens": [0]})
    assert f"it needs 8.0 GiB as compiled, and {used}.0 GiB are in use (RESOURCE_EXHAUSTED" in str(error.value)
    assert "buffer 1" not in str(error.value) and "set mesh.data=1 mesh.fsdp=2" in str(error.value)
