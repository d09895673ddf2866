"""A small config with the structure and the options of a large one, whose sizes the given meshes divide."""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from megajax.config import AXES, Config, ModelConfig
from megajax.config.checks import check
from megajax.errors import ConfigError
from megajax.layout.kinds import extra_layers
from megajax.options.fp8_recipes import NONE
from megajax.options.optimizers import EPSILON
from megajax.options.registered import MASKED_TOKENS
from megajax.schema.model import LAYERS
from megajax.schema.vision import VisionConfig

VOCABULARY, WIDTH, TOKENS, WINDOW, INIT_STD, LEARNING_RATE, LARGE_EPSILON = 250, 64, 32, 8, 0.1, 1e-3, 3e-3
FP8_MULTIPLE = 16  # of the widths of matmuls on a device, for every recipe; some need more
Sizes = Mapping[str, int]
Precision = Literal[
    "float32", "bfloat16", "fp8"
]  # of fp8 the linear layers, with the config's recipe; the rest is FP32


def shrink(
    config: Config, meshes: Sequence[Sizes], steps: int, precision: Precision = "float32"
) -> tuple[Config, list[str]]:
    """(small config on one device, a line `key: from → to` per changed key); `meshes` give the size of every axis.

    It trains on random tokens, without warm-up. Only what `precision` names is not FP32, so that any difference above
    its rounding is an error. Raises ConfigError if the small sizes are refused.
    """
    units = _Units.of(config, meshes)
    rounds, layout = config.pipeline.virtual_stages, config.pipeline.layout
    # A recipe needs multiples of this many tokens on a device, which has two sequences of a microbatch.
    stages = units.pipeline if extra_layers(config.model) else 1
    length = _multiple((units.width // 2 * stages if precision == "fp8" else 2) * units.context * units.tensor, TOKENS)
    microbatches = math.lcm(2, units.pipeline) if config.batch.num_microbatches > 1 else 1
    microbatches *= config.communication.microbatches_at_once  # two pairs
    # Chats remain chats, because their batches have padding; nothing reads them. Pictures are random ones.
    is_chat = config.data.kind == "chat" and config.model.vision is None
    has_documents = config.data.reset_attention or config.data.reset_positions
    small: dict[str, dict[str, Any]] = {
        "run": {"steps": steps, "epochs": None} | ({"eval_steps": 1} if config.run.eval_steps == "all" else {}),
        "model": _small_model(config, units, length),
        "mesh": dict.fromkeys(AXES, 1),
        "precision": _small_precision(config, precision),
        "batch": {
            "global_size": 2 * microbatches * units.batch,
            "num_microbatches": microbatches,
            # The targets of some denoisers are longer than the encoder's sequence.
            "sequence_length": (2 if config.span_lengths else 1) * length,
            "schedule": None,
        },
        "schedule": {"kind": "constant", "learning_rate": LEARNING_RATE, "min_learning_rate": 0.0, "warmup_steps": 0},
        "data": {} if is_chat else {"kind": "synthetic", "synthetic_documents": 3 if has_documents else None},
        "logging": {"norms_interval": 0},
        # The first step's gradients are read from the moments.
        "optimizer": {"state": "float32", "master": "float32", "offload_dir": None},
    }
    if config.optimizer.chosen.has_effect(EPSILON):
        # Else steps of AdamW, and of SOAP in a basis of eigenvectors, have the signs of rounding where a gradient is 0.
        small["optimizer"]["epsilon"] = LARGE_EPSILON
    remat, kernels, depth = _loops(config, units)
    small |= {"remat": remat, "kernels": kernels}
    if layout:
        least = min(n for n in layout if n)
        small["pipeline"] = {"layout": [depth * (min(n, 1) + (n > least)) for n in layout], "virtual_stages": rounds}
        small["model"]["num_layers"] = sum(small["pipeline"]["layout"])
    if config.lora.rank:
        small["lora"] = {"rank": min(config.lora.rank, 4)}
    if (teacher := config.of_teacher) is not None:
        small["teacher"] = {"model": _small_model(teacher, _Units.of(teacher, meshes), length)}
    # The mean of the microbatches' means depends on the number of devices that divide the batch.
    masks = config.objective.kind == MASKED_TOKENS
    small["objective"] = {"average": "tokens"} | ({"masking": {"mask_token": None}} if masks else {})
    settings, before, lines = config.model_dump(), config.model_dump(), []
    of_data = ("kind", "train", "tokenizer", "packing") if is_chat else ("reset_attention", "reset_positions")
    of_data += ("noise_density", "mean_span_length", "denoisers") if config.span_lengths else ()
    settings["data"] = {key: settings["data"][key] for key in of_data}
    for section, changes in small.items():
        lines += _replace(settings[section], before[section], changes, section)
    for derived in ("decay_steps", "wsd_decay_steps"):
        settings["schedule"].pop(derived, None)
    return _checked(settings), lines


def _checked(settings: dict[str, Any]) -> Config:
    try:
        made = Config.model_validate(settings)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its mesh is one device, so some settings have no effect
            check(made)
    except (ValidationError, ConfigError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise ConfigError(f"the config cannot be made small: {reason}") from None
    return made


def in_fp32(small: Config) -> Config:
    """The same in FP32; only `precision` differs, so it has the same weights and batches."""
    fp8 = small.precision.fp8.model_copy(update={"recipe": NONE.name})
    precision = small.precision.model_copy(update={"compute": "float32", "fp8": fp8})
    return small.model_copy(update={"precision": precision})


def _small_precision(config: Config, precision: Precision) -> dict[str, Any]:
    fp8 = config.precision.fp8
    small: dict[str, Any] = {"recipe": fp8.recipe if precision == "fp8" else NONE.name}
    if precision == "fp8":
        small |= {"backend": "xla", "amax_history_length": min(fp8.amax_history_length, 4)}
        small |= _bf16_layers(config)
    compute = "bfloat16" if precision == "bfloat16" else "float32"
    return {"compute": compute, "gradients": "float32", "accumulation": "float32", "fp8": small}


def _bf16_layers(config: Config) -> dict[str, int]:
    """The layers at both ends that do not use FP8, at most one remat group each."""
    group, fp8 = _group(config), config.precision.fp8
    return {key: min(getattr(fp8, key), group) for key in ("first_bf16_layers", "last_bf16_layers")}


def _group(config: Config) -> int:
    return min(config.remat.group, 2)


class _Units(NamedTuple):
    """The numbers that the sizes of a config must be multiples of."""

    pipeline: int
    batch: int
    context: int
    tensor: int
    heads: int
    experts: int
    width: int

    @classmethod
    def of(cls, config: Config, meshes: Sequence[Sizes]) -> "_Units":
        return cls(
            pipeline=math.lcm(*(m["pipeline"] for m in meshes)),
            batch=math.lcm(*(config.batch_shards(m) for m in meshes)),
            context=math.lcm(*(m["context"] for m in meshes)),
            tensor=math.lcm(*(m["tensor"] for m in meshes)),
            heads=math.lcm(*(m["tensor"] * config.context_strategy(m).head_shards(m["context"]) for m in meshes)),
            experts=math.lcm(*(config.expert_shards(m) for m in meshes)),
            width=math.lcm(FP8_MULTIPLE, config.precision.fp8.chosen.multiple),
        )


def _small_model(config: Config, units: _Units, length: int) -> dict[str, Any]:
    model = config.model
    kv_heads = min(model.num_kv_heads, max(2, units.heads))
    heads = kv_heads * min(model.num_heads // model.num_kv_heads, 2 if kv_heads > 1 else max(4, units.heads))
    width = _multiple(units.width * units.tensor, WIDTH)
    small: dict[str, Any] = {
        "num_layers": _layers(config, units),
        "first_dense_layers": min(model.first_dense_layers, 1),
        "hidden_size": min(model.hidden_size, WIDTH),
        "num_heads": math.lcm(heads, units.heads),
        "num_kv_heads": math.lcm(heads, units.heads) if model.num_kv_heads == model.num_heads else kv_heads,
        "head_dim": units.width,
        "ffn_hidden_size": width,
        "vocab_size": min(model.vocab_size, VOCABULARY),
        "vocab_multiple": min(model.vocab_multiple, 128),
        "init_std": INIT_STD,
    }
    if model.is_latent:
        small |= {"kv_lora_rank": units.width, "v_head_dim": units.width}
        small |= dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), units.width)
        small |= {"q_lora_rank": 2 * units.width if model.q_lora_rank else None, "head_dim": 2 * units.width}
    if model.sliding_window:
        small["sliding_window"] = min(model.sliding_window, WINDOW)
    if model.max_positions is not None:
        small["max_positions"] = length
    if model.rope_scaling:
        small["rope_scaling"] = _rope_scaling(model, small, length / config.batch.sequence_length)
    if model.encoder.kind == LAYERS:
        small["encoder"] = {"num_layers": min(model.encoder.num_layers or 1, 2), "sequence_length": length}
    if sections := model.rope_sections:
        pairs = int(small["head_dim"] * model.rope_fraction) // 2
        others = [max(1, pairs * each // sum(sections)) for each in sections[1:]]
        small["rope_sections"] = [pairs - sum(others), *others]
    if model.vision:
        small["vision"] = _small_vision(model.vision, units)
        small["num_layers"] = max(small["num_layers"], len(small["vision"]["deepstack_layers"]))
    if model.num_experts:
        groups = min(model.router.num_groups, 4)
        chosen = min(model.experts_per_token, 2)
        small |= {
            "num_experts": _multiple(math.lcm(groups, units.experts), min(model.num_experts, max(4, 2 * groups))),
            "experts_per_token": chosen,
            "expert_ffn_hidden_size": _multiple(units.width * units.tensor, WIDTH // 2),
            "shared_expert_ffn_hidden_size": _multiple(units.width * units.tensor, WIDTH // 2)
            if model.shared_expert_ffn_hidden_size
            else 0,
            "router": {"num_groups": groups, "groups_per_token": min(model.router.groups_per_token, chosen)},
        }
    return small


def _small_vision(vision: VisionConfig, units: _Units) -> dict[str, Any]:
    """Two layers, of which the last one is global or projected if one was, and a few pictures of few patches a row."""
    last, heads = min(vision.num_layers, 2) - 1, math.lcm(2, units.heads)
    width = _multiple(units.width * units.tensor, WIDTH)
    grid = None if vision.grid is None else 2 * vision.merge
    pictures = 2 * (grid**2 + vision.class_token) if grid else 1
    return {
        "image_token": VOCABULARY - 1,
        "num_layers": last + 1,
        "hidden_size": 8 * heads,
        "num_heads": heads,
        "ffn_hidden_size": width,
        "projector_ffn_hidden_size": width,
        "patch_size": 2,
        "grid": grid,
        "window": vision.window and vision.merge,
        "global_layers": [last] if vision.global_layers else [],
        "deepstack_layers": [*range(min(len(vision.deepstack_layers), last + 1))],
        "patches_per_row": _multiple(vision.block * units.context * units.tensor, max(pictures, 16 * vision.block)),
    }


def _layers(config: Config, units: _Units) -> int:
    """The layers of each virtual stage, one at least, each pattern once at least, and whole bodies of loops."""
    model = config.model
    patterns = (model.block_pattern, model.layer_pattern, model.rope_pattern)
    period = math.lcm(model.moe_layer_interval, *(len(pattern) for pattern in patterns if pattern))
    stages, without_fp8 = units.pipeline * config.pipeline.virtual_stages, sum(_bf16_layers(config).values())
    layers = min(model.num_layers, max(2, stages, period + min(model.first_dense_layers, 1), without_fp8 + 1))
    depth = _loops(config, units)[2]
    return _multiple(stages * depth, layers) if depth > 1 else layers


def _loops(config: Config, units: _Units) -> tuple[dict[str, Any], dict[str, Any], int]:
    """The small settings of `remat` and `kernels`, and the layers of a virtual stage that they need, or a multiple.

    A group, or a loop's body, of several layers has two; of some recomputed layers there is one group, and others too;
    several bodies are two.
    """
    chosen, of_stage = (
        config.kernels.scan_unroll,
        config.model.num_layers // (units.pipeline * config.pipeline.virtual_stages),
    )
    unroll, group, partly = min(chosen or 1, 2), _group(config), config.remat.layers is not None
    bodies = 2 if unroll > 1 and of_stage > (chosen or 1) else 1
    depth = max(bodies * unroll, (group // unroll + 1) * unroll if partly else group)
    remat = {"group": group, "layers": group if partly else None}
    return remat, {"scan_unroll": None if chosen is None else unroll}, depth


def _rope_scaling(model: ModelConfig, small: Mapping[str, Any], ratio: float) -> dict[str, Any]:
    assert model.rope_scaling is not None
    scaling = model.rope_scaling
    changes: dict[str, Any] = {"original_max_positions": max(2, round(scaling.original_max_positions * ratio))}
    dims = small.get("qk_rope_head_dim", small["head_dim"])
    for name in ("short_factors", "long_factors"):
        if factors := getattr(scaling, name):
            changes[name] = list(factors[: int(dims * model.rope_fraction) // 2])
    return changes


def _multiple(unit: int, least: int) -> int:
    return -(-least // unit) * unit


def _replace(values: dict[str, Any], before: Mapping[str, Any], changes: Mapping[str, Any], name: str) -> list[str]:
    """Put `changes` into `values`; the line of each key that is no longer as `before`."""
    lines = []
    for key, value in changes.items():
        if isinstance(value, dict):
            lines += _replace(values[key], before[key], value, f"{name}.{key}")
            continue
        values[key] = value
        if name != "mesh" and before[key] != value:
            lines.append(f"{name}.{key}: {before[key]} → {value}")
    return lines
