"""Parameters and FLOPs of a config."""

import math

from megajax.config import Config, ModelConfig
from megajax.config.kinds import layer_kinds
from megajax.model import Transformer, parameters

PEAK_BF16_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}  # dense, by the vendor


def peak_flops(device_kind: str) -> float | None:
    """Dense BF16 operations a second of a device, by its name; None if it is not known."""
    return next((flops for kind, flops in PEAK_BF16_FLOPS.items() if kind in device_kind), None)


def parameter_count(model: Transformer) -> int:
    """Number of parameters, rows of the padded vocabulary included."""
    return sum(math.prod(p.shape) for p in parameters(model).values())


def flops_per_token(config: Config) -> float:
    """Floating-point operations of forward and backward a token, by Megatron's count (design.md section 9).

    6 for each matmul parameter that a token meets (head included, embedding look-up not) and 6·S·N·H a layer for
    causal attention; local windows at their real length; recomputation is not counted.
    """
    model = config.model
    D, N, K, H = model.hidden_size, model.num_heads, model.num_kv_heads, model.head_dim
    kinds, projections = layer_kinds(model), D * H * (2 * N + 2 * K)
    matmuls = sum(projections + _active_mlp_parameters(model, kind.block) for kind in kinds)
    attention = sum(_attended(config.batch.sequence_length, kind.window) for kind in kinds)
    return 6 * (matmuls + D * model.padded_vocab_size) + 12 * attention * N * H


def active_parameter_count(model: Transformer) -> int:
    """The same without the experts that a token is not sent to."""
    config = model.config
    experts = sum(math.prod(p.shape) for p in parameters(model).values() if "experts" in p.axes)
    return parameter_count(model) - (experts - experts * config.experts_per_token // (config.num_experts or 1))


def _active_mlp_parameters(model: ModelConfig, block: str) -> int:
    """Matmul parameters of a block's MLP that a token meets, the router's and the shared expert's included."""
    D, matrices = model.hidden_size, 3 if model.activation in ("swiglu", "geglu") else 2
    if block == "dense":
        return matrices * D * model.ffn_hidden_size
    assert model.num_experts is not None
    width = model.experts_per_token * (model.expert_ffn_hidden_size or 0) + model.shared_expert_ffn_hidden_size
    return D * (matrices * width + model.num_experts + model.shared_expert_gate)


def _attended(S: int, window: int | None) -> float:
    """Mean number of keys that a query attends to; S/2 for plain causal attention, as the field counts it."""
    if window is None or window >= S:
        return S / 2
    return window - window * window / (2 * S)
