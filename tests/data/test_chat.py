"""Chats: tokens and loss mask are transformers', packing changes no loss, mistakes are sentences."""

import json
import random
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers

import megajax
from megajax.config.checks import check, check_mesh
from megajax.data.chat import Rendering, counted_in, counted_tokens, read_chats
from megajax.data.chat_template import ChatTemplate, find_chat_template
from megajax.data.conversation import IMAGE_PART, Completion, is_chat, read_record
from megajax.data.describe import describe_data, has_chats
from megajax.data.loader import make_loader, open_datasets
from megajax.data.rendering import Chat
from megajax.errors import ConfigError, InputError
from megajax.inference.generation import continue_texts
from megajax.inference.sampling import Sampling
from megajax.training.batches import to_global
from megajax.training.logs import closing_line

REFERENCE = Path(__file__).parents[1] / "data_files/chat.json"


@pytest.fixture(scope="module")
def reference() -> dict:
    return json.loads(REFERENCE.read_text())


@pytest.fixture
def folder(reference, tmp_path) -> Path:
    """A tokenizer's folder with its template, and chats.jsonl with the conversations."""
    (tmp_path / "tokenizer.json").write_text(reference["tokenizer"])
    (tmp_path / "chat_template.jinja").write_text(reference["template"])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    lines = [json.dumps({"messages": each["messages"]}) for each in reference["conversations"]]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def config_of(folder: Path, data: dict | None = None, length: int = 512, **sections):
    content = {
        "run": {"steps": 3, "dir": str(folder / "run"), "seed": 5},
        "model": {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 512},
        "mesh": {"data": 1},
        "batch": {"global_size": 2, "sequence_length": length},
        "precision": {"compute": "float32"},
        "data": {"kind": "chat", "train": str(folder / "chats.jsonl"), "tokenizer": str(folder / "tokenizer.json")}
        | (data or {}),
    }
    return megajax.Config.model_validate(content | sections)


def without_marks(template: str) -> str:
    return template.replace("{% generation %}", "").replace("{% endgeneration %}\n", "")


# Who speaks in ShareGPT's turns, as their published files have it, and the roles that messages may have.
SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "observation": "tool"}
SPEAKERS |= {"function_response": "tool"}
ROLES = ("system", "developer", "user", "assistant", "tool", "ipython", "function")


@pytest.mark.parametrize("key", ["from", "role"])
def test_each_speaker_has_a_role_and_each_role_may_be_written(key):
    first = {key: "human", "value": "hi"}
    for speaker, role in (SPEAKERS | {role: role for role in ROLES}).items():
        found = read_record({"conversations": [first, {key: speaker, "value": "x"}]})
        assert isinstance(found, Chat) and [each["role"] for each in found.messages] == ["user", role], speaker
        result = {"messages": [{"role": "user", "content": "hi"}, {"role": role, "content": {"sum": 3}}]}
        if role in ("tool", "ipython", "function"):  # a tool's result, which templates write as JSON
            assert isinstance(read_record(result), Chat)
        else:
            with pytest.raises(ValueError, match="has content that is not text"):
                read_record(result)
    for unknown in ("bing", "Human"):
        with pytest.raises(ValueError, match=f"has the role .*{unknown}.* in message 1: use {', '.join(ROLES)}"):
            read_record({"conversations": [first, {key: unknown, "value": "x"}]})


def test_a_picture_is_named_under_each_key_that_templates_know():
    parts = {"image": "a.png", "path": "a.png", "url": "a.png", "image_url": {"url": "a.png"}}
    written = [{"type": "image", key: value} for key, value in parts.items()]
    written += [{"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "image", "image": {"url": "a.png"}}]
    written += [{"type": "image", "image": {"path": "a.png"}}]
    for part in written:
        messages = [{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}]
        found = read_record({"messages": [*messages, {"role": "assistant", "content": "a"}]})
        assert isinstance(found, Chat) and found.pictures == ("a.png",), part
    turns = [("human", "<image>\nwhat?"), ("gpt", "a")]  # a text without a picture stays a text
    spoken = {"conversations": [{"from": speaker, "value": text} for speaker, text in turns], "images": ["a.png"]}
    found = read_record(spoken)
    assert isinstance(found, Chat)
    contents = [message["content"] for message in found.messages]
    assert contents == [[IMAGE_PART, {"type": "text", "text": "what?"}], "a"]
    found = read_record({name: value for name, value in spoken.items() if name != "images"})
    assert isinstance(found, Chat) and found.messages[0]["content"] == "<image>\nwhat?"
    with pytest.raises(ValueError, match="has no path or URL for the picture in part 0 of message 0"):
        read_record({"messages": [{"role": "user", "content": [{"type": "image", "file": "a.png"}]}]})


@pytest.mark.parametrize("marked", [True, False])
def test_tokens_and_mask_are_those_of_transformers(folder, reference, marked):
    if not marked:  # the same text without marks: an answer is what its message adds
        (folder / "chat_template.jinja").write_text(without_marks(reference["template"]))
    samples = open_datasets(config_of(folder, {"packing": "none", "order": "sequential"}))["train"]
    for i, expected in enumerate(reference["conversations"]):
        ids, mask = expected["ids"], np.array(expected["mask"], bool)
        assert samples[i][: len(ids)].tolist() == ids and not samples[i][len(ids) :].any()
        assert samples.document_lengths(i).tolist() == [len(ids), 513 - len(ids)]
        np.testing.assert_array_equal(samples.counted(i)[: len(ids)], mask)
        assert not samples.counted(i)[len(ids) :].any()


def test_each_answer_is_trained_as_the_template_shows_it_when_it_is_the_last(folder, reference):
    """Ids and mask of a template that shows the last reasoning only, against transformers' for each answer."""
    (folder / "chat_template.jinja").write_text(without_marks(reference["thinks"]))
    for case in reference["answers"]:
        (folder / "chats.jsonl").write_text(json.dumps({"messages": case["messages"]}) + "\n")
        args = {"chat_template_args": case["arguments"]} if case["arguments"] else {}
        samples = open_datasets(config_of(folder, {"packing": "none", "order": "sequential"} | args))["train"]
        each = case["answers"]
        # A sample of an answer that does not change when the next one follows is part of the next sample.
        last = [
            a for a, b in zip(each, [*each[1:], None], strict=True) if not b or b["ids"][: len(a["ids"])] != a["ids"]
        ]
        assert len(samples) == len(last) and samples.conversations == 1
        for i, expected in enumerate(last):
            ids, mask = expected["ids"], np.array(expected["mask"], bool)
            assert samples[i][: len(ids)].tolist() == ids and not samples[i][len(ids) :].any()
            np.testing.assert_array_equal(samples.counted(i)[: len(ids)], mask)
    assert [len(case["answers"]) for case in reference["answers"]] == [3, 2, 3, 4, 2]


def test_the_summary_says_that_answers_have_samples_of_their_own(folder, reference):
    (folder / "chat_template.jinja").write_text(without_marks(reference["thinks"]))
    config = config_of(folder)
    (line,) = [line for line in describe_data(config, open_datasets(config)) if line.startswith("train:")]
    answers = sum(m["role"] == "assistant" for each in reference["conversations"] for m in each["messages"])
    assert f"20 conversations ({answers} samples" in line


def test_packed_and_unpacked_batches_have_the_same_loss(folder):
    """All conversations in one batch: packed in few rows, or one in a row, with the same loss per counted token."""
    losses, rows = {}, {}
    for packing in ("balanced", "none"):
        config = config_of(folder, {"packing": packing}, length=160)
        rows[packing] = len(open_datasets(config)["train"])
        config = config.model_copy(update={"batch": config.batch.model_copy(update={"global_size": rows[packing]})})
        samples = open_datasets(config)["train"]
        mesh = megajax.build_mesh(check_mesh(config, 1), jax.devices()[:1])
        program = megajax.TrainProgram.build(config, mesh)
        every = np.arange(rows[packing])
        batch = to_global(program, next(make_loader(config, split="train", rows=every, samples=samples)))
        sums, tokens = program.eval_step(program.init_state().params, {}, batch)
        losses[packing] = float(sums["loss"] / tokens)
    assert rows["balanced"] < rows["none"] == 20
    assert losses["balanced"] == pytest.approx(losses["none"], abs=1e-6)


def test_prompts_and_completions_count_the_completion_and_the_end(folder, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "ab", "completion": "cé"}\n')
    data = {"train": str(tmp_path / "p.jsonl"), "tokenizer": "byte"}
    samples = open_datasets(config_of(folder, data, length=8))["train"]
    assert samples[0].tolist() == [97, 98, 99, 0xC3, 0xA9, 256, 0, 0, 0]
    assert samples.counted(0).tolist() == [False, False, True, True, True, True, False, False, False]
    batch = next(make_loader(config_of(folder, data, length=8), split="train", rows=np.arange(1), samples=samples))
    assert batch["loss_mask"].tolist() == [[0, 1, 1, 1, 1, 0, 0, 0]]
    assert batch["is_real"].tolist() == [[True] * 6 + [False] * 2]
    assert batch["segment_ids"].tolist() == [[0] * 6 + [1] * 2] and batch["positions"][0].tolist()[:6] == [*range(6)]


def test_the_first_token_of_a_packed_completion_is_not_counted(folder, tmp_path):
    """Without a prompt nothing of its own text predicts it, only the end of the text before it in the sequence."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "", "completion": "ab"}\n' * 2)
    samples = open_datasets(config_of(folder, {"train": str(tmp_path / "p.jsonl"), "tokenizer": "byte"}, length=6))[
        "train"
    ]
    assert samples[0].tolist() == [97, 98, 256, 97, 98, 256, 0]
    assert samples.counted(0).tolist() == [False, True, True, False, True, True, False]


QUESTION, ANSWER = {"role": "user", "content": "hi é"}, {"role": "assistant", "content": "fine"}
SYSTEM = {"role": "system", "content": "be brief"}
SAME = {  # each the chat of `messages`, in another form
    "conversations": {"conversations": [{"from": "human", "value": "hi é"}, {"from": "gpt", "value": "fine"}]},
    "a greeting": {
        "conversations": [
            {"from": "gpt", "value": "hello"},
            {"from": "human", "value": "hi é"},
            {"role": "assistant", "content": "fine"},
        ]
    },
    "prompt and completion": {"prompt": [QUESTION], "completion": [ANSWER]},
}


@pytest.mark.parametrize("form", SAME)
def test_forms_of_chats_give_the_samples_of_messages(folder, form):
    samples = []
    for record in ({"messages": [QUESTION, ANSWER]}, SAME[form]):
        (folder / "chats.jsonl").write_text(json.dumps(record) + "\n")
        opened = open_datasets(config_of(folder))["train"]
        samples.append((opened[0].tolist(), opened.counted(0).tolist()))
    assert samples[0] == samples[1] and any(samples[0][1])


@pytest.mark.parametrize(
    ("record", "advised"),
    [
        ({"messages": [QUESTION, ANSWER]}, "chat RUN;"),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, "chat RUN;"),
        ({"prompt": [QUESTION], "completion": [ANSWER]}, "chat RUN;"),
        ({"prompt": "hi", "completion": "fine"}, "generate RUN --prompts FILE.jsonl;"),
        ({"instruction": "hi", "output": "fine"}, "generate RUN --prompts FILE.jsonl;"),
    ],
)
def test_the_last_line_advises_the_command_that_fits_the_data(folder, record, advised):
    (folder / "chats.jsonl").write_text(json.dumps(record) + "\n")
    config = config_of(folder)
    line = closing_line(config, 1, 1, 1.0, has_chats(open_datasets(config)["train"]))
    assert advised.replace("RUN", config.run.dir) in line and line.count(config.run.dir) == 3
    assert is_chat(record) and not is_chat(dict(list(record.items())[1:]) | {"text": "a"})


def test_system_prompts_and_weights_of_turns_and_answers_in_a_prompt():
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": 0}]
    chat = read_record({"conversations": turns, "system": "be brief", "tools": "[]"})
    asked = {"role": "user", "content": "a"}
    assert chat == Chat([SYSTEM, asked, {"role": "assistant", "content": "b", "weight": 0}], {"tools": []})
    # Of a prompt with earlier answers only the completion counts.
    chat = read_record({"prompt": [QUESTION, ANSWER, QUESTION], "completion": [ANSWER]})
    assert isinstance(chat, Chat) and chat.answers == [1, 3] and [chat.counts(i) for i in chat.answers] == [False, True]


def test_instructions_are_alpacas_prompts():
    """Written out from the prompts that Stanford Alpaca published."""
    intro = "Below is an instruction that describes a task"
    write = "rite a response that appropriately completes the request.\n\n### Instruction:\nAdd {1}\n\n"
    without = f"{intro}. W{write}### Response:"
    with_input = f"{intro}, paired with an input that provides further context. W{write}### Input:\n2\n\n### Response:"
    record = {"instruction": "Add {1}", "output": "3"}
    for more, prompt in (({}, without), ({"input": ""}, without), ({"input": "2"}, with_input)):
        assert read_record(record | more) == Completion(prompt, "3")


def test_an_array_and_a_glob_give_the_samples_of_the_lines(folder, reference):
    """A whole JSON array, indented and with a byte order mark, and the same chats in two files by name."""
    chats = [{"messages": each["messages"]} for each in reference["conversations"]]
    (folder / "array.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(chats, indent=1, ensure_ascii=False).encode())
    lines = (folder / "chats.jsonl").read_text().splitlines(keepends=True)
    (folder / "part-b.jsonl").write_text("".join(lines[7:]))
    (folder / "part-a.jsonl").write_text("".join(lines[:7]))
    expected = open_datasets(config_of(folder))["train"]
    for name in ("array.json", "part-*.jsonl"):
        samples = open_datasets(config_of(folder, {"train": str(folder / name)}))["train"]
        assert len(samples) == len(expected) and samples.conversations == 20
        np.testing.assert_array_equal(samples.tokens, expected.tokens)
        np.testing.assert_array_equal(samples.counts, expected.counts)


def test_mistakes_in_arrays_and_globs_are_sentences(folder):
    (folder / "array.json").write_text('[{"messages": []}, {"text": "a"}]')
    (folder / "lines.json").write_text('[{"role": "user"}]\n[{"role": "user"}]')
    (folder / "cut.json").write_bytes(b'[{"prompt": "a", "completion": "b"}]\xc3')
    for name, sentence in {
        "cut.json": "begins like a JSON array, but it is not UTF-8",
        "array.json": "item 1 has neither",
        "lines.json": "begins like a JSON array, but text follows its end",
        "no*.jsonl": "matches no file",
    }.items():
        with pytest.raises(InputError, match=sentence) as error:
            open_datasets(config_of(folder, {"train": str(folder / name)}))
        assert str(folder / name) in str(error.value)


def test_stored_arrays_that_do_not_fit_each_other_are_a_sentence(folder):
    """Of 20 conversations in one row."""
    config = config_of(folder, {"packing": "sequential"}, length=8192)
    assert len(open_datasets(config)["train"]) == 1
    [stored] = folder.glob("run/index_cache/*/")
    for name, index, value in (("starts", 1, 0), ("starts", 0, 1), ("order", 0, -1), ("order", 0, 20), ("ends", 0, 19)):
        array = np.load(path := stored / f"{name}.npy")
        damaged = array.copy()
        damaged[index] = value
        for wrong in (damaged, array[:0]):
            np.save(path, wrong)
            with pytest.raises(InputError, match=rf"{stored} cannot .* \(its arrays do not fit each other\): .*remove"):
                open_datasets(config)
        np.save(path, array)
    open_datasets(config)


def test_long_conversations_are_cut_or_left_out_and_the_summary_says_so(folder, reference):
    lengths = sorted(len(each["ids"]) for each in reference["conversations"])
    room = lengths[12]  # one fills it exactly
    long = sum(length > room for length in lengths)
    assert 0 < long < 8
    cut = config_of(folder, length=room - 1)
    left = config_of(folder, {"too_long": "drop"}, length=room - 1)
    assert sum(map(len, [open_datasets(left)["train"].order])) == 20 - long
    opened = open_datasets(cut)
    assert max(np.diff(opened["train"].starts)) == room
    (line,) = [line for line in describe_data(left, open_datasets(left)) if line.startswith("train:")]
    assert f"20 conversations, {long} left out" in line and "the loss counts" in line
    (line,) = [line for line in describe_data(cut, opened) if line.startswith("train:")]
    assert f", {long} cut after {room} tokens, " in line
    masks, rows = [each["mask"][:room] for each in reference["conversations"]], len(opened["train"])
    tokens, read = sum(map(len, masks)), cut.run.steps * cut.batch.global_size
    assert f"{tokens:,} tokens in {rows} sequences ({tokens / (room * rows):.0%} full)" in line
    assert line.endswith(f"counts {sum(map(sum, masks)) / tokens:.0%} of the tokens; {read / rows:.3g} epochs")
    twice = [{"prefix": str(folder / "chats.jsonl"), "weight": weight} for weight in (3, 1)]
    blend = config_of(folder, {"train": twice}, length=room - 1)
    found = [line for line in describe_data(blend, open_datasets(blend)) if line.startswith("train:")]
    for line, share in zip(found, (0.75, 0.25), strict=True):
        assert line.endswith(f"; {share * read / rows:.3g} epochs")
    with pytest.raises(InputError, match="within 4 tokens: raise batch.sequence_length, or give other data"):
        open_datasets(config_of(folder, length=4))


def test_epochs_have_different_orders_and_a_run_resumes_in_them(folder):
    config = config_of(folder, length=160)
    samples = open_datasets(config)["train"]
    rows = [samples[i].tobytes() for i in range(3 * len(samples))]
    epochs = [rows[len(samples) * e : len(samples) * (e + 1)] for e in range(3)]
    assert len(set(epochs[0])) == len(samples) and all(set(epoch) == set(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    in_order = open_datasets(config_of(folder, {"order": "sequential"}, length=160))["train"]
    for epoch, found in enumerate(epochs):  # of the seed 5; other seeds have other epochs
        order = np.random.Generator(np.random.PCG64((5, epoch))).permutation(len(samples))
        assert found == [in_order[i].tobytes() for i in order]
    batches = make_loader(config, split="train", rows=np.arange(2))
    whole = [next(batches)["tokens"] for _ in range(5)]
    resumed = make_loader(config, split="train", rows=np.arange(1, 2), start_step=3)
    np.testing.assert_array_equal(next(resumed)["tokens"], whole[3][1:])


MISTAKES = {
    "{": "line 1 is not JSON",
    "[]": 'line 1 has neither "messages" nor',
    '{"conversations": [1]}': 'has "conversations" that are not a list of turns',
    '{"conversations": [{"from": "narrator", "value": "a"}]}': "has the role 'narrator' in message 0",
    '{"conversations": [{"from": "gpt", "value": "a"}]}': 'has no "messages"',
    '{"instruction": 1, "output": "a"}': 'has "instruction" that is not text (1)',
    '{"prompt": [], "completion": "a"}': "or both as lists of messages",
    '{"text": "a"}': 'line 1 has neither "messages" nor "prompt" and "completion"',
    '{"id": 1, "text": "a"}': "(its keys: id, text): set data.kind=text for texts",
    '{"prompt": "a", "chosen": "b", "rejected": "c"}': "(its keys: prompt, chosen, rejected): set data.packing=pairs",
    '{"question": "a", "answer": "b"}': "(its keys: question, answer): write one of them",
    **{
        f'{{"{key}": "a"}}': f"(its keys: {key}): write one of them"
        for key in ("prompt", "completion", "instruction", "output", "chosen", "rejected")
    },
    '{"prompt": 1, "completion": "a"}': 'line 1 has a "prompt" or a "completion" that is not text',
    r'{"prompt": "\ud800", "completion": "a"}': "line 1 contains half of a surrogate pair",
    '{"messages": [{"role": "bot", "content": "a"}]}': "line 1 has the role 'bot' in message 0: use system, developer",
    '{"messages": [{"role": "user"}]}': "line 1 has a message without content (message 0, user): give it some",
    '{"messages": [{"role": "user", "content": 5}]}': "line 1 has content that is not text (5) in message 0 (user)",
    '{"messages": [{"role": "user", "content": {"a": 1}}]}': "content that is not text ({'a': 1}) in message 0 (user)",
    '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}': "no path or URL for the picture in part 0",
    '{"messages": [{"role": "user", "content": [{"type": "image", "path": "a.png"}]}]}': "has pictures, but the",
    '{"messages": [{"role": "user", "content": [{"type": "audio"}]}]}': "a part of content of type 'audio' in",
    '{"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}': "{'type': 'text', 'text': 1} in mess",
    '{"messages": [{"role": "tool", "content": ["a"]}]}': "has a part of content 'a' in message 0 (tool)",
    '{"messages": [{"role": "user", "content": "a"}]}': "line 1 has no answer of the assistant",
    '{"messages": [{"role": "assistant", "content": "a", "weight": 0}]}': "no answer of the assistant that counts",
    '{"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}': "the weight 0.5 in message 0 (assistant)",
    '{"messages": [{"role": "assistant", "content": "a", "weight": true}]}': "the weight True in message 0",
    '{"messages": [{"role": "user", "content": "a", "weight": 1}]}': "the weight 1 in message 0 (user)",
    '{"messages": [{"role": "user", "content": "a"}], "tools": "[1]"}': 'has "tools" that are not a list of JSON',
    '{"messages": [{"role": "user", "content": "a"}], "documents": {}}': 'has "documents" that are not a list of JSON',
    '{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"tools": []}}': "not arguments of a",
    '{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": ["a"]}': "not arguments of a template",
}


@pytest.mark.smoke
@pytest.mark.parametrize("line", MISTAKES)
def test_a_bad_line_is_a_sentence(folder, line):
    (folder / "chats.jsonl").write_text(line + "\n")
    with pytest.raises(InputError) as error:
        open_datasets(config_of(folder))
    assert MISTAKES[line] in str(error.value) and "data.train" in str(error.value)


def test_of_several_bad_lines_the_first_is_named(folder):
    """The template refuses line 4 before an answer is looked for in line 3; the chats before both are there."""
    source = "{% for m in messages %}{{ m.content if m.content != 'bad' else raise_exception('no') }}{% endfor %}"
    answer = {"role": "assistant", "content": "b"}
    lines = [[answer], [answer], [{"role": "user", "content": "a"}], [{"role": "user", "content": "bad"}, answer]]
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in lines))
    chats = read_chats([str(path)], Rendering(lambda: ChatTemplate(source, {}, "t")))
    assert [next(chats).location, next(chats).location] == [f"{path}, line 1", f"{path}, line 2"]
    with pytest.raises(InputError, match=r"line 3 has no answer of the assistant"):
        next(chats)


@pytest.mark.smoke
def test_templates_that_fail_are_sentences(folder):
    for template, sentence in {
        "{{": r"^data\.tokenizer .*jinja is damaged",
        "{{ raise_exception('no system turns') }}": r"does not accept the messages \(no system turns\)",
        "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}": "changes earlier turns when .* in "
        "message 2",
        "{% for m in messages %}{{ m.content }}{% if loop.revindex == 2 %}!{% endif %}{% endfor %}": "changes earlier",
        "{{ '\\ud800' }}": "does not accept the messages .*surrogates not allowed",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}": "does not accept the messages",
    }.items():
        (folder / "chat_template.jinja").write_text(template)
        with pytest.raises(InputError, match=sentence):
            open_datasets(config_of(folder))
    (folder / "other.jinja").write_text("{% for")
    for name, sentence in (("other", "damaged"), ("nowhere", "cannot be read"), ("..", "cannot be read")):
        path = folder / f"{name}.jinja" if name != ".." else folder
        with pytest.raises(InputError, match=rf"^data\.chat_template \(.*{sentence}"):
            open_datasets(config_of(folder, {"chat_template": str(path)}))
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(InputError, match="has no chat template"):
        open_datasets(config_of(folder))
    with pytest.raises(InputError, match="template .*nowhere cannot be read"):
        find_chat_template(folder, folder / "nowhere")


@pytest.mark.smoke
def test_settings_that_do_not_fit_are_sentences(folder):
    for data, sentence in {
        ("tokenizer", None): "data.kind=chat needs data.tokenizer",
        ("tokenizer", "null:300"): "data.tokenizer=null:300",
        ("train", None): "data.kind=chat needs data.train .*: set data.train to JSON lines",
        ("split", "9,1,0"): "data.split=9,1,0.* cannot be combined with data.kind=chat.*: give files to data.valid",
        ("order", "megatron"): "data.order=megatron.* cannot be combined with data.kind=chat.*: use shuffled",
    }.items():
        with pytest.raises(ConfigError, match=sentence):
            check(config_of(folder, dict([data])))


@pytest.mark.long
def test_a_model_learns_to_answer_and_generates_the_answers(tmp_path):
    """From no right answer to questions that it has not seen to more than 90 %: the first letter of a word."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=4)) for _ in range(660)]
    seen, held = words[:600], [word for word in words[600:] if word not in words[:600]]
    chats = [[{"role": "user", "content": word}, {"role": "assistant", "content": word[0]}] for word in seen]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{{ '=' if m.role == 'user' else end }}{% endfor %}"
    )
    config = config_of(
        tmp_path,
        {"tokenizer": "byte", "chat_template": str(tmp_path / "t.jinja"), "chat_template_args": {"end": ";"}},
        run={"steps": 50, "dir": str(tmp_path / "run"), "eval_steps": 0, "seed": 1},
        model={"num_layers": 1, "hidden_size": 32, "num_heads": 4, "vocab_size": 257},
        batch={"global_size": 16, "sequence_length": 48},
        schedule={"learning_rate": 0.01, "warmup_steps": 10},
        logging={"tensorboard": False},
    )

    def share_of_right_answers() -> float:
        model = megajax.load_run(tmp_path / "run")
        answers = continue_texts(model, [f"{word}=" for word in held], 2, Sampling(temperature=0))
        return sum(answer == f"{word[0]};" for word, answer in zip(held, answers, strict=True)) / len(held)

    trainer = megajax.Trainer(config, jax.devices()[:1])
    trainer.save()
    trainer.checkpoints.wait()
    (tmp_path / "run/config.yaml").write_text(config.to_yaml())
    assert share_of_right_answers() == 0
    trainer.run()
    assert share_of_right_answers() > 0.9
    (tmp_path / "t.jinja").unlink()  # the run has a copy, which generation uses with the arguments of the training
    assert megajax.load_run(tmp_path / "run").chat_template.render(chats[0]) == f"{seen[0]}={seen[0][0]};"


@pytest.mark.parametrize("kind", ["bytes", "pieces", "words"])
def test_the_tokens_of_spans_are_those_that_share_a_character_with_them(kind):
    """Characters of several tokens, characters of none, empty spans; the definition is `counted_tokens`."""
    texts = ["ab 🙂 é  cd\n\n🙂🙂 ef ", "   ", "naïve 🙂", "a"]
    if kind == "bytes":  # without merges: each byte is a token
        tokenizer = tokenizers.ByteLevelBPETokenizer()
        tokenizer.train_from_iterator(["ab cd"], vocab_size=257, show_progress=False)
    else:
        model, words = (tokenizers.models.BPE, tokenizers.pre_tokenizers.Metaspace())
        if kind == "words":  # white space has no token
            model, words = tokenizers.models.WordLevel, tokenizers.pre_tokenizers.WhitespaceSplit()
        tokenizer = tokenizers.Tokenizer(model(unk_token="?"))
        tokenizer.pre_tokenizer = words
        trainers = tokenizers.trainers
        made = trainers.BpeTrainer if kind == "pieces" else trainers.WordLevelTrainer
        tokenizer.train_from_iterator(texts[:3], made(special_tokens=["?"], show_progress=False))
    rng = np.random.default_rng(0)
    for encoding in tokenizer.encode_batch(texts):
        for _ in range(100):
            spans = np.sort(rng.integers(0, 20, (2, 2)), axis=1).tolist()
            found = counted_in(encoding, spans)
            assert np.array_equal(found, counted_tokens(encoding.offsets, spans)), (encoding.tokens, spans)
