"""The graph of a step: its nodes, their weights, and the inputs that a microbatch gives them, on one device.

Everything here runs inside the step's shard_map.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from megajax.model.encoder import Encoder
from megajax.model.encoder_layers import EncoderLayers
from megajax.model.sublayer import BlockInputs, RealTokens
from megajax.model.transformer import two_sided_tokens
from megajax.ops.block_recipes import block_recipe
from megajax.parallel.collectives import sum_over_all
from megajax.parallel.context.token_order import (
    ROW_INDEX,
    TWO_SIDED_ENDS,
    add_token_positions,
    token_positions_of,
    two_sided_ends,
)
from megajax.parallel.mesh_comm import MeshComm
from megajax.schema.fields import BATCH_AXES
from megajax.step.embedding import Embedding
from megajax.step.encoder_node import EncoderNode
from megajax.step.encoder_stack import EncoderStack, RelativeBias
from megajax.step.mtp import MultiTokenPrediction
from megajax.step.nodes import (
    Arrays,
    Field,
    InnerNode,
    Microbatch,
    Results,
    StepArrays,
    Streams,
    Table,
    TerminalNode,
    joined_fields,
)
from megajax.step.objective import make_objective
from megajax.step.pipeline.shared_tokens import SharedTokensComm
from megajax.step.second_stack import SecondStack
from megajax.step.stack.layers import LayerStack
from megajax.step.stack.stack_weights import ByGroup, GroupWeights
from megajax.step.teacher import Base, Teacher
from megajax.step.vision_stack import VisionStack
from megajax.step_plan import BasePlan, StepPlan
from megajax.weights.table import WeightTable, block_weights, table_weights
from megajax.weights.weight import WeightDtypes

# Folded into the step's key for jitter, adapters and FP4's rounding; dropout of layers uses smaller numbers.
JITTER, ADAPTERS, ROUNDING = 2**31, 2**31 + 1, 2**32 - 1
WITH_BLOCKS = (MultiTokenPrediction,)  # terminal nodes for which a model may have blocks of the kind NAME
FACTOR = "factor of "  # and a terminal node's name: a field `[M, ...]`
# Fields of a batch with padding, for `RealTokens`: `[M, B]`, `[M]`, `[M]`.
REAL_COUNTS = ("real_lengths", "real_tokens", "real_sequences")


@dataclass(frozen=True)
class Graph:
    """The nodes of a step: inner ones in the order of their forward passes, then terminal ones."""

    plan: StepPlan
    comm: MeshComm
    table: WeightTable
    inner: tuple[InnerNode, ...]
    terminal: tuple[TerminalNode, ...]
    layers: LayerStack  # the one inner node that a pipeline divides into stages
    stacks: tuple[LayerStack, ...]  # of all nodes, trained
    frozen: tuple[LayerStack, ...]  # of a teacher, or of a frozen vision tower
    before: tuple[LayerStack, ...]  # those of `stacks` that run before the layers: an encoder's, a vision tower's

    @classmethod
    def build(cls, plan: StepPlan) -> "Graph":
        sizes, model, blocks = plan.sizes, plan.transformer, dict(plan.transformer.blocks)
        comm = MeshComm(sizes, plan.kernels, plan.collectives, plan.deterministic, not plan.trains_layers)
        dtypes = WeightDtypes(plan.compute, plan.gradients, plan.accumulation)
        weights = block_weights(plan, blocks, dtypes)
        embedding, extra = Embedding(plan, comm), [node for node in WITH_BLOCKS if node.NAME in blocks]
        own = [(blocks.pop(node.NAME), weights.pop(node.NAME)) for node in extra]
        layers = LayerStack("layers", plan, comm, blocks, weights, not plan.sums_gradients)
        shared = SharedTokensComm(comm, plan) if extra and plan.is_pipelined else comm
        modules = [node(plan, shared, *of_node) for node, of_node in zip(extra, own, strict=True)]
        terminal: list[TerminalNode] = [make_objective(plan, comm), *modules]
        table = WeightTable(table_weights(plan, dtypes), embedding.as_stored)
        first: list[InnerNode] = [RelativeBias()] if model.relative_bias is not None else []
        second = _second_stacks(plan, dtypes)
        if isinstance(model.encoder, Encoder):
            first.append(EncoderNode(plan, model.encoder, comm, [*plan.trained]))
        teachers = _teachers(plan, layers)
        nodes = (*first, *second, *teachers, embedding, layers), (*terminal,)
        before = tuple(each.stack for each in second if each.is_trained)
        others = *before, *(each.stack for each in teachers if isinstance(each, Base))  # gathered already
        frozen = tuple(each.stack for each in (*teachers, *second) if each.stack not in others)
        stacks = layers, *before, *(node.stack for node in modules)
        return cls(plan, comm, table, *nodes, layers, stacks, frozen, before)

    @property
    def sizes(self) -> Mapping[str, int]:
        return self.plan.sizes

    @property
    def trained(self) -> list[str]:
        """The names of the stored parameters that have gradients."""
        return [*self.plan.trained]

    @property
    def fields(self) -> dict[str, Field]:
        """The fields of a batch: those that the nodes read."""
        return joined_fields(*(node.fields() for node in (*self.inner, *self.terminal)))

    def derived_fields(self, fields: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The fields `[rows, S, ...]` that terminal nodes make from those of whole rows."""
        return {name: field for node in self.terminal for name, field in node.derived_fields(fields).items()}

    # The inputs of nodes

    def microbatch(self, fields: Arrays, index: jax.Array | int, arrays: StepArrays | None = None) -> Microbatch:
        """Microbatch `index` with the fields `[B, S]`; `arrays` in training only."""
        key, layer_loss_scale = (arrays.key, arrays.layer_loss_scale) if arrays else (None, None)
        B, S = fields["tokens"].shape
        shards = self.plan.batch_shards
        sequences = (index * B * shards + self.comm.sequence_ids(B)).astype(jnp.uint32)
        positions = token_positions_of(fields, self.sizes["context"], self.plan.has_consecutive_tokens)
        index = fields.get(ROW_INDEX, positions.index).astype(jnp.uint32)
        token_ids = (sequences[:, None] * (S * self.sizes["context"]) + index).reshape(-1)
        model, real = self.plan.model, None
        if positions.is_real is not None:
            real_here = self.comm.local_tokens(positions.is_real.reshape(-1))
            real = RealTokens(real_here, *(fields[name] for name in REAL_COUNTS))
        inputs = BlockInputs(
            fields["positions"],
            positions,
            self.comm.local_tokens(token_ids),
            dropout_key=key if model.dropout > 0 else None,
            jitter_key=None if key is None or not model.router.jitter else jax.random.fold_in(key, JITTER),
            adapter_key=None if key is None or not self.plan.lora.dropout else jax.random.fold_in(key, ADAPTERS),
            rounding_key=jax.random.fold_in(key, ROUNDING) if key is not None and self.rounds_at_random else None,
            layer_loss_scale=layer_loss_scale,
            real=real,
            rope_positions=fields.get("rope_positions"),
        )
        factors = {n: fields[FACTOR + n] for n in (node.NAME for node in self.terminal) if FACTOR + n in fields}
        return Microbatch(fields, inputs, sequences, factors)

    def add_derived_fields(self, batch: Arrays) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """`token_order.add_token_positions` for this device's fields `[M, B, S]`; if some are padding, REAL_COUNTS."""
        plan, context = self.plan, self.sizes["context"]
        fields, metrics = add_token_positions(batch, context, plan.has_consecutive_tokens, plan.model.causal)
        for node in (node for node in self.inner if isinstance(node, SecondStack)):
            fields |= node.add_derived_fields(batch)
        if (flags := two_sided_tokens(plan.model, batch)) is not None:
            order = batch.get("order")
            fields[TWO_SIDED_ENDS] = two_sided_ends(flags, order, context, plan.has_consecutive_tokens)
        if "is_real" in batch:
            lengths = self.comm.sum(batch["is_real"].sum(-1, dtype=jnp.int32), "context")
            sequences = jnp.stack([lengths, jnp.minimum(lengths, 1)]).sum(-1)
            counts = lengths, *self.comm.sum(sequences, BATCH_AXES)
            fields |= {name: jnp.maximum(a, 1) for name, a in zip(REAL_COUNTS, counts, strict=True)}
        return fields, metrics

    def layer_loss_scale(self, loss_scale: jax.Array) -> jax.Array | None:
        """The factor of the layers' losses of one microbatch before differentiation; of a step their mean is taken.

        None if no layer has metrics.
        """
        has_metrics = any(block.has_metrics for block in self.layers.blocks.values())
        return loss_scale / self.plan.num_microbatches if has_metrics else None

    def random_key(self, step: jax.Array) -> jax.Array | None:
        """The key of a step's dropout, jitter and random rounding, if there are any."""
        model, lora = self.plan.model, self.plan.lora
        if not any((model.dropout, model.router.jitter, lora.rank and lora.dropout, self.rounds_at_random)):
            return None
        return jax.random.fold_in(jax.random.key(self.plan.seed + 1), step)

    @property
    def rounds_at_random(self) -> bool:
        """Whether the gradients of linear layers are rounded at random."""
        recipe = block_recipe(self.plan.fp8.chosen)
        return recipe is not None and recipe.is_stochastic

    def counts(self, batch: Arrays) -> dict[str, jax.Array]:
        """By loss what it counts, over all devices and microbatches."""
        copies = self.sizes["tensor"] * self.sizes["pipeline"]  # devices that hold the same tokens
        counts = {name: count / copies for node in self.terminal for name, count in node.counts(batch).items()}
        return sum_over_all(counts, self.sizes)

    def divisors(self, batch: Arrays) -> dict[str, jax.Array]:
        """By loss the number that its sum is divided by: what it counts, or 1 if nothing counts."""
        return {name: _divisor(count) for name, count in self.counts(batch).items()}

    def add_factors(self, batch: Arrays, counts: Arrays) -> Arrays:
        """The batch with the fields FACTOR, `[M, ...]`, if the step minimises the mean of the microbatches' means.

        They turn a sum over the step's count into one over the count of this device's rows of the microbatch.
        """
        if self.plan.objective.average == "tokens":
            return batch
        means = self.plan.num_microbatches * self.plan.batch_shards
        factors = {}
        for node in self.terminal:
            fields = {name: batch[name][:, None] for name in node.fields()}
            for name, count in jax.vmap(node.counts)(fields).items():
                factors[FACTOR + node.NAME] = counts[name] / (_divisor(self.comm.sum(count, "context")) * means)
        return {**batch, **factors}

    # What nodes give

    def turn(
        self, arrays: StepArrays, streams: Streams, batch: Microbatch, table: Table
    ) -> tuple[Streams, Table, Results]:
        """The terminal nodes of a microbatch: (gradients of the streams, `table` plus their weights', results)."""
        gradients, results = Streams(), Results()
        if batch.factors:
            factors = {name: factor * batch.factors[name] for name, factor in arrays.loss_factors.items()}
            arrays = arrays._replace(loss_factors=factors)
        for node in self.terminal:
            gradients, table, of_node = node.turn(arrays, streams, gradients, batch, table)
            results = results.joined(of_node)
        return gradients, table, results

    def evaluate(self, arrays: StepArrays, streams: Streams, batch: Microbatch) -> dict[str, jax.Array]:
        """This device's shares of a microbatch's losses that evaluation reports, by name."""
        return {name: loss for node in self.terminal for name, loss in node.evaluate(arrays, streams, batch).items()}

    def zero_losses(self) -> dict[str, jax.Array]:
        """Zeros for the losses of `evaluate`."""
        return {name: jnp.zeros((), jnp.float32) for node in self.terminal for name in node.EVALUATED}

    def zero_sums(self, arrays: StepArrays, stacks: Sequence[LayerStack]) -> dict[str, ByGroup[GroupWeights]]:
        """Zeros for `StepArrays.sums` of these stacks."""
        return {stack.NAME: stack.zero_sums(arrays.stacks[stack.NAME]) for stack in stacks}

    def zero_results(self, shapes: Results) -> Results:
        """Zeros to which results of these shapes are added, gradients in the dtype of their sums."""
        stacks = {stack.NAME: stack for stack in self.stacks}
        gradients = {name: stacks[name].weights.zero_gradients(own) for name, own in shapes.gradients.items()}
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes._replace(gradients={}))
        return zeros._replace(gradients=gradients)

    def metrics(self, losses: Arrays) -> dict[str, jax.Array]:
        """The losses of a step, divided by their counts → the metrics that are logged."""
        return {name: value for node in self.terminal for name, value in node.metrics(losses).items()}


def _second_stacks(plan: StepPlan, dtypes: WeightDtypes) -> list[SecondStack]:
    """The node of an encoder's layers or of a vision tower, if the model has one."""
    model, own = plan.transformer, plan.second_stack
    if own is None:
        return []
    if isinstance(model.encoder, EncoderLayers):
        return [EncoderStack(plan, own, model.encoder, dtypes)]
    assert model.vision is not None
    return [VisionStack(plan, own, model.vision, dtypes)]


def _teachers(plan: StepPlan, layers: LayerStack) -> list[Teacher]:
    """The node of a frozen teacher, if the objective reads one."""
    own = plan.teacher
    if own is None:
        return []
    return [Base(own, layers) if isinstance(own, BasePlan) else Teacher(plan, own)]


def _divisor(count: jax.Array) -> jax.Array:
    """A sum of weights of tokens, which may be below 1; 1 in place of 0, since what is divided is 0 too."""
    return jnp.where(count > 0, count, 1)
