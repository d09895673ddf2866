"""The cost of a layer, from traces of its block at abstract shapes: matmuls, attention, what the backward pass keeps.

A sublayer declares no costs. Its block is traced with `shapes.ShapeComm` for a sequence on one of several devices;
numbers per token do not depend on the number of sequences.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from megajax.config import LoraConfig, ModelConfig
from megajax.errors import ConfigError
from megajax.estimate.shapes import ShapeComm, Shards, kernel
from megajax.jax_internals import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from megajax.layout.kinds import ENCODER, LayerKind
from megajax.model.block import Block, blocks_of
from megajax.model.comm import Comm, TokenPositions
from megajax.model.encoder import make_encoder
from megajax.model.lora import add_adapters, is_adapter
from megajax.model.parameters import parameters
from megajax.model.sublayer import RELATIVE_BIAS, BlockInputs, LayerContext
from megajax.ops.fp8 import E4M3, E5M2, Fp8Weight
from megajax.options.remat import RematPolicy
from megajax.schema.fields import AXES, cached
from megajax.sharding import mesh_axes, place
from megajax.step.stack.vjp import VIEWS, with_policy
from megajax.weights.adapters import adapted
from megajax.weights.table import side_by_side
from megajax.weights.weight import Weight, WeightDtypes

Shape = jax.ShapeDtypeStruct
SAME = (*VIEWS, "reduce_precision")  # of named values that a policy keeps
TOKENS = None  # the origin of an array that depends on the tokens; that of others is a set of weights' names
NOTHING = frozenset[int]()  # the origin of constants
OTHERS = ""  # the name of the work of a block that is none of its sublayers'
# Operations that XLA does not run again, besides those whose results are smaller than their operands
COSTLY = ("dot_general", "kernel", "custom_vjp_call", "concatenate", "sort", "cumsum")


@dataclass(frozen=True)
class Matmul:
    """A matmul of tokens with a weight: numbers per token on one device."""

    multiplications: float
    inputs: float
    outputs: float
    depth: int  # the width of its input: of one expert
    of_experts: bool
    into_stream: bool  # whether its weight's outputs are those of the residual stream


@dataclass
class SublayerWork:
    """The work of a sublayer's forward pass on one device."""

    matmuls: list[Matmul] = field(default_factory=list)
    per_key: float = 0  # multiplications of attention for a token and each token that it attends to
    mixing: float = 0  # multiplications per token of other products of tokens with tokens
    state: float = 0  # numbers in the states of a sequence
    mixed: float = 0  # numbers per token that a recurrence and its convolution read and write
    decays: float = 0  # the same of its decays: one for each head, or for each channel of its keys
    attended: float = 0  # numbers per token in attention's output

    @cached_property
    def multiplications(self) -> float:
        """Multiplications per token by weights: the number of matmul parameters that are active per token."""
        return sum(matmul.multiplications for matmul in self.matmuls)

    @cached_property
    def has_experts(self) -> bool:
        return any(matmul.of_experts for matmul in self.matmuls)

    @cached_property
    def last(self) -> list[Matmul]:
        """The matmuls that write to the residual stream."""
        return [matmul for matmul in self.matmuls if matmul.into_stream]

    @cached_property
    def width(self) -> float:
        """Numbers per token in the inputs of the last linear layers."""
        return sum(matmul.inputs for matmul in self.last)

    @cached_property
    def products(self) -> float:
        """Numbers per token in the outputs of the other matmuls."""
        return sum(matmul.outputs for matmul in self.matmuls if not matmul.into_stream)

    @cached_property
    def rows(self) -> float:
        """Numbers per token in the rows that experts receive."""
        return sum(matmul.inputs for matmul in self.matmuls if matmul.of_experts and not matmul.into_stream)

    @cached_property
    def depth(self) -> float:
        """The width of the narrowest last linear layer; infinite without one."""
        return min((matmul.depth for matmul in self.last), default=math.inf)


@dataclass(frozen=True)
class LayerForm:
    """The form of a layer's program."""

    shards: Shards = Shards()
    fp8: bool = False
    recompute: tuple[str, ...] = ()  # as in `LayerContext`


class Traces:
    """The traces of a model's layers, for sequences of `length` tokens."""

    def __init__(self, model: ModelConfig, lora: LoraConfig, length: int, compute: str, frozen: bool = False):
        """`frozen`: the layers' weights have no gradients, except adapters."""
        self.model, self.length, self.dtype = model, length, jnp.dtype(compute)
        self.blocks = {kind: add_adapters(block, lora) for kind, block in blocks_of(model).items()}
        self.lora, self.frozen = lora, frozen
        self._traces = dict[tuple[str, LayerForm], BlockTrace]()

    def of(self, kind: str, form: LayerForm = LayerForm()) -> "BlockTrace":
        """The trace of a kind of block. Raises ConfigError for one that needs a mesh."""
        if (kind, form) not in self._traces:
            try:
                self._traces[kind, form] = BlockTrace(self, self.blocks[kind], form)
            except NameError as error:  # jax's, for an axis of the mesh
                raise ConfigError(
                    f"a sublayer of the block {kind} cannot be traced without a mesh: {error}: reach other devices by "
                    "ctx.comm (gather, sum, max, index)."
                ) from error
        return self._traces[kind, form]


traces = cached(Traces)  # all candidates of a search have the same


class BlockTrace:
    """The forward pass of a block, traced."""

    def __init__(self, of: Traces, block: Block, form: LayerForm):
        shards, dtype = form.shards, of.dtype
        length = -(-of.length // shards.tensor) * shards.tensor  # whole tokens on each device; figures are per token
        self.block, self.frozen, self.length, self.dtype, self.fp8 = block, of.frozen, length, dtype, form.fp8
        fused = _weights(block, shards)
        # Sorted, as jax flattens dictionaries
        weights = {name: self._shapes(name, weight) for name, weight in sorted(fused.items())}
        comm, local_tokens = ShapeComm(shards, frozen=of.frozen), length // shards.tensor
        kind = LayerKind(block.kind, None)

        def run(weights, x, streams, positions, token_ids, state, fields):
            inputs = BlockInputs(positions, TokenPositions(positions), token_ids, None, streams=streams, fields=fields)
            ctx = LayerContext(comm, inputs, 0, kind, form.recompute, state)
            return block.apply(adapted(weights, fused, of.lora, inputs, 0), x, ctx)[0]

        x = Shape((local_tokens, block.input_width), dtype)
        positions, token_ids = Shape((1, length), jnp.int32), Shape((local_tokens,), jnp.uint32)
        streams, fields = _streams(of.model, shards, dtype)
        arguments = weights, x, streams, positions, token_ids, block.layer_state, fields
        self.jaxpr: ClosedJaxpr = jax.make_jaxpr(run)(*arguments)
        self.arguments, self.streams = jax.tree.leaves(arguments), len(streams)
        self._saved = dict[RematPolicy, tuple[float, float]]()
        self.weights = [(name, fused[name].placement) for name, w in weights.items() for _ in jax.tree.leaves(w)]

    def _shapes(self, name: str, weight: Weight) -> Any:
        """The shapes of a fused weight of one layer on one device."""
        placement = weight.placement
        entries = zip(placement.shape, placement.spec, strict=True)
        whole = (0, placement.storage_dim)  # the layers', and the one that is divided in storage only
        shape = tuple(
            n if dim in whole else n // math.prod(weight.sizes[axis] for axis in mesh_axes(entry))
            for dim, (n, entry) in enumerate(entries)
        )[1:]
        if not (self.fp8 and name in self.block.linear_layers):
            return Shape(shape, placement.dtype_in_use(self.dtype))
        *lead, inside, out = shape
        scale, gradient = Shape((), jnp.float32), Shape(shape, self.dtype)
        tensors: list[Any] = [Shape(shape, E4M3), Shape((*lead, out, inside), E4M3), scale, scale, scale, gradient]
        return Fp8Weight(*tensors, amax=Shape((2,), jnp.float32), gradient_dtype=E5M2)  # type: ignore[arg-type]

    @cached_property
    def parts(self) -> dict[str, SublayerWork]:
        """The work of each sublayer. That of none is of the one whose weights were used last."""
        work = {name: SublayerWork() for name in (*self.block.names, OTHERS)}
        origins: list[Any] = [frozenset([i]) for i in range(len(self.weights))]
        origins += [TOKENS] * (len(self.arguments) - len(self.weights))
        self._add(self.jaxpr.jaxpr, origins, 1, work, self.block.names[0])
        return work

    def _add(self, jaxpr: Jaxpr, origins: list[Any], times: int, work: dict[str, SublayerWork], part: str) -> str:
        """Add the work of a jaxpr that runs `times` times; returns the sublayer whose weights it used last."""
        found: dict[Var, Any] = dict(zip(jaxpr.invars, origins, strict=True))
        for equation in jaxpr.eqns:
            operands = [NOTHING if isinstance(v, Literal) else found.get(v, NOTHING) for v in equation.invars]
            used = frozenset[int]().union(*(each for each in operands if each is not TOKENS))
            origin = TOKENS if TOKENS in operands else used
            found |= dict.fromkeys(equation.outvars, origin)
            if origin is TOKENS and used:
                part, _, _ = self.weights[min(used)][0].partition(".")
                part = part if part in work else OTHERS
            for inside in jaxprs_inside(equation):
                arguments = operands[len(operands) - len(inside.invars) :]
                part = self._add(inside, arguments, times * equation.params.get("length", 1), work, part)
            per_key, fixed = (equation.params.get(name, 0) for name in ("per_key", "fixed"))
            if equation.primitive is kernel and origin is TOKENS and (per_key or fixed):
                work[part].per_key += times * per_key
                work[part].mixing += times * fixed
                work[part].attended += times * self._numbers(equation.outvars[0])
            if equation.primitive is kernel and (state := equation.params.get("state")):
                work[part].state += times * state
                work[part].mixing += times * state * equation.params["products"]
                shapes: list[Any] = [v.aval for v in (*equation.invars[:3], equation.outvars[0])]  # with the outputs
                work[part].mixed += times * sum(shape.size for shape in shapes) / self.length
                work[part].decays += times * self._numbers(equation.invars[3])
            if equation.primitive is jax.lax.dot_general_p and origin is TOKENS:
                self._add_product(equation, [each is TOKENS for each in operands], used, times, work[part])
        return part

    def _add_product(self, equation: JaxprEqn, of_tokens: list[bool], used, times: int, work: SublayerWork) -> None:
        """Add a product of tokens with a weight, or with tokens."""
        (contracted, _), _ = equation.params["dimension_numbers"]
        shapes: list[Any] = [var.aval for var in (*equation.invars, *equation.outvars)]
        depth, out = math.prod(shapes[0].shape[axis] for axis in contracted), shapes[-1]
        multiplications = times * depth * out.size / self.length
        if all(of_tokens) or not used:
            work.mixing += multiplications
            return
        weight, placement = shapes[of_tokens.index(False)], self.weights[min(used)][1]
        of_experts = "experts" in placement.axes
        experts = weight.shape[0] if of_experts else 1  # a row is multiplied by one of them
        multiplications, depth = multiplications / experts, depth // experts
        inputs, outputs = multiplications * depth * experts / weight.size, times * out.size / self.length
        into_stream = placement.axes[-1] == "embed"
        work.matmuls.append(Matmul(multiplications, inputs, outputs, depth, of_experts, into_stream))

    def _numbers(self, var: Any) -> float:
        """Numbers per token in an array, in the compute dtype."""
        return var.aval.size * var.aval.dtype.itemsize / self.dtype.itemsize / self.length

    def saved(self, policy: RematPolicy, copied: bool) -> float:
        """Numbers per token, in the compute dtype, that the block keeps for its backward pass under a remat policy.

        If they are not `copied`, XLA computes some of them again from smaller arrays.
        """
        if policy not in self._saved:
            self._saved[policy] = self._kept(policy)
        return self._saved[policy][copied]

    def _kept(self, policy: RematPolicy) -> tuple[float, float]:
        """`saved` if they are not copied, and if they are."""
        names, count = self.block.saved_names, len(self.weights)
        run = with_policy(jaxpr_as_fun(self.jaxpr), policy, names, attention_is_fused=False)
        trained = {i for i, (name, _) in enumerate(self.weights) if not self.frozen or is_adapter(name)}
        trained |= {*range(count, count + 1 + self.streams)}

        def residuals(*arguments):
            own = {i: arguments[i] for i in trained}
            pull = jax.vjp(lambda own: run(*(own.get(i, a) for i, a in enumerate(arguments)))[0], own)[1]
            return jax.tree.leaves(pull)

        jaxpr = jax.make_jaxpr(residuals)(*self.arguments).jaxpr
        x, *streams = jaxpr.invars[count : count + 1 + self.streams]  # of the streams all layers keep one
        made, of_tokens = dict[Var, JaxprEqn](), {x, *streams}
        for equation in jaxpr.eqns:
            made |= dict.fromkeys(equation.outvars, equation)
            if not of_tokens.isdisjoint(v for v in equation.invars if not isinstance(v, Literal)):
                of_tokens.update(equation.outvars)
        saved = {_source(v, made) for v in jaxpr.outvars if not isinstance(v, Literal)} & of_tokens - {*streams}
        smaller = set[Var]().union(*(_operands(var, made, of_tokens) for var in saved))
        return sum(map(self._numbers, smaller)), sum(map(self._numbers, saved))


def _weights(block: Block, shards: Shards) -> dict[str, Weight]:
    """The fused weights of one layer on the devices that share it."""
    experts = shards.experts // (shards.tensor if shards.experts_over_tensor else 1)
    sizes = {**dict.fromkeys(AXES, 1), "tensor": shards.tensor, "expert": experts}
    stored = {
        name: place((1, *p.shape), ("layers", *p.axes), sizes, experts_over=shards.experts_over)
        for name, p in parameters(block).items()
    }
    dtypes = WeightDtypes(None, None)  # not needed
    return {name: Weight(name, members, sizes, dtypes) for name, members in side_by_side(stored, block.fused).items()}


def _streams(model: ModelConfig, shards: Shards, dtype: Any) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """The shapes of the streams that sublayers read, and of the batch fields."""
    streams = {}
    if model.position == "relative":
        streams[RELATIVE_BIAS] = Shape((model.num_heads // shards.tensor, model.relative_buckets), dtype)
    if (length := model.encoder.sequence_length) is not None:
        return streams | {ENCODER: Shape((length // shards.tensor, model.hidden_size), dtype)}, {}
    encoder = make_encoder(model)
    if encoder is None:
        return streams, {}
    fields = {name: Shape((1, length, *more), kind) for name, (kind, length, *more) in encoder.fields().items()}
    weights = {name: Shape(p.shape, dtype) for name, p in parameters(encoder).items()}
    stream = jax.eval_shape(lambda weights, fields: encoder.apply(weights, fields, Comm()), weights, fields)
    return streams | {encoder.NAME: Shape((len(stream) // shards.tensor, *stream.shape[1:]), dtype)}, fields


def jaxprs_inside(equation: JaxprEqn) -> Iterator[Jaxpr]:
    """The jaxprs that an equation runs forward."""
    for value in equation.params.values():
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(inside := getattr(each, "jaxpr", each), Jaxpr):
                yield inside


def _source(var: Any, made: Mapping[Var, JaxprEqn]) -> Any:
    """The array that has the numbers of `var`."""
    while var in made and made[var].primitive.name in SAME and isinstance(made[var].invars[0], Var):
        var = made[var].invars[0]
    return var


def _is_costly(equation: JaxprEqn) -> bool:
    """Whether XLA does not run it again; jax's own functions, such as `jnp.sort`, are calls of what they compute."""
    name = equation.primitive.name
    inside = jaxprs_inside(equation) if name == "jit" else ()
    return name in COSTLY or any(_is_costly(each) for jaxpr in inside for each in jaxpr.eqns)


def _operands(var: Any, made: Mapping[Var, JaxprEqn], of_tokens: set[Var]) -> set[Any]:
    """The arrays that XLA keeps in place of `var`: smaller ones from which it computes `var` again, elementwise."""
    found = {var}
    while found == {var} or _bytes(found) >= _bytes({var}):
        ahead = [each for each in found if each in made and not _is_costly(made[each])]
        if not ahead:
            return {var}
        largest = max(ahead, key=lambda each: _bytes({each}))
        operands: set[Any] = {v for v in made[largest].invars if isinstance(v, Var) and v in of_tokens}
        if any(v.aval.size > largest.aval.size for v in operands):
            return {var}
        found = found - {largest} | operands
    return set[Any]().union(*(_operands(_source(each, made), made, of_tokens) for each in found))


def _bytes(arrays: set[Any]) -> int:
    return sum(var.aval.size * var.aval.dtype.itemsize for var in arrays)
