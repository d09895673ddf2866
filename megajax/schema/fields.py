"""Types of config values with their limits, and the base class of all sections."""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from megajax.errors import ConfigError, shown
from megajax.files import read_text, why_unreadable
from megajax.schema import amounts

AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")
MAX_BLEND_BYTES = 2**24  # of a file with a blend
BATCH_AXES = ("data", "fsdp", "expert")  # axes that divide the sequences of a batch

# Upper limits are far above any sensible value, to catch typing errors: larger counts would overflow 32 bits, exhaust
# the host's memory, or make a check run for minutes.
INT32 = 2**31 - 1
Count = Annotated[int, Field(ge=1, le=INT32)]
UNKNOWN_STEPS = INT32  # run.steps with run.epochs, until the data is open
# Printed as null while it follows from unknown steps; a tenth of them is the default of the final decay.
Steps = Annotated[
    Count, PlainSerializer(lambda steps: None if steps in (UNKNOWN_STEPS, UNKNOWN_STEPS // 10) else steps)
]
Port = Annotated[int, Field(ge=1, le=65535)]
CountOrZero = Annotated[int, Field(ge=0, le=INT32)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 2)]  # dropout uses the seed plus 1
Layers = Annotated[int, Field(ge=1, le=1000)]
Width = Annotated[int, Field(ge=1, le=2**20)]
MlpWidth = Annotated[int, Field(ge=1, le=2**22)]
MlpWidthOrZero = Annotated[int, Field(ge=0, le=2**22)]
Experts = Annotated[int, Field(ge=1, le=2**16)]
Vocabulary = Annotated[int, Field(ge=1, le=2**24)]
Sequences = Annotated[int, Field(ge=1, le=2**24)]
Tokens = Annotated[int, Field(ge=1, le=2**27)]
HistoryLength = Annotated[int, Field(ge=1, le=2**16)]
PowerOfTwo = Annotated[int, Field(ge=0, le=100)]
Share = Annotated[float, Field(ge=0, le=1)]
Workers = Annotated[int, Field(ge=0, le=1024)]
Positive = Annotated[float, Field(gt=0)]
AboveOne = Annotated[float, Field(gt=1)]
PositiveOrZero = Annotated[float, Field(ge=0)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Seconds = Annotated[float, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]


def cached[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """`function`, which remembers its last results; its arguments are sections of configs, which are frozen."""
    remembered: Any = functools.lru_cache(maxsize=64)(function)
    return remembered


def derived(rule: Callable[[dict[str, Any]], Any], shown: str, description: str) -> Any:
    """A key whose default is `rule` of the keys above it, `shown` in words; null means the default."""
    return Field(default_factory=rule, description=description, json_schema_extra={"derived": shown})


def _axis_size(value: int) -> int:
    if value < 1 and value != -1:
        raise ValueError("is not a mesh size: use 1 or more, or -1 on one axis to take all remaining devices")
    return value


def _batches(value: Any) -> Any:
    if value != "all" and (type(value) is not int or not 0 <= value <= INT32):
        raise ValueError("is not a number of batches: use 0 or more, or all")
    return value


def _each_once(names: tuple[str, ...]) -> tuple[str, ...]:
    for number, name in enumerate(names):
        if name in names[:number]:
            raise ValueError(f"names {name} twice: name each once")
    return names


def _sorted_axes(axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in AXES if axis in axes)


def _split_weights(value: str) -> str:
    try:
        weights = [float(part) for part in value.split(",")]
    except ValueError:
        weights = []
    if len(weights) != 3 or weights[0] <= 0 or not all(0 <= weight < float("inf") for weight in weights):
        raise ValueError("is not a split: write the weights of train, valid and test, such as '969,30,1'")
    return value


def shortest_pattern[Kind](pattern: tuple[Kind, ...], num_layers: int) -> tuple[Kind, ...]:
    """The shortest pattern that gives each of `num_layers` layers the same kind as `pattern` repeated.

    A pattern longer than the model is returned unchanged; a check raises the error.
    """
    if len(pattern) > num_layers:
        return pattern
    layers = [pattern[i % len(pattern)] for i in range(num_layers)]
    periods = range(1, len(pattern) + 1)
    return pattern[: next(n for n in periods if all(layers[i] == layers[i % n] for i in range(num_layers)))]


def _shortest(pattern: tuple[str, ...] | None, info: ValidationInfo) -> tuple[str, ...] | None:
    if pattern is None or "num_layers" not in info.data:
        return pattern
    return shortest_pattern(pattern, info.data["num_layers"])


def path_or_sources(value: Any) -> Any:
    """`value`; "0.7 a 0.3 b" and [a, b] as a list of {prefix, weight}; for other forms an error with such a list."""
    if isinstance(value, dict) and value.keys() == {"file"}:
        return _sources_in(value["file"])
    words = value.split() if isinstance(value, str) else value
    if isinstance(words, dict) and "prefix" not in words and all(map(_number, words.values())):
        words = [word for path, weight in words.items() for word in (weight, path)]  # {path: weight}
    elif isinstance(words, dict):
        words = [words]
    if not isinstance(words, list) or not words:
        return value
    if len(words) % 2 == 0 and all(_number(weight) and isinstance(path, str) for weight, path in _pairs(words)):
        if isinstance(value, str):
            return [{"prefix": path, "weight": float(weight)} for weight, path in _pairs(words)]
        sources = [f"{{prefix: {path}, weight: {weight}}}" for weight, path in _pairs(words)]
    elif isinstance(value, str) and len(words) > 1 and _number(words[0]):
        raise ValueError("begins with a weight, but its weights and paths do not alternate: write '0.7 a 0.3 b'")
    elif isinstance(value, str) or not all(isinstance(word, str) for word in words):
        return value
    elif any(map(_number, words)):
        return value
    else:
        return [{"prefix": path, "weight": None} for path in words]
    raise ValueError(f"is not a path or a list of sources: write [{', '.join(sources)}]")


def _sources_in(file: Any) -> Any:
    """The sources in a file as Megatron's --data-args-path has them: weights and paths, or paths, between spaces."""
    try:
        words = read_text(Path(file), MAX_BLEND_BYTES).split()
    except TypeError:
        raise ValueError("is not the path of a file: write one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"names a file that cannot be read ({why_unreadable(error)}): correct the path") from None
    if words and not any(map(_number, words)):
        return [{"prefix": path, "weight": None} for path in words]
    if not words or len(words) % 2 or not all(_number(w) and not _number(p) for w, p in _pairs(words)):
        raise ValueError("names a file that has no blend, such as '0.7 a 0.3 b' or 'a b': write one into it")
    return [{"prefix": path, "weight": float(weight)} for weight, path in _pairs(words)]


def all_or_no_weights(sources: Any) -> Any:
    """`sources`. Raises ValueError if some of them have a weight and some have null."""
    if not isinstance(sources, str) and len({source.weight is None for source in sources}) > 1:
        raise ValueError("has sources with and without a weight: give each a weight, or null to all")
    return sources


def _pairs(words: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(words[::2], words[1::2], strict=True))


def _number(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


AxisSize = Annotated[int, Field(le=INT32), AfterValidator(_axis_size)]
ExpertAxis = Literal["data", "fsdp", "expert", "context", "tensor"]
EachOnce = AfterValidator(_each_once)  # of a list of names
ExpertAxes = Annotated[
    tuple[ExpertAxis, ...], Field(strict=False, min_length=1), EachOnce, AfterValidator(_sorted_axes)
]
Split = Annotated[str, AfterValidator(_split_weights)]
BatchSchedule = Annotated[
    str,
    BeforeValidator(amounts.as_text, json_schema_input_type=str | dict[str, int]),
    AfterValidator(amounts.check_text),
]
Batches = Annotated[CountOrZero | Literal["all"], BeforeValidator(_batches)]
BlockPattern = Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None
LayerPattern = Annotated[
    Annotated[tuple[Literal["global", "local"], ...], Field(strict=False, min_length=1)] | None,
    AfterValidator(_shortest),
]
RopeFactors = Annotated[tuple[Positive, ...], Field(strict=False, min_length=1)] | None
RopePattern = Annotated[
    Annotated[tuple[Literal["rope", "none"], ...], Field(strict=False, min_length=1)] | None,
    AfterValidator(_shortest),
]


class Section(BaseModel):
    """Base class of all sections: no unknown keys, no conversion of types, immutable."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_means_default(cls, values: Any) -> Any:
        """Leave out null where it means the default: of derived keys, subsections and mappings."""
        if not isinstance(values, dict):
            return values
        fields = cls.model_fields.items()
        those = {name for name, f in fields if f.json_schema_extra or f.default_factory or f.default == {}}
        return {key: value for key, value in values.items() if value is not None or key not in those}


class HashableSettings(dict[str, Any]):
    """Settings with a hash, as sections have."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(self))


# Settings of the classes of extensions, by the name of each
SettingsByName = Annotated[dict[str, dict[str, Any]], AfterValidator(HashableSettings)]


class Registered(Section):
    """A section that names a class of an extension (`kind`) and has the `settings` of it."""

    def __hash__(self) -> int:
        return hash(repr(self))


def check_attributes(made: type[Any], base: type[Any]) -> None:
    """Raise ConfigError if an attribute of `made` has another type than the ClassVar of that name in its `base`."""
    for name, hint in get_type_hints(base, include_extras=True).items():
        if get_origin(hint) is not ClassVar or not hasattr(made, name):
            continue
        value, (wanted,) = getattr(made, name), get_args(hint)
        try:
            TypeAdapter(wanted, config=ConfigDict(strict=True)).validate_python(value)
        except ValidationError as error:
            reason = error.errors(include_url=False)[0]["msg"].removeprefix("Input ")
            place = f"{base.__module__}.{base.__qualname__}"
            problem = f"{made.__name__}.{name} is {shown(repr(value))}, which {reason}"
            raise ConfigError(f"{problem}: correct it as {place} says.") from None
