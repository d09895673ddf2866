"""Stages of the training data: another blend from a step on, against a plain loop over all samples."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest

from megajax.config.load import load_config
from megajax.data.describe import SOURCES_SHOWN, describe_data
from megajax.data.loader import make_loader, open_datasets
from megajax.data.samples import BlendedSamples, StagedSamples
from megajax.data.synthetic import SyntheticSamples
from megajax.errors import ConfigError, InputError
from megajax.schema.data import sources_of

SOURCES = [SyntheticSamples(50, 4, seed) for seed in range(4)]
STAGES = [(0, [9, 0, 1, 0]), (50, [0, 1, 1, 0]), (51, [0, 3, 0, 0]), (100, [0.2, 0.5, 0.2, 0.1])]


def plain_stages(stages, count):
    """Each sample's source and rank: in a stage the source furthest behind its weight, of those with a weight."""
    taken, result, starts = [0] * len(SOURCES), [], dict(stages)
    for n in range(count):
        if n in starts:
            weights, here = np.array(starts[n]) / np.sum(starts[n]), [0] * len(SOURCES)
        behind = [(here[d] + 0.5) / weights[d] if weights[d] else np.inf for d in range(len(SOURCES))]
        source = int(np.argmin(behind))
        result.append((source, taken[source]))
        taken[source] += 1
        here[source] += 1
    return result


def test_a_source_continues_in_a_later_stage():
    samples, expected = StagedSamples(SOURCES, STAGES, 300), plain_stages(STAGES, 600)
    assert [samples.locate(n) for n in range(600)] == expected
    for n in (0, 1, 50, 51, 52, 100, 101, 437):
        assert samples.taken(n).tolist() == np.bincount([d for d, _ in expected[:n]], minlength=4).tolist()
    shares = np.bincount([source for source, _ in expected[:300]]) / 300
    np.testing.assert_allclose(samples.weights, shares)
    assert samples[70].tolist() == SOURCES[1][expected[70][1]].tolist()
    assert pickle.loads(pickle.dumps(samples)).locate(599) == expected[599]


def test_the_count_of_a_blends_samples_is_that_of_its_places():
    blend = BlendedSamples(SOURCES[:3], [0.7, 0.299, 0.001])
    found = [blend.locate(n)[0] for n in range(2000)]
    for n in range(0, 2000, 37):
        assert blend.taken(n).tolist() == np.bincount(found[:n], minlength=3).tolist()
    assert blend.taken(10**12).sum() == 10**12


@pytest.fixture
def staged(make_config, write_documents):
    web, code, maths = (
        write_documents([[token] * 40] * 9, name) for token, name in ((1, "web"), (2, "code"), (3, "maths"))
    )
    second = [SimpleNamespace(prefix=web, weight=1.0), SimpleNamespace(prefix=maths, weight=3.0)]
    later = (SimpleNamespace(from_step=3, train=second), SimpleNamespace(from_step=6, train=code))
    blend = [SimpleNamespace(prefix=web, weight=1.0), SimpleNamespace(prefix=code, weight=1.0)]
    return make_config(train=blend, stages=later)


def test_batches_change_at_the_step_and_resume_in_each_stage(staged):
    loader = make_loader(staged, split="train", rows=np.arange(4))
    whole = [next(loader)["tokens"] for _ in range(10)]
    counts = [np.bincount(batch[:, 0], minlength=4)[1:].tolist() for batch in whole]
    assert counts == [[2, 2, 0]] * 3 + [[1, 0, 3]] * 3 + [[0, 4, 0]] * 4
    for step in (2, 3, 7):
        resumed = make_loader(staged, split="train", rows=np.array([3, 1]), start_step=step)  # of another process
        for batch in whole[step:]:
            np.testing.assert_array_equal(next(resumed)["tokens"], batch[[3, 1]])


def test_the_summary_has_the_stages_and_the_shares_of_the_whole_run(staged):
    web, code = (part.prefix for part in staged.data.train)
    maths = staged.data.stages[0].train[1].prefix
    lines = describe_data(staged, open_datasets(staged))
    assert lines[1:3] == [f"stage from step 3: 25.0% {web}, 75.0% {maths}", f"stage from step 6: 100.0% {code}"]
    assert [line.split(":")[0].strip() for line in lines[4:]] == [f"22.5% {web}", f"55.0% {code}", f"22.5% {maths}"]
    many = [SimpleNamespace(prefix=f"p{i}", weight=1.0) for i in range(SOURCES_SHOWN + 5)]
    staged.data.stages = (SimpleNamespace(from_step=3, train=many),)
    shown = ", ".join(f"4.0% p{i}" for i in range(20))  # each of 25
    assert describe_data(staged, {})[1] == f"stage from step 3: {shown}, and 5 more"


def test_the_other_splits_have_no_stages(staged):
    staged.data.valid = staged.data.train
    valid = open_datasets(staged)["valid"]
    assert {int(token) for i in range(20) for token in valid[i]} == {1, 2}, "not 3, of maths"


def test_a_missing_file_of_a_stage_is_named(staged):
    staged.data.stages[1].train = "no/where"
    with pytest.raises(InputError, match=r"^data.stages.1.train \(run.yaml, line 19\): no/where.idx does not exist"):
        open_datasets(staged)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["data.stages=[{from_step: 5, train: b}, {from_step: 5, train: c}]"], "is not after the stage before it"),
        (["data.stages=[]"], "data.stages=[] is empty"),
        (["data.stages=[{from_step: 0, train: b}]"], "data.stages.0.from_step=0 is too small"),
        (
            ["data.stages=[{from_step: 5, train: b}]", "data.order=megatron"],
            "data.stages=[{from_step: 5, train: b}] cannot be combined with data.order=megatron",
        ),
        (["data.train=[{prefix: a}, {prefix: b, weight: null}]"], "has sources with and without a weight"),
        (["data.train={file: no.txt}"], "names a file that cannot be read (No such file or directory)"),
        (["data.train=0.7 a b"], "begins with a weight, but its weights and paths do not alternate"),
        (["data.train={file: bad.txt}"], "names a file that has no blend, such as '0.7 a 0.3 b' or 'a b'"),
        (["data.train=-0.5 a 1.5 b"], "data.train.0.weight=-0.5 is too small"),
        (["data.train=0 a 0 b"], "data.train.0.weight=0.0 is too small"),
    ],
)
def test_mistakes_are_sentences(tmp_path, monkeypatch, settings, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.txt").write_text("0.7 a 0.3")
    path = tmp_path / "run.yaml"
    path.write_text("""\
model: {num_layers: 2, hidden_size: 64, num_heads: 8, vocab_size: 1000}
batch: {global_size: 8, sequence_length: 32}
data: {train: a}
""")
    with pytest.raises(ConfigError) as caught:
        load_config(str(path), settings)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("content", "sources"),
    [("0.7 a\n0.3 b\n", [("a", 0.7), ("b", 0.3)]), ("a b", [("a", None), ("b", None)]), ("a", [("a", None)])],
)
def test_a_blend_is_read_from_a_file(tmp_path, content, sources):
    (tmp_path / "blend.txt").write_text(content)
    path = tmp_path / "run.yaml"
    path.write_text(f"""\
model: {{num_layers: 2, hidden_size: 64, num_heads: 8, vocab_size: 1000}}
batch: {{global_size: 8, sequence_length: 32}}
data: {{train: {{file: {tmp_path}/blend.txt}}}}
""")
    assert sources_of(load_config(str(path)).data.train) == sources
