"""Files that take far more room than they say: icons, tiles, compressed tars and tables; and odd pictures' pixels."""

from __future__ import annotations

import gzip
import io
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_shard_sources import captions_of

from conftest import TESTS
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import text as files
from fnpipe.pipeline.images.decode import BadImage, decode_rgb, inspect_image

CASES = TESTS / "cases2"
SIDE = 20_000
# Runs in a process of its own, whose memory nobody else has used: prints the reason, and the MiB taken.
MEASURE = """
import resource, sys
from fnpipe.pipeline.images.decode import BadImage, decode_rgb, inspect_image
data = open(sys.argv[1], "rb").read()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
reasons = set()
for look in (decode_rgb, inspect_image):
    try:
        look(data)
    except BadImage as bad:
        reasons.add(bad.reason)
print(*reasons, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def packed_png(side: int) -> bytes:
    """A PNG that says it is ``side`` x ``side``; only its first row is there."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress(bytes(side + 1))
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def icon(entry: bytes) -> bytes:
    return struct.pack("<HHHBBBBHHII", 0, 1, 1, 16, 16, 0, 0, 1, 32, len(entry), 22) + entry


def bitmap(side: int) -> bytes:
    return struct.pack("<IiiHHIIiiII", 40, side, 2 * side, 1, 32, 0, 0, 0, 0, 0, 0)


def tiled_tiff(tile: int) -> bytes:
    """16 x 16 pixels in one compressed tile of ``tile`` x ``tile``."""
    packed = zlib.compress(bytes(4096))
    entries = [(256, 16), (257, 16), (258, 8), (259, 8), (262, 1), (277, 1), (322, tile), (323, tile)]
    entries += [(324, 8), (325, len(packed))]
    table = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries)
    return b"II*\0" + struct.pack("<I", 8 + len(packed)) + packed + struct.pack("<H", len(entries)) + table + bytes(4)


@pytest.mark.parametrize(
    "data",
    [icon(packed_png(SIDE)), icon(bitmap(SIDE)), tiled_tiff(SIDE)],
    ids=["icon of a PNG", "icon of a bitmap", "tile"],
)
def test_nothing_is_decoded_beyond_the_limit_whatever_the_header_says(data: bytes, tmp_path: Path):
    path = tmp_path / "picture"
    path.write_bytes(data)
    done = subprocess.run([sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True)
    reason, mebibytes = done.stdout.split()
    assert reason == "too-many-pixels"
    assert int(mebibytes) < 100


def test_the_limit_is_that_of_the_call_for_entries_and_tiles_too():
    small = io.BytesIO()
    Image.new("RGB", (64, 64), (9, 8, 7)).save(small, "ICO", sizes=[(64, 64)])
    assert decode_rgb(small.getvalue()).shape == (64, 64, 3)
    for data in (small.getvalue(), tiled_tiff(64)):
        with pytest.raises(BadImage, match="too-many-pixels"):
            inspect_image(data, max_pixels=1000)


def test_pillow_refuses_large_pictures_inside_others_and_lets_a_higher_limit_pass():
    assert Image.MAX_IMAGE_PIXELS
    data = packed_png(14_000)  # more than twice Pillow's limit
    assert inspect_image(data, full=False, max_pixels=200_000_000).width == 14_000


@pytest.mark.parametrize("kind", ["tar.gz", "json.gz", "csv.gz"])
def test_what_unpacks_without_end_is_one_message(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "_UNPACKED_FREELY", 1 << 20)
    path = tmp_path / f"pairs.{kind}"
    start = {
        "tar.gz": b"",
        "json.gz": b'[{"image": "a.png", "caption": "one"}, ',
        "csv.gz": b"image,caption\na.png,one\n",
    }
    with gzip.open(path, "wb") as file:
        file.write(start[kind])
        for _ in range(8):
            file.write(bytes(1 << 20) if kind == "tar.gz" else (b" " * 1023 + b"\n") * 1024)
    with pytest.raises(InputError, match="unpacks to more than 200 times its size") as caught:
        captions_of(path, "webdataset" if kind == "tar.gz" else "auto")
    assert path.name in str(caught.value)


# Pixels


def test_an_orientation_beside_another_odd_tag_is_believed():
    data = (CASES / "18-orientation-beside-a-bad-tag" / "rational.jpg").read_bytes()
    assert decode_rgb(data).shape == (8, 4, 3)
    for full in (True, False):
        facts = inspect_image(data, full=full)
        assert (facts.width, facts.height) == (4, 8)


@pytest.mark.parametrize(("kind", "value"), [(9, -1), (4, 1), (10, -1)])
def test_an_orientation_beside_a_tag_of_any_number_is_believed(kind: int, value: int):
    """XResolution as SLONG, as LONG, and as SRATIONAL."""
    inner = struct.pack("<ii", value, 0) if kind == 10 else b""
    field = 38 if kind == 10 else value
    entries = struct.pack("<HHIHH", 0x0112, 3, 1, 6, 0) + struct.pack("<HHIi", 0x011A, kind, 1, field)
    exif = b"Exif\0\0II*\0\x08\0\0\0\x02\0" + entries + bytes(4) + inner
    out = io.BytesIO()
    Image.new("RGB", (8, 4)).save(out, "JPEG", exif=exif)
    assert decode_rgb(out.getvalue()).shape == (8, 4, 3)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_size_of_a_turned_tiff_is_the_same_from_its_header(orientation: int):
    exif = Image.Exif()
    exif[0x0112] = orientation
    out = io.BytesIO()
    Image.new("RGB", (8, 4)).save(out, "TIFF", exif=exif)
    height, width, _ = decode_rgb(out.getvalue()).shape
    for full in (True, False):
        facts = inspect_image(out.getvalue(), full=full)
        assert (facts.width, facts.height) == (width, height)


@pytest.mark.parametrize(
    "ramp",
    [
        np.linspace(0, 65535, 256, dtype=np.float32),
        np.linspace(0, 4000, 256, dtype=np.float32),
        np.linspace(0, 1, 256, dtype=np.float32),
        np.linspace(0, 255, 256, dtype=np.float32),
        np.linspace(0, 2e9, 256).astype(np.int32),
        np.linspace(0, 65535, 256).astype(np.uint16),
        np.linspace(0, 65535, 256).astype(np.int32),
    ],
    ids=["float 65535", "float 4000", "float 1", "float 255", "int 2e9", "uint16", "int 65535"],
)
def test_a_ramp_of_wide_numbers_is_a_ramp(ramp: np.ndarray):
    out = io.BytesIO()
    Image.fromarray(np.tile(ramp, (4, 1))).save(out, "TIFF")
    pixels = decode_rgb(out.getvalue())[0, :, 0]
    assert np.abs(pixels.astype(int) - np.arange(256)).max() <= 1


def test_a_float_tiff_of_the_set_is_a_ramp_and_an_infinite_value_darkens_nothing():
    assert 125 < decode_rgb((CASES / "19-wide-floats" / "float-0-65535.tiff").read_bytes()).mean() < 129
    values = np.linspace(0, 4000, 256, dtype=np.float32)
    values[[3, 5, 7]] = np.inf, -np.inf, np.nan
    out = io.BytesIO()
    Image.fromarray(np.tile(values, (4, 1))).save(out, "TIFF")
    pixels = decode_rgb(out.getvalue())[0, :, 0]
    assert (pixels[3], pixels[5], pixels[7], pixels[254]) == (255, 0, 0, 254)
