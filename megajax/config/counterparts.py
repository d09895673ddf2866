"""Our counterpart of another framework's name, for "did you mean"."""

from megajax.config.other_name import OtherName
from megajax.config.other_names import ALL


def plain(name: str) -> str:
    """A name without the dashes and capitals in which frameworks differ."""
    return name.lstrip("-").replace("-", "_").lower()


def counterpart(key: str) -> OtherName | None:
    """The counterpart of the unknown `key`: looked up whole, then by its last part."""
    whole = plain(key)
    return _BY_NAME.get(whole) or _BY_NAME.get(whole.rpartition(".")[2])


_BY_NAME = {plain(name): other for other in reversed(ALL) for name in other.names}
