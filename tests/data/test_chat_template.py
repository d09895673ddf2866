"""Chat templates: found where transformers writes them, text is transformers', and where the answers are."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megajax.data.answers import WINDOW, answer_samples
from megajax.data.chat import Rendering, conversations
from megajax.data.chat_template import ChatTemplate, load_chat_template
from megajax.data.rendering import Chat, Template
from megajax.data.sandbox import Stopped
from megajax.errors import InputError

REFERENCE = Path(__file__).parents[1] / "data_files/chat.json"
CHATML = """{% for m in messages %}
<begin>{{ m.role }}
{{ m.content | trim }}<end>
{% endfor %}
{% if add_generation_prompt %}
<begin>assistant
{% endif %}
"""
MARKED = CHATML.replace(
    "{{ m.content | trim }}",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}",
)
CHAT = [{"role": "user", "content": "é?"}]
THINKING = CHATML.replace(
    "{{ m.content",
    "{% if loop.last and m.role == 'assistant' %}<think>{{ m.n }}</think>{% endif %}{{ seen(m) }}{{ m.content",
)


@pytest.fixture(scope="module")
def reference() -> dict:
    return json.loads(REFERENCE.read_text())


def folder_of(reference: dict, folder: Path) -> Path:
    """A folder with the special tokens and the named templates of the references."""
    named = [{"name": name, "template": source} for name, source in reference["templates"].items()]
    (folder / "tokenizer_config.json").write_text(json.dumps(reference["config"] | {"chat_template": named}))
    return folder


TEMPLATE = """{{ bos_token }}{% for m in messages %}
{% if m.role == "tool" %}{{ raise_exception("no tools") }}{% endif %}
[{{ m.role }}]{{ m.content | trim }}
{% endfor %}
{% if add_generation_prompt %}[assistant]{% endif %}"""


def template_of(source: str, **arguments) -> Template:
    return Template({"default": source}, arguments, "t")


# As strict as published ones: a system's or developer's message is the first one, the user's follows it or an answer,
# and a tool's follows a call. Texts in parts are written one by one.
STRICT = """{% for m in messages %}{% set before = messages[loop.index0 - 1] if loop.index0 else {'role': ''} %}
{% if m.role in ('system', 'developer') %}{% set fits = loop.first and not loop.last %}
{% elif m.role == 'user' %}
{% set fits = before.role in ('', 'system', 'developer', 'assistant') and not before.tool_calls %}
{% elif m.role == 'assistant' %}{% set fits = before.role in ('user', 'tool') %}
{% else %}{% set call = (before.tool_calls or [{}])[0] %}
{% set fits = before.role == 'tool' or (call.type == 'function' and call.id | length == 9
 and m.name is string and m.tool_call_id == call.id
 and call.function.name is string and call.function.arguments is mapping) %}{% endif %}
{% if not fits %}{{ raise_exception('order') }}{% endif %}
{% if m.content is string %}[{{ m.content }}]{% else %}
{% for p in m.content if p.type == 'text' %}<{{ p.text }}>{% endfor %}{% endif %}
{% endfor %}"""
CALL = {"type": "function", "id": "a1b2c3d4e", "function": {"name": "f", "arguments": {"x": 1}}}
BEFORE = {"system": [], "developer": [], "user": [], "assistant": [{"role": "user", "content": "q"}]}
BEFORE |= {"tool": [*BEFORE["assistant"], {"role": "assistant", "content": "", "tool_calls": [CALL]}]}


@pytest.mark.parametrize("role", BEFORE)
def test_a_template_that_reads_parts_gets_them_in_a_message_of_each_role(role):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    chat = [
        *BEFORE[role],
        {"role": role, "content": parts, "tool_call_id": CALL["id"], "name": "f"},
        *[{"role": "user", "content": "q"}] * (role in ("system", "developer")),
    ]
    assert "<one><two>" in template_of(STRICT).render(chat)
    only_text = STRICT.replace("{% if m.content is string %}", "{% if true %}")
    assert "[one\ntwo]" in template_of(only_text).render(chat)


def long_chat(turns: int) -> Chat:
    turn = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": " so "}]
    return Chat([{"role": "system", "content": "be brief"}, *(m | {"n": i} for i in range(turns) for m in turn)], {})


@pytest.mark.smoke
def test_a_template_sees_what_transformers_gives_it(reference, tmp_path):
    template, refused = load_chat_template(folder_of(reference, tmp_path)), 0
    for case in reference["texts"]:
        arguments = (case["messages"], case["prompt"])
        if case["text"] is None:
            refused += 1
            with pytest.raises(InputError, match="does not accept the messages"):
                template.render(*arguments, **case["arguments"])
        else:
            assert template.render(*arguments, **case["arguments"]) == case["text"]
    assert 0 < refused < len(reference["texts"]) / 4


def test_tools_and_documents_that_are_not_given_are_none_as_in_transformers():
    template = template_of("{{ tools is none }} {{ documents is none }} {{ tools | length if tools is not none }}")
    assert template.render([{"role": "user", "content": "a"}]).split() == ["True", "True"]


def test_the_reasoning_of_a_message_has_both_names_that_templates_read():
    template = template_of("{{ messages[0].reasoning_content }}|{{ messages[0].thinking }}")
    for names in (("reasoning_content",), ("thinking",), ("reasoning",), ("reasoning_content", "reasoning")):
        message = {"role": "assistant", "content": "a", **{name: f"by {name}" for name in names}}
        assert template.render([message]) == f"by {names[0]}|by {names[0]}"


PARTS = [{"type": "text", "text": "ab "}, {"type": "text", "text": "cd"}]
LOOKS = "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text | trim }}{% endfor %}"
CONTENTS = {  # what a template does with content: the text of PARTS
    "{{ m.content }}": "ab \ncd",
    "{{ '' + m['content'] }}": "ab \ncd",
    "{% if m.content is string %}{{ m.content }}{% endif %}": "ab \ncd",  # Qwen3 drops other content
    LOOKS + "{% endif %}": "abcd",
    "{{ m.content if m.content is string else m.content[0].text }}": "ab \ncd",
    "{% for p in m.content %}{{ p.text }}{% endfor %}": "ab cd",  # without a case for text
}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_parts_of_content_are_joined_unless_the_template_reads_them(content, role):
    """Also one that reads those of users only, and one that needs arguments."""
    source = "{{ bos + '' }}{% for m in messages %}" + content + "{% endfor %}"
    assert template_of(source, bos="<s>").render([{"role": role, "content": PARTS}]) == "<s>" + CONTENTS[content]
    only = (
        "{% for m in messages %}{% if m.role == 'user' %}"
        + content
        + "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    expected = {each: CONTENTS[content] if each == "user" else "ab \ncd" for each in (role, "user")}
    assert template_of(only).render([{"role": role, "content": PARTS}]) == expected[role]
    for order in (("user", role), (role, "user")):  # what one role's content is does not decide on another's
        chat = [{"role": each, "content": PARTS} for each in order]
        assert template_of(only).render(chat) == "".join(expected[each] for each in order)


def test_the_form_of_content_is_found_with_each_chats_own_arguments():
    """A template that reads parts only beside tools, in either order of the chats."""
    parts = "{% for p in m.content %}[{{ p.text }}]{% endfor %}"
    source = "{% for m in messages %}{% if tools %}" + parts + "{% else %}{{ 'A' + m.content }}{% endif %}{% endfor %}"
    chat = [{"role": "user", "content": [{"type": "text", "text": text} for text in "xy"]}]
    for order in (1, -1):
        template = template_of(source)
        for tools, text in ((None, "Ax\ny"), ([{"name": "f"}], "[x][y]"))[::order]:
            assert template.render(chat, tools=tools) == text


def test_parts_with_a_picture_are_joined_unless_the_template_writes_it_too():
    for written, pictured in (("", "[i]\nab \ncd"), ("{% if p.type == 'image' %}[i]{% endif %}", "[i]abcd")):
        content = LOOKS.replace("{{ p.text", written + "{{ p.text") + "{% endif %}"
        template = replace(template_of("{% for m in messages %}" + content + "{% endfor %}"), image="[i]")
        chats = [[{"role": "user", "content": [*first, *PARTS]}] for first in ([{"type": "image"}], [])]
        assert [template.render(chat) for chat in chats] == [pictured, "abcd"]


def test_an_object_as_content_of_a_tool_is_json_or_a_sentence():
    chat = [{"role": "tool", "content": {"a": 1}}]
    source = "{% for m in messages %}{{ m.content | tojson if m.content is mapping else m.content }}{% endfor %}"
    assert template_of(source).render(chat) == '{"a": 1}'
    with pytest.raises(InputError, match="role tool .*write it as text"):
        template_of("{% for m in messages %}{{ m.content }}{% endfor %}").render(chat)


def test_special_tokens_of_older_folders_and_templates_in_files(tmp_path):
    """special_tokens_map.json is transformers' older file, which counts where the newer one has no added tokens."""
    write = lambda name, value: (tmp_path / name).write_text(json.dumps(value))  # noqa: E731
    write("tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>"})
    write("special_tokens_map.json", {"eos_token": {"content": "<e>"}, "sep_token": "<sep>"})
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}{{ sep_token }}")
    assert load_chat_template(tmp_path).render(CHAT) == "<s><e><sep>"
    write("tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>", "added_tokens_decoder": {}})
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("{{ tools | length }}{{ eos_token }}")
    template = load_chat_template(tmp_path)
    assert (template.render(CHAT), template.render(CHAT, tools=[{}])) == ("<s></s>", "1</s>")
    assert template_of("{{ tools | length }} of one template").render(CHAT, tools=[{}]) == "1 of one template"
    named = {"extra_special_tokens": {"a_token": "<a>"}, "model_specific_special_tokens": {"b_token": "<b>"}}
    write("tokenizer_config.json", {"added_tokens_decoder": {}, **named})
    (tmp_path / "chat_template.jinja").write_text("{{ a_token }}{{ b_token }}")
    assert load_chat_template(tmp_path).render(CHAT) == "<a><b>"


def test_an_argument_replaces_the_special_token_of_its_name():
    tokens, arguments = {"bos_token": "<s>", "eos_token": "</s>"}, {"eos_token": "<end>", "word": "w"}
    template = ChatTemplate("{{ bos_token }}{{ eos_token }}{{ word }}", tokens, "t", arguments)
    assert template.render(CHAT) == "<s><end>w"


def test_a_line_of_a_statement_alone_leaves_nothing():
    """Neither its indent nor its end, as in transformers (`lstrip_blocks` and `trim_blocks`)."""
    source = "a\n  {% if true %}\n  b\n  {% endif %}\n  {# no #}\nc {% if true %}d{% endif %}\ne"
    assert template_of(source).render(CHAT) == "a\n  b\nc de"


@pytest.mark.smoke
def test_a_template_is_found_where_transformers_writes_it(tmp_path):
    chat = [{"role": "system", "content": " be brief"}, {"role": "user", "content": "é?"}]
    config: dict = {"bos_token": {"content": "<s>"}, "chat_template": [{"name": "default", "template": TEMPLATE}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = load_chat_template(tmp_path)
    assert template.render(chat, True) == "<s>[system]be brief\n[user]é?\n[assistant]"
    assert template.render(chat) == "<s>[system]be brief\n[user]é?\n"
    assert (
        ChatTemplate(
            "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}x{% endfor %}", {}, "t"
        ).render(chat)
        == "x"
    )


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("changes", ["", "{% if m.n == 20 and messages[-1].n > 22 %}later{% endif %}"])
def test_a_long_chat_is_rendered_in_windows_only_if_that_is_right(changes, role):
    """Each answer of 40 begins and ends where whole renderings put it."""
    chat = long_chat(40)
    chat.messages[0]["role"] = role
    template = template_of(CHATML.replace("{{ m.content", changes + "{{ m.content"))
    expected = []
    for answer in chat.answers:
        before, text = template.render(chat.messages[:answer], True), template.render(chat.messages[: answer + 1])
        assert text.startswith(before)
        if expected and text.startswith(expected[-1][0]):
            expected[-1] = (text, [*expected[-1][1], (len(before), len(text))])
        else:
            expected.append((text, [(len(before), len(text))]))
    assert answer_samples(template, chat) == (expected, 0)
    assert (len(expected) == 1) == (not changes)


def test_a_chat_of_3000_turns_is_rendered_in_linear_time():
    """The number of messages that are rendered, not the time; each turn begins with the system's message."""
    counts = {}
    for turns in (100, 200):
        rendered = []
        count = lambda n, rendered=rendered: rendered.append(n) or ""  # noqa: E731
        template = template_of(
            CHATML.replace("{{ m.content", "{{ count(m.n) }}{{ messages[0].content }}{{ m.content"), count=count
        )
        assert len(answer_samples(template, long_chat(turns)).samples) == 1
        counts[turns] = len(rendered)
    assert counts[200] < 2.2 * counts[100]


def test_a_long_chat_of_a_model_that_thinks_takes_linear_time():
    """The number of messages that are rendered; the answers within the room have the samples of the whole chat."""
    counts = {}
    for turns in (50, 100):
        rendered = []
        template = template_of(THINKING, seen=lambda m, rendered=rendered: rendered.append(m) or "")
        samples, beyond = answer_samples(template, long_chat(turns), lambda text: 500)
        counts[turns] = len(rendered)
        every = answer_samples(template, long_chat(turns))
        assert samples == every.samples[: len(samples)] and beyond == turns - len(samples) and every.beyond == 0
        starts = [spans[-1][0] for _, spans in every.samples]
        assert len(samples) == sum(start < 500 for start in starts) > WINDOW
    assert counts[100] < 2.2 * counts[50]
    chat = long_chat(20)
    # Those beyond the room that have the weight 0 are no loss.
    weighted = [
        {**message, "weight": 0} if i in chat.answers[-3:] else message for i, message in enumerate(chat.messages)
    ]
    chat = chat._replace(messages=weighted)
    samples, beyond = answer_samples(template_of(THINKING, seen=lambda m: ""), chat, lambda text: 500)
    assert 0 < beyond == 20 - len(samples) - 3
    # If each sample begins in another way, only the last one says where its answer begins.
    numbered = template_of("{{ messages | selectattr('role', 'eq', 'user') | list | length }}" + CHATML)
    samples, beyond = answer_samples(numbered, long_chat(20), lambda text: 100)
    assert (len(samples), beyond) == (19, 1)
    in_a_child = ChatTemplate(numbered.sources, {}, "t").samples([long_chat(1), long_chat(20)], lambda text: 100)
    assert in_a_child == [answer_samples(numbered, long_chat(1)), (samples, beyond)]


def test_an_answer_of_weight_0_does_not_count():
    chat = long_chat(3)
    chat.messages[4]["weight"], chat.messages[6]["weight"] = 0, 1
    for source, counted in ((CHATML, ["so<end>\n", "so<end>\n"]), (MARKED, ["so", "so"])):
        [(text, spans)] = answer_samples(template_of(source), chat).samples
        answers = [i for i in range(len(text)) if text.startswith("so<end>", i)]
        assert [text[start:stop] for start, stop in spans] == counted
        assert [start for start, _ in spans] == [answers[0], answers[2]]
    twice = template_of(MARKED + "{% generation %}x{% endgeneration %}")
    with pytest.raises(InputError, match="weight 0"):
        answer_samples(twice, chat)


@pytest.mark.parametrize(
    ("source", "answers", "counted"),
    [
        (CHATML, [("", 1)], ["<end>\n"]),
        (MARKED, [("", 1)], None),
        (MARKED.replace("{% if m.role", "{% if 'so' not in m.content and m.role"), [("so", 1)], None),
        (MARKED, [("", 1), ("so", 0)], None),
        (MARKED, [("", 1), ("no", 0), ("so", 1)], ["", "so"]),
        (MARKED.replace("<end>", "").replace("{% endgen", "<end>{% endgen"), [("", 1)], ["<end>"]),
    ],
)
def test_of_an_answer_counts_what_the_template_marks(source, answers, counted):
    """In transformers too a chat's mask has no token of an empty mark, or of an answer without one."""
    messages = [
        message
        for text, weight in answers
        for message in (*CHAT, {"role": "assistant", "content": text, "weight": weight})
    ]
    line = json.dumps({"messages": messages}).encode()
    rendering = Rendering(lambda: ChatTemplate({"default": source}, {}, "t"))
    if counted is None:
        with pytest.raises(Stopped) as stopped:
            conversations([line], rendering)
        assert "has no answer of the assistant that counts" in str(stopped.value.error)
    else:
        [[[text, spans, _]]] = [each.texts for each in conversations([line], rendering)]
        assert [text[start:stop] for start, stop in spans] == counted


def test_a_generation_prompt_that_the_answer_does_not_begin_with():
    """As DeepSeek-R1's, which opens <think> in the prompt and drops it from the chat."""
    template = template_of(CHATML.replace("<begin>assistant\n", "<begin>assistant\n<think>\n"))
    for text, spans in answer_samples(template, long_chat(2)).samples:
        assert [text[start:stop] for start, stop in spans] == ["so<end>\n"] * 2


def test_characters_of_a_message_do_not_move_the_mask():
    """The marks of the assistant's text cannot be written by a message."""
    source = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}{% generation %}{{ m.content }}"
    template = template_of(source + "{% endgeneration %}{% endif %}{% endfor %}")
    said = "a\ufdd0b\ufdd1\ufdd0"
    text, spans = template.with_marks([{"role": "user", "content": said}, {"role": "assistant", "content": said}])
    assert text == 2 * said and spans == [(5, 10)] and template.render([{"role": "user", "content": said}]) == said
