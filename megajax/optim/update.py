"""The update of a step, for every optimizer: new weights, averages and slots from the gradients.

It decodes the slots, asks the optimizer for directions, adds weight decay, changes the weights, and encodes again.
Whole matrices come and go in between, and so do arrays that are kept on the host (`optimizer.offload`).
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.tree_util import keystr

from megajax.errors import ConfigError, array_form, shown
from megajax.ops.barriers import not_merged
from megajax.optim.groups import clip, decays, rates
from megajax.optim.matrix_exchange import on_whole_matrices
from megajax.optim.offload import in_turn
from megajax.optim.optimizer import MatrixOptimizer, Named, Optimizer, OptimizerState, Slots, Updated
from megajax.optim.schedule import make_schedule
from megajax.optim.slots import Member, OptimizerSlots
from megajax.sharding import Placement
from megajax.step_plan import StepPlan
from megajax.weights.masters import join_all, split


class Given(NamedTuple):
    """What an update is computed from."""

    gradients: Named
    norms: Mapping[int, jax.Array]  # by which they are clipped (`clipped_norms`)
    factors: Named  # of new weights
    step: jax.Array
    finite: jax.Array  # whether the step's numbers are; if not, nothing changes

    def of(self, names: Collection[str]) -> "Given":
        """For some parameters."""
        return self._replace(gradients=_chosen(self.gradients, names), factors=_chosen(self.factors, names))


@dataclass(frozen=True)
class Update:
    """The update of the trained parameters by the optimizer of a plan, on its mesh."""

    plan: StepPlan
    mesh: Mesh
    slots: OptimizerSlots
    rates: Mapping[str, Any]  # of each parameter, as a multiple of the schedule's
    decays: Mapping[str, float]

    @classmethod
    def build(
        cls, plan: StepPlan, declared: Mapping[str, Any], placements: Mapping[str, Placement], mesh: Mesh
    ) -> "Update":
        """`declared` are the trained parameters (`model.parameters`)."""
        slots = OptimizerSlots.of(plan, declared, placements)
        return cls(plan, mesh, slots, rates(plan, declared, slots), decays(plan, declared))

    def first(self, masters: Named) -> Updated:
        """The state of step 0 with these FP32 weights."""
        optimizer = jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), self.slots.stored.optimizer)
        averages = self.first_averages(masters)
        params, low_bits = self.halves(masters)
        return Updated(params, averages, optimizer, low_bits)

    def first_averages(self, masters: Named) -> Named:
        """The first moving averages, in arrays of their own, because the state is donated; empty without them."""
        return {name: jnp.copy(masters[name]) for name in self.slots.averages}

    def halves(self, masters: Named) -> tuple[Named, Named]:
        """FP32 master weights → (weights as they are stored, low bits of those that are split)."""
        both = {name: split(masters[name]) for name in masters if name in self.slots.low_bits}
        return masters | {n: half for n, (half, _) in both.items()}, {n: low_bits for n, (_, low_bits) in both.items()}

    def rate(self, step: jax.Array) -> Any:
        """The schedule's learning rate of the step after `step` steps."""
        return make_schedule(self.plan.schedule)(step + 1)

    def __call__(self, before: Updated, given: Given) -> Updated:
        """The weights, averages and slots after a step; the parameters of a turn together."""
        untrained = {name: w for name, w in before.params.items() if name not in self.slots.placements}
        before = before._replace(params={n: w for n, w in before.params.items() if n not in untrained})
        turns = self.turns
        on_host = jax.tree.map(lambda array: array.on_host, self.slots.stored)
        parts, moving = [part_of(before, turn) for turn in turns], [part_of(on_host, turn) for turn in turns]
        with jax.named_scope("optimizer"):
            after = join_parts(in_turn(self.of_turn, parts, [given.of(turn) for turn in turns], moving))
        return after._replace(params=after.params | untrained)

    def of_turn(self, before: Updated, given: Given) -> Updated:
        """The update of the parameters of a turn, whose arrays are on the device."""
        masters = join_all(before.params, before.master_low_bits)
        gradients = clip(self.plan, given.gradients, given.norms)
        directions, held = self.directions(gradients, before.optimizer, masters)
        rate = self.rate(given.step)
        new = {name: masters[name] - rate * d for name, d in directions.items()}
        new |= {name: new[name] * factor for name, factor in given.factors.items()}
        after, old = (new, self._averages(before.ema, new, given.step), held), (masters, before.ema, before.optimizer)
        new, averages, held = jax.tree.map(lambda x, old: jnp.where(given.finite, x, old), after, old)
        params, low_bits = self.halves(new)
        return Updated(params, averages, held, low_bits)

    def _averages(self, averages: Named, new: Named, step: jax.Array) -> Named:
        """The moving averages after step `step` + 1 with the `new` weights.

        In early steps the decay rate is lower, (1 + t) / (10 + t) in step t as in TensorFlow's, so that the first
        weights are soon forgotten.
        """
        if not averages:
            return {}
        assert self.plan.optimizer.ema_decay is not None
        t = (step + 1).astype(jnp.float32)
        share = 1 - jnp.minimum(self.plan.optimizer.ema_decay, (1 + t) / (10 + t))
        return jax.tree.map(lambda average, w: average + share * (w - average), averages, new)

    @cached_property
    def turns(self) -> list[list[str]]:
        """The trained parameters, by what is updated together: one turn, or more if `optimizer.offload` is set.

        A parameter with such arrays has a turn of its own; those whose matrices are computed together have one.
        """
        names, offloaded = [*self.slots.placements], {name for _, name in self.slots.offloaded}
        turn_of = {name: self.slots.member_of(name).turn_of(name) for name in names}
        moving = dict.fromkeys(turn_of[name] for name in names if name in offloaded)
        turns = {turn: [name for name in names if turn_of[name] == turn] for turn in moving}
        size = {name: math.prod(placement.stored_shape) for name, placement in self.slots.placements.items()}
        order = sorted(turns.values(), key=lambda together: -sum(size[name] for name in together))
        # A small one and a large one, so that two large ones are not on the device together.
        order = [order[index // 2 if index % 2 else -(index // 2) - 1] for index in range(len(order))]
        left = [name for name in names if turn_of[name] not in moving]
        return [*order, left] if left else order

    def directions(self, gradients: Named, held: OptimizerState, masters: Named) -> tuple[Named, OptimizerState]:
        """(directions with weight decay and learning rates of parameters, new slots), of some or all parameters."""
        slots = self.slots.each(lambda array, stored: array.decode(stored), held.slots)
        found: Named = {}
        for member in self.slots.members:
            of_member = {name: gradients[name] for name in member.placements if name in gradients}
            directions, slots[member.kind] = self._directions_of(member, of_member, slots[member.kind])
            found |= directions
        rounded = None if held.rounded is None else held.rounded + 1
        again = self._new_moments_again(gradients, held)
        slots = self.slots.each(lambda array, x: array.encode(x, rounded, again.get(array.key)), slots)
        found = dict(sorted(found.items()))
        found = {n: d + self.decays[n] * masters[n] if self.decays[n] else d for n, d in found.items()}
        plain = {n for n, rate in self.rates.items() if isinstance(rate, float) and rate == 1.0}
        return {n: d if n in plain else self.rates[n] * d for n, d in found.items()}, OptimizerState(rounded, slots)

    def _new_moments_again(self, gradients: Named, held: OptimizerState) -> dict[tuple[str, str], jax.Array]:
        """By (slot, parameter) the new slots of shards that have scales, computed from the stored ones once more.

        For the scales alone: XLA would write the FP32 numbers that it reads twice, 8 bytes for each weight. The scales
        must be those of the numbers that are encoded, so this is the same function of the same arrays.
        """
        if not self.slots.form.has_scales:
            return {}
        slots = self.slots.each(lambda array, stored: array.decode(stored), not_merged(held.slots))
        found = dict[tuple[str, str], jax.Array]()
        for member in self.slots.members:
            of_member = {name: gradients[name] for name in member.placements if name in gradients}
            _, after = member.optimizer.direction(of_member, slots[member.kind])
            arrays = {slot: by_name for slot, by_name in after.items() if isinstance(by_name, dict)}
            for slot, by_name in arrays.items():
                found |= {(slot, name): x for name, x in by_name.items() if name not in member.with_slots}
        return found

    def _directions_of(self, member: Member, gradients: Named, slots: Slots) -> tuple[Named, Slots]:
        """Of one optimizer: of shards, then of whole matrices."""
        optimizer = member.optimizer
        directions, slots = _directions_and_slots(optimizer, gradients, slots)
        if not isinstance(optimizer, MatrixOptimizer):
            return directions, slots
        scalars = {slot: x for slot, x in slots.items() if not isinstance(x, dict)}
        layouts = {name: layout for name, layout in member.layouts.items() if name in gradients}
        owned = {name: {slot: slots[slot][name] for slot in member.owned_slots(name)} for name in layouts}
        owned = {name: held for name, held in owned.items() if held}

        def of_matrices(matrices: jax.Array, held: Slots) -> tuple[jax.Array, Slots]:
            with _only_declared(method := f"{type(optimizer).__name__}.of_matrices", given := scalars | held):
                returned = optimizer.of_matrices(matrices, given)
            directions, new = _pair(method, returned)
            if (found := array_form(directions)) != (wanted := array_form(matrices)):
                raise ConfigError(f"{method} returns {found} as directions: return {wanted}.")
            _check_returned(method, "slot", held, new)
            return directions, new

        compute = on_whole_matrices(of_matrices, layouts, self.mesh, optimizer.dtype)
        whole, owned = compute({name: directions[name] for name in layouts}, owned)
        for name, held in owned.items():
            slots = slots | {slot: slots[slot] | {name: x} for slot, x in held.items()}
        scales = {name: optimizer.scale(layout.inputs, layout.outputs) for name, layout in layouts.items()}
        return {name: scales[name] * whole[name].astype(jnp.float32) for name in layouts}, slots


@contextmanager
def _only_declared(method: str, slots: Slots) -> Iterator[None]:
    """Around a method of an extension's optimizer: a slot that it reads and does not declare is a ConfigError."""
    try:
        yield
    except KeyError as error:
        name = error.args[0]
        if not isinstance(name, str) or not name.isidentifier() or name in slots:
            raise
        problem = f"{method} reads {name!r}, but its slots are {', '.join(slots) or 'none'}"
        raise ConfigError(f"{problem}: declare a Slot of this name in SLOTS, or in slots_of_matrices.") from error


def _directions_and_slots(optimizer: Optimizer, gradients: Named, slots: Slots) -> tuple[Named, Slots]:
    """`optimizer.direction`. Raises ConfigError if it does not return arrays for all parameters and slots."""
    name = f"{type(optimizer).__name__}.direction"
    with _only_declared(name, slots):
        returned = optimizer.direction(gradients, slots)
    directions, new = _pair(name, returned)
    _check_returned(name, "direction", gradients, directions, lambda x: str([*jnp.shape(x)]))
    _check_returned(name, "slot", slots, new)
    return directions, new


def _pair(method: str, returned: Any) -> tuple[Any, Any]:
    """What a method of an extension's optimizer returned. Raises ConfigError unless it is a pair."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise ConfigError(f"{method} returns {type(returned).__name__}: return the directions and the new slots.")
    return returned


def _check_returned(method: str, noun: str, given: Slots, new: Any, form: Callable[[Any], str] = array_form) -> None:
    """Raise ConfigError unless `new` has the names of `given`, with arrays of the same `form`: dtype and shape."""
    names = shown(", ".join(given) or "nothing")
    if not isinstance(new, dict):
        raise ConfigError(f"{method} returns its {noun}s as {type(new).__name__}: return a dictionary with {names}.")
    if missing := [name for name in given if name not in new]:
        raise ConfigError(f"{method} does not return the {noun} {missing[0]}: return all of {names}.")
    if more := [name for name in new if name not in given]:
        cure = f"return only {names}" if given else f"return no {noun}s, {{}}"
        raise ConfigError(f"{method} returns the {noun} {more[0]} too: {cure}.")
    before, after = (
        {keystr(path, simple=True, separator="."): form(x) for path, x in jax.tree.leaves_with_path(tree)}
        for tree in (given, new)
    )
    for path in (*before, *after):
        found, wanted = (forms.get(path, "nothing") for forms in (after, before))
        if found != wanted:
            raise ConfigError(f"{method} returns {found} as the {noun} {path}: return {wanted}.")


def _chosen(by_name: Any, names: Collection[str]) -> Any:
    """The entries of some parameters; a scalar unchanged."""
    return {name: by_name[name] for name in names if name in by_name} if isinstance(by_name, dict) else by_name


def part_of(tree: Updated, names: Collection[str]) -> Updated:
    """The arrays of some parameters, and all scalars."""
    part = tree.each_slot(lambda slot, arrays, kind: _chosen(arrays, names))
    return part._replace(params=_chosen(tree.params, names))


def join_parts(trees: Sequence[Any]) -> Any:
    """The inverse of `part_of`; scalars are those of the last part."""
    first = trees[0]
    if isinstance(first, dict):
        return {key: join_parts([tree[key] for tree in trees if key in tree]) for tree in trees for key in tree}
    if isinstance(first, Updated | OptimizerState):
        return type(first)(*map(join_parts, zip(*trees, strict=True)))
    return trees[-1]
