"""Faults of a long run on CPUs, in real processes: after each the same command goes on bit for bit.

`python scripts/faults.py` trains a tiny model on four virtual devices (and on 2 x 4), disturbs it, starts the same
command again until it ends, and compares each step's loss, gradient norm, learning rate and number of tokens with those
of an undisturbed run. A checkpoint that was reported saved must be there afterwards. It prints a table; exit status 1
if a row fails. Full and read-only disks need the right to mount (root); without it their rows say so.
"""

import argparse
import contextlib
import fcntl
import json
import os
import random
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
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
# Dropout and microbatches, so that a wrong random key or position in the data would show; Megatron's order is stored.
LONG = (
    *("run.steps=120", "run.checkpoint_interval=7", "run.eval_interval=40", "run.eval_steps=1", "model.dropout=0.1"),
    *("batch.num_microbatches=2", "data.split='8,2,0'", "data.order=megatron"),
)
MESHES = {1: ("mesh.data=2", "mesh.tensor=2"), 2: ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")}  # by processes
NUMBERS = ("loss", "grad_norm", "learning_rate", "tokens")
Numbers = dict[tuple[int, str], tuple[float, ...]]  # by step and first name
LONGEST = 300.0  # seconds without the expected event


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

    def read_until(self, reached: Callable[[], object]) -> bool:
        """Read until `reached()` holds, which is asked every millisecond; False if the process ends before."""
        end = time.monotonic() + LONGEST
        while not reached():
            assert time.monotonic() < end, f"nothing happened for {LONGEST} s:\n{self.output}"
            if select.select([self.stdout], [], [], 0.001)[0]:
                data = os.read(self.stdout.fileno(), 4096).decode(errors="replace")
                if not data:
                    return False
                self.output += data
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
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
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
        (root / "tiny.yaml").write_text(TINY)
        self._quiet: dict[tuple[str, ...], Numbers] = {}
        self._open: list[Run] = []

    def start(self, run_dir: Path, *overrides: str, processes: int = 1, **environment: str) -> list[Run]:
        """The processes of a run: one, or two that are joined."""
        variables = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", str(self.root / "compiled")),
            "XLA_FLAGS": "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0",
            **environment,
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


MOMENTS = ("start", "compiling", "index", "first step", "step", "save", "save", "export", "step", "save")


def kill_at(lab: Lab, run: Run, run_dir: Path, moment: str) -> bool:
    """SIGKILL at a random time within a kind of moment; False if the run ended before."""
    pause, before = lab.random.uniform(0, 0.05), steps_logged(run_dir)
    reached: Callable[[], object]
    if moment == "start":
        end = time.monotonic() + lab.random.uniform(0, 8)
        reached = lambda: time.monotonic() > end  # noqa: E731
    elif moment in ("compiling", "first step"):
        line = {"compiling": "compiling", "first step": "compiled in"}[moment]
        reached = lambda: line in run.output  # noqa: E731
    elif moment == "step":
        target = before + lab.random.randint(1, 5)
        reached = lambda: steps_logged(run_dir) >= target  # noqa: E731
    else:
        pattern = {"index": "index_cache/*.partial-*", "save": "checkpoints/*tmp*", "export": "exports/.*"}[moment]
        reached, pause = lambda: any(run_dir.glob(pattern)), pause / 5
    if not run.read_until(reached):
        run.finish()
        return False
    time.sleep(pause)
    run.kill()
    return True


def steps_logged(run_dir: Path) -> int:
    with contextlib.suppress(OSError):
        return (run_dir / "metrics.jsonl").read_text().count('"loss"')
    return 0


def kills(lab: Lab, count: int) -> str:
    """A chain of SIGKILLs in one run directory; nothing that was reported saved may be lost."""
    run_dir = lab.root / "killed"
    export = (f"checkpoint.export_hf.dir={run_dir / 'exports'}", "checkpoint.export_hf.every=14")
    done, saved, moments = 0, 0, []
    for number in range(count):
        moment = MOMENTS[number % len(MOMENTS)]
        if moment == "index":
            shutil.rmtree(run_dir / "index_cache", ignore_errors=True)  # so that it is built again
        [run] = lab.start(run_dir, *export)
        killed = kill_at(lab, run, run_dir, moment)
        assert resumed_in(run.output) >= saved or "resuming" not in run.output, f"step {saved} is lost\n{run.output}"
        saved = max(saved, saved_in(run.output))
        if not killed:
            assert "done: " in run.output or "nothing to do" in run.output, run.output
            break
        done += 1
        moments.append(f"{moment} (step {steps_logged(run_dir)})")
    [last] = lab.start(run_dir, *export)
    assert last.finish() == 0, last.output
    assert resumed_in(last.output) >= saved or "nothing to do" in last.output, f"step {saved} is lost"
    assert numbers_of(run_dir) == lab.quiet(), "the numbers differ"
    left = [path for pattern in ("checkpoints/*tmp*", "exports/.*") for path in run_dir.glob(pattern)]
    assert not left, left
    return f"{done} kills: {', '.join(moments)}"


@contextlib.contextmanager
def small_disk(lab: Lab, megabytes: int) -> Iterator[Path]:
    """A file system of this size; PermissionError if this user can't mount one."""
    disk = lab.root / "disk"
    disk.mkdir(exist_ok=True)
    mount("-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(disk))
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)


def mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise PermissionError(done.stderr.strip())


def mount_read_only(path: str) -> None:
    """Make a directory read-only, between two moments in which a process writes there."""
    for _ in range(50):
        mount("--bind", path, path)
        with contextlib.suppress(PermissionError):
            return mount("-o", "remount,ro,bind", path)
        subprocess.run(["umount", "-l", path], check=True)
        time.sleep(0.05)
    raise AssertionError(f"{path} was never idle")


def full_disk(lab: Lab) -> str:
    """The disk fills while the run trains, and has room again later."""
    with small_disk(lab, 40) as disk:
        [run] = lab.start(disk / "run")
        run.read_to(r"saved step \d+")
        free = shutil.disk_usage(disk).free
        (disk / "filler").write_bytes(b"x" * max(0, free - 300_000))
        assert run.finish() == 2, run.output
        assert "could not be saved" in run.output and "training continues" in run.output, run.output
        assert "Traceback" not in run.output, run.output
        [again] = lab.start(disk / "run")
        assert again.finish() == 2 and "Traceback" not in again.output, again.output
        (disk / "filler").unlink()
        output = lab.finish(disk / "run")
        assert resumed_in(output) >= saved_in(run.output)
    return "saves failed with a warning, status 2 at the end; with room again resumed from the last one"


def read_only(lab: Lab) -> str:
    """The run directory can't be written at the start, and its checkpoints while it trains."""
    with small_disk(lab, 40) as disk:
        mount("-o", "remount,ro", str(disk))
        [run] = lab.start(disk / "run")
        assert run.finish() == 2 and "Read-only file system" in run.output, run.output
        assert "Traceback" not in run.output, run.output
        mount("-o", "remount,rw", str(disk))
        [run] = lab.start(disk / "run")
        run.read_to(r"saved step \d+")
        checkpoints = str(disk / "run" / "checkpoints")
        try:
            mount_read_only(checkpoints)
            assert run.finish() == 2 and "Traceback" not in run.output, run.output
            assert "could not be saved" in run.output and "training continues" in run.output, run.output
        finally:
            subprocess.run(["umount", "-l", checkpoints], check=False)
        lab.finish(disk / "run")
    return "status 2 with a sentence at the start; later saves failed with a warning; resumed when writable"


DAMAGES: dict[str, Callable[[Path, random.Random], object]] = {
    "truncated": lambda path, random: os.truncate(path, random.randrange(path.stat().st_size)),
    "bit flipped": lambda path, random: flip(path, random),
    "removed": lambda path, random: path.unlink(),
}


def flip(path: Path, random: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    path.write_bytes(data)


def damaged(lab: Lab, kind: str, count: int) -> str:
    """Files of the newest checkpoint are damaged; the run goes on from the one before."""
    source = lab.root / "source"
    if not source.exists():
        [run] = lab.start(source)
        run.read_to(r"saved step 28")
        run.kill()
    newest = max(int(path.name) for path in (source / "checkpoints").iterdir() if path.name.isdigit())
    tried = []
    for number in range(count):
        run_dir = lab.root / f"{kind} {number}"
        shutil.copytree(source, run_dir)
        files = [path for path in sorted((run_dir / "checkpoints" / str(newest)).rglob("*")) if path.is_file()]
        path = lab.random.choice([path for path in files if path.stat().st_size])
        DAMAGES[kind](path, lab.random)
        output = lab.finish(run_dir)
        resumed = resumed_in_all(output)[-1]
        assert path.name in output or resumed == newest, f"{path} is not named:\n{output}"
        tried.append(f"{path.relative_to(run_dir / 'checkpoints' / str(newest))} → step {resumed}")
        shutil.rmtree(run_dir)
    return f"{count} files of step {newest}: {'; '.join(re.sub(r'[0-9a-f]{32}', 'data', each) for each in tried)}"


def resumed_in_all(output: str) -> list[int]:
    return [int(step) for step in re.findall(r"resuming from the checkpoint of step (\d+)", output)] or [0]


def lost_process(lab: Lab, number: signal.Signals, index: int) -> str:
    """One of two processes is killed or stopped; the other ends by itself, and both go on."""
    run_dir, settings = lab.root / f"{number.name} {index}", ("run.peer_timeout_seconds=10",)
    lab.quiet(processes=2)
    runs = lab.start(run_dir, *settings, processes=2)
    runs[0].read_until(lambda: steps_logged(run_dir) >= 10)
    runs[index].process.send_signal(number)
    start = time.monotonic()
    survivor = runs[1 - index]
    status = survivor.finish()
    seconds = time.monotonic() - start
    runs[index].close()
    assert status == 4, f"status {status} after {seconds:.0f} s\n{survivor.output}"
    assert f"process {index}" in survivor.output and "Traceback" not in survivor.output, survivor.output
    lab.end(lab.start(run_dir, *settings, processes=2))
    assert numbers_of(run_dir) == lab.quiet(processes=2), "the numbers differ"
    return f"the other process ended with status 4 after {seconds:.0f} s"


def bad_gradients(lab: Lab) -> str:
    """The gradients overflow in FP16 at the first steps, until the loss scale is smaller; killed in between."""
    settings = ("precision.compute=float16", "model.init_std=1.0", "run.checkpoint_interval=3")
    run_dir = lab.root / "overflow"
    [run] = lab.start(run_dir, *settings)
    run.read_until(lambda: steps_logged(run_dir) >= 5)
    run.kill()
    lab.finish(run_dir, *settings)
    skipped = [json.loads(line).get("skipped", 0) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert max(skipped) > 1, "no gradient overflowed"
    return f"the updates of {max(skipped)} steps were skipped, the same ones"


def bad_data(lab: Lab) -> str:
    """Tokens beyond the vocabulary in the .bin, as a flipped bit makes them."""
    prefix = lab.root / "bad_text"
    write_text(str(prefix))
    with open(f"{prefix}.bin", "r+b") as file:
        for at in (800, 1600, 2400):
            file.seek(at)
            file.write(b"\xff\x7f")
    lab.prefix, good = str(prefix), lab.prefix
    try:
        run_dir = lab.root / "bad_data"
        [run] = lab.start(run_dir)
        status = run.finish()
        assert "Traceback" not in run.output, run.output
        if status == 2:
            return f"status 2: {run.output.splitlines()[-1].removeprefix('megajax: error: ')[:150]}"
        skipped = run.output.count("skipped")
        quiet = numbers_of(run_dir)
        [run] = lab.start(lab.root / "bad_data_killed")
        run.read_until(lambda: steps_logged(lab.root / "bad_data_killed") >= 20)
        run.kill()
        lab.end(lab.start(lab.root / "bad_data_killed"))
        assert numbers_of(lab.root / "bad_data_killed") == quiet, "the numbers differ"
        return f"status {status}; {skipped} steps were skipped, the same ones after a kill"
    finally:
        lab.prefix = good


CLOCK = """
import time
real, calls = time.time, 0
def jumping():
    global calls
    calls += 1
    return real() + (0, 86400, -86400, 3600)[calls // 50 % 4]
time.time = jumping
"""


def clock(lab: Lab) -> str:
    """The clock jumps by hours and days, forwards and back."""
    folder, run_dir = lab.root / "clock", lab.root / "clocked"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(CLOCK)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    [run] = lab.start(run_dir, PYTHONPATH=path)
    run.read_until(lambda: steps_logged(run_dir) >= 30)
    run.kill()
    [run] = lab.start(run_dir, PYTHONPATH=path)
    assert run.finish() == 0 and "Traceback" not in run.output, run.output
    assert numbers_of(run_dir) == lab.quiet(), "the numbers differ"
    return "killed and resumed with a jumping clock"


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--files", type=int, default=5, help="damaged files of each kind")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--only", default="", help="part of the names of the faults to try")
    options = parser.parse_args()
    faults: dict[str, Callable[[Lab], str]] = {
        "SIGKILL at random moments": lambda lab: kills(lab, options.kills),
        "disk full": full_disk,
        "read-only directory": read_only,
        **{f"checkpoint file {kind}": lambda lab, kind=kind: damaged(lab, kind, options.files) for kind in DAMAGES},
        "one of two processes killed": lambda lab: lost_process(lab, signal.SIGKILL, 1),
        "the first of two processes killed": lambda lab: lost_process(lab, signal.SIGKILL, 0),
        "one of two processes stopped": lambda lab: lost_process(lab, signal.SIGSTOP, 1),
        "gradients not finite": bad_gradients,
        "tokens not in the vocabulary": bad_data,
        "clock jumps": clock,
    }
    rows = []
    for name, fault in faults.items():
        if options.only not in name:
            continue
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            lab = Lab(Path(folder), random.Random(f"{options.seed} {name}"))
            try:
                outcome = fault(lab)
            except PermissionError as error:
                outcome = f"not tried: {error}"
            except Exception:
                traceback.print_exc()
                outcome = "FAILED"
            finally:
                lab.close()
        rows.append(f"| {name} | {outcome} |")
        print(f"{rows[-1]}  {time.monotonic() - start:.0f} s", flush=True)
    print(f"\nseed {options.seed}\n\n| fault | outcome |\n|---|---|", *rows, sep="\n")
    return 1 if any("FAILED" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
