"""Parameters and FLOPs of a config."""

import math

from megajax.config import Config
from megajax.layout.kinds import layer_kinds, prediction_kind
from megajax.model import Transformer, parameters
from megajax.model.block import blocks_of
from megajax.model.lora import is_adapter
from megajax.model.sublayer import Sublayer, SublayerSizes
from megajax.model.transformer import declared_model
from megajax.options.remat import ATTENTION, OUTPUT, Keep, RematPolicy
from megajax.schema.fields import cached

planned_blocks = cached(blocks_of)  # all candidates of a search have the same
PEAK_BF16_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}  # dense, from NVIDIA


def peak_flops(device_kind: str) -> float | None:
    """Dense BF16 operations per second of a device, by its name; None if unknown."""
    return next((flops for kind, flops in PEAK_BF16_FLOPS.items() if kind in device_kind), None)


def parameter_count(model: Transformer) -> int:
    """Number of parameters, rows of the padded vocabulary included."""
    return sum(math.prod(p.shape) for p in parameters(model).values())


def flops_per_token(config: Config) -> float:
    """Floating-point operations per token, forward and backward, counted as in Megatron-LM.

    6 per active matmul parameter (with the head, without the embedding look-up) and 6·S·N·H per layer for causal
    attention; local windows count with their real length; recomputation is not counted. A frozen parameter counts 4,
    because it has no gradient, a teacher's 2. Each multi-token prediction module counts as a layer, its projection and
    a head.
    """
    each = 6 if config.lora.rank is None else 4
    model, S, total = config.model, config.batch.sequence_length, 0.0
    parts = {kind: tuple(block.parts.values()) for kind, block in planned_blocks(model).items()}
    modules = [prediction_kind(model)] * model.mtp_layers
    for kind in (*layer_kinds(model), *modules):
        total += each * sum(part.matmul_parameters() for part in parts[kind.block])
        total += sum(part.attention_flops(attended_keys(S, kind.window)) for part in parts[kind.block])
    total += each * model.hidden_size * model.padded_vocab_size * (1 + model.mtp_layers)
    total += each * 2 * model.hidden_size**2 * model.mtp_layers  # the modules' projections
    whole = declared_model(model, config.lora)
    total += whole.encoder.flops() / S if whole.encoder else 0
    total += flops_per_token(config.of_teacher) / 3 if config.of_teacher else 0  # forward only
    return total + 6 * adapter_parameter_count(whole)


def adapter_parameter_count(model: Transformer) -> int:
    """Number of parameters of the adapters, the only trained ones if there are any."""
    return sum(math.prod(p.shape) for name, p in parameters(model).items() if is_adapter(name))


def active_parameter_count(model: Transformer) -> int:
    """Parameters used per token."""
    config = model.config
    experts = sum(math.prod(p.shape) for p in parameters(model).values() if "experts" in p.axes)
    return parameter_count(model) - (experts - experts * config.experts_per_token // (config.num_experts or 1))


def attended_keys(S: int, window: int | None) -> float:
    """Mean number of keys that a query attends to; S/2 for plain causal attention, as usual."""
    if window is None or window >= S:
        return S / 2
    return window - window * window / (2 * S)


def unsaved(part: Sublayer, sizes: SublayerSizes, policy: RematPolicy, stream: float) -> float:
    """Numbers per token of a part that a remat policy does not keep of those that `save_matmuls` keeps.

    `kept_width` is attention's output. The part's other values count as kept if the policy names one of them.
    """
    if isinstance(policy.keep, Keep):
        return sizes.recomputed if ATTENTION in policy.recomputed_by_blocks else 0
    others = set(part.SAVED) - {ATTENTION, OUTPUT}
    left_out = 0 if OUTPUT in policy.of_names(part.SAVED) else stream
    left_out += 0 if ATTENTION in policy.of_names(part.SAVED) else sizes.kept_width
    return left_out + (0 if policy.of_names(others) else sizes.kept - sizes.kept_width)
