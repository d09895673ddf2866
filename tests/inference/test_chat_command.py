"""Conversations: the command's answers are those of the written-out prompts, and Ctrl-C keeps what was said."""

import contextlib
import io
import json
import signal
import sys

import pytest

import megajax
from megajax import chat, generate
from megajax.inference.generation import continue_texts
from megajax.inference.sampling import Sampling

ANSWER = "{% if add_generation_prompt %}a {% endif %}"
TEMPLATE = "{{ tone }}{% for m in messages %}{{ m.role[0] }} {{ m.content }}é{% endfor %}" + ANSWER
GREEDY = ["--temperature", "0", "--tokens", "6"]


@pytest.fixture(scope="module")
def folder(letters_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    for path in letters_folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def answer(folder):
    """Text → its continuation, the likeliest by default, without the tokenizer's first token."""
    model = megajax.from_hf(folder)

    def answer(text: str, temperature: float = 0, seed: int = 0) -> str:
        tokens = model.encode(text, special_tokens=False)
        return continue_texts(model, [tokens], 6, Sampling(temperature), seed=seed)[0]

    return answer


@pytest.fixture
def talk(folder, monkeypatch, capsys):
    """(bytes of stdin, options...) → (exit status, stdout, stderr)."""

    def talk(said: bytes, *options: str, stdin: type[io.TextIOWrapper] = io.TextIOWrapper):
        monkeypatch.setattr(sys, "stdin", stdin(io.BytesIO(said)))
        try:
            status = chat.main([str(folder), *GREEDY, *options])
        except SystemExit as stopped:
            status = stopped.code
        return status, *capsys.readouterr()

    return talk


def test_each_answer_follows_the_conversation_before_it(talk, answer):
    first = answer("s be niceéu hello\nyouéa ")
    second = answer(f"s be niceéu hello\nyouéa {first}éu goéa ")
    again = answer("s be niceéu goéa ")
    assert len({first, second, again}) == 3
    said = "\ufeffhello\\\nyou\n\ngo\n/reset\ngo\n/exit\nmore\n".encode()
    assert talk(said, "--system", "be nice") == (0, f"{first}\n{second}\n{again}\n", "")
    # The line that the last one continues is missing. A message whose answer is empty is forgotten.
    stop = next(first[:end] for end in range(1, len(first)) if first[:end] not in again)
    for said, before, *options in ((b"go\\", ""), (b"hello\\\nyou\ngo\\\n", "\n", "--stop", stop)):
        assert talk(said, "--system", "be nice", *options) == (0, f"{before}{again}\n", "")
    # No other message than the empty one, and each answer has a seed of its own.
    drawn = [answer("xs éu goéa ", 2.0, seed) for seed in (7, 8)]
    assert drawn[0] != drawn[1]
    others = "--chat-template-args", "{tone: x}", "--system", "", "--temperature", "2", "--seed", "7"
    assert talk(b"go\n/reset\ngo\n", *others) == (0, "{}\n{}\n".format(*drawn), "")


def test_what_cannot_be_answered_is_a_sentence(talk, folder):
    status, out, error = talk(b"a" * 70)
    assert (status, out) == (2, "") and "the model's context has 64: shorten it" in error
    assert talk(b"\xff")[0] == 2
    assert "--tokens=0 is not a positive number" in talk(b"", "--tokens", "0")[2]
    assert "--stop='' is in every text" in talk(b"", "--stop", "")[2]
    (folder / "chat_template.jinja").rename(folder / "away")
    assert "has no chat template: add chat_template.jinja" in talk(b"a\n")[2]
    (folder / "away").rename(folder / "chat_template.jinja")


def test_characters_that_a_terminal_does_not_have_are_codes(folder):
    printed = io.BytesIO()
    with io.TextIOWrapper(printed, encoding="ascii") as terminal, contextlib.redirect_stdout(terminal):
        assert generate.main([str(folder), "--prompt", "é", *GREEDY]) == 0
        assert printed.getvalue().startswith(b"\\xe9")


class Interrupting(io.StringIO):
    """An output that gets Ctrl-C with the first piece of an answer."""

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.getvalue() and "\n" not in self.getvalue():
            signal.raise_signal(signal.SIGINT)
        return written


def test_ctrl_c_stops_an_answer_and_keeps_its_text(talk, answer):
    with contextlib.redirect_stdout(Interrupting()) as printed:
        assert talk(b"hello\ngo\n", "--tokens", "40")[0] == 0
    stopped, after = printed.getvalue().splitlines()
    assert 0 < len(stopped) < 40
    expected = answer(f"u helloéa {stopped}éu goéa ")
    assert after.startswith(expected)


class Keyboard(io.TextIOWrapper):
    """A terminal whose user types Ctrl-C after each line that ends with ^C."""

    def isatty(self) -> bool:
        return True

    def readline(self, *size) -> str:
        line = super().readline(*size)
        if line.endswith("^C\n"):
            raise KeyboardInterrupt
        return line


def test_ctrl_c_gives_up_a_message_with_the_lines_that_it_continues(talk, answer):
    status, out, _ = talk(b"hello\\\nyou^C\ngo\n", stdin=Keyboard)
    expected = answer("u goéa ")
    assert expected != answer("u hello\ngoéa ")
    assert (status, out) == (0, f"> … \n> {expected}\n> \n")


@pytest.mark.long
def test_generate_answers_messages(folder, answer, tmp_path, capsys):
    """A prompt with --chat or --system is a message; a chat that has a system's message keeps it."""
    assert generate.main([str(folder), "--prompt", "hello", "--chat", *GREEDY]) == 0
    assert capsys.readouterr().out == answer("u helloéa ") + "\n"
    chats = [[{"role": "system", "content": "x"}, {"role": "user", "content": "hello"}]]
    (tmp_path / "p.jsonl").write_text('{"prompt": "hello"}\n' + json.dumps({"messages": chats[0]}))
    options = ["--prompts", str(tmp_path / "p.jsonl"), "--system", "be nice"]
    assert generate.main([str(folder), *options, *GREEDY]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["text"] for line in lines] == [answer("s be niceéu helloéa "), answer("s xéu helloéa ")]
    assert lines[0]["prompt"][0] == {"role": "system", "content": "be nice"} and lines[1]["prompt"] == chats[0]
