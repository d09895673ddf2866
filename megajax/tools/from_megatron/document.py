"""A translation as a config file: each value with a comment that names its flag."""

from typing import Any

from megajax.config.megatron_flags import VERSION
from megajax.errors import counted
from megajax.schema.config import Config
from megajax.schema.tree import as_override
from megajax.tools.from_megatron.translation import Setting, Translation, nested

MOST = 100  # characters of a comment


def document(t: Translation, others: dict[str, list[tuple[str, str]]]) -> str:
    """The text of the file. `others` are the flags that became no setting, by class."""
    where = _in_a_line(t.arguments.location)
    lines = [
        f"# From the launch line of Megatron-LM in {where}, for {counted(t.world, 'device')}.",
        f"# Defaults are those of Megatron-Core {VERSION}.",
    ]
    order = {name: i for i, name in enumerate(Config.model_fields)}
    lines += _section(dict(sorted(nested(t.settings).items(), key=lambda section: order[section[0]])), 0)
    for outcome, flags in others.items():
        if flags:
            lines += ["", f"# {outcome[0].upper()}{outcome[1:]}:"]
            lines += [f"#   {_in_a_line(flag)}{reason and ': '}{_in_a_line(reason)}" for flag, reason in flags]
    return "\n".join(lines) + "\n"


def _section(tree: dict[str, Any], depth: int) -> list[str]:
    lines, indent = [], "  " * depth
    for name, value in tree.items():
        if isinstance(value, Setting):
            lines.append(f"{indent}{name}: {as_override(value.value)}  # {_in_a_line(value.source)}")
        else:
            lines += [*([""] if not depth else []), f"{indent}{name}:", *_section(value, depth + 1)]
    return lines


def _in_a_line(text: str) -> str:
    """A text in a comment: printable, and not too long."""
    plain = "".join(character if character.isprintable() else "?" for character in text)
    return plain if len(plain) <= MOST else f"{plain[: MOST - 3]}..."
