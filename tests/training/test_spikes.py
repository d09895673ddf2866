"""Loss spikes are found in all steps, and a run goes back and leaves out their batches, also if it is killed."""

import json
import math
import re
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from megajax.data.loader import open_datasets
from megajax.mesh import build_mesh
from megajax.schema.batch_schedule import BatchSizes, Position
from megajax.training.batches import batches
from megajax.training.checks import NonFiniteCheck, SpikeCheck
from megajax.training.loop import Trainer
from megajax.training.resuming import ResumePoint
from megajax.training.rollbacks import Rollbacks
from megajax.training.spikes import BadStep, LossWatch, explain_nonfinite
from megajax.training.step import TrainProgram

WATCHED = ("run.spike_factor=1.1", "run.spike_window=2", "run.max_rollbacks=2", "run.checkpoint_interval=3")
SMALL = ("model.num_layers=1", "run.steps=9", "run.log_interval=4", "checkpoint.keep=3")
BAD_SAMPLE = 7 * 8  # the first one of step 8


def metrics(loss, in_row=0):
    return {"loss": np.float32(loss), "skipped_in_row": np.int32(in_row)}


def test_a_loss_below_zero_is_a_spike_if_it_is_as_far_above_the_median_as_one_above_zero(make_config):
    """Objectives of one's own have such losses: 1.5 times -4 is below all of them."""
    watch = LossWatch(make_config("run.spike_factor=1.5", "run.spike_window=3"))
    for step, loss in enumerate((-4.0, -4.1, -3.9, -2.1, -1.9, -4.0), start=1):
        watch.keep(step, metrics(loss))
    assert [(bad.step, bad.median) for bad in watch.examine(6)] == [(5, pytest.approx(-3.9))]


def test_spikes_are_those_of_numpy_whatever_steps_are_logged_and_after_a_restart(make_config):
    config = make_config("run.spike_factor=1.5", "run.spike_window=5")
    random = np.random.default_rng(0)
    losses = (3 + random.normal(0, 0.2, 60)).astype(np.float32)
    losses[[2, 20, 21, 40]] = 9  # the window is not full at the first one
    losses[[30, 31]] = math.nan, math.inf
    expected, good = [], []
    for step, loss in enumerate(losses, start=1):
        if np.isfinite(loss):
            if len(good) >= 5 and loss > 1.5 * np.median(good[-5:]):
                expected.append(BadStep(step, float(loss), float(np.median(np.array(good[-5:], np.float64)))))
            good.append(loss)
    assert [bad.step for bad in expected] == [21, 22, 41]
    for interval in (1, 7, 60):
        watch, found = LossWatch(config), []
        for step, loss in enumerate(losses, start=1):
            watch.keep(step, metrics(loss, int(not np.isfinite(loss))))
            if step % interval == 0:
                found += watch.examine(step - 1)  # as the loop does, one step late
            if step in (21, 30):
                found += watch.examine(step)
                watch = LossWatch(config, json.loads(json.dumps(watch.history)))
        found += watch.examine(60)
        assert found == expected and watch.spikes == 3


def test_a_step_whose_gradient_alone_is_not_finite_is_no_good_step(make_config):
    """Its finite loss is no spike and in no median; one more in a row than run.max_nonfinite_steps is a bad step."""
    watched = ("run.spike_factor=1.5", "run.spike_window=3", "run.max_rollbacks=1", "run.checkpoint_interval=1")
    steps = [(3, 0), (9, 1), (4, 0), (8, 1), (7, 2), (5, 0), (9, 1), (9, 2), (9, 3), (9, 4), (7, 0)]
    watch = LossWatch(make_config("run.max_nonfinite_steps=2", *watched))
    for step, (loss, in_row) in enumerate(steps, start=1):
        watch.keep(step, metrics(loss, in_row))
    assert watch.examine(len(steps)) == [BadStep(9, 9.0, None), BadStep(11, 7.0, 4.0)]
    assert watch.history == {"last": [4, 5, 7], "spikes": 1}


def test_a_save_between_log_points_examines_the_steps_that_wait(make_config):
    """As in a notebook, after an interrupted run."""
    watch = LossWatch(make_config("run.spike_factor=1.5", "run.spike_window=2"))
    for step, loss in enumerate([3, 3, 9], start=1):
        watch.keep(step, metrics(loss))
    with pytest.warns(UserWarning, match="loss spike at step 3: 9.0000 is above 4.5000.*=1.5 .*the last 2 steps.$"):
        assert watch.saved(3) == {"losses": {"last": [3, 9], "spikes": 1}}


def test_the_event_of_spikes_that_were_found_together_is_of_the_first(tmp_path, make_config):
    """With the step, the number and the median of the first one."""
    config = make_config(f"run.dir={tmp_path}", "run.spike_factor=1.5", "run.spike_window=2")
    said, events, values = [], [], {}
    check = SpikeCheck(config, lambda: pytest.fail("no checkpoint is needed"), lambda *event: events.append(event))
    check.begin(SimpleNamespace(saved={}, rollbacks=Rollbacks(config)))
    run = SimpleNamespace(end=None, sizes=BatchSizes.of(config), note=said.append)
    for run.step, loss in enumerate([3, 3, 9, 3, 9, 3, 14], start=1):
        run.metrics = metrics(loss)
        check.on_step(run)
    check.examine(run, 7)
    check.on_log(run, 7, values)
    ((kind, step, text),) = events
    assert (kind, step) == ("spike", 3) and "step 3: 9.0000" in text and "1 more up to step 7" in text
    assert len(said) == 1 and text in said[0] and values == {"spikes": 2}
    # A run that ends does not go back.
    for run.step, run.end, loss in ((8, None, 14), (9, "stopped", 99)):
        run.metrics = metrics(loss)
        check.on_step(run)
        check.examine(run, run.step)
    assert [step for _, step, _ in events] == [3, 8] and len(said) == 2


@pytest.mark.parametrize(("end", "in_row", "ends"), [(None, 2, False), (None, 3, True), ("a rollback", 3, False)])
def test_steps_that_are_not_finite_end_a_run_that_does_not_end_already(make_config, end, in_row, ends):
    said, ended = [], []
    config = make_config("run.max_nonfinite_steps=2")
    run: Any = SimpleNamespace(end=end, config=config, note=said.append, end_with=ended.append)
    saved: Any = SimpleNamespace(latest_step=None)
    NonFiniteCheck(lambda: saved).on_log(run, 9, metrics(3, in_row))
    assert len(said) == len(ended) == ends


def test_weights_from_elsewhere_may_be_the_cause_of_bad_numbers(make_config):
    cause = "inspect the data of these steps and the weights of checkpoint.init_from, then start again."
    assert explain_nonfinite(21, make_config("checkpoint.init_from=folder"), None).endswith(cause)
    without = explain_nonfinite(21, make_config(), None)
    assert "init_from" not in without and "; no checkpoint was saved: lower" in without
    assert "; the checkpoint of step 0 is from before: lower" in explain_nonfinite(21, make_config(), 0)


def test_without_the_options_nothing_is_kept(make_config):
    watch = LossWatch(make_config())
    watch.keep(1, metrics(3))
    assert not watch.is_on and watch.examine(1) == [] and watch.saved(1) == {} and watch.spikes == 0


class SpoiledTrainer(Trainer):
    """The batches that begin with `bad_samples` are bad, at whatever step; it is killed after a step if `dies`."""

    bad_samples = (BAD_SAMPLE,)

    def next_batch(self):
        bad = self.sizes.samples_before(self.step) in self.bad_samples
        batch = super().next_batch()
        return shuffled_targets(batch) if bad else batch

    def dies(self):
        return False

    def train_step(self, batch):
        if self.dies():
            raise KeyboardInterrupt
        return super().train_step(batch)


class FromStep8(Trainer):
    """Its batches have no number from step 8 on."""

    def next_batch(self):
        batch = super().next_batch()
        return no_number(batch) if self.step >= 7 else batch


def shuffled_targets(batch):
    targets = (np.asarray(batch["targets"]) + 60) % 125
    return batch | {"targets": jax.device_put(targets, batch["targets"].sharding)}


def no_number(batch):
    mask = np.array(batch["loss_mask"])
    mask[0, 0, 0] = math.nan
    return batch | {"loss_mask": jax.device_put(mask, batch["loss_mask"].sharding)}


def by_hand(config, order):
    """(loss, norm) of plain steps on the batches `order`, numbers of steps from 0."""
    program = TrainProgram.build(config, build_mesh({}, jax.devices()[:1]))
    source = open_datasets(config)["train"]
    state, curve = program.init_state(), []
    for index in order:
        state, found = program.train_step(state, next(batches(program, "train", source, index)))
        curve.append((float(found["loss"]), float(found["grad_norm"])))
    return curve


def fail(*_):
    raise KeyboardInterrupt


def test_a_rollback_leaves_out_the_batches_and_a_killed_run_repeats_it_bit_for_bit(
    tmp_path, make_config, monkeypatch, read_metrics, capsys
):
    def trainer(name, *overrides):
        config = make_config(f"run.dir={tmp_path / name}", *SMALL, *WATCHED, *overrides)
        return SpoiledTrainer(config, jax.devices()[:1])

    def events(name):
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        return [{key: line[key] for key in line if key != "time"} for line in lines if "rollback" in line]

    hook = f"logging.on_event=tee -a {tmp_path / 'events'}"
    assert trainer("whole", hook).run() == 0
    assert re.findall('"event": "(.*?)"', (tmp_path / "events").read_text()) == ["rollback", "end"]
    printed = capsys.readouterr().out
    assert (
        "warning: loss spike at step 8" in printed
        and "rollback 1 of run.max_rollbacks=2: back to the checkpoint of step 6, leaving out 16" in printed
    )
    numbers = ("loss", "grad_norm", "tokens")
    expected = read_metrics(tmp_path / "whole", *numbers)
    curve = by_hand(make_config(*SMALL), [*range(6), 8, 9, 10])
    assert {step: values[:2] for step, values in expected.items()} == {s: curve[s - 1] for s in (1, 4, 8, 9)}
    assert expected[8][2] == 10 * 8 * 16
    (event,) = events("whole")
    assert (event["rollback"], event["step"], event["bad_step"], event["left_out_samples"]) == (1, 6, 8, 16)
    assert event["bad_loss"] > 1.1 * event["loss_median"]
    assert '"step": 8' in (tmp_path / "whole/set_aside/1/metrics.jsonl").read_text()
    # Its samples are not those of its steps, which with run.epochs would else mean another size of the batch.
    assert trainer("whole", "run.steps=null", "run.epochs=1").step == 9

    def killed_in(owner, method):
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, fail)
            with pytest.raises(KeyboardInterrupt):
                trainer(f"in {method}").run()
        return f"in {method}"

    dying = trainer("before a checkpoint")
    dying.dies = lambda: dying.step == 7 and Rollbacks(dying.config).past
    with pytest.raises(KeyboardInterrupt):
        dying.run()
    for name in ("before a checkpoint", killed_in(Rollbacks, "add"), killed_in(ResumePoint, "go_back")):
        assert trainer(name).run() == 0
        assert read_metrics(tmp_path / name, *numbers) == expected, name
        assert events(name) == [event], name


def test_the_first_step_after_a_rollback_is_judged_by_the_losses_before_its_checkpoint(tmp_path, make_config):
    run = SpoiledTrainer(make_config(f"run.dir={tmp_path}", *SMALL, *WATCHED), jax.devices()[:1])
    run.bad_samples = (BAD_SAMPLE, BAD_SAMPLE + 8)  # that of step 8, and of step 7 when it comes again
    assert run.run() == 0
    assert [(past.step, past.bad_step) for past in Rollbacks(run.config).past] == [(6, 8), (3, 7)]


def test_numbers_that_stay_bad_use_up_the_rollbacks_and_end_the_run(tmp_path, make_config, capsys, checkpoint_steps):
    watched = ("run.max_nonfinite_steps=1", "run.max_rollbacks=2", "run.checkpoint_interval=3", "run.steps=14")
    run = FromStep8(make_config(f"run.dir={tmp_path}", *SMALL, *watched), jax.devices()[:1])
    assert run.run() == 3
    assert [(past.step, past.bad_step, past.bad_loss) for past in Rollbacks(run.config).past] == [
        (6, 9, None),
        (3, 9, None),
    ]
    assert checkpoint_steps(tmp_path) == [3, 6, 9]  # skipped steps change no weight
    printed = capsys.readouterr().out
    assert (
        printed.count("2 steps in a row, up to step 9, had a loss") == 3
        and "all rollbacks of run.max_rollbacks=2 are used" in printed
    )


def test_a_rollback_goes_to_the_newest_regular_checkpoint_that_was_not_tried(tmp_path, make_config):
    config = make_config(f"run.dir={tmp_path}", *WATCHED, "run.max_rollbacks=9")
    sizes, saved = BatchSizes.constant(8), SimpleNamespace(describe=lambda step: {"samples_consumed": 8 * step})

    def plan(bad_step):
        return Rollbacks(config).plan([BadStep(bad_step, 9.0, 3.0)], sizes, lambda: saved)[0]

    assert plan(12) is None
    for step in (3, 6, 8, 9, 11):  # 8 and 11 of requested stops
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
    assert plan(3) is None  # its weights may be those of the spike
    for bad_step, step, left_out in ((9, 6, 24), (9, 3, 48), (10, 9, 8), (13, 9, 24)):
        found = plan(bad_step)
        assert (found.step, found.samples, found.left_out_samples) == (step, 8 * bad_step, left_out)
        Rollbacks(config).add(found)
    assert [past.number for past in Rollbacks(config).past] == [1, 2, 3, 4]
    record = Rollbacks(config)
    record.forget_after(6)
    assert [past.step for past in Rollbacks(config).past] == [6, 3]
    assert Rollbacks(config).position(Position(6, 48)) == (6, 72)
    assert Rollbacks(config).position(Position(9, 80)) == (9, 80)
    record.forget_after(3)  # the one to step 6 came before the one to step 3
    assert [past.step for past in Rollbacks(config).past] == [6, 3]
    record.forget_after(2)
    assert not Rollbacks(config).past
