"""Upcycling: a mixture of experts that begins with the weights of a dense model.

Each expert begins as a copy of its layer's MLP (Komatsuzaki et al. 2022, Sparse Upcycling, arXiv 2212.05055). Where the
weights of a token's experts add up to 1, the layer's first output is the MLP's.
"""

from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.config import ModelConfig
from megajax.layout.kinds import BUILT_IN_BLOCKS, DENSE, KIND_OF, MLP, MOE, layer_kinds, stacked_layers
from megajax.model.parameters import parameters
from megajax.model.transformer import Transformer
from megajax.schema.fields import shortest_pattern
from megajax.schema.model import EXPERTS


class Origin(NamedTuple):
    """The parameter of the dense model that a parameter begins as.

    rows: the layers of the dense model's stack that it has, of `num_rows`; None: all, or it is no stack; experts: the
    number of copies of each; None: it has no dimension of experts.
    """

    name: str
    rows: tuple[int, ...] | None = None
    num_rows: int = 0
    experts: int | None = None

    @property
    def is_unchanged(self) -> bool:
        return self.rows is None and self.experts is None

    def abstract(self, wanted: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """The dense model's array, divided over the devices as the `wanted` one; its layers only if they are the same.

        A device holds no more copies than it gets experts.
        """
        if self.is_unchanged:
            return wanted
        sharding = wanted.sharding
        assert isinstance(sharding, NamedSharding)
        sizes = [*zip(wanted.shape, [*sharding.spec, *[None] * len(wanted.shape)], strict=False)]
        if self.experts is not None:
            del sizes[1]
        if self.rows is not None:
            sizes[0] = self.num_rows, None
        spec = P(*(axes for _, axes in sizes))
        shape = tuple(size for size, _ in sizes)
        return jax.ShapeDtypeStruct(shape, wanted.dtype, sharding=NamedSharding(sharding.mesh, spec))

    def copies(self, dense: jax.Array) -> jax.Array:
        """The dense model's array → the parameter."""
        rows = dense if self.rows is None else jnp.stack([dense[row] for row in self.rows])
        if self.experts is None:
            return rows
        return jnp.broadcast_to(rows[:, None], (len(rows), self.experts, *rows.shape[1:]))


def dense_model(model: ModelConfig) -> ModelConfig:
    """The model with an MLP in place of the experts of each layer."""
    blocks = tuple(_dense_kind(kind.block) for kind in layer_kinds(model))
    of_experts = {name for name, field in ModelConfig.model_fields.items() if EXPERTS in field.metadata}
    settings = model.model_dump(mode="json", exclude={"num_experts", *of_experts})
    settings["block_pattern"] = None if {*blocks} == {DENSE} else shortest_pattern(blocks, model.num_layers)
    return ModelConfig.model_validate(settings)


def origins(model: ModelConfig, names: Iterable[str]) -> dict[str, Origin]:
    """Where each of these parameters begins in `dense_model(model)`; new ones, those of routers, have no entry."""
    own, dense = parameters(Transformer(model)), dense_model(model)
    theirs, layers, found = parameters(Transformer(dense)), stacked_layers(dense), dict[str, Origin]()
    stacks = stacked_layers(model)
    for name in names:
        parts = name.split(".")
        if parts[0] != "blocks" or name not in own:
            found[name] = Origin(name)
            continue
        _, stack, part, *rest = parts
        kind, mine = _dense_kind(stack), stacks[stack]
        origin = ".".join(["blocks", kind, MLP if part == MOE else part, *rest])
        if origin in theirs:
            rows = None if mine == layers[kind] else tuple(layers[kind].index(layer) for layer in mine)
            experts = model.num_experts if "experts" in own[name].axes else None
            found[name] = Origin(origin, rows, len(layers[kind]), experts)
    return found


def _dense_kind(block: str) -> str:
    """The kind of block with an MLP in place of experts; other kinds, and names of stacks, unchanged."""
    sublayers = BUILT_IN_BLOCKS.get(block, ())
    return KIND_OF[tuple(MLP if name == MOE else name for name in sublayers)] if MOE in sublayers else block
