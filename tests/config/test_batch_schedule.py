"""`batch.schedule`: which steps have which sequences, and the sentences about schedules that cannot run."""

import re
from pathlib import Path

import pytest
from config_errors import first_place

from megajax.config import Config, load_config
from megajax.config.checks import check_mesh
from megajax.errors import ConfigError
from megajax.schema.amounts import sizes_in, tokens_of
from megajax.schema.batch_schedule import BatchSizes, Position, samples_before

pytestmark = pytest.mark.usefixtures("base_config")

BASE = """\
model: {num_layers: 4, hidden_size: 64, num_heads: 8, vocab_size: 1000}
batch: {global_size: 12, num_microbatches: 6, sequence_length: 10}
data: {kind: synthetic}
run: {steps: 100}
"""


def load(schedule: str, *others: str) -> Config:
    return load_config("x.yaml", [f"batch.schedule={schedule}", *others])


# Steps of 4 x 10 tokens begin at 0, 40 and 80 tokens, then those of 8 x 10 at 120 and 200, since 120 is the first at or
# after 85; then those of 12 x 10 at 280.
RISING = "{0: 4, 85: 8, 0.28K: 12}"


def test_a_size_applies_from_the_first_step_at_or_after_its_tokens():
    config = load(RISING)
    sizes = BatchSizes.of(config)
    assert sizes.phases == (((0, 0), 4), ((3, 12), 8), ((5, 28), 12))
    assert [sizes.size(step) for step in range(8)] == [4, 4, 4, 8, 8, 12, 12, 12]
    assert [samples_before(config, step) for step in range(8)] == [0, 4, 8, 12, 20, 28, 40, 52]
    assert sizes.sizes(0, 100) == [4, 8, 12] and sizes.sizes(0, 4) == [4, 8] and sizes.sizes(0, 3) == [4]
    assert sizes.sizes(4, 100) == [8, 12] and sizes.sizes(5, 6) == [12] and sizes.sizes(9, 9) == [12]


@pytest.mark.parametrize("start", [Position(), Position(4, 20), Position(6, 40)])
def test_the_steps_for_some_samples_are_counted_one_by_one(start: Position):
    sizes = BatchSizes.of(load(RISING), start)
    for samples in range(start.samples + 1, 80):
        step = start.step
        while sizes.samples_before(step) < samples:
            step += 1
        assert sizes.steps_for(samples) == step, samples


def test_a_size_that_no_step_begins_in_is_passed_over():
    sizes = BatchSizes.of(load("{0: 4, 41: 6, 79: 12}"))
    assert sizes.phases == (((0, 0), 4), ((2, 8), 12))


@pytest.mark.parametrize("step", range(8))
def test_the_sizes_after_a_step_follow_from_its_samples(step: int):
    config = load(RISING)
    whole = BatchSizes.of(config)
    resumed = BatchSizes.of(config, Position(step, whole.samples_before(step)))
    for later in range(step, 10):
        assert (resumed.size(later), resumed.samples_before(later)) == (whole.size(later), whole.samples_before(later))


def test_without_a_schedule_all_steps_have_the_global_size():
    config = load("null")
    assert [samples_before(config, step) for step in (0, 1, 7)] == [0, 12, 84]
    assert BatchSizes.of(config, Position(5, 7)).samples_before(8) == 7 + 3 * 12


@pytest.mark.parametrize("written", ["'\"0: 6, 1.5B: 12\"'", "{0: 6, 1.5B: 12}", '"0:6,1500M:12"'])
def test_a_schedule_may_be_text_or_a_mapping(written: str):
    config = load(written.strip("'"), "run.steps=30_000_000")
    assert config.batch.sizes_by_tokens == [(0, 6), (1_500_000_000, 12)]
    Path("again.yaml").write_text(config.to_yaml())
    assert load_config("again.yaml") == config


REFUSED = {
    "'256'": "batch.schedule='256' is not a schedule (@): write the tokens from which each size applies, such as"
    " '0: 256, 50B: 512'.",
    "'0: 6, 1.5: 12'": "batch.schedule='0: 6, 1.5: 12' is not a schedule (@): write the tokens from which each size"
    " applies, such as '0: 256, 50B: 512'.",
    "'1K: 12'": "batch.schedule='1K: 12' has no size for the first steps (@): begin with 0, such as '0: 12'.",
    "{0: 0, 1K: 12}": "batch.schedule={'0': 0, 1K: 12} has steps without sequences (@): use 1 or more.",
    "{0: 12, 1K: 6}": "batch.schedule={'0': 12, 1K: 6} does not rise (@): give each size more tokens and more"
    " sequences than the one before it.",
    "{0: 12, 1K: 12}": "batch.schedule={'0': 12, 1K: 12} does not rise (@): give each size more tokens and more"
    " sequences than the one before it.",
    "'0: 6, 1K: 8, 1000: 12'": "batch.schedule='0: 6, 1K: 8, 1000: 12' does not rise (@): give each size more tokens"
    " and more sequences than the one before it.",
    "{0: 6, 2K: 8, 1K: 12}": "batch.schedule={'0': 6, 2K: 8, 1K: 12} does not rise (@): give each size more tokens"
    " and more sequences than the one before it.",
    "{0: 4, 1K: 8}": "batch.schedule='0: 4, 1K: 8' ends with 8 sequences, not with batch.global_size=12 (@): set"
    " batch.global_size=8, or change the last size.",
    "{0: 3, 1K: 12}": "batch.schedule='0: 3, 1K: 12' has steps of 3 sequences, no multiple of the microbatches of"
    " batch.global_size=12 / batch.num_microbatches=6 = 2 (@): set batch.num_microbatches to 4 or 12, or use multiples"
    " of 2.",
    "{0: 3, 1K: 12} mesh.pipeline=2": "batch.schedule='0: 3, 1K: 12' has steps of 3 sequences, no multiple of the"
    " microbatches of batch.global_size=12 / batch.num_microbatches=6 = 2 (@): set batch.num_microbatches to 12, or use"
    " multiples of 2.",
    "{0: 2, 1K: 12} mesh.pipeline=2": "batch.schedule='0: 2, 1K: 12' has steps of 2 sequences in 1 microbatch, fewer"
    " than mesh.pipeline=2 (@): use 4 or more, or raise batch.num_microbatches.",
    "{0: 6, 1K: 12} mesh.pipeline=-1": "batch.schedule='0: 6, 1K: 12' has steps of 6 sequences in 3 microbatches, fewer"
    " than mesh.pipeline=4 (from -1) (@): use 8 or more, or raise batch.num_microbatches.",
    "{0: 6, 1K: 12} mesh.pipeline=2 pipeline.virtual_stages=2": "batch.schedule='0: 6, 1K: 12' has steps of 6 sequences"
    " in 3 microbatches, not a multiple of mesh.pipeline=2, which pipeline.virtual_stages=2 needs (@): use multiples of"
    " 4.",
}


@pytest.mark.parametrize("written", REFUSED)
def test_a_schedule_that_cannot_run_is_refused(written: str):
    schedule, *others = re.split(r" (?=\w+\.\w+=)", written)
    location = f"the command line: batch.schedule={schedule}"
    with pytest.raises(ConfigError) as caught:
        check_mesh(load(schedule, *others), 4)
    assert first_place(str(caught.value)) == REFUSED[written].replace("@", location)


def test_a_schedule_that_the_run_does_not_finish_is_warned_about():
    with pytest.warns(UserWarning, match=r"has 12 sequences from step 1001 on, which is after run.steps=100 .*raise"):
        load("{0: 6, 60K: 12}")
    with pytest.warns(UserWarning, match=r"from step 1001 on, which is after run.steps=1000 .*raise"):
        load("{0: 6, 60K: 12}", "run.steps=1000")
    load("{0: 6, 60K: 12}", "run.steps=1001")


@pytest.mark.parametrize(("text", "tokens"), [("15", 15), ("2K", 2e3), ("1.5M", 15e5), ("3B", 3e9), ("15T", 15e12)])
def test_numbers_of_tokens_have_units(text: str, tokens: float):
    assert tokens_of(text) == tokens and sizes_in(f"0: 1, {text}: 2") == [(0, 1), (tokens, 2)]
