"""Dispatches: how tokens are sent to experts on other devices, declared once; all others ask these objects.

It does not import jax: parallel/experts has what each dispatch computes.
"""

from dataclasses import dataclass

from megajax.options.registry import AUTO, Registry

ROOM = 1.25  # of an all-to-all's blocks; see `Dispatch.room`


@dataclass(frozen=True)
class Dispatch:
    """A way to send tokens to experts, by its declarations."""

    name: str  # for `communication.experts`
    room: float | None  # rows sent to each device, as a multiple of an even share; None: each device gets all tokens

    @property
    def gathers_tokens(self) -> bool:
        """Whether each device gets all tokens; else an assignment's row is sent to its expert's device only."""
        return self.room is None

    def rows_per_token(self, devices: int, experts_per_token: int) -> float:
        """The rows that are sent for each token, if the experts are divided over `devices`."""
        return devices if self.room is None else min(devices, self.room) * experts_per_token


ALL_TO_ALL = Dispatch("all_to_all", room=ROOM)
ALL_GATHER = Dispatch("all_gather", room=None)
DISPATCHES = Registry("dispatch", ALL_TO_ALL, ALL_GATHER, words=(AUTO,))


def choose_dispatch(name: str, devices: int, experts_per_token: int) -> Dispatch:
    """The dispatch of `communication.experts`, if the experts are divided over `devices`.

    An all-gather sends no more rows than an all-to-all if `experts_per_token` is at least the number of devices. On one
    host it was faster with more devices too (docs/records/log.md).
    """
    if name != AUTO:
        return DISPATCHES[name]
    return ALL_GATHER if devices <= max(8, experts_per_token) else ALL_TO_ALL
