"""The keys of the section `model`: the network's shapes and options."""

from typing import Annotated, Any, Literal

from pydantic import Field

from megajax.options.activations import ACTIVATIONS
from megajax.options.context import STRATEGIES
from megajax.options.optimizers import OPTIMIZERS
from megajax.options.registered import MASKED_TOKENS, NEXT_TOKEN, NO_ENCODER, OWN_OBJECTIVES, replaces_head
from megajax.options.registry import AUTO
from megajax.schema.fields import (
    BelowOne,
    BlockPattern,
    Count,
    CountOrZero,
    Experts,
    LayerPattern,
    Layers,
    MlpWidth,
    MlpWidthOrZero,
    Positive,
    PositiveOrZero,
    Registered,
    RopePattern,
    Section,
    SettingsByName,
    Text,
    Tokens,
    Vocabulary,
    Width,
    cached,
    derived,
)
from megajax.schema.layer_sections import (
    KdaConfig,
    LinearAttentionConfig,
    Mamba2Config,
    MultipliersConfig,
    RopeScaling,
    RouterConfig,
)
from megajax.schema.rules import TRAINING_ONLY, AtMost, Excludes, Needs, ReadIf
from megajax.schema.vision import VisionConfig

EXPERTS = Needs("model.num_experts", what="experts")
WITHOUT_LATENTS = "attention_sinks", "attention_bias", "attention_gate"
LATENT_WIDTHS = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}  # DeepSeek's


def _without_bias(strategy: str) -> bool:
    return strategy != AUTO and not STRATEGIES[strategy].takes_bias


def _has_local(pattern: tuple[str, ...] | None) -> bool:
    return "local" in (pattern or ["local"])


RELATIVE, NO_BIAS = "relative", "its attention has no bias of the scores"
WITHOUT_ENCODER = Excludes("model.encoder.kind", "layers", because="an encoder with a decoder has no such part")
BEFORE_OR_AFTER_LAYERS = ("embedding_norm", "prediction_head", "head_bias")
OF_CROSS_ENTROPY = f"objective.kind={' or '.join(OWN_OBJECTIVES)}"
ROTARY, IN_LOCAL_LAYERS = ReadIf("position", "rope"), ReadIf("layer_pattern", _has_local)


def _head_dim(model: dict[str, Any]) -> int:
    if model["kv_lora_rank"]:
        return (model["qk_nope_head_dim"] or 0) + (model["qk_rope_head_dim"] or 0)
    return model["hidden_size"] // model["num_heads"]


LAYERS = "layers"  # the encoder of `encoder.kind` that is layers like the model's


class EncoderConfig(Registered):
    """The encoder, whose stream the layers can read beside their own."""

    kind: Annotated[
        Text,
        Needs("num_layers", of=LAYERS),
        Needs("sequence_length", of=LAYERS),
        Excludes("model.num_experts", of=LAYERS, because="its layers have none"),
        Excludes("model.kv_lora_rank", of=LAYERS, because="cross-attention has keys and values of its own"),
        Excludes("model.position", "learned", of=LAYERS, because="the table has the decoder's positions only"),
        Excludes("model.causal", False, of=LAYERS, because="its decoder is causal"),
        Excludes("model.qk_clip", of=LAYERS, because="its layers have no such metric"),
        Excludes("lora.rank", of=LAYERS, because="its layers have no adapters"),
        Excludes("precision.fp8.recipe", of=LAYERS, because="its layers are not quantised"),
        Excludes("teacher.model", of=LAYERS, because="a teacher reads tokens only"),
        Excludes("optimizer.layer_decay", of=LAYERS, because="its layers have no distance from the output"),
    ] = Field(
        default="none",
        description="none; layers: layers like the model's, with attention to both sides, as in T5; or the name of a"
        " registered encoder.",
    )
    num_layers: Annotated[Layers | None, ReadIf("kind", LAYERS)] = Field(
        default=None, description="layers: their number."
    )
    sequence_length: Annotated[Tokens | None, ReadIf("kind", LAYERS)] = Field(
        default=None, description="layers: number of tokens of each of its sequences."
    )
    settings: Annotated[
        dict[str, Any], Needs("kind", lambda kind: kind not in (NO_ENCODER, LAYERS), what="a registered encoder")
    ] = Field(default={}, description="Settings of a registered encoder, by name.")


class ModelConfig(Section):
    """The network: shapes and options, independent of mesh and kernels."""

    num_layers: Layers = Field(description="Number of blocks (attention and MLP).")
    hidden_size: Width = Field(description="Width of the residual stream.")
    num_heads: Width = Field(description="Number of query heads.")
    num_kv_heads: Width = derived(
        lambda model: model["num_heads"],
        "num_heads",
        "Number of key/value heads; fewer than num_heads is GQA.",
    )
    kv_lora_rank: Annotated[
        Width | None,
        *(Needs(key, cure=f"set model.{key}={n}, as DeepSeek has") for key, n in LATENT_WIDTHS.items()),
        Excludes("position", "learned", cure="use rope, or none as in Kimi Linear"),
        Excludes("rope_fraction", cure="remove model.rope_fraction: all of model.qk_rope_head_dim is rotated"),
        Excludes("qk_norm", because="the latents are normalised", cure="remove model.qk_norm"),
        *(Excludes(key, cure=f"remove model.{key}") for key in WITHOUT_LATENTS),
    ] = Field(
        default=None,
        description="Width of the latent from which keys and values are computed (multi-head latent attention,"
        " DeepSeek-V2); null: keys and values are computed from the residual stream.",
    )
    q_lora_rank: Annotated[Width | None, ReadIf("kv_lora_rank")] = Field(
        default=None, description="Latent attention: width of the queries' latent; null: queries have none."
    )
    qk_nope_head_dim: Annotated[Width | None, ReadIf("kv_lora_rank")] = Field(
        default=None, description="Latent attention: width of a query's and a key's part without positions."
    )
    qk_rope_head_dim: Annotated[Width | None, ReadIf("kv_lora_rank")] = Field(
        default=None, description="Latent attention: width of the rotated part; all heads share that of the keys."
    )
    v_head_dim: Annotated[Width | None, ReadIf("kv_lora_rank")] = Field(
        default=None, description="Latent attention: width of a value."
    )
    head_dim: Width = derived(
        _head_dim,
        "hidden_size / num_heads, or qk_nope_head_dim + qk_rope_head_dim",
        "Width of a query and a key.",
    )
    ffn_hidden_size: MlpWidth = derived(lambda model: 4 * model["hidden_size"], "4 * hidden_size", "Width of the MLP.")
    vocab_size: Vocabulary = Field(description="Number of tokens in the vocabulary.")
    vocab_multiple: Vocabulary = Field(default=128, description="Pad the vocabulary to a multiple of this number.")
    max_positions: Annotated[Tokens | None, ReadIf("position", "learned")] = Field(
        default=None,
        description="Rows of the table of learned positions.",
        json_schema_extra={"derived": "batch.sequence_length if position is learned"},
    )
    norm: Literal["rmsnorm", "layernorm"] = Field(default="rmsnorm", description="Kind of normalisation.")
    norm_bias: Annotated[bool, ReadIf("norm", "layernorm")] = Field(
        default=True, description="LayerNorms have a bias; RMSNorm has none."
    )
    norm_placement: Literal["before", "after", "both"] = Field(
        default="before",
        description="Norms of the attention and MLP parts: before them, after them (of their output, before it is added"
        " to the residual stream), or both.",
    )
    norm_zero_centred: bool = Field(
        default=False, description="Norms multiply by 1 + weight, and these weights start at 0."
    )
    norm_epsilon: Positive = Field(default=1e-5, description="Added to the variance in normalisations.")
    activation: Annotated[str, ACTIVATIONS] = Field(
        default="swiglu",
        description="MLP activation. swiglu, geglu, geglu_exact, clamped_swiglu (GPT-OSS): gated, three matrices;"
        " gelu, gelu_exact, quick_gelu (x * sigmoid(1.702 x)), relu, relu2 (squared ReLU): two matrices. gelu and"
        " geglu have GELU's tanh approximation.",
    )
    position: Annotated[
        Literal["rope", "learned", "relative", "none"],
        Excludes("kv_lora_rank", of=RELATIVE, because=NO_BIAS),
        Excludes("attention_sinks", of=RELATIVE, because=NO_BIAS),
        Excludes("attention_softcap", of=RELATIVE, because=NO_BIAS),
        Excludes("qk_clip", of=RELATIVE, because=NO_BIAS),
        Excludes("communication.context", _without_bias, of=RELATIVE, cure="use all_to_all or all_gather"),
        Excludes("kernels.attention", ("pallas", "triton"), of=RELATIVE, cure="use kernels.attention=auto"),
    ] = Field(
        default="rope",
        description="Position encoding: rotary, a learned table, a learned bias of attention's scores by distance (T5),"
        " or none.",
    )
    relative_buckets: Annotated[int, Field(ge=4, le=4096, multiple_of=4), ReadIf("position", RELATIVE)] = Field(
        default=32, description="relative: number of intervals of distances, each with a bias for each head."
    )
    relative_max_distance: Annotated[Count, ReadIf("position", RELATIVE)] = Field(
        default=128, description="relative: distance from which on all have the same bias."
    )
    rope_theta: Annotated[Positive, ROTARY] = Field(default=10000.0, description="Base of the rotary wavelengths.")
    rope_scaling: Annotated[RopeScaling | None, ROTARY] = Field(
        default=None, description="Scaling of the rotary frequencies."
    )
    rope_fraction: Annotated[float, Field(gt=0, le=1), ROTARY] = Field(
        default=1.0, description="Fraction of each head that is rotated."
    )
    rope_sections: Annotated[Annotated[tuple[Count, Count, Count], Field(strict=False)] | None, ROTARY] = Field(
        default=None,
        description="Numbers of rotated pairs that turn with a token's time, with its row and with its column, in this"
        " order (M-RoPE, Qwen2.5-VL); null: all turn with its position.",
    )
    rope_interleaved: Annotated[bool, ROTARY, Needs("rope_sections", what="positions of images")] = Field(
        default=False,
        description="The pairs of rope_sections take turns, time, row, column, as long as there are some of row and of"
        " column; the others are of time (Qwen3-VL).",
    )
    rope_local_theta: Annotated[Positive | None, ROTARY, IN_LOCAL_LAYERS, ReadIf("sliding_window")] = Field(
        default=None,
        description="Base of the rotary wavelengths in local layers, without rope_scaling; null: as in global layers.",
    )
    rope_pattern: Annotated[RopePattern, ROTARY] = Field(
        default=None,
        description="Whether layers have rotary positions (rope) or none, repeated over the depth; null: all have.",
    )
    qk_norm: bool | Literal["all_heads", "layernorm"] = Field(
        default=False,
        description="Normalise queries and keys. true: each head, by RMSNorm; all_heads: all heads of a token"
        " together, by RMSNorm; layernorm: each head, by LayerNorm with a bias.",
    )
    attention_scale: Positive | None = Field(
        default=None, description="Factor of the attention scores; null: 1 / sqrt(head_dim)."
    )
    attention_bias: bool | Literal["qkv"] = Field(
        default=False,
        description="Biases in the attention projections. true: all four; qkv: queries, keys and values.",
    )
    mlp_bias: Annotated[bool, Excludes("shared_expert_ffn_hidden_size", cure="set model.mlp_bias=false")] = Field(
        default=False, description="Biases in the projections of MLPs and experts."
    )
    logit_softcap: Positive | None = Field(
        default=None, description="Limit the output logits to ±this value with tanh."
    )
    attention_softcap: Positive | None = Field(
        default=None, description="Limit the attention scores to ±this value with tanh."
    )
    mup_base_width: Annotated[
        Count | None,
        Excludes("tie_embeddings", because="µP scales embeddings and head in different ways"),
        Excludes(
            "optimizer.kind",
            lambda kind: not OPTIMIZERS[kind].scales_with_width,
            because="the rates are those of AdamW, AdEMAMix, Lion and Muon",
        ),
        Excludes("lora.rank", because="the rates are those of training all weights"),
        TRAINING_ONLY,
    ] = Field(
        default=None,
        description="Hidden size at which init_std and the learning rate were tuned; µP (Yang et al. 2022) scales both"
        " to hidden_size; null: no scaling.",
    )
    qk_clip: Annotated[
        Positive | None,
        Excludes("qk_norm", because="normalised queries and keys undo it, and bound the scores themselves"),
        Excludes("attention_softcap", because="the soft-cap bounds the scores itself"),
        Excludes("lora.rank", because="the weights of queries and keys are frozen"),
        TRAINING_ONLY,
    ] = Field(
        default=None,
        description="QK-clip (Kimi K2): after each update, rescale the query and key weights of heads whose largest"
        " attention score in the step was above this threshold; Kimi K2 has 100. Also logs max_attention_score.",
    )
    attention_gate: bool = Field(
        default=False,
        description="Multiply attention's output by a learned sigmoid of the layer's input, each number by its own.",
    )
    attention_sinks: bool = Field(
        default=False,
        description="One learned logit per head in the softmax denominator (attention sink); it starts at 0.",
    )
    causal: Annotated[
        bool,
        Excludes(
            "objective.kind",
            NEXT_TOKEN,
            of=False,
            because="a token would see the next one",
            cure="set objective.kind=masked_tokens",
        ),
    ] = Field(
        default=True,
        description="A token attends to the tokens before it only; false: also to those after it, as in encoders.",
    )
    prefix_lm: Annotated[
        bool,
        Excludes("causal", False, because="a token then sees all others anyway"),
        Excludes("sliding_window", because="a prefix is seen whole"),
        Excludes("position", RELATIVE, because="its biases are those of tokens before"),
        Excludes("model.encoder.kind", because="the encoder is for what comes first"),
        Excludes("teacher.model", because="a teacher has no prefix"),
    ] = Field(
        default=False,
        description="The tokens of a prefix attend to all of it, and the loss does not count them (prefix-LM): of a"
        " chat those before the first answer, of other data as many as a random number says.",
    )
    sliding_window: Annotated[Count | None, IN_LOCAL_LAYERS] = Field(
        default=None,
        description="Number of tokens that a local layer attends to, the query's own token included; with causal=false"
        " on each side.",
    )
    layer_pattern: Annotated[
        LayerPattern,
        Needs(
            "sliding_window",
            of=lambda pattern: "local" in (pattern or ()),
            what="a window for its local layers",
            cure="set model.sliding_window",
        ),
    ] = Field(
        default=None,
        description="Kinds of attention layers, repeated over the depth; null: all local if sliding_window is set.",
    )
    sublayer_settings: SettingsByName = Field(
        default={},
        validate_default=True,
        description="Settings of registered sublayers, by the sublayer's name in its block.",
    )
    block_pattern: Annotated[BlockPattern, Excludes("first_dense_layers"), Excludes("moe_layer_interval")] = Field(
        default=None,
        description="Kinds of blocks, repeated over the depth; null: dense, or by num_experts, first_dense_layers and"
        " moe_layer_interval.",
    )
    tie_embeddings: bool = Field(default=False, description="Use the embedding table, transposed, as the output head.")
    scale_head: bool = Field(
        default=False, description="Divide the head's input by sqrt(hidden_size), as T5 does with a tied head."
    )
    head_bias: Annotated[bool, WITHOUT_ENCODER] = Field(default=False, description="A bias of the output logits.")
    prediction_head: Annotated[bool, WITHOUT_ENCODER] = Field(
        default=False,
        description="Before the output logits, after the final norm: a matrix, GELU and another norm, as in BERT.",
    )
    embedding_norm: Annotated[
        bool,
        WITHOUT_ENCODER,
        Excludes("block_pattern", because="the first layer has a kind of its own"),
        Excludes("num_experts", because="the first layer has an MLP"),
    ] = Field(
        default=False,
        description="Normalise the embeddings; attention in the first layer, which reads them, then has no norm before"
        " it (ModernBERT).",
    )
    scale_embeddings: bool = Field(
        default=False, description="Multiply the token embeddings by sqrt(hidden_size), but not a tied head."
    )
    dropout: Annotated[BelowOne, TRAINING_ONLY] = Field(
        default=0.0, description="Dropout rate after the embedding and in both residual branches."
    )
    init_std: Annotated[Positive, TRAINING_ONLY] = Field(
        default=0.02, description="Standard deviation of the initial weights."
    )
    depth_scaled_init: Annotated[bool, TRAINING_ONLY] = Field(
        default=True,
        description="Divide init_std by sqrt(2 * num_layers) for projections into the residual stream.",
    )
    z_loss: Annotated[PositiveOrZero, Needs("objective.kind", OWN_OBJECTIVES, what=OF_CROSS_ENTROPY), TRAINING_ONLY] = (
        Field(default=0.0, description="Weight of the squared log-sum-exp of the output logits.")
    )
    mtp_layers: Annotated[
        CountOrZero,
        Excludes("objective.kind", replaces_head, because="it has parameters in place of the head"),
        Excludes("objective.kind", MASKED_TOKENS, because="the modules predict the tokens that follow"),
        *(Excludes(key, because="the modules have parts of their own") for key in BEFORE_OR_AFTER_LAYERS),
        Excludes("scale_head", because="the modules' heads are not scaled"),
        Excludes("position", RELATIVE, because="the modules read no bias of the scores"),
        Excludes("prefix_lm", because="the modules would predict tokens that a prefix shows"),
        Excludes("model.encoder.kind", LAYERS, because="the modules do not read its stream"),
        Excludes("vision", because="the modules read tokens only"),
        Excludes(
            "lora.rank",
            because="adapters are of the model's layers only",
            cure="set model.mtp_layers=0; the base may have modules",
        ),
        Excludes("causal", False, because="a module's target would be in sight", cure="set model.mtp_layers=0"),
    ] = Field(
        default=0, description="Number of multi-token prediction modules; module k predicts the token k + 1 ahead."
    )
    mtp_loss_weight: Annotated[Positive, ReadIf("mtp_layers"), TRAINING_ONLY] = Field(
        default=0.3,
        description="Weight of the mean of their losses; DeepSeek-V3 trained with 0.3 for 10T tokens, then with 0.1.",
    )
    num_experts: Experts | None = Field(
        default=None, description="Number of experts in each MoE layer; null: a dense model."
    )
    first_dense_layers: Annotated[CountOrZero, EXPERTS] = Field(
        default=0, description="Number of layers at the start with an MLP instead of experts."
    )
    moe_layer_interval: Annotated[Count, EXPERTS] = Field(
        default=1, description="Every n-th layer has experts, the others an MLP."
    )
    experts_per_token: Annotated[Count, EXPERTS, AtMost("num_experts")] = Field(
        default=2, description="Number of experts per token (top-k)."
    )
    expert_ffn_hidden_size: Annotated[MlpWidth | None, EXPERTS] = derived(
        lambda model: model["ffn_hidden_size"] if model["num_experts"] else None,
        "ffn_hidden_size if there are experts",
        "Width of an expert.",
    )
    shared_expert_ffn_hidden_size: Annotated[MlpWidthOrZero, EXPERTS] = Field(
        default=0, description="Width of the shared expert, or the sum of several; 0: none."
    )
    shared_expert_gate: Annotated[bool, EXPERTS, Needs("shared_expert_ffn_hidden_size", what="a shared expert")] = (
        Field(default=False, description="Multiply the shared expert's output by a learned sigmoid.")
    )
    router: Annotated[RouterConfig, EXPERTS] = Field(default_factory=RouterConfig, description="Routing of MoE layers.")
    linear_attention: LinearAttentionConfig = Field(
        default_factory=LinearAttentionConfig, description="Linear attention, which has a state instead of a cache."
    )
    kda: KdaConfig = Field(default_factory=KdaConfig, description="Kimi delta attention, which has a state too.")
    mamba2: Mamba2Config = Field(default_factory=Mamba2Config, description="Mamba-2, which has a state too.")
    multipliers: MultipliersConfig = Field(
        default_factory=MultipliersConfig, description="Multipliers that exported folders have beside the weights."
    )
    encoder: EncoderConfig = Field(default_factory=EncoderConfig, description="A second stream beside the tokens'.")
    vision: Annotated[
        VisionConfig | None,
        Excludes("model.encoder.kind", because="a model has one of them"),
        Excludes("mup_base_width", because="the tower has a width of its own"),
        Excludes("causal", False, because="images are for causal models"),
        Excludes("teacher.model", because="a teacher reads tokens only"),
        Excludes("precision.fp8.recipe", because="the tower's layers are not quantised"),
        Excludes("optimizer.layer_decay", because="the tower's layers have no distance from the output"),
    ] = Field(
        default=None,
        description="A vision tower, whose output takes the place of image tokens' embeddings; null: none.",
    )

    @property
    def of_encoder(self) -> "ModelConfig | None":
        """The layers of `encoder.kind: layers` as a model: like this one, with attention to both sides."""
        if self.encoder.kind != LAYERS:
            return None
        own = {"num_layers": self.encoder.num_layers, "encoder": EncoderConfig(), "causal": False}
        return self.model_copy(update=own | {"block_pattern": None})

    @property
    def of_vision(self) -> "ModelConfig | None":
        """The layers of the vision tower as a model."""
        return None if self.vision is None else _tower(self.vision, self.depth_scaled_init)

    @property
    def has_norm_bias(self) -> bool:
        """Whether the norms of the residual stream have a bias."""
        return self.norm == "layernorm" and self.norm_bias

    @property
    def is_latent(self) -> bool:
        """Whether attention is multi-head latent attention."""
        return self.kv_lora_rank is not None

    @property
    def value_dim(self) -> int:
        """Width of a head's value."""
        return self.v_head_dim if self.is_latent and self.v_head_dim else self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Width of the part of a head that `rope_fraction` is a fraction of."""
        return self.qk_rope_head_dim if self.is_latent and self.qk_rope_head_dim else self.head_dim

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table: `vocab_size` rounded up to a multiple of `vocab_multiple`."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


@cached
def _tower(vision: VisionConfig, depth_scaled_init: bool) -> ModelConfig:
    """The layers of a vision tower as a model; its vocabulary is not used.

    Local layers see blocks of windows (`BlockInputs.windows`). For estimates their `sliding_window` has as many keys,
    and `max_positions` are those of an image if its size is fixed.
    """
    same = ("num_layers", "hidden_size", "num_heads", "ffn_hidden_size", "norm", "norm_epsilon", "activation")
    model: dict[str, Any] = {name: getattr(vision, name) for name in same} | {"vocab_size": 1, "vocab_multiple": 1}
    model |= {"attention_bias": True, "mlp_bias": True, "causal": False, "depth_scaled_init": depth_scaled_init}
    if vision.window is not None:
        kinds = ["global" if i in vision.global_layers else "local" for i in range(vision.num_layers)]
        model |= {"layer_pattern": kinds, "sliding_window": max(vision.window**2 // 2, 1)}
    if vision.fixed_grid is not None:
        return ModelConfig.model_validate(model | {"position": "none", "max_positions": vision.entries_of_grid})
    tower = ModelConfig.model_validate(model | {"rope_theta": vision.rope_theta})
    return tower.model_copy(update={"rope_sections": (tower.head_dim // 4,) * 2})  # of a row and a column
