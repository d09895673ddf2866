"""A chat template that needs more memory or time than its child process has is a sentence."""

import json
import pickle
import subprocess
import sys
import time

import pytest

from megajax.data.answers import samples_of_each
from megajax.data.chat import Rendering, read_chats
from megajax.data.chat_template import ChatTemplate
from megajax.data.rendering import Chat, Template, render
from megajax.data.sandbox import LimitedProcess, Stopped
from megajax.errors import InputError

CHAT = [{"role": "user", "content": "x y"}]
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
    child = LimitedProcess(200 << 20, 0.2 if limit == "processor time" else 5)
    assert child.run("t", "c", render, Template({"default": "{{ messages[0].content }}"}, {}, "t"), CHAT, False, {})
    for source in EXPLODING[limit]:
        start = time.perf_counter()
        with pytest.raises(Stopped, match=f"the template takes more than .* {limit}: correct it"):
            child.run("the template", "correct it", render, Template({"default": source}, {}, "t"), CHAT, False, {})
        assert time.perf_counter() - start < 10


def test_each_chat_has_all_of_the_time():
    """40 chats of about a hundredth of a second each, with a fifth for one."""
    child = LimitedProcess(seconds=0.2)
    source = 2 * "{% for a in range(9000 * messages[0].content | length) %}{% endfor %}"
    chats = [Chat([{"role": "user", "content": text}], {}) for text in ["", *["x" * 9] * 40]]
    for given in (chats[:1], chats):  # the first one imports jinja
        found = child.run("t", "c", samples_of_each, Template({"default": source}, {}, "t"), given)
        assert len(found) == len(given)


@pytest.mark.parametrize("padding", [0, 1000])
def test_a_text_has_up_to_65536_characters_or_100_times_those_of_its_template_and_messages(padding):
    def rendered(length: int) -> str:
        source = f"{{{{ 'a' * {length:7} }}}}{{# {'x' * padding} #}}"
        most.append(max(2**16, 100 * (len(source) + len(pickle.dumps((CHAT, {}))))))
        return Template({"default": source}, {}, "t.jinja").render(CHAT, False)

    most: list[int] = []
    rendered(1)
    assert len(rendered(most[0])) == most[0]
    with pytest.raises(InputError, match=f"t.jinja makes a text of {most[0] + 1:,} characters, more than 100 times"):
        rendered(most[0] + 1)


MESSAGE_BOMB = "{% for m in messages %}{{ m.content * (m.content | length) ** 12 }}{% endfor %}"


def test_a_template_that_explodes_at_one_chat_names_its_line(tmp_path):
    template = ChatTemplate(MESSAGE_BOMB, {}, "t.jinja")
    lines = [{"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "b"}]} for text in "ab"]
    lines.insert(1, {"prompt": "a", "completion": "b"})
    lines.append(lines[0] | {"messages": [{"role": "user", "content": "a" * 20}, *lines[0]["messages"]]})
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(InputError, match=r"chats.jsonl, line 4: the chat template t.jinja takes more than .* memory"):
        list(read_chats([str(tmp_path / "chats.jsonl")], Rendering(lambda: template)))


def test_a_child_imports_neither_jax_nor_the_config():
    """Else it starts in a second, not in a tenth of one."""
    code = "import sys; from megajax.data import answers, rendering, tokenizer_trial"
    code += "; sys.exit(not {'jax', 'numpy', 'pydantic', 'megajax.config'}.isdisjoint(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_child_lives_as_long_as_it_is_used(tmp_path):
    """Values of a work, its error, and a child that was killed meanwhile."""
    child, template = LimitedProcess(), Template({"default": "{{ messages | length }}"}, {}, "t")
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
