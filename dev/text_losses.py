"""Losses of optimizers or of FP8 recipes on the same text: `python dev/text_losses.py optimizers|dense|moe TEXT RUNS`.

`optimizers` trains llama_100m; `dense` and `moe` train a model of 0.3 billion parameters, or of 0.5 with experts, with
each recipe, and with NVFP4 without one of its ingredients (dev/nvfp4_without_*.py). TEXT is a directory of
scripts/prepare_text.py. Each run has a GPU of its own and the directory RUNS/NAME_SEED, and as many runs as there are
GPUs (`--jobs`) are at work at the same time. A run that has ended is not repeated, so the command can be killed and
started again. At the end, or at once with `--table`, it prints a line for each name: the training loss of each seed
(mean of the log points of the last tenth of the steps, at most 100 steps), the evaluation loss at the end, and their
mean and standard deviation over the seeds. RUNS/means/NAME has the mean of each logged value over the seeds, for
megajax.tools.plot and dev/pictures.py.
"""

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megajax.console import user_errors
from megajax.errors import InputError
from megajax.tools.plot import read_records

ROOT = Path(__file__).parents[1]
BLOCKS = "precision.fp8.backend=emulated"
NVFP4 = (BLOCKS, "precision.fp8.recipe=nvfp4")
LAST = "precision.fp8.last_bf16_layers=3"  # 15 % of 20 layers, as in the paper
RECIPES = {
    "bf16": (),
    "blockwise": ("precision.fp8.recipe=blockwise",),
    "nvfp4": (*NVFP4, LAST),
    "current": ("precision.fp8.recipe=current",),
    "delayed": ("precision.fp8.recipe=delayed",),
    "mxfp8": (BLOCKS, "precision.fp8.recipe=mxfp8"),
    **{
        f"nvfp4_without_{part}": (*NVFP4, LAST, f"run.extensions=[dev/nvfp4_without_{part}.py]")
        for part in ("hadamard", "random_rounding", "square_blocks")
    },
    "nvfp4_in_all_layers": NVFP4,
}
SMALL_BATCH = ("batch.global_size=16", "schedule.learning_rate=3e-4", "schedule.min_learning_rate=3e-5")
# By what is compared: the config, overrides of all its runs, and those of each name
COMPARISONS: dict[str, tuple[str, tuple[str, ...], dict[str, tuple[str, ...]]]] = {
    "optimizers": (
        "llama_100m",
        (),
        {
            "adamw": (),
            "muon": ("optimizer.kind=muon",),
            "muon_qk_clip": ("optimizer.kind=muon", "model.qk_clip=100"),
            "soap": ("optimizer.kind=soap",),
            "adamw_bfloat16": ("optimizer.state=bfloat16",),
            "adamw_int8": ("optimizer.state=int8",),
        },
    ),
    "dense": (
        "llama_100m",
        (
            *SMALL_BATCH,
            "model.num_layers=20",
            "model.hidden_size=1024",
            "model.num_heads=16",
            "model.ffn_hidden_size=2816",
        ),
        RECIPES,
    ),
    "moe": (
        "moe_1b",
        (*SMALL_BATCH, "model.num_layers=20", "model.num_experts=8", "model.experts_per_token=2"),
        RECIPES,
    ),
}


def losses(run: Path, steps: int) -> tuple[float, float] | None:
    """(training loss, evaluation loss) at the end of a run; None if it has not ended."""
    try:
        records = read_records(run)
    except InputError:
        return None  # not begun, or no step yet
    evaluated = [record["eval_loss"] for record in records if record["step"] == steps and "eval_loss" in record]
    first = steps - max(1, min(100, steps // 10))
    trained = [record["loss"] for record in records if record["step"] > first and "loss" in record]
    return (statistics.mean(trained), evaluated[-1]) if evaluated and trained else None


def train(options: argparse.Namespace, gpus: "queue.Queue[str]", run: Path, overrides: Sequence[str]) -> None:
    """Train one run on the next free GPU. Raises InputError if it fails."""
    steps, text, (config, common, _) = options.steps, options.text.resolve(), COMPARISONS[options.what]
    settings = (
        *(f"run.steps={steps}", f"run.dir={run}", f"run.eval_interval={max(1, steps // 4)}", "run.eval_steps=50"),
        *("data.kind=indexed", f"data.train={text}/train_text_document", f"data.valid={text}/valid_text_document"),
        f"data.tokenizer={text}/tokenizer.json",
        *("logging.tensorboard=false", f"run.compilation_cache={run.parent}/compiled"),
    )
    gpu = gpus.get()
    try:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
        command = [sys.executable, "-m", "megajax.train", f"configs/{config}.yaml", *common, *settings, *overrides]
        run.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{run}.log", "w", encoding="utf-8") as log:
            done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)
        if done.returncode:
            raise InputError(f"the run in {run} ended with status {done.returncode}: see {run}.log.")
        print(f"{run.name}: {losses(run, steps)}", flush=True)
    finally:
        gpus.put(gpu)


def row(name: str, ended: Sequence[tuple[float, float]]) -> str:
    """A line of the table."""
    cells = [name]
    for values in zip(*ended, strict=True):
        spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
        cells += [", ".join(f"{value:.3f}" for value in values), f"{statistics.mean(values):.3f}{spread}"]
    return "| " + " | ".join(cells) + " |"


def write_means(runs: Sequence[Path], to: Path) -> None:
    """Write the mean over `runs` of each number that all have logged at a step to the run directory `to`."""
    # By step and name; a run that was killed has logged some steps twice.
    values = [{(line["step"], key): line[key] for line in read_records(run) for key in line} for run in runs]
    lines: dict[int, dict[str, float]] = {}
    for step, key in values[0]:
        same = [number for run in values if isinstance(number := run.get((step, key)), int | float)]
        if key != "step" and len(same) == len(runs):
            lines.setdefault(step, {"step": step})[key] = statistics.mean(same)
    to.mkdir(parents=True, exist_ok=True)
    (to / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines.values()), encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Train what has not ended, and print the table; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=COMPARISONS, help="what is compared")
    parser.add_argument("text", type=Path, metavar="TEXT", help="directory of prepare_text.py")
    parser.add_argument("runs", type=Path, metavar="RUNS", help="directory of the runs")
    parser.add_argument("--steps", type=int, default=4000, help="default: 4000")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="default: 1 2 3")
    parser.add_argument("--only", nargs="+", help="names (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="number of GPUs (default: 1)")
    parser.add_argument("--table", action="store_true", help="train nothing")
    options = parser.parse_args(arguments)
    named = COMPARISONS[options.what][2]
    if unknown := set(options.only or ()) - set(named):
        parser.error(f"--only {' '.join(unknown)}: {options.what} has {', '.join(named)}")
    with user_errors():
        # Seeds first: a command that is killed has as many whole comparisons as possible.
        cases = [
            (name, seed, options.runs.resolve() / f"{name}_{seed}")
            for seed in options.seeds
            for name in options.only or named
        ]
        if not options.table:
            gpus: queue.Queue[str] = queue.Queue()
            for gpu in range(options.jobs):
                gpus.put(str(gpu))
            with ThreadPoolExecutor(options.jobs) as pool:
                waiting = [
                    pool.submit(train, options, gpus, run, (f"run.seed={seed}", *named[name]))
                    for name, seed, run in cases
                    if losses(run, options.steps) is None
                ]
            for each in waiting:
                each.result()
        print("| | training loss | mean | evaluation loss | mean |\n| --- | --- | --- | --- | --- |")
        for name in options.only or named:
            ended = {run: found for other, _, run in cases if other == name and (found := losses(run, options.steps))}
            if ended:
                print(row(name, list(ended.values())))
                write_means(list(ended), options.runs / "means" / name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
