"""The weights of a layer with their low-rank adapters, as the communication points take them."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from megajax.model.lora import A, Adapted, B, adapters, is_adapter
from megajax.model.sublayer import BlockInputs
from megajax.schema.lora import LoraConfig
from megajax.weights.weight import Weight


def adapted(
    used: dict[str, Any], weights: Mapping[str, Weight], lora: LoraConfig, inputs: BlockInputs, layer: Any
) -> dict[str, Any]:
    """A layer's `used` weights by name, those that have an adapter as `Adapted`; `layer` is the layer's index."""
    if lora.rank is None:
        return used
    out = {name: w for name, w in used.items() if not is_adapter(name)}
    for name in adapters(used):
        a, b = used[name + A], lora.scale * _block_diagonal(weights[name].columns, used)
        out[name] = Adapted(out[name], a, b)
        if inputs.adapter_key is not None:
            key = jax.random.fold_in(jax.random.fold_in(inputs.adapter_key, layer), zlib.crc32(name.encode()))
            out[name] = Adapted(out[name].base, a, b, key, inputs.token_ids, lora.dropout)
    return out


def without_adapters(
    layers: Sequence[Sequence[Sequence[dict[str, Any]]]],
) -> list[tuple[tuple[dict[str, Any], ...], ...]]:
    """The weights of a stack's layers, by segment, remat group and layer, without the adapters."""

    def base(layer: dict[str, Any]) -> dict[str, Any]:
        return {name: w for name, w in layer.items() if not is_adapter(name)}

    return [tuple(tuple(map(base, group)) for group in groups) for groups in layers]


def _block_diagonal(columns: Mapping[str, slice], used: dict[str, Any]) -> jax.Array:
    """`[R, out]` of a fused weight: each layer's B in its own rows and columns, zeros elsewhere."""
    width = max(columns_of_member.stop for columns_of_member in columns.values())
    rows = [
        jnp.pad(used[member + B], ((0, 0), (columns_of_member.start, width - columns_of_member.stop)))
        for member, columns_of_member in columns.items()
        if member + B in used
    ]
    return jnp.concatenate(rows)
