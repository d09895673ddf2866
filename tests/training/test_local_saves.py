"""Local checkpoints: a run that crashes goes on from the newest one bit for bit, or from the durable one."""

import json
import re
import resource
import shutil
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from several_processes import clusters, together
from trainers import Killed, KilledQuickTrainer, KilledTrainer, QuickTrainer

import megajax
from megajax.checkpoint import checksums
from megajax.checkpoint.local_tier import LocalTier
from megajax.errors import ConfigError, InputError
from megajax.training.loop import Trainer
from megajax.training.rollbacks import Rollbacks
from megajax.training.spikes import Rollback

NUMBERS = ("loss", "grad_norm", "learning_rate", "tokens")
STEPS = ("run.steps=8", "run.checkpoint_interval=3", "run.eval_steps=0")
MESH = ("mesh.tensor=2",)
WIDE = ("model.hidden_size=64", "model.ffn_hidden_size=128")
HALVES = ("precision.compute=bfloat16", "optimizer.master=split", "optimizer.offload=1.0")
EXPERTS = ("model.num_experts=4", "model.router.expert_bias=true")
# All kinds of state: padding, halves of master weights, arrays on the host, amax histories, the routers' bias, and rows
# in a pipeline's order with empty slots.
STATES = {
    "padded": ("mesh.fsdp=4", "model.hidden_size=36", "model.head_dim=8", *HALVES),
    "fp8": (*MESH, "mesh.fsdp=2", *WIDE, "precision.fp8.recipe=delayed", "precision.fp8.amax_history_length=3"),
    "experts": ("mesh.expert=2", "mesh.data=2", "model.block_pattern=null", *EXPERTS),
    "pipeline": ("mesh.pipeline=2", "mesh.data=2", "model.num_layers=3", "batch.num_microbatches=2"),
}


@pytest.fixture
def build(make_config, tmp_path):
    """(overrides...) → a Trainer on two devices that saves locally every step."""

    def build(*overrides, devices=2, kind=KilledTrainer, hooks=()):
        local = (f"checkpoint.local_dir={tmp_path / 'local'}", "checkpoint.local_interval=1")
        config = make_config(f"run.dir={tmp_path / 'run'}", *STEPS, *local, *overrides)
        return kind(config, jax.devices()[:devices], hooks=hooks)

    return build


def crash(trainer, step):
    """Run until `step` is done and its local checkpoint written."""
    trainer.killed_at = step
    with pytest.raises(Killed):
        trainer.run()


def local_files(tmp_path) -> dict[int, Path]:
    return {int(path.name): path for path in tmp_path.glob("local/run-*/process-0/*") if path.name.isdigit()}


def assert_equal(mine, theirs):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), mine, theirs)
    assert jax.tree.map(lambda a: a.sharding, mine) == jax.tree.map(lambda a: a.sharding, theirs)


def test_a_crashed_run_goes_on_from_the_local_checkpoint_bit_for_bit(
    build, tmp_path, read_metrics, checkpoint_steps, monkeypatch, capsys
):
    """Its shards are written when the next step has taken their memory."""
    common = (*MESH, "model.dropout=0.1", "run.checkpoint_interval=0", "checkpoint.local_interval=3")
    common += ("run.spike_factor=100", "run.spike_window=8")
    whole = build(*common, f"run.dir={tmp_path / 'whole'}")
    assert whole.run() == 0
    crashing, write = build(*common), LocalTier._write

    def late(self, step, *arguments):
        while crashing.step == step:
            time.sleep(0.01)
        time.sleep(0.1)
        return write(self, step, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(LocalTier, "_write", late)
        crash(crashing, 7)
    assert sorted(local_files(tmp_path)) == [3, 6] and checkpoint_steps(tmp_path / "run") == []
    capsys.readouterr()
    again, kept, prepare = build(*common), [], LocalTier.prepare

    def prepared(tier, keep):
        prepare(tier, keep)
        kept.append(sorted(local_files(tmp_path)))

    monkeypatch.setattr(LocalTier, "prepare", prepared)
    assert again.step == 6
    assert again.run() == 0
    assert kept == [[6]], "after another crash before step 9 it is needed again"
    assert f"resuming from the local checkpoint of step 6 in {tmp_path / 'local'}/run-" in capsys.readouterr().out
    assert read_metrics(tmp_path / "run", *NUMBERS) == read_metrics(tmp_path / "whole", *NUMBERS)
    assert_equal(again.state, whole.state)
    losses, expected = (trainer.checkpoints.describe(8)["losses"] for trainer in (again, whole))
    assert losses == expected and len(losses["last"]) == 8, "also those from before the crash, for the next median"
    assert not [*tmp_path.glob("local/*")]  # the durable checkpoint of the last step replaces them


def test_the_first_save_is_a_line_with_its_size_and_its_time(build, monkeypatch, capsys):
    take = LocalTier.outcome

    def outcome(tier, wait=False):
        found = take(tier, wait)
        return found and replace(found, size=1_234_000, seconds=12.34)

    monkeypatch.setattr(LocalTier, "outcome", outcome)
    crash(build(*MESH, kind=KilledQuickTrainer), 2)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("saved step")]
    assert len(lines) == 1 and lines[0].startswith("saved step 1 in ")
    assert lines[0].endswith("(1.23 MB in 12.3 s beside training)")


def test_the_size_of_a_save_is_that_of_all_shards_of_a_process_and_of_one_copy_of_each(tmp_path):
    tier, mesh = LocalTier(str(tmp_path), "run", "layout"), jax.make_mesh((4, 2), ("data", "tensor"))
    tier.prepare(keep=None)
    arrays = {name: jax.numpy.ones((8, 2), dtype) for name, dtype in (("w", "float32"), ("mu", "bfloat16"))}
    for spec in ((), ("data",), ("data", "tensor")):
        sharding = jax.NamedSharding(mesh, jax.P(*spec))
        tier.save(len(spec), jax.device_put(arrays, sharding), {})
        outcome = tier.outcome(wait=True)
        assert (outcome.error, outcome.size) == (None, 16 * 4 + 16 * 2)


def test_layers_in_another_order_are_another_layout(build, capsys):
    """Each device has rows of the same shapes with one round of stages or two."""
    stages = ("mesh.pipeline=2", "model.num_layers=4", "batch.num_microbatches=2", "run.checkpoint_interval=0")
    crash(build(*stages, kind=KilledQuickTrainer), 1)
    assert build(*stages, "pipeline.virtual_stages=2").step == 0
    assert (
        "that of step 1 is of another mesh, number of processes or precision: the run begins" in capsys.readouterr().out
    )
    assert build(*stages, "precision.compute=bfloat16").step == 0  # its loss scale is of another dtype
    assert build(*stages).step == 1


@pytest.mark.parametrize("kind", STATES)
def test_every_kind_of_state_comes_back_bit_for_bit(build, kind):
    state = (*STATES[kind], "run.checkpoint_interval=0")
    trainer, random = build(*state, devices=4, kind=KilledQuickTrainer), np.random.default_rng(1)
    trainer.state = jax.tree.map(
        lambda a: jax.device_put(random.integers(1, 9, a.shape).astype(a.dtype), a.sharding), trainer.state
    )
    crash(trainer, 1)
    again = build(*state, devices=4)
    assert (again.step, again.sizes.samples_before(1)) == (1, 8)
    assert_equal(again.state, trainer.state)


def test_a_damaged_local_checkpoint_falls_back_with_a_warning(build, tmp_path, capsys):
    crash(build(*MESH, kind=KilledQuickTrainer), 5)
    newest = local_files(tmp_path)[5]
    flip(newest / "data")
    with pytest.warns(UserWarning, match=f"{newest} is damaged .data has other bits.*: it is not used"):
        assert build(*MESH).step == 4
    flip(local_files(tmp_path)[4] / "index.json")
    with pytest.warns(UserWarning, match="is damaged .index.json has other bits"):
        assert build(*MESH).step == 3
    said = "a local checkpoint is newer, but that of step 5 is damaged on process 0: the run resumes from step 3"
    assert said in capsys.readouterr().out


def test_a_local_checkpoint_in_place_of_a_damaged_durable_one_stays_for_another_crash(build, tmp_path):
    settings = (*MESH, "run.checkpoint_interval=2")
    crash(build(*settings, kind=KilledQuickTrainer), 5)
    shutil.rmtree(local_files(tmp_path)[5])
    flip(max((tmp_path / "run/checkpoints/4").rglob("*"), key=lambda path: path.is_file() and path.stat().st_size))
    again = build(*settings, kind=KilledQuickTrainer)
    with pytest.warns(UserWarning, match="checkpoints/4 is damaged .*: the run resumes from an older one"):
        crash(again, 3)
    assert sorted(local_files(tmp_path)) == [3]


class GoingBack(megajax.Hook):
    """A rollback from step 7, once, to the checkpoint of step 4."""

    def on_step(self, run):
        if run.step == 7:
            self.saved()
            run.end_with(Rollback(1, 4, 56, 7, None, None, 24))


class KilledAfterRollback(QuickTrainer):
    """Its process is killed after the first step that it repeats."""

    def next_batch(self):
        if self.step == 5 and Rollbacks(self.config).past:
            raise Killed
        return super().next_batch()


def test_a_run_that_is_killed_after_a_rollback_does_not_undo_it(build, tmp_path):
    hook = GoingBack()
    trainer = build("run.checkpoint_interval=4", devices=1, kind=KilledAfterRollback, hooks=[hook])
    hook.saved = trainer.saved
    with pytest.raises(Killed):
        trainer.run()
    assert sorted(local_files(tmp_path)) == [5]


def test_an_index_that_does_not_fit_its_data_is_damage(build, tmp_path):
    """Checksums do not prove who wrote a file."""
    lasting = (*MESH, "run.checkpoint_interval=0")
    crash(build(*lasting, kind=KilledQuickTrainer), 2)
    newest = local_files(tmp_path)[2]
    values = json.loads((newest / "index.json").read_text())
    end = (newest / "data").stat().st_size
    values["shards"] = [[*shard[:4], end - 1] for shard in values["shards"]]
    (newest / "index.json").write_text(json.dumps(values))
    (newest / "checksums.json").unlink()
    checksums.write(newest, [checksums.compute(newest)])
    with pytest.warns(UserWarning, match=f"{newest} is damaged .index.json does not fit data"):
        assert build(*lasting).step == 1


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_another_mesh_or_another_course_of_the_run_uses_the_durable_checkpoint(build, tmp_path, capsys):
    crash(build(*MESH, kind=KilledQuickTrainer), 5)
    other = build("mesh.fsdp=2", kind=KilledQuickTrainer)
    said = "that of step 5 is of another mesh, number of processes or precision: the run resumes from step 3"
    assert other.step == 3 and said in capsys.readouterr().out
    crash(other, 4)
    assert build(*MESH).step == 3  # step 5 is gone: the run took another course
    crash(build(*MESH, kind=KilledQuickTrainer), 5)
    back = build(*MESH, "checkpoint.resume_step=3", kind=KilledQuickTrainer)
    assert back.step == 3
    crash(back, 4)
    assert build(*MESH, "checkpoint.resume_step=3").step == 4


def test_a_new_run_in_the_same_place_and_a_copy_do_not_see_the_local_checkpoints(build, tmp_path, monkeypatch):
    crash(build(*MESH, "run.checkpoint_interval=0", kind=KilledQuickTrainer), 1)
    assert build(*MESH).step == 1
    (tmp_path / "run").rename(tmp_path / "moved")
    assert build(*MESH).step == 0
    assert build(*MESH, f"run.dir={tmp_path / 'moved'}").step == 0
    crash(build(*MESH, kind=KilledQuickTrainer), 1)
    shutil.copytree(tmp_path / "run", tmp_path / "copies/run")  # with the same name and the same id
    assert build(*MESH, f"run.dir={tmp_path / 'copies/run'}").step == 0
    monkeypatch.chdir(tmp_path)
    assert build(*MESH, "run.dir=run").step == 1


def test_changed_settings_are_refused_as_with_a_durable_checkpoint(build):
    crash(build(*MESH, kind=KilledQuickTrainer), 4)
    with pytest.raises(InputError, match=r"the local checkpoint of step 4 in .*\n  run.seed=1234, but this run has 7$"):
        build(*MESH, "run.seed=7")


class FullDisk(KilledQuickTrainer):
    """The local checkpoint of step 5 finds no room: files end at 20 kB while it is written."""

    def save_locally(self):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if self.step == 5:
            self.directory.local_saves.report(wait=True)
            self.directory.checkpoints.outcome(wait=True)  # that of step 3 may still be written
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        super().save_locally()
        self.directory.local_saves.report(wait=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_directory_is_a_warning_and_keeps_the_last_good_one(build, tmp_path):
    with pytest.warns(UserWarning, match=r"local checkpoint of step 5 could not be saved in .*\(File too large"):
        crash(build(*MESH, kind=FullDisk), 5)
    assert 4 in local_files(tmp_path)
    assert not [*tmp_path.glob("local/run-*/process-0/*.partial")]
    assert build(*MESH).step == 4


@pytest.fixture
def tiers(tmp_path):
    """(function) → its results of three processes, called with the tier of each, and its number."""
    with together(clusters(3)) as call:
        made = call(lambda _: LocalTier(str(tmp_path), "run", "layout"))
        call(lambda index: made[index].prepare(keep=None))
        yield lambda function: call(lambda index: function(made[index], index))


def save_step(step: int, tier: LocalTier, description=None) -> str | None:
    """The error of the save of an array."""
    tier.save(step, {"w": jax.numpy.full(4, step)}, description or {"step": step, "model": {}})
    return tier.outcome(wait=True).error


def stored_steps(tmp_path):
    return [
        sorted(path.name for path in (tmp_path / "run" / f"process-{index}").iterdir() if path.name.isdigit())
        for index in range(3)
    ]


def newest(tier: LocalTier, _: int, after: int = 0):
    found, why = tier.newest(after, {"w": jax.numpy.zeros(4, int)})
    return found and found.step, why


def test_a_step_that_one_process_could_not_write_replaces_nothing(tiers, tmp_path):
    """So all processes have a step in common, whichever of them writes the next one."""
    for step in (4, 5):
        assert tiers(lambda tier, _, step=step: save_step(step, tier)) == [None] * 3
    bad = {"no JSON": {1}}
    errors = tiers(lambda tier, index: save_step(6, tier, bad if index == 1 else {}))
    assert all("set is not JSON serializable" in error for error in errors) and "process 1: " in errors[0]
    assert tiers(lambda tier, _: save_step(7, tier)) == [None] * 3
    assert stored_steps(tmp_path) == [["5", "7"]] * 3
    tiers(lambda tier, _: tier.prepare(keep=5))  # killed at once, it must not find the other
    assert stored_steps(tmp_path) == [["5"]] * 3


def test_a_step_without_checksums_is_not_saved(tiers, tmp_path, monkeypatch):
    monkeypatch.setattr(checksums, "write", lambda folder, _: "no room" if "process-1" in str(folder) else None)
    assert tiers(lambda tier, _: save_step(1, tier)) == ["process 1: no room", "no room", "process 1: no room"]
    assert not stored_steps(tmp_path)[1]


def test_a_step_that_not_every_process_has_is_not_chosen(tiers, tmp_path):
    for step in (1, 2, 3):
        tiers(lambda tier, _, step=step: save_step(step, tier))
    assert stored_steps(tmp_path) == [["2", "3"]] * 3 and tiers(newest) == [(3, "")] * 3
    for after, expected in {2: (3, ""), 3: (None, "")}.items():  # above the durable one only
        assert tiers(partial(newest, after=after)) == [expected] * 3
    shutil.rmtree(tmp_path / "run/process-2/3")
    assert tiers(newest) == [(2, "")] * 3
    flip(tmp_path / "run/process-1/2/data")
    with pytest.warns(UserWarning, match="process-1/2 is damaged"):
        assert tiers(newest) == [(None, "not every process has that of step 3")] * 3


@pytest.mark.smoke
def test_mistakes_are_sentences(make_config, tmp_path):
    local = "checkpoint.local_dir=/x"
    for overrides, sentence in (
        ([local], "checkpoint.local_dir=/x needs checkpoint.local_interval (@): set checkpoint.local_interval to a"),
        ([local, "checkpoint.local_interval=5", "run.checkpoint_interval=5"], "is not below run.checkpoint_interv"),
        (
            [local, "checkpoint.local_interval=5", "checkpoint.save_optimizer=false"],
            "=false, because it is to resume from (@): remove one of them",
        ),
    ):
        with pytest.raises(ConfigError, match=re.escape(sentence.replace("@", f"the command line: {local}"))):
            make_config(*overrides)
    with pytest.warns(UserWarning, match="local_interval=5 has no effect with checkpoint.local_dir=null"):
        make_config("checkpoint.local_interval=5")
    (tmp_path / "file").touch()
    config = make_config(f"run.dir={tmp_path / 'run'}", f"checkpoint.local_dir={tmp_path / 'file'}", *LAST)
    with pytest.raises(InputError, match=r"local_dir=.*/file .*process-0 cannot be written .Not a directory.: choose"):
        Trainer(config, jax.devices()[:1]).run()


LAST = ("checkpoint.local_interval=1", "run.eval_steps=0", "run.steps=1")
