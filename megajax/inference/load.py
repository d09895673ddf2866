"""Models from a run's checkpoint or from a folder in Hugging Face's format."""

from argparse import Namespace
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from megajax.checkpoint import find_checkpoint, restore_model
from megajax.checkpoint.weights import run_config
from megajax.config import Config, ModelConfig
from megajax.data.special_tokens import first_token, known_end, stop_tokens, usual_first_token
from megajax.data.tokenizers import FILES, Tokenizer, files_in, has_no_file, load_tokenizer
from megajax.errors import InputError
from megajax.hf import is_hf_folder
from megajax.inference.language_model import LanguageModel, TextSettings
from megajax.inference.weights import abstract_parameters, abstract_state
from megajax.mesh import build_mesh, named_mesh
from megajax.model import Transformer
from megajax.model.lora import is_adapter, merge
from megajax.options.fp8_recipes import NONE
from megajax.runtime import accept_missing_cuda

DTYPES = ("float32", "bfloat16", "float16")


def load_model(
    path: str | Path, mesh: Mesh | None = None, dtype: str | None = None, *, setting: str = "path", speculate: int = 0
) -> LanguageModel:
    """`from_hf` of a folder in Hugging Face's format, else `load_run`; `setting` gave the path, for errors."""
    load = from_hf if is_hf_folder(path) else load_run
    return load(path, mesh, dtype, setting=setting, speculate=speculate)


def load_chosen(options: Namespace, speculate: int = 0) -> LanguageModel:
    """The model of a command's arguments (`console.add_model_arguments`)."""
    mesh = named_mesh(options.mesh, "--mesh") if options.mesh else None
    return load_model(options.run, mesh, options.dtype, setting="RUN", speculate=speculate)


def load_run(
    run: str | Path, mesh: Mesh | None = None, dtype: str | None = None, *, setting: str = "run", speculate: int = 0
) -> LanguageModel:
    """The model of a run's newest checkpoint, or of `RUN/checkpoints/STEP`, and the run's tokenizer if it has one.

    The weights are laid out for `mesh` (None: the first device), whatever mesh trained them, in `dtype` (None: the
    run's compute dtype). The context is the run's sequence length. Generation drafts `speculate` tokens in each step.
    Raises InputError for an unusable checkpoint, and for drafts without multi-token prediction modules.
    """
    if is_hf_folder(run):
        raise InputError(f"{setting}={run} is a folder in Hugging Face's format, not a run: use megajax.from_hf.")
    run_dir, step = find_checkpoint(run, setting)
    config = run_config(run_dir, setting)
    _check_modules(config.model, speculate, f"{setting}={run}")
    config = for_inference(config, dtype or config.precision.compute, speculate)
    mesh = mesh or _first_device()
    model = Transformer(config.model)
    text = text_settings(config, run_dir)
    params, state = _restored(config, str(run_dir / "checkpoints" / str(step)), model, mesh, setting)
    return LanguageModel(config, params, state, mesh, text, speculate=speculate)


def text_settings(config: Config, run_dir: Path) -> TextSettings:
    """What a run's LanguageModel has to know of texts: the tokenizer, if there is one, and the tokens at both ends."""
    tokenizer = find_tokenizer(config, run_dir) if config.data.tokenizer else None
    end = None if tokenizer is None else known_end(config.data, tokenizer)
    stops = tuple(stop_tokens(run_dir, tokenizer, end, config.data.template_arguments))
    if tokenizer is None:
        return TextSettings(None, run_dir, stop_tokens=stops)
    # A run that began with a Hugging Face model keeps its config: its texts begin as those of that model.
    begin = first_token(config.data, tokenizer, (run_dir / "hf_config.json").is_file())
    return TextSettings(tokenizer, run_dir, begin, end, stops)


def _restored(config: Config, path: str, model: Transformer, mesh: Mesh, setting: str):
    """(parameters, state) of a checkpoint; adapters are merged into their base."""
    dtype, state = config.precision.compute, abstract_state(model, mesh)
    base = abstract_parameters(model, mesh, dtype)
    if config.lora.rank is None:
        return restore_model(path, base, state, config.model, setting)
    whole = abstract_parameters(Transformer(config.model, config.lora), mesh, jnp.float32)
    adapters = {name: shape for name, shape in whole.items() if is_adapter(name)}
    adapted, kept = restore_model(path, adapters, state, config.model, setting)
    key, source = "checkpoint.init_from", config.checkpoint.init_from
    assert source is not None
    if is_hf_folder(source):
        from megajax.hf.convert import load  # here, because it needs safetensors

        params, _ = load(source, base, {}, config.model, key)
    else:
        params, _ = restore_model(source, base, {}, config.model, key)
    return merge(params, adapted, config.lora), kept


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
    and for drafts without multi-token prediction modules.
    """
    from megajax.hf.convert import load, read_folder  # here, because it needs safetensors

    folder, (_, section, hf_config) = Path(folder), read_folder(folder)
    given = dtype or hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32"
    length = hf_config.get("max_position_embeddings") or section.get("max_positions") or 2048
    config = Config.model_validate(
        {
            "model": section,
            "mesh": {"data": 1},
            "batch": {"global_size": 1, "sequence_length": length},
            "data": {"kind": "synthetic"},
        }
    )
    _check_modules(config.model, speculate, f"{setting}={folder}")
    config = for_inference(config, given, speculate)
    mesh = mesh or _first_device()
    model = Transformer(config.model)
    shapes = abstract_parameters(model, mesh, config.precision.compute)
    params, state = load(folder, shapes, abstract_state(model, mesh), config.model, setting)
    tokenizer = load_tokenizer(str(folder)) if files_in(folder) else None
    end = None if tokenizer is None else tokenizer.end_of_document
    begin = None if tokenizer is None else usual_first_token(tokenizer)
    text = TextSettings(tokenizer, folder, begin, end, tuple(stop_tokens(folder, tokenizer, end, {})))
    return LanguageModel(config, params, state, mesh, text, speculate=speculate)


def _first_device() -> Mesh:
    accept_missing_cuda()
    return build_mesh({}, jax.devices()[:1])


def _check_modules(model: ModelConfig, speculate: int, source: str) -> None:
    """Raises InputError if `speculate` is not a number of drafts that the model of `source` can make."""
    if speculate < 0:
        raise InputError(f"--speculate={speculate} is not a number of 0 or more: give one such as 1.")
    if speculate and not model.mtp_layers:
        raise InputError(
            f"--speculate={speculate} drafts with multi-token prediction modules, but {source} has none: give 0, or a "
            "model that was trained with model.mtp_layers=1."
        )


def for_inference(config: Config, dtype: str, speculate: int) -> Config:
    """The config with this compute dtype and without a capacity of experts: padding would use it up.

    It has multi-token prediction modules only if they draft tokens.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype={dtype} is not one of {', '.join(DTYPES)}: give one of them.")
    router = config.model.router.model_copy(update={"capacity_factor": None})
    model = config.model.model_copy(
        update={"router": router, "mtp_layers": config.model.mtp_layers if speculate else 0}
    )
    fp8 = config.precision.fp8.model_copy(update={"recipe": NONE.name})
    precision = config.precision.model_copy(update={"compute": dtype, "fp8": fp8})
    kernels = config.kernels.model_copy(update={"attention": "auto", "grouped_matmul": "auto"})
    data = config.data.model_copy(update={"reset_attention": False})
    return config.model_copy(update={"model": model, "precision": precision, "kernels": kernels, "data": data})


def find_tokenizer(config: Config, run_dir: Path) -> Tokenizer:
    """The tokenizer of a run's training, independent of the current directory if the run has a copy.

    It is the run's copy, `tokenizer.json` or `tokenizer.model`, else `data.tokenizer` relative to the current directory
    or to a directory above the run. Raises InputError if there is none, or if it does not fit the model.
    """
    spec = config.data.tokenizer
    if spec is None:
        raise InputError(f"{run_dir}/config.yaml has no data.tokenizer, so tokens cannot become text: add it.")
    suffix = Path(spec).suffix
    copies = sorted((run_dir / name for name in FILES), key=lambda path: path.suffix != suffix)
    copy = copies[0]
    if not has_no_file(spec):
        candidates = [*copies, Path(spec), *(directory / spec for directory in run_dir.resolve().parents)]
        found = next((path for path in candidates if path.exists()), None)
        if found is None:
            raise InputError(
                f"data.tokenizer={spec} ({run_dir}/config.yaml) is neither in the current directory nor above the "
                f"run: copy the file to {copy}."
            )
        spec = str(found)
    tokenizer = load_tokenizer(spec)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise InputError(
            f"the tokenizer {spec} has {tokenizer.vocab_size} tokens, but the model has {config.model.vocab_size}: "
            f"copy the tokenizer of the training to {copy}."
        )
    return tokenizer
