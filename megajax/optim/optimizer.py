"""The update direction; the step multiplies it by the learning rate."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from megajax.config import Config
from megajax.config.optimizer_schema import MuonConfig
from megajax.mesh import mesh_sizes
from megajax.ops.newton_schulz import coefficients, newton_schulz
from megajax.optim.ademamix import ademamix
from megajax.optim.groups import decays, rates
from megajax.optim.states import small_states
from megajax.parallel.weights.matrices import MatrixLayout, on_whole_matrices
from megajax.sharding import Placement


def make_optimizer(
    config: Config, declared: Mapping[str, Any], placements: Mapping[str, Placement], mesh: Mesh
) -> optax.GradientTransformation:
    """Gradients by name → directions by name, in stored form, decoupled weight decay included.

    `declared` are the trained parameters (`model.parameters.declare`). AdamW is Loshchilov and Hutter 2019, Lion is
    Chen et al. 2023, SGD is heavy-ball momentum, Muon is Jordan et al. 2024.
    """
    own, trained = config.optimizer, {name: placements[name] for name in declared}
    adamw = optax.scale_by_adam(own.beta1, own.beta2, own.epsilon)
    after = optax.chain(_add_decay(decays(config, declared)), _multiply(rates(config, declared, placements)))
    if own.kind == "muon":
        muon = {name: placements[name] for name, p in declared.items() if p.muon}
        direction = optax.partition(
            {
                "muon": optax.chain(optax.trace(own.muon.momentum, own.muon.nesterov), _orthogonal(config, muon, mesh)),
                "adamw": adamw,
            },
            lambda some: {name: "muon" if name in muon else "adamw" for name in some},
        )
        direction = small_states(direction, own.state, trained)
        return optax.chain(direction, after)
    direction = {
        "adamw": lambda: adamw,
        "ademamix": lambda: ademamix(config),
        "lion": lambda: optax.scale_by_lion(own.beta1, own.beta2),
        "sgd": lambda: optax.trace(own.beta1) if own.beta1 > 0 else optax.identity(),
    }[own.kind]()
    return optax.chain(small_states(direction, own.state, trained), after)


def _orthogonal(config: Config, placements: Mapping[str, Placement], mesh: Mesh) -> optax.GradientTransformation:
    """Momenta by name → orthogonal updates of their matrices, scaled; computed in BF16 unless the step is in FP32."""
    muon, sizes = config.optimizer.muon, mesh_sizes(mesh)
    layouts = {name: MatrixLayout.of(placement, sizes, muon.per_head) for name, placement in placements.items()}
    scales = {name: _update_scale(muon, layout.inputs, layout.outputs) for name, layout in layouts.items()}
    dtype = jnp.float32 if config.precision.compute == "float32" else jnp.bfloat16
    steps = coefficients(muon.coefficients, muon.steps)
    orthogonal = on_whole_matrices(partial(newton_schulz, steps=steps), layouts, mesh, dtype)

    def update(momenta: Any, _: Any) -> Any:
        own = {name: momenta[name] for name in layouts if isinstance(momenta.get(name), jax.Array)}
        if not own:  # of parameters without matrices only
            return momenta
        whole = orthogonal(own)
        return momenta | {name: scales[name] * whole[name].astype(jnp.float32) for name in layouts}

    return optax.stateless(update)


def _update_scale(config: MuonConfig, inputs: int, outputs: int) -> float:
    """The factor of an orthogonal update of a matrix `[inputs, outputs]`.

    `match_adamw` is that of Moonlight (Liu et al. 2025): the mean square of the update is then 0.2², as AdamW's is.
    """
    if config.scale == "spectral":
        return math.sqrt(max(1.0, outputs / inputs))
    return 0.2 * math.sqrt(max(inputs, outputs))


def _add_decay(decays: Mapping[str, float]) -> optax.GradientTransformation:
    def update(directions: Any, params: Any) -> Any:
        return {name: d + decays[name] * params[name] if decays[name] else d for name, d in directions.items()}

    return optax.stateless(update)


def _multiply(factors: Mapping[str, Any]) -> optax.GradientTransformation:
    def update(directions: Any, _: Any) -> Any:
        return {
            name: d if isinstance(factors[name], float) and factors[name] == 1.0 else factors[name] * d
            for name, d in directions.items()
        }

    return optax.stateless(update)
