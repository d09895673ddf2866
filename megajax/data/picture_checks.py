"""Pictures of conversations, looked at before the first step: each that cannot be used is named and counted."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count
from pathlib import Path
from typing import TYPE_CHECKING

from megajax.data.encoding import BadLines
from megajax.data.images import Images, SizedPicture
from megajax.data.pictures import Picture, PictureError
from megajax.data.workers import in_order
from megajax.errors import counted

if TYPE_CHECKING:
    from megajax.data.chat import ConversationSamples

AHEAD = 4  # conversations for each thread


class BadPictures:
    """Conversations that are left out because of a picture, and sentences about the first ones."""

    def __init__(self) -> None:
        self.lines = BadLines(0, [])

    def add(self, sentence: str) -> None:
        self.lines = self.lines.plus(BadLines(1, [sentence]))


def warn_of_pictures(paths: Sequence[str], bad: BadLines, stored: Path | None = None) -> None:
    """Names the conversations that were left out; `stored` is the folder that has the others' tokens."""
    if bad.count:
        again = "" if stored is None else f" After correcting them, remove {stored}, or they stay left out."
        what = f"{', '.join(paths)}: {counted(bad.count, 'conversation')} with bad pictures left out."
        warnings.warn(f"{what}{again}{bad.named()}", stacklevel=2)


def with_pictures(
    chats: Iterable["ConversationSamples"], images: Images | None, bad: BadPictures
) -> Iterator[tuple["ConversationSamples", list[SizedPicture]]]:
    """The conversations with their pictures, decoded in threads for their sizes; those with a bad one go to `bad`."""
    if images is None:
        yield from ((chat, []) for chat in chats)
        return
    threads = cpu_count() or 1
    with ThreadPoolExecutor(threads, "pictures") as pool:
        for chat, found in in_order(lambda chat: pool.submit(_sized, images, chat), chats, AHEAD * threads):
            if isinstance(found, str):
                bad.add(found)
            else:
                yield chat, found


def _sized(images: Images, chat: "ConversationSamples") -> tuple["ConversationSamples", list[SizedPicture] | str]:
    """A conversation and its pictures, or a sentence about the first bad one."""
    found = list[SizedPicture]()
    for number, name in enumerate(chat.pictures, start=1):
        picture = Picture(name, chat.file, chat.location)
        try:
            found.append(images.sized(images.files.keep(picture)))
        except PictureError as error:
            return chat, f"{chat.location}, picture {number}: {picture.title} {error}"
    return chat, found
