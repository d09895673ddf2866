"""`checkpoint.dir`: the checkpoints of a run in another directory than its own."""

import jax
import numpy as np
import pytest

import megajax
from megajax.config import load_config
from megajax.errors import InputError
from megajax.training.loop import Trainer

TINY = """
run: {log_interval: 1, steps: 4, eval_steps: 0}
model: {num_layers: 1, hidden_size: 16, num_heads: 2, vocab_size: 64}
batch: {global_size: 2, sequence_length: 8}
data: {kind: synthetic}
logging: {tensorboard: false}
"""


@pytest.fixture
def build(tmp_path):
    """(overrides...) → a Trainer of `tmp_path/run` with its checkpoints in `tmp_path/far`."""
    (tmp_path / "tiny.yaml").write_text(TINY)

    def build(*overrides):
        places = (f"run.dir={tmp_path / 'run'}", f"checkpoint.dir={tmp_path / 'far'}")
        return Trainer(load_config(tmp_path / "tiny.yaml", [*places, *overrides]), jax.devices()[:1])

    return build


def save(trainer, step):
    trainer.step = step
    trainer.save()
    trainer.close()
    return trainer


def steps_in(directory):
    return sorted(path.name for path in directory.iterdir() if path.name.isdigit())


def test_checkpoints_are_written_and_found_there(build, tmp_path, capsys):
    first = save(build(), 2)
    assert steps_in(tmp_path / "far") == ["2"]
    weights = megajax.load_weights(tmp_path / "run")
    np.testing.assert_array_equal(weights["head"], first.state.params["head"])
    other = build(f"run.dir={tmp_path / 'other'}", "checkpoint.dir=null", f"checkpoint.init_from={tmp_path / 'run'}")
    np.testing.assert_array_equal(other.state.params["head"], weights["head"])
    again = build()
    assert again.step == 2
    save(again, 3)
    back = build("checkpoint.resume_step=2")
    save(back, 4)  # what is newer than step 2 stays on that disk
    assert steps_in(tmp_path / "far") == ["2", "4"]
    assert steps_in(tmp_path / "far/set_aside/1") == steps_in(tmp_path / "run/set_aside/1/checkpoints") == ["3"]


def test_a_lost_run_directory_does_not_lose_the_checkpoints(build, tmp_path):
    save(build(), 2)
    (tmp_path / "run").rename(tmp_path / "lost")
    assert build().step == 2


@pytest.mark.smoke
def test_mistakes_are_sentences(build, tmp_path):
    with pytest.raises(
        InputError, match=r"checkpoint.dir=gs://b/x .* is a URL, .*: give one, such as a bucket that is mounted"
    ):
        build("checkpoint.dir=gs://b/x")
    build()
    with pytest.raises(InputError, match=f"has the checkpoints of run.dir={tmp_path / 'run'}: choose another"):
        build(f"run.dir={tmp_path / 'second'}")
    with pytest.raises(InputError, match="the run's checkpoints are in .*/far: move them to checkpoint.dir"):
        build(f"checkpoint.dir={tmp_path / 'new'}")
    save(build("checkpoint.dir=null", f"run.dir={tmp_path / 'own'}"), 1)
    with pytest.raises(InputError, match="the run's checkpoints are in .*/own/checkpoints: move them"):
        build(f"run.dir={tmp_path / 'own'}", f"checkpoint.dir={tmp_path / 'new'}")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"checkpoint.dir=.*/file/x .* cannot be written \(Not a directory\)"):
        build(f"run.dir={tmp_path / 'third'}", f"checkpoint.dir={tmp_path / 'file/x'}")
