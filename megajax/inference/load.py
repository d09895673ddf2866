"""Models in use: of a run's checkpoint, of a folder in Hugging Face's format, or of another source of weights."""

from argparse import Namespace
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from megajax.checkpoint import find_checkpoint
from megajax.config import Config, KernelsConfig, ModelConfig
from megajax.config.other_values import choice_cure
from megajax.console import command
from megajax.errors import InputError
from megajax.inference.language_model import LanguageModel
from megajax.inference.weights import abstract_parameters, abstract_state
from megajax.layout.kinds import EXTRA, extra_layers, without_extra
from megajax.mesh import build_mesh, named_mesh
from megajax.model import Transformer
from megajax.model.lora import is_adapter, merge
from megajax.options.fp8_recipes import NONE
from megajax.options.registered import replaces_head
from megajax.runtime import accept_missing_cuda
from megajax.schema.checkpoint import DTYPES
from megajax.sources import HfSource, RunSource, WeightSource, find_source, initial_weights, read_weights

# Keys of `kernels` that this machine decides
CHOSEN_KERNELS = [name for name, field in KernelsConfig.model_fields.items() if field.default == "auto"]


def load_model(
    path: str | Path, mesh: Mesh | None = None, dtype: str | None = None, *, setting: str = "path", speculate: int = 0
) -> LanguageModel:
    """The model of a run or its checkpoint, or of a Hugging Face folder; `setting` gave the path, for errors."""
    return _load(find_source(path, setting), mesh, dtype, speculate)


def load_chosen(options: Namespace, speculate: int = 0) -> LanguageModel:
    """The model of a command's arguments (`console.add_model_arguments`)."""
    return load_model(options.run, chosen_mesh(options), options.dtype, setting="RUN", speculate=speculate)


def chosen_mesh(options: Namespace) -> Mesh | None:
    """The mesh of a command's arguments; None: the first device."""
    return named_mesh(options.mesh, "--mesh") if options.mesh else None


def load_run(
    run: str | Path, mesh: Mesh | None = None, dtype: str | None = None, *, setting: str = "run", speculate: int = 0
) -> LanguageModel:
    """The model of a run's newest checkpoint, or of `RUN/checkpoints/STEP`, and the run's tokenizer if it has one.

    The weights are laid out for `mesh` (None: the first device), whatever mesh trained them, in `dtype` (None: the
    run's compute dtype). The context is the run's sequence length. Generation drafts `speculate` tokens in each step.
    Raises InputError for an unusable checkpoint, and for drafts that the model has no layers for.
    """
    if isinstance(find_source(run, setting), HfSource):
        raise InputError(f"{setting}={run} is a folder in Hugging Face's format, not a run: use megajax.from_hf.")
    return _load(RunSource(run, setting), mesh, dtype, speculate)


def from_hf(
    folder: str | Path,
    mesh: Mesh | None = None,
    dtype: str | None = None,
    *,
    setting: str = "folder",
    speculate: int = 0,
) -> LanguageModel:
    """The model of a folder in Hugging Face's format, with its tokenizer and stop tokens.

    The weights are laid out for `mesh` (None: the first device) in `dtype` (None: that of config.json). The context is
    `max_position_embeddings`. Each process reads only what its devices hold. Generation drafts `speculate` tokens in
    each step. Raises InputError for a family or an option that megajax does not have, for missing or damaged files,
    and for drafts that the model has no layers for.
    """
    return _load(HfSource(folder, setting), mesh, dtype, speculate)


def _load(source: WeightSource, mesh: Mesh | None, dtype: str | None, speculate: int) -> LanguageModel:
    config = source.config()
    _check_modules(config.model, speculate, source.shown)
    config = for_inference(config, dtype or config.precision.compute, speculate)
    if mesh is None:
        accept_missing_cuda()
        mesh = build_mesh({}, jax.devices()[:1])
    text, model = source.text(config), Transformer(config.model)
    state, base = abstract_state(model, mesh), abstract_parameters(model, mesh, config.precision.compute)
    if config.lora.rank is None:
        params, layer_state = read_weights(source, base, state, config.model)
        return LanguageModel(config, params, layer_state, mesh, text, speculate=speculate)
    # Adapters are merged into their base.
    whole = abstract_parameters(Transformer(config.model, config.lora), mesh, jnp.float32)
    adapters = {name: shape for name, shape in whole.items() if is_adapter(name)}
    adapted, layer_state = read_weights(source, adapters, state, config.model)
    run_dir, _ = find_checkpoint(source.path, source.setting, source.location)
    params, _ = read_weights(initial_weights(config, run_dir=run_dir), base, {}, config.model)
    params = merge(params, adapted, config.lora)
    return LanguageModel(config, params, layer_state, mesh, text, speculate=speculate)


def _check_modules(model: ModelConfig, speculate: int, source: str) -> None:
    """Raises InputError if `speculate` is not a number of drafts that the model of `source` can make."""
    if speculate < 0:
        raise InputError(f"--speculate={speculate} is not a number of 0 or more: give one such as 1.")
    if speculate and not extra_layers(model):
        purposes, keys = (" or ".join(getattr(each, name) for each in EXTRA) for name in ("purpose", "key"))
        raise InputError(
            f"--speculate={speculate} drafts with {purposes} modules, but {source} has none: give 0, or a model "
            f"that was trained with {keys}=1."
        )


def check_dtype(dtype: str) -> None:
    """Raise InputError for what is no dtype of weights in use."""
    if dtype not in DTYPES:
        raise InputError(f"dtype={dtype} is not a choice: {choice_cure('checkpoint.export_hf.dtype', dtype, DTYPES)}.")


def uncapped(model: ModelConfig) -> ModelConfig:
    """A model whose experts drop no tokens: how many they would depends on the size of a batch."""
    return model.model_copy(update={"router": model.router.model_copy(update={"capacity_factor": None})})


def for_inference(config: Config, dtype: str, speculate: int) -> Config:
    """The config with this compute dtype and without a capacity of experts: padding would use it up.

    It has layers after the model's only if they draft tokens.
    """
    if replaces_head(kind := config.objective.kind):
        problem = f"objective.kind={kind} has parameters in place of the model's head"
        cure = f"take the figures of {command('evaluate', 'RUN')}, or of TrainProgram.eval_step"
        raise InputError(f"{problem}, so the model does not generate or score texts: {cure}.")
    check_dtype(dtype)
    model = uncapped(config.model).model_copy(update={} if speculate else without_extra())
    fp8 = config.precision.fp8.model_copy(update={"recipe": NONE.name})
    precision = config.precision.model_copy(update={"compute": dtype, "fp8": fp8})
    kernels = config.kernels.model_copy(update=dict.fromkeys(CHOSEN_KERNELS, "auto"))
    data = config.data.model_copy(update={"reset_attention": False})
    return config.model_copy(update={"model": model, "precision": precision, "kernels": kernels, "data": data})
