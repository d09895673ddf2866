"""Master weights in two halves of 16 bits (`optimizer.master: split`)."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from mesh_models import COMMON
from single_device import make_batches, make_config
from single_device import stored as stored_in

from megajax.checkpoint import Checkpoints
from megajax.config.checks import check_mesh
from megajax.errors import ConfigError
from megajax.mesh import build_mesh
from megajax.tools.verify.runs import canonical
from megajax.training.batches import to_global
from megajax.training.saving import StateSaver
from megajax.training.step import TrainProgram, TrainState
from megajax.weights.masters import is_split, joined, split

# A hidden size of 36 is padded over fsdp 8.
MODEL = {**COMMON, "block_pattern": ["mlp"], "hidden_size": 36, "num_heads": 2, "ffn_hidden_size": 48}


def make_program(mesh: dict[str, int], devices: int, master: str, **optimizer) -> TrainProgram:
    """A layer for each stage, and a microbatch."""
    stages = mesh.get("pipeline", 1)
    sections = {"optimizer": {"master": master, **optimizer}, "precision": {"compute": "bfloat16"}}
    sections["batch"] = {"global_size": 16, "sequence_length": 8, "num_microbatches": stages}
    config = make_config(MODEL | {"num_layers": stages}, mesh, steps=3, **sections)
    return TrainProgram.build(config, build_mesh(check_mesh(config, devices), jax.devices()[:devices]))


def bits(array) -> np.ndarray:
    array = np.asarray(array)
    return array.view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def masters(program: TrainProgram, state: TrainState) -> dict[str, np.ndarray]:
    return canonical(program, jax.jit(lambda state: state.masters)(state))


def train(program: TrainProgram) -> tuple[TrainState, list[float]]:
    state, losses = program.init_state(), []
    for fields in make_batches(program.config):
        state, metrics = program.train_step(state, to_global(program, fields))
        losses.append(float(metrics["loss"]))
    return state, losses


def test_both_halves_are_the_number_bit_for_bit_and_one_is_the_nearest_bfloat16():
    """All signs, exponents and upper bits (zeros, subnormal numbers, infinities, NaN), with lower bits around ties."""
    upper = np.arange(2**16, dtype=np.uint32)[:, None] << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1234], np.uint32)
    x = (upper | lower).view(np.float32)
    half, low_bits = map(np.asarray, jax.jit(split)(x))
    assert half.dtype == ml_dtypes.bfloat16 and low_bits.dtype == np.uint16
    np.testing.assert_array_equal(bits(jax.jit(joined)(half, low_bits)), bits(x))

    number, tie = ~np.isnan(x), np.broadcast_to(lower == 0x8000, x.shape)
    np.testing.assert_array_equal(bits(half)[number & ~tie], bits(x[number & ~tie].astype(ml_dtypes.bfloat16)))
    away = (x.view(np.uint32) >> 16) + 1  # of ties, in magnitude
    np.testing.assert_array_equal(bits(half)[number & tie], away[number & tie])


@pytest.mark.parametrize(
    ("mesh", "devices", "optimizer"),
    [
        ({}, 1, {"ema_decay": 0.5}),
        pytest.param({"fsdp": 8}, 8, {"offload": 1.0, "state": "bfloat16"}, marks=pytest.mark.long),
        pytest.param({"pipeline": 2}, 2, {"kind": "muon", "ema_decay": 0.5}, marks=pytest.mark.long),
    ],
    ids=["one device", "offload", "muon"],
)
def test_a_run_is_that_with_fp32_weights_bit_for_bit(monkeypatch, mesh, devices, optimizer):
    """The other run's weights are rounded to the same BF16 numbers before each step."""
    plain, halves = (make_program(mesh, devices, master, **optimizer) for master in ("float32", "split"))

    def rounded(state: TrainState) -> dict[str, jax.Array]:
        own = halves.placements
        return {n: split(w)[0] if is_split(halves.plan, own[n]) else w for n, w in state.params.items()}

    found, losses = train(halves)
    monkeypatch.setattr(TrainState, "weights", property(rounded))
    expected, others = train(plain)
    assert losses == others
    for name, w in masters(halves, found).items():
        np.testing.assert_array_equal(bits(w), bits(canonical(plain, expected.params)[name]), err_msg=name)
    in_fp32 = {name for name, w in found.params.items() if w.dtype == jnp.float32}
    low_bits = found.master_low_bits
    assert in_fp32 == {name for name in found.params if name.endswith("norm")} == found.params.keys() - low_bits
    kinds = {leaf.sharding.memory_kind for leaf in low_bits.values()}
    assert kinds == {"pinned_host" if "offload" in optimizer else "device"}


def test_checkpoints_are_fp32_and_a_run_may_change_the_form(tmp_path):
    """Written by the padded shards of eight devices, read by four and by one."""
    source = make_program({"fsdp": 8}, 8, "split", offload=1.0)
    state = source.init_state()
    expected = masters(source, state)
    for program in (make_program({}, 1, "float32"), make_program({"data": 2, "tensor": 2}, 4, "split")):
        checkpoints = Checkpoints(tmp_path / program.config.optimizer.master, keep=1, keep_every=None)
        StateSaver(source).save(checkpoints, 3, state)
        outcome = checkpoints.outcome(wait=True)
        assert outcome is not None and not outcome.error
        source, state = program, StateSaver(program).restore(checkpoints, 3)
        checkpoints.close()
        assert bool(state.master_low_bits) == (program.config.optimizer.master == "split")
        for name, w in masters(program, state).items():
            np.testing.assert_array_equal(bits(w), bits(expected[name]), err_msg=name)
        sharding = program.state_shardings
        found, wanted = state.params | state.master_low_bits, sharding.params | sharding.master_low_bits
        assert {name: w.sharding for name, w in found.items()} == wanted


def test_weights_of_another_run_are_split():
    program = make_program({"fsdp": 8}, 8, "split", ema_decay=0.9)
    random = np.random.default_rng(0)
    given = {n: random.standard_normal(p.shape).astype(np.float32) for n, p in program.placements.items()}
    saver = StateSaver(program)
    first = program.random_state(params=False)
    assert not (first.params or first.ema or first.master_low_bits), (
        "those of the other run would need room beside them"
    )
    state = saver.with_weights(first, (jax.device_put(given), {}))
    assert jax.tree.structure(state) == jax.tree.structure(program.abstract_state)
    for name, w in masters(program, state).items():
        np.testing.assert_array_equal(bits(w), bits(given[name]))
        padded = stored_in(given[name], program.placements[name], np.dtype(np.float32))
        np.testing.assert_array_equal(np.asarray(state.ema[name]), padded)


def test_it_needs_bfloat16():
    with pytest.raises(
        ConfigError,
        match=r"optimizer.master=split cannot be combined with precision.compute=float32, because it stores the BF16"
        r" numbers .*: set precision.compute=bfloat16, or optimizer.master=float32.",
    ):
        make_config(MODEL, optimizer={"master": "split"})
