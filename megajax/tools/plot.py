"""Curves of runs, as PNG and SVG: `megajax plot RUN [RUN ...]`.

Each run has one colour in all panels. The first panel has the training loss as a line and the evaluation loss as dots.
The panels below have what `--metric` names, the load of experts, the learning rate and the gradient norm, and, if the
losses of all runs coincide, the differences from the first run: their sizes or, with `--smooth`, those of the smoothed
losses.
"""

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from megajax import metrics_file
from megajax.command_parser import CommandParser
from megajax.console import user_errors
from megajax.errors import InputError, file_reader, shown
from megajax.files import CONFIG, CONSOLE_LOG, METRICS, check_output

Record = dict[str, Any]  # a line of metrics.jsonl
Curve = tuple[np.ndarray, np.ndarray]  # x and y
Runs = Mapping[str, Sequence[Record]]  # by name

EVALUATED = ("eval_", "ema_eval_")  # such metrics are drawn as dots
UNITS = {"step": "step", "tokens": "tokens", "hours": "hours since the first logged step"}
COINCIDING = 0.02  # runs with a smaller median relative difference of the loss look the same in the loss panel
WIDTH, LOSS_HEIGHT, PANEL_HEIGHT = 8.0, 4.0, 1.5  # inches


@file_reader("run_dir")
def read_records(run_dir: Path) -> list[Record]:
    """The lines of a run's metrics.jsonl; InputError if it cannot be read or has no logged step.

    An incomplete last line is ignored: the run is writing it. Damaged lines are left out with a warning.
    """
    path = run_dir / METRICS
    begun = f"wait for its first log line; if it has ended, {run_dir / CONSOLE_LOG} says why"
    if not path.exists():
        cure = begun if (run_dir / CONFIG).is_file() else "give the directory of a run"
        raise InputError(f"{run_dir} has no {METRICS}: {cure}.")
    records: list[Record] = [{**record} for _, record in metrics_file.read(path)]
    if not any(record.get("loss") is not None for record in records):
        raise InputError(f"{path} has no logged loss: {begun}.")
    return records


def curve(name: str, records: Sequence[Record], key: str, x: str = "step") -> Curve:
    """(x, value) of the records of the run `name` that have `key`, in order, without null values."""
    chosen = [record for record in records if record.get(key) is not None]
    values = np.array([record[key] for record in chosen], float)
    steps = np.array([record["step"] for record in chosen], float)
    if x == "tokens":  # lines of evaluations have the step only
        counted = np.array([(0, 0), *((r["step"], r["tokens"]) for r in records if "tokens" in r)], float)
        return np.interp(steps, counted[:, 0], counted[:, 1]), values
    if x == "hours":
        if any("time" not in record for record in records):
            raise InputError(f"--x=hours: lines of the metrics of {name} have no time: use --x=step or --x=tokens.")
        return np.array([record["time"] - records[0]["time"] for record in chosen]) / 3600, values
    return steps, values


def check_metrics(metrics: Sequence[str], runs: Runs) -> None:
    """InputError if no run has logged a metric, or with a number for each layer or expert."""
    logged = {key: value for records in runs.values() for record in records for key, value in record.items()}
    single = sorted(key for key, value in logged.items() if value is None or isinstance(value, int | float))
    for key in metrics:
        if key not in single:
            problem = "has several numbers at each step" if key in logged else "is in no line of these runs"
            raise InputError(f"--metric={key} {problem}: choose among {', '.join(single)}.")


def smoothed(values: np.ndarray, smooth: float) -> np.ndarray:
    """Means over the `smooth` logged steps around each; with `smooth` below 1 exponential means of earlier steps."""
    if smooth >= 1:
        sums, count, indices = np.cumsum(np.insert(values, 0, 0.0)), int(smooth), np.arange(len(values))
        starts = np.maximum(indices - (count - 1) // 2, 0)
        ends = np.minimum(indices + count // 2 + 1, len(values))
        return (sums[ends] - sums[starts]) / (ends - starts)
    found, total, weight = np.empty_like(values), 0.0, 0.0
    for index, value in enumerate(values):
        total, weight = smooth * total + (1 - smooth) * value, smooth * weight + (1 - smooth)
        found[index] = total / weight
    return found


def differences(runs: Runs, x: str, smooth: float = 0.0) -> dict[str, Curve]:
    """|loss − first run's loss| / first run's loss, by run; empty unless the curves of all runs coincide.

    With `smooth`, of smoothed losses and with their sign: runs that read the same batches have much of their noise in
    common.
    """
    losses = {}
    for name, records in runs.items():
        steps, values = curve(name, records, "loss")
        losses[name] = dict(zip(steps, smoothed(values, smooth) if smooth else values, strict=True))
    (first, reference), *compared = losses.items()
    at_steps, at_positions = (curve(first, runs[first], "loss", unit)[0] for unit in ("step", x))
    positions = dict(zip(at_steps, at_positions, strict=True))  # a damaged file may have a step twice
    found = {}
    for name, losses_of_run in compared:
        shared = [step for step in reference if step in losses_of_run and reference[step]]
        ratios = np.array([(losses_of_run[step] - reference[step]) / abs(reference[step]) for step in shared])
        found[name] = np.array([positions[step] for step in shared]), ratios if smooth else np.abs(ratios)
    coinciding = all(len(values) > 1 and np.median(np.abs(values)) < COINCIDING for _, values in found.values())
    return found if coinciding else {}


def draw(
    runs: Runs, *, x: str = "step", smooth: float = 0.0, baseline: float | None = None, metrics: Sequence[str] = ()
) -> Figure:
    """The picture of the runs; `baseline` is a dashed line in the loss panel, `metrics` have panels of their own."""
    colors = dict(zip(runs, _colors(len(runs)), strict=True))

    def draw_key(axes: Axes, key: str) -> None:
        for name, records in runs.items():
            style = "o:" if key.startswith(EVALUATED) else "-"
            axes.plot(*curve(name, records, key, x), style, color=colors[name], linewidth=1, markersize=4)

    panels: list[tuple[str, Callable[[Axes], None]]] = []
    if ratios := differences(runs, x, smooth):

        def draw_differences(axes: Axes) -> None:
            for name, points in ratios.items():
                axes.plot(*points, color=colors[name], linewidth=1)
            if smooth:
                axes.yaxis.set_major_formatter(PercentFormatter(1.0))
                axes.set_ylim(-2 * COINCIDING, 2 * COINCIDING)
            elif any(values.any() for _, values in ratios.values()):
                axes.set_yscale("log")

        panels.append((f"relative difference\nfrom {next(iter(runs))}", draw_differences))
    for key, label in (
        *((key, key) for key in metrics),
        ("expert_load_max", "expert load over\nmean, worst layer"),
        ("learning_rate", "learning rate"),
        ("grad_norm", "gradient norm"),
    ):
        if any(record.get(key) is not None for records in runs.values() for record in records):
            panels.append((label, lambda axes, key=key: draw_key(axes, key)))

    heights = [LOSS_HEIGHT, *[PANEL_HEIGHT] * len(panels)]
    figure = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
    axes = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    _draw_losses(axes[0], runs, colors, x, smooth, baseline)
    for panel, (label, draw_panel) in zip(axes[1:], panels, strict=True):
        draw_panel(panel)
        panel.set_ylabel(label)
        if label == "learning rate":
            panel.set_ylim(bottom=0)
        if label == "gradient norm":
            panel.set_yscale("log")
    for panel in axes:
        panel.grid(alpha=0.3)
    axes[-1].set_xlabel(UNITS[x])
    if x == "step":
        axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.align_ylabels(axes)
    return figure


def _draw_losses(
    axes: Axes, runs: Runs, colors: Mapping[str, Any], x: str, smooth: float, baseline: float | None
) -> None:
    for name, records in runs.items():
        prefix, color = f"{name}: " if len(runs) > 1 else "", colors[name]
        position, loss = curve(name, records, "loss", x)
        if smooth:
            axes.plot(position, loss, color=color, linewidth=1, alpha=0.25)
            loss = smoothed(loss, smooth)
        axes.plot(position, loss, color=color, linewidth=1, label=f"{prefix}training")
        position, loss = curve(name, records, "eval_loss", x)
        if len(loss):
            axes.plot(position, loss, "o:", color=color, markersize=4, label=f"{prefix}evaluation")
    if baseline is not None:
        axes.axhline(baseline, color="black", linestyle="--", linewidth=1, label="unigram entropy")
    axes.set_ylabel("loss (nats per token)")
    axes.legend(fontsize="small")


def _colors(count: int) -> list[Any]:
    if count <= 10:
        return [f"C{index}" for index in range(count)]
    return list(matplotlib.colormaps["turbo"](np.linspace(0, 1, count)))


def write(figure: Figure, stem: Path) -> list[Path]:
    """Write `stem`.png and .svg, deterministically; returns their paths. InputError if it fails."""
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg")]
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        settings = matplotlib.rc_context({"svg.hashsalt": "megajax", "svg.fonttype": "none"})
        with settings, np.errstate(over="ignore", invalid="ignore"):  # it becomes an error below
            figure.savefig(paths[0], dpi=120)
            figure.savefig(paths[1], metadata={"Date": None})
    except OSError as error:
        raise InputError(f"--output={stem} cannot be written ({error.strerror}): choose another file.") from None
    except (ArithmeticError, ValueError) as error:  # matplotlib's, of numbers near the largest
        raise InputError(f"{stem} cannot be drawn ({shown(error)}): leave out values far from the others.") from None
    return paths


def names_of(run_dirs: Sequence[Path]) -> list[str]:
    """A unique name for each run: its directory's name, with as many parent directories as necessary."""
    parts = [run_dir.resolve().parts for run_dir in run_dirs]

    def name(run: tuple[str, ...]) -> str:
        others = [other for other in parts if other != run]
        count = next((n for n in range(1, len(run)) if all(other[-n:] != run[-n:] for other in others)), len(run))
        return str(Path(*run[-count:]))

    return [name(own) for own in parts]


def describe(name: str, records: Sequence[Record], baseline: float | None) -> str:
    """One sentence about the losses of a run, with the baseline."""
    steps, loss = curve(name, records, "loss")
    text = f"{name}: training loss {loss[-1]:.3f} at step {steps[-1]:.0f}"
    steps, loss = curve(name, records, "eval_loss")
    if len(loss):
        text += f", evaluation loss {loss[-1]:.3f} at step {steps[-1]:.0f}"
    if len(loss) > 1:
        text += f" ({loss[0]:.3f} at step {steps[0]:.0f})"
    return text + (f"; unigram entropy {baseline:.3f}." if baseline is not None else ".")


def add_drawing_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `draw`."""
    parser.add_argument("--x", choices=UNITS, default="step", help="horizontal axis (default: step)")
    parser.add_argument(
        "--smooth",
        type=float,
        default=0.0,
        metavar="N",
        help="mean of the training loss over N logged steps; below 1: exponential mean with this weight",
    )
    parser.add_argument(
        "--metric",
        action="append",
        default=[],
        dest="metrics",
        metavar="NAME",
        help="a panel of a logged number, such as eval_accuracy; may be repeated",
    )
    parser.add_argument(
        "--baseline", type=float, metavar="LOSS", help="draw a dashed line, such as the text's unigram entropy"
    )


def check_drawing_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `draw`; InputError for invalid ones."""
    smooth, baseline = options.smooth, options.baseline
    if not (0 <= smooth < 1 or (math.isfinite(smooth) and smooth == int(smooth) and smooth > 0)):
        raise InputError(f"--smooth={smooth:g} is neither a whole number of steps nor a weight of 0 to below 1.")
    if baseline is not None and not math.isfinite(baseline):
        raise InputError(f"--baseline={baseline} is not a loss: give a number of nats per token.")
    return {"x": options.x, "smooth": smooth, "baseline": baseline, "metrics": options.metrics}


def main(arguments: Sequence[str]) -> int:
    """Write the pictures and print a sentence about each run; returns the exit status."""
    parser = CommandParser(
        "megajax.tools.plot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directory of a run")
    add_drawing_arguments(parser)
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="write FILE.png and FILE.svg (default: RUN/loss; for several runs loss in this directory)",
    )
    with user_errors():
        options = parser.parse_args(arguments)
        settings = check_drawing_arguments(options)
        run_dirs = list({run_dir.resolve(): run_dir for run_dir in options.runs}.values())
        output = options.output or (run_dirs[0] / "loss" if len(run_dirs) == 1 else Path("loss"))
        if output.suffix in (".png", ".svg"):
            output = output.with_suffix("")
        check_output("--output", output.parent, is_folder=True)
        runs = dict(zip(names_of(run_dirs), map(read_records, run_dirs), strict=True))
        check_metrics(options.metrics, runs)
        paths = write(draw(runs, **settings), output)
        for name, records in runs.items():
            print(describe(name, records, options.baseline))
        print(f"Pictures: {', '.join(map(str, paths))}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
