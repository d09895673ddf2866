"""Trains a small version of a config on one device and on meshes, and prints a table of the differences."""

import math
from collections.abc import Mapping, Sequence

from megajax.config import AXES, Config
from megajax.verify.runs import Difference, compare, train
from megajax.verify.shrink import shrink

HEAD = ("mesh", "loss", "gradient norm", "largest gradient difference", "largest update difference", "verdict")


def report(config: Config, meshes: Sequence[Mapping[str, int]], steps: int) -> int:
    """Train and print, a line as soon as it is known; the exit status."""
    small, changes = shrink(config, meshes, steps)
    print("\n".join(["The small version of the config:", *(f"  {line}" for line in changes), ""]))
    expected = train(small, dict.fromkeys(AXES, 1))
    print("\n".join([row(HEAD), row(["---"] * len(HEAD))]), flush=True)
    wrong = []
    for sizes in meshes:
        difference = compare(train(small, sizes), expected)
        print(row(cells(sizes, difference)), flush=True)
        wrong += [f"{mesh_name(sizes)}: {difference.first}."] if difference.first else []
    count = f"{len(meshes)} mesh" + "es" * (len(meshes) > 1)
    number = f"{steps} step" + "s" * (steps > 1)
    print("\n".join(["", *(wrong or [f"{count}: the same as one device after {number}, up to rounding."])]))
    return 1 if wrong else 0


def mesh_name(sizes: Mapping[str, int]) -> str:
    """The axes above 1."""
    return " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one device"


def cells(sizes: Mapping[str, int], difference: Difference) -> list[str]:
    """A row of the table."""
    worst = [
        f"{value:.1e} {name}"
        for values in (difference.gradients, difference.updates)
        for name, value in [max(values.items(), key=lambda item: math.inf if math.isnan(item[1]) else item[1])]
    ]
    verdict = "differs" if difference.first else "agrees"
    return [mesh_name(sizes), f"{difference.loss:.1e}", f"{difference.norm:.1e}", *worst, verdict]


def row(entries: Sequence[str]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(entries)} |"
