"""A checkpoint becomes a folder in Hugging Face's format."""

from pathlib import Path

import numpy as np

from megajax.checkpoint.storage import SUBDIRECTORY
from megajax.checkpoint.weights import open_weights
from megajax.config import Config
from megajax.hf import beside
from megajax.hf.adapters import open_merged
from megajax.hf.convert import export
from megajax.hf.quantising import StoredForm, fail
from megajax.options.quantisations import FP8_BLOCK, FP8_CHANNEL, NONE, QUANTISATIONS
from megajax.weights.scaling import FP8


def export_step(
    run_dir: Path, step: int, config: Config, folder: Path, dtype: str, quantisation: str = NONE.name
) -> None:
    """Write the checkpoint of `step` as a folder in `dtype`, with the run's tokenizer and the ids of special tokens.

    `quantisation` as in `checkpoint.export_hf`.

    Adapters are merged into their base. One layer of a parameter is in memory at a time, and one file. Raises
    InputError for a model that no family has, a damaged file, and a folder that exists or cannot be written; nothing
    remains then.
    """
    found = beside.collect(run_dir, config)
    form = StoredForm(dtype, quantisation)
    if QUANTISATIONS[quantisation].needs_history:
        if not config.precision.fp8.chosen.keeps_history:
            fail(
                quantisation,
                "its inputs' amaxes are those of precision.fp8.recipe=delayed, which the run did not have",
                f"{FP8_CHANNEL.name} or {FP8_BLOCK.name}",
            )
        stored = open_weights(run_dir / SUBDIRECTORY / str(step), f"{FP8}.")
        form = form._replace(history={name: np.asarray(array[...]) for name, array in stored.items()})
    with open_merged(run_dir, step, config) as weights:
        export(weights, config.model, folder, form, found)
