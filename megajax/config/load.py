"""Loads a config: YAML files with includes, then overrides; every mistake is one sentence with its location."""

import difflib
import itertools
import re
import warnings
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from megajax.config.checks import check
from megajax.config.extensions import import_extensions
from megajax.config.missing_features import missing_feature
from megajax.config.other_names import counterpart, plain
from megajax.config.other_values import choice_cure
from megajax.config.run_checks import check_one_length
from megajax.config.sentences import listed
from megajax.errors import MOST_SHOWN, ConfigError, file_reader, shown
from megajax.options.registry import Registry
from megajax.schema.config import Config
from megajax.schema.keys import keys
from megajax.schema.tree import NAMED, RENAMED, Tree, as_override, leaves, read_file, read_override, show


@file_reader("path", cure="correct it")
def load_config(path: str | Path, overrides: Sequence[str] = (), run_dir: Path | None = None) -> Config:
    """The config in file `path`, changed by `overrides` ("section.key=value"), resolved and checked.

    A file that does not exist may be the name of one in configs/: llama3_8b. `run.extensions` are imported first; with
    `run_dir`, whose record the file is, only those outside this directory. Raises `ConfigError`; warns about settings
    without effect.
    """
    if not isinstance(path, (str, PathLike)):
        raise ConfigError(f"{shown(path)} is of the type {type(path).__name__}, not a path: give that of a YAML file.")
    if (
        isinstance(overrides, str)
        or not isinstance(overrides, Sequence)
        or not all(isinstance(each, str) for each in overrides)
    ):
        raise ConfigError(f'{shown(overrides)} is no list of overrides: write ["section.key=value", ...].')
    tree = read_tree(path, overrides)
    for section in Config.model_fields:
        if tree.values.get(section) is None:
            tree.values[section] = {}
    _drop_removed_key(tree)
    if run_dir is None:  # nobody edits a run's record
        for former, location in tree.former.items():
            warnings.warn(f"{former} is called {RENAMED[former]} now ({location}): rename it.", stacklevel=3)
    _import_extensions(tree, run_dir)
    try:
        config = Config.model_validate(tree.values)
    except ValidationError as error:
        raise ConfigError(_sentence(error, tree, str(path))) from None
    config._locations.update(tree.locations)
    _check_allowed_changes(config)
    if run_dir is None:
        check_one_length(config)
    check(config)
    return config


def with_steps(config: Config, steps: int) -> Config:
    """`config`, which has `run.epochs`, with the number of steps that they are; checked again.

    Warns only about what the number of steps changes.
    """
    settings = config.model_dump(mode="json")
    settings["run"]["steps"] = steps
    made = Config.model_validate(settings)
    made._locations.update(config._locations | {"run.steps": config.where("run.epochs")})
    before, now = _warnings(config), _warnings(made)
    for text in now:
        if text not in before:
            warnings.warn(text, stacklevel=3)
    return made


def _warnings(config: Config) -> list[str]:
    """What `check` warns about."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        check(config)
    return [str(each.message) for each in found]


def read_tree(path: str | Path, overrides: Sequence[str]) -> Tree:
    """The values of a file changed by `overrides`, as they are written, without defaults."""
    tree = read_file(config_path(path))
    for override in overrides:
        tree.merge(read_override(override))
    return tree


def config_path(name: str | Path) -> Path:
    """The file of a config: the path itself, or if there is no such file, that of the name in configs/."""
    path, named = Path(name), NAMED / f"{name}.yaml"
    try:
        return named if named.is_file() and not path.is_file() else path
    except OSError as error:  # a name of 300 letters
        raise ConfigError(
            f"config file {shown(name)} cannot be read ({error.strerror}): give the path of a YAML file."
        ) from None


def _import_extensions(tree: Tree, run_dir: Path | None) -> None:
    """Import `run.extensions` and put the paths of files in full; other values than names are left to the schema."""
    run, key = tree.values["run"], "run.extensions"
    names = run.get("extensions") if isinstance(run, dict) else None
    if isinstance(names, list) and all(isinstance(name, str) and name for name in names):
        run["extensions"] = import_extensions(names, tree.locations.get(key, "default"), run_dir)


def _check_allowed_changes(config: Config) -> None:
    """Raise ConfigError for a name in `checkpoint.allow_changes` that is neither a key nor a section."""
    key, entries = "checkpoint.allow_changes", config.checkpoint.allow_changes
    known = [name for name, _ in keys()] if entries else []
    for entry in entries:
        if not any(f"{name}.".startswith(f"{entry}.") for name in known):
            raise ConfigError(
                f"{key} names {shown(entry)}, which is no config key ({config.where(key)}): {suggestion(entry)}"
            )


def _drop_removed_key(tree: Tree) -> None:
    """Accept `precision.params: float32`, which each `config.yaml` of an earlier version contains, with a warning."""
    precision = tree.values["precision"]
    if isinstance(precision, dict) and precision.get("params") == "float32":
        del precision["params"]
        location = tree.locations["precision.params"]
        warnings.warn(
            f"precision.params has no effect ({location}): remove it, the format is always float32.", stacklevel=4
        )


def help_text(part: str = "all") -> str:
    """A key, the keys of a section, or all keys, with meaning, type and default. `ConfigError` if there is none."""
    lines = ["Config keys, as section.key=value on the command line, nested in YAML files:"]
    for section, info in Config.model_fields.items():
        found = [
            f"  {key}  {field.description} [{type_of(field)}, {_default(field)}]"
            for key, field in keys()
            if key.startswith(f"{section}.") and (part == "all" or f"{key}.".startswith(f"{part}."))
        ]
        lines += ["", f"{section}: {info.annotation.__doc__}", *found] if found else []
    if len(lines) == 1:
        raise ConfigError(f"{part} is not a section of the config (the command line): {suggestion(part)}")
    return "\n".join(lines) + "\n"


def overview() -> str:
    """The list of sections."""
    width = max(map(len, Config.model_fields)) + 2
    lines = [f"  {name:{width}}{info.annotation.__doc__}" for name, info in Config.model_fields.items()]
    return "\n".join(["Config sections:", *lines, "", "--help SECTION shows its keys, --help all shows all keys.\n"])


def type_of(field: FieldInfo) -> str:
    """The type of a key, in words."""
    registry = Registry.of(field)
    return " | ".join(registry.choices) if registry else _type_name(field.annotation)


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " | ".join(get_args(annotation))
    if get_origin(annotation) is tuple:
        return f"list of ({_type_name(get_args(annotation)[0])})"
    if get_origin(annotation) is dict:
        return "mapping"
    if isinstance(annotation, type):
        return {str: "text"}.get(annotation, "mapping" if issubclass(annotation, BaseModel) else annotation.__name__)
    if hasattr(annotation, "__metadata__"):
        return _type_name(annotation.__origin__)
    names = ["null" if item is type(None) else _type_name(item) for item in get_args(annotation)]
    return " or ".join(names)


def _default(field: FieldInfo) -> str:
    if isinstance(field.json_schema_extra, dict):
        return f"default: {field.json_schema_extra['derived']}"
    if field.default_factory is not None:  # a subsection: its keys have defaults of their own
        return "default: {}"
    return "required" if field.is_required() else f"default: {show(field.default)}"


def _sentence(error: ValidationError, tree: Tree, path: str) -> str:
    """The sentence about the first mistake; unknown keys come first, because a misspelt key is also a missing one."""
    mistakes = [item for item in error.errors(include_url=False) if item["type"] != "default_factory_not_called"]
    mistakes.sort(key=lambda item: (item["type"] != "extra_forbidden", _is_list_for_a_choice(item)))
    if unknown := [item for item in mistakes if item["type"] == "extra_forbidden"]:
        return _unknown({_key(item): item["input"] for item in unknown}, tree, path)
    mistake, key = mistakes[0], _key(mistakes[0])
    location = _location(key, tree, path)
    if mistake["type"] == "missing":
        return f"{key} is not set ({location}): add it{_meaning(key)}."
    problem, cure = describe_problem(*(item for item in mistakes if _key(item) == key))
    if problem == "is not a list" and mistake["type"] != "value_error":
        cure = _as_list(_with_n(key), mistake["input"]) or cure
    elif problem == "is not a mapping" and _last(key).isdigit():
        cure = _as_list(_with_n(key).removesuffix(".N"), mistake["input"])
    cure = cure.replace("{first}", next((name for name, _ in keys() if name.startswith(f"{key}.")), ""))
    return f"{key}={show(mistake['input'])} {problem} ({location}): {cure}."


def _as_list(key: str, value: Any) -> str:
    """How to write `value` in the list that `key` is, as the end of a sentence; "" if its items may be anything."""
    if value is None:
        return "write [] for none"
    fields = {name.removeprefix(f"{key}.N."): field for name, field in keys() if name.startswith(f"{key}.N.")}
    fields = {name: field for name, field in fields.items() if "." not in name}
    if not fields:
        known = not isinstance(value, list | dict) and not key.endswith(".N")
        return f"write [{shown(value if isinstance(value, str) else as_override(value))}]" if known else ""
    first, *others = [name for name, field in fields.items() if field.is_required()] or list(fields)[:1]
    if isinstance(value, dict) and value.keys() <= fields.keys():
        return f"write [{as_override(value)}]"
    if not isinstance(value, dict) or not all(others or isinstance(own, dict) for own in value.values()):
        return f"write [{{{', '.join(f'{name}: ...' for name in (first, *others))}}}]"
    entries = []
    for name, own in value.items():  # {name: path}, or {name: {prefix: path}}
        named = [name] if get_origin(fields[first].annotation) is tuple else yaml.safe_load(name)
        entries.append({first: named, **(own if isinstance(own, dict) else dict.fromkeys(others, own))})
    return f"write {as_override(entries)}"


def _key(mistake: Any) -> str:
    """The dotted key of a mistake, without the names of the types that its value may have."""
    return ".".join(
        part for part in map(str, mistake["loc"]) if not re.match(r"~|(constrained-)?(bool|int|float|str)$|\w+\[", part)
    )


def _location(key: str, tree: Tree, path: str) -> str:
    """The location of `key` or of a key below it; else of the nearest key above it."""
    below = (location for name, location in tree.locations.items() if name == key or name.startswith(f"{key}."))
    parent = key.rpartition(".")[0]
    return next(below, None) or (_location(parent, tree, path) if parent else path)


def _meaning(key: str) -> str:
    text = next((field.description or "" for name, field in keys() if name == _with_n(key)), "")
    return f" ({text[:1].lower()}{text[1:].removesuffix('.')})" if text else ""


def _with_n(key: str) -> str:
    """The key with N instead of indices, as in the schema."""
    return re.sub(r"\.\d+(?=\.|$)", ".N", key)


def _unknown(values: dict[str, Any], tree: Tree, path: str) -> str:
    """The sentence about the first unknown key, and a list of the others; a list of our keys is written once."""
    lines: dict[str, str] = {}
    for key, value in leaves(values):
        cure = f": {suggestion(key, value)}"
        problem = " (" if lines else " is not a config key ("
        is_repeated = len(cure) > MOST_SHOWN and cure in lines.values()
        lines[f"{key}{problem}{_location(key, tree, path)})"] = "" if is_repeated else cure
    return "\n  ".join(f"{key}{cure}" for key, cure in lines.items())


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def suggestion(key: str, value: Any = None) -> str:
    """The correction of the unknown `key`, as the end of a sentence.

    It looks for the name among features that do not exist and in other frameworks, then for a similar key in the same
    section, then for a nearly equal one in any section: by its section and last part, or by its last part if no other
    key at the same depth has it. `value` may name a feature too.
    """
    if key in RENAMED:
        return f"did you mean {RENAMED[key]}?"
    if feature := missing_feature(key, value):
        return f"{feature}."
    if other := counterpart(key):
        return other.cure
    indices = re.findall(r"\.(\d+)\.", key)
    section, _, leaf = _with_n(plain(key)).rpartition(".")
    known = [name for name, _ in keys()]
    siblings = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == section}
    outside = [name for name in known if ".N." not in name]  # of lists' items
    elsewhere = {"_".join(name.split(".")[-2:]): name for name in outside}
    for last, same in itertools.groupby(sorted(outside, key=_last), _last):
        first, *others = sorted(same, key=lambda name: name.count("."))
        if not others or first.count(".") < others[0].count("."):
            elsewhere[last] = first
    near = [siblings[name] for name in difflib.get_close_matches(leaf, siblings, 1, 0.7)]
    for written in (leaf, f"{_last(section)}_{leaf}".lstrip("_")):
        near += [elsewhere[name] for name in difflib.get_close_matches(written, elsewhere, 1, 0.9)]
    if near:
        return f"did you mean {near[0].replace('.N.', f'.{indices[0]}.' if indices else '.N.')}?"
    if siblings:
        return f"{section} has {listed(siblings, 'and', 99)}."
    if outer := counterpart(key.partition(".")[0]):  # a setting within a section of another framework
        return outer.cure
    sections = difflib.get_close_matches(key, Config.model_fields, 1, 0.7)
    if sections:
        return f"did you mean the section {sections[0]}?"
    return f"the sections are {listed(Config.model_fields, 'and', 99)}."


_PROBLEMS = {
    "int_type": ("is not a whole number", "write one such as 4, without quotes"),
    "float_type": ("is not a number", "write one such as 0.1, without quotes"),
    "finite_number": ("is not a finite number", "write one such as 0.1"),
    "bool_type": ("is not true or false", "write true or false"),
    "string_type": ("is not text", "put it in quotes"),
    "string_too_short": ("is empty", "write a name"),
    "tuple_type": ("is not a list", "write it in brackets, with commas"),
    "too_short": ("is empty", "give at least one entry"),
    "too_long": ("has too many entries", "give {max_length}"),
    "union_tag_not_found": (
        "is not a data source",
        "write a path prefix, or a list of {{prefix, weight}}",
    ),
    "greater_than": ("is too small", "use more than {gt}"),
    "greater_than_equal": ("is too small", "use {ge} or more"),
    "less_than": ("is too large", "use less than {lt}"),
    "less_than_equal": ("is too large", "use {le} or less"),
    "model_type": ("is not a mapping", "set its keys, such as {{first}}"),
    "dict_type": ("is not a mapping", "write its keys in braces, as {{name: value}}"),
}


def describe_problem(*mistakes: Any) -> tuple[str, str]:
    """The problem with a value, and the correction; `mistakes` are those of each type that it may have."""
    mistake = mistakes[0]
    if choices := _choices(mistakes):
        key = _with_n(_key(mistake))
        more = any(name == key and Registry.of(field) is not None for name, field in keys())
        return "is not a choice", choice_cure(key, show(mistake["input"]), choices, more)
    kind, context = mistake["type"], mistake.get("ctx", {})
    if kind == "value_error":
        problem, _, cure = str(context["error"]).partition(": ")
        return problem, cure
    value = mistake["input"]
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return "is not a whole number", f"write {int(value)}"
    if kind == "model_type" and isinstance(value, str) and re.match(r"\w+:\S", value):
        return "is not a mapping", "write a space after each colon"
    problem, cure = _PROBLEMS.get(kind, ("is not valid", mistake["msg"]))
    limits = {n: int(v) if isinstance(v, float) and v.is_integer() else v for n, v in context.items()}
    return problem, cure.format(**limits)


def _is_list_for_a_choice(mistake: Any) -> bool:
    """Whether a list is none of the choices of a key, which then may be a list too."""
    return mistake["type"] == "literal_error" and isinstance(mistake["input"], list | tuple)


def _choices(mistakes: Sequence[Any]) -> list[str]:
    """The choices of a value that is none of them; empty for other mistakes."""
    expected = [
        item["ctx"]["expected"]
        for item in mistakes
        if item["type"] == "literal_error" and (len(mistakes) == 1 or not _is_list_for_a_choice(item))
    ]
    kinds = {item["type"] for item in mistakes}
    others = ["true", "false"] * ("bool_type" in kinds) + ["a number"] * ("int_type" in kinds)
    return [*others, *re.findall(r"'([^']*)'", " ".join(expected))] if expected else []
