"""A recurrence of a few tokens in one kernel that reads each state once and writes it once, on GPUs.

A Pallas kernel on Triton (jax 0.11 calls that backend deprecated): a program has some columns of a head's state, which
no other columns depend on, and goes from token to token.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

COLUMNS, NUM_WARPS = 32, 4  # of a program
FEW_COLUMNS, FEW = 16, 264  # where there are fewer programs than twice a Hopper GPU's multiprocessors
# (state [d, w], a token's query, key, value, decay, ...) → (the next state, the output [w])
Token = Callable[..., tuple[jax.Array, jax.Array]]


def fits(key_width: int, value_width: int) -> bool:
    """Whether the kernel has these widths: Triton's arrays have powers of two."""
    return all(width >= 16 and width & (width - 1) == 0 for width in (key_width, value_width))


def few_tokens(
    token: Token, inputs: Sequence[jax.Array], initial: jax.Array, count: jax.Array | None, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Of `inputs [B, S, heads, ...]`, queries, keys, values and others, and states `[B, N, d, w]` → (outputs
    `[B, S, N, w]` in the values' dtype, states).

    Fewer heads than N are shared by consecutive ones. The states are those after the first `count [B]` tokens (None:
    after all); they take the memory of `initial`.
    """
    (B, N, d, w), S = initial.shape, inputs[0].shape[1]
    columns = min(w, COLUMNS if B * N * w // COLUMNS >= FEW else FEW_COLUMNS)
    of_columns = [a.ndim == 4 and index == 2 for index, a in enumerate(inputs)]  # the values

    def kernel(count_ref, *refs) -> None:
        *inputs, state_ref, out_ref, final_ref = refs
        state = kept = state_ref[...]
        for t in range(S):
            state, out = token(state, *(ref[t] for ref in inputs))
            out_ref[t] = out.astype(out_ref.dtype)
            kept = state if count is None else jnp.where(t < count_ref[0], state, kept)
        final_ref[...] = kept

    def spec(x: jax.Array | jax.ShapeDtypeStruct, split: bool) -> pl.BlockSpec:
        """The tokens of one head, or of a program's columns of it."""
        group = N // x.shape[2]
        if x.ndim == 3:
            return pl.BlockSpec((None, S, None), lambda i, n, b: (b, 0, n // group))
        width = columns if split else x.shape[3]
        return pl.BlockSpec((None, S, None, width), lambda i, n, b: (b, 0, n // group, i if split else 0))

    state = pl.BlockSpec((None, None, d, columns), lambda i, n, b: (b, n, 0, i))
    out = jax.ShapeDtypeStruct((B, S, N, w), inputs[2].dtype)
    counts = jnp.zeros(B, jnp.int32) if count is None else count
    return pl.pallas_call(
        kernel,
        grid=(w // columns, N, B),
        in_specs=[pl.BlockSpec((1,), lambda i, n, b: (b,)), *map(spec, inputs, of_columns), state],
        out_specs=[spec(out, True), state],
        out_shape=[out, jax.ShapeDtypeStruct(initial.shape, initial.dtype)],
        input_output_aliases={1 + len(inputs): 1},
        compiler_params=plgpu.CompilerParams(num_warps=NUM_WARPS),
        interpret=interpret,
        name="few_tokens",
    )(counts, *inputs, initial)
