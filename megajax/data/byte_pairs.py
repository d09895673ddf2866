"""Byte-pair tokenizers from files other than tokenizer.json, as `tokenizers.Tokenizer`: GPT-2's two files, tiktoken's.

tiktoken's files hold ranks only. How text is cut into words and the special tokens are part of the encoding's name, so
they are here: those of OpenAI's encodings by file name, Llama 3's for every other file.
"""

import base64
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megajax.data.special_tokens import FolderTokens
from megajax.errors import InputError, reported
from megajax.files import is_number

if TYPE_CHECKING:
    import tokenizers

GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_UPPER, _LOWER, _SHORT = (
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
)
O200K_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_NAMED = {0: "begin_of_text", 1: "end_of_text", 6: "start_header_id", 7: "end_header_id", 9: "eot_id"}
LLAMA3_FILES = ("tokenizer", "llama3")  # Meta publishes it as tokenizer.model
LONGEST_LINE = 1024  # letters of a token in base64; the time to find its merges is quadratic in it
LLAMA3_SPECIAL = 256  # after the ranks; those without a name are reserved


class Encoding(NamedTuple):
    """The pattern of words and the special tokens, which a tiktoken file does not hold."""

    words: str
    special: dict[str, int]


ENCODINGS = {
    "r50k_base": Encoding(GPT2_WORDS, {"<|endoftext|>": 50256}),
    "p50k_base": Encoding(GPT2_WORDS, {"<|endoftext|>": 50256}),
    "cl100k_base": Encoding(
        LLAMA3_WORDS,
        {
            "<|endoftext|>": 100257,
            "<|fim_prefix|>": 100258,
            "<|fim_middle|>": 100259,
            "<|fim_suffix|>": 100260,
            "<|endofprompt|>": 100276,
        },
    ),
    "o200k_base": Encoding(O200K_WORDS, {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}),
}


def read_gpt2(folder: Path, end_names: tuple[str, ...]) -> "tokenizers.Tokenizer":
    """The tokenizer of GPT-2's `vocab.json` and `merges.txt`; tokens of `end_names` are special. Raises InputError."""
    import tokenizers

    with reported(f"{folder} has a vocab.json and a merges.txt that are not GPT-2's", "copy both again"):
        model = tokenizers.models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    tokenizer = _byte_level(model, None)
    tokenizer.add_special_tokens([name for name in end_names if model.token_to_id(name) is not None])
    return tokenizer


def is_tiktoken(path: Path) -> bool:
    """Whether the file's first line is a token in base64 and its rank, whatever its name: Llama 3's is a .model."""
    with open(path, "rb") as file:
        words = file.readline(1000).split()
    try:
        return (
            len(words) == 2
            and is_number(words[1].decode(errors="replace"))
            and bool(base64.b64decode(words[0], validate=True))
        )
    except ValueError:
        return False


def read_tiktoken(path: Path) -> "tokenizers.Tokenizer":
    """The tokenizer of a tiktoken file, a token in base64 and its rank a line, token for token as tiktoken's.

    Raises InputError for a damaged file.
    """
    import tokenizers

    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token[:LONGEST_LINE], validate=True)] = int(rank)
            if len(token) > LONGEST_LINE or not 0 <= int(rank) < 2**31:
                raise ValueError
        except ValueError:
            raise InputError(
                f"{path}, line {number} is not a token in base64 and its rank: copy the file again."
            ) from None
    missing = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if missing is not None or len(set(ranks.values())) < len(ranks):
        problem = "gives one rank to two tokens" if missing is None else f"has no token for the byte {missing}"
        raise InputError(f"{path} {problem}, so it is not a tiktoken file: copy it again.")
    words, special = _encoding(path, max(ranks.values()) + 1)
    letters = _letters()
    names = {token: "".join(letters[byte] for byte in token) for token in ranks}
    pairs = (pair for token in sorted(ranks, key=ranks.__getitem__) for pair in _pairs(token, ranks))
    merges = [(names[first], names[second]) for first, second in pairs]
    vocabulary = {names[token]: rank for token, rank in ranks.items()} | special
    with reported(f"{path} is not a tiktoken file", "copy it again"):
        model = tokenizers.models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True)
    tokenizer = _byte_level(model, words)
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def add_missing(tokenizer: "tokenizers.Tokenizer", found: FolderTokens) -> None:
    """Add the tokens that only the files beside a tokenizer have; texts are cut at them, as in transformers.

    What these files say of a token counts before the tokenizer's own file. Raises InputError if one would get another
    id than there.
    """
    import tokenizers

    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    names = {*found.names.values()}
    for number, token in sorted(found.added.items()):
        if token.content not in known or token.has_flags:
            flags = {name: getattr(token, name) for name in ("lstrip", "rstrip", "single_word", "normalized")}
            special = token.special or token.content in names
            tokenizer.add_tokens([tokenizers.AddedToken(token.content, special=special, **flags)])
        if token.content not in known:
            known.add(token.content)
            if tokenizer.token_to_id(token.content) != number:
                raise InputError(
                    f"tokenizer_config.json gives {token.content} the id {number}, but the tokenizer beside it "
                    f"{tokenizer.token_to_id(token.content)}: copy all of the tokenizer's files again."
                )
    tokenizer.add_special_tokens([name for name in names - known if tokenizer.token_to_id(name) is not None])


def _encoding(path: Path, size: int) -> Encoding:
    """The encoding that the file's name says; InputError for another name, whose tokens would be wrong."""
    name = path.name.split(".")[0]
    if name in LLAMA3_FILES:
        return Encoding(LLAMA3_WORDS, _llama3_special(size))
    if name not in ENCODINGS:
        known = ", ".join(f"{known}.tiktoken" for known in (*ENCODINGS, *LLAMA3_FILES[1:]))
        raise InputError(
            f"{path} names no known encoding, and a tiktoken file does not say how text is cut into words: call it "
            f"{known}, or give the model's tokenizer.json."
        )
    return ENCODINGS[name]


def _pairs(token: bytes, ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The pairs of tokens that byte-pair encoding merges to this one.

    Usually one: the two parts that the merges of lower rank leave of it. If they leave more, merges of higher rank may
    come first, so every pair counts.
    """
    parts, rank = [bytes([byte]) for byte in token], ranks[token]
    while len(parts) > 2:
        best, at = min((ranks.get(a + b, rank), i) for i, (a, b) in enumerate(pairwise(parts)))
        if best >= rank:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    if len(parts) == 2:
        return [(parts[0], parts[1])]
    cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
    return [(first, second) for first, second in cuts if first in ranks and second in ranks]


def _llama3_special(first: int) -> dict[str, int]:
    reserved = (i for i in range(LLAMA3_SPECIAL) if i not in LLAMA3_NAMED)
    names = LLAMA3_NAMED | {place: f"reserved_special_token_{i}" for i, place in enumerate(reserved)}
    return {f"<|{names[place]}|>": first + place for place in range(LLAMA3_SPECIAL)}


def _byte_level(model: "tokenizers.models.BPE", words: str | None) -> "tokenizers.Tokenizer":
    """A tokenizer of bytes that cuts text into `words` first; None: as GPT-2 does."""
    import tokenizers
    from tokenizers import pre_tokenizers

    tokenizer = tokenizers.Tokenizer(model)
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None)
    cut = [] if words is None else [pre_tokenizers.Split(tokenizers.Regex(words), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cut, in_bytes])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def _letters() -> list[str]:
    """GPT-2's letter for each byte: printable Latin-1 itself, the others in order from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]
