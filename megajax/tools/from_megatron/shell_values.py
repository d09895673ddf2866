"""Values of words in a shell script: variables, arrays, quotes and integer arithmetic. Nothing is executed.

What only an execution would give, such as $(date), is a mark in the text; whoever needs such a text gets a sentence.
"""

import ast
import fnmatch
import operator
import os
import re
from collections.abc import Callable, Iterator

from megajax.errors import InputError, shown
from megajax.tools.from_megatron.shell_syntax import MAX_DEPTH, Word, end_of_piece

MAX_TEXT = 2**20  # characters of a value: A=$A$A doubles it
MAX_NUMBER = 2**63
MARK = re.compile("\ue000(\\d+)\ue001")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9]|[@*#?$!]")
_SPECIAL = {"?": "0", "$": "1", "!": ""}
_ARITHMETIC: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda one, other: abs(one) // abs(other) * (1 if (one < 0) == (other < 0) else -1),
    ast.Mod: lambda one, other: abs(one) % abs(other) * (1 if one >= 0 else -1),
    ast.Pow: lambda one, other: one ** min(other, 64) if other >= 0 else 0,
}


class Values:
    """The variables of a script, and the words that they make."""

    def __init__(self, file: str, positional: list[str]):
        self.file, self.line, self.positional = file, 0, positional
        self.variables: dict[str, str | list[str]] = {}
        self.unknown: list[tuple[str, str]] = []  # of each mark: what it is for, and its location
        self.unset: dict[str, str] = {}  # variables that had no value: the location of the first use

    def fail(self, problem: str, cure: str) -> InputError:
        return InputError(f"{problem} ({self.file}, line {self.line}): {cure}.")

    def set(self, name: str, value: str | list[str], append: bool = False) -> None:
        before = self.variables.get(name, "")
        if append and isinstance(before, str) and isinstance(value, str):
            value = before + value
        elif append:
            earlier = before if isinstance(before, list) else [before] if before else []
            value = [*earlier, *(value if isinstance(value, list) else [value])]
        size = len(value) if isinstance(value, str) else sum(map(len, value)) + len(value)
        self._check_size(size)
        self.variables[name] = value

    def text(self, word: Word) -> str:
        """A word as one text, as in an assignment."""
        self.line = word.line
        return self._joined(
            "".join(piece if isinstance(piece, str) else " ".join(piece) for piece, _ in self._of(word.raw))
        )

    def fields(self, word: Word) -> list[str]:
        """The words that a word becomes: unquoted values are divided at spaces, "${A[@]}" is a word for each item."""
        self.line = word.line
        found: list[str] = []
        current: str | None = None
        for piece, quoted in self._of(word.raw):
            if isinstance(piece, list):
                first, *rest = piece or [""]
                parts = [(current or "") + first, *rest] if piece or current else []
            elif quoted:
                parts = [(current or "") + piece]
            else:
                parts = piece.split()
                if piece[:1].isspace() and current is not None:
                    found.append(current)
                elif parts and current is not None:
                    parts[0] = current + parts[0]
                elif not parts and current is not None:
                    parts = [current]
                if piece[-1:].isspace():
                    parts.append("")
                    found += parts[:-1]
                    current = None
                    continue
            found += parts[:-1]
            current = parts[-1] if parts else None
        self._check_size(sum(map(len, found)))
        return found if current is None else [*found, current]

    def mark(self, what: str) -> str:
        """A text in place of one that is not known."""
        self.unknown.append((what, f"{self.file}, line {self.line}"))
        return f"\ue000{len(self.unknown) - 1}\ue001"

    def written(self, text: str) -> str:
        """`text` as the script has it, with what is not known."""
        return MARK.sub(lambda found: self.unknown[int(found[1])][0], text)

    def known(self, text: str, problem: str) -> str:
        """`text`, unless a part of it is not known. `problem` begins the sentence."""
        if found := MARK.search(text):
            what, where = self.unknown[int(found[1])]
            raise InputError(f"{problem} is {shown(what)}, which is not executed ({where}): write its value instead.")
        return text

    def number(self, text: str) -> str:
        """The value of an arithmetic expression."""
        text = self._joined("".join(str(piece) for piece, _ in self._of(text)))
        if MARK.search(text):
            return self.mark(MARK.sub("...", text))
        named = re.sub(r"[A-Za-z_]\w*", lambda name: self._integer(name[0]), text)
        try:
            if len(named) > 1000:
                raise ValueError
            return str(_evaluated(ast.parse(named.strip() or "0", mode="eval").body))
        except ZeroDivisionError:
            raise self.fail(f"$(({shown(text)})) divides by 0", "correct the numbers") from None
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            raise self.fail(f"$(({shown(text)})) is no expression of integers", "write its value instead") from None

    def _integer(self, name: str) -> str:
        value = self.get(name)
        return f"({value.strip() or 0})" if isinstance(value, str) else "0"

    def get(self, name: str) -> str | list[str] | None:
        """The value of a variable of the script or the environment; None if it has none."""
        if name in ("@", "*"):
            return list(self.positional[1:])
        if name == "#":
            return str(len(self.positional) - 1)
        if name.isdigit():
            return self.positional[int(name)] if int(name) < len(self.positional) else None
        if name in self.variables:
            return self.variables[name]
        return _SPECIAL.get(name, os.environ.get(name))

    def _check_size(self, size: int) -> None:
        if size > MAX_TEXT:
            raise self.fail(f"a value has more than {MAX_TEXT:,} characters", "write the launch line by itself")

    def _joined(self, text: str) -> str:
        self._check_size(len(text))
        return text

    def _of(self, raw: str, depth: int = 0, quoted: bool = False) -> Iterator[tuple[str | list[str], bool]]:
        """The pieces of a word: (text, whether it is never divided); a list for "${A[@]}"."""
        if depth > MAX_DEPTH:
            raise self.fail("substitutions are nested too deeply", "simplify the line")
        at = 0
        while at < len(raw):
            character = raw[at]
            if character == "\\" and not quoted:
                yield raw[at + 1 : at + 2].replace("\n", ""), True
                at += 2
            elif character == "\\":
                kept = raw[at + 1 : at + 2] if raw[at + 1 : at + 2] in '$`"\\\n' else raw[at : at + 2]
                yield kept.replace("\n", ""), True
                at += 2
            elif character == "`" or (not quoted and (character in "'\"" or raw.startswith("$'", at))):
                end = end_of_piece(raw, at, self.file, self.line)
                yield from self._quotation(raw[at:end], depth)
                at = end
            elif character == "$" and at + 1 < len(raw):
                piece, at = self._dollar(raw, at, depth, quoted)
                yield piece, quoted
            elif raw.startswith(("<(", ">("), at):
                yield self.mark(raw[at:]), True
                return
            else:
                stop = re.compile(r"[\\'\"`$]|[<>]\(").search(raw, at + 1)
                end = stop.start() if stop else len(raw)
                yield raw[at:end], True
                at = end

    def _quotation(self, text: str, depth: int) -> Iterator[tuple[str | list[str], bool]]:
        """The pieces of a text with its quotes: 'x', $'x', "x" or `x`."""
        if text[0] == '"':
            yield "", True
            yield from self._of(text[1:-1], depth + 1, quoted=True)
        elif text[0] == "`" or (text[0] == "$" and "\\" in text):
            yield self.mark(text), True
        else:
            yield text[text.index("'") + 1 : -1], True

    def _dollar(self, raw: str, at: int, depth: int, quoted: bool) -> tuple[str | list[str], int]:
        if raw[at + 1] in "({":
            end = end_of_piece(raw, at, self.file, self.line)
            inside = raw[at + 2 : end - 1]
            if raw[at + 1] == "{":
                return self._parameter(inside, depth, quoted), end
            if inside.startswith("(") and inside.endswith(")"):
                return self.number(inside[1:-1]), end
            return self.mark(raw[at:end]), end
        if name := _NAME.match(raw, at + 1):
            return self._value(name[0], quoted), name.end()
        return "$", at + 1

    def _value(self, name: str, quoted: bool) -> str | list[str]:
        value = self.get(name)
        if value is None:
            self.unset.setdefault(name, f"{self.file}, line {self.line}")
            return ""
        if isinstance(value, list) and name not in ("@", "*"):
            value = value[0] if value else ""  # $A of an array
        return value if isinstance(value, str) or (quoted and name != "*") else " ".join(value)

    def _parameter(self, inside: str, depth: int, quoted: bool) -> str | list[str]:
        """The value of ${inside}."""
        found = re.fullmatch(
            r"([!#]?)([A-Za-z_]\w*|\d+|[@*#?$!])(\[(?:[^\[\]]|\[[^\[\]]*\])*\])?(.*)", inside, re.DOTALL
        )
        if found is None:
            return self.mark(f"${{{inside}}}")
        prefix, name, index, rest = found[1], found[2], found[3], found[4]
        if prefix == "!":
            pointed = self.get(name)
            if not isinstance(pointed, str) or not re.fullmatch(r"[A-Za-z_]\w*", pointed):
                return self.mark(f"${{{inside}}}")
            name = pointed
        value = self.get(name)
        if index in ("[@]", "[*]"):
            value = [value] if isinstance(value, str) else value
        elif index is not None:
            items = [value] if isinstance(value, str) else value or []
            number = self.number(index[1:-1])
            at = int(number) if re.fullmatch(r"-?\d+", number) else len(items)
            value = items[at] if -len(items) <= at < len(items) else None
        elif isinstance(value, list) and name not in ("@", "*"):
            value = value[0] if value else None
        if prefix == "#":
            return str(len(value or ""))
        if rest[:2] in (":-", ":=", ":?", ":+") or rest[:1] in ("-", "=", "?", "+"):
            return self._default(name, value, rest, depth)
        if value is None:
            if index is None:
                self.unset.setdefault(name, f"{self.file}, line {self.line}")
            return [] if index == "[@]" and quoted else ""
        if rest:
            return self._changed(value, rest, inside)
        if isinstance(value, str) or (quoted and index != "[*]" and name != "*"):
            return value
        return " ".join(value)

    def _default(self, name: str, value: str | list[str] | None, rest: str, depth: int) -> str | list[str]:
        colon = rest[0] == ":"
        sign, word = rest[colon], rest[colon + 1 :]
        absent = value is None or (colon and not value)
        if sign == "+":
            absent, value = not absent, ""
        if not absent:
            return value or ""
        if sign == "?":
            raise self.fail(f"{name} has no value", f"set it before the command: {name}=... megajax from-megatron ...")
        pieces = self._of(word, depth + 1)
        text = self._joined("".join(piece if isinstance(piece, str) else " ".join(piece) for piece, _ in pieces))
        if sign == "=":
            self.set(name, text)
        return text

    def _changed(self, value: str | list[str], rest: str, inside: str) -> str:
        """The value of ${A%pattern}, ${A##pattern}, ${A/one/other}, ${A,,} and ${A:from:length}."""
        if isinstance(value, list) or len(value) > 1000 or "$" in rest or "`" in rest:
            return self.mark(f"${{{inside}}}")
        if rest[0] in "#%":
            greedy = rest[1:2] == rest[0]
            pattern, ends = rest[1 + greedy :], range(len(value) + 1)
            if rest[0] == "#":
                order = reversed(ends) if greedy else ends
                return next((value[n:] for n in order if fnmatch.fnmatchcase(value[:n], pattern)), value)
            order = ends if greedy else reversed(ends)
            return next((value[:n] for n in order if fnmatch.fnmatchcase(value[n:], pattern)), value)
        if rest in ("^^", ",,"):
            return value.upper() if rest == "^^" else value.lower()
        if replaced := re.fullmatch(r"/(/?)([^/*?\[\\]+)/?([^/]*)", rest):
            return self._joined(value.replace(replaced[2], replaced[3], -1 if replaced[1] else 1))
        if part := re.fullmatch(r":(\d+)(?::(\d+))?", rest):
            start = int(part[1])
            return value[start : start + int(part[2])] if part[2] else value[start:]
        return self.mark(f"${{{inside}}}")


def _evaluated(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        found = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        found = _evaluated(node.operand) * (-1 if isinstance(node.op, ast.USub) else 1)
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        found = _ARITHMETIC[type(node.op)](_evaluated(node.left), _evaluated(node.right))
    else:
        raise ValueError
    if abs(found) >= MAX_NUMBER:
        raise ValueError
    return found
