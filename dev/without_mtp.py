"""Shows that multi-token prediction is one registered thing: a copy of the code without it imports, types and runs.

    python -m dev.without_mtp [--tests]    # with --tests the copy's smoke tests, without those of the feature

Deleted are its three files, the lines that register them, its keys of the config, also in configs/, and the names that
other frameworks have for these keys.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = ("layout/prediction_modules.py", "model/mtp_block.py", "step/mtp.py")
# (file, pattern, replacement), each found once
EDITS = (
    ("layout/kinds.py", r"from megajax\.layout\.prediction_modules import MODULES\n", ""),
    ("layout/kinds.py", r"EXTRA = \(MODULES,\)", "EXTRA: tuple[ExtraLayers, ...] = ()"),
    ("model/__init__.py", r"import megajax\.model\.mtp_block.*\n", ""),
    ("step/graph.py", r"from megajax\.step\.mtp import MultiTokenPrediction\n", ""),
    ("step/graph.py", r"WITH_BLOCKS = \(MultiTokenPrediction,\)", "WITH_BLOCKS = ()"),
    ("schema/model.py", r"    mtp_layers: (.|\n)*?(?=    num_experts: )", ""),
    ("config/maxtext_names.py", r"mtp_num_layers \|(.|\n)*?mtp_loss_scaling_factor .*\n", ""),
    ("config/megatron_names.py", r"mtp-num-layers (.|\n)*?mtp-loss-scaling-factor .*\n", ""),
)
# Tests whose models have modules
OWN_TESTS = (
    *("training/test_prediction_run.py", "parallel/test_prediction.py", "parallel/test_plain_model.py"),
    *("inference/test_speculation.py", "hf/test_deepseek.py", "hf/test_families.py"),
)
# Families of Hugging Face whose files have modules, and the pages of the book
OF_OTHERS = "not (qwen3_next or deepseek_v3 or files_that)"
IMPORTS = """
import contextlib, importlib, pkgutil, megajax
from megajax.errors import InputError
for module in pkgutil.walk_packages(megajax.__path__, "megajax."):
    if not module.name.endswith("__main__"):
        with contextlib.suppress(InputError):  # of an optional package that is not installed
            importlib.import_module(module.name)
"""


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", action="store_true", help="run the smoke tests too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "megajax"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__"))
        delete(copy)
        commands = [[sys.executable, "-c", IMPORTS], ["pyright", "--pythonpath", sys.executable, "megajax"]]
        if options.tests:
            ignored = [f"--ignore=tests/{path}" for path in OWN_TESTS]
            commands.append([sys.executable, "-m", "pytest", "-q", "-n", "2", "-m", "smoke", "-k", OF_OTHERS, *ignored])
        for command in commands:
            print("$", *(word.strip().splitlines()[0] for word in command), flush=True)
            if status := subprocess.run(command, cwd=copy, env=environment(copy)).returncode:
                return status
    return 0


def delete(copy: Path) -> None:
    """Remove the feature from a copy of the repository."""
    for path in FILES:
        (copy / "megajax" / path).unlink()
    for path, pattern, replacement in EDITS:
        file = copy / "megajax" / path
        text, count = re.subn(pattern, replacement, file.read_text(encoding="utf-8"))
        assert count == 1, f"{path} has {pattern!r} {count} times"
        file.write_text(text, encoding="utf-8")
    for file in (copy / "configs").rglob("*.yaml"):
        text = re.sub(r"\n  mtp_layers: \d|, mtp_layers: \d", "", file.read_text(encoding="utf-8"))
        file.write_text(text, encoding="utf-8")


def environment(copy: Path) -> dict[str, str]:
    """The environment in which the copy is imported, not the original."""
    return os.environ | {"PYTHONPATH": f"{copy}:{copy / 'tests/references'}"}


if __name__ == "__main__":
    sys.exit(main())
