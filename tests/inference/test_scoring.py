"""Scores are those of transformers; evaluation of files; the windows of long documents."""

import json
import math
import shutil
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import yaml

import megajax
from megajax import evaluate, sources
from megajax.data.indexed import IndexedWriter
from megajax.data.tokenizers import load_tokenizer
from megajax.errors import InputError
from megajax.hf.convert import read_folder
from megajax.inference.scored_sets import SetFormat, open_set
from megajax.inference.scoring import ScoredWindow, Scorer, answer_windows, windows
from megajax.inference.weights import ModelWeights


# test_lm_eval.py has the scores of tiny_llama.
@pytest.mark.parametrize("name", [pytest.param("tiny_llama", marks=pytest.mark.long), "tiny_mixtral"])
def test_scores_are_those_of_transformers_on_a_mesh(references, folder_of, name):
    devices = jax.devices()[:4]
    model = megajax.from_hf(folder_of(name), megajax.build_mesh({"fsdp": 2, "tensor": 2}, devices))
    expected = references[name]["scores"]
    found = Scorer(model, tokens_per_batch=128).scores([ScoredWindow(tokens, start) for tokens, start, *_ in expected])
    for score, (tokens, start, likelihood, greedy) in zip(found, expected, strict=True):
        assert score.log_likelihood == pytest.approx(likelihood, abs=1e-4)
        assert (score.is_greedy, score.count) == (greedy, len(tokens) - start)
    assert {greedy for *_, greedy in expected} == {True, False}


@pytest.mark.smoke
@pytest.mark.parametrize(("count", "length"), [(2, 8), (9, 8), (10, 4), (11, 4), (14, 3)])
def test_windows_predict_each_token_once_with_all_the_context_there_is(count, length):
    tokens = list(range(100, 100 + count))
    predicted = []
    for part, start, *_ in windows(tokens, length):
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


def test_files_are_evaluated_as_by_hand(letters_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(evaluate, "WINDOWS_AT_ONCE", 2)
    lines = [json.dumps({"text": "of another key", "body": text}) for text in TEXTS]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines) + "\n")
    model = megajax.from_hf(letters_folder)
    with pytest.raises(InputError, match="use megajax.from_hf"):
        megajax.load_run(letters_folder)
    with IndexedWriter(tmp_path / "tokens", np.uint16) as writer:
        for text in TEXTS:
            writer.add_document(model.encode(text, special_tokens=text != TEXTS[0]))  # scored with its beginning once
    total = count = 0
    for text in TEXTS:
        tokens = [0] + [28 if c == "é" else 27 if c == " " else ord(c) - 96 for c in text]
        for i in range(1, len(tokens)):
            window = (i - 1) // 8  # a window's first token has the one before it as its context
            first = 8 * window if (window + 1) * 8 + 1 <= len(tokens) else max(0, len(tokens) - 9)
            whole = (tokens[first:] + [5] * 8)[:8]  # no token sees those after it
            logits = np.asarray(model([whole]))[0, i - 1 - first].astype(np.float64)
            total -= logits[tokens[i]] - np.log(np.exp(logits).sum())
            count += 1
    size = sum(len(text.encode()) for text in TEXTS)
    options = ["--data", f"lines={tmp_path / 'texts.jsonl'}", "--data", str(tmp_path / "tokens"), "--json-key=body"]
    assert evaluate.main([str(letters_folder), *options, "--output", str(tmp_path / "out.json")]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert [found[name].pop("scored") for name in ("lines", "tokens")] == ["all tokens"] * 2
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
    _, *rows = (line.split() for line in capsys.readouterr().out.splitlines() if "all tokens" in line or "loss" in line)
    assert [row[-3::2] for row in rows] == [[f"{total / count:.4f}", f"{total / math.log(2) / size:.4f}"]] * 2
    model.tokenizer = None  # the texts of the tokens are not known
    unknown = evaluate.evaluate(model, str(tmp_path / "tokens"))
    assert unknown["bits_per_byte"] is None and unknown["loss"] == pytest.approx(total / count)


@pytest.mark.smoke
def test_windows_of_answers_predict_each_once_after_all_that_fits():
    tokens, counted = list(range(100, 130)), np.zeros(30, bool)
    counted[[2, 3, 6, 12, 13, *range(17, 29)]] = True
    found = answer_windows(tokens, counted, 8)
    assert [(part[0] - 100, part[-1] - 99, start) for part, start, *_ in found] == [
        (0, 7, 2),  # both answers that end in the first nine tokens
        (5, 14, 7),
        (16, 25, 1),  # an answer that is longer than the context, in two windows
        (20, 29, 5),
    ]
    scored = [
        token
        for part, start, of, _ in found
        for token, is_scored in zip(part[start:], np.ones(9, bool) if of is None else of, strict=False)
        if is_scored
    ]
    assert scored == [tokens[i] for i in np.flatnonzero(counted)]


@pytest.mark.smoke
@pytest.mark.parametrize(("stop", "expected"), [(9, [(0, 9, 2)]), (10, [(0, 4, 2), (1, 10, 7)])])
def test_an_answer_shares_the_first_window_if_it_ends_in_it(stop, expected):
    """A window of 8 inputs has 9 tokens."""
    counted = np.zeros(12, bool)
    counted[[2, 3, *range(8, stop)]] = True
    found = answer_windows(list(range(12)), counted, 8)
    assert [(part[0], part[-1] + 1, start) for part, start, *_ in found] == expected


def test_a_window_longer_than_the_context_keeps_the_flags_of_its_tokens(letters_folder):
    """Of 12 tokens the last 9 remain; of those from the fifth on the flagged ones are scored."""
    model, tokens = megajax.from_hf(letters_folder), [5, 17, 2, 9, 20, 11, 3, 8, 14, 6, 1, 12]
    flagged = {2, 3, 5, 6, 10}  # the tokens 2 and 3 are cut off, or have nothing before them
    counted = np.array([i in flagged for i in range(2, 12)])
    (score,) = Scorer(model).scores([ScoredWindow(tokens, 2, counted)])
    logits = np.asarray(model([tokens[3:11]]))[0].astype(np.float64)  # of the tokens 4 to 11
    each = {i: logits[i - 4, tokens[i]] - np.log(np.exp(logits[i - 4]).sum()) for i in range(4, 12)}
    assert score.count == 3 and score.log_likelihood == pytest.approx(each[5] + each[6] + each[10], rel=1e-5)


def test_windows_of_different_lengths_in_a_batch_have_scores_of_their_own():
    """By a stub of a model, to which the next number is as likely as all 127 other tokens together."""
    model = SimpleNamespace(
        check_has_no_encoder=str,
        check_has_no_prefix=str,
        check_is_causal=str,
        check_tokens=len,
        config=SimpleNamespace(padded_vocab_size=128),
        max_length=100,
        model=SimpleNamespace(logits=lambda weights, x: x),
        weights=ModelWeights({}, [], []),
        whole_sequences=lambda weights, tokens, source: math.log(127) * jax.nn.one_hot(tokens + 1, 128),
    )
    found = Scorer(model).scores([ScoredWindow([*range(length)], start) for length, start in ((4, 1), (90, 20))])
    assert [(score.is_greedy, score.count) for score in found] == [(True, 3), (True, 70)]
    assert [score.log_likelihood for score in found] == pytest.approx([3 * math.log(0.5), 70 * math.log(0.5)])


CHAT_TEMPLATE = (
    "{{ tone }}{% for m in messages %}{{ m.role[0] }} {{ m.content }}é{% endfor %}"
    "{% if add_generation_prompt %}a {% endif %}"
)
CHATS = [  # a line, its text, and below each character of it whether it counts
    (
        {
            "messages": [
                {"role": r, "content": c}
                for r, c in (("user", "hi"), ("assistant", "yes"), ("user", "why"), ("assistant", "so it is"))
            ]
        },
        "u hiéa yeséu whyéa so it isé",
        "       ++++        +++++++++",
    ),
    ({"conversations": [{"from": "human", "value": "go"}, {"from": "gpt", "value": "on"}]}, "u goéa oné", "       +++"),
    ({"prompt": "a b", "completion": " c"}, "a b c", "   ++"),
]


def token(letter: str) -> int:
    return 28 if letter == "é" else 27 if letter == " " else ord(letter) - 96


@pytest.fixture(scope="module")
def chats(letters_folder, tmp_path_factory):
    """(context → folder, file, (tokens, whether each counts) of each chat)."""
    directory = tmp_path_factory.mktemp("chats")
    for context in (64, 8):
        shutil.copytree(letters_folder, directory / str(context))
        (directory / str(context) / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        config = json.loads((letters_folder / "config.json").read_text()) | {"max_position_embeddings": context}
        (directory / str(context) / "config.json").write_text(json.dumps(config))
        (directory / str(context) / "tokenizer_config.json").write_text('{"eos_token": "z"}')
    (directory / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line, _, _ in CHATS))
    expected = []
    for record, text, counts in CHATS:
        bare = "prompt" in record  # between the tokens that begin and end a text
        tokens = [0] * bare + [token(c) for c in text] + [token("z")] * bare
        expected.append((tokens, np.array([False] * bare + [c == "+" for c in counts] + [True] * bare)))
    return directory, directory / "chats.jsonl", expected


@pytest.mark.parametrize("context", [pytest.param(64, marks=pytest.mark.long), 8])
def test_chats_are_evaluated_as_by_hand(chats, context, tmp_path, capsys):
    directory, file, expected = chats
    model, total, count = megajax.from_hf(directory / str(context)), 0.0, 0
    for tokens, counted in expected:
        edges = np.flatnonzero(np.diff(np.concatenate([[False], counted, [False]])))
        for start, stop in edges.reshape(-1, 2).tolist():
            for i in range(start, stop):
                end = stop if stop <= context + 1 else min(start + context * ((i - start) // context + 1), stop)
                first = max(0, end - context - 1)
                window = (tokens[first : end - 1] + [5] * context)[:context]  # no token sees those after it
                logits = np.asarray(model([window]))[0, i - 1 - first].astype(np.float64)
                total -= logits[tokens[i]] - np.log(np.exp(logits).sum())
                count += 1
    options = ["--data", f"b={file}", "--data", f"c={directory}/*.jsonl", "--output", str(tmp_path / "out.json")]
    assert evaluate.main([str(directory / str(context)), *options]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["b"] == found["c"] and (found["b"]["documents"], found["b"]["scored"]) == (3, "answers")
    assert found["b"]["tokens"] == count == sum(counted.sum() for _, counted in expected)
    assert found["b"]["loss"] == pytest.approx(total / count, rel=1e-5)
    size = sum(len(c.encode()) for _, text, counts in CHATS for c, n in zip(text, counts, strict=True) if n == "+")
    assert found["b"]["bits_per_byte"] == pytest.approx(total / math.log(2) / size, rel=1e-5)
    assert " answers " in capsys.readouterr().out


def test_the_loss_of_chats_is_that_of_the_training(chats, tmp_path):
    directory, file, _ = chats
    folder = directory / "64"
    config = megajax.Config.model_validate(
        {
            "run": {"steps": 1, "dir": str(tmp_path), "eval_steps": 1},
            "model": read_folder(folder)[1],
            "mesh": {"data": 1},
            "batch": {"global_size": 2, "sequence_length": 32},  # the three chats are two rows
            "precision": {"compute": "float32"},
            "checkpoint": {"init_from": str(folder)},
            "data": {"kind": "chat", "train": str(file), "valid": str(file), "tokenizer": str(folder)},
            "logging": {"tensorboard": False},
        }
    )
    trained = megajax.Trainer(config, jax.devices()[:1]).evaluate("valid")["loss"]
    found = evaluate.evaluate(megajax.from_hf(folder), str(file))
    assert found["loss"] == pytest.approx(trained, rel=1e-5)


def test_a_run_without_data_is_evaluated_on_its_own(chats, tmp_path, monkeypatch, capsys):
    directory, file, _ = chats
    shutil.copy(file, tmp_path / "held.jsonl")
    (run := tmp_path / "runs" / "a").mkdir(parents=True)
    (run / "checkpoints" / "1").mkdir(parents=True)
    config = {
        "model": read_folder(directory / "64")[1],
        "batch": {"global_size": 2, "sequence_length": 32},
        "data": {"kind": "text", "train": "a.jsonl", "valid": "held.jsonl", "text_key": "body", "tokenizer": "byte"},
    }
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setattr(sources, "find_checkpoint", lambda *_: (run, 1))
    assert evaluate.own_sets(str(run)) == ({"held.jsonl": str(tmp_path / "held.jsonl")}, "body")
    config["data"] = {
        "kind": "chat",
        "train": "a.jsonl",
        "valid_sets": [{"name": "held", "prefix": "held.jsonl"}],
        "tokenizer": "byte",
    }
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert evaluate.own_sets(str(run)) == ({"held": str(tmp_path / "held.jsonl")}, None)
    (tmp_path / "tokens.idx").touch()  # of a set that its prefix names
    config["data"] = {"kind": "indexed", "train": "a", "valid": "tokens"}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert evaluate.own_sets(str(run)) == ({"tokens": str(tmp_path / "tokens")}, None)
    config["data"] = {"kind": "chat", "train": "a.jsonl", "tokenizer": "byte"}
    for source in (run, directory / "64"):
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        with pytest.raises(SystemExit):
            evaluate.main([str(source)])
        assert "names no evaluation data" in (error := capsys.readouterr().err) and "give --data PATH" in error


def test_tokens_that_begin_and_end_a_documents_tokens_are_not_its_text(chats, tmp_path):
    model, begin, end = megajax.from_hf(chats[0] / "64"), 0, token("z")
    with IndexedWriter(tmp_path / "tokens", np.uint16) as writer:
        for tokens in ([begin, 1, 28, end], [1, 28, end], [1, end, 28], [begin, end], [end]):
            writer.add_document(tokens)
    found = open_set(str(tmp_path / "tokens"), model, SetFormat()).documents
    size = len("aé".encode())
    assert [(window.tokens, size) for (window,), size in found] == [
        ([begin, 1, 28], size),
        ([begin, 1, 28], size),
        ([begin, 1, end, 28], size),
    ]


def test_what_lines_are_is_decided_by_the_first(chats, tmp_path):
    """A chat that has a text too is a chat, unless the key of the text is given; --limit counts chats."""
    directory, _, expected = chats
    model = megajax.from_hf(directory / "64")
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}')
    with pytest.raises(InputError, match=r"pairs.jsonl has pairs .*data.packing=pairs.*--json-key=chosen"):
        evaluate.evaluate(model, str(tmp_path / "pairs.jsonl"))
    path = tmp_path / "both.jsonl"
    path.write_text("".join(json.dumps({"text": "abc"} | line) + "\n" for line, _, _ in CHATS) + '{"text": "abc"}\n')
    one = evaluate.evaluate(model, str(path), limit=1)
    assert (one["documents"], one["tokens"], one["scored"]) == (1, expected[0][1].sum(), "answers")
    with pytest.raises(InputError, match='both.jsonl, line 4 has neither "messages"'):
        evaluate.evaluate(model, str(path))
    texts = evaluate.evaluate(model, str(path), SetFormat(json_key="text"))
    assert (texts["documents"], texts["tokens"], texts["scored"]) == (4, 12, "all tokens")
    toned = evaluate.evaluate(model, str(path), SetFormat(template_arguments={"tone": "b"}), limit=1)
    assert toned["tokens"] == one["tokens"] and toned["loss"] != one["loss"]
    model.template_arguments = {"tone": "c"}  # those of a training, which a command's replace
    again = evaluate.evaluate(model, str(path), SetFormat(template_arguments={"tone": "b"}), limit=1)
    assert again["loss"] == toned["loss"]
    assert model.chat_template.render([{"role": "user", "content": "x"}]) == "cu xé"
    assert evaluate.evaluate(model, str(path), limit=1)["loss"] not in (one["loss"], toned["loss"])
    (directory / "64" / "chat_template.jinja").rename(directory / "away")
    with pytest.raises(InputError, match="line 1: .*64 has no chat template: add chat_template.jinja to the folder"):
        evaluate.evaluate(model, str(path))
    (directory / "away").rename(directory / "64" / "chat_template.jinja")


def test_the_token_that_ends_a_completion_is_the_trainings_or_a_sentence(letters_folder, tmp_path):
    (tmp_path / "one.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    model: Any = SimpleNamespace(
        tokenizer=load_tokenizer(str(letters_folder)),
        folder=letters_folder,
        template_arguments={},
        config=SimpleNamespace(vision=None),
        max_length=8,
        end_token=None,
    )
    with pytest.raises(
        InputError, match=r"has no eos_token .*: name its token with eos_token in tokenizer_config.json"
    ):
        next(open_set(str(tmp_path / "one.jsonl"), model, SetFormat()).documents)
    model.end_token = token("z")  # of a run, by its config
    (window,) = next(open_set(str(tmp_path / "one.jsonl"), model, SetFormat()).documents).windows
    assert [*window.tokens] == [0, token("a"), token("b"), token("z")]
    model.tokenizer = None
    with pytest.raises(InputError, match=f"{letters_folder} has no tokenizer, so .*: add tokenizer.json"):
        next(open_set(str(tmp_path / "one.jsonl"), model, SetFormat()).documents)


def test_mistakes_are_sentences(letters_folder, tmp_path, capsys):
    def error_of(*options: str) -> str:
        with pytest.raises(SystemExit):
            evaluate.main([str(letters_folder), *options])
        return capsys.readouterr().err

    (tmp_path / "empty.jsonl").touch()
    assert "has no tokens to predict" in error_of("--data", str(tmp_path / "empty.jsonl"))
    assert "another set is called x: write NAME=" in error_of("--data", "x=1", "--data", "x=2")
    assert "tensors is no axis of a mesh" in error_of("--data", "a", "--mesh", "tensors=2")
    assert "needs 64 devices, more than the 8 here" in error_of("--data", "a", "--mesh", "fsdp=64")
    assert "--limit=0 is not a positive number: give at least 1" in error_of("--data", "a", "--limit", "0")
    assert "dtype=int8 is not a choice: use float32, " in error_of("--data", "a", "--dtype", "int8")
    assert "dtype=bf16 is not a choice: did you mean bfloat16?" in error_of("--data", "a", "--dtype", "bf16")
    assert "nothing.idx" in error_of("--data", str(tmp_path / "nothing"))
