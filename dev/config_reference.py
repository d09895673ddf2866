"""Writes the key reference in docs/configuration.md from the descriptions that `--help all` prints."""

import argparse
import re
from pathlib import Path

from megajax.config import help_text

PAGE = Path(__file__).parents[1] / "docs/configuration.md"
BEGIN, END = "<!-- keys: written by dev/config_reference.py -->\n", "<!-- end of keys -->"
KEY = re.compile(r"  (?P<key>\S+)  (?P<meaning>.*) \[(?P<type>.*), (?P<default>required|default: .*)\]")


def reference() -> str:
    """A heading and a table for each section."""
    lines = []
    for line in help_text().splitlines()[1:]:
        if found := KEY.fullmatch(line):
            kind = found["type"].replace(" | ", ", ")
            default = found["default"].removeprefix("default: ").replace("|", "\\|")
            default = default if default == "required" else f"`{default}`"
            lines.append(f"| `{found['key']}` | {found['meaning']} | {kind} | {default} |")
        elif line:
            section, _, meaning = line.partition(": ")
            lines += [f"### {section}", "", meaning, "", "| key | meaning | type | default |", "|---|---|---|---|"]
        elif lines:
            lines.append("")
    return "\n".join(lines) + "\n"


def updated(page: str) -> str:
    """The page with the reference between its markers rewritten."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"{PAGE} has lost the marker {BEGIN!r} or {END!r}"
    return f"{before}{BEGIN}\n{reference()}\n{END}{after}"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE}")
