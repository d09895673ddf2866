"""The number of steps of `run.epochs`, which follows from the open data."""

from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING, Any

from megajax.config.load import with_steps
from megajax.data.chat_samples import ChatSamples
from megajax.data.samples import Samples, sources_in
from megajax.errors import InputError, counted
from megajax.schema.batch_schedule import BatchSizes
from megajax.schema.fields import UNKNOWN_STEPS

if TYPE_CHECKING:
    from megajax.config import Config


def resolve_epochs(config: "Config", train: Samples) -> "Config":
    """The config with the steps in which a run reads `run.epochs` passes over `train`; without them itself.

    The last step is filled with samples of the next pass. Raises InputError for too many steps, or for other ones than
    `run.steps`, which the record of a run has.
    """
    run = config.run
    if run.epochs is None:
        return config
    given = f"run.epochs={run.epochs:g} ({config.where('run.epochs')})"
    samples = ceil(Fraction(str(run.epochs)) * sum(map(_samples_per_epoch, sources_in(train))))
    steps = BatchSizes.of(config).steps_for(samples)
    if steps >= UNKNOWN_STEPS:
        raise InputError(f"{given} is {counted(steps, 'step')}, more than a run can have: use fewer.")
    if run.steps not in (UNKNOWN_STEPS, steps):
        raise InputError(f"{given} is {counted(steps, 'step')}, but run.steps={run.steps}: remove one of the two.")
    return with_steps(config, steps)


def _samples_per_epoch(source: Any) -> Fraction:
    """Of chats, or of documents, whose samples may begin in one epoch and end in the next."""
    if isinstance(source, ChatSamples):
        return Fraction(len(source))
    return Fraction(source.num_tokens, source.tokens_per_sample)
