"""The signals that request a stop, known before jax is imported."""

import signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def read_by_a_thread(*_: object) -> None:
    """Handler of the signals that a thread of `megajax.train` reads from a pipe: until the trainer has its own."""
