"""Masked language modelling: the tokens that are chosen, and what hides them, in BERT and in ModernBERT."""

import json

import numpy as np
import pytest

import megajax
from megajax.config.checks import check
from megajax.data.loader import make_loader, open_datasets
from megajax.data.masking import Masking, open_masking
from megajax.data.samples import Changes, Samples, make_batch
from megajax.errors import ConfigError, InputError

MASK, SPECIAL, SIZE = 99, (97, 98, 99), 100


@pytest.mark.smoke
def test_the_shares_are_those_of_the_settings():
    """400,000 tokens: each count within five standard deviations of the binomial distribution's mean."""
    tokens = np.random.default_rng(0).integers(0, 97, 400_000).astype(np.int32)
    counted = np.ones(tokens.size, bool)
    hidden, chosen = Masking(0.15, 0.8, 0.1, MASK, SIZE, SPECIAL, 1)(tokens, counted, 0)
    assert hidden.dtype == np.int32 and (hidden == tokens)[~chosen].all()
    masked, same = (hidden == MASK)[chosen].sum(), (hidden == tokens)[chosen].sum()
    number = chosen.sum()
    # A random token is the mask, or the token itself, once in SIZE times.
    wanted = {(number, tokens.size): 0.15, (masked, number): 0.8 + 0.1 / SIZE, (same, number): 0.1 + 0.1 / SIZE}
    for (found, of), share in wanted.items():
        assert abs(found - share * of) < 5 * np.sqrt(of * share * (1 - share))
    others = hidden[chosen & (hidden != MASK) & (hidden != tokens)]
    assert {*others.tolist()} == {*range(SIZE)} - {MASK}, "any token of the vocabulary"

    hidden, chosen = Masking(0.3, 1.0, 0.0, MASK, SIZE, SPECIAL, 1)(tokens, counted, 0)
    assert abs(chosen.mean() - 0.3) < 5 * np.sqrt(0.3 * 0.7 / tokens.size)
    np.testing.assert_array_equal(hidden, np.where(chosen, MASK, tokens))


@pytest.mark.smoke
def test_positions_are_a_function_of_seed_and_index_and_special_tokens_are_kept():
    rng, counted = np.random.default_rng(0), np.arange(1000) < 900
    tokens, others = rng.integers(0, SIZE, (2, 1000)).astype(np.int32)
    masking = Masking(0.5, 0.8, 0.1, MASK, SIZE, SPECIAL, 7)
    (_, chosen), (_, again), (_, other) = (
        masking(tokens, counted, 3),
        masking(others, counted, 3),
        masking(tokens, counted, 4),
    )
    eligible, both = counted & ~np.isin(tokens, SPECIAL), counted & ~np.isin([tokens, others], SPECIAL).any(0)
    assert chosen.any() and not chosen[~eligible].any() and (chosen != other).any()
    np.testing.assert_array_equal(chosen[both], again[both])
    seeds = [Masking(0.5, 0.8, 0.1, MASK, SIZE, SPECIAL, seed)(tokens, counted, 3)[1] for seed in (7, 8)]
    assert (seeds[0] == chosen).all() and (seeds[1] != chosen).any()


class Padded(Samples):
    """Nine tokens, of which the first does not count, nor do the last three, which are padding."""

    def __getitem__(self, index: int) -> np.ndarray:
        return np.arange(10, 19, dtype=np.int32)

    def counted(self, index: int) -> np.ndarray:
        return np.isin(np.arange(9), range(1, 6))

    def padding(self, index: int) -> int:
        return 3


@pytest.mark.smoke
def test_each_token_that_counts_may_be_hidden_and_no_other_one():
    masking = Masking(1.0, 1.0, 0.0, MASK, SIZE, SPECIAL, 1)
    batch = make_batch(Padded(), [0], changes=Changes(masking=masking, pads_samples=True))
    assert batch["tokens"].tolist() == [[10, *[MASK] * 5, 16, 17]]
    assert batch["targets"].tolist() == [[*range(10, 18)]]
    assert batch["loss_mask"].tolist() == [[0, 1, 1, 1, 1, 1, 0, 0]]
    assert batch["is_real"].tolist() == [[True] * 6 + [False] * 2]


MODEL = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 110, "causal": False}


@pytest.fixture
def config_of(tmp_path):
    special = {"[MASK]": 100, "[CLS]": 101, "<|endoftext|>": 102}
    vocabulary = {"?": 0} | {str(i): i for i in range(1, 100)} | special | {"<s>": 103}  # it begins a text
    added = [{"id": i, "content": name, "special": True} for name, i in special.items()]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content = {"version": "1.0", "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "?"}}
    content |= {"pre_tokenizer": {"type": "Whitespace"}, "added_tokens": [token | flags for token in added]}
    (tmp_path / "t.json").write_text(json.dumps(content))
    texts = [" ".join(map(str, range(start, start + 40))) for start in range(1, 60, 7)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def make(objective="masked_tokens", masking=None, model=None, **data) -> megajax.Config:
        files = {"kind": "text", "train": str(tmp_path / "a.jsonl"), "tokenizer": str(tmp_path / "t.json")}
        content = {
            "run": {"steps": 20, "dir": str(tmp_path / "run"), "seed": 5},
            "model": MODEL | (model or {}) | {"causal": objective == "next_token"},
            "objective": {"kind": objective} | ({"masking": masking} if masking else {}),
            "batch": {"global_size": 4, "sequence_length": 64},
            "data": files | data,
        }
        return megajax.Config.model_validate(content)

    return make


def test_batches_hide_tokens_of_the_samples_and_their_targets_are_these(config_of):
    """Documents and positions are those of the samples; any process and any start give the same rows."""
    packed = {"reset_attention": True, "reset_positions": True}
    config, plain = config_of(**packed, masking={"rate": 0.5}), config_of("next_token", **packed)
    open_datasets(config)
    loader, unmasked = (make_loader(each, split="train", rows=np.arange(4)) for each in (config, plain))
    masking = open_masking(config)
    assert masking is not None and (masking.mask_token, masking.vocab_size) == (100, 104)
    assert masking.kept == (100, 101, 102, 103)
    ended = open_masking(config_of(**packed, end_of_document="57"))  # no special token
    assert ended is not None and ended.kept == (57, 100, 101, 102, 103)
    whole = [next(loader) for _ in range(3)]
    for step, (batch, other) in enumerate(zip(whole, unmasked, strict=False)):
        assert {name: a.dtype for name, a in batch.items()} == {name: a.dtype for name, a in other.items()}
        for name in ("segment_ids", "positions"):
            np.testing.assert_array_equal(batch[name], other[name])
        np.testing.assert_array_equal(batch["targets"], other["tokens"])
        for row, tokens in enumerate(other["tokens"]):
            hidden, chosen = masking(tokens, np.ones(64, bool), 4 * step + row)
            np.testing.assert_array_equal(batch["tokens"][row], hidden)
            np.testing.assert_array_equal(batch["loss_mask"][row], chosen)
    resumed = make_loader(config, split="train", rows=np.array([2]), start_step=2)  # another process
    np.testing.assert_array_equal(next(resumed)["tokens"], whole[2]["tokens"][2:3])


@pytest.mark.smoke
def test_settings_that_do_not_fit_are_sentences(config_of):
    token = "objective.masking.mask_token"
    for masking, data, problem in (
        ({"mask_token": "<M>"}, {}, f"has no token <M>: set {token}"),
        ({"mask_token": 110}, {}, f"{token}=110 .*is not below model.vocab_size=110"),
        ({}, {"tokenizer": "byte"}, rf"data.tokenizer=byte has no token \[MASK\] or <mask>: set {token}"),
        ({}, {"kind": "indexed", "tokenizer": None}, f"without data.tokenizer: set {token}"),
    ):
        with pytest.raises(InputError, match=problem):
            open_masking(config_of(masking=masking, **data))
    for arguments, problem in (
        ({"masking": {"masked": 0.9, "random": 0.2}}, "masking.masked=0.9 .*masking.random=0.2 .*together more than 1"),
        ({"fim_rate": 0.5}, "objective.kind=masked_tokens .*cannot be combined with data.fim_rate=0.5"),
        ({"mask_end_of_document_loss": True}, "objective.kind=masked_tokens .*data.mask_end_of_document_loss=true"),
    ):
        with pytest.raises(ConfigError, match=problem):
            check(config_of(**arguments))
    causal = config_of().model_copy(update={"model": config_of("next_token").model})
    with pytest.raises(ConfigError, match="masked_tokens .*needs attention to both sides .*set model.causal=false"):
        check(causal)
