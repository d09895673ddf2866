"""Records in a run directory: the config, its earlier versions with their steps, and the tokenizer."""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megajax.checkpoint.storage import (
    SUBDIRECTORY,
    checkpoint_folder,
    complete_steps,
    lead_to,
    leads_elsewhere,
    move,
)
from megajax.config import Config
from megajax.config.extensions import SUFFIX, file_of
from megajax.data import tokenizers
from megajax.errors import ConfigError
from megajax.files import CONFIG, METRICS, is_number, replace_copy, replace_text
from megajax.hf import beside
from megajax.schema.tree import leaves, read_file, show

CONFIGS, EXTENSIONS, SET_ASIDE = "configs", "extensions", "set_aside"


def previous_config(run_dir: Path) -> dict[str, Any]:
    """The values of the last start's `config.yaml`, by section; empty if there is no readable one."""
    if not (run_dir / CONFIG).is_file():
        return {}  # `read_file` looks for files with similar names
    try:
        values = read_file(run_dir / CONFIG).values
    except ConfigError:
        return {}
    return {section: keys for section, keys in values.items() if isinstance(keys, dict)}


def changed_keys(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """`key before → after` for each key whose value differs, or that only one of them has."""
    old, new = ({key: value for key, value in leaves(values) if value != {}} for values in (before, after))
    return [
        f"{key} {show(old.get(key))} → {show(new.get(key))}" for key in {**new, **old} if old.get(key) != new.get(key)
    ]


def record_start(run_dir: Path, config: Config, step: int, new: bool, say: Callable[[str], None]) -> None:
    """Record a start at `step`: set newer checkpoints aside, write the config, and copy the tokenizer.

    A `new` run does not resume; it also keeps the files beside its first weights. `say` prints a line.
    """
    before = previous_config(run_dir)
    changed = changed_keys(before, config.model_dump(mode="json")) if before else []
    if step and changed:
        say(f"changed since the last start: {'; '.join(changed)}")
    later = [other for other in complete_steps(run_dir) if other > step]
    if later:
        say(f"checkpoints after step {step} were set aside in {set_aside(run_dir, step, later)}")
    write_config(run_dir, config, step)
    if new:
        keep_model_files(run_dir, config)
    keep_tokenizer(run_dir, config)
    keep_extensions(run_dir, config, say)


def write_config(run_dir: Path, config: Config, step: int) -> None:
    """Write `config.yaml`, and `configs/STEP.yaml` if `config` differs from the previous one.

    configs/STEP.yaml is the config of the steps after STEP, up to that of the next file.
    """
    before, text = previous_config(run_dir), config.to_yaml()
    history = run_dir / CONFIGS
    history.mkdir(exist_ok=True)
    later = [path for path in history.glob("*.yaml") if is_number(path.stem) and int(path.stem) > step]
    if step == 0 or later or before != config.model_dump(mode="json"):
        if before and step > 0 and not any(history.iterdir()):
            replace_copy(run_dir / CONFIG, history / "0.yaml")
        for path in later:
            path.unlink()  # these steps were lost and are now repeated
        replace_text(history / f"{step}.yaml", text)
        replace_text(run_dir / CONFIG, text)


def keep_tokenizer(run_dir: Path, config: Config) -> None:
    """Copy the tokenizer and the chat template into the run directory, where `generate` looks for them first."""
    spec, template = config.data.tokenizer, config.data.chat_template
    if spec is not None and Path(spec).exists():
        tokenizers.keep_tokenizer(spec, run_dir)
    if config.data.kind == "chat" and template is not None and Path(template).exists():
        replace_copy(Path(template), run_dir / "chat_template.jinja")


def keep_extensions(run_dir: Path, config: Config, say: Callable[[str], None]) -> None:
    """Copy the files of `run.extensions` to `extensions/`, as a record; says which differ from the last start's."""
    for name in config.run.extensions:
        source = file_of(name)
        if source is None:
            continue
        copy = run_dir / EXTENSIONS / (source.name if name.endswith(SUFFIX) else f"{name}{SUFFIX}")
        copy.parent.mkdir(exist_ok=True)
        if copy.exists() and copy.read_bytes() != source.read_bytes():
            say(f"changed since the last start: {name} of run.extensions")
        replace_copy(source, copy)


def keep_model_files(run_dir: Path, config: Config) -> None:
    """Copy the files beside the weights of `checkpoint.init_from`: tokenizer, settings for generation, special tokens.

    Not if `data.tokenizer` is another tokenizer than the one there.
    """
    source = Path(config.checkpoint.init_from or "")
    if source.parent.name == SUBDIRECTORY:  # RUN/checkpoints/STEP
        source = source.parent.parent
    if config.checkpoint.init_from is not None and beside.is_its_tokenizer(source, config.data.tokenizer):
        beside.keep(source, run_dir)


def set_aside(run_dir: Path, step: int, later_steps: list[int]) -> str:
    """Move the checkpoints of `later_steps` to a new directory, since the run goes back to `step`; returns its path.

    metrics.jsonl and the configs are copied there too, since the run overwrites its logs after `step`.
    """
    checkpoints, elsewhere = checkpoint_folder(run_dir), leads_elsewhere(run_dir)
    places = [run_dir / SET_ASIDE, *([checkpoints / SET_ASIDE] if elsewhere else [])]
    numbers = [int(path.name) for place in places for path in place.glob("*") if is_number(path.name)]
    target = run_dir / SET_ASIDE / str(max(numbers, default=0) + 1)
    target.mkdir(parents=True)
    folder = target / SUBDIRECTORY
    if elsewhere:  # `checkpoint.dir` may be on another disk, so they stay there
        folder = checkpoints / SET_ASIDE / target.name
        lead_to(folder, target / SUBDIRECTORY)
    if isinstance(folder, Path):  # a bucket has no directories
        folder.mkdir(parents=True)
    for name in (CONFIG, METRICS):
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(run_dir / name, target / name)
    with contextlib.suppress(FileNotFoundError):
        shutil.copytree(run_dir / CONFIGS, target / CONFIGS)
    for later in later_steps:
        move(checkpoints / str(later), folder / str(later))
    return str(target)
