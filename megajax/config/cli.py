"""The command line of `megajax train`: CONFIG, overrides, --print-config, --diff, --help."""

import re
from collections.abc import Sequence

from megajax.command_parser import CommandParser
from megajax.config.difference import between, from_defaults
from megajax.config.load import help_text, load_config, overview
from megajax.console import program_name
from megajax.errors import ConfigError
from megajax.schema.config import Config

PROGRAM = "megajax.train"


def parse_command_line(argv: Sequence[str]) -> Config:
    """The config from the arguments `argv`; call it inside `user_errors`.

    Prints and exits with status 0 for --help, --print-config and --diff; raises `UserError`.
    """
    name = program_name(PROGRAM)
    parser = CommandParser(
        PROGRAM,
        usage=f"{name} CONFIG.yaml [section.key=value ...] [--print-config] [--diff [OTHER.yaml]] [--help [SECTION]]",
        description="Train the model of a config, or resume its run.",
        epilog=f"Example: {name} configs/quickstart.yaml run.steps=300 mesh.tensor=2",
        add_help=False,
    )
    parser.add_argument("config", metavar="CONFIG.yaml", nargs="?", help="the run, described in YAML")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="overrides of single keys")
    parser.add_argument("--print-config", action="store_true", help="print the resolved config and exit")
    parser.add_argument(
        "--diff",
        metavar="OTHER.yaml",
        nargs="?",
        const="",
        help="print the keys that differ from the defaults, or from another config, and exit",
    )
    parser.add_argument(
        "-h", "--help", metavar="SECTION", nargs="?", const="", help="print this help, or the keys of a section"
    )
    options = parser.parse_intermixed_args(argv)
    # A config or an override after an option is not the option's value: `--diff run.yaml`, `--help run.yaml`.
    words = [word for word in (options.config, *options.overrides) if word is not None]
    if options.help and (_is_override(options.help) or options.help.endswith((".yaml", ".yml"))):
        words, options.help = [*words, options.help], ""
    if options.diff and (_is_override(options.diff) or all(map(_is_override, words))):
        words, options.diff = [*words, options.diff], ""
    if options.help is not None:
        print(help_text(options.help) if options.help else f"{parser.format_help()}\n{overview()}", end="")
        raise SystemExit(0)
    path = next((word for word in words if not _is_override(word)), None)
    if path is None:
        raise ConfigError(f"no config is given (the command line): write {parser.usage}.")
    words.remove(path)
    config = load_config(path, words)
    if options.diff is not None:
        other = load_config(options.diff) if options.diff else None
        print(from_defaults(config) if other is None else between(config, other, path, options.diff), end="")
        raise SystemExit(0)
    if options.print_config:
        print(config.to_yaml(), end="")
        raise SystemExit(0)
    return config


def _is_override(argument: str) -> bool:
    return re.match(r"[\w.-]+=", argument) is not None
