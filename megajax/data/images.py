"""Pictures of a model with a vision tower: their tokens in a text, and the batch's fields of patches.

docs/vision.md has the fields. Everything about a picture follows from its file and the config, so a batch stays a
function of seed, index and data.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megajax.data.encoding import BadLines
from megajax.data.image_processing import ImageProcessor, cut_patches, default_processor, find_processor, patch_order
from megajax.data.index_cache import cache_directory
from megajax.data.model_files import token_texts, tokenizer_config
from megajax.data.pictures import Picture, PictureError, PictureFiles
from megajax.data.tokenizers import Tokenizer, load_tokenizer, tokenizer_files
from megajax.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

    from megajax.config import Config
    from megajax.data.rendering import Span
    from megajax.schema.vision import VisionConfig

BORDERS = ("boi_token", "eoi_token")  # Gemma 3's names of the tokens around a picture's


class SizedPicture(NamedTuple):
    """A picture and the numbers of its patches."""

    picture: Picture
    rows: int
    columns: int


class PlacedPicture(NamedTuple):
    """A picture of a sample, and the position of its first token there."""

    sized: SizedPicture
    first: int


@dataclass(frozen=True)
class ImageText:
    """A picture in texts: as a chat template writes it, and as it is tokenised, with `token` in it once."""

    template: str
    tokenised: str

    def written(self, text: str, spans: Sequence["Span"] = ()) -> tuple[str, list["Span"]]:
        """(a template's text as it is tokenised, the spans of it)."""
        if self.template == self.tokenised:
            return text, list(spans)
        parts = text.split(self.template)
        ends = np.array(list(accumulate(len(part) + len(self.template) for part in parts[:-1])))
        more = len(self.tokenised) - len(self.template)

        def moved(place: int) -> int:
            return place + more * int(np.searchsorted(ends, place, side="right"))

        return self.tokenised.join(parts), [(moved(start), moved(stop)) for start, stop in spans]


@dataclass(frozen=True)
class Images:
    """What a config makes of pictures."""

    vision: "VisionConfig"
    processor: ImageProcessor
    text: ImageText
    has_rope_positions: bool
    files: PictureFiles

    @property
    def key(self) -> list:
        """All that decides a picture's size in patches and its tokens, for the names of stored files."""
        vision = self.vision
        sizes = vision.patch_size, vision.merge, vision.patches_per_row, vision.image_token, vision.class_token
        return [repr(self.processor), list(sizes), [self.text.template, self.text.tokenised]]

    @property
    def files_key(self) -> list:
        """What of `key` the tokenizer's folder decides, and not the config; None for a default processor."""
        own = None if self.processor == default_processor(self.vision) else repr(self.processor)
        return [own, self.text.template, self.text.tokenised]

    def entries(self, sized: SizedPicture) -> int:
        """The picture's entries of a row of patches."""
        return sized.rows * sized.columns + self.vision.class_token

    def tokens(self, sized: SizedPicture) -> int:
        """The number of the picture's tokens."""
        return sized.rows * sized.columns // self.vision.merge**2

    def sized(self, picture: Picture) -> SizedPicture:
        """Decodes a picture for its size; PictureError if it cannot be used."""
        image, vision = self.files.image(picture), self.vision
        size = self.processor.size(image.height, image.width, vision.patch_size * vision.merge)
        found = SizedPicture(picture, *(side // vision.patch_size for side in size))
        if found.rows % vision.merge or found.columns % vision.merge or not found.rows * found.columns:
            raise PictureError(f"has {found.rows} x {found.columns} patches, which model.vision.merge does not divide")
        if (entries := self.entries(found)) > vision.patches_per_row:
            raise PictureError(f"has {entries:,} patches, but model.vision.patches_per_row={vision.patches_per_row}")
        return found

    def expanded(
        self, ids: Sequence[int], counted: np.ndarray, pictures: Sequence[SizedPicture], least: int
    ) -> tuple[list[int], np.ndarray, list[PlacedPicture]]:
        """(tokens with all those of each picture, whether the loss counts each, its pictures).

        `ids` have `least` pictures or more: others belong to a later part of the conversation. Raises ValueError if
        they have fewer, or image tokens of no picture.
        """
        all_ids = np.asarray(ids)
        places = np.flatnonzero(all_ids == self.vision.image_token)
        if len(places) > len(pictures):
            raise ValueError(
                f"has {len(places)} times the text {self.text.template}, but its pictures are {len(pictures)}: remove "
                "the text"
            )
        if len(places) < least:
            raise ValueError(f"has {least} pictures, but the chat template writes {len(places)}: correct it")
        numbers = np.array([self.tokens(each) for each in pictures[: len(places)]], np.int64)
        repeats = np.ones(len(all_ids), np.int64)
        repeats[places] = numbers
        kept = counted.copy()
        kept[places] = False
        firsts = places - np.arange(len(places)) + np.cumsum(numbers) - numbers
        placed = [PlacedPicture(each, first) for each, first in zip(pictures, firsts.tolist(), strict=False)]
        return np.repeat(all_ids, repeats).tolist(), np.repeat(kept, repeats), placed

    def fitting(self, placed: Sequence[PlacedPicture], capacity: int) -> tuple[int, list[PlacedPicture]]:
        """(the tokens of a sample that fit into `capacity` and have whole pictures that fit into a row, these)."""
        used = 0
        for number, (sized, first) in enumerate(placed):
            used += self.entries(sized)
            if used > self.vision.patches_per_row or first + self.tokens(sized) > capacity:
                return min(first, capacity), list(placed[:number])
        return capacity, list(placed)

    def entries_of(self, sized: SizedPicture) -> tuple[np.ndarray, np.ndarray]:
        """(patches float32 [entries, dim], positions int32 [entries, 2]); InputError for a picture that changed."""
        vision, (picture, rows, columns) = self.vision, sized
        try:
            pixels = self.processor(self.files.image(picture), vision.patch_size * vision.merge)
        except PictureError as error:
            raise InputError(f"{picture.location}: the picture {picture.title} {error}: restore it.") from None
        if tuple(side // vision.patch_size for side in pixels.shape[1:]) != (rows, columns):
            raise InputError(
                f"{picture.location}: the picture {picture.title} has another size than when its tokens were stored: "
                "restore it, or remove data.index_cache."
            )
        return self.arranged(pixels)

    def arranged(self, pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The entries of a picture's pixels [3, height, width]."""
        vision = self.vision
        rows, columns = (side // vision.patch_size for side in pixels.shape[1:])
        order = patch_order(rows, columns, vision.merge, vision.window)
        patches = cut_patches(pixels, vision.patch_size, vision.temporal_patch_size)[order]
        positions = np.stack(np.divmod(order, columns), axis=1).astype(np.int32)
        if vision.class_token:
            patches = np.concatenate([np.zeros_like(patches[:1]), patches])
            positions = np.concatenate([np.full((1, 2), -1, np.int32), positions])
        return patches, positions

    def shown(self, patches: np.ndarray, positions: np.ndarray) -> "Image":
        """The picture that has these entries, without what the model does not see of it."""
        from PIL import Image

        side, processor = self.vision.patch_size, self.processor
        real = positions[:, 0] >= 0
        (rows, columns), patches = (
            positions[real].T,
            patches[real].reshape(-1, 3, self.vision.temporal_patch_size, side, side),
        )
        pixels = np.zeros((rows.max() + 1, side, columns.max() + 1, side, 3), np.float32)
        pixels[rows, :, columns] = patches[:, :, 0].transpose(0, 2, 3, 1)
        if processor.normalises:
            pixels = pixels * np.asarray(processor.std, np.float32) + np.asarray(processor.mean, np.float32)
        pixels = pixels.reshape(pixels.shape[0] * side, -1, 3) / (processor.scale or 1)
        return Image.fromarray(np.uint8(np.clip(np.rint(pixels), 0, 255)))

    def embedding_order(self, sized: SizedPicture) -> np.ndarray:
        """For each token of a picture the index of its embedding among the picture's entries / merge², int64."""
        merge, window = self.vision.merge, self.vision.window
        blocks = patch_order(sized.rows // merge, sized.columns // merge, 1, window and window // merge)
        return np.argsort(blocks) + self.vision.class_token

    def fields(
        self,
        of_rows: Sequence[tuple[Sequence[PlacedPicture], np.ndarray]],
        length: int,
        resets: bool,
        entries: int | None = None,
    ) -> dict[str, np.ndarray]:
        """The fields of rows of `length` tokens: of each its pictures and the lengths of its documents.

        With `resets` positions begin again in each document. `entries` is the room for patches; None: the config's.
        """
        vision, rows = self.vision, len(of_rows)
        entries = entries or vision.patches_per_row
        fields = {
            "patches": np.zeros((rows, entries, vision.patch_dim), np.float32),
            "patch_segments": np.full((rows, entries), -1, np.int32),
            "patch_positions": np.zeros((rows, entries, 2), np.int32),
            "image_index": np.full((rows, length), -1, np.int32),
        }
        for row, (placed, _) in enumerate(of_rows):
            filled = 0
            for number, (sized, first) in enumerate(placed):
                patches, positions = self.entries_of(sized)
                stop = filled + len(patches)
                fields["patches"][row, filled:stop] = patches
                fields["patch_segments"][row, filled:stop] = number
                fields["patch_positions"][row, filled:stop] = positions
                index = filled // vision.merge**2 + self.embedding_order(sized)
                here = fields["image_index"][row, first : first + len(index)]  # the last ones may be targets only
                here[:] = index[: len(here)]
                filled = stop
        if self.has_rope_positions:
            starts = [np.cumsum(each) - each if resets else np.zeros(1, int) for _, each in of_rows]
            placed = [each for each, _ in of_rows]
            rope = [self.rope_positions(*each, length) for each in zip(placed, starts, strict=True)]
            fields["rope_positions"] = np.stack(rope)
        return fields

    def rope_positions(self, placed: Sequence[PlacedPicture], starts: np.ndarray, length: int) -> np.ndarray:
        """Qwen2-VL's positions of time, row and column, int32 [length, 3]: 0 at each of `starts`.

        A picture's tokens have the time of its first one and their row and column after it; the text behind it goes on
        after the largest of them.
        """
        # Each event is a picture (its first token, rows and columns of its tokens) or a document's start.
        merge = self.vision.merge
        events = [(first, sized.rows // merge, sized.columns // merge) for sized, first in placed]
        events += [(int(start), 0, 0) for start in starts] + [(length, 0, 0)]
        found, position, following = np.zeros((length, 3), np.int32), 0, 0
        for first, rows, columns in sorted(events):
            first = min(first, length)
            found[position:first] = (following + np.arange(first - position))[:, None]
            following += first - position
            if not rows:
                position, following = first, 0
                continue
            grid = np.stack(
                [np.zeros(rows * columns, np.int32), *np.divmod(np.arange(rows * columns), columns)], axis=1
            )
            here = found[first : first + len(grid)]
            here[:] = (following + grid)[: len(here)]
            position, following = min(first + len(grid), length), following + max(rows, columns)
        return found


class PictureTable(NamedTuple):
    """The pictures of stored conversations, as arrays.

    `ends` int64 [conversations]: where those of each end in the others; `places` int64 [pictures, 3]: the first token
    in the conversation, rows and columns of patches; `names` uint8: JSON of each `Picture`, and `name_ends` int64.
    `bad` uint8: JSON of the number of conversations left out because of their pictures, and of sentences about some.
    """

    ends: np.ndarray
    places: np.ndarray
    names: np.ndarray
    name_ends: np.ndarray
    bad: np.ndarray

    @classmethod
    def of(cls, conversations: Sequence[Sequence[PlacedPicture]], left_out: BadLines) -> "PictureTable":
        """The table of conversations' pictures; others are left out."""
        flat = [placed for each in conversations for placed in each]
        names = [json.dumps(placed.sized.picture).encode() for placed in flat]
        return cls(
            np.cumsum([len(each) for each in conversations], dtype=np.int64),
            np.array([(first, sized.rows, sized.columns) for sized, first in flat], np.int64).reshape(-1, 3),
            np.frombuffer(b"".join(names) or b" ", np.uint8),
            np.cumsum([len(name) for name in names], dtype=np.int64),
            np.frombuffer(json.dumps(left_out).encode(), np.uint8),
        )

    @property
    def left_out(self) -> BadLines:
        """The conversations that are left out because of their pictures."""
        return BadLines(*json.loads(self.bad.tobytes()))

    def pictures(self, item: int) -> list[PlacedPicture]:
        """The pictures of a conversation; their positions are those in it."""
        found = []
        for number in range(int(self.ends[item - 1]) if item else 0, int(self.ends[item])):
            start = int(self.name_ends[number - 1]) if number else 0
            picture = Picture(*json.loads(self.names[start : int(self.name_ends[number])].tobytes()))
            first, rows, columns = self.places[number].tolist()
            found.append(PlacedPicture(SizedPicture(picture, rows, columns), first))
        return found

    def entries(self, images: Images) -> np.ndarray:
        """The entries of a row of patches that each conversation takes, int64 [conversations]."""
        each = np.concatenate([[0], np.cumsum(self.places[:, 1] * self.places[:, 2] + images.vision.class_token)])
        return np.diff(each[np.concatenate([[0], self.ends])])


def open_images(config: "Config") -> Images | None:
    """What a config makes of pictures; None without a vision tower. Data that are no chats have none.

    Raises InputError if the tokenizer lacks the image token, or its folder has a processor that does not fit.
    """
    vision, data = config.model.vision, config.data
    if vision is None:
        return None
    has_rope, cache = config.model.rope_sections is not None, PictureFiles(cache_directory(config))
    if data.kind != "chat" or data.tokenizer is None:
        return Images(vision, find_processor(None, vision), ImageText("", ""), has_rope, cache)
    files = tokenizer_files(data.tokenizer)
    folder = files[0].parent if files else None
    text = image_text(load_tokenizer(data.tokenizer), data.tokenizer, folder, vision.image_token)
    return Images(vision, find_processor(folder, vision), text, has_rope, cache)


def image_text(tokenizer: Tokenizer, spec: str, folder: Path | None, token: int) -> ImageText:
    """How a picture is written; Gemma 3's chat template writes the token that begins one. `spec` is for errors."""
    name = next((each for each in tokenizer.added_tokens if tokenizer.token_id(each) == token), None)
    if name is None:
        raise InputError(
            f"the tokenizer {spec} has no added token with the id {token}: set model.vision.image_token to the id of "
            "its image token."
        )
    config = {} if folder is None else tokenizer_config(folder)
    named = config.get("extra_special_tokens")
    borders = token_texts(config | (named if isinstance(named, dict) else {}), BORDERS)
    if len(borders) < len(BORDERS):
        return ImageText(name, name)
    before, after = (borders[key] for key in BORDERS)
    return ImageText(before, f"\n\n{before}{name}{after}\n\n")
