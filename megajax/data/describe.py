"""The summary's lines about a run's data."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megajax.data.chat_samples import ChatSamples
from megajax.data.loader import Split
from megajax.data.progress import data_size
from megajax.data.samples import BlendedSamples, Samples, sources_in
from megajax.data.text import TextDataset
from megajax.data.whole import WholeSet
from megajax.errors import counted
from megajax.schema.batch_schedule import BatchSizes
from megajax.schema.data import sources_of

if TYPE_CHECKING:
    from megajax.config import Config

SOURCES_SHOWN = 20  # at most, of a blend


def describe_data(config: "Config", datasets: Mapping[Split, Samples], sizes: BatchSizes | None = None) -> list[str]:
    """Lines about the data that `loader.open_datasets` opened; reads no file.

    The first line names the source. Then each split has its documents, tokens and the epochs that the run reads, and
    for a blend each source's share and epochs. Synthetic data has one line only. `sizes` are those of the run's steps,
    by default those of a run that begins with the config.
    """
    data = config.data
    reset = {
        "attention": data.reset_attention,
        "positions": data.reset_positions,
        "loss": data.mask_end_of_document_loss,
    }
    separate = ", ".join(name for name, is_reset in reset.items() if is_reset)
    packed = f"; documents separate in {separate}" if separate else ""
    packed += f", packed {data.packing}" if data.packing and data.kind != "synthetic" else ""
    filled = f"; fill-in-the-middle in {data.fim_rate:.0%} of the documents" if data.fim_rate else ""
    if data.kind == "synthetic":
        return [f"synthetic tokens{packed}"]
    train = data.train if isinstance(data.train, str) else f"a blend of {counted(len(data.train or ()), 'data set')}"
    lines = [f"{train}, {data.order}, tokenizer {data.tokenizer or 'not given'}{packed}{filled}"]
    for stage in data.stages or ():
        parts = sources_of(stage.train)
        total = sum(weight or 0 for _, weight in parts)
        shares = ["by size" if weight is None else f"{weight / total:.1%}" for _, weight in parts]
        shown = zip(shares, (path for path, _ in parts[:SOURCES_SHOWN]), strict=False)
        blend = ", ".join(f"{share} {path}" for share, path in shown)
        more = f", and {len(parts) - SOURCES_SHOWN} more" if len(parts) > SOURCES_SHOWN else ""
        lines.append(f"stage from step {stage.from_step:,}: {blend}{more}")
    sizes = sizes or BatchSizes.of(config)
    for split, samples in datasets.items():
        lines += _split_lines(config, split, samples, _samples_read(config, split, samples, sizes))
    return lines


def _split_lines(config: "Config", split: Split, samples: Samples, samples_read: int) -> list[str]:
    """A split's size and the number of tokens that the run reads; for a blend, of each source too."""
    if config.data.kind == "chat":
        return _chat_lines(split, samples, samples_read)
    shares = _shares(samples)
    bad = sum(source.dataset.bad_lines for source, _ in shares if isinstance(source.dataset, TextDataset))
    tokens, length = sum(source.num_tokens for source, _ in shares), shares[0][0].tokens_per_sample
    read = min(samples_read * length, tokens) if isinstance(samples, WholeSet) else samples_read * length
    size = f"{split}: {data_size(sum(source.num_documents for source, _ in shares), tokens)}"
    size += f" ({counted(bad, 'bad line')} of the text left out)" if bad else ""
    if not read:
        return [f"{size}; not evaluated by the run"]
    reading = f"{counted(config.run.steps, 'step')} read" if split == "train" else "an evaluation reads"
    if len(shares) == 1:
        epochs = _epochs(read, tokens)
        return [
            f"{size}, {counted(tokens // length, 'sample')} per epoch; {reading} {counted(read, 'token')}, {epochs}"
        ]
    lines = [f"{size} in {counted(len(shares), 'data set')}; {reading} {counted(read, 'token')}"]
    for source, share in shares[:SOURCES_SHOWN]:
        size = data_size(source.num_documents, source.num_tokens)
        lines.append(f"  {share:.1%} {source.dataset.prefix}: {size}, {_epochs(share * read, source.num_tokens)}")
    if len(shares) > SOURCES_SHOWN:
        lines.append(f"  and {len(shares) - SOURCES_SHOWN} more")
    return lines


def _chat_lines(split: Split, samples: Samples, samples_read: int) -> list[str]:
    """The conversations of each file of a split, how they fill the sequences, and the epochs that the run reads."""
    lines = []
    for source, share in _shares(samples):
        tokens, rows = len(source.tokens), len(source)
        full, in_loss = tokens / (rows * (source.sequence_length + 1)), float(source.counts.mean())
        size, out = counted(source.conversations, "conversation"), ""
        if (samples_made := len(source.order) + source.dropped) != source.conversations:
            why = "the chat template changes earlier turns, so answers have their own"
            size += f" ({counted(samples_made, 'sample')}: {why})"
        if source.dropped:
            out = f", {source.dropped:,} left out"
        if source.table is not None:
            size += f" with {counted(len(source.table.places), 'picture')}"
            if bad := source.table.left_out.count:
                out += f", {bad:,} left out because of their pictures"
        if source.cut:
            at = " or before a picture that does not fit" if source.table is not None else ""
            out += f", {source.cut:,} cut after {counted(source.sequence_length + 1, 'token')}{at}"
        epochs = samples_read * share / rows
        lines.append(
            f"{split}: {source.path}: {size}{out}, {counted(tokens, 'token')} in {counted(rows, 'sequence')} "
            f"({full:.0%} full); the loss counts {in_loss:.0%} of the tokens; {counted(f'{epochs:.3g}', 'epoch')}"
        )
    return lines


def has_chats(samples: Samples) -> bool:
    """Whether a chat template wrote some of the samples; prompts with completions need none."""
    return any(isinstance(source, ChatSamples) and source.rendered for source in sources_in(samples))


def _samples_read(config: "Config", split: Split, samples: Samples, sizes: BatchSizes) -> int:
    """The samples that the run reads of train, or one evaluation of a split; none of test."""
    if split == "train":
        return sizes.samples_before(config.run.steps)
    if split == "test":
        return 0
    if isinstance(samples, WholeSet):
        return len(samples)
    assert config.run.eval_steps != "all"
    return config.run.eval_steps * config.batch.global_size


def _shares(samples: Samples) -> list[tuple[Any, float]]:
    """The data sets of a split, DocumentSamples or ChatSamples, each with its share of the samples."""
    weights = samples.weights.tolist() if isinstance(samples, BlendedSamples) else [1.0]
    return list(zip(sources_in(samples), weights, strict=True))


def _epochs(read: float, tokens: int) -> str:
    epochs = read / tokens
    if epochs < 0.001:
        return "less than 0.001 epochs"
    return counted(f"{epochs:,.0f}" if epochs >= 1000 else f"{epochs:.3g}", "epoch")
