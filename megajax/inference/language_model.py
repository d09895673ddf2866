"""A language model with its weights on devices: logits, scores and generation."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from megajax import ops
from megajax.config import AXES, Config
from megajax.data.chat_template import ChatTemplate, load_chat_template
from megajax.data.image_processing import find_processor
from megajax.data.images import Images, image_text
from megajax.data.pictures import PictureFiles
from megajax.data.special_tokens import framed
from megajax.errors import ConfigError, InputError, shown
from megajax.inference.comm import Decode, WholeSequences
from megajax.inference.weights import ModelWeights, Parameters, from_parameters
from megajax.kernel_choice import Hardware, Kernels
from megajax.layout.kinds import ENCODER, IMAGES, extra_layers, layer_kinds
from megajax.model import Transformer
from megajax.model.comm import TokenPositions
from megajax.model.cross_attention import END_OF_KEYS, FIRST_KEY
from megajax.model.encoder_layers import ENDS, STARTS, TOKENS, EncoderLayers, bias_stream
from megajax.model.sublayer import BlockInputs, LayerContext, State
from megajax.model.vision import INDEX, add_image_features
from megajax.options.registered import NO_ENCODER
from megajax.schema.model import LAYERS
from megajax.sources import NO_TEXT, TextSettings

ROPE = "rope_positions"  # a field of prompts with pictures


class LanguageModel:
    """A model's weights on a mesh, its programs, and its tokenizer.

    `model(tokens)` are logits; `inference.scoring` and `inference.generation` score and continue texts. Made by
    `megajax.from_hf` and `megajax.load_run`.
    """

    def __init__(
        self,
        config: Config,
        params: Parameters,
        state: Mapping[str, State],
        mesh: Mesh,
        text: TextSettings = NO_TEXT,
        *,
        speculate: int = 0,
    ):
        """`params` are canonical, in the compute dtype, and a dictionary is emptied.

        `speculate` is the number of tokens that generation drafts in each step, with the layers after the model's; 0:
        none.
        """
        assert extra_layers(config.model) or not speculate
        if config.model.encoder.kind not in (NO_ENCODER, LAYERS):
            problem = (
                f"model.encoder.kind={config.model.encoder.kind}: a model with an encoder can be trained and evaluated"
            )
            raise InputError(
                f"{problem} on batches, but it does not generate or score texts yet: use TrainProgram.eval_step."
            )
        self.config, self.mesh, self.tokenizer, self.speculate = config.model, mesh, text.tokenizer, speculate
        self.template_arguments = config.data.template_arguments
        self.max_length = config.batch.sequence_length
        self.stop_tokens, self.folder = text.stop_tokens, text.folder
        self.begin_token, self.end_token = text.begin_token, text.end_token
        self.model = Transformer(config.model)
        self.kernels = choose_kernels(config, Hardware.of(mesh))
        self.weights = from_parameters(self.model, params, state, mesh)

    def update(self, params: Parameters, state: Mapping[str, State]) -> None:
        """Replace the weights by others of the same model, also in the generators of this model."""
        del self.weights  # so that there is room for others
        self.weights = from_parameters(self.model, params, state, self.mesh)

    def __call__(self, tokens_bs: Any) -> jax.Array:
        """FP32 logits `[B, S, V]` of whole sequences of token ids `[B, S]`, without the vocabulary's padding.

        Raises InputError for ids that the model does not have and for sequences longer than `max_length`.
        """
        tokens = np.asarray(tokens_bs, np.int32)
        self.check_has_no_encoder("logits of tokens")
        self.check_has_no_prefix("logits of tokens")
        self.check_tokens(tokens)
        return self._logits(self.weights, tokens)

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """The tokens of a text, with `special_tokens` behind `begin_token`, unless the text has it already.

        Raises InputError if there is no tokenizer, or if the text has no tokens.
        """
        if self.tokenizer is None:
            raise InputError(f"{self.folder} has no tokenizer, so text cannot become tokens: add tokenizer.json.")
        try:
            text.encode()  # the library `tokenizers` has no error of its own for this
        except UnicodeEncodeError:
            raise InputError(f"the prompt {shown(repr(text))} is not UTF-8: write it in UTF-8.") from None
        end = self.end_token if self.config.of_encoder else None  # as the encoder's sequences in training
        tokens = framed(self.tokenizer.encode(text), self.begin_token if special_tokens else None, end)
        if not tokens:
            raise InputError(f"the prompt {shown(repr(text))} has no tokens: give at least one character.")
        return tokens

    @cached_property
    def images(self) -> Images:
        """What the model makes of pictures; InputError if it has no vision tower."""
        vision, folder = self.config.vision, self.folder
        if vision is None:
            raise InputError("the prompt has pictures, but the model reads text only: leave them out.")
        if self.tokenizer is None:
            raise InputError(f"{folder} has no tokenizer, so pictures have no tokens: add tokenizer.json.")
        text = image_text(self.tokenizer, str(folder), folder, vision.image_token)
        self._remote_pictures = TemporaryDirectory(prefix="megajax-pictures-")
        files = PictureFiles(Path(self._remote_pictures.name))
        return Images(vision, find_processor(folder, vision), text, self.config.rope_sections is not None, files)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The folder's chat template with the arguments of the training; InputError if there is none."""
        return load_chat_template(self.folder, arguments=self.template_arguments)

    @property
    def prefix_token(self) -> int | None:
        """The token before a text whose first token is predicted: the beginning of a text, else the end of one."""
        if self.begin_token is not None:
            return self.begin_token
        return self.stop_tokens[0] if self.stop_tokens else None

    def check_has_no_encoder(self, what: str) -> None:
        """Raises InputError if the model reads its prompts with an encoder, which `what` does not have."""
        if self.config.of_encoder is not None:
            raise InputError(f"{what} need a text before them, and this model has an encoder: generate from prompts.")

    def check_has_no_prefix(self, what: str) -> None:
        """Raises InputError if the tokens of a prefix attend to those after them, and `what` has no prefix."""
        if self.config.prefix_lm:
            problem = f"{what} would have no prefix, in which this model (model.prefix_lm=true) attends to both sides"
            raise InputError(f"{problem}: generate from prompts.")

    def check_is_causal(self, what: str) -> None:
        """Raises InputError, with `what` needs it, if a token attends to those after it too."""
        if not self.config.causal:
            raise InputError(f"{what} needs model.causal=true: each token of this model sees those after it too.")

    def check_tokens(self, tokens: np.ndarray) -> None:
        """Raises InputError for token ids `[B, S]` that the model does not have, and for too long sequences."""
        if tokens.ndim != 2 or tokens.size == 0:
            raise InputError(f"tokens has the shape {list(tokens.shape)}: give ids [batch, length], at least one.")
        if tokens.min() < 0 or tokens.max() >= self.config.vocab_size:
            wrong = next(int(t) for t in tokens.reshape(-1) if not 0 <= t < self.config.vocab_size)
            raise InputError(
                f"token {wrong} is not in the vocabulary: give ids from 0 to {self.config.vocab_size - 1}."
            )
        if tokens.shape[1] > self.max_length:
            raise InputError(
                f"a sequence has {tokens.shape[1]} tokens, but the model's context has {self.max_length}: shorten it."
            )

    @cached_property
    def _logits(self):
        def logits(weights: ModelWeights, tokens: jax.Array) -> jax.Array:
            return self.model.logits(weights.outer, self.whole_sequences(weights, tokens))

        return jax.jit(logits)

    def whole_sequences(
        self,
        weights: ModelWeights,
        tokens_bs: jax.Array,
        comm: WholeSequences | None = None,
        source: "Source | None" = None,
    ) -> jax.Array:
        """Token ids `[B, S]` → the model's output after its final norm `[B, S, D]`; to be traced."""
        comm = comm or WholeSequences(self.mesh, self.kernels, self.max_length)
        positions = jnp.broadcast_to(jnp.arange(tokens_bs.shape[1]), tokens_bs.shape)
        return self._run(weights, tokens_bs, positions, comm, source or Source())

    def encoded(self, weights: ModelWeights, tokens_bt: jax.Array, lengths_b: jax.Array) -> "Source":
        """What the encoder makes of prompts `[B, T]` of these lengths, padded at their ends; to be traced."""
        encoder = self.model.encoder
        assert isinstance(encoder, EncoderLayers)
        documents = ops.documents_of(jnp.where(jnp.arange(tokens_bt.shape[1]) < lengths_b[:, None], 0, -1))
        fields = {TOKENS: tokens_bt, STARTS: documents.starts, ENDS: documents.ends}
        stream = self.model.encode(encoder, weights.outer, fields, jnp.arange(len(tokens_bt)))
        return Source(lengths_b, stream)

    def new_tokens(
        self,
        weights: ModelWeights,
        tokens_bs: jax.Array,
        first_b: jax.Array,
        comm: Decode,
        source: "Source | None" = None,
    ) -> jax.Array:
        """Tokens from the positions `first_b` on → the model's output `[B, S, D]`; to be traced."""
        return self._run(weights, tokens_bs, positions_from(first_b, tokens_bs.shape[1]), comm, source or Source())

    def _run(self, weights: ModelWeights, tokens, positions, comm: WholeSequences, source: "Source") -> jax.Array:
        vision, ends, rope = self.config.vision, None, None
        streams, fields = bias_stream(weights.outer), dict(source.images or {})
        if source.lengths is not None:
            fields |= {FIRST_KEY: jnp.zeros_like(positions), END_OF_KEYS: jnp.zeros_like(positions)}
            fields[END_OF_KEYS] += source.lengths[:, None]
            streams |= {} if source.stream is None else {ENCODER: source.stream}
        if fields and self.model.vision is not None and vision is not None:
            streams[IMAGES] = self.model.embed_images(self.model.vision, weights.outer, fields, jnp.arange(len(tokens)))
            ends, rope = ops.two_sided_ends(fields[INDEX] >= 0) if vision.bidirectional else None, fields.get(ROPE)
        elif source.rope_shift is not None:
            rope = jnp.repeat((positions + source.rope_shift[:, None])[..., None], 3, axis=-1)
        if source.prefix is not None:
            ends = ops.two_sided_ends(positions < source.prefix[:, None])
        inputs = block_inputs(positions, comm.token_positions(positions, ends))
        inputs = replace(inputs, streams=streams, fields=fields, rope_positions=rope)
        x = self.model.embed(weights.outer, tokens.reshape(-1), positions.reshape(-1), inputs)
        x = comm.place(x, comm.token_spec(len(tokens)))
        for layer, kind in enumerate(layer_kinds(self.config)):
            layer_weights, state = weights.layers[layer], weights.state[layer]
            ctx = LayerContext(comm, inputs, layer, kind, state=state)
            x, _ = self.model.blocks[kind.block].apply(layer_weights, x, ctx)
            x = add_image_features(self.config, x, ctx)
        return self.model.output(weights.outer, x).reshape(*tokens.shape, -1)


class Source(NamedTuple):
    """What a model reads besides tokens.

    With an encoder, the prompts' `lengths` [B] and its `stream` [B · T, D], None for new tokens, whose layers kept what
    they need of it. With a vision tower, the fields of whole prompts' `images`, and of new tokens `rope_shift` [B], by
    which their rotary positions are before the others. With `model.prefix_lm` the lengths [B] of each `prefix`.
    """

    lengths: jax.Array | None = None
    stream: jax.Array | None = None
    images: Mapping[str, jax.Array] | None = None
    rope_shift: jax.Array | None = None
    prefix: jax.Array | None = None


def positions_from(first_b: jax.Array, count: int) -> jax.Array:
    """`count` consecutive positions of each sequence, `[B, count]`."""
    return first_b[:, None] + jnp.arange(count)


def block_inputs(positions_bs: jax.Array, token_positions: TokenPositions | None = None) -> BlockInputs:
    """The blocks' inputs for tokens at these positions."""
    token_ids = jnp.arange(positions_bs.size, dtype=jnp.uint32)
    return BlockInputs(positions_bs, token_positions or TokenPositions(positions_bs), token_ids, None)


def choose_kernels(config: Config, hardware: Hardware) -> Kernels:
    """The kernels of a model in use: attention and experts run on whole heads and experts, as without `tensor`.

    Warns if a GPU's kernel for experts cannot run, because the reference multiplies by the weights of all experts.
    """
    whole: dict[str, int] = dict.fromkeys(AXES, 1)
    try:
        return Kernels.choose(config, whole, hardware)
    except ConfigError as error:
        if config.model.num_experts is None or config.kernels.grouped_matmul == "reference":
            raise
        warnings.warn(f"experts run slowly here, by kernels.grouped_matmul=reference: {error}", stacklevel=3)
        kernels = config.kernels.model_copy(update={"grouped_matmul": "reference"})
        return Kernels.choose(config.model_copy(update={"kernels": kernels}), whole, hardware)
