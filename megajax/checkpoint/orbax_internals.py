"""Modules and attributes of orbax that are not public, and the reason for each. No other file imports any.

The version in brackets is the one with which a module was last tried.
"""

from typing import Any

import jax
import orbax.checkpoint as ocp

# The stores that orbax knows: it has no public functions for another one, such as `s3://`. [0.12.8]
from orbax.checkpoint._src.path import gcs_utils as gcs_utils
from orbax.checkpoint._src.serialization import tensorstore_utils as tensorstore_utils


def share_among_replicas(least: int) -> None:
    """From now on replicas write an array together only if each has `least` bytes of it.

    By default they share every array, and the first save compiles a slice for each shape. The public way, a handler of
    one's own for arrays, prints a warning. [0.12.8]
    """
    handler: Any = ocp.type_handlers.get_type_handler(jax.Array)
    handler._min_slice_bytes_for_replica_parallel = least
