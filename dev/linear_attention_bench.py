"""Speed and accuracy of the gated delta rule's implementations on a Hopper GPU, with decays of heads or of channels.

    python dev/linear_attention_bench.py

For each shape [B, S, heads] with heads of width 128, and one or four documents a sequence: milliseconds of the forward
pass and of forward and backward, beside the bound of memory (inputs read and outputs written once, at 3.35 TB/s),
and ‖found - expected‖ / ‖expected‖ of outputs and of all gradients together, where expected is the reference in FP32.
"""

import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp

from megajax.ops.delta_rule import gated_delta_rule

SHAPES = [(4, 4096, 16), (1, 32768, 32), (3, 1000, 8)]
WIDTH, BANDWIDTH = 128, 3.35e12
IMPLEMENTATIONS = ["jla", "reference"]


def drawn(shape: tuple[int, int, int], by_channel: bool, documents: int) -> tuple[list[jax.Array], jax.Array | None]:
    """Arguments of the rule, in BF16 and FP32, and where documents begin."""
    B, S, N = shape
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v = (jax.random.normal(key, (B, S, N, WIDTH)) for key in keys[:3])
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    of_decays = (*shape, WIDTH) if by_channel else shape
    decay, strength = jax.random.normal(keys[3], of_decays), jax.random.normal(keys[4], shape)
    rates = jax.nn.log_sigmoid(decay + 2), jax.nn.sigmoid(strength)
    starts = jnp.broadcast_to(jnp.arange(S) % -(-S // documents) == 0, (B, S)) if documents > 1 else None
    return [*(x.astype(jnp.bfloat16) for x in (q, k, v)), *rates], starts


def milliseconds(f: Callable, *arguments: Any, repeats: int = 10) -> float:
    jax.block_until_ready(f(*arguments))
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        results = [f(*arguments) for _ in range(repeats)]
        jax.block_until_ready(results)
        times.append((time.perf_counter() - begin) / repeats * 1e3)
    return sorted(times)[1]


def distance(found: Any, expected: Any) -> float:
    pairs = [*zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)]
    squares = [(jnp.sum(jnp.square(a.astype(jnp.float32) - b)), jnp.sum(jnp.square(b))) for a, b in pairs]
    return float(jnp.sqrt(sum(x for x, _ in squares) / sum(y for _, y in squares)))


def main() -> None:
    head = "| shape | decays | documents | kernels | forward ms | both ms | bound ms | error |"
    print(f"{jax.devices()[0].device_kind}\n{head}\n|---|---|---|---|---|---|---|---|")
    for shape, by_channel, documents in product(SHAPES, (False, True), (1, 4)):
        arguments, starts = drawn(shape, by_channel, documents)
        out, pull = jax.vjp(partial(run, "reference", starts), *(x.astype(jnp.float32) for x in arguments))
        weights = jax.random.normal(jax.random.key(1), out.shape)
        expected = [out, *pull(weights)]
        moved = sum(x.nbytes for x in arguments) + arguments[2].nbytes
        for name in IMPLEMENTATIONS:
            forward = jax.jit(partial(run, name, starts))
            both = jax.jit(partial(with_gradients, name, starts))
            forward_ms, both_ms = milliseconds(forward, *arguments), milliseconds(both, weights, *arguments)
            error = distance(both(weights, *arguments), expected)
            bounds = f"{moved / BANDWIDTH * 1e3:.2f}, {3 * moved / BANDWIDTH * 1e3:.2f}"
            row = f"| {shape} | {'channels' if by_channel else 'heads'} | {documents} | {name} "
            print(f"{row}| {forward_ms:.2f} | {both_ms:.2f} | {bounds} | {error:.1e} |")


def run(name: str, starts: jax.Array | None, *arguments: jax.Array) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if arguments[2].dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return gated_delta_rule(*arguments, starts=starts, precision=precision, implementation=name)[0]  # type: ignore[arg-type]


def with_gradients(name: str, starts: jax.Array | None, weights: jax.Array, *arguments: jax.Array) -> list[jax.Array]:
    out, pull = jax.vjp(partial(run, name, starts), *arguments)
    return [out, *pull(weights.astype(out.dtype))]


if __name__ == "__main__":
    main()
