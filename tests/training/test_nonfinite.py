"""Numbers that go bad: the update is skipped and counted, a long row of them ends the run; the FP16 loss scale."""

import hashlib
import re
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax import train
from megajax.config.checks import check_mesh
from megajax.mesh import build_mesh
from megajax.optim.optimizer import OptimizerState
from megajax.step.gradients import gradient_function
from megajax.training.batches import batches
from megajax.training.loop import Trainer
from megajax.training.step import TrainProgram, TrainState, _update_loss_scale


def build(config, devices=1):
    return TrainProgram.build(config, build_mesh(check_mesh(config, devices), jax.devices()[:devices]))


def good_batch(program):
    from megajax.data.loader import open_datasets

    return next(batches(program, "train", open_datasets(program.config)["train"]))


def poisoned(batch, value=np.nan):
    """The batch with one sequence, of one device, whose loss is not finite."""
    mask = np.array(batch["loss_mask"])
    mask[-1, -1, 0] = value
    return batch | {"loss_mask": jax.device_put(mask, batch["loss_mask"].sharding)}


def numbers(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def kept(state):
    """The state without the counts of steps."""
    return numbers(replace(state, **dict.fromkeys(("step", "skipped", "skipped_in_row"), jnp.int32(0))))


# Averages of the weights, and experts' biases, which the counts of a bad step would move.
MORE = ("model.block_pattern=null", "optimizer.ema_decay=0.9", "model.num_experts=4", "model.router.expert_bias=true")


@pytest.mark.parametrize(
    ("sizes", "more"),
    [pytest.param({}, MORE, marks=pytest.mark.smoke), ({"data": 2, "fsdp": 2}, ())],
    ids=["one device", "four devices"],
)
def test_a_bad_step_is_counted_and_changes_nothing_else(make_config, sizes, more):
    config = make_config(*(f"mesh.{axis}={size}" for axis, size in sizes.items()), *more)
    program = build(config, 4 if sizes else 1)
    batch = good_batch(program)
    state, _ = program.train_step(program.init_state(), batch)
    before = kept(state)
    for count, value in enumerate((np.nan, np.inf), start=1):
        state, metrics = program.train_step(state, poisoned(batch, value))
        assert not np.isfinite(metrics["loss"]) or not np.isfinite(metrics["grad_norm"])
        assert kept(state) == before
        assert (int(metrics["skipped"]), int(metrics["skipped_in_row"])) == (count, count)
    state, metrics = program.train_step(state, batch)
    assert np.isfinite(metrics["loss"]) and kept(state) != before
    assert (int(metrics["skipped"]), int(metrics["skipped_in_row"]), int(state.step)) == (2, 0, 4)


class PoisonedTrainer(Trainer):
    """The batches of its steps `first` to `last` are bad."""

    first, last = 0, 10**9

    def next_batch(self):
        batch = super().next_batch()
        return poisoned(batch) if self.first <= self.step + 1 <= self.last else batch


class MostlyPoisonedTrainer(Trainer):
    """All batches are bad but every fourth."""

    def next_batch(self):
        batch = super().next_batch()
        return batch if self.step % 4 == 0 else poisoned(batch)


def digest(directory: Path) -> dict[str, str]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("log_interval", [1, 5])
def test_too_many_bad_steps_in_a_row_stop_the_run_with_status_3_and_leave_the_checkpoint(
    tmp_path, make_config, capsys, log_interval
):
    def trainer(steps, kind=Trainer):
        return kind(
            make_config(
                f"run.dir={tmp_path}",
                f"run.steps={steps}",
                f"run.log_interval={log_interval}",
                "run.max_nonfinite_steps=3",
            ),
            jax.devices()[:1],
        )

    assert trainer(4).run() == 0
    saved = digest(tmp_path / "checkpoints")
    capsys.readouterr()
    run = trainer(30, PoisonedTrainer)
    run.first = 6
    assert run.run() == 3
    assert run.step < 20
    assert digest(tmp_path / "checkpoints") == saved
    printed = "".join(capsys.readouterr()).splitlines()
    (sentence,) = [line for line in printed if "error" in line]
    assert sentence.startswith("megajax: error: ") and "run.max_nonfinite_steps=3" in sentence


def test_a_row_of_bad_steps_that_is_not_too_long_is_survived_and_logged(tmp_path, make_config, read_metrics):
    config = make_config(f"run.dir={tmp_path}", "run.steps=8", "run.max_nonfinite_steps=3")
    trainer = PoisonedTrainer(config, jax.devices()[:1])
    trainer.first, trainer.last = 3, 5
    assert trainer.run() == 0
    assert read_metrics(tmp_path, "skipped") == {step: (min(step - 2, 3),) for step in range(3, 9)}


def test_bad_steps_in_two_rows_are_not_added(tmp_path, make_config):
    config = make_config(f"run.dir={tmp_path}", "run.steps=9", "run.max_nonfinite_steps=3")
    assert MostlyPoisonedTrainer(config, jax.devices()[:1]).run() == 0


def test_a_learning_rate_that_blows_up_ends_the_command_with_status_3(tmp_path, tiny, text, monkeypatch, capsys):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    monkeypatch.setattr(train, "process_start_time", lambda: time.time() - 1000)
    arguments = (
        f"data.train={text} run.dir={tmp_path / 'run'} mesh.data=8 optimizer.kind=sgd optimizer.clip_norm=0 "
        "schedule.learning_rate=1e30 run.steps=50 run.max_nonfinite_steps=2"
    )
    assert train.main([str(tiny), *arguments.split()]) == 3
    printed = "".join(capsys.readouterr())
    assert "Traceback" not in printed
    assert re.search(r"first step done 10\d\d\.\d s after the start\n", printed)  # the start of the process


class EmptyTrainer(Trainer):
    """In the batches of its steps 2 and 3 nothing counts."""

    def next_batch(self):
        batch = super().next_batch()
        return batch | {"loss_mask": 0 * batch["loss_mask"]} if self.step in (1, 2) else batch


def test_a_step_in_which_nothing_counts_is_told_once(tmp_path, make_config, capsys):
    config = make_config(f"run.dir={tmp_path}", "run.steps=8", "run.max_nonfinite_steps=3")
    assert EmptyTrainer(config, jax.devices()[:1]).run() == 0
    (warning,) = [line for line in capsys.readouterr().out.splitlines() if "nothing counts" in line]
    assert "in step 2" in warning and "loss_mask" in warning


# FP16


@pytest.fixture
def fp16(make_config):
    return build(make_config("precision.compute=float16"))


def with_scale(state, scale):
    """With the sharding of a step's result, or else the second step is compiled again."""
    return replace(state, loss_scale=jax.device_put(np.float32(scale), state.loss_scale.sharding))


def test_the_loss_scale_halves_at_an_overflow_until_steps_are_good_again(fp16):
    batch, state = good_batch(fp16), with_scale(fp16.init_state(), 2**28)
    before, scales = numbers(state.params), []
    for step in range(1, 20):
        state, metrics = fp16.train_step(state, batch)
        scales.append(float(metrics["loss_scale"]))
        if not int(metrics["skipped_in_row"]):
            break
        assert numbers(state.params) == before and int(metrics["skipped"]) == step
    assert 2 < len(scales) < 19
    assert scales == [2.0 ** (28 - i) for i in range(len(scales))]
    assert numbers(state.params) != before
    assert float(state.loss_scale) == scales[-1]


def test_the_good_steps_of_the_loss_scale_are_counted_again_after_it_has_doubled():
    """From 1,998 of 2,000 steps on; the fourth one is bad."""
    zero, found = jnp.int32(0), []
    state = TrainState({}, OptimizerState(None, {}), {}, zero, jnp.float32(16), jnp.int32(1998), zero, zero)
    for finite in (True, True, True, False, True):
        state = _update_loss_scale(state, jnp.bool_(finite))
        found.append((float(state.loss_scale), int(state.scale_age)))
    assert found == [(16, 1999), (32, 0), (32, 1), (16, 0), (16, 1)]


@pytest.mark.long
def test_the_loss_scale_doubles_after_the_run_of_good_steps(fp16):
    """2000 steps as in NVIDIA's and Megatron's dynamic loss scaling, of which 1997 are over."""
    batch, scales = good_batch(fp16), []
    state = fp16.init_state()
    assert (float(state.loss_scale), int(state.scale_age)) == (2.0**16, 0)
    state = replace(state, loss_scale=jnp.float32(16), scale_age=jnp.int32(1997))
    for step in range(1, 10):
        # A bad fifth step: the count of good steps restarts.
        state, metrics = fp16.train_step(state, poisoned(batch) if step == 5 else batch)
        scales.append(float(metrics["loss_scale"]))
        if step == 5:
            assert int(state.scale_age) == 0
            state = replace(state, scale_age=jnp.int32(1997))
    assert scales == [16, 16, 16, 32, 32, 16, 16, 16, 32]


def test_fp16_gradients_do_not_depend_on_the_loss_scale(fp16, make_config):
    batch, state = good_batch(fp16), fp16.init_state()
    gradients_of = jax.jit(gradient_function(fp16.graph, fp16.mesh))
    norms, found = [], []
    for scale in (2.0**8, 2.0**12):
        _, gradients, norm, *_ = gradients_of(state.params, {}, batch, state.step, jnp.float32(scale))
        norms.append(float(norm))
        found.append({name: np.asarray(g, np.float64) for name, g in gradients.items()})
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    single = build(make_config())
    gradients_of = jax.jit(gradient_function(single.graph, single.mesh))
    _, exact, *_ = gradients_of(state.params, {}, batch, state.step, jnp.float32(1))
    for name, g in exact.items():
        size = np.linalg.norm(g)
        assert np.linalg.norm(found[0][name] - found[1][name]) < 5e-3 * size, name
        assert np.linalg.norm(found[0][name] - np.asarray(g)) < 2e-2 * size, name


def test_an_overflow_keeps_the_scale_at_one_or_more(fp16):
    state, _ = fp16.train_step(with_scale(fp16.init_state(), 1), poisoned(good_batch(fp16)))
    assert float(state.loss_scale) == 1
