"""The arrays of an optimizer in the train state: the parameter, placement and form of each, and its name on disk."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax

from megajax.errors import ConfigError
from megajax.optim.adamw import AdamW
from megajax.optim.ademamix import Ademamix
from megajax.optim.blocks import random_bits
from megajax.optim.forms import BFloat16, Form, Int8, LowBits, StateArray, seed_of
from megajax.optim.lion import Lion
from megajax.optim.matrix_exchange import MatrixLayout
from megajax.optim.muon import Muon
from megajax.optim.offload import OFFLOADED, largest_share
from megajax.optim.optimizer import MatrixOptimizer, Optimizer, OptimizerState, Slot, Slots, Updated, check_slots
from megajax.optim.sgd import Sgd
from megajax.optim.soap import Soap
from megajax.sharding import Placement
from megajax.step_plan import StepPlan
from megajax.weights.masters import is_split

# Those of `options.optimizers`; `register_optimizer` and `register_form` add others.
OPTIMIZER_CLASSES: dict[str, type[Optimizer]] = {
    "adamw": AdamW,
    "ademamix": Ademamix,
    "sgd": Sgd,
    "lion": Lion,
    "muon": Muon,
    "soap": Soap,
}
FORM_CLASSES: dict[str, type[Form]] = {"float32": Form, "bfloat16": BFloat16, "int8": Int8}
ADAMW = "adamw"


@dataclass(frozen=True)
class SlotArray:
    """A slot of a parameter."""

    parameter: str
    slot: str
    placement: Placement
    form: Form
    non_negative: bool = False
    seed_name: str = ""  # random bits depend on it

    @property
    def key(self) -> tuple[str, str]:
        return self.slot, self.parameter

    def stored(self, sizes: Mapping[str, int], on_host: bool = False) -> Any:
        """The arrays in the train state, as a tree of `StateArray`."""
        arrays = self.form.arrays(self.placement, self.non_negative, sizes)
        return jax.tree.map(lambda array: replace(array, on_host=on_host), arrays)

    def encode(self, x: jax.Array, step: jax.Array | None, again: jax.Array | None = None) -> Any:
        """FP32 → the arrays after the update `step`, on which random bits depend.

        `again` is `x`, computed a second time, if the form has scales.
        """
        bits = random_bits(self.placement, seed_of(self.seed_name, step)) if self.form.is_rounded else None
        how = self.placement, self.non_negative, bits
        return self.form.encode(x, *how) if again is None else self.form.encode_with_scales(x, again, *how)

    def decode(self, stored: Any) -> jax.Array:
        """The inverse of `encode`."""
        return self.form.decode(stored, self.placement, self.non_negative)


@dataclass(frozen=True)
class Member:
    """An optimizer and its parameters."""

    kind: str
    optimizer: Optimizer
    placements: Mapping[str, Placement]
    layouts: Mapping[str, MatrixLayout]  # of the parameters whose matrices it takes whole

    def slots_of(self, name: str) -> tuple[Slot, ...]:
        """The slots of a parameter."""
        slots = tuple(slot for slot in self.optimizer.slots() if slot.shape != "scalar")
        if isinstance(self.optimizer, MatrixOptimizer):
            slots += (*self.optimizer.slots_of_matrices(self.layouts[name].inputs, self.layouts[name].outputs),)
        return slots

    def owned_slots(self, name: str) -> list[str]:
        """The slots with an array for each of a parameter's matrices, which its owner keeps."""
        return [slot.name for slot in self.slots_of(name) if not isinstance(slot.shape, str)]

    @property
    def with_slots(self) -> set[str]:
        """The parameters whose matrices have slots, so that they are exchanged by themselves."""
        return {name for name in self.layouts if self.owned_slots(name)}

    def turn_of(self, name: str) -> str:
        """A name for the parameters that are updated together: those whose matrices are exchanged together."""
        return self.kind if self.layouts and not self.owned_slots(name) else name

    def placement(self, name: str, slot: Slot, sizes: Mapping[str, int]) -> Placement:
        """The placement of a slot's array."""
        return self.placements[name] if isinstance(slot.shape, str) else self.layouts[name].owned(slot.shape, sizes)


@dataclass(frozen=True)
class OptimizerSlots:
    """The slots of the optimizer of a plan, with averages and low bits of weights."""

    plan: StepPlan
    roles: Mapping[str, str]  # of the trained parameters
    members: tuple[Member, ...]  # in the order in which they compute

    @classmethod
    def of(cls, plan: StepPlan, declared: Mapping[str, Any], placements: Mapping[str, Placement]) -> "OptimizerSlots":
        """`declared` are the trained parameters (`model.parameters`)."""
        kind, roles = plan.optimizer.kind, {name: parameter.role for name, parameter in declared.items()}
        made = OPTIMIZER_CLASSES[kind](plan, plan.optimizer_settings(OPTIMIZER_CLASSES[kind]))
        trained = {name: placements[name] for name in declared}
        check_slots(type(made), made.slots())
        if not isinstance(made, MatrixOptimizer):
            return cls(plan, roles, (Member(kind, made, trained, {}),))
        matrices = {name: placements[name] for name, parameter in declared.items() if parameter.muon}
        layouts = {name: MatrixLayout.of(p, plan.sizes, made.per_head, made.turns) for name, p in matrices.items()}
        for layout in layouts.values():
            check_slots(type(made), made.slots(), own := made.slots_of_matrices(layout.inputs, layout.outputs))
            if own and (made.turns or made.per_head):
                problem = (
                    f"{type(made).__name__} has turns or per_head, and slots_of_matrices, which are of whole matrices"
                )
                raise ConfigError(f"{problem} as they are stored: leave out turns and per_head, or these slots.")
        left_to_adamw = {name: placement for name, placement in trained.items() if name not in matrices}
        members = Member(kind, made, matrices, layouts), Member(ADAMW, AdamW(plan), left_to_adamw, {})
        return cls(plan, roles, members)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Of the mesh's axes."""
        return self.plan.sizes

    def member_of(self, name: str) -> Member:
        """The optimizer of a parameter."""
        return next(member for member in self.members if name in member.placements)

    @cached_property
    def form(self) -> Form:
        """The form of moments."""
        return FORM_CLASSES[self.plan.optimizer.state]()

    @cached_property
    def placements(self) -> dict[str, Placement]:
        """Of the trained parameters."""
        found = {name: placement for member in self.members for name, placement in member.placements.items()}
        return {name: found[name] for name in self.roles}

    @cached_property
    def arrays(self) -> dict[str, dict[str, Any]]:
        """`OptimizerState.slots` with a `SlotArray` in place of each array, and None of each scalar."""
        found = dict[str, dict[str, Any]]()
        for member in self.members:
            by_slot: dict[str, Any] = {s.name: None if s.shape == "scalar" else {} for s in member.optimizer.slots()}
            for name in member.placements:
                for slot in member.slots_of(name):
                    by_slot.setdefault(slot.name, {})[name] = self._array(member, name, slot)
            found[member.kind] = by_slot
        return found

    def _array(self, member: Member, name: str, slot: Slot) -> SlotArray:
        above = f".inner_states['{member.kind}'].inner_state" if len(self.members) > 1 else ""
        seed_name = f"{above}{'[0]' if member.optimizer.in_chain else ''}.{slot.name}['{name}']"
        placement = member.placement(name, slot, self.sizes)
        form = Form() if slot.exact else self.form
        return SlotArray(name, slot.name, placement, form, slot.non_negative, seed_name)

    @cached_property
    def averages(self) -> dict[str, SlotArray]:
        """Moving averages of the weights."""
        averaged = self.placements if self.plan.optimizer.ema_decay else {}
        return {name: SlotArray(name, "ema", placement, Form()) for name, placement in averaged.items()}

    @cached_property
    def low_bits(self) -> dict[str, SlotArray]:
        """The lower halves of split master weights."""
        halved = {name: p for name, p in self.placements.items() if is_split(self.plan, p)}
        return {name: SlotArray(name, "master_low_bits", placement, LowBits()) for name, placement in halved.items()}

    @cached_property
    def stored(self) -> Updated:
        """What an update reads and changes, with a `StateArray` in place of each array.

        What is in files (`in_files`) comes from the host as well.
        """
        rounded = StateArray(None, jnp.int32) if self.form.is_rounded else None
        slots = {
            kind: {slot: StateArray(None, jnp.int32) if own is None else self._stored(own) for slot, own in by.items()}
            for kind, by in self.arrays.items()
        }
        weights = {
            name: StateArray(placement, jnp.bfloat16 if name in self.low_bits else jnp.float32)
            for name, placement in self.placements.items()
        }
        return Updated(
            weights, self._stored(self.averages), OptimizerState(rounded, slots), self._stored(self.low_bits)
        )

    def _stored(self, arrays: Mapping[str, SlotArray]) -> dict[str, Any]:
        return {n: array.stored(self.sizes, array.key in self.offloaded) for n, array in arrays.items()}

    @property
    def slot_arrays(self) -> list[SlotArray]:
        """All arrays that only the update needs."""
        return jax.tree.leaves((self.arrays, self.averages, self.low_bits))

    @cached_property
    def movable(self) -> dict[tuple[str, str], int]:
        """The bytes of each array, by slot and parameter, that `optimizer.offload` may move to the host."""
        return {
            array.key: sum(stored.bytes for stored in jax.tree.leaves(array.stored(self.sizes)))
            for array in self.slot_arrays
            if self.roles[array.parameter] in OFFLOADED
        }

    @cached_property
    def offloaded(self) -> set[tuple[str, str]]:
        """The arrays in the host's memory or in files, by slot and parameter."""
        return largest_share(self.movable, self.plan.optimizer.offload)

    @cached_property
    def in_files(self) -> dict[tuple[str, str], Any]:
        """The arrays in files (`optimizer.offload_dir`), by slot and parameter, as trees of `StateArray`."""
        if self.plan.optimizer.offload_dir is None:
            return {}
        return {array.key: array.stored(self.sizes) for array in self.slot_arrays if array.key in self.offloaded}

    def divided(self, tree: Updated) -> tuple[Updated, dict[tuple[str, str], Any]]:
        """A tree like `stored` → (what is not in files, what is in files by slot and parameter)."""
        found = dict[tuple[str, str], Any]()

        def rest(slot: str, of_slot: Any, kind: str) -> Any:
            if not isinstance(of_slot, dict):
                return of_slot
            found.update({(slot, name): x for name, x in of_slot.items() if (slot, name) in self.in_files})
            return {name: x for name, x in of_slot.items() if (slot, name) not in found}

        return tree.each_slot(rest), found

    def merged(self, tree: Updated, of_files: Mapping[tuple[str, str], Any]) -> Updated:
        """The inverse of `divided`, of some or all of what is in files."""

        def whole(slot: str, of_slot: Any, kind: str) -> Any:
            if not isinstance(of_slot, dict):
                return of_slot
            own = {n: x for (s, n), x in of_files.items() if s == slot and kind in ("", self.member_of(n).kind)}
            return of_slot | own

        return tree.each_slot(whole)

    def each[T](self, change: Callable[[SlotArray, Any], T], slots: Mapping[str, Slots]) -> dict[str, dict[str, Any]]:
        """`change(slot array, arrays)` of the slots of some or all parameters; scalars unchanged."""

        def changed(arrays: Mapping[str, SlotArray] | None, kept: Any) -> Any:
            return kept if arrays is None else {name: change(arrays[name], kept[name]) for name in sorted(kept)}

        return {
            kind: {slot: changed(self.arrays[kind][slot], of_kind[slot]) for slot in sorted(of_kind)}
            for kind, of_kind in sorted(slots.items())
        }

    def on_disk(self, state: OptimizerState) -> Any:
        """The tree of a checkpoint. Its names are those of optax's states, which earlier checkpoints have."""
        trees = dict[str, Any]()
        masked = {name: optax.MaskedNode() for member in self.members for name in member.placements}
        for member in self.members:
            held: Any = {slot: masked | x if isinstance(x, dict) else x for slot, x in state.slots[member.kind].items()}
            held = held or optax.EmptyState()
            trees[member.kind] = {"inner_state": (held, optax.EmptyState()) if member.optimizer.in_chain else held}
        first = next(iter(trees.values()))["inner_state"]
        tree = {"inner_states": trees} if len(self.members) > 1 else first
        tree = tree if state.rounded is None else {"rounded": state.rounded, "inner": tree}
        return tree, (optax.EmptyState(), optax.EmptyState())

    def from_disk(self, tree: Any) -> OptimizerState:
        """The inverse of `on_disk`."""
        tree, _ = tree
        rounded = tree["rounded"] if self.form.is_rounded else None
        tree = tree["inner"] if self.form.is_rounded else tree
        slots = dict[str, Any]()
        for member in self.members:
            saved = tree["inner_states"][member.kind]["inner_state"] if len(self.members) > 1 else tree
            saved: Any = saved[0] if member.optimizer.in_chain else saved
            slots[member.kind] = {
                slot: {name: saved[slot][name] for name in arrays} if isinstance(arrays, dict) else saved[slot]
                for slot, arrays in self.arrays[member.kind].items()
            }
        return OptimizerState(rounded, slots)
