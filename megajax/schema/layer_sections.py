"""The sections of `model` for parts of a layer: rotary frequencies, the router, and sublayers with a state."""

from typing import Annotated, Literal

from pydantic import Field

from megajax.schema.fields import BelowOne, Count, Positive, PositiveOrZero, RopeFactors, Section, Tokens, Width
from megajax.schema.rules import AtMost, Below, Divides, Excludes, Needs, ReadIf, fits, more_than_one


class RopeScaling(Section):
    """Scaling of the rotary frequencies, for sequences that are longer than in the original training."""

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope"] = Field(
        default="llama3",
        description="Rule of the scaling. linear: all frequencies; dynamic: a larger rope_theta for sequences longer"
        " than original_max_positions; llama3, yarn: the low frequencies; longrope: each by its own"
        " factor.",
    )
    factor: Annotated[float, Field(ge=1)] = Field(description="Divisor of the low frequencies.")
    low_freq_factor: Annotated[
        Positive, ReadIf("kind", "llama3"), Below("high_freq_factor", cure="use 1.0 and 4.0 as Llama 3.1 does")
    ] = Field(
        default=1.0, description="Wavelengths above original_max_positions / low_freq_factor are low frequencies."
    )
    high_freq_factor: Annotated[Positive, ReadIf("kind", "llama3")] = Field(
        default=4.0, description="Wavelengths below original_max_positions / high_freq_factor keep their frequency."
    )
    original_max_positions: Annotated[Tokens, ReadIf("kind", ("dynamic", "llama3", "yarn", "longrope"))] = Field(
        default=8192, description="Sequence length of the original training."
    )
    beta_fast: Annotated[Positive, ReadIf("kind", "yarn")] = Field(
        default=32.0, description="yarn: frequencies with more turns in original_max_positions are kept."
    )
    beta_slow: Annotated[Positive, ReadIf("kind", "yarn"), AtMost("beta_fast")] = Field(
        default=1.0, description="yarn: frequencies with fewer turns in original_max_positions are divided by factor."
    )
    attention_factor: Annotated[Positive | None, ReadIf("kind", ("yarn", "longrope"))] = Field(
        default=None,
        description="yarn, longrope: factor of the rotated queries and keys; null: 0.1 * ln(factor) + 1, in longrope"
        " sqrt(1 + ln(factor) / ln(original_max_positions)).",
    )
    mscale: Annotated[Positive | None, ReadIf("kind", "yarn"), ReadIf("mscale_all_dim")] = Field(
        default=None,
        description="yarn: with mscale_all_dim, attention_factor=null means"
        " (0.1 * mscale * ln(factor) + 1) / (0.1 * mscale_all_dim * ln(factor) + 1), as in DeepSeek.",
    )
    mscale_all_dim: Annotated[Positive | None, ReadIf("kind", "yarn")] = Field(
        default=None,
        description="yarn: latent attention multiplies its scores by (0.1 * mscale_all_dim * ln(factor) + 1)^2.",
    )
    truncate: Annotated[bool, ReadIf("kind", "yarn")] = Field(
        default=True, description="yarn: round the indices of the limits beta_fast and beta_slow."
    )
    short_factors: Annotated[RopeFactors, ReadIf("kind", "longrope")] = Field(
        default=None, description="longrope: divisor of each frequency, for sequences up to original_max_positions."
    )
    long_factors: Annotated[RopeFactors, ReadIf("kind", "longrope")] = Field(
        default=None, description="longrope: the same for longer sequences."
    )

    @property
    def unused(self) -> tuple[str, ...]:
        """The keys that this kind does not read."""
        rules = [(name, rule) for name, field in type(self).model_fields.items() for rule in field.metadata]
        by_kind = [(name, rule) for name, rule in rules if isinstance(rule, ReadIf) and rule.other == "kind"]
        return tuple(name for name, rule in by_kind if not fits(self.kind, rule.values))


class RouterConfig(Section):
    """The choice of experts in MoE layers, and the balance of their load."""

    score_function: Literal["softmax", "sigmoid"] = Field(
        default="softmax", description="Function from router logits to scores."
    )
    pre_softmax: Annotated[bool, Excludes("score_function", "sigmoid", cure="set model.router.pre_softmax=false")] = (
        Field(
            default=False,
            description="true: softmax over all experts, then top-k; false: top-k, then softmax over these.",
        )
    )
    normalise: bool = Field(default=True, description="Divide the chosen experts' scores by their sum.")
    scaling_factor: Positive = Field(default=1.0, description="Factor of the chosen experts' weights.")
    num_groups: Count = Field(default=1, description="Number of expert groups; a token uses only some of them.")
    groups_per_token: Count = Field(default=1, description="Number of groups from which a token chooses its experts.")
    group_score: Annotated[Literal["sum", "max"], ReadIf("num_groups", more_than_one)] = Field(
        default="sum",
        description="Score of a group: the sum of its best experts_per_token / groups_per_token scores (DeepSeek-V3),"
        " or its largest score (DeepSeek-V2).",
    )
    logit_bias: bool = Field(default=False, description="Learned bias of the router logits; it starts at 0.")
    jitter: BelowOne = Field(
        default=0.0, description="Multiply the router's input by random numbers between 1 - jitter and 1 + jitter."
    )
    sequence_loss: PositiveOrZero = Field(
        default=0.0, description="Weight of the load-balancing loss, computed for each sequence."
    )
    global_loss: PositiveOrZero = Field(
        default=0.0, description="Weight of the load-balancing loss, computed for a microbatch over all devices."
    )
    loss_counts: Literal["chosen", "top_scores"] = Field(
        default="chosen",
        description="Assignments that both of these losses count. chosen: those to the experts that get the token"
        " (DeepSeek-V2); top_scores: those to the experts_per_token largest scores, without expert_bias and groups"
        " (DeepSeek-V3, Megatron-LM).",
    )
    z_loss: PositiveOrZero = Field(default=0.0, description="Weight of the squared log-sum-exp of the router logits.")
    expert_bias: bool = Field(
        default=False,
        description="Balance without a loss: add a bias to the scores for the choice only, and update it each step.",
    )
    bias_update_rate: Annotated[PositiveOrZero, ReadIf("expert_bias")] = Field(
        default=1e-3, description="Change of the expert bias in one step."
    )
    sinkhorn: Annotated[bool, Excludes("expert_bias"), Excludes("num_groups")] = Field(
        default=False, description="In training, choose experts by scores balanced with Sinkhorn's iteration."
    )
    capacity_factor: Positive | None = Field(
        default=None, description="Expert capacity, as a multiple of the even share of a microbatch; null: no limit."
    )
    drop_policy: Annotated[Literal["probability", "position"], Needs("capacity_factor", what="an expert capacity")] = (
        Field(
            default="probability",
            description="Assignments that an expert over capacity drops: the lowest routing weights, or the last in the"
            " batch.",
        )
    )
    force_balance: Annotated[bool, Excludes("sinkhorn"), Excludes("expert_bias")] = Field(
        default=False, description="Send tokens to the experts in turn and ignore the scores; for benchmarks."
    )

    @property
    def counts_others(self) -> bool:
        """Whether the balancing losses may count other experts than those that get a token."""
        balances, differs = self.sequence_loss > 0 or self.global_loss > 0, self.expert_bias or self.num_groups > 1
        return self.loss_counts == "top_scores" and balances and differs and not self.force_balance


class LinearAttentionConfig(Section):
    """The heads of gated DeltaNet (blocks gated_deltanet and gated_deltanet_moe)."""

    num_key_heads: Annotated[Width, Divides("num_value_heads")] = Field(
        default=16, description="Number of query and key heads."
    )
    num_value_heads: Width = Field(
        default=32, description="Number of value heads, a multiple of num_key_heads; each has a state of its own."
    )
    key_head_dim: Width = Field(default=128, description="Width of a query and a key.")
    value_head_dim: Width = Field(default=128, description="Width of a value.")
    conv_kernel: Annotated[int, Field(ge=2, le=64)] = Field(
        default=4, description="Number of tokens that the convolution of queries, keys and values sees."
    )


class KdaConfig(Section):
    """The heads of Kimi delta attention (blocks kda and kda_moe)."""

    num_heads: Width = Field(default=32, description="Number of heads, each with a state.")
    head_dim: Width = Field(
        default=128, description="Width of a query, a key and a value, and rank of the decays' and gates' projections."
    )
    conv_kernel: Annotated[int, Field(ge=2, le=64)] = Field(
        default=4, description="Number of tokens that the convolution of queries, keys and values sees."
    )


class Mamba2Config(Section):
    """The heads of Mamba-2 (blocks mamba2, mamba2_mlp, mamba2_moe and attention_mamba2)."""

    num_heads: Width = Field(default=64, description="Number of heads, each with a state.")
    num_groups: Annotated[Width, Divides("num_heads")] = Field(
        default=8, description="Number of groups of heads that share a key and a query (B and C); it divides num_heads."
    )
    head_dim: Width = Field(default=64, description="Width of a head's values.")
    state_dim: Width = Field(default=128, description="Width of a key and a query, the other width of a state.")
    conv_kernel: Annotated[int, Field(ge=2, le=64)] = Field(
        default=4, description="Number of tokens that the convolution of values, keys and queries sees."
    )
    min_step: PositiveOrZero = Field(default=0.0, description="Lower limit of the steps (delta).")
    output_norm: Literal["after_gate", "before_gate", "none"] = Field(
        default="after_gate",
        description="RMSNorm of the output in each group: after it is multiplied by its gate, before that, or none.",
    )


Two = Annotated[tuple[Positive, Positive], Field(strict=False)]
Five = Annotated[tuple[Positive, Positive, Positive, Positive, Positive], Field(strict=False)]


class MultipliersConfig(Section):
    """Multipliers of a Hugging Face config.json (Granite, Falcon-H1), by its keys. The weights here contain them.

    Reading a folder multiplies its tensors by them, and export divides by them; nothing else uses them.
    """

    embedding_multiplier: Positive = Field(default=1.0, description="Of the token embeddings.")
    logits_scaling: Positive = Field(default=1.0, description="Divisor of the logits.")
    lm_head_multiplier: Positive = Field(default=1.0, description="Of the logits.")
    residual_multiplier: Positive = Field(default=1.0, description="Of all outputs that are added to the stream.")
    attention_in_multiplier: Positive = Field(default=1.0, description="Of attention's input.")
    key_multiplier: Positive = Field(default=1.0, description="Of the keys.")
    attention_out_multiplier: Positive = Field(default=1.0, description="Of attention's output.")
    ssm_in_multiplier: Positive = Field(default=1.0, description="Of Mamba-2's input.")
    ssm_multipliers: Five = Field(
        default=(1.0, 1.0, 1.0, 1.0, 1.0), description="Of Mamba-2's gates, values, keys (B), queries (C) and steps."
    )
    ssm_out_multiplier: Positive = Field(default=1.0, description="Of Mamba-2's output.")
    mlp_multipliers: Two = Field(default=(1.0, 1.0), description="Of the MLP's gate and output.")
