"""The position of a run in its data."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megajax.config.schema import Config


def samples_before(config: "Config", step: int) -> int:
    """The number of training samples that the first `step` steps of a run read."""
    return step * config.batch.global_size
