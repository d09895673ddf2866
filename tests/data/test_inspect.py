"""The inspect command: figures about token files by hand, and samples as the model gets them."""

import contextlib
import json

import numpy as np
import pytest
import tokenizers
from terminal import Terminal

from megajax.data import index
from megajax.data.indexed import IndexedDataset, IndexedWriter
from megajax.data.inspect import describe_file, main, repeated_starts

# 6 documents: 1 empty, the fourth begins as the second, the last is the start of the second.
DOCUMENTS = [[5, 9], [1] * 40 + [9], [], [1] * 33, [2, 3, 9], [1] * 10]

CONFIG = """
run: {{steps: 10, eval_steps: 0}}
model: {{num_layers: 1, hidden_size: 16, num_heads: 2, vocab_size: 257}}
batch: {{global_size: 2, sequence_length: 8}}
data: {{{data}, tokenizer: byte, order: sequential}}
"""


@pytest.fixture
def shown(tmp_path, capsys):
    """(the section data, arguments...) → the lines that the command prints."""

    def shown(data, *arguments):
        (tmp_path / "c.yaml").write_text(CONFIG.format(data=data))
        assert main([str(tmp_path / "c.yaml"), *arguments]) == 0
        return capsys.readouterr().out.splitlines()

    return shown


def text(*words):
    return [[*word.encode(), 256] for word in words]


@pytest.mark.smoke
def test_files_are_described_by_lengths_first_and_last_tokens(write_documents, capsys):
    prefix = write_documents(DOCUMENTS)
    assert main([prefix]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        f"{prefix}: 6 documents, 6 sequences, 89 tokens, uint16",
        "tokens per document: mean 14.8, median 6, 90 % up to 37, longest 41",
        "0 1 " + "#" * 20,
        "1 0",
        "2-3 2 " + "#" * 40,
        "4-7 0",
        "8-15 1 " + "#" * 20,
        "16-31 0",
        "32-63 2 " + "#" * 40,
        "16.67% of the documents are empty",
        "token ids from 1 to 9",
        "20.00% begin as an earlier one (the first 32 tokens)",
        "60.00% end with token 9, the most frequent last token",
    ]
    assert describe_file(IndexedDataset(prefix), end=3)[-1] == "  0.00% end with token 3, the end-of-document token"


def test_a_file_of_empty_documents_has_one_line(write_documents, capsys):
    prefix = write_documents([[], []])
    assert main([prefix]) == 0
    assert capsys.readouterr().out == f"{prefix}: 2 documents, 2 sequences, 0 tokens, uint16\n"


@pytest.mark.parametrize(
    "dtype, token, problem",
    [
        ("<i4", -7, "has the token -7 at position 30: ids are from 0"),
        ("<i8", 2**31, "has the token 2147483648 at position 30"),
        ("<f4", np.nan, "holds float32: token ids must be integers"),
        ("<f8", 1e300, "holds float64"),
    ],
)
def test_tokens_that_cannot_be_ids_are_a_sentence(tmp_path, capsys, dtype, token, problem):
    with IndexedWriter(tmp_path / "a", dtype) as writer:
        for document in (np.full(20, 5), np.array([*[5] * 10, token, 5])):
            writer.add_document(document)
    with pytest.raises(SystemExit) as end:
        main([str(tmp_path / "a")])
    assert end.value.code == 2 and problem in capsys.readouterr().err


def test_repeated_starts_are_those_of_a_set(write_documents):
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 2, rng.integers(0, 6)).tolist() * int(rng.integers(1, 9)) for _ in range(400)]
    dataset = IndexedDataset(write_documents(documents))
    full = [tuple(document[:32]) for document in documents if document]
    assert repeated_starts(dataset.tokens, dataset.document_starts()) == len(full) - len(set(full)) > 100


def test_a_sample_shows_its_documents_positions_and_what_does_not_count(tmp_path, write_documents, shown):
    prefix = write_documents(text("a\tc", "de\x1b", "fghij"))
    data = f"train: {prefix}, reset_positions: true, mask_end_of_document_loss: true"
    lines = shown(data)
    # Sample 0 is the first 9 tokens, sample 1 starts with the last of them. 2 of 8 predictions are of a next document.
    sample = lines.index(next(line for line in lines if line.startswith("sample")))
    assert lines[sample:] == [
        f"sample 0 of train, number 0 of {prefix}: 9 tokens, 3 documents, 0 tokens of padding; in ⟦⟧: not counted in "
        "the loss",
        "--- document 1: 4 tokens, position 0",
        "⟦a⟧\tc<end of document>",
        "--- document 2: 4 tokens, position 0",
        "⟦d⟧e\\x1b<end of document>",
        "--- document 3: 1 token, a target only",
        "⟦f⟧",
    ]
    assert "  100.00% end with token 256, the end-of-document token" in lines
    without = shown(f"train: {prefix}, reset_positions: false", "--sample", "1", "data.tokenizer=null")
    assert without[-4:] == [
        "--- document 1: 6 tokens, position 0",
        "⟦102 ⟧103 104 105 106 256 ",
        "--- document 2: 3 tokens, position 6",
        "97 9 99 ",
    ]
    assert "first 256 samples of train: padding 0.0%, the loss counts 100.0%" in without
    shown(data)
    with contextlib.redirect_stdout(Terminal()) as terminal:
        assert main([str(tmp_path / "c.yaml")]) == 0
    assert terminal.getvalue().splitlines()[-3:] == [
        "\033[90md\033[0me\\x1b<end of document>",
        "\033[1m--- document 3: 1 token, a target only\033[0m",
        "\033[90mf\033[0m",
    ]


def test_a_blend_gives_each_sources_tokens_of_the_run(write_documents, shown):
    one, two = write_documents(text("a" * 30), "one"), write_documents(text("b" * 50), "two")
    lines = shown(f"train: [{{prefix: {one}, weight: 3}}, {{prefix: {two}, weight: 1}}]", "--sample", "3")
    at = lines.index("train: tokens of each source in 20 samples")
    assert [line.split() for line in lines[at + 1 : at + 3]] == [["120", one], ["40", two]]  # 20 samples of 8
    assert lines[-2:] == ["--- document 1: 9 tokens, position 0", "⟦a⟧" + "a" * 8]
    assert f"sample 3 of train, number 2 of {one}: " in lines[-3]  # one, one, two, one


def test_the_samples_of_a_blend_in_one_epoch_are_those_of_its_sources(tmp_path, write_documents, shown, capsys):
    one, two = write_documents(text("a" * 32), "one"), write_documents(text("b" * 16), "two")  # 4 + 2 samples of 8
    data = f"train: {one}, valid: [{one}, {two}], index_cache: {tmp_path / 'cache'}"
    more = ("--split", "valid", "data.order=megatron", "run.eval_steps=50")  # more than there are
    assert any(line.startswith("sample 5 of valid, ") for line in shown(data, *more, "--sample", "5"))
    with pytest.raises(SystemExit):
        shown(data, *more, "--sample", "6")
    assert "data.order=megatron has 6 samples of valid: give 0 to 5." in capsys.readouterr().err


def test_chats_show_padding_and_the_assistants_tokens(tmp_path, shown):
    source = tmp_path / "c.jsonl"
    source.write_text("".join(json.dumps({"prompt": "ab", "completion": c}) + "\n" for c in ("c", "\ufdd0")))
    lines = shown(f"kind: chat, train: {source}, packing: none, index_cache: {tmp_path}", "--sample", "1")
    assert lines[-3:] == [
        f"sample 1 of train, number 1 of {source}: 9 tokens, 1 document, 3 tokens of padding; in ⟦⟧: not counted in "
        "the loss",
        "--- document 1: 6 tokens, position 0",
        "⟦ab⟧\\ufdd0<end of document>",  # three bytes, and a code as Python writes it
    ]
    # 4 and 6 of 9 tokens are no padding; 2 and 4 of 8 predictions count.
    assert "first 256 samples of train: padding 44.4%, the loss counts 37.5%" in lines
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁a": 0, "▁b": 1, "</s>": 2}, "▁a"))
    words.pre_tokenizer, words.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    words.save(str(tmp_path / "words.json"))
    source.write_text('{"prompt": "a b", "completion": " a b"}')
    lines = shown(f"kind: chat, train: {source}, index_cache: {tmp_path}", f"data.tokenizer={tmp_path}/words.json")
    assert lines[-1].startswith("⟦a b⟧ a b"), "the parts of a sample are its text"
    words.add_special_tokens(["<mark>"])
    words.save(str(tmp_path / "words.json"))
    source.write_text('{"prompt": "a<mark><mark>", "completion": "<mark> b"}')
    lines = shown(f"kind: chat, train: {source}, index_cache: {tmp_path}", f"data.tokenizer={tmp_path}/words.json")
    assert lines[-1].startswith("⟦a<mark> x 2 ⟧<mark> b")


@pytest.mark.parametrize("split", ["easy", "valid/easy"])
def test_a_named_set_is_shown_by_its_name(write_documents, shown, split):
    train, easy = write_documents(text("a" * 30), "train"), write_documents(text("b" * 30), "easy")
    lines = shown(f"train: {train}, valid_sets: [{{name: easy, prefix: {easy}}}]", "--split", split)
    assert any(line.startswith(f"sample 0 of valid/easy, number 0 of {easy}: ") for line in lines)
    assert lines[-1] == "⟦b⟧" + "b" * 8


def test_a_run_directory_is_its_config(tmp_path, write_documents, capsys):
    (tmp_path / "config.yaml").write_text(CONFIG.format(data=f"train: {write_documents(text('abc', 'defghij'))}"))
    assert main([str(tmp_path), "--sample", "1"]) == 0
    sample = capsys.readouterr()
    assert main([str(tmp_path / "config.yaml"), "--sample", "1"]) == 0
    assert capsys.readouterr() == sample and "sample 1 of train" in sample.out


def test_mistakes_are_answered_with_one_sentence(tmp_path, write_documents, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prefix = write_documents(text("abc", "defghij"))
    (tmp_path / "c.yaml").write_text(CONFIG.format(data=f"train: {prefix}"))
    for arguments, sentence in {
        "p --sample 1": "p is the prefix of token files, which have no samples: give a CONFIG (.yaml) for --sample, "
        "--pictures, --split and section.key=value.",
        "c.yaml --split valid": "--split=valid is not in the config: choose train.",
        "c.yaml data.train=none --pictures x": "--pictures: the config has no model.vision, so its samples have no "
        "pictures: leave it out.",
        "c.yaml --sample -1": "argument --sample: -1 is not the number of a sample (0 or more); "
        "python -m megajax.data.inspect --help lists the arguments.",
        "c.yaml --sample 20 data.order=megatron": "--sample=20: data.order=megatron has 20 samples of train: give 0 to "
        "19.",
        "no": "no.idx does not exist: correct the prefix, or write it with `python -m megajax.data.preprocess`.",
    }.items():
        with pytest.raises(SystemExit) as stopped:
            main(arguments.split())
        assert (stopped.value.code, capsys.readouterr()) == (2, ("", f"megajax: error: {sentence}\n"))
    with pytest.raises(SystemExit) as stopped:
        index.main(["c.yaml"])
    sentence = "data.kind=indexed with data.order=sequential stores nothing: this is for data.order=megatron"
    assert stopped.value.code == 2 and sentence in capsys.readouterr().err
