"""`megajax.load_weights`: a checkpoint's parameters as NumPy arrays."""

import json
import re
import resource
import shutil
import subprocess
import sys
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
import zstandard
from jax.sharding import NamedSharding, PartitionSpec

import megajax
from megajax.checkpoint import Checkpoints
from megajax.checkpoint.arrays import check_size
from megajax.checkpoint.weights import open_weights


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run with two checkpoints: parameters over eight devices, optimizer, experts and FP8 state beside them."""
    path = tmp_path_factory.mktemp("runs") / "a run, 100%"
    checkpoints = Checkpoints(path, keep=5, keep_every=None)
    sharding = NamedSharding(jax.make_mesh((8,), ("data",)), PartitionSpec("data"))
    for step in (9, 10):
        params = {
            "blocks.dense.attention.query": jax.device_put(jnp.arange(64.0).reshape(8, 2, 4) + step, sharding),
            "final_norm": jnp.full((4,), step, jnp.bfloat16),
        }
        state = {
            "params": params,
            "optimizer": [{"mu": params}],
            "experts": {"bias": jnp.ones(3)},
            "step": jnp.array(1),
        }
        checkpoints.save(step, state, {"model": {}})
        checkpoints.wait()
    checkpoints.close()
    return path


@pytest.mark.parametrize(("name", "step"), [("", 10), ("checkpoints/9", 9)])
def test_parameters_of_the_newest_or_of_one_checkpoint_come_by_name(run_dir, name, step):
    weights = megajax.load_weights(str(run_dir / name))
    assert set(weights) == {"blocks.dense.attention.query", "final_norm"}
    query, norm = weights["blocks.dense.attention.query"], weights["final_norm"]
    assert type(query) is np.ndarray and query.dtype == np.float32
    np.testing.assert_array_equal(query, np.arange(64.0).reshape(8, 2, 4) + step)
    assert norm.dtype == jnp.bfloat16 and norm.tolist() == [step] * 4


@pytest.mark.long
def test_jax_is_not_started(run_dir):
    code = (
        f"import megajax\nassert len(megajax.load_weights({str(run_dir)!r})) == 2\n"
        "from jax._src import xla_bridge\nassert not xla_bridge.backends_are_initialized()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_what_is_not_a_checkpoint_is_a_sentence(run_dir, tmp_path):
    def sentence(path) -> str:
        with pytest.raises(megajax.InputError) as caught:
            megajax.load_weights(path)
        return str(caught.value)

    (tmp_path / "empty/checkpoints/tmp").mkdir(parents=True)
    (tmp_path / "damaged/checkpoints/3/state").mkdir(parents=True)
    assert "nowhere does not exist on this machine: give the directory of a run" in sentence("nowhere")
    (tmp_path / "cache/snapshots/0af").mkdir(parents=True)
    (tmp_path / "cache/snapshots/0af/config.json").write_text("{}")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/model.safetensors").touch()
    assert f"give the model's files in it, {tmp_path}/cache/snapshots/0af." in sentence(tmp_path / "cache")
    assert "has safetensors files, but no config.json: add the model's." in sentence(tmp_path / "bare")
    assert f"is a file: give its folder, {tmp_path}/bare." in sentence(tmp_path / "bare/model.safetensors")
    assert f"give the run, {run_dir}, or {run_dir}/checkpoints/STEP." in sentence(run_dir / "checkpoints")
    assert "empty has no complete checkpoint" in sentence(tmp_path / "empty")
    assert "has checkpoints of steps 9, 10." in sentence(run_dir / "checkpoints/7")
    assert "checkpoints/last does not exist" in sentence(run_dir / "checkpoints/last")
    assert "checkpoints/3 is damaged (it has no parameters)" in sentence(tmp_path / "damaged")
    (tmp_path / "damaged/checkpoints/3/state/manifest.ocdbt").write_text("no manifest")
    assert "checkpoints/3 is damaged (" in sentence(tmp_path / "damaged")


@pytest.mark.parametrize("read", [megajax.load_weights, open_weights])
def test_each_file_with_other_bits_than_when_it_was_saved_is_refused(run_dir, tmp_path, read):
    """Also files that have no parameters, and bits that no format checks."""
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    checkpoint = copy / "checkpoints" / "10"
    files = [path for path in checkpoint.rglob("*") if path.is_file() and not path.name.startswith("checksums.json")]
    for path in files:
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(megajax.InputError, match=f"10 is damaged .*{re.escape(path.name)}.*: give another"):
            read(copy)
        path.write_bytes(whole)
    assert len(files) > 3 and read(copy).keys() == {"blocks.dense.attention.query", "final_norm"}


def written_chunk(checkpoint, name, content):
    """Replace the one chunk of an array, and have no checksums."""
    base = {"driver": "file", "path": f"{checkpoint / 'state'}/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    store.write(f"{name}/0", content).result()
    for record in checkpoint.glob("checksums.json*"):
        record.unlink()


def test_a_chunk_that_expands_is_read_no_further_than_its_array(run_dir, tmp_path):
    """256 MiB in 8 kB: tensorstore stops where the array's bytes end."""
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    bomb = zstandard.compress(bytes(2**28))
    assert len(bomb) < 2**15
    written_chunk(copy / "checkpoints" / "10", "params.final_norm", bomb)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB
    with pytest.raises(megajax.InputError, match="checkpoints/10 is damaged .*: give another checkpoint"):
        megajax.load_weights(copy)["final_norm"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**17


def declare(checkpoint, name, **header):
    """Change entries of an array's header, as somebody may who writes checksums too; its chunks stay as they are."""
    base = {"driver": "file", "path": f"{checkpoint / 'state'}/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    found = json.loads(store.read(f"{name}/.zarray").result().value)
    store.write(f"{name}/.zarray", json.dumps(found | header)).result()
    for record in checkpoint.glob("checksums.json*"):
        record.unlink()


def test_arrays_may_be_a_gibibyte_or_a_thousand_times_their_files(tmp_path):
    """Constant weights compress well; larger declarations are no weights."""
    (tmp_path / "chunks").write_bytes(bytes(2**21))
    large = 1000 * 2**21 // 4  # float32 numbers
    for numbers, files in ((2**28, tmp_path / "nothing"), (large, tmp_path)):
        files.mkdir(exist_ok=True)
        for more in (0, 1):
            spec = {"driver": "zarr", "kvstore": "memory://", "metadata": {"shape": [numbers + more], "dtype": "<f4"}}
            array = tensorstore.open(spec, create=True).result()
            with pytest.raises(ValueError, match="declare") if more else nullcontext():
                check_size(files, {"w": array})


@pytest.mark.parametrize(
    "name, header, problem",
    [
        ("params.blocks.dense.attention.query", {"shape": [2**33, 2, 4]}, r"shape \[8589934592, 2, 4\] instead of"),
        ("optimizer.0.mu.final_norm", {"shape": [2**40]}, "optimizer.0.mu.final_norm has shape"),
        ("params.final_norm", {"shape": [5]}, r"params.final_norm has shape \[5\] instead of \[4\]"),
        ("params.final_norm", {"chunks": [2**31]}, r"params.final_norm of shape \[4\] has chunks of \[2147483648\]"),
        ("params.final_norm", {"chunks": [2**62]}, "params.final_norm"),
        ("params.final_norm", {"dtype": "|V4000000000"}, ""),
        ("params.final_norm", {"compressor": {"id": "blosc"}}, "params.final_norm has the compressor blosc instead of"),
    ],
)
def test_an_array_that_declares_gigabytes_is_refused_before_it_is_read(run_dir, tmp_path, name, header, problem):
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    checkpoints = Checkpoints(copy, keep=5, keep_every=None)
    whole = checkpoints.restore(10, None)
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), whole)
    assert checkpoints.restore(10, abstract)["step"] == 1
    declare(copy / "checkpoints" / "10", name, **header)
    with pytest.raises(ValueError, match=problem or "."):
        checkpoints.restore(10, abstract)
    checkpoints.close()
    if name.startswith("params") and header != {"shape": [5]}:
        with pytest.raises(megajax.InputError, match="checkpoints/10 is damaged .*: give another checkpoint"):
            megajax.load_weights(copy)
