"""The `megajax` command: `megajax train …` runs what `python -m megajax.train …` runs.

A subcommand's module is imported when it runs: it sets XLA's flags before it starts jax.
"""

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from megajax.errors import InputError

# subcommand: (the module whose main(arguments) it runs, what it does)
COMMANDS = {
    "train": ("megajax.train", "train a model as a config says, or resume its run"),
    "generate": ("megajax.generate", "sample text from a run"),
    "plot": ("megajax.plot", "draw loss, learning rate and gradient norm of runs"),
    "bench": ("megajax.bench", "measure the speed of configs"),
    "preprocess": ("megajax.data.preprocess", "turn JSON lines into the token files that training reads"),
    "schema": ("megajax.config.json_schema", "write the JSON schema of configs, for editors"),
}


class CommandParser(argparse.ArgumentParser):
    """The parser of a subcommand: its usage names the program as the user called it; errors are sentences.

    Call `parse_args` inside `user_errors`.
    """

    def __init__(self, module: str, **settings):
        super().__init__(prog=program_name(module), **settings)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; {self.prog} --help shows what can be given.")


def program_name(module: str) -> str:
    """How the user called `module`: "megajax train", "python -m megajax train" or "python -m megajax.train"."""
    called = Path(sys.argv[0])
    subcommand = next(name for name, (target, _) in COMMANDS.items() if target == module)
    if called.stem == "megajax":
        return f"megajax {subcommand}"
    if called.name == "__main__.py" and called.parent.name == "megajax":
        return f"python -m megajax {subcommand}"
    return f"python -m {module}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; the exit status."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(help_text())
        return 0
    if name not in COMMANDS:
        nearest = difflib.get_close_matches(name, COMMANDS, n=1)
        advice = f"did you mean {nearest[0]}?" if nearest else f"choose {', '.join(COMMANDS)}."
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
            "megajax COMMAND --help shows the arguments of a command.",
        ]
    )
