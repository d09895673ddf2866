"""Parameters, FLOPs and memory of a config."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megajax.config import Config, ModelConfig
from megajax.config.kinds import block_layers, layer_kinds
from megajax.config.stages import gathered_slots, slot_kinds
from megajax.model import Transformer, parameters
from megajax.parallel.embedding import TOKENS, row_axes
from megajax.parallel.schedules import assign_slots, make_schedule
from megajax.sharding import END_AXES, ONCE_AXES, Placement

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


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device."""

    parameters: int  # FP32 master weights, as stored
    optimizer: int
    gradients: int  # before and after their reduction
    weights: int  # gathered once a step, in the compute dtype
    activations: int  # saved for the backward pass: of a microbatch, or of those in the pipeline

    @property
    def total(self) -> int:
        return self.parameters + self.optimizer + self.gradients + self.weights + self.activations


def estimate_memory(config: Config, placements: Mapping[str, Placement], sizes: Mapping[str, int]) -> MemoryEstimate:
    """Bytes a device; activations by what the remat policy saves of a block, transients left out."""
    stored = gathered = unreduced = 0
    compute = 4 if config.precision.compute == "float32" else 2
    accumulated = compute if config.batch.num_microbatches == 1 else 4
    staged = sizes["pipeline"] > 1
    stay = _gathered_shares(config, sizes["pipeline"])
    for name, placement in placements.items():
        size = math.prod(placement.stored_shape)
        shards = math.prod(n for axis, n in sizes.items() if axis not in placement.replicated_axes)
        # Head and embedding are gathered for the whole step over all axes, and their gradients accumulate in FP32; not
        # the embedding where tokens' rows travel instead.
        end = placement.axes[0] != "layers"
        gathered_axes = END_AXES if end else ONCE_AXES
        if "experts" in placement.axes:
            gathered_axes = tuple(axis for axis in ONCE_AXES if axis not in config.mesh.experts_over)
        once = math.prod(sizes[a] for a in gathered_axes) if placement.storage_dim is not None else 1
        stored += 4 * size // shards
        if name == TOKENS and row_axes(config, sizes):
            continue
        gathered += compute * size * once // shards
        unreduced += (4 if end else accumulated) * size * once // shards if once > 1 or staged else 0
        if not end and "fsdp" in placement.storage_axes:  # the rest of the layers that stay gathered
            rest = int(size * once * (sizes["fsdp"] - 1) * stay[name.split(".")[1]]) // shards
            gathered, unreduced = gathered + compute * rest, unreduced + accumulated * rest
    moments = {"adamw": 2, "lion": 1, "sgd": 1 if config.optimizer.beta1 > 0 else 0}[config.optimizer.kind]
    activations = _saved_activations(config, sizes, compute)
    return MemoryEstimate(stored, moments * stored, stored + unreduced, gathered, activations)


def _gathered_shares(config: Config, stages: int) -> dict[str, float]:
    """By kind of block the share of its slots whose layers stay gathered over `fsdp`, where they are unrolled."""
    blocks = [slot.block for slot in slot_kinds(config, stages)]
    stay = [blocks[slot] for slot in gathered_slots(config, stages)]
    return {block: stay.count(block) / blocks.count(block) for block in blocks}


def _saved_activations(config: Config, sizes: Mapping[str, int], compute: int) -> int:
    batch, remat, tensor = config.batch, config.remat, sizes["tensor"]
    shards = math.prod(sizes[a] for a in ("data", "fsdp", "expert", "context"))
    tokens = batch.global_size * batch.sequence_length / batch.num_microbatches / shards
    slots = slot_kinds(config, sizes["pipeline"])
    covered = len(slots) if remat.layers is None else remat.layers
    blocks = {block: _values_of_block(config, sizes, compute, block) for block in block_layers(config.model)}
    values = sum(blocks[slot.block][remat.policy if j < covered else "none"] for j, slot in enumerate(slots))
    if sizes["pipeline"] == 1:
        return int(tokens * compute * values)
    settings = config.pipeline
    kept = assign_slots(make_schedule(settings.schedule, sizes["pipeline"], batch.num_microbatches, settings.rounds))
    put_off = sum(blocks[slot.block]["put off"] for slot in slots)
    waiting = kept.heads * config.model.hidden_size / tensor if kept.heads > 1 else 0
    return int(tokens * compute * (values * kept.activations + put_off * kept.put_offs + waiting))


def _values_of_block(config: Config, sizes: Mapping[str, int], compute: int, block: str) -> dict[str, float]:
    """Numbers of a token that are saved of a block, in the compute dtype's size: by policy, and those put off."""
    model, tensor, experts = config.model, sizes["tensor"], config.model.num_experts if block == "moe" else None
    D = model.hidden_size
    heads = model.head_dim * (2 * model.num_heads + 2 * max(model.num_kv_heads, tensor)) / tensor  # q, k, v, output
    gated, k = 2 if model.activation in ("swiglu", "geglu") else 1, model.experts_per_token
    width, routed, arrived = model.ffn_hidden_size, 0.0, D
    if experts:  # where experts lie over devices there is room for as many rows as could arrive
        shards = config.expert_shards(sizes)
        rows = shards * min(k, experts // shards) if shards > 1 else k
        if model.router.capacity_factor is not None:  # of the microbatch's tokens, on all devices
            apart = [axis for axis in ("data", "fsdp", "expert", "context") if axis not in config.mesh.experts_over]
            rows = min(rows, model.router.capacity_factor * k * math.prod(sizes[axis] for axis in apart))
        width = rows * (model.expert_ffn_hidden_size or 0) + model.shared_expert_ffn_hidden_size
        split = tensor if "tensor" in config.mesh.experts_over else 1  # by tokens, then, instead of by width
        arrived = rows * D / split  # each assignment's row
        routed = arrived + 4 / compute * (experts + 4 * k) / tensor  # and the routing in FP32
    mlp = gated * width / tensor + routed
    matmuls = heads + mlp + 2 * D / tensor  # and the two projections into the residual stream
    in_fp8 = len(config.fp8_layers) / model.num_layers
    norms = 0 if sizes["pipeline"] > 1 and tensor == 1 and not in_fp8 else 2 * D  # in a pipeline computed again
    everything = heads + mlp + norms + 2 * D / tensor  # and the norms' results and inputs
    if model.mlp_bias:  # without biases the activation is computed again
        everything += (1 - in_fp8) * model.ffn_hidden_size / tensor
    if in_fp8:  # the four layers' inputs are kept in FP8 alone
        inputs = D + arrived + (model.num_heads * model.head_dim + width) / tensor
        everything += in_fp8 * (inputs / compute - D - arrived)
    inputs = 2 * D + (model.num_heads * model.head_dim + width) / tensor  # of the four linear layers
    outputs = heads - model.num_heads * model.head_dim / tensor + mlp + 2 * D
    return {
        "none": everything,
        "selective": everything,
        "full": D / tensor / config.remat.group,
        "save_matmuls": matmuls + D / tensor,
        "offload": D / tensor,
        "put off": inputs + outputs,
    }
