"""Checks for the pipeline's stages: layers, microbatches, and settings that count the layers of a stage."""

import math

from megajax.config.fitting import microbatches_cure
from megajax.config.sentences import at_most, divisors, fail, format_axis, format_keys, listed, value
from megajax.errors import counted
from megajax.layout.kinds import attention_kinds, extra_of, is_mixed
from megajax.layout.stages import count_layer_slots, default_layout, in_step, layout_in_step, virtual_stages
from megajax.schema.config import Config
from megajax.schema.tree import show


def check_stages(config: Config, sizes: dict[str, int]) -> None:
    """Raise `ConfigError` if the config cannot run on the `pipeline` stages of `sizes`."""
    stages = sizes["pipeline"]
    if stages > 1:
        _check_count(config, sizes)
        _check_layout(config, sizes)
        _check_microbatches(config, sizes)
        _check_pattern(config, sizes)
        _check_precision(config, sizes)
        _check_offload(config, sizes)
        _check_extra_layers(config, sizes)
    _check_unroll(config, sizes)
    _check_remat(config, sizes)


def _split(config: Config, sizes: dict[str, int]) -> str:
    """`mesh.pipeline=P`, with the number of virtual stages if there are several."""
    per_stage = f" x {format_keys(config, 'pipeline.virtual_stages')}" if config.pipeline.virtual_stages > 1 else ""
    return format_axis(config, sizes, "pipeline") + per_stage


def _check_count(config: Config, sizes: dict[str, int]) -> None:
    layers, per_stage = config.model.num_layers, config.pipeline.virtual_stages
    count = sizes["pipeline"] * per_stage
    if sizes["pipeline"] <= layers and count <= layers + (2 if per_stage > 1 else 0):
        return
    depth = format_keys(config, "model.num_layers")
    if per_stage == 1:
        problem = f"{_split(config, sizes)} is more than {depth}"
        fail(config, problem, f"use {at_most(layers)}", "mesh.pipeline", "model.num_layers")
    problem = f"{_split(config, sizes)} makes {count} virtual stages, but {depth} allows at most {layers + 2}"
    problem += ", two of them empty"
    if sizes["pipeline"] <= layers:
        cure = f"set pipeline.virtual_stages to {at_most((layers + 2) // sizes['pipeline'])}"
    else:
        most = min(layers, (layers + 2) // per_stage)
        cure = f"set mesh.pipeline to {at_most(max(most, 1))}"
    fail(config, problem, cure, "mesh.pipeline", "pipeline.virtual_stages", "model.num_layers")


def _check_layout(config: Config, sizes: dict[str, int]) -> None:
    layout, layers = config.pipeline.layout, config.model.num_layers
    if layout is None:
        return
    count = sizes["pipeline"] * config.pipeline.virtual_stages
    even = f"or set it to null for {show(list(default_layout(config.model, count)))}"
    if len(layout) != count:
        problem = f"{format_keys(config, 'pipeline.layout')} has {counted(len(layout), 'number')}"
        problem += f", but {_split(config, sizes)} needs {count}"
        cure = f"write {count} numbers that add up to {format_keys(config, 'model.num_layers')}, {even}"
        fail(config, problem, cure, "pipeline.layout", "mesh.pipeline", "pipeline.virtual_stages")
    if 0 in layout[1:-1]:
        problem = f"{format_keys(config, 'pipeline.layout')} leaves an inner virtual stage without layers"
        fail(config, problem, f"give it one or more, {even}", "pipeline.layout")
    if sum(layout) != layers:
        layout_set, needed = (format_keys(config, key) for key in ("pipeline.layout", "model.num_layers"))
        problem = f"{layout_set} adds up to {sum(layout)}, not to {needed}"
        fail(config, problem, f"make it {layers}, {even}", "pipeline.layout", "model.num_layers")


def _check_microbatches(config: Config, sizes: dict[str, int]) -> None:
    stages, per_stage = sizes["pipeline"], config.pipeline.virtual_stages
    microbatches = config.batch.num_microbatches
    key, name = "batch.num_microbatches", format_axis(config, sizes, "pipeline")
    cure = microbatches_cure(config, sizes)
    if microbatches < stages:
        idle = (stages - 1) / (microbatches * per_stage + stages - 1)
        problem = (
            f"{format_keys(config, key)} is less than {name}, so stages would be idle for up to {idle:.0%} of a step"
        )
        fail(config, problem, cure, key, "mesh.pipeline")
    if per_stage > 1 and microbatches % stages:
        several = format_keys(config, "pipeline.virtual_stages")
        problem = f"{format_keys(config, key)} is not a multiple of {name}, which {several} needs"
        fail(config, problem, cure, key, "mesh.pipeline", "pipeline.virtual_stages")
    _check_ramp_up(config, sizes)


def _check_ramp_up(config: Config, sizes: dict[str, int]) -> None:
    """The smaller batches of `batch.schedule` have enough microbatches too."""
    stages, several = sizes["pipeline"], config.pipeline.virtual_stages > 1
    microbatch = config.batch.global_size // config.batch.num_microbatches
    for size in (size for _, size in config.batch.sizes_by_tokens):
        count = size // microbatch
        if count >= stages and not (several and count % stages):
            continue
        problem = f"{format_keys(config, 'batch.schedule')} has steps of {counted(size, 'sequence')} in "
        problem += counted(count, "microbatch")
        name, needed = format_axis(config, sizes, "pipeline"), stages * microbatch
        if several:
            problem += f", not a multiple of {name}, which {format_keys(config, 'pipeline.virtual_stages')} needs"
            cure = f"use multiples of {needed}"
        else:
            problem += f", fewer than {name}"
            cure = f"use {needed} or more, or raise batch.num_microbatches"
        fail(config, problem, cure, "batch.schedule", "mesh.pipeline")


def _check_pattern(config: Config, sizes: dict[str, int]) -> None:
    """Each slot must hold the same kind of layer on all virtual stages, because they run one program.

    A model with dense and MoE layers has slots for each kind of block and window, so it needs no check.
    """
    if is_mixed(config.model):
        return
    period, stages = len(attention_kinds(config.model)), sizes["pipeline"]
    layout = tuple(len(layers) for layers in virtual_stages(config, stages))
    if in_step(layout, period):
        return
    patterns = [key for key in ("model.layer_pattern", "model.rope_pattern") if value(config, key) is not None]
    pattern = format_keys(config, *patterns)
    if config.pipeline.layout is None:
        problem = f"{_split(config, sizes)} makes virtual stages of {show(list(layout))} layers, and with"
        problem += f" {pattern} they have different kinds of layers"
    else:
        problem = (
            f"{format_keys(config, 'pipeline.layout')} and {pattern} give virtual stages with different kinds of layers"
        )
    keys = ("pipeline.layout", "mesh.pipeline", "pipeline.virtual_stages", *patterns)
    fail(config, problem, _cure_of_pattern(config, stages, period), *keys)


def _cure_of_pattern(config: Config, stages: int, period: int) -> str:
    """A layout with the same layer kinds on all virtual stages, with at most `pipeline.virtual_stages` on a device."""
    per_stage = config.pipeline.virtual_stages
    for fewer in range(per_stage, 0, -1):
        layout = layout_in_step(config.model.num_layers, stages * fewer, period)
        if layout is not None:
            changed = f"pipeline.virtual_stages={fewer} and " if fewer < per_stage else ""
            return f"set {changed}pipeline.layout={list(layout)}"
    return f"use fewer stages, so that each has a multiple of {period} layers"


def _check_precision(config: Config, sizes: dict[str, int]) -> None:
    fp8 = config.precision.fp8
    names = [name for name in ("first_bf16_layers", "last_bf16_layers") if getattr(fp8, name)]
    if fp8.recipe != "none" and names:
        keys = [f"precision.fp8.{name}" for name in names]
        problem = f"{format_keys(config, *keys)} cannot be combined with {format_axis(config, sizes, 'pipeline')},"
        problem += " because all stages run the same program"
        cure = f"set {' and '.join(f'{key}=0' for key in keys)}, or mesh.pipeline=1"
        fail(config, problem, cure, *keys, "mesh.pipeline")


def _check_offload(config: Config, sizes: dict[str, int]) -> None:
    if config.remat.chosen.on_host:
        problem = (
            f"{format_keys(config, 'remat.policy')} cannot be combined with {format_axis(config, sizes, 'pipeline')},"
        )
        problem += " because a pipeline keeps its saved activations on the GPU"
        fail(config, problem, "use full, selective or save_matmuls", "remat.policy", "mesh.pipeline")


def _check_extra_layers(config: Config, sizes: dict[str, int]) -> None:
    """The stages divide every sequence, and with `tensor` the part of it that a device holds."""
    stages, batch, extra = sizes["pipeline"], config.batch, extra_of(config.model)
    length = batch.sequence_length // sizes["context"]
    sequences = batch.global_size // batch.num_microbatches // config.batch_shards(sizes)
    piece = math.gcd(length, sequences * length // sizes["tensor"])
    if extra and piece % stages:
        keys = (extra.key, "mesh.pipeline", "batch.sequence_length")
        problem = f"{format_keys(config, keys[0])} shares the tokens of a sequence among the stages, but"
        problem += f" {format_axis(config, sizes, 'pipeline')} does not divide the {counted(piece, 'token')}"
        problem += f" that a device has of {format_keys(config, keys[2])}"
        fail(config, problem, f"make it a multiple of {stages * batch.sequence_length // piece}", *keys)


# Settings of the loop over the slots of a virtual stage, or over all layers without a pipeline


def _check_unroll(config: Config, sizes: dict[str, int]) -> None:
    unroll, size = config.kernels.scan_unroll, count_layer_slots(config, sizes["pipeline"])
    if unroll is not None and size % unroll:
        problem = f"{format_keys(config, 'kernels.scan_unroll')} does not divide {_format_slots(config, sizes)}"
        keys = ("kernels.scan_unroll", "mesh.pipeline", "model.num_layers")
        fail(config, problem, f"use {listed(divisors(size))}", *keys)


def _check_remat(config: Config, sizes: dict[str, int]) -> None:
    remat, size = config.remat, count_layer_slots(config, sizes["pipeline"])
    if remat.layers is not None and remat.layers > size:
        problem = f"{format_keys(config, 'remat.layers')} is more than {_format_slots(config, sizes)}"
        keys = ("remat.layers", "mesh.pipeline", "model.num_layers")
        fail(config, problem, f"use {at_most(size)}, or null for all", *keys)
    covered = remat.layers or size
    if covered % remat.group:
        what, where = _loop_in_words(config, sizes)
        problem = f"{format_keys(config, 'remat.group')} does not divide the {counted(covered, f'recomputed {what}')}"
        problem += f" in {where}" if sizes["pipeline"] > 1 else ""
        fail(config, problem, f"use {listed(divisors(covered))}", "remat.group", "remat.layers", "mesh.pipeline")
    if (second := config.of_second_stack) is None:
        return
    own = second.model.num_layers
    layers = min(remat.layers or own, own)  # all of them are on each stage
    if layers % remat.group:
        key = "model.encoder.num_layers" if config.model.vision is None else "model.vision.num_layers"
        problem = f"{format_keys(config, 'remat.group')} does not divide the {counted(layers, 'recomputed layer')}"
        problem += f" of {format_keys(config, key)}"
        common = divisors(math.gcd(covered, layers))
        fail(config, problem, f"use {listed(common)}", "remat.group", "remat.layers", key)


def _format_slots(config: Config, sizes: dict[str, int]) -> str:
    if sizes["pipeline"] == 1:
        return format_keys(config, "model.num_layers")
    what, where = _loop_in_words(config, sizes)
    return f"the {counted(count_layer_slots(config, sizes['pipeline']), what)} of {where}"


def _loop_in_words(config: Config, sizes: dict[str, int]) -> tuple[str, str]:
    """The loop of a stage's program in words: (layer or slot, the virtual stage with this number of them)."""
    mixed = is_mixed(config.model) and sizes["pipeline"] > 1
    what, which = ("dense or MoE layer slot", "each") if mixed else ("layer", "the largest")
    return what, f"{which} virtual stage of {_split(config, sizes)}"
