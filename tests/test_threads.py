"""A background thread whose work fails is a line at once, and the end of the run if the run needs it."""

import ast
import multiprocessing
import re
import socket
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from megajax import threads
from megajax.cluster import Cluster, relay, standing_for
from megajax.cluster.peers import Peers
from megajax.console import user_errors
from megajax.data import workers
from megajax.errors import InputError, ThreadError
from megajax.training import run_lock, watch
from megajax.training.gpu_health import GpuHealth
from megajax.training.monitoring import Background
from megajax.training.run_lock import RunLock
from megajax.training.stop_signals import Agreement
from megajax.training.watch import Watch

PACKAGE = Path(threads.__file__).parent


def fail(*_: object, **__: object) -> None:
    raise KeyError("what nobody expects")


class Broken:
    """An object of which everything fails."""

    def __getattr__(self, name: str):
        raise KeyError("what nobody expects")


SECOND = Cluster(1, 2, Broken())


def watching(tmp_path, monkeypatch) -> str:
    monkeypatch.setattr(watch, "TICK", 0.01)
    Watch(types.SimpleNamespace(run=Broken())).__enter__()  # type: ignore[arg-type]
    return "the watch over hangs"


def exchanging(tmp_path, monkeypatch) -> str:
    Peers(SECOND, timeout=1)
    return "the watch over the other processes"


def beating(tmp_path, monkeypatch) -> str:
    monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 0.01)
    lock = RunLock(tmp_path)
    lock.acquire(print)
    monkeypatch.setattr(lock, "path", Broken())
    return "the sign of life"


def agreeing(tmp_path, monkeypatch) -> str:
    with standing_for(SECOND):
        Agreement(0)
    return "the agreement on a stop"


def relaying(tmp_path, monkeypatch) -> str:
    name = relay.relay("host:no port").partition(":")[2]
    socket.socket(socket.AF_UNIX).connect(f"\0{name}")
    return "the relay to host"


def serving(tmp_path, monkeypatch) -> str:
    Background(fail).submit("a service", fail)
    return "the thread of W&B, MLflow and on_event"


def orphaned(tmp_path, monkeypatch) -> str:
    monkeypatch.setattr(multiprocessing, "parent_process", Broken)
    workers.end_with_parent()
    return "the wait for the end of the trainer"


def reading_gpus(tmp_path, monkeypatch) -> str:
    health = GpuHealth()
    health._nvml, health._gpus = types.SimpleNamespace(NVMLError=OSError), {"GPU-1": 0}
    health.on_log(None, 1, {})
    return "the watch over the GPUs"


NEEDED = (watching, exchanging, beating, agreeing, relaying)
OTHERS = (serving, orphaned, reading_gpus)


def wait_for(found: Callable[[], str]) -> str:
    end = time.monotonic() + 10
    while not (text := found()) and time.monotonic() < end:
        time.sleep(0.01)
    return text


@pytest.mark.parametrize("begin", [*NEEDED, *OTHERS], ids=lambda begin: begin.__name__)
def test_the_failure_of_each_threads_work_is_seen(begin, tmp_path, monkeypatch, capsys):
    name = begin(tmp_path, monkeypatch)
    line = wait_for(lambda: capsys.readouterr().err)
    assert line.startswith(f"megajax: warning: {name}") and line.count("\n") == 1 and "Error" in line
    if begin in NEEDED:
        with pytest.raises(ThreadError, match="start the same command again to resume"):
            threads.check()
    threads.check()  # raised once, or not at all


def test_the_end_of_a_run_by_a_thread_is_a_sentence_with_the_status_of_a_crash(capsys):
    """The launcher starts it again, as after no mistake."""
    threads.start("a watch", fail, needed=True).join()
    with pytest.raises(SystemExit) as end, user_errors():
        threads.check()
    assert end.value.code == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("megajax: error: a watch failed (KeyError: ")


def sources() -> dict[str, str]:
    return {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}


def test_no_other_module_starts_a_thread():
    """`threading.Thread` would lose an error."""
    starts = re.compile(r"\b(Thread|Timer|start_new_thread|run_in_executor|to_thread)\(")
    assert [name for name, text in sources().items() if starts.search(text)] == ["threads.py"]


def test_the_result_of_each_executor_s_work_is_asked_for_or_watched():
    """The error of a future that nobody keeps is unseen. `Background` is no executor: it notes errors itself."""
    kept, discarded = set(), set()
    for name, text in sources().items():
        for node in ast.walk(ast.parse(text)) if "submit" in text else ():
            call = node.value if isinstance(node, ast.Expr) else node
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "submit":
                (discarded if isinstance(node, ast.Expr) else kept).add(name)
        if name in kept - discarded:
            assert any(asks in text for asks in (".result()", "in_order(", "threads.watched(")), name
    assert "training/loop.py" in kept and "data/remote.py" in kept
    assert discarded == {"training/monitoring.py"} and "Background(" in sources()["training/monitoring.py"]


def test_the_error_of_a_watched_future_is_a_line_and_a_cancelled_one_is_none(capsys):
    failed, cancelled, done = Future(), Future(), Future()
    for future, name in ((failed, "the first"), (cancelled, "the second"), (done, "the third")):
        threads.watched(future, name)
    failed.set_exception(ValueError("no"))
    cancelled.cancel()
    done.set_result(None)
    assert capsys.readouterr().err == "megajax: warning: the first failed (ValueError: no)\n"


def test_the_failure_of_a_library_s_thread_is_one_line(capsys):
    with user_errors():
        libraries_own = threading.Thread(target=fail, name="of a server")
        libraries_own.start()
        libraries_own.join()
    assert capsys.readouterr().err.startswith("megajax: warning: the thread of a server failed (KeyError: ")


def test_results_before_an_error_of_the_values_come_first():
    def lines():
        yield from range(5)
        raise InputError("a bad line")

    with ThreadPoolExecutor(2) as pool:
        for ahead in (1, 3, 100):
            results = workers.in_order(lambda line: pool.submit(str, line), lines(), ahead)
            assert [next(results) for _ in range(5)] == [*"01234"]
            with pytest.raises(InputError, match="a bad line"):
                next(results)
