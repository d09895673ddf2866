"""The keys of the section `model.vision`: a tower of layers over the patches of images."""

from typing import Annotated, Literal

from pydantic import Field

from megajax.schema.fields import Count, CountOrZero, Layers, MlpWidth, Positive, Section, Tokens, Width, derived
from megajax.schema.rules import Below, Divides, Excludes, MultipleOf, Needs, ReadIf, more_than_one

CHANNELS = 3


class VisionConfig(Section):
    """A vision tower, whose output takes the place of the embeddings of image tokens."""

    image_token: Annotated[CountOrZero, Below("model.vocab_size", cure="raise model.vocab_size")] = Field(
        description="Id of the tokens that stand for images."
    )
    num_layers: Layers = Field(description="Number of layers of the tower.")
    hidden_size: Width = Field(description="Width of the tower's residual stream.")
    num_heads: Annotated[Width, Divides("hidden_size")] = Field(description="Number of the tower's heads.")
    ffn_hidden_size: MlpWidth = derived(
        lambda vision: 4 * vision["hidden_size"], "4 * hidden_size", "Width of the tower's MLP."
    )
    norm: Literal["layernorm", "rmsnorm"] = Field(default="layernorm", description="Kind of the tower's norms.")
    norm_epsilon: Positive = Field(default=1e-6, description="Added to the variance in the tower's norms.")
    activation: Literal["gelu", "gelu_exact", "quick_gelu", "swiglu"] = Field(
        default="gelu", description="Activation of the tower's MLP, as model.activation; quick_gelu is CLIP's."
    )
    patch_size: Count = Field(default=14, description="Height and width of a patch in pixels.")
    temporal_patch_size: Count = Field(default=1, description="Number of frames of a patch; an image is repeated.")
    patch_bias: bool = Field(default=True, description="A bias of the patches' embedding.")
    grid: Count | None = Field(
        default=None,
        description="Rows and columns of the table of learned positions, in patches; null: rotary positions by row"
        " and column.",
    )
    interpolate: Annotated[bool, Needs("grid", what="learned positions")] = Field(
        default=False,
        description="Stretch the table over the rows and columns of each image, of any size, and have rotary positions"
        " too (Qwen3-VL).",
    )
    rope_theta: Positive = Field(
        default=10000.0, description="Base of the rotary wavelengths of the tower, where it has rotary positions."
    )
    class_token: Annotated[
        bool,
        Needs("grid", what="learned positions"),
        Excludes("merge", more_than_one, because="a class entry is in no block"),
        Excludes("interpolate", because="only images of one size have a class entry"),
    ] = Field(
        default=False, description="Each image has one entry more than its patches, the first, with a learned vector."
    )
    patches_per_row: Tokens = derived(
        lambda vision: (64 if vision["interpolate"] else vision["grid"] or 64) ** 2 + vision["class_token"],
        "grid^2 + class_token: one image; or 4096 where sizes differ",
        "Number of patches, and of class entries, of the images of a sequence; the rest is padding.",
    )
    embedding_norm: bool = Field(default=False, description="Normalise the patches' embeddings (CLIP).")
    final_norm: bool = Field(default=True, description="Normalise the output of the last layer.")
    window: Annotated[Count | None, MultipleOf("merge")] = Field(
        default=None,
        description="Rows and columns of the windows, in patches: a patch attends to those of its own; null: to all of"
        " its image.",
    )
    global_layers: Annotated[tuple[CountOrZero, ...], ReadIf("window")] = Field(
        default=(), strict=False, description="The layers in which patches attend to all of their image all the same."
    )
    merge: Count = Field(
        default=1, description="Rows and columns of the blocks of patches that become one embedding, of one token."
    )
    projector: Literal["mlp", "average"] = Field(
        default="mlp",
        description="From a block's patches to an embedding. mlp: side by side into an MLP with GELU (exact) and"
        " biases; average: their mean, an RMSNorm and a matrix (Gemma 3).",
    )
    projector_ffn_hidden_size: Annotated[MlpWidth, ReadIf("projector", "mlp")] = derived(
        lambda vision: vision["merge"] ** 2 * vision["hidden_size"],
        "merge^2 * hidden_size",
        "Width of the projector's MLP.",
    )
    deepstack_layers: Annotated[
        tuple[CountOrZero, ...],
        Needs("projector", "mlp", what="MLPs of blocks of patches"),
        Excludes("remat.group", more_than_one, because="features are read and added after single layers"),
    ] = Field(
        default=(),
        strict=False,
        description="Layers of the tower whose output is projected too, in increasing order. The first is added to the"
        " residual stream after the model's first layer, at the images' tokens, the second after its second (DeepStack,"
        " Qwen3-VL).",
    )
    bidirectional: Annotated[bool, Excludes("model.prefix_lm", because="tokens see one kind of later ones")] = Field(
        default=False,
        description="In the model's layers a token of an image attends to all of its image (Gemma 3); false: to the"
        " tokens before it.",
    )

    @property
    def block(self) -> int:
        """Number of patches of an image embedding."""
        return self.merge**2

    @property
    def fixed_grid(self) -> int | None:
        """Rows and columns of all images, in patches; None: they differ, and patches have rotary positions."""
        return None if self.interpolate else self.grid

    @property
    def stream_parts(self) -> int:
        """Number of arrays of image embeddings: those of the tokens, and those of DeepStack."""
        return 1 + len(self.deepstack_layers)

    @property
    def entries_of_grid(self) -> int:
        """Number of rows of the table of positions; 0 without one."""
        return self.grid**2 + self.class_token if self.grid else 0

    @property
    def patch_dim(self) -> int:
        """Numbers of a patch: channels, frames, rows, columns."""
        return CHANNELS * self.temporal_patch_size * self.patch_size**2

    @property
    def embeddings_per_row(self) -> int:
        """Number of image embeddings of a sequence, padding included."""
        return self.patches_per_row // self.block
