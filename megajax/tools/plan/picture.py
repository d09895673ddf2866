"""A step as an SVG picture: a pipeline's schedule with the costs of its stages, or the phases of one GPU."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass, field

from megajax.config import AXES
from megajax.errors import counted
from megajax.step.pipeline.buffers import schedule_of
from megajax.step.pipeline.simulator import Costs
from megajax.svg import FAINT, empty_picture, legend, rectangle, text, written
from megajax.tools import schedule as schedules
from megajax.tools.plan.candidates import Candidate
from megajax.tools.plan.report import mesh_text
from megajax.tools.plan.step_time import StepTime
from megajax.tools.plan.work import Traffic

WIDTH, LEFT, RIGHT, TOP, ROW, GAP, BELOW = 1400, 150, 30, 96, 34, 10, 34  # pixels
MILLISECONDS = 1e3
COLORS = {
    "forward": "#005f9e",
    "head": "#7a3fa0",
    "backward": "#c95400",
    "casts": "#b58900",
    "update": "#007a5a",
    "waiting": "#9a9a9a",
    "hidden": "#9fc4dd",
    "exposed": "#b3261e",
}
MEANINGS = {
    "casts": "casts and sums of gradients",
    "waiting": "waiting for the slowest GPU",
    "hidden": "collective beside computation",
    "exposed": "collective that nothing hides",
}
TICKS = 10  # of the time axis


@dataclass
class StepPhase:
    """A part of a step: computation, and collectives by axis. Its length is the computation and what nothing hides."""

    name: str
    computation: float  # seconds
    traffic: dict[str, Traffic] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.computation + sum(each.exposed for each in self.traffic.values())


def picture(found: Candidate) -> str:
    """The text of the SVG file."""
    return of_pipeline(found) if found.plan.is_pipelined else of_phases(found)


def of_pipeline(found: Candidate) -> str:
    """The schedule; costs are ms of a microbatch on a whole stage. The forward pass has the head, which stages share.

    Recomputation and copies are in the backward pass.
    """
    schedule, time = schedule_of(found.plan), found.time
    layers = time.layers / schedule.microbatches
    again = (time.recomputed.total + time.loops) / schedule.microbatches
    forward, matrices = time.forward * layers, time.matrices * layers
    backward, head = layers - forward - matrices + again, _head(time, schedule.microbatches).seconds
    send = time.ticks / schedule.ticks
    costs = [round(MILLISECONDS * s, 1) for s in (forward + head, backward, matrices, send)]
    return schedules.svg(schedule, Costs(*costs), "ms")


def of_phases(found: Candidate) -> str:
    """Time from left to right, computation in the first row, a row for the collectives of each axis."""
    time, phases = found.time, list(phases_of(found))
    axes = [axis for axis in AXES if axis in time.traffic]
    height = TOP + (1 + len(axes)) * (ROW + GAP) + BELOW
    drawing, scale = empty_picture(WIDTH, height), (WIDTH - LEFT - RIGHT) / sum(phase.seconds for phase in phases)
    _heading(drawing, found, {phase.name for phase in phases}, bool(axes))
    for row, name in enumerate(["computation", *(time.link(axis) for axis in axes)]):
        y = TOP + row * (ROW + GAP)
        rectangle(drawing, LEFT, y, WIDTH - LEFT - RIGHT, ROW, fill="none", stroke=FAINT)
        text(drawing, LEFT - 10, y + ROW / 2 + 4, name, text_anchor="end")
    start = LEFT
    for phase in phases:
        _box(
            drawing, start, 0, phase.computation * scale, COLORS[phase.name], f"{phase.name}: {_ms(phase.computation)}"
        )
        for row, axis in enumerate(axes, 1):
            of_axis = phase.traffic.get(axis, Traffic())
            hidden, exposed = min(of_axis.seconds - of_axis.exposed, phase.computation), of_axis.exposed
            hint = f"{axis}, {phase.name}: {_ms(of_axis.seconds)}, {_ms(exposed)} exposed, {of_axis.sent / 1e9:,.3f} GB"
            _box(drawing, start + (phase.computation - hidden) * scale, row, hidden * scale, COLORS["hidden"], hint)
            waits = sum(phase.traffic[other].exposed for other in axes[: row - 1] if other in phase.traffic)
            at = start + (phase.computation + waits) * scale
            _box(drawing, at, row, exposed * scale, COLORS["exposed"], hint)
        start += phase.seconds * scale
    _time_axis(drawing, time.total, height)
    return written(drawing)


def phases_of(found: Candidate) -> Iterator[StepPhase]:
    """The phases of a step without a pipeline.

    Over `fsdp` weights are gathered in every microbatch; over other axes before the first and after the last.
    """
    time, count = found.time, found.config.batch.num_microbatches
    first, again = time.computation / count, (time.recomputed.total + time.loops) / count
    shares = {"forward": time.forward, "backward": 1 - time.forward}
    for microbatch in range(count):
        edge = {"forward": microbatch == 0, "backward": microbatch == count - 1}
        for name in ("forward", "head", "backward"):
            if name == "head":
                yield _head(time, count)
                continue
            traffic = {axis: each * (shares[name] / count) for axis, each in time.activations.items()}
            for axis, each in time.weights.items():
                factor = shares[name] / count if axis == "fsdp" else shares[name] * edge[name]
                traffic[axis] = traffic.get(axis, Traffic()) + each * factor
            yield StepPhase(name, first * shares[name] + (again if name == "backward" else 0), traffic)
    yield StepPhase("casts", time.conversions)
    yield StepPhase("update", time.optimizer)
    yield StepPhase("waiting", time.waiting)


def _head(time: StepTime, count: int) -> StepPhase:
    """The head of one of `count` microbatches, with the collectives of the embedding."""
    return StepPhase("head", time.head / count, {axis: each * (1 / count) for axis, each in time.around.items()})


def _ms(seconds: float) -> str:
    return f"{MILLISECONDS * seconds:,.1f} ms"


def _box(drawing: ElementTree.Element, x: float, row: int, width: float, color: str, hint: str) -> None:
    if width > 0:
        box = rectangle(drawing, x, TOP + row * (ROW + GAP), width, ROW, fill=color, stroke="white", stroke_width="0.5")
        ElementTree.SubElement(box, "title").text = hint


def _heading(drawing: ElementTree.Element, found: Candidate, names: set[str], sends: bool) -> None:
    """Title, figures and legend."""
    config, time = found.config, found.time
    text(drawing, LEFT, 24, f"{config.run.name}: {mesh_text(found)}", font_size="16", font_weight="600")
    microbatches = counted(config.batch.num_microbatches, "microbatch")
    text(drawing, LEFT, 46, f"a step of {_ms(time.total)}, {microbatches}, estimated")
    x = float(LEFT)
    for name, color in COLORS.items():
        if name in names or (sends and name in ("hidden", "exposed")):
            x = legend(drawing, x, 60, [color], MEANINGS.get(name, name))


def _time_axis(drawing: ElementTree.Element, seconds: float, height: float) -> None:
    for tick in range(TICKS + 1):
        x = LEFT + tick / TICKS * (WIDTH - LEFT - RIGHT)
        text(
            drawing,
            x,
            height - 12,
            f"{MILLISECONDS * seconds * tick / TICKS:,.0f}",
            text_anchor="middle",
            fill="#666666",
        )
    text(drawing, LEFT - 10, height - 28, "ms", text_anchor="end", fill="#666666")
