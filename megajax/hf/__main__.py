"""`python -m megajax.hf`: models in Hugging Face's format.

- `config HF_FOLDER`: print the section `model` of the config that describes the folder's model.
- `export RUN HF_FOLDER`: write a run's weights as such a folder.
"""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from megajax.checkpoint.manager import find_checkpoint
from megajax.checkpoint.weights import open_weights, run_config
from megajax.config.tree import Dumper
from megajax.console import CommandParser, program_name, user_errors
from megajax.errors import InputError
from megajax.hf.convert import export, read_model

DTYPES = ("float32", "bfloat16", "float16")


def export_run(run: str, folder: Path, dtype: str) -> None:
    """Write the newest checkpoint of a run, or `RUN/checkpoints/STEP`, as a folder in Hugging Face's format.

    One layer of a parameter is in memory at a time, and one file. The tokenizer of the run's directory is copied.
    Raises InputError for a run without checkpoint, a model that no family has, and a folder that cannot be written.
    """
    run_dir, step = find_checkpoint(run, "RUN")
    config = run_config(run_dir, "RUN")
    weights = open_weights(run_dir / "checkpoints" / str(step))
    extra = {} if config.model.position == "learned" else {"max_position_embeddings": config.batch.sequence_length}
    export(weights, config.model, folder, dtype, extra)
    tokenizer = run_dir / "tokenizer.json"
    if tokenizer.is_file():
        shutil.copy(tokenizer, folder)
    print(f"wrote step {step} of {run_dir} to {folder}")


def main(argv: Sequence[str]) -> int:
    """Convert; returns the exit status."""
    name = program_name("megajax.hf.__main__")
    usage = f"{name} config HF_FOLDER | {name} export RUN HF_FOLDER [--dtype bfloat16]"
    parser = CommandParser("megajax.hf.__main__", description="Models in Hugging Face's format.", usage=usage)
    parser.add_argument("command", choices=("config", "export"), help="print the section `model`, or write a folder")
    parser.add_argument("source", metavar="HF_FOLDER|RUN", help="a folder; or a run, or RUN/checkpoints/STEP")
    parser.add_argument("folder", metavar="HF_FOLDER", nargs="?", help="export: the new folder")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of the tensors (default: float32)")
    with user_errors():
        options = parser.parse_args(argv)
        if (options.command == "export") != (options.folder is not None):
            raise InputError(f"{options.command} has a folder too few or too many: write {usage}.")
        if options.command == "config":
            print(yaml.dump({"model": read_model(options.source)}, Dumper=Dumper, sort_keys=False), end="")
        else:
            export_run(options.source, Path(options.folder), options.dtype)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
