"""Every key of the config: one class per section, one line of documentation per key.

A `Config` is frozen, hashable and complete: keys that are not set get their values when it is made.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Literal, Self

import yaml
from pydantic import Field, PrivateAttr, model_validator

from megajax.options.context import STRATEGIES, ContextStrategy, choose_context
from megajax.options.dispatch import DISPATCHES, Dispatch, choose_dispatch
from megajax.options.pipeline_schedules import Kind
from megajax.options.registry import AUTO
from megajax.options.remat import NONE, POLICIES, RematPolicy
from megajax.options.schedules import TAIL
from megajax.schema.amounts import sizes_in
from megajax.schema.checkpoint import CheckpointConfig
from megajax.schema.data import DataConfig
from megajax.schema.fields import (
    BATCH_AXES,
    AxisSize,
    BatchSchedule,
    Count,
    CountOrZero,
    ExpertAxes,
    Port,
    Section,
    Sequences,
    Text,
    Tokens,
)
from megajax.schema.lora import LoraConfig
from megajax.schema.model import EXPERTS, ModelConfig
from megajax.schema.objective import ObjectiveConfig, TeacherConfig
from megajax.schema.optimizer import OptimizerConfig
from megajax.schema.precision import Fp8Config, PrecisionConfig
from megajax.schema.rules import AtMost, Excludes, MultipleOf, Needs, ReadIf, more_than_one
from megajax.schema.run import RunConfig
from megajax.schema.schedule import ScheduleConfig
from megajax.schema.spans import SpanLengths, span_lengths
from megajax.schema.tree import Dumper

AUTO_ATTENTION = "use kernels.attention=auto"


class MeshConfig(Section):
    """Devices along each axis; their product is the number of devices; one axis may be -1 (all remaining devices)."""

    pipeline: AxisSize = Field(default=1, description="Divides the layers into stages; see the section pipeline.")
    data: AxisSize = Field(
        default=1, description="Divides the batch; weights are gathered and gradients reduced once per step."
    )
    fsdp: AxisSize = Field(default=1, description="Divides the batch; weights are gathered layer by layer.")
    expert: AxisSize = Field(default=1, description="Divides the experts; everywhere else the batch.")
    context: AxisSize = Field(default=1, description="Divides the sequence.")
    tensor: AxisSize = Field(default=1, description="Divides heads, MLP width and vocabulary.")
    experts_over: Annotated[ExpertAxes, EXPERTS] = Field(
        default=("expert",),
        description="Axes that divide the experts; if tensor is not among them, it divides each expert's width.",
    )


class PipelineConfig(Section):
    """The schedule of the stages of `mesh.pipeline`, and the layers of each."""

    schedule: Kind = Field(
        default="1f1b",
        description="gpipe: all forward passes, then all backward passes; 1f1b: one forward, one backward;"
        " zero_bubble: as 1f1b, with weight gradients deferred to idle times.",
    )
    virtual_stages: Count = Field(
        default=1, description="Virtual stages on each stage's device; more than 1: the interleaved schedule."
    )
    layout: Annotated[tuple[CountOrZero, ...], Field(strict=False, min_length=1)] | None = Field(
        default=None,
        description="Number of layers of each virtual stage, in the model's order: the first one of all stages,"
        " then their second one, ...; null: as even as possible, with the fewest layers on the first and the last.",
    )


class BatchConfig(Section):
    """The size of one step."""

    global_size: Sequences = Field(description="Sequences per step, over all devices and microbatches.")
    num_microbatches: Sequences = Field(
        default=1,
        description="Number of parts of the global batch, computed one after the other (with"
        " communication.overlap_experts in pairs).",
    )
    sequence_length: Annotated[Tokens, AtMost("model.max_positions")] = Field(description="Tokens per sequence.")
    schedule: BatchSchedule | None = Field(
        default=None,
        description="Ramp-up of the batch: '0: 256, 50B: 512' is 256 sequences per step, and 512 from 50 billion tokens"
        " on, in microbatches of the same size; the last number is global_size. null: always global_size.",
    )

    @property
    def sizes_by_tokens(self) -> list[tuple[int, int]]:
        """(tokens, sequences): each size of a step with the number of tokens from which it applies; first from 0."""
        return [(0, self.global_size)] if self.schedule is None else sizes_in(self.schedule)


class RematConfig(Section):
    """Recomputation of activations in the backward pass, to save memory."""

    policy: Annotated[str, POLICIES] = Field(
        default=NONE.name,
        description="none: recompute nothing; full: whole blocks; selective: attention; save_matmuls: everything except"
        " matmuls; offload: as save_matmuls, with the saved values in host memory; or a policy registered by"
        " run.extensions.",
    )
    layers: Annotated[Count | None, ReadIf("policy", lambda policy: not POLICIES[policy].recomputes_nothing)] = Field(
        default=None,
        description="Recompute only the first n layers (with mesh.pipeline: of each virtual stage); null: all.",
    )
    group: Annotated[
        Count,
        Needs(
            "policy",
            lambda policy: POLICIES[policy].keeps_input,
            what="remat.policy=full",
            cure="set remat.group=1, or remat.policy=full",
        ),
    ] = Field(default=1, description="full: keep the input of every n-th block only.")

    @property
    def chosen(self) -> RematPolicy:
        """The declarations of the policy."""
        return POLICIES[self.policy]


class CommunicationConfig(Section):
    """Which collectives carry tokens between devices."""

    context: Annotated[str, STRATEGIES, ReadIf("mesh.context", more_than_one)] = Field(
        default=AUTO,
        description="Attention over mesh.context; auto: all_to_all if mesh.context divides the query"
        " and KV heads of a device, except where latents can be sent (latent attention); else ring. dynamic: the"
        " documents of a microbatch decide how many devices share each.",
    )
    experts: Annotated[str, DISPATCHES] = Field(
        default=AUTO,
        description="Tokens to experts on other devices; auto: all_gather up to 8 devices or up to"
        " experts_per_token, else all_to_all.",
    )
    overlap_experts: bool = Field(
        default=False,
        description="Two microbatches pass the layers side by side, so that one computes while tokens of the other go"
        " to their experts and back. Activations need the memory of both.",
    )

    @property
    def microbatches_at_once(self) -> int:
        """How many microbatches pass the layers side by side."""
        return 2 if self.overlap_experts else 1

    @property
    def one_by_one(self) -> Self:
        """For layers that no two microbatches pass side by side."""
        return self.model_copy(update={"overlap_experts": False})


class KernelsConfig(Section):
    """Which kernels compute the step."""

    attention: Annotated[
        Literal["auto", "cudnn", "pallas", "triton", "reference"],
        Excludes("model.attention_softcap", of="cudnn", cure=AUTO_ATTENTION),
        Excludes("precision.compute", "float32", of=("cudnn", "pallas", "triton"), cure=AUTO_ATTENTION),
    ] = Field(
        default="auto",
        description="Attention kernel; pallas: megajax's for Hopper; triton: megajax's for any GPU since Ampere.",
    )
    grouped_matmul: Annotated[Literal["auto", "pallas", "triton", "xla", "reference"], ReadIf("model.num_experts")] = (
        Field(
            default="auto",
            description="Kernel of the experts' matmuls; pallas: for Hopper; triton: for any GPU since Ampere; xla:"
            " XLA's matmuls, batched over the experts.",
        )
    )
    linear_attention: Literal["auto", "jla", "reference"] = Field(
        default="auto",
        description="Kernels of gated DeltaNet, KDA and Mamba-2; jla: those of jax-linear-attention (pip install"
        " 'megajax[linear-attention]') on Hopper; reference: matmuls within chunks.",
    )
    scan_unroll: Count | None = Field(
        default=None,
        description="Number of layers in one iteration of the loop over layers. Default: all layers if XLA compiles"
        " them in about 90 s, else 1; on CPUs 1.",
        json_schema_extra={"derived": "by compile time"},
    )
    loss_chunk_tokens: Count | None = Field(
        default=None,
        description="Number of tokens in a chunk of the head and the loss.",
        json_schema_extra={"derived": "by tokens and vocabulary"},
    )


class LoggingConfig(Section):
    """Logs in addition to metrics.jsonl and the console."""

    tensorboard: bool = Field(default=True, description="Write TensorBoard files.")
    wandb: bool = Field(default=False, description="Log to Weights & Biases.")
    wandb_project: Annotated[Text | None, ReadIf("wandb")] = Field(
        default=None, description="Name of the Weights & Biases project."
    )
    mlflow: Text | None = Field(
        default=None, description="Log to MLflow: the URL of its server, or file:DIRECTORY; null: do not."
    )
    mlflow_experiment: Annotated[Text | None, ReadIf("mlflow")] = Field(
        default=None, description="Name of the MLflow experiment; null: Default."
    )
    prometheus_port: Port | None = Field(
        default=None, description="Serve the newest numbers to Prometheus on this port, at /metrics; null: do not."
    )
    prometheus_host: Annotated[Text, ReadIf("prometheus_port")] = Field(
        default="127.0.0.1", description="Address of that port; 0.0.0.0: all addresses of the host, without a password."
    )
    on_event: Text | None = Field(
        default=None,
        description="Command that gets a JSON object as its input, or http(s) URL to which it is posted, on a loss"
        " spike, a rollback and the end of the process, whatever its cause; $NAME: a variable of the environment.",
    )
    profile_start: Count | None = Field(default=None, description="First step of a jax.profiler trace; null: none.")
    profile_steps: Annotated[Count, ReadIf("profile_start")] = Field(
        default=3, description="Number of steps in the trace."
    )
    norms_interval: Annotated[
        CountOrZero,
        MultipleOf("run.log_interval", cure="choose one, since norms are part of a logged line, or 0 for no norms"),
    ] = Field(
        default=0,
        description="Steps between logged norms of gradients and weights, and update / weight ratios, by parameter and"
        " layer; a multiple of run.log_interval; 0: none.",
    )


class Config(Section):
    """A whole run."""

    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig
    mesh: MeshConfig = Field(default_factory=MeshConfig)
    pipeline: Annotated[PipelineConfig, ReadIf("mesh.pipeline", more_than_one)] = Field(default_factory=PipelineConfig)
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig)
    batch: BatchConfig
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    lora: LoraConfig = Field(default_factory=LoraConfig)
    teacher: TeacherConfig = Field(default_factory=TeacherConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    remat: RematConfig = Field(default_factory=RematConfig)
    communication: CommunicationConfig = Field(default_factory=CommunicationConfig)
    kernels: KernelsConfig = Field(default_factory=KernelsConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)

    _locations: dict[str, str] = PrivateAttr(default_factory=dict)
    _replaced: dict[str, bool] = PrivateAttr(default_factory=dict)  # values that were given, but follow from others

    @model_validator(mode="after")
    def _fill_across_sections(self) -> "Config":
        model, schedule = self.model, self.schedule
        if model.position == "learned" and model.max_positions is None:
            model = model.model_copy(update={"max_positions": self.batch.sequence_length})
        if schedule.decay_steps is None:
            # A trial run may end within its warm-up.
            steps = max(self.run.steps, schedule.warmup_steps + 1)
            schedule = schedule.model_copy(update={"decay_steps": steps})
        if TAIL in schedule.chosen.reads and schedule.wsd_decay_steps is None:
            schedule = schedule.model_copy(update={"wsd_decay_steps": max(1, schedule.decay_steps // 10)})
        if self.data.kind == "chat":
            # The last token of a conversation does not predict the next one, and none attends to another.
            is_packed = self.data.packing not in ("none", "pairs")  # one conversation in a row
            separate = {"reset_attention": is_packed, "reset_positions": is_packed}
            separate |= {"mask_end_of_document_loss": True}
            given = {name: getattr(self.data, name) for name in self.data.model_fields_set & separate.keys()}
            self._replaced.update({f"data.{name}": own for name, own in given.items() if own != separate[name]})
            object.__setattr__(self, "data", self.data.model_copy(update=separate))
        if self.lora.rank is not None and self.lora.alpha is None:
            object.__setattr__(self, "lora", self.lora.model_copy(update={"alpha": float(self.lora.rank)}))
        teacher = self.teacher.model
        if teacher is not None and teacher.position == "learned" and teacher.max_positions is None:
            teacher = teacher.model_copy(update={"max_positions": self.batch.sequence_length})
            object.__setattr__(self, "teacher", self.teacher.model_copy(update={"model": teacher}))
        # The section is frozen, but the object is still being made.
        object.__setattr__(self, "model", model)
        object.__setattr__(self, "schedule", schedule)
        return self

    @property
    def teacher_model(self) -> ModelConfig | None:
        """The teacher's network: the model's own, if the teacher is the base of adapters."""
        return self.model if self.teacher.base else self.teacher.model

    @property
    def of_teacher(self) -> "Config | None":
        """This config with the teacher in place of the model: in BF16, without adapters.

        None without a teacher, and if it is the base of adapters.
        """
        if self.teacher.model is None:
            return None
        plain = self.precision.model_copy(update={"fp8": Fp8Config()})
        sections = {"model": self.teacher.model, "teacher": TeacherConfig(), "lora": LoraConfig(), "precision": plain}
        sections |= {"communication": self.communication.one_by_one}
        return self.model_copy(update=sections | {"objective": ObjectiveConfig(), "remat": RematConfig()})

    @property
    def of_encoder(self) -> "Config | None":
        """This config with an encoder's layers (`model.encoder.kind: layers`) in place of the model's; or None."""
        if (model := self.model.of_encoder) is None:
            return None
        batch = self.batch.model_copy(update={"sequence_length": self.model.encoder.sequence_length})
        return self.model_copy(update={"model": model, "batch": batch, "teacher": TeacherConfig()})

    @property
    def of_vision(self) -> "Config | None":
        """This config with the layers of a vision tower in place of the model's; None without one.

        The images of a row are its documents.
        """
        if self.model.vision is None or self.model.of_vision is None:
            return None
        batch = self.batch.model_copy(update={"sequence_length": self.model.vision.patches_per_row})
        packed = self.data.model_copy(update={"reset_attention": True})
        sections = {"model": self.model.of_vision, "batch": batch, "data": packed, "lora": LoraConfig()}
        if self.kernels.attention == "cudnn":  # which takes no documents
            sections["kernels"] = self.kernels.model_copy(update={"attention": "auto"})
        sections |= {"communication": self.communication.one_by_one}
        return self.model_copy(update=sections)

    @property
    def of_second_stack(self) -> "Config | None":
        """This config with the layers in place of the model's that run before them: an encoder's or a tower's."""
        return self.of_encoder or self.of_vision

    @property
    def attended_length(self) -> int:
        """Number of tokens of a sequence that one may attend to: all, or those of an image whose size is fixed."""
        return min(self.batch.sequence_length, self.model.max_positions or self.batch.sequence_length)

    @property
    def span_lengths(self) -> tuple[SpanLengths, ...]:
        """Numbers of tokens of a sample of span corruption, which an encoder of layers trains on, by denoiser.

        Empty without an encoder of layers. A denoiser's own token is not counted.
        """
        if (length := self.model.encoder.sequence_length) is None:
            return ()
        own = ((length - (d.token is not None), d.noise_density, d.mean_span_length) for d in self.data.mixture)
        return tuple(span_lengths(*each) for each in own)

    @property
    def sample_length(self) -> int:
        """The number of tokens of the text from one sample to the next."""
        return max((each.tokens for each in self.span_lengths), default=self.batch.sequence_length)

    @property
    def fp8_layers(self) -> range:
        """The layers whose matmuls run in FP8."""
        fp8 = self.precision.fp8
        last = self.model.num_layers - fp8.last_bf16_layers
        return range(fp8.first_bf16_layers, last) if fp8.chosen.is_on else range(0)

    def pads_samples(self, split: str) -> bool:
        """Whether sequences of a split ("train", "valid/NAME", ...) may end with padding.

        Their batches have the field `is_real`.
        """
        data, of_validation = self.data, split.partition("/")[0] == "valid"
        last_sample = data.order == "megatron" and not data.drop_last_validation_sample and of_validation
        return data.kind == "chat" or last_sample or self.reads_whole(split)

    def reads_whole(self, split: str) -> bool:
        """Whether a split is evaluated, and an evaluation reads each of its samples once."""
        return self.run.eval_steps == "all" and split != "train"

    def batch_shards(self, sizes: Mapping[str, int]) -> int:
        """The number of devices that the sequences are divided among, on a mesh of `sizes`."""
        return math.prod(sizes[axis] for axis in BATCH_AXES)

    def expert_shards(self, sizes: Mapping[str, int]) -> int:
        """The number of devices that the experts are divided among, on a mesh of `sizes`."""
        return math.prod(sizes[axis] for axis in self.mesh.experts_over)

    def choose_context(self, sizes: Mapping[str, int]) -> tuple[ContextStrategy, str]:
        """The declarations of `communication.context` on a mesh of `sizes`, and the reason for the choice."""
        model, tensor = self.model, sizes["tensor"]
        heads = {"query heads": model.num_heads // tensor, "KV heads": max(model.num_kv_heads // tensor, 1)}
        has = self.has_sendable_latents, self.model.position == "relative"
        return choose_context(self.communication.context, sizes["context"], heads, *has)

    def context_strategy(self, sizes: Mapping[str, int]) -> ContextStrategy:
        """The declarations of `communication.context` on a mesh of `sizes`."""
        return self.choose_context(sizes)[0]

    @property
    def has_sendable_latents(self) -> bool:
        """Whether another device can compute keys and values from latents: not in FP8 or with adapters."""
        return self.model.is_latent and not self.precision.fp8.chosen.is_on and self.lora.rank is None

    def dispatch(self, sizes: Mapping[str, int]) -> Dispatch:
        """The declarations of `communication.experts` on a mesh of `sizes`."""
        return choose_dispatch(self.communication.experts, self.expert_shards(sizes), self.model.experts_per_token)

    def where(self, key: str) -> str:
        """The location where `key` ("section.name") was set: a file and line, an override, or "default"."""
        return self._locations.get(key, "default")

    @property
    def replaced(self) -> Mapping[str, bool]:
        """Values that were given, by key, in place of which the config has those that follow from other keys."""
        return self._replaced

    def to_yaml(self) -> str:
        """The whole config as YAML, sections in order; it loads to an equal config."""
        return yaml.dump(self.model_dump(mode="json"), Dumper=Dumper, sort_keys=False, width=10**6)

    def __eq__(self, other: object) -> bool:
        """Whether all values are equal, wherever they were set."""
        return isinstance(other, Config) and self.model_dump() == other.model_dump()
