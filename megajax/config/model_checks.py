"""Checks of the section `model` (heads, rotary positions, patterns of layers) and of low-rank adapters."""

from megajax.config.sentences import divisors, fail, format_keys, listed, value
from megajax.errors import counted
from megajax.schema.config import Config


def check_model(config: Config) -> None:
    """Raise `ConfigError` for combinations of model settings that can run on no mesh."""
    _check_latent(config)
    _check_heads(config)
    _check_rope(config)
    _check_relative(config)
    _check_layers(config)


def _check_latent(config: Config) -> None:
    """Latent attention (DeepSeek-V2) has its own widths."""
    model, parts = config.model, ("model.qk_nope_head_dim", "model.qk_rope_head_dim")
    if not model.is_latent:
        return
    if model.head_dim != sum(value(config, key) for key in parts):
        problem = f"{format_keys(config, 'model.head_dim')} is not the sum of {format_keys(config, *parts)}"
        fail(config, problem, "remove model.head_dim", "model.head_dim", *parts)
    if model.position == "rope" and value(config, parts[1]) % 2:
        problem = f"{format_keys(config, parts[1])} is odd, but pairs of dimensions are rotated"
        fail(config, problem, "make it even", parts[1])
    if model.num_kv_heads != model.num_heads:
        latent, heads = "model.kv_lora_rank", "model.num_kv_heads"
        problem = f"{format_keys(config, latent)} cannot be combined with {format_keys(config, heads)}"
        fail(config, problem, f"remove {heads}: each head has its own keys", latent, heads)


def _check_heads(config: Config) -> None:
    model = config.model
    computed = "head_dim" not in model.model_fields_set and not model.is_latent
    if computed and model.hidden_size % model.num_heads:
        problem = f"{format_keys(config, 'model.num_heads')} does not divide {format_keys(config, 'model.hidden_size')}"
        fail(config, problem, "change one of them, or set model.head_dim", "model.num_heads")
    if model.num_heads % model.num_kv_heads:
        problem = (
            f"{format_keys(config, 'model.num_kv_heads')} does not divide {format_keys(config, 'model.num_heads')}"
        )
        tensor = max(1, config.mesh.tensor)
        usable = [n for n in divisors(model.num_heads) if n % tensor == 0 or tensor % n == 0]
        cure = f"use {listed(usable)}, or change model.num_heads"
        fail(config, problem, cure, "model.num_kv_heads", "model.num_heads")


def _check_rope(config: Config) -> None:
    model = config.model
    if model.position != "rope":
        return
    rotated = model.rope_fraction * model.rotary_dim
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
    if scaling and kind == "longrope":
        for key in ("short_factors", "long_factors"):
            found, name = getattr(scaling, key) or (), f"model.rope_scaling.{key}"
            if len(found) != whole // 2:
                needs = counted(whole // 2, "number")
                problem = f"model.rope_scaling.kind=longrope needs {needs} in {name}, not {len(found)}"
                fail(config, problem, "give one for each rotated pair", name, "model.rope_scaling.kind")
    least = {"yarn": "model.rope_theta", "dynamic": "model.rope_fraction"}
    if (kind == "yarn" and model.rope_theta <= 1) or (kind == "dynamic" and whole == 2):
        problem = f"model.rope_scaling.kind={kind} cannot be combined with {format_keys(config, least[kind])}"
        cure = "use more than 1" if kind == "yarn" else "rotate 4 or more dimensions of each head"
        fail(config, problem, cure, "model.rope_scaling.kind", least[kind])


def _check_relative(config: Config) -> None:
    """The buckets of distances of model.position=relative: of T5, a quarter of them one distance each."""
    model, keys = config.model, ("model.relative_buckets", "model.relative_max_distance")
    if model.position == "relative" and model.relative_max_distance <= model.relative_buckets // 2:
        cure = "use a distance above half of the number of buckets"
        fail(config, f"{format_keys(config, *keys)} are no buckets of distances", cure, *reversed(keys))


def _check_layers(config: Config) -> None:
    model = config.model
    for name in ("layer_pattern", "rope_pattern"):
        pattern, keys = getattr(model, name), (f"model.{name}", "model.num_layers")
        if pattern is not None and len(pattern) > model.num_layers:
            problem = f"{format_keys(config, keys[0])} has {counted(len(pattern), 'entry')}, more than"
            fail(config, f"{problem} {format_keys(config, keys[1])}", "shorten the pattern", *keys)


def check_lora(config: Config) -> None:
    """Raise `ConfigError` for a router that changes. `model.lora.targets` checks the targets."""
    rank = "lora.rank"
    if config.lora.rank is None:
        return
    router = config.model.router
    if router.expert_bias and router.bias_update_rate > 0:
        rate = "model.router.bias_update_rate"
        problem = f"{format_keys(config, rank)} freezes the routers, but {format_keys(config, rate)} changes their bias"
        fail(config, problem, f"set {rate}=0", rank, rate)
