"""Changes of a file's bytes: bits, length fields, words of a text, values of JSON, nesting, lines, sizes."""

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

NUMBERS = (0, 1, -1, 2**7, 2**8, 2**15, 2**16, 2**31, 2**32, 2**53, 2**63, 2**64)
NUMBERS = tuple(n + d for n in NUMBERS for d in (-1, 0, 1))
WORDS = (
    *b' null true -1 0 0.5 1e308 -1e308 1e400 1e-400 .inf inf NaN [] {} "" [[1]] 1:2:3 1_000 2024-13-45 99999'.split(
        b" "
    ),
    *(b"{a: 1}", b'"../../../etc/passwd"', b'"/etc/passwd"', b"/dev/zero", b'"\\0"', b'"\\ud800"', b"\t", b"---"),
    *(b"*a", b"&a [*a]", b"<<", b"!!python/object/apply:os.system [exit 1]", b"\xff\xfe", b"\x00"),
    *(b'"' + b"x" * 300 + b'"', b'"' + b"x" * 5000 + b'"', b"9" * 30, b"9" * 5000, b"-" + b"9" * 400),
    *(text.encode() for text in ("٣", "²", '"\ufdd0"', "\u2028")),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 0.5, 1e308, float("nan"), float("inf"), "", "x", "\0", "x" * 300, "x" * 5000, "9"),
    *([], {}, [[]], [None], [1], ["x"], {"": None}, {"a": {"a": 1}}, {"content": "x"}, *NUMBERS, 10**30, "../x", "/"),
)


class Mutator:
    """Changes bytes by a random generator, up to four changes at a time; `words` are the format's own."""

    def __init__(self, generator: random.Random, words: Sequence[bytes] = ()):
        self.random, self.words = generator, words
        self.changes: list[Callable[[bytes], bytes]] = [
            *(self.flip, self.number, self.cut, self.remove, self.copy, self.word, self.word, self.nest, self.aliases),
            *(self.json_value, self.json_value, self.lines),
        ]

    def __call__(self, data: bytes) -> bytes:
        for _ in range(self.random.choice((1, 1, 1, 2, 4))):
            data = self.random.choice(self.changes)(data)
        return data

    def at(self, data: bytes) -> int:
        """A position; the beginning, where headers are, is as likely as the rest."""
        return self.random.randrange(min(len(data), self.random.choice((64, 1 << 30))) + 1)

    def flip(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(self.random.randint(1, 8) if data else 0):
            changed[min(self.at(data), len(data) - 1)] ^= 1 << self.random.randrange(8)
        return bytes(changed)

    def number(self, data: bytes) -> bytes:
        width, at = self.random.choice((1, 2, 4, 8)), self.at(data)
        value = self.random.choice((*NUMBERS, len(data), len(data) - 1, len(data) + 1)) % (1 << 8 * width)
        return data[:at] + value.to_bytes(width, "little") + data[at + width :]

    def cut(self, data: bytes) -> bytes:
        return data[: self.at(data)]

    def remove(self, data: bytes) -> bytes:
        at = self.at(data)
        return data[:at] + data[at + self.random.randint(1, 16) :]

    def copy(self, data: bytes) -> bytes:
        start, at = self.at(data), self.at(data)
        return data[:at] + data[start : start + self.random.randint(1, 256)] + data[at:]

    def word(self, data: bytes) -> bytes:
        """Another value instead of a number or a name of a text."""
        words = [*re.finditer(rb'"[^"]*"|[\w./-]+', data[: 1 << 16])]
        if not words:
            return data
        found = self.random.choice(words)
        values = [
            *WORDS,
            *(str(n).encode() for n in NUMBERS),
            self.random.choice(words).group(),
            *self.words,
            *self.words,
            *self.words,
        ]
        return data[: found.start()] + self.random.choice(values) + data[found.end() :]

    def nest(self, data: bytes) -> bytes:
        depth, (first, last) = self.random.choice((10, 200, 5000)), self.random.choice(((b"[", b"]"), (b'{"a":', b"}")))
        return self._instead_of_a_word(data, first * depth + b"1" + last * depth)

    def aliases(self, data: bytes) -> bytes:
        """YAML whose size is exponential in its number of aliases."""
        lists = [b"&a0 [x]", *(b"&a%d [%s]" % (i, b", ".join([b"*a%d" % (i - 1)] * 9)) for i in range(1, 12))]
        return self._instead_of_a_word(data, b"[" + b", ".join(lists) + b"]")

    def json_value(self, data: bytes) -> bytes:
        """Another value, or none, or a second one, at a place of the JSON, or of one of its lines; else a word."""
        lines = data.split(b"\n") if data.lstrip()[:1] in (b"{", b"[") else []
        if len(lines) > 1 and not lines[0].rstrip().endswith((b"{", b"[", b",")):
            line = self.random.randrange(len(lines))
            lines[line] = self._other_json(lines[line])
            return b"\n".join(lines)
        return self._other_json(data)

    def _other_json(self, data: bytes) -> bytes:
        try:
            root = [json.loads(data)]
        except (ValueError, RecursionError):
            return self.word(data)
        places: list[tuple[Any, Any]] = [(root, 0)]
        for place in places:  # which grows
            value = place[0][place[1]]
            keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
            places += [(value, key) for key in keys]
        inside, key = self.random.choice(places)
        change = self.random.randrange(8)
        if change == 0 and inside is not root:
            del inside[key]
        elif change == 1 and isinstance(inside, dict):
            inside[self.random.choice(("", "x", "\0", "-1", "x" * 300))] = inside.pop(key)
        elif change == 2:
            other = self.random.choice(places)
            inside[key] = json.loads(json.dumps(other[0][other[1]]))
        else:
            inside[key] = self.random.choice(VALUES)
        return json.dumps(root[0], ensure_ascii=self.random.random() < 0.5).encode(errors="surrogatepass")

    def lines(self, data: bytes) -> bytes:
        """Lines in another order, twice, many times, joined, or with other ends."""
        lines = data.split(b"\n")
        change = self.random.randrange(5)
        if change == 0:
            self.random.shuffle(lines)
        elif change == 1:
            lines.insert(self.random.randrange(len(lines) + 1), self.random.choice(lines))
        elif change == 2:
            lines = lines * min(200, 1 + 100_000 // (len(data) + 1))
        return (b"", b" ", b"\r\n")[change - 3].join(lines) if change > 2 else b"\n".join(lines)

    def _instead_of_a_word(self, data: bytes, value: bytes) -> bytes:
        words = [*re.finditer(rb"[\w.]+", data[: 1 << 16])]
        if not words:
            return value
        found = self.random.choice(words)
        return data[: found.start()] + value + data[found.end() :]
