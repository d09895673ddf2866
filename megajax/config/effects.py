"""Warnings about settings without effect."""

from typing import Any, NamedTuple

from megajax.config.rule_checks import default_of, unread
from megajax.config.sentences import format_keys, value, warn
from megajax.layout.kinds import ATTENTION, MLP, MOE, layer_kinds, may_have, reads_ffn_width
from megajax.layout.recurrent import recurrent_heads, unused_sections
from megajax.schema.config import Config
from megajax.schema.rules import ReadIf
from megajax.schema.schedule import lowest_rate
from megajax.schema.tree import show

# Besides the model, a checkpoint's description has these.
COMPARED_ON_RESUME = (
    "model",
    "optimizer.kind",
    "optimizer.state",
    "optimizer.beta1",
    "optimizer.settings",
    "optimizer.soap.max_dimension",
    "run.seed",
    "batch.sequence_length",
    "lora.rank",
    "lora.alpha",
    "lora.targets",
    "objective.kind",
    *(f"data.{name}" for name in ("kind", "train", "stages", "split", "order", "train_samples")),
    *(f"data.{name}" for name in ("tokenizer", "text_key", "end_of_document", "begin_of_document")),
    *(f"data.{name}" for name in ("chat_template", "chat_template_args", "packing", "too_long")),
    *(f"data.{name}" for name in ("fim_rate", "fim_spm_rate", "fim_tokens", "noise_density", "mean_span_length")),
    "data.denoisers",
)
OF_ATTENTION = (
    *("model.rope_theta", "model.rope_scaling", "model.rope_fraction", "model.rope_sections", "model.rope_interleaved"),
    *("model.qk_norm", "model.qk_clip", "model.attention_scale", "model.attention_bias", "model.attention_softcap"),
    *("model.attention_gate", "model.attention_sinks"),
)
OF_ROTATION = ("model.rope_theta", "model.rope_scaling")
OF_GROUPS = ("model.router.num_groups", "model.router.groups_per_token", "model.router.group_score")
DECAYED = ("optimizer.decay_norms", "optimizer.decay_biases", "optimizer.decay_embeddings")


class Unread(NamedTuple):
    """Keys that are not read because of another one, whose name the warning has."""

    applies: bool
    reason: str  # the other key
    keys: tuple[str, ...]


def warn_without_effect(config: Config) -> None:
    """Warn about each key that differs from its default but is not read."""
    several = [(key, each.reason) for each in _of_several_keys(config) if each.applies for key in each.keys]
    for key, reason in [*unread(config), *several]:
        if config.where(key) != "default" and value(config, key) != _default(config, key):
            problem = f"{format_keys(config, key)} {ReadIf.WORDS} {format_keys(config, reason)}"
            warn(config, problem, "remove it", key)
    for key, given in config.replaced.items():
        problem = f"{key}={show(given)} {ReadIf.WORDS} {format_keys(config, 'data.kind', 'data.packing')}"
        warn(config, problem, "remove it", key)
    allowed = "checkpoint.allow_changes"
    for entry in config.checkpoint.allow_changes:
        if not any(_within(key, entry) for key in COMPARED_ON_RESUME) and not _within(entry, "model"):
            problem = f"{allowed} names {entry}, which any resumed run may change"
            warn(config, problem, "remove it", allowed)


def _within(key: str, section: str) -> bool:
    return f"{key}.".startswith(f"{section}.")


def _of_several_keys(config: Config) -> list[Unread]:
    """The rules that depend on more than one other key."""
    model, data, run, optimizer = config.model, config.data, config.run, config.optimizer
    no_attention = not may_have(model, ATTENTION)
    rotated = [kind for kind in layer_kinds(model) if kind.rope and not (kind.window and model.rope_local_theta)]
    unrotated = model.position == "rope" and not rotated
    own_theta = unrotated and any(kind.rope for kind in layer_kinds(model))
    averages = optimizer.ema_decay is not None or optimizer.master == "split"
    stateless = optimizer.chosen.is_stateless and optimizer.beta1 == 0
    recurrent = tuple(
        heads.key(name) for heads in unused_sections(model) for name in type(getattr(model, heads.section)).model_fields
    )
    undivided = all(getattr(config.mesh, axis) == 1 for axis in config.mesh.experts_over)
    evaluated = data.valid is not None or bool(data.valid_sets) or data.kind == "synthetic"
    untested = not evaluated and data.split is None and data.test is None
    no_valid_share = data.split is not None and float(data.split.split(",")[1]) == 0
    separate = ("data.reset_attention", "data.reset_positions", "data.mask_end_of_document_loss")
    one_document = data.kind == "synthetic" and data.synthetic_documents is None
    together = not any(value(config, key) for key in separate)
    stores = data.order == "megatron" or data.kind in ("chat", "text") or data.is_remote
    one_pass = config.batch.num_microbatches <= config.communication.microbatches_at_once  # and so no stages
    router = "model.router.expert_bias"
    ungrouped = not model.router.expert_bias and model.router.num_groups == 1
    width = model.expert_ffn_hidden_size or model.ffn_hidden_size
    no_mlp = not reads_ffn_width(model)
    fixed = model.vision is not None and model.vision.fixed_grid is not None
    return [
        Unread(fixed, "model.vision.grid", ("model.vision.rope_theta",)),
        Unread(undivided, f"mesh.{config.mesh.experts_over[0]}", ("communication.experts", "mesh.experts_over")),
        Unread(True, "model.block_pattern", recurrent),
        Unread(not recurrent_heads(model), "model.block_pattern", ("kernels.linear_attention",)),
        Unread(no_attention, "model.block_pattern", OF_ATTENTION),
        Unread(no_attention and model.position == "rope", "model.block_pattern", ("data.reset_positions",)),
        Unread(unrotated and not own_theta, "model.rope_pattern", (*OF_ROTATION, "model.rope_fraction")),
        Unread(own_theta, "model.rope_local_theta", OF_ROTATION),
        Unread(no_attention and model.vision is None, "model.block_pattern", ("kernels.attention",)),
        Unread(not may_have(model, MLP, MOE), "model.block_pattern", ("model.activation", "model.mlp_bias")),
        Unread(no_mlp and not may_have(model, MOE), "model.block_pattern", ("model.ffn_hidden_size",)),
        # The default of an expert's width is read
        Unread(no_mlp and width != model.ffn_hidden_size, "model.expert_ffn_hidden_size", ("model.ffn_hidden_size",)),
        Unread(ungrouped, router, ("model.router.loss_counts",)),
        Unread(model.router.force_balance, "model.router.force_balance", OF_GROUPS),
        Unread(optimizer.weight_decay == 0, "optimizer.weight_decay", DECAYED),
        Unread(stateless, "optimizer.beta1", ("optimizer.state",)),
        Unread(stateless and not averages, "optimizer.beta1", ("optimizer.offload",)),
        Unread(not evaluated and data.split is None, "data.valid", ("run.eval_interval",)),
        Unread(bool(run.eval_steps) and untested, "data.valid", ("run.eval_steps",)),
        Unread(not evaluated and no_valid_share, "data.split", ("run.eval_interval",)),
        Unread(not stores, "data.order", ("data.index_cache",)),
        Unread(one_document, "data.synthetic_documents", separate),
        Unread(together, "data.reset_attention", ("data.synthetic_documents",)),
        Unread(one_pass, "batch.num_microbatches", ("precision.accumulation",)),
        Unread((config.logging.profile_start or 0) > run.steps, "run.steps", ("logging.profile_start",)),
        Unread(config.logging.norms_interval > run.steps, "run.steps", ("logging.norms_interval",)),
    ]


def _default(config: Config, key: str) -> Any:
    if key == "schedule.decay_steps":
        return max(config.run.steps, config.schedule.warmup_steps + 1)
    if key == "schedule.min_learning_rate":
        return lowest_rate(config.schedule.kind, config.schedule.learning_rate)
    if key == "model.ffn_hidden_size":
        return 4 * config.model.hidden_size
    return default_of(key)
