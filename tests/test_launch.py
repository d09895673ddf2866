"""The launcher: which ends are restarted, on which devices, signals, output, and that it leaves no process behind."""

import contextlib
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from etils.epath import backend
from fsspec import AbstractFileSystem
from fsspec.registry import _registry

from megajax import launch
from megajax.config import load_config
from megajax.errors import ConfigError, InputError
from megajax.training.local_saves import RUN_ID, tier_name

CONFIG = """
model: {num_layers: 1, hidden_size: 8, num_heads: 2, vocab_size: 9}
mesh: {data: -1, tensor: 2}
batch: {global_size: 12, sequence_length: 4}
data: {kind: synthetic}
"""
SHORT = launch.Waits(longest_pause=0)
CRASH = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture(autouse=True)
def survives_signals():
    """A signal that the launcher does not take fails the test, instead of ending pytest."""

    def fail(number, _):
        pytest.fail(f"nobody handled {signal.Signals(number).name}")

    before = {number: signal.signal(number, fail) for number in launch.FORWARDED}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(CONFIG)
    (tmp_path / "run").mkdir()
    return load_config(path, [f"run.dir={tmp_path / 'run'}", f"logging.on_event=tee -a {tmp_path / 'events'}"])


@pytest.fixture
def devices(monkeypatch):
    """(number) → this host has so many CPU devices from now on."""
    return lambda number: monkeypatch.setenv("XLA_FLAGS", f"{launch.CPU_DEVICES}={number}")


@pytest.fixture
def gpus(monkeypatch, tmp_path):
    """(output of `nvidia-smi -L`) → the driver's command prints it from now on."""

    def gpus(listed: str):
        program = tmp_path / "bin/nvidia-smi"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{listed}END\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent), prepend=":")

    return gpus


@pytest.fixture
def run(config, devices, capfd):
    """(ends, devices=[2], **settings) → (exit status, number of starts, stderr).

    Start n runs the Python code `ends[n]` in each process, or exits with that number, after it `left[n + 1]` of the
    first `left[0]` devices remain. `{save}` in the code saves a checkpoint of the next step.
    """

    def run(*ends, left=(2,), processes=1, max_restarts=3, max_minutes=None, config=config, waits=SHORT):
        commands = itertools.count()
        devices(left[0])
        section = config.run.model_copy(update={"max_minutes": max_minutes})
        config = config.model_copy(update={"run": section})
        launcher = launch.Launcher(config, [], processes, max_restarts, waits)

        def command():
            start = next(commands) // processes
            devices(left[min(start + 1, len(left) - 1)])
            directory = Path(config.run.dir, "checkpoints", str(start + 1))
            save = f"import os; os.makedirs({str(directory)!r}, exist_ok=True)"
            end = ends[start]
            code = f"raise SystemExit({end})" if isinstance(end, int) else end.replace("{save}", save)
            return [sys.executable, "-S", "-c", code]

        launcher.command = command
        status = launcher.run()
        run.output, errors = capfd.readouterr()
        return status, next(commands) // processes, errors

    return run


@pytest.mark.parametrize("local", [True, False])
def test_a_local_checkpoint_is_progress(config, tmp_path, run, local, monkeypatch):
    monkeypatch.chdir(tmp_path)
    section = config.checkpoint.model_copy(update={"local_dir": "fast" if local else None})
    own = {"checkpoint": section, "run": config.run.model_copy(update={"dir": "run"})}
    (tmp_path / "run/checkpoints/4").mkdir(parents=True)
    (tmp_path / "run" / RUN_ID).write_text("abc")
    for run_id, step in (("abc", "6"), ("abc", "8.partial"), ("another", "9")):
        (tmp_path / "fast" / tier_name(tmp_path / "run", run_id) / "process-0" / step).mkdir(parents=True)
    errors = run(4, 0, config=config.model_copy(update=own))[2]
    assert f"the newest checkpoint is of step {6 if local else 4}\n" in errors


@pytest.mark.parametrize("status", [0, 2, 3, 130])
def test_an_end_that_a_restart_would_repeat_is_passed_on(run, status):
    assert run(status) == (status, 1, "")


@pytest.mark.parametrize("end", [1, 4, 134, 75, CRASH], ids=str)
def test_a_crash_a_lost_peer_and_a_stop_that_the_launcher_did_not_ask_for_are_restarted(run, end, tmp_path):
    """A process tells of its end itself, unless a signal ends it."""
    status, starts, errors = run(end, 0)
    assert (status, starts) == (0, 2)
    assert "restart in 0 s on 2 devices; there is no checkpoint yet" in errors
    assert ("was ended by SIGKILL" in errors) == (end == CRASH) == (tmp_path / "events").exists()


def test_a_run_is_restarting_until_a_process_has_the_lock(run, config):
    sign = Path(config.run.dir, "restarting")
    sees_the_sign = f"import os; raise SystemExit(0 if os.path.exists({str(sign)!r}) else 2)"
    assert run(sees_the_sign)[0] == 2
    assert run(4, sees_the_sign)[:2] == (0, 2) and not sign.exists()


def test_a_run_is_restarting_though_its_other_processes_have_not_ended_yet(run, config, tmp_path):
    """Process 0 loses the lock when a collective fails, seconds before it has found out why and ends."""
    sign, seen = Path(config.run.dir, "restarting"), tmp_path / "seen"
    waits = (
        "import os, time\n"
        "if os.environ['JAX_PROCESS_ID'] == '1': os._exit(4)\n"
        f"while not os.path.exists({str(sign)!r}): time.sleep(0.01)\n"
        f"open({str(seen)!r}, 'w'); os._exit(4)"
    )
    assert run(waits, 0, processes=2)[:2] == (0, 2) and seen.exists()


def test_the_end_of_the_time_limit_is_passed_on(run):
    assert run(75, max_minutes=1)[:2] == (75, 1)


def test_it_gives_up_after_crashes_without_progress_and_a_checkpoint_resets_their_number(run):
    assert run(4, 4, CRASH, max_restarts=2)[:2] == (137, 3)
    assert run(4, 75, 75, 4, CRASH, max_restarts=2)[:2] == (137, 5)  # stops on request do not count
    status, starts, errors = run("{save}; raise SystemExit(4)", 4, "{save}; raise SystemExit(4)", 4, 4, max_restarts=2)
    assert (status, starts) == (4, 5)
    assert "restart in 0 s on 2 devices; the newest checkpoint is of step 3" in errors
    assert "giving up: 3 starts ended early since the checkpoint of step 3 (--max-restarts=2)" in errors


def test_a_crash_is_no_progress_while_the_bucket_of_the_checkpoints_does_not_answer(run, config, monkeypatch):
    class Silent(AbstractFileSystem):
        def ls(self, path, **_):
            raise ConnectionError("no route to host")

    monkeypatch.setitem(_registry, "gs", Silent)
    monkeypatch.setattr(backend.fsspec_backend, "_get_filesystem", lambda name: Silent())
    folder = str(Path(config.run.dir, "checkpoints"))
    moves = f"os.rename({folder!r}, {folder!r} + '-away'); open({folder!r}, 'w').write('gs://b/x')"
    status, starts, errors = run("{save}; os._exit(4)", f"import os; {moves}; os._exit(4)", 0, max_restarts=1)
    assert (status, starts) == (4, 2) and "gs://b/x" in errors and "no route to host" in errors
    assert "giving up: 2 starts ended early since the checkpoint of step 1 (--max-restarts=1)" in errors


def test_a_process_with_a_mistake_is_not_restarted_when_it_takes_others_with_it(run):
    code = "import os, time; os.environ['JAX_PROCESS_ID'] == '1' and os._exit(2); time.sleep(0.5); os._exit(134)"
    assert run(code, processes=2)[:2] == (2, 1)


@pytest.mark.parametrize(("statuses", "cause"), [((134, 2), 1), ((2, 134), 0), ((0, 134), 1), ((4, 75, 2), 2)])
def test_of_processes_that_end_together_one_with_a_mistake_is_the_cause(config, devices, statuses, cause):
    devices(len(statuses))
    launcher = launch.Launcher(config, [], len(statuses), 0, SHORT)
    launcher._sign = SimpleNamespace(renew=lambda: None, give=lambda: None)  # type: ignore[assignment]
    children = [
        SimpleNamespace(index=i, process=SimpleNamespace(returncode=s), has_ended=lambda: True)
        for i, s in enumerate(statuses)
    ]
    first = launcher._wait(children, SimpleNamespace(copy=lambda _: None))  # type: ignore[arg-type]
    assert first is children[cause]


def test_the_survivors_of_a_crash_are_ended_and_the_event_names_the_cause(run, tmp_path):
    begin = time.monotonic()
    code = "import os, time; os.environ['JAX_PROCESS_ID'] == '1' and os.abort(); time.sleep(60)"
    assert run(code, 0, processes=2, waits=SHORT._replace(crash=0.1))[:2] == (0, 2)
    assert time.monotonic() - begin < 20
    event = json.loads((tmp_path / "events").read_text())
    assert (event["event"], event["status"], event["text"]) == ("lost", 134, "process 1 was ended by SIGABRT.")


def test_the_event_of_a_lost_process_0_is_that_of_process_1_if_it_could_send_one(run, tmp_path):
    code = "import os, time; os.environ['JAX_PROCESS_ID'] == '0' and os.abort(); time.sleep(0.2); os._exit({})"
    assert run(code.format(4), 0, processes=2)[:2] == (0, 2) and not (tmp_path / "events").exists()
    assert run(code.format(1), 0, processes=2)[:2] == (0, 2) and (tmp_path / "events").exists()


def test_a_restart_uses_as_many_of_the_remaining_devices_as_the_mesh_and_the_batch_allow(run, config):
    status, starts, errors = run(4, 0, left=(8, 7))
    assert (status, starts) == (0, 2) and "1 of 8 devices is gone" in errors and "on 6 devices" in errors
    assert len(launch.usable_devices(config, list("0123456"), 0)) == 6
    status, starts, errors = run(4, left=(8, 1))  # mesh.tensor=2 needs two
    assert (status, starts) == (4, 1) and "no restart" in errors and "mesh.tensor=2" in errors
    with pytest.raises(ConfigError, match="no device of this host is left"):
        launch.usable_devices(config, [], 1)


@pytest.mark.parametrize(("devices", "wanted", "number"), [(8, 1, 1), (8, 0, 8), (6, 4, 3), (7, 4, 1)])
def test_processes_share_the_devices_evenly(devices, wanted, number):
    assert launch.number_of_processes(devices, wanted) == number


def test_each_process_gets_its_own_devices_and_the_coordinator_listens_on_this_host_only(monkeypatch):
    first, second = launch.child_environments(["GPU-a", "GPU-b", "GPU-c", "GPU-d"], 2)
    assert (first["JAX_LOCAL_DEVICE_IDS"], second["JAX_LOCAL_DEVICE_IDS"]) == ("0,1", "2,3")
    assert first["CUDA_VISIBLE_DEVICES"] == second["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b,GPU-c,GPU-d"
    assert [env["JAX_PROCESS_ID"] for env in (first, second)] == ["0", "1"] and first["JAX_NUM_PROCESSES"] == "2"
    address = first["JAX_COORDINATOR_ADDRESS"]
    assert address.startswith("127.0.0.1:") and second["JAX_COORDINATOR_BIND_ADDRESS"] == address
    monkeypatch.setenv("XLA_FLAGS", "--a=1 --xla_force_host_platform_device_count=8")
    assert launch.child_environments(list("012345"), 2)[1]["XLA_FLAGS"].endswith("--a=1 " + launch.CPU_DEVICES + "=3")
    assert "JAX_NUM_PROCESSES" not in launch.child_environments(["0"], 1)[0]


LISTED = """GPU 0: NVIDIA H200 (UUID: GPU-1111aaaa-0000)
Unable to determine the device handle for gpu 0000:5D:00.0: GPU is lost.  Reboot the system to recover this GPU
GPU 2: NVIDIA H200 (UUID: GPU-3333cccc-0000)
"""


@pytest.mark.parametrize(
    ("environment", "working"),
    [
        *(
            ({"JAX_PLATFORMS": named} if named else {}, ["GPU-1111aaaa-0000", "GPU-3333cccc-0000"])
            for named in ("", "cuda", "gpu", "cuda,cpu")
        ),
        ({"CUDA_VISIBLE_DEVICES": "2,1"}, ["GPU-3333cccc-0000"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-3333,GPU-1111"}, ["GPU-3333cccc-0000", "GPU-1111aaaa-0000"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-"}, []),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--x {launch.CPU_DEVICES}=3"}, ["0", "1", "2"]),
        # Of two flags XLA takes the last
        ({"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{launch.CPU_DEVICES}=3 {launch.CPU_DEVICES}=2"}, ["0", "1"]),
        ({"JAX_PLATFORMS": "cpu"}, ["0"]),
    ],
    ids=str,
)
def test_devices_that_work_are_those_that_the_driver_lists(environment, working, gpus):
    gpus(LISTED)
    assert launch.working_devices(environment) == working


def test_processes_that_cannot_share_the_devices_are_refused(config, devices, gpus, monkeypatch):
    devices(4)
    with pytest.raises(InputError, match="--processes=3 does not divide the 4 devices"):
        launch.Launcher(config, [], 3, 1)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    gpus("")
    with pytest.raises(InputError, match="no GPU of this host answers"):
        launch.Launcher(config, [], 1, 1)


# The largest number with which a process is alone: jax's own variables are set for processes of a cluster only.
ALONE = {"JAX_NUM_PROCESSES": 0, "SLURM_NTASKS": 1, "OMPI_COMM_WORLD_SIZE": 1}


@pytest.mark.parametrize("variable", ALONE)
def test_a_process_of_a_cluster_is_refused_and_one_that_is_alone_is_not(variable, monkeypatch, capsys):
    def answer(value) -> str:
        monkeypatch.setenv(variable, str(value))
        with pytest.raises(SystemExit) as stopped:
            launch.main(["--", "none.yaml"])
        assert stopped.value.code == 2
        return capsys.readouterr().err

    assert "config file none.yaml does not exist" in answer(ALONE[variable])
    assert f"{variable}={ALONE[variable] + 1}: this command starts" in answer(ALONE[variable] + 1)
    assert f"{variable}=two is not a whole number" in answer("two")


def test_lines_of_several_processes_begin_with_their_number(run, capfd):
    status, _, errors = run("import sys; print('one\\ntwo'); print('end', end='', file=sys.stderr)", 0, processes=2)
    assert status == 0 and sorted(errors.splitlines()) == ["[0] end", "[1] end"]
    assert sorted(run.output.splitlines()) == ["[0] one", "[0] two", "[1] one", "[1] two"]


def test_a_foreign_process_that_keeps_the_output_open_does_not_hold_the_launcher(run, tmp_path):
    note = tmp_path / "pid"
    code = (
        "import subprocess, sys\n"
        "other = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        f"print('said', flush=True); open({str(note)!r}, 'a').write(f'{{other.pid}} ')"
    )
    begin = time.monotonic()
    try:
        assert run(code, processes=2, waits=SHORT._replace(drain=0.2))[:2] == (0, 1)
    finally:
        for process in note.read_text().split():
            os.kill(int(process), signal.SIGKILL)
    assert time.monotonic() - begin < 30 and sorted(run.output.splitlines()) == ["[0] said", "[1] said"]


class Signalling(io.StringIO):
    """A stderr with which the line about a restart brings a signal."""

    number: int

    def write(self, text: str) -> int:
        if "restart in" in text:
            signal.raise_signal(self.number)
        return super().write(text)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_in_the_pause_before_a_restart_ends_the_launcher(run, number, status):
    with contextlib.redirect_stderr(Signalling()) as errors:
        errors.number = number
        assert run(4, waits=launch.Waits())[:2] == (status, 1)
    assert "restart in 1 s on 2 devices" in errors.getvalue()


def test_the_pause_before_a_restart_is_as_long_as_it_says(run):
    tells = "import time; print(time.monotonic(), flush=True); raise SystemExit"
    assert run(f"{tells}(4)", f"{tells}(0)", waits=launch.Waits(longest_pause=0.2))[:2] == (0, 2)
    ended, started = map(float, run.output.split())
    assert started - ended > 0.2


def test_the_workers_of_a_process_end_with_it_though_a_signal_was_forwarded_after_its_end(run, tmp_path):
    note = tmp_path / "pid"
    code = (
        "import os, signal, subprocess\n"
        f"worker = subprocess.Popen(['sleep', '60']); open({str(note)!r}, 'w').write(str(worker.pid))\n"
        "os.kill(os.getppid(), signal.SIGTERM); os._exit(75)"
    )
    assert run(code)[:2] == (75, 1)
    end = time.monotonic() + 20
    while running(int(note.read_text())) and time.monotonic() < end:
        time.sleep(0.01)
    assert not running(int(note.read_text()))


@pytest.mark.parametrize(("number", "end", "status"), [("TERM", 75, 75), ("USR1", 75, 75), ("INT", 130, 130)])
def test_signals_are_forwarded_and_the_answer_is_not_restarted(run, tmp_path, number, end, status):
    ready = tmp_path / "ready"
    code = (
        f"import os, signal, time\nsignal.signal(signal.SIG{number}, lambda *_: os._exit({end}))\n"
        f"open({str(ready)!r}, 'w').close()\ntime.sleep(60)"
    )

    def send():
        while not ready.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), getattr(signal, f"SIG{number}"))

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    assert run(code)[:2] == (status, 1)
    thread.join()


def test_a_process_that_a_forwarded_signal_ends_before_its_first_step_was_stopped_on_request(run, tmp_path):
    assert run("import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)")[:2] == (75, 1)
    assert not (tmp_path / "events").exists(), "nobody needs to be told of it"


# A launcher whose process waits for ever, with a worker that does too.
WAITING = """
import multiprocessing, sys, time, types
from megajax.data.workers import end_with_parent

def worker():
    end_with_parent()
    time.sleep(60)

def train(_):
    process = multiprocessing.get_context("spawn").Process(target=worker)
    process.start()
    print("started", process.pid, flush=True)
    time.sleep(60)

if __name__ == "__main__":
    from megajax import launch  # not in the worker, which imports this file
    from megajax.config import load_config

    if "--child" in sys.argv:
        sys.modules["megajax.train"] = types.SimpleNamespace(main=train)  # it would import jax
        sys.exit(launch.main(sys.argv[1:]))
    launcher = launch.Launcher(load_config(sys.argv[1]), [sys.argv[1]], 1, 0)
    command = launcher.command()
    launcher.command = lambda: [command[0], __file__, *command[3:]]
    sys.exit(launcher.run())
"""


def running(process: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_process_is_left_when_the_launcher_is_killed(config, tmp_path):
    script = tmp_path / "waiting.py"
    script.write_text(WAITING)
    launcher = subprocess.Popen([sys.executable, script, tmp_path / "tiny.yaml"], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    worker = int(launcher.stdout.readline().split()[1])
    child = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
    assert child != launcher.pid and running(child) and running(worker)
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    end = time.monotonic() + 20
    while (running(child) or running(worker)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not running(child) and not running(worker)
