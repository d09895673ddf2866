"""Checks of divisibility by the mesh: heads, widths, experts, sequences, FP8 matmuls; a mesh as text in an option."""

import math

from megajax.config.fitting import axis_sizes, fits_kv_heads, microbatch_numbers, tensor_keys
from megajax.config.other_names import counterpart
from megajax.config.sentences import divisors, fail, format_axis, format_keys, listed, value
from megajax.errors import ConfigError, counted, shown
from megajax.files import is_number
from megajax.layout.kinds import extra_of, is_gated, mlp_widths
from megajax.layout.recurrent import recurrent_heads
from megajax.options.context import with_whole_heads
from megajax.options.registered import ENCODER_KIND, NO_ENCODER
from megajax.schema.config import Config
from megajax.schema.fields import AXES, BATCH_AXES


def check_axes(config: Config, sizes: dict[str, int]) -> None:
    """Raise `ConfigError` if `tensor` or the axes of the experts cannot divide the model."""
    _check_experts(config, sizes)
    model, tensor = config.model, sizes["tensor"]
    name, vocab = format_axis(config, sizes, "tensor"), model.padded_vocab_size

    def cure_of(key: str) -> str:
        return f"set mesh.tensor to {listed(axis_sizes(config, 'tensor', divisors(model.num_heads)))}, or change {key}"

    for key in tensor_keys(config):
        if value(config, key) % tensor:
            problem = f"{name} does not divide {format_keys(config, key)}"
            fail(config, problem, cure_of(key), "mesh.tensor", key)
    if not fits_kv_heads(config, tensor):
        key = "model.num_kv_heads"
        problem = f"{name} neither divides {format_keys(config, key)} nor is a multiple of it"
        fail(config, problem, cure_of(key), "mesh.tensor", key)
    if vocab % tensor:
        padded = f"{vocab} ({format_keys(config, 'model.vocab_size', 'model.vocab_multiple')})"
        problem = f"{name} does not divide the padded vocabulary of {padded}"
        cure = f"make model.vocab_multiple a multiple of {tensor}"
        fail(config, problem, cure, "mesh.tensor", "model.vocab_multiple", "model.vocab_size")


def _check_experts(config: Config, sizes: dict[str, int]) -> None:
    """Raise `ConfigError` for a mesh that cannot divide the experts."""
    model, name, axes = config.model, format_axis(config, sizes, "expert"), config.mesh.experts_over
    if model.num_experts is None:
        if sizes["expert"] > 1:
            cure = "set model.num_experts, or use mesh.data or mesh.fsdp for the batch"
            fail(config, f"{name} needs a model with experts", cure, "mesh.expert")
        return
    if sizes["expert"] > 1 and "expert" not in axes:
        key = "mesh.experts_over"
        problem = f"{name} divides no experts, because {format_keys(config, key)} does not contain expert"
        fail(config, problem, f"add expert to {key}, or use mesh.data", "mesh.expert", key)
    if model.num_experts % config.expert_shards(sizes):
        larger = [axis for axis in axes if sizes[axis] > 1]
        problem = " x ".join(format_axis(config, sizes, axis) for axis in larger)
        problem += f" does not divide {format_keys(config, 'model.num_experts')}"
        keys = [f"mesh.{axis}" for axis in larger]
        cure = "use sizes whose product is" if len(larger) > 1 else "use"
        usable = divisors(model.num_experts)
        usable = axis_sizes(config, larger[0], usable) if len(larger) == 1 else usable
        fail(config, problem, f"{cure} {listed(usable)}", *keys, "model.num_experts")


def check_local_batch(config: Config, sizes: dict[str, int]) -> None:
    """Raise `ConfigError` if the mesh cannot divide the sequences and tokens of a microbatch."""
    batch, tensor = config.batch, sizes["tensor"]
    axes, shards = [axis for axis in BATCH_AXES if sizes[axis] > 1], config.batch_shards(sizes)
    microbatch = batch.global_size // batch.num_microbatches
    if microbatch % shards:
        names = " x ".join(format_axis(config, sizes, axis) for axis in axes)
        problem = f"{names} does not divide {format_keys(config, 'batch.global_size')}"
        if batch.num_microbatches > 1:
            problem += f" / {format_keys(config, 'batch.num_microbatches')} = {microbatch}"
        multiple = batch.num_microbatches * shards
        cure = f"make batch.global_size a multiple of {multiple}"
        if numbers := microbatch_numbers(config, sizes):
            cure += f", or set batch.num_microbatches to {listed(numbers)}"
        fail(config, problem, cure, "batch.global_size", "batch.num_microbatches", *(f"mesh.{a}" for a in axes))
    context = sizes["context"]
    tokens = microbatch // shards * batch.sequence_length // context
    if tokens % tensor:
        had = f"{microbatch // shards} x {format_keys(config, 'batch.sequence_length')}"
        had += f" / {format_axis(config, sizes, 'context')}" if context > 1 else ""
        problem = f"{format_axis(config, sizes, 'tensor')} does not divide the tokens of a microbatch, {had} = {tokens}"
        cure = f"make batch.sequence_length a multiple of {context * math.lcm(tensor, min(context, 2))}"
        fail(config, problem, cure, "mesh.tensor", "batch.sequence_length")


def check_context(config: Config, sizes: dict[str, int]) -> None:
    """Each device has two chunks of every sequence, and with some strategies a part of the heads."""
    context, model = sizes["context"], config.model
    if context == 1:
        return
    name, length = format_axis(config, sizes, "context"), "batch.sequence_length"
    if config.batch.sequence_length % (2 * context):
        problem = f"{name} cuts a sequence into {2 * context} chunks, which do not divide {format_keys(config, length)}"
        fail(config, problem, f"make {length} a multiple of {2 * context}", "mesh.context", length)
    _check_windows(config, sizes)
    if config.context_strategy(sizes).in_groups:
        _check_groups(config, context, name)
    heads = model.num_heads // sizes["tensor"]
    if heads % config.context_strategy(sizes).head_shards(context):
        had = format_keys(config, "model.num_heads")
        if sizes["tensor"] > 1:
            had += f" / {format_axis(config, sizes, 'tensor')} = {heads}"
        problem = (
            f"{format_keys(config, 'communication.context')} divides the heads over {name}, which does not divide {had}"
        )
        alternatives = listed(with_whole_heads())
        sizes_that_do = listed(axis_sizes(config, "context", divisors(heads)))
        cure = f"use communication.context={alternatives}, or mesh.context={sizes_that_do}"
        fail(config, problem, cure, "communication.context", "mesh.context", "model.num_heads")


def _check_groups(config: Config, context: int, name: str) -> None:
    """Groups of devices are for separate documents, and for the tokens of the model alone."""
    key, model, others = "communication.context", config.model, "use communication.context=auto"
    setting = format_keys(config, key)
    if context & (context - 1):
        cure = f"set mesh.context to {1 << context.bit_length() - 1}, or {others}"
        fail(config, f"{setting} halves groups of devices, and {name} is no power of 2", cure, "mesh.context", key)
    if not config.data.reset_attention:
        problem = f"{setting} divides documents among groups of devices, and data.reset_attention=false joins them"
        fail(config, problem, f"set data.reset_attention=true, or {others}", key, "data.reset_attention")
    tower, encoder = model.vision is not None, model.encoder.kind != NO_ENCODER
    for has, part, its in ((encoder, "an encoder", ENCODER_KIND), (tower, "a vision tower", "model.vision")):
        if has:
            problem = f"{setting} puts a row's documents into another order, which the rows of {part} do not follow"
            fail(config, problem, others, key, its)


def _check_windows(config: Config, sizes: dict[str, int]) -> None:
    """A device needs the tokens before its own that a short convolution sees from one other device."""
    context = sizes["context"]
    tokens = config.batch.sequence_length // context
    for key in (heads.key("conv_kernel") for heads in recurrent_heads(config.model)):
        before = value(config, key) - 1
        if tokens < before:
            problem = (
                f"{format_axis(config, sizes, 'context')} leaves {counted(tokens, 'token')} of a sequence on a device, "
            )
            problem += f"fewer than the {before} before a token that {format_keys(config, key)} needs"
            cure = f"make batch.sequence_length {context * before} or more"
            fail(config, problem, cure, "mesh.context", key, "batch.sequence_length")


def check_fp8_shapes(config: Config, sizes: dict[str, int]) -> None:
    """A recipe may need multiples in every dimension of a matmul: cuBLAS of 16 in FP8, formats in blocks of a block."""
    chosen = config.precision.fp8.chosen
    if chosen.multiple == 1:
        return
    model, batch, tensor = config.model, config.batch, sizes["tensor"]
    shards = config.batch_shards(sizes)
    tokens = batch.global_size // batch.num_microbatches // shards * batch.sequence_length // sizes["context"]
    recipe, mesh = "precision.fp8.recipe", format_axis(config, sizes, "tensor")
    widths = {
        format_keys(config, "model.hidden_size"): model.hidden_size,
        **_attention_widths(config, tensor, mesh),
        **_recurrent_widths(config, tensor, mesh),
        f"the tokens of a microbatch on one device / {mesh}": tokens // tensor,
    }
    if extra_of(model) and sizes["pipeline"] > 1:  # the stages share the tokens of these layers
        stages = format_axis(config, sizes, "pipeline")
        widths[f"the tokens of a microbatch on one device / {mesh} / {stages}"] = tokens // tensor // sizes["pipeline"]
    for key in mlp_widths(model):
        whole = key == "expert_ffn_hidden_size" and "tensor" in config.mesh.experts_over
        shape = format_keys(config, f"model.{key}")
        widths[shape if whole else f"{shape} / {mesh}"] = getattr(model, key) // (1 if whole else tensor)
    for shape, width in widths.items():
        if width % chosen.multiple:
            found = "is not one" if shape.endswith(f"={width}") else f"is {width}"
            problem = f"{format_keys(config, recipe)} needs multiples of {chosen.multiple}, but {shape} {found}"
            fail(config, problem, f"change it, or set {recipe}=none", recipe)
    if chosen.in_blocks and not chosen.has_hopper_kernels:
        return
    gated = 1 + is_gated(model)
    attention = model.num_heads * model.head_dim + model.num_kv_heads * (model.head_dim + model.value_dim)
    # The kernels of experts do not have this limit.
    mlp = max([0, *(getattr(model, key) for key in mlp_widths(model) if key != "expert_ffn_hidden_size")])
    widest = max(gated * mlp, attention) // tensor
    if tokens * widest >= 2**31:
        problem = f"{format_keys(config, recipe)} can quantise fewer than 2^31 numbers at once, but a microbatch"
        problem += f" on one device has {tokens} tokens of {widest} numbers"
        fail(config, problem, "raise batch.num_microbatches", recipe)


def _recurrent_widths(config: Config, tensor: int, mesh: str) -> dict[str, int]:
    """The widths of the matmuls of sublayers with a state on one device, by the settings that they follow from."""
    return {
        f"{format_keys(config, heads.key(count))} x {format_keys(config, heads.key(width))} / {mesh}": (
            value(config, heads.key(count)) * value(config, heads.key(width)) // tensor
        )
        for heads in recurrent_heads(config.model)
        for count, width in heads.widths
    }


def _attention_widths(config: Config, tensor: int, mesh: str) -> dict[str, int]:
    """The widths of attention's matmuls on one device, by the settings that they follow from."""
    model, heads = config.model, format_keys(config, "model.num_heads")
    if not model.is_latent:
        width, kv_heads = format_keys(config, "model.head_dim"), format_keys(config, "model.num_kv_heads")
        return {
            f"{heads} x {width} / {mesh}": model.num_heads * model.head_dim // tensor,
            f"{kv_heads} x {width} / {mesh}": max(model.num_kv_heads // tensor, 1) * model.head_dim,
        }
    latents = [f"model.{name}" for name in ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim")]
    parts = [f"model.{name}" for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    widths = {format_keys(config, key): value(config, key) or 0 for key in latents}
    return widths | {
        f"{heads} x {format_keys(config, key)} / {mesh}": model.num_heads * value(config, key) // tensor
        for key in parts
    }


def read_mesh(text: str, setting: str, rest: bool = False) -> dict[str, int]:
    """The sizes of the axes in `text`, such as tensor=4; with `rest` a size may be -1. ConfigError names `setting`."""
    sizes: dict[str, int] = {}
    for entry in text.split(",") if text else ():
        axis, _, size = (part.strip() for part in entry.partition("="))
        given = f"{setting}={shown(text)}"
        if axis not in AXES:
            other = counterpart(axis)
            meant = other.ours.removeprefix("mesh.") if other else ""
            cure = f"did you mean {meant}?" if meant in AXES else f"the axes are {', '.join(AXES)}."
            raise ConfigError(f"{given}: {shown(axis)} is no axis of a mesh: {cure}")
        if not (rest and size == "-1" or is_number(size) and int(size) > 0):
            raise ConfigError(f"{given}: {shown(entry)} is no axis with a size: write tensor=2,fsdp=2, for example.")
        if axis in sizes:
            raise ConfigError(f"{given} has {axis} twice: leave one of them out.")
        sizes[axis] = int(size)
    return sizes
