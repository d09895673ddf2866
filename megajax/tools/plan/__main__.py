"""Plans a run without a GPU: the fastest mesh, microbatches, pipeline schedule and recomputation for N GPUs.

    megajax plan CONFIG [section.key=value ...] --gpus N

Overrides are kept; the config file's mesh, microbatches, schedule, layout and recomputation are varied. Nothing that
changes the training is: model, batch, sequence length and optimizer stay, and the precision without --fp8. Memory and
time are estimates, by the rates of the device, which are measured or an H200's, scaled by data sheets; --compile
replaces the memory of the first rows by XLA's figure. A CONFIG is a path, or the name of a file in configs/.
"""

import argparse
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megajax.command_parser import CommandParser
from megajax.console import user_errors
from megajax.errors import InputError
from megajax.files import check_new_file
from megajax.tools.plan import DEVICE_NAMES

TELL_SECONDS = 10.0  # between lines on a pipe


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan; the exit status."""
    with user_errors():
        options = parser().parse_intermixed_args(_joined(sys.argv[1:] if arguments is None else arguments))
        check(options)
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        with _live("loading the planner") as tell:
            from megajax.tools.plan.answers import answer  # here, because it imports jax, which takes seconds

            lines = answer(options, tell)
        print("\n".join(lines))
    return 0


def _joined(arguments: Sequence[str]) -> list[str]:
    """The arguments with a % that stands alone joined to the number before it: --margin 8 %."""
    return re.sub(r"(\0[\d.]+)\0%(?=\0|$)", r"\1%", "\0".join(["", *arguments])).split("\0")[1:]


def _number(text: str) -> int:
    """A number of GPUs."""
    if not re.fullmatch(r"[+-]?\d+", text):
        kind = f"write --device {text}, and --gpus with their number" if text[:1].isalpha() else "write it in digits"
        raise argparse.ArgumentTypeError(f"{text} is not a number of GPUs: {kind}")
    return int(text)


def _tokens(text: str) -> float:
    """A number of tokens."""
    from megajax.schema.amounts import tokens_of  # here, because few plans need it

    try:
        return tokens_of(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a number of tokens: write 15T or 15e12, for example") from None


def _share(text: str) -> float:
    """A percentage as a share."""
    try:
        share = float(text.removesuffix("%")) / 100
    except ValueError:
        share = math.nan
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(f"{text} is no percentage from 0 to below 100: write 8%, for example")
    return share


@contextmanager
def _live(text: str) -> Iterator[Callable[[str], None]]:
    """A line on stderr with the text, then the texts told, and seconds.

    If stderr is no terminal, a line with the first text told, then one every TELL_SECONDS.
    """
    if not sys.stderr.isatty():
        start, told = time.monotonic(), -math.inf

        def tell(text: str) -> None:
            nonlocal told
            if (now := time.monotonic()) - told >= TELL_SECONDS:
                print(text if told < 0 else f"after {now - start:.0f} s: {text}", file=sys.stderr, flush=True)
                told = now

        yield tell
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(text)  # before the start, which shows it at once
    with bar:
        yield lambda text: bar.update(task, description=text)


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = CommandParser(
        "megajax.tools.plan.__main__", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("config", type=Path, help="YAML file")
    made.add_argument("overrides", nargs="*", help="section.key=value, kept as they are")
    made.add_argument("--gpus", type=_number, help="number of GPUs; with --fewest the largest number to try")
    made.add_argument("--device", help=f"{', '.join(DEVICE_NAMES)} (default: {DEVICE_NAMES[0]})")
    made.add_argument("--rates", type=Path, metavar="FILE", help="JSON file of rates in place of the device's own")
    made.add_argument("--hosts-of", type=int, metavar="N", help="GPUs per host (default: 8)")
    made.add_argument("--network-gbps", type=float, metavar="RATE", help="Gbit/s per GPU between hosts (default: 400)")
    made.add_argument("--top", type=int, default=5, help="number of rows to show (default: 5)")
    made.add_argument("--compile", type=int, default=0, metavar="K", help="compile the first K rows for XLA's memory")
    made.add_argument("--margin", type=_share, default=0.05, metavar="P", help="mark rows this near the limit (5%%)")
    made.add_argument("--usual", action="store_true", help="show the usual recipe too: tensor 8, pipeline 8, else data")
    made.add_argument("--markdown", action="store_true", help="print tables as Markdown")
    made.add_argument("--fp8", action="store_true", help="try FP8 too, which changes the training")
    made.add_argument("--tokens", type=_tokens, metavar="T", help="show days and GPU-hours for T tokens, such as 15T")
    made.add_argument("--write", type=Path, metavar="FILE", help="write a config file with the first row's settings")
    made.add_argument("--explain", metavar="MESH", help="explain one mesh, such as tensor=8,pipeline=4")
    made.add_argument("--picture", type=Path, metavar="FILE", help="with --explain: draw the step's timeline as SVG")
    made.add_argument("--fewest", action="store_true", help="find the fewest GPUs whose memory suffices")
    return made


def check(options: argparse.Namespace) -> None:
    """Raises InputError for arguments that cannot be followed."""
    if options.gpus is None or options.gpus < 1:
        raise InputError("--gpus is missing or below 1: give the number of GPUs, such as --gpus 64.")
    for name in ("top", "hosts_of", "network_gbps", "tokens"):
        value, shown = getattr(options, name), name.replace("_", "-")
        if value is not None and not value > 0:
            raise InputError(f"--{shown}={value:g} is not above 0: give more.")
    if options.compile < 0:
        raise InputError(f"--compile={options.compile} is below 0: give 0 or more.")
    if options.compile > options.top:
        raise InputError(
            f"--compile={options.compile} is more than the rows, --top={options.top}: compile fewer, or raise --top."
        )
    if options.explain is not None or options.fewest:
        other = "--fewest" if options.explain is None else "--explain"
        for name in ("compile", "fp8", "usual", *(("fewest",) if options.explain is not None else ())):
            if getattr(options, name):
                raise InputError(f"--{name} has no effect with {other}, which searches nothing: leave one of them out.")
    if options.picture is not None and options.explain is None:
        raise InputError(f"--picture={options.picture} is for one mesh: add --explain.")
    for name in ("write", "picture"):
        if (path := getattr(options, name)) is not None:
            check_new_file(f"--{name}", path)


if __name__ == "__main__":
    sys.exit(main())
