"""Megatron-LM's flags: name, type, default, and what becomes of each here.

One place for all who need them: the tables of docs/migration.md, the answers to unknown keys, and `from-megatron`.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from megajax.config.megatron_names import WITH_COUNTERPART
from megajax.config.megatron_without import ALWAYS_SO, NO_EFFECT, NOT_POSSIBLE
from megajax.config.other_name import OtherName, rows

VERSION = "0.20"  # of Megatron-Core: that of the defaults
KEY, NO_EFFECT_HERE, ALWAYS_SO_HERE, REFUSED = "key", "no effect here", "always so here", "not possible"
MANY = "many"  # the type of a flag that takes one value or more
_TYPES = {"int": int, "float": float, "str": str}


class Flag(NamedTuple):
    """A flag: `dest` is the name of Megatron's argument, `kind` its type: flag, off, int, float, str or many."""

    name: str
    dest: str
    kind: str
    default: Any
    outcome: str  # KEY, NO_EFFECT_HERE, ALWAYS_SO_HERE or REFUSED
    note: str

    @property
    def takes_value(self) -> bool:
        """Whether the flag is followed by a value, or by several."""
        return self.kind not in ("flag", "off")

    def value_of(self, words: list[str]) -> Any:
        """The value of the words that follow the flag. Raises ValueError for one that is not of its type."""
        if not self.takes_value:
            return self.kind == "flag"
        return list(words) if self.kind == MANY else _TYPES[self.kind](words[0])


def _parsed(row: OtherName, outcome: str) -> Iterator[Flag]:
    for text in row.names:
        name, _, rest = text.partition(" ")
        described = re.fullmatch(r"(\w*)(?:=(.*?))?(?:->(\w+))?", rest)
        assert described, f"{text!r} is no flag of the table"
        kind, default, dest = described[1] or "flag", described[2], described[3]
        value = {"flag": False, "off": True}.get(kind)
        if default is not None:
            value = default.split() if kind == MANY else _TYPES[kind](default)
        yield Flag(name, dest or name.replace("-", "_"), kind, value, outcome, row.note)


def _named(row: OtherName) -> OtherName:
    names = (text.partition(" ")[0] for text in row.names)
    return row._replace(names=tuple(name for name in names if "_" not in name))  # two are spelled with dashes too


_TABLES = {
    outcome: rows(text)
    for outcome, text in (
        (KEY, WITH_COUNTERPART),
        (NO_EFFECT_HERE, NO_EFFECT),
        (ALWAYS_SO_HERE, ALWAYS_SO),
        (REFUSED, NOT_POSSIBLE),
    )
}
MEGATRON = tuple(map(_named, _TABLES[KEY]))
MEGATRON_WITHOUT = {outcome: tuple(map(_named, _TABLES[outcome])) for outcome in list(_TABLES)[1:]}

FLAGS = {
    flag.name: flag
    for outcome, table in _TABLES.items()
    for row in table
    for flag in _parsed(row, outcome if row.ours or outcome != KEY else ALWAYS_SO_HERE)
}
DEFAULTS = {flag.dest: flag.default for flag in reversed(FLAGS.values())}  # by Megatron's names of arguments
