"""One Transformer: embedding → stack of blocks → norm → head.

The config section `model` selects GPT-2/GPT-3 (learned positions, LayerNorm, GELU, biases, tied embeddings), the Llama
family (RoPE, RMSNorm, SwiGLU, grouped-query attention) and their options. Each module takes shapes from its weights, so
the same code runs on a whole model and on one device's share of heads and MLP width.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from megajax import ops
from megajax.config import LoraConfig, ModelConfig
from megajax.layout.kinds import kind_of_layer, stacked_layers
from megajax.model.block import blocks_of
from megajax.model.comm import Comm, TokenPositions
from megajax.model.encoder import Encoder, make_encoder
from megajax.model.encoder_layers import TOKENS, EncoderLayers, bias_stream, with_document_fields
from megajax.model.lora import add_adapters
from megajax.model.parameters import check_declared, declare, parameters, stack
from megajax.model.second_layers import SecondLayers
from megajax.model.sublayer import (
    BlockInputs,
    LayerContext,
    Metrics,
    State,
    Weights,
    add_bias,
    declare_norm,
    declare_relative_bias,
    normalise,
    predict,
    scale_embeddings,
    scale_head,
)
from megajax.model.vision import INDEX, VisionTower, add_image_features, place_images
from megajax.model.vision import with_document_fields as with_images
from megajax.model.width import std_factor
from megajax.options.registered import OBJECTIVES, replaces_head
from megajax.schema.fields import cached
from megajax.schema.model import LAYERS
from megajax.schema.objective import ObjectiveConfig
from megajax.sharding import ENCODER, VISION, below


@cached
def declared_model(
    config: ModelConfig, lora: LoraConfig, rows: str = "layers", objective: ObjectiveConfig | None = None
) -> "Transformer":
    """The `Transformer` of these arguments; it has no arrays, so that one object serves all."""
    return Transformer(config, lora, rows, objective)


class EmbeddingTables(nnx.Module):
    """Token embedding `[V, D]`; for learned positions position embedding `[max_positions, D]`; perhaps a norm."""

    def __init__(self, config: ModelConfig):
        V, D = config.padded_vocab_size, config.hidden_size
        self.tokens = declare((V, D), ("vocab", "embed"), "embedding")
        length = config.max_positions or 0  # the config always sets it for learned positions
        learned = config.position == "learned"
        self.positions = declare((length, D), ("positions", "embed"), "embedding") if learned else None
        self.norm, self.norm_bias = declare_norm(config, config.embedding_norm)


class Transformer(nnx.Module):
    """The whole model: its parameters, and its logits on one device.

    Training runs the layers after the model's too (`layout.extra_layers`), and generation for its drafts.
    """

    def __init__(
        self,
        config: ModelConfig,
        lora: LoraConfig | None = None,
        rows: str = "layers",
        objective: ObjectiveConfig | None = None,
    ):
        """`lora` adds adapters; they have no effect on `__call__`.

        `rows` is the logical axis of the layers; "modules": all stages of a pipeline have all of them. An `objective`
        may have parameters in place of the head; such a model has no logits.
        """
        V, D = config.padded_vocab_size, config.hidden_size
        self.config, lora = config, lora or LoraConfig()
        self.embedding = EmbeddingTables(config)
        blocks = {kind: add_adapters(block, lora) for kind, block in blocks_of(config).items()}
        layers = stacked_layers(config)
        self.blocks = nnx.Dict({kind: stack(block, layers[kind], block.ROWS or rows) for kind, block in blocks.items()})
        self.encoder: Encoder | EncoderLayers | None = (
            EncoderLayers(config) if config.encoder.kind == LAYERS else make_encoder(config)
        )
        self.vision = None if config.vision is None else VisionTower(config)
        self.relative_bias = declare_relative_bias(config)
        self.final_norm, self.final_norm_bias = declare_norm(config)
        self.objective = _objective_parameters(config, objective)
        has_head = not config.tie_embeddings and self.objective is None
        self.head = declare((D, V), ("embed", "vocab"), muon=False) if has_head else None
        has_logits, predicts = self.objective is None, config.prediction_head and self.objective is None
        self.head_bias = declare((V,), ("vocab",), "bias") if config.head_bias and has_logits else None
        self.head_dense = declare((D, D), ("embed", "whole"), muon=False) if predicts else None
        self.head_norm, self.head_norm_bias = declare_norm(config, predicts)
        for parameter in parameters(self).values():
            parameter.set_metadata(scale=parameter.scale * std_factor(config, parameter))

    def __call__(
        self, tokens_bs: jax.Array, state: Mapping[str, State] | None = None, fields: State | None = None
    ) -> jax.Array:
        """FP32 logits `[B, S, V]` of whole sequences on one device, without the vocabulary's padding.

        `state` is the trained state of the layers, by kind of block and name, `[L, ...]`; `fields` are those that the
        encoder or the vision tower reads.
        """
        B, S = tokens_bs.shape
        weights = {name: p[...] for name, p in parameters(self).items()}
        positions = jnp.broadcast_to(jnp.arange(S), (B, S))
        inputs = BlockInputs(positions, TokenPositions(positions), jnp.arange(B * S, dtype=jnp.uint32), None)
        inputs = self.with_stream(weights, inputs, fields or {})
        x = self.embed(weights, tokens_bs.reshape(-1), positions.reshape(-1), inputs)
        for layer in range(self.config.num_layers):
            x, _ = self.layer(weights, layer, x, inputs, state or {})
        return self.logits(weights, self.output(weights, x)).reshape(B, S, -1)

    def with_stream(self, weights: Weights, inputs: BlockInputs, fields: State) -> BlockInputs:
        """The inputs of layers on one device with the other streams, and what else layers read of `fields`.

        Streams are an encoder's or a vision tower's, and the bias of the scores.
        """
        streams = bias_stream(weights)
        sequences = inputs.token_ids[:: inputs.positions.shape[1]] // inputs.positions.shape[1]
        if isinstance(self.encoder, EncoderLayers):
            fields = with_document_fields(fields, fields.get("segment_ids"))
            streams[self.encoder.NAME] = self.encode(self.encoder, weights, fields, sequences, inputs.dropout_key)
        elif self.encoder is not None:
            streams[self.encoder.NAME] = self.encoder.apply(below(weights, ENCODER), fields, Comm())
        if self.vision is not None and INDEX in fields:
            streams[self.vision.NAME] = self.embed_images(self.vision, weights, fields, sequences)
        if (flags := two_sided_tokens(self.config, fields)) is not None:
            tokens = replace(inputs.token_positions, two_sided_ends=ops.two_sided_ends(flags))
            inputs = replace(inputs, token_positions=tokens)
        inputs = replace(inputs, rope_positions=fields.get("rope_positions"))
        return replace(inputs, streams=streams, fields=fields) if streams else inputs

    def encode(
        self,
        encoder: EncoderLayers,
        weights: Weights,
        fields: State,
        sequences: jax.Array,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """The stream of an encoder of layers, on one device: fields `[B, length]` → `[B · length, D]`."""
        inputs = encoder.inputs(fields, sequences, Comm(), dropout_key, bias_stream(weights, ENCODER))
        x = self.embed_tokens(weights, fields[TOKENS].reshape(-1))
        if inputs.dropout_key is not None:
            x = ops.dropout(x, self.config.dropout, jax.random.fold_in(inputs.dropout_key, 0), inputs.token_ids)
        own = below(weights, ENCODER)
        x, _ = _through(encoder, own, x, inputs)
        return normalise(encoder.config, x, own["final_norm"], own.get("final_norm_bias"))

    def embed_images(self, tower: VisionTower, weights: Weights, fields: State, sequences: jax.Array) -> jax.Array:
        """The image embeddings of a vision tower, on one device: fields `[B, patches, ...]` → `[embeddings, D]`."""
        own, fields = below(weights, VISION), with_images(tower, fields)
        inputs = tower.inputs(fields, sequences, Comm())
        x, outputs = _through(tower, own, tower.embed(own, fields, Comm()), inputs)
        return tower.project(own, x, [outputs[layer] for layer in tower.vision.deepstack_layers], Comm())

    def layer(
        self, weights: Weights, layer: int, x: jax.Array, inputs: BlockInputs, states: Mapping[str, State]
    ) -> tuple[jax.Array, Metrics]:
        """Layer number `layer` on one device: `x [T, D]` → (x, metrics).

        Layers after the model's continue its numbers; theirs is `x [T, 2D]`. `states` are as `state` above.
        """
        x, metrics = apply_layer(self.config, self.blocks, weights, layer, x, inputs, states)
        kind = kind_of_layer(self.config, layer)
        return add_image_features(self.config, x, LayerContext(Comm(), inputs, layer, kind)), metrics

    def embed(
        self, weights: Weights, tokens: jax.Array, positions: jax.Array, inputs: BlockInputs | None = None
    ) -> jax.Array:
        """Token ids and their positions `[T]` → the residual stream `[T, D]`; `weights` by canonical name.

        `inputs` may have a stream of image embeddings, which are placed at the tokens that stand for images.
        """
        x = self.embed_tokens(weights, tokens)
        if inputs is not None and (images := inputs.streams.get(VisionTower.NAME)) is not None:
            x = place_images(x, images, inputs.fields[INDEX], Comm())
        x = x if self.embedding.positions is None else x + weights["embedding.positions"][positions]
        return normalise(self.config, x, weights.get("embedding.norm"), weights.get("embedding.norm_bias"))

    def embed_tokens(self, weights: Weights, tokens: jax.Array) -> jax.Array:
        """Token ids `[T]` → their rows of the scaled token table `[T, D]`, without positions and norm."""
        return scale_embeddings(self.config, weights["embedding.tokens"][tokens])

    def output(self, weights: Weights, x: jax.Array) -> jax.Array:
        """The residual stream after the blocks `[T, D]` → the model's output, after the final norm."""
        h = normalise(self.config, x, weights["final_norm"], weights.get("final_norm_bias"))
        return scale_head(self.config, h)

    def logits(self, weights: Weights, h: jax.Array) -> jax.Array:
        """`output`, also of a layer after it, `[..., D]` → FP32 logits `[..., V]`, without the vocabulary's padding."""
        c = self.config
        assert self.objective is None
        head = weights["embedding.tokens"].T if self.head is None else weights["head"]
        logits = jnp.dot(predict(c, weights, h), head, preferred_element_type=jnp.float32)
        logits = add_bias(logits, weights.get("head_bias"))[..., : c.vocab_size]
        return logits if c.logit_softcap is None else c.logit_softcap * jnp.tanh(logits / c.logit_softcap)


def two_sided_tokens(config: ModelConfig, fields: State) -> jax.Array | None:
    """Whether each token attends to all consecutive such tokens around it `[..., S]`: an image's, a prefix's.

    None: no token does.
    """
    if config.prefix_lm:
        return fields.get("is_prefix")
    is_of_images = config.vision is not None and config.vision.bidirectional and INDEX in fields
    return fields[INDEX] >= 0 if is_of_images else None


def _through(
    second: SecondLayers, weights: Weights, x: jax.Array, inputs: BlockInputs
) -> tuple[jax.Array, list[jax.Array]]:
    """(the residual stream after all layers of a second stack, after each one), on one device."""
    outputs = []
    for layer in range(second.config.num_layers):
        x, _ = apply_layer(second.config, second.blocks, weights, layer, x, inputs, {})
        outputs.append(x)
    return x, outputs


def apply_layer(
    config: ModelConfig,
    blocks: Mapping[str, Any],
    weights: Weights,
    layer: int,
    x: jax.Array,
    inputs: BlockInputs,
    states: Mapping[str, State],
) -> tuple[jax.Array, Metrics]:
    """A layer of a stack on one device, from the weights and states of all of them."""
    kind = kind_of_layer(config, layer)
    row = stacked_layers(config)[kind.block].index(layer)
    layer_weights = {name: w[row] for name, w in below(weights, f"blocks.{kind.block}.").items()}
    state = {name: a[row] for name, a in states.get(kind.block, {}).items()}
    block = blocks[kind.block]
    return block.apply(block.fuse(layer_weights), x, LayerContext(Comm(), inputs, layer, kind, state=state))


def _objective_parameters(config: ModelConfig, objective: ObjectiveConfig | None) -> nnx.Dict | None:
    """The parameters that an objective has in place of the head; None if it reads the head's logits."""
    if objective is None or not replaces_head(objective.kind):
        return None
    registered = OBJECTIVES[objective.kind]
    own = nnx.Dict(registered.parameters(config, registered.Settings.model_validate(dict(objective.settings))))
    check_declared(own, f"{registered.__name__}.parameters")
    return own
