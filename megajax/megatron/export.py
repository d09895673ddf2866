"""A model's weights become a checkpoint of Megatron-Core."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megajax.config import ModelConfig
from megajax.hf.convert import their_tensors
from megajax.hf.folder import new_folder
from megajax.layout.kinds import is_mixed
from megajax.megatron import NEWEST
from megajax.megatron.distributed import FUSED_NORMS, VOCABULARY
from megajax.megatron.gpt import entries
from megajax.megatron.writer import CheckpointWriter
from megajax.model.block import layer_state, state_by_name

OF_LATENTS = "_up_proj."  # in the names of norms that only latent attention has


class Stored(NamedTuple):
    """The names under which a checkpoint has a tensor, and the block of the stored tensor that it is."""

    names: list[str]
    at: list[int]  # the layer and the expert, as far as they are dimensions there
    sizes: list[int]  # of these dimensions


def export(
    weights: Mapping[str, Any],
    model: ModelConfig,
    folder: Path,
    step: int,
    common: Mapping[str, Any],
    padded_vocabulary: int,
    dtype: str,
) -> None:
    """Write the parameters and the layers' state `weights`, canonical arrays read layer by layer, as a run's folder.

    It has the checkpoint of `step`, with `common`, what all ranks have in common. Tokens up to `padded_vocabulary` have
    zeros. The model is one that Megatron has. Raises InputError if the folder exists or cannot be written.
    """
    kept = state_by_name(layer_state(model))
    with new_folder(folder) as partial:
        (partial / f"iter_{step:07d}").mkdir()
        with CheckpointWriter(partial / f"iter_{step:07d}") as writer:
            for name, array in their_tensors(weights, entries(model), model, np.dtype(dtype), kept):
                if name in VOCABULARY and len(array) < padded_vocabulary:
                    array = np.pad(array, ((0, padded_vocabulary - len(array)), (0, 0)))
                stored = stored_as(name, model)
                writer.add(stored.names, array[None] if name.endswith("gate_weight") else array, *stored[1:])
                writer.add_nothing(_extra_states(stored))
            writer.finish(common)
        (partial / NEWEST).write_text(str(step), encoding="utf-8")


def stored_as(name: str, model: ModelConfig) -> Stored:
    """Where a checkpoint has a tensor of `entries`: the inverse of `distributed.named_parts`.

    A norm has all the names that Megatron's implementations give it: of the norm's own module, and fused with the layer
    after it.
    """
    stored = Stored([], [], [])
    if found := re.match(r"(decoder|mtp)\.layers\.(\d+)\.", name):
        layer, rest = int(found[2]), name[found.end() :]
        if found[1] == "mtp":
            name = f"mtp.layers.{layer - model.num_layers}.{rest}"
        elif not is_mixed(model):  # Megatron's rule: layers of one kind are one tensor
            name = f"decoder.layers.{rest}"
            stored.at.append(layer)
            stored.sizes.append(model.num_layers)
    if found := re.search(r"\.local_experts\.(\d+)\.", name):
        name = f"{name[: found.start()]}.experts.{name[found.end() :]}"
        stored.at.append(int(found[1]))
        stored.sizes.append(model.num_experts or 0)
    fused = (name.replace(ours, theirs) for theirs, ours in FUSED_NORMS.items() if theirs.endswith("layer_norm_"))
    others = [other for other in fused if other != name and (model.is_latent or OF_LATENTS not in other)]
    stored.names.extend([name, *others])
    return stored


def _extra_states(stored: Stored) -> Iterator[str]:
    """The names of the states of FP8 that Megatron expects beside a weight; nothing is in them."""
    at, sizes = (".".join(map(str, values)) for values in (stored.at or [0], stored.sizes or [1]))
    for name in stored.names:
        module, _, weight = name.rpartition(".")
        if weight == "weight":
            yield f"{module}._extra_state/shard_{at}_{sizes}"
            if module.endswith("self_attention.linear_proj"):
                attention = module.removesuffix("linear_proj")
                yield f"{attention}core_attention._extra_state/shard_{at}_{sizes}"
