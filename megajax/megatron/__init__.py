"""Checkpoints of Megatron-Core: their weights into a run, without torch."""

from pathlib import Path

METADATA = ".metadata"  # in a checkpoint
NEWEST = "latest_checkpointed_iteration.txt"  # in the folder of a run's checkpoints


def is_megatron_folder(path: str | Path) -> bool:
    """Whether a path is a checkpoint in Megatron-Core's distributed format, or the folder of a run with such ones."""
    return (Path(path) / METADATA).is_file() or (Path(path) / NEWEST).is_file()
