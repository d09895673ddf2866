"""`megajax checkpoints RUN`: a run's checkpoints, their sizes and meshes, and their damage."""

import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from megajax.checkpoint import checksums, complete_steps, find_checkpoint
from megajax.checkpoint.storage import (
    SUBDIRECTORY,
    Folder,
    checkpoint_folder,
    read_description,
    saved_at,
    sizes,
    store_errors,
)
from megajax.checkpoint.weights import array_headers
from megajax.command_parser import CommandParser
from megajax.console import aligned, size, user_errors
from megajax.errors import UserError, reading

COLUMNS = ("step", "saved", "arrays", "on disk", "saved on", "files")
DAMAGED = 1  # exit status


def row(checkpoint: Folder, verify: bool) -> tuple[list[str], bool]:
    """The cells of `RUN/checkpoints/STEP`, and whether it is damaged; with `verify` its files are read and compared."""
    date = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(saved_at(checkpoint)))
    arrays, where, problem = "?", "?", ""
    try:
        arrays = size(sum(math.prod(shape) * dtype.itemsize for shape, dtype in array_headers(checkpoint).values()))
        where = _saved_on(checkpoint)
    except (UserError, OSError, ValueError) as error:
        problem = str(error) or type(error).__name__
    problem = (checksums.damage(checkpoint) if verify else checksums.lost(checkpoint)) or problem
    state = "verified" if verify else "with checksums, not verified"
    if not checksums.exist(checkpoint):
        state = "without checksums"
    if problem:
        state = f"DAMAGED: {problem}"
    on_disk = size(sum(sizes(checkpoint).values()))
    return [checkpoint.name, date, arrays, on_disk, where, state], bool(problem)


def _saved_on(checkpoint: Folder) -> str:
    """The mesh and the number of devices and processes that saved a checkpoint."""
    found = read_description(checkpoint).get("saved_on")
    if found is None:  # an older version
        return "unknown"
    with reading(f"{checkpoint}/description", "restore it"):
        mesh = " × ".join(f"{axis} {count}" for axis, count in found["mesh"].items()) or "one device"
        return mesh if found["processes"] == 1 else f"{mesh}, {found['processes']} processes"


def array_lines(checkpoint: Folder) -> Iterator[str]:
    """A line for each array of a checkpoint: name, shape, dtype, bytes."""
    headers = array_headers(checkpoint)
    width = max(map(len, headers))
    for name, (shape, dtype) in sorted(headers.items()):
        count = math.prod(shape) * dtype.itemsize
        yield f"{name:<{width}}  {dtype!s:<9} {size(count):>8}  {list(shape)}"


def main(argv: list[str]) -> int:
    """Print the table; the exit status, DAMAGED if a checkpoint is."""
    with user_errors():
        parser = CommandParser(
            "megajax.checkpoint.inspect", description="List the checkpoints of a run; no array is read, no GPU needed."
        )
        parser.add_argument("run", metavar="RUN", help="directory of a run, or RUN/checkpoints/STEP")
        parser.add_argument("--arrays", action="store_true", help="list the arrays of STEP, or of the newest one")
        parser.add_argument("--verify", action="store_true", help="compare all files with their checksums")
        options = parser.parse_args(argv)
        run_dir, newest = find_checkpoint(options.run, "RUN")
        chosen = [newest] if Path(options.run).parent.name == SUBDIRECTORY else complete_steps(run_dir)
        folder = checkpoint_folder(run_dir)
        with store_errors(folder):
            rows = [row(folder / str(step), options.verify) for step in chosen]
        table = [list(COLUMNS), *(cells for cells, _ in rows)]
        print("\n".join(aligned(table)))
        if options.arrays:
            print("", *array_lines(folder / str(newest)), sep="\n")
    return DAMAGED if any(damaged for _, damaged in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
