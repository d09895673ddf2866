"""FP8 recipes: what quantised linear layers need, declared once; all others ask these objects."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megajax.errors import ConfigError
from megajax.options.registry import Registry

# (numbers, the axis that is summed over, "input", "weight" or "gradient") → the numbers that a format can represent
Rounding = Callable[[Any, int, str], Any]


@dataclass(frozen=True)
class Fp8Recipe:
    """A recipe for the matmuls of linear layers, by its declarations."""

    name: str  # for `precision.fp8.recipe`
    is_on: bool = True
    keeps_history: bool = False  # scales follow from the amaxes of earlier steps, which are part of the train state
    # Reference arithmetic: matmuls in `precision.compute` of rounded operands, instead of FP8 kernels
    rounded: Rounding | None = None

    @property
    def has_kernels(self) -> bool:
        """Whether FP8 matmuls with one scale a tensor run."""
        return self.is_on and self.rounded is None


NONE, CURRENT = Fp8Recipe("none", is_on=False), Fp8Recipe("current")
RECIPES = Registry("FP8 recipe", NONE, CURRENT, Fp8Recipe("delayed", keeps_history=True))


def register_fp8(recipe: Fp8Recipe) -> None:
    """Register a recipe in reference arithmetic for `precision.fp8.recipe`; before the config is loaded.

    Raises ConfigError for a name that another recipe has, and for one without `rounded`.
    """
    if recipe.rounded is None:
        raise ConfigError(f"the FP8 recipe {recipe.name} has no function `rounded`: give one.")
    RECIPES.add(recipe)
