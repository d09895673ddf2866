"""Low-rank adapters of linear layers beside frozen weights (LoRA, Hu et al. 2021).

A layer's output becomes `x @ W + alpha / rank · x @ A @ B`. W, like every weight without an adapter, is frozen: it is
kept in the compute dtype and has no gradient. A and B are parameters of the same part, `query_lora_a` beside `query`.
A column layer's A is `[D, rank]`, its B `[rank, ...]` has the columns of W; a row layer's A has the rows of W, its B is
`[rank, D]`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from megajax.config import Config, LoraConfig
from megajax.config.sentences import at_most, fail, format_keys, listed
from megajax.model.block import FIRST, Block, blocks_of
from megajax.model.parameters import declare, parameters
from megajax.schema.lora import ALL, our_layers

A, B = FIRST, "_lora_b"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapted:
    """A frozen weight `[in, out]` of a linear layer with its adapter, for the communication points."""

    base: jax.Array
    a: jax.Array  # [in, R]; layers that are fused have theirs side by side
    b: jax.Array  # [R, out], times alpha / rank
    key: jax.Array | None = None  # of the adapter's dropout; None: no dropout
    token_ids: jax.Array | None = None  # as in `BlockInputs`
    dropout: float = field(default=0.0, metadata={"static": True})


def is_adapter(name: str) -> bool:
    """Whether a weight of this name, stored or fused, is part of an adapter."""
    return name.endswith((A, B))


def adaptable(block: Block) -> dict[str, nnx.Param]:
    """The parameters of a block that adapters can be added to: those of its linear layers, without experts'."""
    declared, fused = parameters(block), block.fused
    names = [member for name in block.linear_layers for member in fused.get(name, (name,))]
    return {name: declared[name] for name in names if name in declared and "experts" not in declared[name].axes}


def targets(config: Config) -> list[str]:
    """The names of the linear layers that have adapters, without their parts' names. Empty without LoRA.

    Raises ConfigError for a target that the model does not have, and for a rank above a target's width.
    """
    lora, key = config.lora, "lora.targets"
    if lora.rank is None:
        return []
    found = [item for block in blocks_of(config.model).values() for item in adaptable(block).items()]
    known = sorted({_own_name(name) for name, _ in found})
    wanted = known if lora.targets is None else sorted(set(lora.targets))
    unknown = [name for name in wanted if name not in known]
    if unknown:
        problem = f"{format_keys(config, key)} has {unknown[0]}, which is not a linear layer that can have an adapter"
        problem += " (experts cannot)" if config.model.num_experts else ""
        cure, ours = f"use {listed(known)}", our_layers(lora.targets or ())
        if not ours:
            cure = ALL
        elif set(ours) <= set(known):
            cure = f"write {key}=[{','.join(ours)}]; the model has {listed(known, 'and')}"
        fail(config, problem, cure, key)
    for name, parameter in found:
        width = min(_sizes(parameter))
        if _own_name(name) in wanted and lora.rank > width:
            problem = f"{format_keys(config, 'lora.rank')} is above the width {width} of {_own_name(name)}"
            fail(config, problem, f"use {at_most(width)}", "lora.rank")
    return wanted


def add_adapters(block: Block, lora: LoraConfig) -> Block:
    """The same block, with the adapters of its `lora.targets` declared beside their weights.

    A is normal with the variance of the authors' initial values, 1 / (3 · in); B is zero, so the adapted model is the
    base model at first.
    """
    if lora.rank is None:
        return block
    for name, parameter in adaptable(block).items():
        part, own = name.split(".")
        if lora.targets is not None and own not in lora.targets:
            continue
        shape, axes, rank = parameter.shape, parameter.axes, lora.rank
        inside = len(shape) - 1 if axes[-1] == "embed" else 1  # dimensions of the input
        scale = 1 / (math.sqrt(3 * _sizes(parameter)[0]) * block.config.init_std)
        setattr(block.parts[part], own + A, declare((*shape[:inside], rank), (*axes[:inside], "rank"), scale=scale))
        setattr(block.parts[part], own + B, declare((rank, *shape[inside:]), ("rank", *axes[inside:]), scale=0.0))
    return block


def low_rank[Array: (np.ndarray, jax.Array)](a: Array, b: Array) -> Array:
    """`A @ B` of one layer, in the shape of its weight."""
    return (a.reshape(-1, a.shape[-1]) @ b.reshape(b.shape[0], -1)).reshape(*a.shape[:-1], *b.shape[1:])


def merge(base: dict[str, jax.Array], adapted: Mapping[str, jax.Array], lora: LoraConfig) -> dict[str, jax.Array]:
    """Stacked weights by name with the adapters merged into them, in the dtypes and shardings of `base`.

    `base` is emptied.
    """
    out = {}
    for name in [*base]:
        w = base.pop(name)
        if name + A in adapted:
            with jax.default_matmul_precision("highest"):
                w = _add(w, adapted[name + A], adapted[name + B], lora.scale, w.sharding)
        out[name] = w
    return out


@partial(jax.jit, static_argnames=("scale", "sharding"), donate_argnums=0)
def _add(w: jax.Array, a: jax.Array, b: jax.Array, scale: float, sharding: jax.sharding.Sharding) -> jax.Array:
    added = (w.astype(jnp.float32) + scale * jax.vmap(low_rank)(a, b)).astype(w.dtype)
    return jax.lax.with_sharding_constraint(added, sharding)


def adapters(names: Mapping[str, object]) -> list[str]:
    """The names of the weights that have an adapter."""
    return [name.removesuffix(A) for name in names if name.endswith(A)]


def _sizes(parameter: nnx.Param) -> tuple[int, int]:
    """(in, out) of a linear layer's weight."""
    inside = len(parameter.shape) - 1 if parameter.axes[-1] == "embed" else 1
    return math.prod(parameter.shape[:inside]), math.prod(parameter.shape[inside:])


def _own_name(name: str) -> str:
    return name.rsplit(".", 1)[-1]
