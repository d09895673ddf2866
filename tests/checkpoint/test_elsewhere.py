"""`checkpoint.dir`: the checkpoints of a run in another directory than its own, or in a bucket.

A directory plays the bucket: object by object, without renames. `scripts/remote_checkpoints.py` tries the clients of
Google's stores against a server.
"""

import os
import sys
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from etils.epath import backend
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import _registry
from orbax.checkpoint._src.path import gcs_utils

import megajax
from megajax.checkpoint import complete_steps, elsewhere, inspect, weights
from megajax.config import load_config
from megajax.errors import ConfigError, InputError
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


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """The directory that plays the bucket `gs://b`."""
    root = tmp_path / "stores"
    (root / "b").mkdir(parents=True)

    def local(path):
        return os.fspath(path).replace("gs://", f"{root}/")

    class Store(LocalFileSystem):
        protocol, cachable, auto_mkdir = ("gs", "gcs"), False, True

        @classmethod
        def _strip_protocol(cls, path):
            return super()._strip_protocol(local(path))

        def glob(self, path, **options):
            return [found.removeprefix(f"{root}/") for found in super().glob(path, **options)]

        def cp_file(self, source, target, **options):  # a bucket has no directories
            os.makedirs(os.path.dirname(self._strip_protocol(target)), exist_ok=True)
            super().cp_file(source, target, **options)

        def rename(self, *_, **__):
            raise NotImplementedError

    def key_value_store(folder):
        return {"driver": "file", "path": f"{local(folder)}/"}

    for protocol in Store.protocol:
        monkeypatch.setitem(_registry, protocol, Store)
    monkeypatch.setattr(backend.fsspec_backend, "_get_filesystem", lambda name: Store(auto_mkdir=True))
    monkeypatch.setattr(gcs_utils, "get_kvstore_for_gcs", lambda path: {"driver": "file", "path": local(path)})
    monkeypatch.setattr(gcs_utils, "is_hierarchical_namespace_enabled", lambda path: False)
    for module in (elsewhere, weights):
        monkeypatch.setattr(module, "key_value_store", key_value_store)
    return root / "b"


IN_BUCKET = "checkpoint.dir=gs://b/x"


def test_checkpoints_in_a_bucket(build, bucket, tmp_path, capsys):
    run, folder = tmp_path / "run", bucket / "x"
    first = save(build(IN_BUCKET), 2)
    assert (run / "checkpoints").read_text() == "gs://b/x\n"
    assert (folder / "run").read_text() == f"{run}\n"
    loaded = megajax.load_weights(run)
    np.testing.assert_array_equal(loaded["head"], first.state.params["head"])
    again = build(IN_BUCKET)
    assert again.step == 2
    np.testing.assert_array_equal(again.state.params["head"], loaded["head"])
    save(again, 3)
    other = build(
        f"run.dir={tmp_path / 'other'}", "checkpoint.dir=null", f"checkpoint.init_from={run / 'checkpoints/2'}"
    )
    np.testing.assert_array_equal(other.state.params["head"], loaded["head"])
    assert inspect.main([str(run), "--verify"]) == 0
    assert capsys.readouterr().out.count("verified") == 2
    save(build(IN_BUCKET, "checkpoint.resume_step=2"), 4)
    assert complete_steps(run) == [2, 4]
    assert steps_in(folder / "set_aside/1") == ["3"]
    assert (run / "set_aside/1/checkpoints").read_text() == "gs://b/x/set_aside/1\n"
    save(build(IN_BUCKET), 5)
    assert complete_steps(run) == [4, 5]  # checkpoint.keep=2


def test_a_part_of_a_checkpoint_in_a_bucket_is_ignored_and_removed(build, bucket, tmp_path):
    save(build(IN_BUCKET), 2)
    save(build(IN_BUCKET), 3)
    (bucket / "x/3/commit_success.txt").unlink()
    assert complete_steps(tmp_path / "run") == [2]
    again = build(IN_BUCKET)
    assert again.step == 2
    again._start_writing()
    assert not (bucket / "x/3").exists()
    save(again, 3)
    assert complete_steps(tmp_path / "run") == [2, 3]


def test_damage_in_a_bucket_is_not_confused_with_a_store_that_does_not_answer(build, bucket, tmp_path, monkeypatch):
    for step in (2, 3):
        save(build(IN_BUCKET), step)

    sentence = r"gs://b/x/3 cannot be read or written "
    for error, rest in (
        (OSError("Forbidden: b/x"), r"\(Forbidden.*: give this machine"),
        (TimeoutError(), r"\(TimeoutError\): check the connection"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(LocalFileSystem, "open", Mock(side_effect=error))
            with pytest.raises(InputError, match=sentence + rest):
                build(IN_BUCKET).state  # noqa: B018
    path = max((bucket / "x/3/state").rglob("d/*"), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    again = build(IN_BUCKET)
    with pytest.warns(UserWarning, match="gs://b/x/3 is damaged .*has other bits .*resumes from an older one"):
        assert again.state.params
    assert again.step == 2
    path.unlink()
    assert inspect.main([str(tmp_path / "run"), "--verify"]) == inspect.DAMAGED


@pytest.mark.smoke
def test_mistakes_are_sentences(build, tmp_path, monkeypatch):
    for url in ("s3://b/x", "gs://b"):
        with pytest.raises(ConfigError, match=f"checkpoint.dir={url} is a URL, but not of the form gs://BUCKET/F"):
            build(f"checkpoint.dir={url}")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(InputError, match=r"gs://b/x is in a bucket, but gcsfs is not installed: pip install"):
        build(IN_BUCKET)
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
