"""A checkpoint's description: the settings that it was saved with, compared with those of a run."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from pydantic.fields import FieldInfo

from megajax.config import Config, DataConfig, ModelConfig
from megajax.config.sentences import listed
from megajax.errors import InputError
from megajax.layout.kinds import DENSE, MOE, reads_ffn_width
from megajax.layout.recurrent import unused_sections
from megajax.model import Transformer, parameters
from megajax.model.block import layer_state
from megajax.model.lora import targets
from megajax.options.registered import replaces_head
from megajax.schema.fields import Section, shortest_pattern
from megajax.schema.layer_sections import RopeScaling, RouterConfig
from megajax.schema.optimizer import OptimizerConfig
from megajax.schema.rules import TRAINING_ONLY
from megajax.schema.tree import show
from megajax.sharding import OBJECTIVE

# Router keys that change the network's function; the others only balance the load in training.
ROUTER_OF_NETWORK = (
    "score_function",
    "pre_softmax",
    "normalise",
    "scaling_factor",
    "num_groups",
    "groups_per_token",
    "group_score",
    "logit_bias",
    "expert_bias",
)
OWN_BATCHES = "batch_of"  # the data's kind if the `batch_of` of a Trainer makes the batches
OTHER_ARRAYS = {  # sections, or keys, whose changes give the state other arrays
    "optimizer": "the optimizer has other moments",
    "lora.rank": "the adapters have other shapes",
    "lora.targets": "the adapters have other shapes",
    "objective": "the objective has other parameters",
}
# Keys that decide the tokens of the samples, by `data.kind`, besides its sources and their order.
OF_SAMPLES = {
    "text": ("end_of_document", "begin_of_document", "text_key", "packing"),
    "chat": ("end_of_document", "chat_template_args", "packing", "too_long"),
    "indexed": ("packing",),
    "synthetic": (),
}
ALLOW = "checkpoint.allow_changes"
_SECTIONS = {"model": ModelConfig, "optimizer": OptimizerConfig, "model.router": RouterConfig, "data": DataConfig}


def _default(field: FieldInfo) -> Any:
    """The default of a key as a description has it; None for a key that must be set, or that follows from others."""
    if field.is_required() or field.default_factory_takes_validated_data:
        return None
    default = field.get_default(call_default_factory=True)
    return default.model_dump(mode="json") if isinstance(default, Section) else default


_DEFAULTS = {
    f"{at}.{name}": _default(field) for at, section in _SECTIONS.items() for name, field in section.model_fields.items()
}

# Settings of the rows of data, not of the network: a run that resumes compares them, a reader of weights has none.
OF_ROWS = ("encoder.sequence_length", "vision.patches_per_row")
NOT_OF_ALL = (*OF_ROWS, "ffn_hidden_size")  # older checkpoints have the width of MLPs without any, too


class SettingDifference(NamedTuple):
    """A setting whose value in a checkpoint differs from this run's."""

    key: str
    saved: Any
    mine: Any

    def __str__(self) -> str:
        """`key=value, but this run has value`; of two lists of files or sources those that are not in both."""
        key, saved, mine = self
        if key == "data.tokenizer.pictures.content":
            return "what the folder of data.tokenizer says of pictures is not what it said at the checkpoint"
        if key.endswith(".content"):
            return f"{key.removesuffix('.content')} has another content than at the checkpoint"
        if key.endswith(".digests"):
            changed = listed([_with_index(path) for path in saved if saved[path] != mine[path]], "and")
            return f"{key.removesuffix('.digests')}: {changed} has another content than at the checkpoint"
        of_files = key.endswith(".files")
        if of_files or (isinstance(saved, list) and isinstance(mine, list) and show(saved) == show(mine)):
            key, common = f"files of {key[:-6]}" if of_files else key, [each for each in saved if each in mine]
            if not len(saved) == len(mine) == len(common):  # else their order differs
                saved, mine = ([each for each in items if each not in common] for items in (saved, mine))
        return f"{key}={show(saved)}, but this run has {show(mine)}"


def _with_index(path: str) -> str:
    return f"{path} or its .idx" if path.endswith(".bin") else path


def describe_model(model: ModelConfig) -> dict[str, Any]:
    """The settings that define the network; those of training alone may change between runs."""
    training_only = {name for name, field in ModelConfig.model_fields.items() if TRAINING_ONLY in field.metadata}
    description = model.model_dump(mode="json", exclude=training_only)
    description["encoder"] = _encoder_of_network(description["encoder"])
    # Not block_pattern, of whose kinds a folder's family may be: a hybrid's that has layers of attention alone
    description |= {name: _pattern(name, description[name], description) for name in ("layer_pattern", "rope_pattern")}
    if model.vision is not None:  # the length of its rows does not define it
        del description["vision"]["patches_per_row"]
    if not reads_ffn_width(model):
        del description["ffn_hidden_size"]
    router = description.pop("router")
    for heads in unused_sections(model):
        del description[heads.section]
    if model.num_experts is None:  # the form of dense models' descriptions before experts existed
        return {name: value for name, value in description.items() if "expert" not in name}
    return description | {f"router.{name}": router[name] for name in ROUTER_OF_NETWORK}


def _encoder_of_network(encoder: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an encoder that define it: not the length of its sequences, nor those of other kinds."""
    return {name: value for name, value in encoder.items() if name != "sequence_length" and value is not None}


def has_optimizer_state(description: Mapping[str, Any]) -> bool:
    """Whether a checkpoint has optimizer state, and not only weights. Descriptions older than the key have no entry."""
    return description.get("optimizer_state", True)


def describe_lora(config: Config) -> dict[str, Any]:
    """The settings that define the adapters; empty without any."""
    lora = config.lora
    return {"rank": lora.rank, "alpha": lora.alpha, "targets": targets(config)} if lora.rank else {}


def describe_objective(config: Config) -> dict[str, Any]:
    """An objective that has parameters, and their shapes; empty for others."""
    if not replaces_head(config.objective.kind):
        return {}
    own = parameters(Transformer(config.model, objective=config.objective))
    shapes = {name.removeprefix(OBJECTIVE): [*p.shape] for name, p in own.items() if name.startswith(OBJECTIVE)}
    return {"kind": config.objective.kind, **shapes}


def describe_data(data: DataConfig) -> dict[str, Any]:
    """The settings that decide which tokens the n-th sample has."""
    infilling = ("fim_spm_rate", "fim_tokens") if data.fim_rate else ()
    keys = {
        "kind",
        "train",
        "split",
        "order",
        "fim_rate",
        "noise_density",
        "mean_span_length",
        "denoisers",
        *OF_SAMPLES.get(data.kind, OF_SAMPLES["indexed"]),  # of a registered kind
        *infilling,
    }
    packing = {"packing": data.row_packing} if "packing" in keys else {}
    return data.model_dump(mode="json", include=keys) | packing


def differences(saved: Mapping[str, Any], mine: Mapping[str, Any], sections: Sequence[str]) -> list[SettingDifference]:
    """All settings of `sections` that differ between a checkpoint's description and this run's."""
    found = []
    for section in sections:
        theirs, ours = saved[section], mine[section]
        if section == "data":
            theirs, ours = _data(theirs, ours), _data(ours, theirs)
        for name in {**theirs, **ours}:
            if name in NOT_OF_ALL and name not in ours:
                continue
            difference = SettingDifference(
                f"{section}.{name}", _value(theirs, section, name), _value(ours, section, name)
            )
            if difference.saved != difference.mine:
                found.append(difference)
    return found


def compare_descriptions(
    saved: Mapping[str, Any], mine: Mapping[str, Any], checkpoint: str, sections: Sequence[str], other: str
) -> None:
    """Raise InputError with all settings of `sections` in which a checkpoint's description differs from this run's.

    `checkpoint` names it in the error, `other` the correction besides restoring the settings.
    """
    if lines := [str(each) for each in differences(saved, mine, sections)]:
        raise _refusal(checkpoint, f"restore them, or {other}", lines)


def compare_models(
    saved: Mapping[str, Any], model: ModelConfig, source: str, other: str, allowed: Sequence[str] | None = None
) -> None:
    """Raise InputError if weights of the description `saved` are of another model; warn of changes in `allowed`.

    `source` names the weights, `other` is the correction besides restoring the settings. `allowed` are those of
    `checkpoint.allow_changes`; None: the command has no such setting.
    """
    mine, sections = {"model": describe_model(model)}, ("model",)
    if allowed is None:
        return compare_descriptions(saved, mine, source, sections, other)
    if model.num_experts is not None and saved["model"].get("num_experts") is None:
        refuse_dense(source, model, other)
    found = differences(saved, mine, sections)
    _refuse(found, model, allowed, source, other)
    for each in found:
        warnings.warn(f"{source}: let through by {ALLOW}: {each}.", stacklevel=2)


def refuse_dense(source: str, model: ModelConfig, other: str) -> NoReturn:
    """Raise InputError for weights of `checkpoint.init_from` without the experts of `model`."""
    raise InputError(
        f"{source} has no experts, but this run has model.num_experts={model.num_experts}: set "
        f"checkpoint.upcycle=true, with which each begins as a copy of its layer's MLP, or {other}."
    )


def refuse_changes(
    found: Sequence[SettingDifference], config: Config, checkpoint: str, other: str = "choose another run.dir"
) -> None:
    """Raise InputError with the differences that `checkpoint.allow_changes` does not name, or cannot let through.

    It cannot where the checkpoint's arrays are others than this run's. `other` is a further correction.
    """
    _refuse(found, config.model, config.checkpoint.allow_changes, checkpoint, other)


def _refuse(
    found: Sequence[SettingDifference], model: ModelConfig, allowed: Sequence[str], checkpoint: str, other: str
) -> None:
    reasons = [_reason(each, found, model) for each in found]
    refused = [(each, why) for each, why in zip(found, reasons, strict=True) if why or not _is_named(each, allowed)]
    if not refused:
        return
    cure = f"restore them, or {other}"
    if not all(why for _, why in refused):
        cure = f"restore them, {other}, or name those that are meant in {ALLOW}"
    lines = [
        f"{each} ({ALLOW} can't let it through: {why})" if why else f"{each}{_note(each)}" for each, why in refused
    ]
    raise _refusal(checkpoint, cure, lines)


def config_allows(config: Config, difference: SettingDifference) -> bool:
    """Whether `checkpoint.allow_changes` names a difference's key or its section."""
    return _is_named(difference, config.checkpoint.allow_changes)


def _is_named(difference: SettingDifference, names: Sequence[str]) -> bool:
    return any(f"{difference.key}.".startswith(f"{name}.") for name in names)


def _refusal(checkpoint: str, cure: str, lines: Sequence[str]) -> InputError:
    return InputError("\n  ".join([f"{checkpoint} was saved with other settings: {cure}.", *lines]))


def _data(data: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """A description's settings of the data, by config key, in comparison with another one.

    Paths of synthetic data are ignored. What follows from other keys and from the files, and what older descriptions
    lack, is compared if both have it.
    """
    if data["kind"] == other["kind"] in ("synthetic", OWN_BATCHES):
        return {}
    data, other = dict(_with_packing(data)), _with_packing(other)
    always, keys = ("kind", "train", "split", "order", "stages"), {"samples": "train_samples", "files": "train.files"}
    keys |= {"digests": "train.digests", "stage_files": "stages.files", "stage_digests": "stages.digests"}
    data |= {name: _of_equal_files(name, data, other) for name in ("digests", "stage_digests") if name in data}
    keys |= {f"{name}_content": f"{name}.content" for name in ("tokenizer", "chat_template")}
    keys["pictures_content"] = "tokenizer.pictures.content"
    return {keys.get(name, name): value for name, value in data.items() if name in always or name in other}


def _of_equal_files(name: str, data: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The hashes of files that both descriptions have, with one size: the lists of files show other changes."""
    mine, theirs = (
        {path: size for path, size in [*d.get("files", ()), *d.get("stage_files", ())]} for d in (data, other)
    )
    return {
        path: found for path, found in data[name].items() if path in other.get(name, ()) and mine[path] == theirs[path]
    }


def _with_packing(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Descriptions older than `data.packing` get the packing of their time."""
    of_chats = "best_fit" if data.get("pack", True) else "none"
    return {"packing": of_chats if data["kind"] == "chat" else "sequential", **data}


def _value(description: Mapping[str, Any], section: str, name: str) -> Any:
    """A setting in a description's section; a checkpoint that is older than a key was saved with its default."""
    value = description.get(name, _DEFAULTS.get(f"{section}.{name}"))
    if name == "encoder" and section == "model":  # checkpoints older than it have the default
        return _encoder_of_network(value)
    if name == "rope_scaling" and value:  # older checkpoints lack the keys of newer kinds
        return RopeScaling.model_validate(value).model_dump(mode="json")
    if name in ("layer_pattern", "rope_pattern", "block_pattern"):  # older checkpoints have them as they were written
        return _pattern(name, value, description)
    return value


def _pattern(name: str, value: Sequence[str] | None, description: Mapping[str, Any]) -> list[str] | None:
    """The shortest form of a pattern of the layers; None if they are those of null."""
    if value is None:
        return None
    pattern = shortest_pattern(tuple(value), description["num_layers"])
    of_null = {
        "layer_pattern": "local" if description.get("sliding_window") else "global",
        "rope_pattern": "rope",
        "block_pattern": MOE if description.get("num_experts") else DENSE,
    }
    return None if pattern == (of_null[name],) else [*pattern]


def _reason(difference: SettingDifference, found: Sequence[SettingDifference], model: ModelConfig) -> str:
    """The reason why a state that was saved with a difference has other arrays than this run's; empty if it has not."""
    section = difference.key.partition(".")[0]
    if why := OTHER_ARRAYS.get(section) or OTHER_ARRAYS.get(difference.key):
        return why
    if section == "model" and _shapes(_saved_model(found, model)) != _shapes(model):
        return "the model's arrays have other shapes"
    return ""


def _saved_model(found: Sequence[SettingDifference], model: ModelConfig) -> ModelConfig:
    """The model of a checkpoint that differs from `model` in the differences `found`."""
    values = model.model_dump(mode="json")
    for key, saved, _ in found:
        section, *parents, name = key.split(".")
        if section == "model":
            (values[parents[0]] if parents else values)[name] = saved
    return ModelConfig.model_validate(values)


def _note(difference: SettingDifference) -> str:
    """What a user should know of a difference in a value that may follow from other keys."""
    if OWN_BATCHES in (difference.saved, difference.mine):
        return f" ({OWN_BATCHES}: the batches are made by the program that gives it to megajax.Trainer)"
    if difference.key != "data.train_samples":
        return ""
    return (
        " (by default the samples up to run.steps, and data.order=megatron orders them as a whole: if named, the other"
        " samples come in another order, and some again; set from the start, run.steps may be raised up to it)"
    )


def _shapes(model: ModelConfig) -> dict[str, Any]:
    """The shapes of a model's parameters and of its layers' state."""
    return {name: p.shape for name, p in parameters(Transformer(model)).items()} | layer_state(model)
