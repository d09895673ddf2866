"""What is computed: Flax nnx modules, written once for one logical device."""

from megajax.model.parameters import bind, init_parameters, parameters
from megajax.model.transformer import Block, Transformer

__all__ = ["Block", "Transformer", "bind", "init_parameters", "parameters"]
