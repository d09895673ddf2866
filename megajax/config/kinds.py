"""The kinds of layers that a model has, and the kind of each layer."""

from typing import NamedTuple

from megajax.config.model_schema import ModelConfig


class LayerKind(NamedTuple):
    """What a layer's program depends on."""

    block: str  # "dense" or "moe": which parameters it has
    window: int | None  # number of tokens that it attends to; None: all


def layer_kinds(model: ModelConfig) -> tuple[LayerKind, ...]:
    """The kind of each layer."""
    windows, experts = layer_windows(model), model.num_experts is not None
    dense, interval = model.first_dense_layers, model.moe_layer_interval
    return tuple(
        LayerKind("moe" if experts and i >= dense and (i + 1) % interval == 0 else "dense", windows[i % len(windows)])
        for i in range(model.num_layers)
    )


def block_layers(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The layers of each kind of block that the model has."""
    blocks = [kind.block for kind in layer_kinds(model)]
    return {name: tuple(i for i, block in enumerate(blocks) if block == name) for name in sorted(set(blocks))}


def is_mixed(model: ModelConfig) -> bool:
    """Whether some layers are dense and others have experts."""
    return len(block_layers(model)) > 1


def layer_windows(model: ModelConfig) -> tuple[int | None, ...]:
    """The sliding window of each layer of one period of `model.layer_pattern`."""
    if model.layer_pattern is None:
        return (model.sliding_window,)
    return tuple(model.sliding_window if kind == "local" else None for kind in model.layer_pattern)
