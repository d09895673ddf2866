"""Each rule beside a key of the schema: a config that breaks it is refused with both keys, and a way out loads.

`rules.txt` lists the rules by what they say of both keys' values; run this file to rewrite it.
"""

import itertools
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from megajax.config import load_config
from megajax.config.rule_checks import Statement, all_statements
from megajax.errors import ConfigError
from megajax.options.data_kinds import KINDS, DataKind
from megajax.options.optimizers import OPTIMIZERS, OptimizerKind
from megajax.options.registered import OBJECTIVES, OWN_OBJECTIVES
from megajax.options.registry import Registry
from megajax.options.schedules import SCHEDULES, LearningRateSchedule
from megajax.schema.keys import keys
from megajax.schema.rules import AtMost, Below, Divides, Excludes, MultipleOf, Needs, ReadIf
from megajax.schema.tree import as_override

pytestmark = pytest.mark.usefixtures("base_config", "extensions")

BASE = """\
model: {num_layers: 12, hidden_size: 64, num_heads: 8, vocab_size: 1000}
batch: {global_size: 8, sequence_length: 32}
data: {kind: synthetic}
"""
GOLDEN = Path(__file__).with_name("rules.txt")
Settings = dict[str, Any]
FILES = {"data.kind": "indexed", "data.train": "t", "data.tokenizer": "byte"}
EXPERTS = {"model.num_experts": 8}
TOWER = {"image_token": 5, "num_layers": 12, "hidden_size": 64, "num_heads": 4}
# What else a config has that sets a key; "model.router" stands for all keys that begin so.
WITH: dict[str, Settings] = {
    "checkpoint.best_by": {"run.checkpoint_interval": 10, "run.eval_interval": 10},
    "checkpoint.export_hf": {"checkpoint.export_hf.dir": "d", "run.checkpoint_interval": 2},
    "checkpoint.keep_best": {"run.checkpoint_interval": 10, "run.eval_interval": 10},
    "checkpoint.local": {"checkpoint.local_dir": "d", "checkpoint.local_interval": 5},
    "checkpoint.upcycle": {"checkpoint.init_from": "r", **EXPERTS},
    "communication.context": {"mesh.context": 2},
    "data.fim": FILES,
    "data.kind": FILES,
    "data.order": FILES,
    "data.packing": FILES,
    "data.stages": FILES,
    "data.split": {"data.tokenizer": "byte"},
    "lora.rank": {"checkpoint.init_from": "r"},
    "mesh.experts_over": EXPERTS,
    "model.causal": {"objective.kind": "mine"},
    "model.encoder": {"model.encoder.num_layers": 12, "model.encoder.sequence_length": 16},
    "model.expert": EXPERTS,
    "model.first_dense_layers": EXPERTS,
    "model.kv_lora_rank": dict.fromkeys(("model.qk_nope_head_dim", "model.qk_rope_head_dim", "model.v_head_dim"), 8),
    "model.max_positions": {"model.position": "learned"},
    "model.moe_layer_interval": EXPERTS,
    "model.rope_interleaved": {"model.rope_sections": [2, 1, 1]},
    "model.rope_scaling": {"model.rope_scaling.factor": 2},
    "model.rope_scaling.beta": {"model.rope_scaling.kind": "yarn"},
    "model.rope_scaling.long": {"model.rope_scaling.short_factors": [1.0] * 4},
    "model.rope_scaling.short": {"model.rope_scaling.long_factors": [1.0] * 4},
    "model.router": EXPERTS,
    "model.shared_expert": EXPERTS,
    "model.vision.": {"model.vision": TOWER},
    "model.vision.class_token": {"model.vision.grid": 4},
    "objective.kind": {"model.causal": False},
    "optimizer.offload_dir": {"optimizer.offload": 1.0},
    "pipeline": {"batch.num_microbatches": 4},
    "precision.fp8.backend": {"precision.fp8.recipe": "current"},
    "remat.group": {"remat.policy": "full"},
    "run.max_rollbacks": {"run.checkpoint_interval": 10},
    "teacher": {"objective.kind": "reads_teacher"},
    "teacher.base": {"lora.rank": 4, "checkpoint.init_from": "r"},
}
# Values of the keys whose types do not tell them
VALUES: dict[str, list[Any]] = {
    "checkpoint.best_by": ["highest eval_accuracy"],
    "data.denoisers": [[{"weight": 1.0}]],
    "data.split": ["8,1,1"],
    "data.stages": [[{"from_step": 5, "train": "u"}]],
    "data.tokenizer": ["byte", "null:10"],
    "data.train_samples": [8000],
    "model.block_pattern": [["dense"], ["moe"], ["gated_deltanet"]],
    "model.encoder.kind": ["none", "layers", "mine"],
    "model.max_positions": [64, 16],
    "model.relative_max_distance": [64],
    "model.rope_scaling": [{"factor": 2.0}],
    "model.rope_scaling.beta_fast": [16.0, 0.5],
    "model.rope_scaling.high_freq_factor": [8.0, 0.5],
    "model.rope_scaling.long_factors": [[2.0] * 4],
    "model.rope_scaling.short_factors": [[2.0] * 4],
    "model.rope_sections": [[2, 1, 1]],
    "model.vision": [TOWER],
    "objective.kind": [*OWN_OBJECTIVES, "mine", "replaces_head", "reads_teacher"],
    "objective.masking.random": [0.05],
    "optimizer.muon.coefficients": ["polar_express"],
    "pipeline.layout": [[6, 6]],
    "schedule.min_learning_rate": [1e-4, 0.5],
    "teacher.model": [{"num_layers": 1, "hidden_size": 64, "num_heads": 8, "vocab_size": 1000}],
}
OF_TYPES = {"int": [4, 1, 2, 3, 10, 64, 0, 2000], "float": [0.5, 2.0, 1.0], "dict": [{"a": 1}], "str": ["x"]}
FIELDS = dict(keys())


class Mine:
    """An objective, an optimizer or a schedule of an extension."""


@pytest.fixture
def extensions(monkeypatch: pytest.MonkeyPatch):
    register(monkeypatch)


def register(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(KINDS, "mine", DataKind("mine", read=lambda path: ([], [])))
    monkeypatch.setitem(OPTIMIZERS, "mine", OptimizerKind("mine", reads=(), made=Mine))
    monkeypatch.setitem(SCHEDULES, "mine", LearningRateSchedule("mine", reads=(), rate=Mine))
    monkeypatch.setitem(OBJECTIVES, "mine", Mine)
    for name, trait in {"replaces_head": "REPLACES_HEAD", "reads_teacher": "TEACHER"}.items():
        monkeypatch.setitem(OBJECTIVES, name, type(name, (Mine,), {trait: True}))


def values(key: str) -> list[Any]:
    """Values of a key, its default last."""
    field, registry = FIELDS[key], Registry.of(FIELDS[key])
    found = VALUES.get(key) or (named_by(registry) if registry else list(choices(field.annotation)))
    types = re.sub(r"Literal\[.*?\]", "", str(field.annotation))
    if key not in VALUES and registry is None:
        found += next((each for name, each in OF_TYPES.items() if name in types), [])
        found = [[each] for each in found] if "tuple" in types else found
    null = [None] if "None" in types else []
    return [*found, *null, None if field.default_factory or field.is_required() else field.default]


def named_by(registry: Registry) -> list[str]:
    """The choices without those that other tests' extensions have registered."""
    return [each for each in registry.choices if each == "mine" or each not in registry.added]


def choices(annotation: Any) -> Iterator[Any]:
    if annotation is bool:
        yield from (True, False)
    for each in get_args(annotation):
        yield from [each] if isinstance(each, str) else choices(each)


def breaking(statement: Statement) -> Iterator[Settings]:
    """Settings that break a rule."""
    both = statement.key, statement.other
    others = [given for prefix, given in WITH.items() if any(key.startswith(prefix) for key in both)]
    for pair in itertools.product(*map(values, both)):
        if not statement.rule.holds(*pair, *statement.defaults):
            yield {name: own for given in others for name, own in given.items()} | dict(zip(both, pair, strict=True))


def overrides(settings: Settings) -> list[str]:
    return [f"{key}={as_override(settings[key])}" for key in sorted(settings)]  # a section before its keys


def load(overrides: list[str]) -> str:
    """The error, or the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            load_config("x.yaml", overrides)
        except ConfigError as error:
            return f"error: {error}"
    return "\n".join(str(each.message) for each in caught)


def named_ways(statement: Statement, settings: Settings, cure: str) -> Iterator[list[str]]:
    """The overrides after each thing that a cure names: key=value, or a key to remove."""
    yield from ([*overrides(settings), change] for change in re.findall(r"[\w.]+=[\w.]+", cure))
    both = [statement.key, statement.other]
    for removed in both if cure == "remove one of them" else re.findall(r"remove ([\w.]+)", cure):
        yield overrides({name: own for name, own in settings.items() if name != removed})


def other_values(statement: Statement, settings: Settings) -> Iterator[list[str]]:
    """The overrides with another value of one of both keys."""
    for key in (statement.key, statement.other):
        yield from (overrides(settings | {key: own}) for own in reversed(values(key)))


def name_of(statement: Statement) -> str:
    return f"{statement.key}-{type(statement.rule).__name__}-{statement.other}"


REFUSING = all_statements((Needs, Excludes, Divides, MultipleOf, AtMost, Below))


@pytest.mark.parametrize("statement", REFUSING, ids=name_of)
def test_what_breaks_a_rule_is_refused_and_a_way_out_loads(statement: Statement):
    rule, tried = statement.rule, list[str]()
    relation = "needs .*" if isinstance(rule, Needs) else f"{rule.WORDS} {statement.other}=.*"
    relation += re.escape(rule.because)
    sentence = re.compile(rf"error: {statement.key}=.* {relation}.*\): (.*{re.escape(rule.cure)})\.$", re.DOTALL)
    for settings in breaking(statement):
        tried.append(load(overrides(settings)))
        if found := sentence.match(tried[-1]):
            assert statement.other in tried[-1]
            after = [load(way) for way in named_ways(statement, settings, found[1])]
            assert not any(map(sentence.match, after)), (tried[-1], after)
            ways = (load(way) for way in other_values(statement, settings))
            assert any(not text.startswith("error") for text in itertools.chain(after, ways)), tried[-1]
            return
    raise AssertionError(tried)


@pytest.mark.parametrize("statement", all_statements((ReadIf,)), ids=name_of)
def test_what_is_not_read_is_warned_about_and_is_read_with_another_value(statement: Statement):
    start = f"{statement.key}="
    unread = re.compile(rf"{start}.* {ReadIf.WORDS} {statement.other}=.* \(.*\): remove it\.$", re.MULTILINE)
    for settings in breaking(statement):
        if unread.search(load(overrides(settings))):
            break
    else:
        raise AssertionError("no config is warned about")
    fits = [own for own in values(statement.other) if statement.rule.holds(None, own, *statement.defaults)]
    after = [load(overrides(settings | {statement.other: own})) for own in fits]
    assert any(not each.startswith("error") and not unread.search(each) for each in after), after


# What several keys decide together: settings with which keys are not read, the key that the warning names, and they
UNREAD: dict[str, tuple[Settings, str, str]] = {
    "no attention": (
        {"model.block_pattern": ["mamba2"], "data.synthetic_documents": 2},
        "model.block_pattern",
        "model.rope_theta model.rope_scaling model.rope_fraction model.rope_sections model.rope_interleaved"
        " model.qk_norm model.qk_clip model.attention_scale model.attention_bias model.attention_softcap"
        " model.attention_gate model.attention_sinks kernels.attention data.reset_positions",
    ),
    "no rotation": (
        {"model.rope_pattern": ["none"]},
        "model.rope_pattern",
        "model.rope_theta model.rope_scaling model.rope_fraction",
    ),
    "a theta of local layers": (
        {"model.sliding_window": 8, "model.rope_local_theta": 100.0},
        "model.rope_local_theta",
        "model.rope_theta model.rope_scaling",
    ),
    "no MLP": ({"model.block_pattern": ["attention"]}, "model.block_pattern", "model.activation model.mlp_bias"),
    "no state": (
        {},
        "model.block_pattern",
        "kernels.linear_attention model.linear_attention.num_key_heads model.linear_attention.num_value_heads"
        " model.linear_attention.key_head_dim model.linear_attention.value_head_dim"
        " model.linear_attention.conv_kernel model.kda.num_heads model.kda.head_dim model.kda.conv_kernel"
        " model.mamba2.num_heads model.mamba2.num_groups model.mamba2.head_dim model.mamba2.state_dim"
        " model.mamba2.conv_kernel model.mamba2.min_step model.mamba2.output_norm",
    ),
    "even experts": (
        {"model.router.force_balance": True, "model.router.num_groups": 4},
        "model.router.force_balance",
        "model.router.num_groups model.router.groups_per_token model.router.group_score",
    ),
    "no decay": (
        {"optimizer.weight_decay": 0.0},
        "optimizer.weight_decay",
        "optimizer.decay_norms optimizer.decay_biases optimizer.decay_embeddings",
    ),
    "images of one size": ({"model.vision.grid": 4}, "model.vision.grid", "model.vision.rope_theta"),
}


@pytest.mark.parametrize("case", UNREAD)
def test_what_is_not_read_because_of_several_keys_is_warned_about(case: str):
    given, reason, names = UNREAD[case]
    for key in names.split():
        others = [also for prefix, also in WITH.items() if f"{key} ".startswith(prefix)]
        settings = {name: own for also in others for name, own in also.items()} | given
        warned = re.compile(rf"{key}=.* {ReadIf.WORDS} {reason}=.* \(.*\): remove it\.$", re.MULTILINE)
        found = (load(overrides(settings | {key: own})) for own in values(key))
        assert any(warned.search(text) and not text.startswith("error") for text in found), key


ALL = all_statements((Needs, Excludes, Divides, MultipleOf, AtMost, Below, ReadIf))


def in_words(statement: Statement) -> str:
    """A rule with the values that it is about; without any if they are all but null and the default."""
    key, other, rule = statement.key, statement.other, statement.rule
    mine, others = values(key), values(other)
    if isinstance(rule, Needs | Excludes | ReadIf):
        broken = [(a, b) for a in mine for b in others if not rule.holds(a, b, *statement.defaults)]
        refused = [b for b in others if any(b == each for _, each in broken)]
        named = refused if isinstance(rule, Excludes) else [b for b in others if b not in refused]
        other += which(named, other)
        key += "" if isinstance(rule, ReadIf) else which([a for a in mine if any(a == each for each, _ in broken)], key)
    return f"{key} {type(rule).__name__} {other}"


def which(named: list[Any], key: str) -> str:
    """The values among those of a key, as =value|value."""
    *found, default = values(key)
    usual = [each for each in found if each is not None and each != default]
    shown = dict.fromkeys(as_override(each) for each in named)
    return "" if shown == dict.fromkeys(map(as_override, usual)) else "=" + "|".join(shown)


def test_the_rules_are_those_of_the_list():
    """One that is gone, or that is for fewer values, is seen: the tests above walk over those that exist."""
    assert sorted(map(in_words, ALL)) == GOLDEN.read_text().splitlines()


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        register(patch)
        GOLDEN.write_text("".join(f"{line}\n" for line in sorted(map(in_words, ALL))))
