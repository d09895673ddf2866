"""What is stored for one config is not read for another: every setting that decides it is part of its name.

Each config differs from a base in one setting. Its samples through the cache that all of them share are those through
a cache of its own; and some setting of every kind of data changes them, or the test would say nothing.
"""

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

import megajax
from megajax.config import DataConfig
from megajax.data.chat_samples import open_chat
from megajax.data.encoding import TextEncoder
from megajax.data.indexed import IndexedWriter
from megajax.data.loader import make_loader
from megajax.data.megatron import MegatronBlend
from megajax.data.packing import RowPacking
from megajax.data.preprocess import _settings as preprocess_settings
from megajax.data.text import open_text
from megajax.data.tokenizers import load_tokenizer
from megajax.layout.attention_pairs import AttentionPairs

REFERENCE = Path(__file__).parents[1] / "data_files/chat.json"
CHANGED = {  # by kind of data: settings, each with a second value; FOLDER is the test's
    "indexed": {
        "run.seed": 6,
        "run.steps": 40,
        "batch.global_size": 8,
        "batch.sequence_length": 8,
        "data.order": "sequential",
        "data.train": "FOLDER/b",
        "data.split": "50,50,0",
        "data.train_samples": 200,
        "data.drop_last_validation_sample": False,
    },
    "text": {
        "run.seed": 6,
        "batch.sequence_length": 8,
        "data.order": "sequential",
        "data.train": "FOLDER/b.jsonl",
        "data.split": "50,50,0",
        "data.text_key": "other",
        "data.tokenizer": "FOLDER/second/tokenizer.json",
        "data.end_of_document": "<|start|>",
        "data.begin_of_document": True,
    },
    "chat": {
        "run.seed": 6,
        "batch.sequence_length": 32,
        "data.order": "sequential",
        "data.train": "FOLDER/b.jsonl",
        "data.tokenizer": "FOLDER/second/tokenizer.json",
        "data.end_of_document": "<|start|>",
        "data.chat_template": "FOLDER/other.jinja",
        "data.chat_template_args": {"word": "y"},
        "data.packing": "none",
        "data.too_long": "drop",
    },
}
# Settings that decide no stored tokens or order: other data, how a batch is made of samples, and how they are read.
ELSEWHERE = """
    kind stages valid valid_sets test index_cache reset_attention reset_positions mask_end_of_document_loss
    fim_rate fim_spm_rate fim_tokens noise_density mean_span_length denoisers synthetic_documents workers
    prefetch""".split()
TEMPLATE = (
    "{% for m in messages %}{{ '<|start|>' + (word or 'x') + m.content }}{% generation %}{{ '<|end|>' }}"
    "{% endgeneration %}{% endfor %}"
)


@pytest.fixture
def folder(tmp_path) -> Path:
    rng = np.random.default_rng(0)
    for number, name in enumerate("ab"):
        with IndexedWriter(tmp_path / name, np.uint16) as writer:
            for size in rng.integers(1, 30, 40):
                writer.add_document(rng.integers(4, 200, size) + number)
        words = ["".join(map(chr, rng.integers(97, 110, size))) for size in rng.integers(1, 90, 40)]
        chats = [{"messages": [{"role": "user", "content": name + w}]} for w in words[::2]]
        chats += [{"prompt": name, "completion": w} for w in words[1::2]]
        lines = [chat | {"text": f"{name}{w}", "other": w[::-1]} for chat, w in zip(chats, words, strict=True)]
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    tokenizer = json.loads(json.loads(REFERENCE.read_text())["tokenizer"])
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(tokenizer))
        (tmp_path / name / "tokenizer_config.json").write_text(
            json.dumps({"eos_token": "<|endoftext|>", "bos_token": "<s>"})
        )
        (tmp_path / name / "chat_template.jinja").write_text(TEMPLATE)
        vocabulary = tokenizer["model"]["vocab"]  # of the second two ids change places
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (tmp_path / "other.jinja").write_text(TEMPLATE.replace("'x'", "'z'"))
    return tmp_path


def config_of(folder: Path, kind: str, cache: str, setting: str = "") -> megajax.Config:
    source = folder / ("a" if kind == "indexed" else "a.jsonl")
    data = {"kind": kind, "train": str(source), "tokenizer": str(folder / "first/tokenizer.json")}
    data |= {"index_cache": str(folder / cache), "end_of_document": None}
    data |= {"order": "megatron", "split": "80,20,0"} if kind == "indexed" else {}
    data |= {"split": "80,20,0"} if kind == "text" else {}
    content = {
        "run": {"steps": 20, "dir": str(folder / "run"), "seed": 5, "eval_interval": 10, "eval_steps": 2},
        "model": {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 512},
        "batch": {"global_size": 4, "sequence_length": 16},
        "data": data,
    }
    if setting:
        section, name = setting.split(".")
        value = CHANGED[kind][setting]
        content[section][name] = value.replace("FOLDER", str(folder)) if isinstance(value, str) else value
    return megajax.Config.model_validate(content)


def samples(config: megajax.Config) -> list[np.ndarray]:
    """All fields of some batches, of evaluation too."""
    splits = ("train", "valid") if config.data.kind != "chat" else ("train",)
    batches = [
        batch
        for split in splits
        for batch in islice(make_loader(config, split=split, rows=np.arange(config.batch.global_size)), 20)
    ]
    return [batch[name] for batch in batches for name in sorted(batch)]


def equal(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return len(one) == len(other) and all(map(np.array_equal, one, other))


@pytest.mark.parametrize("kind", CHANGED)
def test_a_setting_that_changes_what_is_stored_is_in_its_name(folder, kind):
    base = samples(config_of(folder, kind, "shared"))
    differ = set()
    for setting in CHANGED[kind]:
        found = samples(config_of(folder, kind, "shared", setting))
        alone = samples(config_of(folder, kind, f"own-{setting}", setting))
        assert equal(found, alone), setting
        differ |= set() if equal(found, base) else {setting}
    assert {*CHANGED[kind]} - differ <= {"data.drop_last_validation_sample"}, "a second value changes nothing"
    assert equal(samples(config_of(folder, kind, "shared")), base)


def test_every_key_of_the_data_is_in_the_test_above():
    walked = {setting.removeprefix("data.") for settings in CHANGED.values() for setting in settings}
    assert {*DataConfig.model_fields} - {*ELSEWHERE} == {name for name in walked if "." not in name}


def test_all_that_decides_the_work_of_balanced_rows_is_in_the_name(folder, monkeypatch):
    changed = {"layers": ((8, 1),), "causal": False}
    assert changed.keys() == AttentionPairs.__dataclass_fields__.keys()
    for method, counts in (("balanced", (1, 2, 3)), ("first_fit", (1, 1, 1))):
        for number, fields in zip(counts, ({}, *({name: own} for name, own in changed.items())), strict=True):
            packing = RowPacking(method, AttentionPairs(**fields))
            monkeypatch.setattr(RowPacking, "of", lambda config, packing=packing: packing)
            open_chat(config_of(folder, "chat", method), str(folder / "a.jsonl"))
            assert len([*(folder / method).glob("*/key.json")]) == number


def test_every_file_of_a_glob_is_in_the_name_of_what_is_stored(folder):
    def config(cache):
        base = config_of(folder, "chat", cache).model_dump()
        return megajax.Config.model_validate(base | {"data": base["data"] | {"train": str(folder / "?.jsonl")}})

    before = samples(config("shared"))
    for name in "ab":
        path = folder / f"{name}.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
        found = samples(config("shared"))
        assert equal(found, samples(config(f"own-{name}"))) and not equal(found, before), name
        before = found


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_a_token_that_a_file_beside_the_tokenizer_adds_is_in_the_name(folder, kind):
    spec, path = str(folder / "first/tokenizer.json"), folder / "first/tokenizer_config.json"
    encoder, size = TextEncoder(spec, None, None, "text"), load_tokenizer(spec).vocab_size
    before, settings = samples(config_of(folder, kind, "shared")), preprocess_settings([], encoder)
    added = {str(size): {"content": "ab"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"added_tokens_decoder": added}))
    found = samples(config_of(folder, kind, "shared"))
    assert equal(found, samples(config_of(folder, kind, "own"))) and not equal(found, before)
    assert preprocess_settings([], encoder) != settings  # --resume does not go on with other tokens either


def test_a_text_that_changes_in_its_middle_is_read_again(folder):
    path = folder / "long.jsonl"
    lines = [json.dumps({"text": "a" * 1000})] * 2400  # longer than the two ends that are compared by their content
    tokens = []
    for _ in range(2):
        path.write_text("\n".join(lines))
        data = {"kind": "text", "tokenizer": "byte", "train": str(path), "index_cache": str(folder / "shared")}
        config = config_of(folder, "text", "shared").model_dump() | {"data": data}
        tokens.append(open_text(megajax.Config.model_validate(config), str(path)).tokens[:])
        lines[1200] = lines[1200].replace("aa", "ab", 1)
    assert np.count_nonzero(tokens[0] != tokens[1]) == 1


def test_sources_of_other_sizes_have_another_order_however_many_samples_they_have_together(tmp_path):
    """Without weights, in Megatron's order, where each source has one epoch."""

    def order(sizes, cache):
        sources = [range(size) for size in sizes]
        return MegatronBlend(sources, None, sum(sizes), tmp_path / cache)  # pyright: ignore[reportArgumentType]

    for sizes in ((30, 10), (20, 20), (10, 30)):
        found = order(sizes, "shared")
        assert np.bincount(found.datasets).tolist() == [*sizes]
        assert np.array_equal(found.datasets, order(sizes, f"own-{sizes[0]}").datasets)


def test_blends_of_other_weights_or_lengths_have_another_order(tmp_path):
    def order(weights, samples, cache):
        sources = [range(40), range(40)]
        return MegatronBlend(sources, weights, samples, tmp_path / cache)  # pyright: ignore[reportArgumentType]

    for weights, samples in (((0.5, 0.5), 20), ((0.75, 0.25), 20), ((0.25, 0.75), 20), ((0.25, 0.75), 40)):
        found = order(weights, samples, "shared")
        assert np.bincount(found.datasets).tolist() == [round(weight * samples) for weight in weights]
        assert np.array_equal(found.datasets, order(weights, samples, f"own-{weights[0]}-{samples}").datasets)
