"""Checks of the objective, and of the frozen teacher that it may read."""

from collections.abc import Callable

from megajax.config.extensions import settings_of
from megajax.config.missing_features import missing_feature
from megajax.config.rule_checks import check_rules
from megajax.config.sentences import fail, format_keys, listed, value
from megajax.errors import ConfigError
from megajax.layout.kinds import extra_of
from megajax.options.registered import MASKED_TOKENS, NO_ENCODER, OBJECTIVES, OWN_OBJECTIVES, taken_together
from megajax.schema.config import Config

OBJECTIVE, MODEL, BASE = "objective.kind", "teacher.model", "teacher.base"


def check_objective(config: Config) -> None:
    """Raise ConfigError for an unknown objective and for wrong settings of it."""
    kind, key = config.objective.kind, OBJECTIVE
    if kind in OWN_OBJECTIVES:
        shares = ("objective.masking.masked", "objective.masking.random")
        if kind == MASKED_TOKENS and sum(value(config, share) for share in shares) > 1:
            fail(config, f"{format_keys(config, *shares)} are together more than 1", "lower one of them", *shares)
    elif kind not in OBJECTIVES:
        known = listed([*OWN_OBJECTIVES, *sorted(OBJECTIVES)])
        cure = missing_feature("", kind) or f"use {known}, or name the module that registers it in run.extensions"
        fail(config, f"{format_keys(config, key)} is not a registered objective", cure, key)
    else:
        settings_of(config, OBJECTIVES[kind], "objective")
    _check_rows(config)


def _check_rows(config: Config) -> None:
    """Raise ConfigError if the rows of chats are not the segments that the objective takes together."""
    together, pairs = taken_together(config.objective.kind), config.data.reads_pairs
    if config.data.kind != "chat" or (together is None and not pairs):
        return
    reads, keys = format_keys(config, OBJECTIVE), ("data.packing", OBJECTIVE)
    if together is None:
        problem = f"{format_keys(config, 'data.packing')} puts two answers beside each other, but {reads} compares none"
        cure = f"set {OBJECTIVE} to an objective of pairs such as docs/examples/dpo.py, or data.packing=none"
        fail(config, problem, cure, *keys)
    unread = {
        "data.stages": (config.data.stages, "only the rows of one source stay beside each other"),
        "model.vision": (config.model.vision, "pictures of pairs are not read yet"),
    }
    for key, (found, reason) in unread.items():
        if pairs and found:
            problem = f"{format_keys(config, 'data.packing')} cannot be combined with {key}: {reason}"
            fail(config, problem, f"remove {key}", "data.packing", key)
    wanted = {1: "none", 2: "pairs"}.get(together)
    if config.data.row_packing != wanted:
        what = "one conversation in a row" if together == 1 else f"{together} rows together"
        problem = f"{reads} takes {what}, but {format_keys(config, 'data.packing')} does not keep them so"
        cure = (
            f"set data.packing={wanted}" if wanted else "make the batches by Trainer's batch_of (docs/custom_loop.md)"
        )
        fail(config, problem, cure, *keys)


def check_teacher(config: Config) -> None:
    """Raise `ConfigError` for a teacher that nobody reads, that is missing, or that cannot run beside the model."""
    registered, base = OBJECTIVES.get(config.objective.kind), config.teacher.base
    teacher, key = config.teacher_model, BASE if base else MODEL
    reads = getattr(registered, "TEACHER", False)
    if teacher is None:
        if reads:
            problem = f"{format_keys(config, OBJECTIVE)} reads what a teacher predicts, but there is none"
            of_adapters = f", or {BASE}=true, the model without its adapters" if config.lora.rank else ""
            fail(config, problem, f"set {MODEL}{of_adapters}", OBJECTIVE)
        return
    if not reads:
        problem = f"{format_keys(config, OBJECTIVE)} reads no teacher, but {key} is set"
        fail(config, problem, f"remove teacher, or set {OBJECTIVE} to an objective with TEACHER", key, OBJECTIVE)
    for name in ("vocab_size", "vocab_multiple"):
        of_model, of_teacher = value(config, f"model.{name}"), getattr(teacher, name)
        if of_model != of_teacher:
            problem = f"{MODEL}.{name}={of_teacher}, but model.{name}={of_model}"
            fail(config, problem, "give both the same vocabulary", f"{MODEL}.{name}", f"model.{name}")
    extra = extra_of(teacher)
    unused = {
        extra.layers if extra else "": (extra is not None, "the layers after its own would not run"),
        "position": (teacher.position == "relative", "a teacher's layers read no bias of the scores"),
        "prediction_head": (teacher.prediction_head, "a teacher's output goes to its head alone"),
        "encoder": (teacher.encoder.kind != NO_ENCODER, "a teacher reads tokens only"),
        "vision": (teacher.vision is not None, "a teacher reads tokens only"),
        "prefix_lm": (teacher.prefix_lm, "a teacher has no prefix"),
        # The base's bias is the state of its layers
        "router.expert_bias": (teacher.router.expert_bias and not base, "a teacher's routers have no trained bias yet"),
    }
    for name, (is_set, reason) in unused.items():
        if is_set and base:
            keys = f"model.{name}", BASE
            fail(config, f"{keys[0]} cannot be combined with {BASE}: {reason}", "remove one of them", *keys)
        if is_set:
            fail(config, f"{MODEL}.{name} is set: {reason}", f"remove it from {MODEL}", f"{MODEL}.{name}", MODEL)


def with_teacher(config: Config, sizes: dict[str, int], *checks: Callable[[Config, dict[str, int]], None]) -> None:
    """Checks of the config, and of its teacher in place of the model, on a mesh of `sizes`."""
    for check in checks:
        check(config, sizes)
    if (of_teacher := config.of_teacher) is None:
        return
    experts = {} if of_teacher.model.num_experts else {"expert": 1}  # these devices then divide the batch only
    try:
        check_rules(of_teacher, "model.", "kernels.")
        for check in checks:
            check(of_teacher, sizes | {"pipeline": 1} | experts)
    except ConfigError as error:
        raise ConfigError(f"teacher: {error}") from None
