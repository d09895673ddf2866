"""`run.eval_steps: all`: the loss is that of each sample of the data once, on any mesh."""

import json

import jax
import numpy as np
import pytest

from megajax.data.indexed import IndexedWriter
from megajax.data.loader import open_split
from megajax.data.samples import Changes, Packing, make_batch
from megajax.errors import UserError
from megajax.training.batches import to_global
from megajax.training.loop import Trainer

RNG = np.random.default_rng(4)
LENGTHS = [*RNG.integers(1, 40, 20)]
MESHES = {"one device": {}, "mesh": {"data": 2, "tensor": 2}}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Two prefixes of documents; of the first the tokens are no multiple of a sequence."""
    folder = tmp_path_factory.mktemp("valid")
    for name, lengths in (("a", LENGTHS), ("b", LENGTHS[:5])):
        with IndexedWriter(folder / name, np.uint16) as writer:
            for length in lengths:
                writer.add_document(RNG.integers(0, 125, length))
    return folder


def test_every_token_but_the_first_of_a_source_is_predicted_once(make_config, texts):
    """Of two sources, with documents apart; in NumPy, from the files' tokens."""
    blend = f"data.valid=[{{prefix: {texts}/a, weight: null}}, {{prefix: {texts}/b, weight: null}}]"
    config = make_config(blend, "run.eval_steps=all", "data.reset_attention=true", "model.block_pattern=null")
    whole = open_split(config, "valid")
    rows = make_batch(whole, range(len(whole) + 3), Packing.of(config), Changes(pads_samples=True))
    counted = rows["loss_mask"] > 0
    assert not rows["is_real"][len(whole) :].any() and not (counted & ~rows["is_real"]).any()
    expected = []
    for name in "ab":
        tokens = np.fromfile(texts / f"{name}.bin", np.uint16)
        expected += [*zip(tokens[:-1], tokens[1:], strict=True)]
    found = [*zip(rows["tokens"][counted], rows["targets"][counted], strict=True)]
    assert found == expected
    sets = make_config(f"data={{valid_sets: [{{name: a, prefix: {texts}/a}}], test: {texts}/a}}", "run.eval_steps=all")
    rows = -(-(sum(LENGTHS) - 1) // sets.batch.sequence_length)
    assert [len(open_split(sets, split)) for split in ("valid/a", "test")] == [rows] * 2
    assert [sets.pads_samples(split) for split in ("valid", "valid/a", "test", "train")] == [True] * 3 + [False]
    # Megatron's last sample of a validation set may be short
    last = make_config(blend, "data.order=megatron", "data.drop_last_validation_sample=false")
    assert [last.pads_samples(split) for split in ("valid", "valid/a", "test", "train")] == [True] * 2 + [False] * 2


CHATS = [
    {"messages": [{"role": "user", "content": "a" * 3}, {"role": "assistant", "content": "b" * length}]}
    for length in (1, 30, 2, 25, 3, 4, 20)
]
KINDS = {
    "text": ("data.valid={folder}/a",),
    "Megatron's order": ("data.valid={folder}/a", "data.order=megatron", "data.drop_last_validation_sample=false"),
    "chats": (
        "data={{kind: chat, train: {folder}/chats.jsonl, valid: {folder}/chats.jsonl, tokenizer: byte}}",
        "data.chat_template={folder}/template.jinja",
        "model.vocab_size=300",
    ),
}
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh", MESHES)
def test_the_loss_is_the_mean_over_all_counted_tokens(make_config, texts, tmp_path, kind, mesh):
    """Against the sum over single samples, of batches of one: their numbers of counted tokens differ by far."""
    (texts / "template.jinja").write_text(TEMPLATE)
    (texts / "chats.jsonl").write_text("".join(f"{json.dumps(chat)}\n" for chat in CHATS))
    given = [each.format(folder=texts) for each in KINDS[kind]]
    axes = [f"mesh.{axis}={size}" for axis, size in MESHES[mesh].items()]
    run = (f"run.dir={tmp_path}", "run.steps=1", "run.eval_steps=all")
    trainer = Trainer(make_config(*given, *run, *axes), jax.devices()[: 4 if axes else 1])
    found, program, samples = trainer.evaluate()["loss"], trainer.program, trainer.data["valid"]
    size = program.config.batch.global_size
    assert len(samples) % size and len(samples) > (1 if kind == "chats" else size)

    losses, counts = [], []
    for index in range(len(samples)):
        one = make_batch(samples, [index] * size, Packing.of(program.config), Changes(pads_samples=True))
        one["loss_mask"][1:] = 0
        sums, tokens = program.eval_step(trainer.state.weights, trainer.state.layer_state, to_global(program, one))
        losses.append(float(sums["loss"]))
        counts.append(int(tokens))
    trainer.close()
    assert len(set(counts)) > 1
    np.testing.assert_allclose(found, np.sum(losses) / np.sum(counts), rtol=1e-6)


def test_weights_and_endless_data_are_refused_in_a_sentence(make_config, texts):
    weighted = f"data.valid=[{{prefix: {texts}/a, weight: 1}}, {{prefix: {texts}/b, weight: 2}}]"
    with pytest.raises(UserError, match="data.valid .*weights, but run.eval_steps=all .*remove the weights"):
        open_split(make_config(weighted, "run.eval_steps=all"), "valid")
    with pytest.raises(UserError, match="run.eval_steps=all .*data.kind=synthetic.* number"):
        make_config("data.kind=synthetic", "run.eval_steps=all")
