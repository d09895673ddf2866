"""A block: a list of parts, each added to the residual stream, with the parts' declarations for the whole block."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from megajax import ops
from megajax.config import ModelConfig
from megajax.config.sentences import listed
from megajax.errors import ConfigError, accepts, array_form, check_methods
from megajax.layout.kinds import BUILT_IN_BLOCKS, KINDS, PARALLEL, WITHOUT_NORM, stacked_layers
from megajax.layout.sublayers import ABILITIES, EVERYTHING, parts_of
from megajax.model.attention import Attention
from megajax.model.cross_attention import CrossAttention
from megajax.model.gated_deltanet import GatedDeltaNet
from megajax.model.kda import KimiDeltaAttention
from megajax.model.latent_attention import LatentAttention
from megajax.model.mamba2 import Mamba2
from megajax.model.mlp import MLP
from megajax.model.moe import MoE
from megajax.model.parameters import check_declared, parameters
from megajax.model.sublayer import MAX_SCORE, LayerContext, Metrics, State, Sublayer, Weights, declare_norm, normalise
from megajax.ops.barriers import not_repeated
from megajax.schema.fields import cached, check_attributes
from megajax.sharding import below

FIRST = "_lora_a"  # after a linear layer's name: its adapter's first matrix
BRANCHES = 2**31 + 2**16  # folded into a step's key; below it are numbers of nodes
BLOCK_CLASSES: dict[str, type[Any]] = {}  # of the kinds that are more than a list of sublayers: subclasses of Block
ATTRIBUTES = ("config", "kind", "names", "parallel")  # of a Block, besides its members and its sublayers by name
# Members of a sublayer for which there is no default.
REQUIRED = ("NAME", "LINEAR", "apply")


def register_block(kind: str, *parts: type[Sublayer], **named: type[Sublayer]) -> None:
    """Register blocks of these sublayers as `kind`, for `model.block_pattern`; before the config is loaded.

    `named` ones follow and have other names than their class's NAME: `register_block("pair", MLP, second=MLP)`.
    Raises ConfigError for a kind that has other sublayers already, for a name or a metric that two of them have, and
    for one that lacks a member.
    """
    for part in (*parts, *named.values()):
        _check_part(part)
    own = [*((part.NAME, part) for part in parts), *named.items()]
    if not own or not kind.isidentifier() or kind in BLOCK_CLASSES:
        raise ConfigError(
            f"register_block({kind!r}) is no kind of block: give a name, such as my_block, and its sublayers."
        )
    for values in ([name for name, _ in own], [metric for _, part in own for metric in part.METRICS]):
        if again := sorted({value for value in values if values.count(value) > 1}):
            cure = "name one of them, register_block(..., second=TheClass)" if again[0] in dict(own) else "rename one"
            raise ConfigError(f"two sublayers of the block {kind} have the name or the metric {again[0]}: {cure}.")
    if taken := [name for name, _ in own if not name.isidentifier() or hasattr(Block, name) or name in ATTRIBUTES]:
        raise ConfigError(f"a sublayer of the block {kind} has the name {taken[0]!r}, which it cannot have: rename it.")
    names, known = _described(dict(own)), _described(KINDS.get(kind, {}))
    if known and names != known:
        raise ConfigError(f"the kind of block {kind} has {', '.join(known)} already: choose another name.")
    KINDS[kind] = dict(own)


def _described(parts: Mapping[str, type[Sublayer]]) -> list[str]:
    return [f"{name} ({part.__module__}.{part.__qualname__})" for name, part in parts.items()]


def _check_part(part: type[Sublayer]) -> None:
    missing = [name for name in REQUIRED if getattr(part, name, None) is getattr(Sublayer, name, None)]
    if missing:
        members = f"{listed(missing, 'and')}: see megajax.model.Sublayer"
        raise ConfigError(f"{part.__name__} does not define {members}; LINEAR names one weight at least.")
    check_methods(part, Sublayer)
    check_attributes(part, Sublayer)
    arguments = ["self", "config", *([] if part.Settings is None else ["settings"])]
    if not accepts(part.__init__, *arguments):
        wanted = f"__init__({', '.join(arguments)})"
        raise ConfigError(f"{part.__name__}.__init__ does not take what it is called with: write {wanted}.")
    if unknown := sorted(set(part.SUPPORTS) - EVERYTHING):
        raise ConfigError(f"{part.__name__}.SUPPORTS has {unknown[0]!r}: use {listed(ABILITIES, 'and')}.")
    if unknown := sorted(set(part.LOSSES) - {*part.METRICS}):
        raise ConfigError(f"{part.__name__}.LOSSES has {unknown[0]!r}, which METRICS has not: add it there.")


def _check_linear_layers(part: Sublayer) -> None:
    for name in part.linear_layers():
        if name not in part.FUSED and not isinstance(getattr(part, name, None), nnx.Param):
            raise ConfigError(f"{type(part).__name__}.LINEAR has {name!r}, which is no parameter: declare it.")


def _is_loss(metric: Any) -> bool:
    return isinstance(metric, jax.Array) and metric.shape == () and metric.dtype == jnp.float32


def _term_and_metrics(part: Sublayer, x: jax.Array, ctx: LayerContext, returned: Any) -> tuple[jax.Array, Metrics]:
    """The result of a sublayer's `apply` to a residual stream `x`. Raises ConfigError for one of another form."""
    name = f"{type(part).__name__}.apply"
    if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], Mapping):
        raise ConfigError(f"{name} returns {type(returned).__name__}: return a term and a dictionary of metrics.")
    (y, metrics), losses = returned, part.losses() if ctx.inputs.has_metrics else ()
    if getattr(y, "shape", None) != x.shape or jnp.promote_types(x.dtype, y.dtype) != x.dtype:
        cure = "return one as x (by ctx.comm.column_linear and row_linear, and .astype(x.dtype))"
        raise ConfigError(f"{name} returns a term {array_form(y)} for x {array_form(x)}: {cure}.")
    if unknown := sorted(metrics.keys() - {*part.METRICS, MAX_SCORE}):
        raise ConfigError(f"{name} returns the metric {unknown[0]!r}, which METRICS has not: add it there.")
    if wrong := [loss for loss in losses if loss not in metrics or not _is_loss(metrics[loss])]:
        raise ConfigError(f"{name} does not return the loss {wrong[0]!r} of LOSSES as one FP32 number: return it.")
    return y, metrics


OWN = (Attention, CrossAttention, GatedDeltaNet, KimiDeltaAttention, Mamba2, MLP, MoE)
SUBLAYERS: dict[str, type[Sublayer]] = {part.NAME: part for part in OWN}


class Block(nnx.Module):
    """The sublayers of one kind of block.

    A name is the sublayer's name and the name within it: `attention.qkv`.
    """

    ROWS: ClassVar[str] = ""  # the logical axis of its stack's rows; empty: that of the layers

    def __init__(self, config: ModelConfig, kind: str):
        self.config, self.kind = config, kind
        self.names = tuple(parts_of(kind))
        self.parallel = PARALLEL.get(kind, {})
        for name, part in parts_of(kind).items():
            own, values = part.Settings, config.sublayer_settings.get(name, {})
            settings = [] if own is None else [own.model_validate(values)]
            module = (LatentAttention if part is Attention and config.is_latent else part)(config, *settings)
            check_declared(module, type(module).__name__)
            _check_linear_layers(module)
            module.post_norm, module.post_norm_bias = declare_norm(config, config.norm_placement != "before")
            if name in self.parallel or name in WITHOUT_NORM.get(kind, ()):
                module.norm = module.norm_bias = None
            setattr(self, name, module)

    @property
    def input_width(self) -> int:
        """The width of the input of `apply`."""
        return self.config.hidden_size

    @property
    def parts(self) -> dict[str, Sublayer]:
        """The parts by name, in order."""
        return {name: getattr(self, name) for name in self.names}

    def apply(self, weights: Weights, x: jax.Array, ctx: LayerContext) -> tuple[jax.Array, Metrics]:
        """`x [T / tensor, D]` → (x, metrics). `weights` are from `fuse`, `ctx.state` is the whole block's."""
        metrics, read = Metrics(), x
        for branch, (name, part) in enumerate(self.parts.items()):
            part_weights = below(weights, f"{name}.")
            if name in self.parallel:
                first = below(weights, f"{self.parallel[name]}.")
                part_weights |= {norm: first[norm] for norm in ("norm", "norm_bias") if norm in first}
            else:
                read = x
            returned = part.apply(part_weights, read, replace(ctx, state=below(ctx.state, f"{name}.")))
            y, found = _term_and_metrics(part, x, ctx, returned)
            if self.config.norm_placement != "before":
                # The backward pass needs y. Without the barrier XLA keeps the terms of its sum over `tensor` instead.
                y = normalise(
                    self.config, not_repeated(y), part_weights["post_norm"], part_weights.get("post_norm_bias")
                )
            x = x + self._dropout(y, ctx, branch)
            metrics |= found
        return x, metrics

    def fuse(self, stored: Weights) -> dict[str, jax.Array]:
        """Parameters of the block, or shards of them, by name → the fused weights of its matmuls.

        Heads are flattened, and weights with the same input are side by side: `attention.qkv [D, (N + 2K)·H]`,
        `mlp.gate_up [D, 2F]` (`[D, F]` without a gate), `moe.gate_up [E, D, 2F]`, `attention.output [N·H, D]`; biases
        in the same way. Leading dimensions are kept.
        """
        return fuse(stored, {name: parameter.axes for name, parameter in parameters(self).items()}, self.fused)

    @property
    def fused(self) -> dict[str, tuple[str, ...]]:
        """Fused weight → its stored parameters, for weights of several parameters."""
        fused = {
            f"{part}.{name}": tuple(f"{part}.{member}" for member in members)
            for part, module in self.parts.items()
            for name, members in module.FUSED.items()
        }
        # The first matrices of their adapters (lora.py), where a model has them
        return fused | {f"{n}{FIRST}": tuple(f"{member}{FIRST}" for member in own) for n, own in fused.items()}

    @property
    def linear_layers(self) -> tuple[str, ...]:
        """The weights of the linear layers, which FP8 quantises."""
        return tuple(f"{name}.{own}" for name, part in self.parts.items() for own in part.linear_layers())

    @property
    def used_first(self) -> str:
        """The weight that the forward pass uses first."""
        return self.linear_layers[0]

    @property
    def used_last(self) -> str:
        """The weight that the forward pass uses last and the backward pass first."""
        name = self.names[-1]
        return f"{name}.{self.parts[name].used_last()}"

    @property
    def saved_names(self) -> tuple[str, ...]:
        """The names of the values that the remat policies `save_matmuls` and `offload` keep."""
        return tuple(dict.fromkeys(saved for part in self.parts.values() for saved in part.SAVED))

    @property
    def has_experts(self) -> bool:
        """Whether some of its weights are divided over `mesh.experts_over`."""
        return any(part.HAS_EXPERTS for part in self.parts.values())

    @property
    def streams(self) -> tuple[str, ...]:
        """The streams that the block reads besides the residual stream."""
        return tuple(dict.fromkeys(name for part in self.parts.values() for name in part.streams()))

    @property
    def losses(self) -> tuple[str, ...]:
        """The metrics that are losses, added to the language model's loss."""
        return tuple(name for part in self.parts.values() for name in part.losses())

    @property
    def has_metrics(self) -> bool:
        """Whether the block has metrics."""
        return any(part.has_metrics() for part in self.parts.values())

    @property
    def layer_state(self) -> dict[str, jax.ShapeDtypeStruct]:
        """A layer's state that is not a parameter."""
        return {f"{n}.{own}": shape for n, part in self.parts.items() for own, shape in part.layer_state().items()}

    @property
    def is_real_layer_names(self) -> tuple[str, ...]:
        """The names of the state `is_real_layer`, which is False in a pipeline's empty layer slots."""
        return tuple(f"{name}.is_real_layer" for name, part in self.parts.items() if part.READS_IS_REAL_LAYER)

    def updated_state(self, state: State, metrics: State) -> dict[str, jax.Array]:
        """The state `[L, ...]` of this kind's layers after a step; `metrics [L, ...]` are summed over all devices."""
        out: dict[str, jax.Array] = {}
        for name, part in self.parts.items():
            own = below(state, f"{name}.")
            new = part.updated_state(own, metrics)
            if {n: jnp.shape(a) for n, a in new.items()} != {n: a.shape for n, a in own.items()}:
                problem = f"{type(part).__name__}.updated_state returns another state than it gets"
                raise ConfigError(f"{problem}: return {listed(own, 'and')}, [layers, ...], of the same shapes.")
            out |= {f"{name}.{n}": a for n, a in new.items()}
        return out

    def rescaled(self, metrics: State) -> dict[str, jax.Array]:
        """Factors of parameters after an update, by name, for this kind's metrics `[L, ...]`; see `Sublayer`."""
        own = {name: part.rescaled(metrics) for name, part in self.parts.items()}
        return {f"{name}.{n}": factor for name, factors in own.items() for n, factor in factors.items()}

    def _dropout(self, y: jax.Array, ctx: LayerContext, branch: int) -> jax.Array:
        if ctx.inputs.dropout_key is None:
            return y
        key = dropout_key(ctx.inputs.dropout_key, len(self.names), ctx.layer, branch)
        return ops.dropout(y, self.config.dropout, key, ctx.inputs.token_ids)


def dropout_key(key: jax.Array, count: int, layer: jax.Array | int, branch: int) -> jax.Array:
    """The key for the dropout of sublayer `branch` of `count` in a layer: a different one for each."""
    if count == 2:
        return jax.random.fold_in(key, 2 * layer + branch + 1)
    return jax.random.fold_in(jax.random.fold_in(key, BRANCHES + branch), layer)


def blocks_of(config: ModelConfig) -> dict[str, Block]:
    """One block of each stack of parameters in the model."""
    return {kind: BLOCK_CLASSES.get(kind, Block)(config, kind) for kind in stacked_layers(config)}


@cached
def _declared_blocks(config: ModelConfig) -> dict[str, Block]:
    """`blocks_of` to read declarations from; a run asks for them a dozen times before its first step."""
    return blocks_of(config)


def linear_layers(config: ModelConfig) -> tuple[str, ...]:
    """The names of the linear layers' weights in all kinds of blocks of the model."""
    return tuple(dict.fromkeys(name for block in _declared_blocks(config).values() for name in block.linear_layers))


def layer_state(config: ModelConfig) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
    """The layers' state that is not a parameter, by kind of block and name, `[L, ...]`; it starts as zeros."""
    layers = stacked_layers(config)
    states = {kind: block.layer_state for kind, block in _declared_blocks(config).items()}
    return {
        kind: {name: jax.ShapeDtypeStruct((len(layers[kind]), *a.shape), a.dtype) for name, a in state.items()}
        for kind, state in states.items()
        if state
    }


def state_by_name[Leaf](state: Mapping[str, Mapping[str, Leaf]]) -> dict[str, Leaf]:
    """Layer state by kind of block and name → by names like those of parameters, `blocks.KIND.NAME`."""
    return {f"blocks.{kind}.{name}": leaf for kind, own in state.items() for name, leaf in own.items()}


def fuse(
    stored: Weights, axes: Mapping[str, tuple[str, ...]], fused: Mapping[str, tuple[str, ...]]
) -> dict[str, jax.Array]:
    """`Block.fuse` for parameters with these logical `axes`; the members of each entry of `fused` are side by side."""
    weights = {name: _merge_heads(w, axes[name]) for name, w in stored.items()}
    for name, members in fused.items():
        present = [weights.pop(member) for member in members if member in weights]
        if present:
            weights[name] = jnp.concatenate(present, axis=-1)
    return weights


def _merge_heads(w: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """`w` with heads and head width as one dimension."""
    if "head" not in axes:
        return w
    after = len(axes) - 1 - axes.index("head")
    lead = w.shape[: w.ndim - after - 2]
    return w.reshape(*lead, -1, *w.shape[w.ndim - after :])


for _kind, _names in BUILT_IN_BLOCKS.items():
    register_block(_kind, *(SUBLAYERS[name] for name in _names))
