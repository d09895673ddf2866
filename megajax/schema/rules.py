"""Rules of one key about another: they stand beside the key in its type, as `Annotated[Count, AtMost("num_experts")]`.

`config/rule_checks.py` checks them and writes the sentences. A rule of several keys, or of the mesh, is a check of its
feature.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

TRAINING_ONLY = object()  # beside a key of the model that does not define the network
SET: Any = object()  # any value but null and the default


@dataclass(frozen=True)
class Rule:
    """A relation to the key `other`, of the same section if its name has no dot."""

    other: str
    values: Any = SET  # of `other`: one, a tuple of some, or a function that tells
    of: Any = SET  # the values of this key that the rule is for
    because: str = ""
    cure: str = ""  # "" for the one that follows from the rule
    WORDS: ClassVar[str] = ""  # of the sentence, between both keys

    def holds(self, value: Any, other: Any, default: Any, other_default: Any) -> bool:
        """Whether the rule is kept by the values of both keys, whose defaults are also given."""
        return value is None or other is None or self.relates(value, other)

    def relates(self, value: Any, other: Any) -> bool:
        """Whether two numbers are in the relation."""
        raise NotImplementedError


class ReadIf(Rule):
    """This key is read only if `other` has one of the values. Otherwise it has no effect, and only its needs count."""

    WORDS = "has no effect with"

    def holds(self, value: Any, other: Any, default: Any, other_default: Any) -> bool:
        return fits(other, self.values, other_default)


@dataclass(frozen=True)
class Needs(Rule):
    """This key needs one of the values of `other`."""

    what: str = ""  # the need in words, for the name of `other`

    def holds(self, value: Any, other: Any, default: Any, other_default: Any) -> bool:
        return not fits(value, self.of, default) or fits(other, self.values, other_default)


class Excludes(Rule):
    WORDS = "cannot be combined with"

    def holds(self, value: Any, other: Any, default: Any, other_default: Any) -> bool:
        return not (fits(value, self.of, default) and fits(other, self.values, other_default))


class Divides(Rule):
    WORDS = "does not divide"

    def relates(self, value: int, other: int) -> bool:
        return other % value == 0


class MultipleOf(Rule):
    WORDS = "is not a multiple of"

    def relates(self, value: int, other: int) -> bool:
        return value % other == 0 if other else value == 0


class AtMost(Rule):
    WORDS = "is more than"

    def relates(self, value: float, other: float) -> bool:
        return value <= other


class Below(Rule):
    """This number is less than `other`, unless that is 0."""

    WORDS = "is not below"

    def relates(self, value: float, other: float) -> bool:
        return value < other or other == 0


def fits(value: Any, values: Any, default: Any = None) -> bool:
    """Whether a value is one of the `values` of a rule."""
    if values is SET:
        return value is not None and value != default
    if callable(values):
        return bool(values(value))
    return value in values if isinstance(values, tuple) else value == values


def more_than_one(number: int) -> bool:
    """Of an axis of the mesh also if it takes the remaining devices (-1)."""
    return number != 1
