"""The update of a step: new weights, averages and moments from the gradients."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from megajax.config import Config
from megajax.optim import make_schedule
from megajax.optim.groups import clip
from megajax.parallel.weights.masters import join_all
from megajax.parallel.weights.offload import in_turn, merged, on_device, select
from megajax.sharding import BLOCKS, in_stored_rows

if TYPE_CHECKING:
    from megajax.training.step import TrainProgram, TrainState


def updated(
    program: "TrainProgram",
    state: "TrainState",
    gradients: Mapping[str, jax.Array],
    norm: jax.Array,
    layers: Mapping[str, Mapping[str, jax.Array]],
    finite: jax.Array,
) -> tuple[jax.Array, tuple[dict[str, jax.Array], dict[str, jax.Array], Any], dict[str, jax.Array]]:
    """(learning rate, (parameters, averages, optimizer state), rests of parameters) after a step.

    All but the rate are unchanged if the step is not `finite`.

    The gradients are not clipped yet; `norm` is the norm of all of them. `layers` are the metrics of the layers.
    """
    rate, names = learning_rate(program.config, state), list(gradients)
    clipped, factors = clip(program.config, gradients, norm), _rescaling(program, layers)

    def update(kept: Any, other: Any) -> Any:
        ((params, ema, optimizer), rest), (gradients, factors) = kept, other
        params = join_all(params, rest)
        directions, after = program.optimizer.update(gradients, optimizer, params)
        new = jax.tree.map(lambda p, d: p - rate * d, params, directions)
        new |= {name: new[name] * factor for name, factor in factors.items()}
        averages = _averaged(program.config, state.step, ema, new)
        before, after = (params, ema, optimizer), (new, averages, after)
        new, *others = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before)
        halves, rest = program.halves(new)
        return (halves, *others), rest

    def part(tree: "TrainState", chosen: Collection[str]) -> tuple[Any, dict[str, Any]]:
        own = select((tree.params, tree.ema, tree.optimizer), names, chosen)
        return own, {name: tree.rest[name] for name in chosen if name in tree.rest}

    def other(chosen: Collection[str]) -> tuple[Any, Any]:
        return {name: clipped[name] for name in chosen}, {name: factors[name] for name in chosen if name in factors}

    with jax.named_scope("optimizer"):
        turns, away = program.update_turns, program.is_on_host
        kept = [part(state, turn) for turn in turns]
        done = in_turn(update, kept, [*map(other, turns)], [part(away, turn) for turn in turns])
        rest = {name: own for _, rests in done for name, own in rests.items()}
        return rate, merged([own for own, _ in done], turns), rest


def directions_of(
    program: "TrainProgram", state: "TrainState", gradients: Mapping[str, jax.Array], norm: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array], Any]:
    """(learning rate, directions, new optimizer state): a step subtracts the rate times the direction from a weight.

    The gradients are not clipped yet; `norm` is the norm of all of them.
    """
    directions: Any
    clipped, optimizer = clip(program.config, gradients, norm), on_device(state.optimizer)
    directions, optimizer = program.optimizer.update(clipped, optimizer, state.masters)
    return learning_rate(program.config, state), directions, optimizer


def learning_rate(config: Config, state: "TrainState") -> jax.Array:
    """The schedule's learning rate of the step that trains `state`."""
    rate: Any = make_schedule(config.schedule)(state.step + 1)
    return rate


def _averaged(
    config: Config, step: jax.Array, averages: dict[str, jax.Array], params: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """The moving averages after step `step` + 1 with the new weights `params`.

    In early steps the decay rate is lower, (1 + t) / (10 + t) in step t as in TensorFlow's, so that the first weights
    are soon forgotten.
    """
    if not averages:
        return {}
    assert config.optimizer.ema_decay is not None
    t = (step + 1).astype(jnp.float32)
    share = 1 - jnp.minimum(config.optimizer.ema_decay, (1 + t) / (10 + t))
    return jax.tree.map(lambda average, w: average + share * (w - average), averages, params)


def _rescaling(program: "TrainProgram", layers: Mapping[str, Mapping[str, jax.Array]]) -> dict[str, jax.Array]:
    """Factors, in stored rows, of the parameters that a kind of block rescales after an update."""
    found = {}
    for kind, metrics in layers.items():
        for own, factor in program.model.blocks[kind].rescaled(metrics).items():
            name = f"{BLOCKS}{kind}.{own}"
            found[name] = in_stored_rows(factor, program.placements[name])
    return found
