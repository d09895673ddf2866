"""The keys of the schema."""

from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megajax.schema.config import Config

AS_MODEL = "teacher.model"  # has the keys of the section model


def keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every dotted key of the schema with its field, in order, AS_MODEL as one; N is an index into a list."""
    for name, field in model.model_fields.items():
        if prefix:
            yield f"{prefix}{name}", field
        inner, index = class_in(field.annotation)
        if inner is not None and f"{prefix}{name}" != AS_MODEL:
            yield from keys(inner, f"{prefix}{name}.{index}")


def class_in(annotation: Any, index: str = "") -> tuple[type[BaseModel] | None, str]:
    """The section class inside a field's type, and "N." if it is the type of a list's items."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, index
    if get_origin(annotation) is tuple:
        index = "N."
    found = (class_in(item, index) for item in get_args(annotation))
    return next((pair for pair in found if pair[0] is not None), (None, ""))
