"""Long training on CPUs with random kills beside a run that nobody disturbs: both have the same weights, bit for bit.

`python dev/soak.py --minutes 120` trains a tiny model on four virtual devices, twice at the same time. One of the
runs is killed at random times (SIGKILL, sometimes SIGTERM or Ctrl-C) and started again by the same command. When the
time is over both are stopped. All numbers that both have logged must be equal, and all weights of the newest step of
which both have a checkpoint.
"""

import argparse
import itertools
import os
import random
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from lab import Lab, Run, numbers_of, resumed_in, saved_in, steps_logged

from megajax import load_weights
from megajax.checkpoint import complete_steps

INTERVAL, KEPT = 200, 2000  # steps between checkpoints, and between those that are never deleted
SETTINGS = (
    *("run.steps=100000000", "run.log_interval=20", f"run.checkpoint_interval={INTERVAL}"),
    *(f"checkpoint.keep_every={KEPT}", "model.dropout=0.1", "batch.num_microbatches=2", "data.split='8,2,0'"),
)
SIGNALS = (*[signal.SIGKILL] * 6, signal.SIGTERM, signal.SIGINT)
STOPPED, INTERRUPTED = 75, 130  # exit statuses after SIGTERM and SIGINT, and after SIGINT before the first step
LONGEST = 1800.0  # seconds without output, of a process with low priority on a busy machine


def disturb(
    lab: Lab, run_dir: Path, signals: Iterable[signal.Signals], seconds: float, every: float, may_end: Callable
) -> int:
    """Train in `run_dir`, and end each start by the next of `signals` after about `every` seconds; the number of them.

    After `seconds`, or when there are no more signals, the run is stopped as soon as `may_end()`. Raises AssertionError
    if something that was reported saved is lost.
    """
    end, saved = time.monotonic() + seconds, 0
    for number, kind in enumerate(itertools.chain(signals, [None])):
        [run] = lab.start(run_dir)
        pause = lab.random.uniform(0.2, 1.8) * every
        if lab.random.random() < 0.8:  # the others come at any moment of the start, too
            wait(run, 0.0, lambda run=run: "\nstep" in run.output)
        if kind is not None and time.monotonic() + pause < end:
            wait(run, time.monotonic() + pause)
        else:
            wait(run, end if kind else 0.0, lambda run=run: "\nstep" in run.output and may_end())
            kind = None
        sent = kind or signal.SIGTERM
        run.process.send_signal(sent)
        status = run.finish()
        expected = {-sent} if sent == signal.SIGKILL else {STOPPED}
        if "\nstep" not in run.output:  # there is nothing to save, or Python has only started
            expected |= {-sent, INTERRUPTED} if sent == signal.SIGINT else {-sent}
            expected |= {1} if sent == signal.SIGINT and "init_import_site" in run.output else set()
        assert status in expected, f"status {status}\n{run.output}"
        assert saved <= resumed_in(run.output) or "resuming" not in run.output, f"step {saved} is lost\n{run.output}"
        saved = max(saved, saved_in(run.output))
        print(f"{sent.name} at step {saved} or later, status {status}", flush=True)
        if kind is None:
            return number
    raise AssertionError


def wait(run: Run, end: float, ready: Callable[[], object] = lambda: True) -> None:
    """Read the output until time `end`, and until `ready()`."""
    reached = run.read_until(lambda: time.monotonic() >= end and ready(), pause=0.1, longest=LONGEST)
    assert reached, f"ended by itself\n{run.output}"


def follow(run: Run, ahead: Callable[[], bool], over: threading.Event) -> None:
    """Read the output of a run unless it is `ahead`, where it waits: its pipe holds a page. To the end once `over`."""
    while not over.is_set() and run.process.poll() is None:
        if ahead() or not select.select([run.stdout], [], [], 0.1)[0]:
            over.wait(0.1)
        else:
            run.output += os.read(run.stdout.fileno(), 4096).decode(errors="replace")
    run.finish()


def soak(lab: Lab, signals: Iterable[signal.Signals], seconds: float, every: float, kept: int) -> str:
    """A disturbed and a quiet run side by side (`disturb`), and their comparison; a sentence about it.

    Both keep the checkpoints of every `kept` steps. Raises AssertionError if they differ.
    """
    ours, theirs = lab.root / "disturbed", lab.root / "quiet"
    quiet, over = list[Run](), threading.Event()

    def accompany() -> None:
        # From the disturbed run's first step on: then its compiled programs are there for both.
        while not steps_logged(ours) and not over.is_set():
            over.wait(0.1)
        if not over.is_set():
            quiet.extend(lab.start(theirs))
            follow(quiet[0], lambda: steps_logged(theirs) > steps_logged(ours), over)

    reader = threading.Thread(target=accompany)
    reader.start()

    def common() -> set[int]:
        assert reader.is_alive(), f"the quiet run has ended\n{''.join(run.output for run in quiet)}"
        return {step for step in set(complete_steps(ours)) & set(complete_steps(theirs)) if step % kept == 0}

    try:
        kills = disturb(lab, ours, signals, seconds, every, common)
        step = max(common())
        over.set()
        quiet[0].process.send_signal(signal.SIGTERM)
        reader.join()
        assert quiet[0].process.returncode == STOPPED, quiet[0].output
    finally:
        over.set()
        for run in quiet:
            run.process.kill()
        reader.join()
    weights, others = (load_weights(run_dir / "checkpoints" / str(step)) for run_dir in (ours, theirs))
    assert weights.keys() == others.keys()
    assert all(np.array_equal(weights[name], others[name]) for name in weights), f"the weights of step {step} differ"
    logged, expected = numbers_of(ours), numbers_of(theirs)
    last = min(max(step for step, _ in numbers) for numbers in (logged, expected))
    wanted = {key for key in logged | expected if key[0] <= last}
    assert not (bad := sorted(key for key in wanted if logged.get(key) != expected.get(key))), f"{bad} differ"
    return (
        f"{kills} kills: {len(wanted)} lines of logged numbers up to step {last} and the weights of step {step} are "
        "the same bit for bit"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--every", type=float, default=120, help="mean seconds between kills")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    options = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(Path(folder), random.Random(options.seed), SETTINGS)
        signals = (lab.random.choice(SIGNALS) for _ in itertools.count())
        try:
            outcome = soak(lab, signals, 60 * options.minutes, options.every, KEPT)
        finally:
            lab.close()
    print(f"{(time.monotonic() - start) / 60:.0f} minutes, {outcome} (seed {options.seed})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
