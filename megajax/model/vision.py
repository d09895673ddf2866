"""`model.vision`: a tower of layers over the patches of images, and the image embeddings among the tokens'."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from megajax import ops
from megajax.config import ModelConfig
from megajax.layout.kinds import IMAGES, deepstack_count
from megajax.model.comm import Comm
from megajax.model.parameters import declare
from megajax.model.second_layers import SecondLayers
from megajax.model.sublayer import BlockInputs, LayerContext, State, Weights, add_bias, declare_norm, normalise
from megajax.ops import PackedDocuments
from megajax.schema.vision import CHANNELS, VisionConfig
from megajax.sharding import VISION

# Batch fields `[rows, patches, ...]`: the numbers of each patch; the image that it belongs to, negative for padding at
# the end; its row and column, negative for a class entry. The patches of an image are consecutive, those of a window
# too, and those of a block. And `[rows, S]`: the image embedding of each token, negative for text
PATCHES, SEGMENTS, POSITIONS, INDEX = "patches", "patch_segments", "patch_positions", "image_index"
IMAGE_STARTS, IMAGE_ENDS = "image_starts", "image_ends"  # made of SEGMENTS once a step
WINDOW_STARTS, WINDOW_ENDS = "window_starts", "window_ends"
IMAGE_ROWS, IMAGE_COLUMNS = "image_rows", "image_columns"


class Projector(nnx.Module):
    """From the tower's output of a block of patches to an embedding of the model's width."""

    def __init__(self, vision: VisionConfig, width: int):
        D, block, F = vision.hidden_size, vision.block, vision.projector_ffn_hidden_size
        is_mlp = vision.projector == "mlp"
        self.norm = None if is_mlp else declare((D,), ("norm",), "norm", scale=0.0)  # zero-centred
        self.matrix = None if is_mlp else declare((D, width), ("embed", "whole"), muon=False)
        self.up = declare((block * D, F), ("embed", "mlp"), muon=False) if is_mlp else None
        self.up_bias = declare((F,), ("mlp",), "bias") if is_mlp else None
        self.down = declare((F, width), ("mlp", "embed"), muon=False) if is_mlp else None
        self.down_bias = declare((width,), ("residual",), "bias") if is_mlp else None
        self.deepstack = nnx.Dict({str(i): Features(vision, width) for i in range(len(vision.deepstack_layers))})


class Features(nnx.Module):
    """DeepStack: from the output of one of the tower's layers to an array that is added to the residual stream."""

    def __init__(self, vision: VisionConfig, width: int):
        D, F = vision.block * vision.hidden_size, vision.projector_ffn_hidden_size
        self.norm = declare((D,), ("norm",), "norm")
        self.norm_bias = declare((D,), ("norm",), "bias") if vision.norm == "layernorm" else None
        self.up = declare((D, F), ("embed", "mlp"), muon=False)
        self.up_bias = declare((F,), ("mlp",), "bias")
        self.down = declare((F, width), ("mlp", "embed"), muon=False)
        self.down_bias = declare((width,), ("residual",), "bias")


class VisionTower(SecondLayers):
    """Patches of images → image embeddings: an embedding of patches, layers with attention to both sides, a projector.

    Its stack is `model.of_vision`, a model of its own. A row of patches has several images, its documents.
    """

    NAME, PREFIX = IMAGES, VISION

    def __init__(self, config: ModelConfig):
        """`config` is that of the whole model."""
        vision, model = config.vision, config.of_vision
        assert vision is not None and model is not None
        super().__init__(model, vision.patches_per_row)
        self.vision, D = vision, vision.hidden_size
        shape = (CHANNELS, vision.temporal_patch_size, vision.patch_size, vision.patch_size, D)
        self.patch = declare(shape, ("whole",) * 4 + ("embed",), muon=False)
        self.patch_bias = declare((D,), ("residual",), "bias") if vision.patch_bias else None
        rows = vision.entries_of_grid
        self.positions = declare((rows, D), ("positions", "embed"), "embedding") if rows else None
        self.class_embedding = declare((D,), ("residual",), "embedding") if vision.class_token else None
        self.embedding_norm, self.embedding_norm_bias = declare_norm(model, vision.embedding_norm)
        self.final_norm, self.final_norm_bias = declare_norm(model, vision.final_norm)
        self.projector = Projector(vision, config.hidden_size)

    def inputs(self, fields: State, sequences: jax.Array, comm: Comm) -> BlockInputs:
        """The inputs of its layers, from this device's fields `[B, patches / context]` and those of `documents`."""
        images = PackedDocuments(fields[IMAGE_STARTS], fields[IMAGE_ENDS])
        positions, windows = self.positions_of(fields[SEGMENTS].shape, comm, images), None
        if WINDOW_STARTS in fields:
            documents = PackedDocuments(fields[WINDOW_STARTS], fields[WINDOW_ENDS])
            windows = self.positions_of(fields[SEGMENTS].shape, comm, documents)
        ids = self.token_ids_of(sequences, positions, comm)
        return BlockInputs(positions.index, positions, ids, None, rope_positions=fields[POSITIONS], windows=windows)

    def documents(self, segments: jax.Array, positions: jax.Array) -> dict[str, jax.Array]:
        """Fields of whole rows, SEGMENTS `[B, N]` and POSITIONS → the fields that `inputs` reads besides."""
        images = ops.documents_of(segments)
        found = {IMAGE_STARTS: images.starts, IMAGE_ENDS: images.ends}
        if self.vision.interpolate:
            size = jnp.where(segments[..., None] < 0, 0, positions) + 1
            row, number = jnp.arange(len(segments))[:, None], jnp.maximum(segments, 0)
            largest = jnp.ones((*segments.shape, 2), jnp.int32).at[row, number].max(size)[row, number]
            found |= {IMAGE_ROWS: largest[..., 0], IMAGE_COLUMNS: largest[..., 1]}
        if (size := self.vision.window) is not None:
            places = jnp.concatenate([segments[..., None], positions // size], axis=-1)
            changed = (places != jnp.roll(places, 1, axis=1)).any(-1)
            windows = ops.documents_of(jnp.cumsum(changed, axis=1, dtype=jnp.int32))
            found |= {WINDOW_STARTS: windows.starts, WINDOW_ENDS: windows.ends}
        return {name: a for name, a in found.items() if a is not None}

    @jax.named_scope("patches")
    def embed(self, w: Weights, fields: State, comm: Comm) -> jax.Array:
        """This device's patches `[B, patches / context, patch_dim]` → the tower's residual stream `[T / tensor, D]`."""
        patches, places = (comm.local_tokens(fields[n].reshape(-1, fields[n].shape[-1])) for n in (PATCHES, POSITIONS))
        matrix = w["patch"].reshape(-1, w["patch"].shape[-1])
        x = add_bias(patches.astype(matrix.dtype) @ matrix, w.get("patch_bias"))
        is_class = places[:, :1] < 0
        if "class_embedding" in w:
            x = jnp.where(is_class, w["class_embedding"], x)
        if (table := w.get("positions")) is not None:
            table = table.astype(jnp.float32)  # its gradient is a sum in FP32
            if self.vision.interpolate:
                sizes = (comm.local_tokens(fields[name].reshape(-1)) for name in (IMAGE_ROWS, IMAGE_COLUMNS))
                x = x + self._interpolated(table, places, *sizes).astype(x.dtype)
            else:
                grid, first = self.vision.grid or 0, int(self.vision.class_token)
                rows = jnp.where(is_class, 0, places[:, :1] * grid + places[:, 1:] + first)[:, 0]
                x = x + table[rows].astype(x.dtype)
        return normalise(self.config, x, w.get("embedding_norm"), w.get("embedding_norm_bias"))

    def _interpolated(self, table: jax.Array, places: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
        """The table `[grid², D]` stretched over images: at `places [T, 2]` of images of these sizes, `[T, D]`.

        Corner entries are those of the table, others are bilinear.
        """
        grid = self.vision.grid or 0
        taps = []
        for place, size in ((places[:, 0], rows), (places[:, 1], columns)):
            at = place.astype(jnp.float32) * (grid - 1) / jnp.maximum(size - 1, 1)
            first, share = jnp.floor(at).astype(jnp.int32), at - jnp.floor(at)
            taps.append([(first, 1 - share), (jnp.minimum(first + 1, grid - 1), share)])
        terms = [(u * v)[:, None] * table[r * grid + c] for r, u in taps[0] for c, v in taps[1]]
        return terms[0] + terms[1] + terms[2] + terms[3]

    @jax.named_scope("projector")
    def project(self, w: Weights, x: jax.Array, between: Sequence[jax.Array], comm: Comm) -> jax.Array:
        """The output of the last layer `[T / tensor, D]` → image embeddings `[T / block / tensor, model's D]`.

        `between` are the outputs of `deepstack_layers`; their features are beside the embeddings, `[..., parts · D]`.
        """
        parts = [self._embeddings(w, x, comm)]
        for i, output in enumerate(between):
            own, block = f"projector.deepstack.{i}.", output.reshape(-1, self.vision.block * output.shape[-1])
            block = normalise(self.config, block, w[f"{own}norm"], w.get(f"{own}norm_bias"))
            parts.append(_mlp(w, own, block, comm))
        return jnp.concatenate(parts, axis=1) if between else parts[0]

    def _embeddings(self, w: Weights, x: jax.Array, comm: Comm) -> jax.Array:
        x = normalise(self.config, x, w.get("final_norm"), w.get("final_norm_bias"))
        if (matrix := w.get("projector.matrix")) is not None:
            mean = x.reshape(-1, self.vision.block, x.shape[-1]).astype(jnp.float32).mean(1).astype(x.dtype)
            return ops.rms_norm(mean, w["projector.norm"], self.vision.norm_epsilon, True) @ matrix
        return _mlp(w, "projector.", x.reshape(-1, self.vision.block * x.shape[-1]), comm)


def _mlp(w: Weights, name: str, x: jax.Array, comm: Comm) -> jax.Array:
    up, bias, down, last = (w[f"{name}{own}"] for own in ("up", "up_bias", "down", "down_bias"))
    return comm.column_activation_row("gelu_exact", x, up, bias, down) + last


def with_document_fields(tower: VisionTower, fields: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Fields `[B, ...]` of whole rows, with those that the tower's layers read besides."""
    return {**fields, **tower.documents(fields[SEGMENTS], fields[POSITIONS])}


@jax.named_scope("image_embeddings")
def place_images(x: jax.Array, images: jax.Array, index: jax.Array, comm: Comm) -> jax.Array:
    """Tokens' embeddings `[T / tensor, D]` → the same with image embeddings at the tokens that stand for images.

    `images [T' / tensor, parts · D]` are those of all devices' rows, `index [B, S / context]` is INDEX.
    """
    is_image, rows = _at_tokens(images[:, : x.shape[1]], index, comm)
    return jnp.where(is_image, rows.astype(x.dtype), x)


@jax.named_scope("image_features")
def add_image_features(config: ModelConfig, x: jax.Array, ctx: LayerContext) -> jax.Array:
    """DeepStack: the residual stream `[T / tensor, D]` after a layer → the same with the layer's image features.

    `ctx.layer` may be traced, and may be a layer that has none.
    """
    count, images = deepstack_count(config), ctx.inputs.streams.get(IMAGES)
    if images is None or not count or (isinstance(ctx.layer, int) and ctx.layer >= count):
        return x
    width, has_some = x.shape[1], (ctx.layer >= 0) & (ctx.layer < count)
    own = lax.dynamic_slice_in_dim(images, (jnp.clip(ctx.layer, 0, count - 1) + 1) * width, width, axis=1)
    is_image, rows = _at_tokens(own, ctx.inputs.fields[INDEX], ctx.comm)
    return x + jnp.where(is_image & has_some, rows.astype(x.dtype), 0)


def _at_tokens(images: jax.Array, index: jax.Array, comm: Comm) -> tuple[jax.Array, jax.Array]:
    """(whether each token is an image's `[T / tensor, 1]`, its row of `images`, any row if not)."""
    B, width = len(index), images.shape[-1]
    rows = comm.gather(comm.all_gather_tokens(images).reshape(B, -1, width), "context", dim=1)
    own = comm.local_tokens((jnp.arange(B)[:, None] * rows.shape[1] + jnp.maximum(index, 0)).reshape(-1))
    return comm.local_tokens(index.reshape(-1))[:, None] >= 0, rows.reshape(-1, width)[own]
