"""A mesh as text in an option of a command: tensor=4,pipeline=2."""

from megajax.config.counterparts import counterpart
from megajax.errors import ConfigError, shown
from megajax.files import is_number
from megajax.schema.fields import AXES


def read_mesh(text: str, setting: str, rest: bool = False) -> dict[str, int]:
    """The sizes of the axes that `text` names; with `rest` a size may be -1. ConfigError names `setting`."""
    sizes: dict[str, int] = {}
    for entry in text.split(",") if text else ():
        axis, _, size = (part.strip() for part in entry.partition("="))
        given = f"{setting}={shown(text)}"
        if axis not in AXES:
            other = counterpart(axis)
            meant = other.ours.removeprefix("mesh.") if other else ""
            cure = f"did you mean {meant}?" if meant in AXES else f"the axes are {', '.join(AXES)}."
            raise ConfigError(f"{given}: {shown(axis)} is no axis of a mesh: {cure}")
        if not (rest and size == "-1" or is_number(size) and int(size) > 0):
            raise ConfigError(f"{given}: {shown(entry)} is no axis with a size: write tensor=2,fsdp=2, for example.")
        if axis in sizes:
            raise ConfigError(f"{given} has {axis} twice: leave one of them out.")
        sizes[axis] = int(size)
    return sizes
