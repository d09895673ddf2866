"""Shows where the time of a train step goes, beside the planner's estimate, and names the largest gap.

    megajax profile CONFIG [section.key=value ...]
    megajax profile RUN

The first command traces steps of a config on synthetic tokens, on the devices of this machine; CONFIG is a path, or the
name of a file in configs/. The second reads the trace in a run directory (`logging.profile_start`), or in a folder of
--save. docs/profiling.md explains the table.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megajax.command_parser import CommandParser
from megajax.console import user_errors
from megajax.errors import InputError
from megajax.files import CONFIG, check_new_folder
from megajax.runtime import accept_missing_cuda, prepare_environment
from megajax.tools.bench import synthetic_config
from megajax.tools.plan import DEVICE_NAMES

if TYPE_CHECKING:
    from megajax.tools.plan.rates import Rates

WARMUP_STEPS = 3
# A trace does not name the operations of a CUDA graph's kernels.
NO_GRAPHS = "--xla_gpu_enable_command_buffer="


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; the exit status."""
    parser = CommandParser(
        "megajax.tools.profile.__main__", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="CONFIG_OR_RUN", help="a config to trace, or a folder with a trace")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="of the config")
    parser.add_argument("--steps", type=int, default=3, help="steps to trace (default: 3)")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="keep the trace in this new folder")
    parser.add_argument("--device", help=f"predict for {', '.join(DEVICE_NAMES)} (default: the devices of the trace)")
    parser.add_argument("--rates", type=Path, metavar="FILE", help="JSON file of rates, as of megajax plan")
    parser.add_argument("--parts", action="store_true", help="add the parts of each row, with their rooflines")
    parser.add_argument("--operations", type=int, default=0, metavar="N", help="add the N longest operations")
    with user_errors():
        options = parser.parse_intermixed_args(arguments)
        check(options)
        if Path(options.source).is_dir():
            os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a GPU here may be that of the run
            print(described(Path(options.source), options))
            return 0
        with tempfile.TemporaryDirectory() as scratch:
            folder = options.save or Path(scratch)
            trace_steps(options, folder)
            print(described(folder, options))
    return 0


def check(options: argparse.Namespace) -> None:
    """Raises InputError for arguments that cannot be followed."""
    if options.steps < 1:
        raise InputError(f"--steps={options.steps} is below 1: give 1 or more.")
    if options.operations < 0:
        raise InputError(f"--operations={options.operations} is below 0: give 0 or more.")
    if Path(options.source).is_dir():
        if options.overrides:
            raise InputError(
                f"{options.overrides[0]} cannot change the trace in {options.source}: leave it out, or give a config."
            )
        if options.save is not None:
            raise InputError(f"--save={options.save}: {options.source} has a trace already: leave --save out.")
    if options.save is not None:
        check_new_folder("--save", options.save)


def trace_steps(options: argparse.Namespace, folder: Path) -> None:
    """Run a config's steps in this process and write the trace of the last ones into a folder."""
    config = synthetic_config(options.source, options.overrides, str(folder))
    chosen = {"profile_start": WARMUP_STEPS + 1, "profile_steps": options.steps}
    config = config.model_copy(update={"logging": config.logging.model_copy(update=chosen)})
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {NO_GRAPHS}".strip()
    flags = prepare_environment(config)

    import jax

    from megajax.training.loop import Trainer

    chosen_rates(options, jax.devices()[0].device_kind)  # a mistake is found before the steps
    trainer = Trainer(config, flags=flags)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(config.to_yaml(), encoding="utf-8")
    for _ in range(WARMUP_STEPS + options.steps):
        batch = trainer.next_batch()
        trainer.profile.before_step(trainer.view, batch)
        trainer.train_step(batch)
        trainer.profile.on_step(trainer.view)
    trainer.checkpoints.close()


def described(folder: Path, options: argparse.Namespace) -> str:
    """The report on the trace in a folder."""
    accept_missing_cuda()

    from megajax.tools.profile.report import report
    from megajax.tools.profile.trace import read

    trace = read(folder)
    return report(trace, chosen_rates(options, trace.device_kind), options.parts, options.operations)


def chosen_rates(options: argparse.Namespace, device_kind: str) -> "Rates | None":
    """The rates of the prediction, for a trace of devices of this kind; None if the planner has none of them."""
    from megajax.tools.plan.rates import rates_of, rates_of_kind, read_rates

    rates = rates_of(options.device) if options.device is not None else rates_of_kind(device_kind)
    if options.rates is None:
        return rates
    if rates is None:
        raise InputError(
            f"--rates={options.rates}: the planner has no rates of {device_kind} that the file could change: "
            "add --device h200."
        )
    return read_rates(options.rates, rates)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
