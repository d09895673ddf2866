"""Saving and restoring: asynchronous, atomic, independent of the mesh."""

from megajax.checkpoint.manager import Checkpoints, has_checkpoint, restore_model

__all__ = ["Checkpoints", "has_checkpoint", "restore_model"]
