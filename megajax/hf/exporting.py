"""A checkpoint becomes a folder in Hugging Face's format."""

from pathlib import Path

from megajax.config import Config
from megajax.hf import beside
from megajax.hf.adapters import open_merged
from megajax.hf.convert import export


def export_step(run_dir: Path, step: int, config: Config, folder: Path, dtype: str) -> None:
    """Write the checkpoint of `step` as a folder in `dtype`, with the run's tokenizer and the ids of special tokens.

    Adapters are merged into their base. One layer of a parameter is in memory at a time, and one file. Raises
    InputError for a model that no family has, a damaged file, and a folder that exists or cannot be written; nothing
    remains then.
    """
    files, keys = beside.collect(run_dir, config)
    with open_merged(run_dir, step, config) as weights:
        export(weights, config.model, folder, dtype, keys, files, beside.origin(run_dir))
