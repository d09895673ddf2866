"""A tokenizer whose regular expressions or steps need more than a child process has is a sentence."""

import json
import os
import re
import subprocess
import sys

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from megajax.data.sandbox import LimitedProcess, Stopped
from megajax.data.tokenizer_trial import trial_texts, try_tokenizer
from megajax.data.tokenizers import load_tokenizer
from megajax.errors import InputError

EXPONENTIAL = ["(a|a?)+$b", "(a+)+$", r"(\w+\s?)+$", r"(\s+)+x", "(é|é?)+z", "(?:x+x+)+y", r"(\S+\s*)+\d"]
CUBIC = "a*a*a*[^a]?c|a"  # each match ends before the library's own limit of steps
# The words of GPT-2, and those of Llama 3 and GPT-4o, which are the longest of published tokenizers.
LETTERS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
ORDINARY = [
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
    rf"{LETTERS}*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+(?i:'s|'t)?|{LETTERS}+[\p{{Ll}}\p{{Lm}}]*|\p{{N}}{{1,3}}|\s+",
]


def splitting(path, regex):
    made = Tokenizer(models.WordLevel({"?": 0, "a": 1}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(regex), "isolated")
    made.save(str(path))
    return path


def child_seconds():
    times = os.times()
    return times.children_user + times.children_system


@pytest.mark.parametrize("regex", [*EXPONENTIAL, CUBIC])
def test_a_regular_expression_that_takes_long_is_a_sentence_within_seconds(regex, tmp_path, capfd):
    path, before = splitting(tmp_path / "tokenizer.json", regex), child_seconds()
    with pytest.raises(InputError) as error:
        load_tokenizer(str(tmp_path))
    assert f"the tokenizer {path} " in str(error.value) and "give another tokenizer" in str(error.value)
    assert ("2 s of processor time" if regex == CUBIC else "retry-limit") in str(error.value)
    assert child_seconds() - before < 5
    assert capfd.readouterr().err == ""  # nothing of Rust's


@pytest.mark.parametrize("regex", ORDINARY[1:])
def test_an_ordinary_tokenizer_is_read_within_a_second(regex, tmp_path):
    before = child_seconds()
    load_tokenizer(str(splitting(tmp_path / "tokenizer.json", regex)))
    assert 0 < child_seconds() - before < 1


def test_an_ordinary_tokenizer_is_tried_once_by_all_processes(tmp_path):
    path, before = splitting(tmp_path / "tokenizer.json", ORDINARY[0]), child_seconds()
    load_tokenizer(str(path))
    first = child_seconds() - before
    assert 0 < first < 1
    (copy := tmp_path / "copy.json").write_bytes(path.read_bytes())
    load_tokenizer(str(copy))
    assert child_seconds() - before == first
    code = "import os, sys; from megajax.data.tokenizers import load_tokenizer; load_tokenizer(sys.argv[1]); "
    code += "times = os.times(); print(times.children_user + times.children_system)"
    assert float(subprocess.check_output([sys.executable, "-c", code, str(path)])) == 0
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": {"type": "NFC"}}))
    before = child_seconds()
    load_tokenizer(str(path))
    assert child_seconds() > before


def test_the_trial_has_runs_of_all_letters_that_a_tokenizer_names():
    texts = list(trial_texts("ﷺq"))
    for letter in "ﷺqa0 \n":
        assert max(text.count(letter) for text in texts) >= 3000
    assert sum(map(len, texts)) < 2**18


def growing(text):
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("a", 10 * "a")] * 10)
    yield len(tokenizer.encode(text).ids)


def test_an_allocation_that_ends_the_process_is_a_sentence():
    with pytest.raises(Stopped) as stopped:
        LimitedProcess(memory=2**28).run("the tokenizer", "give another", growing, "a")
    assert "the tokenizer ends its process (SIG" in str(stopped.value.error)


def environment():
    yield {
        name: os.environ.get(name) for name in ("TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    }


def test_a_limited_process_starts_no_threads_whose_stacks_would_count_as_its_memory():
    assert LimitedProcess().run("the tokenizer", "give another", environment) == [
        {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    ]


REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": 10 * "a"}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
GROWING = {  # a part of a tokenizer.json, the name of its steps, one of them, and how much longer ten make a text
    "normalizer": ("normalizers", REPLACE, 10**10),
    "pre_tokenizer": ("pretokenizers", BYTES, 8**10),
    "post_processor": ("processors", BYTES, 8**10),
    "decoder": ("decoders", REPLACE, 10**10),
}


@pytest.mark.parametrize("part", GROWING)
def test_ten_steps_that_each_make_a_text_longer_are_refused_before_they_run(tmp_path, part):
    path = splitting(tmp_path / "tokenizer.json", "a")
    name, step, times = GROWING[part]
    steps = {part: {"type": "Sequence", name: [step] * 10}}
    path.write_text(json.dumps(json.loads(path.read_text()) | steps))
    before = child_seconds()
    with pytest.raises(InputError, match=re.escape(f"{part} of {path} may make a text {times:.3g} times as long")):
        try_tokenizer(path)
    assert child_seconds() - before < 1
