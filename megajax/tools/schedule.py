"""Pipeline schedules as pictures, in a terminal and as SVG: `megajax schedule --help`."""

import argparse
import string
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megajax.command_parser import CommandParser
from megajax.config import AXES, load_config
from megajax.config.sentences import fail
from megajax.console import terminal_width, user_errors
from megajax.errors import ConfigError, counted
from megajax.files import check_output
from megajax.layout.backward_parts import PARTS, backward_parts
from megajax.options.pipeline_schedules import KINDS
from megajax.step.pipeline.schedules import IDLE, Schedule, ScheduleTable, make_schedule
from megajax.step.pipeline.simulator import Costs, Report, sends, simulate, tick_starts
from megajax.svg import FAINT, INK, empty_picture, hexadecimal, legend, pixels, rectangle, text, text_width, written

# In a terminal


def draw(schedule: Schedule, width: int | None = None) -> str:
    """A line for each stage and operation, a column for each tick, a legend below.

    Lines longer than `width` characters are broken into blocks of ticks, one below the other.
    """
    widest = max(
        len(str(schedule.ticks - 1)), len(_label(schedule, schedule.microbatches - 1, schedule.virtual_stages - 1))
    )
    left = len(f"stage {schedule.stages - 1} F")
    columns = schedule.ticks if width is None else max(1, (width - left) // (1 + widest))

    def line(name: str, cells: list[str]) -> str:
        return name.ljust(left) + "".join(f" {cell:>{widest}}" for cell in cells)

    blocks = []
    for first in range(0, schedule.ticks, columns):
        ticks = range(first, min(first + columns, schedule.ticks))
        lines = [line("tick", [str(tick) for tick in ticks])]
        for stage in range(schedule.stages):
            title = f"stage {stage}"
            for operation, table in schedule.tables.items():
                name = f"{title:{left - 2}} {operation[0].upper()}"
                lines.append(line(name, [_cell(schedule, table, tick, stage) for tick in ticks]))
                title = ""
        blocks.append("\n".join(lines))
    return "\n\n".join([*blocks, _legend(schedule)])


def _cell(schedule: Schedule, table: ScheduleTable, tick: int, stage: int) -> str:
    microbatch = int(table.microbatch[tick, stage])
    return "." if microbatch == IDLE else _label(schedule, microbatch, int(table.virtual_stage[tick, stage]))


def _label(schedule: Schedule, microbatch: int, r: int) -> str:
    """3, or with several virtual stages 3a, 3b and so on."""
    if schedule.virtual_stages == 1:
        return str(microbatch)
    return f"{microbatch}{string.ascii_lowercase[r]}" if schedule.virtual_stages <= 26 else f"{microbatch}.{r}"


def _legend(schedule: Schedule) -> str:
    lines = [f"{name[0].upper()}: {_meaning(schedule, name)}" for name in schedule.tables]
    numbers = "number: microbatch"
    if schedule.virtual_stages > 1:
        first, last = (_label(schedule, 0, r)[1:] for r in (0, schedule.virtual_stages - 1))
        numbers += f"; {first} to {last}: virtual stage 0 to {schedule.virtual_stages - 1}"
    return "\n".join([", ".join(lines), f"{numbers}; dot: no such operation"])


def _meaning(schedule: Schedule, operation: str) -> str:
    """The meaning of an operation, for legends."""
    if schedule.weight is None:
        return operation
    return {"backward": "gradients of inputs", "weight": "gradients of weights"}.get(operation, operation)


# As SVG

ROW, GAP, LEFT, TOP, BELOW, RIGHT = 30, 8, 72, 92, 32, 24  # pixels
NARROWEST_BOX, WIDEST_PLOT, NARROWEST_PICTURE = 26, 8000, 640
READABLE_BOX = 8  # narrower ones have no legible number
COLORS = {"forward": (0, 95, 158), "backward": (201, 84, 0), "weight": (0, 122, 90)}
LIGHTEST = 0.62  # share of white in the last virtual stage's shade
SENDING = "#e8e8e8"


class _Box(NamedTuple):
    """One operation of one stage."""

    operation: str
    microbatch: int
    virtual_stage: int
    stage: int
    tick: int
    start: float  # time
    cost: float


def boxes(schedule: Schedule, costs: Costs) -> Iterator[_Box]:
    """All operations; a stage runs the operations of a tick one after the other."""
    cost = costs.of_operations(schedule)
    for tick, starts in enumerate(tick_starts(schedule, costs)[:-1]):
        for stage in range(schedule.stages):
            start = float(starts)
            for operation, table in schedule.tables.items():
                if (microbatch := int(table.microbatch[tick, stage])) != IDLE:
                    r = int(table.virtual_stage[tick, stage])
                    yield _Box(operation, microbatch, r, stage, tick, start, cost[operation])
                    start += cost[operation]


def svg(schedule: Schedule, costs: Costs, unit: str = "") -> str:
    """A picture of a schedule: time from left to right, one row per stage, one box per operation; `unit`: of costs.

    The colour is the operation, its shade the virtual stage, the number the microbatch; white is idle, grey is sending.
    Dashed lines mark the starts of ticks. Of a schedule that is too long for legible boxes one period is drawn.
    """
    report, starts = simulate(schedule, costs), tick_starts(schedule, costs)
    narrowest = min(cost for cost in costs.of_operations(schedule).values() if cost > 0)
    scale, shown = min(NARROWEST_BOX / narrowest, WIDEST_PLOT / report.time), range(schedule.ticks)
    if scale * narrowest < READABLE_BOX:
        shown = middle_period(schedule)
        scale = min(NARROWEST_BOX / narrowest, WIDEST_PLOT / float(starts[shown.stop] - starts[shown.start]))
    origin = float(starts[shown.start])
    width = max(LEFT + float(starts[shown.stop] - origin) * scale + RIGHT, NARROWEST_PICTURE)
    height = TOP + schedule.stages * (ROW + GAP) + BELOW
    picture = empty_picture(width, height)
    draw_heading(picture, schedule, costs, report, unit, shown)
    draw_ticks(picture, schedule, costs, LEFT + scale * (starts[shown.start : shown.stop + 1] - origin), shown, scale)
    for box in boxes(schedule, costs):
        if box.tick in shown:
            draw_box(picture, schedule, box._replace(start=box.start - origin), scale)
    return written(picture)


def middle_period(schedule: Schedule) -> range:
    """The ticks in the middle in which one microbatch for each stage passes all virtual stages of a stage."""
    period = min(schedule.ticks, schedule.stages * schedule.virtual_stages * schedule.period)
    start = (schedule.ticks - period) // 2
    return range(start, start + period)


def draw_heading(
    picture: ElementTree.Element, schedule: Schedule, costs: Costs, report: Report, unit: str, shown: range
) -> None:
    """Title, figures and legend."""
    text(picture, LEFT, 24, _title(schedule), font_size="16", font_weight="600")
    prices = {"forward": costs.forward, "backward": costs.backward + costs.weight}
    if schedule.weight is not None:
        prices |= {"backward": costs.backward, "weight": costs.weight}
    if costs.send:
        prices["send"] = costs.send
    named = ", ".join(f"{name} {price:g} {unit}".rstrip() for name, price in prices.items())
    part = f"; shown: ticks {shown.start} to {shown.stop - 1}, one period" if len(shown) < report.ticks else ""
    text(picture, LEFT, 44, f"{report.ticks} ticks, idle {report.bubble:.1%} of the time; costs: {named}{part}")
    x, y = LEFT, 58
    for operation in schedule.tables:
        shades = [hexadecimal(_shade(schedule, operation, r)) for r in range(schedule.virtual_stages)]
        x = legend(picture, x, y, shades, _meaning(schedule, operation))
    if costs.send:
        x = legend(picture, x, y, [SENDING], "send")
    if schedule.virtual_stages > 1:
        text(picture, x, y + 11, f"dark to light: virtual stage 0 to {schedule.virtual_stages - 1}")


def draw_ticks(
    picture: ElementTree.Element, schedule: Schedule, costs: Costs, edges: np.ndarray, shown: range, scale: float
) -> None:
    """The background of the boxes: rows with their names, sending, and lines at the starts of the ticks `shown`."""
    bottom = TOP + schedule.stages * (ROW + GAP) - GAP
    left, right = float(edges[0]), float(edges[-1])
    if costs.send:
        for index in np.flatnonzero(sends(schedule)[shown.start : shown.stop]):
            end = float(edges[index + 1])
            rectangle(picture, end - costs.send * scale, TOP, costs.send * scale, bottom - TOP, fill=SENDING)
    for stage in range(schedule.stages):
        y = TOP + stage * (ROW + GAP)
        rectangle(picture, left, y, right - left, ROW, fill="none", stroke=FAINT)
        text(picture, LEFT - 10, y + ROW / 2 + 4, f"stage {stage}", text_anchor="end")
    for edge in map(float, edges):
        line = {"x1": edge, "x2": edge, "y1": TOP - 4, "y2": bottom + 6}
        attributes = {name: pixels(value) for name, value in line.items()}
        ElementTree.SubElement(picture, "line", attributes | {"stroke": FAINT, "stroke-dasharray": "2 2"})
    text(picture, LEFT - 10, bottom + 20, "tick", text_anchor="end", fill="#666666")
    free = 0.0  # left end of the space for the next number
    for tick, middle in zip(shown, map(float, (edges[1:] + edges[:-1]) / 2), strict=True):
        half = 0.5 * text_width(str(tick))
        if middle - half >= free:
            text(picture, middle, bottom + 20, str(tick), text_anchor="middle", fill="#666666")
            free = middle + half + 6


def draw_box(picture: ElementTree.Element, schedule: Schedule, box: _Box, scale: float) -> None:
    x, y, width = LEFT + box.start * scale, TOP + box.stage * (ROW + GAP), box.cost * scale
    color = _shade(schedule, box.operation, box.virtual_stage)
    attributes = {"class_": box.operation, "stroke": "white", "stroke_width": "0.75"}
    drawn = rectangle(picture, x, y, width, ROW, fill=hexadecimal(color), **attributes)
    part = f"virtual stage {box.virtual_stage}, stage {box.stage}"
    hint = f"{box.operation}, microbatch {box.microbatch}, {part}, tick {box.tick}"
    ElementTree.SubElement(drawn, "title").text = hint
    size = min(12.0, 12 * (width - 3) / text_width(str(box.microbatch)))
    if size >= 5:
        light = np.dot(color, (0.299, 0.587, 0.114)) > 150
        attributes = {"text_anchor": "middle", "font_size": pixels(size), "fill": INK if light else "white"}
        text(
            picture, x + width / 2, y + ROW / 2 + 0.36 * size, str(box.microbatch), pointer_events="none", **attributes
        )


def _shade(schedule: Schedule, operation: str, r: int) -> tuple[int, ...]:
    """Red, green and blue of an operation: the full colour in the first virtual stage, the lightest in the last."""
    share = LIGHTEST * r / max(1, schedule.virtual_stages - 1)
    return tuple(round(part + share * (255 - part)) for part in COLORS[operation])


# The command line


def chosen(options: argparse.Namespace) -> tuple[Schedule, Costs]:
    """The schedule and the costs of a command line; raises ConfigError for impossible ones."""
    try:
        sizes = options.stages, options.microbatches, options.virtual_stages
        lockstep = options.lockstep or options.schedule != "1f1b" or options.virtual_stages > 1
        schedule = make_schedule(options.schedule, *sizes, parts_per_backward=0 if lockstep else PARTS)
        return schedule, Costs(options.forward, options.backward, options.weight, options.send)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _of_config(path: str, overrides: list[str]) -> dict[str, Any]:
    """The options that draw the schedule of a config."""
    config = load_config(path, overrides)
    sizes = {axis: max(1, getattr(config.mesh, axis)) for axis in AXES}
    if config.mesh.pipeline < 2:
        fail(config, f"mesh.pipeline={config.mesh.pipeline} has no schedule", "set 2 stages or more", "mesh.pipeline")
    return {
        "schedule": config.pipeline.schedule,
        "stages": config.mesh.pipeline,
        "microbatches": config.batch.num_microbatches,
        "virtual_stages": config.pipeline.virtual_stages,
        "lockstep": not backward_parts(config, sizes).slots,
    }


def main(arguments: list[str]) -> int:
    """Print a drawing of the schedule and its costs, and write the SVG; returns the exit status."""
    with user_errors():
        parser = _parser()
        options = parser.parse_intermixed_args(arguments)
        if options.config is not None:
            parser.set_defaults(**_of_config(options.config, options.overrides))  # options replace them
            options = parser.parse_intermixed_args(arguments)
        schedule, costs = chosen(options)
        default = f"{schedule.kind}_p{schedule.stages}_m{schedule.microbatches}_r{schedule.virtual_stages}.svg"
        check_output("--svg", path := getattr(options, "svg", Path(default)))
        print(f"{_title(schedule)}\n\n{draw(schedule, terminal_width())}\n\n{_described(simulate(schedule, costs))}")
        path.write_text(svg(schedule, costs), encoding="utf-8")
        print(f"Picture: {path}")
    return 0


def _title(schedule: Schedule) -> str:
    sizes = {"stage": schedule.stages, "microbatch": schedule.microbatches, "virtual stage": schedule.virtual_stages}
    named = [counted(size, name) for name, size in sizes.items()]
    return f"{schedule.kind}: {', '.join(named)}{', one operation a tick' if schedule.parts_per_backward else ''}"


def _described(report: Report) -> str:
    """The report as text, one figure per line."""
    slots = report.buffer_slots
    lines = [
        f"ticks      {report.ticks}",
        f"time       {report.time:g}; {report.ideal:g} without idle stages",
        f"bubble     {report.bubble:.1%} of the time",
        f"in flight  {' '.join(f'{most:g}' for most in report.in_flight)} (most microbatches kept, by stage)",
        f"slots      {slots.activation_slots} for activations, {slots.deferred_slots} deferred, "
        f"{slots.pending_head_slots} for the head",
    ]
    return "\n".join(lines)


def _parser() -> CommandParser:
    parser = CommandParser(
        "megajax.tools.schedule",
        description="Draw a pipeline's schedule, not the learning rate's, and print its costs."
        " Costs are per microbatch on a whole stage.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("config", metavar="CONFIG.yaml", nargs="?", help="a run, whose schedule is drawn")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="overrides of single keys")
    parser.add_argument("--schedule", default="1f1b", help=f"{', '.join(KINDS[:-1])} or {KINDS[-1]}")
    parser.add_argument("--stages", type=int, default=4, help="number of stages")
    parser.add_argument("--microbatches", type=int, default=8, help="number of microbatches in a step")
    parser.add_argument("--virtual-stages", type=int, default=1, help="virtual stages on each stage's device")
    parser.add_argument("--lockstep", action="store_true", help="1f1b with a forward and a backward operation a tick")
    parser.add_argument("--forward", type=float, default=1.0, help="cost of a forward pass")
    parser.add_argument("--backward", type=float, default=1.0, help="cost of input gradients")
    parser.add_argument("--weight", type=float, default=1.0, help="cost of weight gradients")
    parser.add_argument("--send", type=float, default=0.0, help="cost of sending to the neighbours, once per tick")
    parser.add_argument(
        "--svg",
        type=Path,
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="file of the picture (default: the schedule's name, such as 1f1b_p4_m8_r1.svg)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
