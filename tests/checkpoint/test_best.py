"""Which checkpoints `checkpoint.keep_best` keeps, from their evaluation losses."""

import math
from types import SimpleNamespace

from megajax.checkpoint.best import BestByLoss


def kept(best: BestByLoss, *steps: int) -> list[int]:
    found = best.should_preserve([SimpleNamespace(step=step) for step in steps], context=None)
    return [step for step, keep in zip(steps, found, strict=True) if keep]


def test_a_checkpoint_that_is_written_again_has_no_loss_until_it_is_evaluated(tmp_path):
    best = BestByLoss(tmp_path, 1)
    best.set(2, 1.0)
    best.set(4, 3.0)
    assert kept(best, 2, 4, 6) == [2]
    best.forget(2)
    after_a_restart = BestByLoss(tmp_path, 1)  # of a run that was killed before the evaluation
    assert kept(best, 2, 4, 6) == [4] == kept(after_a_restart, 2, 4, 6)
    for worse in (5.0, math.nan):
        best.set(2, worse)
        assert kept(best, 2, 4, 6) == [4] == kept(BestByLoss(tmp_path, 1), 2, 4, 6)
