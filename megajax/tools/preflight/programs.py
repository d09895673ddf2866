"""The programs whose times are the rates of a GPU: a linear layer's matmuls, attention, and a copy, as in the step."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from megajax import ops
from megajax.errors import ConfigError
from megajax.kernel_choice import AttentionShape, Hardware, choose_attention
from megajax.ops import fp8
from megajax.options.fp8_recipes import CURRENT

MATMUL, IN_FP32 = {False: "matmul BF16", True: "matmul FP8"}, "matmul FP32"
COPY = "copy"
WIDTHS = ((64, 64), (128, 128), (192, 128), (256, 256))  # of a head's keys and values


def attention_kind(width: int) -> str:
    """The kind of attention's timings with keys of this width."""
    return f"attention, heads of {width}"


@dataclass(frozen=True)
class Sizes:
    """Large enough that a call takes longer than its start, 0.1 ms."""

    tokens: int  # of the matmuls; also the larger dimension of the weight
    smallest: tuple[int, ...]  # the smaller one
    attended: int  # tokens in attention
    lengths: tuple[int, ...]  # of the sequences that they form
    heads: int
    copied: int  # bytes
    megabytes: tuple[int, ...]  # buffers of collectives
    warm_seconds: float  # of each program before it is timed


# Each program runs for seconds before it is timed, because a GPU at its power limit lowers its clocks after some tenths
# of a second, and a step runs at those clocks.
ON_GPUS = Sizes(16384, (512, 1024, 2048, 4096, 8192), 32768, (2048, 8192, 32768), 32, 2**30, (64, 256, 512), 2.0)
ON_CPUS = Sizes(64, (16, 32, 64), 64, (16, 64), 2, 2**20, (1, 2), 0.0)  # to try the command, not to plan with


class TimedProgram(NamedTuple):
    """A function of a tuple of arrays with these shapes; `kind`, `size` and `work` as in `Timing`."""

    kind: str
    size: int
    work: float
    function: Callable[[Any], Any]
    arguments: tuple[jax.ShapeDtypeStruct, ...]


def programs(sizes: Sizes, hardware: Hardware) -> Iterator[TimedProgram]:
    """All programs, without those that this hardware cannot run."""
    for n in sizes.smallest:
        yield _matmuls(MATMUL[False], jnp.bfloat16, sizes.tokens, n)
    yield _matmuls(IN_FP32, jnp.float32, sizes.tokens, sizes.smallest[-1])
    try:
        implementation = fp8.choose(CURRENT, "xla", hardware.platform, hardware.capability)
    except ConfigError:  # before Hopper
        pass
    else:
        for n in sizes.smallest:
            yield _fp8_matmuls(sizes.tokens, n, fp8.kernels(implementation).matmul)
    for widths in WIDTHS:
        for length in sizes.lengths:
            try:
                yield _attention(sizes, length, widths, hardware)
            except ConfigError:  # no kernel for these widths
                break
    shape = jax.ShapeDtypeStruct((sizes.copied // 2,), jnp.bfloat16)
    yield TimedProgram(COPY, sizes.copied, 2 * sizes.copied, lambda arrays: arrays[0] * 1.5, (shape,))


def random_arguments(program: TimedProgram) -> tuple[jax.Array, ...]:
    """Normal random numbers: a matmul of zeros needs less power, and is faster."""
    return tuple(
        jax.random.normal(jax.random.key(i), each.shape).astype(each.dtype) for i, each in enumerate(program.arguments)
    )


def _matmuls(kind: str, dtype: Any, T: int, n: int) -> TimedProgram:
    """The three matmuls of a linear layer with T tokens and a weight [n, T]: output and both gradients.

    Those of FP32 are in full precision, as in a step (`precision.compute`).
    """

    def matmuls(arrays):
        x, w, dy = arrays
        with jax.default_matmul_precision("highest" if dtype == jnp.float32 else "default"):
            return x @ w, dy @ w.T, x.T @ dy

    return TimedProgram(kind, n, 6 * T * T * n, matmuls, _shapes(dtype, (T, n), (n, T), (T, T)))


def _fp8_matmuls(T: int, n: int, matmul: Callable[..., jax.Array]) -> TimedProgram:
    """The same of tensors that are quantised with their transposes; the scales are applied inside the matmuls."""

    def matmuls(arrays):
        x, w, x_t, w_t, dy, dy_t, scale = arrays
        products = ((x, w_t), (dy, w), (x_t, dy_t))
        return [matmul(a, b, scale, jnp.bfloat16) for a, b in products]

    shapes = _shapes(fp8.E4M3, (T, n), (n, T), (n, T), (T, n)) + _shapes(fp8.E5M2, (T, T), (T, T))
    return TimedProgram(MATMUL[True], n, 6 * T * T * n, matmuls, shapes + _shapes(jnp.float32, ()))


def _attention(sizes: Sizes, S: int, widths: tuple[int, int], hardware: Hardware) -> TimedProgram:
    """Forward and backward pass with the kernel that a step would choose; it counts half of the pairs, as causal."""
    H, W = widths
    N, B = sizes.heads, sizes.attended // S
    K = N if H != W else max(1, N // 4)  # latent attention has as many heads of keys as of queries
    # A step uses cuDNN for equal widths above 128 only if the config asks for it.
    requested = "cudnn" if H == W > 128 and hardware.platform == "gpu" else "auto"
    implementation, _ = choose_attention(requested, hardware, AttentionShape(jnp.bfloat16, H, W, S))

    def forward_and_backward(arrays):
        *qkv, dout = arrays
        out, gradients = jax.vjp(lambda q, k, v: ops.attention(q, k, v, implementation=implementation)[0], *qkv)
        return out, gradients(dout)

    shapes = _shapes(jnp.bfloat16, (B, S, N, H), (B, S, K, H), (B, S, K, W), (B, S, N, W))
    return TimedProgram(attention_kind(H), S, 3 * B * S * S * N * (H + W), forward_and_backward, shapes)


def _shapes(dtype: Any, *shapes: tuple[int, ...]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
