"""Writes the tables and the translated launch line of docs/migration.md from megajax/config and its translator."""

import argparse
import contextlib
import re
import tempfile
from pathlib import Path

from megajax.config import megatron_flags, other_names
from megajax.config.load import keys
from megajax.config.other_name import OtherName
from megajax.schema.tree import show
from megajax.tools.from_megatron.__main__ import read, translate
from megajax.tools.from_megatron.differences import DIFFERENCES

PAGE = Path(__file__).parents[1] / "docs/migration.md"
MOST_NAMES = 12  # of a row
TABLES = {
    "Megatron-LM": ("--", megatron_flags.MEGATRON),
    **{f"Megatron-LM, {outcome}": ("--", table) for outcome, table in megatron_flags.MEGATRON_WITHOUT.items()},
    "MaxText": ("", other_names.MAXTEXT),
    "torchtitan": ("", other_names.TORCHTITAN),
    "Hugging Face": ("", other_names.HUGGING_FACE),
    "PEFT and TRL": ("", other_names.FINE_TUNING),
}
# Our key, Megatron's flag and its default, our value for this default.
DEFAULTS = (
    ("model.tie_embeddings", "`--untie-embeddings-and-output-weights`: not set, so tied", "`true`"),
    ("model.norm", "`--normalization`: `LayerNorm`", "`layernorm`"),
    ("model.activation", "`--swiglu`: not set, so GELU", "`gelu`"),
    (
        "model.ffn_hidden_size",
        "4 × hidden size; with `--swiglu` 8/3 × hidden size, rounded down to a multiple of 64",
        "the width; with `swiglu` our default has 3/2 of the weights",
    ),
    ("model.position", "`--position-embedding-type`: `learned_absolute`", "`learned`"),
    ("model.attention_bias", "`--disable-bias-linear`: not set, so biases", "`true`"),
    ("model.mlp_bias", "`--disable-bias-linear`: not set, so biases", "`true`"),
    ("model.dropout", "`--hidden-dropout`: 0.1", "`0.1`; for `--attention-dropout` (0.1) there is no counterpart"),
    ("model.vocab_multiple", "`--make-vocab-size-divisible-by`: 128 × tensor-parallel size", "the product"),
    ("optimizer.beta2", "`--adam-beta2`: 0.999", "`0.999`"),
    ("optimizer.weight_decay", "`--weight-decay`: 0.01", "`0.01`"),
    ("schedule.kind", "`--lr-decay-style`: `linear`", "`linear`"),
    ("schedule.min_learning_rate", "`--min-lr`: 0", "`0`, with which the last step changes nothing"),
    ("precision.compute", "`--bf16`: not set, so FP32", "`float32`"),
    ("precision.fp8.recipe", "`--fp8-recipe`: `delayed`, once `--fp8-format` is set", "`delayed`"),
    ("precision.fp8.amax_history_length", "`--fp8-amax-history-len`: 1", "`1`"),
    ("precision.fp8.amax_algorithm", "`--fp8-amax-compute-algo`: `most_recent`", "`most_recent`"),
    ("data.split", "`--split`: `969, 30, 1` with `--data-path`", '`"969,30,1"`'),
    ("run.eval_steps", "`--eval-iters`: 100", "`100`"),
    ("run.log_interval", "`--log-interval`: 100", "`100`"),
)


def table(prefix: str, rows: tuple[OtherName, ...]) -> str:
    """A row for each setting: the other framework's names, our key or note."""
    lines = ["| there | here |", "|---|---|"]
    for row in rows:
        names = ", ".join(f"`{prefix}{name}`" for name in row.names[:MOST_NAMES])
        names += f" and {len(row.names) - MOST_NAMES} more" if len(row.names) > MOST_NAMES else ""
        here = ", ".join(filter(None, [f"`{row.ours}`" if row.ours else "", row.note]))
        lines.append(f"| {names} | {here} |")
    return "\n".join(lines) + "\n"


def defaults() -> str:
    """A row for each default that differs from Megatron-LM's."""
    fields = dict(keys())
    lines = ["| key | default here | default in Megatron-LM | value here for Megatron's default |", "|---|---|---|---|"]
    for key, theirs, value in DEFAULTS:
        extra = fields[key].json_schema_extra
        ours = extra["derived"] if isinstance(extra, dict) else show(fields[key].default)
        lines.append(f"| `{key}` | `{ours}` | {theirs} | {value} |")
    return "\n".join(lines) + "\n"


def differences() -> str:
    """A row for each formula that differs from Megatron-LM's."""
    lines = ["| row | Megatron-LM | megajax | equal with |", "|---|---|---|---|"]
    lines += [f"| `{row}` | {each.theirs} | {each.ours} | {each.equal} |" for row, each in DIFFERENCES.items()]
    return "\n".join(lines) + "\n"


def with_example(page: str) -> str:
    """The page with what `from-megatron` makes of its launch script."""
    before, heading, after = page.partition("### Your launch line\n")
    script = re.search(r"```bash\n(.*?)```", after, re.DOTALL)
    assert script, f"{PAGE} has lost its launch script"
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("train.sh").write_text(script[1], encoding="utf-8")
        given, world = read(["train.sh"])
        assert world, "the launch script has lost its launcher"
        text, warned = translate(given, world)
    warnings = "".join(f"megajax: warning: {sentence}\n" for sentence in warned)
    after = re.sub(r"```yaml\n.*?```", lambda _: f"```yaml\n{text}```", after, count=1, flags=re.DOTALL)
    after = re.sub(r"```\nmegajax: warning.*?```", lambda _: f"```\n{warnings}```", after, count=1, flags=re.DOTALL)
    return before + heading + after


def updated(page: str) -> str:
    """The page with all tables between their markers rewritten."""
    tables = {name: table(*arguments) for name, arguments in TABLES.items()}
    tables |= {"defaults": defaults(), "differences": differences()}
    for name, text in tables.items():
        begin, end = f"<!-- {name}: written by dev/migration_tables.py -->\n", f"<!-- end of {name} -->"
        before, found, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        assert found and closed, f"{PAGE} has lost the marker {begin!r} or {end!r}"
        page = f"{before}{begin}\n{text}\n{end}{after}"
    return with_example(page)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE}")
