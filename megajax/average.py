"""`megajax average RUN --last N --out DIR`: the mean of a run's checkpoints, or of their moving averages."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from megajax.checkpoint import complete_steps
from megajax.checkpoint.description import compare_descriptions, describe_lora, describe_model
from megajax.checkpoint.manager import save_weights
from megajax.checkpoint.storage import SUBDIRECTORY, checkpoint_folder, read_description
from megajax.checkpoint.weights import EMA, PARAMS, open_model, run_config
from megajax.command_parser import CommandParser
from megajax.config import Config
from megajax.config.sentences import listed
from megajax.console import user_errors
from megajax.errors import InputError
from megajax.files import is_number
from megajax.hf import beside
from megajax.hf.folder import new_folder
from megajax.model.block import state_by_name
from megajax.runtime import use_cpu

THREADS = 8  # layers are decompressed in parallel


def average(run_dir: Path, steps: Sequence[int], ema: bool, out: Path) -> None:
    """Write a run directory with the mean of the checkpoints of `steps`: config.yaml, a checkpoint, tokenizer files.

    The mean is taken of each parameter, with `ema` of its moving average, and of the layers' state. The checkpoint has
    the last step and FP32 weights only. Host memory holds the mean, a few layers of one array, and in the end orbax's
    copy of the mean. Raises InputError if a checkpoint is of another model, has no moving average or is damaged, or if
    `out` exists or cannot be written; nothing remains then.
    """
    config = run_config(run_dir, "RUN")
    described = [_checked(run_dir, step, config, ema) for step in steps]
    paths = [run_dir / SUBDIRECTORY / str(step) for step in steps]
    opened = [open_model(path, config.model, EMA if ema else PARAMS) for path in paths]
    with new_folder(out) as partial:
        params, state = map(_means, zip(*opened, strict=True))
        about = {name: described[-1].get(name) for name in ("format", "step", "model", "lora", "base")}
        about |= {"averaged": {"steps": list(steps), "ema": ema}}
        save_weights(partial, params, _by_kind(state), about)
        beside.keep(run_dir, partial)
        (partial / "config.yaml").write_text(_config(config, out).to_yaml(), encoding="utf-8")


def _checked(run_dir: Path, step: int, config: Config, ema: bool) -> dict[str, Any]:
    """The description of a checkpoint. Raises InputError if the model is not the run's, or for a missing average."""
    checkpoint = checkpoint_folder(run_dir) / str(step)
    found = {"lora": {}, **read_description(checkpoint)}
    mine = {"model": describe_model(config.model), "lora": describe_lora(config)}
    compare_descriptions(found, mine, str(checkpoint), ("model", "lora"), "leave out this step")
    if ema and not found.get("ema"):
        raise InputError(
            f"{checkpoint} has no moving average of the weights (optimizer.ema_decay was null): leave out --ema, or "
            "this step."
        )
    return found


def _means(stored: Sequence[Mapping[str, Any]]) -> dict[str, jax.Array]:
    """The FP32 mean of each array over the checkpoints, on the CPU device."""
    device, means = jax.devices("cpu")[0], {}
    for name in stored[0]:  # each NumPy array is freed before the next is made
        means[name] = jax.device_put(_mean([arrays[name] for arrays in stored], name.startswith("blocks.")), device)
    return means


def _mean(arrays: Sequence[Any], stacked: bool) -> np.ndarray:
    """The FP32 mean of stored arrays of one shape; THREADS layers of `stacked` ones are read at a time."""
    mean = np.empty(arrays[0].shape, np.float32)

    def fill(at: Any) -> None:
        mean[at] = arrays[0][at]
        for array in arrays[1:]:
            mean[at] += array[at]
        mean[at] /= len(arrays)

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(fill, range(len(mean)) if stacked else [...]))
    return mean


def _by_kind(state: Mapping[str, jax.Array]) -> dict[str, dict[str, jax.Array]]:
    """The inverse of `state_by_name`."""
    kinds: dict[str, dict[str, jax.Array]] = {}
    for name, array in state.items():
        _, kind, parameter = name.split(".", 2)
        kinds.setdefault(kind, {})[parameter] = array
    assert state_by_name(kinds).keys() == state.keys()
    return kinds


def _config(config: Config, out: Path) -> Config:
    """The run's config with the new directory."""
    run = config.run.model_copy(update={"name": out.name, "dir": str(out)})
    return config.model_copy(update={"run": run, "checkpoint": config.checkpoint.model_copy(update={"dir": None})})


def _numbers(text: str) -> list[int]:
    """Numbers such as 1000,1200; for argparse, which makes a sentence of the error."""
    words = text.split(",")
    if not all(map(is_number, words)):
        raise argparse.ArgumentTypeError(f"{text} is not a list of steps such as 1000,1200")
    return sorted(map(int, words))


def _chosen(run_dir: Path, options: argparse.Namespace) -> list[int]:
    """The steps of the arguments `--steps` or `--last`, in order. Raises InputError for those that do not fit."""
    if run_dir.parent.name == SUBDIRECTORY:
        run_dir, step = run_dir.parent.parent, run_dir.name
        raise InputError(f"RUN={options.run} is one checkpoint: give {run_dir} --steps {step}.")
    if not (run_dir / SUBDIRECTORY).exists():
        raise InputError(f"RUN={run_dir} has no {SUBDIRECTORY}: give the directory of a run.")
    there = complete_steps(run_dir)
    saved = f"{run_dir} has checkpoints of steps {', '.join(map(str, there)) or 'none'}"
    steps, given = options.steps, f"--last={options.last}"
    if steps is None:
        if not 0 < options.last <= len(there):
            raise InputError(f"{given}: {saved}: give a number from 1 to {len(there)}, or another run.")
        steps = there[-options.last :]
    else:
        given = f"--steps={','.join(map(str, steps))}"
        if missing := [step for step in steps if step not in there]:
            raise InputError(f"{given}: there is no checkpoint of step {missing[0]}: {saved}.")
        if len(set(steps)) < len(steps):
            raise InputError(f"{given} names a step twice: name each once.")
    if len(steps) < 2 and not options.ema:
        raise InputError(
            f"{given} is one checkpoint: choose two or more, or --ema for the moving average of the weights in it "
            f"({saved})."
        )
    return steps


def main(argv: Sequence[str]) -> int:
    """Write the average; the exit status."""
    with user_errors():
        parser = CommandParser(
            "megajax.average",
            description="Average the weights of several checkpoints of a run, or write the moving average of the "
            "weights (optimizer.ema_decay) of one. The result is a run directory with weights only, which evaluate, "
            "generate, hf export and checkpoint.init_from read; no GPU needed.",
        )
        parser.add_argument("run", metavar="RUN", help="directory of a run")
        which = parser.add_mutually_exclusive_group(required=True)
        which.add_argument("--steps", type=_numbers, help="steps of the checkpoints, such as 1000,1200,1400")
        which.add_argument("--last", type=int, metavar="N", help="the newest N checkpoints")
        parser.add_argument(
            "--ema", action="store_true", help="take the moving average of the weights in each checkpoint"
        )
        parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the new run directory")
        options = parser.parse_args(argv)
        steps = _chosen(Path(options.run), options)
        use_cpu()
        average(Path(options.run), steps, options.ema, options.out)
        weights = "the moving averages of the weights" if options.ema else "the weights"
        print(f"wrote the mean of {weights} at steps {listed(steps, 'and')} of {options.run} to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
