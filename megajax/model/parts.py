"""What every part of a block declares and computes, and what it reads.

A block is attention and an MLP, or whatever its kind puts in the MLP's place. Each is a `Part` with the norm before it:
one module of this package, which the rest of megajax asks for all it has to know.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
from flax import nnx

from megajax import ops
from megajax.config import ModelConfig
from megajax.model.comm import Comm, TokenPositions

Weights = Mapping[str, Any]  # by name within the part: arrays, or what a communication point's linear layers take
State = Mapping[str, jax.Array]
Metrics = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockInputs:
    """What every block reads besides the residual stream."""

    positions: jax.Array  # [B, S] int32, position of each token in its sequence, or in its document
    token_positions: TokenPositions  # where the tokens stand in their sequences, and where their documents begin
    token_ids: jax.Array  # [T / tensor] uint32, index of each token in the global batch (dropout)
    dropout_key: jax.Array | None  # None: no dropout
    jitter_key: jax.Array | None = None  # None: no jitter of the routers' inputs
    layer_loss_scale: jax.Array | None = None  # factor of the layers' own losses; None: they measure nothing


@dataclass(frozen=True)
class Shares:
    """How the work of one token is divided, as `Part.sizes` asks."""

    tensor: int  # devices that share heads and widths
    token_shards: int  # devices of the batch and of `context` that do not tell experts apart
    expert_shards: int = 1  # devices that experts lie over
    experts_over_tensor: bool = False  # `tensor` divides experts instead of their width
    compute: int = 2  # bytes of a number


@dataclass(frozen=True)
class PartSizes:
    """Numbers of the compute dtype that a part has of one token on one device, for the estimate of memory."""

    kept: float  # what matmuls and routing give, which the policies `none` and `save_matmuls` keep
    width: float  # of its last linear layer's input, on all devices of `tensor`
    products: int = 1  # of the width, that its first linear layer gives: two with a gate
    kept_width: float = 0  # what is kept of the last linear layer's input
    rows: float = 0  # of the residual stream's width that experts receive, on all devices of `tensor`
    arrived: float | None = None  # of the first linear layer's input; None: the residual stream's width
    activation: float = 0  # of an activation that is kept because its layer has a bias


class Part(nnx.Module):
    """One part of a block: reads the residual stream, normalised, and gives what is added to it.

    Subclasses declare parameters in `__init__(config)` (`declare`) and compute in `__call__`. Names are those within
    the part; `Block` puts the part's own name before them.
    """

    NAME: ClassVar[str]  # of the part in the names of its parameters
    # Parameters that lie side by side in one matmul: the weight computed with → the parameters stored.
    FUSED: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    LINEAR: ClassVar[tuple[str, ...]] = ()  # weights of linear layers, which FP8 quantises, as computed with
    USED_FIRST: ClassVar[str | None] = None  # the weight that its forward pass uses first; and last
    USED_LAST: ClassVar[str | None] = None
    SAVED: ClassVar[tuple[str, ...]] = ()  # names that `save_matmuls` and `offload` keep (`checkpoint_name`)
    METRICS: ClassVar[tuple[str, ...]] = ()  # that it gives in training
    LOSSES: ClassVar[tuple[str, ...]] = ()  # of these what is added to the loss, and has a gradient
    NEEDS_FILLED: ClassVar[bool] = False  # whether its state has `filled`: is this a layer, or an empty slot of zeros?

    def __init__(self, config: ModelConfig):
        self.config = config

    def __call__(
        self,
        w: Weights,
        x: jax.Array,
        inputs: BlockInputs,
        layer,
        state: State,
        *,
        comm: Comm,
        window,
        recompute,
    ) -> tuple[jax.Array, Metrics]:
        """`x [T / tensor, D]` → (what is added to it, metrics).

        `w` are the weights as `Block.fuse` makes them. `layer` is the layer's index (may be traced), `state` what
        `layer_state` declares. Metrics are this device's shares of sums over the tokens of a microbatch: numbers of
        type float, of which a step reports the mean over microbatches and layers (of LOSSES the sum over layers), or
        counts of type int, which a step sums and reports by layer. The backward pass computes again what `recompute`
        names: "attention", from queries, keys and values; "norms".
        """
        raise NotImplementedError

    def linear_layers(self) -> tuple[str, ...]:
        """Those of LINEAR that this model has."""
        return self.LINEAR

    def losses(self) -> tuple[str, ...]:
        """Those of LOSSES that this model has."""
        return ()

    def layer_state(self) -> dict[str, jax.ShapeDtypeStruct]:
        """What a layer keeps from step to step that is no parameter, zeros at first."""
        return {}

    def updated_state(self, state: State, metrics: State) -> dict[str, jax.Array]:
        """The state `[L, ...]` of all layers after a step, from its metrics `[L, ...]`, summed over all devices."""
        return dict(state)

    def matmul_parameters(self) -> int:
        """Parameters of matmuls that a token uses."""
        raise NotImplementedError

    def attention_flops(self, attended: float) -> float:
        """Operations of attention, forward and backward, for a token that attends to so many others."""
        return 0

    def sizes(self, shares: Shares) -> PartSizes:
        """What a token takes, for the estimate of memory."""
        raise NotImplementedError


@jax.named_scope("norm")
def normalise(config: ModelConfig, x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
    """RMSNorm or LayerNorm, whichever the model has, over the last axis."""
    if config.norm == "rmsnorm":
        return ops.rms_norm(x, weight, config.norm_epsilon)
    return ops.layer_norm(x, weight, bias, config.norm_epsilon)


def add_bias(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    """`y + bias`, if there is one."""
    return y if bias is None else y + bias


def residual_scale(config: ModelConfig) -> float:
    """GPT-2's depth scaling of the projections that write to the residual stream (Radford et al. 2019)."""
    return 1 / math.sqrt(2 * config.num_layers) if config.depth_scaled_init else 1.0


def is_gated(config: ModelConfig) -> bool:
    """Whether MLPs have a gate beside the product that it multiplies."""
    return config.activation in ("swiglu", "geglu")


def products(config: ModelConfig) -> int:
    """How many products an MLP's first linear layer gives side by side: two with a gate."""
    return 1 + is_gated(config)
