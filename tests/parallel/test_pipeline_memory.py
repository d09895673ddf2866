"""What a pipeline keeps in memory, compiled for H200s without a GPU: it does not grow, and is not copied.

`python dev/pipeline_memory.py` measures, here a narrow model of one layer a stage. The numbers of buffer slots, which
`gpipe` needs for all microbatches, are test_buffer_slots.py's.
"""

import compile_row
import jax
import pipeline_memory
import pytest

pytestmark = pytest.mark.long
PATH = str(compile_row.ROOT / "configs/llama3_8b_l16_pipeline.yaml")
NARROW = (
    "model.hidden_size=1024 model.num_heads=8 model.num_kv_heads=4 model.ffn_hidden_size=2816 model.vocab_size=4096"
    " batch.sequence_length=2048"
).split()
D, F, V, S = 1024, 2816, 4096, 2048  # its sizes; 8 heads and 4 KV heads of 128, microbatches of two sequences
STAGES, MICROBATCHES = 3, 128


@pytest.fixture(scope="module")
def row(h200_store) -> pipeline_memory.Row:
    jax.devices()  # jax has started: the flags stay those of the tests
    config = [*NARROW, "mesh.pipeline=3", "model.num_layers=3"]
    return pipeline_memory.measure(PATH, config, STAGES, "zero_bubble", MICROBATCHES, h200_store)


def test_memory_and_program_do_not_grow_with_the_microbatches(row):
    assert row.slots == 2 * STAGES - 1
    # Beside the buffers of slots: less than four microbatches' activations, of 128.
    assert row.temporary < row.saved + row.deferred + 4 * row.saved / row.slots
    assert 500 < row.operations < 500 + 4 * MICROBATCHES


def test_buffers_are_updated_in_place(row):
    assert row.saved and row.deferred and not row.copies


def test_the_arguments_are_the_state_and_the_batch(row):
    layer = 128 * D * (8 + 2 * 4) + D * D + 3 * D * F + 2 * D
    columns = -(-D // STAGES)  # of embedding and head on a stage, padded; every stage has the final norm
    stored = layer + 2 * V * columns + D
    # FP32 parameters and AdamW's two moments; six numbers; four fields of a token
    assert row.arguments == 3 * 4 * stored + 6 * 4 + 4 * 4 * MICROBATCHES * 2 * S


def test_a_stage_with_one_operation_a_tick_copies_its_stream_alone(h200_store):
    """In a single switch for forward and backward operations XLA made 144 copies."""
    jax.devices()
    config = [*NARROW, "mesh.pipeline=2", "mesh.data=2", "model.num_layers=4"]
    row = pipeline_memory.measure(PATH, config, 4, "1f1b", 8, h200_store)
    assert row.slots == 2
    assert len(row.copies) == row.slots, "each slot's program copies the stream that enters the stage"
