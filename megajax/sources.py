"""Sources of weights: what `checkpoint.init_from`, `teacher.source` and the commands that use a model may name.

Built in are a run or its checkpoint, a folder in Hugging Face's format, and a checkpoint of Megatron-Core;
`register_source` adds another layout.
"""

import contextlib
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from megajax.checkpoint import find_checkpoint, restore_model
from megajax.checkpoint.storage import SUBDIRECTORY
from megajax.checkpoint.weights import open_model, run_config
from megajax.config import Config, ModelConfig
from megajax.data.special_tokens import first_token, known_end, stop_tokens, usual_first_token
from megajax.data.tokenizers import FILES, Tokenizer, files_in, has_no_file, load_tokenizer
from megajax.errors import ConfigError, InputError, check_methods, shown
from megajax.hf import is_hf_folder
from megajax.layout.kinds import EXTRA
from megajax.megatron import is_megatron_folder
from megajax.model import Transformer, parameters
from megajax.model.block import layer_state as declared_state
from megajax.model.upcycling import dense_model, origins

if TYPE_CHECKING:
    from megajax.hf.reader import Reader
    from megajax.megatron.resume_point import SavedTraining

INIT_FROM = "checkpoint.init_from"
Abstract = Mapping[str, jax.ShapeDtypeStruct]
LayerState = dict[str, dict[str, jax.Array]]
Weights = tuple[dict[str, jax.Array], LayerState]  # parameters and layer state


@dataclass(frozen=True)
class TextSettings:
    """What a model has to know of texts: its tokenizer, the folder that has it, and the tokens around a text.

    `begin_token` begins its texts, `end_token` ends them; None: nothing does. Generation ends at one of `stop_tokens`.
    """

    tokenizer: Tokenizer | None = None
    folder: Path | None = None
    begin_token: int | None = None
    end_token: int | None = None
    stop_tokens: tuple[int, ...] = ()


NO_TEXT = TextSettings()


class WeightSource:
    """The weights of a model at a path. Another layout is a subclass with `matches` and `open`.

    allowed: the settings of the model that may be others than at the path (`compare_models`).
    """

    allowed: Sequence[str] | None = None

    def __init__(self, path: str | Path, setting: str, location: str = ""):
        """`setting` is the key or argument that gave the path, `location` where it was set, for errors."""
        self.path, self.setting, self.location = Path(path), setting, location

    @classmethod
    def matches(cls, path: Path) -> bool:
        """Whether a path has this layout."""
        raise NotImplementedError

    def open(self, model: ModelConfig) -> contextlib.AbstractContextManager[Mapping[str, Any]]:
        """The canonical parameters of `model` by name, and the layers' state (`state_by_name`).

        Each has a `shape`, and is read where it is indexed. Raises InputError for another model's weights.
        """
        raise NotImplementedError

    def read(self, params: Abstract, layer_state: Mapping[str, Abstract], model: ModelConfig) -> Weights:
        """The parameters by name and the layers' state in these dtypes and shardings.

        Each process reads what its devices hold. Raises InputError as `open` does, for an array that lacks, and for one
        that the model does not have.
        """
        with self.open(model) as arrays:
            self._check_names(arrays, model)
            states = {
                kind: {name: self._on_devices(arrays, f"blocks.{kind}.{name}", wanted) for name, wanted in own.items()}
                for kind, own in layer_state.items()
            }
            return {name: self._on_devices(arrays, name, wanted) for name, wanted in params.items()}, states

    def lacks(self, own: Collection[str], model: ModelConfig) -> set[str]:
        """Those of an objective's parameters `own` that the weights do not have."""
        with self.open(model) as arrays:
            return {*own}.difference(arrays)

    def training(self) -> "SavedTraining":
        """The training that the weights come from, for `checkpoint.init_state`. Raises InputError if it is not read."""
        raise InputError(
            f"{self.shown} is no checkpoint of Megatron-Core, and checkpoint.init_state goes on from these only: set it"
            " to weights; a run of megajax goes on with the same command and run.dir."
        )

    def open_training(
        self, model: ModelConfig, shapes: Mapping[str, tuple[int, ...]], states: Collection[str], optimizer: str
    ) -> "contextlib.AbstractContextManager[Mapping[str, Mapping[str, Reader]]]":
        """The readers of what that training has, see `megatron.convert.open_training`."""
        raise NotImplementedError

    def config(self) -> Config:
        """A config whose section `model` describes the weights, with the dtype of their use, for generation."""
        raise InputError(f"{self.shown} is not a run and no Hugging Face folder: it has no config of the model.")

    def text(self, config: Config) -> TextSettings:
        """The settings of a LanguageModel for texts."""
        return NO_TEXT

    def longest(self, model: ModelConfig) -> int | None:
        """The tokens of the longest sequence that the weights are for, with the positions of `model`; None: unknown."""
        return None

    def __str__(self) -> str:
        """What is read."""
        return str(self.path)

    @property
    def shown(self) -> str:
        """The path in an error's sentence."""
        return f"{self.setting}={self.path}{self.location}"

    def _check_names(self, arrays: Mapping[str, Any], model: ModelConfig) -> None:
        states = {f"blocks.{kind}.{name}" for kind, own in declared_state(model).items() for name in own}
        extra = tuple(f"blocks.{each.name}." for each in EXTRA)  # layers after the model's, which may be left out
        more = sorted({*arrays} - {*parameters(Transformer(model))} - states)
        if more := [name for name in more if not name.startswith(extra)]:
            names = ", ".join(more[:9]) + ", …" * (len(more) > 9)
            raise InputError(
                f"{self.shown} gives {names}, but the model has no such array: set the keys of `model` that it belongs "
                f"to, or leave it out in {type(self).__name__}.open."
            )

    def _on_devices(self, arrays: Mapping[str, Any], name: str, wanted: jax.ShapeDtypeStruct) -> jax.Array:
        array = arrays.get(name)
        if array is None or tuple(array.shape) != wanted.shape:
            found = "no" if array is None else f"{[*array.shape]} for"
            raise InputError(f"{self.shown} has {found} {name} {[*wanted.shape]}: name weights of the same model.")
        part = lambda index: np.asarray(array[index]).astype(wanted.dtype)  # noqa: E731
        return jax.make_array_from_callback(wanted.shape, wanted.sharding, part)


class RunSource(WeightSource):
    """A run's newest checkpoint, or `RUN/checkpoints/STEP`."""

    @classmethod
    def matches(cls, path: Path) -> bool:
        return True  # every other path: its errors say what a run has

    @contextlib.contextmanager
    def open(self, model: ModelConfig) -> Iterator[Mapping[str, Any]]:
        params, layer_state = open_model(self.checkpoint, model)
        yield params | layer_state

    def read(self, params: Abstract, layer_state: Mapping[str, Abstract], model: ModelConfig) -> Weights:
        return restore_model(str(self.path), params, layer_state, model, self.setting, self.location, self.allowed)

    def training(self) -> "SavedTraining":
        if not self.path.exists():
            _ = self._found  # raises its error
        return super().training()

    def config(self) -> Config:
        return run_config(self._found[0], self.setting)

    def text(self, config: Config) -> TextSettings:
        return text_settings(config, self._found[0])

    def __str__(self) -> str:
        return str(self.checkpoint)

    @property
    def checkpoint(self) -> Path:
        """`RUN/checkpoints/STEP`."""
        run_dir, step = self._found
        return run_dir / SUBDIRECTORY / str(step)

    @property
    def _found(self) -> tuple[Path, int]:
        """(run directory, step)."""
        return find_checkpoint(self.path, self.setting, self.location)


class HfSource(WeightSource):
    """A folder in Hugging Face's format."""

    @classmethod
    def matches(cls, path: Path) -> bool:
        return is_hf_folder(path)

    @contextlib.contextmanager
    def open(self, model: ModelConfig) -> Iterator[Mapping[str, Any]]:
        from megajax.hf.convert import open_readers  # here, because it needs safetensors

        shapes = {name: parameter.shape for name, parameter in parameters(Transformer(model)).items()}
        with open_readers(self.path, model, shapes, self.setting, self.location, self.allowed) as readers:
            yield {name: _FolderArray(reader) for name, reader in readers.items()}

    def read(self, params: Abstract, layer_state: Mapping[str, Abstract], model: ModelConfig) -> Weights:
        from megajax.hf.convert import load

        return load(self.path, params, layer_state, model, self.setting, self.location, self.allowed)

    def lacks(self, own: Collection[str], model: ModelConfig) -> set[str]:
        from megajax.hf.convert import own_parameters

        return {*own} - own_parameters(self.path, model.vision is not None)

    def config(self) -> Config:
        from megajax.hf.convert import longest, read_folder

        _, section, theirs = read_folder(self.path)
        values = {
            "model": section,
            "mesh": {"data": 1},
            "batch": {"global_size": 1, "sequence_length": longest(section, theirs)},
            "data": {"kind": "synthetic"},
        }
        config = Config.model_validate(values)
        dtype = theirs.get("dtype") or theirs.get("torch_dtype") or "float32"
        return config.model_copy(update={"precision": config.precision.model_copy(update={"compute": dtype})})

    def longest(self, model: ModelConfig) -> int | None:
        from megajax.hf.convert import longest, read_folder

        _, section, theirs = read_folder(self.path, model.vision is not None)
        own, positions = ModelConfig.model_validate(section), lambda m: (m.position, m.rope_theta, m.rope_scaling)
        grows = model.rope_scaling is not None and model.rope_scaling.kind == "dynamic"  # with the sequence
        if model.position != "rope" or grows or positions(own) != positions(model):
            return None
        return longest(section, theirs)

    def text(self, config: Config) -> TextSettings:
        tokenizer = load_tokenizer(str(self.path)) if files_in(self.path) else None
        end = None if tokenizer is None else tokenizer.end_of_document
        begin = None if tokenizer is None else usual_first_token(tokenizer)
        return TextSettings(tokenizer, self.path, begin, end, tuple(stop_tokens(self.path, tokenizer, end, {})))


class MegatronSource(WeightSource):
    """A checkpoint of Megatron-Core, or the folder of a run with such ones."""

    @classmethod
    def matches(cls, path: Path) -> bool:
        return is_megatron_folder(path)

    @contextlib.contextmanager
    def open(self, model: ModelConfig) -> Iterator[Mapping[str, Any]]:
        from megajax.megatron.convert import open_readers

        shapes = {name: parameter.shape for name, parameter in parameters(Transformer(model)).items()}
        with open_readers(self.path, model, shapes) as readers:
            yield {name: _FolderArray(reader) for name, reader in readers.items()}

    def read(self, params: Abstract, layer_state: Mapping[str, Abstract], model: ModelConfig) -> Weights:
        from megajax.megatron.convert import load

        return load(self.path, params, layer_state, model)

    def training(self) -> "SavedTraining":
        from megajax.megatron.resume_point import saved_training

        return saved_training(self.path)

    def open_training(
        self, model: ModelConfig, shapes: Mapping[str, tuple[int, ...]], states: Collection[str], optimizer: str
    ) -> "contextlib.AbstractContextManager[Mapping[str, Mapping[str, Reader]]]":
        from megajax.megatron.convert import open_training

        return open_training(self.path, model, shapes, states, optimizer)


class Upcycled(WeightSource):
    """A dense model's weights as the first ones of a model with experts (`checkpoint.upcycle`), without its routers."""

    def __init__(self, dense: WeightSource):
        super().__init__(dense.path, dense.setting, dense.location)
        self._dense = dense

    def __str__(self) -> str:
        return f"{self._dense}, each expert a copy of its layer's MLP"

    def training(self) -> "SavedTraining":
        return self._dense.training()

    def longest(self, model: ModelConfig) -> int | None:
        return self._dense.longest(model)

    @contextlib.contextmanager
    def open(self, model: ModelConfig) -> Iterator[Mapping[str, Any]]:
        """The arrays outside the layers."""
        with self._dense.open(dense_model(model)) as arrays:
            yield {name: array for name, array in arrays.items() if not name.startswith("blocks.")}

    def read(self, params: Abstract, layer_state: Mapping[str, Abstract], model: ModelConfig) -> Weights:
        dense, found = dense_model(model), origins(model, params)
        states = {kind: own for kind, own in layer_state.items() if kind in declared_state(dense)}
        wanted = {origin.name: origin.abstract(params[name]) for name, origin in found.items()}
        weights, states = self._dense.read(wanted, states, dense)
        copied = {name: origin for name, origin in found.items() if not origin.is_unchanged}
        copies = jax.jit(
            lambda dense: {name: origin.copies(dense[origin.name]) for name, origin in copied.items()},
            out_shardings={name: params[name].sharding for name in copied},
        )({origin.name: weights[origin.name] for origin in copied.values()})
        return {name: copies.get(name, weights[origin.name]) for name, origin in found.items()}, states


class _FolderArray:
    """An array of a folder; an index of its stacked dimensions reads that part."""

    def __init__(self, reader: Any):
        self._reader, self.shape = reader, reader.padded

    def __getitem__(self, at: tuple[int, ...]) -> np.ndarray:
        return self._reader.part(at)


SOURCES: list[type[WeightSource]] = [HfSource, MegatronSource, RunSource]  # the first that matches


def register_source(source: type[WeightSource]) -> type[WeightSource]:
    """Register a layout, which is asked before the built-in ones. Raises ConfigError for one that lacks a method."""
    if not (isinstance(source, type) and issubclass(source, WeightSource)):
        raise ConfigError(
            f"the source {shown(source)} is no class of megajax.sources.WeightSource: derive it from that."
        )
    for name in ("matches", "open"):
        if inspect.getattr_static(source, name) is inspect.getattr_static(WeightSource, name):
            raise ConfigError(f"{source.__name__} does not define {name}: see megajax.sources.WeightSource.")
    check_methods(source, WeightSource)
    SOURCES.insert(0, source)
    return source


def find_source(path: str | Path, setting: str, location: str = "") -> WeightSource:
    """The source at a path; `setting` gave it, at `location`."""
    return next(source for source in SOURCES if source.matches(Path(path)))(path, setting, location)


def initial_weights(config: Config, path: str | None = None, run_dir: Path | None = None) -> WeightSource:
    """The source of `checkpoint.init_from`, or of `path` in its place.

    With `run_dir`, the run that has the config, a relative path may also begin in a directory above it.
    """
    path = path or config.checkpoint.init_from
    assert path is not None
    if run_dir is not None:
        path = str(above_or_here(path, run_dir) or path)
    where = f"{run_dir}/config.yaml" if run_dir else config.where(INIT_FROM)
    note = "; checkpoint.upcycle=true reads a dense model" if config.checkpoint.upcycle else ""
    source = find_source(path, INIT_FROM, f" ({where}{note})")
    source.allowed = config.checkpoint.allow_changes
    return Upcycled(source) if config.checkpoint.upcycle else source


def read_weights(
    source: WeightSource, params: Abstract, layer_state: Mapping[str, Abstract], model: ModelConfig
) -> Weights:
    """The weights of a source, as `WeightSource.read`. Raises InputError too for numbers that are not finite."""
    weights = source.read(params, layer_state, model)
    refuse_not_finite(weights, source.shown)
    return weights


def refuse_not_finite(weights: Weights, source: str) -> None:
    """Raise InputError with the first arrays that have NaN or Inf, at most three; they are checked on the devices."""
    params, state = weights
    arrays = params | {f"{kind}.{name}": array for kind, of_kind in state.items() for name, array in of_kind.items()}
    if bad := [name for name, good in zip(arrays, _are_finite([*arrays.values()]), strict=True) if not good][:3]:
        is_narrow = any(arrays[name].dtype == jnp.float16 for name in bad)
        cure = ", or read them as bfloat16, if they are above float16's 65504" if is_narrow else ""
        raise InputError(f"{source}: {', '.join(bad)} has NaN or Inf: give weights without them{cure}.")


@jax.jit
def _are_finite(arrays: list[jax.Array]) -> list[jax.Array]:
    """Whether each array has only finite numbers; arrays of equal shapes share a program."""
    return [jnp.isfinite(array).all() for array in arrays]


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


def find_tokenizer(config: Config, run_dir: Path) -> Tokenizer:
    """The tokenizer of `tokenizer_of`. Raises InputError if there is none, or if it does not fit the model."""
    spec = tokenizer_of(config, run_dir)
    tokenizer = load_tokenizer(spec)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise InputError(
            f"the tokenizer {spec} has {tokenizer.vocab_size} tokens, but the model has {config.model.vocab_size}: "
            f"copy the tokenizer of the training to {_copies(config, run_dir)[0]}."
        )
    return tokenizer


def tokenizer_of(config: Config, run_dir: Path) -> str:
    """`data.tokenizer` of a run's training, independent of the current directory if the run has a copy.

    It is the run's copy, `tokenizer.json` or `tokenizer.model`, else `data.tokenizer` relative to a directory above the
    run or to the current one. Raises InputError if there is none.
    """
    spec = config.data.tokenizer
    if spec is None:
        raise InputError(f"{run_dir}/config.yaml has no data.tokenizer, so tokens cannot become text: add it.")
    if has_no_file(spec):
        return spec
    copies = _copies(config, run_dir)
    found = next((path for path in copies if path.exists()), None) or above_or_here(spec, run_dir)
    if found is None:
        raise InputError(
            f"data.tokenizer={spec} ({run_dir}/config.yaml) is neither in the current directory nor above the "
            f"run: copy the file to {copies[0]}."
        )
    return str(found)


def _copies(config: Config, run_dir: Path) -> list[Path]:
    """The paths of a run's copy of its tokenizer, the likelier one first."""
    suffix = Path(config.data.tokenizer or "").suffix
    return sorted((run_dir / name for name in FILES), key=lambda path: path.suffix != suffix)


def above_or_here(path: str, run_dir: Path) -> Path | None:
    """A file or folder by its path from a directory above the run, or from the current one; None if there is none.

    The current directory comes last: it may be another project's, with files of the same names.
    """
    candidates = [*(directory / path for directory in run_dir.resolve().parents), Path(path)]
    return next((found for found in candidates if found.exists()), None)
