"""Encoders: they compute a second stream from fields of the batch, which sublayers read beside the residual stream.

`model.encoder.kind` names one; `register_encoder` adds it. Its stream has the sequences of the batch, each of a length
of its own, and any width.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
from flax import nnx

from megajax.config import ModelConfig
from megajax.errors import ConfigError, check_methods
from megajax.layout.kinds import ENCODER as STREAM
from megajax.model.comm import Comm
from megajax.model.parameters import parameters
from megajax.model.sublayer import Weights
from megajax.options.registered import ENCODERS, NO_ENCODER
from megajax.schema.fields import Section, check_attributes
from megajax.schema.model import LAYERS


class Encoder(nnx.Module):
    """Fields of the batch → a stream. A subclass declares parameters in `__init__` and computes in `apply`."""

    NAME: ClassVar[str]  # of the kind and of the stream

    class Settings(Section):
        """The keys of `model.encoder.settings`."""

    def __init__(self, config: ModelConfig, settings: Any):
        self.config, self.settings = config, settings

    def fields(self) -> dict[str, tuple[Any, ...]]:
        """The batch fields `[rows, length, *extra]` that it reads: by name (dtype, length, *extra)."""
        raise NotImplementedError

    def apply(self, w: Weights, fields: Mapping[str, jax.Array], comm: Comm) -> jax.Array:
        """This device's fields `[B, length / context, ...]`, in order → its part of the stream `[T' / tensor, D']`.

        T' is the number of this device's positions, such as B · length / context. Differentiable in `w`, the parameters
        by name. Weights and stream are divided as those of a layer, by the communication points.
        """
        raise NotImplementedError

    def flops(self) -> float:
        """FLOPs of a sequence, forward and backward: by default those of its matrices, each used at each position."""
        matrices = sum(math.prod(p.shape) for p in parameters(self).values() if p.role == "matrix")
        return 6 * matrices * max(length for _, length, *_ in self.fields().values())


def register_encoder(encoder: type[Encoder]) -> type[Encoder]:
    """A decorator that registers an encoder for `model.encoder.kind`; in a module of `run.extensions`."""
    name, known = encoder.NAME, ENCODERS.get(encoder.NAME, encoder)
    ids = [f"{each.__module__}.{each.__qualname__}" for each in (known, encoder)]
    if name in (NO_ENCODER, LAYERS, STREAM):
        raise ConfigError(f"{ids[1]} has the NAME {name}, which megajax uses: give it another one.")
    if ids[0] != ids[1]:
        raise ConfigError(f"the encoder {name} is {ids[0]} already: register {ids[1]} under another NAME.")
    check_methods(encoder, Encoder)
    check_attributes(encoder, Encoder)
    ENCODERS[name] = encoder
    return encoder


def make_encoder(config: ModelConfig) -> Encoder | None:
    """The encoder that a checked config names; None if it names none."""
    if config.encoder.kind == NO_ENCODER:
        return None
    registered = ENCODERS[config.encoder.kind]
    return registered(config, registered.Settings.model_validate(dict(config.encoder.settings)))
