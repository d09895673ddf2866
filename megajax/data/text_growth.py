"""How much longer the steps of a tokenizer can make a text.

The libraries end the process where a text does not fit in memory: ten steps that write ten letters for one make 10¹⁰.
"""

import base64
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from megajax.errors import InputError

MOST_GROWTH = 10_000  # characters of one; ALBERT's normalizer may make 2,000
GROWTH = {  # the longest text that a step writes for a character
    "NFC": 3,
    "NFD": 4,
    "NFKC": 18,
    "NFKD": 18,
    "Lowercase": 3,
    "BertNormalizer": 9,
    "ByteLevel": 8,
    "Metaspace": 2,
}
SEQUENCES = ("normalizers", "pretokenizers", "decoders", "processors")
ZERO_WIDTH = r"\(\?|\\[bB]|\}\?"  # what may match nothing beside a character, but not in an empty text


def check_growth(factor: float, part: str, path: str) -> None:
    """Raise InputError if a part of the tokenizer at `path` may make texts `factor` times as long, which none needs."""
    if factor > MOST_GROWTH:
        raise InputError(
            f"the {part} of {path} may make a text {factor:.3g} times as long, more than {MOST_GROWTH:,} times: give "
            "another tokenizer."
        )


def growth(step: Mapping[str, Any]) -> float:
    """A bound of the characters (of a post-processor: tokens) that a step of a tokenizer.json makes of one."""
    kind: str = step.get("type", "")
    if kind == "Sequence":
        return math.prod(map(growth, next(step[name] for name in SEQUENCES if name in step)))
    if kind == "Replace":
        return _replace_growth(len(step["content"]), step["pattern"])
    if kind == "Prepend":
        return 1.0 + len(step["prepend"])
    if kind == "Precompiled":
        return charsmap_growth(base64.b64decode(step["precompiled_charsmap"]))
    if kind in ("BPEDecoder", "CTC"):  # they write a space for it
        return 1.0 if step.get("suffix") or step.get("word_delimiter_token") else 3.0
    if kind == "TemplateProcessing":
        return float(len(step["single"]) + sum(len(token["ids"]) for token in step["special_tokens"].values()))
    return GROWTH.get(kind, 1.0)


def charsmap_growth(chars: bytes) -> float:
    """The same of SentencePiece's table of replacements: the size of a tree, the tree, and the texts that it writes."""
    texts = chars[4 + int.from_bytes(chars[:4], "little") :]
    return float(max(1, *(len(text.decode(errors="replace")) for text in texts.split(b"\0"))))


def _replace_growth(written: int, pattern: Mapping[str, str]) -> float:
    """The same of a step that writes `written` characters for a match."""
    if text := pattern.get("String"):
        return max(1.0, written / len(text))
    regex = pattern.get("Regex", "")
    with suppress(re.error):  # of what only the library's own regular expressions have
        if not re.search(ZERO_WIDTH, regex) and re.match(regex, "") is None:
            return max(1.0, written)
    return 1.0 + written  # between any two characters
