"""Sizes that the header of a picture file does not tell: of an icon's entries, and of a TIFF's tiles.

Decoders make room for an entry or a tile before they cut it to the size of the picture.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

_ICON = b"\0\0\1\0"
_PNG = b"\x89PNG\r\n\x1a\n"
# The first kind of bitmap header has sides of 16 bits.
_OLD_BITMAP_HEADER = 12
_TILE_WIDTH, _TILE_LENGTH = 322, 323


def icon_sizes(data: bytes) -> Iterator[tuple[int, int]]:
    """Width and height of every entry of an icon, as the entry itself says; nothing where ``data`` is no icon."""
    if data[:4] != _ICON or len(data) < 6:
        return
    for number in range(struct.unpack_from("<H", data, 4)[0]):
        entry = data[6 + 16 * number : 22 + 16 * number]
        if len(entry) < 16:
            return
        header = data[(offset := struct.unpack_from("<I", entry, 12)[0]) : offset + 24]
        if len(header) < 24:
            continue
        if header.startswith(_PNG):
            yield struct.unpack_from(">II", header, 16)
        elif struct.unpack_from("<I", header)[0] == _OLD_BITMAP_HEADER:
            width, height = struct.unpack_from("<HH", header, 4)
            yield width, height // 2  # a mask of the same size lies under the picture
        else:
            width, height = struct.unpack_from("<ii", header, 4)
            yield abs(width), abs(height) // 2


def tile_size(tags: Any) -> tuple[int, int] | None:
    """Width and height of the tiles of a TIFF, from the tags of its first picture; None where it has none."""
    sides = tags.get(_TILE_WIDTH), tags.get(_TILE_LENGTH)
    return sides if all(isinstance(side, int) for side in sides) else None
