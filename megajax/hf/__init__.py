"""Models in Hugging Face's format: their weights into a run, and a run's weights out."""

from pathlib import Path


def is_hf_folder(path: str | Path) -> bool:
    """Whether a path is a model's folder in Hugging Face's format, and not a run's directory."""
    path = Path(path)
    return (path / "config.json").is_file() and not (path / "config.yaml").exists()
