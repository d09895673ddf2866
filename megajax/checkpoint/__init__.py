"""Saving and restoring: asynchronous, atomic, verified, independent of the mesh."""

from megajax.checkpoint.manager import (
    Checkpoints,
    SaveOutcome,
    agreed_steps,
    find_checkpoint,
    newest_good,
    reason,
    restore_model,
)
from megajax.checkpoint.storage import complete_steps

__all__ = [
    "Checkpoints",
    "SaveOutcome",
    "agreed_steps",
    "complete_steps",
    "find_checkpoint",
    "newest_good",
    "reason",
    "restore_model",
]
