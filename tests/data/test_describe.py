"""The summary's lines on the data, against figures worked out by hand."""

import json
from types import SimpleNamespace

from megajax.data.describe import SOURCES_SHOWN, describe_data
from megajax.data.loader import open_datasets
from megajax.schema.batch_schedule import BatchSizes, Position

DOCUMENTS = [[1] * 50] * 16 + [[2] * 10] * 4  # 840 tokens


def lines_of(config):
    return describe_data(config, open_datasets(config))


def test_a_split_file_is_described_with_the_epochs_that_the_run_reads(make_config, write_documents):
    prefix = write_documents(DOCUMENTS)
    config = make_config(
        train=prefix, split="80,15,5", reset_attention=True, mask_end_of_document_loss=True, tokenizer="byte"
    )
    # 10 steps of 4 x 8 tokens are 320 of the 800 tokens of train; an evaluation takes 2 steps' 64 tokens.
    assert lines_of(config) == [
        f"{prefix}, shuffled, tokenizer byte; documents separate in attention, loss",
        "train: 16 documents, 800 tokens, 100 samples per epoch; 10 steps read 320 tokens, 0.4 epochs",
        "valid: 3 documents, 30 tokens, 3 samples per epoch; an evaluation reads 64 tokens, 2.13 epochs",
        "test: 1 document, 10 tokens; not evaluated by the run",
    ]
    resumed = BatchSizes.of(config, Position(5, 10))  # 5 steps of 2 before the resume, 5 of 4 after it
    assert "10 steps read 240 tokens, 0.3 epochs" in describe_data(config, open_datasets(config), resumed)[1]
    config.run.steps, config.run.eval_steps = 50_000, 0
    assert [line.split("; ")[1] for line in lines_of(config)[1:3]] == [
        "50,000 steps read 1,600,000 tokens, 2,000 epochs",
        "not evaluated by the run",
    ]


def test_a_blend_is_described_by_shares_and_epochs_of_each_source(make_config, write_documents):
    large, small = write_documents(DOCUMENTS, "large"), write_documents([[3] * 20], "small")
    huge = write_documents([[4] * 100_000], "huge")
    sources = [SimpleNamespace(prefix=large, weight=3.0), SimpleNamespace(prefix=small, weight=1.0)]
    assert lines_of(make_config(train=sources)) == [
        "a blend of 2 data sets, shuffled, tokenizer not given",
        "train: 21 documents, 860 tokens in 2 data sets; 10 steps read 320 tokens",
        f"  75.0% {large}: 20 documents, 840 tokens, 0.286 epochs",
        f"  25.0% {small}: 1 document, 20 tokens, 4 epochs",
    ]
    sources = [SimpleNamespace(prefix=huge, weight=1.0), SimpleNamespace(prefix=small, weight=3.0)]
    assert lines_of(make_config(train=sources))[2].endswith("1 document, 100,000 tokens, less than 0.001 epochs")
    many = lines_of(make_config(train=sources * SOURCES_SHOWN))
    assert len(many) == 2 + SOURCES_SHOWN + 1 and many[-1] == f"  and {SOURCES_SHOWN} more"


def test_synthetic_data_is_one_line(make_config):
    assert lines_of(make_config(kind="synthetic", reset_positions=True)) == [
        "synthetic tokens; documents separate in positions"
    ]


def test_each_answer_that_has_no_sample_is_counted_among_those_left_out(make_config, tmp_path):
    """Of 20 answers; a mark before the last one gives each a sample of its own, the text before it and itself.

    Two, of 5 and 9 tokens, fit in a sequence; four more begin within the 25 tokens beyond which no sample is made.
    """
    template = "{% for m in messages %}{{ '!' if loop.last and m.role == 'assistant' }}{{ m.content }};{% endfor %}"
    (tmp_path / "t.jinja").write_text(template)
    turns = [{"role": role, "content": "a"} for _ in range(20) for role in ("user", "assistant")]
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": turns}))
    files = {
        "train": str(tmp_path / "c.jsonl"),
        "chat_template": str(tmp_path / "t.jinja"),
        "index_cache": str(tmp_path),
    }
    config = make_config(kind="chat", tokenizer="byte", too_long="cut", **files)
    (line,) = lines_of(config)[1:]
    assert "1 conversation (20 samples: " in line and ", 18 left out, 14 tokens in 2 sequences" in line
