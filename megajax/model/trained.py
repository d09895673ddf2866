"""What is trained: adapters alone, or all parts of a model but those that `optimizer.groups` freeze whole."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from megajax.config import Config, LoraConfig, ModelConfig
from megajax.model.lora import is_adapter
from megajax.model.parameters import parameters
from megajax.model.transformer import declared_model
from megajax.schema.fields import cached
from megajax.schema.optimizer import OptimizerGroup
from megajax.sharding import OBJECTIVE, TEACHER, VISION

LANGUAGE_MODEL, TOWER, PROJECTOR = "language model", "vision tower", "projector"
ALL_FROZEN = OptimizerGroup(parameters=("*",), learning_rate=0.0)


def part_of(name: str) -> str:
    """The part of the model, or of one with a vision tower, that a parameter belongs to."""
    if name.startswith(f"{VISION}projector."):
        return PROJECTOR
    return TOWER if name.startswith(VISION) else LANGUAGE_MODEL


def frozen_parts(config: Config) -> tuple[str, ...]:
    """The parts whose parameters all have the learning rate 0 by `optimizer.groups`: no gradients are computed."""
    return _frozen_parts(config.model, config.optimizer.groups) if config.lora.rank is None else ()


@cached
def _frozen_parts(model: ModelConfig, groups: Sequence[OptimizerGroup]) -> tuple[str, ...]:
    if all(group.learning_rate for group in groups):
        return ()
    trained: dict[str, bool] = {}
    for name in parameters(declared_model(model, LoraConfig())):
        own = (g.learning_rate for g in groups if any(fnmatchcase(name, pattern) for pattern in g.parameters))
        trained[part_of(name)] = trained.get(part_of(name), False) or bool(next(own, 1.0))
    return tuple(part for part, is_any in trained.items() if not is_any)


def is_trained(config: Config, name: str) -> bool:
    """Whether a weight of this name has a gradient."""
    if name.startswith(TEACHER):
        return False
    if name.startswith(OBJECTIVE):
        return True
    return is_adapter(name) if config.lora.rank is not None else part_of(name) not in frozen_parts(config)


def is_master(config: Config, name: str) -> bool:
    """Whether the state keeps a weight of this name in FP32: all of them, with adapters only the trained ones."""
    return is_trained(config, name) or (config.lora.rank is None and not name.startswith(TEACHER))


def trains_layers(config: Config) -> bool:
    """Whether the weights of the model's layers have gradients, and not only their adapters."""
    return config.lora.rank is None and LANGUAGE_MODEL not in frozen_parts(config)


def second_stack(config: Config) -> Config | None:
    """The config of the layers before the model's (`Config.of_second_stack`), frozen if they are."""
    if (second := config.of_second_stack) is None:
        return None
    frozen = config.model.vision is not None and (config.lora.rank is not None or TOWER in frozen_parts(config))
    groups = (ALL_FROZEN,) if frozen else ()
    return second.model_copy(update={"optimizer": config.optimizer.model_copy(update={"groups": groups})})
