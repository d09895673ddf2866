"""What is computed: Flax nnx modules, written once for one logical device."""

import megajax.model.mtp_block  # noqa: F401  # its blocks are registered there
from megajax.layout.sublayers import EVERYTHING
from megajax.model.block import Block, register_block
from megajax.model.encoder import Encoder, register_encoder
from megajax.model.parameters import bind, declare, init_parameters, parameters
from megajax.model.sublayer import LayerContext, Sublayer
from megajax.model.transformer import Transformer

__all__ = [
    "EVERYTHING",
    "Block",
    "Encoder",
    "LayerContext",
    "Sublayer",
    "Transformer",
    "bind",
    "declare",
    "init_parameters",
    "parameters",
    "register_block",
    "register_encoder",
]
