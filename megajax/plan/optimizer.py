"""Memory and work of the optimizer."""

import math
from collections.abc import Mapping

from megajax.config.fields import cached
from megajax.config.lora_schema import LoraConfig
from megajax.config.model_schema import ModelConfig
from megajax.mesh import AXES
from megajax.model import Transformer, parameters
from megajax.model.lora import is_trained
from megajax.ops.newton_schulz import coefficients, operations
from megajax.parallel.weights.blocks import bytes_per_number
from megajax.parallel.weights.masters import is_split
from megajax.parallel.weights.matrices import MatrixLayout, groups, rounds
from megajax.parallel.weights.offload import OFFLOADED, largest_share
from megajax.sharding import Placement
from megajax.step_plan import StepPlan


@cached
def declared(model: ModelConfig, lora: LoraConfig):
    """`parameters` of the model; all candidates of a search have the same."""
    return parameters(Transformer(model, lora))


def moment_bytes(plan: StepPlan, placements: Mapping[str, Placement]) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes that only the update needs per number of each trained parameter, on the device and in the host's memory.

    They are moments, moving averages and the rests of split master weights; `optimizer.offload` divides them.
    """
    optimizer, own = plan.config.optimizer, declared(plan.config.model, plan.config.lora)
    trained = {name: p for name, p in placements.items() if is_trained(plan.config.lora, name)}
    device, host, sizes = dict.fromkeys(trained, 0.0), dict.fromkeys(trained, 0.0), dict[tuple[str, int], float]()
    each = dict[tuple[str, int], float]()
    for name, placement in trained.items():
        kept = [bytes_per_number(optimizer.state, placement)] * moments(plan, name) + [4.0] * bool(optimizer.ema_decay)
        kept += [2.0] * is_split(plan.config, placement)
        each |= {(name, index): size for index, size in enumerate(kept)}
    for (name, index), size in each.items():
        if own[name].role in OFFLOADED:
            sizes[name, index] = size * math.prod(trained[name].stored_shape)
    away = largest_share(sizes, optimizer.offload)
    for (name, index), size in each.items():
        (host if (name, index) in away else device)[name] += size
    return device, host


def host_bytes(plan: StepPlan, placements: Mapping[str, Placement]) -> float:
    """Bytes of `moment_bytes` of one device in the host's memory; an update moves them there and back."""
    _, host = moment_bytes(plan, placements)
    return sum(each * math.prod(placements[n].stored_shape) / shards(plan, placements[n]) for n, each in host.items())


def state_bytes(plan: StepPlan, placements: Mapping[str, Placement]) -> tuple[int, int]:
    """Bytes on a device of the weights, and of what only the update needs; all steps keep both."""

    def number(name: str) -> int:
        """Bytes of a number of a stored weight; of split master weights, of the half that a step computes with."""
        placement, trained = placements[name], is_trained(plan.config.lora, name)
        in_fp32 = placement.computes_in_fp32 or (trained and not is_split(plan.config, placement))
        return 4 if in_fp32 or plan.config.precision.compute == "float32" else 2

    stored = {name: math.prod(p.stored_shape) // shards(plan, p) for name, p in placements.items()}
    device, _ = moment_bytes(plan, placements)
    weights = sum(number(name) * count for name, count in stored.items())
    return weights, int(sum(stored[name] * each for name, each in device.items()))


def shards(plan: StepPlan, placement: Placement) -> int:
    """Number of shards of a stored weight."""
    return math.prod(plan.sizes[axis] for axis in AXES if axis not in placement.replicated_axes)


def moments(plan: StepPlan, name: str) -> int:
    """The number of moments that the optimizer keeps of a trained parameter."""
    optimizer, lora = plan.config.optimizer, plan.config.lora
    if optimizer.kind == "muon":
        return 1 if declared(plan.config.model, lora)[name].muon else 2
    return {"adamw": 2, "ademamix": 3, "lion": 1, "sgd": 1 if optimizer.beta1 > 0 else 0}[optimizer.kind]


def newton_schulz_flops(plan: StepPlan, placements: Mapping[str, Placement]) -> dict[int, float]:
    """The operations of Muon on one device in a step, by the smaller dimension of the matrices."""
    config, work = plan.config, {}
    if config.optimizer.kind != "muon":
        return work
    muon, own = config.optimizer.muon, declared(config.model, config.lora)
    steps = coefficients(muon.coefficients, muon.steps)
    trained = {name: p for name, p in placements.items() if own[name].muon and is_trained(config.lora, name)}
    layouts = {name: MatrixLayout.of(p, plan.sizes, muon.per_head) for name, p in trained.items()}
    for shape, names in groups(layouts).items():
        count, each = rounds(shape, plan.sizes, sum(layouts[name].count for name in names))
        one = operations(steps, shape.rows, shape.columns)
        work[shape.rows] = work.get(shape.rows, 0.0) + count * each * one
    return work
