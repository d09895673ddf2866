"""An error of any kind while a file from others is read is a sentence with its path, wherever it is raised."""

import io
import json
import random
import sys
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import megajax
from dev.fuzz import data_formats
from dev.fuzz.data_formats import CHATS, TEXTS, as_lines, tokenizer_folder
from dev.fuzz.model_formats import unpacked
from dev.fuzz.subject import write
from megajax import errors, status
from megajax.config import load_config
from megajax.data.chat import Rendering, read_chats
from megajax.data.chat_template import load_chat_template
from megajax.data.indexed import IndexedDataset
from megajax.data.journal import Journal
from megajax.data.json_lines import check_inputs, read_blocks, texts
from megajax.data.shards import Shard
from megajax.data.tokenizers import deciding_files, load_tokenizer
from megajax.errors import UserError
from megajax.hf.convert import read_folder
from megajax.hf.folder import FolderTensors
from megajax.inference.prompts import read_prompts
from megajax.tools.plan.rates import H200, read_rates
from megajax.tools.plot import read_records
from megajax.training.expert_load import read_loads

PACKAGE = str(Path(megajax.__file__).parent)
ERRORS = errors.__file__
PLACES = 25  # of each reader
LINE = {"step": 1, "loss": 2.0, "tokens": 5, "expert_load": [1.0], "time": 1.0, "learning_rate": 0.1}


class Odd(Exception):
    """An error that no reader expects."""


def run(read: Callable[[], object], at: int = 0) -> int:
    """Call `read`; raise Odd in its line number `at` of megajax below a `file_reader`. The number of such lines."""
    count = 0

    def in_function(frame, event, argument):
        nonlocal count
        if event == "line":
            count += 1
            if count == at:
                sys.settrace(None)
                raise Odd("nobody expects this")
        return in_function

    def in_call(frame, event, argument):
        name, each = frame.f_code.co_filename, frame.f_back
        if not name.startswith(PACKAGE) or name == ERRORS:
            return None
        while each is not None and each.f_code.co_filename != ERRORS:
            each = each.f_back
        return None if each is None else in_function

    sys.settrace(in_call)
    threading.settrace(in_call)  # of threads that read ahead
    try:
        read()
    finally:
        sys.settrace(None)
        threading.settrace(None)  # pyright: ignore
    return count


def config(folder: Path):
    write(folder / "base.yaml", "model: {hidden_size: 32, num_heads: 4, num_layers: 1, vocab_size: 512}\n")
    path = write(
        folder / "a.yaml", "include: base.yaml\ndata: {kind: synthetic}\nrun: {steps: 1}\nbatch: {global_size: 1}\n"
    )
    return folder, lambda: load_config(path, ["batch.sequence_length=64"])


def lines_of(path: Path):
    def read():
        check_inputs([str(path)])
        for block in read_blocks([str(path)], "text"):
            assert [*texts(block, "text")]

    return path, read


def json_lines(folder: Path):
    return lines_of(write(folder / "a.jsonl", as_lines(TEXTS)))


def json_array(folder: Path):
    return lines_of(write(folder / "a.json", json.dumps(TEXTS)))


def parquet(folder: Path):
    return lines_of(data_formats.parquet(folder).files[0])


def chats(folder: Path):
    path = write(folder / "c.jsonl", as_lines(CHATS))
    template = load_chat_template(tokenizer_folder(folder / "model"))
    return path, lambda: [*read_chats([str(path)], Rendering(lambda: template, lambda text: None))]


def shard(folder: Path):
    path = folder / "s.tar"
    with tarfile.open(path, "w") as tar:
        for name, text in {"a.json": "{}", "a.png": "no picture", "b.txt": "a caption"}.items():
            tar.add(write(folder / name, text), name)
    return path, lambda: [*Shard(str(path)).records()]


def prompts(folder: Path):
    path = write(folder / "p.jsonl", as_lines([{"prompt": "a"}, *CHATS[:2]]))
    return path, lambda: read_prompts(str(path))


def template(folder: Path):
    model = tokenizer_folder(folder / "model")
    return model, lambda: load_chat_template(model)


def tokenizer(folder: Path):
    model = tokenizer_folder(folder / "model")

    def read():
        found = load_tokenizer(str(model))
        found.decode(found.encode("ab"))
        deciding_files(str(model))

    return model, read


def pieces(folder: Path):
    import sentencepiece

    trained, some = io.BytesIO(), iter([record["text"] for record in TEXTS])
    settings = {"vocab_size": 20, "hard_vocab_limit": False, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.Train(sentence_iterator=some, model_writer=trained, **settings)
    path = write(folder / "tokenizer.model", trained.getvalue())
    return path, lambda: load_tokenizer(str(path))


def tokens(folder: Path):
    path = data_formats.token_files(folder).files[0]
    return path.with_suffix(""), lambda: IndexedDataset(path.with_suffix(""))


def journal(folder: Path):
    data_formats.journals(folder)
    return folder, lambda: Journal(str(folder / "o"), {"a": 1}, 2, resume=True)


def model(folder: Path):
    [path] = unpacked(folder, ["tiny_llama"])
    return path, lambda: read_folder(path)


def tensors(folder: Path):
    save_file({"a": np.ones((2, 3), np.float32)}, folder / "model.safetensors")

    def read():
        found = FolderTensors(folder)
        assert found.read("a", tuple(slice(0, size) for size in found.shape("a"))).sum() == 6

    return folder, read


def rates(folder: Path):
    path = write(folder / "rates.json", '{"bf16_flops": 7e14, "attention_flops": {"64": 1e14}}')
    return path, lambda: read_rates(path, H200)


def metrics(folder: Path):
    path = write(folder / "metrics.jsonl", as_lines([LINE, LINE | {"step": 2}]))
    write(folder / "config.yaml", "run: {steps: 2}\n")

    def read():
        read_records(folder)
        read_loads(path, 1)
        status.status(folder, 1.0)

    return folder, read


READERS = (config, json_lines, json_array, parquet, chats, prompts, template, tokenizer, pieces, tokens, journal, model)
READERS += (tensors, rates, metrics, shard)


@pytest.mark.parametrize("make", READERS, ids=lambda make: make.__name__)
def test_an_error_of_any_kind_anywhere_in_a_reader_is_a_sentence_with_the_path(make, tmp_path):
    """Odd errors are raised by a trace function, at lines from the first to the last that the reader runs."""
    path, read = make(tmp_path)
    read()  # what is kept for later calls
    total = run(read)
    assert total > 10
    for at in sorted({1, total, *random.Random(0).sample(range(1, total + 1), min(PLACES, total))}):
        try:
            run(read, at)
        except UserError as error:
            assert str(path) in str(error) and "\n" not in str(error), at
