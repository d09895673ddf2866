"""Saving and restoring: asynchronous, atomic, independent of the mesh."""

from megajax.checkpoint.manager import Checkpoints, restore_parameters

__all__ = ["Checkpoints", "restore_parameters"]
