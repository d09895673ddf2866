"""Which token ends a text and which begins it: every caller of nine tokenizers does as transformers."""

import base64
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from tokenizers import AddedToken as TokenOfFile
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

import megajax
from megajax.data.byte_pairs import add_missing
from megajax.data.chat_template import find_chat_template
from megajax.data.fim import open_infilling
from megajax.data.indexed import IndexedDataset
from megajax.data.loader import open_datasets
from megajax.data.preprocess import preprocess
from megajax.data.special_tokens import (
    FolderTokens,
    first_token,
    framed,
    read_folder_tokens,
    stop_tokens,
    stored_ids,
    turn_end,
    usual_first_token,
)
from megajax.data.tokenizers import deciding_files, keep_tokenizer, load_tokenizer
from megajax.errors import InputError
from megajax.hf import beside
from megajax.sources import HfSource, text_settings
from megajax.training.loop import Trainer

FILES = Path(__file__).parents[1] / "data_files"
sys.path.append(str(FILES))
from token_families import CHAT, CHATML, COMPLETION, FAMILIES, TEXT, write_family  # noqa: E402

REFERENCES = json.loads((FILES / "tokens.json").read_text())
MODEL = base64.b64decode(REFERENCES["model"])
TURN_ENDS = dict(zip(FAMILIES, [None, 259, 262, 104, 259, 258, 2, 2, 361], strict=True))  # read from the templates


@pytest.fixture(params=FAMILIES)
def family(request, tmp_path):
    """(a tokenizer's folder, what transformers makes of it)."""
    write_family(request.param, tmp_path / request.param, MODEL)
    return tmp_path / request.param, REFERENCES["families"][request.param]


def config_of(folder: Path, lines: list, length: int = 8, **data):
    file = folder.parent / "data.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    content = {
        "run": {"steps": 3, "dir": str(folder.parent / "run")},
        "model": {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 400},
        "mesh": {"data": 1},
        "batch": {"global_size": 1, "sequence_length": length},
        "data": {"train": str(file), "tokenizer": str(folder), "order": "sequential"} | data,
    }
    return megajax.Config.model_validate(content)


def test_the_end_of_the_tokenizers_file_comes_before_known_names():
    ids = {"<|endoftext|>": 3, "</s>": 4, "<end>": 5}
    assert FolderTokens({"eos_token": "<end>"}).end(ids.get, {"</s>"}, 7) == 5
    assert FolderTokens().end(ids.get, {"</s>"}, 7) == 7
    assert FolderTokens().end(ids.get, {"</s>"}, None) == 4 and FolderTokens().end(ids.get, (), None) == 3


@pytest.mark.smoke
def test_documents_end_as_transformers_says(family):
    folder, expected = family
    tokenizer = load_tokenizer(str(folder))
    assert (tokenizer.end_of_document, tokenizer.begin_of_text) == (expected["end"], expected["begin"])
    whole = [*expected["plain"], expected["end"]]
    config = config_of(folder, [{"text": TEXT}], kind="text")
    text = open_datasets(config)["train"].dataset.tokens[:]
    files = [str(folder.parent / "data.jsonl")], str(folder.parent / "p"), str(folder)
    prefix, *_ = preprocess(*files, append_eod=True)
    assert text.tolist() == IndexedDataset(prefix).document(0).tolist() == whole
    if expected["begin"] is not None:
        begun = [expected["begin"], *whole]
        config = config_of(folder, [{"text": TEXT}], kind="text", begin_of_document=True)
        assert open_datasets(config)["train"].dataset.tokens[:].tolist() == begun
        preprocess(*files, append_eod=True, prepend_bos=True)
        assert IndexedDataset(prefix).document(0).tolist() == begun
        assert first_token(config.data, tokenizer, from_folder=False) == expected["begin"]
    else:
        with pytest.raises(InputError, match="data.begin_of_document: .* has no token that begins a text"):
            open_datasets(config_of(folder, [{"text": TEXT}], kind="text", begin_of_document=True))

    # Files of Megatron's order are cut at it, and it stays the last one where the middle of a document is moved.
    files = {"kind": "indexed", "train": prefix, "reset_attention": True}
    names = dict(zip(("prefix", "middle", "suffix"), "abc", strict=True))
    config = config_of(folder, [], **files | {"order": "megatron", "fim_rate": 0.5, "fim_tokens": names})
    assert open_datasets(config)["train"].end_of_document == open_infilling(config).end == expected["end"]


@pytest.mark.smoke
def test_prompts_and_completions_begin_as_prompts_and_end_as_answers(family):
    """Training data, and the prompt that `generate`, `evaluate` and lm-eval give the model."""
    folder, expected = family
    begins = expected["prompt"][0] == expected["begin"] and expected["prompt"] != expected["plain"]
    config = config_of(folder, [{"prompt": TEXT, "completion": COMPLETION}], kind="chat", length=80)
    tokenizer, samples = load_tokenizer(str(folder)), open_datasets(config)["train"]
    whole = [*expected["completed"], expected["end"]]
    assert samples[0][: len(whole)].tolist() == whole
    uncounted = len(tokenizer.encode(TEXT)) + begins
    assert not samples.counted(0)[:uncounted].any() and samples.counted(0)[uncounted : len(whole)].all()
    assert samples.counted(0).sum() == len(whole) - uncounted  # the last spaces count too
    begin = first_token(config.data, tokenizer, from_folder=False)
    assert begin == usual_first_token(tokenizer) == (expected["begin"] if begins else None)
    assert framed(tokenizer.encode(TEXT), begin) == expected["prompt"]
    assert framed(expected["prompt"], begin) == expected["prompt"]  # a rendered chat has the token already
    # Texts that have both tokens already do not get them again.
    names = json.loads((folder / "tokenizer_config.json").read_text())
    texts = [names[name] or "" for name in ("bos_token", "eos_token")]
    first, last = (text["content"] if isinstance(text, dict) else text for text in texts)
    line = {"prompt": first * begins + TEXT, "completion": COMPLETION + last}
    config = config_of(folder, [line], kind="chat", length=80)
    found = open_datasets(config)["train"]
    assert (found[0] == expected["end"]).sum() == whole.count(expected["end"]) and found[0][0] == whole[0]


@pytest.mark.smoke
def test_chats_have_the_tokens_of_transformers_and_stop_at_their_template_s_end(family):
    folder, expected = family
    tokenizer = load_tokenizer(str(folder))
    ended = turn_end(folder, tokenizer, {})
    assert ended == TURN_ENDS[folder.name]
    stops = stop_tokens(folder, tokenizer, tokenizer.end_of_document, {})
    stored = {257} if (folder / "config.json").is_file() else set(expected.get("stops", ()))
    assert stops[0] == expected["end"] and set(stops) == {expected["end"], *stored, ended} - {None}
    if "chat" in expected:
        config = config_of(folder, [{"messages": CHAT}], kind="chat", length=120)
        samples = open_datasets(config)["train"]
        assert samples[0][: len(expected["chat"])].tolist() == expected["chat"]
        assert ended in samples[0][samples.counted(0)]
        rendered = find_chat_template(folder).render(CHAT)
        begin = usual_first_token(tokenizer)  # in a prompt for lm-eval, a text
        assert framed(tokenizer.encode(rendered), begin) == framed(expected["chat"], begin)


@pytest.mark.smoke
def test_exports_and_runs_keep_the_tokens(family):
    """A run's copy of the tokenizer says the same, and an exported folder stops where `generate` does."""
    folder, expected = family
    run, tokenizer = folder.parent / "run", load_tokenizer(str(folder))
    run.mkdir()
    keep_tokenizer(str(folder), run)
    kept = load_tokenizer(str(run))
    for name in ("end_of_document", "begin_of_text", "adds_begin", "added_tokens", "vocab_size"):
        assert getattr(kept, name) == getattr(tokenizer, name), name
    for kind in ("text", "chat"):
        config = config_of(folder, [], kind=kind)
        keys = beside.collect(run, config).keys
        ends = [expected["end"]] if kind == "text" else stop_tokens(run, kept, expected["end"], {})  # no config is kept
        assert np.atleast_1d(keys["eos_token_id"]).tolist() == list(ends)
        assert keys["bos_token_id"] == expected["begin"]
    # A run from scratch was trained without the token before a text; one of a Hugging Face model began with it.
    config = config_of(folder, [], kind="text")
    assert text_settings(config, run).begin_token is None
    (run / "hf_config.json").write_text("{}")
    begins = expected["prompt"][0] == expected["begin"] and expected["prompt"] != expected["plain"]
    assert text_settings(config, run).begin_token == (expected["begin"] if begins else None)


@pytest.mark.parametrize(("vocab_size", "end"), [(64, None), (65, 64)])
def test_an_export_names_no_token_beyond_the_vocabulary(tmp_path, vocab_size, end):
    """Token files of 64 ids have a model of 64, though their tokenizer has an end of its own."""
    config = config_of(tmp_path / "none", [], tokenizer="null:64")
    config = config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": vocab_size})})
    assert beside.collect(tmp_path, config).keys["eos_token_id"] == end


def test_a_setting_wins_over_the_folder(tmp_path):
    folder = tmp_path / "qwen3"
    write_family("qwen3", folder, MODEL)
    lines = [{"prompt": "a", "completion": "b", "text": "ab"}]
    config = config_of(folder, lines, kind="chat", end_of_document="<|endoftext|>")
    assert open_datasets(config)["train"][0][:3].tolist() == [64, 65, 257]
    config = config_of(folder, lines, kind="text", end_of_document="<|endoftext|>", length=2)
    assert open_datasets(config)["train"].dataset.tokens[:].tolist() == [64, 65, 257]
    # Files that end with another special token than the one they are cut at are an error, not one long document.
    name, texts = "<|endoftext|>", [config.data.train] * 2
    prefix, *_ = preprocess(texts, str(tmp_path / "p"), str(folder), eod_token=name)
    own, *_ = preprocess(texts, str(tmp_path / "own"), str(folder), append_eod=True)
    files = {"kind": "indexed", "train": prefix, "order": "megatron", "reset_attention": True}
    cure = r"p_text_document.bin end with <\|endoftext\|> .*: set data.end_of_document=<\|endoftext\|>"
    for train in (prefix, [{"prefix": prefix}, {"prefix": own}], [{"prefix": own}, {"prefix": prefix}]):
        with pytest.raises(InputError, match=cure):
            open_datasets(config_of(folder, [], length=2, **files | {"train": train}))
    assert open_datasets(config_of(folder, [], length=2, **files, end_of_document=name))["train"].end_of_document == 257


def test_without_a_tokenizer_config_known_names_end_a_text(tmp_path):
    for name, expected in {"gemma": 1, "llama3": 258, "qwen3": 257, "deepseek": 258, "llama2": 2, "gpt2": 257}.items():
        write_family(name, tmp_path / name, MODEL)
        for file in ("tokenizer_config.json", "generation_config.json", "config.json"):
            (tmp_path / name / file).unlink(missing_ok=True)
        assert load_tokenizer(str(tmp_path / name)).end_of_document == expected, name
    (tmp_path / "gemma/config.json").write_text('{"text_config": {"eos_token_id": [104, 1]}}')
    assert load_tokenizer(str(tmp_path / "gemma")).end_of_document == 104


def test_an_id_of_minus_one_is_none(tmp_path):
    """As transformers stops at none; other ids below zero are errors."""
    folder = tmp_path / "llama2"
    write_family("llama2", folder, MODEL)
    (folder / "tokenizer_config.json").unlink()
    stored = folder / "config.json"
    for name in ("bos_token", "eos_token", "pad_token"):
        for ids, expected in (
            (-1, []),
            ([-1], []),
            ([5, -1], [5]),
            ({"nested": -1}, None),
            (-2, None),
            ([5, -2], None),
        ):
            stored.write_text(json.dumps({f"{name}_id": ids}))
            (folder / "generation_config.json").write_text(json.dumps({f"{name}_id": -1}))
            if expected is None:
                with pytest.raises(InputError, match=f"config.json, key {name}_id, is damaged .*: give a token id"):
                    stored_ids(folder, name)
            else:
                assert stored_ids(folder, name) == expected
        stored.write_text(json.dumps({f"{name}_id": -1}))
        tokenizer = load_tokenizer(str(folder))
        assert (tokenizer.begin_of_text, tokenizer.end_of_document) == (1, 2)  # the tokenizer's own


def test_ids_are_those_of_the_first_file_that_has_any_the_whole_model_before_its_text_model(tmp_path):
    """As transformers generates: by generation_config.json, where config.json may have another end."""
    files = ("generation_config.json", "config.json", "hf_config.json")
    for token, name in enumerate(files):
        (tmp_path / name).write_text(json.dumps({"eos_token_id": token, "text_config": {"eos_token_id": 10 + token}}))
    for token, name in enumerate(files):
        assert stored_ids(tmp_path, "eos_token") == [token]
        (tmp_path / name).write_text(json.dumps({"text_config": {"eos_token_id": 10 + token}}))
        assert stored_ids(tmp_path, "eos_token") == [10 + token]
        (tmp_path / name).unlink()
    assert stored_ids(tmp_path, "eos_token") == []


OF_TOKENIZERS = {"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"}
OF_MODELS = {"chat_template.jinja", "preprocessor_config.json", "processor_config.json"}


def test_every_file_beside_a_tokenizer_is_kept_exported_and_decides_what_is_read_again(tmp_path):
    source, run = tmp_path / "source", tmp_path / "run"
    write_family("qwen3", source, MODEL)
    own, of_ids = {"tokenizer.json"}, {"generation_config.json", "config.json", "hf_config.json"}
    for name in OF_TOKENIZERS | OF_MODELS | of_ids:
        if not (source / name).is_file():
            (source / name).write_text("{}")
    assert {path.name for path in deciding_files(str(source))} == own | OF_TOKENIZERS | of_ids
    run.mkdir()
    keep_tokenizer(str(source), run)
    assert {path.name for path in run.iterdir()} == own | OF_TOKENIZERS | OF_MODELS
    beside.keep(source, run)
    found = own | OF_TOKENIZERS | OF_MODELS | {"generation_config.json", "hf_config.json"}
    assert {path.name for path in run.iterdir()} == found
    files = beside.collect(run, config_of(source, [], kind="text")).files
    assert files.keys() == found - {"hf_config.json"}


ENDS = ("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<eos>", "</s>")
BEGINS = ("<|begin_of_text|>", "<｜begin▁of▁sentence｜>", "<bos>", "<s>")


@pytest.mark.parametrize("name", [*ENDS, *BEGINS])
def test_a_tokenizer_whose_folder_names_no_token_has_those_of_a_known_name(name):
    """GPT-2's, Llama 3's, DeepSeek's, Gemma's and Llama 2's."""
    names = ["a", name]
    found = FolderTokens()

    def token_id(text: str) -> int | None:
        return names.index(text) if text in names else None

    assert found.end(token_id, [name], None) == (1 if name in ENDS else None)
    assert found.begin(token_id, None) == (1 if name in BEGINS else None, False)


def test_data_of_a_base_model_need_no_template(tmp_path):
    """A folder without a template reads prompts and completions; a template of the data's own gives the stop token."""
    folder = tmp_path / "qwen3"
    write_family("qwen3", folder, MODEL)
    names = json.loads((folder / "tokenizer_config.json").read_text())
    del names["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(names | {"eos_token": "<|endoftext|>"}))
    (folder / "generation_config.json").unlink()
    config = config_of(folder, [{"prompt": "a", "completion": "b"}], kind="chat")
    assert open_datasets(config)["train"][0][:3].tolist() == [64, 65, 257]
    tokenizer = load_tokenizer(str(folder))
    assert stop_tokens(folder, tokenizer, 257, {}) == (257,)
    (folder / "chat_template.jinja").write_text(CHATML)
    assert stop_tokens(folder, tokenizer, 257, {}) == HfSource(folder, "path").text(config).stop_tokens == (257, 259)
    assert stop_tokens(folder, tokenizer, 257, None) == (257,)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{{ end }}{% endfor %}")
    assert stop_tokens(folder, tokenizer, 257, {"end": "<|im_end|>"}) == (257, 259)  # data.chat_template_args
    (folder / "chat_template.jinja").write_text("{{ raise_exception('only with tools') }}")
    assert stop_tokens(folder, tokenizer, 257, {}) == (257,)


@pytest.mark.smoke
def test_the_end_of_a_turn_is_the_longest_token_that_fits(tmp_path):
    """Tokens may be beginnings of others, in any order."""
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    for names in (["<|im", "<|im_end|>", "<|im_e"], ["<|im_end|>", "<|im_e", "<|im"]):
        tokenizer: Any = SimpleNamespace(added_tokens=names, token_id=names.index)
        assert turn_end(tmp_path, tokenizer, {}) == names.index("<|im_end|>")


def test_a_base_model_tuned_on_chats_stops_where_they_do(tmp_path):
    """In generation and in the exported folder; its prompts begin as those of its training."""
    folder, template = tmp_path / "llama3", tmp_path / "chatml.jinja"
    write_family("llama3", folder, MODEL)
    names = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(names | {"eos_token": "<|end_of_text|>"}))
    template.write_text(CHATML.replace("<|im_end|>", "<|eom_id|>"))
    config = config_of(folder, [{"messages": CHAT}], kind="chat", length=120, chat_template=str(template))
    trainer = Trainer(config, jax.devices()[:1])
    trainer.save()
    trainer.close()
    model = megajax.load_run(tmp_path / "run")
    assert (model.stop_tokens, model.begin_token, model.prefix_token) == ((258, 261), 257, 257)
    assert model.encode("a") == [257, 64] and model.encode("<|begin_of_text|>a") == [257, 64]
    assert model.encode("a", special_tokens=False) == [64]
    files, keys, *_ = beside.collect(tmp_path / "run", config)
    assert keys["eos_token_id"] == json.loads(files["generation_config.json"])["eos_token_id"] == [258, 261]
    assert files["chat_template.jinja"] == template.read_bytes()
    # A folder keeps its own settings for generation, with the new end.
    (tmp_path / "run/generation_config.json").write_text('{"eos_token_id": 258, "top_k": 5}')
    files, keys, *_ = beside.collect(tmp_path / "run", config)
    assert json.loads(files["generation_config.json"]).items() >= {"eos_token_id": [258, 261], "top_k": 5}.items()
    (tmp_path / "run/generation_config.json").write_text('{"eos_token_id": [261, 258]}\n')
    files, keys, *_ = beside.collect(tmp_path / "run", config)
    assert files["generation_config.json"] == b'{"eos_token_id": [261, 258]}\n'
    for family, longest in (("llama", "max_position_embeddings"), ("kimi_linear", "model_max_length")):
        (tmp_path / "run/hf_config.json").write_text(json.dumps({"model_type": family, longest: 9999}))
        assert beside.collect(tmp_path / "run", config).keys["max_position_embeddings"] == 9999


NEWER = {"added_tokens_decoder": {}}
WHICH_FILE = {  # tokenizer_config.json, special_tokens_map.json, and what transformers 5.24 makes of both
    "the older file wins": ({"eos_token": "</s>"}, {"eos_token": {"content": "<e>"}}, {"eos_token": "<e>"}),
    "it is not read": ({"eos_token": "</s>"} | NEWER, {"eos_token": "<e>", "pad_token": "<s>"}, {"eos_token": "</s>"}),
    "nor where it alone has the name": (NEWER, {"eos_token": "<e>"}, {}),
    "its null wins": ({"eos_token": "</s>"}, {"eos_token": None}, {}),
    "it is alone": (None, {"eos_token": "<e>"}, {"eos_token": "<e>"}),
    "names of both": (
        {"eos_token": "</s>", "extra_special_tokens": {"image_token": "<e>"}},
        {"extra_special_tokens": {"x_token": "</s>"}},
        {"eos_token": "</s>", "image_token": "<e>", "x_token": "</s>"},
    ),
}


@pytest.mark.smoke
@pytest.mark.parametrize("case", WHICH_FILE)
def test_templates_tokenizers_and_exports_read_the_names_of_the_same_file(case, tmp_path):
    config, older, expected = WHICH_FILE[case]
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "<e>": 2, "a": 3}, "a"))
    tokenizer.add_special_tokens(["<s>", "</s>", "<e>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(older))
    source = "{{ eos_token }},{{ pad_token }},{{ image_token }},{{ x_token }}"
    (tmp_path / "chat_template.jinja").write_text(source)
    names = [expected.get(name, "") for name in ("eos_token", "pad_token", "image_token", "x_token")]
    assert find_chat_template(tmp_path).render(CHAT).split(",") == names
    assert beside.token_names(tmp_path) == {name: text for name, text in expected.items() if name in beside.TOKENS}
    known = {} if "eos_token" in expected else {"eos_token": "</s>"}  # a known name, as documented
    end = (known | expected)["eos_token"]
    assert load_tokenizer(str(tmp_path)).end_of_document == tokenizer.token_to_id(end)


@pytest.mark.parametrize("flags", [{}, {"special": True}, {"special": False}, {"special": True, "normalized": True}])
def test_an_added_token_has_the_flags_that_a_file_leaves_out_as_the_library_has_them(tmp_path, flags):
    stored = {"added_tokens_decoder": {"6": {"content": "<x>"} | flags}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(stored))
    found, usual = read_folder_tokens(tmp_path).added[6], TokenOfFile("<x>", **flags)
    for name in ("content", "special", "lstrip", "rstrip", "single_word", "normalized"):
        assert getattr(found, name) == getattr(usual, name), name


# Flags of <x>, token 6, in tokenizer.json and in added_tokens_decoder, and by transformers 5.24 the tokens of
# "a <x> b", whether it is in "a<x>b", and whether in "<X>" of a tokenizer that writes small letters
PLAIN, LEFT, RIGHT = [0, 2, 6, 2, 1], [0, 6, 2, 1], [0, 2, 6, 1]
FLAGS = [
    (None, {}, PLAIN, True, False),
    (None, {"lstrip": True}, LEFT, True, False),
    (None, {"rstrip": True, "special": False}, RIGHT, True, False),
    (None, {"single_word": True}, PLAIN, False, False),
    (None, {"normalized": True}, PLAIN, True, True),
    ({"lstrip": True}, None, LEFT, True, False),
    ({"lstrip": True}, {}, PLAIN, True, False),
    ({"single_word": True}, {"rstrip": True}, RIGHT, True, False),
]


@pytest.mark.smoke
@pytest.mark.parametrize("named", [False, True], ids=["", "eos"])
@pytest.mark.parametrize(("own", "added", "expected", "within", "in_capitals"), FLAGS, ids=str)
def test_a_token_is_found_in_texts_as_the_files_say(tmp_path, own, added, expected, within, in_capitals, named):
    """A name makes it special, and changes nothing else."""
    tokenizer = Tokenizer(models.WordLevel({text: i for i, text in enumerate("ab <>x")}, "a"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Split("", "isolated")
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    if own is not None:
        tokenizer.add_tokens([TokenOfFile("<x>", **flags | own)])
    config: dict = {"bos_token": "<none>"} | ({"eos_token": "<x>"} if named else {})
    if added is not None:
        config |= {"added_tokens_decoder": {"6": {"content": "<x>"} | flags | added}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    add_missing(tokenizer, read_folder_tokens(tmp_path))
    assert tokenizer.encode("a <x> b").ids == expected
    assert (6 in tokenizer.encode("a<x>b").ids, 6 in tokenizer.encode("<X>").ids) == (within, in_capitals)
    ((number, token),) = tokenizer.get_added_tokens_decoder().items()  # a name alone adds no token
    assert (number, token.special) == (6, named or (added or {}).get("special", True))


def test_the_begin_of_a_text_is_added_as_tokenizer_config_json_says(tmp_path):
    """Of a folder without either key the tokenizer's own file decides."""
    for given, adds in (
        ({}, None),
        ({"add_bos_token": True}, True),
        ({"add_bos_token": False}, False),
        ({"add_eos_token": True}, False),
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(given))
        assert read_folder_tokens(tmp_path).adds_begin == adds
