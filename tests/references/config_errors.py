"""A config's error without the places of the keys in files that an override does not fit."""

import re


def first_place(sentence: str) -> str:
    """`... (the command line: a.b=1; c.d: x.yaml, line 4): ...` → `... (the command line: a.b=1): ...`."""
    names = r"[\w.]+(?:, [\w.]+)*(?: and [\w.]+)?"
    return re.sub(rf"; {names}: [^:();]+, line \d+(?=[;)])", "", sentence)
