"""A picture of the load of a run's experts: a heat map over layers and logged steps."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megajax import metrics_file
from megajax.errors import InputError, counted, file_reader
from megajax.files import METRICS, replace_text
from megajax.svg import empty_picture, hexadecimal, rectangle, text, text_width, written

NAME = "expert_load.svg"
MOST_COLUMNS = 120  # longer runs have several steps per column
LEFT, TOP, BELOW, RIGHT, NARROWEST_PICTURE = 72, 92, 36, 24, 560  # pixels
PLOT, CELL_WIDTHS, CELL_HEIGHTS = (960, 600), (8, 32), (8, 20)
SHARES, SHADES = (0, 0.5, 1), ((237, 244, 250), (96, 162, 204), (8, 48, 107))  # from light to dark
TITLE = "Expert load by layer and step"
NOTE = "the largest count of an expert over the mean; 1: balanced"


def write_load_map(run_dir: Path, layers: Sequence[int]) -> None:
    """Write `expert_load.svg` from the loads in the run's metrics.jsonl, if there are any.

    `layers` are the model's layers with experts.
    """
    steps, loads = read_loads(run_dir / METRICS, len(layers))
    if steps:
        replace_text(run_dir / NAME, load_map(steps, loads, layers))


@file_reader("path")
def read_loads(path: Path, layers: int) -> tuple[list[int], np.ndarray]:
    """(the steps with a logged `expert_load`, the loads `[steps, layers]`)."""
    loads = {line["step"]: line["expert_load"] for _, line in metrics_file.read(path) if "expert_load" in line}
    for step, load in loads.items():
        if len(load) != layers:
            raise InputError(
                f"{path} has {counted(len(load), 'value')} of expert_load at step {step}, but the model has "
                f"{counted(layers, 'layer')} with experts: {metrics_file.CURE}."
            )
    return list(loads), np.array(list(loads.values()))


def load_map(steps: list[int], loads: np.ndarray, layers: Sequence[int]) -> str:
    """`loads [steps, L]` of `layers` → SVG: one row per layer, the first on top, one column per step or group of steps.

    A group shows its mean. The lightest colour is 1 (balanced), the darkest is the largest load, but at least 2, so
    small differences stay light.
    """
    parts = np.array_split(np.arange(len(steps)), min(len(steps), MOST_COLUMNS))
    cell_width, cell_height = (
        float(np.clip(space / count, *limits))
        for space, count, limits in zip(PLOT, (len(parts), len(layers)), (CELL_WIDTHS, CELL_HEIGHTS), strict=True)
    )
    bottom, darkest = TOP + len(layers) * cell_height, max(2.0, float(loads.max()))
    picture = empty_picture(max(LEFT + len(parts) * cell_width + RIGHT, NARROWEST_PICTURE), bottom + BELOW)
    _draw_heading(picture, darkest)
    for column, part in enumerate(parts):
        x, first, last = LEFT + column * cell_width, steps[part[0]], steps[part[-1]]
        name = f"step {first}" if first == last else f"steps {first} to {last}"
        for row, (layer, load) in enumerate(zip(layers, loads[part].mean(axis=0), strict=True)):
            color = hexadecimal(_shade((load - 1) / (darkest - 1)))
            y = TOP + row * cell_height
            cell = rectangle(picture, x, y, cell_width, cell_height, fill=color, class_="load")
            ElementTree.SubElement(cell, "title").text = f"layer {layer}, {name}: {load:.4g}"
    _draw_names(picture, [steps[part[0]] for part in parts], layers, cell_width, cell_height, bottom)
    return written(picture)


def _draw_heading(picture: ElementTree.Element, darkest: float) -> None:
    text(picture, LEFT, 24, TITLE, font_size="16", font_weight="600")
    text(picture, LEFT, 44, NOTE)
    x = LEFT + text(picture, LEFT, 70, "1") + 6
    for share in np.linspace(0, 1, 9):
        rectangle(picture, x, 59, 14, 14, fill=hexadecimal(_shade(share)))
        x += 14
    text(picture, x + 6, 70, f"{darkest:.3g}")


def _draw_names(
    picture: ElementTree.Element, steps: list[int], layers: Sequence[int], width: float, height: float, bottom: float
) -> None:
    """Numbers of layers and steps, as many as fit."""
    every = int(np.ceil(14 / height))
    for row in range(0, len(layers), every):
        text(picture, LEFT - 8, TOP + (row + 0.5) * height + 4, f"layer {layers[row]}", text_anchor="end")
    text(picture, LEFT - 8, bottom + 18, "step", text_anchor="end")
    free = 0.0
    for column, step in enumerate(steps):
        x, half = LEFT + (column + 0.5) * width, text_width(str(step)) / 2
        if x - half >= free:
            text(picture, x, bottom + 18, str(step), text_anchor="middle")
            free = x + half + 8


def _shade(share: float) -> tuple[int, ...]:
    """Red, green and blue; a larger `share` (0 to 1) is darker."""
    return tuple(round(float(np.interp(share, SHARES, channel))) for channel in zip(*SHADES, strict=True))
