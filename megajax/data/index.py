"""`python -m megajax.data.index CONFIG`: make a run's order of samples ahead of time or the tokens of its text."""

import sys
import time
from collections.abc import Sequence

from megajax.command_parser import CommandParser
from megajax.config import load_config
from megajax.console import user_errors
from megajax.data.describe import describe_data
from megajax.data.epochs import resolve_epochs
from megajax.data.loader import open_datasets
from megajax.errors import InputError
from megajax.runtime import accept_missing_cuda


def main(argv: Sequence[str]) -> int:
    """Open and check a config's data and store its order; returns the exit status."""
    parser = CommandParser(
        "megajax.data.index",
        description="Store a run's order or tokens ahead of time.",
    )
    parser.add_argument("config", metavar="CONFIG", help="YAML file of the run")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings instead of the file's")
    with user_errors():
        options = parser.parse_args(argv)
        config = load_config(options.config, options.overrides)
        if config.data.order != "megatron" and config.data.kind not in ("text", "chat"):
            raise InputError(
                f"data.kind={config.data.kind} with data.order={config.data.order} stores nothing: this is for "
                "data.order=megatron, data.kind=text and data.kind=chat."
            )
        accept_missing_cuda()
        start = time.perf_counter()
        opened = open_datasets(config)
        for line in describe_data(resolve_epochs(config, opened["train"]), opened):
            print(line)
        print(f"everything is stored after {time.perf_counter() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
