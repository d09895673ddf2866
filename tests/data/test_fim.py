"""Fill-in-the-middle: hand-worked rearrangements, every token once, the same samples in any process."""

import json
from pathlib import Path

import numpy as np
import pytest

import megajax
from megajax.config.checks import check
from megajax.data.fim import Infilling, open_infilling, rearranged
from megajax.data.loader import make_loader, open_datasets
from megajax.errors import ConfigError, InputError

PRE, MID, SUF, END = 900, 901, 902, 903


@pytest.mark.smoke
def test_a_hand_worked_document():
    document = np.array([10, 11, 12, 13, 14, 15, 16, 17, 18])  # its last three tokens make room
    expected = [PRE, 10, 11, SUF, 15, MID, 12, 13, 14]
    assert rearranged(document, [2, 5], False, (PRE, MID, SUF)).tolist() == expected
    expected = [PRE, SUF, 15, MID, 10, 11, 12, 13, 14]
    assert rearranged(document, [2, 5], True, (PRE, MID, SUF)).tolist() == expected
    assert rearranged(document, [6, 6], False, (PRE, MID, SUF)).tolist() == [PRE, *range(10, 16), SUF, MID]


def test_documents_keep_their_place_and_their_tokens():
    lengths = [1, 4, 30, 4, 61]
    sample = np.arange(100, dtype=np.int32)
    sample[[4, 99]] = END
    borders = np.cumsum(lengths)
    chosen = suffix_first = 0
    for index in range(400):
        out = Infilling(0.5, 0.25, (PRE, MID, SUF), END, 7)(sample, lengths, index)
        for length, stop in zip(lengths, borders, strict=True):
            before, after = sample[stop - length : stop].tolist(), out[stop - length : stop].tolist()
            ended = before[-1] == END
            assert (after[-1] == END) == ended
            if PRE not in after:
                assert after == before
                continue
            assert length > 4 or not ended and length == 4
            before, after = (tokens[:-1] if ended else tokens for tokens in (before, after))
            first, last = after.index(SUF), after.index(MID)
            assert after[0] == PRE and first < last
            prefix, suffix, rest = after[1:first], after[first + 1 : last], after[last + 1 :]
            # The rest is the middle, after the prefix if the suffix came first.
            assert prefix + rest + suffix == before[: len(before) - 3]
            chosen, suffix_first = chosen + (length > 20), suffix_first + (length > 20 and first == 1)
    assert 340 < chosen < 460 and 0.15 < suffix_first / chosen < 0.45  # empty prefixes are among them


def test_both_cuts_fall_on_every_border_with_the_same_probability():
    """Five tokens have six borders, both ends among them; two of 3,000 documents a border: 1,000, by three sigma."""
    counts = np.zeros(6, int)
    for index in range(3000):
        out = Infilling(1.0, 0.0, (PRE, MID, SUF), END, 7)(np.arange(8, dtype=np.int32), [8], index).tolist()
        first, last = out.index(SUF), out.index(MID)
        counts[[first - 1]] += 1
        counts[5 - (last - first - 1)] += 1  # what is left of the suffix
    assert counts.sum() == 6000 and np.abs(counts - 1000).max() < 3.5 * np.sqrt(6000 * 5 / 36)


def test_the_token_that_begins_a_document_stays_first():
    document = np.array([7, *range(10, 20), END], np.int32)
    out = Infilling(1.0, 0.0, (PRE, MID, SUF), END, 7, begin=7)(document, [12], 0)
    assert out[:2].tolist() == [7, PRE] and out[-1] == END and {SUF, MID} < set(out[2:-1].tolist())


@pytest.fixture
def config_of(tmp_path):
    names = ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|endoftext|>"]
    vocabulary = {"?": 0} | {str(i): i for i in range(1, 100)} | {name: 100 + i for i, name in enumerate(names)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "?"}
    content = {"version": "1.0", "model": model, "pre_tokenizer": {"type": "Whitespace"}}
    (tmp_path / "t.json").write_text(json.dumps(content))
    texts = [" ".join(map(str, range(start, start + 40))) for start in range(1, 60, 7)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def make(**data) -> megajax.Config:
        files = {"kind": "text", "train": str(tmp_path / "a.jsonl"), "tokenizer": str(tmp_path / "t.json")}
        content = {
            "run": {"steps": 20, "dir": str(tmp_path / "run"), "seed": 5, "eval_steps": 1},
            "model": {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 110},
            "batch": {"global_size": 4, "sequence_length": 64},
            "data": files | data,
        }
        return megajax.Config.model_validate(content)

    return make


def test_batches_are_a_function_of_seed_and_index(config_of):
    plain, filled = config_of(reset_attention=True), config_of(reset_attention=True, fim_rate=1.0, fim_spm_rate=0.0)
    opened = open_datasets(filled)["train"]
    loader, unfilled = (make_loader(config, split="train", rows=np.arange(4)) for config in (filled, plain))
    whole = [next(loader) for _ in range(6)]
    for step, (batch, other) in enumerate(zip(whole, unfilled, strict=False)):
        np.testing.assert_array_equal(batch["segment_ids"], other["segment_ids"])
        for row in range(4):
            lengths = opened.document_lengths(4 * step + row)
            sample = Infilling(1.0, 0.0, (100, 101, 102), 103, 5)(opened[4 * step + row], lengths, 4 * step + row)
            np.testing.assert_array_equal(batch["tokens"][row], sample[:-1])
            np.testing.assert_array_equal(batch["targets"][row], sample[1:])
            assert (sample == 100).sum() == (sample == 101).sum() == sum(lengths > 4)
    resumed = make_loader(filled, split="train", rows=np.array([2]), start_step=4)  # another process
    np.testing.assert_array_equal(next(resumed)["tokens"], whole[4]["tokens"][2:3])


def test_a_tokenizer_that_changed_under_its_path_is_read_again(config_of):
    config = config_of(fim_rate=0.5)
    before, path = open_infilling(config), Path(config.data.tokenizer)
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    names = [*config.data.fim_tokens.model_dump().values()]
    vocabulary[names[0]], vocabulary[names[1]] = (vocabulary[name] for name in reversed(names[:2]))
    path.write_text(json.dumps(content))
    assert open_infilling(config).tokens == (*reversed(before.tokens[:2]), before.tokens[2])
    path = path.with_name("vocab.json")  # GPT-2's, without merges.txt
    path.write_text(json.dumps(vocabulary))
    data = config.data.model_copy(update={"tokenizer": str(path)})
    with pytest.raises(InputError, match="merges.txt cannot be read"):
        open_infilling(config.model_copy(update={"data": data}))


@pytest.mark.smoke
def test_settings_that_do_not_fit_are_sentences(config_of):
    with pytest.raises(InputError, match=r"data.fim_tokens.suffix=<SUF> \(default\) is no token of data.tokenizer="):
        open_datasets(config_of(fim_rate=0.5, fim_tokens={"suffix": "<SUF>"}))
    with pytest.raises(InputError, match=r"data.end_of_document: .* has no token <eod>: name one"):
        open_infilling(config_of(fim_rate=0.5, end_of_document="<eod>"))
    with pytest.raises(ConfigError, match=r"data.fim_rate=0.5 .*needs data.tokenizer"):
        check(config_of(fim_rate=0.5, kind="indexed", tokenizer=None))
    with pytest.raises(ConfigError, match=r"data.fim_rate=0.5 .*cannot be combined with data.kind=chat"):
        check(config_of(fim_rate=0.5, kind="chat"))
    for data in ({"fim_spm_rate": 0.1}, {"fim_tokens": {"middle": "<M>"}}):
        config = config_of(**data)
        (key,) = data
        config._locations[f"data.{key}" if key != "fim_tokens" else "data.fim_tokens.middle"] = "run.yaml, line 1"
        with pytest.warns(UserWarning, match="has no effect with data.fim_rate=0"):
            check(config)
