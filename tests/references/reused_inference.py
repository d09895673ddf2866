"""Generators and scorers of models with equal settings share their programs, within a test process.

A command loads its model again in each call, and so does each test. An own copy of the first model, without weights,
traces the programs, so changed attributes of a model reach no other one.
"""

import copy
import json
from collections.abc import Callable
from typing import Any

from reused_programs import ReusedPrograms

from megajax.inference.generation import Generator
from megajax.inference.language_model import LanguageModel
from megajax.inference.scoring import Scorer

# A model's attributes that programs do not depend on
OF_HOST = {"weights", "tokenizer", "template_arguments", "folder", "begin_token", "end_token", "images"}
OF_HOST |= {"chat_template", "_remote_pictures", "_logits"}
TRACED = {"config", "mesh", "speculate", "max_length", "stop_tokens", "model", "kernels"}


def share_inference(reused: ReusedPrograms) -> None:
    """While `reused` is active."""
    _share(reused, Generator, ("_prefill", "_decode"), lambda made: [made.sampling, made.drafter is not None])
    _share(reused, Scorer, ("_program",), lambda _: [])


def _share(reused: ReusedPrograms, kind: type, programs: tuple[str, ...], settings: Callable[[Any], list]) -> None:
    own: Callable = vars(kind)["__init__"]

    def shared(made: Any, model: Any, *args: Any, **options: Any) -> None:
        own(made, model, *args, **options)
        if not reused.active or type(model) is not LanguageModel or vars(model).keys() - OF_HOST - TRACED:
            return
        key = [kind.__name__, *facts_of(model), *settings(made)]

        def make() -> Any:
            alone, first = copy.copy(model), object.__new__(kind)
            own(first, alone, *args, **options)
            del alone.weights
            return first

        first = reused.kept(json.dumps(key), make)
        for name in programs:
            setattr(made, name, getattr(first, name))

    kind.__init__ = shared  # pyright: ignore[reportAttributeAccessIssue]


def facts_of(model: LanguageModel) -> list:
    """What a program depends on besides its arguments."""
    devices = str(model.mesh.devices.flatten())
    sizes = [model.speculate, model.max_length, [*map(int, model.stop_tokens)]]
    return [model.config.model_dump_json(), str(model.mesh), devices, repr(model.kernels), *sizes]
