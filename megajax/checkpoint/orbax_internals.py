"""Modules of orbax that are not public, and the reason for each. No other file imports any.

The version in brackets is the one with which a module was last tried.
"""

# The stores that orbax knows: it has no public functions for another one, such as `s3://`. [0.12.8]
from orbax.checkpoint._src.path import gcs_utils as gcs_utils
from orbax.checkpoint._src.serialization import tensorstore_utils as tensorstore_utils
