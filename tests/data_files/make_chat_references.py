"""Makes chat.json: conversations as transformers renders and tokenises them.

Needs the environment of make_transformers_references.py; run it as `python tests/data_files/make_chat_references.py`.
The file holds

- `tokenizer`, the text of a tokenizer.json whose tokens are pieces of words, as in real ones, and `config`, its
  tokenizer_config.json,
- `template`, which marks the assistant's text, and `conversations`: messages, ids and mask of each,
- `thinks`, a template that shows the reasoning of the last answer only, and `answers`: for each answer of a chat the
  ids and the mask of the conversation that ends with it,
- `templates`, which use together what published templates use, and `texts`: messages, arguments, whether with the
  generation prompt, and the text.
"""

import itertools
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATE = """{{ bos_token }}{%- for message in messages %}
<|start|>{{ message['role'] }}
{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] | trim }}<|end|>{% endgeneration %}
{% else %}{{ message['content'] }}<|end|>
{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|start|>assistant
{% endif %}"""
WORDS = "the quick brown fox jumps over a lazy dog while naïve café owners say 你好 and 42 + 17 is 59 !".split()
CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": {"__type": "AddedToken", "content": "<|end|>", "lstrip": False, "rstrip": False, "normalized": False},
    "pad_token": None,
    "unk_token": "<unk>",
    "sep_token": "<sep>",
    "cls_token": "<cls>",
    "mask_token": "<mask>",
    "extra_special_tokens": {"image_token": "<image>"},
    "add_bos_token": True,
}
# As Qwen3: earlier answers lose their reasoning, the last one shows it even if it is empty. The marks are for the mask.
THINKS = """{% set ns = namespace(last=0) %}
{% for m in messages if m.role == 'user' %}{% set ns.last = messages.index(m) %}{% endfor %}
{% for m in messages %}
<|start|>{{ m.role }}
{% if m.role != 'assistant' or loop.index0 < ns.last %}
{{ m.content }}<|end|>
{% elif enable_thinking is defined and enable_thinking is false %}
<think>

</think>

{% generation %}{{ m.content }}<|end|>
{% endgeneration %}
{% else %}
{% generation %}<think>
{{ m.reasoning_content or '' }}
</think>

{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}<|end|>
{% endgeneration %}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}
<think>

</think>

{% endif %}
{% endif %}"""
TEMPLATES = {
    # names that are None or undefined, special tokens, arguments
    "default": """{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ sep_token }}{{ cls_token }}{{ mask_token }}
{{ image_token }}{{ pad_token is defined }}{{ additional_special_tokens is defined }}
{{ tools is defined }}{{ tools is none }}{{ documents is defined }}{{ documents is none }}
{% if documents %}{% for d in documents %}[{{ d.title }}: {{ d['text'] }}]{% endfor %}{% endif %}
{{ thinking | default('off') }} {{ enable_thinking | default(true) }} {{ strftime_now('on') }}
{% for m in messages %}{% if loop.index > 3 %}{% break %}{% endif %}
{{ m.role }}:{{ m.content }}{% if m.content is string %}|{{ m.content.strip().split(' ')[-1] | upper }}{% endif %}
{% if 'tool_calls' in m %} calls {{ m.tool_calls | length }}{% endif %}
{% if m.thinking is defined %} thinks {{ m.thinking }}{{ m['reasoning_content'] | trim }}{% endif %}
{% endfor %}{{ '>' if add_generation_prompt }}""",
    # tools and JSON
    "tool_use": """{% macro show(name, of) -%}
{{ name }}{% for k, v in of.items() if v is mapping %}({{ k }}={{ show('', v) }}){% endfor %}
{%- endmacro %}
{% for t in tools %}{{ t | tojson }}{{ t | tojson(indent=2) }}
{{ t | tojson(separators=(',', ':'), sort_keys=true) }}{{ t | tojson(ensure_ascii=true) }}
{{ show(t.function.name, t.function) }}{% endfor %}{{ tools | length }}
{% for m in messages[::-1] if m.role != 'system' %}
{%- for c in m.tool_calls or [] %}{% set f = c.function if c.function is defined else c %}
{{ f.arguments if f.arguments is string else f.arguments | tojson }}{% endfor %}
{% if m.role == 'tool' and not m.tool_call_id %}{{ raise_exception('no id') }}{% endif %}
{%- if m.content is string or not m.content %}{{ m.content }}
{%- else %}{{ m.content | map(attribute='text') | join('+') }}{% endif %}
{%- endfor %}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}""",
}
PARAMETERS = {"type": "object", "properties": {"city": {"description": 'a "<city>" & é'}, "a": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]


def conversations(rng: random.Random) -> list[list[dict[str, str]]]:
    """Twenty of them: with and without a system turn, one to four answers, tool turns, blanks around texts."""
    out = []
    for i in range(20):
        messages = [{"role": "system", "content": "be brief"}] if i % 3 == 0 else []
        for turn in range(1 + i % 4):
            said = [" ".join(rng.choices(WORDS, k=rng.randint(1, 12))) for _ in range(3)]
            messages.append({"role": "user", "content": said[0]})
            if i % 5 == 4 and turn == 0:
                messages.append({"role": "tool", "content": said[2]})
            messages.append({"role": "assistant", "content": f" {said[1]} " if i % 2 else said[1]})
        out.append(messages)
    return out


def thinking_chats() -> list[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """(messages, arguments): reasoning in all answers, in one, in none; a tool between two answers."""

    def chat(*thoughts: str | None) -> list[dict[str, Any]]:
        turns = [
            [
                {"role": "user", "content": f"{i} + 17"},
                {"role": "assistant", "content": f"is {i + 17}", "reasoning_content": thought},
            ]
            for i, thought in enumerate(thoughts)
        ]
        return [{"role": "system", "content": "be brief"}, *itertools.chain(*turns)]

    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "café"}}}
    calls = [
        {"role": "assistant", "content": "", "reasoning_content": "the fox", "tool_calls": [call]},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "the dog", "thinking": "it is lazy", "tool_calls": None},
    ]
    tools = chat("over") + [{"role": "user", "content": "say"}, *calls]
    tools += [{"role": "user", "content": "and"}, {"role": "assistant", "content": "now"}]
    more = [chat("a fox", "a dog", "and 42"), chat("a fox", None), chat(None, None, None), tools]
    return [*((each, {}) for each in more), (chat(None, None), {"enable_thinking": False})]


def texts(fast: PreTrainedTokenizerFast) -> list[dict[str, Any]]:
    """What `TEMPLATES` make of conversations; the text is None where transformers refuses.

    The template without tools does not read parts of content, so it gets their texts joined by newlines.
    """

    def joined(message: dict[str, Any]) -> dict[str, Any]:
        content = message["content"]
        return {**message, "content": "\n".join(p["text"] for p in content)} if isinstance(content, list) else message

    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "é"}}}
    as_text = {"function": {"name": "weather", "arguments": '{"city":  "é"}'}}
    result = {"role": "tool", "content": "blue", "tool_call_id": "1"}
    ask = {"role": "user", "content": " how are you? "}
    chats = [
        [ask],
        [{"role": "system", "content": "be brief"}, ask, {"role": "assistant", "content": "fine", "tool_calls": None}],
        [ask, {"role": "assistant", "content": None, "tool_calls": [call, as_text]}, result, ask, ask],
        [ask, {"role": "assistant", "content": "x", "thinking": "hm "}, {"role": "tool", "content": "no id"}],
        [{"role": "user", "content": [{"type": "text", "text": "in"}, {"type": "text", "text": "parts"}]}],
        [ask, {"role": "assistant", "content": "x", "reasoning": "a", "reasoning_content": None}],
        [ask, {"role": "assistant", "content": "x", "reasoning_content": "b", "thinking": "a"}],
    ]
    arguments = [{}, {"tools": TOOLS}, {"tools": []}, {"thinking": True, "enable_thinking": False, "bos_token": "<b>"}]
    arguments.append({"documents": [{"title": "a", "text": "b"}], "tools": None})
    found = []
    for messages, more, prompt in itertools.product(chats, arguments, (False, True)):
        given = messages if more.get("tools") is not None else list(map(joined, messages))
        try:
            text = fast.apply_chat_template(given, tokenize=False, add_generation_prompt=prompt, **more)
        except Exception:
            text = None
        found.append({"messages": messages, "arguments": more, "prompt": prompt, "text": text})
    return found


if __name__ == "__main__":
    rng = random.Random(0)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "<|start|>", "<|end|>", "<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 10, trainer)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(f"{folder}/tokenizer.json")
        named = [{"name": name, "template": source} for name, source in TEMPLATES.items()]
        Path(folder, "tokenizer_config.json").write_text(json.dumps(CONFIG | {"chat_template": named}))
        fast = PreTrainedTokenizerFast.from_pretrained(folder)

    def tokenised(messages: list[dict[str, Any]], template: str, **more: Any) -> dict[str, Any]:
        out = fast.apply_chat_template(
            messages, chat_template=template, return_assistant_tokens_mask=True, return_dict=True, **more
        )
        return {"ids": list(out["input_ids"]), "mask": list(out["assistant_masks"])}

    found = [{"messages": chat} | tokenised(chat, TEMPLATE) for chat in conversations(rng)]
    answers = []
    for chat, more in thinking_chats():
        ends = [i + 1 for i, message in enumerate(chat) if message["role"] == "assistant"]
        each = [tokenised(chat[:end], THINKS, **more) for end in ends]
        answers.append({"messages": chat, "arguments": more, "answers": each})
    content = {"tokenizer": tokenizer.to_str(), "config": CONFIG, "template": TEMPLATE, "conversations": found}
    content |= {"thinks": THINKS, "answers": answers, "templates": TEMPLATES, "texts": texts(fast)}
    (Path(__file__).parent / "chat.json").write_text(json.dumps(content) + "\n")
