"""What a pipeline keeps in memory, compiled for H200s without a GPU: it does not grow with the microbatches.

`python scripts/pipeline_memory.py` measures, here a narrow model of one layer a stage. On 4 stages `1f1b` and
`zero_bubble` keep 7 microbatches at most, `gpipe` all of them and one more.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import hlo_counts
import pipeline_memory
import pytest

CASE = (
    "configs/llama3_8b_l16_pipeline.yaml model.num_layers=4 model.hidden_size=1024 model.num_heads=8"
    " model.num_kv_heads=4 model.ffn_hidden_size=2816 model.vocab_size=4096 batch.sequence_length=2048 --gpus 4"
).split()
RUNS = {"1f1b": (8, 32, 128), "zero_bubble": (8, 32, 128), "gpipe": (32,)}


def measure(schedule: str) -> list[pipeline_memory.Row]:
    """In a process of its own, with other flags than the tests' virtual CPU devices have."""
    options = ["--json", "--schedules", schedule, "--microbatches", *map(str, RUNS[schedule])]
    environment = {**os.environ, "XLA_FLAGS": hlo_counts.FAST}
    command = [sys.executable, pipeline_memory.__file__, *CASE, *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=hlo_counts.ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    return [pipeline_memory.Row(**json.loads(line)) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, int], pipeline_memory.Row]:
    with ThreadPoolExecutor(max_workers=2) as pool:
        measured = [row for rows in pool.map(measure, RUNS) for row in rows]
    return {(row.schedule, row.microbatches): row for row in measured}


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_memory_does_not_grow_with_the_microbatches(schedule, rows):
    few, *more = [rows[schedule, microbatches] for microbatches in RUNS[schedule]]
    for row in more:
        assert (row.slots, row.saved, row.put_off) == (few.slots, few.saved, few.put_off)
        assert row.temporary == pytest.approx(few.temporary, rel=0.02)  # all but the state and the batch


def test_1f1b_saves_less_than_half_of_what_gpipe_does(rows):
    ours, gpipe = rows["1f1b", 32], rows["gpipe", 32]
    assert (ours.slots, gpipe.slots) == (7, 33)
    assert ours.saved * 33 == gpipe.saved * 7  # of a microbatch the same
    assert ours.temporary < gpipe.temporary / 2


def test_buffers_are_updated_in_place(rows):
    assert all(row.saved and not row.copies for row in rows.values())
    assert all(bool(row.put_off) == (row.schedule == "zero_bubble") for row in rows.values())


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_the_program_does_not_grow_with_the_microbatches(schedule, rows):
    operations = [rows[schedule, microbatches].operations for microbatches in RUNS[schedule]]
    # XLA fuses the tokens' masks otherwise where there are 8.
    assert operations[1] == operations[2] <= operations[0] + 5
