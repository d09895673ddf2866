"""The keys of the sections `objective` and `teacher`."""

from typing import Annotated, Any, Literal

from pydantic import Field

from megajax.options.registered import MASKED_TOKENS, OWN_OBJECTIVES
from megajax.schema.fields import BelowOne, CountOrZero, Registered, Section, Share, Text
from megajax.schema.model import OF_CROSS_ENTROPY, ModelConfig
from megajax.schema.rules import Excludes, Needs, ReadIf


class MaskingConfig(Section):
    """The choice of the tokens that the model predicts, and what it reads in their place. ModernBERT: 0.3, 1, 0."""

    rate: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.15, description="Probability that a token is chosen; special tokens never are."
    )
    masked: Share = Field(default=0.8, description="Share of the chosen tokens that become the mask token.")
    random: Share = Field(
        default=0.1, description="Share of them that become any token of the vocabulary; the others stay as they are."
    )
    mask_token: CountOrZero | Text | None = Field(
        default=None,
        description="Id or name of the mask token; null: the tokenizer's [MASK] or <mask>; of synthetic data the last"
        " token.",
    )


class ObjectiveConfig(Registered):
    """The loss that training minimises."""

    kind: Annotated[
        Text,
        Needs(
            "model.causal",
            False,
            of=MASKED_TOKENS,
            what="attention to both sides of a token",
            cure="set model.causal=false",
        ),
        Excludes(
            "data.fim_rate", of=MASKED_TOKENS, because="the moved middle is for models that write from left to right"
        ),
        Excludes(
            "data.kind",
            "chat",
            of=MASKED_TOKENS,
            because="the loss of chats counts the answers",
            cure="set data.kind=text",
        ),
        Excludes("data.mask_end_of_document_loss", of=MASKED_TOKENS, because="special tokens are never chosen"),
    ] = Field(
        default="next_token",
        description="next_token; masked_tokens: the tokens that masking hides, for encoders such as ModernBERT; or the"
        " name of a registered objective.",
    )
    masking: Annotated[MaskingConfig, ReadIf("kind", MASKED_TOKENS)] = Field(
        default_factory=MaskingConfig, description="masked_tokens: the chosen tokens and their replacement."
    )
    label_smoothing: Annotated[BelowOne, Needs("kind", OWN_OBJECTIVES, what=OF_CROSS_ENTROPY)] = Field(
        default=0.0,
        description="Weight of the mean loss over all tokens of the vocabulary, the target has the rest.",
    )
    average: Annotated[Literal["tokens", "microbatches"], Needs("kind", OWN_OBJECTIVES, what=OF_CROSS_ENTROPY)] = Field(
        default="tokens",
        description="What a step minimises, the mean over its counted tokens, or the mean of the means of "
        "each microbatch's rows on data × fsdp × expert, as in Megatron-LM. The logged loss is the mean over tokens.",
    )
    settings: Annotated[
        dict[str, Any], Needs("kind", lambda kind: kind not in OWN_OBJECTIVES, what="a registered objective")
    ] = Field(default={}, description="Settings of a registered objective, by name.")


class TeacherConfig(Section):
    """A frozen model that runs beside the trained one, for objectives that see its logits."""

    base: Annotated[
        bool,
        Needs(
            "lora.rank",
            what="adapters, whose base is frozen",
            cure="set lora.rank, or teacher.model and teacher.source for weights of its own",
        ),
        Excludes("model", because="the base is the run's own model"),
        Excludes("source", because="the base has the weights of checkpoint.init_from"),
    ] = Field(
        default=False,
        description="The teacher is the frozen base of the adapters (lora.rank): the model without them, and without"
        " weights of its own.",
    )
    model: ModelConfig | None = Field(
        default=None, description="The teacher's network, with the keys of model; null: there is none."
    )
    source: Annotated[Text | None, Needs("model", cure="set teacher.model, the network of these weights")] = Field(
        default=None, description="Its weights: a run directory, a checkpoint in one, or a Hugging Face folder."
    )
