"""Rotary positions in config.json: transformers' older layout (`rope_theta`, `rope_scaling`) and its newer one."""

from typing import Any

from megajax.config import ModelConfig
from megajax.hf.defaults import Json
from megajax.schema.layer_sections import RopeScaling

# Keys of config.json and of `model.rope_scaling`; a kind has those that it reads.
SCALING = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_positions",
    **{name: name for name in ("low_freq_factor", "high_freq_factor")},
    **{name: name for name in ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")},
    **{f"{name}_factor": f"{name}_factors" for name in ("short", "long")},
}
KINDS = ("linear", "dynamic", "llama3", "yarn", "longrope")


def read_rope(config: Json) -> Json:
    """config.json's rotary positions → keys of the section `model`; ValueError for a kind that megajax lacks."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}  # if both, transformers takes the first
    model: Json = {"rope_theta": rope.get("rope_theta") or config["rope_theta"]}
    fraction = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    if fraction not in (None, 1):
        model["rope_fraction"] = fraction
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # its older name
    if kind == "default":
        return model
    if kind not in KINDS:
        raise ValueError(f"rope_type={kind} is not default, {', '.join(KINDS)}")
    given = {name: rope[name] for name in SCALING if rope.get(name) is not None}
    given = {name: number for name, number in given.items() if number or not name.startswith("mscale")}  # 0: unset
    name, longest = "original_max_position_embeddings", config["max_position_embeddings"]
    given[name] = longest if kind == "dynamic" else config.get(name) or given.get(name) or longest
    if kind in ("yarn", "longrope"):
        original = given["original_max_position_embeddings"]
        given["factor"] = given.get("factor") or config.get("max_position_embeddings", original) / original
    used = {theirs: ours for theirs, ours in SCALING.items() if ours not in unused(kind)}
    return model | {"rope_scaling": {"kind": kind} | {used[name]: given[name] for name in given if name in used}}


def unused(kind: Any) -> tuple[str, ...]:
    """The keys of `model.rope_scaling` that a kind does not read."""
    return RopeScaling(kind=kind, factor=1).unused


def write_rope(model: ModelConfig, partial: bool) -> Json:
    """The section `model` → rotary positions for config.json, in both layouts; `partial` heads if the family has them.

    The limit of dynamic scaling is `max_position_embeddings`.
    """
    scaling = model.rope_scaling
    rope: Json = {"rope_type": scaling.kind if scaling else "default", "rope_theta": model.rope_theta}
    out: Json = {}
    if partial:
        out["partial_rotary_factor"] = rope["partial_rotary_factor"] = model.rope_fraction
    if scaling:
        values = {theirs: getattr(scaling, ours) for theirs, ours in SCALING.items() if ours not in scaling.unused}
        if scaling.kind == "dynamic":
            out["max_position_embeddings"] = values.pop("original_max_position_embeddings")
        if scaling.kind == "longrope":  # Phi-3 has these beside it, and its factor is their ratio
            out["original_max_position_embeddings"] = scaling.original_max_positions
            out["max_position_embeddings"] = round(values.pop("factor") * scaling.original_max_positions)
        rope |= {n: [*v] if isinstance(v, tuple) else v for n, v in values.items() if v is not None}
    # The first two are transformers' older layout, which other programs read; the last is the newer one.
    return out | {"rope_theta": model.rope_theta, "rope_scaling": rope if scaling else None, "rope_parameters": rope}
