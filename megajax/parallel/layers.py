"""A stage's blocks, forward and backward, with what is saved between the two chosen by the remat policy.

The backward pass is written by hand: the forward pass of a unit (one layer, or `remat.group` of them) keeps the
residuals of its `jax.vjp` less the weights, which the backward pass gathers again. So gathered weights never live
longer than a unit, and the pipeline's schedules run the two passes at different ticks (pipeline.py).
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from megajax.config import Config
from megajax.model.transformer import (
    LINEAR,
    ROUTER_LOSSES,
    SAVED_NAMES,
    BlockInputs,
    Transformer,
    block_kind,
    layer_windows,
)
from megajax.ops import fp8
from megajax.ops.fp8 import Fp8Weight
from megajax.parallel.comm import MeshComm
from megajax.parallel.fused import FusedWeights
from megajax.parallel.scaling import Scales, Scaling
from megajax.parallel.weights import WeightExchange
from megajax.sharding import EMPTY

STATE = ("expert_bias",)  # what a layer keeps that is no parameter; it travels among the unit's weights
NO_STATE: Mapping[str, jax.Array] = {}
Unit = tuple[dict[str, Any], ...]  # the fused weights of a unit's layers, by name: arrays or Fp8Weights
Amax = dict[str, jax.Array]  # by linear layer: the largest magnitudes of its input and its output gradient
Metrics = tuple[dict[str, jax.Array], ...]  # of a unit's layers, by name


@dataclass(frozen=True)
class Segment:
    """Consecutive layers of one remat policy and precision, run as `loops` times a body of `unroll` layers."""

    start: int
    loops: int
    unroll: int
    group: int
    policy: str
    fp8: bool = False

    @property
    def count(self) -> int:
        return self.loops * self.unroll


def plan_segments(config: Config, platform: str, depth: int | None = None) -> tuple[Segment, ...]:
    """The loops over `depth` layers, by default all, that `remat` and `kernels.scan_unroll` ask for.

    A body holds whole periods of `model.layer_pattern` and whole remat groups. Unrolled layers keep their residuals as
    values instead of slices of stacked arrays: faster and smaller on GPUs, but slower to compile; so by default up to
    16 layers on GPUs, and as few as possible elsewhere.
    """
    L, remat = depth or config.model.num_layers, config.remat
    period = len(layer_windows(config.model))
    covered = L if remat.layers is None else remat.layers
    if remat.policy == "none":
        covered = 0
    fp8_layers = config.fp8_layers
    if len(fp8_layers) == config.model.num_layers:
        fp8_layers = range(L)
    edges = sorted({0, covered, L, fp8_layers.start, fp8_layers.stop})
    segments = []
    for start, end in itertools.pairwise(edges):
        policy, group = (remat.policy, remat.group) if start < covered else ("none", 1)
        count, in_fp8 = end - start, start in fp8_layers
        step = math.lcm(period, group)
        # The largest body that divides the layers, if it is near the target; else even ones, and a rest.
        periods = count // step
        target = max((config.kernels.scan_unroll or (16 if platform != "cpu" else 1)) // step, 1)
        loops = next((periods // n for n in range(target, target // 2, -1) if periods % n == 0), -(-periods // target))
        unroll = periods // loops * step if loops else 0
        if loops:
            segments.append(Segment(start, loops, unroll, group, policy, in_fp8))
        rest = count - loops * unroll  # of a count that does not divide, or of a pattern that is no whole period
        if rest:
            segments.append(Segment(end - rest, 1, rest, group, policy, in_fp8))
    return tuple(segments)


@jax.tree_util.register_pytree_node_class
class Residuals:
    """What a unit's backward pass needs: the leaves of a `jax.vjp` function, less those that are the weights."""

    def __init__(self, saved: list[jax.Array], treedef: Any, sources: tuple[int, ...]):
        # sources: for each leaf its index in [*saved, *weights]
        self.saved, self.treedef, self.sources = saved, treedef, sources

    @classmethod
    def of(cls, pull: Callable, weights: Any) -> "Residuals":
        """Split the leaves by identity: the weights themselves, and everything else once."""
        leaves, treedef = jax.tree.flatten(pull)
        weight_ids = {id(w) for w in jax.tree.leaves(weights)}
        saved = {id(leaf): leaf for leaf in leaves if id(leaf) not in weight_ids}
        index = {key: i for i, key in enumerate([*saved, *map(id, jax.tree.leaves(weights))])}
        return cls(list(saved.values()), treedef, tuple(index[id(leaf)] for leaf in leaves))

    def pull(self, weights: Any) -> Callable:
        """The vjp function again, with `weights` in their places."""
        arrays = [*self.saved, *jax.tree.leaves(weights)]
        return jax.tree.unflatten(self.treedef, [arrays[i] for i in self.sources])

    def tree_flatten(self):
        return self.saved, (self.treedef, self.sources)

    @classmethod
    def tree_unflatten(cls, static, saved):
        return cls(list(saved), *static)


class LayerStack:
    """All layers of one device's pipeline stage: R rounds of the same segments.

    `table [P, R, slots]` says which layer lies where (`sharding.stored_layers`). A stage stores R·slots rows of every
    weight; where a segment has one loop and the stage one round, its weights have no leading dimension, else `[R·loops,
    ...]`. An empty slot holds zeros, and a block of zeros adds nothing to the residual stream.
    """

    def __init__(
        self,
        config: Config,
        comm: MeshComm,
        model: Transformer,
        exchange: WeightExchange,
        fused: FusedWeights,
        table: np.ndarray,
        platform: str,
    ):
        kind = block_kind(config.model)
        self.block, self.prefix = model.blocks[kind], f"blocks.{kind}."
        self.has_losses = config.model.num_experts is not None and config.model.router.has_losses
        self.comm, self.exchange, self.fused = comm, exchange, fused
        # With sinks, cuDNN's call is one step of an operation whose result has a name.
        self.attention_is_fused = comm.attention_is_fused and not config.model.attention_sinks
        self.scaling = Scaling(config)
        self.windows = layer_windows(config.model)
        self.table, self.rounds = table, table.shape[1]
        self.segments = plan_segments(config, platform, table.shape[2])
        apart = platform != "cpu" or config.kernels.scan_unroll is not None
        self.unrolled = apart and all(segment.loops == 1 for segment in self.segments)
        # The layer that lies in each virtual stage's first slot, or would if it were not empty; [P, R]
        first = np.where(table == EMPTY, EMPTY - table.size, table - np.arange(table.shape[2]))
        self.first_layers = first.max(axis=2)
        # Where in the pattern of windows every virtual stage begins.
        self.window_offset = int(first.max()) % len(self.windows)

    @jax.named_scope("weights")
    def gather_once(
        self, params: Mapping[str, jax.Array], scales: Scales, state: Mapping[str, jax.Array] = NO_STATE
    ) -> list[tuple[Unit, ...]]:
        """Stored `[R·slots, ...]` shards → for each segment its units' `fsdp` shards, `[R·loops, ...]` or `[...]`.

        `scales` are the linear layers' FP8 scales, `[R·slots]` each, `state` what else the layers keep, `[L, ...]`.
        """
        state = self.of_stage(dict(state))
        blocks = {n.removeprefix(self.prefix): w for n, w in params.items() if n.startswith(self.prefix)}

        def layer(segment: Segment, j: int) -> dict[str, Any]:
            stored = {name: self._layer_of(w, segment, j) for name, w in blocks.items()}
            out = {}
            for name, w in self.fused.fuse(stored).items():
                if segment.fp8 and name in LINEAR:
                    own = {which: self._layer_of(scale, segment, j) for which, scale in scales[name].items()}
                    out[name] = self._quantized(name, w, own)
                else:
                    out[name] = self.exchange.gather_once(self.prefix + name, w)
            return out | {name: self._layer_of(a, segment, j) for name, a in state.items()}

        def units(s: Segment):
            return tuple(tuple(layer(s, u + i) for i in range(s.group)) for u in range(0, s.unroll, s.group))

        return [units(segment) for segment in self.segments]

    @jax.named_scope("weights")
    def weight_amax(self, params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The largest magnitude of each linear layer's weight, `[R·slots]`, over all devices; none without FP8."""
        if not any(segment.fp8 for segment in self.segments):
            return {}
        local = {}
        for name in LINEAR:
            parts = [params[self.prefix + part] for part in self.fused.parts[name]]
            local[name] = jnp.stack([jnp.abs(w).max(axis=range(1, w.ndim)) for w in parts]).max(axis=0)
        return self.comm.max_over_devices(local)

    @jax.named_scope("gradients")
    def collect(self, gradients: Sequence[tuple[Unit, ...]], only_microbatch: bool) -> dict[str, jax.Array]:
        """Gradients from `backward`, summed over the microbatches → complete FP32 gradients of the stored shards."""
        parts: dict[str, list[jax.Array]] = {}
        for segment, units in zip(self.segments, gradients, strict=True):
            if not _reduced_on_the_way(segment, only_microbatch):
                units = [self._scatter_once(unit) for unit in units]
            layers = [layer for unit in units for layer in unit]
            for name in layers[0]:
                stacked = self._stack_layers([layer[name] for layer in layers], segment)
                for part, gradient in self.fused.split(
                    name, self.exchange.complete(self.prefix + name, stacked)
                ).items():
                    parts.setdefault(self.prefix + part, []).append(gradient)
        return {name: self._without_empty_slots(self._join_segments(part)) for name, part in parts.items()}

    def collect_amax(self, amaxes: Sequence[tuple[tuple[Amax, ...], ...]]) -> dict[str, jax.Array]:
        """Amaxes from `backward`, largest over the microbatches → by linear layer `[R·slots, 2]`, over all devices."""
        out: dict[str, list[jax.Array]] = {}
        for segment, units in zip(self.segments, amaxes, strict=True):
            layers = [layer for unit in units for layer in unit]
            zeros = jnp.zeros((self.copies(segment), 2) if self.copies(segment) > 1 else 2, jnp.float32)
            for name in LINEAR:
                out.setdefault(name, []).append(self._stack_layers([a.get(name, zeros) for a in layers], segment))
        return self.comm.max_over_devices({name: self._join_segments(parts) for name, parts in out.items()})

    def collect_metrics(self, metrics: Sequence[tuple[Metrics, ...]]) -> dict[str, jax.Array]:
        """Metrics from `forward`, summed over the microbatches → `[L, ...]` by name, summed over all devices."""
        out: dict[str, list[jax.Array]] = {}
        for segment, units in zip(self.segments, metrics, strict=True):
            layers = [layer for unit in units for layer in unit]
            for name in layers[0]:
                out.setdefault(name, []).append(self._stack_layers([layer[name] for layer in layers], segment))
        if not out:
            return {}
        return self.of_all_layers(
            self.comm.sum_over_tokens({n: self._join_segments(parts) for n, parts in out.items()})
        )

    def of_stage[Arrays](self, arrays: Arrays) -> Arrays:
        """Arrays `[L, ...]` of all layers → `[R·slots, ...]` of this stage's rows."""
        if len(self.table) == 1:
            return arrays
        rows = jnp.asarray(np.maximum(self.table, 0).reshape(len(self.table), -1))[lax.axis_index("pipeline")]
        return jax.tree.map(lambda a: a[rows], arrays)

    def of_all_layers[Arrays](self, arrays: Arrays) -> Arrays:
        """Arrays `[R·slots, ...]` of this stage's rows, none negative → `[L, ...]` of all layers."""
        if len(self.table) == 1:
            return arrays
        rows = jnp.asarray(self.table.reshape(len(self.table), -1))[lax.axis_index("pipeline")]
        L = int(self.table.max()) + 1
        rows = jnp.where(rows == EMPTY, L, rows)  # out of bounds: dropped
        placed = jax.tree.map(lambda a: jnp.zeros((L, *a.shape[1:]), a.dtype).at[rows].set(a, mode="drop"), arrays)
        return lax.pmax(placed, "pipeline")

    def copies(self, segment: Segment) -> int:
        """How many layers share one place in a segment's body: the length of its weights' leading dimension."""
        return self.rounds * segment.loops

    def forward(self, weights: Sequence[tuple[Unit, ...]], x: jax.Array, inputs: BlockInputs, save: bool = True):
        """The residual stream through all layers → (x, residuals for `backward`, metrics for `collect_metrics`).

        If not `save`, the residuals of each unit are None.
        """
        residuals, metrics = [], []
        for segment, units in zip(self.segments, weights, strict=True):

            def body(x, loop, segment=segment):
                units, first = loop
                saved, measured = [], []
                for u, unit in enumerate(units):
                    x, kept, values = self.unit_forward(unit, x, inputs, segment, first, u, save)
                    saved.append(kept)
                    measured.append(values)
                return x, (tuple(saved), tuple(measured))

            x, (saved, measured) = _loop(body, x, (units, _first_layers(segment)), segment)
            residuals.append(saved)
            metrics.append(measured)
        return x, residuals, metrics

    def backward(self, weights, residuals, dx: jax.Array, inputs: BlockInputs, only_microbatch: bool):
        """Gradient of the stack's output → (gradient of its input, gradients for `collect`, for `collect_amax`).

        Collectives are tied to the layer that they run beside. A unit's weights are gathered while the unit above goes
        backward (untied, the gather would be merged with the forward pass's, and the weights kept); its gradients are
        reduced while the unit below does (untied, XLA merges the reductions of distant layers and runs them last).
        """
        gradients, amaxes = [], []
        for segment, units, saved in zip(self.segments[::-1], weights[::-1], residuals[::-1], strict=True):
            on_the_way = _reduced_on_the_way(segment, only_microbatch)

            def body(dx, loop, segment=segment, on_the_way=on_the_way):
                units, saved, first = loop
                above: Unit | None = None
                entered, reduced, amax = dx, [], []
                for u in reversed(range(len(units))):
                    unit, _ = self.exchange.tie_gather((units[u], entered))
                    entered = dx
                    dx, gradient, largest = self.unit_backward(unit, saved[u], dx, inputs, segment, first, u)
                    amax.append(largest)
                    if above is not None:
                        above = self.reduce(above, on_the_way)
                        dx, gradient, above = self.exchange.tie_reduction((dx, gradient, above), on_the_way)
                        reduced.append(above)
                    above = gradient
                assert above is not None
                return dx, ((self.reduce(above, on_the_way), *reduced[::-1]), tuple(amax[::-1]))

            dx, out = _loop(body, dx, (units, saved, _first_layers(segment)), segment, reverse=True)
            gradients.append(out[0])
            amaxes.append(out[1])
        return dx, gradients[::-1], amaxes[::-1]

    def unit_forward(self, unit: Unit, x, inputs, segment: Segment, first, u: int, save: bool):
        """Unit `u` of a body whose first layer is `first` → (y, residuals; None if not `save`, metrics)."""
        weights = self._gather(unit)
        run = self._runner(inputs, segment, first, u)
        if not save or segment.policy == "full":
            (y, _), metrics = run(weights, x)
            return y, (x if save else None), metrics
        run = _with_policy(run, segment.policy, self.attention_is_fused)
        (y, _), pull, metrics = jax.vjp(run, weights, x, has_aux=True)
        return y, Residuals.of(pull, weights), metrics

    def unit_backward(self, unit: Unit, saved, dy, inputs, segment: Segment, first, u: int):
        """The unit's output gradient → (that of its input, its weights' gradients, FP8 amaxes of its layers)."""
        weights = self._gather(unit)
        if segment.policy == "full":
            x, dy = lax.optimization_barrier((saved, dy))  # or the recomputation would be merged with the forward pass
            _, pull, _ = jax.vjp(self._runner(inputs, segment, first, u), weights, x, has_aux=True)
        else:
            pull = saved.pull(weights)
        gradient, dx = pull((dy, inputs.balance_scale if self.has_losses else None))
        gradient = tuple({n: g for n, g in layer.items() if n not in STATE} for layer in gradient)
        amax = tuple({n: g.amax for n, g in layer.items() if isinstance(g, Fp8Weight)} for layer in gradient)
        gradient = tuple(
            {n: g.gradient if isinstance(g, Fp8Weight) else g for n, g in layer.items()} for layer in gradient
        )
        return dx, gradient, amax

    @jax.named_scope("gradients")
    def reduce(self, gradient: Unit, on_the_way: bool) -> Unit:
        """A unit's gradients, summed over `fsdp`, and over the once-a-step axes too if `on_the_way`."""
        reduced = tuple(
            {n: self.exchange.reduce_layer(self.prefix + n, g) for n, g in layer.items()} for layer in gradient
        )
        return self._scatter_once(reduced) if on_the_way else reduced

    def _scatter_once(self, gradient: Unit) -> Unit:
        return tuple(
            {n: self.exchange.scatter_once(self.prefix + n, g) for n, g in layer.items()} for layer in gradient
        )

    def _runner(self, inputs: BlockInputs, segment: Segment, first, u: int) -> Callable:
        """(weights of unit `u` of a body whose first layer is `first`, x) → ((y, routers' losses), metrics).

        The losses are this device's share, None where there are none. They are an output, because their gradient begins
        here, whatever becomes of y.
        """

        def run(weights: Unit, x: jax.Array):
            metrics = []
            for i, layer_weights in enumerate(weights):
                offset = u * segment.group + i
                x, _, measured = self.block(
                    layer_weights,
                    x,
                    inputs,
                    first + offset,
                    {name: layer_weights[name] for name in STATE if name in layer_weights},
                    comm=self.comm,
                    window=self.windows[(self.window_offset + segment.start + offset) % len(self.windows)],
                    recompute=self._recomputed(segment),
                )
                metrics.append(measured)
            losses = [layer[name] for layer in metrics for name in ROUTER_LOSSES if name in layer]
            return (x, sum(losses) if losses else None), tuple(metrics)

        return run

    def _recomputed(self, segment: Segment) -> tuple[str, ...]:
        """What blocks compute again without being asked to by a policy of `jax.checkpoint`.

        Results of norms are dear to keep in a pipeline's buffers: written twice and read twice, they take longer than
        to compute again. Not so over `tensor`, where their tokens would be gathered again, and in FP8.
        """
        parts = ("attention",) if segment.policy == "selective" else ()
        if len(self.table) > 1 and self.comm.tensor_size == 1 and not segment.fp8:
            parts = (*parts, "norms")
        return parts if segment.policy in ("none", "selective") else ()

    @jax.named_scope("weights")
    def _gather(self, unit: Unit) -> Unit:
        return tuple({n: self._gather_layer(n, w) for n, w in layer.items()} for layer in unit)

    def _gather_layer(self, name: str, w: jax.Array | Fp8Weight):
        if name in STATE:
            assert not isinstance(w, Fp8Weight)
            return w
        name = self.prefix + name
        if not isinstance(w, Fp8Weight):
            return self.exchange.gather_layer(name, w)
        values = self.exchange.gather_layer(name, w.values)
        return replace(
            w,
            values=values,
            transposed=values.T if w.transposed is None else w.transposed,
            gradient=jnp.zeros(values.shape, self.exchange.compute),
            amax=jnp.zeros(2, jnp.float32),
        )

    def _layer_of(self, stacked: jax.Array, segment: Segment, j: int) -> jax.Array:
        """Of `[R·slots, ...]` the j-th layers of a segment's loops, `[R·loops, ...]` or `[...]`."""
        w = stacked.reshape(self.rounds, -1, *stacked.shape[1:])
        w = lax.slice_in_dim(w, segment.start, segment.start + segment.count, axis=1)
        w = w.reshape(self.copies(segment), segment.unroll, *stacked.shape[1:])[:, j]
        return w[0] if len(w) == 1 else w

    def _stack_layers(self, layers: list[jax.Array], segment: Segment) -> jax.Array:
        """A segment's layers in order, `[R · count, ...]`."""
        copies = self.copies(segment)
        stacked = jnp.stack(layers, axis=0 if copies == 1 else 1)
        return stacked if copies == 1 else stacked.reshape(-1, *stacked.shape[2:])

    def _join_segments(self, parts: list[jax.Array]) -> jax.Array:
        """`[R · count, ...]` of each segment → `[R·slots, ...]`."""
        if len(parts) == 1:
            return parts[0]
        rounds = [part.reshape(self.rounds, -1, *part.shape[1:]) for part in parts]
        return jnp.concatenate(rounds, axis=1).reshape(-1, *parts[0].shape[1:])

    def _without_empty_slots(self, gradient: jax.Array) -> jax.Array:
        """`[R·slots, ...]`, zeros in empty slots: a bias there, added to the residual stream, has a gradient."""
        filled = (self.table != EMPTY).reshape(len(self.table), -1, *(1,) * (gradient.ndim - 1))
        if filled.all():
            return gradient
        return jnp.where(jnp.asarray(filled)[lax.axis_index("pipeline")], gradient, 0)

    def _quantized(self, name: str, w: jax.Array, scales: Mapping[str, jax.Array]) -> Fp8Weight:
        """Shards of one layer `[in, out]`, or of several `[loops, in, out]`, quantised and gathered once."""
        scale = scales["weight"]
        values = self.exchange.gather_once(self.prefix + name, fp8.quantize(w, scale[..., None, None], fp8.E4M3))
        whole = self.exchange.is_whole(self.prefix + name)  # if not, each layer's pass gathers and transposes it
        return Fp8Weight(
            values,
            values.swapaxes(-1, -2) if whole else None,
            1 / scale,
            scales.get("input"),
            scales.get("gradient"),
            None,
            None,
            self.scaling.gradient_dtype,
        )


def _loop(body: Callable, carry, xs, segment: Segment, reverse: bool = False):
    """`body` over a segment's loops; a single one is no loop, and its values are not stacked."""
    return body(carry, xs) if segment.loops == 1 else lax.scan(body, carry, xs, reverse=reverse)


def _reduced_on_the_way(segment: Segment, only_microbatch: bool) -> bool:
    """Whether each unit's gradients are complete when its backward pass is; not inside loops over layers."""
    return only_microbatch and segment.loops == 1


def _first_layers(segment: Segment):
    first = segment.start + segment.unroll * jnp.arange(segment.loops)
    return segment.start if segment.loops == 1 else first


def _with_policy(run: Callable, policy: str, fused: bool) -> Callable:
    """`run` under a policy; `fused`: attention is one cuDNN call, not parts with a name for their sum."""
    if policy in ("none", "selective"):
        return run
    policies = jax.checkpoint_policies
    # cuDNN's output is among its residuals, which are kept below.
    names = [name for name in SAVED_NAMES if not (name == "attention" and fused)]
    if policy == "save_matmuls":
        named = policies.save_only_these_names(*names)
    else:
        assert policy == "offload"
        named = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=names,
            offload_src="device",
            offload_dst="pinned_host",
        )

    def keep(prim, *args, **params):
        # cuDNN's residuals are inside its custom_vjp, out of reach of names: without this its forward runs twice.
        return True if fused and "dot_product_attention_fwd" in str(prim) else named(prim, *args, **params)

    return jax.checkpoint(run, policy=keep)
