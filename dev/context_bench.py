"""Attention over `context` by itself, on all GPUs of a host: `python dev/context_bench.py`.

Runs forward and backward of one layer with each strategy, and on one device with whole sequences. Every device has the
same number of tokens and, with whole sequences, the same work. TFLOP/s count 4 · H · N for each visible pair of
positions and 2.5 times that backward. On CPUs the shapes are tiny and the figures are meaningless.
"""

# ruff: noqa: E402 (XLA reads its flags when jax starts)
import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from megajax.config import AXES, load_config
from megajax.runtime import prepare_environment

prepare_environment(load_config(Path(__file__).parents[1] / "configs/llama3_8b_l8_context.yaml"))

import jax
import jax.numpy as jnp
from attention_bench import milliseconds, on_cpu
from jax.sharding import PartitionSpec as P

from megajax.kernel_choice import Kernels
from megajax.mesh import build_mesh, mesh_sizes
from megajax.ops import AttentionSettings, Implementation
from megajax.options.context import RING, STRATEGIES, ContextStrategy
from megajax.parallel.context.token_order import add_token_positions, balanced_order, stored_order, token_positions_of
from megajax.parallel.mesh_comm import MeshComm
from megajax.step_plan import Collectives


def heads() -> tuple[int, int, int]:
    """Query heads, key heads and the dimension of each."""
    return (8, 4, 16) if on_cpu() else (32, 8, 128)


def segments(rows: int, S: int, documents: int) -> np.ndarray:
    """The document of each token, `[rows, S]`: the same number in each sequence, of random lengths."""
    rng = np.random.default_rng(0)
    cuts = [np.sort(rng.choice(np.arange(1, S), documents - 1, replace=False)) for _ in range(rows)]
    return np.stack([np.searchsorted(row, np.arange(S), side="right") for row in cuts])


def seen_pairs(segment_ids: np.ndarray) -> int:
    """Number of visible pairs of a query and a key."""
    lengths = [np.bincount(row) for row in segment_ids]
    return sum(int((n * (n + 1) // 2).sum()) for n in lengths)


def batch_of(segment_ids: np.ndarray, context: int, strategy: ContextStrategy) -> dict[str, np.ndarray]:
    """Fields `[1, B, S]` in the devices' order of tokens."""
    packed = segment_ids.max() > 0
    B, S = segment_ids.shape
    balanced = packed and strategy.key_shards(context) > 1
    order = balanced_order(segment_ids, context) if balanced else np.tile(stored_order(S, context), (B, 1))
    fields = {"tokens": np.zeros((B, S), np.int32)}
    if packed:
        fields["segment_ids"] = np.take_along_axis(segment_ids, order, axis=1).astype(np.int32)
    if balanced:
        fields["order"] = order.astype(np.int32)
    return {name: field[None] for name, field in fields.items()}


def step(comm: MeshComm, context: int) -> Callable:
    """(fields, q, k, v, gradient of the output) of this device → gradients of q, k and v."""

    def run(fields: Mapping[str, jax.Array], q, k, v, dout):
        fields, _ = add_token_positions(fields, context)
        positions = token_positions_of({name: field[0] for name, field in fields.items()}, context)

        def attend(q, k, v):
            return comm.attend(q, k, v, positions, AttentionSettings())[0]

        return jax.vjp(attend, q, k, v)[1](dout)

    return run


def measure(S: int, documents: int, strategy: ContextStrategy, context: int) -> tuple[float, float]:
    """(ms of forward and backward, TFLOP/s a device)."""
    N, K, H = heads()
    mesh = build_mesh({axis: context if axis == "context" else 1 for axis in AXES}, jax.devices()[:context])
    packed = documents > 1
    implementation: Implementation = "reference" if on_cpu() else "pallas" if packed else "cudnn"
    comm = MeshComm(mesh_sizes(mesh), Kernels(implementation), Collectives(context=strategy), deterministic=False)
    segment_ids = segments(context, S, documents)
    fields = {name: jnp.asarray(a) for name, a in batch_of(segment_ids, context, strategy).items()}
    shapes = [(context, S, count, H) for count in (N, K, K, N)]
    sharding = jax.NamedSharding(mesh, P(None, "context"))
    make = jax.jit(
        lambda: [jax.random.normal(jax.random.key(i), s, jnp.bfloat16) for i, s in enumerate(shapes)],
        out_shardings=sharding,
    )
    of_tokens = P(None, "context")
    mapped = jax.shard_map(
        step(comm, context),
        mesh=mesh,
        in_specs=(P(None, None, "context"), *[of_tokens] * 4),
        out_specs=(of_tokens,) * 3,
        check_vma=False,
    )
    fields = jax.device_put(fields, jax.NamedSharding(mesh, P(None, None, "context")))
    ms = milliseconds(jax.jit(mapped), fields, *make())
    return ms, 3.5 * 4 * H * N * seen_pairs(segment_ids) / context / ms / 1e9


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", help="of sequences")
    parser.add_argument("--documents", type=int, nargs="+", help="in a sequence")
    arguments = parser.parse_args()
    lengths = arguments.lengths or ([64] if on_cpu() else [32768, 131072])
    counts = arguments.documents or ([1, 4] if on_cpu() else [1, 64])
    devices, (N, K, H) = jax.devices(), heads()
    print(f"{len(devices)} x {devices[0].device_kind}, jax {jax.__version__}, heads {N}/{K} of {H}, BF16")
    print("| S | documents | context | strategy | forward + backward ms | TFLOP/s a device | of context 1 |")
    print("|---|---|---|---|---|---|---|")
    for S in lengths:
        for documents in counts:
            alone, rate = measure(S, documents, RING, 1)
            print(f"| {S} | {documents} | 1 | – | {alone:.2f} | {rate:.0f} | |", flush=True)
            for strategy in (each for each in STRATEGIES.values() if not each.in_groups):
                ms, rate = measure(S, documents, strategy, len(devices))
                share = f"{100 * alone / ms:.0f} %" if documents == 1 else ""
                row = f"{len(devices)} | {strategy.name} | {ms:.2f} | {rate:.0f} | {share}"
                print(f"| {S} | {documents} | {row} |", flush=True)


if __name__ == "__main__":
    main()
