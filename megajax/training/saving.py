"""The train state's canonical form, and its way into and out of checkpoints."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.checkpoint import Checkpoints, restore_parameters
from megajax.checkpoint.manager import compare_descriptions, describe_model
from megajax.mesh import mesh_sizes
from megajax.sharding import STORAGE_AXES, Placement, pad_to_storage, strip_padding
from megajax.training.step import TrainProgram, TrainState


class StateSaver:
    """Saves and restores a program's state; canonical shapes on disk, stored shapes on the devices."""

    def __init__(self, program: TrainProgram):
        self.program = program
        self.padded = any(p.shape != p.stored_shape for p in program.placements.values())

    def description(self, step: int) -> dict[str, Any]:
        """What a checkpoint says of itself; `model` and `optimizer` must fit the run that restores it."""
        config = self.program.config
        return {
            "format": 1,
            "step": step,
            "samples_consumed": step * config.batch.global_size,
            "run": {"seed": config.run.seed},  # another seed is another data order
            "model": describe_model(config.model),
            "optimizer": {"kind": config.optimizer.kind},
            "batch": {"global_size": config.batch.global_size, "sequence_length": config.batch.sequence_length},
        }

    def save(self, checkpoints: Checkpoints, step: int, state: TrainState) -> None:
        """Start writing the state as the checkpoint of `step`."""
        checkpoints.save(step, _as_tree(self._to_canonical(state)), self.description(step))

    def restore(self, checkpoints: Checkpoints, step: int) -> TrainState:
        """The state of a checkpoint, whatever mesh wrote it. Raises InputError if it is of another model or run."""
        place = f"The checkpoint of step {step} in {checkpoints.directory}"
        mine = self.description(step)
        compare_descriptions(
            checkpoints.describe(step), mine, place, ("model", "optimizer", "run", "batch"), "choose another run.dir"
        )
        tree = checkpoints.restore(step, _as_tree(self._canonical_abstract()))
        return self._to_stored(TrainState(**tree))

    def restore_weights(self, path: str) -> dict[str, jax.Array]:
        """The stored parameters of another run's checkpoint."""
        abstract: Any = self._canonical_abstract().params
        config, key = self.program.config, "checkpoint.init_from"
        weights = restore_parameters(path, abstract, config.model, key, f" ({config.where(key)})")
        placements = self.program.placements
        pad = jax.jit(
            lambda params: {name: pad_to_storage(w, placements[name]) for name, w in params.items()},
            out_shardings=self.program.state_shardings.params,
        )
        return pad(weights)

    def _canonical_abstract(self) -> TrainState:
        """Shapes of the canonical state; what the mesh does not divide lies unsharded."""
        if not self.padded:
            return self.program.abstract_state
        mesh = self.program.mesh
        return self._each(
            self.program.abstract_state,
            lambda s, p: jax.ShapeDtypeStruct(p.shape, s.dtype, sharding=NamedSharding(mesh, _unpadded_spec(p, mesh))),
        )

    def _to_canonical(self, state: TrainState) -> TrainState:
        if not self.padded:
            return state
        target = jax.tree.map(lambda s: s.sharding, self._canonical_abstract())
        return jax.jit(lambda s: self._each(s, strip_padding), out_shardings=target)(state)

    def _to_stored(self, state: TrainState) -> TrainState:
        if not self.padded:
            return state
        return jax.jit(lambda s: self._each(s, pad_to_storage), out_shardings=self.program.state_shardings)(state)

    def _each(self, state: TrainState, change: Callable) -> TrainState:
        """`change(leaf, placement)` for each parameter and moment; other leaves as they are."""
        placements = self.program.per_parameter(self.program.placements, None)
        leaves, treedef = jax.tree.flatten(state)
        which = jax.tree.leaves(placements, is_leaf=lambda node: node is None or isinstance(node, Placement))
        changed = [a if p is None else change(a, p) for a, p in zip(leaves, which, strict=True)]
        return jax.tree.unflatten(treedef, changed)


def _as_tree(state: TrainState) -> dict[str, Any]:
    return {name: getattr(state, name) for name in TrainState.__dataclass_fields__}


def _unpadded_spec(placement: Placement, mesh) -> P:
    sizes = mesh_sizes(mesh)
    shards = 1
    for axis in STORAGE_AXES:
        shards *= sizes[axis]
    entries = list(placement.spec)
    dim = placement.storage_dim
    if dim is not None and placement.shape[dim] % shards:
        entries[dim] = None
    return P(*entries)
