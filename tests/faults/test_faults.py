"""A run that is killed, interrupted and stopped beside a quiet one: the same bits, and nothing that was saved is lost.

A sample of `python dev/soak.py`. `python dev/faults.py` also fills the disk, damages checkpoints and loses
processes.
"""

import random
import signal

import pytest
from lab import LONG, Lab, numbers_of
from soak import soak

SEED = random.randrange(2**31)
EVERY = 7  # steps between the checkpoints of LONG


@pytest.fixture
def lab(tmp_path):
    settings = ("run.steps=20000", "run.eval_interval=20", f"checkpoint.keep_every={EVERY}", "model.num_layers=1")
    # They compile fast.
    settings += ("mesh.data=4", "mesh.tensor=1", "batch.num_microbatches=1", "model.block_pattern=[mlp]")
    lab = Lab(tmp_path, random.Random(SEED), (*LONG, *settings))
    yield lab
    lab.close()


def test_a_run_killed_interrupted_and_stopped_goes_on_bit_for_bit(lab):
    """SIGKILL or Ctrl-C at a random moment, and SIGTERM at the end; the last two save and exit with 75."""
    signals = [lab.random.choice([signal.SIGKILL, signal.SIGINT])]
    print(f"seed {SEED}: {signals}")
    outcome = soak(lab, signals, seconds=600, every=0.4, kept=EVERY)
    assert outcome.startswith("1 kills")
    run_dir = lab.root / "disturbed"
    steps = [step for step, name in numbers_of(run_dir) if name == "loss"]
    assert steps == [*range(1, len(steps) + 1)]
    assert not [*run_dir.glob("checkpoints/*tmp*")]
