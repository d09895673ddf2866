"""A run's low-rank adapters: merged into their base model, and as a folder in PEFT's format."""

import contextlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megajax.checkpoint.description import describe_model, differences
from megajax.checkpoint.storage import SUBDIRECTORY
from megajax.checkpoint.weights import open_model, open_weights
from megajax.config import Config
from megajax.errors import InputError
from megajax.hf import ADAPTERS, is_hf_folder
from megajax.hf.beside import origin
from megajax.hf.classifiers import ARCHITECTURES, SCORE
from megajax.hf.convert import describe_section, family_for, read_model
from megajax.hf.folder import new_folder, save_tensors
from megajax.hf.tensors import Tensor, tensors_by_name, whole_shape
from megajax.model import Transformer, parameters
from megajax.model.lora import A, B, low_rank
from megajax.sharding import OBJECTIVE
from megajax.sources import initial_weights

PEFT_WEIGHTS = "adapter_model.safetensors"


@contextlib.contextmanager
def open_merged(run_dir: Path, step: int, config: Config) -> Iterator[Mapping[str, Any]]:
    """The canonical parameters of a checkpoint by name, read where they are indexed; adapters merged into their base.

    The layers' state is among them, by names as in `state_by_name`.

    Raises InputError if the base model, `checkpoint.init_from`, cannot be read or is another model.
    """
    checkpoint, base = run_dir / SUBDIRECTORY / str(step), config.checkpoint.init_from
    weights, layer_state = open_model(checkpoint, config.model)
    if config.lora.rank is None:
        yield weights | layer_state
        return
    assert base is not None
    with contextlib.ExitStack() as stack:
        shapes = {name: p.shape for name, p in parameters(Transformer(config.model)).items()}
        source = initial_weights(config, run_dir=run_dir)
        arrays = stack.enter_context(source.open(config.model))
        if {name: tuple(array.shape) for name, array in arrays.items() if name not in layer_state} != shapes:
            raise InputError(f"{source.shown} is not the adapters' base: restore the base.")
        own = {name: array for name, array in weights.items() if name.startswith(OBJECTIVE)}
        yield {name: _Merged(name, arrays[name], weights, config.lora.scale) for name in shapes} | layer_state | own


class _Merged:
    """`W + scale · A B` of a parameter; an index of its stacked dimensions reads and merges that part."""

    def __init__(self, name: str, base: Any, weights: Mapping[str, Any], scale: float):
        self._name, self._base, self._weights, self._scale, self.shape = name, base, weights, scale, base.shape

    def __getitem__(self, at: tuple[int, ...]) -> np.ndarray:
        base = np.asarray(self._base[at], np.float32)
        if self._name + A not in self._weights:
            return base
        return base + self._scale * low_rank(*(self._weights[self._name + end][at] for end in (A, B)))


def export_adapters(run_dir: Path, step: int, config: Config, folder: Path) -> None:
    """Write the adapters of a checkpoint as a folder in PEFT's format: adapter_config.json, adapter_model.safetensors.

    Weights that are one tensor in the family's model, such as GPT-2's queries, keys and values, become one adapter of
    the sum of their ranks. A classifier's matrix is among the tensors, as a module that PEFT saves. Raises InputError
    for a run without adapters, for a model that no family has, and for a folder that cannot be written.
    """
    lora = config.lora
    if lora.rank is None or lora.alpha is None:
        raise InputError(f"RUN={run_dir} has no adapters (lora.rank=null): write its weights with the command export.")
    weights, model = open_weights(run_dir / SUBDIRECTORY / str(step)), config.model
    if model.vision is not None:  # PEFT would add adapters to modules of the same names in the tower
        raise InputError(
            f"RUN={run_dir} reads images (model.vision): write its merged weights with the command export."
        )
    _warn_of_another_base(config, run_dir)
    family, declared = family_for(model, origin(run_dir)), parameters(Transformer(model))
    stored = dict[str, np.ndarray]()
    own = {name for name in weights if name.startswith(OBJECTIVE)}
    is_classifier = own == {SCORE.ours} and family.model_type in ARCHITECTURES
    if is_classifier:
        score = np.asarray(weights[SCORE.ours][...], np.float32)
        stored[f"base_model.model.{SCORE.theirs}"] = np.ascontiguousarray(score.T)
    elif own:
        problem = f"RUN={run_dir} has parameters of objective.kind={config.objective.kind} in place of the model's head"
        warnings.warn(f"{problem}, which are not written: take them from megajax.load_weights.", stacklevel=2)
    ranks: dict[str, int] = {}
    transposed = False
    for name, parts in tensors_by_name(family.tensors(model), model).items():
        group, at = [tensor for tensor, _ in parts], parts[0][1]  # parts of one tensor have the same indices
        adapted = [tensor for tensor in group if tensor.ours + A in weights]
        if not adapted:
            continue
        transposed = _is_transposed(adapted[0], *(weights[adapted[0].ours + end][at] for end in (A, B)))
        module = name.removesuffix(".weight")
        a, b = _of_module(group, weights, at, {tensor.ours: declared[tensor.ours].shape[1:] for tensor in group})
        ranks[".".join(module.split(".")[-2:])] = len(a)
        for which, matrix in (("A", a), ("B", b)):
            stored[f"base_model.model.{module}.lora_{which}.weight"] = np.ascontiguousarray(matrix)
    other_ranks = {module: rank for module, rank in ranks.items() if rank != lora.rank}
    settings = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if is_classifier else "CAUSAL_LM",
        "modules_to_save": [SCORE.theirs.removesuffix(".weight")] if is_classifier else None,
        "base_model_name_or_path": config.checkpoint.init_from,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(ranks),
        "rank_pattern": other_ranks,
        "alpha_pattern": {module: lora.scale * rank for module, rank in other_ranks.items()},
        "bias": "none",
        "fan_in_fan_out": transposed,
        "inference_mode": True,
    }
    with new_folder(folder) as partial:
        save_tensors(stored, partial / PEFT_WEIGHTS)
        (partial / ADAPTERS).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _warn_of_another_base(config: Config, run_dir: Path) -> None:
    """Warn if the run's model is not that of its base's folder, to which PEFT will add the adapters."""
    base, model = initial_weights(config, run_dir=run_dir).path, config.model
    if not is_hf_folder(base):
        return
    with contextlib.suppress(InputError):
        theirs, mine = describe_section(read_model(base), model), {"model": describe_model(model)}
        if changed := differences(theirs, mine, ("model",)):
            warnings.warn(
                f"the base {base} is not the run's model ({'; '.join(map(str, changed))}), and PEFT adds the adapters"
                " to the base: change it in the same way first, or write the merged model with the command export.",
                stacklevel=2,
            )


def _of_module(
    parts: Sequence[Tensor], weights: Mapping[str, Any], at: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[np.ndarray, np.ndarray]:
    """A `[R, in]` and B `[out, R]` of one tensor that `parts` share; each has its own rows of A, and columns of B.

    `shapes` are those of the weights. A pattern holds for a weight, and so for B of a column layer and for A of a row
    layer, where the rank is the other dimension.
    """
    firsts, seconds = [], []
    for tensor in parts:
        if tensor.ours + A not in weights:
            continue
        a, b = (np.asarray(weights[tensor.ours + end][at]) for end in (A, B))
        b = tensor.divided(b)
        if a.ndim == 2:
            shapes_of_parts, factor = {t.ours: (b.shape[0], *shapes[t.ours][1:]) for t in parts}, b
        else:
            shapes_of_parts, factor = {t.ours: (*shapes[t.ours][:-1], a.shape[-1]) for t in parts}, a
        theirs = np.zeros(whole_shape((t, shapes_of_parts[t.ours]) for t in parts), np.float32)
        tensor.put(theirs, factor)
        theirs = theirs.T if _is_transposed(tensor, a, b) else theirs
        firsts.append(a.T if a.ndim == 2 else theirs)
        seconds.append(theirs if a.ndim == 2 else b.T)
    return np.concatenate(firsts), np.concatenate(seconds, axis=1)


def _is_transposed(tensor: Tensor, a: np.ndarray, b: np.ndarray) -> bool:
    """Whether the tensor is `[in, out]`, as in GPT-2, and not `[out, in]`, for a weight with these A and B."""
    if a.ndim == 2:
        return tensor.their_shape((1, *b.shape[1:]))[0] == 1
    return tensor.their_shape((*a.shape[:-1], 1))[1] == 1
