"""What goes together: combinations of settings, and what a mesh must divide."""

import functools
import math
import warnings
from pathlib import Path
from typing import Any

from megajax.config.schema import AXES, Config
from megajax.config.tree import show
from megajax.errors import ConfigError

UNAVAILABLE_AXES = ("pipeline", "expert", "context")


def check(config: Config) -> None:
    """Refuse combinations that can run on no mesh (`ConfigError`); warn about settings without effect."""
    _check_axes(config, _sizes(config))
    _check_heads(config)
    _check_layers(config)
    _check_batch(config)
    _check_remat(config)
    _check_attention_kernel(config)
    _check_fp8_layers(config)
    _check_schedule(config)
    _check_data(config)
    _check_run_dir(config)
    _warn_without_effect(config)
    _warn_about_kept_checkpoints(config)


def check_mesh(config: Config, num_devices: int) -> dict[str, int]:
    """Sizes in axis order with -1 filled in; refuses what the mesh does not divide (`ConfigError`)."""
    _check_axes(config, _sizes(config))
    _check_batch(config)
    sizes = _fill(config, num_devices)
    _check_axes(config, sizes)
    _check_local_batch(config, sizes)
    _check_fp8_shapes(config, sizes)
    return sizes


def _value(config: Config, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), config)


def _said(config: Config, *keys: str) -> str:
    """`key=value`, several joined by "and"."""
    return " and ".join(f"{key}={show(_value(config, key))}" for key in keys)


def _refuse(config: Config, problem: str, cure: str, *keys: str) -> None:
    """Raise `problem (place): cure.` with the place of the first of `keys` that someone set."""
    raise ConfigError(f"{problem} ({_place(config, *keys)}): {cure}.")


def _warn(config: Config, problem: str, cure: str, *keys: str) -> None:
    """Warn with a sentence like `_refuse`'s; for a `_warn_...` function that `check` calls for `load_config`."""
    warnings.warn(f"{problem} ({_place(config, *keys)}): {cure}.", stacklevel=5)


def _place(config: Config, *keys: str) -> str:
    places = [config.where(key) for key in keys]
    return next((place for place in places if place != "default"), "default")


def _listed(numbers: list[int]) -> str:
    """At most 12 numbers: "1, 2 or 4"."""
    shown = [str(number) for number in numbers[:12]]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


# Mesh sizes


def _sizes(config: Config) -> dict[str, int]:
    """Sizes as far as they are known without the devices: 1 for the axis to fill up."""
    fills = [f"mesh.{axis}" for axis in AXES if getattr(config.mesh, axis) == -1]
    if len(fills) > 1:
        problem = f"{_said(config, *fills)} cannot both fill up the mesh"
        _refuse(config, problem, "leave -1 on one axis", *fills)
    return {axis: max(1, getattr(config.mesh, axis)) for axis in AXES}


def _fill(config: Config, num_devices: int) -> dict[str, int]:
    sizes = _sizes(config)
    larger = [f"mesh.{axis}" for axis in AXES if sizes[axis] > 1]
    product = math.prod(sizes.values())
    said = " x ".join(_said(config, key) for key in larger) or "a mesh of one device"
    free = [axis for axis in AXES if getattr(config.mesh, axis) == -1]
    if free and num_devices % product:
        cure = f"use sizes whose product is {_listed(_divisors(num_devices))}"
        _refuse(config, f"{said} does not divide {num_devices} devices", cure, *larger)
    if free:
        return sizes | {free[0]: num_devices // product}
    if product != num_devices:
        problem = f"{said} takes {product} of {num_devices} devices"
        cure = f"make the product {num_devices}, or set one axis to -1, such as mesh.data=-1"
        _refuse(config, problem, cure, *larger)
    return sizes


def _axis(config: Config, sizes: dict[str, int], axis: str) -> str:
    """`mesh.axis=size`, saying where the size was filled in."""
    return f"mesh.{axis}={sizes[axis]}" + (" (filled up)" if getattr(config.mesh, axis) == -1 else "")


# What the mesh must divide


def _check_axes(config: Config, sizes: dict[str, int]) -> None:
    for axis in UNAVAILABLE_AXES:
        if sizes[axis] > 1:
            problem = f"{_axis(config, sizes, axis)} is not available yet"
            _refuse(config, problem, "set it to 1", f"mesh.{axis}")
    model, tensor = config.model, sizes["tensor"]
    name = _axis(config, sizes, "tensor")
    kv_heads, vocab = model.num_kv_heads, model.padded_vocab_size
    for key in ("model.num_heads", "model.ffn_hidden_size"):
        if _value(config, key) % tensor:
            usable = _divisors(math.gcd(model.num_heads, model.ffn_hidden_size))
            problem = f"{name} does not divide {_said(config, key)}"
            _refuse(config, problem, f"use {_listed(usable)}", "mesh.tensor", key)
    if kv_heads % tensor and tensor % kv_heads:
        key = "model.num_kv_heads"
        problem = f"{name} neither divides {_said(config, key)} nor is a multiple of it"
        usable = [n for n in _divisors(model.num_heads) if kv_heads % n == 0 or n % kv_heads == 0]
        _refuse(config, problem, f"use {_listed(usable)}", "mesh.tensor", key)
    if vocab % tensor:
        padded = f"{vocab} ({_said(config, 'model.vocab_size', 'model.vocab_multiple')})"
        problem = f"{name} does not divide the padded vocabulary of {padded}"
        cure = f"make model.vocab_multiple a multiple of {tensor}"
        _refuse(config, problem, cure, "mesh.tensor", "model.vocab_multiple")


def _check_local_batch(config: Config, sizes: dict[str, int]) -> None:
    batch, tensor = config.batch, sizes["tensor"]
    axes = [axis for axis in ("data", "fsdp", "expert") if sizes[axis] > 1]
    shards = math.prod(sizes[axis] for axis in axes)
    microbatch = batch.global_size // batch.num_microbatches
    if microbatch % shards:
        names = " x ".join(_axis(config, sizes, axis) for axis in axes)
        sequences = f"{_said(config, 'batch.global_size')} / {_said(config, 'batch.num_microbatches')}"
        problem = f"{names} does not divide {sequences} = {microbatch}"
        multiple = batch.num_microbatches * shards
        cure = f"make batch.global_size a multiple of {multiple}"
        if batch.global_size % shards == 0:
            cure += f", or batch.num_microbatches one of {_listed(_divisors(batch.global_size // shards))}"
        _refuse(config, problem, cure, "batch.global_size", "batch.num_microbatches", *(f"mesh.{a}" for a in axes))
    tokens = microbatch // shards * batch.sequence_length
    if tokens % tensor:
        had = f"{microbatch // shards} x {_said(config, 'batch.sequence_length')} = {tokens}"
        problem = f"{_axis(config, sizes, 'tensor')} does not divide the tokens of a microbatch, {had}"
        cure = f"make batch.sequence_length a multiple of {tensor}"
        _refuse(config, problem, cure, "mesh.tensor", "batch.sequence_length")


def _check_fp8_shapes(config: Config, sizes: dict[str, int]) -> None:
    """cuBLAS multiplies in FP8 what is a multiple of 16 in every dimension."""
    if config.precision.fp8.recipe == "none":
        return
    model, batch, tensor = config.model, config.batch, sizes["tensor"]
    shards = math.prod(sizes[axis] for axis in ("data", "fsdp", "expert"))
    tokens = batch.global_size // batch.num_microbatches // shards * batch.sequence_length // sizes["context"]
    recipe, mesh = "precision.fp8.recipe", _axis(config, sizes, "tensor")
    widths = {
        _said(config, "model.hidden_size"): model.hidden_size,
        f"{_said(config, 'model.num_heads')} x {_said(config, 'model.head_dim')} / {mesh}": (
            model.num_heads * model.head_dim // tensor
        ),
        f"{_said(config, 'model.num_kv_heads')} x {_said(config, 'model.head_dim')} / {mesh}": (
            max(model.num_kv_heads // tensor, 1) * model.head_dim
        ),
        f"{_said(config, 'model.ffn_hidden_size')} / {mesh}": model.ffn_hidden_size // tensor,
        f"the tokens of a microbatch on a device / {mesh}": tokens // tensor,
    }
    for said, width in widths.items():
        if width % 16:
            problem = f"{_said(config, recipe)} needs multiples of 16, and {said} is {width}"
            _refuse(config, problem, f"change it, or set {recipe}=none", recipe)
    gated = 2 if model.activation in ("swiglu", "geglu") else 1
    attention = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    widest = max(gated * model.ffn_hidden_size, attention) // tensor
    if tokens * widest >= 2**31:
        problem = f"{_said(config, recipe)} quantises fewer than 2^31 numbers at once, and a microbatch on a device has"
        problem += f" {tokens} tokens of {widest} numbers"
        _refuse(config, problem, "raise batch.num_microbatches", recipe)


# What no mesh can run


def _check_heads(config: Config) -> None:
    model = config.model
    if "head_dim" not in model.model_fields_set and model.hidden_size % model.num_heads:
        problem = f"{_said(config, 'model.num_heads')} does not divide {_said(config, 'model.hidden_size')}"
        _refuse(config, problem, "change one of them, or set model.head_dim", "model.num_heads")
    if model.num_heads % model.num_kv_heads:
        problem = f"{_said(config, 'model.num_kv_heads')} does not divide {_said(config, 'model.num_heads')}"
        cure = f"use {_listed(_divisors(model.num_heads))}"
        _refuse(config, problem, cure, "model.num_kv_heads", "model.num_heads")
    rotated = model.rope_fraction * model.head_dim
    whole = round(rotated)
    if model.position == "rope" and (abs(rotated - whole) > 1e-6 or whole % 2 or whole < 2):
        keys = ("model.rope_fraction", "model.head_dim")
        _refuse(
            config,
            f"{_said(config, *keys)} rotate {rotated:g} numbers a head",
            "make it an even number, 2 or more",
            *keys,
        )
    scaling = model.rope_scaling
    if scaling is not None and scaling.low_freq_factor >= scaling.high_freq_factor:
        low, high = (f"model.rope_scaling.{name}" for name in ("low_freq_factor", "high_freq_factor"))
        problem = f"{low}={scaling.low_freq_factor} is not below {high}={scaling.high_freq_factor}"
        _refuse(config, problem, "use 1.0 and 4.0 as Llama 3.1 does", low, high)


def _check_layers(config: Config) -> None:
    model, pattern = config.model, config.model.layer_pattern
    keys = ("model.layer_pattern", "model.num_layers")
    if pattern is not None and "local" in pattern and model.sliding_window is None:
        problem = f"{_said(config, keys[0])} has local layers without a window"
        _refuse(config, problem, "set model.sliding_window", keys[0])
    if pattern is not None and len(pattern) > model.num_layers:
        problem = f"{_said(config, keys[0])} has {len(pattern)} entries, more than {_said(config, keys[1])}"
        _refuse(config, problem, "shorten the pattern", *keys)
    unroll = config.kernels.scan_unroll
    if unroll is not None and model.num_layers % unroll:
        problem = f"{_said(config, 'kernels.scan_unroll')} does not divide {_said(config, keys[1])}"
        _refuse(config, problem, f"use {_listed(_divisors(model.num_layers))}", "kernels.scan_unroll", keys[1])


def _check_batch(config: Config) -> None:
    batch, model = config.batch, config.model
    if batch.global_size % batch.num_microbatches:
        keys = ("batch.num_microbatches", "batch.global_size")
        problem = f"{_said(config, keys[0])} does not divide {_said(config, keys[1])}"
        _refuse(config, problem, f"use {_listed(_divisors(batch.global_size))}", *keys)
    if model.position == "learned" and batch.sequence_length > (model.max_positions or 0):
        keys = ("batch.sequence_length", "model.max_positions")
        problem = f"{_said(config, keys[0])} is longer than {_said(config, keys[1])}"
        _refuse(config, problem, f"use {model.max_positions} or less, or a longer table", *keys)


def _check_remat(config: Config) -> None:
    remat, depth = config.remat, config.model.num_layers
    if remat.layers is not None and remat.layers > depth:
        problem = f"{_said(config, 'remat.layers')} is more than {_said(config, 'model.num_layers')}"
        _refuse(config, problem, f"use {depth} or less, or null for all", "remat.layers", "model.num_layers")
    if remat.group > 1 and remat.policy != "full":
        problem = f"{_said(config, 'remat.group')} needs remat.policy=full, not {remat.policy}"
        _refuse(config, problem, "set remat.group to 1 or the policy to full", "remat.group", "remat.policy")
    covered = remat.layers or depth
    if covered % remat.group:
        problem = f"{_said(config, 'remat.group')} does not divide the {covered} layers that are recomputed"
        _refuse(config, problem, f"use {_listed(_divisors(covered))}", "remat.group", "remat.layers")


def _check_attention_kernel(config: Config) -> None:
    if config.kernels.attention != "cudnn":
        return
    obstacle = {
        "model.attention_softcap": config.model.attention_softcap is not None,
        "precision.compute": config.precision.compute == "float32",
    }
    for key in (key for key, present in obstacle.items() if present):
        problem = f"kernels.attention=cudnn cannot run with {_said(config, key)}"
        _refuse(config, problem, "use kernels.attention=auto", "kernels.attention", key)


def _check_fp8_layers(config: Config) -> None:
    fp8, depth = config.precision.fp8, config.model.num_layers
    keys = ("precision.fp8.first_bf16_layers", "precision.fp8.last_bf16_layers")
    if fp8.recipe == "none":
        return
    if fp8.first_bf16_layers + fp8.last_bf16_layers >= depth:
        problem = f"{_said(config, *keys)} leave none of {_said(config, 'model.num_layers')} in FP8"
        _refuse(config, problem, "lower them, or set precision.fp8.recipe=none", *keys)
    covered = 0 if config.remat.policy == "none" else config.remat.layers or depth
    for key, edge in zip(keys, (config.fp8_layers.start, config.fp8_layers.stop), strict=True):
        if edge < covered and edge % config.remat.group:
            problem = f"{_said(config, key)} begins or ends FP8 at layer {edge}, inside a group of"
            problem += f" {_said(config, 'remat.group')}"
            _refuse(config, problem, "make that layer a multiple of remat.group, or set remat.group=1", key)


def _check_schedule(config: Config) -> None:
    schedule = config.schedule
    decay = "schedule.decay_steps"
    if schedule.min_learning_rate > schedule.learning_rate:
        keys = ("schedule.min_learning_rate", "schedule.learning_rate")
        problem = f"{_said(config, keys[0])} is above {_said(config, keys[1])}"
        _refuse(config, problem, "lower it", *keys)
    if not _ignores_decay_steps(config) and schedule.warmup_steps > schedule.decay_steps:
        keys = ("schedule.warmup_steps", decay, "run.steps")
        problem = f"{_said(config, keys[0])} is more than {_said(config, decay)}"
        _refuse(config, problem, f"use {schedule.decay_steps} or less", *keys)
    tail = schedule.wsd_decay_steps or 0
    if schedule.kind == "wsd" and schedule.warmup_steps + tail > schedule.decay_steps:
        keys = ("schedule.wsd_decay_steps", "schedule.warmup_steps", decay)
        problem = f"{_said(config, *keys[:2])} do not fit into {_said(config, decay)}"
        _refuse(config, problem, "shorten one of them", *keys)


def _ignores_decay_steps(config: Config) -> bool:
    """Whether the learning rate after the warm-up takes no notice of `schedule.decay_steps`."""
    return config.schedule.kind in ("constant", "inverse_sqrt")


def _check_data(config: Config) -> None:
    data = config.data
    if data.kind == "synthetic":
        return
    if data.train is None:
        cure = "set data.train to the prefix of a .bin/.idx pair, or data.kind=synthetic to try without data"
        _refuse(config, "data.kind=indexed needs data.train", cure, "data.kind")
    for key in ("data.valid", "data.test"):
        if data.split is not None and _value(config, key) is not None:
            problem = f"{_said(config, 'data.split')} does not go together with {_said(config, key)}"
            _refuse(config, problem, "unset one of them", "data.split", key)


def _check_run_dir(config: Config) -> None:
    """XLA gets the absolute path in a flag."""
    path = str(Path(config.run.dir).resolve())
    if config.run.deterministic and any(character.isspace() for character in path):
        problem = f"{_said(config, 'run.deterministic')} hands a file in {_said(config, 'run.dir')} to XLA"
        problem += f", whose flags are separated by blanks, and there is one in {path}"
        _refuse(config, problem, "choose a run.dir without blanks", "run.dir", "run.deterministic")


# Settings without effect


def _warn_without_effect(config: Config) -> None:
    """One warning for each key that someone set to another value than its default although nothing reads it."""
    model, schedule, data, logging = config.model, config.schedule, config.data, config.logging
    fp8 = config.precision.fp8
    indexed = data.kind == "indexed"
    no_valid_share = data.split is not None and float(data.split.split(",")[1]) == 0
    rules = [
        (
            model.position != "rope",
            "model.position",
            ("model.rope_theta", "model.rope_scaling", "model.rope_fraction"),
        ),
        (model.position != "learned", "model.position", ("model.max_positions",)),
        ("local" not in (model.layer_pattern or ["local"]), "model.layer_pattern", ("model.sliding_window",)),
        (schedule.kind != "wsd", "schedule.kind", ("schedule.wsd_decay_steps",)),
        (schedule.kind == "constant", "schedule.kind", ("schedule.min_learning_rate",)),
        (_ignores_decay_steps(config), "schedule.kind", ("schedule.decay_steps",)),
        (config.optimizer.kind == "sgd", "optimizer.kind", ("optimizer.beta2", "optimizer.epsilon")),
        (config.optimizer.kind == "lion", "optimizer.kind", ("optimizer.epsilon",)),
        (config.remat.policy == "none", "remat.policy", ("remat.layers",)),
        (indexed and data.valid is None and data.split is None, "data.valid", ("run.eval_interval",)),
        (indexed and no_valid_share, "data.split", ("run.eval_interval",)),
        (config.run.eval_steps == 0, "run.eval_steps", ("run.eval_interval",)),
        (not logging.wandb, "logging.wandb", ("logging.wandb_project",)),
        (logging.profile_start is None, "logging.profile_start", ("logging.profile_steps",)),
        (
            fp8.recipe == "none",
            "precision.fp8.recipe",
            tuple(f"precision.fp8.{name}" for name in type(fp8).model_fields if name != "recipe"),
        ),
        (
            fp8.recipe == "current",
            "precision.fp8.recipe",
            tuple(f"precision.fp8.{name}" for name in ("amax_history_length", "amax_algorithm", "margin")),
        ),
        ((logging.profile_start or 0) > config.run.steps, "run.steps", ("logging.profile_start",)),
    ]
    for applies, reason, keys in rules:
        for key in keys if applies else ():
            if config.where(key) != "default" and _value(config, key) != _default(config, key):
                _warn(config, f"{_said(config, key)} has no effect with {_said(config, reason)}", "remove it", key)


def _warn_about_kept_checkpoints(config: Config) -> None:
    interval, kept = config.run.checkpoint_interval, config.checkpoint.keep_every
    if interval and kept and kept % interval:
        keys = ("checkpoint.keep_every", "run.checkpoint_interval")
        problem = f"{_said(config, keys[0])} is no multiple of {_said(config, keys[1])}"
        problem += f", so only steps that are a multiple of {math.lcm(interval, kept)} are both saved and kept"
        _warn(config, problem, f"use a multiple of {interval}", *keys)


def _default(config: Config, key: str) -> Any:
    if key == "schedule.decay_steps":
        return max(config.run.steps, config.schedule.warmup_steps + 1)
    section, name = key.rsplit(".", 1)
    return type(_value(config, section)).model_fields[name].default
