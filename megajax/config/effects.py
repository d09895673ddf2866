"""Warnings about settings without effect."""

from typing import Any, NamedTuple

from megajax.config.sentences import format_keys, value, warn
from megajax.layout.kinds import LATENT
from megajax.layout.recurrent import recurrent_heads, unused_sections
from megajax.options.optimizers import BETA1, BETA2, EPSILON, OPTIMIZERS
from megajax.options.schedules import DECAY, LOWEST, STYLE, TAIL
from megajax.schema.config import Config
from megajax.schema.schedule import lowest_rate

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
    *(f"data.{name}" for name in ("kind", "train", "stages", "split", "order", "train_samples")),
    *(f"data.{name}" for name in ("tokenizer", "text_key", "end_of_document", "begin_of_document")),
    *(f"data.{name}" for name in ("chat_template", "chat_template_args", "pack", "too_long")),
    *(f"data.{name}" for name in ("fim_rate", "fim_spm_rate", "fim_tokens")),
)


class Rule(NamedTuple):
    """Keys that are not read because of another one."""

    applies: bool
    reason: str  # the other key
    keys: tuple[str, ...]


def warn_without_effect(config: Config) -> None:
    """Warn about each key that differs from its default but is not read."""
    for applies, reason, keys in [*_of_the_model(config), *_of_the_data(config), *_of_the_run(config)]:
        for key in keys if applies else ():
            if config.where(key) != "default" and value(config, key) != _default(config, key):
                problem = f"{format_keys(config, key)} has no effect with {format_keys(config, reason)}"
                warn(config, problem, "remove it", key)
    allowed = "checkpoint.allow_changes"
    for entry in config.checkpoint.allow_changes:
        if not any(_within(key, entry) for key in COMPARED_ON_RESUME) and not _within(entry, "model"):
            problem = f"{allowed} names {entry}, which any resumed run may change"
            warn(config, problem, "remove it", allowed)


def _within(key: str, section: str) -> bool:
    return f"{key}.".startswith(f"{section}.")


def ignores_decay_steps(config: Config) -> bool:
    """Whether the learning rate after the warm-up does not depend on `schedule.decay_steps`."""
    return DECAY not in config.schedule.chosen.reads


def _of_the_model(config: Config) -> list[Rule]:
    model, scaling = config.model, config.model.rope_scaling
    has_local = "local" in (model.layer_pattern or ["local"])
    unused = tuple(f"model.rope_scaling.{name}" for name in (scaling.unused if scaling else ()))
    rope = tuple(f"model.rope_{name}" for name in ("theta", "scaling", "fraction", "local_theta", "pattern"))
    latent = tuple(f"model.{name}" for name in LATENT)
    recurrent = tuple(
        heads.key(name) for heads in unused_sections(model) for name in type(getattr(model, heads.section)).model_fields
    )
    undivided = all(getattr(config.mesh, axis) == 1 for axis in config.mesh.experts_over)
    return [
        Rule(model.position != "rope", "model.position", rope),
        Rule(scaling is not None, "model.rope_scaling.kind", unused),
        Rule(
            scaling is not None and scaling.kind == "yarn" and scaling.mscale_all_dim is None,
            "model.rope_scaling.mscale_all_dim",
            ("model.rope_scaling.mscale",),
        ),
        Rule(not model.is_latent, "model.kv_lora_rank", latent),
        Rule(model.position != "learned", "model.position", ("model.max_positions",)),
        Rule(not has_local, "model.layer_pattern", ("model.sliding_window", "model.rope_local_theta")),
        Rule(model.sliding_window is None, "model.sliding_window", ("model.rope_local_theta",)),
        Rule(undivided, f"mesh.{config.mesh.experts_over[0]}", ("communication.experts", "mesh.experts_over")),
        Rule(not model.mtp_layers, "model.mtp_layers", ("model.mtp_loss_weight",)),
        Rule(model.num_experts is None, "model.num_experts", ("kernels.grouped_matmul",)),
        Rule(True, "model.block_pattern", recurrent),
        Rule(not recurrent_heads(model), "model.block_pattern", ("kernels.linear_attention",)),
        Rule(
            not model.router.expert_bias and model.router.num_groups == 1,
            "model.router.expert_bias",
            ("model.router.loss_counts",),
        ),
        Rule(not model.router.expert_bias, "model.router.expert_bias", ("model.router.bias_update_rate",)),
        Rule(
            model.router.num_groups == 1,
            "model.router.num_groups",
            ("model.router.groups_per_token", "model.router.group_score"),
        ),
    ]


def _of_the_data(config: Config) -> list[Rule]:
    data = config.data
    evaluated = data.valid is not None or bool(data.valid_sets)
    chat, text, files = data.kind == "chat", data.kind == "text", data.kind in ("indexed", "text")
    separate = ("data.reset_attention", "data.reset_positions", "data.mask_end_of_document_loss")
    no_valid_share = data.split is not None and float(data.split.split(",")[1]) == 0
    one_document = data.kind == "synthetic" and data.synthetic_documents is None
    fim_tokens = tuple(f"data.fim_tokens.{part}" for part in type(data.fim_tokens).model_fields)
    together = not any(value(config, key) for key in separate)
    stores = data.order == "megatron" or chat or text or data.is_remote
    return [
        Rule(files and not evaluated and data.split is None, "data.valid", ("run.eval_interval",)),
        Rule(files and not evaluated and no_valid_share, "data.split", ("run.eval_interval",)),
        Rule(data.order != "megatron", "data.order", ("data.train_samples", "data.drop_last_validation_sample")),
        Rule(not stores, "data.order", ("data.index_cache",)),
        Rule(not text, "data.kind", ("data.text_key",)),
        Rule(not files, "data.kind", ("data.begin_of_document",)),
        Rule(data.kind == "synthetic", "data.kind", ("data.fim_rate",)),
        Rule(not data.fim_rate, "data.fim_rate", ("data.fim_spm_rate", *fim_tokens)),
        Rule(not chat, "data.kind", ("data.chat_template", "data.chat_template_args", "data.pack", "data.too_long")),
        Rule(config.model.position == "none", "model.position", ("data.reset_positions",)),
        Rule(one_document, "data.synthetic_documents", separate),
        Rule(together, "data.reset_attention", ("data.synthetic_documents",)),
    ]


def _of_the_run(config: Config) -> list[Rule]:
    reads, logging, fp8 = config.schedule.chosen.reads, config.logging, config.precision.fp8
    pipeline = tuple(f"pipeline.{name}" for name in type(config.pipeline).model_fields)
    recipe, exports = "precision.fp8.recipe", "checkpoint.export_hf"
    one_microbatch = config.batch.num_microbatches == 1 and config.mesh.pipeline == 1
    of_fp8 = tuple(f"precision.fp8.{name}" for name in type(fp8).model_fields if name != "recipe")
    optimizer = config.optimizer
    others = {kind: own for kind in OPTIMIZERS if kind != optimizer.kind and (own := getattr(optimizer, kind, None))}
    delayed = tuple(f"precision.fp8.{name}" for name in ("amax_history_length", "amax_algorithm", "margin"))
    return [
        *(Rule(key not in reads, "schedule.kind", (f"schedule.{key}",)) for key in (TAIL, STYLE, LOWEST, DECAY)),
        *(
            Rule(key not in optimizer.chosen.reads, "optimizer.kind", (f"optimizer.{key}",))
            for key in (BETA1, BETA2, EPSILON)
        ),
        *(
            Rule(True, "optimizer.kind", tuple(f"optimizer.{kind}.{name}" for name in type(own).model_fields))
            for kind, own in others.items()
        ),
        Rule(one_microbatch, "batch.num_microbatches", ("precision.accumulation",)),
        Rule(config.remat.chosen.recomputes_nothing, "remat.policy", ("remat.layers",)),
        Rule(config.lora.rank is None, "lora.rank", ("lora.alpha", "lora.targets", "lora.dropout")),
        Rule(config.mesh.pipeline == 1, "mesh.pipeline", pipeline),
        Rule(config.mesh.context == 1, "mesh.context", ("communication.context",)),
        Rule(config.run.eval_steps == 0, "run.eval_steps", ("run.eval_interval",)),
        Rule(config.run.spike_factor is None, "run.spike_factor", ("run.spike_window",)),
        Rule(not logging.wandb, "logging.wandb", ("logging.wandb_project",)),
        Rule(logging.mlflow is None, "logging.mlflow", ("logging.mlflow_experiment",)),
        Rule(logging.prometheus_port is None, "logging.prometheus_port", ("logging.prometheus_host",)),
        Rule(config.checkpoint.export_hf.dir is None, f"{exports}.dir", (f"{exports}.every", f"{exports}.dtype")),
        Rule(config.checkpoint.init_from is None, "checkpoint.init_from", ("checkpoint.init_state",)),
        Rule(config.checkpoint.local_dir is None, "checkpoint.local_dir", ("checkpoint.local_interval",)),
        Rule(logging.profile_start is None, "logging.profile_start", ("logging.profile_steps",)),
        Rule((logging.profile_start or 0) > config.run.steps, "run.steps", ("logging.profile_start",)),
        Rule(logging.norms_interval > config.run.steps, "run.steps", ("logging.norms_interval",)),
        Rule(not fp8.chosen.is_on, recipe, of_fp8),
        Rule(fp8.chosen.is_on and not fp8.chosen.keeps_history, recipe, delayed),
        Rule(fp8.chosen.rounded is not None, recipe, ("precision.fp8.backend", "precision.fp8.format")),
    ]


def _default(config: Config, key: str) -> Any:
    if key == "schedule.decay_steps":
        return max(config.run.steps, config.schedule.warmup_steps + 1)
    if key == "schedule.min_learning_rate":
        return lowest_rate(config.schedule.kind, config.schedule.learning_rate)
    section, name = key.rsplit(".", 1)
    return type(value(config, section)).model_fields[name].default
