"""Compares the texts of published chat templates with transformers': `python dev/chat_templates.py FOLDER`.

FOLDER has templates, `NAME.jinja`, which are not part of megajax. Needs transformers 5 beside megajax. Each template is
rendered for conversations with and without a system turn, tools, tool calls, reasoning, nulls, documents and arguments,
with and without the generation prompt. Prints a table: the template, the texts that are equal, the conversations that
both refuse, and how many samples a chat of four answers becomes. Exits with 1 if something differs.
"""

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast  # type: ignore[import-not-found]

from megajax.data.chat_template import ChatTemplate
from megajax.data.rendering import Chat
from megajax.data.sandbox import Stopped
from megajax.errors import InputError

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>", "sep_token": "<sep>"}
TOKENS |= {"cls_token": "<cls>", "mask_token": "<mask>"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": 'a "city" <é>'}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": PARAMETERS}}
PARTS = [{"type": "text", "text": "in parts"}]
ARGUMENTS: list[dict[str, Any]] = [{}, {"enable_thinking": False}, {"thinking": True, "reasoning_effort": "high"}]


def conversations() -> Iterator[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """(messages, what the template gets beside them)."""
    call = {"id": "call_0aB1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
    as_text = call | {"function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    ask = {"role": "user", "content": " how are you? "}
    plain = [ask, {"role": "assistant", "content": " fine \n"}]
    thought = [ask, {"role": "assistant", "content": "fine", "reasoning_content": "they are\npolite"}]
    inline = [ask, {"role": "assistant", "content": "<think>\nthey are polite\n</think>\n\nfine"}]
    older = [ask, {"role": "assistant", "content": "fine", "thinking": "they are polite", "tool_calls": None}]
    result = {"role": "tool", "content": '{"sky": "blue"}', "tool_call_id": "call_0aB1", "name": "weather"}
    calls = [
        [ask, {"role": "assistant", "content": content, "tool_calls": [each]}, result]
        for content, each in itertools.product((None, "", "let me see"), (call, as_text))
    ]
    answered = [[*each, {"role": "assistant", "content": "blue"}] for each in calls]
    turns = [[ask], plain, plain + [ask], plain * 2, thought, thought + thought, inline * 2, older, thought + plain]
    for head, messages, tools, arguments in itertools.product(
        ([], [{"role": "system", "content": "be brief"}], [{"role": "developer", "content": "be brief"}]),
        [*turns, *calls, *answered],
        ({}, {"tools": None}, {"tools": []}, {"tools": [TOOL, TOOL]}),
        ARGUMENTS,
    ):
        yield head + messages, tools | arguments
    yield plain, {"documents": [{"title": "a", "text": "b"}]}
    yield [{"role": "user", "content": PARTS}], {}


def compare(source: str, name: str) -> tuple[int, int, list[str]]:
    """(texts that are equal, conversations that both refuse, sentences about the others)."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **TOKENS)
    template, equal, refused, different = ChatTemplate(source, TOKENS, name), 0, 0, []

    def render(messages: list[dict[str, Any]], prompt: bool, more: dict[str, Any]) -> str | None:
        try:
            return tokenizer.apply_chat_template(
                messages, chat_template=source, tokenize=False, add_generation_prompt=prompt, **more
            )
        except Exception:  # a template is a program, which can fail in any way
            return None

    for (messages, more), prompt in itertools.product(conversations(), (False, True)):
        expected = render(messages, prompt, more)
        if messages[0]["content"] is PARTS and (
            expected is None or repr(PARTS) in expected
        ):  # as text, see docs/data.md
            expected = render([{"role": "user", "content": "in parts"}], prompt, more)
        try:
            found = template.render(messages, prompt, **more)
        except InputError as error:
            found, reason = None, str(error)
        else:
            reason = found
        equal += found == expected is not None
        refused += found is expected is None
        if found != expected:
            different.append(f"{name}: {json.dumps([messages, more])[:300]}\n  {expected!r}\n  {reason!r}")
    return equal, refused, different


def samples(template: ChatTemplate) -> str:
    """The number of samples of a chat with four answers, plain and with reasoning."""
    counts = []
    for more in ({}, {"reasoning_content": "hm"}):
        turn = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"} | more]
        try:
            counts.append(str(len(template.samples([Chat(turn * 4, {})])[0].samples)))
        except Stopped:
            counts.append("refused")
    return ", ".join(counts)


def main(folder: str) -> int:
    """Print the table; returns the exit status."""
    print("| template | equal | refused by both | different | samples of 4 answers: plain, with reasoning |")
    print("|---|---|---|---|---|")
    found = []
    for path in sorted(Path(folder).glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        equal, refused, different = compare(source, path.stem)
        found += different
        count = samples(ChatTemplate(source, TOKENS, path.stem))
        print(f"| {path.stem} | {equal} | {refused} | {len(different)} | {count} |", flush=True)
    print("\n".join(found[:20]), file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
