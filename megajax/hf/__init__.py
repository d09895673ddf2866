"""Models in Hugging Face's format: their weights into a run, and a run's weights out."""

from pathlib import Path

ADAPTERS = "adapter_config.json"  # in a folder of PEFT's


def is_hf_folder(path: str | Path) -> bool:
    """Whether a path is a folder in Hugging Face's format, of a model or of adapters, and not a run's directory."""
    path = Path(path)
    return any((path / name).is_file() for name in ("config.json", ADAPTERS)) and not (path / "config.yaml").exists()
