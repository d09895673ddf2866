"""The sequences of each step (`batch.schedule`), and a run's position in its data."""

from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

from megajax.schema.config import Config


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
    def of(cls, config: Config, start: Position = Position()) -> "BatchSizes":  # noqa: B008  a tuple
        """The sizes of a run that begins or continues at `start`.

        A size of `batch.schedule` applies from the first step on that begins at its number of tokens or later.
        """
        length, schedule = config.batch.sequence_length, config.batch.sizes_by_tokens
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


def samples_before(config: Config, step: int) -> int:
    """The number of training samples that the first `step` steps of a config's run read."""
    return BatchSizes.of(config).samples_before(step)
