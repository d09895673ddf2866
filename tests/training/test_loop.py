"""What a run leaves behind: metrics, evaluations, TensorBoard files, traces, its config; and that it learns."""

import json
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from trainers import QuickTrainer

from megajax import threads
from megajax.config import load_config
from megajax.data.indexed import IndexedDataset
from megajax.errors import ThreadError
from megajax.estimate.costs import flops_per_token
from megajax.training.batches import batches
from megajax.training.compiled_steps import CompiledSteps
from megajax.training.loop import Trainer
from megajax.training.profiling import Profile
from megajax.training.trackers import TensorBoardLog

KEYS = {
    "step",
    "time",
    "loss",
    "grad_norm",
    "learning_rate",
    "tokens",
    "step_seconds",
    "tokens_per_second_per_device",
    "tflops_per_second_per_device",
    "mfu",
    "peak_memory_gib",
}
ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path, make_config):
    """(overrides..., devices) → the Trainer of a run that ended well in tmp_path/run."""

    def run(*overrides, devices=1, kind=Trainer) -> Trainer:
        trainer = kind(make_config(f"run.dir={tmp_path / 'run'}", *overrides), jax.devices()[:devices])
        assert trainer.run() == 0
        return trainer

    return run


def lines(trainer) -> list[dict]:
    found = [json.loads(line) for line in (trainer.run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if {"loss", "eval_loss"} & line.keys()]  # not that of the last save


def test_metrics_have_the_fixed_keys_and_fit_together(run):
    trainer = run("run.steps=5", "mesh.data=2", "run.log_interval=2", devices=2)
    logged = lines(trainer)
    assert [line["step"] for line in logged] == [1, 2, 4, 5]
    for line in logged:
        assert set(line) == KEYS
        assert line["tokens"] == line["step"] * 8 * 16
        speed = 8 * 16 / line["step_seconds"] / 2
        assert line["tokens_per_second_per_device"] == pytest.approx(speed)
        teraflops = speed * flops_per_token(trainer.config) / 1e12
        assert line["tflops_per_second_per_device"] == pytest.approx(teraflops)
        assert line["mfu"] is None  # nobody knows this CPU's peak
        assert 0 < line["peak_memory_gib"] < 64


def test_a_run_ends_after_the_step_in_which_a_thread_that_it_needs_has_failed(tmp_path, make_config):
    overrides = f"run.dir={tmp_path / 'run'}", "run.steps=5", "mesh.data=2", "run.log_interval=2"
    trainer = Trainer(make_config(*overrides), jax.devices()[:2], flags=["--given"])
    assert trainer.flags == ["--given"]  # by who has prepared the environment already
    threads.start("a watch", lambda: 1 / 0, needed=True).join()
    with pytest.raises(ThreadError, match="a watch failed .ZeroDivisionError"):
        trainer.run()
    assert trainer.step == 1


class FirstLoss:
    """The loss of a first step, which a run has to wait for."""

    shape, waited = (), 0

    def block_until_ready(self):
        self.waited += 1

    def __array__(self, dtype=None, copy=None):
        return np.float32(2)


class SlowFirstTrainer(QuickTrainer):
    """Its first step has a loss of its own."""

    first = None

    def train_step(self, batch):
        metrics = super().train_step(batch)
        if self.first is None:
            self.first = FirstLoss()
            metrics = metrics | {"loss": self.first}
        return metrics


def test_the_time_of_the_first_step_is_measured_at_its_end(run):
    trainer = run("run.steps=2", kind=SlowFirstTrainer)
    assert trainer.first.waited == 1 and [line["loss"] for line in lines(trainer)] == [2, 1]


def test_an_error_while_host_memory_is_reserved_ends_the_run_before_a_step(tmp_path, make_config):
    trainer = QuickTrainer(make_config(f"run.dir={tmp_path / 'run'}", "run.steps=1"), jax.devices()[:1])
    trainer.saver.reserve_host_memory = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.run()
    assert trainer.step == 0


def test_there_is_no_compiled_module_before_the_first_step():
    assert CompiledSteps(SimpleNamespace(), print).text() == ""


@pytest.mark.smoke
def test_flops_per_token_of_llama3_8b_l8_are_worked_out_by_hand():
    # A layer: query and output 2·4096·32·128, key and value 2·4096·8·128, MLP 3·4096·14336.
    layer = 33_554_432 + 8_388_608 + 176_160_768
    head = 4096 * 128256
    attention = 8 * 8192 * 32 * 128  # L·S·N·H
    expected = 6 * (8 * layer + head) + 6 * attention
    assert expected == 15_231_614_976
    assert flops_per_token(load_config(ROOT / "configs" / "llama3_8b_l8.yaml")) == expected


@pytest.mark.smoke
def test_flops_of_a_window_count_the_keys_that_queries_see(make_config):
    S, W = 4096, 256
    settings = ("batch.sequence_length=4096", "model.num_layers=6", "model.block_pattern=null")
    window = ("model.sliding_window=256", "model.layer_pattern=[local, local, global]")
    # Pairs of a query and a key that it sees; the diagonal counts half, as in S/2 for a whole triangle.
    seen = sum(min(query + 0.5, W - 0.5 * (query >= W)) for query in range(S)) / S
    saved = flops_per_token(make_config(*settings)) - flops_per_token(make_config(*settings, *window))
    assert saved == pytest.approx(4 * 12 * 4 * 8 * (S / 2 - seen), rel=3e-4)  # 4 local layers, N=4, H=8
    wider = flops_per_token(make_config(*settings, "model.sliding_window=5000"))
    assert wider == flops_per_token(make_config(*settings))


def test_flops_of_a_plain_tied_model_are_worked_out_by_hand(make_config):
    # D=32, N=4, K=2, H=8, F=64, V=128, L=1, S=16; two MLP matrices, the tied head still multiplies.
    config = make_config("model.block_pattern=null", "model.activation=gelu", "model.tie_embeddings=true")
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 2 * 32 * 64
    assert flops_per_token(config) == 6 * (layer + 32 * 128) + 6 * 16 * 4 * 8


def test_evaluations_stand_at_their_interval_and_at_the_end(run, text):
    named = f"data.valid_sets=[{{name: valid, prefix: {text}}}]"  # the name of the first split too
    trainer = run("data.split='8,2,0'", named, "run.steps=5", "run.eval_interval=2", "run.eval_steps=1")
    evaluations = [line for line in lines(trainer) if "eval_loss" in line]
    assert [line["step"] for line in evaluations] == [2, 4, 5]
    assert all(set(line) == {"step", "time", "eval_loss", "eval_loss/valid"} for line in evaluations)
    assert trainer.evaluate() == {"loss": evaluations[-1]["eval_loss"]}  # always the same batches
    assert trainer.evaluate("valid/valid") == {"loss": evaluations[-1]["eval_loss/valid"]} != trainer.evaluate()


@pytest.mark.long
def test_a_packed_run_trains_and_evaluates_on_packed_batches(run, capsys):
    packed = ("model.block_pattern=null", "data.reset_attention=true", "data.mask_end_of_document_loss=true")
    trainer = run("data.split='8,2,0'", "run.steps=2", "run.eval_steps=2", "mesh.data=2", *packed, devices=2)
    assert "; documents separate in attention, loss\n" in capsys.readouterr().out
    logged, evaluation = lines(trainer)[-2:]
    assert np.isfinite([logged["loss"], evaluation["eval_loss"]]).all()
    for split in ("train", "valid"):
        source = batches(trainer.program, split, trainer.data[split])
        batch = next(source)
        source.close()
        assert {n: (f.shape, f.dtype, f.sharding) for n, f in batch.items()} == {
            n: (f.shape, f.dtype, f.sharding) for n, f in trainer.program.abstract_batch.items()
        }
        segments, mask = np.asarray(batch["segment_ids"]), np.asarray(batch["loss_mask"])
        assert segments.max() > 0  # the text's documents have 30 to 89 tokens, a sequence 16
        np.testing.assert_array_equal(mask[..., :-1], np.diff(segments) == 0)


def test_nothing_is_evaluated_without_validation_data(run):
    assert not any("eval_loss" in line for line in lines(run("run.steps=2")))


@pytest.mark.long
def test_the_loss_falls_below_the_unigram_entropy_of_the_text(run, text):
    counts = np.array(list(Counter(IndexedDataset(text).tokens.tolist()).values()))
    shares = counts / counts.sum()
    entropy = -(shares * np.log(shares)).sum()
    settings = ("model.block_pattern=null", "run.log_interval=5", "schedule.learning_rate=1e-2")
    trainer = run("data.split='8,2,0'", "run.steps=60", *settings)
    losses = [line["loss"] for line in lines(trainer) if "loss" in line]
    assert losses[0] > entropy > 2 * losses[-1]
    assert lines(trainer)[-1]["eval_loss"] < entropy / 2


def test_the_run_directory_holds_the_config_that_ran(run):
    trainer = run("run.steps=1", "model.rope_theta=5e5", kind=QuickTrainer)
    assert load_config(trainer.run_dir / "config.yaml") == trainer.config


def events(directory: Path) -> Iterator[Any]:
    """The events of all files: records of length, checksum, event, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    for path in directory.glob("events.*"):
        data, start = path.read_bytes(), 0
        while start < len(data):
            (length,) = struct.unpack_from("<Q", data, start)
            yield Event.FromString(data[start + 12 : start + 12 + length])
            start += 16 + length


def scalars(directory: Path) -> set[tuple[str, int]]:
    """(tag, step) of every scalar in the event files."""
    return {(value.tag, event.step) for event in events(directory) for value in event.summary.value}


def test_tensorboard_has_each_line_while_the_run_goes_on(tmp_path):
    log = TensorBoardLog(tmp_path, 0, "run: {}")
    for step in (1, 2):
        log.write(step, {"train/loss": 3.0 / step})
        assert ("train/loss", step) in scalars(tmp_path)
    log.close()


def test_tensorboard_holds_the_numbers_of_metrics(run):
    trainer = run(
        "logging.tensorboard=true",
        "data.split='8,2,0'",
        "run.steps=4",
        "run.log_interval=2",
        "run.eval_interval=4",
        "run.eval_steps=1",
    )
    found = scalars(trainer.run_dir / "tensorboard")
    assert {("train/loss", 2), ("train/loss", 4), ("memory/peak_memory_gib", 4), ("eval/loss", 4)} <= found
    assert ("train/loss", 3) not in found and ("config/text_summary", 0) in found
    assert run("logging.tensorboard=true", "data.split='8,2,0'", "run.steps=5").step == 5
    # TensorBoard leaves out the numbers of earlier files from the step of a start on.
    starts = [event.step for event in events(trainer.run_dir / "tensorboard") if event.session_log.status]
    assert max(starts) == 5  # two starts in one second share a file


def test_lines_after_the_checkpoint_are_dropped_when_a_run_goes_on(run):
    trainer = run("run.steps=3")
    path = trainer.run_dir / "metrics.jsonl"
    before = lines(trainer)
    torn = '{"step": 4, "loss": 9.0}\n{"step": 4, "eval_loss": 9.0}\n{"step": 5, "lo'
    path.write_text(path.read_text() + torn)
    after = lines(run("run.steps=6"))
    assert after[:3] == before
    assert [line["step"] for line in after] == [1, 2, 3, 4, 5, 6]
    assert all(line["loss"] < 9 for line in after)


def traces(trainer) -> list[Path]:
    return list((trainer.run_dir / "profile").rglob("*.xplane.pb"))


class NotingTrainer(Trainer):
    noted: list

    def train_step(self, batch):
        self.noted.append(self.step + 1)
        return super().train_step(batch)


@pytest.mark.long
def test_a_trace_of_the_chosen_steps_is_written(run, monkeypatch):
    noted = NotingTrainer.noted = []
    start, stop = jax.profiler.start_trace, jax.profiler.stop_trace
    monkeypatch.setattr(jax.profiler, "start_trace", lambda *a, **k: (noted.append("start"), start(*a, **k)))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: (noted.append("stop"), stop()))
    trainer = run("run.steps=5", "logging.profile_start=3", "logging.profile_steps=2", kind=NotingTrainer)
    assert noted == [1, 2, "start", 3, 4, "stop", 5]
    assert len(traces(trainer)) == 1


@pytest.mark.long
def test_a_trace_that_the_end_of_the_run_cuts_short_is_written(run):
    try:
        assert len(traces(run("run.steps=3", "logging.profile_start=3"))) == 1
    finally:
        try:
            jax.profiler.stop_trace()  # not left running for other tests
        except RuntimeError:
            pass


def test_what_is_written_beside_a_trace_counts_the_steps_that_it_has(tmp_path, monkeypatch):
    """The run ends after two of the three steps."""
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder, **_: Path(folder).mkdir())
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
    logging = SimpleNamespace(profile_start=2, profile_steps=3)
    program = SimpleNamespace(mesh=SimpleNamespace(devices=np.array(jax.devices()[:4]).reshape(2, 2)))
    run: Any = SimpleNamespace(program=program, state=SimpleNamespace(step=0), note=print)
    run.config = SimpleNamespace(logging=logging, run=SimpleNamespace(dir=str(tmp_path)))
    profile, failed = Profile(run, lambda: "HloModule"), Profile(run, lambda: "HloModule")
    run.step = 1
    failed.before_step(run, {})
    failed.on_end(run)  # no step, so nothing that can be divided among them
    assert not [*(tmp_path / "profile").iterdir()]
    (tmp_path / "profile").rmdir()
    for run.step in range(3):
        profile.before_step(run, {})
        profile.on_step(run)
    profile.on_end(run)
    facts = json.loads((tmp_path / "profile/trace.json").read_text())
    assert facts == {"steps": 2, "devices": 4, "device_kind": "cpu"}


@pytest.mark.long
def test_a_run_that_goes_on_amid_the_traced_steps_goes_on(run):
    run("run.steps=3")
    assert run("run.steps=6", "logging.profile_start=2", "logging.profile_steps=4").step == 6


def test_a_run_in_a_thread_ends_well(run):
    """As in a notebook's background thread, where no signal handler can be set."""
    trainers = []
    thread = threading.Thread(target=lambda: trainers.append(run("run.steps=2")))
    thread.start()
    thread.join()
    assert [trainer.step for trainer in trainers] == [2]
