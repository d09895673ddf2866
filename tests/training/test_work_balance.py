"""The imbalance that a run logs and its summary tells, by plain loops over the documents of each row."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megajax import Config
from megajax.data.balance import steps_shown
from megajax.data.indexed import IndexedWriter
from megajax.data.loader import open_split, samples_of_step
from megajax.data.packing import RowPacking
from megajax.schema.batch_schedule import BatchSizes
from megajax.training.work_balance import WorkBalance, balance_lines

D, F, V, S, L, G = 32, 64, 250, 63, 3, 16
MODEL = {"num_layers": L, "hidden_size": D, "num_heads": 4, "ffn_hidden_size": F, "vocab_size": V, "vocab_multiple": 1}


def row_flops(lengths: list[int], window: int) -> float:
    """Six for each weight of a matmul and token, and for scores and values of all pairs of a document.

    A whole row counts S / 2 keys for each token, or those of the window, as Megatron counts, and a pair its share.
    """
    matmuls = V * D + L * (4 * D * D + 3 * D * F)
    pairs = sum(min(i + 1, window) for length in lengths for i in range(length))
    of_row = sum(min(i + 1, window) for i in range(S))
    return 6 * S * matmuls + 6 * L * 2 * D * S * (window - window**2 / (2 * S)) * pairs / of_row


def imbalance(samples: Any, step: int, order: list[int], parts: int, window: int) -> float:
    """Of the rows of a step in this order."""
    size = len(order)
    rows = [row_flops(samples.document_lengths(size * step + row).tolist(), window) for row in order]
    sums = [sum(rows[first : first + size // parts]) for first in range(0, size, size // parts)]
    return max(sums) / np.mean(sums)


@pytest.mark.parametrize(("packing", "window"), [("sequential", S), ("balanced", S), ("balanced", 8)])
def test_logs_and_summary_compare_with_documents_in_sequence(tmp_path, packing, window):
    """16 sequences over 2 microbatches of 2 devices: 4 parts."""
    draw = np.random.default_rng(0)
    with IndexedWriter(tmp_path / "tokens", np.uint16) as writer:
        for size in np.minimum(64, draw.geometric(0.06, 600)):
            writer.add_document(draw.integers(0, V, size))
    data = {"train": str(tmp_path / "tokens"), "packing": packing, "reset_attention": True}
    batch = {"global_size": G, "sequence_length": S, "num_microbatches": 2}
    model = MODEL | {"sliding_window": window}
    config = Config.model_validate({"run": {"steps": 9}, "model": model, "batch": batch, "data": data})
    samples, sizes = open_split(config, "train"), BatchSizes.constant(G)
    program: Any = SimpleNamespace(config=config, by_size={G: SimpleNamespace(plan=SimpleNamespace(sequences=4))})
    values: dict[str, float] = {}
    run: Any = SimpleNamespace(program=program, sizes=sizes, config=config)
    WorkBalance(config, samples).on_log(run, 3, values)
    plain = open_split(config.model_copy(update={"data": config.data.model_copy(update={"packing": None})}), "train")
    in_order = [imbalance(plain, step, list(range(G)), 4, window) for step in range(8)]
    if packing == "sequential":
        assert values == {"work_imbalance": round(in_order[2], 4)}
    else:
        assert values.pop("work_imbalance_sequential") == round(in_order[2], 4)
        rows = (samples_of_step(samples, sizes, 2, RowPacking.of(config)) - 2 * G).tolist()
        in_balance = imbalance(samples, 2, rows, 4, window)
        assert values == {"work_imbalance": round(in_balance, 4)} and in_balance < in_order[2]
    smaller = G // 2  # than `global_size`, as in the first steps of a schedule: two parts
    program.by_size[smaller] = program.by_size[G]
    run.sizes = BatchSizes.constant(smaller)
    WorkBalance(config, samples).on_log(run, 3, values)
    of_smaller = imbalance(plain, 2, list(range(smaller)), 2, window)
    assert values["work_imbalance" if packing == "sequential" else "work_imbalance_sequential"] == round(of_smaller, 4)
    (line,) = balance_lines(program, samples, sizes)
    assert f"by data.packing: sequential {np.mean(in_order):.3f}" in line
    assert ("balanced" in line) == (packing == "balanced")
    whole = config.model_copy(update={"data": config.data.model_copy(update={"reset_attention": False})})
    program.config = whole
    assert not list(balance_lines(program, samples, sizes))


def test_the_summary_looks_at_as_many_rows_whatever_the_size_of_a_step_was_before(make_config):
    sizes_of_steps = ("batch.global_size=2048", "batch.num_microbatches=4", "batch.schedule='0: 512, 1M: 2048'")
    sizes = BatchSizes.of(make_config(*sizes_of_steps))
    first = sizes.phases[1].start.step
    assert steps_shown(sizes) == range(8) and steps_shown(sizes, first) == range(first, first + 2)  # 4096 rows
