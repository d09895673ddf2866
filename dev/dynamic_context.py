"""Time of a step with documents of very different lengths on some GPUs: `data`, static `context`, dynamic context.

    python -m dev.dynamic_context {chats,books} {data,context,dynamic} [--devices 2] [--strategy all_gather]
        [--tiny]

All ways train the same documents, with as many tokens on a device in a microbatch: rows of L tokens with `data`, packed
by first fit, and rows of L for each GPU with `context`, packed by work. Prints a line: seconds of each step, thousands
of tokens a second and GPU, GiB, loss of the first step, and the shares of groups.
"""

import argparse
import time
from typing import Any

import numpy as np

from dev.context_groups import chats
from dev.packing_speed import code_and_books
from megajax.config import load_config
from megajax.data.packing import RowPacking, fill_rows, spread
from megajax.layout.attention_pairs import AttentionPairs
from megajax.runtime import prepare_environment

MICROBATCHES, STEPS = 4, 3
TOKENS = {"chats": 8192, "books": 32_768}  # of a device in a microbatch
TINY = "model.num_layers=2 model.hidden_size=64 model.num_heads=4 model.num_kv_heads=2 model.ffn_hidden_size=64"
TINY += " model.vocab_size=512 precision.compute=float32 precision.accumulation=float32 precision.gradients=float32"


def rows_of(documents: str, way: str, devices: int, tokens: int, step: int) -> list[list[int]]:
    """The lengths of the documents in each row of a step; none is longer than a row of `data`."""
    total, capacity = devices * MICROBATCHES * tokens, tokens if way == "data" else devices * tokens
    lengths = (chats if documents == "chats" else code_and_books)(total, step)
    lengths = np.concatenate([np.diff([*range(0, int(n), tokens), int(n)]) for n in lengths])
    packing = RowPacking("first_fit" if way == "data" else "balanced")
    rows = [[piece.length for piece in row] for row in fill_rows(lengths, total // capacity, capacity, packing)]
    pairs = [int(AttentionPairs().of(row).sum()) for row in rows]
    order = spread(pairs) if packing.balances else np.random.default_rng(step).permutation(len(rows))
    return [rows[row] for row in order]


def batch_of(rows: list[list[int]], vocabulary: int) -> dict[str, np.ndarray]:
    """The fields of random tokens in these documents. A token is a function of its document's length and its place."""
    segments = np.stack([np.repeat(np.arange(len(row)), row) for row in rows])
    positions = np.stack([np.concatenate([np.arange(n) for n in row]) for row in rows])
    lengths = np.stack([np.repeat(row, row) for row in rows])
    tokens = (lengths * 7919 + positions * (positions + 31)) % vocabulary
    ends = positions == lengths - 1
    targets = np.where(ends, 0, np.roll(tokens, -1, axis=1))
    return {
        "tokens": tokens,
        "targets": targets,
        "loss_mask": 1.0 - ends,
        "positions": positions,
        "segment_ids": segments,
    }


def main() -> None:
    """Print the line of one way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("documents", choices=TOKENS)
    parser.add_argument("way", choices=("data", "context", "dynamic"))
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--strategy", default="auto", help="communication.context of the static one")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on virtual CPU devices")
    options = parser.parse_args()
    tokens, count = 256 if options.tiny else TOKENS[options.documents], options.devices
    axis, rows = ("data", count) if options.way == "data" else ("context", 1)
    length = count * tokens // rows
    strategy = "dynamic" if options.way == "dynamic" else options.strategy
    overrides = ["mesh.fsdp=1", f"mesh.{axis}={count}", f"communication.context={strategy}", "data.kind=synthetic"]
    overrides += [f"batch.global_size={rows * MICROBATCHES}", f"batch.num_microbatches={MICROBATCHES}"]
    overrides += [f"batch.sequence_length={length}", "data.reset_attention=true", "data.reset_positions=true"]
    overrides += ["remat.policy=full", "kernels.scan_unroll=1", "data.synthetic_documents=8"]
    config = load_config("configs/llama3_8b_l8.yaml", overrides + (TINY.split() if options.tiny else []))
    prepare_environment(config)

    import jax

    from megajax import TrainProgram, build_mesh
    from megajax.config.checks import check_mesh
    from megajax.training.batches import to_global

    devices = jax.devices()[:count]
    program = TrainProgram.build(config, build_mesh(check_mesh(config, count, platform=devices[0].platform), devices))
    state, seconds, losses, found = program.init_state(), list[float](), list[float](), dict[str, Any]()
    for step in range(STEPS + 1):  # the first one compiles
        fields = batch_of(rows_of(options.documents, options.way, count, tokens, max(step, 1)), config.model.vocab_size)
        batch = jax.block_until_ready(to_global(program, fields))
        start = time.perf_counter()
        state, metrics = program.train_step(state, batch)
        found = {name: np.asarray(value).tolist() for name, value in jax.device_get(metrics).items()}
        seconds.append(time.perf_counter() - start)
        losses.append(found["loss"])
    peak = max((device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in devices) / 2**30
    mean = float(np.mean(seconds[1:]))
    each = " ".join(f"{one:.3f}" for one in seconds[1:])
    groups = {
        name: round(value, 3) for name, value in found.items() if name.startswith(("context_groups", "attention"))
    }
    name = f"{options.documents} {options.way} {config.communication.context if axis == 'context' else 'first_fit'}"
    speed = MICROBATCHES * tokens / mean / 1e3
    kernel = program.plan.kernels.attention
    print(
        f"{name}: {mean:.3f} s ({each}), {speed:.2f}k tokens/s/GPU, {peak:.1f} GiB, compiled and first step"
        f" {seconds[0]:.0f} s, loss {losses[0]:.6f} then {losses[-1]:.4f}, {kernel}, {groups}",
        flush=True,
    )


if __name__ == "__main__":
    main()
