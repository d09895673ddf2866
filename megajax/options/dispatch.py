"""Dispatches: how tokens are sent to experts on other devices, declared once; all others ask these objects.

It does not import jax: parallel/experts has what each dispatch computes.
"""

import math
from dataclasses import dataclass, replace

from megajax.options.registry import AUTO, Registry

LITTLE_ROOM = 1.25  # for rows that cost time also if no token has them


@dataclass(frozen=True)
class Dispatch:
    """A way to send tokens to experts, by its declarations."""

    name: str  # for `communication.experts`
    gathers_tokens: bool = False  # each device gets all tokens; else a row goes to its expert's device only
    # The room for an expert's rows, or for those sent to a device, as a multiple of an even share. The experts compute
    # more rows in further rounds. By default any number has room.
    room: float = math.inf

    def rows_per_token(self, devices: int, experts_per_token: int) -> float:
        """The rows that are sent for each token, if the experts are divided over `devices`."""
        return devices if self.gathers_tokens else min(devices, self.room) * experts_per_token

    def has_rounds(self, devices: int) -> bool:
        """Whether experts divided over `devices` may need more than one round."""
        return devices > self.room

    def with_little_room(self) -> "Dispatch":
        """For matmuls that multiply all rows that have room."""
        return replace(self, room=min(self.room, LITTLE_ROOM)) if self.room < math.inf else self


ALL_TO_ALL = Dispatch("all_to_all", room=LITTLE_ROOM)
ALL_GATHER = Dispatch("all_gather", gathers_tokens=True, room=4)
DISPATCHES = Registry("dispatch", ALL_TO_ALL, ALL_GATHER, words=(AUTO,))


def choose_dispatch(name: str, devices: int, experts_per_token: int) -> Dispatch:
    """The dispatch of `communication.experts`, if the experts are divided over `devices`.

    An all-gather sends no more rows than an all-to-all if `experts_per_token` is at least the number of devices. On one
    host it was faster with more devices too (docs/records/log.md).
    """
    if name != AUTO:
        return DISPATCHES[name]
    return ALL_GATHER if devices <= max(8, experts_per_token) else ALL_TO_ALL
