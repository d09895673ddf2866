"""Parameters and FLOPs of a config."""

import math

import numpy as np

from megajax.config import Config, LoraConfig
from megajax.estimate.traces import SublayerWork, traces
from megajax.layout.attention_pairs import AttentionPairs
from megajax.layout.kinds import extra_kind, extra_layers, layer_kinds
from megajax.model import Encoder, Transformer, parameters
from megajax.model.lora import is_adapter
from megajax.model.trained import is_trained, second_stack, trains_layers
from megajax.model.transformer import declared_model
from megajax.model.vision import VisionTower
from megajax.sharding import VISION

PEAK_BF16_FLOPS = {
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "B200": 2250e12,
}  # dense, from NVIDIA


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
    because it has no gradient, a teacher's or a frozen tower's 2. A layer after the model's counts as a layer, with its
    projection, and a head. An encoder's or a tower's work for a sequence, whose row is full of images, is divided among
    the model's tokens.
    """
    each = 6 if trains_layers(config) else 4
    model, S, total = config.model, config.batch.sequence_length, _layers_flops(config, each)
    if (second := second_stack(config)) is not None:
        of_layers = _layers_flops(second, 6) * second.batch.sequence_length / (1 if trains_layers(second) else 3)
        total += (of_layers + _around_layers_flops(config, 4 if trains_layers(second) else 2)) / S
    whole = declared_model(model, config.lora, objective=config.objective)
    of_head = 6 if whole.objective else each  # an objective's own parameters are always trained
    total += of_head * head_parameter_count(whole) * (1 + len(extra_layers(model)))
    total += whole.encoder.flops() / S if isinstance(whole.encoder, Encoder) else 0
    total += flops_per_token(config.of_teacher) / 3 if config.of_teacher else 0  # forward only
    if config.teacher.base:
        total += _layers_flops(config, 6) / 3 + 2 * head_parameter_count(whole)
    return total + 6 * adapter_parameter_count(whole)


def _around_layers_flops(config: Config, frozen: int) -> float:
    """FLOPs of a row of patches before and after the tower's layers; 0 without one.

    `frozen` are those of each parameter of a projector that is not trained.
    """
    if (vision := config.model.vision) is None:
        return 0.0
    own = {name: math.prod(p.shape) for name, p in parameters(VisionTower(config.model)).items() if p.role == "matrix"}
    projector = sum(size for name, size in own.items() if name.startswith("projector."))
    of_patches = 6 if is_trained(config, f"{VISION}patch") else 2
    of_projector = 6 if is_trained(config, f"{VISION}projector.") else frozen
    return of_patches * own["patch"] * vision.patches_per_row + of_projector * projector * vision.embeddings_per_row


def _layers_flops(config: Config, each: int) -> float:
    """FLOPs per token of the layers; `each` is the number of FLOPs of a matmul parameter."""
    model, total = config.model, 0.0
    traced, S = traces(model, LoraConfig(), config.batch.sequence_length, "bfloat16"), config.attended_length
    ahead = len(extra_layers(model))
    for kind in (*layer_kinds(model), *([extra_kind(model)] * ahead if ahead else ())):
        for work in traced.of(kind.block).parts.values():
            total += each * work.multiplications + attention_flops(work, S, kind.window, model.causal)
    return total


def row_flops(config: Config, pairs: np.ndarray) -> np.ndarray:
    """FLOPs of sequences, forward and backward, with `pairs` of a query and a key in all layers (`AttentionPairs`).

    The linear layers are those of a whole sequence, since a row is as long as the others whatever is in it.
    """
    model, S = config.model, config.batch.sequence_length
    traced, whole = traces(model, LoraConfig(), S, "bfloat16"), int(AttentionPairs.of_model(model).of([S])[0])
    attention = sum(
        6 * S * attended_keys(S, kind.window, model.causal) * work.per_key
        for kind in layer_kinds(model)
        for work in traced.of(kind.block).parts.values()
    )
    return S * flops_per_token(config) - attention + attention * pairs / max(whole, 1)


def head_parameter_count(model: Transformer) -> int:
    """Number of the matmul parameters of the head, which may be the embedding's table, or of an objective's own."""
    if model.objective is None:
        before = model.config.hidden_size if model.config.prediction_head else 0
        return model.config.hidden_size * (before + model.config.padded_vocab_size)
    return sum(math.prod(p.shape) for p in parameters(model.objective).values() if p.role == "matrix")


def adapter_parameter_count(model: Transformer) -> int:
    """Number of parameters of the adapters, the only trained ones if there are any."""
    return sum(math.prod(p.shape) for name, p in parameters(model).items() if is_adapter(name))


def active_parameter_count(model: Transformer) -> int:
    """Parameters used per token."""
    config = model.config
    experts = sum(math.prod(p.shape) for p in parameters(model).values() if "experts" in p.axes)
    return parameter_count(model) - (experts - experts * config.experts_per_token // (config.num_experts or 1))


def attention_flops(work: SublayerWork, S: int, window: int | None, causal: bool) -> float:
    """FLOPs of attention per token, forward and backward."""
    return 6 * (attended_keys(S, window, causal) * work.per_key + work.mixing)


def attended_keys(S: int, window: int | None, causal: bool) -> float:
    """Mean number of keys that a query attends to; S/2 for plain causal attention, as usual; twice that without it."""
    window = S if window is None else min(window, S)
    return (window - window * window / (2 * S)) * (1 if causal else 2)
