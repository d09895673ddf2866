"""The command line that all entry points share: CONFIG, overrides, --print-config, --help."""

import argparse
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from megajax.config.load import help_text, load_config
from megajax.config.schema import Config
from megajax.errors import ConfigError, UserError


@contextmanager
def user_errors() -> Iterator[None]:
    """Turns a `UserError` into one sentence on stderr and exit status 2."""
    try:
        yield
    except UserError as error:
        print(f"megajax: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def parse_command_line(argv: Sequence[str], program: str) -> Config:
    """The config that `argv` asks for; call it inside `user_errors`.

    Prints and exits with status 0 for --help and --print-config; raises `UserError`. `program` is the
    module's name, such as "megajax.train".
    """
    usage = f"python -m {program} CONFIG.yaml [section.key=value ...] [--print-config] [--help]"
    parser = _Parser(usage=usage, add_help=False)
    parser.add_argument("config", metavar="CONFIG.yaml", nargs="?")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*")
    parser.add_argument("--print-config", action="store_true", help="print the resolved config and stop")
    parser.add_argument("--help", action="store_true", help="print this and every key of the config")
    options = parser.parse_intermixed_args(argv)
    if options.help:
        print(f"{parser.format_help()}\n{help_text()}", end="")
        raise SystemExit(0)
    if options.config is None:
        parser.error("no config is given")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = load_config(options.config, options.overrides)
    for warning in caught:
        print(f"megajax: warning: {warning.message}", file=sys.stderr)
    if options.print_config:
        print(config.to_yaml(), end="")
        raise SystemExit(0)
    return config


class _Parser(argparse.ArgumentParser):
    """An `ArgumentParser` whose errors are sentences like all others."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (the command line): write {self.usage}.")
