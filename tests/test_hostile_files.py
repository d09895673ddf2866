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
from megajax.data.chat import read_chats
from megajax.data.chat_template import ChatTemplate
from megajax.data.indexed import IndexedDataset
from megajax.data.model_files import read_json
from megajax.data.rendering import Template, render
from megajax.data.sandbox import Child, Stopped
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


DOUBLED = "{% set ns = namespace(s=START) %}{% for i in range(40) %}{% set ns.s = ns.s OP ns.s %}{% endfor %}"
EXPLODING = {
    "memory": [
        "{{ messages[0].content.ljust(3000000000) }}",
        "{{ messages[0].content | center(3000000000) }}",
        "{{ 'a' | center(3000000000) }}",
        "{{ '{:>3000000000}'.format(1) }}",
        "{{ '%3000000000d' | format(1) }}",
        "{{ '%*d' % (2000000000, 1) }}",
        "{{ 'a b' | indent(3000000000) }}",
        "{{ [1] | tojson(indent=3000000000) }}",
        "{{ range(1) | batch(1000000000, 1) | list }}",
        "{{ 'a' * 10 ** 12 }}",
        "{% set x = 'a'.ljust(900000) %}{{ x.replace(' ', x) }}",
        DOUBLED.replace("START", "'aaaaaaaa'").replace("OP", "~"),
        DOUBLED.replace("START", "'aaaaaaaa'").replace("OP", "+"),
        DOUBLED.replace("START", "[1]").replace("OP", "+"),
    ],
    "processor time": [
        "{{ 9 ** (9 ** 9) }}",
        "{{ lipsum(n=100000000) }}",
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(x=7) %}{% for i in range(100000) %}{% set ns.x = ns.x * 7777777 %}{% endfor %}",
    ],
}


@pytest.mark.parametrize("limit", EXPLODING)
def test_a_template_that_explodes_or_does_not_end_is_a_sentence(limit):
    """The lists of the limits together: some kill the child, which is then started again."""
    child = Child(200 << 20, 0.2)
    assert child.run("t", "c", render, Template({"default": "{{ messages[0].content }}"}, {}, "t"), CHAT, False, {})
    for source in EXPLODING[limit]:
        start = time.perf_counter()
        with pytest.raises(Stopped, match=f"the template takes more than .* {limit}: correct it"):
            child.run("the template", "correct it", render, Template({"default": source}, {}, "t"), CHAT, False, {})
        assert time.perf_counter() - start < 10


MESSAGE_BOMB = "{% for m in messages %}{{ m.content * (m.content | length) ** 12 }}{% endfor %}"


def test_a_template_that_explodes_at_one_chat_names_its_line(tmp_path):
    template = ChatTemplate(MESSAGE_BOMB, {}, "t.jinja")
    lines = [{"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "b"}]} for text in "ab"]
    lines.insert(1, {"prompt": "a", "completion": "b"})
    lines.append(lines[0] | {"messages": [{"role": "user", "content": "a" * 20}, *lines[0]["messages"]]})
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(InputError, match=r"chats.jsonl, line 4: the chat template t.jinja takes more than .* memory"):
        list(read_chats([str(tmp_path / "chats.jsonl")], lambda: template))


def test_a_child_lives_as_long_as_it_is_used(tmp_path):
    """Values of a work, its error, and a child that was killed meanwhile."""
    child, template = Child(), Template({"default": "{{ messages | length }}"}, {}, "t")
    assert child.run("t", "c", render, template, CHAT * 3, False, {}) == ["3"]
    child._process.kill()
    child._process.wait()
    assert child.run("t", "c", render, template, CHAT, False, {}) == ["1"]
    process = child._process
    nested = CHAT[0]
    for _ in range(10_000):
        nested = {"a": nested}
    with pytest.raises(Stopped, match="t gets values that are nested too deeply"):
        child.run("t", "c", render, template, nested, False, {})
    assert child.run("t", "c", render, template, CHAT, False, {}) == ["1"] and child._process is process
    del child
    assert process.poll() is not None
