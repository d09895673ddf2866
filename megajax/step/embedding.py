"""The embedding on the mesh: rows of a device's tokens, and the gradient of the table.

The table is stored in shards of its columns. Either it is gathered once per step and its gradient reduced once. Or
every device looks up its own columns for the tokens of all devices, and an all-to-all sends each device its rows;
gradients of rows return in the same way. With a large vocabulary and few tokens, rows are a fraction of the table's
bytes. This matters because nothing hides a transfer before the first layer or after the last.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from megajax import ops
from megajax.layout.kinds import IMAGES
from megajax.model.sublayer import BlockInputs, normalise, scale_embeddings
from megajax.model.vision import INDEX, place_images
from megajax.ops.barriers import not_repeated
from megajax.ops.numerics import add_rows
from megajax.parallel import collectives
from megajax.parallel.mesh_comm import MeshComm
from megajax.step.nodes import (
    HIDDEN,
    Arrays,
    Field,
    Microbatch,
    Results,
    StepArrays,
    Streams,
    Table,
    plus,
    plus_weights,
)
from megajax.step_plan import StepPlan
from megajax.weights.sums import after_microbatch, of_microbatch
from megajax.weights.weight import row_major

TOKENS, POSITIONS = "embedding.tokens", "embedding.positions"
NORMS = ("embedding.norm", "embedding.norm_bias")


class Embedding:
    """Token and position embeddings of a device's tokens, and their gradients."""

    NAME, PLACE = "embedding", "first"

    def __init__(self, plan: StepPlan, comm: MeshComm):
        self.plan, self.model, self.comm, self.axes = plan, plan.model, comm, plan.embedding_axes
        # Weights whose lookup and gradient accumulation use their shards.
        self.as_stored: tuple[str, ...] = (TOKENS,) if self.axes else ()

    @property
    def reads(self) -> tuple[str, ...]:
        """The streams that it reads: image embeddings."""
        return (IMAGES,) if self.model.vision else ()

    def fields(self) -> dict[str, Field]:
        vision = self.model.vision
        index = {INDEX: Field(jnp.int32, "model.vision", limit=vision.embeddings_per_row, least=-1)} if vision else {}
        return {"tokens": Field(jnp.int32)} | index

    def forward(self, arrays: StepArrays, streams: Streams, batch: Microbatch, save: bool) -> tuple[Streams, Any]:
        return {HIDDEN: self.embed(arrays.table, batch.fields, batch.inputs, streams.get(IMAGES))}, None

    def backward(
        self, arrays: StepArrays, saved: Any, gradients: Streams, batch: Microbatch, table: Table
    ) -> tuple[Streams, Table, Results]:
        dx = gradients[HIDDEN]
        table = self.add_gradients(table, arrays.table, batch.fields, batch.inputs, dx)
        if not self.reads:
            return {}, table, Results()
        of_layers = {name: gradients[name] for name in self.reads if name in gradients}  # DeepStack
        return plus(of_layers, self._image_gradients(batch, dx)), table, Results()

    @jax.named_scope("embedding")
    def embed(self, weights: Arrays, batch: Arrays, inputs: BlockInputs, images: jax.Array | None = None) -> jax.Array:
        """Tokens and positions `[B, S]` → residual stream `[T / tensor, D]`; `images` as in `place_images`."""
        x = self._norm({name: weights[name] for name in NORMS if name in weights}, self._rows(weights, batch, images))
        return self._dropout(x, inputs)

    @jax.named_scope("embedding")
    def _image_gradients(self, batch: Microbatch, dx: jax.Array) -> Streams:
        """The gradient of the stream of image embeddings from that of the residual stream."""
        (dx,), index = self._dropout_gradients(dx, batch.inputs), batch.fields[INDEX]
        assert self.model.vision is not None
        vision, width = self.model.vision, self.model.vision.stream_parts * dx.shape[1]
        each = vision.embeddings_per_row // self.comm.size("context")
        zeros = jnp.zeros((len(index) * each // self.comm.size("tensor"), width), dx.dtype)
        _, pull = jax.vjp(lambda images: place_images(dx, images, index, self.comm), zeros)  # linear: zeros will do
        return {IMAGES: pull(dx)[0]}

    def _dropout_gradients(self, dx: jax.Array, inputs: BlockInputs) -> tuple[jax.Array]:
        return jax.vjp(partial(self._dropout, inputs=inputs), dx)[1](dx)

    def _rows(self, weights: Arrays, batch: Arrays, images: jax.Array | None = None) -> jax.Array:
        """The sums of the rows of both tables, with image embeddings instead of tokens' rows."""
        table, width = weights[TOKENS], self.model.hidden_size
        rows, ours = self._vocabulary_rows(table, batch["tokens"])
        x = self.comm.reduce_scatter_tokens(jnp.where(ours, table[rows], 0).astype(self.plan.compute))
        if self.axes:  # own columns for all tokens → whole rows for own tokens, without padding
            x = collectives.all_to_all(x, self.axes, 1, 2, tiled=True)
            x = row_major(x.reshape(x.shape[0], -1)[:, :width])
        x = scale_embeddings(self.model, x)
        if images is not None:
            x = place_images(x, images, batch[INDEX], self.comm)
        if POSITIONS in weights:
            x = x + weights[POSITIONS][self.comm.local_tokens(batch["positions"].reshape(-1))]
        return x

    def _norm(self, norms: Arrays, x: jax.Array) -> jax.Array:
        return normalise(self.model, x, norms.get(NORMS[0]), norms.get(NORMS[1]))

    @jax.named_scope("embedding")
    def add_gradients(self, gradients: Arrays, weights: Arrays, batch: Arrays, inputs: BlockInputs, dx) -> Table:
        """`gradients` plus the embedding's, if they have it: a scatter-add into the accumulator, in place.

        Before a norm the rows are looked up again.
        """
        out = dict(gradients)
        if TOKENS not in out:
            return out
        (dx,) = self._dropout_gradients(dx, inputs)
        if norms := {name: weights[name] for name in NORMS if name in weights}:
            of_norms, dx = jax.vjp(self._norm, norms, self._rows(weights, batch))[1](dx)
            out = plus_weights(out, of_norms)
        updates = scale_embeddings(self.model, dx)
        if INDEX in batch:  # these tokens have image embeddings
            updates = jnp.where(self.comm.local_tokens(batch[INDEX].reshape(-1))[:, None] >= 0, 0, updates)
        if self.axes:
            shards = math.prod(self.comm.sizes[axis] for axis in self.axes)
            padded = jnp.pad(updates, ((0, 0), (0, shards * weights[TOKENS].shape[1] - dx.shape[1])))
            updates = collectives.all_to_all(padded[:, None], self.axes, 2, 1, tiled=True)
        updates = self.comm.all_gather_tokens(updates)
        rows, ours = self._vocabulary_rows(weights[TOKENS], batch["tokens"])
        totals = {name: out[name] for name in (TOKENS, POSITIONS) if name in weights}
        own = of_microbatch(totals)
        # Without the barrier XLA would scatter into the layout of the reduction.
        in_order, updates = self.plan.deterministic, jnp.where(ours, updates, 0).astype(jnp.float32)
        table = row_major(add_rows(own[TOKENS], rows, updates, in_order))
        own[TOKENS] = not_repeated(table)
        if POSITIONS in weights:
            positions = self.comm.local_tokens(batch["positions"].reshape(-1))
            own[POSITIONS] = add_rows(own[POSITIONS], positions, dx.astype(jnp.float32), in_order)
        return out | after_microbatch(totals, own)

    def _vocabulary_rows(self, table: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(the rows to look up in this device's part of the vocabulary, whether they are in it `[..., 1]`).

        `[T]`; with a lookup in shards `[T, devices]`, for the tokens of all devices of `axes`.
        """
        tokens = tokens.reshape(-1)
        if self.axes:
            tokens = collectives.all_gather(tokens[:, None], self.axes, axis=1, tiled=True)
        rows = tokens - self.comm.index("tensor") * table.shape[0]
        ours = (rows >= 0) & (rows < table.shape[0])
        return jnp.where(ours, rows, 0), ours[..., None]

    def _dropout(self, x: jax.Array, inputs: BlockInputs) -> jax.Array:
        if inputs.dropout_key is None:
            return x
        key = jax.random.fold_in(inputs.dropout_key, 0)
        return ops.dropout(x, self.model.dropout, key, inputs.token_ids)
