"""A killed run with delayed scaling goes on as if nothing had happened: its histories are in the checkpoint."""

import shutil

import jax
import numpy as np
import pytest
from trainers import Killed, KilledTrainer

STEPS, SAVED, KILLED = 5, 3, 4
FP8 = ("precision.fp8.recipe=delayed", "precision.fp8.amax_history_length=3", "model.head_dim=16")


@pytest.fixture
def make_trainer(make_config):
    """(run directory, overrides..., axis=size...) → a Trainer on a mesh of the first devices."""

    def make(run_dir, *overrides, **sizes):
        mesh = [f"mesh.{axis}={size}" for axis, size in sizes.items()]
        run = f"run.dir={run_dir}", f"run.steps={STEPS}", f"run.checkpoint_interval={SAVED}"
        config = make_config(*run, *FP8, *mesh, *overrides)
        return KilledTrainer(config, jax.devices()[: int(np.prod(list(sizes.values()) or [1]))])

    return make


def losses(read_metrics, run_dir) -> list[float]:
    found = read_metrics(run_dir, "loss")
    assert list(found) == list(range(1, STEPS + 1))
    return [loss for (loss,) in found.values()]


@pytest.fixture
def expected(tmp_path, make_trainer, read_metrics):
    """(losses, last state) of an undisturbed run; "killed" has a checkpoint of another one."""
    whole, killed = make_trainer(tmp_path / "whole"), make_trainer(tmp_path / "killed")
    assert whole.run() == 0
    killed.killed_at = KILLED
    with pytest.raises(Killed):
        killed.run()
    return losses(read_metrics, tmp_path / "whole"), whole.state


def test_a_killed_run_goes_on_bit_for_bit(tmp_path, make_trainer, read_metrics, expected):
    shutil.copytree(tmp_path / "killed", tmp_path / "emptied")
    again = make_trainer(tmp_path / "killed")
    assert again.step == SAVED
    assert again.run() == 0
    assert losses(read_metrics, tmp_path / "killed") == expected[0]
    jax.tree.map(np.testing.assert_array_equal, again.state, expected[1])

    # The numbers do hang on the histories.
    emptied = make_trainer(tmp_path / "emptied")
    histories = emptied.state.layer_state["fp8"]
    histories.update({name: 0 * history for name, history in histories.items()})
    assert emptied.run() == 0
    assert losses(read_metrics, tmp_path / "emptied") != expected[0]


@pytest.mark.long
def test_a_killed_run_goes_on_alike_on_another_mesh(tmp_path, make_trainer, read_metrics, expected):
    """Other tests restore histories, and compare those of a mesh with one device's."""
    moved = make_trainer(tmp_path / "killed", data=2, tensor=2)
    assert moved.step == SAVED
    assert moved.run() == 0
    # Sums in another order change a few numbers by an FP8 step; measured: 1.5e-4 of a loss.
    np.testing.assert_allclose(losses(read_metrics, tmp_path / "killed"), expected[0], rtol=1e-3)
