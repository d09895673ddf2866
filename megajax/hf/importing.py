"""`hf import`: a Hugging Face folder becomes a run directory."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from megajax.checkpoint.description import describe_model
from megajax.checkpoint.manager import save_weights
from megajax.config import Config
from megajax.config.checks import check_combinations
from megajax.data.tokenizers import files_in, keep_tokenizer, kept_name, load_tokenizer
from megajax.errors import ConfigError, InputError, file_reader, reading
from megajax.hf import beside
from megajax.hf.convert import load, longest, read_folder
from megajax.hf.folder import new_folder
from megajax.model import Transformer, parameters
from megajax.model.block import layer_state
from megajax.options.registered import MASKED_TOKENS, NEXT_TOKEN
from megajax.schema.checkpoint import DTYPES


def import_folder(folder: Path, run_dir: Path) -> None:
    """Write a run directory with the model of `folder`: config.yaml, a checkpoint of step 0, tokenizer files.

    The checkpoint has FP32 weights only. The weights are in host memory once. Raises InputError if the folder is not
    readable, or if `run_dir` exists or cannot be written; nothing remains then.
    """
    config = _config(folder, run_dir)
    device = SingleDeviceSharding(jax.devices("cpu")[0])
    declared = parameters(Transformer(config.model))
    shapes = {name: jax.ShapeDtypeStruct(p.shape, jnp.float32, sharding=device) for name, p in declared.items()}
    layer_states = {
        kind: {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=device) for name, a in arrays.items()}
        for kind, arrays in layer_state(config.model).items()
    }
    with new_folder(run_dir) as partial:
        params, state = load(folder, shapes, layer_states, config.model, "HF_FOLDER")
        save_weights(partial, params, state, {"format": 1, "step": 0, "model": describe_model(config.model)})
        beside.keep(folder, partial)
        if files_in(folder):
            keep_tokenizer(str(folder), partial)
        (partial / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")


@file_reader("folder")
def _config(folder: Path, run_dir: Path) -> Config:
    """A config whose section `model` describes the folder, for `generate`, `export` and `init_from`."""
    _, section, theirs = read_folder(folder)
    data: dict[str, Any] = {"kind": "synthetic"}
    dtype = theirs.get("dtype") or theirs.get("torch_dtype")
    for source in files_in(folder)[:1]:
        data["tokenizer"] = str(run_dir / kept_name(source))
        name = beside.token_names(folder).get("eos_token")
        if name is not None and load_tokenizer(str(folder)).token_id(name) is not None:
            data["end_of_document"] = name
    values = {
        "run": {"name": run_dir.name, "dir": str(run_dir)},
        "model": section,
        "objective": {"kind": NEXT_TOKEN if section.get("causal", True) else MASKED_TOKENS},
        "precision": {"compute": dtype} if dtype in DTYPES else {},
        "batch": {"global_size": 1, "sequence_length": longest(section, theirs)},
        "data": data,
    }
    with reading(folder / "config.json"):  # such as a length that no run has
        config = Config.model_validate(values)
    try:
        check_combinations(config)
    except ConfigError as error:  # no command could read the run
        problem = str(error).replace(" (default)", "")
        raise InputError(f"{folder / 'config.json'} is of a model that no run has: {problem}") from None
    return config
