"""Which checkpoints `checkpoint.keep_best` keeps, from the numbers of their evaluations."""

import json
import math
from types import SimpleNamespace

import pytest

from megajax.checkpoint.best import BestCheckpoints

LOSS = "lowest eval_loss"


def kept(best: BestCheckpoints, *steps: int) -> list[int]:
    found = best.should_preserve([SimpleNamespace(step=step) for step in steps], context=None)
    return [step for step, keep in zip(steps, found, strict=True) if keep]


def test_a_checkpoint_that_is_written_again_has_no_loss_until_it_is_evaluated(tmp_path):
    best = BestCheckpoints(tmp_path, 1, LOSS)
    best.add(2, {"eval_loss": 1.0})
    best.add(4, {"eval_loss": 3.0})
    assert kept(best, 2, 4, 6) == [2]
    best.forget(2)
    after_a_restart = BestCheckpoints(tmp_path, 1, LOSS)  # of a run that was killed before the evaluation
    assert kept(best, 2, 4, 6) == [4] == kept(after_a_restart, 2, 4, 6)
    for worse in (5.0, math.nan):
        best.add(2, {"eval_loss": worse})
        assert kept(best, 2, 4, 6) == [4] == kept(BestCheckpoints(tmp_path, 1, LOSS), 2, 4, 6)


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        (LOSS, [2, 8]),
        ("highest eval_loss", [6, 8]),  # not a number is neither
        ("highest eval_accuracy", [4, 6]),
        ("lowest eval_accuracy", [2, 8]),
        ("lowest ema_eval_loss", [6]),  # the others have none
    ],
)
def test_they_are_the_best_by_one_number_also_of_a_run_that_went_by_another(tmp_path, by, expected):
    before = BestCheckpoints(tmp_path, 1, LOSS)
    for step, loss, accuracy in ((2, 1.0, 0.1), (4, math.nan, 0.9), (6, 3.0, 0.8), (8, 2.0, 0.2)):
        before.add(step, {"eval_loss": loss, "eval_accuracy": accuracy})
    before.add(6, {"ema_eval_loss": 0.5})  # an evaluation of its own
    assert kept(BestCheckpoints(tmp_path, 2, by), 2, 4, 6, 8) == expected


def test_the_losses_of_a_run_from_before_there_was_a_choice_are_known(tmp_path):
    (tmp_path / "eval_losses.json").write_text(json.dumps({"2": 1.0, "4": 3.0}))
    best = BestCheckpoints(tmp_path, 1, LOSS)
    assert kept(best, 2, 4) == [2]
    best.add(6, {"eval_loss": 0.5})
    assert kept(best, 2, 4, 6) == kept(BestCheckpoints(tmp_path, 1, LOSS), 2, 4, 6) == [6]
