"""Prompt files, and the command's output for them."""

import json

import pytest

from megajax import generate
from megajax.errors import InputError
from megajax.inference.prompts import read_prompts

CHAT = [{"role": "system", "content": " be brief"}, {"role": "user", "content": "é?"}]


@pytest.mark.smoke
def test_prompts_are_lines_or_json_objects(tmp_path):
    other_line_ends = "one\u2028\u2029\x85\f\v\x1c"  # of which no other program makes lines
    (tmp_path / "a.txt").write_text(f"{other_line_ends}1\n\ntwo two\n")
    assert read_prompts(str(tmp_path / "a.txt")) == [f"{other_line_ends}1", "two two"]
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "one\u2028\x85"}\n' + json.dumps({"messages": CHAT}) + "\n" + json.dumps(CHAT) + "\n")
    assert read_prompts(str(path)) == ["one\u2028\x85", CHAT, CHAT]
    for line, sentence in {
        "{": "a.jsonl:1 is not JSON",
        '{"text": "a"}': 'a.jsonl:1 has neither a "prompt" nor "messages"',
        "": "has no prompts",
    }.items():
        path.write_text(line)
        with pytest.raises(InputError, match=sentence):
            read_prompts(str(path))
    with pytest.raises(InputError, match="cannot be read .No such file.*: give a text file"):
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
