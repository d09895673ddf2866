"""The parser of a command: its errors are sentences, and names of other frameworks are answered with ours."""

import argparse
import os
import re
import sys
from typing import Any, NoReturn

from megajax.console import TRACEBACK, program_name
from megajax.errors import InputError, shown
from megajax.version import VERSION

KEYS = "section.key=value"  # in the help of an argument that takes overrides


class _PrintTraceback(argparse.Action):
    def __call__(self, *_: object) -> None:
        os.environ[TRACEBACK] = "1"


class CommandParser(argparse.ArgumentParser):
    """The parser of a subcommand: its usage names the program as in the user's call; errors are sentences.

    Call `parse_args` inside `user_errors`.
    """

    def __init__(self, module: str, **settings):
        super().__init__(prog=program_name(module), allow_abbrev=False, **settings)
        self.add_argument("--version", action="version", version=f"megajax {VERSION}", help="print megajax's version")
        self.add_argument("--traceback", action=_PrintTraceback, nargs=0, help="print the traceback of an error too")

    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        """As argparse's; but it counts arguments of any number as required if they have no default."""
        if settings.get("nargs") == "*" and not names[0].startswith("-"):
            settings.setdefault("default", [])
        return super().add_argument(*names, **settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's; but an unknown option is the first error, and it names ours."""
        words = list(sys.argv[1:] if args is None else args)
        before = words.index("--") if "--" in words else len(words)
        for i, word in enumerate(words[:before]):
            name, equals, value = word.partition("=")
            if word.startswith("--") and name not in self._option_string_actions:
                following = value if equals else next(iter(words[i + 1 : before]), "")
                given = "" if re.match(r"-|[\w.-]+=|.*\.ya?ml$", following) else following
                meant = self._meant(name, given)
                self.error(f"{shown(name)} is not an option{meant and ': '}{meant}")
        return super().parse_known_args(args, namespace)

    def _meant(self, name: str, value: str) -> str:
        from megajax.config.options import meant  # here, because a right command line needs no config

        public = [action for action in self._actions if action.help != argparse.SUPPRESS]
        options = [option for action in public for option in action.option_strings]
        takes_keys = any(KEYS in f"{action.metavar} {action.help}" for action in public)
        return meant(name, value, options, takes_keys)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        from megajax.config.options import command_cure
        from megajax.config.other_values import choice_cure

        choices, option = list(map(str, action.choices)), "/".join(action.option_strings) or action.metavar
        cure = "" if action.option_strings else command_cure(str(value), choices)
        cure = cure or choice_cure(f"checkpoint.export_hf.{action.dest}", value, choices)
        self.error(f"{option}={shown(value)} is not a choice: {cure}")

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith("?") else ";"
        raise InputError(f"{message}{end} {self.prog} --help lists the arguments.")
