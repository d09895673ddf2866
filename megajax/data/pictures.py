"""Picture files: found beside the data, in a shard or at a URL, and decoded by Pillow within limits.

A picture is data from elsewhere. Only formats whose decoders just read pixels are opened: for EPS Pillow runs another
program.
"""

import threading
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megajax.data.index_cache import file_identity, text_digest
from megajax.data.remote import RemoteFile
from megajax.data.shards import Shard, is_shard
from megajax.errors import InputError, UserError, shown
from megajax.extras import require
from megajax.files import why_unreadable
from megajax.schema.data import is_remote

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
MOST_PIXELS = 1 << 26  # 200 MB of RGB
MOST_BYTES = 1 << 27
SCHEMES = ("http", "https", "s3", "gs", "gcs", "az", "abfs", "hf", "file")  # fsspec has others, which may run programs
OPEN_SHARDS = 64


class PictureError(ValueError):
    """A picture that cannot be used; the message is the rest of a sentence that begins with its name."""


class Picture(NamedTuple):
    """A picture as the data name it: relative to the folder of `file`, or in this shard, absolute, or a URL.

    `location` says who names it, for errors.
    """

    name: str
    file: str
    location: str


class PictureFiles:
    """Reads pictures; `cache` keeps remote ones. Threads may share it."""

    def __init__(self, cache: Path):
        self.cache = cache
        self._lock = threading.Lock()
        self._shard = lru_cache(OPEN_SHARDS)(self._opened)

    def __reduce__(self):
        return PictureFiles, (self.cache,)

    def shard(self, path: str) -> Shard:
        """The members of a tar file."""
        with self._lock:
            return self._shard(path)

    def _opened(self, path: str) -> Shard:
        return Shard(path, self.cache)

    def identity(self, path: str) -> str:
        """A text that changes with a shard."""
        return RemoteFile(path, self.cache).identity if is_remote(path) else text_digest(file_identity(path))

    def image(self, picture: Picture) -> "Image":
        """The decoded picture, RGB, upright. Raises PictureError."""
        try:
            data = self._bytes(picture)
        except UserError as error:
            raise PictureError(f"cannot be read: {error}") from None
        except OSError as error:
            raise PictureError(f"cannot be read ({why_unreadable(error)})") from None
        return decode(data)

    def _bytes(self, picture: Picture) -> bytes:
        name = picture.name
        if is_remote(name):
            if name.partition("://")[0] not in SCHEMES:
                raise InputError(f"its URL does not begin with one of {', '.join(SCHEMES)}.")
            remote = RemoteFile(name, self.cache)
            _check_size(remote.size)
            return remote.read(0, remote.size)
        if is_shard(picture.file) and not Path(name).is_absolute():
            return self.shard(picture.file).read(name, MOST_BYTES)
        path = Path(picture.file).parent / name
        if not path.is_file():
            raise PictureError(f"does not exist or is not a file ({path})")
        _check_size(path.stat().st_size)
        return path.read_bytes()


def _check_size(size: int) -> None:
    if size > MOST_BYTES:
        raise PictureError(f"has {size:,} bytes, more than {MOST_BYTES:,}")


def decode(data: bytes) -> "Image":
    """The picture in a file's bytes: its first frame, RGB, turned as its EXIF data say. Raises PictureError."""
    require("vision", "reading pictures")
    from PIL import ImageOps, UnidentifiedImageError
    from PIL.Image import DecompressionBombError
    from PIL.Image import open as open_image

    try:
        with open_image(BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > MOST_PIXELS:
                raise PictureError(f"has {image.width} x {image.height} pixels, more than {MOST_PIXELS:,}")
            image.load()
            return ImageOps.exif_transpose(image).convert("RGB")
    except PictureError:
        raise
    except DecompressionBombError:
        raise PictureError(f"has more than {MOST_PIXELS:,} pixels") from None
    except UnidentifiedImageError:
        raise PictureError(f"is no picture of the formats {', '.join(FORMATS)}") from None
    except Exception as error:  # each decoder has errors of its own
        raise PictureError(f"is damaged or incomplete ({shown(error)})") from None
