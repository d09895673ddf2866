"""Trial runs of a tiny model on virtual CPU devices, in processes that can be read, disturbed and compared.

Used by `faults.py`, `soak.py` and the tests.
"""

import contextlib
import fcntl
import json
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from megajax.data.indexed import IndexedWriter

TINY = """
run: {log_interval: 1, steps: 8}
model: {num_layers: 2, hidden_size: 32, num_heads: 4, num_kv_heads: 2, ffn_hidden_size: 64, vocab_size: 125,
        vocab_multiple: 64, init_std: 0.1}
batch: {global_size: 8, sequence_length: 16}
precision: {compute: float32}
schedule: {kind: constant, learning_rate: 3.0e-3}
logging: {tensorboard: false}
"""
# Dropout, microbatches and a rate that changes, so that a wrong random key, step or position in the data would show;
# Megatron's order is stored.
LONG = (
    *("run.steps=120", "run.checkpoint_interval=7", "run.eval_interval=40", "run.eval_steps=1", "model.dropout=0.1"),
    *("batch.num_microbatches=2", "data.split='8,2,0'", "data.order=megatron"),
    *("schedule.kind=linear", "schedule.warmup_steps=9", "schedule.decay_steps=200"),
)
MESHES = {1: ("mesh.data=2", "mesh.tensor=2"), 2: ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")}  # by processes
NUMBERS = ("loss", "grad_norm", "learning_rate", "tokens")
Numbers = dict[tuple[int, str], tuple[float, ...]]  # by step and first name
LONGEST = 300.0  # seconds without a line of output
# Unoptimised code by XLA's older emitters, as one program: compiled in a third of the time, and as deterministic.
FLAGS = (
    "--xla_backend_optimization_level=0 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
    " --xla_cpu_parallel_codegen_split_count=1"
)


def write_text(prefix: str, documents: int = 60) -> None:
    """A text that repeats itself: documents of counting words, one byte a token."""
    generator = np.random.default_rng(5)
    words = b"one two three four five six seven eight nine ten "
    with IndexedWriter(prefix, np.uint16) as writer:
        for _ in range(documents):
            start = generator.integers(len(words))
            writer.add_document(np.frombuffer((words * 3)[start : start + generator.integers(30, 90)], np.uint8))


class Run:
    """`python -m megajax.train` in a process of its own; its output is read line by line.

    The pipe holds one page: a process whose output is not read blocks a few steps later, so a signal sent after
    the line of step n arrives soon after step n, however fast or slow the machine is.
    """

    def __init__(self, arguments: Sequence[str], environment: dict[str, str]):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "megajax.train", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        assert self.process.stdout is not None
        self.stdout = self.process.stdout
        fcntl.fcntl(self.stdout, fcntl.F_SETPIPE_SZ, 4096)
        self.output = ""

    def read_to(self, pattern: str) -> None:
        """Read until a line that begins with a regular expression."""
        for line in self.stdout:
            self.output += line
            if re.match(pattern, line):
                return
        raise AssertionError(f"ended before {pattern}:\n{self.output}")

    def read_to_step(self, step: int) -> None:
        """Read until the console line of `step`."""
        self.read_to(rf"step\s+{step}/")

    def read_until(self, reached: Callable[[], object], pause: float = 0.001, longest: float = LONGEST) -> bool:
        """Read until `reached()` holds, which is asked every `pause` seconds; False if the process ends before.

        Raises AssertionError after `longest` seconds without output.
        """
        last = time.monotonic()
        while not reached():
            assert time.monotonic() - last < longest, f"no output for {longest} s:\n{self.output}"
            if select.select([self.stdout], [], [], pause)[0]:
                data = os.read(self.stdout.fileno(), 4096).decode(errors="replace")
                if not data:
                    return False
                self.output, last = self.output + data, time.monotonic()
        return True

    def finish(self) -> int:
        """Read to the end; the exit status."""
        self.output += self.stdout.read()
        return self.process.wait()

    def kill(self) -> None:
        """SIGKILL, and the rest of the output."""
        self.process.send_signal(signal.SIGKILL)
        assert self.finish() == -signal.SIGKILL, self.output

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.stdout.close()


def numbers_of(run_dir: Path) -> Numbers:
    """The logged values of each step and of each evaluation, after a check that none occurs twice."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    found: Numbers = {}
    for line in lines:
        if not {"loss", "eval_loss"} & line.keys():  # figures of the last save
            continue
        names = ("eval_loss",) if "eval_loss" in line else NUMBERS
        key = (line["step"], names[0])
        assert key not in found, key
        found[key] = tuple(line[name] for name in names)
    return found


class Lab:
    """A text, a config, a shared cache of compiled steps, and runs of them below one directory."""

    def __init__(self, root: Path, random: random.Random, settings: Sequence[str] = LONG):
        self.root, self.random, self.settings = root, random, settings
        self.prefix = str(root / "text")
        write_text(self.prefix)
        (root / "tiny.yaml").write_text(TINY, encoding="utf-8")
        self._quiet: dict[tuple[str, ...], Numbers] = {}
        self._open: list[Run] = []

    def start(
        self, run_dir: Path, *overrides: str, processes: int = 1, environment: dict[str, str] | None = None
    ) -> list[Run]:
        """The processes of a run, one or two that are joined, with these environment variables beside their own."""
        variables = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", str(self.root / "compiled")),
            "XLA_FLAGS": f"--xla_force_host_platform_device_count=4 {FLAGS}",
            **(environment or {}),
        }
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"localhost:{free.getsockname()[1]}"
        arguments = [
            str(self.root / "tiny.yaml"),
            f"data.train={self.prefix}",
            *MESHES[processes],
            *self.settings,
            *overrides,
        ]
        runs = []
        for index in range(processes):
            joined = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(index)}
            runs.append(Run([*arguments, f"run.dir={run_dir}"], variables | (joined if processes > 1 else {})))
        self._open += runs
        return runs

    def quiet(self, *overrides: str, processes: int = 1, status: int = 0) -> Numbers:
        """The numbers of the undisturbed run."""
        key = (str(processes), *overrides)
        if key not in self._quiet:
            run_dir = self.root / f"quiet{len(self._quiet)}"
            self.end(self.start(run_dir, *overrides, processes=processes), status)
            self._quiet[key] = numbers_of(run_dir)
        return self._quiet[key]

    def end(self, runs: list[Run], status: int = 0) -> str:
        """Read to the end of all processes, which must have this exit status; the first one's output."""
        statuses = [run.finish() for run in runs]
        assert statuses == [status] * len(runs), "".join(run.output for run in runs)
        return runs[0].output

    def finish(self, run_dir: Path, *overrides: str, processes: int = 1) -> str:
        """The same command until the end, and the comparison with the undisturbed run."""
        output = self.end(self.start(run_dir, *overrides, processes=processes))
        assert numbers_of(run_dir) == self.quiet(*overrides, processes=processes), "the numbers differ"
        return output

    def close(self) -> None:
        for run in self._open:
            run.close()


def saved_in(output: str) -> int:
    """The newest step that a run reported as saved; 0 if none."""
    return max((int(step) for step in re.findall(r"^saved step (\d+) ", output, re.M)), default=0)


def resumed_in(output: str) -> int:
    found = re.search(r"resuming from the checkpoint of step (\d+)", output)
    return int(found[1]) if found else 0


def steps_logged(run_dir: Path) -> int:
    with contextlib.suppress(OSError):
        return (run_dir / "metrics.jsonl").read_text(encoding="utf-8").count('"loss"')
    return 0
