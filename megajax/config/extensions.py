"""The modules and files of `run.extensions`, imported before the config is checked, and settings of their classes."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from megajax.config.sentences import fail, listed
from megajax.errors import ConfigError, UserError
from megajax.layout.sublayers import registered_parts
from megajax.options.registered import HOOKS
from megajax.schema.config import Config
from megajax.schema.fields import Section
from megajax.schema.tree import show

SUFFIX = ".py"


def import_extensions(names: Sequence[str], location: str = "default", run_dir: Path | None = None) -> list[str]:
    """Import modules by name, or files by path; returns the names to record, a file's path absolute.

    A module is looked for in the working directory too. `run_dir` is the run whose recorded config names them: code
    inside it is not imported, since the directory may come from someone else. Raises ConfigError if there is none of a
    name, or if it cannot be imported.
    """
    if names and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return [_import(name, f"run.extensions has {name} ({location})", run_dir) for name in names]


def _import(name: str, setting: str, run_dir: Path | None) -> str:
    path = Path(name).absolute() if name.endswith(SUFFIX) else None
    sources = [str(path)] if path else _sources(name)
    if run_dir is not None and any(Path(each).resolve().is_relative_to(run_dir.resolve()) for each in sources):
        cure = "move it elsewhere, read it, and name it there"
        raise ConfigError(f"{setting}, which is inside the run's directory, where code is not trusted: {cure}.")
    had_started = jax_has_started()
    try:
        if path is not None:
            _import_file(path, setting)
        else:
            importlib.import_module(name)
    except UserError:
        raise
    except ModuleNotFoundError as error:
        if path is not None or error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(f"{setting}, which imports {error.name}, and there is none: install it.") from error
        cure = "start in its directory, add that to PYTHONPATH, or give the path of a .py file"
        raise ConfigError(f"{setting}, but there is no module {error.name} on Python's path: {cure}.") from None
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{setting}, which ends in {type(error).__name__}: {error}: correct it.") from error
    if jax_has_started() and not had_started:
        problem = f"{setting}, whose import makes jax arrays, so jax starts before its flags are set"
        raise ConfigError(f"{problem}: make the arrays inside a function, or with NumPy.")
    return str(path or name)


def file_of(name: str) -> Path | None:
    """The file of an imported extension; None for one that has none, such as a namespace package."""
    module = sys.modules.get(Path(name).stem if name.endswith(SUFFIX) else name)
    path = getattr(module, "__file__", None)
    return Path(path) if path else None


def jax_has_started() -> bool:
    """Whether jax has looked for its devices; then XLA's flags have no effect."""
    if "jax" not in sys.modules:
        return False
    from megajax.jax_internals import xla_bridge

    return xla_bridge.backends_are_initialized()


def _sources(name: str) -> list[str]:
    """The file of a module by name, or of its outermost package, which is not imported; or a package's directories."""
    try:
        spec = importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError):
        return []
    return [] if spec is None else [spec.origin] if spec.origin else [*(spec.submodule_search_locations or ())]


def _import_file(path: Path, setting: str) -> ModuleType:
    """The module of a file, under the file's name, so that other processes can find its classes."""
    if not path.is_file():
        raise ConfigError(f"{setting}, but there is no file {path}: correct the path, or bring the file back.")
    name = path.stem
    loaded = sys.modules.get(name)
    source = getattr(loaded, "__file__", None) or "built in"
    others = [source] if loaded else [each for each in _sources(name) if not Path(each).is_dir()]
    if others:
        if Path(others[0]).resolve() != path.resolve():
            raise ConfigError(f"{setting}, but {name} is another module's name ({others[0]}): rename the file.")
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def settings_of(config: Config, registered: Any, section: str) -> Any:
    """`SECTION.settings` as the `Settings` of what is `registered`. Raises ConfigError for a wrong one."""
    chosen: Any = config
    for name in section.split("."):
        chosen = getattr(chosen, name)
    return _validated(config, registered, f"{section}.settings", chosen.settings, f"{section}.kind")


def settings_of_hook(config: Config, name: str) -> Any | None:
    """`run.hook_settings` of a hook as its `Settings`; None if it has none. Raises ConfigError for a wrong one."""
    values = config.run.hook_settings.get(name, {})
    return _validated(config, HOOKS[name].make, f"run.hook_settings.{name}", values, "run.hooks")


def check_hook_settings(config: Config) -> None:
    """Raise ConfigError for wrong settings, and for those of a hook that `run.hooks` does not name."""
    for name in config.run.hooks:
        settings_of_hook(config, name)
    _check_names(config, "run.hook_settings", config.run.hook_settings, config.run.hooks, "run.hooks", "hook")


def check_sublayer_settings(config: Config) -> None:
    """The same for `model.sublayer_settings` and the sublayers of the model's blocks."""
    key, given, parts = "model.sublayer_settings", config.model.sublayer_settings, registered_parts(config.model)
    for name, part in parts.items():
        _validated(config, part, f"{key}.{name}", given.get(name, {}), "model.block_pattern")
    _check_names(config, key, given, parts, "model.block_pattern", "block with a registered sublayer")


def _check_names(
    config: Config, key: str, given: Mapping[str, Any], known: Collection[str], chosen: str, what: str
) -> None:
    for name in given:
        if name not in known:
            cure = f"add it there, or remove {key}.{name}"
            problem = f"{key}.{name} is not read: {chosen} names no {what} {name}"
            fail(config, problem, cure, *(f"{key}.{name}.{each}" for each in given[name]), f"{key}.{name}", key)


def _validated(config: Config, registered: Any, key: str, values: Mapping[str, Any], chosen: str) -> Any | None:
    """The `values` of `key` as the `Settings` of what the key `chosen` names; None if it has none."""
    settings, owner = getattr(registered, "Settings", None) or Section, getattr(registered, "__name__", registered)
    if not (isinstance(settings, type) and issubclass(settings, Section)):
        problem = f"{owner}.Settings is no section: derive it from megajax.schema.fields.Section"
        raise ConfigError(f"{problem}, class Settings(Section).")
    try:
        valid = settings.model_validate(dict(values))
        return None if settings is Section else valid
    except ValidationError as error:
        mistake = error.errors(include_url=False)[0]
    name = ".".join(map(str, mistake["loc"]))
    known = [*settings.model_fields]
    own = f"it has {listed(known, 'and')}" if known else "it has none"
    if mistake["type"] == "extra_forbidden":
        fail(config, f"{key}.{name} is no setting of {owner}", own, f"{key}.{name}", key)
    if mistake["type"] == "missing":
        fail(config, f"{key}.{name} is not set", "add it", chosen)
    problem = f"{key}.{name}={show(mistake['input'])} is wrong: {mistake['msg'][:1].lower()}{mistake['msg'][1:]}"
    fail(config, problem, "correct it", f"{key}.{name}", key)
