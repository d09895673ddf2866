"""The keys of the section `data`."""

import json
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from megajax.options.data_kinds import KINDS, is_registered
from megajax.schema.fields import (
    Count,
    Positive,
    Section,
    Share,
    Split,
    Text,
    Workers,
    all_or_no_weights,
    path_or_sources,
)
from megajax.schema.rules import AtMost, Excludes, Needs, ReadIf

OF_SPANS, WITHOUT_DENOISERS = ReadIf("model.encoder.kind", "layers"), ReadIf("denoisers", lambda given: not given)
NoiseDensity = Annotated[float, Field(gt=0, lt=1)]
SpanLength = Annotated[float, Field(ge=1, le=10**6)]
OF_FILES = ReadIf("kind", lambda kind: kind != "synthetic")
WITHOUT_DATA = "or data.kind=synthetic to try without data"


class DataSource(Section):
    """One data set of a blend."""

    prefix: Text = Field(description="Path of the .bin/.idx pair without the file extension, or of text or chats.")
    weight: Positive | None = Field(
        default=1.0,
        description="Share of the samples, relative to the other sources; null, for all of them: the source's size.",
    )


class ValidationSet(Section):
    """A further evaluation set with a loss of its own."""

    name: Text = Field(description="Name in the logs: eval_loss/NAME.")
    prefix: Text = Field(description="Path of the .bin/.idx pair without the extension, or of a text or chat file.")


def _source_form(value: Any) -> str | None:
    return {str: "~text", list: "~list", tuple: "~list"}.get(type(value))


# The tags start with ~ so that an error's location can leave them out.
Sources = Annotated[
    Annotated[Text, Tag("~text")] | Annotated[tuple[DataSource, ...], Field(strict=False, min_length=1), Tag("~list")],
    Discriminator(_source_form),
    BeforeValidator(path_or_sources),
    AfterValidator(all_or_no_weights),
]


def sources_of(blend: Any) -> list[tuple[str, float | None]]:
    """(path, weight) of each source of `Sources`; without weights their sizes decide."""
    return [(blend, 1.0)] if isinstance(blend, str) else [(part.prefix, part.weight) for part in blend]


TEMPLATE_INPUTS = {"messages", "tools", "documents", "add_generation_prompt"}  # of every chat template


NO_ARGUMENTS = "is not a mapping from names to values: write it like {enable_thinking: false}"


def template_arguments(text: str) -> dict[str, Any]:
    """The arguments of a chat template that `text` gives, a mapping in YAML; ValueError for anything else."""
    try:
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            raise ValueError("has an alias, *NAME, which may stand for very many values: write the value itself")
        found = yaml.safe_load(text)
        json.dumps(found)
    except (yaml.YAMLError, TypeError, RecursionError):
        found = None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ValueError(NO_ARGUMENTS)
    if used := sorted(found.keys() & TEMPLATE_INPUTS):
        raise ValueError(f"sets {', '.join(used)}, which each chat gives: remove it")
    return found


def _as_text(value: Any) -> str:
    if isinstance(value, dict):
        return yaml.safe_dump(value, default_flow_style=True, width=10**9).strip()
    if not isinstance(value, str):
        raise ValueError(NO_ARGUMENTS)
    return value


def _check_arguments(text: str) -> str:
    template_arguments(text)
    return text


TemplateArguments = Annotated[
    Text,
    BeforeValidator(_as_text, json_schema_input_type=str | dict[str, Any]),
    AfterValidator(_check_arguments),
]


def is_remote(path: str) -> bool:
    """Whether a path is a URL."""
    return "://" in path


class Stage(Section):
    """A later stage of the training data."""

    from_step: Count = Field(description="Number of steps before the stage.")
    train: Sources = Field(description="Training data from then on, written like data.train.")


class FimTokens(Section):
    """Names of the special tokens of fill-in-the-middle."""

    prefix: Text = Field(default="<|fim_prefix|>", description="Token before the prefix.")
    middle: Text = Field(default="<|fim_middle|>", description="Token before the middle.")
    suffix: Text = Field(default="<|fim_suffix|>", description="Token before the suffix.")


class Denoiser(Section):
    """One way to corrupt a text (UL2, Tay et al. 2205.05131)."""

    noise_density: NoiseDensity = Field(default=0.15, description="Share of the tokens that are replaced.")
    mean_span_length: SpanLength | None = Field(
        default=3.0, description="Mean number of tokens of a span; null: one span, the end of the text (prefix-LM)."
    )
    token: Text | None = Field(default=None, description="Name of the token before the encoder's sequence; null: none.")
    weight: Positive = Field(default=1.0, description="Share of the samples, relative to the other denoisers.")


class DataConfig(Section):
    """The training and evaluation data, and the tokenizer."""

    kind: Annotated[
        str,
        KINDS,
        Needs("train", of=is_registered, cure=f"set data.train to what it reads, {WITHOUT_DATA}"),
        Needs("train", of="indexed", cure=f"set data.train to the prefix of a .bin/.idx pair, {WITHOUT_DATA}"),
        Needs("train", of=("text", "chat"), cure=f"set data.train to JSON lines, {WITHOUT_DATA}"),
        Needs("tokenizer", of="text", cure="set data.tokenizer to the model's tokenizer.json, or to byte"),
        Needs(
            "tokenizer",
            of="chat",
            cure="set data.tokenizer to a model's tokenizer.json, whose folder has the chat template",
        ),
    ] = Field(
        default="indexed",
        description="indexed: read .bin/.idx files; text: read text from JSON lines or Parquet, tokenised before the"
        " first step; chat: read conversations from JSON lines, the loss counts the assistant's tokens; synthetic:"
        " random tokens, every path is ignored; or a kind that an extension registers.",
    )
    train: Sources | None = Field(
        default=None,
        description="Training data: the path or URL prefix of a .bin/.idx pair, a list of {prefix, weight},"
        " '0.7 a 0.3 b', {file: PATH} of one, or [a, b] for shares by size; text, chat: files of JSON lines or"
        " of one JSON array, Parquet, compressed files and globs such as 'web/*.jsonl.gz'.",
    )
    stages: Annotated[
        Annotated[tuple[Stage, ...], Field(strict=False, min_length=1)] | None,
        OF_FILES,
        Excludes(
            "order",
            "megatron",
            because="that order is made for one blend",
            cure="use shuffled or sequential, or remove data.stages",
        ),
    ] = Field(
        default=None,
        description="Later stages of the training data, a list of {from_step, train}; a source of several stages"
        " continues. null: train all the time.",
    )
    valid: Sources | None = Field(default=None, description="Evaluation data, written like train.")
    valid_sets: tuple[ValidationSet, ...] = Field(
        default=(),
        strict=False,
        description="Further evaluation sets: a list of {name, prefix}; each has its own loss, eval_loss/NAME.",
    )
    test: Sources | None = Field(default=None, description="Held-out data, written like train.")
    split: Annotated[
        Split | None,
        Excludes("kind", "chat", cure="give files to data.valid and data.test"),
        Excludes("valid"),
        Excludes("test"),
    ] = Field(
        default=None,
        description="Weights that divide train's documents into train, valid and test: '969,30,1'.",
    )
    text_key: Annotated[Text, ReadIf("kind", "text")] = Field(
        default="text", description="text: key or Parquet column of a document's text."
    )
    tokenizer: Annotated[
        Text | None,
        Excludes(
            "kind",
            "chat",
            of=lambda tokenizer: (tokenizer or "").startswith("null:"),
            because="it has no text",
            cure="set data.tokenizer to a model's tokenizer",
        ),
    ] = Field(
        default=None,
        description="byte; null:N for token ids below N; a tokenizer.json, a SentencePiece .model, a .tiktoken file, or"
        " a folder with one of them or with vocab.json and merges.txt; null: none.",
    )
    end_of_document: Text | None = Field(
        default=None,
        description="Name of the token that ends a document or a completion, at which generation stops; null: the"
        " tokenizer's own.",
    )
    begin_of_document: Annotated[bool, ReadIf("kind", lambda kind: kind not in ("chat", "synthetic"))] = Field(
        default=False,
        description="text: documents begin with the token that begins a text; prompts then do too, and with token files"
        " that have it.",
    )
    order: Annotated[
        Literal["shuffled", "sequential", "megatron"],
        OF_FILES,
        Excludes("kind", "chat", of="megatron", cure="use shuffled or sequential"),
        Excludes("kind", is_registered, of="megatron", cure="use shuffled or sequential"),
        Excludes(
            "kind",
            "text",
            of="megatron",
            cure="write token files with megajax.data.preprocess, or use shuffled or sequential",
        ),
    ] = Field(
        default="shuffled",
        description="Order of documents and samples. megatron: number for number that of Megatron-Core's GPTDataset.",
    )
    train_samples: Annotated[Count | None, ReadIf("order", "megatron")] = Field(
        default=None,
        description="megatron: number of training samples for which the order is made, which depends on it; null:"
        " those of run.steps.",
    )
    drop_last_validation_sample: Annotated[bool, ReadIf("order", "megatron")] = Field(
        default=True,
        description="megatron: false: in evaluation sets the rest of the tokens is a sample too, padded to its length.",
    )
    index_cache: Text | None = Field(
        default=None,
        description="megatron, text, chat, files at a URL: directory of the stored order, tokens and blocks; null:"
        " index_cache in run.dir.",
    )
    reset_attention: bool = Field(default=False, description="Tokens attend within their document only.")
    reset_positions: Annotated[bool, ReadIf("model.position", ("rope", "learned"))] = Field(
        default=False, description="Positions start at 0 in each document."
    )
    mask_end_of_document_loss: bool = Field(
        default=False, description="Exclude the prediction of the next document's first token from the loss."
    )
    chat_template: Annotated[Text | None, ReadIf("kind", "chat")] = Field(
        default=None, description="chat: file of the chat template; null: that of the tokenizer's folder."
    )
    chat_template_args: Annotated[TemplateArguments | None, ReadIf("kind", "chat")] = Field(
        default=None,
        description="chat: further arguments of the chat template, such as {enable_thinking: false}, in training and in"
        " generation from the run.",
    )
    packing: Annotated[
        Literal["none", "pairs", "sequential", "first_fit", "balanced"] | None,
        OF_FILES,
        Needs("kind", "chat", of="none", cure="set data.packing=sequential, which cuts documents where a row is full"),
        Needs("kind", "chat", of="pairs", cure="set data.kind=chat, whose lines have the keys chosen and rejected"),
        Needs(
            "reset_attention",
            of="balanced",
            cure="set data.reset_attention=true; without it all sequences have equal attention",
        ),
        Excludes(
            "order",
            "megatron",
            of=("first_fit", "balanced"),
            because="that order cuts documents where a row is full",
            cure="use data.packing=sequential, or data.order=shuffled",
        ),
    ] = Field(
        default=None,
        description="Documents or conversations in one sequence. sequential: the next ones; first_fit: the longest"
        " first, few are cut; balanced: equal attention for all sequences, devices and microbatches; none: one,"
        " for chats; pairs: one, and a line of chats has two, chosen and rejected, in neighbouring sequences. null:"
        " first_fit for chats, else sequential.",
    )
    too_long: Annotated[Literal["truncate", "drop"], ReadIf("kind", "chat")] = Field(
        default="truncate", description="chat: conversations that are longer than a sequence are cut, or left out."
    )
    fim_rate: Annotated[
        Share,
        OF_FILES,
        Excludes("kind", "chat", cure="remove data.fim_rate"),
        Needs("tokenizer", cure="set data.tokenizer to the tokenizer that wrote the data"),
    ] = Field(default=0.0, description="Fill-in-the-middle: share of the documents whose middle is moved to their end.")
    fim_spm_rate: Annotated[Share, ReadIf("fim_rate")] = Field(
        default=0.5, description="Share of these with the suffix before the prefix."
    )
    fim_tokens: Annotated[FimTokens, ReadIf("fim_rate")] = Field(
        default_factory=FimTokens, description="Special tokens of fill-in-the-middle."
    )
    noise_density: Annotated[NoiseDensity, OF_SPANS, WITHOUT_DENOISERS] = Field(
        default=0.15, description="Span corruption: share of the tokens that are replaced by sentinels."
    )
    mean_span_length: Annotated[SpanLength, OF_SPANS, WITHOUT_DENOISERS] = Field(
        default=3.0, description="Span corruption: mean number of tokens of a span that is replaced by one sentinel."
    )
    denoisers: Annotated[tuple[Denoiser, ...], Field(strict=False), OF_SPANS] = Field(
        default=(),
        description="Span corruption: a mixture, a list of {noise_density, mean_span_length, token, weight} instead of"
        " these two keys (UL2).",
    )
    synthetic_documents: Annotated[
        Count | None,
        Needs("kind", "synthetic"),
        AtMost("batch.sequence_length"),
    ] = Field(
        default=None, description="synthetic: number of documents in a sequence, cut at random positions; null: one."
    )
    workers: Workers = Field(default=0, description="Loader processes; 0: threads of the trainer.")
    prefetch: Workers = Field(default=2, description="Number of batches read ahead, and of threads that read them.")

    @property
    def mixture(self) -> tuple[Denoiser, ...]:
        """The denoisers of span corruption: those given, or the one of both keys."""
        one = Denoiser(noise_density=self.noise_density, mean_span_length=self.mean_span_length)
        return self.denoisers or (one,)

    @property
    def template_arguments(self) -> dict[str, Any]:
        """`chat_template_args` by name."""
        return template_arguments(self.chat_template_args or "{}")

    @property
    def row_packing(self) -> str:
        """`packing`, or what its null stands for; synthetic samples are not packed."""
        if self.kind == "synthetic":
            return "sequential"
        return self.packing or ("first_fit" if self.kind == "chat" else "sequential")

    @property
    def reads_pairs(self) -> bool:
        """Whether a line of chats has two answers, chosen and rejected, for neighbouring rows."""
        return self.row_packing == "pairs"

    @property
    def is_remote(self) -> bool:
        """Whether some data is at a URL."""
        later = [stage.train for stage in self.stages or ()]
        given = [source for source in (self.train, *later, self.valid, self.test) if source is not None]
        paths = [path for source in given for path, _ in sources_of(source)]
        return any(is_remote(path) for path in [*paths, *(each.prefix for each in self.valid_sets)])
