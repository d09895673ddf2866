"""Draws the pictures of docs/images from the data in docs/images/data.

    python dev/pictures.py
    python dev/pictures.py --record NAME RUN [RUN ...] [--baseline LOSS] [--smooth N] [--x step|tokens|hours]

The second command first stores the necessary metrics of the runs in docs/images/data/NAME.json; a run's name in the
picture is that of its directory. dev/pipeline_picture.py draws `pipeline_trace.svg` from a trace.
"""

import argparse
import json
import sys
from pathlib import Path

from megajax.console import user_errors
from megajax.errors import InputError
from megajax.step.pipeline.schedules import Kind, make_schedule
from megajax.step.pipeline.simulator import Costs
from megajax.tools import plot
from megajax.tools import schedule as schedule_drawing

IMAGES = Path(__file__).parents[1] / "docs/images"
KEYS = ("step", "time", "tokens", "loss", "eval_loss", "learning_rate", "grad_norm", "expert_load_max")
SCHEDULES: dict[str, tuple[Kind, int, int]] = {  # kind, virtual stages, and parts of a backward operation
    "schedule_1f1b": ("1f1b", 1, 2),
    "schedule_1f1b_lockstep": ("1f1b", 1, 0),
    "schedule_1f1b_interleaved": ("1f1b", 2, 0),
    "schedule_zero_bubble": ("zero_bubble", 1, 0),
}


def record(images: Path, name: str, run_dirs: list[Path], settings: dict) -> None:
    """Store the metrics of the runs and the drawing arguments in `images`/data/`name`.json."""
    runs = dict(zip(plot.names_of(run_dirs), map(plot.read_records, run_dirs), strict=True))
    kept = {
        run: [json.dumps({key: line[key] for key in KEYS if key in line}) for line in records]
        for run, records in runs.items()
    }
    body = ",\n".join(f"{json.dumps(run)}: [\n{',\n'.join(lines)}\n]" for run, lines in kept.items())
    path = images / "data" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'{{"settings": {json.dumps(settings)},\n"runs": {{\n{body}\n}}}}\n', encoding="utf-8")


def draw_all(images: Path) -> list[Path]:
    """Write every picture with stored data, and those of schedules; returns their paths."""
    written = []
    for path in sorted(images.glob("data/*.json")):
        kept = json.loads(path.read_text(encoding="utf-8"))
        written += plot.write(plot.draw(kept["runs"], **kept["settings"]), images / path.stem)
    for name, (kind, *settings) in SCHEDULES.items():
        schedule = make_schedule(kind, 4, 8, *settings)
        written.append(images / f"{name}.svg")
        written[-1].write_text(schedule_drawing.svg(schedule, Costs()), encoding="utf-8")
    return written


def main() -> int:
    """Store data with `--record`, and draw; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="directory of a run to store")
    parser.add_argument("--record", metavar="NAME", help="store the runs' data for the picture NAME")
    plot.add_drawing_arguments(parser)
    options = parser.parse_args()
    with user_errors():
        if (options.record is None) != (not options.runs):
            raise InputError("--record NAME and the directories of runs go together: give both or neither.")
        if options.record:
            settings = plot.check_drawing_arguments(options)
            record(IMAGES, options.record, options.runs, settings)
        for path in draw_all(IMAGES):
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
