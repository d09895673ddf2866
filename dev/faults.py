"""Faults of a long run on CPUs, in real processes: after each the same command goes on bit for bit.

`python dev/faults.py` trains a tiny model on four virtual devices (and on 2 x 4), disturbs it, starts the same
command again until it ends, and compares each step's loss, gradient norm, learning rate and number of tokens with those
of an undisturbed run. A checkpoint that was reported saved must be there afterwards. It prints a table; exit status 1
if a row fails. Full and read-only disks need the right to mount (root); without it their rows say so.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from lab import Lab, Run, numbers_of, resumed_in, saved_in, steps_logged, write_text

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
    skipped = [
        json.loads(line).get("skipped", 0)
        for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
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
    (folder / "sitecustomize.py").write_text(CLOCK, encoding="utf-8")
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    [run] = lab.start(run_dir, environment={"PYTHONPATH": path})
    run.read_until(lambda: steps_logged(run_dir) >= 30)
    run.kill()
    [run] = lab.start(run_dir, environment={"PYTHONPATH": path})
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
