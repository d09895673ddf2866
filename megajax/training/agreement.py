"""What must agree between a checkpoint and the run that resumes from it: settings, the order of the data, the rate."""

import math
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import ValidationError

from megajax import cluster
from megajax.checkpoint.description import (
    SettingDifference,
    config_allows,
    describe_data,
    describe_lora,
    describe_model,
    describe_objective,
)
from megajax.config import Config, ModelConfig, ScheduleConfig
from megajax.config.sentences import located, value
from megajax.data.megatron import wanted_samples
from megajax.errors import InputError, counted, shown
from megajax.model.trained import frozen_parts
from megajax.optim.schedule import AFTER_WARMUP, make_schedule
from megajax.schema.batch_schedule import BatchSizes, Position, samples_before
from megajax.schema.data import sources_of
from megajax.sources import WeightSource

MUST_AGREE = ("model", "optimizer", "run", "batch", "lora", "objective", "data")


def compared_settings(config: Config, step: int, contents: Mapping[str, Any]) -> dict[str, Any]:
    """The sections MUST_AGREE of the description of a checkpoint of `step`; `contents` are from `data_contents`."""
    optimizer, data = config.optimizer, config.data
    # Megatron's order depends on the number of samples.
    decisive: dict[str, Any] = {"samples": wanted_samples(config, "train")} if data.order == "megatron" else {}
    # A later stage may change.
    if data.kind != "synthetic" and (past := [each for each in data.stages or () if each.from_step < step]):
        decisive["stages"] = [[samples_before(config, s.from_step), s.model_dump(mode="json")] for s in past]
    contents = dict(contents)
    for found in filter(None, contents.pop("stages", ())[: len(decisive.get("stages", ()))]):
        files = [file for file in found["files"] if file not in contents.get("files", ())]
        decisive.setdefault("stage_files", []).extend(files)
        decisive.setdefault("stage_digests", {}).update(found.get("digests", {}))
    # SGD without momentum has no moments to restore; other changes of beta1 are allowed.
    beta1 = "zero" if optimizer.chosen.is_stateless and optimizer.beta1 == 0 else "above zero"
    more = {key: value(config, f"optimizer.{key}") for key in optimizer.chosen.decides_arrays}
    more |= {"frozen_by_groups": list(frozen)} if (frozen := frozen_parts(config)) else {}  # they have no moments
    # The network does not depend on these, but the spans of a sample do, and what fits into a row.
    rows = {"encoder.sequence_length": config.model.encoder.sequence_length} if config.span_lengths else {}
    if config.model.vision is not None and data.kind != "synthetic":
        rows["vision.patches_per_row"] = config.model.vision.patches_per_row
    return {
        "run": {"seed": config.run.seed},  # another seed is another data order
        "model": {**describe_model(config.model), **rows},
        "optimizer": {"kind": optimizer.kind, "state": optimizer.state, "beta1": beta1, **more},
        "batch": {"sequence_length": config.batch.sequence_length},
        "lora": describe_lora(config),
        "objective": describe_objective(config),
        "data": {**describe_data(data), **decisive, **contents},
    }


def check_order(config: Config, position: Position, saved: int | None, name: str) -> None:
    """Raise InputError if the order of the data changes with the size of the batch, as it did at `position`.

    The samples at which stages begin do; Megatron's order does with the number of samples, which was `saved`,
    unless `checkpoint.allow_changes` names it. After an odd number of samples no pair begins.
    """
    data = config.data
    if data.kind == "synthetic":
        return
    grows = samples_before(config, position.step) > position.samples
    cures = ["write the change as batch.schedule"] * grows + ["keep the size"]
    problem, cure = f"{name} was saved with another size of the batch", ", or ".join(cures)
    if data.reads_pairs and position.samples % 2:
        where = f"data.packing=pairs ({config.where('data.packing')})"
        reason = f"{name} was saved after {counted(position.samples, 'sample')}, between the two answers of a pair"
        raise InputError(f"{where}: {reason}: choose another run.dir, and set checkpoint.init_from to its weights.")
    if data.stages:
        where = f"data.stages ({config.where('data.stages')})"
        raise InputError(f"{problem}, which changes the samples at which {where} begin: {cure}.")
    if data.order != "megatron" or saved is None:
        return
    weights = [weight for _, weight in sources_of(data.train)]
    if len(weights) > 1 and None in weights:
        where = f"data.train ({config.where('data.train')})"
        raise InputError(f"{problem}, and the sources of {where} have no weights, so each has one epoch: {cure}.")
    mine, steps = wanted_samples(config, "train"), config.run.steps
    if mine != saved and not config_allows(config, SettingDifference("data.train_samples", saved, mine)):
        if not grows:
            cure = f"set data.train_samples={saved}, or {cure}"
        raise InputError(
            f"{problem}, and data.order=megatron depends on the number of training samples, {saved} there and "
            f"{mine} here: {cure}."
        )
    needed = BatchSizes.of(config, position).samples_before(steps)
    if needed > mine:
        raise InputError(
            f"data.train_samples={mine} ({config.where('data.train_samples')}) is less than the "
            f"{counted(needed, 'sample')} that the run reads up to run.steps={steps} after {name}: lower run.steps."
        )


def consequence(change: SettingDifference, samples: int) -> str:
    """The end of a sentence about an allowed change of a run that goes on after `samples` samples."""
    if change.key != "batch.sequence_length":
        return ""
    before, now = (f"{samples * length:,}" for length in (change.saved, change.mine))
    counted = f"its count of tokens, also for batch.schedule, is {now} and not {before}"
    return f"; it goes on at sample {samples:,}, so {counted}"


def warn_of_longer_sequences(config: Config, source: WeightSource, model: ModelConfig) -> None:
    """Warn if the sequences of a run are longer than those that the weights of `source`, of `model`, are for."""
    if not cluster.current().is_first or (longest := source.longest(model)) is None:
        return
    length, key = config.batch.sequence_length, "batch.sequence_length"
    if length <= longest:
        return
    further = "a larger model.rope_scaling.factor"
    if model.rope_scaling is None:
        scaling = f"{{kind: yarn, factor: {math.ceil(length / longest)}, original_max_positions: {longest}}}"
        further = f"model.rope_scaling='{scaling}'"
    warnings.warn(
        f"{located(config, key)} is more than the {longest} positions of {source.shown}, whose weights "
        f"have seen none beyond them: set {key}={longest} or less, or {further} with "
        "checkpoint.allow_changes=[model.rope_scaling].",
        stacklevel=2,
    )


def warn_of_another_rate(config: Config, saved: Mapping[str, Any], name: str) -> None:
    """Warn if the next step's learning rate differs from that of the run that saved a checkpoint.

    `saved` is its description, `name` its name in errors. A schedule whose decay_steps is run.steps changes
    when run.steps is raised.
    """
    if "schedule" not in saved:
        return
    step, given, now = saved["step"], saved["schedule"], config.schedule
    try:
        before = ScheduleConfig.model_validate(given)
        rates = [np.asarray(make_schedule(schedule)(step + 1)).item() for schedule in (before, now)]
    except ValidationError:
        kind = given.get("kind") if isinstance(given, Mapping) else None
        if not isinstance(kind, str) or kind in AFTER_WARMUP:
            raise InputError(f"{name} is damaged (its schedule has no valid keys): remove it.") from None
        if cluster.current().is_first:
            problem = f"schedule.kind={shown(kind)} so far, which run.extensions no longer has with its settings"
            cure = "restore both to keep its learning rate"
            warnings.warn(
                f"the learning rate of step {step + 1} follows another schedule, {problem}: {cure}.", stacklevel=2
            )
        return
    if math.isclose(*rates, rel_tol=1e-3) or not cluster.current().is_first:
        return
    cure = "restore the section schedule to keep it."
    if before.model_copy(update={"decay_steps": now.decay_steps}) == now:
        cure = f"schedule.decay_steps was {before.decay_steps} and is {now.decay_steps} now; set "
        cure += f"schedule.decay_steps={before.decay_steps} to keep it."
    warnings.warn(
        f"the learning rate of step {step + 1} is {rates[1]:.3g}, but {rates[0]:.3g} in the schedule so far: {cure}",
        stacklevel=2,
    )
