"""Checks of the section `model` (heads, rotary positions, patterns of layers) and of low-rank adapters."""

from megajax.config.sentences import counted, divisors, fail, format_keys, listed, value
from megajax.layout.recurrent import recurrent_heads
from megajax.schema.config import Config


def check_model(config: Config) -> None:
    """Raise `ConfigError` for combinations of model settings that can run on no mesh."""
    _check_latent(config)
    _check_qk_clip(config)
    _check_width(config)
    _check_heads(config)
    _check_recurrent(config)
    _check_rope(config)
    _check_layers(config)


def _check_latent(config: Config) -> None:
    """Latent attention (DeepSeek-V2) has its own widths, and one kind of positions, norms and biases."""
    model, latent = config.model, "model.kv_lora_rank"
    if not model.is_latent:
        return
    for name, published in (("qk_nope_head_dim", 128), ("qk_rope_head_dim", 64), ("v_head_dim", 128)):
        if getattr(model, name) is None:
            fail(
                config, f"{format_keys(config, latent)} needs model.{name}", f"set it; DeepSeek has {published}", latent
            )
    parts = ("model.qk_nope_head_dim", "model.qk_rope_head_dim")
    if model.head_dim != sum(value(config, key) for key in parts):
        problem = f"{format_keys(config, 'model.head_dim')} is not the sum of {format_keys(config, *parts)}"
        fail(config, problem, "remove model.head_dim", "model.head_dim", *parts)
    if model.position == "rope" and value(config, parts[1]) % 2:
        problem = f"{format_keys(config, parts[1])} is odd, but pairs of dimensions are rotated"
        fail(config, problem, "make it even", parts[1])
    plain = {
        "model.num_kv_heads": (model.num_kv_heads == model.num_heads, "remove it: each head has its own keys"),
        "model.position": (model.position != "learned", "use rope, or none as in Kimi Linear"),
        "model.rope_fraction": (model.rope_fraction == 1, "set model.qk_rope_head_dim instead"),
        "model.qk_norm": (not model.qk_norm, "remove it: the latents are normalised"),
        "model.attention_sinks": (not model.attention_sinks, "remove it"),
        "model.attention_bias": (not model.attention_bias, "remove it"),
        "model.attention_gate": (not model.attention_gate, "remove it"),
    }
    for key in (key for key, (fits, _) in plain.items() if not fits):
        problem = f"{format_keys(config, latent)} (latent attention) cannot be combined with {format_keys(config, key)}"
        fail(config, problem, plain[key][1], latent, key)


def _check_qk_clip(config: Config) -> None:
    model, key = config.model, "model.qk_clip"
    if model.qk_clip is None:
        return
    others = {
        "model.qk_norm": (bool(model.qk_norm), "normalised queries and keys undo it, and bound the scores themselves"),
        "model.attention_softcap": (model.attention_softcap is not None, "the soft-cap bounds the scores itself"),
        "lora.rank": (bool(config.lora.rank), "the weights of queries and keys are frozen"),
    }
    for other in (other for other, (found, _) in others.items() if found):
        problem = f"{format_keys(config, key)} cannot be combined with {format_keys(config, other)}"
        fail(config, problem, f"remove one of them: {others[other][1]}", key, other)


def _check_width(config: Config) -> None:
    """µP: what its table does not have."""
    key, optimizer = "model.mup_base_width", config.optimizer.chosen
    if config.model.mup_base_width is None:
        return
    others = {
        "model.tie_embeddings": (config.model.tie_embeddings, "embeddings and head are scaled in another way"),
        "optimizer.kind": (not optimizer.scales_with_width, "the rates are those of AdamW, Lion and Muon"),
        "lora.rank": (bool(config.lora.rank), "the rates are those of training all weights"),
    }
    for other in (other for other, (found, _) in others.items() if found):
        problem = f"{format_keys(config, key)} cannot be combined with {format_keys(config, other)}"
        fail(config, problem, f"change one of them: {others[other][1]}", key, other)


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


def _check_recurrent(config: Config) -> None:
    for heads in recurrent_heads(config.model):
        keys = heads.key(heads.shared), heads.key(heads.heads)
        shared, count = (value(config, key) for key in keys)
        if count % shared:
            problem = f"{format_keys(config, keys[0])} does not divide {format_keys(config, keys[1])}"
            fail(config, problem, f"use {listed(divisors(count))}, or change {keys[1]}", *keys)


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
    if kind == "llama3":
        _check_limits(config, "low_freq_factor", "high_freq_factor", "use 1.0 and 4.0 as Llama 3.1 does")
    if kind == "yarn":
        _check_limits(config, "beta_slow", "beta_fast", "use 1.0 and 32.0, the defaults", may_be_equal=True)
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


def _check_limits(config: Config, lower: str, upper: str, cure: str, may_be_equal: bool = False) -> None:
    """The key `lower` of `model.rope_scaling` must be below `upper`."""
    low, high = (f"model.rope_scaling.{name}" for name in (lower, upper))
    if value(config, low) > value(config, high) or (value(config, low) == value(config, high) and not may_be_equal):
        problem = (
            f"{format_keys(config, low)} is {'above' if may_be_equal else 'not below'} {format_keys(config, high)}"
        )
        fail(config, problem, cure, low, high)


def _check_layers(config: Config) -> None:
    model = config.model
    for name in ("layer_pattern", "rope_pattern"):
        pattern, keys = getattr(model, name), (f"model.{name}", "model.num_layers")
        if pattern is not None and "local" in pattern and model.sliding_window is None:
            problem = f"{format_keys(config, keys[0])} has local layers without a window"
            fail(config, problem, "set model.sliding_window", keys[0])
        if pattern is not None and len(pattern) > model.num_layers:
            problem = f"{format_keys(config, keys[0])} has {counted(len(pattern), 'entry')}, more than"
            fail(config, f"{problem} {format_keys(config, keys[1])}", "shorten the pattern", *keys)


def check_lora(config: Config) -> None:
    """Raise `ConfigError` for settings that `lora.rank` excludes. `model.lora.targets` checks the targets."""
    rank, base = "lora.rank", "checkpoint.init_from"
    if config.lora.rank is None:
        return
    if config.checkpoint.init_from is None:
        problem = f"{format_keys(config, rank)} freezes the weights of a trained model, but {base} names none"
        fail(config, problem, f"set {base} to a run or to a Hugging Face folder", rank)
    if config.checkpoint.init_state != "weights":
        state = "checkpoint.init_state"
        problem = (
            f"{format_keys(config, rank)} trains new adapters, but {format_keys(config, state)} goes on with the base"
        )
        fail(config, problem, f"set {state}=weights", rank, state)
    if config.precision.fp8.chosen.is_on:
        recipe = "precision.fp8.recipe"
        problem = f"{format_keys(config, rank)} cannot be combined with {format_keys(config, recipe)}"
        fail(config, problem, f"set {recipe}=none", rank, recipe)
    if config.model.mtp_layers:
        modules = "model.mtp_layers"
        problem = f"{format_keys(config, rank)} trains adapters of the model's layers only, but"
        problem += f" {format_keys(config, modules)} adds prediction modules"
        fail(config, problem, f"set {modules}=0; the base may have modules", rank, modules)
    router = config.model.router
    if router.expert_bias and router.bias_update_rate > 0:
        rate = "model.router.bias_update_rate"
        problem = f"{format_keys(config, rank)} freezes the routers, but {format_keys(config, rate)} changes their bias"
        fail(config, problem, f"set {rate}=0", rank, rate)
