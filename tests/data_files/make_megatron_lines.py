"""Makes megatron_lines.json: what bash and Megatron-LM's own parser make of tests/from_megatron/lines.

python make_megatron_lines.py CHECKOUT, with torch (CPU); CHECKOUT is one of Megatron-LM, with its history. The scripts
run in bash, their launchers are stubs that print their arguments.
"""

import argparse
import contextlib
import dataclasses
import importlib.abc
import importlib.machinery
import io
import json
import os
import subprocess
import sys
import tempfile
import typing
from pathlib import Path
from unittest.mock import MagicMock

import yaml

HERE = Path(__file__).parent
LINES = HERE.parent / "from_megatron/lines"
# Each script: its arguments and the number of devices that it starts.
SCRIPTS: dict[str, tuple[list[str], int]] = json.loads((HERE / "megatron_scripts.json").read_text())
EXAMPLE = "examples/gpt3/gpt_config.yaml"  # for --yaml-cfg; deleted in 2026
STUB = """#!/bin/bash
for ((i = 1; i <= $#; i++)); do
  if [[ "${!i}" == bash && "$*" == *" -c "* ]]; then shift $((i - 1)); exec "$@"; fi
done
printf '%s\\0' "$@" > "$STUB_OUT"
"""


def words_of(name: str, arguments: list[str]) -> list[str]:
    """The words that the launcher of a script gets."""
    with tempfile.TemporaryDirectory() as folder:
        for launcher in ("torchrun", "srun", "python", "python3", "mpirun", "hostname", "date"):
            stub = Path(folder) / launcher
            stub.write_text(STUB if launcher not in ("hostname", "date") else "#!/bin/bash\necho 0\n")
            stub.chmod(0o755)
        out = Path(folder) / "out"
        environment = {"PATH": f"{folder}:/usr/bin:/bin", "STUB_OUT": str(out), "MASTER_ADDR": "h", "MASTER_PORT": "1"}
        script = (LINES / name).read_text().replace("| tee log.txt", "").replace("2>&1 | tee log", "")
        subprocess.run(["bash", "-c", script, name, *arguments], env=environment, cwd=LINES, check=False)
        words = out.read_text().split("\0")[:-1]
    program = next(i for i, word in enumerate(words) if word.endswith(".py"))
    return words[program + 1 :]


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands for modules of Megatron-LM that need a GPU's libraries."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.startswith(
            ("megatron.core.transformer.moe.ops", "megatron.core.ssm.", "triton", "nvidia_resiliency_ext")
        ):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        module = MagicMock()
        module.__name__, module.__path__, module.__spec__ = spec.name, [], spec
        module.__version__ = "1.0"
        return module

    def exec_module(self, module):
        pass


def load(checkout: str) -> typing.Any:
    """Megatron's module of arguments."""
    import torch
    import torch.utils.flop_counter

    try:
        import torch._inductor.runtime.triton_heuristics  # noqa: F401  before triton is a stub
    except ImportError:
        pass
    typing.override = lambda function: function  # pyright: ignore
    sys.meta_path.insert(0, Absent())
    sys.path.insert(0, checkout)
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    from megatron.training import arguments  # pyright: ignore

    arguments.is_te_min_version = lambda *_: True
    arguments.get_device_arch_version = lambda: 9
    return arguments


def plain(value: typing.Any) -> typing.Any:
    """A value for JSON; classes and functions by their names."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return getattr(value, "__name__", str(value))


def parsed(arguments: typing.Any, words: list[str], world: int) -> tuple[dict[str, typing.Any], typing.Any]:
    """(Megatron's arguments of a line and some fields of its TransformerConfig, that config or None)."""
    os.environ |= {"WORLD_SIZE": str(world), "RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if "--use-megatron-fsdp" in words:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
    sys.argv = ["pretrain_gpt.py", *words]
    with contextlib.redirect_stdout(io.StringIO()):
        given = arguments.parse_args()
        arguments.validate_args(given)
    given.apply_rope_fusion = given.moe_grouped_gemm = False  # need a GPU's libraries
    found = {name: plain(value) for name, value in vars(given).items()}
    config = None
    try:
        from megatron.training.argument_utils import core_transformer_config_from_args  # pyright: ignore

        config = core_transformer_config_from_args(given)
    except Exception as error:  # noqa: BLE001
        print("  no TransformerConfig:", str(error)[:200])
    if config is not None:
        fields = [field.name for field in dataclasses.fields(config)]
        names = (
            "activation_func",
            "gated_linear_unit",
            "bias_activation_fusion",
            "num_query_groups",
            "rope_type",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "moe_layer_freq",
        )
        found |= {f"config.{name}": plain(getattr(config, name)) for name in names if name in fields}
    return found, config


def choices_of(arguments: typing.Any) -> dict[str, list[str]]:
    """The texts that Megatron's parser accepts, by the names of arguments that have few."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    arguments.add_megatron_arguments(parser)
    found = {action.dest: list(action.choices) for action in parser._actions if action.choices}
    return {dest: choices for dest, choices in found.items() if all(isinstance(choice, str) for choice in choices)}


def fields_of(configs: list[typing.Any], dests: typing.Container[str]) -> dict[str, list[typing.Any]]:
    """The fields of Megatron's configs that are no arguments: the values by default and in the lines."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig  # pyright: ignore

    found = {}
    for field in dataclasses.fields(MLATransformerConfig):
        values = [field.default, *(getattr(config, field.name, field.default) for config in configs)]
        if field.name not in dests and not any(map(callable, values)):
            found[field.name] = list(dict.fromkeys(map(plain, values)))
    return found


def example(checkout: str) -> dict[str, list[typing.Any]]:
    """The names of Megatron's own YAML file, of all of its versions, with their values."""
    git = ("git", "-C", checkout)
    versions = subprocess.run([*git, "rev-list", "HEAD", "--", EXAMPLE], capture_output=True, text=True, check=True)
    found: dict[str, list[typing.Any]] = {}
    for version in versions.stdout.split():
        text = subprocess.run([*git, "show", f"{version}:{EXAMPLE}"], capture_output=True, text=True, check=False)
        for name, value in (yaml.safe_load(text.stdout) or {}).items():
            for key, each in value.items() if isinstance(value, dict) else [(name, value)]:
                known = found.setdefault(key, [])
                known += [] if each in known and type(each) in map(type, known) else [each]
    return found


def described(arguments: typing.Any) -> dict[str, list[typing.Any]]:
    """Each flag of Megatron's parser: the name of its argument, its kind, its default."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    arguments.add_megatron_arguments(parser)
    found = {}
    for action in parser._actions:
        kind = {"_StoreTrueAction": "flag", "_StoreFalseAction": "off"}.get(type(action).__name__, "value")
        kind = (
            "many" if kind == "value" and action.nargs is not None and type(action).__name__ == "_StoreAction" else kind
        )
        for option in action.option_strings:
            own = ("off" if option.startswith("--no-") else "flag") if "BooleanOptional" in str(type(action)) else kind
            found[option] = [action.dest, own, plain(action.default)]
    return found


def main() -> None:
    checkout = sys.argv[1]
    arguments = load(checkout)
    flags = described(arguments)
    defaults = {dest: default for dest, _, default in flags.values()}
    lines, configs = [], []
    for name, (given, world) in SCRIPTS.items():
        print(name)
        words = words_of(name, given)
        found, config = parsed(arguments, words, world)
        configs += [] if config is None else [config]
        found = {key: value for key, value in found.items() if key not in defaults or value != defaults[key]}
        lines.append(f"{json.dumps(name)}: {json.dumps({'words': words, 'parsed': found})}")
    shown = [f"{json.dumps(option)}: {json.dumps(flag)}" for option, flag in flags.items()]
    others = {"choices": choices_of(arguments), "fields": fields_of(configs, defaults), "yaml": example(checkout)}
    more = "".join(f",\n{json.dumps(name)}: {json.dumps(value)}" for name, value in others.items())
    text = '{"flags": {\n' + ",\n".join(shown) + '\n},\n"lines": {\n' + ",\n".join(lines) + "\n}" + more + "}\n"
    (HERE / "megatron_lines.json").write_text(text)


if __name__ == "__main__":
    main()
