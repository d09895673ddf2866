"""FP8 and FP4 recipes: what quantised linear layers need, declared once; all others ask these objects."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from megajax.errors import ConfigError, accepts
from megajax.options.registry import Registry

# (FP32 numbers [rows, K] of a matmul that sums over K, "input", "weight" or "gradient") → the numbers that a format has
Rounding = Callable[[Any, str], Any]


@dataclass(frozen=True)
class Fp8Recipe:
    """A recipe for the matmuls of linear layers, by its declarations."""

    name: str  # for `precision.fp8.recipe`
    is_on: bool = True
    keeps_history: bool = False  # scales follow from the amaxes of earlier steps, which are part of the train state
    # Operands are quantised in blocks (`ops/block_recipes.py`), and not with one scale a tensor
    in_blocks: bool = False
    has_block_scaled_dot: bool = False  # Blackwell multiplies its blocks
    has_hopper_kernels: bool = False  # megajax's own quantise and multiply its blocks on Hopper GPUs
    matmul_speed: float = 1.0  # of that with one scale a tensor
    multiple: int = 1  # of the widths and the tokens on a device
    rounded: Rounding | None = None  # of an extension: the numbers that its format has, of any operand

    @property
    def has_kernels(self) -> bool:
        """Whether FP8 matmuls with one scale a tensor run."""
        return self.is_on and not self.in_blocks


NONE, CURRENT = Fp8Recipe("none", is_on=False), Fp8Recipe("current", multiple=16)
BLOCKWISE = Fp8Recipe("blockwise", in_blocks=True, has_hopper_kernels=True, matmul_speed=0.73, multiple=16)
MXFP8 = Fp8Recipe("mxfp8", in_blocks=True, has_block_scaled_dot=True, multiple=32)
NVFP4 = Fp8Recipe("nvfp4", in_blocks=True, has_block_scaled_dot=True, multiple=16)
RECIPES = Registry(
    "FP8 recipe", NONE, CURRENT, Fp8Recipe("delayed", keeps_history=True, multiple=16), BLOCKWISE, MXFP8, NVFP4
)


def register_fp8(recipe: Fp8Recipe) -> None:
    """Register a recipe in reference arithmetic for `precision.fp8.recipe`; before the config is loaded.

    Raises ConfigError for a name that another recipe has, and for one without a function `rounded` of these arguments.
    """
    if recipe.rounded is None:
        raise ConfigError(f"the FP8 recipe {recipe.name} has no function `rounded`: give one.")
    if not accepts(recipe.rounded, None, "input"):
        problem = f"`rounded` of the FP8 recipe {recipe.name} does not take what it is called with"
        raise ConfigError(f"{problem}: write rounded(x, operand), with operand input, weight or gradient.")
    RECIPES.add(replace(recipe, in_blocks=True))
