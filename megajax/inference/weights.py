"""The weights of a model in use: each layer's own, fused, in the compute dtype, divided over the devices of a mesh."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.layout.kinds import stacked_layers
from megajax.mesh import mesh_sizes
from megajax.model import Block, Transformer, parameters
from megajax.model.block import layer_state
from megajax.model.sublayer import State
from megajax.sharding import BLOCKS, COMPUTED_IN_FP32, place_in_use

FUSED_BYTES = 2**26  # of small parameters that one program fuses


class ModelWeights(NamedTuple):
    """A pytree with all arrays of a model."""

    outer: dict[str, jax.Array]  # embedding, final norm and head, by canonical name
    layers: tuple[dict[str, jax.Array], ...]  # of each layer, also those after the model's, from `Block.fuse`
    state: tuple[dict[str, jax.Array], ...]  # of the same


class Parameters(Protocol):
    """Canonical parameters by name, each of which is given once."""

    def pop(self, name: str, /) -> jax.Array: ...


def abstract_parameters(model: Transformer, mesh: Mesh, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """The canonical parameters with the dtypes and the shardings in which they are read."""

    def abstract(parameter: Any) -> jax.ShapeDtypeStruct:
        dtype_in_use = jnp.float32 if parameter.axes[-1] in COMPUTED_IN_FP32 else dtype
        spec = place_in_use(parameter.shape, parameter.axes, mesh_sizes(mesh))
        return jax.ShapeDtypeStruct(parameter.shape, dtype_in_use, sharding=NamedSharding(mesh, spec))

    return {name: abstract(parameter) for name, parameter in parameters(model).items()}


def abstract_state(model: Transformer, mesh: Mesh) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
    """The layers' state as `restore_model` reads it, on all devices."""
    everywhere = NamedSharding(mesh, P())
    return {
        kind: {n: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=everywhere) for n, a in arrays.items()}
        for kind, arrays in layer_state(model.config).items()
    }


def from_parameters(model: Transformer, params: "Parameters", state: Mapping[str, State], mesh: Mesh) -> ModelWeights:
    """The weights of canonical parameters, popped one by one, so that a large one is freed when it has been fused."""
    outer = {name: params.pop(name) for name in parameters(model) if not name.startswith(BLOCKS)}
    count = sum(map(len, stacked_layers(model.config).values()))
    layers: list[dict[str, jax.Array]] = [{} for _ in range(count)]
    states: list[dict[str, jax.Array]] = [{} for _ in range(count)]
    for kind, held in stacked_layers(model.config).items():
        block = model.blocks[kind]
        axes = {name: parameter.axes for name, parameter in parameters(block).items()}  # with "layers" first
        fused = {member: name for name, members in block.fused.items() for member in members}
        groups = [*dict.fromkeys(fused.get(name, name) for name in axes)]
        stacked: dict[str, jax.Array] = {}
        rows_of: dict[str, tuple[str, ...]] = {}  # the groups of `stacked`, with the logical axes of a row
        for group in groups:
            members = [name for name in axes if fused.get(name, name) == group]
            stacked |= {name: params.pop(f"{BLOCKS}{kind}.{name}") for name in members}
            rows_of[group] = tuple(axis for axis in axes[members[0]][1:] if axis != "head")
            if group == groups[-1] or sum(array.nbytes for array in stacked.values()) >= FUSED_BYTES:
                rows = _rows(stacked, block=block, axes=tuple(rows_of.items()), mesh=mesh)
                stacked, rows_of = {}, {}
                for layer, row in zip(held, rows, strict=True):
                    layers[layer] |= row
        for name, array in state.get(kind, {}).items():
            for row, layer in enumerate(held):
                states[layer][name] = array[row]
    return ModelWeights(outer, tuple(layers), tuple(states))


@partial(jax.jit, static_argnames=("block", "axes", "mesh"))
def _rows(
    stacked: dict[str, jax.Array], *, block: Block, axes: tuple[tuple[str, tuple[str, ...]], ...], mesh: Mesh
) -> tuple[dict[str, jax.Array], ...]:
    """The fused weights of each layer by name, those in `axes`, from the `stacked` parameters that they consist of."""

    def placed(row: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        return lax.with_sharding_constraint(row, NamedSharding(mesh, place_in_use(row.shape, axes, mesh_sizes(mesh))))

    whole = block.fuse(stacked)
    rows = {group: [placed(row, of_row) for row in whole[group]] for group, of_row in axes}
    return tuple(dict(zip(rows, layer, strict=True)) for layer in zip(*rows.values(), strict=True))
