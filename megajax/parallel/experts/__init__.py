"""Tokens to experts on other devices: the class of each choice of `communication.experts`, in a file of its own."""

from megajax.ops.block_matmul import MaxOverDevices
from megajax.ops.expert_mlp import ExpertKernels
from megajax.options.dispatch import ALL_GATHER, ALL_TO_ALL, DISPATCHES, Dispatch
from megajax.parallel.experts.contract import ExpertParallel
from megajax.parallel.experts.exchanged import Exchanged
from megajax.parallel.experts.gathered_tokens import GatheredExperts
from megajax.step_plan import Collectives

# By the name of the declaration in `options/dispatch.py`
IMPLEMENTATIONS: dict[str, type[ExpertParallel]] = {ALL_TO_ALL.name: Exchanged, ALL_GATHER.name: GatheredExperts}


def register_dispatch(dispatch: Dispatch, experts: type[ExpertParallel]) -> None:
    """Register an extension's choice for `communication.experts`. Raises ConfigError for a name that is taken."""
    DISPATCHES.add(dispatch, experts)
    IMPLEMENTATIONS[dispatch.name] = experts


def expert_parallel(
    collectives: Collectives, kernels: ExpertKernels, max_over_devices: MaxOverDevices
) -> ExpertParallel:
    """The experts of a layer on this mesh."""
    devices = collectives.expert_shards
    experts = IMPLEMENTATIONS[collectives.dispatch.name] if devices > 1 else ExpertParallel
    room = collectives.dispatch.room
    return experts(collectives.experts_over, devices, kernels, max_over_devices, collectives.defers, room)
