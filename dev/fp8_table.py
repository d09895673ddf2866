"""The table of recipes and GPUs in docs/precision.md, from the code: `python dev/fp8_table.py [--write]`."""

import argparse
import sys
from pathlib import Path

from megajax.errors import ConfigError
from megajax.kernel_choice import Hardware, choose_grouped_matmul
from megajax.ops import fp8
from megajax.options.fp8_recipes import RECIPES

DOCS = Path(__file__).parents[1] / "docs/precision.md"
START, END = "<!-- kernels: written by dev/fp8_table.py -->", "<!-- end -->"
# Platforms and compute capabilities; the implementations that have run there, others are compiled at most
HARDWARE = {
    "CPU": ("cpu", None, ("reference", "emulated")),
    "A100": ("gpu", "8.0", ()),
    "L40S": ("gpu", "8.9", ()),
    "H100, H200": ("gpu", "9.0", ("pallas", "transformer_engine")),
    "B200": ("gpu", "10.0", ()),
}
NAMES = {
    "pallas": "kernels of `xla`",
    "transformer_engine": "Transformer Engine",
    "cudnn": "cuDNN's block-scaled matmuls",
    "reference": "plain operations",
    "emulated": "emulated",
}


def table() -> str:
    """The markdown table, and the sentences of what is refused."""
    refused: list[str] = []
    lines = [f"| recipe | {' | '.join(HARDWARE)} |", f"|{'---|' * (len(HARDWARE) + 1)}"]
    for name, recipe in RECIPES.items():
        if not recipe.is_on:
            continue
        cells = []
        for platform, capability, have_run in HARDWARE.values():
            cell = []
            for experts in (False, True):
                try:
                    found = fp8.choose(recipe, "xla", platform, capability)
                    if experts:
                        hardware, widths = Hardware(platform, capability), (2048, 768)
                        choose_grouped_matmul("auto", hardware, "bfloat16", widths, recipe)
                    cell.append(NAMES[found] + ("" if found in have_run else ", not run"))
                except ConfigError as error:
                    sentence = str(error).replace(f"recipe={name} ", "recipe=... ")
                    sentence = sentence.replace(f"compute capability {capability}", "compute capability ...")
                    refused += [sentence] if sentence not in refused else []
                    cell.append(f"refused ({refused.index(sentence) + 1})")
            cells.append(cell[0] if cell[0] == cell[1] else f"{cell[0]}; experts {cell[1]}")
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{number}. {sentence}" for number, sentence in enumerate(refused, 1))])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write it into {DOCS.name}")
    if not parser.parse_args(arguments).write:
        print(table())
        return 0
    before, rest = DOCS.read_text(encoding="utf-8").split(START)
    DOCS.write_text(f"{before}{START}\n\n{table()}\n\n{END}{rest.split(END, 1)[1]}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
