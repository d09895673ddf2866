"""Steps with optimizer state in files: the same numbers as with all of it on the devices, and none lost or doubled."""

from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from megajax.checkpoint import Checkpoints
from megajax.config.checks import check_mesh
from megajax.errors import ConfigError
from megajax.mesh import build_mesh
from megajax.optim import slot_files, streamed
from megajax.optim.forms import StateArray
from megajax.optim.slot_files import SlotFiles
from megajax.optim.streamed import StoredRows
from megajax.sharding import Placement
from megajax.training.batches import to_global
from megajax.training.in_memory import StateSource
from megajax.training.saving import StateSaver
from megajax.training.step import TrainProgram

BUFFERS = ("optimizer.offload_buffers=1e-9",)  # a few chunks


@pytest.fixture(autouse=True)
def on_a_disk(monkeypatch):
    """The tests' files are in memory, which the kernel does not tell here; arrays have several chunks."""
    monkeypatch.setattr(slot_files, "MOUNTS", Path("/nothing"))
    monkeypatch.setattr(streamed, "CHUNK", 1500)


@pytest.fixture
def programs(make_config, tmp_path):
    """(overrides..., sizes) → the same program without and with files."""

    def make(*overrides, **sizes):
        overrides += tuple(f"mesh.{axis}={size}" for axis, size in sizes.items())
        made = []
        for more in ((), ("optimizer.offload=1", f"optimizer.offload_dir={tmp_path}", *BUFFERS)):
            config, count = make_config(*overrides, *more), int(np.prod([*sizes.values()]))
            made.append(TrainProgram.build(config, build_mesh(check_mesh(config, count), jax.devices()[:count])))
        return made

    return make


def random_batch(program, seed):
    M, B, S = program.plan.batch_shape
    tokens = np.random.default_rng(seed).integers(0, program.config.model.vocab_size, (M * B, S + 1), dtype=np.int32)
    positions = np.broadcast_to(np.arange(S, dtype=np.int32), (M * B, S))
    fields = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "positions": positions}
    return to_global(program, fields | {"loss_mask": np.ones((M * B, S), np.float32)})


# Programs of tests are compiled without XLA's optimisations: `a + b·c` is rounded once in some, and twice in others.
# With the optimisations they are equal bit for bit: `dev/optimizer_files.py`.
ROUNDING = 1e-6


def assert_equal(found, expected, tolerance=0.0):
    for (path, x), y in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        name = jax.tree_util.keystr(path)
        assert x.dtype == y.dtype, name
        if tolerance and np.issubdtype(x.dtype, np.floating):
            np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance, err_msg=name)
        elif not tolerance:
            np.testing.assert_array_equal(x.view(f"u{x.itemsize}"), y.view(f"u{y.itemsize}"), err_msg=name)


@pytest.mark.long
def test_a_run_is_that_on_the_devices_and_a_skipped_step_changes_no_file(programs, monkeypatch):
    groups = "[{parameters: ['*.norm'], weight_decay: 0}, {parameters: ['*.attention.*'], clip_norm: 0.1}]"
    plain, filed = programs(
        "optimizer.clip_norm=0.5",
        f"optimizer.groups={groups}",
        "model.block_pattern=null",
        "precision.compute=bfloat16",
        "optimizer.master=split",
        "optimizer.ema_decay=0.5",
        fsdp=2,
    )
    expected, state = plain.init_state(), filed.init_state()
    for step in range(3):
        expected, metrics = plain.train_step(expected, random_batch(plain, step))
        state, found = filed.train_step(state, random_batch(filed, step))
        assert_equal(found, metrics, ROUNDING)
    before = jax.tree.map(np.array, filed.with_files(state))
    assert_equal(
        (before.masters, before.ema, before.optimizer), (expected.masters, expected.ema, expected.optimizer), ROUNDING
    )
    assert len(filed.streamed.files.sizes) > len(filed.streamed.stored)  # arrays in several chunks

    # A skipped step neither reads nor writes, and the next one goes on.
    batch = random_batch(filed, 3)
    bad = batch | {"loss_mask": batch["loss_mask"] * jnp.nan}
    with monkeypatch.context() as patch:
        for name in ("take", "write"):
            patch.setattr(SlotFiles, name, None)
        state, _ = filed.train_step(state, bad)
    skipped = filed.with_files(state)
    assert int(skipped.skipped) == 1
    assert_equal(skipped.updated, before.updated)
    for each in (bad, batch):  # both count the skipped step
        expected, _ = plain.train_step(expected, each)
    state, _ = filed.train_step(state, batch)
    after = filed.with_files(state)
    assert_equal((after.masters, after.ema), (expected.masters, expected.ema), ROUNDING)


def test_no_parameter_is_updated_alone_beside_others_of_its_optimizer():
    """One optimizer of seven parameters, and one of a single parameter."""
    members = [SimpleNamespace(placements=dict.fromkeys(names)) for names in ("abcdefg", "x")]
    turns = ["a", "bx", "c", "d", "e", "f", "g"]
    update = SimpleNamespace(slots=SimpleNamespace(members=members), turns=turns)
    assert streamed.paired(update) == [{"a", "b", "x"}, {"c", "d"}, {"e", "f", "g"}]


def test_buffers_have_two_files_or_as_many_gib_as_are_set(make_config, tmp_path):
    """Of memory in GiB for each device."""
    for buffers, expected in ((1e-6, lambda streamed: 1073), (1.0, lambda streamed: 2 * streamed.bytes)):
        settings = ("optimizer.offload=1", f"optimizer.offload_dir={tmp_path}", f"optimizer.offload_buffers={buffers}")
        program = TrainProgram.build(make_config(*settings), build_mesh({}, jax.devices()[:1]))
        assert program.streamed.memory == expected(program.streamed)
    assert len(program.streamed.files.sizes) > len(program.streamed.stored)  # arrays in several chunks
    assert program.streamed.bytes == program.streamed.files.files[0].size


@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [
        ("optimizer.kind=ademamix optimizer.state=int8", {"fsdp": 4}),
        ("optimizer.kind=muon optimizer.state=bfloat16", {"fsdp": 2, "tensor": 2}),
        ("model.num_layers=2 batch.num_microbatches=2", {"pipeline": 2, "data": 2}),
    ],
    ids=["ademamix", "muon", "adamw in a pipeline"],
)
@pytest.mark.long
def test_other_optimizers_and_forms(programs, overrides, sizes):
    plain, filed = programs(*overrides.split(), **sizes)
    expected, state = plain.init_state(), filed.init_state()
    for step in range(2):
        expected, _ = plain.train_step(expected, random_batch(plain, step))
        state, _ = filed.train_step(state, random_batch(filed, step))
    whole = filed.with_files(state)
    assert_equal((whole.params, whole.optimizer), (expected.params, expected.optimizer), 10 * ROUNDING)


def random_state(program):
    random = np.random.default_rng(0)

    def of(leaf):
        numbers = random.integers(1, 100, leaf.shape).astype(leaf.dtype)
        return jax.device_put(numbers, leaf.sharding)

    return jax.tree.map(of, program.abstract_state)


def test_what_is_stored_is_loaded(programs):
    _, filed = programs("optimizer.state=int8", "optimizer.ema_decay=0.5", fsdp=4, tensor=2)
    whole = random_state(filed)
    state = filed.to_files(whole)
    norms = {name for name in state.params if name.endswith("norm")}
    assert norms == {*state.optimizer.slots["adamw"]["mu"]} == {*state.ema}
    assert_equal(filed.with_files(state), whole)
    assert_equal(filed.with_files(state, "ema").ema, whole.ema)
    first = filed.with_files(filed.init_state())
    assert not any(np.any(np.asarray(x)) for x in jax.tree.leaves(first.optimizer))  # zeros again


def test_weights_in_use_are_whole_if_a_half_of_each_is_in_files(programs):
    _, filed = programs("optimizer.master=split", "precision.compute=bfloat16")
    whole = random_state(filed)  # of small lower halves, so the upper ones are not rounded up
    state, name = filed.to_files(whole), "head"
    assert name in whole.master_low_bits and name not in state.master_low_bits
    upper, lower = (
        np.asarray(half[name]).view(np.uint16).astype(np.uint32) for half in (whole.params, whole.master_low_bits)
    )
    with StateSource(filed, state).open(filed.config.model) as weights:
        np.testing.assert_array_equal(weights[name][()].view(np.uint32), upper << 16 | lower)


def test_a_loop_saves_restores_and_begins_with_slots_in_files(programs, tmp_path):
    averages = "optimizer.ema_decay=0.5"
    _, filed = programs(averages, fsdp=2)
    saver, checkpoints, whole = StateSaver(filed), Checkpoints(tmp_path / "run", 1, None), random_state(filed)
    saver.save(checkpoints, 1, filed.to_files(whole))
    checkpoints.wait()
    state = filed.init_state()
    assert jax.tree.structure(state) == jax.tree.structure(filed.without_files(whole))
    restored = saver.restore(checkpoints, 1)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert_equal(filed.with_files(restored), whole)
    _, other = programs(averages, f"checkpoint.init_from={tmp_path / 'run'}", fsdp=2)
    begun = StateSaver(other).first_state()
    assert jax.tree.structure(begun) == jax.tree.structure(state)
    assert_equal(other.with_files(begun).ema, whole.params)  # averages begin with the weights
    checkpoints.close()


@pytest.mark.parametrize("shape", [(7,), (3, 5, 11), (2, 1000), (2, 3, 400, 7), (13, 1)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.uint8])
def test_chunks_cover_an_array(shape, dtype):
    placement = Placement(shape, ("embed",) * len(shape), P(), shape, None, 1, None)
    mesh = build_mesh(dict.fromkeys(("pipeline", "data", "fsdp", "expert", "context", "tensor"), 1), jax.devices()[:1])
    rows, covered = StoredRows.of(StateArray(placement, dtype), mesh), np.zeros(shape, int)
    for begin in rows.begins:
        part = covered[rows.slices(begin)]
        assert part.shape == rows.shape
        part += 1
    assert covered.min() == 1
    row = jnp.dtype(dtype).itemsize * shape[-1]
    assert rows.bytes <= max(streamed.CHUNK, row)
    assert (covered > 1).mean() <= 0.5


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            "",
            "optimizer.offload_dir=/disk needs optimizer.offload above 0, but optimizer.offload=0.0 .*: set optimizer",
        ),
        ("optimizer.offload=1 logging.norms_interval=2", "offload_dir=/disk cannot be combined with logging.norms_int"),
    ],
)
def test_what_cannot_be_combined_is_refused(make_config, overrides, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make_config("optimizer.offload_dir=/disk", *overrides.split())
