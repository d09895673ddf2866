"""`megajax.train` in processes that are forked from one which has imported it all: importing takes most of their start.

The server starts no device. For each request it forks a process; `Forked` is the part of `subprocess.Popen` that a
`lab.Run` uses. What jax reads of the environment when it is imported must be that of the server.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

OWN = {"JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"}  # which are read when processes join


class Server:
    """Starts with the first request."""

    def __init__(self):
        self._lock, self._process = threading.Lock(), None

    def start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> "Forked":
        (reading, writing), (ours, theirs) = os.pipe(), socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with self._lock:
            if self._process is None:
                self._socket, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                command = [sys.executable, __file__, str(server.fileno())]
                self._process = subprocess.Popen(command, pass_fds=[server.fileno()])
                server.close()
            request = json.dumps([*arguments]), json.dumps({**environment})
            socket.send_fds(self._socket, ["\n".join(request).encode()], [writing, theirs.fileno()])
        os.close(writing)
        theirs.close()
        return Forked(ours, os.fdopen(reading))

    def close(self) -> None:
        if self._process is not None:
            self._socket.close()
            self._process.wait()


class Forked:
    """A process that the server has forked. The socket says its number, and its status when it has ended."""

    def __init__(self, said: socket.socket, stdout):
        self._said, self._lock = said, threading.Lock()
        self.pid, self.returncode, self.stdout = int(said.recv(100)), None, stdout

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None and select.select([self._said], [], [], 0)[0]:
                self.returncode = int(self._said.recv(100))
                self._said.close()
        return self.returncode

    def wait(self) -> int:
        while self.poll() is None:
            select.select([self._said], [], [], 0.1)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def serve(requests: socket.socket) -> None:
    """Fork for each request until the other end is closed, and say when a process has ended."""
    import megajax.start_checks
    import megajax.training.loop
    import megajax.training.watch  # noqa: F401
    from megajax import train

    warnings.filterwarnings("ignore", message="os.fork")  # jax's: no backend has started, so it has no threads
    before, running = dict(os.environ), {}
    while True:
        while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            said = running.pop(ended[0])
            said.send(str(os.waitstatus_to_exitcode(ended[1])).encode())
            said.close()
        if not select.select([requests], [], [], 0.02 if running else None)[0]:
            continue
        request, files, *_ = socket.recv_fds(requests, 2**20, 2)
        if not request:
            return
        said = socket.socket(fileno=files[1])
        number = os.fork()
        if not number:
            arguments, environment = map(json.loads, request.decode().splitlines())
            for fd in (1, 2):
                os.dup2(files[0], fd)
            for each in (requests, said, *running.values()):
                each.close()
            os.close(files[0])
            others = {name for name, _ in environment.items() ^ before.items() if name.startswith("JAX_")} - OWN
            assert not others, f"{others} must be those of the server"
            os.environ.clear()
            os.environ |= environment
            for path in (Path(folder, "sitecustomize.py") for folder in environment.get("PYTHONPATH", "").split(":")):
                if path.is_file():
                    exec(path.read_text(), {})
            sys.exit(train.main(arguments))
        os.close(files[0])
        said.send(str(number).encode())
        running[number] = said


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
