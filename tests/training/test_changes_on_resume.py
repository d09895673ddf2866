"""Every config key is compared when a run resumes, or stands here with the reason why it may change."""

import contextlib
import functools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
import pytest
from pydantic import BaseModel

from megajax.checkpoint.description import (
    SettingDifference,
    compare_models,
    config_allows,
    differences,
    refuse_changes,
)
from megajax.config import Config, LoraConfig
from megajax.config.checks import check_mesh
from megajax.config.effects import COMPARED_ON_RESUME
from megajax.config.extensions import import_extensions
from megajax.config.load import load_config
from megajax.config.rule_checks import unread
from megajax.config.sentences import value
from megajax.data.contents import data_contents
from megajax.errors import InputError
from megajax.mesh import build_mesh
from megajax.model import parameters
from megajax.model.trained import frozen_parts, part_of
from megajax.model.transformer import declared_model
from megajax.options.registry import Registry
from megajax.schema.data import Denoiser
from megajax.schema.fields import Section
from megajax.schema.optimizer import OPTIMIZERS, OptimizerGroup
from megajax.training.agreement import MUST_AGREE, compared_settings, warn_of_another_rate
from megajax.training.step import TrainProgram

# Keys, or sections, that a resumed run may change.
MAY_CHANGE = {
    "settings of the training, as for a new phase of it": """
        schedule batch.global_size batch.num_microbatches batch.schedule precision lora.dropout run.steps run.epochs
        objective teacher model.dropout model.z_loss model.mtp_loss_weight model.qk_clip
        model.router.jitter model.router.sequence_loss model.router.global_loss model.router.loss_counts
        model.router.z_loss
        model.router.bias_update_rate model.router.sinkhorn model.router.capacity_factor model.router.drop_policy
        optimizer.weight_decay optimizer.beta2 optimizer.epsilon optimizer.clip_norm
        optimizer.decay_norms optimizer.decay_biases optimizer.decay_embeddings optimizer.groups optimizer.layer_decay
        optimizer.muon optimizer.ademamix optimizer.soap.precondition_frequency
        data.reset_attention data.reset_positions data.mask_end_of_document_loss""",
    "the learning rate is scaled by it, but a new run's first weights alone are": "model.mup_base_width",
    "read for the first weights only": "model.init_std model.depth_scaled_init",
    "converted when it is read": "optimizer.master optimizer.ema_decay",
    "for benchmarks": "model.router.force_balance",
    "no number depends on it": """
        mesh pipeline communication remat kernels logging checkpoint
        optimizer.offload optimizer.offload_dir optimizer.offload_buffers
        run.name run.dir run.log_interval run.eval_interval run.checkpoint_interval run.deterministic
        run.compilation_cache run.max_minutes run.peer_timeout_seconds run.hang_factor run.hang_min_seconds
        run.max_nonfinite_steps run.spike_factor run.spike_window run.max_rollbacks run.replica_check_interval run.hooks
        run.hook_settings
        data.index_cache data.workers data.prefetch""",
    "evaluation": "run.eval_steps data.valid data.valid_sets data.test data.drop_last_validation_sample",
    "the sources' code is compared when processes join": "run.extensions",
    "synthetic data are for tests of speed": "data.synthetic_documents",
}


def leaves(section: BaseModel, at: str = "") -> Iterator[tuple[str, Any]]:
    """Each key with its value."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        yield from leaves(value, f"{at}{name}.") if isinstance(value, Section) else [(f"{at}{name}", value)]


def another(value: Any, choices: tuple[Any, ...]) -> Any:
    """A value of the same kind that is not equal, one of the `choices` if there are any."""
    if isinstance(value, str):
        return next((each for each in choices if isinstance(each, str) and each != value), f"{value}x")
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value / 2 if 0 < value < 1 else value + 1
    if choices[:1] == (OptimizerGroup,):
        return (OptimizerGroup(parameters=("*",), learning_rate=2.0),)
    if choices[:1] == (Denoiser,):
        return (Denoiser(noise_density=0.4),)
    if "tuple" in str(choices):
        return value[1:] if value else (2.0,)
    return value[1:] if value else 7


def changed(section: Any, key: str) -> Any:
    name, _, rest = key.partition(".")
    value = getattr(section, name)
    field = type(section).model_fields[name]
    registry = Registry.of(field)
    choices = get_args(field.annotation) if registry is None else (*registry,)
    return section.model_copy(update={name: changed(value, rest) if rest else another(value, choices)})


# Compared by the stages that began, where SGD has no momentum (both in test_saving.py), by the keys within it, and
# through the number of samples. Settings of an extension's optimizer: test_registered_optimizers.py.
ELSEWHERE = ("data.stages", "model.vision", "optimizer.beta1", "optimizer.settings", "model.rope_scaling")
ELSEWHERE += ("data.train_samples",)
# Not read in the first base, which has no such layers, and whose tokens are in files.
NOT_IN_FIRST = ("model.linear_attention", "model.kda", "model.mamba2", "model.ffn_hidden_size")
NOT_IN_FIRST += ("data.end_of_document", "data.begin_of_document")
LATENT = (
    "model.num_experts=4",
    "model.kv_lora_rank=8",
    "model.qk_nope_head_dim=8",
    "model.qk_rope_head_dim=8",
    "model.num_kv_heads=4",
)
LORA = ("lora.rank=2", "lora.targets=[query]", "checkpoint.init_from=elsewhere")
TEXT = ("data.tokenizer=byte", "model.vocab_size=300")
VISION = ("model.vision={image_token: 9, num_layers: 1, hidden_size: 16, num_heads: 2, patches_per_row: 16}",)
ENCODER = ("model.encoder={kind: layers, num_layers: 1, sequence_length: 16}",)
# Settings with which keys are read, and the section that is walked with them: "" all.
BASES = (
    ("", (*LATENT, "model.router.num_groups=2", "model.v_head_dim=8", "model.rope_scaling={kind: yarn, factor: 2}")),
    ("lora", LORA),
    ("data", ("data.kind=text", *TEXT, "data.fim_rate=0.5")),
    ("data", ("data.kind=chat", *TEXT)),
    ("data", ("data.kind=text", *TEXT, *ENCODER)),
    ("optimizer", ("optimizer.kind=soap",)),
    ("model.ffn_hidden_size", ()),
    ("model.linear_attention", ("model.block_pattern=[gated_deltanet]",)),
    ("model.kda", ("model.block_pattern=[kda]",)),
    ("model.mamba2", ("model.block_pattern=[mamba2]",)),
    ("model.encoder", ("data.kind=synthetic", *ENCODER)),
    ("model.vision", ("data.kind=chat", *TEXT, *VISION)),
)


@pytest.fixture(scope="session")
def tiny(tiny_with_attention):
    return tiny_with_attention


@pytest.fixture(scope="module")
def bases(tiny, text):
    """BASES with resolved configs."""
    return [(section, load_config(tiny, [f"data.train={text}", *overrides])) for section, overrides in BASES]


def settings(config):
    """What a checkpoint's description would have, with paths in place of hashes of their content."""
    data = config.data
    contents = {"tokenizer_content": data.tokenizer, "chat_template_content": data.chat_template}
    return compared_settings(config, 1, contents)


def is_named(key: str, names) -> bool:
    return any(f"{key}.".startswith(f"{name}.") for name in names)


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of values that a key cannot have
def test_every_key_is_compared_or_may_change_for_a_reason(bases):
    """In each base in which it is read."""
    free = {name for names in MAY_CHANGE.values() for name in names.split()}
    refused, keys, forgotten, read = set(), set(), [], set()
    for section, base in bases:
        saved, ignored = settings(base), {key for key, _ in unread(base)} | {*(() if section else NOT_IN_FIRST)}
        for key, _ in leaves(base):
            keys.add(key)
            if key in ELSEWHERE or not key.startswith(section):
                continue
            if not is_named(key, ignored):
                read.add(key)
            if differences(saved, settings(changed(base, key)), MUST_AGREE):
                refused.add(key)
            elif not is_named(key, free | ignored):
                forgotten.append((section, base.data.kind, key))
    for name in (*free, *COMPARED_ON_RESUME):
        assert any(is_named(key, [name]) for key in keys), f"{name} is no key"
    assert forgotten == []
    unread_in_all = [key for key in keys - read - refused if not is_named(key, (*free, *ELSEWHERE))]
    assert unread_in_all == [], "BASES lack settings with which they are read"
    assert [key for key in refused if is_named(key, free)] == []
    assert [key for key in keys if not is_named(key, (*free, *COMPARED_ON_RESUME))] == [], "are they not compared?"


@pytest.mark.parametrize("of_rows", ["encoder.sequence_length", "vision.patches_per_row"])
def test_weights_of_a_run_are_read_whatever_the_length_of_its_rows(tiny, text, of_rows):
    """A run that resumes compares it, but generation, `checkpoint.init_from` and averages have other rows or none."""
    kind, part = ("text", ENCODER) if of_rows.startswith("encoder") else ("chat", VISION)
    config = load_config(tiny, [f"data.train={text}", f"data.kind={kind}", *TEXT, *part])
    saved = settings(config)
    assert saved["model"][of_rows] == 16
    compare_models(saved, config.model, "RUN=runs/a", "name another run")
    compare_models(saved, changed(config.model, of_rows), "RUN=runs/a", "name another run")
    with pytest.raises(InputError, match="model.num_layers="):
        compare_models(saved, changed(config.model, "num_layers"), "RUN=runs/a", "name another run")


def test_a_pattern_of_the_layers_that_null_gives_is_no_change(tiny):
    def of(*overrides: str) -> Config:
        return load_config(tiny, ["data.kind=synthetic", "model.num_layers=2", *overrides])

    window = "model.sliding_window=8"
    for plain, written in (
        ([], "rope_pattern=[rope]"),
        ([], "layer_pattern=[global,global]"),
        ([], "block_pattern=[dense]"),
        ([window], "layer_pattern=[local]"),
        (["model.num_experts=4"], "block_pattern=[moe]"),
        (["model={num_experts: 4, expert_ffn_hidden_size: 32}"], "ffn_hidden_size=96"),  # which no layer reads
    ):
        one, other = of(*plain), of(*plain, f"model.{written}")
        if "block" not in written:  # exports look for the same in each family
            assert settings(one)["model"] == settings(other)["model"]
        for saved, config in ((one, other), (other, one)):
            compare_models(settings(saved), config.model, "RUN=runs/a", "name another run")
    older = settings(one)
    older["model"]["ffn_hidden_size"] = 7
    compare_models(older, other.model, "RUN=runs/a", "name another run")
    (found,) = differences(settings(of(window)), settings(of(window, "model.layer_pattern=[local,global]")), ["model"])
    assert (found.key, found.saved, found.mine) == ("model.layer_pattern", None, ["local", "global"])


def test_parts_that_are_frozen_by_groups_are_compared_since_they_have_no_moments(tiny):
    """Other changes of groups are allowed (MAY_CHANGE)."""

    def of(rate: float):
        groups = f"optimizer.groups=[{{parameters: ['vision.*'], learning_rate: {rate}}}]"
        return settings(load_config(tiny, ["data.kind=synthetic", *VISION, groups]))

    assert not differences(of(1.0), of(0.5), MUST_AGREE)
    (found,) = differences(of(0.5), of(0.0), MUST_AGREE)
    assert (found.key, found.saved, found.mine) == ("optimizer.frozen_by_groups", None, ["vision tower", "projector"])
    *most, last = parameters(declared_model(load_config(tiny, ["data.kind=synthetic", *VISION]).model, LoraConfig()))
    for names in ([last], most):  # a part is trained if one of its parameters is
        groups = f"optimizer.groups=[{{parameters: {json.dumps(names)}, learning_rate: 0}}]"
        parts = frozen_parts(load_config(tiny, ["data.kind=synthetic", *VISION, groups]))
        assert part_of(last) not in parts and len(parts) == (2 if names is most else 0)
    for rates, count in (((0, 2), 2), ((2, 0), 1)):  # of a parameter the first group counts
        pairs = zip(("vision.*", "*"), rates, strict=True)
        groups = ", ".join(f"{{parameters: ['{pattern}'], learning_rate: {rate}}}" for pattern, rate in pairs)
        parts = frozen_parts(load_config(tiny, ["data.kind=synthetic", *VISION, f"optimizer.groups=[{groups}]"]))
        assert len(parts) == count and ("language model" in parts) == (rates[0] > 0)


def test_stages_are_compared_if_only_one_of_both_runs_has_them(tiny, text):
    """Stage 2 begins at step 3: it may be added before, and neither be added nor left out afterwards."""
    stages = f"data.stages=[{{from_step: 3, train: {text}}}]"
    plain, staged = (load_config(tiny, [f"data.train={text}", *given]) for given in ([], [stages]))
    for step in (3, 4):
        before, after = (compared_settings(config, step, {}) for config in (plain, staged))
        for saved, mine in ((before, after), (after, before)):
            found = [each.key for each in differences(saved, mine, MUST_AGREE)]
            assert found == (["data.stages"] if step > 3 else [])


def changed_packing(config, packing):
    return settings(config.model_copy(update={"data": config.data.model_copy(update={"packing": packing})}))


def test_a_key_that_an_older_checkpoint_does_not_have_is_not_compared(bases):
    (_, text), (_, chat) = bases[2:4]
    saved, mine = settings(text), settings(changed(text, "data.text_key"))
    (found,) = differences(saved, mine, MUST_AGREE)
    assert (found.key, found.saved, found.mine) == ("data.text_key", "text", "textx")
    del saved["data"]["text_key"]
    assert not differences(saved, mine, MUST_AGREE)
    for older, now in (({}, "sequential"), ({"pack": True}, "best_fit"), ({"pack": False}, "none")):
        of_kind = settings(chat if older else text)
        assert of_kind["data"].pop("packing") == ("first_fit" if older else "sequential")
        of_kind["data"] |= older
        for packing in ("none", "sequential", "first_fit"):
            packed = changed_packing(chat if older else text, packing)
            found = [(each.key, each.saved, each.mine) for each in differences(of_kind, packed, MUST_AGREE)]
            assert found == ([] if packing == now else [("data.packing", now, packing)])
    plain, required = settings(load_config("quickstart")), {"num_layers", "hidden_size", "num_heads", "vocab_size"}
    older = plain | {"model": {name: value for name, value in plain["model"].items() if name in required}}
    newer = {each.key for each in differences(older, plain, MUST_AGREE)}  # of these keys the value follows from others
    assert "model.encoder" not in newer and "model.qk_norm" not in newer, newer
    assert "data.kind" in [each.key for each in differences(saved, settings(chat), MUST_AGREE)]


def test_a_checkpoint_without_a_key_was_saved_with_its_default(bases):
    """Of the keys whose value in this run is the schema's default, a number or a word."""
    dense, with_experts = load_config("quickstart"), bases[0][1]
    for config in (dense, with_experts):
        saved, found = settings(config), set()
        for section in ("model", "optimizer", "data"):
            for name, mine in saved[section].items():
                *parents, last = f"{section}.{name}".split(".")
                fields = type(functools.reduce(getattr, parents, config)).model_fields
                if (
                    isinstance(mine, str | int | float)
                    and last in fields.keys() - {"kind"}
                    and fields[last].default == mine
                ):
                    older = saved | {section: {key: of for key, of in saved[section].items() if key != name}}
                    assert not differences(older, saved, MUST_AGREE), name
                    found.add(f"{section}.{name.rpartition('.')[0]}")
        assert found == {"model.", "optimizer.", "data."} | ({"model.router"} if config is with_experts else set())


def test_a_tokenizer_and_a_template_are_compared_by_their_content(bases, tmp_path):
    """Also if the files were changed in place; another path to the same content is the same data."""
    (_, base), folders = bases[3], [tmp_path / name for name in ("one", "copy")]
    (chats := tmp_path / "chats.jsonl").write_text("")
    for folder in folders:
        folder.mkdir()
        (folder / "tokenizer.json").write_text("{}")
        (folder / "chat_template.jinja").write_text("{{ messages }}")

    def found(folder, **others):
        changes = {"tokenizer": str(folder / "tokenizer.json"), "train": str(chats), **others}
        config = base.model_copy(update={"data": base.data.model_copy(update=changes)})
        return compared_settings(config, 1, data_contents(config))

    infilling = {"kind": "indexed", "fim_rate": 0.5}  # adds tokens of the tokenizer to those of the files
    saved, filled = found(folders[0]), found(folders[0], **infilling)
    assert not differences(saved, found(folders[1]), MUST_AGREE)
    (folders[1] / "tokenizer.json").write_text("{ }")
    (folders[1] / "chat_template.jinja").write_text("{{ messages[0] }}")
    lines = [str(each) for each in differences(saved, found(folders[1]), MUST_AGREE)]
    assert lines == [
        f"data.{name} has another content than at the checkpoint" for name in ("tokenizer", "chat_template")
    ]
    assert [str(each) for each in differences(filled, found(folders[1], **infilling), MUST_AGREE)] == lines[:1]


def test_what_the_tokenizers_folder_says_of_pictures_is_compared_by_its_content(tiny, tmp_path):
    """Not what keys of model.vision decide, which `checkpoint.allow_changes` names themselves."""
    with np.load(Path(__file__).parents[1] / "data_files/images.npz") as arrays:
        own = json.loads(arrays["chats"].tobytes())["llava"]["folder"]
    for name, content in own.items():
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "chats.jsonl").write_text("")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    processor = tmp_path / "preprocessor_config.json"

    def found(patches):
        data = (f"data.{key}={value}" for key, value in (("tokenizer", tmp_path), ("train", tmp_path / "chats.jsonl")))
        sizes = f"{{image_token: 258, num_layers: 1, hidden_size: 16, num_heads: 2, patches_per_row: {patches}}}"
        config = load_config(tiny, ["data.kind=chat", *data, f"model.vision={sizes}", "model.vocab_size=264"])
        return compared_settings(config, 1, data_contents(config))

    for folder in ("with a processor", "without one"):
        if folder == "without one":
            processor.unlink()
        saved = found(256)
        assert [each.key for each in differences(saved, found(512), MUST_AGREE)] == ["model.vision.patches_per_row"]
    processor.write_text(json.dumps(own[processor.name] | {"image_mean": [0.1, 0.2, 0.3]}))
    (changed_folder,) = differences(saved, found(256), MUST_AGREE)
    assert changed_folder.key.startswith("data.tokenizer.")  # so that allow_changes: [data.tokenizer] lets it through


@pytest.mark.parametrize("of", ["train", "stages"])
def test_token_files_are_compared_by_their_sizes_and_by_pieces_of_their_content(tmp_path, of):
    """Those of stages too that have begun."""
    prefix, fixed = tmp_path / "tokens", tmp_path / "fixed"
    file, index = (prefix.with_suffix(suffix) for suffix in (".bin", ".idx"))
    stages = f"data.stages=[{{from_step: 5, train: {prefix}}}]" if of == "stages" else "data.stages=null"
    source = fixed if of == "stages" else prefix
    config = load_config("quickstart", ["data.kind=indexed", f"data.train={source}", "data.split=null", stages])
    for path in (index, fixed.with_suffix(".bin"), fixed.with_suffix(".idx")):
        path.write_bytes(bytes(9))

    def found(step=6):
        return compared_settings(config, step, data_contents(config))

    def changes():
        return [(each.key, str(each)) for each in differences(saved, found(), MUST_AGREE)]

    older = found()
    file.write_bytes(bytes(6))
    before = found()
    file.write_bytes(bytes(100_000))
    saved = found()
    assert not differences(older, saved, MUST_AGREE) and not differences(saved, saved, MUST_AGREE)
    (change,) = differences(before, saved, MUST_AGREE)
    assert change == (f"data.{of}.files", [[str(file), 6]], [[str(file), 100_000]])
    for path, content in ((file, b"x" + bytes(99_999)), (file, bytes(99_999) + b"x"), (index, b"12345678x")):
        before = path.read_bytes()
        path.write_bytes(content)
        ((key, text),) = changes()
        assert key == f"data.{of}.digests" and str(file) in text
        path.write_bytes(before)
    assert not changes()
    file.unlink()
    assert not [key for key, _ in changes() if key.endswith("digests")]
    index.write_bytes(bytes(8))
    if of == "stages":  # one that has not begun may change
        assert not differences(found(5), older | {"data": found(5)["data"]}, MUST_AGREE)


def test_the_files_of_each_stage_that_has_begun_are_compared(tmp_path):
    """Stages begin at steps 2, 4 and 6; the checkpoint is of step 5."""
    prefixes = [str(tmp_path / name) for name in ("fixed", "first", "second", "later")]
    for prefix in prefixes:
        for suffix in (".bin", ".idx"):
            Path(prefix + suffix).write_bytes(bytes(9))
    stages = ", ".join(f"{{from_step: {2 * n}, train: {prefix}}}" for n, prefix in enumerate(prefixes) if n)
    given = ["data.kind=indexed", f"data.train={prefixes[0]}", "data.split=null", f"data.stages=[{stages}]"]
    config = load_config("quickstart", given)
    saved = compared_settings(config, 5, data_contents(config))
    keys = ["data.train.digests", "data.stages.digests", "data.stages.digests", None]
    for prefix, expected in zip(prefixes, keys, strict=True):
        Path(f"{prefix}.bin").write_bytes(b"x" + bytes(8))
        found = differences(saved, compared_settings(config, 5, data_contents(config)), MUST_AGREE)
        assert [each.key for each in found] == ([expected] if expected else []), prefix
        assert all(f"{prefix}.bin" in str(each) for each in found)
        Path(f"{prefix}.bin").write_bytes(bytes(9))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_beta1_of_zero_is_another_one_where_it_takes_an_array_from_the_state(tiny, kind):
    plain, zero = (
        load_config(tiny, ["data.kind=synthetic", f"optimizer.kind={kind}", f"optimizer.beta1={beta1}"])
        for beta1 in (0.9, 0.0)
    )
    found = [each.key for each in differences(settings(plain), settings(zero), MUST_AGREE)]
    assert found == ([] if arrays(plain) == arrays(zero) else ["optimizer.beta1"])
    assert bool(found) == (kind == "sgd")


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_texts_and_chats_of_the_same_size_are_compared_by_their_content(bases, tmp_path, kind):
    _, base = bases[2 if kind == "text" else 3]
    (file := tmp_path / "file.jsonl").write_bytes(bytes(100_000))
    config = base.model_copy(update={"data": base.data.model_copy(update={"train": str(file)})})
    saved = compared_settings(config, 1, data_contents(config))
    assert not differences(saved, compared_settings(config, 1, data_contents(config)), MUST_AGREE)
    for position in (99_999,) if kind == "text" else (99_999, 5_000):  # the second is between the pieces
        content = bytearray(100_000)
        content[position] = 1
        file.write_bytes(content)
        (change,) = differences(saved, compared_settings(config, 1, data_contents(config)), MUST_AGREE)
        assert change.key == "data.train.digests" and str(file) in str(change) and ".idx" not in str(change)
    without = saved | {"data": {name: value for name, value in saved["data"].items() if name != "digests"}}
    assert not differences(without, compared_settings(config, 1, data_contents(config)), MUST_AGREE)  # an older one


def test_two_long_lists_show_what_differs():
    sources = [{"prefix": f"data/a_long_name_of_a_text_document_{n}", "weight": 0.5} for n in range(9)]
    changed = [*sources[:8], {"prefix": "data/new", "weight": 0.5}]
    text = str(SettingDifference("data.train", sources, changed))
    assert "document_8" in text and "data/new" in text and "document_0" not in text


def test_a_change_is_allowed_by_its_key_or_its_section_and_by_no_other_key(bases):
    (_, config), *_ = bases
    sections = {key.rpartition(".")[0] for key in COMPARED_ON_RESUME} - {""}
    for entry in {*COMPARED_ON_RESUME, *sections}:
        allows = config.checkpoint.model_copy(update={"allow_changes": (entry,)})
        for key in (*COMPARED_ON_RESUME, "data.train.files"):
            found = config_allows(config.model_copy(update={"checkpoint": allows}), SettingDifference(key, 1, 2))
            assert found == (key.split(".")[: entry.count(".") + 1] == entry.split(".")), (entry, key)


def arrays(config) -> dict[str, Any]:
    """The arrays of a run's state."""
    program = TrainProgram.build(config, build_mesh(check_mesh(config, 1), jax.devices()[:1]))
    leaves = jax.tree_util.tree_leaves_with_path(replace(program.abstract_state, frozen={}))
    return {jax.tree_util.keystr(path): (leaf.shape, leaf.dtype) for path, leaf in leaves}


OWNER = {"lora": "adapters", "optimizer": "optimizer", "objective": "objective", "model": "model"}  # of the arrays


@pytest.mark.parametrize(
    ("base", "change"),
    [
        *((LORA, change) for change in ("lora.rank=3", "lora.alpha=9", "lora.targets=[key]")),
        *(((), change) for change in ("optimizer.kind=lion", "optimizer.state=int8", "run.seed=5")),
        *(((), change) for change in ("model.rope_theta=5.0", "model.num_layers=3", "model.qk_norm=true")),
    ],
)
def test_what_is_named_is_let_through_if_the_arrays_of_the_state_stay_the_same(tiny, base, change):
    key = change.partition("=")[0]
    named = (*base, "data.kind=synthetic", f"checkpoint.allow_changes=[{key}]")
    saved, mine = (load_config(tiny, [*named, *changes]) for changes in ((), (change,)))
    found, same = [SettingDifference(key, *(value(each, key) for each in (saved, mine)))], arrays(saved) == arrays(mine)
    with (
        contextlib.nullcontext()
        if same
        else pytest.raises(InputError, match=f"{key}=.*can't let it through.* {OWNER[key.split('.')[0]]}")
    ):
        refuse_changes(found, mine, "the checkpoint")


def test_the_schedule_of_an_extension_that_is_gone_is_no_damage(tiny):
    config = load_config(tiny, ["data.kind=synthetic"])
    there = config.schedule.model_dump(mode="json")
    with pytest.warns(UserWarning, match="of step 4 follows another schedule, schedule.kind=gone .*: restore both"):
        warn_of_another_rate(config, {"step": 3, "schedule": there | {"kind": "gone", "settings": {"x": 1}}}, "it")
    with pytest.raises(InputError, match="it is damaged"):
        warn_of_another_rate(config, {"step": 3, "schedule": there | {"warmup_steps": "x"}}, "it")


def test_an_objective_with_parameters_is_compared_with_their_shapes(tiny):
    import_extensions(["docs/examples/value_head.py"])
    own = ("data.kind=synthetic", "objective.kind=value_head")
    plain, one, two = (load_config(tiny, given) for given in (own[:1], own, (*own, "objective.settings={outputs: 2}")))
    for saved, mine in ((plain, one), (one, plain), (one, two)):
        found = differences(settings(saved), settings(mine), MUST_AGREE)
        with pytest.raises(InputError, match=r"objective\..*can't let it through: the objective"):
            refuse_changes(found, mine, "the checkpoint")
    assert not differences(settings(two), settings(two), MUST_AGREE)


def test_the_paths_of_synthetic_data_are_not_read_and_not_compared(tiny):
    ours, theirs = (settings(load_config(tiny, ["data.kind=synthetic", f"data.train={path}"])) for path in "ab")
    assert ours["data"] != theirs["data"] and not differences(ours, theirs, MUST_AGREE)
