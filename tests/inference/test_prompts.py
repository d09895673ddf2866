"""Chats become text by the model's own template, in a sandbox; prompt files; the command's output."""

import json

import pytest

from megajax import generate
from megajax.errors import InputError
from megajax.inference.prompts import read_prompts, render_chat

TEMPLATE = """{{ bos_token }}{% for m in messages %}
{% if m.role not in ["user", "system"] %}{{ raise_exception("no " + m.role) }}{% endif %}
[{{ m.role }}]{{ m.content | trim }}
{% endfor %}
{% if add_generation_prompt %}[assistant]{% endif %}"""
CHAT = [{"role": "system", "content": " be brief"}, {"role": "user", "content": "é?"}]


@pytest.mark.smoke
@pytest.mark.parametrize("newer", [True, False])
def test_a_chat_is_rendered_by_the_models_template(tmp_path, newer):
    config: dict = {"bos_token": {"content": "<s>"}}
    if newer:
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    else:
        config["chat_template"] = [{"name": "tools", "template": "-"}, {"name": "default", "template": TEMPLATE}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    # As transformers: the newline after a block is removed, and blanks before one.
    assert render_chat(CHAT, tmp_path) == "<s>[system]be brief\n[user]é?\n[assistant]"
    assert render_chat(CHAT, tmp_path, add_generation_prompt=False) == "<s>[system]be brief\n[user]é?\n"
    with pytest.raises(InputError, match="does not accept the messages .no tool.: correct them"):
        render_chat([{"role": "tool", "content": ""}], tmp_path)


@pytest.mark.smoke
def test_a_template_cannot_reach_python(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(InputError, match="does not accept the messages"):
        render_chat(CHAT, tmp_path)
    with pytest.raises(InputError, match="has no chat template: give prompts as text"):
        render_chat(CHAT, tmp_path / "nowhere")


@pytest.mark.smoke
def test_prompts_are_lines_or_json_objects(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo two\n")
    assert read_prompts(str(tmp_path / "a.txt")) == ["one", "two two"]
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "one"}\n' + json.dumps({"messages": CHAT}) + "\n" + json.dumps(CHAT) + "\n")
    assert read_prompts(str(path)) == ["one", CHAT, CHAT]
    for line, sentence in {
        "{": "a.jsonl:1 is not JSON",
        '{"text": "a"}': 'a.jsonl:1 has neither a "prompt" nor "messages"',
        "": "has no prompts",
    }.items():
        path.write_text(line)
        with pytest.raises(InputError, match=sentence):
            read_prompts(str(path))
    with pytest.raises(InputError, match="cannot be read"):
        read_prompts(str(tmp_path / "missing"))


def test_a_file_of_prompts_gives_json_lines(letters_folder, tmp_path, capsys):
    (letters_folder / "chat_template.jinja").write_text("{{ messages[0].content }} b")
    (tmp_path / "p.jsonl").write_text('{"prompt": "hello"}\n{"messages": [{"role": "user", "content": "a"}]}\n')
    options = ["--prompts", str(tmp_path / "p.jsonl"), "--temperature", "0", "--tokens", "3"]
    assert generate.main([str(letters_folder), *options]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["hello", [{"role": "user", "content": "a"}]]
    assert generate.main([str(letters_folder), "--prompt", "hello", "--temperature", "0", "--tokens", "3"]) == 0
    assert capsys.readouterr().out == f"hello{lines[0]['text']}\n"
