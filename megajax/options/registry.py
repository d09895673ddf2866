"""Registries of options that are objects: the built-in ones of a key, and those that extensions add.

In the schema such a key has the type `Annotated[str, registry]`.
"""

from typing import Any, Protocol

from pydantic.fields import FieldInfo
from pydantic_core import PydanticKnownError, core_schema

from megajax.errors import ConfigError

AUTO = "auto"  # the value of a key whose option follows from the rest of the config


class Option(Protocol):
    @property
    def name(self) -> str: ...


def _named(value: Any) -> Any:
    """A class or function by its name, which is the same when its module or cell runs again."""
    name = getattr(value, "__qualname__", None)
    return value if name is None else (value.__module__, name)


class Registry[Registered: Option](dict[str, Registered]):
    """The options of a key, by name."""

    def __init__(self, kind: str, *options: Registered, words: tuple[str, ...] = ()):
        """`kind`: of the options, for sentences. `words`: values of the key that name none, such as auto."""
        super().__init__({option.name: option for option in options})
        self.kind, self.words = kind, words
        self.added = dict[str, list[Any]]()  # what extensions have registered by name, with classes by their names

    @staticmethod
    def of(field: FieldInfo) -> "Registry | None":
        """The registry of the options that a key of the schema names."""
        return next((each for each in field.metadata if isinstance(each, Registry)), None)

    def add(self, option: Registered, *made: Any) -> None:
        """Add an extension's option; before the config is loaded. Raises ConfigError for a name that is taken.

        `made` are its classes or functions that are no fields of it. The same again, as from a cell of a notebook that
        runs twice, takes the place of the first.
        """
        if not option.name.isidentifier():
            raise ConfigError(f"{option.name!r} is not a name of a {self.kind}: use letters, digits and _.")
        own = [_named(value) for value in (type(option), *vars(option).values(), *made)]
        if option.name in self.words or (option.name in self and self.added.get(option.name) != own):
            raise ConfigError(f"the {self.kind} {option.name} exists already: choose another name.")
        self.added[option.name] = own
        self[option.name] = option

    @property
    def choices(self) -> list[str]:
        """The values of the key."""
        return [*self.words, *self]

    def check(self, value: Any) -> str:
        """`value`, if it is a choice."""
        if isinstance(value, str) and value in self.choices:
            return value
        if not self.choices:
            raise ValueError(f"is not a registered {self.kind}: name the module that registers it in run.extensions")
        raise PydanticKnownError("literal_error", {"expected": ", ".join(f"'{choice}'" for choice in self.choices)})

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"enum": self.choices}
