"""`megajax export-megatron`: a run's weights as a checkpoint of Megatron-Core in its distributed format."""

import sys
from collections.abc import Sequence
from pathlib import Path

from megajax.checkpoint.manager import find_checkpoint
from megajax.checkpoint.storage import SUBDIRECTORY, checkpoint_folder, read_description
from megajax.checkpoint.weights import run_config
from megajax.command_parser import CommandParser
from megajax.console import DONE, user_errors
from megajax.errors import InputError
from megajax.hf.adapters import open_merged
from megajax.megatron.export import export
from megajax.megatron.torch_files import Instance, Named
from megajax.schema.batch_schedule import samples_before
from megajax.tools.export_megatron.arguments import arguments_for

MODULE = "megajax.tools.export_megatron.__main__"
VERSION = 3.0  # of what the checkpoint's dictionary has, as Megatron-LM numbers it
CONTENT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}  # Megatron's way to name tensors


def export_step(run_dir: Path, step: int, folder: Path, sizes: tuple[int, int, int], dtype: str) -> None:
    """Write the checkpoint of `step` as a folder of Megatron-LM's, whose saved arguments have the parallel `sizes`.

    The sizes are those of tensor, pipeline and expert parallelism. One layer of a parameter is in memory at a time.
    Raises InputError for a model that Megatron's GPTModel does not have, a damaged file, and a folder that exists or
    cannot be written; nothing remains then.
    """
    config = run_config(run_dir, "RUN")
    samples = read_description(checkpoint_folder(run_dir) / str(step)).get("samples_consumed")
    arguments = arguments_for(config, step, samples_before(config, step) if samples is None else samples, sizes)
    common = {
        "args": Instance(Named("argparse", "Namespace"), arguments),
        "checkpoint_version": VERSION,
        "iteration": step,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": CONTENT,
    }
    with open_merged(run_dir, step, config) as weights:
        export(weights, config.model, folder, step, common, arguments["padded_vocab_size"], dtype)


def main(argv: Sequence[str]) -> int:
    """Write the checkpoint; returns the exit status."""
    with user_errors():
        options = _parser().parse_args(argv)
        sizes = (options.tp, options.pp, options.ep)
        for name, size in zip(("tp", "pp", "ep"), sizes, strict=True):
            if size < 1:
                raise InputError(f"--{name}={size} is no number of devices: use 1 or more.")
        named = options.run if options.step is None else Path(options.run) / SUBDIRECTORY / str(options.step)
        run_dir, step = find_checkpoint(named, "RUN")
        export_step(run_dir, step, options.folder, sizes, options.dtype)
        print(
            f"wrote step {step} of {run_dir} to {options.folder}; Megatron-LM reads it with --load and --no-load-optim"
        )
    return DONE


def _parser() -> CommandParser:
    parser = CommandParser(
        MODULE,
        description="Write a run's weights as a checkpoint of Megatron-Core (torch_dist), which it reads with any "
        "tensor-, pipeline- and expert-parallel sizes. --tp, --pp and --ep are only the sizes in the checkpoint's "
        "arguments, which Megatron-LM takes with --use-mp-args-from-checkpoint-args; --tp also pads the vocabulary.",
    )
    parser.add_argument("run", metavar="RUN", help="directory of a run, or RUN/checkpoints/STEP")
    parser.add_argument("folder", metavar="DIR", type=Path, help="the new folder, for --load of Megatron-LM")
    for name, kind in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert")):
        help_text = f"{kind}-parallel size in the saved arguments (default: 1)"
        parser.add_argument(f"--{name}", type=int, default=1, metavar="N", help=help_text)
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: the newest)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights (default: float32)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
