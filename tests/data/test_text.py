"""Text gives the samples of preprocessed files, tokenises each file once, and resumes anywhere."""

import fcntl
import gzip
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

import megajax
from megajax.config.checks import check
from megajax.data import index, index_cache, inspect, text
from megajax.data.describe import describe_data
from megajax.data.json_lines import LineBlock, TextPosition
from megajax.data.loader import make_loader, open_datasets
from megajax.data.preprocess import preprocess
from megajax.data.text import JoinedTokens
from megajax.errors import ConfigError, InputError

RNG = np.random.default_rng(0)
TEXTS = ["".join(map(chr, RNG.integers(97, 1000, size))) for size in RNG.integers(0, 90, 60)]


def config_of(folder: Path, data: dict | None = None, **sections) -> megajax.Config:
    content = {
        "run": {"steps": 20, "dir": str(folder / "run"), "seed": 5, "eval_steps": 1},
        "model": {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 257},
        "batch": {"global_size": 4, "sequence_length": 16},
        "data": {"kind": "text", "train": str(folder / "shard-*"), "tokenizer": "byte", "text_key": "body"}
        | (data or {}),
    }
    return megajax.Config.model_validate(content | sections)


@pytest.fixture
def shards(tmp_path) -> list[str]:
    """The same texts in four formats; the glob takes them by name. The third file is empty."""

    def lines(texts) -> bytes:
        return b"".join(json.dumps({"body": text}).encode() + b"\n" for text in texts)

    (tmp_path / "shard-0").write_bytes(lines(TEXTS[:20]))
    (tmp_path / "shard-1").write_bytes(gzip.compress(lines(TEXTS[20:30])))
    (tmp_path / "shard-2").write_bytes(b"")
    (tmp_path / "shard-3").write_bytes(zstandard.compress(lines(TEXTS[30:45])))
    parquet.write_table(pyarrow.table({"body": TEXTS[45:]}), tmp_path / "shard-4")
    return [str(path) for path in sorted(tmp_path.glob("shard-*"))]


@pytest.fixture
def encoded_files(monkeypatch) -> list[str]:
    """The files whose blocks are tokenised from now on."""
    seen, encode = [], text.TextEncoder.__call__

    def call(self, block):
        seen.append(Path(block.path).name)
        return encode(self, block)

    monkeypatch.setattr(text.TextEncoder, "__call__", call)
    return seen


@pytest.mark.parametrize("order", ["shuffled", "sequential"])
def test_samples_are_those_of_preprocessed_files_at_any_step_and_in_any_process(tmp_path, shards, order, encoded_files):
    prefix, _, _ = preprocess(shards, str(tmp_path / "p"), "byte", append_eod=True, json_key="body")
    data = {"order": order, "split": "70,30,0", "reset_attention": True, "mask_end_of_document_loss": True}
    expected = open_datasets(config_of(tmp_path, data | {"kind": "indexed", "train": prefix, "text_key": "text"}))
    encoded_files.clear()
    config = config_of(tmp_path, data)
    found = open_datasets(config)
    assert encoded_files == ["shard-0", "shard-1", "shard-3", "shard-4"]  # once for both splits
    copy = pickle.loads(pickle.dumps(found["train"]))  # of a reader process
    for i in range(300):  # some epochs
        for split in ("train", "valid"):
            np.testing.assert_array_equal(found[split][i], expected[split][i])
            np.testing.assert_array_equal(found[split].document_lengths(i), expected[split].document_lengths(i))
        np.testing.assert_array_equal(copy[i], expected["train"][i])
    loader = make_loader(config, split="train", rows=np.arange(4))
    whole = [next(loader) for _ in range(20)]
    resumed = make_loader(config, split="train", rows=np.array([3, 1]), start_step=13)  # of two other processes
    for batch in whole[13:]:
        other = next(resumed)
        assert all((other[name] == batch[name][[3, 1]]).all() for name in batch)
    open_datasets(config)
    assert len(encoded_files) == 4


def test_only_new_files_are_tokenised(tmp_path, shards, encoded_files):
    train = [{"prefix": shards[1], "weight": 1}, {"prefix": shards[3], "weight": 1}]
    open_datasets(config_of(tmp_path, {"train": train}))
    assert encoded_files == ["shard-1", "shard-3"]
    open_datasets(config_of(tmp_path))
    assert encoded_files[2:] == ["shard-0", "shard-4"]
    (tmp_path / "shard-0").write_text('{"body": "another text, long enough"}')
    open_datasets(config_of(tmp_path))
    assert encoded_files[4:] == ["shard-0"]
    assert all(path.is_dir() and "partial" not in path.name for path in (tmp_path / "run/index_cache").iterdir())


def test_processes_share_the_files(tmp_path, shards, encoded_files, monkeypatch):
    """This one leaves the file that another one is at, waits for it, and does it if the other one stops."""
    config, waiting = config_of(tmp_path, {"order": "sequential"}), []
    open_datasets(config_of(tmp_path, run={"dir": str(tmp_path / "before"), "steps": 20, "eval_steps": 1}))
    keys = [json.loads(path.read_text()) for path in tmp_path.glob("before/index_cache/*/key.json")]
    [key] = [key for key in keys if key["size"] == os.path.getsize(shards[1])]
    encoded_files.clear()
    cache = tmp_path / "run/index_cache"
    other, lock = index_cache.filling(cache, key), f"{index_cache.folder_of(cache, key)}.lock"
    assert other.__enter__() is not None

    def flock(file, how):
        if how == fcntl.LOCK_EX and file.name == lock:
            waiting.append(list(encoded_files))
            other.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
        real(file, how)

    real = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", flock)
    samples = open_datasets(config)["train"]
    assert waiting == [["shard-0", "shard-3", "shard-4"]] and encoded_files[3:] == ["shard-1"]
    stream = b"".join(one.encode() + b"\xff" for one in TEXTS if one)
    tokens = np.concatenate([samples[i][:-1] for i in range(40)])
    assert np.where(tokens == 256, 255, tokens).tolist() == list(stream[: 40 * 16])


def test_an_error_while_text_is_tokenised_is_not_one_of_the_cache(tmp_path, shards, monkeypatch):
    config = config_of(tmp_path)
    for error in (OSError(5, "Input/output error"), ValueError("a tokenizer's own")):
        monkeypatch.setattr(text.TextEncoder, "__call__", Mock(side_effect=error))
        with pytest.raises(type(error)) as caught:
            open_datasets(config)
        assert caught.value is error and not list(tmp_path.rglob("*partial*"))
    monkeypatch.undo()
    monkeypatch.setattr(Path, "rename", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(InputError, match=r"the stored data .* cannot be written or read .No space left on device"):
        open_datasets(config)


KILLED = """
import os, pathlib, signal, sys
from megajax.data import index_cache
with index_cache.filling(pathlib.Path(sys.argv[1]), {"a": 1}) as folder:
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_files_of_a_killed_process_are_removed_under_the_lock(tmp_path):
    def names():
        return sorted(path.name.split("-")[0] for path in tmp_path.iterdir())

    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path], capture_output=True, text=True, check=False)
    killed = Path(done.stdout.strip())
    with index_cache.filling(tmp_path, {"b": 2}):
        assert killed.is_dir()  # of another key
    with index_cache.filling(tmp_path, {"a": 1}) as folder:
        assert folder.is_dir() and not killed.exists()
        with index_cache.filling(tmp_path, {"a": 1}, wait=False) as other:
            assert other is None and folder.is_dir()
    assert not any("partial" in name for name in names()) and len(names()) == 2


def test_bad_lines_are_left_out_and_the_summary_and_the_commands_say_so(tmp_path, capsys):
    (tmp_path / "shard-0").write_text('{"body": "some text that is good"}\n{"text": "a"}\n[]\n{"body": "more"}\n')
    (tmp_path / "shard-1").write_text('{"body": "another text of some length"}\n{\n')
    config = config_of(tmp_path)
    with pytest.warns(UserWarning, match=r"shard-0: 2 bad lines left out.\n.*line 2 has no key .*data.text_key"):
        opened = open_datasets(config)
    lines = describe_data(config, opened)
    assert lines[0] == f"{tmp_path}/shard-*, shuffled, tokenizer byte"
    assert lines[1].startswith("train: 3 documents, 56 tokens (3 bad lines of the text left out), 3 samples per epoch;")
    blend = config_of(tmp_path, {"train": f"1 {tmp_path}/shard-0 1 {tmp_path}/shard-1"})
    assert (
        "56 tokens (3 bad lines of the text left out) in 2 data sets" in describe_data(blend, open_datasets(blend))[1]
    )
    (tmp_path / "run.yaml").write_text(config.to_yaml())
    assert index.main([str(tmp_path / "run.yaml")]) == 0 and inspect.main([str(tmp_path / "run.yaml")]) == 0
    printed = capsys.readouterr().out
    assert "everything is stored" in printed and "<end of document>" in printed and "\nsome text that i" in printed
    assert "100.00% end with token 256, the end-of-document token" in printed
    # Two passes over 56 tokens are 7 samples of 16, two steps of four.
    assert index.main([str(tmp_path / "run.yaml"), "run.epochs=2", "run.steps=null"]) == 0
    assert "2 steps read 128 tokens, 2.29 epochs" in capsys.readouterr().out


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.data())
def test_joined_arrays_read_as_one(sizes, data):
    whole = np.arange(sum(sizes))
    joined = JoinedTokens(np.split(whole, np.cumsum(sizes)[:-1]))
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    np.testing.assert_array_equal(joined[start:stop], whole[start:stop])
    places = np.array(data.draw(st.lists(st.sampled_from(whole.tolist()))) if len(whole) else [], np.int64)
    np.testing.assert_array_equal(joined[places], whole[places])


FILES = {"empty": "", "hollow": '{"body": ""}', "bad": "{\n[]", "short": '{"body": "short"}', "a.zip": "PK\3\4"}
MISTAKES = {
    "none": r"data.train \(default\): .*none does not exist or is not a file: correct the path",
    "no-*.jsonl": r"no-\*.jsonl matches no file",
    "run": r"run is a directory; name the files in it, such as .*run/\*.jsonl",
    "empty": "empty has no documents: give other files, or another data.text_key",
    "hollow": 'hollow has only empty text under "body"',
    "bad": "every line is bad, 2 in all; nothing is written. The first: .*bad, line 1 is not JSON",
    "short": r"short has 6 tokens for train, but a sample of batch.sequence_length=16 takes 17",
    "a.zip": "a.zip is a ZIP archive",
    "stream.arrow": "stream.arrow is an Arrow file: write it as Parquet",
    "file.arrow": "file.arrow is an Arrow file: write it as Parquet",
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", MISTAKES)
def test_files_that_cannot_be_read_are_sentences_and_leave_nothing(tmp_path, name):
    (tmp_path / "run").mkdir()
    for file, content in FILES.items():
        (tmp_path / file).write_text(content)
    table = pyarrow.table({"body": TEXTS})
    for file, writer in (("stream.arrow", pyarrow.ipc.new_stream), ("file.arrow", pyarrow.ipc.new_file)):
        with writer(str(tmp_path / file), table.schema) as arrow:
            arrow.write_table(table)
    with pytest.raises(InputError, match=MISTAKES[name]):
        open_datasets(config_of(tmp_path, {"train": str(tmp_path / name)}))
    assert not list(tmp_path.rglob("*partial*"))


@pytest.mark.smoke
@pytest.mark.parametrize("token", [-1, 0, 3, 4, 2**16])
def test_a_token_outside_the_vocabulary_of_its_tokenizer_is_a_sentence(token):
    """One beyond the bytes of a stored token too."""
    tokenizer: Any = SimpleNamespace(vocab_size=4, encode_all=lambda texts: [[token] for _ in texts])
    encoder, line = text.TextEncoder("mine", None, None, "text", tokenizer=tokenizer), b'{"text": "a"}\n'
    block = LineBlock("a.jsonl", 1, line, len(line), TextPosition(len(line), 1))
    if 0 <= token < 4:
        assert encoder(block).tokens.tolist() == [token]
    else:
        with pytest.raises(InputError, match=f"mine gave the token id {token}, outside its vocab_size=4: correct it"):
            encoder(block)


def test_settings_that_do_not_fit_are_sentences(tmp_path):
    (tmp_path / "shard-0").write_text('{"body": "some text that is good"}')
    for data, sentence in {
        ("tokenizer", None): "data.kind=text needs data.tokenizer",
        ("train", None): "data.kind=text needs data.train .*: set data.train to JSON lines",
        ("order", "megatron"): "data.order=megatron.* cannot be combined with data.kind=text.*: write token files",
    }.items():
        with pytest.raises(ConfigError, match=sentence):
            check(config_of(tmp_path, dict([data])))
    with pytest.raises(InputError, match="data.tokenizer=null:300 has 301 tokens, more than model.vocab_size=257"):
        open_datasets(config_of(tmp_path, {"tokenizer": "null:300"}))
    model = {"type": "WordLevel", "vocab": {"?": 0, "<stop>": 1}, "unk_token": "?"}
    (tmp_path / "t.json").write_text(json.dumps({"version": "1.0", "model": model}))
    with pytest.raises(InputError, match="no end-of-document token .*: name its token with data.end_of_document"):
        open_datasets(config_of(tmp_path, {"tokenizer": str(tmp_path / "t.json")}))
    config = config_of(tmp_path, {"tokenizer": str(tmp_path / "t.json"), "end_of_document": "<stop>"})
    config = config.model_copy(update={"batch": config.batch.model_copy(update={"sequence_length": 1})})
    assert open_datasets(config)["train"][0].tolist() in ([0, 1], [1, 0])
