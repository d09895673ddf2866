"""Matmuls in INT8 with a scale for each row of an operand: a recipe of `precision.fp8.recipe` of one's own.

    megajax train my.yaml run.extensions=[docs/examples/int8_rows.py] precision.fp8.recipe=int8_rows

Each row is divided by 1/127 of its largest magnitude, rounded to integers, and multiplied back.
"""

import jax.numpy as jnp

from megajax.config import Fp8Recipe, register_fp8


def int8_rows(x, tensor):
    """FP32 numbers `[rows, K]` of an operand, `"input"`, `"weight"` or `"gradient"`, whose K is summed over."""
    step = jnp.abs(x).max(axis=1, keepdims=True) / 127
    return jnp.round(x / jnp.where(step > 0, step, 1)) * step


register_fp8(Fp8Recipe("int8_rows", rounded=int8_rows))
