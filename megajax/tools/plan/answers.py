"""What the planner prints: the table of a search, one mesh in detail, or the fewest GPUs."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence

from megajax.config.load import config_path
from megajax.console import terminal_width
from megajax.errors import ConfigError, InputError, counted
from megajax.files import replace_text
from megajax.tools.plan import DEVICE_NAMES
from megajax.tools.plan.candidates import Candidate
from megajax.tools.plan.compile import require_plugin
from megajax.tools.plan.explain import best_microbatches, explain, mesh_overrides
from megajax.tools.plan.picture import picture
from megajax.tools.plan.rates import GIB, Rates, hosts_of, rates_of, read_rates
from megajax.tools.plan.report import (
    budget,
    cells,
    fit,
    limit_line,
    mesh_text,
    more_time,
    table,
    write_config,
)
from megajax.tools.plan.search import Search, explained, missing_settings

COMPILE_SECONDS = 1800.0
type Tell = Callable[[str], None]  # gets the text of the progress


def answer(options: argparse.Namespace, tell: Tell) -> list[str]:
    """The lines that answer the command's arguments, cut at the width of a terminal. Raises `UserError`."""
    rates, notes = rates_of(options.device or DEVICE_NAMES[0]), list[str]()
    if options.device is None and options.rates is None:
        other_devices = ", ".join(DEVICE_NAMES[1:])
        notes.append(f"--device is not given: {rates.name} is assumed. The others are {other_devices}.")
    if options.rates is not None:
        rates = read_rates(options.rates, rates)
    if options.compile:
        require_plugin()
    rates = rates.with_links(options.hosts_of, options.network_gbps)
    options.config = config_path(options.config)
    assumed, lines = missing_settings(options.config, options.overrides, options.gpus)
    options.overrides = [*assumed, *options.overrides]
    made = one_mesh if options.explain is not None else fewest if options.fewest else plan
    width = None if options.markdown else terminal_width()
    return [part for line in (*notes, *lines, *made(options, rates, tell)) for part in fit(line, width)]


def plan(options: argparse.Namespace, rates: Rates, tell: Tell) -> list[str]:
    """The table of the fastest candidates, and the overrides of the first."""
    search = Search(options.config, options.overrides, options.gpus, rates, options.fp8)
    search.tell = lambda tried: tell(counted(tried, "candidate"))
    best, compiled, notes = search.best(options.top), dict[int, float](), list[str]()
    for number, found in enumerate(best[: options.compile]):
        tell(f"compiling {number + 1} of {options.compile}: {mesh_text(found)}")
        try:
            compiled[number] = xla_gib(options, found)
        except InputError as error:
            notes.append(f"Its memory is an estimate: {error}")
    usual = _usual(search) if options.usual else None
    fitting = [n for n in range(len(best)) if compiled.get(n, 0) <= rates.memory_gib]
    if not fitting:
        raise InputError("none of the compiled candidates fits by XLA's figures: raise --compile and --top.")
    rows = [cells(best[n], options.margin, compiled.get(n)) for n in fitting]
    if isinstance(usual, Candidate):
        mesh, *other_cells = cells(usual, options.margin)
        rows.append((f"usual: {mesh}", *other_cells))
    where, origin = f"{counted(options.gpus, rates.name)}, hosts of {rates.hosts_of}", rates.origin
    if search.base.precision.compute == "float32" and options.rates is None:
        origin += ", of FP32 by data sheets"
    lines = [
        f"{counted(search.tried, 'candidate')} on {where}; rates: {origin}",
        "",
        *table(rows, options.markdown, terminal_width()),
    ]
    lines.append(limit_line(rates, rows, options.margin))
    if usual is not None:
        lines.append(_usual_line(usual, best[fitting[0]]))
    lines += notes
    if options.fp8:
        lines.append("FP8 changes the training. One row at least is without it.")
    winner = best[fitting[0]]
    changed = search.changed(winner)
    lines += ["", f"The fastest: {' '.join(changed) or 'the config as it is'}", *budget(options, winner)]
    return [*lines, *written(options, winner, changed)]


def _usual(search: Search) -> Candidate | ConfigError:
    """The usual recipe, or the reason why the config cannot have it."""
    try:
        return search.usual()
    except ConfigError as error:
        return error


def _usual_line(usual: Candidate | ConfigError, winner: Candidate) -> str:
    """The sentence on the usual recipe beside the winner."""
    if isinstance(usual, ConfigError):
        return f"The usual recipe is not possible with this config: {usual}"
    fits = "" if usual.gib <= usual.rates.memory_gib else ", and does not fit"
    return f"The usual recipe takes {more_time(usual, winner)}{fits}."


def written(options: argparse.Namespace, found: Candidate, settings: Sequence[str]) -> list[str]:
    """The line on the config file of a candidate, which is written here; none without --write."""
    if options.write is None:
        return []
    gpus = counted(options.gpus, found.rates.name)
    note = f"megajax plan: {gpus}, {1e3 * found.time.total:,.0f} ms a step, {found.gib:.1f} GiB"
    write_config(options.write, options.config, [*options.overrides, *settings], f"{note} a GPU (estimates)")
    return [f"Written: {options.write}, for megajax train"]


def xla_gib(options: argparse.Namespace, found: Candidate) -> float:
    """XLA's GiB of a GPU, compiled in a process of its own. Raises InputError if it does not compile."""
    command = [sys.executable, "-m", "megajax.tools.compile", "--json", str(options.config), *options.overrides]
    command += [*found.overrides, "--gpus", str(options.gpus), "--device", found.rates.name]
    environment = {"XLA_FLAGS": "--xla_gpu_autotune_level=0", **os.environ}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=COMPILE_SECONDS)
    except subprocess.TimeoutExpired:
        raise InputError(f"{' '.join(found.overrides)} does not compile in {COMPILE_SECONDS:.0f} s.") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise InputError(f"{' '.join(found.overrides)} does not compile: {reason}")
    return json.loads(done.stdout.splitlines()[-1])["device_memory"]["whole"] / GIB


def one_mesh(options: argparse.Namespace, rates: Rates, _: Tell) -> list[str]:
    """The mesh of --explain in detail."""
    hosts_of(options.gpus, rates.hosts_of)
    settings = mesh_overrides(options.explain)
    settings += best_microbatches(options, [*options.overrides, *settings], rates)
    overrides = [*options.overrides, *settings]
    found = explained(options.config, overrides, options.gpus, rates)
    lines = explain(options, found, overrides)
    if options.picture is not None:
        replace_text(options.picture, picture(found))
        lines.append(f"Picture: {options.picture}")
    return [*lines, *written(options, found, settings)]


def fewest(options: argparse.Namespace, rates: Rates, tell: Tell) -> list[str]:
    """Lines on the fewest GPUs, powers of two up to --gpus, that hold the run."""
    gpus, reason = 1, ""
    while gpus <= options.gpus:
        try:
            tell(f"trying {counted(gpus, 'GPU')}")
            [found] = Search(options.config, options.overrides, gpus, rates).best(1)
        except InputError as error:
            gpus, reason = 2 * gpus, str(error)
            continue
        options.gpus = gpus
        rows = [cells(found, options.margin)]
        lines = [
            f"The fewest that hold it, of powers of two: {counted(gpus, rates.name)}",
            "",
            *table(rows, options.markdown, terminal_width()),
        ]
        lines.append(limit_line(rates, rows, options.margin))
        return [*lines, *written(options, found, found.overrides)]
    raise InputError(f"--gpus={options.gpus} is too few: {reason}")
