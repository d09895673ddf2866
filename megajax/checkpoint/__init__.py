"""Saving and restoring: asynchronous, atomic, independent of the mesh."""

from megajax.checkpoint.manager import Checkpoints, SaveOutcome, complete_steps, find_checkpoint, reason, restore_model

__all__ = ["Checkpoints", "SaveOutcome", "complete_steps", "find_checkpoint", "reason", "restore_model"]
