"""Long training on CPUs with random kills: it ends with the same weights, bit for bit, as a run that nobody disturbs.

`python scripts/soak.py --minutes 120` trains a tiny model on four virtual devices, kills it at random times (SIGKILL,
sometimes SIGTERM) and starts the same command again, until the time is over. Then it trains once more, in a new
directory and undisturbed, for the same number of steps, and compares all weights and all logged numbers.
"""

import argparse
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from faults import Lab, numbers_of, resumed_in, saved_in

from megajax import load_weights

SETTINGS = (
    *("run.log_interval=20", "run.checkpoint_interval=200", "model.dropout=0.1", "batch.num_microbatches=2"),
    "data.split='8,2,0'",
)
STOPPED = 75  # exit status after SIGTERM


def disturb(lab: Lab, run_dir: Path, seconds: float, every: float) -> tuple[int, int]:
    """Train with kills for some time; (the last step, the number of kills)."""
    end, saved, number = time.monotonic() + seconds, 0, 0
    while True:
        [run] = lab.start(run_dir, "run.steps=100000000")
        pause = time.monotonic() + lab.random.uniform(0.2, 1.8) * every
        last = pause >= end
        until = min(pause, end)
        run.read_until(lambda until=until: time.monotonic() >= until)
        if last:
            run.read_until(lambda run=run: "\nstep" in run.output)  # asked before, it would exit without a save
        kind = signal.SIGTERM if last or lab.random.random() < 0.2 else signal.SIGKILL
        run.process.send_signal(kind)
        status = run.finish()
        assert status in (-kind, STOPPED), run.output
        assert saved <= resumed_in(run.output) or "resuming" not in run.output, f"step {saved} is lost"
        saved, number = max(saved, saved_in(run.output)), number + (not last)
        print(f"{kind.name} at step {saved} or later, status {status}", flush=True)
        if last:
            assert status == STOPPED, run.output
            return saved, number


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--every", type=float, default=120, help="mean seconds between kills")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    options = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(Path(folder), random.Random(options.seed), SETTINGS)
        try:
            last, kills = disturb(lab, lab.root / "soak", 60 * options.minutes, options.every)
            minutes = (time.monotonic() - start) / 60
            lab.end(lab.start(lab.root / "quiet", f"run.steps={last}"))
        finally:
            lab.close()
        ours, theirs = (load_weights(lab.root / name) for name in ("soak", "quiet"))
        same = ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)
        logged, expected = numbers_of(lab.root / "soak"), numbers_of(lab.root / "quiet")
        same_numbers = all(logged[step] == expected[step] for step in logged.keys() & expected.keys())
    print(
        f"{minutes:.0f} minutes, {kills} kills, {last} steps (seed {options.seed}): "
        f"weights {'are the same bit for bit' if same else 'DIFFER'}, "
        f"{len(logged)} logged steps {'too' if same_numbers else 'DIFFER'}"
    )
    return 0 if same and same_numbers else 1


if __name__ == "__main__":
    sys.exit(main())
