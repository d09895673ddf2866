"""Every key of the config: one class per section, one line of documentation per key.

A `Config` is frozen, hashable and complete: what is left out is filled in when it is made.
"""

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    model_validator,
)

from megajax.config.tree import Dumper

AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
PositiveOrZero = Annotated[float, Field(ge=0)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]


def derived(rule: Callable[[dict[str, Any]], Any], shown: str, description: str) -> Any:
    """A key whose default follows from keys above it, as `shown` says in words; null means the default."""
    return Field(default_factory=rule, description=description, json_schema_extra={"derived": shown})


def _axis_size(value: int) -> int:
    if value < 1 and value != -1:
        raise ValueError("is not a mesh size: use 1 or more, or -1 on one axis to take all remaining devices")
    return value


def _in_order(axes: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(axes)) < len(axes):
        raise ValueError("names an axis twice: name each once")
    return tuple(axis for axis in AXES if axis in axes)


def _split_weights(value: str) -> str:
    try:
        weights = [float(part) for part in value.split(",")]
    except ValueError:
        weights = []
    if len(weights) != 3 or weights[0] <= 0 or not all(0 <= weight < float("inf") for weight in weights):
        raise ValueError("is not a split: write the weights of train, valid and test, such as '969,30,1'")
    return value


AxisSize = Annotated[int, AfterValidator(_axis_size)]
ExpertAxis = Literal["data", "fsdp", "expert", "context", "tensor"]
ExpertAxes = Annotated[tuple[ExpertAxis, ...], Field(strict=False, min_length=1), AfterValidator(_in_order)]
Split = Annotated[str, AfterValidator(_split_weights)]


class Section(BaseModel):
    """What all sections share: nothing unknown, nothing converted, nothing changed later."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_means_derived(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        extras = {name: field.json_schema_extra for name, field in cls.model_fields.items()}
        return {key: value for key, value in values.items() if value is not None or not extras.get(key)}


class RunConfig(Section):
    """The run as a whole: its name, place, length and rhythm."""

    name: Text = Field(default="run", description="Name of the run.")
    dir: Text = derived(
        lambda run: f"runs/{run['name']}",
        "runs/<name>",
        "Directory of logs and checkpoints; a rerun resumes there.",
    )
    seed: CountOrZero = Field(default=1234, description="Seed of weights, data order and dropout.")
    steps: Count = Field(default=1000, description="Number of optimizer steps.")
    log_interval: Count = Field(default=10, description="Steps between two logged lines.")
    eval_interval: CountOrZero = Field(default=0, description="Steps between two evaluations; 0: only at the end.")
    eval_steps: CountOrZero = Field(default=10, description="Batches of an evaluation; 0: never evaluate.")
    checkpoint_interval: CountOrZero = Field(
        default=0, description="Steps between two checkpoints; 0: only at the end."
    )
    deterministic: bool = Field(default=False, description="Same numbers bit for bit when run again on the same mesh.")
    max_nonfinite_steps: Count = Field(
        default=20,
        description="Skipped steps in a row (loss or gradient not finite) after which the run stops.",
    )


class RopeScaling(Section):
    """Stretching of the rotary frequencies for sequences longer than those trained on first."""

    kind: Literal["llama3"] = Field(default="llama3", description="How the frequencies are stretched.")
    factor: Annotated[float, Field(ge=1)] = Field(description="By how much low frequencies are divided.")
    low_freq_factor: Positive = Field(default=1.0, description="Wavelengths above original/this are divided by factor.")
    high_freq_factor: Positive = Field(default=4.0, description="Wavelengths below original/this are left as they are.")
    original_max_positions: Count = Field(default=8192, description="Sequence length of the unscaled model.")


class RouterConfig(Section):
    """How MoE layers choose experts, and what keeps these evenly loaded."""

    score_function: Literal["softmax", "sigmoid"] = Field(default="softmax", description="Scores from logits.")
    pre_softmax: bool = Field(
        default=False, description="softmax over all experts, then the choice; false: over the chosen."
    )
    normalise: bool = Field(default=True, description="Divide the chosen scores by their sum.")
    scaling_factor: Positive = Field(default=1.0, description="The chosen experts' weights are multiplied by this.")
    num_groups: Count = Field(default=1, description="Groups of experts, of which a token chooses from a few.")
    groups_per_token: Count = Field(default=1, description="Groups that a token chooses its experts from.")
    jitter: BelowOne = Field(
        default=0.0, description="The router's input is multiplied by random numbers from 1-this to 1+this."
    )
    sequence_loss: PositiveOrZero = Field(
        default=0.0, description="Weight of the balancing loss of each sequence's assignments."
    )
    global_loss: PositiveOrZero = Field(
        default=0.0, description="Weight of the balancing loss of a microbatch's assignments, over all devices."
    )
    z_loss: PositiveOrZero = Field(default=0.0, description="Weight of the squared log-normaliser of the logits.")
    expert_bias: bool = Field(
        default=False, description="Balance without a loss: a bias on the choice, updated from each step's counts."
    )
    bias_update_rate: PositiveOrZero = Field(default=1e-3, description="Step of the expert bias.")
    sinkhorn: bool = Field(
        default=False, description="Choose in training by scores that Sinkhorn's iteration balances."
    )
    capacity_factor: Positive | None = Field(
        default=None, description="Of a microbatch an expert takes so many times its even share; null: all."
    )
    drop_policy: Literal["probability", "position"] = Field(
        default="probability", description="What it drops: the lowest weights, or what is last in the batch."
    )
    force_balance: bool = Field(default=False, description="Experts in turn, whatever the scores; for benchmarks.")

    @property
    def has_losses(self) -> bool:
        """Whether anything is added to the language model's loss."""
        return self.sequence_loss > 0 or self.global_loss > 0 or self.z_loss > 0


class ModelConfig(Section):
    """The network: shapes and choices, nothing about where or how fast it runs."""

    num_layers: Count = Field(description="Number of blocks (attention and MLP).")
    hidden_size: Count = Field(description="Width of the residual stream.")
    num_heads: Count = Field(description="Number of query heads.")
    num_kv_heads: Count = derived(
        lambda model: model["num_heads"],
        "num_heads",
        "Number of key/value heads; fewer than num_heads is GQA.",
    )
    head_dim: Count = derived(
        lambda model: model["hidden_size"] // model["num_heads"],
        "hidden_size / num_heads",
        "Width of a head.",
    )
    ffn_hidden_size: Count = derived(lambda model: 4 * model["hidden_size"], "4 * hidden_size", "Width of the MLP.")
    vocab_size: Count = Field(description="Number of tokens in the vocabulary.")
    vocab_multiple: Count = Field(default=128, description="The vocabulary is padded to a multiple of this.")
    max_positions: Count | None = Field(
        default=None,
        description="Length of the table of learned positions.",
        json_schema_extra={"derived": "batch.sequence_length if position is learned"},
    )
    norm: Literal["rmsnorm", "layernorm"] = Field(default="rmsnorm", description="Kind of normalisation.")
    norm_epsilon: Positive = Field(default=1e-5, description="Added to the variance in normalisations.")
    activation: Literal["swiglu", "geglu", "gelu", "relu2"] = Field(
        default="swiglu", description="MLP: gated by SiLU or GELU, or plain with GELU or squared ReLU."
    )
    position: Literal["rope", "learned", "none"] = Field(default="rope", description="How positions enter.")
    rope_theta: Positive = Field(default=10000.0, description="Base of the rotary wavelengths.")
    rope_scaling: RopeScaling | None = Field(default=None, description="Stretching of the rotary frequencies.")
    rope_fraction: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="Part of each head that is rotated."
    )
    qk_norm: bool = Field(default=False, description="Normalise queries and keys of each head.")
    attention_bias: bool = Field(default=False, description="Biases in the four attention projections.")
    mlp_bias: bool = Field(default=False, description="Biases in the MLP projections.")
    logit_softcap: Positive | None = Field(default=None, description="Bound the head's logits to +-this by tanh.")
    attention_softcap: Positive | None = Field(default=None, description="Bound attention scores to +-this by tanh.")
    attention_sinks: bool = Field(
        default=False, description="A learned logit a head in the softmax's sum, without a value; starts at 0."
    )
    sliding_window: Count | None = Field(
        default=None, description="Tokens that a local layer attends to, the query's own included."
    )
    layer_pattern: Annotated[tuple[Literal["global", "local"], ...], Field(strict=False, min_length=1)] | None = Field(
        default=None, description="Kinds of layers, repeated; null with a sliding_window: all local."
    )
    tie_embeddings: bool = Field(default=False, description="The head is the embedding table, transposed.")
    dropout: BelowOne = Field(default=0.0, description="Rate after the embedding and in both residual branches.")
    init_std: Positive = Field(default=0.02, description="Standard deviation of initial weights.")
    depth_scaled_init: bool = Field(
        default=True,
        description="Divide init_std by sqrt(2 * num_layers) for projections into the residual stream.",
    )
    z_loss: PositiveOrZero = Field(default=0.0, description="Weight of the squared log-normaliser added to the loss.")
    num_experts: Count | None = Field(default=None, description="Experts of each MoE layer's MLP; null: a dense model.")
    first_dense_layers: CountOrZero = Field(default=0, description="So many layers at the start have a plain MLP.")
    moe_layer_interval: Count = Field(default=1, description="Of the layers every n-th has experts, the others an MLP.")
    experts_per_token: Count = Field(default=2, description="Experts that compute each token (top-k).")
    expert_ffn_hidden_size: Count | None = derived(
        lambda model: model["ffn_hidden_size"] if model["num_experts"] else None,
        "ffn_hidden_size if there are experts",
        "Width of an expert.",
    )
    shared_expert_ffn_hidden_size: CountOrZero = Field(
        default=0, description="Width of an expert that computes every token, or of several together; 0: none."
    )
    shared_expert_gate: bool = Field(default=False, description="Multiply the shared expert's output by a sigmoid.")
    router: RouterConfig = Field(default_factory=RouterConfig, description="Routing of MoE layers.")

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table: `vocab_size` rounded up to a multiple of `vocab_multiple`."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


class MeshConfig(Section):
    """Devices along each axis; the product is the number of devices; one size may be -1 (the rest)."""

    pipeline: AxisSize = Field(default=1, description="Stages of layers; the section pipeline says how they run.")
    data: AxisSize = Field(default=1, description="Batch; weights are gathered and gradients reduced once a step.")
    fsdp: AxisSize = Field(default=1, description="Batch; weights are gathered layer by layer.")
    expert: AxisSize = Field(default=1, description="Experts; elsewhere one more batch axis.")
    context: AxisSize = Field(default=1, description="Sequence.")
    tensor: AxisSize = Field(default=1, description="Heads, MLP width, vocabulary.")
    experts_over: ExpertAxes = Field(
        default=("expert",), description="Axes that experts lie over; if not over tensor, their width does."
    )


class PipelineConfig(Section):
    """How the stages of `mesh.pipeline` take turns, and which layers each has."""

    schedule: Literal["gpipe", "1f1b", "zero_bubble"] = Field(
        default="1f1b",
        description="gpipe: all forward passes, then all backward; 1f1b: one of each in turn; zero_bubble: so too, but"
        " weight gradients later, when stages would wait.",
    )
    rounds: Count = Field(
        default=1, description="Virtual stages per stage; more than 1: Megatron's interleaved schedule."
    )
    layout: Annotated[tuple[CountOrZero, ...], Field(strict=False, min_length=1)] | None = Field(
        default=None,
        description="Layers of each virtual stage, in the model's order: all stages of round 0, then of round 1, ...;"
        " null: even, the first and the last fewer where layers are missing.",
    )


class Fp8Config(Section):
    """FP8 matmuls of the linear layers; embedding, head and attention stay in precision.compute."""

    recipe: Literal["none", "current", "delayed"] = Field(
        default="none",
        description="Scale tensors by their own largest magnitude, or by that of earlier steps; none: no FP8.",
    )
    backend: Literal["xla", "transformer_engine"] = Field(default="xla", description="Whose kernels.")
    format: Literal["hybrid", "e4m3"] = Field(
        default="hybrid", description="hybrid: E4M3 forward and E5M2 for gradients; e4m3: E4M3 for both."
    )
    amax_history_length: Count = Field(default=1024, description="delayed: steps whose largest magnitudes are kept.")
    amax_algorithm: Literal["max", "most_recent"] = Field(
        default="max", description="delayed: the largest of the history, or the last step's."
    )
    margin: CountOrZero = Field(default=0, description="delayed: powers of two of room above the largest magnitude.")
    first_bf16_layers: CountOrZero = Field(default=0, description="Layers at the start that stay out of FP8.")
    last_bf16_layers: CountOrZero = Field(default=0, description="Layers at the end that stay out of FP8.")


class PrecisionConfig(Section):
    """Number formats."""

    compute: Literal["bfloat16", "float16", "float32"] = Field(
        default="bfloat16", description="Activations and matrix products; float32 is FP32 on GPUs too, not TF32."
    )
    params: Literal["float32"] = Field(default="float32", description="Master weights and optimizer state.")
    gradients: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Format in which gradients are reduced across devices."
    )
    fp8: Fp8Config = Field(default_factory=Fp8Config, description="FP8 matmuls.")


class BatchConfig(Section):
    """How much one step reads."""

    global_size: Count = Field(description="Sequences a step, over all devices and microbatches.")
    num_microbatches: Count = Field(default=1, description="Slices of the global batch, computed one after the other.")
    sequence_length: Count = Field(description="Tokens a sequence.")


class OptimizerConfig(Section):
    """The update."""

    kind: Literal["adamw", "sgd", "lion"] = Field(default="adamw", description="Which optimizer.")
    weight_decay: PositiveOrZero = Field(default=0.1, description="Decoupled weight decay, times the learning rate.")
    beta1: BelowOne = Field(default=0.9, description="Decay of the first moment; sgd: momentum.")
    beta2: BelowOne = Field(default=0.95, description="Decay of the second moment; lion: of the stored momentum.")
    epsilon: Positive = Field(default=1e-8, description="Added to the root of the second moment.")
    clip_norm: PositiveOrZero = Field(default=1.0, description="Largest global norm of the gradient; 0: do not clip.")
    decay_norms: bool = Field(default=False, description="Weight decay on normalisation scales too.")
    decay_biases: bool = Field(default=False, description="Weight decay on biases too.")
    decay_embeddings: bool = Field(default=True, description="Weight decay on embedding tables too.")


class ScheduleConfig(Section):
    """The learning rate over the steps."""

    kind: Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"] = Field(
        default="cosine", description="Shape after the warm-up; wsd: stable, then a final decay."
    )
    learning_rate: Positive = Field(default=3e-4, description="Highest learning rate.")
    min_learning_rate: PositiveOrZero = Field(default=0.0, description="Learning rate at the end of the decay.")
    warmup_steps: CountOrZero = Field(default=0, description="Steps of linear rise from 0.")
    decay_steps: Count = derived(  # filled in by Config, which sees the run
        lambda schedule: None, "run.steps, past the warm-up", "Step at which min_learning_rate is reached."
    )
    wsd_decay_steps: Count | None = Field(
        default=None,
        description="Length of wsd's final decay.",
        json_schema_extra={"derived": "a tenth of decay_steps if kind is wsd"},
    )


class DataSource(Section):
    """One data set of a blend."""

    prefix: Text = Field(description="Path of the .bin/.idx pair without its ending.")
    weight: Positive = Field(default=1.0, description="Share of the samples, relative to the other sources.")


def _source_form(value: Any) -> str | None:
    return {str: "~text", list: "~list", tuple: "~list"}.get(type(value))


# The tags start with ~ so that an error's location can leave them out.
Sources = Annotated[
    Annotated[Text, Tag("~text")] | Annotated[tuple[DataSource, ...], Field(strict=False, min_length=1), Tag("~list")],
    Discriminator(_source_form),
]


class DataConfig(Section):
    """Where tokens come from."""

    kind: Literal["indexed", "synthetic"] = Field(
        default="indexed", description="Read .bin/.idx files, or make tokens up (then every path is ignored)."
    )
    train: Sources | None = Field(default=None, description="Training data: a prefix, or a list of {prefix, weight}.")
    valid: Sources | None = Field(default=None, description="Evaluation data, written like train.")
    test: Sources | None = Field(default=None, description="Held-out data, written like train.")
    split: Split | None = Field(
        default=None,
        description="Weights that divide train's documents into train, valid and test: '969,30,1'.",
    )
    tokenizer: Text | None = Field(
        default=None, description="byte, a tokenizer.json, or a SentencePiece .model; null: token ids only."
    )
    order: Literal["shuffled", "sequential"] = Field(default="shuffled", description="Order of documents and samples.")
    reset_attention: bool = Field(default=False, description="Tokens attend within their document only.")
    reset_positions: bool = Field(default=False, description="Positions start at 0 in each document.")
    mask_end_of_document_loss: bool = Field(
        default=False, description="Where the target is the next document's first token, the loss does not count."
    )
    synthetic_documents: Count | None = Field(
        default=None, description="synthetic: documents that a sequence is cut into at random; null: one."
    )
    workers: CountOrZero = Field(default=0, description="Loader processes; 0: a thread of the trainer.")
    prefetch: CountOrZero = Field(default=2, description="Batches prepared ahead, and threads that read them.")


class CheckpointConfig(Section):
    """What is kept, and where the first weights come from."""

    keep: Count = Field(default=2, description="Newest checkpoints that are kept.")
    keep_every: Count | None = Field(default=None, description="Checkpoints at multiples of this step stay for good.")
    init_from: Text | None = Field(default=None, description="Run directory or checkpoint to take first weights from.")
    resume_step: Count | None = Field(
        default=None,
        description="Go back to the checkpoint of this step, once; null: resume from the newest.",
    )


class RematConfig(Section):
    """What is computed again in the backward pass instead of being kept."""

    policy: Literal["none", "full", "selective", "save_matmuls", "offload"] = Field(
        default="none",
        description="Recompute nothing, whole blocks, attention, all but matmuls; or offload to the host.",
    )
    layers: Count | None = Field(
        default=None,
        description="Only the first layers, this many; with mesh.pipeline, this many of each virtual stage; null: all.",
    )
    group: Count = Field(default=1, description="With full: keep the input of every n-th block only.")


class KernelsConfig(Section):
    """How it is computed."""

    attention: Literal["auto", "cudnn", "pallas", "reference"] = Field(default="auto", description="Attention kernel.")
    context: Literal["ring", "all_gather", "all_to_all"] = Field(
        default="ring", description="How keys and queries meet over mesh.context."
    )
    dispatch: Literal["auto", "all_to_all", "all_gather"] = Field(
        default="auto",
        description="How tokens meet experts on other devices; auto: all_gather up to 8 devices, or as many as a"
        " token has experts.",
    )
    grouped_matmul: Literal["auto", "pallas", "reference"] = Field(
        default="auto", description="Kernel of the experts' matmuls."
    )
    scan_unroll: Count | None = Field(
        default=None,
        description="Layers in a body of the loop over layers.",
        json_schema_extra={"derived": "by depth and device"},
    )
    loss_chunk_tokens: Count | None = Field(
        default=None,
        description="Tokens in a chunk of head and loss.",
        json_schema_extra={"derived": "by tokens and vocabulary"},
    )


class LoggingConfig(Section):
    """Logs beside metrics.jsonl and the console."""

    tensorboard: bool = Field(default=True, description="Write TensorBoard files.")
    wandb: bool = Field(default=False, description="Log to Weights & Biases.")
    wandb_project: Text | None = Field(default=None, description="Weights & Biases project.")
    profile_start: Count | None = Field(default=None, description="First step of a jax.profiler trace; null: none.")
    profile_steps: Count = Field(default=3, description="Steps in the trace.")


class Config(Section):
    """A whole run."""

    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig
    mesh: MeshConfig = Field(default_factory=MeshConfig)
    pipeline: PipelineConfig = Field(default_factory=PipelineConfig)
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig)
    batch: BatchConfig
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    remat: RematConfig = Field(default_factory=RematConfig)
    kernels: KernelsConfig = Field(default_factory=KernelsConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)

    _places: dict[str, str] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _fill_across_sections(self) -> "Config":
        model, schedule = self.model, self.schedule
        if model.position == "learned" and model.max_positions is None:
            model = model.model_copy(update={"max_positions": self.batch.sequence_length})
        if schedule.decay_steps is None:
            # A run cut short within its warm-up, to try it, is no mistake.
            steps = max(self.run.steps, schedule.warmup_steps + 1)
            schedule = schedule.model_copy(update={"decay_steps": steps})
        if schedule.kind == "wsd" and schedule.wsd_decay_steps is None:
            schedule = schedule.model_copy(update={"wsd_decay_steps": max(1, schedule.decay_steps // 10)})
        # Past the freeze: the object is still being made.
        object.__setattr__(self, "model", model)
        object.__setattr__(self, "schedule", schedule)
        return self

    @property
    def fp8_layers(self) -> range:
        """The layers whose matmuls run in FP8."""
        fp8 = self.precision.fp8
        return (
            range(0)
            if fp8.recipe == "none"
            else range(fp8.first_bf16_layers, self.model.num_layers - fp8.last_bf16_layers)
        )

    def expert_shards(self, sizes: Mapping[str, int]) -> int:
        """The number of devices that the experts are divided among, on a mesh of `sizes`."""
        return math.prod(sizes[axis] for axis in self.mesh.experts_over)

    def dispatch(self, sizes: Mapping[str, int]) -> str:
        """The strategy of `kernels.dispatch` on a mesh of `sizes`.

        An all-gather sends no more than an all-to-all while a token has as many experts as there are devices. On one
        host it was faster beyond that too: XLA's ragged all-to-all moves 18 GB/s between H200s.
        """
        if self.kernels.dispatch != "auto":
            return self.kernels.dispatch
        shards = self.expert_shards(sizes)
        return "all_gather" if shards <= max(8, self.model.experts_per_token) else "all_to_all"

    def where(self, key: str) -> str:
        """Where `key` ("section.name") was set: a file and line, an override, or "default"."""
        return self._places.get(key, "default")

    def to_yaml(self) -> str:
        """The whole config as YAML, sections in order; loading it gives an equal config."""
        return yaml.dump(self.model_dump(mode="json"), Dumper=Dumper, sort_keys=False, width=10**6)

    def __eq__(self, other: object) -> bool:
        """Equal values, wherever they were set."""
        return isinstance(other, Config) and self.model_dump() == other.model_dump()
