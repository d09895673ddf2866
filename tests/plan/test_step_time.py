"""The estimate of a step's time against steps that were measured on H200s (docs/performance.md)."""

import itertools
import json

import pytest
import time_table

# More than 7 % off: DeepSeek-V3's layers, estimated 6 % too fast on one GPU of the same host, one row of Mixtral, and
# two zero-bubble pipelines with long sequences or experts.
EXCEPTIONS = {
    ("configs/dsv3_l4_e16.yaml", "precision.fp8.recipe=current"),
    ("configs/dsv3_l4_e16.yaml", "mesh.tensor=2"),
    ("configs/dsv3_l4_e16.yaml", "mesh.context=2"),
    ("configs/dsv3_l4_e16.yaml", "mesh.pipeline=2"),
    ("configs/mixtral_l2.yaml", "mesh.tensor=2"),
    ("configs/mixtral_l2.yaml", "mesh.pipeline=2"),
    ("configs/llama3_8b_l8_context.yaml", "mesh.pipeline=2"),
}


def is_exception(row: time_table.Row) -> bool:
    return any(row.config == config and override in row.overrides for config, override in EXCEPTIONS)


@pytest.fixture(scope="module")
def speeds() -> dict:
    return {row: time_table.estimate(row)[0] for row in time_table.read_rows()}


def test_rows_that_were_not_fitted_are_within_seven_per_cent(speeds):
    others = [row for row in speeds if not row.fitted]
    assert sum(not is_exception(row) for row in others) >= 35
    for row in others:
        assert speeds[row] == pytest.approx(row.teraflops, rel=0.12 if is_exception(row) else 0.07), row


def test_nine_of_ten_pairs_that_differ_are_in_the_right_order(speeds):
    pairs = [p for p in itertools.combinations(speeds, 2) if not 0.95 < p[0].teraflops / p[1].teraflops < 1.05]
    right = sum((one.teraflops > other.teraflops) == (speeds[one] > speeds[other]) for one, other in pairs)
    assert right >= 0.9 * len(pairs) and len(pairs) > 100


def test_the_parts_of_a_step_add_up_and_losses_are_named(speeds):
    row = next(row for row in speeds if "pipeline=2" in " ".join(row.overrides))
    step = time_table.estimate(row)[1]
    useful = step.matmuls + step.attention + step.head
    assert step.total == pytest.approx(useful + sum(step.losses.values()))
    assert step.losses["bubble"] > 0 and "communication over tensor" not in step.losses


def test_the_table_is_of_a_file_of_rates(speeds, tmp_path, monkeypatch, capsys):
    """With half of all rates of computation, one GPU takes twice the time."""
    file, rates = tmp_path / "rates.json", time_table.H200
    names = ("bf16_flops", "fp8_flops", "memory_bytes")
    halves = {name: getattr(rates, name) / 2 for name in names}
    attention = {str(width): rate / 2 for width, rate in rates.attention_flops}
    file.write_text(json.dumps(halves | {"attention_flops": attention}))
    rows = [next(row for row in speeds if row.gpus == 1 and row.fitted == fitted) for fitted in (True, False)]
    monkeypatch.setattr(time_table, "read_rows", lambda: rows)
    assert time_table.main([f"--rates={file}"]) == 0
    estimates = [int(line.split("|")[4]) for line in capsys.readouterr().out.splitlines()[2:4]]
    assert estimates == pytest.approx([speeds[row] / 2 for row in rows], abs=0.5)
