"""Shows the way of one weight through a step: its forms, their bytes on a device, and the collectives between them.

Example: megajax explain-weight configs/llama3_8b.yaml blocks.dense.attention.query mesh.tensor=2

The edges are traced from the functions that the step calls (`megajax.weights`), for one layer on one device; no GPU is
needed. NAME is that of a parameter, or of a weight with several parameters side by side.
"""

import argparse
import difflib
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from megajax.command_parser import CommandParser
from megajax.config import load_config
from megajax.config.checks import check_mesh
from megajax.console import user_errors
from megajax.errors import InputError, counted
from megajax.estimate.traces import jaxprs_inside
from megajax.jax_internals import Jaxpr
from megajax.mesh import AXES
from megajax.model.lora import adapters
from megajax.ops.numerics import wide
from megajax.sharding import Placement
from megajax.step.graph import Graph
from megajax.step.stack.layers import LayerStack
from megajax.step_plan import StepPlan
from megajax.tools.plan import DEVICE_NAMES
from megajax.tools.plan.rates import rates_of
from megajax.weights.adapters import adapted
from megajax.weights.weight import Weight, fuse

COLLECTIVES = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "psum": "all-reduce"}


class Collective(NamedTuple):
    """A collective of one device."""

    kind: str
    axes: tuple[str, ...]
    dtype: str
    bytes: int  # of the gathered result, or of the operand that is reduced


@dataclass(frozen=True)
class Edge:
    """A conversion of one layer's weight, or of its gradient on the way back, as traced."""

    name: str
    times: int  # in a step
    result: Any  # a tree of `ShapeDtypeStruct`
    collectives: tuple[Collective, ...] = ()


@dataclass(frozen=True)
class Chain:
    """The way of a weight of some layers, or of one outside the layers."""

    weight: Weight
    in_fp8: bool
    layers: int  # of a device with this chain
    forward: list[Edge] = field(default_factory=list)
    backward: list[Edge] = field(default_factory=list)

    def count(self, kind: str, axis: str) -> int:
        """The number of collectives of this kind over an axis in a step, on one device."""
        edges = (*self.forward, *self.backward)
        matching = [(edge, [c for c in edge.collectives if c.kind == kind and axis in c.axes]) for edge in edges]
        return sum(len(found) * edge.times * self.layers for edge, found in matching)

    def totals(self) -> Counter[tuple[str, tuple[str, ...], str]]:
        """Bytes of a step on one device by (collective, axes, dtype)."""
        found = Counter[tuple[str, tuple[str, ...], str]]()
        for edge in (*self.forward, *self.backward):
            for each in edge.collectives:
                found[each.kind, each.axes, each.dtype] += each.bytes * edge.times * self.layers
        return found


@dataclass(frozen=True)
class _Passes:
    """How the layers with one chain are treated."""

    in_fp8: bool
    gathers: int  # over `fsdp`, in a step
    reductions: int
    casts: int  # from the stored form, in a step


def chains(graph: Graph, name: str) -> list[Chain]:
    """The chains of the weight that has or is `name`; more than one if its layers differ. Raises InputError."""
    table = graph.table
    for weight in table.weights.values():
        if weight.name == name:
            return [_outside(graph, weight)]
    for stack in (*graph.stacks, *graph.frozen):
        for kind, weights in stack.weights.weights.items():
            for members, weight in weights.items():
                if name in (weight.name, *(weight.scope + member for member in weight.members)):
                    return _of_layers(graph, stack, kind, members)
    known = [*graph.plan.placements, *names(graph)]
    near = difflib.get_close_matches(name, known, 3, 0.4) or known[:3]
    raise InputError(f"the model has no weight {name}: give one such as {', '.join(dict.fromkeys(near))}.")


def names(graph: Graph) -> list[str]:
    """The names of all weights."""
    blocks = [weights for stack in (*graph.stacks, *graph.frozen) for weights in stack.weights.weights.values()]
    return [*graph.table.weights, *(weight.name for weights in blocks for weight in weights.values())]


def _outside(graph: Graph, weight: Weight) -> Chain:
    """The chain of a weight outside the layers, each edge of which runs once a step."""
    (placement,) = weight.members.values()
    chain, w = Chain(weight, False, 1), _stored(weight, placement, _local(placement, weight.sizes))
    if weight.name in graph.table.as_stored:
        chain.forward.append(Edge("look up rows in the shards", 1, w))
        gradient: Any = jax.ShapeDtypeStruct(w.shape, weight.sum_dtype)
    else:
        w = _edge(chain.forward, weight, "cast and gather", 1, weight.gather_per_step, w)
        w = _edge(chain.forward, weight, "gather", 1, weight.gather_per_layer, w)
        gradient = jax.ShapeDtypeStruct(w.shape, weight.sum_dtype)
    if not weight.is_trained:
        return chain
    chain.backward.append(Edge("sum over the microbatches", 1, gradient))
    if weight.name not in graph.table.as_stored:
        gradient = _edge(chain.backward, weight, "reduce", 1, weight.reduce_per_layer, gradient)
        gradient = _edge(chain.backward, weight, "reduce", 1, weight.reduce_per_step, gradient)
    _edge(chain.backward, weight, "sum over copies", 1, weight.complete, gradient)
    return chain


def _of_layers(graph: Graph, stack: LayerStack, kind: str, name: str) -> list[Chain]:
    """The chains of a weight of a stack's layers."""
    counts = Counter[_Passes]()
    trains, times = stack in graph.stacks, _times(graph, stack)
    for s, segment in enumerate(stack.segments):
        for j in stack.weights.kinds[kind].indices_in_body(segment):
            u, slot, weight = j // segment.group_size, segment.start + j, stack.weights.weights[kind][name]
            stays_gathered = slot in stack.weights.plan.gathered_slots
            passes = (1 + (not stack.stays_gathered_until_backward(s, u)) if trains else 1) * times
            in_fp8 = segment.fp8 and stack.weights.scaling.quantises(name)
            casts = passes if not in_fp8 and stack.weights.kept_in_stack(weight, segment, slot) else 1
            reductions = 1 if stays_gathered else times
            gathers, copies = 1 if stays_gathered else passes, stack.weights.kinds[kind].copies(segment)
            counts[_Passes(in_fp8, gathers, reductions, casts)] += copies
    found = list[Chain]()
    for passes, count in counts.items():
        chain = _of_layer(graph, stack, kind, name, passes, count)
        # A chain without collectives is the same, however often the layers' weights are gathered.
        same = next((i for i, other in enumerate(found) if replace(other, layers=count) == chain), None)
        if same is None:
            found.append(chain)
        else:
            found[same] = replace(chain, layers=found[same].layers + count)
    return found


def _times(graph: Graph, stack: LayerStack) -> int:
    """How often a step passes a stack: in pairs of microbatches only the model's layers."""
    return graph.plan.passes if stack is graph.layers else graph.plan.num_microbatches


def _of_layer(graph: Graph, stack: LayerStack, kind: str, name: str, passes: _Passes, count: int) -> Chain:
    weight, weights = stack.weights.weights[kind][name], stack.weights
    chain = Chain(weight, passes.in_fp8, count)
    parts = {n: _stored(weight, p, _local(p, weight.sizes)[1:]) for n, p in weight.members.items()}
    w = _edge(chain.forward, weight, "fuse", passes.casts, lambda parts: fuse({name: weight}, parts)[name], parts)
    if passes.in_fp8:
        scale = jax.ShapeDtypeStruct((), jnp.float32)
        tensors = ("weight", "input", "gradient") if weights.scaling.settings.chosen.keeps_history else ("weight",)
        quantise = lambda w, scales: weight.quantize_per_step(w, scales, weights.scaling.gradient_dtype)  # noqa: E731
        w = _edge(chain.forward, weight, "quantise and gather", 1, quantise, w, dict.fromkeys(tensors, scale))
    else:
        w = _edge(chain.forward, weight, "cast and gather", passes.casts, weight.gather_per_step, w)
    w = _edge(chain.forward, weight, "gather for the layer", passes.gathers, weight.gather_per_layer, w)
    _add_adapter(chain, graph, weights.weights[kind], name, w)
    if not weight.is_trained:
        return chain
    used = jax.eval_shape(weight.differentiable, w)
    gradient = used.gradient if passes.in_fp8 else used
    chain.backward.append(Edge("gradient", graph.plan.num_microbatches, gradient))
    if _times(graph, stack) < graph.plan.num_microbatches:
        gradient = jax.ShapeDtypeStruct(gradient.shape, wide(gradient.dtype))
        chain.backward.append(Edge("sum of two microbatches", graph.plan.passes, gradient))
    gradient = _edge(chain.backward, weight, "reduce", passes.reductions, weight.reduce_per_layer, gradient)
    if graph.plan.sums_gradients:
        gradient = jax.ShapeDtypeStruct(gradient.shape, weight.sum_dtype)
        chain.backward.append(Edge("sum over the microbatches", _times(graph, stack), gradient))
    gradient = _edge(chain.backward, weight, "reduce", 1, weight.reduce_per_step, gradient)
    gradient = _edge(chain.backward, weight, "sum over copies", 1, weight.complete, gradient)
    _edge(chain.backward, weight, "split", 1, weight.split, gradient)
    return chain


def _add_adapter(chain: Chain, graph: Graph, weights: Mapping[str, Weight], name: str, w: Any) -> None:
    """The edge that adds low-rank adapters, if the weight has any."""
    if name not in adapters(weights):
        return
    used = {name: w}
    for other, weight in weights.items():
        if other.startswith(tuple(f"{member}_lora_" for member in (name, *weights[name].members))):
            shapes = {n: _stored(weight, p, _local(p, weight.sizes)[1:]) for n, p in weight.members.items()}
            whole = lambda s, o=other, v=weight: v.gather_per_layer(v.gather_per_step(fuse({o: v}, s)[o]))  # noqa: E731
            used[other] = _trace(weight, whole, shapes)[0]
    inputs: Any = SimpleNamespace(adapter_key=None)
    add = lambda used: adapted(used, weights, graph.plan.lora, inputs, 0)[name]  # noqa: E731
    _edge(chain.forward, chain.weight, "with its adapter", 1, add, used)


def _edge(edges: list[Edge], weight: Weight, name: str, times: int, convert: Callable, *given: Any) -> Any:
    """Append the edge `convert`; its result. Edges that change nothing are left out."""
    result, found = _trace(weight, convert, *given)
    if found or [*map(_described, jax.tree.leaves(given[0]))] != [*map(_described, jax.tree.leaves(result))]:
        edges.append(Edge(name, times, result, tuple(found)))
    return result


def _trace(weight: Weight, convert: Callable, *given: Any) -> tuple[Any, list[Collective]]:
    jaxpr, result = jax.make_jaxpr(convert, axis_env=[*weight.sizes.items()], return_shape=True)(*given)
    return result, [each for each, _ in collectives(jaxpr.jaxpr)]


def collectives(jaxpr: Jaxpr, times: int = 1) -> Iterator[tuple[Collective, int]]:
    """The collectives of a traced function on one device, with the number of times that each runs."""
    for equation in jaxpr.eqns:
        name, inner = equation.primitive.name, times * equation.params.get("length", 1)
        if name in COLLECTIVES:
            axes: Any = equation.params.get("axes", equation.params.get("axis_name"))
            for operand, result in zip(equation.invars, equation.outvars, strict=True):
                whole: Any = (result if name == "all_gather" else operand).aval
                size = math.prod(whole.shape) * whole.dtype.itemsize
                axis_names = (axes,) if isinstance(axes, str) else tuple(axes)
                yield Collective(COLLECTIVES[name], axis_names, whole.dtype.name, size), times
        for inside in jaxprs_inside(equation):
            yield from collectives(inside, inner)


def _local(placement: Placement, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a device's shard."""
    return jax.sharding.NamedSharding(_mesh(sizes), PartitionSpec(*placement.spec)).shard_shape(placement.stored_shape)


def _mesh(sizes: Mapping[str, int]) -> Any:
    return jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))


def _stored(weight: Weight, placement: Placement, shape: Sequence[int]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), weight.stored_dtype)


def _described(x: Any) -> str:
    return f"[{', '.join(map(str, x.shape))}] {x.dtype.name}"


def lines(graph: Graph, name: str) -> list[str]:
    """The text of the command."""
    found = chains(graph, name)
    return [*_head(graph, found[0].weight), *(line for chain in found for line in _body(chain))]


def _head(graph: Graph, weight: Weight) -> Iterator[str]:
    """The declared, canonical and stored forms."""
    yield f"{weight.name}: {'trained' if weight.is_trained else 'frozen'}"
    for member, placement in weight.members.items():
        declared = graph.plan.declared[weight.scope + member]
        bits, size = (" and 16 low bits", 4) if weight.is_split else ("", weight.stored_dtype.itemsize)
        divided = {axis: n for axis, n in weight.sizes.items() if n > 1 and axis not in placement.replicated_axes}
        over = ", ".join(f"{axis} {n}" for axis, n in divided.items())
        shards = f"in shards over {over}" if over else "whole on each device"
        form = f"{[*placement.stored_shape]} {weight.stored_dtype.name}{bits}"
        yield f"  declared   {weight.scope + member}: {', '.join(declared.axes)}; {declared.role}"
        yield f"  canonical  {[*placement.shape]} float32"
        yield f"  stored     {form}, {shards}: {_bytes(size * math.prod(_local(placement, weight.sizes)))}"


def _body(chain: Chain) -> Iterator[str]:
    """The traced edges of one layer, and what its layers send in a step."""
    if chain.weight.scope:
        yield f"\n{counted(chain.layers, 'layer')} of a device{', in FP8' * chain.in_fp8}; of one layer:"
    for title, edges in (("forward", chain.forward), ("backward", chain.backward)):
        for edge in edges:
            result = edge.result
            arrays = [*result.values()] if isinstance(result, dict) else jax.tree.leaves(result)
            size = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
            forms = ", ".join(_described(x) for x in arrays if x.ndim or len(arrays) == 1)
            often = "once a step" if edge.times == 1 else f"{edge.times} times a step"
            yield f"  {title:9}{edge.name:26} {often:18} {forms} = {_bytes(size)}"
            for each in edge.collectives:
                yield f"{'':56} {each.kind} over {', '.join(each.axes)}: {_bytes(each.bytes)}"
    for (kind, axes, dtype), size in chain.totals().items():
        yield f"  in a step, {kind} over {', '.join(axes)}: {_bytes(size)} of {dtype}"


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:,.4g} {unit}"
        size /= 1024
    return f"{size:,.4g} GiB"


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = CommandParser(
        "megajax.tools.explain_weight", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("config", type=Path, help="YAML file")
    made.add_argument("name", help="such as blocks.dense.attention.query")
    made.add_argument("overrides", nargs="*", help="section.key=value")
    made.add_argument("--gpus", type=int, help="number of GPUs, where an axis of the mesh is -1")
    made.add_argument("--device", default="h200", help=f"{', '.join(DEVICE_NAMES)} (default: {DEVICE_NAMES[0]})")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the chain; the exit status."""
    with user_errors():
        options = parser().parse_args(arguments)
        config = load_config(options.config, options.overrides)
        count = options.gpus or math.prod(max(1, getattr(config.mesh, axis)) for axis in AXES)
        plan = StepPlan.make(config, check_mesh(config, count), rates_of(options.device).hardware)
        print("\n".join(lines(Graph.build(plan), options.name)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
