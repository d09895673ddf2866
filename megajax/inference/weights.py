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
    """The weights of canonical parameters, popped one by one, so that each is freed when it has been fused."""
    outer = {name: params.pop(name) for name in parameters(model) if not name.startswith(BLOCKS)}
    count = sum(map(len, stacked_layers(model.config).values()))
    layers: list[dict[str, jax.Array]] = [{} for _ in range(count)]
    states: list[dict[str, jax.Array]] = [{} for _ in range(count)]
    for kind, held in stacked_layers(model.config).items():
        block = model.blocks[kind]
        axes = {name: parameter.axes for name, parameter in parameters(block).items()}  # with "layers" first
        fused = {member: name for name, members in block.fused.items() for member in members}
        for group in dict.fromkeys(fused.get(name, name) for name in axes):
            members = [name for name in axes if fused.get(name, name) == group]
            stacked = {name: params.pop(f"{BLOCKS}{kind}.{name}") for name in members}
            logical = tuple(axis for axis in axes[members[0]][1:] if axis != "head")
            rows = _rows(stacked, block=block, group=group, axes=logical, mesh=mesh)
            for layer, row in zip(held, rows, strict=True):
                layers[layer][group] = row
        for name, array in state.get(kind, {}).items():
            for row, layer in enumerate(held):
                states[layer][name] = array[row]
    return ModelWeights(outer, tuple(layers), tuple(states))


@partial(jax.jit, static_argnames=("block", "group", "axes", "mesh"))
def _rows(
    stacked: dict[str, jax.Array], *, block: Block, group: str, axes: tuple[str, ...], mesh: Mesh
) -> tuple[jax.Array, ...]:
    """The fused weight `group` of each layer, from the `stacked` parameters that it consists of."""
    rows = tuple(block.fuse(stacked)[group])
    sharding = NamedSharding(mesh, place_in_use(rows[0].shape, axes, mesh_sizes(mesh)))
    return tuple(lax.with_sharding_constraint(row, sharding) for row in rows)
