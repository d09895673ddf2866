"""Files from elsewhere run no code, lead out of no folder, and take no time or memory beyond their size."""

import json
import os
import time
from pathlib import Path

import pytest

from dev.fuzz.cases import FAILED
from dev.fuzz.formats import FORMATS
from dev.fuzz.runner import run_all
from megajax.config import load_config
from megajax.config.tree import read_file
from megajax.data.chat_template import ChatTemplate
from megajax.data.indexed import IndexedDataset
from megajax.data.model_files import read_json
from megajax.data.tokenizers import load_tokenizer
from megajax.errors import ConfigError, InputError
from megajax.hf import beside
from megajax.hf.folder import Weights, read_config

CASES = 12
PENDING = {"parquet", "index_caches", "journals", "metrics", "plots", "rollbacks", "traces"}
PENDING |= {"local_checkpoints", "compiled_plans", "command_lines", "checkpoints", "rates", "tokenizer_json"}


def test_a_damaged_file_of_each_format_is_read_or_ends_in_a_sentence():
    """A sample of `python -m dev.fuzz`: no traceback, no death of the process, limits on memory and time."""
    found = run_all([*FORMATS], seed=1, first=0, count=CASES, jobs=2)
    assert found.keys() == FORMATS.keys() and all(len(outcomes) == CASES for outcomes in found.values())
    failed = {f"{name}:{each.case}": each for name, own in found.items() for each in own if each.ends == FAILED}
    assert not {case: each for case, each in failed.items() if case.partition(":")[0] not in PENDING}


ALIASES = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 'x'}]\n" for i in range(12))


@pytest.mark.parametrize(
    "text, problem",
    [
        (ALIASES, "has more than 50,000 values"),
        ("run: " + "[" * 100_000, "is nested too deeply"),
        ("run:\n" + "\n".join(" " * i + "a:" for i in range(1, 1000)), "is nested too deeply"),
        ("run: {seed: " + "9" * 100_000 + "}", "does not fit its type"),
        ('run: {name: "a\\0b"}', "run.name has a character that is not text"),
        ("run: {name: !!python/object/apply:os.mkdir [made]}", "is not text"),
    ],
    ids=["aliases", "brackets", "indentation", "digits", "NUL", "Python"],
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
        Weights(folder)


def test_links_out_of_a_model_folder_are_not_followed(tmp_path):
    (secret := tmp_path / "secret").write_text("{}")
    folder, run = tmp_path / "model", tmp_path / "run"
    folder.mkdir()
    run.mkdir()
    reads = {
        "tokenizer.json": lambda: load_tokenizer(str(folder)),
        "config.json": lambda: read_config(folder),
        "model.safetensors": lambda: Weights(folder),
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


@pytest.mark.parametrize(
    "source",
    [
        "{{ ().__class__.__base__.__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__['os'].mkdir('made') }}",
        "{{ lipsum.__globals__['os'].mkdir('made') }}",
        "{{ messages.append(1) }}",
        "{{ 'a' * 10 ** 12 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ 1 // 0 }}",
    ],
)
def test_a_chat_template_reaches_nothing_and_makes_nothing_large(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="the chat template its place "):
        ChatTemplate(source, {}, "its place").render([{"role": "user", "content": "x"}])
    assert not [*Path().iterdir()]
