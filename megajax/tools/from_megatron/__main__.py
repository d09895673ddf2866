"""Translates a launch line of Megatron-LM into a config: `megajax from-megatron --help`.

Scripts are read, not executed: no command in them runs.
"""

import argparse
import re
import sys
import tempfile
import warnings
from pathlib import Path

from megajax.command_parser import CommandParser
from megajax.config import load_config
from megajax.config.checks import check_mesh
from megajax.config.megatron_flags import FLAGS
from megajax.console import DONE, command, user_errors
from megajax.errors import ConfigError, InputError, shown
from megajax.files import check_new_file
from megajax.megatron import is_megatron_folder
from megajax.megatron.distributed import saved_arguments
from megajax.tools.from_megatron import arguments as megatron
from megajax.tools.from_megatron import launch_line
from megajax.tools.from_megatron.arguments import Arguments
from megajax.tools.from_megatron.data import translate_data, translate_loss
from megajax.tools.from_megatron.document import document
from megajax.tools.from_megatron.experts import translate_experts
from megajax.tools.from_megatron.model import translate_model
from megajax.tools.from_megatron.parallel import translate_batch, translate_mesh, translate_pipeline
from megajax.tools.from_megatron.shell_values import Values
from megajax.tools.from_megatron.training import (
    translate_optimizer,
    translate_precision,
    translate_recompute,
    translate_records,
    translate_run,
)
from megajax.tools.from_megatron.translation import Translation

OWN = ("--write", "--world")  # options with a value; they may come after the line too
SHORT = ("-h", "--help", "--version", "--traceback")  # without one, before the line


def main(words: list[str]) -> int:
    """Print or write the config of a launch line; returns the exit status."""
    with user_errors():
        own, line = _divided(words)
        options = _parser().parse_args([*own, "--", *line])
        if options.write is not None:
            check_new_file("--write", options.write)
        given, world = read(options.line)
        world = options.world or world
        if world is None:
            cure = "add --world N, the number of GPUs"
            raise InputError(f"the number of devices is not in the launch line ({given.location}): {cure}.")
        text, warned = translate(given, world)
        for sentence in warned:
            warnings.warn(sentence, stacklevel=1)
        if options.write is None:
            print(text, end="")
            return DONE
        with options.write.open("x", encoding="utf-8") as file:
            file.write(text)
        print(f"wrote {options.write}; {command('plan', options.write, '--gpus', world)} checks memory and speed")
    return DONE


def _divided(words: list[str]) -> tuple[list[str], list[str]]:
    """(our options, the words of the script or the line): flags of Megatron-LM are not ours."""
    own, line, at = [], [], 0
    theirs = any(word.startswith("--") and word[2:].partition("=")[0] in FLAGS for word in words)
    while at < len(words):
        name, equals, _ = words[at].partition("=")
        before_line = not line and name.startswith("-") and (name in SHORT or not theirs)
        count = 2 if name in OWN and not equals else 1
        (own if name in OWN or before_line else line).extend(words[at : at + count])
        at += count
    return own, line


def _with(given: Arguments, more: Arguments) -> Arguments:
    return Arguments(given.given | more.given, given.texts | more.texts, f"{given.location}, {more.location}")


def read(line: list[str]) -> tuple[Arguments, int | None]:
    """(the arguments, the number of devices if it is known) of a script, a YAML file, a checkpoint or a line.

    Warns about what the script has and this does not know.
    """
    first = Path(line[0])
    if is_megatron_folder(first):
        saved = saved_arguments(first)
        world = saved.get("world_size")
        saved |= dict.fromkeys(("finetune", "no_load_optim", "pretrained_checkpoint", "ckpt_step")) | {"load": line[0]}
        given, world = megatron.from_mapping(saved, str(first)), world if isinstance(world, int) else None
        if len(line) > 1:  # further flags, such as --data-path
            given = _with(given, megatron.from_words(line[1:], Values("the command line", [""]), "the command line"))
        return given, world
    if len(line) == 1 and first.suffix in (".yaml", ".yml"):
        return megatron.from_yaml(first), None
    is_script = first.suffix in (".sh", ".bash", ".slurm", ".sbatch") or (
        len(line) == 1 and not line[0].startswith("-")
    )
    if is_script or (not line[0].startswith("-") and first.is_file() and first.suffix != ".py"):
        found = launch_line.from_script(first, line[1:])
    else:
        found = launch_line.from_words(line)
    for sentence in found.warnings:
        warnings.warn(sentence, stacklevel=2)
    words = [part for w in found.words for part in (w.split("=", 1) if w.startswith("--yaml-cfg=") else [w])]
    if "--yaml-cfg" in words[:-1]:
        at = words.index("--yaml-cfg")
        given = megatron.from_yaml(Path(found.values.known(words[at + 1], "--yaml-cfg")))
        more = megatron.from_words(words[:at] + words[at + 2 :], found.values, found.location)
        return _with(given, more), found.world
    return megatron.from_words(words, found.values, found.location), found.world


def translate(given: Arguments, world: int) -> tuple[str, list[str]]:
    """(the text of the config, warnings). `InputError` for arguments that cannot be translated.

    `arguments.from_mapping` makes `given` from arguments that are saved elsewhere.
    """
    t = translation(given, world)
    text = document(t, t.finish())
    return text, [*t.warnings, *_checked(text, world)]


def translation(given: Arguments, world: int) -> Translation:
    """All keys of the config, of which none is checked. `InputError` for arguments that contradict each other."""
    t = Translation(given, world)
    replicas = translate_mesh(t)
    size = translate_batch(t, replicas)
    translate_pipeline(t)
    translate_model(t)
    translate_experts(t, replicas)
    translate_precision(t)
    translate_recompute(t)
    translate_optimizer(t)
    translate_run(t, size)
    translate_records(t)
    translate_data(t)
    translate_loss(t)
    return t


def _checked(text: str, world: int) -> list[str]:
    """Load the config and check its mesh; what the checks warn about."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        path = Path(folder) / "run.yaml"
        path.write_text(text, encoding="utf-8")
        try:
            check_mesh(load_config(path), world)
        except ConfigError as error:
            raise InputError(
                f"the line becomes a config that does not run: {_by_flags(str(error), path, text)}"
            ) from None
    return [_by_flags(str(each.message), path, text) for each in found]


def _by_flags(sentence: str, path: Path, text: str) -> str:
    """A sentence about the translation, with the flags of the lines that it names."""
    lines = text.splitlines()
    at_line = re.escape(str(path)) + r", line (\d+)"
    flags = re.sub(at_line, lambda found: lines[int(found[1]) - 1].rpartition("  # ")[2] or found[0], sentence)
    return flags.replace(str(path), "the translation")


def _parser() -> CommandParser:
    parser = CommandParser(
        "megajax.tools.from_megatron.__main__",
        description="Translate a launch line of Megatron-LM into a config. The script is read, no command in it runs.",
        usage=f"{command('from-megatron')} [--write FILE] [--world N] SCRIPT_OR_ARGS ...",
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the config here (default: print it)")
    parser.add_argument("--world", type=_count, metavar="N", help="number of devices (default: that of the line)")
    parser.add_argument(
        "line",
        nargs="+",
        metavar="SCRIPT_OR_ARGS",
        help="a shell script with its arguments, a YAML file of Megatron-LM, a checkpoint, or the words of a line",
    )
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text[:9]) or len(text) > 8:
        raise argparse.ArgumentTypeError(f"{shown(text)} is no number of devices: use 1 to 99999999")
    return int(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
