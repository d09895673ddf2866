"""`megajax hf`: models in Hugging Face's format; `--help` lists the commands."""

import argparse
import re
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from megajax.checkpoint.manager import find_checkpoint
from megajax.checkpoint.storage import SUBDIRECTORY
from megajax.checkpoint.weights import run_config
from megajax.command_parser import CommandParser
from megajax.config import load_config
from megajax.config.checks import check_mesh
from megajax.console import user_errors
from megajax.errors import InputError
from megajax.files import check_new_folder
from megajax.hf.adapters import export_adapters
from megajax.hf.compare import check_reference, compare, compare_logits, summary
from megajax.hf.convert import read_folder
from megajax.hf.exporting import export_step
from megajax.hf.folder import folder_bytes
from megajax.hf.importing import import_folder
from megajax.hf.plan import plan, report
from megajax.options.quantisations import NONE, QUANTISATIONS
from megajax.runtime import use_cpu
from megajax.schema.checkpoint import DTYPES
from megajax.schema.tree import Dumper

MODULE = "megajax.hf.__main__"
OTHER_HEAD = re.compile(r"\w+For(\w+Classification|QuestionAnswering|MultipleChoice)|\w+Reward\w*")  # of a family
PER_PROCESS = 8  # devices, unless there are fewer


def _config(parser: CommandParser, argv: Sequence[str]) -> int:
    """print the section `model` of the config that describes the folder's model"""
    parser.add_argument("folder", metavar="HF_FOLDER")
    options = parser.parse_args(argv)
    _, section, theirs = read_folder(options.folder)
    if head := OTHER_HEAD.search(str(theirs.get("architectures"))):
        warnings.warn(
            f"{options.folder}/config.json has architectures={head[0]}, whose head the section model does not have: "
            "only an objective with parameters of its own starts from this folder (docs/huggingface.md, classifiers); "
            "else give checkpoint.init_from that of the language model.",
            stacklevel=2,
        )
    print(yaml.dump({"model": section}, Dumper=Dumper, sort_keys=False), end="")
    return 0


def _import(parser: CommandParser, argv: Sequence[str]) -> int:
    """write a run directory with the folder's weights"""
    parser.add_argument("folder", metavar="HF_FOLDER", type=Path)
    parser.add_argument("run", metavar="RUN_DIR", type=Path, help="the new run directory")
    options = parser.parse_args(argv)
    check_new_folder("RUN_DIR", options.run)
    use_cpu()
    import_folder(options.folder, options.run)
    print(f"wrote the weights of {options.folder} to {options.run}")
    return 0


def _export(parser: CommandParser, argv: Sequence[str]) -> int:
    """write a run's weights as a folder"""
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of the tensors (default: float32)")
    help_of_quantization = "format of the linear layers (default: none, that of --dtype)"
    parser.add_argument("--quantization", choices=[*QUANTISATIONS], default=NONE.name, help=help_of_quantization)
    options, run_dir, step = _checkpoint(parser, argv, "HF_FOLDER")
    export_step(run_dir, step, run_config(run_dir, "RUN"), options.folder, options.dtype, options.quantization)
    print(f"wrote step {step} of {run_dir} to {options.folder}")
    return 0


def _adapters(parser: CommandParser, argv: Sequence[str]) -> int:
    """write the adapters of a run with `lora` as a folder in PEFT's format"""
    options, run_dir, step = _checkpoint(parser, argv, "PEFT_FOLDER")
    export_adapters(run_dir, step, run_config(run_dir, "RUN"), options.folder)
    print(f"wrote the adapters of step {step} of {run_dir} to {options.folder}")
    return 0


def _checkpoint(parser: CommandParser, argv: Sequence[str], folder: str) -> tuple[Namespace, Path, int]:
    """(arguments, run directory, step) of a command that writes a checkpoint's weights to the new folder `folder`."""
    parser.add_argument("run", metavar="RUN", help="directory of a run, or RUN/checkpoints/STEP")
    parser.add_argument("folder", metavar=folder, type=Path, help="the new folder")
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: the newest)")
    options = parser.parse_args(argv)
    check_new_folder(folder, options.folder)
    return options, *find_checkpoint(_one(options.run, options.step), "RUN")


def _compare(parser: CommandParser, argv: Sequence[str]) -> int:
    """compare a run's weights with a folder; exit status 1 if they differ"""
    parser.add_argument("folder", metavar="HF_FOLDER", type=Path)
    parser.add_argument("run", metavar="RUN_DIR", help="directory of a run, or RUN/checkpoints/STEP")
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: the newest)")
    parser.add_argument(
        "--logits", action="store_true", help="also run both models on a few tokens; needs torch and transformers"
    )
    options = parser.parse_args(argv)
    if options.logits:
        check_reference()
    use_cpu()
    run = _one(options.run, options.step)
    differences = compare(options.folder, run)
    print("tensor  [shape] dtype  largest absolute difference  largest relative difference")
    for difference in differences:
        print(difference.line())
    print(summary(differences, options.folder, run))
    if options.logits:
        print(compare_logits(options.folder, run))
    return int(any(difference.unequal for difference in differences))


def _plan(parser: CommandParser, argv: Sequence[str]) -> int:
    """print the bytes of a folder that each process of a mesh reads"""
    parser.add_argument("config", metavar="CONFIG.yaml")
    parser.add_argument("folder", metavar="HF_FOLDER", type=Path)
    parser.add_argument("overrides", metavar="section.key=value", nargs="*")
    parser.add_argument("--devices", type=int, required=True, help="number of devices of all processes")
    parser.add_argument("--per-process", type=int, help=f"devices of a process (default: {PER_PROCESS}, or fewer)")
    options = parser.parse_intermixed_args(argv)
    per_process = options.per_process or min(PER_PROCESS, options.devices)
    if options.devices < 1 or per_process < 1 or options.devices % per_process:
        raise InputError(
            f"--per-process={per_process} does not divide --devices={options.devices}: give the number of devices of "
            "all processes, and that of each."
        )
    config = load_config(options.config, options.overrides)
    sizes = check_mesh(config, options.devices, options.devices // per_process)
    reads = plan(config, sizes, options.folder, per_process)
    print(report(reads, per_process, folder_bytes(options.folder)))
    return 0


COMMANDS: dict[str, Callable[[CommandParser, Sequence[str]], int]] = {
    "config": _config,
    "import": _import,
    "export": _export,
    "adapters": _adapters,
    "compare": _compare,
    "plan": _plan,
}


def _one(run: str, step: int | None) -> str:
    return run if step is None else str(Path(run) / SUBDIRECTORY / str(step))


def main(argv: Sequence[str]) -> int:
    """Run the command that the first argument names; returns the exit status."""
    with user_errors():
        lines = "\n".join(f"  {name:9}{run.__doc__}" for name, run in COMMANDS.items())
        parser = CommandParser(
            MODULE,
            description=f"Models in Hugging Face's format.\n\n{lines}\n\nCOMMAND --help lists a command's arguments.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=", ".join(COMMANDS))
        run = COMMANDS[parser.parse_args(argv[:1]).command]
        parser = CommandParser(MODULE, description=f"{(run.__doc__ or '').capitalize()}.")
        parser.prog += f" {argv[0]}"
        return run(parser, argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
