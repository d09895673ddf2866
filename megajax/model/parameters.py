"""Declaration of parameters with shape, logical axes and role, and their initial values.

A module is abstract: its parameters hold `jax.ShapeDtypeStruct`s, so describing a 405B model takes no memory. Arrays
are passed as flat dictionaries, keyed by the canonical dotted names of the checkpoint format.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.errors import ConfigError, accepts, shown
from megajax.sharding import LOGICAL_TO_MESH

Initial = Callable[[jax.Array, tuple[int, ...]], jax.Array]  # (key, shape) → FP32 values
ROLES = ("matrix", "embedding", "norm", "bias")


def declare(
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    role: str = "matrix",
    scale: float = 1.0,
    muon: bool = True,
    initial: Initial | None = None,
) -> nnx.Param:
    """A parameter without an array.

    `axes` are names of LOGICAL_TO_MESH. `role` sets the initial values (matrix and embedding: normal with std
    `model.init_std * scale`; norm: `scale`; bias: zeros), unless `initial` does, and whether weight decay applies.
    `muon`: whether the optimizer Muon updates it as a matrix, if that is its role; AdamW updates all others.
    """
    if not isinstance(shape, Sequence) or not all(isinstance(size, Integral) and size > 0 for size in shape):
        raise ConfigError(f"a parameter was declared with the shape {shown(shape)}: give a tuple of sizes, (64, 128).")
    if len(shape) != len(axes) or not set(axes) <= {*LOGICAL_TO_MESH}:
        raise ConfigError(
            f"a parameter of the shape {shape} was declared with the logical axes {axes}: give each dimension one of "
            f"{', '.join(LOGICAL_TO_MESH)} (docs/extensions.md, 'What a sublayer declares')."
        )
    dividing = [LOGICAL_TO_MESH[axis] for axis in axes if LOGICAL_TO_MESH[axis]]
    if "experts" not in axes and len({*dividing}) < len(dividing):
        problem = f"a parameter of the shape {shape} was declared with the logical axes {axes}"
        raise ConfigError(f"{problem}, two of which the same mesh axes divide: call one dimension whole.")
    if initial is not None and not accepts(initial, None, shape):
        raise ConfigError(
            f"a parameter was declared with initial={shown(initial)}: give a function of a key and a shape."
        )
    if role not in ROLES:
        raise ConfigError(f"a parameter was declared with the role {role}: use {', '.join(ROLES)}.")
    own = {"axes": axes, "role": role, "scale": scale, "muon": muon and role == "matrix", "initial": initial}
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), **own)


def check_declared(module: nnx.Module, name: str) -> None:
    """Raise ConfigError if an array of `module`, the user's `name`, was not made by `declare`."""
    for path, parameter in parameters(module).items():
        if not isinstance(parameter, nnx.Param) or not hasattr(parameter, "role"):
            problem = f"{name} has {path} of the type {type(parameter).__name__}, which declare did not make"
            raise ConfigError(
                f"{problem}: write megajax.model.declare(shape, axes), or keep constants out of attributes."
            )


def stack[Module: nnx.Module](block: Module, layers: tuple[int, ...], axis: str = "layers") -> Module:
    """The same block with every parameter stacked in place to `[L, ...]`, one row for each of the model's `layers`.

    `axis` is the logical axis of the rows.
    """
    for parameter in parameters(block).values():
        parameter.set_value(jax.ShapeDtypeStruct((len(layers), *parameter.shape), parameter.dtype))
        parameter.set_metadata(axes=(axis, *parameter.axes), layers=layers)
    return block


def parameters(module: nnx.Module) -> dict[str, nnx.Param]:
    """The module's parameters by canonical dotted name, in the order of its pytree leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(module, is_leaf=lambda node: isinstance(node, nnx.Param))
    return {
        ".".join(str(getattr(key, "name", getattr(key, "key", key))) for key in path): leaf for path, leaf in leaves
    }


def bind[Module: nnx.Module](module: Module, arrays: Mapping[str, jax.Array]) -> Module:
    """The module with `arrays`, by name and of any shape, instead of its parameters."""
    return jax.tree.unflatten(jax.tree.structure(module), [arrays[name] for name in parameters(module)])


def init_parameters(
    module: nnx.Module, seed: int, init_std: float, layers: Mapping[str, Sequence[int] | None] | None = None
) -> dict[str, jax.Array]:
    """Initial FP32 weights; they depend only on the seed, the parameter's name and the layer in the model.

    `layers` has for each block parameter the layer of each row, by default all layers in order; a row with a negative
    layer is zeros.
    """
    layers = layers or {n: p.layers for n, p in parameters(module).items() if p.axes[0] == "layers"}
    return {n: _initial(p, n, seed, init_std, layers.get(n)) for n, p in parameters(module).items()}


def _initial(parameter: nnx.Param, name: str, seed: int, init_std: float, layers: Sequence[int] | None) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode()))
    std, shape = init_std * parameter.scale, parameter.shape

    def values(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        if parameter.initial is not None:
            first = parameter.initial(key, shape)
            if first.shape != shape:
                problem = f"the function `initial` of {name} returns the shape {[*first.shape]} for {[*shape]}"
                raise ConfigError(f"{problem}: return an array of the shape that it is given.")
            return first
        if parameter.role == "norm":
            return jnp.full(shape, parameter.scale, jnp.float32)
        if parameter.role == "bias":
            return jnp.zeros(shape, jnp.float32)
        return std * jax.random.normal(key, shape, jnp.float32)

    if layers is None:
        return values(key, shape)
    rows = jnp.array(layers)
    weights = jax.vmap(lambda layer: values(jax.random.fold_in(key, layer), shape[1:]))(rows)
    return jnp.where((rows >= 0).reshape(-1, *(1,) * (len(shape) - 1)), weights, 0)
