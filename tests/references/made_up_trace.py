"""Traces as jax.profiler stores them, from events that a test makes up."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.profiler


class Event(NamedTuple):
    """An event of a line; times in ms."""

    name: str
    start: float
    end: float
    stats: dict[str, str | int] = {}


def space(planes: dict[str, dict[str, Sequence[Event]]]) -> bytes:
    """The content of a *.xplane.pb with these planes and lines."""
    text = ""
    for plane, lines in planes.items():
        names = sorted({event.name for events in lines.values() for event in events})
        stats = sorted({stat for events in lines.values() for event in events for stat in event.stats})
        text += f'planes {{ name: "{plane}"\n'
        for line, events in lines.items():
            text += f'lines {{ name: "{line}"\n'
            for e in events:
                values = "".join(
                    f"stats {{ metadata_id: {stats.index(stat) + 1} "
                    + (f'str_value: "{value}" }}' if isinstance(value, str) else f"uint64_value: {value} }}")
                    for stat, value in e.stats.items()
                )
                times = f"offset_ps: {round(e.start * 1e9)} duration_ps: {round((e.end - e.start) * 1e9)}"
                text += f"events {{ metadata_id: {names.index(e.name) + 1} {times} {values} }}\n"
            text += "}\n"
        for kind, known in (("event_metadata", names), ("stat_metadata", stats)):
            for i, name in enumerate(known, 1):
                text += f'{kind} {{ key: {i} value {{ id: {i} name: "{name}" }} }}\n'
        text += "}\n"
    return jax.profiler.ProfileData.text_proto_to_serialized_xspace(text)
