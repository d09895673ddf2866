"""Messages between the processes of a run: texts in the key-value store of jax's coordinator.

They need no devices, so they work before jax's backend has started, in any thread, and while the devices are busy.
"""

from typing import Any

FOR_EVER = 365 * 24 * 3600.0  # seconds


class Failure(Exception):
    """Of each method: there is no such value (in time), or the coordinator is gone."""


class Messages:
    """Texts by name in one directory of the store."""

    def __init__(self, client: Any, directory: str):
        self._client, self.directory = client, directory

    def post(self, name: str, text: str, again: bool = False) -> None:
        """Set a text; a Failure if there is one of this name already, unless `again`."""
        self._call("key_value_set", self._key(name), text, allow_overwrite=again)

    def read(self, name: str) -> str:
        """A text that is there."""
        return self._call("key_value_try_get", self._key(name))

    def read_all(self) -> dict[str, str]:
        """All texts by name."""
        return {key.rpartition("/")[2]: text for key, text in self._call("key_value_dir_get", self._key())}

    def wait(self, name: str, seconds: float = FOR_EVER) -> str:
        """A text that may come later."""
        return self._call("blocking_key_value_get", self._key(name), int(1000 * seconds))

    def meet(self, seconds: float) -> None:
        """Wait until all processes call this, which each may do once."""
        self._call("wait_at_barrier", self._key("met"), int(1000 * seconds))

    def remove(self) -> None:
        """Remove the directory with all its texts."""
        self._call("key_value_delete", self._key())

    def _key(self, name: str = "") -> str:
        return f"megajax/{self.directory}/{name}".rstrip("/")

    def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        try:
            return getattr(self._client, method)(*arguments, **named)
        except RuntimeError as error:  # jax's; this module does not import it
            raise Failure(str(error)) from None
