"""Keys that were renamed: the former names are understood, with a sentence; records of old runs need no change."""

import re
import warnings
from pathlib import Path

import pytest

from megajax.config import load_config
from megajax.config.load import keys, suggestion
from megajax.errors import ConfigError
from megajax.schema.tree import RENAMED, Tree
from megajax.training.run_record import changed_keys, previous_config

MINIMAL = """\
model: {num_layers: 4, hidden_size: 64, num_heads: 8, vocab_size: 1000}
batch: {global_size: 8, sequence_length: 32}
data: {kind: synthetic}
"""
FORMER = {"kernels.context": "ring", "kernels.dispatch": "all_gather", "pipeline.rounds": 2, "data.pack": "null"}
OLD = MINIMAL.replace("synthetic}", "synthetic, pack: true}")
OLD += "pipeline: {rounds: 2}\nkernels:\n  context: ring\n  dispatch: all_gather\n  loss_chunk_tokens: 8\n"
OVERRIDES = [
    "kernels={context: ring, loss_chunk_tokens: 8, dispatch: all_gather}",
    "pipeline.rounds=2",
    "data.pack=true",
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plain.yaml").write_text(MINIMAL)
    Path("old.yaml").write_text(OLD)


def test_the_table_leads_from_names_that_are_gone_to_keys():
    known = [name for name, _ in keys()]
    assert set(RENAMED.values()) <= set(known) and not set(RENAMED) & set(known)
    assert FORMER.keys() == RENAMED.keys()


@pytest.mark.parametrize(
    ("path", "overrides", "place"), [("old.yaml", [], "old.yaml, line"), ("plain.yaml", OVERRIDES, "command line")]
)
def test_former_names_mean_the_same_and_a_sentence_names_the_key(path, overrides, place):
    now = [f"{RENAMED[name]}={value}" for name, value in FORMER.items()]
    expected = load_config("plain.yaml", [*now, "kernels.loss_chunk_tokens=8"]).model_dump()
    with pytest.warns(UserWarning, match="is called") as caught:
        assert load_config(path, overrides).model_dump() == expected
    sentences = [str(item.message) for item in caught if "is called" in str(item.message)]
    assert len(sentences) == 4
    for name, sentence in zip(sorted(RENAMED), sorted(sentences), strict=True):
        assert sentence.startswith(f"{name} is called {RENAMED[name]} now (") and place in sentence


def test_chats_that_did_not_share_sequences_do_not_share_them():
    assert Tree({"data": {"pack": False}}, {"data.pack": "old.yaml"}).rename().values == {"data": {"packing": "none"}}


def test_the_later_value_wins_by_either_name():
    Path("new.yaml").write_text("include: old.yaml\ncommunication: {context: all_gather}\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert load_config("new.yaml").communication.context == "all_gather"
        assert load_config("new.yaml", ["kernels.context=all_to_all"]).communication.context == "all_to_all"


def test_both_names_in_one_file_are_refused_and_unknown_names_are_answered():
    Path("both.yaml").write_text(f"communication: {{context: ring}}\n{OLD}")
    with pytest.raises(ConfigError, match=r"communication.context is set twice.*kernels.context \(both.yaml, line \d+"):
        load_config("both.yaml")
    assert suggestion("kernels.dispatch") == "did you mean communication.experts?"


def test_the_record_of_an_old_run_is_read_without_a_warning_and_shows_no_change():
    Path("run").mkdir()
    Path("run/config.yaml").write_text(OLD)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = load_config("run/config.yaml", run_dir=Path("run"))
    assert not re.findall("is called", str([item.message for item in caught]))
    changed = changed_keys(previous_config(Path("run")), config.model_dump(mode="json"))
    assert changed and not re.search("virtual_stages|communication.context|kernels.dispatch", str(changed))
