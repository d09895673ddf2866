"""Preference pairs (`data.packing: pairs`): rows by hand, neighbours in every order, and the first loss of DPO."""

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import megajax
from megajax import evaluate
from megajax.config.checks import check
from megajax.config.extensions import import_extensions
from megajax.data.loader import open_datasets
from megajax.errors import ConfigError, InputError
from megajax.schema.batch_schedule import Position
from megajax.training.agreement import check_order
from megajax.training.own_evaluation import evaluate_by_objective, sets_of_objective

DPO, MODELS = (str(Path(__file__).parents[2] / f"docs/examples/{name}.py") for name in ("dpo", "reward_model"))
TEMPLATE = "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }};{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}[a]{% endif %}"
MODEL = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "ffn_hidden_size": 24, "vocab_size": 272}
REWARD = {"objective": {"kind": "reward_model"}, "teacher": {}}
TOWER = {"image_token": 5, "num_layers": 1, "hidden_size": 16, "num_heads": 2}
LENGTH = 32


def turns(*contents):
    roles = itertools.cycle(["user", "assistant"])
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


def config_of(folder: Path, lines, data=None, **sections):
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "template.jinja").write_text(TEMPLATE)
    given = {"kind": "chat", "train": str(folder / "pairs.jsonl"), "tokenizer": "byte", "packing": "pairs"}
    given |= {"chat_template": str(folder / "template.jinja"), "index_cache": str(folder / "cache")}
    content = {
        "run": {"steps": 2, "dir": str(folder / "run"), "eval_steps": 0, "extensions": [DPO, MODELS]},
        "model": MODEL | {"block_pattern": ["mlp"]},
        "objective": {"kind": "dpo"},
        "teacher": {"model": MODEL | {"block_pattern": ["mlp"]}},
        "batch": {"global_size": 4, "num_microbatches": 2, "sequence_length": LENGTH},
        "precision": {"compute": "float32"},
        "data": given | (data or {}),
    }
    import_extensions([DPO, MODELS])
    return megajax.Config.model_validate(content | sections)


def rows(samples, indices):
    """(text up to the padding, the part of it that counts) of samples."""
    found = []
    for index in indices:
        stop = len(samples[index]) - samples.padding(index)
        tokens, counted = samples[index][:stop], samples.counted(index)
        assert not counted[stop:].any()
        found.append(
            tuple("".join(chr(t) if t < 256 else "$" for t in ids) for ids in (tokens, tokens[counted[:stop]]))
        )
    return found


@pytest.mark.parametrize(
    ("line", "chosen", "rejected"),
    [
        ({"prompt": "2+2=", "chosen": "4", "rejected": "five"}, ("2+2=4$", "4$"), ("2+2=five$", "five$")),
        ({"chosen": "Q: a A: yes", "rejected": "Q: a A: yet"}, ("Q: a A: yes$", " yes$"), ("Q: a A: yet$", " yet$")),
        # Nothing predicts a first token
        ({"prompt": "", "chosen": "yes", "rejected": "no"}, ("yes$", "es$"), ("no$", "o$")),
        (
            {"prompt": turns("hi"), "chosen": turns("hi", "A")[1:], "rejected": turns("hi", "B")[1:]},
            ("[u]hi;[a]A;", "A;"),
            ("[u]hi;[a]B;", "B;"),
        ),
        (
            {"prompt": turns("hi"), "chosen": turns("hi", "A"), "rejected": turns("hi", "B")},
            ("[u]hi;[a]A;", "A;"),
            ("[u]hi;[a]B;", "B;"),
        ),
        # The earlier answer is the prompt's; a prompt of the other form is not read (UltraFeedback's).
        (
            {"prompt": "x", "chosen": turns("x", "y", "z", "A"), "rejected": turns("x", "y", "z", "B")},
            ("[u]x;[a]y;[u]z;[a]A;", "A;"),
            ("[u]x;[a]y;[u]z;[a]B;", "B;"),
        ),
        # Answers of several turns
        (
            {"chosen": turns("x", "A", "y", "B"), "rejected": turns("x", "C")},
            ("[u]x;[a]A;[u]y;[a]B;", "A;B;"),
            ("[u]x;[a]C;", "C;"),
        ),
        (
            {"prompt": None, "chosen": turns("x", "A"), "rejected": turns("x", "A", "y", "B")},
            ("[u]x;[a]A;", "A;"),
            ("[u]x;[a]A;[u]y;[a]B;", "A;B;"),
        ),
        ({"chosen": turns("x", "A"), "rejected": turns("x", "A")}, ("[u]x;[a]A;", "A;"), ("[u]x;[a]A;", "A;")),
    ],
    ids="text|common text|empty prompt|prompt|prompt again|common messages|turns|one begins the other|equal".split("|"),
)
def test_a_line_is_two_rows_with_the_loss_on_the_answers(tmp_path, line, chosen, rejected):
    assert rows(open_datasets(config_of(tmp_path, [line]))["train"], range(2)) == [chosen, rejected]


def pair(name, chosen=1, rejected=1):
    return {"prompt": name, "chosen": "+" * chosen, "rejected": "-" * rejected}


def test_rows_of_a_pair_are_neighbours_in_every_order(tmp_path):
    lines = [pair(name) for name in "abcdefgh"]
    orders = set()
    for order in ("shuffled", "sequential"):
        samples = open_datasets(config_of(tmp_path, lines, {"order": order}))["train"]
        epochs = [rows(samples, range(16 * k, 16 * k + 16)) for k in range(2)]
        for epoch in epochs:
            names = [text[0] for text, _ in epoch[::2]]
            assert sorted(names) == [*"abcdefgh"]
            assert [text for text, _ in epoch] == [f"{name}{sign}$" for name in names for sign in "+-"]
        orders.add(tuple(text for text, _ in epochs[0]))
        assert (epochs[0] == epochs[1]) == (order == "sequential")
    assert len(orders) == 2
    # A whole evaluation reads each pair of all files once, and rows without a token that counts after them.
    both = {"valid_sets": [{"name": "held_out", "prefix": str(tmp_path / "pairs.jsonl")}]}
    config = config_of(tmp_path, lines[:3], both, run={"steps": 1, "dir": str(tmp_path / "run"), "eval_steps": "all"})
    whole = open_datasets(config)["valid/held_out"]
    assert [text for text, _ in rows(whole, range(6))] == [f"{name}{sign}$" for name in "abc" for sign in "+-"]
    assert not whole.counted(6).any() and not whole.counted(7).any()
    assert len(whole.first(4)) == 4 and whole.first(4).counted(3).any() and not whole.first(4).counted(4).any()


@pytest.mark.parametrize(("too_long", "kept"), [("drop", "ad"), ("truncate", "acd")])
def test_a_pair_is_left_out_as_a_whole(tmp_path, too_long, kept):
    # b's prompt fills a row, so that nothing of its answers counts; c's rejected answer is cut.
    lines = [pair("a"), pair("b" * 40), pair("c", rejected=40), pair("d")]
    samples = open_datasets(config_of(tmp_path, lines, {"too_long": too_long, "order": "sequential"}))["train"]
    found = rows(samples, range(len(samples)))
    assert [text[0] for text, _ in found] == [name for name in kept for _ in range(2)]
    assert all(("+" in text) == (i % 2 == 0) for i, (text, _) in enumerate(found))
    assert (samples.conversations, samples.dropped, samples.cut) == ((8, 4, 0) if too_long == "drop" else (8, 2, 1))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"messages": turns("a", "b")}, ["chosen", "rejected", "its keys: messages"]),
        ({"prompt": "a", "chosen": "b", "rejected": turns("c")}, ["both text or both lists"]),
        ({"prompt": "a", "chosen": "", "rejected": "c"}, ['nothing in "chosen"', "leave the line out"]),
        ({"prompt": turns("a"), "chosen": turns("a"), "rejected": turns("a", "b")}, ['nothing in "chosen"']),
        # Prompts that would be left out: beside answers alone, of another form, or under another key
        ({"prompt": "a", "chosen": turns("a", "b")[1:], "rejected": turns("a", "c")[1:]}, ["same prompt", "list"]),
        ({"prompt": turns("a"), "chosen": "b c", "rejected": "b d"}, ["that are text", "'role': 'user'", "one form"]),
        ({"question": "a", "chosen": "b", "rejected": "c"}, ["same prompt", 'under "prompt", as text']),
        ({"chosen": turns("a", "b", "c", "d"), "rejected": turns("a", "b", "e", "d")}, ["same prompt", "list"]),
        # Both ask once more, or one of them does where the other one answers
        *(
            (
                {
                    name: [*turns("a", "b"), {"role": role if name in asking else "assistant", "content": name}]
                    + turns("x", "d")[1:]
                    for name in ("chosen", "rejected")
                },
                ["same prompt", "list"],
            )
            for role in ("system", "developer", "user")
            for asking in ("chosen rejected", "chosen", "rejected")
        ),
        (
            {"prompt": {"role": "user"}, "chosen": turns("a", "b"), "rejected": turns("a", "c")},
            ["that are lists of messages", "'role': 'user'", "one form"],
        ),
        ({"prompt": turns("a"), "chosen": turns("a"), "rejected": turns("b")}, ["no answer of the assistant"]),
        ({"prompt": turns("a"), "chosen": [{"role": "x"}], "rejected": turns("b")}, ["role 'x'"]),
    ],
)
def test_a_line_that_is_no_pair_is_named(tmp_path, line, words):
    config = config_of(tmp_path, [pair("a"), line, pair("b")])
    with pytest.raises(InputError) as error:
        open_datasets(config)
    for word in ("pairs.jsonl, line 2", *words):
        assert word in str(error.value)


def test_what_does_not_keep_pairs_together_is_refused(tmp_path):
    single = [{"prompt": "a", "completion": "b"}]
    for sections, keys in (
        ({"objective": {"kind": "next_token"}, "teacher": {}}, ["data.packing=pairs", "objective.kind=next_token"]),
        ({"objective": {"kind": "dop"}, "teacher": {}}, ["objective.kind=dop", "not a registered", "run.extensions"]),
        ({"data": {"packing": None}}, ["objective.kind=dpo", "set data.packing=pairs"]),
        ({"data": {"packing": "none"}}, ["objective.kind=dpo", "set data.packing=pairs"]),
        ({"data": {"kind": "text", "chat_template": None}}, ["data.packing=pairs", "data.kind=text"]),
        ({"data": {"stages": [{"from_step": 1, "train": "u"}]}}, ["data.packing=pairs", "remove data.stages"]),
        ({**REWARD, "model": MODEL | {"vision": TOWER}}, ["data.packing=pairs", "remove model.vision"]),
    ):
        own = dict(sections)
        with pytest.raises(ConfigError) as error:
            check(config_of(tmp_path, single, own.pop("data", None), **own))
        assert all(key in str(error.value) for key in keys), error.value
    config = config_of(tmp_path, [pair("a")])
    two = config_of(tmp_path, [pair("a")], {"train": [config.data.train, config.data.train]})
    with pytest.raises(InputError, match="data.train.*2 sources.*data.packing=pairs.*glob"):
        open_datasets(two)
    # A run of other rows, with checkpoint.allow_changes
    with pytest.raises(InputError, match="data.packing=pairs.*step 1 was saved after 3 samples.*checkpoint.init_from"):
        check_order(config, Position(1, 3), None, "step 1")


def means_by_hand(policy, reference, samples):
    """The loss and the METRICS of DPO from its definition, over all pairs of whole rows."""
    indices = range(len(samples))
    tokens, counted = np.stack([samples[i] for i in indices]), np.stack([samples.counted(i) for i in indices])
    of_models = []
    for model in (policy, reference):
        log_p = np.asarray(jax.nn.log_softmax(model(tokens[:, :-1])), np.float64)
        of_models.append(np.where(counted[:, 1:], np.take_along_axis(log_p, tokens[:, 1:, None], -1)[..., 0], 0).sum(1))
    chosen, rejected = 0.1 * (of_models[0] - of_models[1]).reshape(-1, 2).T
    margin = chosen - rejected
    numbers = {"accuracy": margin > 0, "margin": margin, "chosen_reward": chosen, "rejected_reward": rejected}
    return {name: a.mean() for name, a in {"loss": np.log1p(np.exp(-margin)), **numbers}.items()}


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> str:
    """A run whose weights preferences begin with."""
    folder = tmp_path_factory.mktemp("sft")
    run = {"dir": str(folder / "run"), "eval_steps": 0}
    plain = {"objective": {}, "teacher": {}, "run": run}
    synthetic = {"kind": "synthetic", "packing": None}
    trainer = megajax.Trainer(config_of(folder, [], synthetic, **plain), jax.devices()[:1])
    trainer.save()
    trainer.checkpoints.close()
    return str(folder / "run")


@pytest.mark.filterwarnings("ignore:.*let through by checkpoint.allow_changes")
@pytest.mark.parametrize("lora", [None, 2])
def test_dpo_trains_on_pairs_from_log_2_on_and_evaluates_them(tmp_path, capsys, lora, start):
    """With adapters their base is the reference, without a second copy. An allowed change is one in all commands."""
    lines, held = [pair(name, 3, 5) for name in "abcd"], [pair(name, 1 + n, 7 - 2 * n) for n, name in enumerate("eab")]
    (tmp_path / "held.jsonl").write_text("".join(json.dumps(line) + "\n" for line in held))
    reference = {"base": True} if lora else {"model": MODEL | {"block_pattern": ["mlp"]}, "source": start}
    synthetic = {"kind": "synthetic", "packing": None}
    changed = {"model": MODEL | {"block_pattern": ["mlp"], "rope_theta": 5e3}}  # which no layer reads
    checkpoint = {"init_from": start, "allow_changes": ["model.rope_theta"]}
    more = {"teacher": reference, "checkpoint": checkpoint, "lora": {"rank": lora}} | changed
    of_text = {"kind": "text", "packing": None, "text_key": "chosen"}
    with pytest.raises(ConfigError, match="objective.kind=dpo reads the batch field segments.*set data.kind=chat"):
        megajax.Trainer(config_of(tmp_path, lines * 20, of_text, **more), jax.devices()[:1])
    rows = megajax.Trainer(config_of(tmp_path, lines, synthetic, **more), jax.devices()[:1]).next_batch()["segments"]
    np.testing.assert_array_equal(rows, np.broadcast_to([[[0], [1]]] * 2, (2, 2, LENGTH)))  # as for a benchmark
    more |= {"mesh": {"fsdp": 2}, "schedule": {"learning_rate": 0.03, "warmup_steps": 0}}
    more["run"] = {"steps": 3, "dir": str(tmp_path / "run"), "eval_steps": "all", "extensions": [DPO, MODELS]}
    data = {"valid": str(tmp_path / "held.jsonl")}
    config = config_of(tmp_path, lines, data, **more)
    trainer = megajax.Trainer(config, jax.devices()[:2])
    batch = trainer.next_batch()
    np.testing.assert_array_equal(batch["segments"], np.broadcast_to([[[0], [1]]] * 2, (2, 2, LENGTH)))
    metrics = trainer.train_step(batch)
    assert float(metrics["loss"]) == pytest.approx(math.log(2), rel=1e-6)
    assert float(metrics["margin"]) == pytest.approx(0, abs=1e-6)
    assert float(trainer.train_step(trainer.next_batch())["loss"]) < math.log(2)
    assert trainer.run() == 0
    teachers = [name for name in trainer.state.frozen if name.startswith("teacher.")]
    assert bool(teachers) == (not lora)
    # The evaluation of the run, whose last batch has a pair of padding, and the command's on one device
    figures = tmp_path / "figures.json"
    assert evaluate.main([str(tmp_path / "run"), "--output", str(figures)]) == 0
    assert "held.jsonl          3  pairs" in capsys.readouterr().out
    ((name, found),) = json.loads(figures.read_text()).items()
    assert (name, found.pop("samples"), found.pop("scored")) == ("held.jsonl", 3, "pairs")
    models = megajax.load_run(tmp_path / "run"), megajax.load_run(start)
    expected = means_by_hand(*models, trainer.data["valid"])
    assert abs(expected["margin"]) > 1e-3 and found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    logged = {}
    for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines():
        logged |= json.loads(line)
    assert {name: logged[f"eval_{name}"] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_the_objective_of_a_run_evaluates_pairs_and_what_a_model_without_a_head_is_given(tmp_path):
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}\n')
    dpo, reward = config_of(tmp_path, [pair("a")]), config_of(tmp_path, [pair("a")], **REWARD)
    plain = config_of(tmp_path, [pair("a")], {"packing": None}, objective={}, teacher={})
    sets = {name: str(tmp_path / f"{name}.jsonl") for name in ("pairs", "texts", "nowhere")}
    source: Any
    for config, are_own, chosen in (
        (dpo, False, ["pairs"]),
        (dpo, True, [*sets]),
        (reward, False, [*sets]),
        (plain, False, []),
        (plain, True, []),
    ):
        source = SimpleNamespace(config=lambda config=config: config)
        assert [*sets_of_objective(source, sets, are_own)] == chosen
    own = config_of(tmp_path, [pair("a")], {"kind": "synthetic"}, **REWARD)  # batches of a program
    with pytest.raises(InputError, match=r"RUN=run .*synthetic.*TrainProgram\.eval_step"):
        source = SimpleNamespace(config=lambda: own, shown="RUN=run")
        evaluate_by_objective(source, sets)
