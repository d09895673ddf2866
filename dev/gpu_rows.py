"""Runs the rows of dev/gpu_rows.yaml on this machine's four GPUs, in their order, within a time limit.

    python -m dev.gpu_rows [--gpus 8] --predict    # writes the planner's figures into gpu_rows_predicted.json
    python -m dev.gpu_rows [--gpus 8] --results rows.jsonl --seconds 560 [--peer FOLDER] [NAME ...]

With `--gpus 8` the rows are those of dev/gpu_rows_8.yaml, for eight.

Each row has processes of its own and a time limit. A JSON line per row is appended to the results file as soon as it
ends; rows that the file has are not run again, unless they are named. A row whose expected seconds are more than what
is left is left out. Neighbours that need fewer GPUs than there are run at the same time. The compile time is that
without a cache. `--tiny` replaces the models by tiny ones, for a rehearsal on virtual CPU devices.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml

from dev.launched_rows import launched
from megajax.config.checks import check_mesh
from megajax.console import user_errors
from megajax.estimate.costs import flops_per_token
from megajax.tools.bench import bench, synthetic_config
from megajax.tools.plan.candidates import Candidate
from megajax.tools.plan.rates import GIB, rates_of
from megajax.tools.plan.step_time import tokens_per_second

FOLDER = Path(__file__).parent
FILES = {4: "gpu_rows", 8: "gpu_rows_8"}  # by the GPUs of the machine


@dataclass(frozen=True)
class Row:
    """A row of the YAML file."""

    name: str
    seconds: float
    config: str = ""
    train: str = ""
    peer: str = ""
    set: str = ""
    gpus: int = 4
    steps: tuple[int, int] = (3, 10)
    processes: int = 1
    kill: bool = False
    tiny: str = "dense"

    @property
    def overrides(self) -> list[str]:
        return self.set.split()


def read_rows(gpus: int, tiny: bool) -> list[Row]:
    """The rows for a machine, with the overrides of a rehearsal if `tiny`."""
    content = {n: yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8")) for n, name in FILES.items()}
    rows = [Row(**{"gpus": gpus, **values}) for values in content[gpus]["rows"]]
    if tiny:
        rows = [Row(**{**row.__dict__, "set": f"{row.set} {content[4]['tiny'][row.tiny]}"}) for row in rows]
    return rows


def predictions(gpus: int) -> Path:
    """The file of the planner's figures."""
    return FOLDER / f"{FILES[gpus]}_predicted.json"


def prediction(row: Row) -> dict[str, float]:
    """The planner's figures for H100s. Raises ConfigError if the config does not fit the GPUs."""
    config = synthetic_config(row.config or row.train, row.overrides, "bench")
    candidate = Candidate.of(config, check_mesh(config, row.gpus), rates_of("h100"))
    seconds = candidate.time.total
    speed = tokens_per_second(candidate.plan, seconds)
    return {
        "ms": round(1e3 * seconds, 1),
        "tflops": round(speed * flops_per_token(config) / 1e12, 1),
        "gib": round(candidate.memory.total / GIB, 1),
    }


def groups(rows: list[Row], gpus: int) -> Iterator[list[Row]]:
    """Neighbours that together need at most the machine's GPUs."""
    group: list[Row] = []
    for row in rows:
        if group and sum(each.gpus for each in (*group, row)) > gpus:
            yield group
            group = []
        group.append(row)
    if group:
        yield group


class Runner:
    """Runs rows until `seconds` have passed, and appends their results to a file."""

    def __init__(self, gpus: int, results: Path, seconds: float, peer: Path, tiny: bool):
        self.gpus, self.results, self.peer, self.tiny = gpus, results, peer, tiny
        self.end = time.monotonic() + seconds
        self.log = results.with_suffix(".log").open("a", encoding="utf-8")
        lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
        self.done = {json.loads(line)["row"] for line in lines}
        predicted = predictions(gpus)
        self.predicted = json.loads(predicted.read_text(encoding="utf-8")) if predicted.exists() else {}

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    def run(self, rows: list[Row]) -> None:
        """Run what the time is enough for."""
        for group in groups(rows, self.gpus):
            if max(row.seconds for row in group) > self.left:
                print(f"left out, {self.left:.0f} s are left: {', '.join(row.name for row in group)}", flush=True)
                continue
            first, devices = 0, []
            for row in group:
                devices.append(",".join(map(str, range(first, first := first + row.gpus))))
            with ThreadPoolExecutor(len(group)) as pool:
                results = list(pool.map(self.measure, group, devices))
            for row, result in zip(group, results, strict=True):
                result["beside"] = [other.name for other in group if other is not row]
                self.add(row, result)

    def add(self, row: Row, result: dict) -> None:
        line = json.dumps({"row": row.name, **result, "predicted": self.predicted.get(row.name)})
        with self.results.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(summary(row.name, result, self.predicted.get(row.name)), flush=True)

    def measure(self, row: Row, devices: str) -> dict:
        """The result of a row on these GPUs, or its error."""
        start, environment = time.monotonic(), os.environ | {"CUDA_VISIBLE_DEVICES": devices}
        limit = min(1.8 * row.seconds + 20, self.left + 10)
        if self.tiny:
            limit = 600
            environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={row.gpus}"
        try:
            if row.train:
                result = launched(row.train, row.overrides, row.processes, row.kill, environment, limit, self.log)
            elif row.peer:
                environment |= {
                    "N": str(row.gpus),
                    "TMO": f"{limit - 15:.0f}",
                }  # torchrun ends its workers, not when it is killed
                command = ["bash", "bench_multi.sh", *row.peer.split()]
                output = self.finish(row, command, environment, limit, self.peer)
                if "RESULT " not in output:
                    raise RuntimeError(" ".join(output.split()[-40:]) or "the peer printed nothing")
                result = json.loads(output.rpartition("RESULT ")[2].splitlines()[0])
            else:
                command = [sys.executable, "-m", "dev.gpu_rows", "--gpus", str(self.gpus), "--one", row.name]
                command += ["--tiny"] * self.tiny
                result = json.loads(self.finish(row, command, environment, limit).splitlines()[-1])
        except (RuntimeError, ValueError, IndexError, OSError) as error:
            result = {"error": str(error)[:400]}
        return {**result, "wall_seconds": round(time.monotonic() - start, 1)}

    def finish(self, row: Row, command: list[str], environment: dict, limit: float, folder: Path | None = None) -> str:
        """The output of a command. RuntimeError: it failed or was killed, with the last line on its error."""
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
            process = subprocess.Popen(
                command,
                env=environment,
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                process_group=0,
            )
            try:
                output, _ = process.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                output, _ = process.communicate()
                output += f"\nError: killed after {limit:.0f} s\n"
            errors.seek(0)
            text = errors.read()
        self.log.write(f"=== {row.name}\n{text[-20000:]}\n{output[-4000:]}\n")
        self.log.flush()
        if process.returncode or "Error: killed" in output:
            lines = [line for line in (text + output).splitlines() if line.strip()]
            named = [line for line in lines if any(word in line for word in ("Error", "error:", "EXHAUSTED"))]
            raise RuntimeError((named or lines or [f"status {process.returncode}"])[-1])
        return output


def summary(name: str, result: dict, predicted: dict | None) -> str:
    """A line for the console."""
    wall = f"({result['wall_seconds']:.0f} s)"
    if "error" in result:
        return f"{name}: FAILED {result['error']} {wall}"
    if "tflops_per_second_per_device" not in result:
        kept = (
            "tflops_per_s_gpu",
            "tokens_per_s_gpu",
            "step_ms",
            "peak_gib",
            "killed_at",
            "seconds_to_new_step",
            "compared",
        )
        shown = {key: result[key] for key in (*kept, "largest_difference") if key in result}
        return f"{name}: {shown} {wall}"
    text = f"{name}: {result['tflops_per_second_per_device']:.1f} TFLOP/s, "
    text += "{:.1f} ms ({:.1f} to {:.1f})".format(*result["step_ms"])
    if "peak_memory_gib" in result:
        text += f", {result['peak_memory_gib']:.1f} GiB, compiled in {result['compile_seconds']:.0f} s"
        text += f", first step after {result['first_step_seconds']:.0f} s, loss {result['loss'][-1]:.4f}"
    if predicted:
        text += f"; predicted {predicted['tflops']} TFLOP/s, {predicted['ms']} ms, {predicted['gib']} GiB"
    return f"{text} {wall}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="rows to run, also if the results have them")
    parser.add_argument("--gpus", type=int, choices=FILES, default=4, help="of the machine (default: 4)")
    parser.add_argument("--results", type=Path, default=Path("rows.jsonl"))
    parser.add_argument("--seconds", type=float, default=560, help="no row starts that is expected to end later")
    parser.add_argument("--peer", type=Path, default=Path(".peers/te_megatron"), help="folder of bench_multi.sh")
    parser.add_argument("--predict", action="store_true", help="write the planner's figures")
    parser.add_argument("--tiny", action="store_true", help="tiny models, for a rehearsal")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # in the process of a row
    options = parser.parse_args(arguments)
    rows = read_rows(options.gpus, options.tiny)
    with user_errors():
        if options.one:
            [row] = [row for row in rows if row.name == options.one]
            print(json.dumps(bench(row.config, row.overrides, *row.steps)))
            return 0
        if options.predict:  # finds mistakes too
            predicted = {row.name: prediction(row) for row in rows if not row.peer}
            lines = [f"{json.dumps(name)}: {json.dumps(figures)}" for name, figures in predicted.items()]
            predictions(options.gpus).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
            return 0
    if unknown := set(options.names) - {row.name for row in rows}:
        parser.error(f"no row is named {', '.join(sorted(unknown))}")
    runner = Runner(options.gpus, options.results, options.seconds, options.peer, options.tiny)
    runner.run([row for row in rows if (row.name in options.names if options.names else row.name not in runner.done)])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
