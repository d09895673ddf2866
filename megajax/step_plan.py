"""The plan of a train step: all decisions that follow from config, mesh and devices, made once.

The step, the summary, the estimate of memory and the loader read it. It needs no compilation and makes no arrays.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NoReturn, Self

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from megajax.config import Config
from megajax.config.extensions import settings_of
from megajax.config.sentences import fail
from megajax.kernel_choice import Hardware, Kernels
from megajax.layout import stages
from megajax.layout.backward_parts import BackwardParts, backward_parts
from megajax.layout.context_groups import ContextGroups
from megajax.layout.kinds import (
    ATTENTION,
    LayerKind,
    block_layers,
    deepstack_count,
    extra_kind,
    extra_layers,
    layer_windows,
    may_have,
)
from megajax.layout.segments import LayerSegment, Unrolling, choose_unrolling, plan_segments
from megajax.layout.sublayers import takes_order
from megajax.mesh import mesh_sizes
from megajax.model import trained
from megajax.model.parameters import parameters
from megajax.model.transformer import Transformer, declared_model
from megajax.options.context import RING, ContextStrategy
from megajax.options.dispatch import ALL_GATHER, Dispatch
from megajax.options.pipeline_schedules import defers
from megajax.options.registered import OWN_OBJECTIVES
from megajax.options.remat import RematPolicy
from megajax.schema.config import PipelineConfig
from megajax.schema.fields import cached
from megajax.schema.lora import LoraConfig
from megajax.schema.model import ModelConfig
from megajax.schema.objective import ObjectiveConfig
from megajax.schema.optimizer import OptimizerConfig
from megajax.schema.precision import Fp8Config
from megajax.schema.schedule import ScheduleConfig
from megajax.sharding import (
    EMPTY,
    NON_BLOCK_AXES,
    PER_STEP_AXES,
    TEACHER,
    Placement,
    place_all,
    stored_layers,
    stored_rows,
)

_parameters = cached(parameters)  # all candidates of a search have the same model
CHUNK_BYTES = 2**31  # limit of a chunk's FP32 logits


@dataclass(frozen=True)
class Collectives:
    """The choice of a layer's collectives."""

    context: ContextStrategy = RING  # for keys and values
    consecutive: bool = False  # each device of `context` has consecutive tokens
    latents: bool = False  # send latents instead, and compute keys and values from them on every device
    dispatch: Dispatch = ALL_GATHER  # for tokens to experts on other devices
    experts_over: tuple[str, ...] = ("expert",)  # mesh axes that divide the experts
    expert_shards: int = 1  # number of devices along `experts_over`
    copied: bool = False  # copy engines send the pieces over `tensor`
    tied: bool = False  # a linear layer's input gradient waits for its weight gradients
    defers: bool = False  # a pipeline may compute weight gradients later than the others


@dataclass(frozen=True)
class StepPlan:
    """The plan of one train step."""

    config: Config
    sizes: Mapping[str, int]  # of all axes
    hardware: Hardware
    kernels: Kernels
    layer_slots: tuple[LayerKind, ...]  # the kind of each slot, the same on every virtual stage of the pipeline
    unrolling: Unrolling
    segments: tuple[LayerSegment, ...]  # of the layer slots
    edges: tuple[int, ...] = ()  # ends of segments, besides those that follow from the slots
    backward_parts: BackwardParts = BackwardParts()  # of a stage's backward pass

    @classmethod
    def make(
        cls,
        config: Config,
        sizes: Mapping[str, int],
        hardware: Hardware,
        kernels: Kernels | None = None,
        edges: tuple[int, ...] = (),
    ) -> Self:
        """The plan of a config that `check_mesh` accepts on these sizes.

        Raises ConfigError for a kernel that cannot run.
        """
        kernels = kernels or Kernels.choose(config, sizes, hardware)
        slots, images = stages.slot_kinds(config, sizes["pipeline"]), stages.image_slots(config, sizes["pipeline"])
        unrolling = choose_unrolling(config, hardware.platform, slots, sizes)
        parts = backward_parts(config, sizes, hardware.platform)
        every = (*edges, images.start, images.stop, *parts.edges)
        segments = plan_segments(config, hardware.platform, slots, sizes, every)
        return cls(config, dict(sizes), hardware, kernels, slots, unrolling, segments, edges, parts)

    @classmethod
    def of(cls, config: Config, mesh: Mesh) -> "StepPlan":
        """The plan for the devices of a mesh."""
        return cls.make(config, mesh_sizes(mesh), Hardware.of(mesh))

    def on_gpus(self) -> "StepPlan":
        """The same plan on GPUs, where more layers are unrolled."""
        hardware = replace(self.hardware, platform="gpu")
        return StepPlan.make(self.config, self.sizes, hardware, self.kernels, self.edges)

    # What the step computes, as plain data: nodes, weights and optimizers read no other keys of the config.

    @property
    def model(self) -> ModelConfig:
        """The network."""
        return self.config.model

    @property
    def transformer(self) -> Transformer:
        """The declared model, without arrays."""
        return declared_model(self.model, self.lora, objective=self.objective)

    @cached_property
    def declared(self) -> dict[str, nnx.Param]:
        """All parameters by name, those of a teacher with its prefix."""
        teacher = self.config.of_teacher  # not its plan: on GPUs without a capability it cannot choose kernels
        frozen = {} if teacher is None else _parameters(_teacher_model(teacher))
        return _parameters(self.transformer) | {TEACHER + name: parameter for name, parameter in frozen.items()}

    @property
    def trained(self) -> dict[str, nnx.Param]:
        """The parameters that have gradients."""
        return {name: parameter for name, parameter in self.declared.items() if self.is_trained(name)}

    def is_trained(self, name: str) -> bool:
        """Whether a parameter has a gradient."""
        return trained.is_trained(self.config, name)

    @property
    def trains_layers(self) -> bool:
        """Whether the weights of the model's layers have gradients, and not only their adapters."""
        return trained.trains_layers(self.config)

    @property
    def frozen_parts(self) -> tuple[str, ...]:
        """The parts of the model that `optimizer.groups` freeze whole."""
        return trained.frozen_parts(self.config)

    @cached_property
    def placements(self) -> dict[str, Placement]:
        """The placement of every parameter."""
        rows = stored_rows(self.config, self.sizes["pipeline"])
        return place_all(self.declared, self.sizes, rows, self.config.mesh.experts_over)

    @property
    def lora(self) -> LoraConfig:
        """The adapters, which decide what is trained."""
        return self.config.lora

    @property
    def objective(self) -> ObjectiveConfig:
        return self.config.objective

    def objective_settings(self, objective: type[Any]) -> Any:
        """The settings of the class that `objective.kind` names, as its `Settings`."""
        return None if self.objective.kind in OWN_OBJECTIVES else settings_of(self.config, objective, "objective")

    @property
    def optimizer(self) -> OptimizerConfig:
        return self.config.optimizer

    def where(self, key: str) -> str:
        """The location where a key of the config was set, for sentences."""
        return self.config.where(key)

    def optimizer_settings(self, optimizer: type[Any]) -> Any:
        """The settings of the class that `optimizer.kind` names, as its `Settings`."""
        return settings_of(self.config, optimizer, "optimizer")

    @property
    def schedule(self) -> ScheduleConfig:
        """The learning rate over the steps."""
        return self.config.schedule

    @property
    def steps(self) -> int:
        """The number of steps of the run."""
        return self.config.run.steps

    @property
    def pipeline(self) -> PipelineConfig:
        """The schedule of the stages."""
        return self.config.pipeline

    @property
    def remat(self) -> RematPolicy:
        return self.config.remat.chosen

    @property
    def fp8(self) -> Fp8Config:
        return self.config.precision.fp8

    @property
    def compute(self) -> jnp.dtype:
        """The dtype of activations and matmuls."""
        return jnp.dtype(self.config.precision.compute)

    @property
    def gradients(self) -> jnp.dtype:
        """The dtype in which gradients are reduced over devices."""
        return jnp.dtype(self.config.precision.gradients)

    @property
    def deterministic(self) -> bool:
        return self.config.run.deterministic

    @property
    def seed(self) -> int:
        return self.config.run.seed

    @property
    def is_packed(self) -> bool:
        """Whether a sequence has several documents, none of which attends to another."""
        return self.config.data.reset_attention

    @property
    def pads_samples(self) -> bool:
        """Whether sequences of training may end with padding."""
        return self.config.pads_samples("train")

    def refuse(self, problem: str, cure: str, *keys: str) -> NoReturn:
        """Raise ConfigError: `problem (where a key is set): cure.`"""
        fail(self.config, problem, cure, *keys)

    # The batch

    @property
    def num_microbatches(self) -> int:
        return self.batch_shape[0]

    @property
    def batch_shards(self) -> int:
        """The number of devices that the sequences are divided among."""
        return self.config.batch_shards(self.sizes)

    @property
    def batch_shape(self) -> tuple[int, int, int]:
        """`[M, B, S]` of a global batch."""
        batch = self.config.batch
        return batch.num_microbatches, batch.global_size // batch.num_microbatches, batch.sequence_length

    @property
    def sequences(self) -> int:
        """Number of sequences of a microbatch on one device."""
        return self.batch_shape[1] // self.batch_shards

    @property
    def tokens(self) -> int:
        """Number of tokens of a microbatch on one device; devices of `tensor` share them."""
        return self.sequences * self.batch_shape[2] // self.sizes["context"]

    @property
    def head_tokens(self) -> int:
        """Number of these tokens in a device's head: stages share the head of a microbatch."""
        return -(-self.tokens // self.sizes["pipeline"])

    @property
    def shared_tokens(self) -> int:
        """Length of the pieces of a device's residual stream that the stages divide: all, or parts of one sequence.

        Of the layers after the model's each stage has a part of every sequence.
        """
        tokens = self.tokens // self.sizes["tensor"]
        if extra_layers(self.model):
            return math.gcd(tokens, self.batch_shape[2] // self.sizes["context"])
        return tokens

    @property
    def loss_chunks(self) -> int:
        """The number of chunks in which head and loss of a microbatch run."""
        return self.chunks_of(self.head_tokens)

    def chunks_of(self, tokens: int) -> int:
        """The number of chunks of a device's T `tokens`, each of `kernels.loss_chunk_tokens` tokens or slightly fewer.

        By default a chunk has at most 4096 tokens and 2 GiB of logits. There are at least four chunks if each then has
        at least 2048 tokens: each chunk reads and writes the head's FP32 gradient, which with 2048 tokens takes a third
        of the time of its matmul.
        """
        fits = CHUNK_BYTES * self.sizes["tensor"] // (4 * self.model.padded_vocab_size)
        limit = self.config.kernels.loss_chunk_tokens or max(min(4096, fits, max(tokens // 4, 2048)), 1)
        return -(-tokens // limit)

    @property
    def balances_context(self) -> bool:
        """Whether the tokens of a sequence are distributed over `context` by the work of its documents.

        Not where the devices share the heads instead. Not if all layers have windows: then all tokens have
        about the same work, and the ring skips devices. Groups of devices (`context_groups`) need it in both cases.
        Not if a sublayer takes consecutive tokens (`Comm.in_order`), or if scores have a bias, which is made for one
        order.
        """
        if any(map(takes_order, block_layers(self.config.model))) or self.config.model.position == "relative":
            return False
        if self.context_groups is not None:
            return True
        whole = any(window is None for window in layer_windows(self.config.model))
        shared = self.config.context_strategy(self.sizes).key_shards(self.sizes["context"]) > 1
        return self.config.data.reset_attention and shared and whole

    @property
    def has_consecutive_tokens(self) -> bool:
        """Whether each device of `context` has consecutive tokens of a sequence.

        That is what some sublayers take (`Comm.in_order`). Causal attention would have more work on later devices, so
        only where they share the heads, or no layer can have attention, or in groups, most of which are small.
        """
        model, strategy = self.config.model, self.config.context_strategy(self.sizes)
        shared = strategy.key_shards(self.sizes["context"]) == 1 or self.context_groups is not None
        return any(map(takes_order, block_layers(model))) and (shared or not may_have(model, ATTENTION))

    @cached_property
    def context_groups(self) -> ContextGroups | None:
        """The division of documents among groups of devices of `context`; None: all share every sequence."""
        size, strategy = self.sizes["context"], self.config.context_strategy(self.sizes)
        return ContextGroups.of_model(self.config.model, size) if size > 1 and strategy.in_groups else None

    # The layers

    @cached_property
    def layer_table(self) -> np.ndarray:
        """The layer in each slot, `[P, R, slots]` (`sharding.stored_layers`)."""
        return stored_layers(self.config, self.sizes["pipeline"])

    @cached_property
    def first_layers(self) -> np.ndarray:
        """The layer index of each virtual stage's first slot, `[P, R]`; for an empty slot the index that it would have.

        If a stage's layers are not consecutive in its slots, the layers of all slots, `[P, R, slots]`. This happens if
        layers of two kinds leave empty slots between them. And if an empty slot had the index of a layer that adds
        image features.
        """
        table, slots = self.layer_table, np.arange(len(self.layer_slots))
        first = np.where(table == EMPTY, EMPTY - table.size, table - slots)
        index = first.max(axis=2, keepdims=True) + slots
        adds_images = (index >= 0) & (index < deepstack_count(self.model))
        follow = (index == table) | (table == EMPTY) & ~adds_images
        return first.max(axis=2) if follow.all() else table

    @cached_property
    def image_slots(self) -> range:
        """The slots whose layers may add image features (DeepStack), on one of the virtual stages."""
        return stages.image_slots(self.config, self.sizes["pipeline"])

    @property
    def segments_of_parts(self) -> list[list[int]]:
        """The indices of the segments of each part of a stage's backward pass, from the last part on."""
        return [[s for s, own in enumerate(self.segments) if own.start in part] for part in self.backward_parts.slots]

    @property
    def is_pipelined(self) -> bool:
        return self.sizes["pipeline"] > 1

    @property
    def sums_gradients(self) -> bool:
        """Whether gradients are added to sums over microbatches, as a pipeline always does."""
        return self.passes > 1 or self.is_pipelined

    @property
    def microbatches_at_once(self) -> int:
        """How many microbatches pass the layers side by side."""
        return self.config.communication.microbatches_at_once

    @property
    def passes(self) -> int:
        """How often a step passes the layers, forward and backward."""
        return self.num_microbatches // self.microbatches_at_once

    @property
    def with_large_microbatches(self) -> Self:
        """The plan whose microbatches are those that this one computes at once.

        It needs as much memory for layers, and at least as much for what runs for one microbatch after the other.
        """
        config = self.config
        batch = config.batch.model_copy(update={"num_microbatches": self.passes, "schedule": None})
        changed = {"batch": batch, "communication": config.communication.one_by_one}
        return replace(self, config=config.model_copy(update=changed))

    @property
    def accumulation(self) -> jnp.dtype:
        """The dtype of sums of gradients over microbatches; FP32 if nothing is summed."""
        return jnp.dtype(self.config.precision.accumulation if self.sums_gradients else "float32")

    @property
    def is_unrolled(self) -> bool:
        """Whether no layers run in loops. On CPUs True only if `kernels.scan_unroll` is set."""
        chosen = self.hardware.platform != "cpu" or self.config.kernels.scan_unroll is not None
        return chosen and all(segment.iterations == 1 for segment in self.segments)

    @cached_property
    def gathered_slots(self) -> tuple[int, ...]:
        """The slots whose layers `fsdp` gathers and reduces once a step."""
        passes = (range(len(self.layer_slots)), *self.backward_parts.slots)
        return stages.gathered_slots(passes) if self.is_pipelined and self.is_unrolled else ()

    @property
    def ties_gradients(self) -> bool:
        """Whether a linear layer's input gradient waits for its weight gradients.

        Only in loops, where the layer itself hides their reduction, and not in a pipeline, which may defer them. Not
        with frozen weights, which have none.
        """
        in_loops = any(segment.iterations > 1 for segment in self.segments)
        return self.sizes["fsdp"] > 1 and not self.is_pipelined and in_loops and self.trains_layers

    def ends_reductions_per_layer(self, complete: bool) -> bool:
        """Whether a layer's weight gradients, and reductions of those above it, end before the next backward pass.

        They do where reductions over `fsdp`, or `complete` ones, are hidden behind that pass. Where nothing ties them,
        XLA may compute the weight gradients of all layers last and keep their operands until then. With `tensor` and
        `expert`, and with moments on the host or in int8, this costs memory and gains no speed; with sums over
        microbatches it is 1 % faster (docs/records/log.md, 2026-11-25).
        """
        optimizer = self.config.optimizer
        small = (optimizer.offload > 0 or optimizer.form.is_small) and not self.is_pipelined
        per_step = complete and any(self.sizes[axis] > 1 for axis in PER_STEP_AXES)
        return small or per_step or any(self.sizes[axis] > 1 for axis in ("fsdp", "expert", "tensor"))

    @cached_property
    def teacher(self) -> "TeacherPlan | BasePlan | None":
        """The plan of the frozen teacher's forward pass, whose layers all stages of a pipeline compute.

        The base of adapters is computed through the stages, which hold it.
        """
        if self.config.teacher.base:
            return BasePlan(*(getattr(self, field.name) for field in fields(self)))
        config = self.config.of_teacher
        return None if config is None else TeacherPlan.make(config, {**self.sizes, "pipeline": 1}, self.hardware)

    @cached_property
    def second_stack(self) -> "SecondPlan | None":
        """The plan of an encoder's or a vision tower's layers, all of which each stage of a pipeline has."""
        if (config := trained.second_stack(self.config)) is None:
            return None
        read = () if self.model.vision is None else self.model.vision.deepstack_layers
        edges = tuple(layer + 1 for layer in read)
        return SecondPlan.make(config, {**self.sizes, "pipeline": 1}, self.hardware, edges=edges)

    # Collectives

    @cached_property
    def collectives(self) -> Collectives:
        dispatch = self.config.dispatch(self.sizes)
        return Collectives(
            context=self.config.context_strategy(self.sizes),
            consecutive=self.has_consecutive_tokens,
            latents=self.sends_latents,
            dispatch=dispatch.with_little_room() if self.kernels.experts.multiply_unused_rows else dispatch,
            experts_over=self.config.mesh.experts_over,
            expert_shards=self.config.expert_shards(self.sizes),
            copied=self.hardware.copied_permutations,
            tied=self.ties_gradients,
            defers=self.is_pipelined and defers(self.pipeline.schedule),
        )

    @property
    def sends_latents(self) -> bool:
        """Whether `context` sends the latents of latent attention instead of keys and values.

        Not if each device needs some of the heads only, and not with up-projections in FP8 or with adapters.
        """
        sends = self.config.context_strategy(self.sizes).sends_latents
        return self.sizes["context"] > 1 and sends and self.config.has_sendable_latents

    @cached_property
    def embedding_axes(self) -> tuple[str, ...]:
        """The axes over which the embedding is looked up in its shards, in their order; empty: the table is gathered.

        A lookup in shards sends the tokens' rows twice in the compute dtype; otherwise the table is sent once, and its
        gradient once. Axes besides `fsdp` may connect hosts; only 1 / fsdp of the table crosses them, so rows must be
        fewer bytes than that. A tied table is gathered anyway. In a pipeline the table is gathered too, because all
        stages hold the same tokens.
        """
        if self.model.tie_embeddings or self.is_pipelined:
            return ()
        axes = tuple(axis for axis in NON_BLOCK_AXES if self.sizes[axis] > 1)
        tokens = math.prod(self.batch_shape) // math.prod(self.sizes[axis] for axis in axes)
        number, summed = self.compute.itemsize, self.gradients.itemsize
        share = 1 if axes == ("fsdp",) else self.sizes["fsdp"]
        return axes if 2 * number * tokens < (number + summed) * self.model.padded_vocab_size // share else ()


class TeacherPlan(StepPlan):
    """The plan of a frozen teacher."""

    prefix = TEACHER  # of the names of its parameters

    @property
    def transformer(self) -> Transformer:
        return _teacher_model(self.config)

    @cached_property
    def embedding_axes(self) -> tuple[str, ...]:
        return ()  # it has no gradient whose table would be large


class BasePlan(StepPlan):
    """The plan of the frozen base of adapters as a teacher: the step's own, without the adapters."""

    prefix = ""

    @property
    def lora(self) -> LoraConfig:
        return LoraConfig()


class SecondPlan(StepPlan):
    """The plan of an encoder's or a vision tower's layers: tokens are consecutive over `context`."""

    @property
    def has_consecutive_tokens(self) -> bool:
        return True

    @property
    def balances_context(self) -> bool:
        return False


def _teacher_model(config: Config) -> Transformer:
    return declared_model(config.model, config.lora, rows="modules")  # each stage of a pipeline has all layers


class ExtraPlan(StepPlan):
    """The plan of the layers after the model's: without stages."""

    @classmethod
    def after(cls, plan: StepPlan) -> "ExtraPlan":
        """Each layer is a segment with the remat policy and the precision of the model's last one."""
        count, last = len(extra_layers(plan.model)), plan.segments[-1]
        slots, sizes = (extra_kind(plan.model),) * count, {**plan.sizes, "pipeline": 1}
        segments = tuple(LayerSegment(k, 1, 1, 1, last.policy, last.fp8) for k in range(count))
        return cls(plan.config, sizes, plan.hardware, plan.kernels, slots, plan.unrolling, segments)

    @cached_property
    def layer_table(self) -> np.ndarray:
        return np.array(extra_layers(self.model))[None, None]
