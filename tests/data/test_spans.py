"""Span corruption: T5's lengths, its format restated in loops, the same samples in any process."""

import json

import numpy as np
import pytest

import megajax
from megajax.data.loader import make_loader, open_datasets
from megajax.data.spans import open_spans
from megajax.errors import ConfigError, InputError
from megajax.schema.spans import span_lengths

SENTINELS, END = range(119, 109, -1), 1


@pytest.mark.smoke
def test_the_lengths_are_those_of_t5():
    """512 inputs: 568 tokens and 114 targets in T5's code; others by its formulas.

    Before each span there is a token: 37 tokens, 28 of them replaced, have 9 spans at most.
    """
    assert span_lengths(512, 0.15, 3.0) == (568, 85, 28, 512, 114)
    assert span_lengths(20, 0.75, 1.0) == (37, 28, 9, 9 + 9 + 1, 28 + 9 + 1)
    for inputs in (20, 128, 1024):
        found = span_lengths(inputs, 0.15, 3.0)
        noise = round(found.tokens * 0.15)
        assert found[1:] == (noise, round(noise / 3), inputs, noise + round(noise / 3) + 1)


def segments(generator, items, count):
    """`count` parts of `items`: a part begins at each item that the shuffle marks, and at the first."""
    marks = [True] * (count - 1) + [False] * (items - count)
    lengths = [1]
    for begins in generator.permutation(marks):
        lengths = [*lengths, 1] if begins else [*lengths[:-1], lengths[-1] + 1]
    return lengths


def corrupted(tokens, generator, noise, spans):
    """T5's format, token by token."""
    replaced, kept = segments(generator, noise, spans), segments(generator, len(tokens) - noise, spans)
    inputs, targets, position = [], [], 0
    for span in range(spans):
        for _ in range(kept[span]):
            inputs.append(int(tokens[position]))
            position += 1
        inputs.append(SENTINELS[span])
        targets.append(SENTINELS[span])
        for _ in range(replaced[span]):
            targets.append(int(tokens[position]))
            position += 1
    return [*inputs, END], [*targets, END]


def numbers_of(index):
    return np.random.Generator(np.random.PCG64((5, 3, index)))


@pytest.fixture
def config_of(tmp_path):
    vocabulary = {"?": 0, "</s>": END} | {str(i): i for i in range(2, 110)}
    vocabulary |= {f"<extra_id_{i}>": token for i, token in enumerate(SENTINELS)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "?"}
    content = {"version": "1.0", "model": model, "pre_tokenizer": {"type": "WhitespaceSplit"}}
    (tmp_path / "t.json").write_text(json.dumps(content))
    texts = [" ".join(map(str, range(start, start + 40))) for start in range(2, 65, 7)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def make(model=(), batch=(), **data) -> megajax.Config:
        files = {"kind": "text", "train": str(tmp_path / "a.jsonl"), "tokenizer": str(tmp_path / "t.json")}
        encoder = {"kind": "layers", "num_layers": 1, "sequence_length": 32}
        content = {
            "run": {"steps": 20, "dir": str(tmp_path / "run"), "seed": 5},
            "model": {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 120, "encoder": encoder},
            "batch": {"global_size": 4, "sequence_length": 12, **dict(batch)},
            "data": files | {"end_of_document": "</s>"} | data,
        }
        content["model"] |= dict(model)
        return megajax.Config.model_validate(content)

    return make


def test_batches_are_corrupted_text_as_a_function_of_seed_and_index(config_of):
    config = config_of()
    samples, loader = open_datasets(config)["train"], make_loader(config, split="train", rows=np.arange(4))
    tokens, noise, spans, _, _ = span_lengths(32, 0.15, 3.0)
    whole = [next(loader) for _ in range(5)]
    for step, batch in enumerate(whole):
        assert batch.keys() == {"encoder_tokens", "tokens", "targets", "loss_mask", "positions"}
        for row in range(4):
            index = 4 * step + row
            inputs, targets = corrupted(samples[index][:tokens], numbers_of(index), noise, spans)
            padding = [0] * (12 - len(targets))
            assert batch["encoder_tokens"][row].tolist() == inputs and len(inputs) == 32
            assert batch["targets"][row].tolist() == [*targets, *padding]
            assert batch["tokens"][row].tolist() == [0, *targets, *padding][:12]
            assert batch["loss_mask"][row].tolist() == [1] * len(targets) + padding
    resumed = make_loader(config, split="train", rows=np.array([2]), start_step=4)  # another process
    np.testing.assert_array_equal(next(resumed)["targets"], whole[4]["targets"][2:3])
    ends = [samples[i][0] for i in range(3)] + [samples[i][tokens - 1] for i in range(3)]
    assert len(ends) == 6  # samples have no token in common: each has the length of the step to the next
    sequential = open_datasets(config_of(order="sequential"))["train"]
    assert sequential[1][0] == sequential[0][tokens]


# UL2's: regular spans, extreme ones (long, or half of the tokens), and the end of the text after its beginning
UL2 = [
    {"mean_span_length": 3.0, "token": "100"},
    {"mean_span_length": 3.0, "noise_density": 0.5, "token": "101", "weight": 2.0},
    {"mean_span_length": 9.0, "token": "101"},
    {"mean_span_length": None, "noise_density": 0.25, "token": "102"},
]


def test_a_mixture_gives_each_sample_one_denoiser_as_a_function_of_seed_and_index(config_of):
    config = config_of(batch={"sequence_length": 40}, denoisers=UL2)
    samples, loader = open_datasets(config)["train"], make_loader(config, split="train", rows=np.arange(4))
    assert config.sample_length == 45  # that of half of the tokens in spans of three: 45 - 22 + 7 + 1 = 31
    seen = [0] * 4
    for step in range(40):
        batch = next(loader)
        for row in range(4):
            index = 4 * step + row
            generator, total, which = numbers_of(index), 0.0, 0
            draw = generator.random()
            while total + UL2[which].get("weight", 1.0) / 5 <= draw:
                total += UL2[which].get("weight", 1.0) / 5
                which += 1
            density, mean = UL2[which].get("noise_density", 0.15), UL2[which]["mean_span_length"]
            tokens, noise, spans, length, _ = span_lengths(31, density, mean)
            assert length == 31 and (spans == 1 or mean is not None)
            inputs, targets = corrupted(samples[index][:tokens], generator, noise, spans)
            assert batch["encoder_tokens"][row].tolist() == [int(UL2[which]["token"]), *inputs]
            assert batch["targets"][row].tolist() == [*targets, *[0] * (40 - len(targets))]
            assert batch["loss_mask"][row].tolist() == [1] * len(targets) + [0] * (40 - len(targets))
            seen[which] += 1
    assert sum(seen) == 160 and min(seen) > 20 and seen[1] == max(seen)


def test_synthetic_samples_have_other_tokens_for_each_denoiser_than_for_the_spans(config_of):
    denoisers = [{"token": "a"}, {"token": "b", "mean_span_length": 6.0}, {}, {"token": "a", "noise_density": 0.3}]
    found = open_spans(config_of(kind="synthetic", batch={"sequence_length": 40}, denoisers=denoisers))
    assert found is not None
    a, b, none, again = (noise.token for noise in found.mixture)
    assert none is None and a == again and len({a, b, *found.sentinels}) == 2 + len(found.sentinels)
    assert found.sentinels == tuple(range(119, 119 - max(noise.lengths.spans for noise in found.mixture), -1))
    assert {a, b} < set(range(2, 120))


@pytest.mark.smoke
def test_settings_that_do_not_fit_are_sentences(config_of, tmp_path):
    for data, sentence in (
        ({"reset_attention": True}, "trains on corrupted spans, which data.reset_attention=true does not have"),
        ({"fim_rate": 0.5}, "data.fim_rate=0.5 does not have"),
        ({"order": "megatron"}, "data.order=megatron does not have"),
        ({"packing": "none"}, "data.packing=none does not have"),
        ({"mean_span_length": 1.0, "noise_density": 0.5}, "batch.sequence_length=12 is too short"),
        ({"denoisers": [{"token": "[NLU]"}]}, r"has no token \[NLU\], which data.denoisers names"),
        ({"denoisers": [{}, {"noise_density": 0.5}]}, "batch.sequence_length=12 is too short"),
        ({"tokenizer": None, "kind": "indexed"}, "data.tokenizer, which is not set"),
        ({"batch": {"sequence_length": 200}, "mean_span_length": 1.0, "noise_density": 0.4}, "has no <extra_id_10>"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            open_datasets(config_of(**data))
    long = {"kind": "layers", "num_layers": 1, "sequence_length": 1000}
    with pytest.raises((ConfigError, InputError), match="takes 1110|has no <extra_id_10>"):
        open_datasets(config_of({"encoder": long}, {"sequence_length": 400}))
    least = {"train": str(tmp_path / "few.jsonl"), "noise_density": 0.15, "mean_span_length": 3.0}
    for numbers, is_enough in ((33, True), (32, False)):  # and the end of the document: 34 tokens become 32 inputs
        (tmp_path / "few.jsonl").write_text(json.dumps({"text": " ".join(map(str, range(2, 2 + numbers)))}))
        if is_enough:
            assert open_datasets(config_of(**least))["train"].num_tokens == 34
        else:
            sentence = "has 33 tokens for train, but .* spans takes 34: shorten model.encoder.sequence_length, or give"
            with pytest.raises(InputError, match=sentence):
                open_datasets(config_of(**least))
