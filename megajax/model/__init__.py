"""What is computed: Flax nnx modules, written once for one logical device."""

from megajax.config.block_kinds import EVERYTHING
from megajax.model.block import Block, register
from megajax.model.parameters import bind, declare, init_parameters, parameters
from megajax.model.parts import Part
from megajax.model.transformer import Transformer

__all__ = ["EVERYTHING", "Block", "Part", "Transformer", "bind", "declare", "init_parameters", "parameters", "register"]
