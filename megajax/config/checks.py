"""Checks of combinations of settings, and of divisibility by the mesh."""

import math
import tempfile
from itertools import pairwise
from numbers import Integral
from pathlib import Path

from megajax.config.checkpoint_checks import check_checkpoints, warn_about_kept_checkpoints
from megajax.config.effects import warn_without_effect
from megajax.config.encoder_checks import check_encoder, check_encoder_on_mesh
from megajax.config.expert_checks import check_experts, check_overlap, check_upcycling, warn_about_upcycling
from megajax.config.extensions import check_hook_settings, settings_of
from megajax.config.fitting import axis_sizes, microbatch_numbers, microbatches_cure
from megajax.config.mesh_checks import check_axes, check_context, check_fp8_shapes, check_local_batch
from megajax.config.model_checks import check_lora, check_model
from megajax.config.objective_checks import check_objective, check_teacher, with_teacher
from megajax.config.pipeline_checks import check_stages
from megajax.config.rule_checks import check_rules
from megajax.config.run_checks import check_directories, check_epochs, check_name
from megajax.config.sentences import divisors, fail, format_keys, listed, require_config, warn
from megajax.config.sublayer_checks import check_parts
from megajax.config.vision_checks import check_vision, check_vision_on_mesh
from megajax.errors import ConfigError, counted, shown
from megajax.options.schedules import TAIL
from megajax.schema.batch_schedule import BatchSizes, samples_before
from megajax.schema.config import Config
from megajax.schema.fields import AXES

MOST_TOKENS = 2**30  # per step: counts of tokens are 32-bit numbers, and a host holds a few arrays of this length


def check(config: Config) -> None:
    """Raise `ConfigError` for combinations that can run on no mesh; warn about settings without effect."""
    check_combinations(config)
    warn_without_effect(config)
    warn_about_kept_checkpoints(config)
    warn_about_upcycling(config)
    _warn_about_warmup(config)
    _warn_about_ramp_up(config)


def check_combinations(config: Config) -> None:
    """Raise `ConfigError` for combinations that can run on no mesh."""
    sizes = _sizes(config)
    check_rules(config)
    with_teacher(config, sizes, _check_model, check_axes)
    _check_batch(config)
    _check_optimizer(config)
    if config.mesh.pipeline != -1:
        check_stages(config, sizes)
    check_hook_settings(config)
    _check_fp8_layers(config)
    with_teacher(config, sizes, check_parts)
    check_objective(config)
    check_teacher(config)
    check_encoder(config)
    check_vision(config)
    check_lora(config)
    _check_schedule(config)
    _check_data(config)
    check_name(config)
    check_directories(config)
    _check_run_dir(config)
    check_checkpoints(config)
    check_upcycling(config)
    check_epochs(config)


def _check_model(config: Config, sizes: dict[str, int]) -> None:
    check_experts(config)
    check_model(config)


def check_mesh(config: Config, num_devices: int, num_processes: int = 1, platform: str = "gpu") -> dict[str, int]:
    """Sizes in axis order with -1 filled in; raises `ConfigError` if the mesh does not fit the config.

    `num_devices` is the number of devices of all `num_processes` processes together. On the `platform` cpu an error
    for too few of them says how one process gets several.
    """
    require_config(config)
    if not isinstance(num_devices, Integral):
        raise ConfigError(f"num_devices={shown(num_devices)} is no number: give one, such as jax.device_count().")
    check_axes(config, _sizes(config))
    _check_batch(config)
    sizes = _fill(config, num_devices, num_processes, platform)
    with_teacher(config, sizes, check_axes)
    check_stages(config, sizes)
    with_teacher(config, sizes, check_context)
    check_local_batch(config, sizes)
    check_overlap(config, sizes)
    check_fp8_shapes(config, sizes)
    with_teacher(config, sizes, check_parts)
    check_encoder_on_mesh(config, sizes)
    check_vision_on_mesh(config, sizes)
    return sizes


# Mesh sizes


def _sizes(config: Config) -> dict[str, int]:
    """Sizes before the number of devices is known: 1 for an axis of -1."""
    fills = [f"mesh.{axis}" for axis in AXES if getattr(config.mesh, axis) == -1]
    if len(fills) > 1:
        problem = f"{format_keys(config, *fills)} cannot share the remaining devices"
        fail(config, problem, "keep -1 on one axis only", *fills)
    return {axis: max(1, getattr(config.mesh, axis)) for axis in AXES}


def _fill(config: Config, num_devices: int, num_processes: int, platform: str) -> dict[str, int]:
    sizes, free = _sizes(config), [axis for axis in AXES if getattr(config.mesh, axis) == -1]
    product = math.prod(sizes.values())
    if free and num_devices % product == 0:
        return sizes | {free[0]: num_devices // product}
    if not free and product == num_devices:
        return sizes
    larger = [f"mesh.{axis}" for axis in AXES if sizes[axis] > 1]
    factors = " x ".join(format_keys(config, key) for key in larger) or "the default mesh"
    each = f" ({num_processes} processes with {num_devices // num_processes} each)" if num_processes > 1 else ""
    devices = counted(num_devices, "device") + each
    virtual = ""
    if platform == "cpu" and num_processes == 1 and num_devices < product:
        virtual = f"; to try the mesh on CPUs, set XLA_FLAGS=--xla_force_host_platform_device_count={product}"
    if free:
        cure = "use sizes whose product is" if len(larger) > 1 else "use"
        usable = divisors(num_devices)
        usable = axis_sizes(config, larger[0].removeprefix("mesh."), usable) if len(larger) == 1 else usable
        cure = f"{cure} {listed(usable)}{virtual}"
        fail(config, f"{factors} does not divide {devices}", cure, *larger)
    few = f"uses {product} of {devices}"
    many = f"needs {product} devices, but there {'is' if num_devices == 1 else 'are'} {num_devices}{each}"
    cure = f"make the product {num_devices}, or set one axis to -1, such as mesh.data=-1{virtual}"
    fail(config, f"{factors} {few if product < num_devices else many}", cure, *larger)


# Combinations that no mesh can run


def _check_batch(config: Config) -> None:
    batch = config.batch
    if batch.global_size % batch.num_microbatches:
        keys = ("batch.num_microbatches", "batch.global_size")
        problem = f"{format_keys(config, keys[0])} does not divide {format_keys(config, keys[1])}"
        fail(config, problem, microbatches_cure(config, _sizes(config)), *keys)
    _check_ramp_up(config)
    tokens = batch.global_size * batch.sequence_length
    if tokens > MOST_TOKENS:
        keys = ("batch.global_size", "batch.sequence_length")
        problem = f"{format_keys(config, keys[0])} x {format_keys(config, keys[1])} makes {tokens} tokens per step"
        fail(config, problem, f"use {MOST_TOKENS} or less", *keys)


def _check_ramp_up(config: Config) -> None:
    """Every size is a number of microbatches of the same size, and the last one is `batch.global_size`."""
    batch, key, sizes = config.batch, "batch.schedule", [size for _, size in config.batch.sizes_by_tokens]
    if sizes[-1] != batch.global_size:
        problem = f"{format_keys(config, key)} ends with {counted(sizes[-1], 'sequence')}"
        problem += f", not with {format_keys(config, 'batch.global_size')}"
        fail(config, problem, f"set batch.global_size={sizes[-1]}, or change the last size", key, "batch.global_size")
    microbatch = batch.global_size // batch.num_microbatches
    for size in (size for size in sizes if size % microbatch):
        usable = microbatch_numbers(config, _sizes(config))
        whole, parts = (format_keys(config, name) for name in ("batch.global_size", "batch.num_microbatches"))
        problem = f"{format_keys(config, key)} has steps of {counted(size, 'sequence')}, no multiple of the"
        problem += f" microbatches of {whole} / {parts} = {microbatch}"
        cure = f"set batch.num_microbatches to {listed(usable)}, or " if usable else ""
        cure += f"use multiples of {microbatch}"
        fail(config, problem, cure, key, "batch.num_microbatches")


def _check_optimizer(config: Config) -> None:
    if (optimizer := config.optimizer.chosen.made) is not None:
        settings_of(config, optimizer, "optimizer")
    muon, key, steps = config.optimizer.muon, "optimizer.muon.coefficients", "optimizer.muon.steps"
    given = muon.coefficients if config.optimizer.kind == "muon" and isinstance(muon.coefficients, tuple) else ()
    if len(given) > muon.steps:
        problem = f"{key} has those of {counted(len(given), 'step')}, more than {format_keys(config, steps)}"
        fail(config, problem, f"set {steps}={len(given)}, or shorten the list", key, steps)


def _check_fp8_layers(config: Config) -> None:
    fp8, depth = config.precision.fp8, config.model.num_layers
    keys = ("precision.fp8.first_bf16_layers", "precision.fp8.last_bf16_layers")
    if not fp8.chosen.is_on:
        return
    if fp8.first_bf16_layers + fp8.last_bf16_layers >= depth:
        problem = f"{format_keys(config, *keys)} leave no layer of {format_keys(config, 'model.num_layers')} in FP8"
        fail(config, problem, "lower them, or set precision.fp8.recipe=none", *keys)
    covered = 0 if config.remat.chosen.recomputes_nothing else config.remat.layers or depth
    for key, edge in zip(keys, (config.fp8_layers.start, config.fp8_layers.stop), strict=True):
        if edge < covered and edge % config.remat.group:
            problem = f"{format_keys(config, key)} starts or ends FP8 at layer {edge}, inside a group of"
            problem += f" {format_keys(config, 'remat.group')}"
            fail(config, problem, "make that layer a multiple of remat.group, or set remat.group=1", key)


def _check_schedule(config: Config) -> None:
    schedule, decay = config.schedule, "schedule.decay_steps"
    if schedule.chosen.rate is not None:
        settings_of(config, schedule.chosen.rate, "schedule")
    tail = schedule.wsd_decay_steps or 0
    if TAIL in schedule.chosen.reads and schedule.warmup_steps + tail > schedule.decay_steps:
        keys = ("schedule.wsd_decay_steps", "schedule.warmup_steps", decay)
        problem = f"{format_keys(config, *keys[:2])} together are more than {format_keys(config, decay)}"
        derived = config.where(decay) == "default"
        fail(config, problem, f"shorten one of them{', or raise run.steps' * derived}", *keys, *["run.steps"] * derived)


def _check_data(config: Config) -> None:
    data = config.data
    if data.kind == "synthetic":
        return
    samples, needed = data.train_samples, samples_before(config, config.run.steps)
    if data.order == "megatron" and samples is not None and samples < needed:
        keys = ("data.train_samples", "run.steps", "batch.global_size")
        problem = f"{format_keys(config, keys[0])} is less than the {counted(needed, 'sample')} of"
        problem += f" {' and '.join(format_keys(config, key) for key in keys[1:])}"
        fail(config, problem, f"set {keys[0]}={needed} or more, or remove it", *keys)
    names = [each.name for each in data.valid_sets]
    if len(set(names)) < len(names):
        again = next(name for name in names if names.count(name) > 1)
        fail(config, f"data.valid_sets has two sets called {again}", "give each its own name", "data.valid_sets")
    _check_stages(config)


def _check_stages(config: Config) -> None:
    key, steps = "data.stages", [stage.from_step for stage in config.data.stages or ()]
    for i, (before, step) in enumerate(pairwise([0, *steps])):
        if step <= before:
            problem = f"{key}.{i}.from_step={step} is not after the stage before it, which begins at step {before}"
            fail(config, problem, "write the stages in the order of their steps", key)
    if steps and steps[-1] >= config.run.steps:
        problem = f"the stage of {key} with from_step={steps[-1]} begins after {format_keys(config, 'run.steps')}"
        warn(config, problem, "lower from_step, or raise run.steps", key, "run.steps")


def _check_run_dir(config: Config) -> None:
    """The paths must have no spaces, because XLA gets them as flags."""
    if not config.run.deterministic:
        return
    deterministic, run_dir = (format_keys(config, key) for key in ("run.deterministic", "run.dir"))
    temporary = "the directory for temporary files", tempfile.gettempdir(), "set TMPDIR to one without spaces"
    for name, path, cure in ((run_dir, config.run.dir, "choose a run.dir without spaces"), temporary):
        whole = str(Path(path).resolve())
        if any(character.isspace() for character in whole):
            problem = f"{deterministic} passes a path in {name} to XLA as a flag, but a flag"
            fail(config, f"{problem} cannot contain the space in {whole}", cure, "run.dir", "run.deterministic")


def _warn_about_warmup(config: Config) -> None:
    warmup, steps = "schedule.warmup_steps", "run.steps"
    if config.schedule.warmup_steps > config.run.steps:
        problem = f"{format_keys(config, warmup)} is more than {format_keys(config, steps)}"
        problem += f", so the run ends before it reaches {format_keys(config, 'schedule.learning_rate')}"
        warn(config, problem, f"lower {warmup}, or raise {steps}", warmup, steps)


def _warn_about_ramp_up(config: Config) -> None:
    start, size = BatchSizes.of(config).phases[-1]
    if start.step >= config.run.steps:
        problem = (
            f"{format_keys(config, 'batch.schedule')} has {counted(size, 'sequence')} from step {start.step + 1} on"
        )
        problem += f", which is after {format_keys(config, 'run.steps')}"
        warn(config, problem, "raise run.steps, or lower the number of tokens", "batch.schedule", "run.steps")
