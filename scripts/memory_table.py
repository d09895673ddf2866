"""A markdown table that compares the memory estimate of a run's summary with XLA's figure.

    python scripts/memory_table.py
    python scripts/memory_table.py --write

The first command reads XLA's figures from tests/data/memory_rows.txt and computes the estimates, which takes seconds.
The second command compiles each row for H200s, without a GPU, in its own process, which takes minutes, and writes XLA's
figures to that file; a test compares the estimates with them. A row is GiB per device, a config, overrides and `--gpus
N`: to add one, write any figure and run `--write`. Compiling needs jax's CUDA plugin (in the extra `dev`).
"""

import argparse
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from compile_row import ROOT, compile_apart

from megajax.config import load_config
from megajax.config.checks import check_mesh
from megajax.console import user_errors
from megajax.errors import InputError
from megajax.model import Transformer, parameters
from megajax.plan import MemoryEstimate, estimate_memory
from megajax.plan.compile import require_plugin
from megajax.sharding import place_all, stored_rows
from megajax.step_plan import HOPPER, StepPlan

ROWS = ROOT / "tests/data/memory_rows.txt"
GIB = 2**30


@dataclass(frozen=True)
class Row:
    """A config on a number of GPUs, and XLA's memory figure for it."""

    gib: float  # of a device
    config: str
    overrides: tuple[str, ...]
    gpus: int

    @classmethod
    def parse(cls, line: str) -> "Row":
        """The row of a line of the file. Raises InputError if it is not a row."""
        try:
            gib, config, *overrides, flag, gpus = shlex.split(line)
            if flag != "--gpus":
                raise ValueError
            return cls(float(gib), config, tuple(overrides), int(gpus))
        except ValueError:
            raise InputError(f"{line!r} is no row: write GiB, a config, overrides and --gpus N.") from None

    @property
    def case(self) -> str:
        return shlex.join([self.config, *self.overrides, "--gpus", str(self.gpus)])


def read_rows(path: Path = ROWS) -> list[Row]:
    """The rows of the file."""
    return [Row.parse(line) for line in path.read_text().splitlines() if line.strip()]


def estimate(row: Row) -> MemoryEstimate:
    """Estimated bytes per device; it needs no devices."""
    config = load_config(ROOT / row.config, list(row.overrides))
    sizes = check_mesh(config, row.gpus)
    rows = stored_rows(config, sizes["pipeline"])
    placements = place_all(parameters(Transformer(config.model, config.lora)), sizes, rows, config.mesh.experts_over)
    return estimate_memory(StepPlan.make(config, sizes, HOPPER), placements)


def planned(row: Row) -> float:
    """XLA's GiB per device. Raises InputError if the row does not compile."""
    return compile_apart(row.config, row.overrides, row.gpus)["device_memory"]["whole"] / GIB


def table(rows: list[Row]) -> str:
    """A Markdown table, one line per row."""
    lines = ["| config | GPUs | XLA GiB | estimate GiB | ratio |", "|---|---:|---:|---:|---:|"]
    for row in rows:
        ours = estimate(row).total / GIB
        name = " ".join([Path(row.config).stem, *row.overrides])
        lines.append(f"| {name} | {row.gpus} | {row.gib:.2f} | {ours:.2f} | {ours / row.gib:.3f} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"compile each row and write {ROWS.relative_to(ROOT)}")
    args = parser.parse_args(arguments)
    with user_errors():
        rows = read_rows()
        if args.write:
            require_plugin()
            rows = [Row(planned(row), row.config, row.overrides, row.gpus) for row in rows]
            ROWS.write_text("".join(f"{row.gib:.2f} {row.case}\n" for row in rows))
        print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
