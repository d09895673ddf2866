"""The processes of a run: what the environment says of them, how they join, and how they decide together.

`current()` is the one way in which code asks which process it is, and by which processes agree.
"""

import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megajax.cluster.cluster import Cluster, Gone

__all__ = ["Cluster", "Gone", "current", "standing_for"]

_stand_in = threading.local()


def current() -> Cluster:
    """The processes of this run. A process is alone until `join`, and where jax is not loaded, as in a data reader."""
    if (given := getattr(_stand_in, "cluster", None)) is not None:
        return given
    if "jax" not in sys.modules:
        return _known(None, 0, 1)
    from megajax.jax_internals import distributed

    state = distributed.global_state
    return _known(None, 0, 1) if state.client is None else _known(state.client, state.process_id, state.num_processes)


@contextmanager
def standing_for(cluster: Cluster) -> Iterator[None]:
    """Within it this thread is a process of `cluster`: for tests, whose threads play processes."""
    _stand_in.cluster = cluster
    try:
        yield
    finally:
        _stand_in.cluster = None


@functools.lru_cache
def _known(client: Any, rank: int, size: int) -> Cluster:
    return Cluster(rank, size, client)
