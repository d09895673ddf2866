"""The update with slots in files (`optimizer.offload_dir`): a program for the parameters of each turn, led by the host.

The step's program ends with the gradients and the norms by which they are clipped. Then the slots of each turn come
from the files to the device, chunk by chunk, the program of `Update` changes them, and they return. A chunk has some
rows of an array on each device, so the host keeps a few chunks only, and the device the slots of two turns, as with
slots in the host's memory.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax import cluster
from megajax.errors import InputError
from megajax.optim.forms import StateArray
from megajax.optim.offload import on_host
from megajax.optim.optimizer import Updated
from megajax.optim.slot_files import KEY, TAKEN, SlotFiles, aligned
from megajax.optim.update import Given, Update, join_parts, part_of

CHUNK = 2**26  # bytes on a device, at most if a row is not larger


@dataclass(frozen=True)
class StoredRows:
    """The chunks of a stored array: on each device `shape` of its shard, at `begins`; the last two may overlap."""

    dtype: Any
    shard: tuple[int, ...]
    shape: tuple[int, ...]
    begins: tuple[tuple[int, ...], ...]
    sharding: NamedSharding  # on the device
    whole: tuple[int, ...]  # shape of the whole array

    @classmethod
    def of(cls, array: StateArray, mesh: Mesh) -> "StoredRows":
        assert array.placement is not None
        sharding = array.sharding(mesh)
        whole, dtype = array.placement.stored_shape, jnp.dtype(array.dtype)
        shard, size = sharding.shard_shape(whole), dtype.itemsize
        # The first dimension of which a row fits into a chunk.
        dim = next(d for d in range(len(shard)) if d + 1 == len(shard) or math.prod(shard[d + 1 :]) * size <= CHUNK)
        rows = max(1, min(shard[dim], CHUNK // (math.prod(shard[dim + 1 :]) * size)))
        starts = [*range(0, shard[dim] - rows, rows), shard[dim] - rows]
        rest = (0,) * (len(shard) - dim - 1)
        begins = tuple((*above, start, *rest) for above in np.ndindex(shard[:dim]) for start in starts)
        return cls(dtype, shard, (*(1,) * dim, rows, *shard[dim + 1 :]), begins, sharding, whole)

    @property
    def bytes(self) -> int:
        """Of a chunk on a device."""
        return math.prod(self.shape) * self.dtype.itemsize

    def array(self, parts: Sequence[np.ndarray]) -> jax.Array:
        """A chunk of each of this process's devices, in bytes → the chunks of all devices as one array."""
        sharding, devices = self.sharding, _devices(self.sharding.mesh)
        shape = tuple(
            size * whole // shard for size, whole, shard in zip(self.shape, self.whole, self.shard, strict=True)
        )
        shaped = [part.view(self.dtype).reshape(self.shape) for part in parts]
        # An array on a CPU would share the memory of the buffer, which is filled again.
        shaped = [part.copy() if d.platform == "cpu" else part for part, d in zip(shaped, devices, strict=True)]
        placed = [jax.device_put(part, device) for part, device in zip(shaped, devices, strict=True)]
        return jax.make_array_from_single_device_arrays(shape, sharding, placed)

    def slices(self, begin: Sequence[int]) -> tuple[slice, ...]:
        """The chunk at `begin` as part of a shard."""
        return tuple(slice(b, b + n) for b, n in zip(begin, self.shape, strict=True))


class StreamedUpdate:
    """The update whose slots are in files. What is on the devices is in the train state, which lacks the others."""

    def __init__(self, update: Update):
        self.update, self.slots, self.mesh = update, update.slots, update.mesh
        self.stored = self.slots.in_files  # by key
        self.turns = [(names, [key for key in self.stored if key[1] in names]) for names in paired(update)]
        # By key, the arrays of a slot in the order of its tree.
        self.rows = {
            key: [StoredRows.of(array, self.mesh) for array in jax.tree.leaves(arrays)]
            for key, arrays in self.stored.items()
        }

    def make_files(self) -> None:
        """Make the files now. Raises InputError on all processes if one of them has no usable folder, or no room."""

        def problem() -> str:
            try:
                _ = self.files
            except InputError as error:
                return str(error)
            return ""

        if found := cluster.current().first_problem(problem):
            raise InputError(found)

    @cached_property
    def files(self) -> SlotFiles:
        settings, chunks = self.update.plan.optimizer, [rows for _, rows, _ in self._chunks]
        assert settings.offload_dir is not None
        where, sizes = self.update.plan.where(KEY), [rows.bytes for rows in chunks]
        return SlotFiles(Path(settings.offload_dir), sizes, len(_devices(self.mesh)), self.memory, where)

    @property
    def bytes(self) -> int:
        """Of the file of a device."""
        return sum(aligned(rows.bytes) for _, rows, _ in self._chunks)

    @property
    def memory(self) -> int:
        """Bytes of host memory for each device, at most."""
        return min(2 * self.bytes, int(self.update.plan.optimizer.offload_buffers * 2**30))

    @cached_property
    def _chunks(self) -> list[tuple[tuple[str, str], StoredRows, tuple[int, ...]]]:
        """The key, the array and the begin of each chunk, in the order of the files."""
        return [
            (key, rows, begin)
            for _, keys in self.turns
            for key in keys
            for rows in self.rows[key]
            for begin in rows.begins
        ]

    @cached_property
    def _first_chunk(self) -> dict[tuple[str, str], int]:
        """The number of the first chunk of each slot."""
        found = dict[tuple[str, str], int]()
        for number, (key, _, _) in enumerate(self._chunks):
            found.setdefault(key, number)
        return found

    def __call__(self, state: Updated, given: Given) -> Updated:
        """What is on the devices after the update of a step; the slots in the files change too."""
        self.files.read_ahead()
        if not bool(given.finite):  # a skipped step changes nothing
            return state
        untrained = {name: w for name, w in state.params.items() if name not in self.slots.placements}
        parts = []
        for number, (names, keys) in enumerate(self.turns):
            before = self.slots.merged(part_of(state, names), {key: self._read(key) for key in keys})
            of_turn = given.of(names)
            after = self.programs[number](*_by_donation(before), of_turn)
            for gradient in of_turn.gradients.values():
                gradient.delete()  # frees it when the program has read it
            after, moved = self.slots.divided(after)
            for key in keys:
                self._write(key, moved[key])
            parts.append(after)
        after = join_parts(parts)
        return after._replace(params=after.params | untrained)

    @cached_property
    def programs(self) -> list[Any]:
        """The jitted update of each turn: (arrays, which are donated, scalars, `Given`) → what has changed."""
        return [self._make_program(names, keys) for names, keys in self.turns]

    def _make_program(self, names: set[str], keys: Sequence[tuple[str, str]]) -> Any:
        on_device = {
            key: jax.tree.unflatten(jax.tree.structure(self.stored[key]), [rows.sharding for rows in self.rows[key]])
            for key in keys
        }
        on_devices = jax.tree.map(lambda array: array.sharding(self.mesh), self.slots.divided(self.slots.stored)[0])
        target = self.slots.merged(part_of(on_devices, names), on_device)

        def update(arrays: Updated, scalars: Updated, given: Given) -> Updated:
            with jax.named_scope("optimizer"):
                return self.update.of_turn(_merged_scalars(arrays, scalars), given)

        return jax.jit(update, donate_argnums=0, out_shardings=target)

    # Slots on the way

    def _read(self, key: tuple[str, str]) -> Any:
        """The arrays of a slot on the devices: those whose turn it is in the files."""
        arrays = []
        for rows in self.rows[key]:
            whole, arriving = None, deque[jax.Array]()
            for begin in rows.begins:
                chunk = rows.array(self.files.take())
                arriving.append(chunk)
                if len(rows.begins) == 1:
                    whole = chunk
                else:
                    whole = _zeros(rows.whole, rows.dtype, rows.sharding)() if whole is None else whole
                    whole = _put(rows.sharding)(whole, chunk, np.array(begin, np.int32))
                del chunk
                if len(arriving) == TAKEN:
                    self._arrived(arriving)
            while arriving:
                self._arrived(arriving)
            arrays.append(whole)
        return jax.tree.unflatten(jax.tree.structure(self.stored[key]), arrays)

    def _arrived(self, arriving: deque[jax.Array]) -> None:
        arriving.popleft().block_until_ready()
        self.files.free()

    def _write(self, key: tuple[str, str], arrays: Any) -> None:
        number = self._first_chunk[key]
        for rows, array in zip(self.rows[key], jax.tree.leaves(arrays), strict=True):
            for begin in rows.begins:
                part = array
                if len(rows.begins) > 1:
                    part = _take(rows.sharding, rows.shape)(array, np.array(begin, np.int32))
                self.files.write(number, [shard.data for shard in _local(part)])
                number += 1

    # All of the state

    def load(self, slot: str = "") -> dict[tuple[str, str], Any]:
        """The arrays in the files by key, or those of a slot, as arrays in the hosts' memory."""
        self.files.flush()
        return {key: self._each(key, self._load) for key in self.stored if slot in ("", key[0])}

    def _load(self, rows: StoredRows, number: int) -> jax.Array:
        shards, sharding = [], on_host(rows.sharding)
        for index, device in enumerate(_devices(self.mesh)):
            shard = np.empty(rows.shard, rows.dtype)
            for chunk, begin in enumerate(rows.begins, number):
                shard[rows.slices(begin)] = self.files.load(chunk, index).view(rows.dtype).reshape(rows.shape)
            at = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            shards.append(jax.device_put(shard, at))
        return jax.make_array_from_single_device_arrays(rows.whole, sharding, shards)

    def store(self, slots: Mapping[tuple[str, str], Any]) -> None:
        """Write arrays of slots to the files."""
        self.files.restart()
        for key, arrays in slots.items():
            by_leaf = iter(jax.tree.leaves(arrays))
            self._each(key, lambda rows, number: self._store(rows, number, next(by_leaf)))  # noqa: B023

    def _store(self, rows: StoredRows, number: int, array: jax.Array) -> None:
        for index, shard in enumerate(_local(array)):
            data = np.asarray(shard.data)
            for chunk, begin in enumerate(rows.begins, number):
                self.files.store(chunk, index, data[rows.slices(begin)])

    def _each(self, key: tuple[str, str], change: Any) -> Any:
        """`change(rows, number of the first chunk)` of each array of a slot, as its tree."""
        number, found = self._first_chunk[key], []
        for rows in self.rows[key]:
            found.append(change(rows, number))
            number += len(rows.begins)
        return jax.tree.unflatten(jax.tree.structure(self.stored[key]), found)


def paired(update: Update) -> list[set[str]]:
    """The parameters that are updated together: those of one or more of the update's turns.

    They are at least two of each optimizer, if it has as many: XLA divides by a scalar that is used once in another way
    (it multiplies by the reciprocal), so a single parameter would differ from its update among others in the last bit.
    """
    members, turns, names = update.slots.members, list[set[str]](), set[str]()
    for turn in update.turns:
        names |= {*turn}
        counts = [(len(names & member.placements.keys()), len(member.placements)) for member in members]
        if all(count in (0, of_all) or count > 1 for count, of_all in counts):
            turns, names = [*turns, names], set()
    if names and turns:
        turns[-1] |= names
    return turns or [names]


def _devices(mesh: Any) -> list[Any]:
    """This process's devices, in the order of the mesh."""
    return mesh.local_devices


def _local(array: Any) -> list[Any]:
    """The shards of this process's devices, in the order of the mesh."""
    shards = {shard.device: shard for shard in array.addressable_shards}
    return [shards[device] for device in _devices(array.sharding.mesh)]


def _by_donation(before: Updated) -> tuple[Updated, Updated]:
    """The arrays, and the scalars, which each turn gets."""
    arrays, scalars = (
        jax.tree.map(lambda x, wanted=wanted: x if bool(x.ndim) == wanted else None, before) for wanted in (True, False)
    )
    return arrays, scalars


def _merged_scalars(arrays: Updated, scalars: Updated) -> Updated:
    """The inverse of `_by_donation`."""
    return jax.tree.map(lambda a, b: b if a is None else a, arrays, scalars, is_leaf=lambda x: x is None)


@lru_cache
def _zeros(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> Any:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)


@lru_cache
def _put(sharding: NamedSharding) -> Any:
    """Jitted (array, chunk, begin) → the array with the chunk of each device; the array is donated."""
    return jax.jit(
        jax.shard_map(
            lambda whole, chunk, begin: lax.dynamic_update_slice(whole, chunk, [*begin]),
            mesh=sharding.mesh,
            in_specs=(sharding.spec, sharding.spec, P()),
            out_specs=sharding.spec,
            check_vma=False,
        ),
        donate_argnums=0,
    )


@lru_cache
def _take(sharding: NamedSharding, shape: tuple[int, ...]) -> Any:
    """Jitted (array, begin) → the chunk of each device."""
    return jax.jit(
        jax.shard_map(
            lambda whole, begin: lax.dynamic_slice(whole, [*begin], shape),
            mesh=sharding.mesh,
            in_specs=(sharding.spec, P()),
            out_specs=sharding.spec,
            check_vma=False,
        )
    )
