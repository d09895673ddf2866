"""A translation as it grows: keys of a config with their values and the flags that they come from."""

from collections.abc import Mapping
from functools import reduce
from typing import Any, NamedTuple

from megajax.config.megatron_flags import ALWAYS_SO_HERE, DEFAULTS, KEY, NO_EFFECT_HERE, REFUSED, VERSION
from megajax.errors import InputError
from megajax.tools.from_megatron.arguments import DESTS, Arguments
from megajax.tools.from_megatron.differences import DIFFERENCES

DEFAULT = "Megatron's default"
NOT_READ = "without effect beside the other flags"


class Setting(NamedTuple):
    """The value of a key, and where it comes from."""

    value: Any
    source: str


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The values of dotted keys in mappings by section and name."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *path, name = key.split(".")
        reduce(lambda below, part: below.setdefault(part, {}), path, tree)[name] = value
    return tree


class Translation:
    """What becomes of the arguments: settings, warnings, and refusals, which end it."""

    def __init__(self, arguments: Arguments, world: int):
        self.arguments, self.world = arguments, world
        self.settings: dict[str, Setting] = {}
        self.warnings: list[str] = []
        self.refused: list[str] = []

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def given(self, *names: str) -> list[str]:
        """Those of the arguments that are in the line."""
        return [name for name in names if name in self.arguments.given]

    def use(self, *names: str) -> None:
        """Note that arguments were read."""
        self.arguments.used.update(names)

    def put(self, key: str, value: Any, *names: str, note: str = "") -> None:
        """Set a key; `names` are the arguments that its value comes from."""
        self.use(*names)
        given = [self.arguments.shown(name) for name in self.given(*names)]
        self.arguments.known(str(value), f"the value of {' '.join(given)}")
        self.settings[key] = Setting(value, " ".join(dict.fromkeys(given)) or note or DEFAULT)

    def copy(self, key: str, name: str, value: Any = None) -> None:
        """Set a key to an argument (or to `value`) if it is in the line."""
        if self.given(name) and self[name] is not None:
            self.put(key, self[name] if value is None else value, name)

    def differs(self, row: str, *names: str) -> None:
        """Warn about a formula that differs."""
        assert row in DIFFERENCES
        self.use(*names)
        shown = " ".join(self.arguments.shown(name) for name in names[:1])
        self.warnings.append(f"{shown}: {DIFFERENCES[row].ours} (docs/migration.md, row {row}).")

    def refuse(self, problem: str, *names: str) -> None:
        """Note what is not possible; all of it is one error at the end."""
        self.use(*names)
        shown = " ".join(self.arguments.shown(name) for name in names)
        self.refused.append(f"{shown}: {problem}" if shown else problem)

    def finish(self) -> dict[str, list[tuple[str, str]]]:
        """The flags that became no setting, by class: (the flag, the reason). `InputError` for refused ones."""
        found: dict[str, list[tuple[str, str]]] = {NO_EFFECT_HERE: [], ALWAYS_SO_HERE: [], NOT_READ: []}
        for name in self.arguments.given:
            shown, flag = self.arguments.shown(name), DESTS[name]
            if name in self.arguments.used:
                continue
            if flag.outcome == REFUSED:
                if self[name] not in (DEFAULTS[name], None):
                    self.refused.append(f"{shown}: {flag.note}")
            elif flag.outcome == KEY:
                found[NOT_READ].append((shown, ""))
            else:
                found[flag.outcome].append((shown, flag.note))
        if self.refused:
            where = self.arguments.location
            raise InputError(
                f"{len(self.refused)} of the settings of Megatron-LM {VERSION} cannot be translated ({where}):\n  "
                + "\n  ".join(self.refused)
            )
        return found
