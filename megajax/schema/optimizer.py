"""Keys of the optimizer."""

from typing import Annotated, Any, Literal

from pydantic import Field

from megajax.options.optimizers import BETA1, BETA2, EPSILON, FORMS, OPTIMIZERS, MomentForm, OptimizerKind
from megajax.schema.fields import BelowOne, Count, CountOrZero, Positive, PositiveOrZero, Section, Share, Text
from megajax.schema.rules import Excludes, Needs, ReadIf

Coefficients = Annotated[tuple[float, float, float], Field(strict=False)]
EmaDecay = Annotated[float, Field(gt=0, lt=1)]
LayerDecay = Annotated[float, Field(gt=0, le=1)]
OfSteps = Annotated[tuple[Coefficients, ...], Field(strict=False, min_length=1)]


def _reads(key: str) -> ReadIf:
    return ReadIf("kind", lambda kind: OPTIMIZERS[kind].has_effect(key))


class MuonConfig(Section):
    """Muon (Jordan et al. 2024): momentum, made orthogonal by Newton–Schulz, for each matrix of the layers."""

    momentum: BelowOne = Field(default=0.95, description="Decay rate of the momentum.")
    nesterov: bool = Field(default=True, description="Use Nesterov momentum.")
    coefficients: Literal["quintic", "polar_express"] | OfSteps = Field(
        default="quintic",
        description="Coefficients (a, b, c) of a step of Newton–Schulz, X ← aX + bXXᵀX + c(XXᵀ)²X: quintic (Jordan et"
        " al. 2024), polar_express (Amsel et al. 2025), or a list with three numbers for each step; the last are"
        " repeated.",
    )
    steps: Count = Field(default=5, description="Steps of Newton–Schulz.")
    scale: Literal["match_adamw", "spectral"] = Field(
        default="match_adamw",
        description="Size of an update of a matrix [in, out]: match_adamw 0.2·√max(in, out), so that AdamW's learning"
        " rate and weight decay fit (Moonlight), or spectral √max(1, out / in), which Megatron-LM calls shape_scaling.",
    )
    per_head: bool = Field(
        default=False, description="Each head of queries, keys and values is a matrix by itself; false: all together."
    )
    adamw_rate: Positive = Field(
        default=1.0,
        description="Learning rate of the parameters that AdamW updates, as a multiple of schedule.learning_rate.",
    )


class OptimizerGroup(Section):
    """Parameters with their own learning rate, weight decay or clipping."""

    parameters: Annotated[tuple[Text, ...], Field(strict=False, min_length=1)] = Field(
        description="Patterns of whole names of parameters, as of files in a shell: '*.attention.*', 'embedding.*'."
    )
    learning_rate: PositiveOrZero = Field(default=1.0, description="Factor of the learning rate; 0: frozen.")
    weight_decay: PositiveOrZero = Field(default=1.0, description="Factor of optimizer.weight_decay; 0: none.")
    clip_norm: PositiveOrZero | None = Field(
        default=None,
        description="Clip the gradient of this group to this norm of its own; 0: do not clip; null: clip it together"
        " with the parameters outside such groups, by optimizer.clip_norm.",
    )


class AdemamixConfig(Section):
    """AdEMAMix (Pagliardini et al. 2024): its slow mean of the gradients."""

    beta3: Annotated[float, Field(gt=0, lt=1)] = Field(default=0.9999, description="Decay rate of the slow mean.")
    alpha: PositiveOrZero = Field(default=5.0, description="Weight of the slow mean beside the first moment.")
    warmup_steps: CountOrZero | None = Field(
        default=None,
        description="Steps in which alpha rises from 0, and the slow mean's decay rate from beta1; null: run.steps.",
    )


class SoapConfig(Section):
    """SOAP (Vyas et al. 2024): Adam in the eigenbases of each matrix of the layers."""

    precondition_frequency: Count = Field(default=10, description="Steps between two refreshes of the eigenbases.")
    max_dimension: Count = Field(
        default=10_000, description="A side of a matrix that is longer keeps its own basis, as with AdamW."
    )


class OptimizerConfig(Section):
    """The optimizer and its settings."""

    kind: Annotated[str, OPTIMIZERS] = Field(
        default="adamw",
        description="Kind of optimizer; muon and soap update the matrices of the layers, and AdamW all others; or one"
        " registered by run.extensions.",
    )
    settings: Annotated[
        dict[str, Any], Needs("kind", lambda kind: OPTIMIZERS[kind].made is not None, what="a registered optimizer")
    ] = Field(default={}, description="Settings of a registered optimizer, by name.")
    state: Annotated[str, FORMS] = Field(
        default="float32",
        description="Form of the moments between steps: bfloat16 by stochastic rounding, or int8 by blocks with a"
        " scale each; or one registered by run.extensions. A step computes with them in FP32.",
    )
    master: Annotated[
        Literal["float32", "split"],
        Excludes(
            "precision.compute",
            ("float16", "float32"),
            of="split",
            because="it stores the BF16 numbers that a step computes with",
            cure="set precision.compute=bfloat16, or optimizer.master=float32",
        ),
    ] = Field(
        default="float32",
        description="Form of the FP32 master weights between steps: split into a BF16 number, with which the step"
        " computes, and the other 16 bits, which only the update needs.",
    )
    offload: Share = Field(
        default=0.0,
        description="Share of the bytes of moments, averages and 16-bit rests of split master weights that is kept in"
        " pinned memory of the host, and comes to the device for the update, parameter by parameter.",
    )
    offload_dir: Annotated[
        Text | None,
        Needs("offload", lambda share: share > 0, what="optimizer.offload above 0", cure="set optimizer.offload=1"),
        Excludes(
            "logging.norms_interval",
            because="the norms of updates need all moments on the devices",
        ),
    ] = Field(
        default=None,
        description="Folder on a local disk (NVMe): optimizer.offload then keeps its arrays in files there, and not in"
        " the host's memory. The files have no names, and nothing is left of them when a process ends.",
    )
    offload_buffers: Annotated[Positive, ReadIf("offload_dir")] = Field(
        default=4.0,
        description="GiB of host memory for each device that hold parts of these files: read ahead, or not yet"
        " written.",
    )
    weight_decay: PositiveOrZero = Field(
        default=0.1, description="Decoupled weight decay; it is multiplied by the learning rate."
    )
    beta1: Annotated[BelowOne, _reads(BETA1)] = Field(
        default=0.9, description="Decay rate of the first moment; sgd: momentum."
    )
    beta2: Annotated[BelowOne, _reads(BETA2)] = Field(
        default=0.95, description="Decay rate of the second moment; lion: of the stored momentum."
    )
    epsilon: Annotated[Positive, _reads(EPSILON)] = Field(
        default=1e-8, description="Added to the square root of the second moment."
    )
    clip_norm: PositiveOrZero = Field(default=1.0, description="Clip the gradient to this global norm; 0: do not clip.")
    decay_norms: bool = Field(default=False, description="Apply weight decay to normalisation scales too.")
    decay_biases: bool = Field(default=False, description="Apply weight decay to biases too.")
    decay_embeddings: bool = Field(default=True, description="Apply weight decay to embedding tables too.")
    groups: tuple[OptimizerGroup, ...] = Field(
        default=(),
        strict=False,
        description="Parameters with their own settings: a list of {parameters, learning_rate, weight_decay,"
        " clip_norm}; a parameter is in the first group that has its name.",
    )
    layer_decay: LayerDecay = Field(
        default=1.0,
        description="Factor of the learning rate for each layer further from the output, for fine-tuning (ELECTRA,"
        " BEiT): 1 in the head, this in the last layer, the lowest in the embeddings.",
    )
    ema_decay: EmaDecay | None = Field(
        default=None,
        description="Decay rate of an exponential moving average of the weights, kept beside them and evaluated with"
        " them; null: none.",
    )
    ademamix: Annotated[AdemamixConfig, ReadIf("kind", "ademamix")] = Field(
        default_factory=AdemamixConfig, description="Settings of the optimizer ademamix."
    )
    muon: Annotated[MuonConfig, ReadIf("kind", "muon")] = Field(
        default_factory=MuonConfig, description="Settings of the optimizer muon."
    )
    soap: Annotated[SoapConfig, ReadIf("kind", "soap")] = Field(
        default_factory=SoapConfig, description="Settings of the optimizer soap."
    )

    def __hash__(self) -> int:  # `settings` and `groups` have none
        return hash((self.kind, self.state, self.master, self.offload, self.offload_dir, self.weight_decay))

    @property
    def chosen(self) -> OptimizerKind:
        """The declarations of the optimizer."""
        return OPTIMIZERS[self.kind]

    @property
    def form(self) -> MomentForm:
        """The declarations of the form of moments."""
        return FORMS[self.state]
