"""The check that copies of replicated state are equal: silent data corruption is found and named."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from megajax.config.checks import check_mesh
from megajax.mesh import AXES, build_mesh
from megajax.training import replicas
from megajax.training.loop import Trainer
from megajax.training.replicas import ReplicaCheck
from megajax.training.step import TrainProgram

NAME = "blocks.mlp.mlp.up"
MESH = ("mesh.data=4", "mesh.tensor=2")


def build(make_config, *overrides):
    config = make_config(*overrides, "run.replica_check_interval=1", "batch.global_size=8", "model.num_layers=1")
    return TrainProgram.build(config, build_mesh(check_mesh(config, 8), jax.devices()[:8]))


def flipped(array, device, bit=0):
    """The array with one bit of one element changed in the copy of one device only."""
    shards = []
    for shard in array.addressable_shards:
        data = np.array(shard.data)
        if shard.device == device:
            data.view(np.uint32).reshape(-1)[-1] ^= np.uint32(1 << bit)
        shards.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def with_damage(state, name, device, bit=0):
    return replace(state, params=state.params | {name: flipped(state.params[name], device, bit)})


def test_a_flipped_bit_of_one_copy_is_named_with_its_device(make_config):
    program = build(make_config, *MESH)
    check, state, devices = (
        ReplicaCheck(program, pytest.fail, pytest.fail),
        program.init_state(),
        program.mesh.devices.ravel(),
    )
    check.start(1, state)
    assert check.damage() is None
    norm = "blocks.mlp.mlp.norm"  # replicated over all eight devices
    for device, bit in ((devices[0], 31), (devices[5], 0)):
        check.start(2, with_damage(state, norm, device, bit))
        check.start(3, state)
        step, found = check.damage()
        assert step == 2 and [(d.array, d.devices) for d in found] == [(f"params.{norm}", [device])]
        line = replicas.explain(step, found, None)
        assert f"params.{norm}" in line and f"devices {device.id} of process 0" in line and "no checkpoint" in line


def test_of_two_copies_both_devices_are_named(make_config):
    program = build(make_config, "mesh.fsdp=4", "mesh.tensor=2", "model.num_kv_heads=1", "model.block_pattern=null")
    check = ReplicaCheck(program, pytest.fail, pytest.fail)
    state, devices = program.init_state(), program.mesh.devices
    key = "blocks.dense.attention.key"  # one head: fsdp shards it, both devices of tensor have it
    check.start(1, with_damage(state, key, devices.ravel()[5]))
    (_, found) = check.damage() or (0, [])
    assert [(d.array, d.devices) for d in found] == [(f"params.{key}", list(devices[0, 0, 2, 0, 0]))]
    assert "no majority" in replicas.explain(1, found, 4)
    # A weight that is sharded over all devices has no copy.
    check.start(2, with_damage(state, "blocks.dense.mlp.up", devices.ravel()[5]))
    assert check.damage() is None


SPECS = [spec for axis in AXES for spec in (P(axis), P(None, ("context", axis)) if axis != "context" else P())]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_device_that_is_named_has_the_wrong_copy_whichever_axes_shard_the_array(spec):
    """On 2 × ... × 2 devices; the checksum of a shard is its number, but that of one device."""
    shape = (2,) * len(AXES)
    numbers = np.arange(2 ** len(AXES)).reshape(shape)
    mesh: Any = SimpleNamespace(devices=numbers, shape=dict.fromkeys(AXES, 2))
    coordinates = np.indices(shape)
    axes = [axis for entry in spec if entry for axis in ((entry,) if isinstance(entry, str) else entry)]
    shard = sum((coordinates[AXES.index(axis)] << i for i, axis in enumerate(axes)), np.zeros(shape, int))
    for wrong in (1, 6, numbers.size - 2):
        sums = shard.reshape(-1, 1).astype(np.uint32)
        assert not replicas.compare(sums, {"w": spec}, mesh)
        sums[wrong] += 100
        assert replicas.compare(sums, {"w": spec}, mesh) == [replicas.Damage("w", [wrong], True)]


def test_one_device_has_no_copies_to_check(make_config):
    config = make_config("run.replica_check_interval=1", "model.num_layers=1")
    program = TrainProgram.build(config, build_mesh({}, jax.devices()[:1]))
    with pytest.warns(UserWarning, match=r"run.replica_check_interval=1 .* has no effect on one device: remove it"):
        check = ReplicaCheck(program, pytest.fail, pytest.fail)
    check.compile()
    check.start(1, program.abstract_state)
    assert check.damage() is None


@pytest.mark.parametrize(("count", "more"), [(5, ""), (7, " and 2 more")])
def test_a_long_sentence_names_five_arrays_and_counts_the_others(count, more):
    device = jax.devices()[3]
    line = replicas.explain(8, [replicas.Damage(f"a{i}", [device], True) for i in range(count)], 6)
    assert f"the copies of {count} replicated arrays differ (a0, a1, a2, a3, a4{more}): the copies on devices 3" in line
    assert "after step 8" in line and "the newest checkpoint is of step 6" in line


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.float8_e4m3fn])
def test_the_checksum_sees_each_bit_and_the_order(dtype):
    size = jnp.dtype(dtype).itemsize
    values = np.random.default_rng(0).integers(0, 256, 64 * size, np.uint8)
    checksum = jax.jit(replicas.checksum)
    number = lambda raw: int(checksum(raw.view(dtype)))  # noqa: E731
    seen = {number(values)}
    for bit in range(8 * size):
        changed = values.copy()
        changed[5 * size + bit // 8] ^= 1 << bit % 8
        seen.add(number(changed))
    order = np.arange(64)
    order[[3, 40]] = 40, 3
    seen.add(number(values.reshape(64, size)[order].reshape(-1)))
    assert len(seen) == 8 * size + 2


class DamagingTrainer(Trainer):
    def train_step(self, batch):
        metrics = super().train_step(batch)
        if self.step == 3:
            self.state = with_damage(self.state, "final_norm", self.program.mesh.devices.ravel()[3])
        return metrics


def test_a_run_with_damage_ends_with_status_3_and_saves_nothing(tmp_path, make_config, capsys, checkpoint_steps):
    overrides = ("run.steps=6", "run.checkpoint_interval=2", "run.replica_check_interval=5", "run.log_interval=6")
    config = make_config(f"run.dir={tmp_path}", *MESH, *overrides, "model.num_layers=1")
    assert DamagingTrainer(config).run() == 3
    assert checkpoint_steps(tmp_path) == [2]
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "error" in line]
    assert "after step 4" in line and "params.final_norm" in line and "devices 3 of process 0" in line
    assert "newest checkpoint is of step 2" in line
