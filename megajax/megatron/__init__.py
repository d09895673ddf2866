"""Checkpoints of Megatron-Core: their weights into a run, without torch."""

from pathlib import Path

METADATA = ".metadata"  # in a checkpoint
NEWEST = "latest_checkpointed_iteration.txt"  # in the folder of a run's checkpoints
RANK_FILE = "model_optim_rng.pt"  # in the folder mp_rank_* of each rank, in the older format


def is_distributed(path: Path) -> bool:
    """Whether a folder is one checkpoint in the distributed format (`torch_dist`)."""
    return (path / METADATA).is_file()


def is_legacy(path: Path) -> bool:
    """Whether a folder is one checkpoint in the older format (`torch`)."""
    return any(path.glob(f"mp_rank_[0-9]*/{RANK_FILE}"))


def is_megatron_folder(path: str | Path) -> bool:
    """Whether a path is a checkpoint of Megatron-Core, or the folder of a run with such ones."""
    return is_distributed(Path(path)) or (Path(path) / NEWEST).is_file() or is_legacy(Path(path))
