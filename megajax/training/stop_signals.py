"""Requests to stop: SIGTERM, SIGUSR1 and Ctrl-C."""

import contextlib
import signal
import sys

import jax
import numpy as np


class StopSignals:
    """SIGTERM, SIGUSR1 and a first Ctrl-C request a stop with a checkpoint while this context is open.

    After the first Ctrl-C the handler from before the context is active again.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self):
        self._asked = False

    def __enter__(self) -> "StopSignals":
        self._before = {}
        self._asked = False
        with contextlib.suppress(ValueError):  # only the main thread may set handlers; a notebook may run in another
            self._before = {s: signal.signal(s, self._ask) for s in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _: object) -> None:
        self._asked = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, self._before[signal.SIGINT])
            sentence = "saving and stopping; Ctrl-C again stops at once, without saving"
            print(f"\nmegajax: {sentence}", file=sys.stderr, flush=True)

    def requested(self, agree: bool) -> bool:
        """Whether to stop now. Several processes agree on it in calls with `agree`, which all make."""
        if jax.process_count() == 1:
            return self._asked
        if not agree:
            return False
        from jax.experimental import multihost_utils

        return bool(multihost_utils.process_allgather(np.array(self._asked)).any())
