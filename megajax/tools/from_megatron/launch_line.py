"""Finds the launch line of Megatron-LM in a script or in words: its arguments, and the number of devices."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from megajax.config.megatron_flags import FLAGS
from megajax.errors import InputError, shown
from megajax.tools.from_megatron.shell_script import Line, Script
from megajax.tools.from_megatron.shell_values import Values

# Models that are no GPT, by a part of the name of the program that trains them.
OTHER_PROGRAMS = {
    "t5": "T5",
    "bert": "BERT",
    "ict": "a retriever",
    "mamba": "Mamba",
    "hybrid": "a hybrid of Mamba and attention",
    "vlm": "a vision-language model",
    "vision": "a vision model",
    "multimodal": "a multimodal model",
    "retro": "Retro",
    "rl": "reinforcement learning",
}
PROCESSES = ("nproc-per-node", "nproc_per_node", "ntasks-per-node", "gpus-per-node", "num_gpus")
NODES = ("nnodes", "nodes", "num_nodes", "N")
TRAINING = ("micro-batch-size", "num-layers", "hidden-size", "yaml-cfg", "use-checkpoint-args")


@dataclass
class LaunchLine:
    """The arguments of a launch line, and what its words need to be understood."""

    words: list[str]
    location: str
    world: int | None
    values: Values
    warnings: list[str] = field(default_factory=list)


def from_script(path: Path, arguments: list[str]) -> LaunchLine:
    """The launch line of a script, of which `arguments` are the arguments."""
    script = Script(path, arguments)
    found = [line for line in script.lines if _is_launch(line.words)]
    if not found:
        if script.ended:
            cure = "give the arguments or variables with which it goes on, or the launch line itself"
            raise InputError(f"the script ends with exit before a launch line of Megatron-LM ({script.ended}): {cure}.")
        others = [word for line in script.lines for word in line.words[:3] if word.endswith(".sh")]
        cure = (
            f"give {shown(others[0])}, which it calls" if others else "give the script that has it, or the line itself"
        )
        raise InputError(f"{path} has no launch line of Megatron-LM, with --micro-batch-size and --num-layers: {cure}.")
    if len({tuple(line.words) for line in found}) > 1:
        where = " and ".join(line.location for line in found[:3])
        raise InputError(f"{path} has {len(found)} launch lines ({where}): give the one that you mean by itself.")
    line = found[0]
    given = _arguments(line, script.values)
    world = _world(line, script)
    unset = [
        f"the script's argument {name} is missing ({at}): give it after the script's name."
        if name.isdigit()
        else f"{name} has no value ({at}), so it is empty, as in a shell."
        for name, at in script.values.unset.items()
    ]
    return LaunchLine(given, line.location, world, script.values, script.warnings + unset)


def from_words(words: list[str]) -> LaunchLine:
    """The launch line that the words of a command are, with or without its launcher and program."""
    values = Values("the command line", [""])
    line = Line(words, "the command line")
    return LaunchLine(_arguments(line, values), line.location, _world_of_launcher(_launcher(words), []), values)


def _is_launch(words: list[str]) -> bool:
    return any(word.partition("=")[0] == f"--{name}" for word in words for name in TRAINING)


def _program(words: list[str]) -> int:
    """The index of the training program among the words; -1 if there is none."""
    for at, word in enumerate(words):
        if word.endswith(".py") or (at and words[at - 1] == "-m" and not word.startswith("torch.distributed")):
            return at
        if word.startswith("--") and word[2:].partition("=")[0] in FLAGS:
            return -1
    return -1


def _launcher(words: list[str]) -> list[str]:
    return words[: max(_program(words), 0)]


def _arguments(line: Line, values: Values) -> list[str]:
    at = _program(line.words)
    program = line.words[at].rpartition("/")[2] if at >= 0 else ""  # its folder does not matter
    name = values.known(program, "the program").removesuffix(".py")
    parts = re.split(r"[^a-z0-9]+", name.lower())
    if other := next((model for part, model in OTHER_PROGRAMS.items() if part in parts), None):
        raise InputError(f"{name}.py trains {other} ({line.location}), which megajax does not: it trains GPTs.")
    arguments = line.words[at + 1 :]
    if at < 0:  # options of a launcher may come before the first flag
        first = (i for i, word in enumerate(arguments) if word[2:].partition("=")[0] in FLAGS and word[:2] == "--")
        arguments = arguments[next(first, 0) :]
    return arguments


def _world(line: Line, script: Script) -> int | None:
    """The number of devices: of the launcher's options, of WORLD_SIZE, or of #SBATCH lines."""
    options = re.findall(r"^#SBATCH[ \t]+([^#\n]+)", "\n".join(script.texts), re.MULTILINE)
    batch = [word for several in options for word in several.split()]
    launcher = [*line.outer, *_launcher(line.words)]
    if _has(launcher, PROCESSES):  # some clusters' WORLD_SIZE is the number of nodes
        return _world_of_launcher(launcher, batch)
    if found := _world_of_words(launcher):
        return found
    given = script.values.get("WORLD_SIZE")
    if isinstance(given, str) and given.isdigit() and int(given) > 0:
        return int(given)
    return _world_of_words(batch)


def _world_of_launcher(words: list[str], batch: list[str]) -> int | None:
    """As `_world_of_words`; a number of nodes without a value is that of the #SBATCH lines, or not known."""
    if _has(words, NODES) and _option(words, NODES) is None:
        nodes = _option(batch, NODES)
        return None if nodes is None else _world_of_words([*words, f"--{NODES[0]}={nodes}"])
    return _world_of_words(words)


def _has(words: list[str], names: tuple[str, ...]) -> bool:
    return any(word.startswith("-") and word.partition("=")[0].lstrip("-") in names for word in words)


def _world_of_words(words: list[str]) -> int | None:
    nodes, processes = _option(words, NODES), _option(words, PROCESSES)
    total = _option(words, ("ntasks", "n", "np"))
    if processes is None:
        return total
    return processes * (1 if nodes is None else nodes)


def _option(words: list[str], names: tuple[str, ...]) -> int | None:
    """The number that the last of the options `names` has: --name N, --name=N or -n N."""
    found = None
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        value = value if equals else words[at + 1] if at + 1 < len(words) else ""
        number = re.fullmatch(r"(?:gpu:)?(\d{1,9})", value)
        if name.lstrip("-") in names and name.startswith("-") and number and int(number[1]):
            found = int(number[1])
    return found
