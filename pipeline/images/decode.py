"""Turning image bytes into the picture that every stage sees, and checking bytes without keeping the picture.

JPEG, the common case, goes through libjpeg-turbo; whatever it will not take as it stands (CMYK, damage that others
forgive) goes to Pillow, whose word is final. `inspect_image` and `decode_rgb` take the same road, so that a picture
that passed sharding decodes in every later stage.
"""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import simplejpeg
from PIL import Image, TiffTags, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from fnpipe.pipeline.images.inner_sizes import icon_sizes, tile_size
from fnpipe.pipeline.machine.limits import MAX_PIXELS

# Our own limit is tested on the header before decoding. Pillow's, the same for all calls, stands behind it for pictures
# inside pictures; it refuses what has more than twice as many pixels.
Image.MAX_IMAGE_PIXELS = MAX_PIXELS
# Pillow warns once per odd palette or EXIF block; such pictures are kept, and a data set has thousands of them.
warnings.filterwarnings("ignore", module=r"PIL\.")

# No PostScript, PDF or the like: their decoders start other programs.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "MPO", "PPM", "ICO", "JPEG2000", "AVIF", "TGA", "DDS", "QOI")

# The members that shards hold; other formats are stored as PNG.
_EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}

_ORIENTATION = 0x0112
_SIDEWAYS = (5, 6, 7, 8)
_NUMBERS = (TiffTags.SHORT, TiffTags.LONG, TiffTags.RATIONAL, TiffTags.SIGNED_RATIONAL)
# Modes whose way to RGB cannot fail once the picture is loaded, so that loading is all a check needs.
_SAFE_MODES = frozenset({"1", "L", "P", "RGB", "RGBA", "LA", "CMYK", "I;16", "YCbCr"})


class BadImage(Exception):
    """Bytes that are no usable picture.

    Attributes:
        reason: the quarantine reason: ``empty-file``, ``decode-error`` or ``too-many-pixels``.
        detail: what was found, for people.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class ImageFacts:
    """What a shard records of a picture: its upright size in pixels, and the extension its bytes call for.

    ``extension`` is None for formats that shards do not hold as they are.
    """

    width: int
    height: int
    extension: str | None


def inspect_image(data: bytes, *, max_pixels: int = MAX_PIXELS, full: bool = True) -> ImageFacts:
    """Check that ``data`` is a picture, by its header alone or (``full``) by decoding all of it.

    Raises:
        BadImage: it is none, or has more than ``max_pixels`` pixels; the header is read before anything is decoded.
    """
    header = _JpegHeader.read(data)
    if header is not None:
        _check_pixels(header.width, header.height, max_pixels)
        # The entropy-coded data is read in full; the inverse transform, which cannot fail, is made an eighth as large.
        if header.plain and (not full or _decodes_cleanly(data)):
            orientation = header.orientation(data)
            return _facts(header.width, header.height, orientation, "jpg")
    image = _open(data, max_pixels)
    if full:
        _load(image)
        if image.mode not in _SAFE_MODES:
            _to_rgb(image)
    # Pillow gives a TIFF's size as it will be once it is turned, which it does itself.
    orientation = 1 if image.format == "TIFF" else _orientation(image)
    return _facts(*image.size, orientation, _EXTENSIONS.get(image.format or ""))


def picture_ending(data: bytes) -> str:
    """The file ending that a picture's bytes call for: jpg, png, webp, or the format's own name; jpg for no picture."""
    # What shards hold is known by its first bytes, without opening it.
    if data[:3] == b"\xff\xd8\xff":
        return "jpg"
    if data[:8] == b"\x89PNG\r\n\x1a\n":
        return "png"
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            name = str(image.format)
    except Exception:  # whatever a decoder raises: the name of bytes that nobody can open does not matter
        return "jpg"
    return _EXTENSIONS.get(name, name.lower())


def decode_rgb(data: bytes, *, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Decode a picture: upright, first frame, transparency over white, 16 bits cut to 8.

    Returns:
        (height, width, 3) uint8.

    Raises:
        BadImage: the bytes are no picture, are damaged, or hold more than ``max_pixels`` pixels.
    """
    header = _JpegHeader.read(data)
    if header is not None:
        _check_pixels(header.width, header.height, max_pixels)
        if header.plain:
            try:
                pixels = simplejpeg.decode_jpeg(data, "RGB")
            except ValueError:
                pass  # Pillow decides below
            else:
                return _upright(pixels, header.orientation(data))
    image = _open(data, max_pixels)
    _load(image)
    orientation = _orientation(image)
    return _upright(_to_rgb(image), orientation)


def decode_or_none(data: bytes, *, max_pixels: int = MAX_PIXELS) -> np.ndarray | None:
    """`decode_rgb`, or None for bytes that are no usable picture, where others must not suffer from it."""
    try:
        return decode_rgb(data, max_pixels=max_pixels)
    except BadImage:
        return None


@dataclass(frozen=True)
class _JpegHeader:
    """What the marker segments in front of a JPEG's pixels say."""

    width: int
    height: int
    plain: bool  # grey or YCbCr at 8 bits: what libjpeg-turbo turns into RGB as Pillow does
    tagged: bool  # carries EXIF or XMP, which may ask for a rotation

    @classmethod
    def read(cls, data: bytes) -> _JpegHeader | None:
        """The header of a JPEG; None where there is none, or where it is out of the ordinary."""
        if data[:3] != b"\xff\xd8\xff":
            return None
        at, tagged, adobe = 2, False, False
        while at + 4 <= len(data) and data[at] == 0xFF:
            marker = data[at + 1]
            if marker == 0xFF:  # fill byte
                at += 1
                continue
            size = int.from_bytes(data[at + 2 : at + 4], "big")
            if marker == 0xE1:
                tagged = True
            elif marker == 0xEE:
                adobe = True
            elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
                if at + 10 > len(data):
                    return None
                height = int.from_bytes(data[at + 5 : at + 7], "big")
                width = int.from_bytes(data[at + 7 : at + 9], "big")
                components = data[at + 9]
                # An Adobe segment may declare RGB; a height of 0 is given after the first scan.
                plain = data[at + 4] == 8 and (components == 1 or (components == 3 and not adobe)) and height > 0
                # Lossless, hierarchical and arithmetic coding are left to Pillow to refuse or take.
                return cls(width, height, plain and marker in (0xC0, 0xC1, 0xC2), tagged)
            elif marker in (0xD8, 0xD9, 0xDA) or size < 2:
                return None
            at += 2 + size
        return None

    def orientation(self, data: bytes) -> int:
        """The EXIF orientation, 1 to 8; Pillow reads it, and only where there is something to read."""
        if not self.tagged:
            return 1
        try:
            return _orientation(Image.open(io.BytesIO(data), formats=_formats()))
        except Exception:  # a broken EXIF block does not spoil the picture
            return 1


def _decodes_cleanly(data: bytes) -> bool:
    try:
        simplejpeg.decode_jpeg(data, "GRAY", fastdct=True, fastupsample=True, min_factor=8)
    except ValueError:
        return False
    return True


@cache
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def _open(data: bytes, max_pixels: int) -> Image.Image:
    if not data:
        raise BadImage("empty-file", "0 bytes")
    for width, height in icon_sizes(data):
        _check_pixels(width, height, max_pixels, "an entry of ")
    if max_pixels > 2 * (Image.MAX_IMAGE_PIXELS or 0):
        Image.MAX_IMAGE_PIXELS = max_pixels
    try:
        image = Image.open(io.BytesIO(data), formats=_formats())
    except UnidentifiedImageError:
        raise BadImage("decode-error", _what_it_is(data)) from None
    except Image.DecompressionBombError as error:
        raise BadImage("too-many-pixels", str(error)) from None
    except Exception as error:  # decoders raise whatever they like; all of it is this picture's trouble
        raise BadImage("decode-error", _say(error)) from None
    _check_pixels(*image.size, max_pixels)
    tile = tile_size(image.tag_v2) if isinstance(image, TiffImageFile) else None
    if tile is not None:
        _check_pixels(*tile, max_pixels, "a tile of ")
    return image


def _load(image: Image.Image) -> None:
    try:
        image.load()
    except MemoryError:
        raise
    except Image.DecompressionBombError as error:
        raise BadImage("too-many-pixels", str(error)) from None
    except Exception as error:
        raise BadImage("decode-error", _say(error)) from None


def _to_rgb(image: Image.Image) -> np.ndarray:
    try:
        return np.asarray(_as_rgb(image))
    except MemoryError:
        raise
    except Exception as error:
        raise BadImage("decode-error", _say(error)) from None


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I") or image.mode == "F":
        return Image.fromarray(_to_8_bits(np.asarray(image))).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layer).convert("RGB")
    return image.convert("RGB")


def _to_8_bits(values: np.ndarray) -> np.ndarray:
    """(H, W) of wide integers or floats -> uint8, over the range that the values use.

    Integers use 8 bits, 16 bits or up to their largest value; floats 0 to 1, 0 to 255 or up to their largest value.
    """
    if values.dtype.kind == "f":
        finite = values[np.isfinite(values)]
        largest = float(finite.max(initial=0))
        values = np.nan_to_num(values, posinf=largest, neginf=0)
        values = values * (255 / largest) if largest > 255 else values * 255 if largest <= 1 else values
    else:
        largest = int(values.max(initial=0))
        if largest > 65535:
            values = values.astype(np.int64) * 255 // largest
        elif values.dtype == np.uint16 or largest > 255:
            values = values.astype(np.int64) >> 8
    return np.clip(values, 0, 255).astype(np.uint8)


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 to 8; 1 where there is none, or where the block that says it is damaged."""
    try:
        exif = image.getexif()
        value: Any = exif.get(_ORIENTATION, 1)
    except Exception:  # a broken EXIF block does not spoil the picture
        return 1
    return value if value in range(2, 9) and not _is_mixed_up(exif) else 1


def _is_mixed_up(exif: Image.Exif) -> bool:
    """Whether a tag that stands for numbers holds text: bytes were lost, and other tags may be as wrong.

    Numbers that are merely odd (a resolution of -1/0) do not count.
    """
    return any(isinstance(value, str) and TiffTags.lookup(tag).type in _NUMBERS for tag, value in exif.items())


def _upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Undo an EXIF orientation on (H, W, 3)."""
    if orientation in _SIDEWAYS:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)


def _facts(width: int, height: int, orientation: int, extension: str | None) -> ImageFacts:
    if orientation in _SIDEWAYS:
        width, height = height, width
    return ImageFacts(width, height, extension)


def _check_pixels(width: int, height: int, max_pixels: int, of: str = "") -> None:
    if width * height > max_pixels:
        raise BadImage("too-many-pixels", f"{of}{width}x{height} is more than {max_pixels:,} pixels")


def _what_it_is(data: bytes) -> str:
    if data.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the picture; fetch it with `git lfs pull`"
    start = data.lstrip()[:40].lower()
    if start.startswith((b"<!doctype", b"<html", b"<?xml", b"<svg")):
        return "not a picture in a known format: it starts like a web page"
    return f"not a picture in a known format: it starts with {data[:12]!r}"


def _say(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
