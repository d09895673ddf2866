"""Draws a traced train step of a pipeline below its schedule, as SVG.

    python dev/pipeline_picture.py TRACE --schedule zero_bubble --stages 4 --microbatches 8 --output PICTURE

TRACE is a directory written by jax.profiler, or a file of kernels written by `--save-rows`. The upper part is the
schedule with the given costs, the lower part the work of each GPU. Both fill the width, each with its own time scale.
A kernel's operation follows from its name; other kernels are assigned to the nearest kernel with a known operation.
"""

import argparse
import bisect
import gzip
import itertools
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import megajax.tools.schedule as drawing
from megajax import svg
from megajax.console import user_errors
from megajax.errors import InputError
from megajax.options.pipeline_schedules import KINDS
from megajax.step.pipeline.schedules import Schedule
from megajax.step.pipeline.simulator import Costs, simulate, tick_starts
from megajax.tools.profile import trace


class Kernel(NamedTuple):
    """A kernel's run on a GPU; times in µs."""

    start: float
    duration: float
    name: str
    op: str  # the HLO operation that launched it

    @property
    def end(self) -> float:
        return self.start + self.duration


class Box(NamedTuple):
    """Kernels of one kind, one after the other; times in ms since the step's first kernel."""

    kind: str
    start: float
    end: float


Rows = dict[str, list[Kernel]]  # by GPU, such as "GPU 0"


# Reading


def read(path: Path) -> Rows:
    """The kernels of each GPU in order of time, from the last trace in a directory or from a file of rows."""
    rows = read_traces(path) if path.is_dir() else read_file(path)
    if not any(rows.values()):
        raise InputError(f"{path} has no kernels of GPUs: trace a step on a machine with GPUs.")
    return rows


def read_traces(path: Path) -> Rows:
    """The kernels of a directory that jax.profiler wrote."""
    kernels = trace.read_files(trace.newest(path), path)
    by_gpu = {gpu: own for gpu, own in trace.by_device(kernels).items() if "GPU" in gpu}
    return {gpu: [Kernel(1e3 * k.start, 1e3 * (k.end - k.start), k.name, k.op) for k in by_gpu[gpu]] for gpu in by_gpu}


def read_file(path: Path) -> Rows:
    """The kernels of a file of rows."""
    try:
        return read_rows(json.loads(gzip.decompress(path.read_bytes())))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}; give a trace directory or a file of rows.") from error
    except (EOFError, zlib.error, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is no file of --save-rows: give one, or a trace directory.") from error


def read_rows(content: Mapping[str, Iterable[Sequence]]) -> Rows:
    """Kernels of a file of rows: by GPU, each with start, duration, name and operation."""
    rows = {}
    for gpu, own in content.items():
        rows[gpu] = sorted(Kernel(float(s), float(d), str(name), str(op)) for s, d, name, op in own)
    return {gpu: rows[gpu] for gpu in sorted(rows, key=lambda gpu: int(re.findall(r"\d+", gpu)[-1]))}


def save_rows(rows: Rows, path: Path) -> None:
    path.write_bytes(gzip.compress(json.dumps(rows).encode(), mtime=0))


# The operations of kernels

FORWARD, BACKWARD, WEIGHT, HEAD, OTHER, NCCL = "forward", "backward", "weight", "head", "other", "nccl"
NEAR = 500.0  # µs: kernels without a telling name belong to a neighbour as near as this
GAP = 50.0  # µs: the longest between kernels of one box


def kind_of(name: str) -> str:
    """The operation of a kernel, from its name only; OTHER if the name is not specific.

    Gradients of weights are matmuls that add to their result, and cuBLAS calls their layout NTT.
    """
    if name.startswith("ncclDevKernel"):
        return NCCL
    if "fprop" in name:
        return FORWARD
    if "bprop" in name or name.startswith("gated_backward"):
        return BACKWARD
    if name.startswith("cross_entropy"):
        return HEAD
    return WEIGHT if _is_matmul(name) and ("badd" in name or name.endswith("_NTT")) else OTHER


def _is_matmul(name: str) -> bool:
    return name.startswith("nvjet")


def kinds(kernels: Sequence[Kernel]) -> list[str]:
    """The operation of each of a GPU's kernels, which are in order of time.

    A matmul with an unspecific name gets the operation of the nearest kernel with a specific one, except weight
    gradients, and not beyond the start of an NCCL kernel, which ends an operation. Other kernels get the operation of
    the nearest matmul.
    """
    found = [kind_of(kernel.name) for kernel in kernels]
    section = list(itertools.accumulate(int(kind == NCCL) for kind in found))  # which one each is in
    for matmuls in (True, False):
        sure = [i for i, kind in enumerate(found) if kind not in (OTHER, NCCL, *([WEIGHT] if matmuls else []))]
        nearest = [
            (i, _nearest(kernels, section, sure, i, matmuls))
            for i, kind in enumerate(found)
            if kind == OTHER and _is_matmul(kernels[i].name) == matmuls
        ]
        for i, j in nearest:
            found[i] = OTHER if j is None else found[j]
        if matmuls:
            _give_head_its_weights(kernels, found)
    return found


def _nearest(kernels: Sequence[Kernel], section: list[int], sure: list[int], i: int, far: bool) -> int | None:
    """The kernel of `sure` nearest to the i-th, preferably in its section; if not `far`, at most NEAR away."""
    at = bisect.bisect(sure, i)
    neighbours = [j for j in sure[max(at - 1, 0) : at + 1]]
    own = [j for j in neighbours if section[j] == section[i]]

    def distance(j: int) -> float:
        return max(kernels[i].start - kernels[j].end, kernels[j].start - kernels[i].end, 0.0)

    best = min(own or neighbours, key=distance, default=None)
    return best if best is not None and (distance(best) <= NEAR or (far and own)) else None


def _give_head_its_weights(kernels: Sequence[Kernel], found: list[str]) -> None:
    """Weight gradients right after the head's other matmuls belong to the head."""
    before = OTHER
    for i, kind in enumerate(found):
        if kind == WEIGHT and before == HEAD:
            found[i] = HEAD
        if kind not in (OTHER, NCCL):
            before = found[i]


def boxes(kernels: Sequence[Kernel], zero: float) -> list[Box]:
    """A GPU's kernels merged into boxes: first those of NCCL, then those that compute."""
    pairs = list(zip(kernels, kinds(kernels), strict=True))
    communication = _grouped([(kernel, kind) for kernel, kind in pairs if kind == NCCL], zero)
    return [*communication, *_grouped([(kernel, kind) for kernel, kind in pairs if kind != NCCL], zero)]


def _grouped(pairs: Iterable[tuple[Kernel, str]], zero: float) -> Iterator[Box]:
    box = None
    for kernel, kind in pairs:
        start, end = (kernel.start - zero) / 1e3, (kernel.end - zero) / 1e3
        if box is not None and box.kind == kind and start - box.end < GAP / 1e3:
            box = box._replace(end=max(box.end, end))
            continue
        if box is not None:
            yield box
        box = Box(kind, start, end)
    if box is not None:
        yield box


def step_of(rows: Rows) -> tuple[dict[str, list[Box]], float]:
    """The boxes of each GPU, and the step time in ms."""
    zero = min(kernel.start for kernels in rows.values() for kernel in kernels)
    end = max(kernel.end for kernels in rows.values() for kernel in kernels)
    return {gpu: boxes(kernels, zero) for gpu, kernels in rows.items()}, (end - zero) / 1e3


# The picture

PLOT, HEADING, LINE, APART = 1480, 84, 5, 12  # pixels: width of the plots, above the trace, of NCCL, between GPUs
SHADES = {kind: svg.hexadecimal(color) for kind, color in drawing.COLORS.items()}
SHADES |= {HEAD: "#7d3c98", OTHER: "#d8d8d8", NCCL: "#707070"}
MEANINGS = {
    FORWARD: "forward",
    BACKWARD: "gradients of inputs",
    WEIGHT: "gradients of weights",
    HEAD: "head and loss",
    OTHER: "other",
    NCCL: "NCCL: sending, and waiting for others",
}
NOTE = "In lockstep a stage that idles in the schedule computes all the same, on numbers that nobody uses."


def picture(schedule: Schedule, costs: Costs, rows: Rows) -> str:
    """The schedule above the trace."""
    top = drawing.TOP + schedule.stages * (drawing.ROW + drawing.GAP) + drawing.BELOW
    height = top + HEADING + len(rows) * (drawing.ROW + LINE + APART) + drawing.BELOW
    width = drawing.LEFT + PLOT + drawing.RIGHT
    root = svg.empty_picture(width, height)
    _draw_schedule(root, schedule, costs)
    _draw_trace(root, rows, top)
    ElementTree.indent(root, "")
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _draw_schedule(root: ElementTree.Element, schedule: Schedule, costs: Costs) -> None:
    report, starts = simulate(schedule, costs), tick_starts(schedule, costs)
    scale = PLOT / report.time
    shown = range(schedule.ticks)
    drawing.draw_heading(root, schedule, costs, report, "", shown)
    drawing.draw_ticks(root, schedule, costs, drawing.LEFT + scale * starts, shown, scale)
    for box in drawing.boxes(schedule, costs):
        drawing.draw_box(root, schedule, box, scale)


def _draw_trace(root: ElementTree.Element, rows: Rows, top: float) -> None:
    found, length = step_of(rows)
    scale, left = PLOT / length, drawing.LEFT
    svg.text(root, left, top + 16, f"traced: {length:.0f} ms", font_size="16", font_weight="600")
    svg.text(root, left, top + 36, NOTE)
    x = float(left)
    for kind, meaning in MEANINGS.items():
        thick = LINE if kind == NCCL else 14
        svg.rectangle(root, x, top + 57 - thick / 2, 14, thick, fill=SHADES[kind])
        x += 20 + svg.text(root, x + 20, top + 61, meaning) + 12
    first, each = top + HEADING, drawing.ROW + LINE + APART
    bottom = first + len(rows) * each - APART
    _draw_axis(root, length, scale, (first, bottom))
    for number, (gpu, own) in enumerate(found.items()):
        _draw_gpu(root, gpu, own, first + number * each, scale)


def _draw_axis(root: ElementTree.Element, length: float, scale: float, rows: tuple[float, float]) -> None:
    """Marks at round numbers of ms, at most 26."""
    first, bottom = rows
    step = next(
        step
        for power in range(-3, 9)
        for step in (10.0**power, 2 * 10.0**power, 5 * 10.0**power)
        if length / step <= 25
    )
    svg.text(root, drawing.LEFT - 10, bottom + 20, "ms", text_anchor="end", fill="#666666")
    for mark in range(int(length / step) + 1):
        x = drawing.LEFT + mark * step * scale
        line = {"x1": x, "x2": x, "y1": first - 4, "y2": bottom + 6}
        attributes = {name: svg.pixels(value) for name, value in line.items()}
        ElementTree.SubElement(root, "line", attributes | {"stroke": svg.FAINT, "stroke-dasharray": "2 2"})
        svg.text(root, x, bottom + 20, f"{mark * step:g}", text_anchor="middle", fill="#666666")


def _draw_gpu(root: ElementTree.Element, gpu: str, own: Sequence[Box], y: float, scale: float) -> None:
    svg.text(root, drawing.LEFT - 10, y + drawing.ROW / 2 + 4, gpu, text_anchor="end")
    svg.rectangle(root, drawing.LEFT, y, PLOT, drawing.ROW, fill="none", stroke=svg.FAINT)
    for kind, color in SHADES.items():
        group = ElementTree.SubElement(root, "g", {"class": f"traced-{kind}", "fill": color})
        for box in own:
            if box.kind == kind:
                at, height = (y + drawing.ROW + 2, LINE) if kind == NCCL else (y, drawing.ROW)
                x, width = drawing.LEFT + box.start * scale, max((box.end - box.start) * scale, 0.2)
                sizes = {"x": round(x, 1), "y": at, "width": round(width, 1), "height": height}
                ElementTree.SubElement(group, "rect", {name: f"{size:g}" for name, size in sizes.items()})


# The command line


def described(rows: Rows) -> str:
    """The times of each GPU in ms, one line each."""
    found, length = step_of(rows)
    lines = []
    for gpu, own in found.items():
        spent: dict[str, float] = defaultdict(float)
        for box in own:
            spent[box.kind] += box.end - box.start
        named = ", ".join(f"{kind} {spent[kind]:.1f}" for kind in MEANINGS)
        lines.append(f"{gpu}: {named} of {length:.1f} ms")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Write the picture and print the times of each GPU; exit status 2 and one sentence if that is impossible."""
    with user_errors():
        options = _parser().parse_args(arguments)
        schedule, costs = drawing.chosen(options)
        rows = read(options.trace)
        if len(rows) % schedule.stages:
            raise InputError(f"{options.trace} has {len(rows)} GPUs, which --stages={schedule.stages} does not divide.")
        try:
            if options.save_rows:
                save_rows(rows, options.save_rows)
            options.output.write_text(picture(schedule, costs, rows), encoding="utf-8")
        except OSError as error:
            raise InputError(f"{error.filename}: {error.strerror}; name a file that can be written.") from error
    print(f"{described(rows)}\nPicture: {options.output}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python dev/pipeline_picture.py",
        description="Draw a traced train step of a pipeline below its schedule. Costs are of one "
        "microbatch on a whole stage.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("trace", type=Path, metavar="TRACE", help="directory of jax.profiler, or file of --save-rows")
    parser.add_argument("--output", type=Path, required=True, metavar="SVG", help="the picture")
    parser.add_argument("--save-rows", type=Path, metavar="FILE", help="store the kernels, as .json.gz")
    parser.add_argument("--schedule", default="1f1b", help=f"{', '.join(KINDS[:-1])} or {KINDS[-1]}")
    parser.add_argument("--lockstep", action="store_true", help="1f1b with a forward and a backward operation a tick")
    for name, size in (("stages", 4), ("microbatches", 8), ("virtual-stages", 1)):
        parser.add_argument(f"--{name}", type=int, default=size, help="of the schedule")
    for name, cost in (("forward", 1.0), ("backward", 1.0), ("weight", 1.0), ("send", 0.0)):
        parser.add_argument(f"--{name}", type=float, default=cost, help="its cost")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
