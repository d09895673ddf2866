"""Prompt files, and the command's output for them."""

import bz2
import gzip
import json
import lzma
from types import SimpleNamespace

import numpy as np
import pyarrow
import pytest
import zstandard
from models_in_use import build
from pyarrow import parquet

from megajax import generate
from megajax.data.images import ImageText
from megajax.data.rendering import Chat, Template
from megajax.errors import InputError
from megajax.inference.generation import Generator
from megajax.inference.prompts import Located, PicturePrompt, as_chat, encode_prompt, read_prompts, with_images
from megajax.inference.sampling import Sampling
from megajax.inference.scoring import Scorer

CHAT = [{"role": "system", "content": " be brief"}, {"role": "user", "content": "é?"}]


def prompts_of(path) -> list:
    return [located.prompt for located in read_prompts(str(path))]


@pytest.mark.smoke
def test_prompts_are_lines_or_json_objects(tmp_path):
    other_line_ends = "one\u2028\u2029\x85\f\v\x1c"  # of which no other program makes lines
    (tmp_path / "a.txt").write_text(f"{other_line_ends}1\n\ntwo two\n")
    assert prompts_of(tmp_path / "a.txt") == [f"{other_line_ends}1", "two two"]
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "one\u2028\x85"}\n' + json.dumps({"messages": CHAT}) + "\n")
    assert prompts_of(path) == ["one\u2028\x85", Chat(CHAT, {})]
    path.write_text(json.dumps({"messages": CHAT, "tools": "[{}]", "chat_template_kwargs": {"thinking": True}}))
    assert prompts_of(path) == [Chat(CHAT, {"tools": [{}], "thinking": True})]
    for line, sentence in {
        "{": "a.jsonl, line 1 is not JSON",
        '{"text": "a"}': 'a.jsonl, line 1 has neither "prompt" nor "messages"',
        '{"prompt": "<image>", "images": [""]}': 'a.jsonl, line 1 has "images" that are not paths or URLs',
        '{"prompt": "<image>", "image": {"path": 1}}': 'a.jsonl, line 1 has "images" that are not paths or URLs',
        '{"prompt": "<image>", "images": ["a.png", "b.png"]}': "has 2 pictures and 1 times <image>: write it",
        '{"prompt": 1}': 'a.jsonl, line 1 has neither "prompt" nor "messages"',
        '{"messages": [{"role": "bot", "content": "a"}]}': "a.jsonl, line 1 has the role 'bot' in message 0",
        '[{"role": "user", "content": "a"}]': 'a.jsonl, item 1 has neither "prompt" nor "messages"',
        '{"messages": [{"role": "assistant", "content": "a"}]}': "line 1 has messages of the assistant only",
        "": "has no prompts",
    }.items():
        path.write_text(line)
        with pytest.raises(InputError, match=sentence):
            read_prompts(str(path))
    with pytest.raises(InputError, match="cannot be read .No such file.*: give a text file"):
        read_prompts(str(tmp_path / "missing"))


COMPRESSED = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstandard.compress}


@pytest.mark.parametrize("ending", ["jsonl", "json", *(f"jsonl.{name}" for name in COMPRESSED), "parquet"])
def test_prompts_are_objects_in_files_of_each_ending_that_training_reads(tmp_path, ending):
    path, line = tmp_path / f"a.{ending}", b'{"prompt": "one"}\n'
    if ending == "parquet":
        parquet.write_table(pyarrow.table({"prompt": ["one"]}), path)
    else:
        path.write_bytes(COMPRESSED.get(ending.partition(".")[2], bytes)(line))
    assert prompts_of(path) == ["one"]


ASKED, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CALL, RESULT = {"role": "assistant", "tool_calls": [{}]}, {"role": "tool", "content": "4"}
TURNS = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nadd\n\n### Response:"
)
FORMS = [  # a line of training data, and what is asked by it
    ({"messages": [ASKED, ANSWER]}, Chat([ASKED], {})),
    ({"messages": [ASKED, ANSWER, ASKED, ANSWER, ANSWER], "prompt": "a"}, Chat([ASKED, ANSWER, ASKED], {})),
    ({"messages": [ASKED, CALL, RESULT, ANSWER], "tools": [{}]}, Chat([ASKED, CALL, RESULT], {"tools": [{}]})),
    ({"conversations": TURNS}, Chat([ASKED], {})),
    ({"conversations": TURNS * 2 + TURNS[:1]}, Chat([ASKED, ANSWER, ASKED, ANSWER, ASKED], {})),
    ({"prompt": [ASKED], "completion": [ANSWER]}, Chat([ASKED], {})),
    ({"prompt": [ASKED]}, Chat([ASKED], {})),
    ({"prompt": "a", "completion": "b"}, "a"),
    ({"instruction": "add", "input": "", "output": "b"}, ALPACA),
    ({"instruction": "add"}, ALPACA),
]


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_training_data_are_prompts_without_their_last_answer(name, tmp_path):
    lines = [line for line, _ in FORMS]
    text = json.dumps(lines, indent=1) if name == "a.json" else "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / name).write_text(text)
    assert prompts_of(tmp_path / name) == [asked for _, asked in FORMS]


@pytest.mark.parametrize(("role", "begins"), [("system", False), ("developer", False), ("user", True)])
def test_instructions_begin_a_chat_that_has_none(role, begins):
    messages, system = [{"role": role, "content": "a"}], {"role": "system", "content": "be nice"}
    assert as_chat(Chat(messages, {}), "be nice").messages == [system] * begins + messages
    assert as_chat(Chat(messages, {}), None).messages == messages
    assert as_chat("a", "be nice").messages == [system, {"role": "user", "content": "a"}]


def test_a_picture_in_a_text_is_written_as_the_template_does_and_tokenised_as_the_model_does():
    """With letters as tokens, and a picture's name in the place of its patches."""
    expanded = lambda tokens, counted, pictures, least: (tokens, counted, [*pictures, least])  # noqa: E731
    images = SimpleNamespace(text=ImageText("[i]", "<[i]>"), sized=lambda picture: picture.name, expanded=expanded)
    model = SimpleNamespace(images=images, encode=lambda text, special_tokens: [text, special_tokens])
    found = encode_prompt(model, Located(with_images("a <image>", ["x.png"])), {})
    assert found == ("a [i]", PicturePrompt(["a <[i]>", True], ["x.png", 1]))


def test_the_template_arguments_of_a_chat_count_before_the_commands():
    template = Template({"default": "{{ a }} {{ b }} {{ tools[0] }}"}, {"a": "the data's", "b": "the data's"}, "t")
    encode = lambda text, special_tokens: [text, special_tokens]  # noqa: E731
    model = SimpleNamespace(config=SimpleNamespace(prefix_lm=False), chat_template=template, encode=encode)
    chat = Chat(CHAT, {"b": "its own", "tools": ["c"]})
    text, prompt = encode_prompt(model, Located(chat), {"a": "the command's", "b": "the command's"})
    assert text == "the command's its own c" and prompt.tokens == [text, False]


def test_a_file_of_prompts_gives_json_lines(letters_folder, tmp_path, capsys):
    template = "<s>{{ messages[0].content }}{{ tools[0].name }}{% if thinking is false %} b{% endif %}"
    (letters_folder / "chat_template.jinja").write_text(template)
    chat = {"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "c"}]}
    answered = chat | {"messages": [*chat["messages"], {"role": "assistant", "content": "x"}]}
    prompts = [{"prompt": "hello"}, chat, {"prompt": "ac b"}, answered]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    options = ["--prompts", str(tmp_path / "p.jsonl"), "--temperature", "0", "--tokens", "3"]
    assert generate.main([str(letters_folder), *options, "--chat-template-args", "{thinking: false}"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["hello", chat["messages"], "ac b", chat["messages"]]
    assert (
        lines[1]["text"] == lines[2]["text"] == lines[3]["text"]
    )  # the chat's tools and the template's arguments are in its prompt
    with pytest.raises(SystemExit):
        generate.main([str(letters_folder), *options, "--chat-template-args", "{tools: []}"])
    assert "--chat-template-args={tools: []} sets tools, which each chat gives" in capsys.readouterr().err
    assert generate.main([str(letters_folder), "--prompt", "hello", "--temperature", "0", "--tokens", "3"]) == 0
    assert capsys.readouterr().out == f"hello{lines[0]['text']}\n"


def test_what_a_model_does_not_have_is_a_sentence():
    sizes = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 32}
    tower = {"image_token": 1, "num_layers": 1, "hidden_size": 16, "num_heads": 2, "patch_size": 2, "grid": 4}
    text, pictures, prefix = (
        build(sizes | more, {}) for more in ({}, {"vision": tower}, {"prefix_lm": True, "position": "learned"})
    )
    for ask, sentence in (
        (lambda: text.encode("a"), "has no tokenizer, so text cannot become tokens: add tokenizer.json"),
        (lambda: text.images, "the model reads text only: leave them out"),
        (lambda: pictures.images, "has no tokenizer, so pictures have no tokens: add tokenizer.json"),
        (lambda: text([1, 2]), r"tokens has the shape \[2\]: give ids \[batch, length\]"),
        (lambda: text(np.zeros((0, 2))), r"tokens has the shape \[0, 2\]: give ids"),
        (lambda: text([[31, 32]]), "32"),
        (lambda: prefix([[1, 2]]), r"logits of tokens would have no prefix.*\(model.prefix_lm=true\).*from prompts"),
        (lambda: Scorer(prefix), r"scores of texts would have no prefix.*\(model.prefix_lm=true\).*from prompts"),
        (lambda: Generator(text, Sampling(top_p=2)), "--top-p=2 is not a number of 0 to 1"),
        (lambda: with_images("a <image> b", ["x.png", "y.png"]), "1 times <image>, but 2 pictures are given"),
    ):
        with pytest.raises(InputError, match=sentence):
            ask()
    assert np.asarray(text([[30, 31]])).shape == (1, 2, 32)
