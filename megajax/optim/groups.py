"""Learning rates, weight decay and clipping of single parameters: `optimizer.groups`, `optimizer.layer_decay`, µP."""

import difflib
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megajax.model.width import rate_factor
from megajax.ops.barriers import not_repeated
from megajax.optim.slots import OptimizerSlots
from megajax.schema.optimizer import OptimizerGroup
from megajax.sharding import EMPTY, Placement
from megajax.step_plan import StepPlan

KEY = "optimizer.groups"
OTHERS = -1  # instead of a group's index: all parameters that are clipped together


def group_of(plan: StepPlan, names: Sequence[str]) -> dict[str, int]:
    """The index of the first of `optimizer.groups` with a pattern that matches the name, for the names of groups.

    Patterns are those of shells, and match whole names: `*.attention.*`. Raises ConfigError for a pattern that matches
    no name of a trained parameter, and for a group whose parameters are all in groups before it.
    """
    found: dict[str, int] = {}
    known = [*names, *(name for name in plan.declared if plan.frozen_parts and not plan.is_trained(name))]
    for index, group in enumerate(plan.optimizer.groups):
        where = f"{KEY}.{index}.parameters"
        members: set[str] = set()
        for pattern in group.parameters:
            matched = fnmatch.filter(known, pattern)
            if not matched:
                near = difflib.get_close_matches(pattern, known, 1, 0) or known[:1]
                problem = f"{where} has {pattern!r}, which matches no trained parameter"
                plan.refuse(problem, f"a name is {near[0]}", KEY)
            members |= set(matched)
        if members <= found.keys():
            problem = f"all parameters of {where}={list(group.parameters)} are in groups before it"
            plan.refuse(problem, "put the narrower group first, or remove this one", KEY)
        found |= {name: index for name in members - found.keys()}
    return {name: index for name, index in found.items() if name in names}


def rates(plan: StepPlan, declared: Mapping[str, Any], slots: OptimizerSlots) -> dict[str, Any]:
    """The learning rate of each parameter as a multiple of the schedule's: a number, or one for each stored row."""
    groups, (chosen, *others) = _groups(plan, declared), slots.members
    out: dict[str, Any] = {}
    for member in (chosen, *others):
        beside = 1.0 if member is chosen else chosen.optimizer.others_rate
        for name, placement in member.placements.items():
            rate = (groups[name].learning_rate if name in groups else 1.0) * beside
            rate *= rate_factor(plan.model, declared[name], member.optimizer.width_factor)
            out[name] = rate * _depth_factor(plan, name, declared[name], placement)
    return out


def decays(plan: StepPlan, declared: Mapping[str, Any]) -> dict[str, float]:
    """The weight decay of each parameter."""
    settings, groups = plan.optimizer, _groups(plan, declared)
    of_role = {
        "matrix": True,
        "embedding": settings.decay_embeddings,
        "norm": settings.decay_norms,
        "bias": settings.decay_biases,
    }
    return {
        name: settings.weight_decay * of_role[p.role] * (groups[name].weight_decay if name in groups else 1.0)
        for name, p in declared.items()
    }


def clipped_norms(plan: StepPlan, gradients: Mapping[str, jax.Array], norm: jax.Array) -> dict[int, jax.Array]:
    """The norms to which `clip` refers: of each group with `clip_norm`, and of all other gradients under OTHERS.

    `norm` is that of all gradients, by `global_norm`.
    """
    apart = _apart(plan)
    if not apart:
        return {OTHERS: norm}
    indices = {name: apart.get(name, OTHERS) for name in gradients}
    gradients = not_repeated({**gradients})  # so that the sums do not depend on the program
    return {
        index: _norm({name: g for name, g in gradients.items() if indices[name] == index})
        for index in dict.fromkeys(indices.values())
    }


def clip(plan: StepPlan, gradients: Mapping[str, jax.Array], norms: Mapping[int, jax.Array]) -> dict[str, jax.Array]:
    """Some or all gradients in stored form, clipped: those of a group with `clip_norm` by its norm, others together."""
    settings, apart = plan.optimizer, _apart(plan)
    limits = {index: settings.groups[index].clip_norm or 0.0 for index in apart.values()}
    limits[OTHERS] = settings.clip_norm
    factors = {
        index: jnp.minimum(1.0, limits[index] / (norm + 1e-6)) for index, norm in norms.items() if limits[index] > 0
    }
    of = {name: apart.get(name, OTHERS) for name in gradients}
    return {name: g * factors[of[name]] if of[name] in factors else g for name, g in gradients.items()}


def _apart(plan: StepPlan) -> dict[str, int]:
    """The group of each parameter that is clipped with its group alone."""
    groups = group_of(plan, [*plan.trained])
    return {name: index for name, index in groups.items() if plan.optimizer.groups[index].clip_norm is not None}


def _norm(gradients: Mapping[str, jax.Array]) -> jax.Array:
    return jnp.sqrt(sum((jnp.sum(jnp.square(g)) for g in gradients.values()), jnp.float32(0)))


def _groups(plan: StepPlan, declared: Mapping[str, Any]) -> dict[str, OptimizerGroup]:
    return {name: plan.optimizer.groups[index] for name, index in group_of(plan, list(declared)).items()}


def _depth_factor(plan: StepPlan, name: str, parameter: Any, placement: Placement) -> Any:
    """`optimizer.layer_decay` (Clark et al. 2020): the power of a layer's distance from the output, by stored row.

    The head, the last norm and layers after the model's have distance 0, the last layer 1, the embeddings L + 1.
    """
    decay, layers = plan.optimizer.layer_decay, plan.model.num_layers
    if decay == 1.0:
        return 1.0
    if name.startswith("embedding."):
        return decay ** (layers + 1)
    if parameter.axes[0] != "layers":
        return 1.0
    assert placement.layers is not None
    rows = np.array([0.0 if layer == EMPTY else decay ** (layers - layer) for layer in placement.layers], np.float32)
    return rows.reshape(-1, *(1,) * (len(parameter.axes) - 1))
