"""The weights of a train state in use without a file: a generator, and tensors in Hugging Face's format.

Arrays are converted one parameter, or one layer, at a time, by programs that are compiled once.
"""

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.config import ModelConfig
from megajax.errors import InputError, shown
from megajax.inference.generation import Generator
from megajax.inference.language_model import LanguageModel
from megajax.inference.load import for_inference
from megajax.inference.sampling import DEFAULT, Sampling
from megajax.inference.weights import abstract_parameters, abstract_state
from megajax.mesh import mesh_sizes
from megajax.model import Transformer
from megajax.model.block import state_by_name
from megajax.model.lora import A, B, is_adapter, low_rank, merge
from megajax.optim.offload import on_device
from megajax.sharding import Placement, to_canonical, unpadded_spec
from megajax.sources import NO_TEXT, Abstract, LayerState, TextSettings, WeightSource
from megajax.training.step import TrainProgram, TrainState
from megajax.weights.masters import joined

Stored = tuple[jax.Array, ...]  # a stored weight, or both halves of a master weight


class StateGenerator(Generator):
    """A Generator with the weights of a train state; on all its processes, each call needs all of them."""

    def __init__(
        self,
        program: TrainProgram,
        state: TrainState,
        sampling: Sampling = DEFAULT,
        mesh: Mesh | None = None,
        text: TextSettings = NO_TEXT,
    ):
        """`mesh`: another one of the same processes; by default that of the training.

        `text`: its tokenizer, and the tokens around a text.
        """
        config = for_inference(program.config, program.config.precision.compute, speculate=0)
        self._program, model, self._mesh = program, Transformer(config.model), mesh or program.mesh
        self._wanted = abstract_parameters(model, self._mesh, config.precision.compute)
        self._wanted_state = abstract_state(model, self._mesh)
        super().__init__(LanguageModel(config, *self._arrays(state), self._mesh, text), sampling)

    def update(self, state: TrainState) -> None:
        """Generate with the weights of another state of the same program from now on; nothing is compiled again.

        Raises InputError, and keeps the earlier weights, for what is no such state.
        """
        self.model.update(*self._arrays(state))

    def _arrays(self, state: TrainState) -> tuple[Any, LayerState]:
        return StateSource(self._program, state).read(self._wanted, self._wanted_state, self._program.config.model)


class StateSource(WeightSource):
    """The weights of a train state, with adapters merged into their base; all processes read together."""

    def __init__(self, program: TrainProgram, state: TrainState):
        _check_state(program, state)
        super().__init__(program.config.run.dir, "state")
        self._program, self._state = program, program.with_files(state, "master_low_bits")

    @contextlib.contextmanager
    def open(self, model: ModelConfig) -> Iterator[Mapping[str, Any]]:
        """One layer of a parameter is on the host at a time."""
        program, state = self._program, self._state
        layer_state = {kind: states for kind, states in state.layer_state.items() if kind in program.model.blocks}
        arrays: dict[str, Any] = {n: _Layers(program, state, n) for n in program.placements if not is_adapter(n)}
        yield arrays | {name: np.asarray(array) for name, array in state_by_name(layer_state).items()}

    def read(self, params: Abstract, layer_state: Mapping[str, Abstract], model: ModelConfig) -> tuple[Any, LayerState]:
        """The parameters are converted one by one, when they are popped."""
        placed = {
            kind: {n: jax.device_put(self._state.layer_state[kind][n], array.sharding) for n, array in wanted.items()}
            for kind, wanted in layer_state.items()
        }
        return _Parameters(self._program, self._state, params), placed


def _check_state(program: TrainProgram, state: Any) -> None:
    """Raise InputError for what is no state of the program, or one whose memory a step has taken."""
    if not isinstance(state, TrainState):
        problem = f"the state is of the type {type(state).__name__}"
        raise InputError(f"{problem}: give a TrainState, such as trainer.state or what train_step returns.")
    wanted, found = ({n: w.shape for n, w in each.weights.items()} for each in (program.abstract_state, state))
    if wanted != found:
        raise InputError("the state has weights of other shapes than this program: give a state of the same program.")
    if any(w.is_deleted() for w in state.weights.values()):
        raise InputError("a step has taken the state's memory: give the state that train_step returned.")


class _Parameters:
    """Canonical parameters in the dtypes and shardings of `wanted`, converted when they are popped."""

    def __init__(self, program: TrainProgram, state: TrainState, wanted: Mapping[str, jax.ShapeDtypeStruct]):
        self._program, self._state, self._wanted = program, state, wanted

    def pop(self, name: str, /) -> jax.Array:
        program, lora, wanted = self._program, self._program.config.lora, self._wanted[name]
        whole = self._whole(name, wanted.dtype, wanted.sharding)
        if name + A not in program.placements:
            return whole
        everywhere = NamedSharding(wanted.sharding.mesh, P())
        adapters = {name + end: self._whole(name + end, jnp.dtype("float32"), everywhere) for end in (A, B)}
        return merge({name: whole}, adapters, lora)[name]

    def _whole(self, name: str, dtype: Any, sharding: NamedSharding) -> jax.Array:
        placement, mesh = self._program.placements[name], self._program.mesh
        spec = unpadded_spec(placement, mesh_sizes(mesh))
        target = sharding if sharding.mesh == mesh else NamedSharding(mesh, spec)
        stored = _stored(self._state, name)
        rows = NamedSharding(mesh, spec) if placement.reordered else None
        return jax.device_put(_canonical(stored, placement, jnp.dtype(dtype), rows, target), sharding)


@partial(jax.jit, static_argnames=("placement", "dtype", "rows", "target"))
def _canonical(
    stored: Stored, placement: Placement, dtype: Any, rows: NamedSharding | None, target: NamedSharding
) -> jax.Array:
    """A weight in its canonical form. `rows`: its sharding while the layers get the model's order."""
    whole = _joined(stored)
    if rows is not None:
        whole = lax.with_sharding_constraint(whole, rows)
    return lax.with_sharding_constraint(to_canonical(whole, placement).astype(dtype), target)


def export_weights(
    program: TrainProgram, state: TrainState, form: str = "hf", dtype: str = "float32"
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of the folder that `hf export` writes of a checkpoint of `state`, one by one with their names.

    One layer of a parameter is on the host at a time. All processes iterate, and each gets all tensors, before a step
    takes the state's memory. Adapters are merged into their base, which has the dtype of the training. Raises
    InputError for a model that no family has.
    """
    from megajax.hf.beside import origin
    from megajax.hf.convert import stream  # here, because it needs safetensors

    if form != "hf":
        raise InputError(f"the format {form} is not known: give hf.")
    try:
        jnp.dtype(dtype)
    except TypeError:
        raise InputError(f"the dtype {shown(dtype)} is not known: give one such as bfloat16.") from None
    with StateSource(program, state).open(program.config.model) as weights:
        return stream(weights, program.config.model, dtype, origin(Path(program.config.run.dir)))


class _Layers:
    """A canonical parameter; an index of its stacked dimensions brings that part to the host."""

    def __init__(self, program: TrainProgram, state: TrainState, name: str):
        self._program, self._state, self._name = program, state, name
        self.shape = program.placements[name].shape

    def __getitem__(self, at: tuple[int, ...]) -> np.ndarray:
        part = self._part(self._name, at)
        if self._name + A not in self._program.placements:
            return part
        adapters = (np.asarray(self._part(self._name + end, at)) for end in (A, B))
        return np.asarray(part, np.float32) + self._program.config.lora.scale * low_rank(*adapters)

    def _part(self, name: str, at: tuple[int, ...]) -> np.ndarray:
        placement, mesh = self._program.placements[name], self._program.mesh
        if at and placement.reordered:
            assert placement.layers is not None
            at = placement.layers.index(placement.canonical_layers[at[0]]), *at[1:]
        found = _part(_stored(self._state, name), tuple(map(np.int32, at)), placement, NamedSharding(mesh, P()))
        return np.asarray(found)


@partial(jax.jit, static_argnames=("placement", "everywhere"))
def _part(stored: Stored, at: tuple[Any, ...], placement: Placement, everywhere: NamedSharding) -> jax.Array:
    """The part of a weight at an index of its first dimensions, on all devices, without padding."""
    for dim, index in enumerate(at):
        stored = tuple(_select(array, index, placement.spec[dim] is not None) for array in stored)
    part = _joined(stored)[tuple(slice(size) for size in placement.shape[len(at) :])]
    return lax.with_sharding_constraint(part, everywhere)


def _select(x: jax.Array, index: jax.Array, is_sharded: bool) -> jax.Array:
    """`x[index]`; of a sharded dimension without gathering it: a sum of bits over the devices, all but one are zero."""
    if not is_sharded:
        return x[index]
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    here = (jnp.arange(len(x)) == index).reshape(-1, *(1,) * (x.ndim - 1))
    return lax.bitcast_convert_type(jnp.where(here, bits, 0).sum(axis=0, dtype=bits.dtype), x.dtype)


def _stored(state: TrainState, name: str) -> Stored:
    return tuple(arrays[name] for arrays in (state.weights, state.master_low_bits) if name in arrays)


def _joined(stored: Stored) -> jax.Array:
    """The weight in one piece, inside a jitted function."""
    first, *low_bits = on_device(stored)
    return joined(first, *low_bits) if low_bits else first
