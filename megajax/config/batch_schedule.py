"""The sequences of each step (`batch.schedule`), and a run's position in its data."""

import re
from bisect import bisect_right
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from megajax.config.schema import Config

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_TOKENS = r"(\d+(?:\.\d+)?)([KMBT]?)"
_ENTRY = re.compile(rf"\s*{_TOKENS}\s*:\s*(\d+)\s*")


class Position(NamedTuple):
    """A point of a run: steps taken, and training samples read by them."""

    step: int = 0
    samples: int = 0


class BatchPhase(NamedTuple):
    """Consecutive steps of `size` sequences each, from a position on."""

    start: Position
    size: int


@dataclass(frozen=True)
class BatchSizes:
    """The number of sequences of each step from the first phase on; the last phase does not end."""

    phases: tuple[BatchPhase, ...]

    @classmethod
    def of(cls, config: "Config", start: Position = Position()) -> "BatchSizes":  # noqa: B008  a tuple
        """The sizes of a run that begins or continues at `start`.

        A size of `batch.schedule` applies from the first step on that begins at its number of tokens or later.
        """
        length, schedule = config.batch.sequence_length, sizes_by_tokens(config)
        ends = [-(-tokens // length) for tokens, _ in schedule[1:]]
        phases, (step, samples) = [], start
        for (_, size), end in zip(schedule, ends, strict=False):
            steps = max(0, -(-(end - samples) // size))
            if steps:
                phases.append(BatchPhase(Position(step, samples), size))
            step, samples = step + steps, samples + steps * size
        return cls((*phases, BatchPhase(Position(step, samples), schedule[-1][1])))

    @classmethod
    def constant(cls, size: int) -> "BatchSizes":
        """The same number of sequences in every step."""
        return cls((BatchPhase(Position(), size),))

    def samples_before(self, step: int) -> int:
        """The number of training samples that the first `step` steps of the run read."""
        (first, samples), size = self.phases[self._index(step)]
        return samples + (step - first) * size

    def steps_for(self, samples: int) -> int:
        """The number of steps of the run after which at least `samples` training samples, one or more, are read."""
        (first, before), size = next(phase for phase in reversed(self.phases) if phase.start.samples < samples)
        return first + -(-(samples - before) // size)

    def size(self, step: int) -> int:
        """The number of sequences of the step after the first `step` ones."""
        return self.phases[self._index(step)].size

    def sizes(self, start: int, stop: int) -> list[int]:
        """The different numbers of sequences of the steps after the first `start` ones, up to step `stop`, in order."""
        return [phase.size for phase in self.phases[self._index(start) : self._index(max(start, stop - 1)) + 1]]

    def _index(self, step: int) -> int:
        assert step >= self.phases[0].start.step, "the sizes of earlier steps are not known"
        return bisect_right(self.phases, step, key=lambda phase: phase.start.step) - 1


def samples_before(config: "Config", step: int) -> int:
    """The number of training samples that the first `step` steps of a config's run read."""
    return BatchSizes.of(config).samples_before(step)


def sizes_by_tokens(config: "Config") -> list[tuple[int, int]]:
    """(tokens, sequences): each size of a step with the number of tokens from which it applies; the first from 0."""
    schedule = config.batch.schedule
    return [(0, config.batch.global_size)] if schedule is None else _entries(schedule)


def as_text(value: Any) -> Any:
    """A mapping from tokens to sequences in the form of a schedule; other values unchanged."""
    return ", ".join(f"{tokens}: {size}" for tokens, size in value.items()) if isinstance(value, dict) else value


def check_text(text: str) -> str:
    """`text` if it is a schedule. Raises ValueError with problem and cure."""
    entries = _entries(text)
    if not entries:
        raise ValueError("is not a schedule: write the tokens from which each size applies, such as '0: 256, 50B: 512'")
    if entries[0][0]:
        raise ValueError(f"has no size for the first steps: begin with 0, such as '0: {entries[0][1]}'")
    for rising in zip(*entries, strict=True):
        if any(one >= other for one, other in zip(rising, rising[1:], strict=False)):
            raise ValueError("does not rise: give each size more tokens and more sequences than the one before it")
    if not entries[0][1]:
        raise ValueError("has steps without sequences: use 1 or more")
    return text


def _entries(text: str) -> list[tuple[int, int]]:
    """The pairs (tokens, sequences) of a schedule; empty if it is not one."""
    found = [_ENTRY.fullmatch(entry) for entry in text.split(",")]
    values = [(_amount(match), int(match[3])) for match in found if match]
    whole = len(values) == len(found) and all(tokens == int(tokens) for tokens, _ in values)
    return [(int(tokens), size) for tokens, size in values] if whole else []


def tokens_of(text: str) -> float:
    """A number of tokens: 15T, 1.5B or 15e12. Raises ValueError if it is none."""
    match = re.fullmatch(_TOKENS, text)
    return float(_amount(match) if match else text)


def _amount(match: re.Match[str]) -> Decimal:
    return Decimal(match[1]) * UNITS[match[2]]
