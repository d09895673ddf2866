"""What a pipeline keeps in memory, compiled for H200s without a GPU: it does not grow with the microbatches.

`python dev/pipeline_memory.py` measures, here narrow models of one layer a stage. On P stages `1f1b` and
`zero_bubble` keep 2P - 1 microbatches at most, `gpipe` all of them and one more.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import compile_row
import pipeline_memory
import pytest

CONFIG = (
    "configs/llama3_8b_l16_pipeline.yaml model.hidden_size=1024 model.num_heads=8"
    " model.num_kv_heads=4 model.ffn_hidden_size=2816 model.vocab_size=4096 batch.sequence_length=2048"
).split()
D, F, V, S = 1024, 2816, 4096, 2048  # its sizes; 8 heads and 4 KV heads of 128, microbatches of two sequences
# schedule, stages, layers: numbers of microbatches
RUNS = {
    # The buffers of 1f1b and those of deferred gradients.
    ("zero_bubble", 3, 3): (32, 128),
    # With this number of slots they have no operations of their own: residuals are copied into them.
    ("gpipe", 3, 3): (32,),
}
GROWING = ("zero_bubble", 3, 3)
Rows = dict[tuple[str, int, int, int], pipeline_memory.Row]  # by run and microbatches


def measure(compiled_steps: list[str], run: tuple[str, int, int]) -> list[pipeline_memory.Row]:
    """In a process of its own, with other flags than the tests' virtual CPU devices have."""
    schedule, stages, layers = run
    sizes = [f"mesh.pipeline={stages}", f"model.num_layers={layers}", "--gpus", str(stages)]
    options = [*compiled_steps, "--json", "--schedules", schedule, "--microbatches", *map(str, RUNS[run])]
    environment = {**os.environ, "XLA_FLAGS": compile_row.FAST}
    command = [sys.executable, pipeline_memory.__file__, *CONFIG, *sizes, *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=compile_row.ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    return [pipeline_memory.Row(**json.loads(line)) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def rows(compiled_steps) -> Rows:
    with ThreadPoolExecutor(max_workers=2) as pool:
        measured = zip(RUNS, pool.map(partial(measure, compiled_steps), RUNS), strict=True)
        return {(*run, row.microbatches): row for run, rows in measured for row in rows}


def test_memory_does_not_grow_with_the_microbatches(rows):
    few, more = (rows[*GROWING, microbatches] for microbatches in (32, 128))
    assert (more.slots, more.saved, more.deferred) == (few.slots, few.saved, few.deferred)
    assert more.temporary == pytest.approx(few.temporary, rel=0.02)  # all but the state and the batch


def test_the_buffers_of_1f1b_save_less_than_half_of_what_gpipe_does(rows):
    ours, gpipe = rows[*GROWING, 32], rows["gpipe", 3, 3, 32]
    assert (ours.slots, gpipe.slots) == (5, 33)
    assert ours.saved * 33 == gpipe.saved * 5  # of a microbatch the same
    assert ours.temporary < gpipe.temporary / 2


def test_buffers_are_updated_in_place(rows):
    assert all(row.saved and not row.copies for row in rows.values())
    assert all(bool(row.deferred) == (row.schedule == "zero_bubble") for row in rows.values())


def test_the_program_does_not_grow_with_the_microbatches(rows):
    few, more = (rows[*GROWING, microbatches].operations for microbatches in (32, 128))
    assert few == more


def test_the_arguments_are_the_state_and_the_batch(rows):
    _, stages, _ = GROWING
    layer = 128 * D * (8 + 2 * 4) + D * D + 3 * D * F + 2 * D
    columns = -(-D // stages)  # of embedding and head on a stage, padded; every stage has the final norm
    stored = layer + 2 * V * columns + D
    for microbatches in RUNS[GROWING]:
        # FP32 parameters and AdamW's two moments; six numbers; four fields of a token
        expected = 3 * 4 * stored + 6 * 4 + 4 * 4 * microbatches * 2 * S
        assert rows[*GROWING, microbatches].arguments == expected
