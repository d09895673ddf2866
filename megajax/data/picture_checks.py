"""Pictures of conversations, looked at before the first step: each that cannot be used is named and counted."""

import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from os import cpu_count
from typing import TYPE_CHECKING

from megajax.data.encoding import BAD_SHOWN, BadLines
from megajax.data.images import Images, SizedPicture
from megajax.data.pictures import Picture, PictureError
from megajax.errors import counted

if TYPE_CHECKING:
    from megajax.data.chat import ConversationSamples

AHEAD = 4  # conversations for each thread


class BadPictures:
    """Conversations that are left out because of a picture, and sentences about the first ones."""

    def __init__(self) -> None:
        self.count, self.first = 0, list[str]()

    def add(self, sentence: str) -> None:
        self.count += 1
        self.first += [sentence] * (len(self.first) < BAD_SHOWN)

    def warn(self, paths: Sequence[str]) -> None:
        if self.count:
            what = f"{', '.join(paths)}: {counted(self.count, 'conversation')} with bad pictures left out."
            warnings.warn(f"{what}{BadLines(self.count, self.first).named()}", stacklevel=2)


def with_pictures(
    chats: Iterable["ConversationSamples"], images: Images | None, bad: BadPictures
) -> Iterator[tuple["ConversationSamples", list[SizedPicture]]]:
    """The conversations with their pictures, decoded in threads for their sizes; those with a bad one go to `bad`."""
    if images is None:
        yield from ((chat, []) for chat in chats)
        return
    threads = cpu_count() or 1
    with ThreadPoolExecutor(threads, "pictures") as pool:
        waiting = deque[tuple["ConversationSamples", Future[list[SizedPicture] | str]]]()

        def next_good() -> Iterator[tuple["ConversationSamples", list[SizedPicture]]]:
            chat, coming = waiting.popleft()
            found = coming.result()
            if isinstance(found, str):
                bad.add(found)
            else:
                yield chat, found

        for chat in chats:
            waiting.append((chat, pool.submit(_sized, images, chat)))
            if len(waiting) > AHEAD * threads:
                yield from next_good()
        while waiting:
            yield from next_good()


def _sized(images: Images, chat: "ConversationSamples") -> list[SizedPicture] | str:
    """The pictures of a conversation, or a sentence about the first bad one."""
    found = list[SizedPicture]()
    for number, name in enumerate(chat.pictures, start=1):
        try:
            found.append(images.sized(Picture(name, chat.file, chat.location)))
        except PictureError as error:
            return f"{chat.location}, picture {number}: {name} {error}"
    return found
