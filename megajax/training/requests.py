"""The signals that request a stop, known before jax is imported."""

import signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
early = list[int]()  # requests from before the trainer listened, which the thread may read too late


def read_by_a_thread(number: int, _: object) -> None:
    """Handler of the signals that a thread of `megajax.train` reads from a pipe: until the trainer has its own."""
    if number in STOP_SIGNALS:
        early.append(number)
