"""Plans a run without a GPU: the fastest mesh, microbatches, pipeline schedule and recomputation for N GPUs.

    python -m megajax.plan CONFIG [section.key=value ...] --gpus N

Overrides are kept; the config file's mesh, microbatches, schedule, layout and recomputation are varied. Nothing that
changes the training is: model, batch, sequence length and optimizer stay, and the precision without --fp8. Memory and
time are estimates, by the rates of the device, which are measured or an H200's, scaled by data sheets; --compile
replaces the memory of the first rows by XLA's figure. A CONFIG is a path, or the name of a file in configs/.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megajax.command_parser import CommandParser
from megajax.config.batch_schedule import tokens_of
from megajax.config.load import config_path
from megajax.config.sentences import counted
from megajax.console import user_errors
from megajax.errors import InputError
from megajax.files import replace_text
from megajax.plan.compile import require_plugin
from megajax.plan.explain import best_microbatches, explain, mesh_overrides
from megajax.plan.picture import picture
from megajax.plan.rates import DEVICES, GIB, Rates, rates_of, read_rates
from megajax.plan.report import budget, cells, fit, limit_line, mesh_text, table, terminal_width, write_config
from megajax.plan.search import Found, Search, check_hosts, explained, missing_settings

COMPILE_SECONDS = 1800.0
TELL_SECONDS = 10.0  # between lines on a pipe


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan; the exit status."""
    with user_errors():
        options = parser().parse_intermixed_args(_joined(sys.argv[1:] if arguments is None else arguments))
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        rates = rates_of(options.device)
        check(options)
        if options.rates is not None:
            rates = read_rates(options.rates, rates)
        rates = rates.with_links(options.hosts_of, options.network_gbps)
        options.config = config_path(options.config)
        assumed, notes = missing_settings(options.config, options.overrides, options.gpus)
        options.overrides = [*assumed, *options.overrides]
        answer = one_mesh if options.explain is not None else fewest if options.fewest else plan
        width = None if options.markdown else terminal_width()
        for line in (*notes, *answer(options, rates)):
            print("\n".join(fit(line, width)))
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
def _live() -> Iterator[Callable[[str], None]]:
    """A line on stderr with the text and the seconds; if stderr is no terminal one at once, then every TELL_SECONDS."""
    if not sys.stderr.isatty():
        start, told = time.monotonic(), -math.inf

        def tell(text: str) -> None:
            nonlocal told
            if (now := time.monotonic()) - told >= TELL_SECONDS:
                told = now
                print(f"searching for {now - start:.0f} s: {text}", file=sys.stderr, flush=True)

        yield tell
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console) as bar:
        bar.live.transient = True
        task = bar.add_task("searching")
        yield lambda text: bar.update(task, description=text)


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = CommandParser(
        "megajax.plan.__main__", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("config", type=Path, help="YAML file")
    made.add_argument("overrides", nargs="*", help="section.key=value, kept as they are")
    made.add_argument("--gpus", type=_number, help="number of GPUs; with --fewest the largest number to try")
    made.add_argument("--device", default="h200", help=f"{', '.join(DEVICES)} (default: h200)")
    made.add_argument("--rates", type=Path, metavar="FILE", help="JSON file of rates in place of the device's own")
    made.add_argument("--hosts-of", type=int, metavar="N", help="GPUs of a host (default: 8)")
    made.add_argument("--network-gbps", type=float, metavar="RATE", help="Gbit/s of a GPU's network card (400)")
    made.add_argument("--top", type=int, default=5, help="rows (default: 5)")
    made.add_argument("--compile", type=int, default=0, metavar="K", help="compile the first K rows")
    made.add_argument("--margin", type=_share, default=0.05, metavar="P", help="mark rows as near the limit (5%%)")
    made.add_argument("--usual", action="store_true", help="adds the usual recipe: tensor 8, pipeline 8, data the rest")
    made.add_argument("--markdown", action="store_true", help="print tables as Markdown")
    made.add_argument("--fp8", action="store_true", help="try FP8 too, which changes the training")
    made.add_argument("--tokens", type=_tokens, metavar="T", help="adds days and GPU-hours for T tokens, such as 15T")
    made.add_argument("--write", type=Path, metavar="FILE", help="write a config file with the first row's settings")
    made.add_argument("--explain", metavar="MESH", help="one mesh in place of a search, such as tensor=8,pipeline=4")
    made.add_argument("--picture", type=Path, metavar="FILE", help="with --explain: an SVG file of the step's timeline")
    made.add_argument("--fewest", action="store_true", help="the fewest GPUs that hold the run")
    return made


def check(options: argparse.Namespace) -> None:
    """Raises InputError for arguments that cannot be followed."""
    if options.gpus is None or options.gpus < 1:
        raise InputError("--gpus is missing or below 1: give the number of GPUs, such as --gpus 64.")
    for name in ("top", "hosts_of", "network_gbps", "tokens"):
        value, shown = getattr(options, name), name.replace("_", "-")
        if value is not None and not value > 0:
            raise InputError(f"--{shown}={value:g} is not above 0.")
    if options.compile < 0:
        raise InputError(f"--compile={options.compile} is below 0.")
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
        check_new(name, getattr(options, name))
    if options.compile:
        require_plugin()


def check_new(option: str, path: Path | None) -> None:
    """Raises InputError for a file that exists, or whose directory does not."""
    if path is not None and path.exists():
        raise InputError(f"--{option}={path} exists: name a new file, or remove it.")
    if path is not None and not path.parent.is_dir():
        raise InputError(f"--{option}={path}: there is no directory {path.parent}.")


def plan(options: argparse.Namespace, rates: Rates) -> list[str]:
    """The table of the fastest candidates, and the overrides of the first."""
    with _live() as tell:
        search = Search(options.config, options.overrides, options.gpus, rates, options.fp8)
        search.tell = lambda tried: tell(counted(tried, "candidate"))
        best, compiled, notes = search.best(options.top), dict[int, float](), list[str]()
        for number, found in enumerate(best[: options.compile]):
            tell(f"compiling {number + 1} of {options.compile}: {mesh_text(found)}")
            try:
                compiled[number] = xla_gib(options, found, rates)
            except InputError as error:
                notes.append(f"Its memory is an estimate: {error}")
        usual = search.usual() if options.usual else None
    fitting = [n for n in range(len(best)) if compiled.get(n, 0) <= rates.memory_gib]
    if not fitting:
        raise InputError("none of the compiled candidates fits by XLA's figures: raise --compile and --top.")
    rows = [cells(best[n], rates, options.margin, compiled.get(n)) for n in fitting]
    if usual is not None:
        mesh, *others = cells(usual, rates, options.margin)
        rows.append((f"usual: {mesh}", *others))
    where = f"{counted(options.gpus, rates.name)}, hosts of {rates.hosts_of}"
    lines = [
        f"{counted(search.tried, 'candidate')} on {where}; rates: {rates.origin}",
        "",
        *table(rows, options.markdown, terminal_width()),
    ]
    lines.append(limit_line(rates, rows, options.margin))
    if options.usual:
        lines.append(_usual_line(usual, best[fitting[0]], rates))
    lines += notes
    if options.fp8:
        lines.append("FP8 changes the training. One row at least is without it.")
    winner = best[fitting[0]]
    changed = search.changed(winner)
    lines += ["", f"The fastest: {' '.join(changed) or 'the config as it is'}", *budget(options, winner)]
    return [*lines, *written(options, winner, rates, changed)]


def _usual_line(usual: Found | None, winner: Found, rates: Rates) -> str:
    """The sentence on the usual recipe beside the winner."""
    if usual is None:
        return "The usual recipe is not possible with this config."
    slower = usual.time.total / winner.time.total - 1
    fits = "" if usual.gib <= rates.memory_gib else ", and does not fit"
    return f"The usual recipe takes {slower:+.0%} time{fits}."


def written(options: argparse.Namespace, found: Found, rates: Rates, settings: Sequence[str]) -> list[str]:
    """The line on the config file of a candidate, which is written here; none without --write."""
    if options.write is None:
        return []
    gpus = counted(options.gpus, rates.name)
    note = f"megajax plan: {gpus}, {1e3 * found.time.total:,.0f} ms a step, {found.gib:.1f} GiB"
    write_config(options.write, options.config, [*options.overrides, *settings], f"{note} a GPU (estimates)")
    return [f"Written: {options.write}, for megajax train"]


def xla_gib(options: argparse.Namespace, found: Found, rates: Rates) -> float:
    """XLA's GiB of a GPU, compiled in a process of its own. Raises InputError if it does not compile."""
    command = [sys.executable, "-m", "megajax.training.compiled_step", str(options.config), *options.overrides]
    command += [*found.overrides, "--gpus", str(options.gpus), "--device", rates.name]
    environment = {"XLA_FLAGS": "--xla_gpu_autotune_level=0", **os.environ}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=COMPILE_SECONDS)
    except subprocess.TimeoutExpired:
        raise InputError(f"{' '.join(found.overrides)} does not compile in {COMPILE_SECONDS:.0f} s.") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise InputError(f"{' '.join(found.overrides)} does not compile: {reason}")
    return json.loads(done.stdout.splitlines()[-1])["device_memory"]["whole"] / GIB


def one_mesh(options: argparse.Namespace, rates: Rates) -> list[str]:
    """The mesh of --explain in detail."""
    check_hosts(options.gpus, rates)
    mesh = mesh_overrides(options.explain)
    overrides = [*options.overrides, *mesh]
    overrides += best_microbatches(options, overrides, rates)
    found = explained(options.config, overrides, options.gpus, rates)
    lines = explain(options, found, overrides, rates)
    if options.picture is not None:
        replace_text(options.picture, picture(found))
        lines.append(f"Picture: {options.picture}")
    return [*lines, *written(options, found, rates, mesh)]


def fewest(options: argparse.Namespace, rates: Rates) -> list[str]:
    """Lines on the fewest GPUs, powers of two up to --gpus, that hold the run."""
    gpus, reason = 1, ""
    while gpus <= options.gpus:
        try:
            with _live() as tell:
                tell(f"trying {counted(gpus, 'GPU')}")
                [found] = Search(options.config, options.overrides, gpus, rates).best(1)
        except InputError as error:
            gpus, reason = 2 * gpus, str(error)
            continue
        options.gpus = gpus
        rows = [cells(found, rates, options.margin)]
        lines = [f"The fewest {rates.name}s that hold it: {gpus}", "", *table(rows, options.markdown, terminal_width())]
        lines.append(limit_line(rates, rows, options.margin))
        return [*lines, *written(options, found, rates, found.overrides)]
    raise InputError(f"up to {counted(options.gpus, 'GPU')} are too few: {reason}")


if __name__ == "__main__":
    sys.exit(main())
