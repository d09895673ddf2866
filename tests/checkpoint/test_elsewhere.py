"""`checkpoint.dir`: the checkpoints of a run in another directory than its own, or in a bucket.

A directory plays the bucket: object by object, without renames. `dev/remote_checkpoints.py` tries the clients of
Google's and Amazon's stores against a server.
"""

import os
import re
import sys
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import jax
import numpy as np
import pytest
import tensorstore
from etils import epath
from etils.epath import backend
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import _registry
from orbax.checkpoint._src.path import gcs_utils

import megajax
from megajax.checkpoint import arrays, complete_steps, elsewhere, inspect, s3, storage
from megajax.config import load_config
from megajax.errors import ConfigError, InputError
from megajax.tools.export_megatron import __main__ as export_megatron
from megajax.training.loop import Trainer

TINY = """
run: {log_interval: 1, steps: 4, eval_steps: 0}
model: {num_layers: 1, hidden_size: 16, num_heads: 2, vocab_size: 64}
batch: {global_size: 2, sequence_length: 8}
data: {kind: synthetic}
logging: {tensorboard: false}
"""


IN_BUCKET = "checkpoint.dir=gs://b/x"


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


@pytest.mark.parametrize("place", ["far", IN_BUCKET])
def test_a_start_that_finds_nothing_where_the_checkpoints_were_is_no_run_from_step_0(build, bucket, tmp_path, place):
    """As with a disk that is not mounted."""
    folder, overrides = (tmp_path / "far", ()) if place == "far" else (bucket / "x", (place,))
    save(build(*overrides), 2)
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="checkpoint.dir=.* but nothing is there now: mount .* remove .*/checkpoints,"):
        build(*overrides)
    assert not folder.exists()
    if place == "far":
        with pytest.raises(InputError, match=f"has its checkpoints in {folder}, which does not exist .*: mount"):
            megajax.load_weights(tmp_path / "run")
        folder.mkdir()  # where the disk is mounted
        with pytest.raises(InputError, match="but nothing is there now: mount"):
            build(*overrides)
        folder.rmdir()
    (tmp_path / "elsewhere").rename(folder)
    assert build(*overrides).step == 2


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """The directory that plays the buckets `gs://b` and `s3://b`."""
    root = tmp_path / "stores"
    (root / "b").mkdir(parents=True)

    def local(path):
        return re.sub("^(gs|s3)://", f"{root}/", os.fspath(path))

    class Store(LocalFileSystem):
        protocol, cachable, auto_mkdir = ("gs", "gcs", "s3"), False, True

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
    for module, name in ((gcs_utils, "get_kvstore_for_gcs"), (s3, "key_value_store")):  # orbax calls them
        monkeypatch.setattr(module, name, lambda path: {"driver": "file", "path": local(path)})
    monkeypatch.setattr(gcs_utils, "is_hierarchical_namespace_enabled", lambda path: False)
    for module in (elsewhere, arrays):
        monkeypatch.setattr(module, "key_value_store", key_value_store)
    return root / "b"


@pytest.mark.parametrize("scheme", [pytest.param("gs", marks=pytest.mark.long), "s3"])
def test_checkpoints_in_a_bucket(build, bucket, tmp_path, capsys, scheme):
    run, folder, in_bucket = tmp_path / "run", bucket / "x", f"checkpoint.dir={scheme}://b/x"
    first = save(build(in_bucket), 2)
    assert (run / "checkpoints").read_text() == f"{scheme}://b/x\n"
    assert (folder / "run").read_text() == f"{run}\n"
    loaded = megajax.load_weights(run)
    np.testing.assert_array_equal(loaded["head"], first.state.params["head"])
    again = build(in_bucket)
    assert again.step == 2
    np.testing.assert_array_equal(again.state.params["head"], loaded["head"])
    save(again, 3)
    other = build(
        f"run.dir={tmp_path / 'other'}", "checkpoint.dir=null", f"checkpoint.init_from={run / 'checkpoints/2'}"
    )
    np.testing.assert_array_equal(other.state.params["head"], loaded["head"])
    assert inspect.main([str(run), "--verify"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("verified") == 2 and shown.count(time.strftime("%Y-")) == 2
    assert export_megatron.main([str(run), str(tmp_path / "megatron")]) == 0
    save(build(in_bucket, "checkpoint.resume_step=2"), 4)
    assert complete_steps(run) == [2, 4]
    assert steps_in(folder / "set_aside/1") == ["3"]
    assert (run / "set_aside/1/checkpoints").read_text() == f"{scheme}://b/x/set_aside/1\n"
    save(build(in_bucket), 5)
    assert complete_steps(run) == [4, 5]  # checkpoint.keep=2


def test_no_part_of_a_checkpoint_looks_complete_while_it_is_moved_in_a_bucket(monkeypatch):
    names, copied, removed = [f"b/3/{name}" for name in ("a", storage.COMMITTED, "z")], [], []
    system = SimpleNamespace(
        find=lambda top: names, cp_file=lambda name, new: copied.append((name, new)), rm_file=removed.append
    )
    monkeypatch.setattr(storage, "_system", lambda folder: (system, folder.removeprefix("gs://")))
    move: Any = storage.move
    move("gs://b/3", "gs://b/old/3")
    assert sorted(copied) == [(name, name.replace("b/3", "b/old/3")) for name in sorted(names)]
    assert copied[-1][0] == removed[0] == names[1] and sorted(removed) == sorted(names)


@pytest.mark.parametrize("content", [b"", b"ftp://b/x", b"\xff\xfe\x00"], ids=["empty", "URL", "binary"])
def test_a_file_in_place_of_the_checkpoints_is_a_sentence(content, tmp_path):
    (tmp_path / "checkpoints").write_bytes(content)
    with pytest.raises(InputError, match="checkpoints is a file .*gs://.* another run.dir"):
        complete_steps(tmp_path)


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
    for step in (1, 2, 3):
        save(build(IN_BUCKET, "checkpoint.keep=3"), step)

    sentence = r"gs://b/x/3 cannot be read or written "
    for error, rest in (
        (OSError("Forbidden: b/x"), r"\(Forbidden.*: give this machine"),
        (TimeoutError(), r"\(TimeoutError\): check the connection"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(LocalFileSystem, "open", Mock(side_effect=error))
            with pytest.raises(InputError, match=sentence + rest):
                build(IN_BUCKET).state  # noqa: B018
            with pytest.raises(InputError, match=sentence + rest):
                storage.read_description(storage.bucket_folder("gs://b/x") / "3")
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


# The codes of tensorstore's statuses (absl::StatusCode), of a store that does not answer, or not to this user
NO_ANSWER = {"UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "RESOURCE_EXHAUSTED", "INTERNAL"}
NO_ANSWER |= {"PERMISSION_DENIED", "UNAUTHENTICATED"}
OF_THE_OBJECT = {"NOT_FOUND", "INVALID_ARGUMENT", "DATA_LOSS", "FAILED_PRECONDITION", "OUT_OF_RANGE", "ALREADY_EXISTS"}


def test_sizes_are_those_of_the_files_in_all_folders(tmp_path):
    (tmp_path / "arrays/d").mkdir(parents=True)
    (tmp_path / "arrays/d/0").write_bytes(bytes(7))
    (tmp_path / "metadata").write_bytes(bytes(3))
    assert storage.sizes(tmp_path) == {"arrays/d/0": 7, "metadata": 3}


def test_tensorstore_s_specification_has_the_driver_of_the_store(tmp_path):
    assert storage.key_value_store(tmp_path) == {"driver": "file", "path": f"{tmp_path}/"}
    of_bucket = {"driver": "gcs", "bucket": "b", "path": "x/3/"}  # of tensorstore's documentation
    assert storage.key_value_store(epath.Path("gs://b/x/3")) == of_bucket


def test_each_error_is_that_of_the_store_or_of_an_object():
    def outcome(error: Exception, folder="gs://b/x/3") -> type:
        try:
            with storage.store_errors(folder):
                raise error
        except Exception as found:
            return type(found)

    found = {code: outcome(ValueError(f"{code}: Error reading x")) for code in NO_ANSWER | OF_THE_OBJECT}
    assert {code for code, kind in found.items() if kind is InputError} == NO_ANSWER
    for package in ("gcsfs", "s3fs", "botocore", "aiobotocore", "fsspec", "aiohttp", "google", "requests", "asyncio"):
        raised = type("OfClient", (Exception,), {"__module__": f"{package}.exceptions"})
        assert outcome(raised("x")) is InputError and outcome(raised("x"), "/a/directory") is raised
    for denied in ("Forbidden", "Anonymous caller", "no credentials", "x, 401", "Unauthorized", "Access Denied"):
        assert outcome(ValueError(denied)) is InputError
    for denied in ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"):
        assert outcome(ValueError(denied), "s3://b/x/3") is InputError
    for missing in ("NOT_FOUND: x", "Invalid GCS bucket name: B", "NoSuchBucket: x"):
        assert "create the bucket, or correct its name" in str(storage.store_problem("gs://b", ValueError(missing)))
    assert outcome(ConnectionResetError()) is InputError and outcome(FileNotFoundError()) is FileNotFoundError
    assert outcome(ValueError("UNAVAILABLE: x"), "/a/directory") is ValueError


def test_of_two_runs_that_take_a_folder_of_a_bucket_at_once_one_is_refused(build, bucket, tmp_path, monkeypatch):
    (bucket / "x").mkdir()
    real = tensorstore.KvStore.read

    def read(store, key):
        found = real(store, key)
        found.result()
        if not (bucket / "x/run").exists():  # now the other run writes its name
            (bucket / "x/run").write_text("/the/other\n")
        return found

    monkeypatch.setattr(elsewhere.tensorstore.KvStore, "read", read)
    with pytest.raises(InputError, match="gs://b/x .* has the checkpoints of run.dir=/the/other: choose"):
        build(IN_BUCKET)
    assert (bucket / "x/run").read_text() == "/the/other\n"
    assert not (tmp_path / "run/checkpoints").exists()


@pytest.mark.parametrize(
    ("endpoint", "region", "profile", "keys", "expected"),
    [
        ("https://s3.amazonaws.com", "aws-global", None, False, {"type": "default", "profile": "default"}),
        ("https://s3.eu-west-1.amazonaws.com", "eu-west-1", "mine", False, {"type": "default", "profile": "mine"}),
        ("http://minio:9000", "aws-global", "mine", True, {"type": "environment"}),
        ("http://minio:9000", "eu-west-1", None, True, {"type": "environment"}),
    ],
)
def test_tensorstore_meets_the_server_and_credentials_of_s3fs(monkeypatch, endpoint, region, profile, keys, expected):
    client = Mock(meta=Mock(endpoint_url=endpoint, region_name=region))
    session = Mock(profile=profile, create_client=lambda service: client)
    monkeypatch.setitem(sys.modules, "botocore", Mock())
    monkeypatch.setitem(sys.modules, "botocore.session", Mock(Session=lambda: session))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    if keys:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setattr(s3, "_server", s3._server.__wrapped__)
    own = {"endpoint": endpoint, "aws_region": region.replace("aws-global", "us-east-1")} if "minio" in endpoint else {}
    spec = s3.key_value_store("s3://bucket/a/b/")
    assert spec == {"driver": "s3", "bucket": "bucket", "path": "a/b/", "aws_credentials": expected} | own
    tensorstore.KvStore.Spec(spec)  # it knows these keys


def test_a_bucket_that_is_not_there_is_named(build, bucket, monkeypatch):
    store = Mock()  # as tensorstore answers when a condition is not met: so it reads a missing bucket's status 404
    store.read.return_value.result.return_value.value = b""
    store.write.return_value.result.return_value.generation = b""
    monkeypatch.setattr(elsewhere.tensorstore.KvStore, "open", lambda *_, **__: Mock(result=lambda: store))
    with pytest.raises(InputError, match="gs://b/x .*(NOT_FOUND: .*): create the bucket, or correct its name"):
        build(IN_BUCKET)


def test_mistakes_are_sentences(build, tmp_path, monkeypatch):
    for url in ("az://b/x", "gs://b", "s3://b"):
        with pytest.raises(ConfigError, match=f"checkpoint.dir={url} is a URL, but not of the form gs://BUCKET/F"):
            build(f"checkpoint.dir={url}")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    for scheme, package, extra in (("gs", "gcsfs", "gcs"), ("s3", "s3fs", "s3")):
        sentence = rf"{scheme}://b/x, .* {package}, which is not installed: pip install 'megajax\[{extra}\]'"
        with pytest.raises(InputError, match=sentence):
            build(f"checkpoint.dir={scheme}://b/x")
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
