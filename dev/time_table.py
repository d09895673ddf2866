"""A markdown table that compares estimated with measured speeds: `python dev/time_table.py [--rates FILE]`.

Reads tests/data/time_rows.txt: `fitted` or `checked` (whether the row was used to fit the constants of
`plan/step_time.py`), the measured TFLOP/s of a GPU (docs/performance.md), a config, overrides and `--gpus N`: of H200s,
or of another device with `--device NAME`.
`--rates`: a file of `megajax preflight --rates` or your own, as for `megajax plan`, in place of the shipped rates.
"""

import argparse
import itertools
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from megajax.config import load_config
from megajax.config.checks import check_mesh
from megajax.console import user_errors
from megajax.estimate.costs import flops_per_token
from megajax.tools.plan.candidates import Candidate
from megajax.tools.plan.rates import H200, Rates, rates_of, read_rates
from megajax.tools.plan.step_time import StepTime, tokens_per_second

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "tests/data/time_rows.txt"


@dataclass(frozen=True)
class Row:
    """A measured config."""

    fitted: bool
    teraflops: float
    config: str
    overrides: tuple[str, ...]
    gpus: int
    device: str = "h200"

    @classmethod
    def parse(cls, line: str) -> "Row":
        line, _, device = line.partition(" --device ")
        use, teraflops, config, *overrides, _, gpus = shlex.split(line)
        return cls(use == "fitted", float(teraflops), config, tuple(overrides), int(gpus), device or cls.device)


def read_rows() -> list[Row]:
    """The rows of the file."""
    return [Row.parse(line) for line in ROWS.read_text(encoding="utf-8").splitlines() if line.strip()]


def estimate(row: Row, rates: Rates | None = None) -> tuple[float, StepTime]:
    """(TFLOP/s of a GPU, the parts of the step); `rates` in place of those of the row's device."""
    config = load_config(ROOT / row.config, list(row.overrides))
    candidate = Candidate.of(config, check_mesh(config, row.gpus), rates or rates_of(row.device))
    step = candidate.time
    return flops_per_token(config) * tokens_per_second(candidate.plan, step.total) / 1e12, step


def table(rows: list[Row], rates: Rates | None = None) -> str:
    """A line per row, then the errors and the share of pairs in the right order."""
    lines = ["| config | GPUs | measured TFLOP/s | estimate | difference | |", "|---|---:|---:|---:|---:|---|"]
    estimates = {row: estimate(row, rates)[0] for row in rows}
    for row, ours in estimates.items():
        name, use = " ".join([Path(row.config).stem, *row.overrides]), "fitted" if row.fitted else ""
        name += f" ({row.device.upper()})" if row.device != Row.device else ""
        lines.append(
            f"| {name} | {row.gpus} | {row.teraflops:g} | {ours:.0f} | {ours / row.teraflops - 1:+.1%} | {use} |"
        )
    for fitted in (True, False):
        errors = [abs(ours / row.teraflops - 1) for row, ours in estimates.items() if row.fitted == fitted]
        of = "fitted" if fitted else "other"
        lines.append(f"\n{len(errors)} {of} rows: mean {sum(errors) / len(errors):.1%}, largest {max(errors):.1%}.")
    pairs = [p for p in itertools.combinations(rows, 2) if not 0.95 < p[0].teraflops / p[1].teraflops < 1.05]
    right = sum((a.teraflops > b.teraflops) == (estimates[a] > estimates[b]) for a, b in pairs)
    return "\n".join([*lines, f"\nOf {len(pairs)} pairs that differ by more than 5 %, {right} are in the right order."])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=Path, metavar="FILE", help="JSON file of rates in place of an H200's")
    options = parser.parse_args(arguments)
    with user_errors():
        print(table(read_rows(), None if options.rates is None else read_rates(options.rates, H200)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
