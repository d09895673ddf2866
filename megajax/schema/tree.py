"""YAML files and overrides as one tree of values with the location of each."""

import contextlib
import copy
import difflib
import functools
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megajax.errors import ConfigError, file_reader, shown
from megajax.files import CONFIG, read_text, why_unreadable

NAMED = Path(__file__).parents[2] / "configs"  # the configs that have names

COMMAND_LINE = "the command line"  # begins the location of an override
MAX_BRACKETS = 100  # one in the other
MAX_BYTES = 2**22  # of a file
MAX_FILES = 200  # with includes
MAX_VALUES = 50_000  # of a file; an alias counts as the values that it stands for


class Loader(yaml.SafeLoader):
    """Reads plain scalars as YAML 1.2 does: 3e-4 is a number, yes and 010 are text."""

    yaml_implicit_resolvers = {}

    def fetch_flow_collection_start(self, token: Any) -> None:
        if self.flow_level == MAX_BRACKETS:  # the parser's time is quadratic in it
            raise RecursionError
        super().fetch_flow_collection_start(token)


class Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # pyright: ignore[reportGeneralTypeIssues]
    """Quotes text only if `Loader` would read it as another type; short lists stay on one line."""

    yaml_implicit_resolvers = {}


_SCALARS = {
    "bool": (r"true|false", "tf"),
    "int": (r"[-+]?(?:0|[1-9][0-9_]*)", "-+0123456789"),
    "float": (
        r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+|[0-9][0-9_]*\.[0-9_]*"
        r"|\.[0-9]+(?:[eE][-+]?[0-9]+)?|\.inf)|\.nan",
        "-+.0123456789",
    ),
    "null": (r"null|~|", ["n", "~", ""]),
}
for _name, (_pattern, _first) in _SCALARS.items():
    for _class in (Loader, Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"^(?:{_pattern})$"), list(_first))


def _represent_list(dumper: yaml.SafeDumper, value: list[Any]) -> yaml.Node:
    flat = not any(isinstance(item, (list, dict)) for item in value)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=flat or None)


Dumper.add_representer(list, _represent_list)


# The names of today of keys that had another one. The former names are still understood.
RENAMED = {
    "kernels.context": "communication.context",
    "kernels.dispatch": "communication.experts",
    "pipeline.rounds": "pipeline.virtual_stages",
    "data.pack": "data.packing",
}
# The values of today of those whose values changed too.
_VALUES = {"data.pack": {True: None, False: "none"}}
# Keys whose mapping is one value: a later one replaces it as a whole.
_WHOLE = ("batch.schedule", "data.train", "data.valid", "data.test")


@dataclass
class Tree:
    """Nested values, and the location ("file, line n" or the override) of every dotted key in them."""

    values: dict[str, Any] = field(default_factory=dict)
    locations: dict[str, str] = field(default_factory=dict)
    former: dict[str, str] = field(default_factory=dict)  # the former names that were written, with their locations

    def merge(self, later: "Tree") -> None:
        """Let `later` override: mappings are merged key by key but for those of `_WHOLE`, other values are replaced."""
        self._merge(self.values, later.values, "")
        self.locations.update(later.locations)
        self.former.update(later.former)

    def rename(self) -> "Tree":
        """Give each key with a former name its name of today."""
        for former, key in RENAMED.items():
            (section, name), (new_section, new_name) = former.split("."), key.split(".")
            old = self.values.get(section)
            new = self.values.get(new_section) or {}
            if not isinstance(old, dict) or name not in old or not isinstance(new, dict):
                continue
            location = self.locations.pop(former)
            if new_name in new:
                problem = f"{key} is set twice, once by its former name {former} ({location})"
                raise ConfigError(f"{problem}: remove {former}.")
            value = old.pop(name)
            if former in _VALUES and isinstance(value, bool):
                value = _VALUES[former][value]
            self.values[new_section] = (self.values.get(new_section) or {}) | {new_name: value}
            self.locations[key] = self.former[former] = location
            if not self.values[section]:
                del self.values[section]
        return self

    def _merge(self, below: dict[str, Any], above: dict[str, Any], prefix: str) -> None:
        for key, value in above.items():
            both = isinstance(value, dict) and isinstance(below.get(key), dict)
            if both and f"{prefix}{key}" not in _WHOLE:
                self._merge(below[key], value, f"{prefix}{key}.")
            else:
                if isinstance(below.get(key), dict | list):
                    gone = f"{prefix}{key}."
                    self.locations = {name: at for name, at in self.locations.items() if not name.startswith(gone)}
                below[key] = value


def leaves(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The dotted keys below mappings, with their values; an empty mapping is a value."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves({f"{key}.{name}": own for name, own in value.items()})
        else:
            yield key, value


def show(value: Any) -> str:
    """A value as in an override, cut to 60 characters."""
    text = as_override(value)
    return text if len(text) <= 60 else text[:57] + "..."


def as_override(value: Any) -> str:
    """A value as in an override."""
    if value is None or type(value) is int:  # YAML's dumper takes a hundred times as long; the planner shows thousands
        return "null" if value is None else str(value)
    text = _on_a_line(value, allow_unicode=True)
    text = text if text.isprintable() else _on_a_line(value, allow_unicode=False)
    return json.dumps(value, ensure_ascii=False) if "\n" in text else text  # text of several lines


def _on_a_line(value: Any, allow_unicode: bool) -> str:
    options: Any = {"default_flow_style": True, "width": 10**6, "sort_keys": False, "allow_unicode": allow_unicode}
    return yaml.dump(value, Dumper=Dumper, **options).removesuffix("\n").removesuffix("\n...")


@file_reader("path", cure="correct it")
def read_file(
    path: Path, parents: tuple[Path, ...] = (), included_at: str = "", reads: Iterator[int] | None = None
) -> Tree:
    """A config file with its includes. `parents` are the files that include it, `included_at` is the last location.

    `reads` counts the files: those that include each other twice double with each level.
    """
    location = f" ({included_at})" if included_at else ""
    if "\0" in str(path):
        raise ConfigError(f"config file {shown(path)} is no file{location}: correct its name.")
    reads = reads or itertools.count()
    if next(reads) == MAX_FILES:
        raise ConfigError(f"a config includes {MAX_FILES} files and more{location}: include each file once.")
    if path.resolve() in [parent.resolve() for parent in parents]:
        chain = " -> ".join(str(file) for file in (*parents, path))
        raise ConfigError(f"the includes form a circle, {chain}{location}: remove one of them.")
    values, locations = _parse(_read_text(path, location), str(path))
    if not isinstance(values, dict | None):
        raise ConfigError(f"{path} holds {show(values)} instead of sections: begin with a section such as model.")
    own = Tree(values or {}, locations)
    line = own.locations.get("include", str(path))
    includes = own.values.pop("include", None)
    if isinstance(includes, str):
        includes = [includes]
    if not isinstance(includes, list | None) or not all(isinstance(item, str) for item in includes or []):
        raise ConfigError(f"include={show(includes)} is not a file ({line}): write a path or a list of paths.")
    tree = Tree()
    for item in includes or []:
        tree.merge(read_file(_beside(path, item), (*parents, path), line, reads))
    own.locations = {key: at for key, at in own.locations.items() if key.split(".")[0] != "include"}
    tree.merge(own.rename())
    return tree


def read_override(text: str) -> Tree:
    """`section.key=value` with a YAML value."""
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", key):
        raise ConfigError(f"{shown(text)} is not an override (the command line): write section.key=value.")
    if key == "include":
        raise ConfigError(f"{shown(text)} is not an override (the command line): write the include in a file.")
    location = f"{COMMAND_LINE}: {shown(text)}"
    parsed, locations = _parse(value, location, key)
    for name in reversed(key.split(".")):
        parsed = {name: parsed}
    return Tree(parsed, {key: location} | locations).rename()


def _beside(path: Path, item: str) -> Path:
    return Path(os.path.normpath(path.parent / item))


def _read_text(path: Path, location: str) -> str:
    try:
        return read_text(path, MAX_BYTES)
    except FileNotFoundError:
        named = NAMED.is_dir() and not location  # an include is a path
        near = _nearest_file(path, named)
        cure = "give the path of a YAML file" + (
            ", or the name of one in configs/, such as llama3_8b." if named else "."
        )
        cure = f"did you mean {near}?" if near else cure
        raise ConfigError(f"config file {shown(path)} does not exist{location}: {cure}") from None
    except (OSError, UnicodeDecodeError) as error:
        of_run = path / CONFIG  # its directory, as other commands take it
        cure = f"did you mean {of_run}?" if of_run.is_file() else "give a YAML file."
        raise ConfigError(
            f"config file {shown(path)} cannot be read{location}, {why_unreadable(error)}: {cure}"
        ) from None


def _nearest_file(path: Path, named: bool) -> str | None:
    """The config with nearly the same name: beside the path, in configs/ and models/ below it, or a `named` one."""
    below = ("", "configs", "configs/models", "models")
    beside = [file for folder in below for file in (path.parent / folder).glob("*.yaml")]
    found = {_letters(file.stem): str(file) for file in reversed(beside)}
    if named:
        for file in [*NAMED.glob("*.yaml"), *NAMED.glob("models/*.yaml")]:
            found.setdefault(_letters(file.stem), str(file.relative_to(NAMED).with_suffix("")))
    near = difflib.get_close_matches(_letters(re.sub(r"\.ya?ml$", "", path.name)), found, 1, 0.7)
    return found[near[0]] if near else None


def _letters(name: str) -> str:
    """Letters and digits in small letters: names of models are written with -, _ and dots."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


# The beginning of a parser's message, and the correction.
_YAML_CURES = {
    "mapping values are not allowed here": "check the indentation and the space after each colon, and quote text with"
    " a colon",
    "found character '\\t'": "indent with spaces instead of tabs",
    "expected <block end>": "check the indentation",
    "could not find expected ':'": "write key: value, with a space after the colon",
    "expected ',' or": "close the bracket",
    "but found another document": "remove the line ---",
}


def _parse(text: str, source: str, key: str = "") -> tuple[Any, dict[str, str]]:
    """Value and locations of YAML `text`; with `key`, the value of this key from the override `source`."""
    return copy.deepcopy(_parsed(text, source, key))


@functools.lru_cache(maxsize=1024)  # the planner reads the same file and overrides thousands of times
def _parsed(text: str, source: str, key: str) -> tuple[Any, dict[str, str]]:
    try:
        loader, node = _compose(text)
        reader = _Reader(loader, source, bool(key))
        return (None if node is None else reader.read(node, key, ())), reader.locations
    except RecursionError:
        raise ConfigError(f"{source} is nested too deeply: write sections, keys and lists only.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None and not key else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "it cannot be read"
        quote = f"; put text in quotes, such as '{key}=\"TEXT\"' in a shell" if key else ""
        if source.endswith(".toml"):
            raise ConfigError(
                f"{source} is TOML: write YAML; docs/migration.md has torchtitan's keys and ours."
            ) from None
        cure = next((f"; {cure}" for start, cure in _YAML_CURES.items() if str(problem).startswith(start)), quote)
        raise ConfigError(f"not valid YAML ({source}{line}): {problem}{cure}.") from None


def _compose(text: str) -> tuple[Any, yaml.Node | None]:
    """(loader, root node) of YAML `text`, by libyaml where PyYAML has it: in a tenth of the time.

    `Loader` reads what libyaml refuses, for its messages; what may exceed MAX_BRACKETS; tabs and tags, which libyaml
    reads otherwise.
    """
    is_plain = sum(map(text.count, "[{")) <= MAX_BRACKETS and not set("\t!") & set(text)
    if is_plain and hasattr(yaml, "CSafeLoader"):
        with contextlib.suppress(yaml.YAMLError):
            fast = yaml.CSafeLoader(text)
            fast.yaml_implicit_resolvers = Loader.yaml_implicit_resolvers
            return fast, fast.get_single_node()
    loader = Loader(text)
    return loader, loader.get_single_node()


class _Reader:
    """Turns YAML nodes into values and notes each key's location."""

    def __init__(self, loader: Loader, source: str, one_location: bool):
        self.loader, self.source, self.one_location = loader, source, one_location
        self.locations: dict[str, str] = {}
        self.count = 0

    def read(self, node: yaml.Node, key: str, parents: tuple[yaml.Node, ...]) -> Any:
        self.count += 1
        if self.count > MAX_VALUES:
            problem = f"{self.source} has more than {MAX_VALUES:,} values"
            raise ConfigError(f"{problem}: write it without aliases of aliases.")
        if node in parents:
            raise ConfigError(f"{key} contains itself ({self.location(node)}): write it without the alias.")
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, key, (*parents, node))
        if isinstance(node, yaml.SequenceNode):
            return [self.item(child, f"{key}.{i}", (*parents, node)) for i, child in enumerate(node.value)]
        return self.scalar(node, key)

    def scalar(self, node: yaml.Node, key: str) -> Any:
        try:
            if node.tag.endswith((":int", ":float")) and ":" in node.value:  # to YAML 1.1 a number in base 60
                raise ValueError
            value = self.loader.construct_object(node)
        except (ValueError, KeyError, IndexError, AttributeError):  # a tag such as !!int, or thousands of digits
            problem = f"{key}={node.value[:60]} does not fit its type ({self.location(node)})"
            raise ConfigError(f"{problem}: correct it, or remove its tag.") from None
        if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):  # no file name, and no text in UTF-8
            raise ConfigError(f"{key} has a character that is not text ({self.location(node)}): remove it.")
        return value

    def mapping(self, node: yaml.MappingNode, key: str, parents: tuple[yaml.Node, ...]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name_node, child in node.value:
            name = name_node.value
            if not isinstance(name, str):
                raise ConfigError(f"a key is not text ({self.location(name_node)}): write keys as plain words.")
            full = f"{key}.{name}" if key else name
            if name in values:
                first = self.locations[full].rpartition(", ")[2]
                raise ConfigError(f"{full} is set twice ({self.location(name_node)}; first on {first}): keep one.")
            self.locations[full] = self.location(name_node)
            values[name] = self.read(child, full, parents)
        return values

    def item(self, node: yaml.Node, key: str, parents: tuple[yaml.Node, ...]) -> Any:
        self.locations[key] = self.location(node)
        return self.read(node, key, parents)

    def location(self, node: yaml.Node) -> str:
        return self.source if self.one_location else f"{self.source}, line {node.start_mark.line + 1}"
