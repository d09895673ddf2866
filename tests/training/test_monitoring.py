"""What follows a run: W&B, MLflow, Prometheus, events and the console's text. None of them ends or delays a run."""

import errno
import http.server
import json
import multiprocessing
import re
import shlex
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from megajax.console import BAD_NUMBERS, DONE, INTERRUPTED, LOST, MISTAKE, STOPPED, user_errors
from megajax.errors import ConfigError, InputError, ThreadError
from megajax.schema.tree import leaves
from megajax.training import events, run_lock, trackers
from megajax.training.ending import Ending
from megajax.training.events import check_target
from megajax.training.logs import MetricsLog
from megajax.training.loop import Trainer
from megajax.training.monitoring import Background, Monitoring
from megajax.training.trackers import tag
from megajax.training.watch import Watch


@pytest.fixture
def build(tmp_path, make_config):
    return lambda *overrides: Trainer(
        make_config(f"run.dir={tmp_path / 'run'}", "run.steps=2", "run.log_interval=1", *overrides), jax.devices()[:1]
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def receiver():
    """(the URL of a webhook, the objects that it was sent)."""
    received = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/hook", received
    server.shutdown()
    server.server_close()


TAGS = {name: f"{group}/{name}" for group, names in trackers.GROUPS.items() for name in names if group != "norms"}


def test_each_named_number_of_a_line_is_in_a_group_by_hand():
    marks = test_tags_have_a_group.pytestmark[0].args[1]
    assert {name: tag(name) for name in TAGS} == TAGS and not TAGS.keys() - {name for name, _ in marks}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("loss", "train/loss"),
        ("tflops_per_second_per_device", "throughput/tflops_per_second_per_device"),
        ("text_tokens_per_second_per_device", "throughput/text_tokens_per_second_per_device"),
        ("grad_norm", "train/grad_norm"),
        ("grad_norm/layers/0", "norms/grad_norm/layers/0"),
        ("mtp_loss/module", "train/mtp_loss/module"),
        ("eval_loss/all", "eval/loss/all"),
        ("ema_eval_loss", "eval/ema_loss"),
        ("mfu", "throughput/mfu"),
        ("peak_memory_gib", "memory/peak_memory_gib"),
        ("expert_load_max", "moe/expert_load_max"),
        ("checkpoint_seconds", "checkpoint/seconds"),
        *(
            (name, f"rollback/{name}")
            for name in ("rollback", "bad_step", "bad_loss", "loss_median", "left_out_samples")
        ),
        *((name, f"moe/{name}") for name in ("aux_loss", "router_z_loss", "router_entropy", "idle_experts_max")),
        *((name, f"moe/{name}") for name in ("dropped_tokens_max", "dropped_tokens_mean")),
        *((name, f"throughput/{name}") for name in ("step_seconds", "slowest_process", "work_imbalance")),
        *((name, f"throughput/{name}") for name in ("slowest_own_seconds", "others_own_seconds")),
        *((name, f"throughput/{name}") for name in ("work_imbalance_sequential", "attention_imbalance")),
        *(
            (name, f"throughput/{name}")
            for name in ("image_tokens_per_second_per_device", "tokens_per_second_per_device")
        ),
        ("context_groups", "throughput/context_groups"),
        *((name, f"moe/{name}") for name in ("global_loss", "sequence_loss")),
    ],
)
def test_tags_have_a_group(name, expected):
    assert tag(name) == expected


def test_the_services_get_each_number_of_a_line_by_its_tag(tmp_path, make_config):
    """JSON has no NaN; a norm of each layer is a number of each layer, counted from 0; texts are in the file only."""
    sent = []
    log = MetricsLog(make_config(f"run.dir={tmp_path}"), 0, writer=True, send=lambda *found: sent.append(found))
    nan, inf = float("nan"), float("inf")
    values = {"loss": 2.5, "skipped": 1, "grad_norm": inf, "mfu": None, "slowest_host": "a1", "of_hook/host": "a2"}
    log.write(3, values | {"grad_norm/layers": [0.5, nan], "expert_load": [1.0, nan, 1.5], "weight_norm/head": 4.0})
    log.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    found = json.loads(line, parse_constant=refuse)
    assert abs(found.pop("time") - time.time()) < 60
    lists = {"grad_norm/layers": [0.5, None], "expert_load": [1.0, None, 1.5], "weight_norm/head": 4.0}
    assert found == {"step": 3, **values, "grad_norm": None, **lists}
    (step, numbers), layers = sent[0], "norms/grad_norm/layers"
    assert step == 3 and np.isnan(numbers.pop(f"{layers}/1"))
    expected = {"train/loss": 2.5, "train/skipped": 1, "train/grad_norm": inf, f"{layers}/0": 0.5}
    assert numbers == expected | {"norms/weight_norm/head": 4.0}


@pytest.mark.parametrize("setting", ["wandb=true", "mlflow=http://x"])
def test_a_service_without_its_package_is_refused_at_the_start(build, tmp_path, setting, monkeypatch):
    key = setting.partition("=")[0]
    monkeypatch.setitem(sys.modules, key, None)
    off = {"wandb": "false", "mlflow": "null"}[key]
    with pytest.raises(ConfigError, match=rf"^logging\.{setting} .*\[{key}\]', or set logging\.{key}={off}\.$"):
        build(f"logging.{setting}")
    assert not [*tmp_path.iterdir()]


@pytest.fixture
def mlflow(monkeypatch):
    """(requests, statuses at the end) of a stand-in for the package: 1000 metrics and 100 parameters in a request."""
    requests, ended = [], []

    def log_batch(run, metrics=(), params=()):
        assert run == "r1" and len(metrics) <= 1000 and len(params) <= 100
        requests.append((metrics, params))

    run = SimpleNamespace(info=SimpleNamespace(run_id="r1"))
    client = SimpleNamespace(
        log_batch=log_batch,
        get_experiment_by_name=lambda name: None,
        create_experiment=lambda name: name,
        create_run=lambda experiment, run_name: run,
        set_terminated=lambda run, status: ended.append(status),
        update_run=lambda run, status: ended.append(status),
    )
    entities = SimpleNamespace(Metric=lambda *values: values, Param=lambda *values: values)
    module = SimpleNamespace(MlflowClient=lambda tracking_uri: client, entities=entities)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return requests, ended


def test_mlflow_gets_all_numbers_and_settings_in_requests_of_its_limits(make_config, tmp_path, mlflow):
    config, (requests, ended) = make_config(f"run.dir={tmp_path}", "logging.mlflow=http://x"), mlflow
    tracker, numbers = trackers.MlflowRun(config, lambda text: None), {f"n{i}": i / 2 for i in range(2500)}
    settings = dict(leaves(config.model_dump(mode="json")))
    given = {key for key, value in settings.items() if value != {}}
    assert (
        dict(each for _, params in requests for each in params).keys() == given < settings.keys() and len(given) > 200
    )
    requests.clear()
    tracker.write(7, numbers)
    found = [metric for metrics, _ in requests for metric in metrics]
    assert {name: number for name, number, _, _ in found} == numbers and len(found) == 2500
    assert all(abs(at / 1000 - time.time()) < 60 and step == 7 for _, _, at, step in found)
    tracker.close(False), tracker.close(True)
    assert ended == ["FINISHED", "FAILED"]
    requests.clear(), ended.clear()
    trackers.MlflowRun(config, lambda text: None).close(False)  # a resume goes on with the same run
    assert ended == ["RUNNING", "FINISHED"] and not requests


def test_the_event_of_an_end_has_each_status_also_that_of_a_good_one(make_config, tmp_path):
    config = make_config(f"run.dir={tmp_path}")
    for status in (DONE, STOPPED, MISTAKE, BAD_NUMBERS, LOST, INTERRUPTED):
        assert events.event(config, "end", 3, "text", status)["status"] == status
    found = events.event(config, "spike", 3, "text")
    assert found.keys() == {"event", "run", "run_dir", "host", "step", "time", "text"}
    assert abs(found["time"] - time.time()) < 60


@pytest.mark.parametrize("status", [DONE, STOPPED, MISTAKE, BAD_NUMBERS, LOST, INTERRUPTED])
def test_a_run_that_was_stopped_has_not_failed(make_config, tmp_path, status, mlflow):
    """MLflow's status of a run that ends with each status."""
    monitoring = Monitoring(make_config(f"run.dir={tmp_path}", "logging.mlflow=http://x"), print)
    monitoring.start(print)
    monitoring.end(status, None)
    assert mlflow[1] == ["FINISHED" if status in (DONE, STOPPED) else "FAILED"]


@pytest.mark.parametrize(
    "error",
    [
        InputError("no data: give some."),
        ThreadError("a thread ended."),
        OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl"),
        BrokenPipeError(errno.EPIPE, "Broken pipe"),
        KeyboardInterrupt(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_the_event_of_an_error_has_the_exit_status_of_the_command(make_config, tmp_path, error, monkeypatch):
    monkeypatch.setattr("sys.stdout", (tmp_path / "stdout").open("w"))  # a closed pipe is replaced by /dev/null
    config = make_config(f"run.dir={tmp_path}", f"logging.on_event=tee -a {tmp_path / 'events'}")
    with pytest.raises(SystemExit) as ended, Watch(config) as watch, user_errors():
        watch.stepped(7)
        raise error
    event = json.loads((tmp_path / "events").read_text())
    assert (event["event"], event["step"], event["status"]) == ("end", 7, ended.value.code)
    assert abs(event["time"] - time.time()) < 60 and (str(error) in event["text"] or isinstance(error, OSError))


def test_a_target_that_is_the_mistake_is_not_told_of_it(make_config, tmp_path, capsys):
    config = make_config(
        f"run.dir={tmp_path}", "logging.on_event=no_such_program"
    )  # an earlier start made the directory
    with pytest.raises(SystemExit), Watch(config), user_errors():
        check_target(config)
    assert capsys.readouterr().err.splitlines()[1:] == []


def test_an_event_names_the_run_directory_for_other_working_directories(make_config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = events.event(make_config("run.dir=runs/a", "run.name=b"), "spike", 3, "text")
    assert (found["run_dir"], found["run"], found["step"]) == (str(tmp_path / "runs/a"), "b", 3)


def test_an_end_before_the_first_step_is_told_if_the_directory_is_this_runs(make_config, tmp_path):
    """Not the end of a start that is refused in a new directory, or while another process trains there."""
    run_dir, told = tmp_path / "run", tmp_path / "events"
    config = make_config(f"run.dir={run_dir}", f"logging.on_event=tee -a {told}")

    def end(process: int, owns_run: bool = False) -> bool:
        ending = Ending(config)
        ending.speaks, ending.owns_run = process == 0, owns_run
        ending.tell("end", "no data", MISTAKE)
        found, _ = told.exists(), told.unlink(missing_ok=True)
        return found

    assert not end(0)
    run_dir.mkdir()
    assert end(0) and not end(1)
    with subprocess.Popen(["sleep", "60"]) as other:
        owner = {"process": other.pid, "started": run_lock._started(other.pid)}
        (run_dir / "lock").write_text(json.dumps(run_lock._this_process() | owner))
        assert not end(0)
        assert end(0, owns_run=True)  # the other one trains since this run released the lock
        other.kill()
    assert end(0)


def records_of(log: bytes) -> list[bytes]:
    """The records of W&B's file of a run: LevelDB's log format after 7 bytes of W&B's own."""
    found, position = [b""], 7
    while position + 7 <= len(log):
        left = -position % 2**15  # a record does not cross blocks of 32 KiB
        if 0 < left < 7:
            position += left
            continue
        size, kind = struct.unpack_from("<HB", log, position + 4)
        found[-1] += log[position + 7 : position + 7 + size]
        if kind in (1, 4):  # a whole record, or the last part of one
            found.append(b"")
        position += 7 + size
    return found[:-1]


@pytest.mark.long
@pytest.mark.skipif(find_spec("wandb") is None, reason="the extra wandb is not installed")
def test_wandb_logs_offline_without_a_key_and_goes_on_with_the_same_run(build, tmp_path, monkeypatch, capsys):
    from wandb.proto import wandb_internal_pb2

    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    assert build("logging.wandb=true").run() == 0
    upload = re.search(r"W&B logs offline \(upload it with `wandb sync (.+)`\)", capsys.readouterr().out)
    assert upload and Path(*shlex.split(upload[1])).is_dir()
    assert build("logging.wandb=true", "run.steps=4").run() == 0
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2 and len({file.name for file in files}) == 1  # the same id
    logged, steps_of = {}, {}
    for file in files:
        for data in records_of(file.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            steps_of |= {record.metric.glob_name: record.metric.step_metric} if record.metric.glob_name else {}
            items = {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
            if "train/loss" in items:
                logged[items["step"]] = items["train/loss"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert logged == {line["step"]: line["loss"] for line in lines if "loss" in line} and len(logged) == 4
    assert steps_of == {"*": "step"}  # else W&B counts the lines, and a rollback comes to earlier steps


@pytest.mark.skipif(find_spec("mlflow") is None, reason="the extra mlflow is not installed")
def test_mlflow_has_the_numbers_the_config_and_the_status(build, tmp_path):
    import mlflow

    uri = f"logging.mlflow=file:{tmp_path / 'mlruns'}"
    assert build(uri, "logging.mlflow_experiment=tiny").run() == 0
    trainer = build(uri, "logging.mlflow_experiment=tiny", "run.steps=3")
    trainer.run()
    client = mlflow.MlflowClient(tracking_uri=f"file:{tmp_path / 'mlruns'}")
    found = client.get_run((tmp_path / "run" / "mlflow_id").read_text())
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert [(entry.step, entry.value) for entry in history] == [(a["step"], a["loss"]) for a in lines if "loss" in a]
    times = [(entry.timestamp / 1000, line["time"]) for entry, line in zip(history, lines, strict=False)]
    assert all(abs(shown - logged) < 60 for shown, logged in times)  # seconds since 1970
    assert found.info.status == "FINISHED" and found.data.params["batch.sequence_length"] == "16"
    assert client.get_experiment(found.info.experiment_id).name == "tiny"
    trackers.MlflowRun(trainer.config, print).close(failed=True)
    assert client.get_run(found.info.run_id).info.status == "FAILED"


def test_an_mlflow_server_that_is_gone_refuses_a_new_run_but_not_one_that_resumes(make_config, tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    config = make_config(f"run.dir={tmp_path}", f"logging.mlflow=http://127.0.0.1:{free_port()}")
    with pytest.raises(InputError, match="logging.mlflow=http://127.0.0.1:.* cannot be used .*: start its server"):
        list(trackers.start_trackers(config, print))
    (tmp_path / "mlflow_id").write_text("0123")
    said = []
    assert list(trackers.start_trackers(config, said.append)) == []
    assert "the run goes on without it" in said[0]


def test_prometheus_reads_the_newest_numbers(build, monkeypatch, capsys):
    port, page = free_port(), []
    end = trackers.PrometheusPage.close

    def read(self, failed):
        page.append(urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode())
        end(self, failed)

    monkeypatch.setattr(trackers.PrometheusPage, "close", read)
    trainer = build(f"logging.prometheus_port={port}")
    assert trainer.run() == 0
    assert f"Prometheus: http://127.0.0.1:{port}/metrics\n" in capsys.readouterr().out
    numbers = dict(line.rsplit(" ", 1) for line in page[0].splitlines() if not line.startswith("#"))
    lines = [json.loads(line) for line in (trainer.run_dir / "metrics.jsonl").read_text().splitlines()]
    loss = [line["loss"] for line in lines if "loss" in line][-1]
    run = trainer.config.run.name
    assert float(numbers[f'megajax_step{{run="{run}"}}']) == 2
    assert float(numbers[f'megajax_train_loss{{run="{run}"}}']) == loss
    assert abs(float(numbers[f'megajax_logged_timestamp_seconds{{run="{run}"}}']) - time.time()) < 60
    assert f'megajax_checkpoint_seconds{{run="{run}"}}' in numbers


def test_a_port_in_use_is_a_sentence_before_anything_is_compiled(build, capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        trainer = build(f"logging.prometheus_port={port}")
        with pytest.raises(InputError, match=f"logging.prometheus_port={port} .* cannot be opened .*another port"):
            trainer.run()
    assert "compiling" not in capsys.readouterr().out


def test_events_reach_a_webhook_with_the_end_of_the_run(build, receiver, monkeypatch):
    url, received = receiver
    monkeypatch.setenv("HOOK", url)
    trainer = build("logging.on_event=$HOOK", "run.name=tiny")
    assert trainer.run() == 0
    (event,) = received
    assert (event["event"], event["run"], event["step"], event["status"]) == ("end", "tiny", 2, 0)
    assert event["text"].startswith("done: at step 2")
    assert url not in (trainer.run_dir / "config.yaml").read_text()


def test_events_reach_a_command_with_the_error(build, tmp_path):
    script = tmp_path / "hook.py"
    script.write_text(f"import sys; open({str(tmp_path / 'events')!r}, 'a').write(sys.stdin.read() + chr(10))")
    trainer = build(f"logging.on_event={sys.executable} {script}")

    def fail():
        raise InputError("a shard is gone.")

    trainer.next_batch = fail
    with pytest.raises(InputError, match="a shard is gone"):
        trainer.run()
    event = json.loads((tmp_path / "events").read_text())
    assert (event["event"], event["status"]) == ("end", 2) and "a shard is gone" in event["text"]
    assert "megajax: error: a shard is gone." in (trainer.run_dir / "console.log").read_text()


def test_a_command_that_fails_is_named_by_the_end_of_its_errors():
    written = "a" * 300 + "the cause"
    command = shlex.join([sys.executable, "-S", "-c", f"raise SystemExit({written!r})"])
    config: Any = SimpleNamespace(logging=SimpleNamespace(on_event=command))
    with pytest.raises(RuntimeError) as error:
        events.deliver(config, {"event": "end"})
    assert str(error.value) == f"status 1: {written[-200:]}"


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("no_such_program --flag", "logging.on_event .* no_such_program, which is not found"),
        (__file__, "logging.on_event .*test_monitoring.py, which is not executable: chmod"),
        ("cat 'x", "logging.on_event .* is not a command \\(cat 'x\\): write it as in a shell"),
        ("$NO_SUCH_VARIABLE", "logging.on_event .* variable that is not set"),
    ],
    ids=["no program", "no permission", "a quote", "a variable"],
)
def test_a_target_that_cannot_work_is_refused(build, target, sentence):
    with pytest.raises(ConfigError, match=sentence):
        build(f"logging.on_event={target}")


def test_a_service_that_fails_is_named_once_and_one_that_hangs_is_left():
    said, release = [], threading.Event()
    services = Background(said.append)
    for name in ("it", "its brother") * 2:
        services.submit(name, lambda: 1 / 0)
    services.submit("other", release.wait)
    services.close(0.2)
    assert "it failed (division by zero)" in said[0] and "its brother failed (division by zero)" in said[1]
    assert "did not answer within 0.2 s" in said[-1] and len(said) == 3
    release.set()


@pytest.mark.long
def test_a_killed_reader_is_a_lost_process(build, capsys):
    earlier = multiprocessing.active_children()
    trainer = build("data.workers=1", "data.prefetch=1")
    trainer.next_batch()
    (reader,) = (process for process in multiprocessing.active_children() if process not in earlier)
    reader.kill()
    with pytest.raises(SystemExit) as ended, user_errors():
        for _ in range(100):
            trainer.next_batch()
    error = capsys.readouterr().err
    assert ended.value.code == LOST and "data.workers=1 was ended (exit code -9)" in error and "resume" in error


def test_the_consoles_text_is_kept_start_by_start(build, capsys):
    trainer = build()
    trainer.run()
    build("run.steps=3").run()
    printed, kept = capsys.readouterr().out, (trainer.run_dir / "console.log").read_text()
    assert [line for line in kept.splitlines() if not line.startswith("--- ")] == printed.splitlines()
    assert kept.count("--- ") == 2
    with user_errors():  # a command, whose config is read before there is a directory
        warnings.warn("of the config", stacklevel=1)
        build("run.steps=4").run()
    lines = (trainer.run_dir / "console.log").read_text().splitlines()[len(kept.splitlines()) :]
    assert lines[0].startswith("--- ") and lines[1] == "megajax: warning: of the config"
