"""The contract of a layer's sublayers: their inputs, declarations and computation.

A layer is a list of sublayers, such as attention and an MLP. Each `Sublayer` includes the norm before it; the block
adds the norm after it (`model.norm_placement`). It is one class in one module; the rest of megajax reads all facts
about it from its declarations.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from pydantic import Field

from megajax import ops
from megajax.config import ModelConfig
from megajax.layout.kinds import LayerKind
from megajax.model.comm import Comm, TokenPositions
from megajax.model.parameters import declare
from megajax.schema.fields import Section

Weights = Mapping[str, Any]  # by name within the part: arrays, or Fp8Weights for the communication points
State = Mapping[str, jax.Array]
Metrics = dict[str, jax.Array]
RELATIVE_BIAS = "relative_bias"  # the stream that is the table `[N, buckets]` of model.position=relative
MAX_SCORE = "max_attention_score"  # the metric of attention that QK-clip reads: [N] of a layer, see `clip_factor`


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RealTokens:
    """The tokens of a microbatch that are no padding. The others count in no loss, mean, maximum or capacity."""

    is_real: jax.Array  # [T / tensor] bool, of this device's tokens
    lengths: jax.Array  # [B] int32, number of real tokens of each sequence on all devices, at least 1
    num_tokens: jax.Array  # int32, number of them over all devices, at least 1
    num_sequences: jax.Array  # int32, number of sequences with a real token over all devices, at least 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockInputs:
    """The inputs of every block besides the residual stream."""

    positions: jax.Array  # [B, S] int32, of RoPE: they begin again with a document only if data.reset_positions is set
    token_positions: TokenPositions  # for attention: the tokens' index in their sequences, and their documents
    token_ids: jax.Array  # [T / tensor] uint32, index of each token in the global batch (dropout)
    dropout_key: jax.Array | None  # None: no dropout
    jitter_key: jax.Array | None = None  # None: no jitter of the routers' inputs
    adapter_key: jax.Array | None = None  # None: no dropout of the adapters' inputs
    rounding_key: jax.Array | None = None  # None: no gradient is rounded at random
    layer_loss_scale: jax.Array | None = None  # factor of the layers' own losses; None: no metrics
    real: RealTokens | None = None  # None: all tokens are real, none is padding
    rope_positions: jax.Array | None = None  # [B, S, A] int32, one for each of model.rope_sections; None: `positions`
    # Of a vision tower: instead of a window, documents that layers with windows see
    windows: TokenPositions | None = None
    streams: State = field(default_factory=dict)  # that STREAMS name, by name: [T' / tensor, D'] of the same sequences
    fields: State = field(default_factory=dict)  # of the batch, for layers that read streams: [B, S, ...]

    @property
    def has_metrics(self) -> bool:
        """Whether sublayers compute their metrics now: in training only, and there if one of the model's has any."""
        return self.layer_loss_scale is not None


@dataclass(frozen=True)
class LayerContext:
    """What a sublayer computes with besides its weights and the residual stream."""

    comm: Comm
    inputs: BlockInputs
    layer: jax.Array | int  # the layer's index; may be traced
    kind: LayerKind  # its window and positions
    recompute: Collection[str] = ()  # what the backward pass recomputes: "attention", from its inputs; "norms"
    state: State = field(default_factory=dict)  # declared by `layer_state`; a step passes it among the weights

    def share_of_mean(self, values: jax.Array) -> jax.Array:
        """This device's share, FP32, of the mean of `values [T / tensor]` over a microbatch's real tokens: a metric."""
        values, real = values.astype(jnp.float32), self.inputs.real
        counted = values if real is None else jnp.where(real.is_real, values, 0)
        return jnp.sum(counted) / self.num_tokens(len(values))

    def num_tokens(self, own: int) -> jax.Array | int:
        """The number of a microbatch's real tokens over all devices, if this one's residual stream has `own` tokens."""
        return own * self.comm.token_shards if self.inputs.real is None else self.inputs.real.num_tokens


class Sublayer(nnx.Module):
    """One step of a layer: it normalises the residual stream and computes a term that is added to it.

    Subclasses declare parameters in `__init__(config)` (`declare`) and compute in `apply`. Names are those within the
    sublayer; `Block` puts the sublayer's name before them.
    """

    NAME: ClassVar[str]  # of the sublayer in the names of its parameters
    # Words of `layout.sublayers.ABILITIES`: the settings for which it is right; others are refused.
    SUPPORTS: ClassVar[Annotated[frozenset[str], Field(strict=False)]] = frozenset()
    # Fused weight → its stored parameters, side by side in one matmul.
    FUSED: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    # Weights of linear layers in the order of use, after fusing; FP8 quantises them
    LINEAR: ClassVar[tuple[str, ...]] = ()
    SAVED: ClassVar[tuple[str, ...]] = ()  # names that `save_matmuls` and `offload` keep (`checkpoint_name`)
    METRICS: ClassVar[tuple[str, ...]] = ()  # names of its metrics in training
    LOSSES: ClassVar[tuple[str, ...]] = ()  # the METRICS that are added to the loss and differentiated
    HAS_EXPERTS: ClassVar[bool] = False  # whether its weights are divided over `mesh.experts_over`
    # Whether its state has `is_real_layer`, which is False in an empty layer slot
    READS_IS_REAL_LAYER: ClassVar[bool] = False
    IN_ORDER: ClassVar[bool] = False  # whether it uses `comm.in_order`
    # Its keys of `model.sublayer_settings.NAME`; `__init__(config, settings)` gets them. None: it has none.
    Settings: ClassVar[type[Section] | None] = None
    STREAMS: ClassVar[tuple[str, ...]] = ()  # the streams besides the residual stream that it reads (`inputs.streams`)
    # The norm of its output, which the block declares and applies.
    post_norm: nnx.Param | None
    post_norm_bias: nnx.Param | None

    def __init__(self, config: ModelConfig):
        self.config = config

    def apply(self, w: Weights, x: jax.Array, ctx: LayerContext) -> tuple[jax.Array, Metrics]:
        """`x [T / tensor, D]` → (the term added to it, metrics).

        `w` are the weights from `Block.fuse`. Metrics, if `ctx.inputs.has_metrics`, are this device's shares of numbers
        of a microbatch: a loss is a mean over its real tokens (`ctx.share_of_mean`), times its weight. A step reports
        floats as the mean over microbatches and layers (LOSSES as the sum over layers), and int counts as sums by
        layer. A metric `max_...` is a maximum of numbers that are not negative.
        """
        raise NotImplementedError

    def linear_layers(self) -> tuple[str, ...]:
        """The weights of LINEAR in this model."""
        return self.LINEAR

    def used_last(self) -> str:
        """The weight that its forward pass uses last; the first is that of `linear_layers`."""
        return self.linear_layers()[-1]

    def streams(self) -> tuple[str, ...]:
        """The streams of STREAMS, and others, that it reads in this model."""
        return self.STREAMS

    def has_metrics(self) -> bool:
        """Whether it has metrics in this model."""
        return bool(self.METRICS)

    def losses(self) -> tuple[str, ...]:
        """The names of LOSSES in this model."""
        return self.LOSSES

    def layer_state(self) -> dict[str, jax.ShapeDtypeStruct]:
        """A layer's state between steps that is not a parameter; it starts as zeros."""
        return {}

    def updated_state(self, state: State, metrics: State) -> dict[str, jax.Array]:
        """The state `[L, ...]` of all layers after a step; `metrics [L, ...]` are summed over all devices."""
        return dict(state)

    def rescaled(self, metrics: State) -> dict[str, jax.Array]:
        """Factors of its parameters after an update, by name, for metrics `[L, ...]`: `[L, ...]`, broadcast to them."""
        return {}


def is_maximum(metric: str) -> bool:
    """Whether microbatches, devices and layers are combined by the maximum, not the sum; 0 is then the least value."""
    return metric.startswith("max_")


def add_metric(name: str, total: jax.Array, new: jax.Array) -> jax.Array:
    """A metric of two microbatches: the sum, or the maximum."""
    return jnp.maximum(total, new) if is_maximum(name) else total + new


def add_metrics[Tree](total: Tree, new: Tree) -> Tree:
    """`add_metric` for trees with metrics in dictionaries by name."""
    return jax.tree_util.tree_map_with_path(lambda path, *two: add_metric(path[-1].key, *two), total, new)


def clip_factor(config: ModelConfig, largest: jax.Array) -> jax.Array:
    """QK-clip (Kimi K2, arXiv 2507.20534): the factor γ of the scores of each head, `[L, N]` for MAX_SCORE `[L, N]`.

    γ brings the largest score down to `model.qk_clip`; heads below it have 1. `largest` is a bound, so the largest
    score may be lower than that by the logarithm of the number of keys.
    """
    assert config.qk_clip is not None
    return jnp.minimum(1.0, config.qk_clip / jnp.maximum(largest, config.qk_clip))


def declare_norm(config: ModelConfig, present: bool = True) -> tuple[nnx.Param | None, nnx.Param | None]:
    """Weight and bias `[D]` of a norm of the residual stream's width, for `normalise`; None if it has none."""
    D, with_bias = config.hidden_size, config.has_norm_bias
    return (
        declare_norm_weight(config, D) if present else None,
        declare((D,), ("norm",), "bias") if present and with_bias else None,
    )


def declare_norm_weight(config: ModelConfig, width: int) -> nnx.Param:
    """The weight of a norm over `width` numbers: at first 1, or 0 if the norm multiplies by 1 + weight."""
    return declare((width,), ("norm",), "norm", scale=0.0 if config.norm_zero_centred else 1.0)


@jax.named_scope("norm")
def normalise(config: ModelConfig, x: jax.Array, weight: jax.Array | None, bias: jax.Array | None) -> jax.Array:
    """The model's RMSNorm or LayerNorm, over the last axis; `x` itself without a weight."""
    if weight is None:
        return x
    if config.norm == "rmsnorm":
        return ops.rms_norm(x, weight, config.norm_epsilon, config.norm_zero_centred)
    return ops.layer_norm(x, weight, bias, config.norm_epsilon, config.norm_zero_centred)


@jax.named_scope("head")
def predict(config: ModelConfig, weights: Weights, h: jax.Array) -> jax.Array:
    """The model's output after its final norm → the input of the output matrix, both `[..., D]`.

    With `model.prediction_head` a matrix, GELU and a norm are between them.
    """
    if (matrix := weights.get("head_dense")) is None:
        return h
    return normalise(
        config, ops.activate("gelu_exact", h @ matrix), weights["head_norm"], weights.get("head_norm_bias")
    )


def rotate(
    config: ModelConfig, kind: LayerKind, inputs: BlockInputs, length: int, *arrays: jax.Array
) -> tuple[jax.Array, ...]:
    """Queries and keys `[B, S, heads, width]` with the layer's rotary positions, or as they are if it has none.

    `length` is that of a whole sequence, in tokens. Two `rope_sections`, of a tower, have the same frequencies.
    """
    if config.position != "rope" or not kind.rope:
        return arrays
    theta, scaling = config.rope_theta, config.rope_scaling.model_dump() if config.rope_scaling else None
    if kind.window is not None and config.rope_local_theta is not None:
        theta, scaling = config.rope_local_theta, None
    factor, sections, positions = ops.rope_attention_factor(scaling), config.rope_sections, inputs.positions
    twice = 2 if sections and len(sections) == 2 else 1
    frequencies = ops.rope_frequencies(config.rotary_dim // twice, theta, config.rope_fraction, scaling, length)
    axes = None if sections is None else ops.section_axes(sections, config.rope_interleaved)
    if sections is not None:  # without images a token has its position three times
        same = jnp.repeat(positions[..., None], len(sections), axis=-1)
        positions = same if inputs.rope_positions is None else inputs.rope_positions
    frequencies = np.tile(frequencies, twice)
    return tuple(ops.apply_rope(a, positions, frequencies, factor, axes) for a in arrays)


def declare_relative_bias(config: ModelConfig) -> nnx.Param | None:
    """The table `[N, buckets]` of model.position=relative, which all layers of a stack share; None without it."""
    if config.position != "relative":
        return None
    return declare((config.num_heads, config.relative_buckets), ("heads", "whole"), "embedding")


def scale_head(config: ModelConfig, h: jax.Array) -> jax.Array:
    """The input of the head, as it is or divided by sqrt(D)."""
    return h * config.hidden_size**-0.5 if config.scale_head else h


def scale_embeddings(config: ModelConfig, x: jax.Array) -> jax.Array:
    """Rows of the token table → their part of the residual stream; the same for gradients, in the other direction."""
    return x * math.sqrt(config.hidden_size) if config.scale_embeddings else x


def add_bias(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    """`y + bias`, if there is one."""
    return y if bias is None else y + bias


def residual_scale(config: ModelConfig) -> float:
    """GPT-2's depth scaling of the projections that write to the residual stream (Radford et al. 2019)."""
    return 1 / math.sqrt(2 * config.num_layers) if config.depth_scaled_init else 1.0
