"""The connection to jax's coordinator, the service in process 0 that joins the processes of a run.

jax's client aborts its process with a C++ stack trace as soon as this connection breaks, so when process 0 dies. The
client therefore connects to a relay in its own process, which keeps the client's side open; `peers.py` notices
the loss and explains it.
"""

import contextlib
import functools
import os
import socket
import threading
from collections.abc import Callable

from megajax import threads

LOST = threading.Event()  # set when the coordinator has closed a connection


def relay(address: str) -> str:
    """Start a relay to `host:port`; the address that a gRPC client in this process connects to instead.

    It is a socket without a file, which proxies of the environment do not concern.
    """
    host, _, port = address.rpartition(":")
    name = f"megajax-{os.getpid()}-{threading.get_native_id()}-{os.urandom(8).hex()}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{name}")
    listener.listen()

    def serve() -> None:
        while True:
            client = listener.accept()[0]
            try:
                service = socket.create_connection((host.strip("[]"), int(port)))
            except OSError:
                client.close()  # not there yet: the client tries again
                continue
            service.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            left = threading.Event()  # set when the client has closed the connection
            carry = functools.partial(threads.start, f"the connection to {address}", _carry, needed=True)
            carry(client, service, lambda left=left, service=service: _leave(left, service))
            carry(service, client, lambda left=left: left.is_set() or LOST.set())

    threads.start(f"the relay to {address}", serve, needed=True)
    return f"unix-abstract:{name}"


def _carry(source: socket.socket, target: socket.socket, at_end: Callable[[], None]) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(2**16):
            target.sendall(data)
    at_end()


def _leave(left: threading.Event, service: socket.socket) -> None:
    left.set()
    with contextlib.suppress(OSError):
        service.shutdown(socket.SHUT_RDWR)
