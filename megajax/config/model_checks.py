"""Checks of the section `model`: heads, rotary positions and patterns of layers."""

from megajax.config.schema import Config
from megajax.config.sentences import divisors, fail, format_keys, listed, value


def check_model(config: Config) -> None:
    """Raise `ConfigError` for combinations of model settings that can run on no mesh."""
    _check_heads(config)
    _check_rope(config)
    _check_layers(config)


def _check_heads(config: Config) -> None:
    model = config.model
    if "head_dim" not in model.model_fields_set and model.hidden_size % model.num_heads:
        problem = f"{format_keys(config, 'model.num_heads')} does not divide {format_keys(config, 'model.hidden_size')}"
        fail(config, problem, "change one of them, or set model.head_dim", "model.num_heads")
    if model.num_heads % model.num_kv_heads:
        problem = (
            f"{format_keys(config, 'model.num_kv_heads')} does not divide {format_keys(config, 'model.num_heads')}"
        )
        cure = f"use {listed(divisors(model.num_heads))}"
        fail(config, problem, cure, "model.num_kv_heads", "model.num_heads")


def _check_rope(config: Config) -> None:
    model = config.model
    if model.position != "rope":
        return
    rotated = model.rope_fraction * model.head_dim
    whole = round(rotated)
    if abs(rotated - whole) > 1e-6 or whole % 2 or whole < 2:
        keys = ("model.rope_fraction", "model.head_dim")
        fail(
            config,
            f"{format_keys(config, *keys)} rotate {rotated:g} dimensions of each head",
            "make this an even number, 2 or more",
            *keys,
        )
    scaling = model.rope_scaling
    kind = scaling.kind if scaling else None
    if kind == "llama3":
        _check_limits(config, "low_freq_factor", "high_freq_factor", "use 1.0 and 4.0 as Llama 3.1 does")
    if kind == "yarn":
        _check_limits(config, "beta_slow", "beta_fast", "use 1.0 and 32.0, the defaults")
    if scaling and kind == "longrope":
        for key in ("short_factors", "long_factors"):
            found, name = getattr(scaling, key) or (), f"model.rope_scaling.{key}"
            if len(found) != whole // 2:
                problem = f"model.rope_scaling.kind=longrope needs {whole // 2} numbers in {name}, not {len(found)}"
                fail(config, problem, "give one for each rotated pair", name, "model.rope_scaling.kind")
    least = {"yarn": "model.rope_theta", "dynamic": "model.rope_fraction"}
    if (kind == "yarn" and model.rope_theta <= 1) or (kind == "dynamic" and whole == 2):
        problem = f"model.rope_scaling.kind={kind} cannot be combined with {format_keys(config, least[kind])}"
        cure = "use more than 1" if kind == "yarn" else "rotate 4 or more dimensions of each head"
        fail(config, problem, cure, "model.rope_scaling.kind", least[kind])


def _check_limits(config: Config, lower: str, upper: str, cure: str) -> None:
    """The key `lower` of `model.rope_scaling` must be below `upper`."""
    low, high = (f"model.rope_scaling.{name}" for name in (lower, upper))
    if value(config, low) >= value(config, high):
        fail(config, f"{format_keys(config, low)} is not below {format_keys(config, high)}", cure, low, high)


def _check_layers(config: Config) -> None:
    model = config.model
    for name in ("layer_pattern", "rope_pattern"):
        pattern, keys = getattr(model, name), (f"model.{name}", "model.num_layers")
        if pattern is not None and "local" in pattern and model.sliding_window is None:
            problem = f"{format_keys(config, keys[0])} has local layers without a window"
            fail(config, problem, "set model.sliding_window", keys[0])
        if pattern is not None and len(pattern) > model.num_layers:
            problem = f"{format_keys(config, keys[0])} has {len(pattern)} entries, more than"
            fail(config, f"{problem} {format_keys(config, keys[1])}", "shorten the pattern", *keys)
