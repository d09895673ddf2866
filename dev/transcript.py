"""Runs the README's commands like a new user, from clone to sampled text, and writes docs/records/transcript.md.

Clones the last commit into an empty directory. There it runs the README's quick start and the commands of "Train your
own model", on 200 documents of the quick start's text and for a few steps. Takes some minutes and installs a .venv.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/records/transcript.md"
SECTION = "Train your own model"
TEXT = "head -n 200 runs/quickstart_data/train.jsonl > data/my.jsonl"
LONGEST = 36  # lines of a command's output; longer outputs lose their middle
HEAD = """# From clone to sampled text

`python dev/transcript.py` ran the README's commands in a new clone of commit {commit} and wrote this page, on
{date}, on {cores} CPU cores{gpus}. There are three differences from the README: the text comes from the quick start's
data, the model trains for {steps} steps only, and `cat` replaces the editor. `[...]` marks omitted lines.
"""


def readme_commands(readme: str, steps: int) -> list[str]:
    """The README's commands in order: the quick start, those of "Train your own model" and the sample.

    `data/my.jsonl` gets its text after the README makes `data`, the editor becomes a here-document, and the training
    run is cut to `steps` steps.
    """
    quickstart = _block(readme, "bash").splitlines()[0]
    section = readme.split(f"\n## {SECTION}\n")[1].split("\n## ")[0]
    sample = re.search(r"`(megajax generate [^`]+)`", section)
    if sample is None:
        raise ValueError(f'README.md: "{SECTION}" has no `megajax generate ...`')
    commands = []
    for line in [quickstart, *_block(section, "bash").splitlines(), sample[1]]:
        command = line.split("  #")[0].rstrip()
        if command.startswith("nano "):
            command = f"cat > {command.split()[1]} <<'END'\n{_block(section, 'yaml')}END"
        elif command.startswith("megajax train") and "--" not in command:
            command += f" run.steps={steps}"
        commands.append(command)
        if command.startswith("mkdir "):
            commands.append(TEXT)
    return commands


def _block(text: str, language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)
    if found is None:
        raise ValueError(f"README.md: no block of {language} where one was")
    return found[1]


def shorten(output: str) -> str:
    """At most `LONGEST` lines: the first and last two of a long row of steps, then both ends of the output."""
    lines, step = output.rstrip().splitlines(), re.compile(r"step +\d+/\d+ ")
    kept: list[str] = []
    for number, line in enumerate(lines):
        around = lines[max(number - 2, 0) : number + 3]
        if len(around) < 5 or not all(map(step.match, around)):
            kept.append(line)
        elif kept[-1] != "[...]":
            kept.append("[...]")
    if len(kept) > LONGEST:
        kept[LONGEST // 2 : -LONGEST // 2] = ["[...]"]
    return "".join(f"{line}\n" for line in kept)


def follow(commands: list[str], directory: Path, hidden: dict[str, str]) -> str:
    """Runs the commands in `directory`, as in one shell; returns Markdown with commands, outputs and times.

    `hidden` are paths of this machine and the words that stand for them. A command that fails ends the script.
    """
    environment = {n: v for n, v in os.environ.items() if n not in ("MEGAJAX_PYTHON", "PYTHONPATH", "VIRTUAL_ENV")}
    pages, activate = [], ""
    for command in commands:
        print(f"$ {command}", flush=True)
        start = time.monotonic()
        done = subprocess.run(
            ["bash", "-c", activate + command],
            cwd=directory,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        seconds = time.monotonic() - start
        if done.returncode:
            sys.exit(f"{done.stdout}\nstatus {done.returncode}: {command}")
        if command.startswith("source "):
            activate = f"{command}\n"
        output = shorten(done.stdout)
        for path, word in hidden.items():
            output = output.replace(path, word)
        took = f"\n{seconds // 60:.0f} min {seconds % 60:.0f} s\n" if seconds >= 1 else ""
        pages.append(f"```text\n$ {command}\n{output}```\n{took}")
    return "\n".join(pages)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="of the model of one's own (default: 60)")
    parser.add_argument("--output", type=Path, default=PAGE, help=f"default: {PAGE.relative_to(ROOT)}")
    arguments = parser.parse_args()
    gpus = Path("/proc/driver/nvidia/gpus")
    facts = {
        "commit": subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip(),
        "date": time.strftime("%Y-%m-%d"),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": f" and {len(list(gpus.iterdir()))} GPUs" if gpus.is_dir() else "",
        "steps": arguments.steps,
    }
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run(["git", "clone", "--quiet", str(ROOT), "megajax"], cwd=directory, check=True)
        clone = Path(directory, "megajax")
        commands = readme_commands((clone / "README.md").read_text(encoding="utf-8"), arguments.steps)
        page = follow(commands, clone, {directory: "~", str(Path.home()): "~"})
    arguments.output.write_text(
        f"{HEAD.format(**facts)}\n```text\n$ git clone REPOSITORY && cd megajax\n```\n\n{page}", encoding="utf-8"
    )
    print(f"written: {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
