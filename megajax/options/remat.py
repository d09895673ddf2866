"""Remat policies: what a remat group keeps for its backward pass, declared once; all others ask these objects.

It does not import jax: the config, the planner and the step use the same declarations.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum

from megajax.errors import ConfigError
from megajax.options.registry import Registry

# The name that built-in sublayers give to attention's output
ATTENTION = "attention"


class Keep(Enum):
    """What is kept, without naming values."""

    ALL = "all residuals"
    NAMED = "all values that the parts of the blocks name"  # `Sublayer.SAVED`
    INPUT = "the group's input; the backward pass starts with the forward pass"


@dataclass(frozen=True)
class RematPolicy:
    """A remat policy, by its declarations."""

    name: str  # for `remat.policy`
    keep: (
        Keep | tuple[str, ...]
    )  # or the names (`checkpoint_name`) of the values that are kept beside the group's input
    recomputed_by_blocks: tuple[str, ...] = ()  # the values that blocks recompute themselves; see `Sublayer.apply`
    on_host: bool = False  # whether kept values are in the host's memory

    @property
    def keeps_all(self) -> bool:
        """Whether the residuals are those of the vjp, without `jax.checkpoint` around a group."""
        return self.keep is Keep.ALL

    @property
    def keeps_input(self) -> bool:
        """Whether the group's input alone is kept."""
        return self.keep is Keep.INPUT

    @property
    def recomputes_nothing(self) -> bool:
        return self.keeps_all and not self.recomputed_by_blocks

    def keeps(self, name: str) -> bool:
        """Whether a value that a part names is kept."""
        return name not in self.recomputed_by_blocks and name in self.of_names([name])

    def of_names(self, names: Iterable[str]) -> tuple[str, ...]:
        """The values of these names that are kept."""
        if self.keeps_input:
            return ()
        return tuple(name for name in names if isinstance(self.keep, Keep) or name in self.keep)

    def check_names(self, names: Collection[str]) -> None:
        """Raise ConfigError if the blocks name none of the values that this policy keeps."""
        if not isinstance(self.keep, Keep) and not self.of_names(names):
            kept, known = ", ".join(self.keep), ", ".join(sorted(names))
            raise ConfigError(
                f"remat.policy={self.name} keeps {kept}, which no block of the model names: use {known}, or full."
            )


NONE = RematPolicy("none", Keep.ALL)
POLICIES = Registry(
    "remat policy",
    NONE,
    RematPolicy("full", Keep.INPUT),
    RematPolicy("selective", Keep.ALL, recomputed_by_blocks=(ATTENTION,)),
    RematPolicy("save_matmuls", Keep.NAMED),
    RematPolicy("offload", Keep.NAMED, on_host=True),
)


def register_remat(policy: RematPolicy) -> None:
    """Register a policy for `remat.policy`; before the config is loaded.

    Raises ConfigError for a name that another policy has, and for one that keeps no value.
    """
    is_names = isinstance(policy.keep, (tuple, list)) and all(isinstance(name, str) for name in policy.keep)
    if not policy.keep or not (is_names or isinstance(policy.keep, Keep)):
        raise ConfigError(
            f"the remat policy {policy.name} has keep={policy.keep!r}: use names in a tuple, or Keep.INPUT."
        )
    POLICIES.add(policy)
