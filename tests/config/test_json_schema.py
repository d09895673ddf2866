"""The JSON schema for editors: it accepts valid configs and rejects the mistakes that a schema can detect."""

import json
from functools import cache
from pathlib import Path

import jsonschema
import pytest
import yaml

from megajax.config import load_config
from megajax.config.json_schema import json_schema, main
from megajax.schema.tree import Loader

CONFIGS = sorted((Path(__file__).parents[2] / "configs").rglob("*.yaml"))


@cache
def schema() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json_schema())


def mistakes(text: str) -> list[str]:
    return [error.message for error in schema().iter_errors(yaml.load(text, Loader))]


def test_the_command_prints_a_valid_schema(capsys):
    assert main([]) == 0
    printed = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(printed)
    assert printed == json_schema()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_file_in_configs_is_accepted(path: Path):
    assert mistakes(path.read_text()) == []


def test_a_printed_config_is_accepted():
    assert mistakes(load_config(CONFIGS[0]).to_yaml()) == []


ACCEPTED = [
    "include: [a.yaml, b.yaml]",
    "mesh:",  # an empty section
    "model: {router: null}\nobjective: {settings: null}",  # and mappings in one
    "model: {head_dim: null}",  # the derived value
    "data: {train: [{prefix: a}, {prefix: b, weight: 0.5}], valid: c}",
]
REFUSED = [
    "modle: {}",
    "model: {num_head: 8}",
    "model: {num_layers: '4'}",
    "model: {norm: batch}",
    "run: {steps: 0}",
    "run: {seed: null}",
    "include: 3",
    "data: {train: [{weight: 1}, a]}",
]


@pytest.mark.parametrize("text", ACCEPTED)
def test_what_a_file_may_hold_is_accepted(text: str):
    assert mistakes(text) == []


@pytest.mark.parametrize("text", REFUSED)
def test_a_mistake_is_refused(text: str):
    assert mistakes(text)
