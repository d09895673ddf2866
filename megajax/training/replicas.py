"""A check for silent data corruption: the copies of replicated state must be equal, bit for bit."""

import math
import warnings
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from megajax.checkpoint import Checkpoints
from megajax.config.sentences import located
from megajax.console import BAD_NUMBERS
from megajax.mesh import AXES
from megajax.optim.offload import on_device
from megajax.sharding import mesh_axes
from megajax.training.hooks import Hook, RunView
from megajax.training.step import TrainProgram, TrainState

UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
MOST_NAMED = 5  # arrays in the sentence


class Damage(NamedTuple):
    """An array whose copies differ, and the devices whose copy differs from the majority.

    Without a majority, as with two copies, these are all devices of the copies that differ.
    """

    array: str
    devices: list[Any]
    has_majority: bool


class ReplicaCheck(Hook):
    """Compares the copies of each array of the train state that several devices hold.

    Each device reads its part of the state once and computes a checksum of each array, so a check takes the bytes of
    the state in a device divided by the bandwidth of its memory. An array that is sharded over all devices has no
    second copy, so its damage is not found. Without `run.replica_check_interval` all methods do nothing.
    """

    def __init__(self, program: TrainProgram, saved: Callable[[], Checkpoints], is_saved: Callable[[RunView], bool]):
        """`saved` gives the checkpoints after the last save has ended; `is_saved`: whether the newest step is saved."""
        self.mesh, self._saved, self._is_saved = program.mesh, saved, is_saved
        self._abstract = program.without_files(program.abstract_state)
        paths = jax.tree_util.tree_flatten_with_path(self._abstract)[0]
        self._replicated = {_name(path): leaf for path, leaf in paths if _copies(leaf.sharding) > 1}
        self._interval = program.config.run.replica_check_interval
        if self._interval and not self._replicated:
            key = located(program.config, "run.replica_check_interval")
            warnings.warn(f"{key} has no effect on one device: remove it.", stacklevel=4)
        self._pending: list[tuple[int, jax.Array]] = []

    @cached_property
    def _compiled(self) -> jax.stages.Compiled:
        return jax.jit(self._checksums).lower(self._abstract).compile()

    @property
    def _is_on(self) -> bool:
        return bool(self._interval and self._replicated)

    def compile(self) -> None:
        """Compile the check, so that its first use does not."""
        if self._is_on:
            _ = self._compiled

    def on_step(self, run: RunView) -> None:
        self.start(run.step, run.state, self._is_saved(run))

    def examine(self, run: RunView, step: int) -> None:
        if damage := self.damage():
            run.note(explain(*damage, self._saved().latest_step))
            run.end_with(BAD_NUMBERS)

    def start(self, step: int, state: TrainState, before_save: bool = False) -> None:
        """Start a check of the state after `step` if it is due; it runs before the next step, the host does not wait.

        It is due at multiples of the interval, and `before_save`.
        """
        if self._is_on and (before_save or step % self._interval == 0):
            self._pending.append((step, self._compiled(state)))

    def damage(self) -> tuple[int, list[Damage]] | None:
        """The step of the first check since the last call that found copies that differ, and its findings."""
        pending, self._pending = self._pending, []
        for step, sums in pending:
            if found := compare(np.asarray(sums), self._specs, self.mesh):
                return step, found
        return None

    @property
    def _specs(self) -> dict[str, P]:
        return {name: leaf.sharding.spec for name, leaf in self._replicated.items()}

    def _checksums(self, state: TrainState) -> jax.Array:
        """The checksums `[devices, arrays]` of the replicated arrays, in the order of the mesh."""
        leaves = {_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]}
        replicated = on_device({name: leaves[name] for name in self._replicated})

        def local(arrays: dict[str, jax.Array]) -> jax.Array:
            return lax.all_gather(jnp.stack([checksum(arrays[name]) for name in self._replicated]), AXES)

        return jax.shard_map(local, mesh=self.mesh, in_specs=(self._specs,), out_specs=P(), check_vma=False)(replicated)


def checksum(x: jax.Array) -> jax.Array:
    """A uint32 of the bits of `x` and their positions: any change of one element changes it.

    Each element's bits and index go through a bijection with the mixing steps of MurmurHash3, and are added up modulo
    2^32; so elements that change places show too.
    """
    bits = lax.bitcast_convert_type(x, UNSIGNED[x.dtype.itemsize]).astype(jnp.uint32).reshape(-1)
    mixed = bits + jnp.arange(bits.size, dtype=jnp.uint32) * jnp.uint32(0x9E3779B9)
    mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
    return (mixed ^ (mixed >> 16)).sum(dtype=jnp.uint32)


def compare(sums: np.ndarray, specs: Mapping[str, P], mesh: Mesh) -> list[Damage]:
    """The arrays whose copies differ; `sums [devices, arrays]` in the order of the mesh and of `specs`."""
    by_axis, found = sums.reshape(*mesh.devices.shape, len(specs)), []
    for i, (name, spec) in enumerate(specs.items()):
        used = {axis for entry in spec for axis in mesh_axes(entry)}
        sharded = [axis for axis in AXES if axis in used]
        order = [AXES.index(axis) for axis in sharded] + [d for d, axis in enumerate(AXES) if axis not in sharded]
        groups = math.prod(mesh.shape[axis] for axis in sharded)
        # Row: one shard; column: one copy of it.
        copies = by_axis[..., i].transpose(order).reshape(groups, -1)
        devices = mesh.devices.transpose(order).reshape(groups, -1)
        for sums_of_copy, holders in zip(copies, devices, strict=True):
            values, counts = np.unique(sums_of_copy, return_counts=True)
            if len(values) > 1:
                majority = bool(2 * counts.max() > len(sums_of_copy))
                differs = sums_of_copy != values[counts.argmax()] if majority else np.ones(len(sums_of_copy), bool)
                found.append(Damage(name, list(holders[differs]), majority))
    return found


def explain(step: int, found: list[Damage], newest: int | None) -> str:
    """The error about copies that differ after `step`; `newest` is the newest checkpoint's step."""
    names = list(dict.fromkeys(damage.array for damage in found))
    listed = ", ".join(names[:MOST_NAMED]) + (f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else "")
    devices = sorted({device for damage in found for device in damage.devices}, key=lambda device: device.id)
    where = ", ".join(f"{device.id} of process {device.process_index}" for device in devices)
    which = "the copies on devices" if all(d.has_majority for d in found) else "no majority among devices"
    saved = "no checkpoint was saved" if newest is None else f"the newest checkpoint is of step {newest}"
    return (
        f"megajax: error: after step {step} the copies of {len(names)} replicated arrays differ ({listed}): "
        f"{which} {where}, so one of them computes or stores wrong numbers; {saved}: test these devices, and start "
        "again without them."
    )


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _copies(sharding: Any) -> int:
    """The number of devices that hold each element."""
    used = {axis for entry in sharding.spec for axis in mesh_axes(entry)}
    return math.prod(size for axis, size in sharding.mesh.shape.items() if axis not in used)
