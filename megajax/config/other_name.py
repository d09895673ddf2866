"""One row of a table of other frameworks' names, and the tables' text form."""

import re
from typing import NamedTuple


class OtherName(NamedTuple):
    """One setting of another framework (`names`) and its counterpart here: `ours`, or "" if there is none."""

    names: tuple[str, ...]
    ours: str
    note: str

    @property
    def cure(self) -> str:
        """What to write in place of the name, as the end of a sentence."""
        if not self.ours:
            return f"{self.note}."
        return f"use {self.ours}, {self.note}." if self.note else f"did you mean {self.ours}?"


def rows(text: str) -> tuple[OtherName, ...]:
    """Rows `names | our key | note`, their further lines indented."""
    joined = re.sub(r"\n +", " ", text.strip())
    divided = ([part.strip() for part in line.split("|")] for line in joined.splitlines())
    return tuple(OtherName(tuple(row[0].split(", ")), row[1], "".join(row[2:])) for row in divided)
