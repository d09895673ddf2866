"""The engine of the rules beside keys (`schema/rules.py`): what they say about a config."""

import functools
import operator
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo

from megajax.config.sentences import at_most, divisors, fail, format_keys, listed
from megajax.schema.config import Config
from megajax.schema.fields import Section
from megajax.schema.keys import keys
from megajax.schema.rules import AtMost, Below, Divides, Excludes, MultipleOf, Needs, ReadIf, Rule
from megajax.schema.tree import show


class Statement:
    """A rule of a key, with full names."""

    def __init__(self, key: str, other: str, rule: Rule):
        self.key, self.other, self.rule = key, other, rule
        self.values = operator.attrgetter(key, other)
        self.defaults = default_of(key), default_of(other)

    def is_broken(self, config: Config) -> bool:
        return not self.rule.holds(*self.values(config), *self.defaults)

    def problem(self, config: Config) -> str:
        """The sentence about a broken rule, without its cure."""
        this, other = format_keys(config, self.key), format_keys(config, self.other)
        if isinstance(self.rule, Needs):
            need = self.rule.what or self.other + (f"={self.rule.values}" if isinstance(self.rule.values, str) else "")
            return f"{this} needs {need}" + ("" if other == f"{need}=null" else f", but {other}")
        return f"{this} {self.rule.WORDS} {other}" + (f", because {self.rule.because}" if self.rule.because else "")

    def cure(self, config: Config) -> str:
        """The cure of a broken rule that has none of its own."""
        value, other = self.values(config)
        match self.rule:
            case Needs(values=needed):
                exactly = f"={show(needed)}" if isinstance(needed, str | bool) else ""
                return f"set {self.other}{exactly}, or remove {self.key}"
            case Divides():
                return f"use {listed(divisors(other))}, or change {self.other}"
            case MultipleOf():
                return f"set {self.other}={value}" + (f", or use a multiple of {other}" if other else "")
            case AtMost():
                return f"use {at_most(other)}, or raise {self.other}"
        return "remove one of them"


def check_rules(config: Config, *sections: str) -> None:
    """Raise `ConfigError` for a key with a value that breaks one of its rules.

    With `sections`, such as "model.", only rules between their keys count.
    """
    of = sections or ("",)
    for each in _statements(config, Needs, Excludes, Divides, MultipleOf, AtMost, Below):
        if each.key.startswith(of) and each.other.startswith(of) and each.is_broken(config):
            ignored = () if isinstance(each.rule, Needs) else [key for key, _ in unread(config)]
            if each.key not in ignored and each.other not in ignored:
                fail(config, each.problem(config), each.rule.cure or each.cure(config), each.key, each.other)


def unread(config: Config) -> list[tuple[str, str]]:
    """The keys that are not read, whatever their values, each with the key because of which."""
    return [(each.key, each.other) for each in _statements(config, ReadIf) if each.is_broken(config)]


def default_of(key: str) -> Any:
    """The default of a key in the schema."""
    return _fields()[key].default


def _statements(config: Config, *kinds: type[Rule]) -> Iterator[Statement]:
    """The rules of some kinds about the keys that the config has."""
    absent = tuple(f"model.{name}." for name in ("rope_scaling", "vision") if getattr(config.model, name) is None)
    return (each for each in all_statements(kinds) if not each.key.startswith(absent))


@functools.cache
def _fields() -> dict[str, FieldInfo]:
    return Config.model_fields | dict(keys())


@functools.cache
def all_statements(kinds: tuple[type[Rule], ...]) -> list[Statement]:
    """All rules of some kinds; one of a section is one of each of its keys."""
    found, fields = [], _fields()
    for key, field in fields.items():
        is_section = isinstance(field.annotation, type) and issubclass(field.annotation, Section)
        inner = [name for name in fields if name.startswith(f"{key}.")] if is_section else [key]
        for rule in (each for each in field.metadata if isinstance(each, kinds)):
            other = rule.other if "." in rule.other else f"{key.rpartition('.')[0]}.{rule.other}"
            found += [Statement(name, other, rule) for name in inner]
    return found
