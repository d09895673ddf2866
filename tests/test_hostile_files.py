"""Files from elsewhere run no code, lead out of no folder, and take no time or memory beyond their size."""

import json
import os
import signal
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from dev.fuzz.cases import FAILED, READ, SENTENCE
from dev.fuzz.formats import FORMATS
from dev.fuzz.hand_made import FOLDER, SECOND, hand_made
from dev.fuzz.runner import run, run_all
from megajax.config import load_config
from megajax.config.extensions import import_extensions
from megajax.data import remote
from megajax.data.chat_template import ChatTemplate, find_chat_template
from megajax.data.indexed import IndexedDataset
from megajax.data.json_lines import check_inputs
from megajax.data.model_files import read_json
from megajax.data.special_tokens import read_folder_tokens
from megajax.data.tokenizers import load_tokenizer
from megajax.errors import ConfigError, InputError, UserError
from megajax.hf import beside
from megajax.hf.folder import FolderTensors, read_config
from megajax.inference.prompts import read_prompts
from megajax.schema.tree import read_file
from megajax.tools.plan.rates import H200, read_rates
from megajax.tools.plot import read_records

CASES = 4


def test_a_damaged_file_of_each_format_is_read_or_ends_in_a_sentence():
    """A sample of `python -m dev.fuzz`: no traceback, no death of the process, limits on memory and time."""
    found = run_all([*FORMATS], seed=1, first=0, count=CASES, jobs=2)
    assert found.keys() == FORMATS.keys() and all(len(outcomes) == CASES for outcomes in found.values())
    failed = {f"{name}:{each.case}": each for name, own in found.items() for each in own if each.ends == FAILED}
    assert not failed


def test_each_hand_made_file_is_read_or_ends_in_a_sentence():
    """In one process: bombs, bytes and numbers that were tracebacks, exhausted memory or never ended."""
    count = sum(path.suffix != SECOND for path in FOLDER.rglob("*.*"))
    outcomes = run(hand_made, "hand_made", seed=0, first=0, last=count)
    assert count > 75 and [each.case for each in outcomes] == list(range(count))
    assert not [each for each in outcomes if each.ends == FAILED]
    assert {each.ends for each in outcomes} == {READ, SENTENCE}


@pytest.mark.parametrize("odd", ["a\nb", "a\u2028b", "\x1b[31m", "\0", "\udce4", "x" * 10_000, "\r"], ids=ascii)
def test_an_error_is_one_line_whatever_is_in_it(odd):
    """A list below it keeps its indentation, and the cure at the end is kept too."""
    text = str(InputError(f"a file has {odd}: correct it.\n  first\n    second"))
    line, *rest = text.splitlines()
    assert line.isprintable() and len(line) < 1100 and line.startswith("a file has ") and line.endswith(": correct it.")
    assert rest == ["  first", "    second"]


ALIASES = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 'x'}]\n" for i in range(12))


@pytest.mark.parametrize(
    "text, problem",
    [
        (ALIASES, "has more than 50,000 values"),
        ("run: " + "[" * 100_000, "is nested too deeply"),
        ("run:\n" + "\n".join(" " * i + "a:" for i in range(1, 1000)), "is nested too deeply"),
        ("run: {seed: " + "9" * 100_000 + "}", "does not fit its type"),
        ('run: {name: "a\\0b"}', "run.name has a character that is not text"),
        ('run: {name: "a\\ud800"}', "run.name has a character that is not text"),
        ("run: {name: !!python/object/apply:os.mkdir [made]}", "is not text"),
    ],
    ids=["aliases", "brackets", "indentation", "digits", "NUL", "surrogate", "Python"],
)
def test_yaml_that_explodes_or_runs_code_is_a_sentence(text, problem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "hostile.yaml"
    path.write_text(text)
    start = time.perf_counter()
    with pytest.raises(ConfigError, match=problem):
        load_config(path)
    assert time.perf_counter() - start < 5
    assert [*tmp_path.iterdir()] == [path]


def test_aliases_that_do_not_explode_are_read(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("a: &a [1, 2]\nb: [*a, *a]\n")
    assert read_file(path).values == {"a": [1, 2], "b": [[1, 2], [1, 2]]}


@pytest.mark.parametrize("named", ["../secret.safetensors", "/etc/hostname", "sub/x.safetensors", "x" * 300])
def test_an_index_names_files_of_its_own_folder_only(named, tmp_path):
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    for path in (tmp_path / "secret.safetensors", folder / "sub" / "x.safetensors"):
        path.write_bytes(b"secret")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": named}}))
    with pytest.raises(InputError, match="lacks .*, which its index names"):
        FolderTensors(folder)


def test_links_out_of_a_model_folder_are_not_followed(tmp_path):
    (secret := tmp_path / "secret").write_text("{}")
    folder, run = tmp_path / "model", tmp_path / "run"
    folder.mkdir()
    run.mkdir()
    reads = {
        "tokenizer.json": lambda: load_tokenizer(str(folder)),
        "config.json": lambda: read_config(folder),
        "model.safetensors": lambda: FolderTensors(folder),
        "generation_config.json": lambda: beside.keep(folder, run),
        "tokenizer_config.json": lambda: beside.token_names(folder),
    }
    for name, read in reads.items():
        (folder / name).symlink_to(secret)
        with pytest.raises(InputError, match=f"{name} is a link out of its folder"):
            read()
        (folder / name).unlink()
    assert not [*run.iterdir()]


def test_links_within_a_folder_and_of_hugging_faces_cache_are_followed(tmp_path):
    cache = tmp_path / "models--a--b"
    (cache / "blobs").mkdir(parents=True)
    (cache / "blobs" / "123").write_text('{"a": 1}')
    snapshot = cache / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to("../../blobs/123")
    (snapshot / "other.json").symlink_to("config.json")
    assert read_json(snapshot / "config.json") == read_json(snapshot / "other.json") == {"a": 1}


def test_a_pipe_in_place_of_an_index_is_no_endless_wait(tmp_path):
    os.mkfifo(tmp_path / "a.idx")
    with pytest.raises(InputError, match="is truncated"):
        IndexedDataset(tmp_path / "a")


CHAT = [{"role": "user", "content": "x y"}]


@pytest.mark.parametrize(
    "source",
    [
        "{{ ().__class__.__base__.__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__['os'].mkdir('made') }}",
        "{{ lipsum.__globals__['os'].mkdir('made') }}",
        "{{ cycler.__init__.__globals__.os.mkdir('made') }}",
        "{% include '/etc/passwd' %}",
        "{{ messages.append(1) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ 1 // 0 }}",
        "{{ '\\ud800' }}",
        "{{ 'a' * 10 ** 6 }}",
    ],
)
def test_a_chat_template_reaches_nothing_and_fails_in_a_sentence(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="the chat template its place "):
        ChatTemplate(source, {}, "its place").render(CHAT)
    assert not [*Path().iterdir()]


def tokenizer_json(model: dict, **more) -> str:
    return json.dumps({"version": "1.0", "added_tokens": [], "model": model} | more)


TOKENIZERS = {
    "WordLevel": tokenizer_json({"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}),
    "BPE": tokenizer_json({"type": "BPE", "vocab": {"a": 0}, "merges": [], "unk_token": "/etc/passwd"}),
    "Unigram": tokenizer_json({"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": None}),
    "WordPiece": tokenizer_json(
        {
            "type": "WordPiece",
            "vocab": {"a": 0},
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 9,
        }
    ),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_tokenizer_without_its_unknown_token_is_a_sentence(kind, tmp_path):
    (tmp_path / "tokenizer.json").write_text(TOKENIZERS[kind])
    with pytest.raises(InputError, match=r"tokenizer.json fails at a text \(.*[Uu](nk|NK)"):
        load_tokenizer(str(tmp_path)).encode_all(["b"])


@pytest.mark.parametrize(
    "added",
    [
        *('{"0": "3"}', '{"x": {"content": "a"}}', '{"0": {}}', "[1]", '{"٣": {"content": "a"}}', '{"a": Infinity}'),
        *('{"a": 1e400}', '{"a": -1}', '{"a": 1.5}', '{"": 1}', '{"0": {"content": ""}}'),
    ],
)
def test_odd_special_tokens_are_read_or_end_in_a_sentence(added, tmp_path):
    for text in (f'{{"added_tokens_decoder": {added}}}', f'{{"eos_token": {added}, "chat_template": {added}}}'):
        (tmp_path / "tokenizer_config.json").write_text(text)
        (tmp_path / "added_tokens.json").write_text(added)
        with pytest.raises(InputError, match="added_tokens"):
            read_folder_tokens(tmp_path)
        (tmp_path / "added_tokens.json").unlink()
        for read in (read_folder_tokens, find_chat_template):
            try:
                read(tmp_path)
            except InputError as error:
                assert str(tmp_path) in str(error)


@pytest.mark.parametrize("spec", ["null:²", "null:٣", "null:" + "9" * 5000, "null:0", "null:-1"])
def test_a_vocabulary_size_is_a_number_that_int_reads(spec):
    with pytest.raises(InputError, match="has no vocabulary size") as error:
        load_tokenizer(spec)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("word", ["²", "٣", "9" * 5000, "1_0"])
def test_a_token_id_is_a_number_that_int_reads(word):
    with pytest.raises(InputError, match="is not a token id of null:50"):
        load_tokenizer("null:50").encode(word)


@pytest.mark.parametrize("protocol", ["bogus", "dir", "cached", "github", "dbfs", "data", "http:"])
def test_urls_of_other_protocols_are_sentences(protocol, tmp_path, monkeypatch):
    pytest.importorskip("fsspec")
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.001)
    with pytest.raises(InputError, match=f"{protocol}://127.0.0.1:1/a.idx"):
        IndexedDataset(f"{protocol}://127.0.0.1:1/a", cache=tmp_path)


def test_a_safetensors_header_with_odd_metadata_is_read(tmp_path):
    header = json.dumps({"__metadata__": None, "a": {"dtype": "F8_E4M3", "shape": [2, 2], "data_offsets": [0, 4]}})
    content = len(header).to_bytes(8, "little") + header.encode() + bytes([56] * 4)
    (tmp_path / "model.safetensors").write_bytes(content)
    block = FolderTensors(tmp_path).read_stored("a", (slice(0, 2), slice(0, 2)))
    assert block.astype(float).tolist() == [[1.0, 1.0], [1.0, 1.0]]  # 0x38: exponent 7 of bias 7


def test_a_role_of_many_letters_is_shown_in_part(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "a" * 5000, "content": "b"}]}))
    with pytest.raises(InputError, match="has the role 'aaa.*\\.\\.\\. in message 0") as error:
        read_prompts(str(path))
    assert len(str(error.value)) < 600


SMALL = """
run: {{steps: 1}}
model: {{num_layers: 1, hidden_size: 16, num_heads: 2, vocab_size: 257}}
batch: {{global_size: 2, sequence_length: 8}}
"""


def config_with(text: str) -> Callable[[Path], object]:
    def load(path: Path) -> object:
        (path.parent / "main.yaml").write_text(text.format(path=path), encoding="utf-8")
        return load_config(path.parent / "main.yaml")

    return load


# Everything that reads a file that a user names: the name that it expects, and the call.
NAMED_FILES = {
    "config": ("a.yaml", load_config),
    "include": ("a.yaml", config_with("include: {path}")),
    "blend": ("blend", config_with(f"{SMALL}data: {{{{train: {{{{file: {{path}}}}}}}}}}")),
    "extension": ("a.py", lambda path: import_extensions([str(path)])),
    "prompts": ("a.txt", lambda path: read_prompts(str(path))),
    "chats": ("a.jsonl", lambda path: check_inputs([str(path)])),
    "tokens": ("a.idx", lambda path: IndexedDataset(path.with_suffix(""))),
    "tokenizer.json": ("tokenizer.json", lambda path: load_tokenizer(str(path))),
    "SentencePiece": ("a.model", lambda path: load_tokenizer(str(path))),
    "tiktoken": ("a.tiktoken", lambda path: load_tokenizer(str(path))),
    "template": ("a.jinja", lambda path: find_chat_template(None, path)),
    "rates": ("rates.json", lambda path: read_rates(path, H200)),
    "model": ("config.json", lambda path: read_config(path.parent)),
    "weights": ("model.safetensors", lambda path: FolderTensors(path.parent)),
    "metrics": ("metrics.jsonl", lambda path: read_records(path.parent)),
}
LARGE_FILES = {"chats", "weights", "extension", "metrics", "tokens"}  # read in pieces, mapped, or code


@pytest.mark.parametrize("kind", NAMED_FILES)
@pytest.mark.parametrize("instead", ["pipe", "device", "directory", "large"])
def test_no_named_file_is_an_endless_wait_or_all_of_the_memory(kind, instead, tmp_path):
    name, read = NAMED_FILES[kind]
    path = tmp_path / name
    if instead == "large":
        with path.open("wb") as file:
            file.truncate(10 * 2**30)  # sparse: it takes no disk
    else:
        {"pipe": os.mkfifo, "directory": os.mkdir, "device": lambda path: path.symlink_to("/dev/zero")}[instead](path)
    if instead == "large" and kind in LARGE_FILES:
        return
    signal.setitimer(signal.ITIMER_REAL, 10)  # its handler's default ends the process
    tracemalloc.start()
    try:
        with pytest.raises(UserError) as error:
            read(path)
        assert name in str(error.value) or "names a file that cannot be read" in str(error.value)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
        signal.setitimer(signal.ITIMER_REAL, 0)
