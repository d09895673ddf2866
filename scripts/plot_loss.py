"""Draws the loss curves of one or more runs, with experts also how evenly these are loaded."""

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from megajax.errors import InputError

Curve = list[tuple[int, float]]


def read_curve(run_dir: Path, key: str) -> Curve:
    """(step, value) of every line of the run's metrics.jsonl that has `key`, in order; null is left out."""
    path = run_dir / "metrics.jsonl"
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; give a run directory that has metrics.") from error
    curve = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if record.get(key) is not None:
                curve.append((record["step"], record[key]))
        except (ValueError, KeyError, AttributeError) as error:
            raise InputError(f"{path}, line {number} is no metrics record: {line[:60]!r}.") from error
    return curve


def draw(run_dirs: list[Path], baseline: float | None, output: Path) -> None:
    """One colour a run: train loss as a line, evaluation loss as dots; the baseline as a dashed line.

    Runs with experts have a second picture beside it: their worst layer's largest load over the mean.
    """
    loads = [read_curve(run_dir, "expert_load_max") for run_dir in run_dirs]
    columns = 2 if any(loads) else 1
    figure, [panels] = plt.subplots(1, columns, figsize=(8 * columns, 4.5), layout="constrained", squeeze=False)
    axes = panels[0]
    for index, run_dir in enumerate(run_dirs):
        train, evaluation = read_curve(run_dir, "loss"), read_curve(run_dir, "eval_loss")
        name = f"{run_dir.name}: " if len(run_dirs) > 1 else ""
        if train:
            axes.plot(*zip(*train, strict=True), color=f"C{index}", linewidth=1, label=f"{name}training")
        if evaluation:
            axes.plot(*zip(*evaluation, strict=True), f"C{index}o:", label=f"{name}evaluation")
    if baseline is not None:
        axes.axhline(baseline, color="black", linestyle="--", linewidth=1, label="unigram entropy")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    if any(loads):
        for index, curve in enumerate(loads):
            panels[1].plot(*(zip(*curve, strict=True) if curve else ((), ())), color=f"C{index}", linewidth=1)
        panels[1].set(xlabel="step", ylabel="largest expert load over the mean, worst layer")
        panels[1].grid(alpha=0.3)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=150)


def describe(run_dir: Path, baseline: float | None) -> str:
    """One sentence on how the evaluation loss went, the baseline beside it."""
    evaluation = read_curve(run_dir, "eval_loss")
    if not evaluation:
        return f"{run_dir.name}: no evaluation yet."
    (first_step, first), (last_step, last) = evaluation[0], evaluation[-1]
    text = f"{run_dir.name}: evaluation loss {last:.3f} at step {last_step}"
    if len(evaluation) > 1:
        text += f" ({first:.3f} at step {first_step})"
    return text + (f"; unigram entropy {baseline:.3f}." if baseline is not None else ".")


def main() -> int:
    """Exit status 2 and one sentence when a run can't be read."""
    parser = argparse.ArgumentParser(description="Draw the loss curves of one or more runs.")
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--output", type=Path, required=True, metavar="PNG")
    parser.add_argument("--baseline", type=float, help="the corpus's unigram entropy, in nats per token")
    arguments = parser.parse_args()
    try:
        draw(arguments.run_dirs, arguments.baseline, arguments.output)
        for run_dir in arguments.run_dirs:
            print(describe(run_dir, arguments.baseline))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"Loss curve: {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
