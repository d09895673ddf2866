"""The first losses of a launch line, with Megatron-Core and with megajax, side by side.

    python dev/first_losses.py --megatron PYTHON [--script docs/examples/tiny_llama.sh] [--record]

megajax preprocesses the text of docs/*.md, megatron-core trains the line's GPT on it through its own GPTDataset, from a
distributed checkpoint that it writes first, and megajax trains the translated line from the same checkpoint on the same
files: `megajax from-megatron` and `megajax train`. dev/compare_megatron.py says what PYTHON's environment needs.
Prints a table of every tenth step; --record writes it into docs/migration.md, with a picture.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from megajax.config.megatron_flags import DEFAULTS
from megajax.tools.from_megatron.__main__ import read

ROOT = Path(__file__).parents[1]
PAGE, PICTURE = ROOT / "docs/migration.md", ROOT / "docs/images/data/first_losses.json"
BEGIN, END = "<!-- first losses: written by dev/first_losses.py -->\n", "<!-- end of first losses -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megatron", required=True, metavar="PYTHON")
    parser.add_argument("--script", type=Path, default=ROOT / "docs/examples/tiny_llama.sh")
    parser.add_argument("--record", action="store_true", help="write the table and the picture of the documentation")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        curves = run(options.script.resolve(), options.megatron, Path(temporary))
    rows = table(curves)
    print(rows)
    if options.record:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{rows}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
        lines = {name: [json.dumps(row) for row in curve] for name, curve in curves.items()}
        body = ",\n".join(f"{json.dumps(name)}: [\n{',\n'.join(own)}\n]" for name, own in lines.items())
        PICTURE.write_text(f'{{"settings": {{}},\n"runs": {{\n{body}\n}}}}\n', encoding="utf-8")
    return 0


def run(script: Path, megatron: str, folder: Path) -> dict[str, list[dict]]:
    """What each step logs, by program: step, loss and gradient norm."""
    texts = [{"text": path.read_text(encoding="utf-8")} for path in sorted((ROOT / "docs").glob("*.md"))]
    (folder / "docs.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts), encoding="utf-8")
    given, _ = read([str(script)])
    (folder / "arguments.json").write_text(json.dumps({name: given[name] for name in DEFAULTS}), encoding="utf-8")
    path = os.pathsep.join([str(ROOT / "dev"), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}

    def call(*command: str) -> None:
        subprocess.run(command, check=True, env=own, cwd=folder)

    megajax = (sys.executable, "-m", "megajax")
    encode = ("--output-prefix", "docs", "--tokenizer", "byte", "--append-eod")
    call(*megajax, "preprocess", "--input", "docs.jsonl", *encode)
    call(megatron, "-m", "megatron_parity.launch_line", str(folder))
    call(*megajax, "from-megatron", str(script), "--write", "run.yaml")
    call(*megajax, "train", "run.yaml")
    theirs = json.loads((folder / "megatron.json").read_text(encoding="utf-8"))
    ours = map(json.loads, (folder / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines())
    ours = [row for row in ours if "grad_norm" in row]
    return {"Megatron-Core": _numbered(theirs), "megajax": _numbered(ours)}


def _numbered(rows: list[dict]) -> list[dict]:
    names = ("loss", "grad_norm", "learning_rate")
    return [{"step": step, **{name: row[name] for name in names}} for step, row in enumerate(rows, 1)]


def table(curves: dict[str, list[dict]]) -> str:
    """The first step and every tenth one."""
    theirs, ours = curves["Megatron-Core"], curves["megajax"]
    assert len(theirs) == len(ours)
    columns = [f"{what}, {program}" for what in ("loss", "gradient norm") for program in curves]
    lines = [f"| step | {' | '.join(columns)} |", "|---|---|---|---|---|"]
    for a, b in zip(theirs, ours, strict=True):
        if a["step"] == 1 or a["step"] % 10 == 0:
            numbers = f"{a['loss']:.6f} | {b['loss']:.6f} | {a['grad_norm']:.5f} | {b['grad_norm']:.5f}"
            lines.append(f"| {a['step']} | {numbers} |")
    worst = max(abs(a["loss"] - b["loss"]) for a, b in zip(theirs, ours, strict=True))
    return "\n".join(lines) + f"\n\nThe largest difference of the 100 losses is {worst:.0e}.\n"


if __name__ == "__main__":
    sys.exit(main())
