"""Trains a small version of a config on one device and on meshes, and prints the differences."""

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from megajax.config import AXES, Config
from megajax.config.sentences import mesh_name
from megajax.tools.verify.differences import RunDifference, compare
from megajax.tools.verify.runs import Run, RunTrace
from megajax.tools.verify.shrink import Precision, in_fp32, shrink

ONE_DEVICE: Mapping[str, int] = dict.fromkeys(AXES, 1)
HEAD = "Largest differences from one device, ‖a − b‖ / ‖b‖, each of the largest that rounding explains:"


def report(
    config: Config, meshes: Sequence[Mapping[str, int]], steps: int, precision: Precision, checkpoint: bool
) -> int:
    """Train and print, a line as soon as it is known; the exit status."""
    small, changes = shrink(config, meshes, steps, precision)
    print("\n".join(["The small version of the config:", *(f"  {line}" for line in changes), ""]))
    one, runs, wrong = Run(small, ONE_DEVICE), 0, 0
    with tempfile.TemporaryDirectory() as scratch:
        own = Path(scratch) if checkpoint else None
        with _working("one device"):
            expected, exact = one.train(own), None
        if precision != "float32":
            with _working("one device in FP32"):
                exact = Run(in_fp32(small), ONE_DEVICE).train()
            print(rounding_line(precision, compare(expected, exact)))
        print(HEAD, flush=True)
        for sizes in meshes:
            for name, found in traces(one, Run(small, sizes), mesh_name(sizes), own):
                difference = compare(found, expected, exact)
                print("\n".join(["", *lines(name, difference)]), flush=True)
                runs, wrong = runs + 1, wrong + (difference.first is not None)
    verdict = "all agree with one device, up to rounding" if not wrong else f"runs that differ from one device: {wrong}"
    print(f"\nruns: {runs}, steps: {steps}; {verdict}.")
    return 1 if wrong else 0


def traces(one: Run, mesh: Run, name: str, saved: Path | None) -> Iterator[tuple[str, RunTrace]]:
    """The mesh's run; with `saved`, one device's checkpoint, also the runs that change to and from one device."""
    with tempfile.TemporaryDirectory() as scratch:
        own = None if saved is None else Path(scratch)
        work: dict[str, Callable[[], RunTrace]] = {name: lambda: mesh.train(own)}
        if saved is not None and own is not None:
            work[f"one device, then {name}"] = lambda: mesh.resume(saved, one.saved)
            work[f"{name}, then one device"] = lambda: one.resume(own, mesh.saved)
        for run, train in work.items():
            with _working(run):
                trace = train()
            yield run, trace


@contextlib.contextmanager
def _working(run: str) -> Iterator[None]:
    """Around a run: it is named on stderr as it begins, on a terminal until it ends."""
    text = f"compiling and training: {run}…"
    if not sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


def rounding_line(precision: Precision, rounding: RunDifference) -> str:
    """The sentence on the rounding of a precision, measured on one device."""
    computed = {"fp8": "Linear layers compute in FP8, all else in FP32.", "bfloat16": "All is computed in BF16."}
    most = {kind: f"{max(rounding.values[kind].values()):.1e}" for kind in ("gradient", "update", "loss")}
    return (
        f"{computed[precision]} On one device this rounding changes a gradient by at most {most['gradient']},\n"
        f"an update by {most['update']}, and a loss by {most['loss']}, compared with FP32. Two runs may differ by "
        "twice that,\nmeasured name by name, and in losses and norms by four times the worst step's. "
        "Smaller errors show with\n--precision float32.\n"
    )


def lines(name: str, difference: RunDifference) -> list[str]:
    """The verdict on a run, and a line for each kind of difference."""
    first = (difference.first or "").replace("; ", ";\n  ")
    out = [f"{name} differs:\n  {first}." if first else f"{name} agrees"]
    for kind in difference.values:
        if worst := difference.worst(kind):
            value, limit = difference.values[kind][worst], difference.limits[kind][worst]
            out.append(f"  {kind:13}  {value:.1e} of {limit:.1e}  {worst}")
    return out
