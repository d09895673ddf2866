"""A tokenizer from elsewhere is tried in a child process with limits before this process uses it.

Its regular expressions can take for ever, and its libraries can end the process. This module imports little, so that a
child starts fast.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from megajax.data.sandbox import LimitedProcess, Stopped
from megajax.data.text_growth import charsmap_growth, check_growth, growth
from megajax.errors import InputError, shown

CURE = "give another tokenizer"
MEMORY, MEMORY_OF_BYTE = 2**30, 32  # bytes of address space, and those for each byte of the file: loading takes 12
SECONDS, BYTES_PER_SECOND = 2, 4_000_000  # of the processor: ten times and four times what is needed
PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
TRIED = "MEGAJAX_TRIED_TOKENIZERS"  # digests, in a variable so that processes that this one starts have them too

LETTERS = "aZé中ー0. \t\n\r\u00a0\u0301_-/='\"()<>\\\U0001f600"
RUNS = (300, 3000)  # what is linear, or fails at once, passes; cubic steps of a regular expression do not
MOST_LETTERS = 256  # of one tokenizer
MIXED = "".join(filter(str.isprintable, map(chr, [*range(0, 0xD800, 61), *range(0xE000, 0x110000, 61)])))
WORDS = "The 3 cats' naïve owner (aged 42) wrote: \"don't!\"\r\n\tДва 中文 é https://example.com/a_b?c=1  \n\n"


def try_tokenizer(path: Path) -> None:
    """Raise InputError if a tokenizer.json or SentencePiece model reaches a limit or ends its process at a trial text.

    Each content is tried once by this process and those that it starts. What the libraries report as an error is left
    to those who use the tokenizer.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "blake2b").hexdigest()[:32]
        size = file.tell()
    tried = os.environ.get(TRIED, "").split()
    if digest in tried:
        return
    work = _try_json if path.suffix == ".json" else _try_pieces
    child = LimitedProcess(MEMORY + MEMORY_OF_BYTE * size, SECONDS + size // BYTES_PER_SECOND)
    try:
        child.run(f"the tokenizer {path}", CURE, work, str(path))
    except Stopped as stopped:
        raise stopped.error from None
    os.environ[TRIED] = " ".join([*tried, digest])


def trial_texts(letters: Iterable[str]) -> Iterator[str]:
    """Mixed text, and runs of each letter, short ones first, before something else and all of the letters."""
    yield from (WORDS, MIXED, 30 * WORDS)
    every = list(dict.fromkeys([*LETTERS, *letters]))[:MOST_LETTERS]
    rest = "".join(every)  # a regular expression that needs a letter is tried only where the letter follows
    for length in RUNS:
        yield from (f"{letter * length}{end}{rest}" for letter in every for end in "!\n")


def _try_json(path: str) -> Iterator[None]:
    from tokenizers import Tokenizer

    if (found := _loaded(Tokenizer.from_file, path)) is not None:
        parts = {name: part.__getstate__() for name in PARTS if (part := getattr(found, name)) is not None}
        for name, part in parts.items():
            check_growth(growth(json.loads(part)), name, path)
        letters = b"".join(parts.values()).decode()
        _try(path, lambda text: found.encode(text).ids, found.decode, found.get_vocab_size(), letters)
    return iter(())


def _try_pieces(path: str) -> Iterator[None]:
    from sentencepiece import SentencePieceProcessor
    from sentencepiece import sentencepiece_model_pb2 as messages

    if (found := _loaded(lambda path: SentencePieceProcessor(model_file=path), path)) is not None:
        stored: Any = vars(messages)["ModelProto"].FromString(found.serialized_model_proto())
        for part in ("normalizer", "denormalizer"):
            check_growth(charsmap_growth(getattr(stored, f"{part}_spec").precompiled_charsmap), part, path)
        _try(path, found.EncodeAsIds, found.DecodeIds, found.vocab_size(), "")
    return iter(())


def _loaded(load: Callable[[str], Any], path: str) -> Any:
    """What `load` gives; None after an error, which the tokenizer's user gets too, as a panic of Rust."""
    try:
        return load(path)
    except BaseException:
        return None


def _try(
    path: str, encode: Callable[[str], list[int]], decode: Callable[[list[int]], str], size: int, letters: str
) -> None:
    tries = [partial(decode, [*range(size)]), *(partial(encode, text) for text in trial_texts(letters))]
    for attempt in tries:
        try:
            attempt()
        except Exception:  # such as a tokenizer without a token for all that is unknown
            pass
        except BaseException as panic:  # of Rust, such as of a regular expression that goes back too often
            raise InputError(f"the tokenizer {path} fails at a text ({shown(panic)}): {CURE}.") from None
