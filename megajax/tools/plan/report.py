"""The planner's table of candidates, and the YAML file of one."""

import argparse
import os
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

import yaml

from megajax.config import AXES
from megajax.console import aligned
from megajax.errors import counted
from megajax.files import replace_text
from megajax.schema.tree import Dumper, Tree, read_override
from megajax.tools.plan.candidates import Candidate
from megajax.tools.plan.rates import Rates
from megajax.tools.plan.step_time import tokens_per_second, utilization

HEAD = ("mesh", "between hosts", "microbatches", "recomputed", "GiB", "ms a step", "tokens/s a GPU", "MFU", "lost to")
SHORT_HEAD = ("M", "remat", "GiB", "ms", "tok/s", "MFU")
FIGURES = {*HEAD[4:8], HEAD[2], *SHORT_HEAD} - {"remat"}  # aligned at the right
NEAR, XLAS = "~", "*"  # marks of GiB
BETWEEN = "^"  # mark of an axis between hosts
NARROWEST = 20  # characters of a mesh


def mesh_text(found: Candidate) -> str:
    """The axes above 1, with the schedule of a pipeline, the axes that divide the experts, and FP8."""
    sizes, config = found.plan.sizes, found.config
    text = " × ".join(f"{axis} {sizes[axis]}" for axis in AXES if sizes[axis] > 1) or "one GPU"
    over = [axis for axis in config.mesh.experts_over if axis != "expert" and sizes[axis] > 1]
    if config.model.num_experts and over:
        text += f", experts over {' and '.join(['expert', *over] if sizes['expert'] > 1 else over)}"
    if sizes["pipeline"] > 1:
        pipeline = config.pipeline
        text += f", {pipeline.schedule}" + (
            f", {pipeline.virtual_stages} virtual stages" if pipeline.virtual_stages > 1 else ""
        )
        text += f", layers {_layout_text(pipeline.layout)}" if pipeline.layout else ""
    return text + (", FP8" if found.in_fp8 else "")


def _layout_text(layout: Sequence[int]) -> str:
    """2 4 4 4 3 as 2 3×4 3."""
    groups: list[list[int]] = []
    for layers in layout:
        if groups and groups[-1][1] == layers:
            groups[-1][0] += 1
        else:
            groups.append([1, layers])
    return " ".join(f"{count}×{layers}" if count > 1 else str(layers) for count, layers in groups)


def between_hosts(found: Candidate) -> str:
    """The axes whose groups are on several hosts."""
    return ", ".join(axis for axis in AXES if axis in found.time.between_hosts) or "–"


def memory_text(gib: float, rates: Rates, margin: float) -> str:
    """GiB, marked if they are less than `margin` (a share) below the limit, or above it."""
    return f"{gib:.1f}{NEAR if gib > (1 - margin) * rates.memory_gib else ''}"


def limit_line(rates: Rates, rows: Sequence[Sequence[str]], margin: float) -> str:
    """The line under the table on the limit of the memory, and on the marks."""
    line = f"Limit: {rates.memory_gib:.1f} GiB of a GPU"
    if any(NEAR in row[HEAD.index("GiB")] for row in rows):
        line += f"; {NEAR}: above it, or less than {margin:.3%} below".replace(".000%", "%")
    if any(XLAS in row[HEAD.index("GiB")] for row in rows):
        line += f"; {XLAS} is XLA's figure, the others are estimates"
    return f"{line}."


def cells(found: Candidate, margin: float, compiled: float | None = None) -> tuple[str, ...]:
    """A row of the table; `compiled`: XLA's GiB in place of the estimate."""
    config, seconds = found.config, found.time.total
    remat = config.remat.policy + (f", {counted(config.remat.layers, 'layer')}" if config.remat.layers else "")
    losses = ", ".join(f"{name} {s / seconds:.0%}" for name, s in list(found.time.losses.items())[:3])
    speed = tokens_per_second(found.plan, seconds)
    gib = memory_text(found.gib if compiled is None else compiled, found.rates, margin)
    gib += "" if compiled is None else XLAS
    mfu, batch = utilization(found.plan, found.rates, seconds), str(config.batch.num_microbatches)
    times = gib, f"{1e3 * seconds:,.0f}", f"{speed:,.0f}", f"{mfu:.1%}"
    return mesh_text(found), between_hosts(found), batch, remat, *times, losses


def table(rows: Sequence[Sequence[str]], markdown: bool, width: int | None = None) -> list[str]:
    """Lines of a table: Markdown, or aligned columns of at most `width` characters, for which heads are shortened."""
    if markdown:
        return [f"| {' | '.join(row)} |" for row in (HEAD, ["---"] * len(HEAD), *rows)]
    lines = _aligned([HEAD, *rows])
    if width is None or max(map(len, lines)) <= width:
        return lines
    short = [_shortened(row) for row in rows]
    figures = _aligned([SHORT_HEAD, *(figures for _, _, figures in short)])
    room = max(width - len(figures[0]) - 2, NARROWEST)
    room = min(room, max(len(mesh) for mesh, _, _ in short))
    lines = [f"{HEAD[0]:{room}}  {figures[0]}"]
    for (mesh, lost, _), line in zip(short, figures[1:], strict=True):
        first, *other_cells = _cut(mesh, room)
        lines += [
            f"{first:{room}}  {line}",
            *other_cells,
            *(each.rstrip(",") for each in _cut(lost and f"  lost to {lost}", width)[:1]),
        ]
    return [*lines, f"{BETWEEN}: between hosts; M: microbatches; ms: of a step; tok/s: of a GPU."]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of the rows, of which the first has the heads; columns of figures are aligned at the right."""
    return aligned(rows, [i for i, name in enumerate(rows[0]) if name in FIGURES])


def _cut(text: str, width: int) -> list[str]:
    """Lines of a cell, cut behind commas and crosses; elsewhere only in what is longer than a line."""
    parts = re.split(r"(?<=[,×]) ", text)
    unbroken = " ".join(part if len(part) > width - 2 else part.replace(" ", "\u00a0") for part in parts)
    return [line.replace("\u00a0", " ") for line in textwrap.wrap(unbroken, width, subsequent_indent="  ")]


def _shortened(row: Sequence[str]) -> tuple[str, str, Sequence[str]]:
    """(mesh with marks of the axes between hosts, losses, cells of SHORT_HEAD) of a row."""
    mesh, between, microbatches, remat, *figures, lost = row
    for axis in between.split(", "):
        mesh = re.sub(rf"\b{axis} \d+", rf"\g<0>{BETWEEN}", mesh, count=1)
    return mesh, lost, (microbatches, re.sub(" layers?", "", remat), *figures)


def fit(line: str, width: int | None) -> list[str]:
    """A line as several of at most `width` characters; overrides continue as in a shell, so that they can be copied."""
    if width is None or len(line) <= width:
        return [line]
    end = " \\" if "=" in line.split()[-1] else ""
    *lines, last = textwrap.wrap(line, width - len(end), subsequent_indent="    ", break_on_hyphens=False)
    return [*(f"{each}{end}" for each in lines), last]


def more_time(one: Candidate, other: Candidate) -> str:
    """How much more time `one` takes than `other`, such as "7% more time"."""
    share = one.time.total / other.time.total - 1
    return f"{abs(share):.0%} {'more' if share >= 0 else 'less'} time"


def budget(options: argparse.Namespace, found: Candidate) -> list[str]:
    """Days and GPU-hours for a number of tokens."""
    if not options.tokens:
        return []
    rate = options.gpus * tokens_per_second(found.plan, found.time.total)
    hours = options.tokens / rate / 3600
    return [f"{options.tokens:.3g} tokens: {hours / 24:,.1f} days, {hours * options.gpus:,.0f} GPU-hours"]


def write_config(path: Path, config: Path, overrides: Sequence[str], note: str) -> None:
    """Write a config file that includes `config` and sets the keys of the overrides; `note` is its comment."""
    tree = Tree({"include": os.path.relpath(config, path.parent)})
    for override in overrides:
        tree.merge(read_override(override))
    body = yaml.dump(tree.values, Dumper=Dumper, sort_keys=False, width=10**6)
    replace_text(path, f"# {note}\n{body}")
