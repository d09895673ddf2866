"""Scores are those of transformers; evaluation of files; the windows of long documents."""

import json
import math

import jax
import numpy as np
import pytest

import megajax
from megajax import evaluate
from megajax.data.indexed import IndexedWriter
from megajax.errors import InputError
from megajax.inference.scoring import Scorer, Window, windows


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_mixtral"])
def test_scores_are_those_of_transformers_on_a_mesh(references, folder_of, name):
    devices = jax.devices()[:4]
    model = megajax.from_hf(folder_of(name), megajax.build_mesh({"fsdp": 2, "tensor": 2}, devices))
    expected = references[name]["scores"]
    found = Scorer(model, tokens_per_batch=128).scores([Window(tokens, start) for tokens, start, *_ in expected])
    for score, (tokens, start, likelihood, greedy) in zip(found, expected, strict=True):
        assert score.log_likelihood == pytest.approx(likelihood, abs=1e-4)
        assert (score.is_greedy, score.count) == (greedy, len(tokens) - start)
    assert {greedy for *_, greedy in expected} == {True, False}


@pytest.mark.smoke
@pytest.mark.parametrize(("count", "length"), [(2, 8), (9, 8), (10, 4), (11, 4), (14, 3)])
def test_windows_predict_each_token_once_with_all_the_context_there_is(count, length):
    tokens = list(range(100, 100 + count))
    predicted = []
    for part, start in windows(tokens, length):
        assert len(part) == min(length + 1, count)
        assert part == tokens[part[0] - 100 :][: len(part)]
        predicted += part[start:]
    assert predicted == tokens[1:]


TEXTS = ["hello world", "é", "a much longer text of several windows"]


def test_a_path_may_have_equal_signs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("date=2024/x.jsonl", "date=2024/tokens.idx", "lang=en.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    sets = ["date=2024/x.jsonl", "date=2024/tokens", "lang=en.jsonl", "a=b.jsonl", "other=date=2024/x.jsonl", "/d=1/y"]
    assert evaluate.data_sets(sets) == {
        "x.jsonl": "date=2024/x.jsonl",
        "tokens": "date=2024/tokens",
        "lang=en.jsonl": "lang=en.jsonl",
        "a": "b.jsonl",
        "other": "date=2024/x.jsonl",
        "y": "/d=1/y",
    }
    with pytest.raises(InputError, match="--data=d/a: another set is called a: write NAME=d/a"):
        evaluate.data_sets(["a=b.jsonl", "d/a"])


def test_files_are_evaluated_as_by_hand(letters_folder, tmp_path, capsys):
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    model = megajax.from_hf(letters_folder)
    with IndexedWriter(tmp_path / "tokens", np.uint16) as writer:
        for text in TEXTS:
            writer.add_document(model.encode(text, special_tokens=text != TEXTS[0]))  # scored with its beginning once
    total = count = 0
    for text in TEXTS:
        tokens = [0] + [28 if c == "é" else 27 if c == " " else ord(c) - 96 for c in text]
        for i in range(1, len(tokens)):
            window = (i - 1) // 8  # a window's first token has the one before it as its context
            first = 8 * window if (window + 1) * 8 + 1 <= len(tokens) else max(0, len(tokens) - 9)
            logits = np.asarray(model([tokens[first:i]]))[0, -1].astype(np.float64)
            total -= logits[tokens[i]] - np.log(np.exp(logits).sum())
            count += 1
    size = sum(len(text.encode()) for text in TEXTS)
    options = ["--data", f"lines={tmp_path / 'texts.jsonl'}", "--data", str(tmp_path / "tokens")]
    assert evaluate.main([str(letters_folder), *options, "--output", str(tmp_path / "out.json")]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["lines"] == pytest.approx(found["tokens"])
    assert found["lines"] == pytest.approx(
        {
            "documents": 3,
            "tokens": count,
            "loss": total / count,
            "perplexity": math.exp(total / count),
            "bits_per_byte": total / math.log(2) / size,
        },
        rel=1e-5,
    )
    assert f"{total / count:.4f}" in capsys.readouterr().out


def test_mistakes_are_sentences(letters_folder, tmp_path, capsys):
    def error_of(*options: str) -> str:
        with pytest.raises(SystemExit):
            evaluate.main([str(letters_folder), *options])
        return capsys.readouterr().err

    (tmp_path / "empty.jsonl").touch()
    assert "has no tokens to predict" in error_of("--data", str(tmp_path / "empty.jsonl"))
    assert "another set is called x: write NAME=" in error_of("--data", "x=1", "--data", "x=2")
    assert "--mesh=tensors=2 is not a mesh: give sizes of" in error_of("--data", "a", "--mesh", "tensors=2")
    assert "needs 64 devices and there are 8" in error_of("--data", "a", "--mesh", "fsdp=64")
    assert "dtype=int8 is not one of float32" in error_of("--data", "a", "--dtype", "int8")
    assert "nothing.idx" in error_of("--data", str(tmp_path / "nothing"))
