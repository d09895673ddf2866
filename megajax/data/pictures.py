"""Pictures: files beside the data, in a shard, at a URL or in the line itself, decoded by Pillow within limits.

A picture is data from elsewhere. Only formats whose decoders just read pixels are opened: for EPS Pillow runs another
program.
"""

import base64
import binascii
import hashlib
import os
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from uuid import uuid4

from megajax.data.index_cache import file_identity, storage_errors, text_digest
from megajax.data.remote import RemoteFile
from megajax.data.shards import Shard, is_shard
from megajax.data.workers import shared_cache
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
EMBEDDED = "data:"  # a picture's bytes in its name, as in URLs: data:image/png;base64,...
SHOWN = 40  # characters of an embedded picture in an error
KEPT = "embedded:"  # before the digest of bytes that `PictureFiles.keep` has written


class PictureError(ValueError):
    """A picture that cannot be used; the message is the rest of a sentence that begins with its name."""


class Picture(NamedTuple):
    """A picture as the data name it: relative to the folder of `file`, or in this shard, absolute, or a URL.

    The name of a picture that a line contains is its bytes. `location` says who names it, for errors.
    """

    name: str
    file: str
    location: str

    @property
    def title(self) -> str:
        """What errors call it."""
        return shown(f"{self.name[:SHOWN]}..." if self.name.startswith(EMBEDDED) else self.name)


def embedded(data: bytes) -> str:
    """The name of a picture with these bytes."""
    return f"{EMBEDDED};base64,{base64.b64encode(data).decode()}"


class PictureFiles:
    """Reads pictures; `cache` keeps remote ones. Threads may share it."""

    def __init__(self, cache: Path):
        self.cache = cache
        self.shard = shared_cache(OPEN_SHARDS, lambda path: Shard(path, cache))  # the members of a tar file

    def __reduce__(self):
        return PictureFiles, (self.cache,)

    def identity(self, path: str) -> str:
        """A text that changes with a shard."""
        return RemoteFile(path, self.cache).identity if is_remote(path) else text_digest(file_identity(path))

    def keep(self, picture: Picture) -> Picture:
        """The picture with a short name; the bytes of one that a line contains are written to `cache` once."""
        if not picture.name.startswith(EMBEDDED):
            return picture
        data = _bytes_of(picture.name)
        digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        path = self._kept(digest)
        with storage_errors(path.parent):
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                partial = path.with_name(f"{path.name}.{uuid4().hex}.partial")
                partial.write_bytes(data)
                os.replace(partial, path)
        return picture._replace(name=KEPT + digest)

    def _kept(self, digest: str) -> Path:
        return self.cache / "pictures" / digest[:2] / digest

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
        if name.startswith(EMBEDDED):
            return _bytes_of(name)
        if name.startswith(KEPT):
            return self._kept(name.removeprefix(KEPT)).read_bytes()
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


def _bytes_of(name: str) -> bytes:
    """The bytes of an EMBEDDED picture."""
    head, _, text = name.partition(",")
    if not head.endswith(";base64"):
        raise PictureError('is a data URL without ";base64,": write the bytes in base64 after data:image/png;base64,')
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise PictureError(f"is a data URL whose base64 is damaged ({error})") from None


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
