"""The `megajax` command: `megajax train …` is the same as `python -m megajax.train …`.

A subcommand's module is imported when it runs, because XLA's flags must be set before jax starts.
"""

import difflib
import importlib
import sys
from collections.abc import Sequence

from megajax.console import COMMANDS
from megajax.version import VERSION


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; the exit status."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(help_text())
        return 0
    if name == "--version":
        print(f"megajax {VERSION}")
        return 0
    if name not in COMMANDS:
        from megajax.config.options import command_cure  # here, because a right command line needs no config

        nearest = difflib.get_close_matches(name, COMMANDS, n=1)
        advice = f"did you mean {nearest[0]}?" if nearest else f"choose {', '.join(COMMANDS)}."
        advice = f"{cure}." if (cure := command_cure(name)) else advice
        print(f"megajax: error: {name} is not a command of megajax: {advice}", file=sys.stderr)
        return 2
    return importlib.import_module(COMMANDS[name][0]).main(rest)


def help_text() -> str:
    """The subcommands, a line each."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {meaning}" for name, (_, meaning) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: megajax COMMAND ...",
            "",
            "Pre-training of large language models in JAX on any mesh of GPUs.",
            "",
            *lines,
            "",
            "megajax COMMAND --help lists the arguments of a command.",
        ]
    )
