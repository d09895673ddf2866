"""A run that is stopped, interrupted and killed: the same command goes on bit for bit, and nothing saved is lost.

A sample of `python scripts/faults.py`, which also fills the disk, damages checkpoints and loses processes.
"""

import random
import signal
from pathlib import Path

import pytest
from faults import LONG, Lab, kill_at, numbers_of, resumed_in, saved_in, steps_logged

SEED = random.randrange(2**31)
STOPPED = 75


@pytest.fixture
def lab(tmp_path):
    lab = Lab(tmp_path, random.Random(SEED), (*LONG, "run.steps=60", "run.eval_interval=20"))
    yield lab
    lab.close()


def newest_checkpoint(run_dir: Path) -> int:
    return max(int(path.name) for path in (run_dir / "checkpoints").iterdir() if path.name.isdigit())


def test_a_run_stopped_interrupted_and_killed_goes_on_bit_for_bit(lab):
    """SIGTERM and Ctrl-C, which save and exit with 75; SIGKILL at a random moment, half of the times during a save."""
    run_dir, saved = lab.root / "run", 0
    moment = lab.random.choice(["save", "save", "save", "start", "first step", "step"])
    print(f"seed {SEED}: SIGKILL, {moment}")
    for number in (signal.SIGTERM, signal.SIGINT):
        [run] = lab.start(run_dir)
        run.read_to_step(saved + 8)
        run.process.send_signal(number)
        assert run.finish() == STOPPED, run.output
        assert resumed_in(run.output) == saved
        saved = newest_checkpoint(run_dir)
        assert saved == saved_in(run.output) == steps_logged(run_dir) < 45
    [run] = lab.start(run_dir)
    assert kill_at(lab, run, run_dir, moment), run.output
    assert max(saved, saved_in(run.output)) <= newest_checkpoint(run_dir) < 60
    saved = newest_checkpoint(run_dir)
    output = lab.finish(run_dir)
    assert resumed_in(output) == saved
    assert f"step {saved + 1:>2}/60" in output and f"step {saved:>2}/60" not in output
    assert [step for step, name in numbers_of(run_dir) if name == "loss"] == [*range(1, 61)]
    assert not [*run_dir.glob("checkpoints/*tmp*")]
