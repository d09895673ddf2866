"""The keys of the section `precision`."""

from typing import Annotated, Literal

from pydantic import Field

from megajax.options.activations import ACTIVATIONS
from megajax.options.fp8_recipes import NONE as NO_FP8
from megajax.options.fp8_recipes import RECIPES, Fp8Recipe
from megajax.schema.fields import CountOrZero, HistoryLength, PowerOfTwo, Section
from megajax.schema.rules import Excludes, ReadIf

TE, XLA = "transformer_engine", "set precision.fp8.backend=xla"

ON = ReadIf("recipe", lambda recipe: RECIPES[recipe].is_on)
WITH_KERNELS = ReadIf("recipe", lambda recipe: RECIPES[recipe].has_kernels)
DELAYED = ReadIf("recipe", lambda recipe: RECIPES[recipe].keeps_history)


class Fp8Config(Section):
    """FP8 and FP4 matmuls of the linear layers; embedding, head and attention stay in precision.compute."""

    recipe: Annotated[str, RECIPES] = Field(
        default=NO_FP8.name,
        description="none: no FP8; current: scale a tensor by its own largest magnitude; delayed: by the largest"
        " magnitudes of earlier steps; blockwise: E4M3 in blocks of 1 x 128, weights of 128 x 128; mxfp8: E4M3 in"
        " blocks of 32; nvfp4: FP4 in blocks of 16; or a recipe of run.extensions.",
    )
    backend: Annotated[
        Literal["xla", "transformer_engine", "emulated"],
        ON,
        Excludes(
            "recipe",
            lambda recipe: RECIPES[recipe].in_blocks,
            of=TE,
            because="only current and delayed use it",
            cure=XLA,
        ),
        Excludes(
            "recipe", lambda recipe: RECIPES[recipe].has_kernels, of="emulated", because="its own kernels run", cure=XLA
        ),
        Excludes("model.num_experts", of=TE, cure=XLA),
        Excludes("model.activation", lambda name: not ACTIVATIONS[name].in_transformer_engine, of=TE, cure=XLA),
    ] = Field(
        default="xla",
        description="Library of the FP8 kernels; emulated: of a recipe in blocks the numbers, multiplied in"
        " precision.compute (CPUs emulate anyway).",
    )
    format: Annotated[Literal["hybrid", "e4m3"], WITH_KERNELS] = Field(
        default="hybrid", description="hybrid: E4M3 forward and E5M2 for gradients; e4m3: E4M3 for both."
    )
    amax_history_length: Annotated[HistoryLength, DELAYED] = Field(
        default=1024, description="delayed: number of steps whose largest magnitudes are kept."
    )
    amax_algorithm: Annotated[Literal["max", "most_recent"], DELAYED] = Field(
        default="max", description="delayed: scale by the maximum of the history, or by the last step's value."
    )
    margin: Annotated[PowerOfTwo, DELAYED] = Field(
        default=0, description="delayed: headroom above the largest magnitude, as a power of two."
    )
    first_bf16_layers: Annotated[CountOrZero, ON] = Field(
        default=0, description="Number of layers at the start that do not use FP8."
    )
    last_bf16_layers: Annotated[CountOrZero, ON] = Field(
        default=0, description="Number of layers at the end that do not use FP8."
    )

    @property
    def chosen(self) -> Fp8Recipe:
        """The declarations of the recipe."""
        return RECIPES[self.recipe]


class PrecisionConfig(Section):
    """Number formats."""

    compute: Literal["bfloat16", "float16", "float32"] = Field(
        default="bfloat16",
        description="Format of activations and matmuls; float32 is true FP32 on GPUs, not TF32.",
    )
    gradients: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Format in which gradients are reduced across devices."
    )
    accumulation: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Format of the sums of gradients over microbatches; those of norms, routers and sinks are float32.",
    )
    fp8: Fp8Config = Field(default_factory=Fp8Config, description="FP8 matmuls of the linear layers.")
