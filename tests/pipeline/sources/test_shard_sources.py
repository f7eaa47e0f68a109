"""The readers of sources and what they stand on, below the level of a whole run."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import flat_colour, png
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files.tar_writer import TarWriter
from fnpipe.pipeline.files.urls import expand_braces
from fnpipe.pipeline.images.decode import BadImage, decode_rgb
from fnpipe.pipeline.images.reader import ImageReader, ImageRequest
from fnpipe.pipeline.shard.order import draw_splits, image_groups, seeded_order, shard_rows
from fnpipe.pipeline.sources import json_rows as jsonstream
from fnpipe.pipeline.sources.captions import clean_caption
from fnpipe.pipeline.sources.json_rows import JsonStream
from fnpipe.pipeline.sources.open import open_sources, source_names
from fnpipe.pipeline.sources.rows import MISSING, RowBuilder
from fnpipe.pipeline.sources.source import ReadOptions, Tools
from fnpipe.pipeline.sources.splits import rows_of_split
from fnpipe.pipeline.sources.tar_samples import index_tar

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def read_rows(path: Path, form: str = "auto", **options: object) -> list[dict[str, object]]:
    """The rows that a source's own reader makes of it."""
    from fnpipe.pipeline.sources.open import READERS

    (source,) = open_sources([str(path)], form)
    rows = RowBuilder(0)
    tools = Tools(lambda function, items: map(function, items), path.parent / "spool")
    READERS[source.format](source, ReadOptions(**options), rows, tools)  # type: ignore[arg-type]
    table = rows.table()
    split = options.get("split")
    return (table if split is None else rows_of_split(str(path), table, str(split))).to_pylist()


def captions_of(path: Path, form: str = "auto", **options: object) -> list[tuple[object, object]]:
    return [(row["image"], row["reason"] or row["captions"]) for row in read_rows(path, form, **options)]


# Captions


@given(st.text())
def test_cleaning_a_caption_twice_changes_nothing_more(text: str):
    once = clean_caption(text)
    assert clean_caption(once) == once
    assert once == once.strip()
    once.encode()


@given(st.text(st.characters(categories=("L", "N", "P", "S")), max_size=20))
def test_cleaning_leaves_letters_digits_and_signs_alone(text: str):
    assert clean_caption(text) == text


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        (" two  words\n", "two words"),
        ("a\x00b", "ab"),
        ("\u200b\ufeff", ""),
        ("\u2067\u2069 \ufe0f\u3164\u2800\U000e0020", ""),
        ("\u2764\ufe0f", "\u2764\ufe0f"),
        ("half \ud83c a pair", "half a pair"),
        ("می\u200cخواهم", "می\u200cخواهم"),
        ("no\u00a0break", "no break"),
    ],
)
def test_cleaned_caption(raw: str, clean: str):
    assert clean_caption(raw) == clean


# JSON


@given(st.lists(JSON_VALUES, max_size=8), st.integers(1, 7), st.sampled_from([None, 1]))
@settings(max_examples=60)
def test_a_list_read_in_small_pieces_holds_what_it_holds_read_whole(
    values: list[object], chunk: int, indent: int | None
):
    text = json.dumps(values, indent=indent)
    original = jsonstream._CHUNK
    jsonstream._CHUNK = chunk
    try:
        stream = JsonStream(io.StringIO(text), "x.json")
        found = list(stream.items())
        stream.end()
    finally:
        jsonstream._CHUNK = original
    assert found == values


@pytest.mark.parametrize(
    ("text", "line"),
    [('[{"a": 1},\n{"a": 2},\n]', 3), ('[{"a": 1},\n{"a" 2}]', 2), ("[1,\n2\n", 3), ("[1] x", 1), ("[1, 2 3]", 1)],
)
def test_a_fault_in_json_is_told_by_its_line(text: str, line: int):
    with pytest.raises(InputError, match=f"pairs.json: line {line}: "):
        stream = JsonStream(io.StringIO(text), "pairs.json")
        list(stream.items())
        stream.end()


def test_json_is_read_whether_packed_or_not(tmp_path: Path):
    rows = [{"image": "a.png", "caption": "one"}, {"image": "b.png", "caption": ["two", "three"]}]
    (tmp_path / "plain.json").write_text(json.dumps(rows))
    (tmp_path / "packed.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
    (tmp_path / "lines.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    wanted = [("a.png", ["one"]), ("b.png", ["two", "three"])]
    for name in ("plain.json", "packed.json.gz", "lines.jsonl.gz"):
        assert captions_of(tmp_path / name) == wanted


def test_packed_json_that_is_cut_off_is_refused(tmp_path: Path):
    from fnpipe.pipeline.shard.stage import ShardConfig, shard

    rows = [{"image": f"{i}.png", "caption": "one"} for i in range(5000)]
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode())[:-200])
    with pytest.raises(InputError, match=r"cut\.json\.gz: .*cut off"):
        shard([str(tmp_path / "cut.json.gz")], str(tmp_path / "workspace"), ShardConfig(workers=1))
    assert not (tmp_path / "workspace").exists()


def test_a_single_object_with_a_row_s_fields_is_one_row(tmp_path: Path):
    (tmp_path / "one.json").write_text('{"image": "a.png", "caption": ["x", "y"]}\n')
    assert captions_of(tmp_path / "one.json") == [("a.png", ["x", "y"])]


def test_karpathy_s_file_keeps_its_splits(tmp_path: Path):
    images = [
        {"filepath": "val2014", "filename": "a.jpg", "split": "test", "sentences": [{"raw": "one"}, {"raw": "two"}]},
        {"filename": "b.jpg", "split": "restval", "sentences": [{"raw": "three"}]},
        {"filename": "c.jpg", "split": "train", "sentences": []},
    ]
    path = tmp_path / "dataset_coco.json"
    path.write_text(json.dumps({"images": images, "dataset": "coco"}))
    rows = read_rows(path)
    assert [(row["image"], row["captions"], row["split"]) for row in rows[:2]] == [
        ("val2014/a.jpg", ["one", "two"], "test"),
        ("b.jpg", ["three"], "restval"),
    ]
    assert rows[2]["reason"] == "empty-caption"
    assert captions_of(path, split="test") == [("val2014/a.jpg", ["one", "two"])]


def test_coco_ids_are_told_apart_by_type_and_annotations_may_come_first(tmp_path: Path):
    path = tmp_path / "captions.json"
    annotations = [{"id": 1, "image_id": 5, "caption": "five"}, {"id": 2, "image_id": "5", "caption": "text five"}]
    path.write_text(json.dumps({"annotations": annotations, "images": [{"id": 5, "file_name": "5.jpg"}]}))
    assert captions_of(path) == [("5.jpg", ["five"]), (None, "orphan-annotation")]


# Tables


@given(st.lists(st.tuples(st.text(max_size=12), st.text(max_size=12)), min_size=1, max_size=8))
@settings(max_examples=60)
def test_a_csv_written_by_python_comes_back_row_by_row(tmp_path_factory: pytest.TempPathFactory, cells):
    cells = [(a.replace("\0", "") or "x", b.replace("\0", "") or "y") for a, b in cells]
    path = tmp_path_factory.mktemp("csv") / "pairs.csv"
    with path.open("w", newline="", encoding="utf-8", errors="surrogatepass") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        writer.writerows([("image", "caption"), *cells])
    found = captions_of(path)
    assert len(found) == len(cells)
    for (image, captions), (path_cell, caption) in zip(found, cells, strict=True):
        if captions != "bad-encoding":
            assert (image, captions) == (path_cell, [caption])


def test_a_stray_quote_costs_its_own_rows_only(tmp_path: Path):
    path = tmp_path / "pairs.csv"
    path.write_text('image,caption\na.png,"never closed\nb.png,two\nc.png,three\nd.png,four\n')
    assert captions_of(path)[1:] == [("b.png", ["two"]), ("c.png", ["three"]), ("d.png", ["four"])]


def test_quotes_in_a_tsv_stay_unless_the_field_was_quoted_for_them(tmp_path: Path):
    path = tmp_path / "pairs.tsv"
    path.write_text('filepath\ttitle\na.png\t"so it begins\nb.png\t"quoted"\nc.png\t"a 12"" record"\n')
    assert [captions for _, captions in captions_of(path)] == [['"so it begins'], ['"quoted"'], ['a 12" record']]


def test_a_table_without_header_takes_columns_by_position(tmp_path: Path):
    path = tmp_path / "pairs.tsv"
    path.write_text("one\ta.png\t7\ntwo\tb.png\t8\n")
    assert captions_of(path, header=False) == [("a.png", ["one"]), ("b.png", ["two"])]
    assert captions_of(path, header=False, caption_column="2", image_column="0") == [("one", ["7"]), ("two", ["8"])]
    with pytest.raises(InputError, match="--image-column file"):
        read_rows(path, header=False, image_column="file")


def test_rows_of_a_whole_column_of_wrong_type_each_have_their_reason():
    rows = RowBuilder(3)
    for caption in ("text", 7, True, {"en": "x"}, [["a"]], [], [None, ""], None, float("nan"), MISSING):
        rows.add("a.png", caption)
    rows.add(None, "text")
    rows.add(5, "text")
    rows.add("a\udce9.png", "text")
    table = rows.table()
    assert table["source"].to_pylist() == [3] * 13
    assert table["row"].to_pylist() == list(range(13))
    assert table["reason"].to_pylist() == [
        None,
        *["bad-caption-type"] * 4,
        "empty-caption",
        None,  # the empty text is found empty after clean-up
        "empty-caption",
        "empty-caption",
        "missing-field",
        "missing-field",
        "bad-row",
        "bad-encoding",
    ]


# Folders and data sets


def test_sidecar_files_are_captions_of_the_image_with_their_name(tmp_path: Path):
    root = tmp_path / "pictures"
    (root / "train").mkdir(parents=True)
    for name in ("a.png", "b.jpg", "c.png", "train/d.webp"):
        (root / name).write_bytes(b"x")
    (root / "a.txt").write_text("of a")
    (root / "b.caption").write_text("of b")
    (root / "train" / "d.json").write_text('{"caption": ["of d", "again"]}')
    (root / "e.txt").write_text("of nothing")
    rows = read_rows(root)
    assert {row["image"]: row["reason"] or row["captions"] for row in rows} == {
        "a.png": ["of a"],
        "b.jpg": ["of b"],
        "c.png": "no-caption",
        "train/d.webp": ["of d", "again"],
        None: "no-image",
    }
    assert [row["split"] for row in rows if row["image"] == "train/d.webp"] == ["train"]


def test_a_data_set_saved_by_datasets_is_read_where_it_lies(tmp_path: Path):
    import datasets

    pictures = [png(flat_colour(i)) for i in range(5)]
    columns = {
        "image": [{"bytes": data, "path": None} for data in pictures],
        "text": [f"card {i}" for i in range(5)],
    }
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    data = datasets.Dataset.from_dict(columns, features=features)
    split = datasets.DatasetDict({"train": data, "validation": data.select([3, 1])})
    split.save_to_disk(str(tmp_path / "saved"))
    rows = read_rows(tmp_path / "saved")
    assert [row["captions"] for row in rows] == [[f"card {i}"] for i in (0, 1, 2, 3, 4, 3, 1)]
    assert [row["split"] for row in rows] == ["train"] * 5 + ["validation"] * 2
    (source,) = open_sources([str(tmp_path / "saved")], "auto")
    assert source.format == "hf"
    files = sorted((tmp_path / "saved" / "train").glob("*.arrow"))
    reader = ImageReader(str(tmp_path), [str(files[0])])
    requests = [ImageRequest(row["image"], row["file"], row["offset"], row["size"]) for row in rows[:5]]
    assert reader.read(requests) == pictures


def test_a_data_set_folder_of_the_hub_is_read_with_its_splits(tmp_path: Path):
    import pyarrow.parquet as pq

    (tmp_path / "set" / "data").mkdir(parents=True)
    for name, n in (("train-00000-of-00002", 2), ("train-00001-of-00002", 1), ("test-00000-of-00001", 1)):
        table = pa.table(
            {"image": [{"bytes": png(flat_colour(i)), "path": f"{i}.png"} for i in range(n)], "text": ["x"] * n}
        )
        pq.write_table(table, tmp_path / "set" / "data" / f"{name}.parquet")
    assert [row["split"] for row in read_rows(tmp_path / "set", "hf")] == ["train", "train", "train", "test"]
    assert len(read_rows(tmp_path / "set", split="test")) == 1
    with pytest.raises(InputError, match="no split 'val'"):
        read_rows(tmp_path / "set", split="val")


@pytest.mark.parametrize(("suffix", "pack"), [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)])
def test_packed_tars_are_unpacked_first(tmp_path: Path, suffix: str, pack):
    (tmp_path / f"a.tar.{suffix}").write_bytes(pack(tar_bytes([("0.png", b"picture"), ("0.txt", b"words")])))
    (row,) = read_rows(tmp_path / f"a.tar.{suffix}")
    assert row["captions"] == ["words"]


# Tars


def tar_bytes(members: list[tuple[str, bytes]], form: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


@given(st.lists(st.binary(max_size=1200), max_size=6))
@settings(max_examples=40)
def test_tarfile_reads_what_the_writer_wrote(contents: list[bytes]):
    out = io.BytesIO()
    writer = TarWriter(out)
    offsets = [writer.add(f"{i:08d}", "txt", data) for i, data in enumerate(contents)]
    writer.close()
    data = out.getvalue()
    assert len(data) % 10240 == 0
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        members = tar.getmembers()
        assert [member.name for member in members] == [f"{i:08d}.txt" for i in range(len(contents))]
        assert [tar.extractfile(member).read() for member in members] == contents
        assert [member.offset_data for member in members] == offsets
        assert all((member.mode, member.mtime, member.uid) == (0o644, 0, 0) for member in members)


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_an_index_agrees_with_tarfile_on_every_form_of_tar(tmp_path: Path, form: int):
    names = ["a", "folder/b", "x" * 90]
    if form != tarfile.USTAR_FORMAT:
        names += ["y" * 180, "猫", "deep/" * 30 + "z"]
    data = tar_bytes([(f"{name}.{end}", name.encode()) for name in names for end in ("png", "txt")], form)
    (tmp_path / "a.tar").write_bytes(data)
    index = index_tar(str(tmp_path / "a.tar"))
    assert not index.damage
    assert [sample.key for sample in index.samples] == names
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        places = [member.offset_data for member in tar.getmembers()]
    assert [member.offset for sample in index.samples for member in sample.fields.values()] == places
    assert [sample.text("txt") for sample in index.samples] == [name.encode() for name in names]


@given(st.integers(1, 10240))
@settings(max_examples=60)
def test_a_tar_cut_anywhere_is_noticed_and_what_lies_before_the_cut_is_there(tmp_path_factory, length: int):
    members = [(f"{i}.{end}", bytes(300)) for i in range(4) for end in ("png", "txt")]
    whole = tar_bytes(members, tarfile.USTAR_FORMAT)
    path = tmp_path_factory.mktemp("cut") / "a.tar"
    path.write_bytes(whole[:length])
    if length < 512:
        with pytest.raises(InputError, match="not a tar"):
            index_tar(str(path))
        return
    index = index_tar(str(path))
    found = sum(len(sample.fields) for sample in index.samples)
    assert found == sum(1024 * (i + 1) - 212 <= length for i in range(8))
    # 8 members of 1,024 bytes; with one block of the end mark the archive is whole.
    assert bool(index.damage) == (length < 8 * 1024 + 512)


def test_members_of_two_samples_with_one_key_that_are_not_whole_are_set_aside(tmp_path: Path):
    names = ["1.png", "1.png", "1.txt", "1.txt", "2.png", "2.txt"]
    (tmp_path / "a.tar").write_bytes(tar_bytes([(name, b"x") for name in names]))
    index = index_tar(str(tmp_path / "a.tar"))
    assert {(sample.key, sample.reason) for sample in index.samples} == {("1", "bad-row"), ("2", "")}


# Paths, names, order


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("a", ["a"]),
        ("{00..02}.tar", ["00.tar", "01.tar", "02.tar"]),
        ("{9..11}", ["9", "10", "11"]),
        ("{x,y}{1..2}", ["x1", "x2", "y1", "y2"]),
        ("{x}", ["{x}"]),
    ],
)
def test_brace_range(pattern: str, paths: list[str]):
    assert expand_braces(pattern) == paths


def test_sources_are_called_by_the_shortest_end_that_tells_them_apart():
    assert source_names(["/d/pairs.json"]) == ["pairs.json"]
    assert source_names(["/d/a/x.json", "/d/b/x.json", "y.json"]) == ["a/x.json", "b/x.json", "y.json"]
    with pytest.raises(InputError, match="given twice"):
        source_names(["/d/a", "/d/a/"])


def test_an_image_reader_never_leaves_its_root_but_by_permission(tmp_path: Path):
    root = tmp_path / "root"
    (root / "real").mkdir(parents=True)
    (root / "real" / "a.png").write_bytes(b"inside")
    (tmp_path / "secret.png").write_bytes(b"secret")
    (root / "out").symlink_to(tmp_path)
    (root / "link.png").symlink_to(tmp_path / "secret.png")
    (root / "loop.png").symlink_to("loop.png")
    (root / "linked").symlink_to("real")
    paths = [
        "real/a.png",
        "linked/a.png",
        "out/secret.png",
        "link.png",
        "../secret.png",
        str(root / "real/a.png"),
        "loop.png",
    ]
    requests = [ImageRequest(path) for path in paths]
    kept = [data if isinstance(data, bytes) else data.reason for data in ImageReader(str(root)).read(requests)]
    escape = "path-escape"
    assert kept[:6] == [b"inside", b"inside", escape, escape, escape, b"inside"]
    assert kept[6] in ("missing-file", "not-a-file")
    free = [
        data if isinstance(data, bytes) else data.reason for data in ImageReader(str(root), (), True).read(requests)
    ]
    assert free[2:5] == [b"secret", b"secret", escape]


def test_a_pipe_is_no_picture_and_is_not_waited_for(tmp_path: Path):
    import os

    os.mkfifo(tmp_path / "pipe.png")
    (found,) = ImageReader(str(tmp_path)).read([ImageRequest("pipe.png")])
    assert isinstance(found, BadImage)
    assert found.reason == "not-a-file"


@given(st.integers(0, 50), st.integers(0, 2**32), st.integers(1, 7))
def test_every_row_is_in_one_shard_and_every_shard_but_the_last_is_full(n: int, seed: int, per_shard: int):
    generator = np.random.default_rng(seed)
    groups = np.unique(generator.integers(0, max(n // 2, 1), n), return_inverse=True)[1]
    order, positions, bounds = shard_rows(groups, seed, per_shard)
    assert sorted(order.tolist()) == list(range(n))
    image_at = dict(zip(positions.tolist(), groups[order].tolist(), strict=True))
    assert sorted(image_at) == list(range(len(image_at)))
    for shard in range(len(bounds) - 1):
        mine = positions[bounds[shard] : bounds[shard + 1]]
        assert set(mine // per_shard) == {shard}
    # The rows of an image stand together in the order of the source.
    assert all(a < b for a, b, same in zip(order, order[1:], np.diff(positions) == 0, strict=False) if same)


def test_the_seeded_order_is_the_one_of_every_earlier_version():
    assert seeded_order(8, 0).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]


def test_one_file_by_two_spellings_is_one_image_but_not_across_sources():
    rows = RowBuilder(0)
    for path in ("a.png", "./a.png", "b/../a.png", "b.png", "/a.png"):
        rows.add(path, "x")
    rows.add("a.png", "x", file=0, size=3)
    other = RowBuilder(1)
    other.add("a.png", "x")
    groups = image_groups(pa.concat_tables([rows.table(), other.table()])).tolist()
    assert groups[0] == groups[1] == groups[2]
    assert len(set(groups)) == 5


@given(st.lists(st.integers(0, 20), min_size=1, max_size=40), st.floats(0.01, 0.49), st.integers(1, 5))
def test_splits_are_drawn_by_whole_pictures_one_behind_the_other(ranks: list[int], share: float, number: int):
    pictures = sorted(set(ranks))
    first, second = round(share * len(pictures)), round(share * len(pictures)) + number
    drawn = draw_splits(np.array(ranks, np.uint64), {"test": share, "validation": number})
    assert drawn["test"].tolist() == pictures[:first]
    assert drawn["validation"].tolist() == pictures[first:second]


# Pictures that the set of awkward inputs does not hold


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_a_picture_is_turned_as_pillow_turns_it(orientation: int, form: str):
    from PIL import Image, ImageOps

    generator = np.random.default_rng(orientation)
    image = Image.fromarray(generator.integers(0, 256, (24, 40, 3), np.uint8)).resize((40, 24))
    exif = image.getexif()
    exif[0x0112] = orientation
    out = io.BytesIO()
    image.save(out, form, exif=exif, quality=95)
    wanted = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(out.getvalue()))).convert("RGB"))
    found = decode_rgb(out.getvalue())
    assert found.shape == wanted.shape
    assert np.abs(found.astype(int) - wanted).max() <= 2


@pytest.mark.parametrize(
    ("mode", "form"),
    [
        *((mode, "PNG") for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")),
        *((mode, "TIFF") for mode in ("L", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "I", "F")),
    ],
)
def test_every_mode_comes_out_as_rgb(mode: str, form: str):
    from PIL import Image

    colour: int | tuple[int, ...] = (200, 60, 30)
    colours = {"LAB": (128, 0, 0), "I;16": 40_000, "I": 40_000, "F": 0.5}
    image = (
        Image.new(mode, (6, 5), colours[mode]) if mode in colours else Image.new("RGB", (6, 5), colour).convert(mode)
    )
    out = io.BytesIO()
    image.save(out, form)
    picture = decode_rgb(out.getvalue())
    assert picture.shape == (5, 6, 3)
    grey = {"I;16": 40_000 >> 8, "I": 40_000 >> 8, "F": 127}
    if mode in grey:
        assert (picture == grey[mode]).all()
    elif mode in ("RGB", "RGBA", "CMYK"):
        assert np.abs(picture.astype(int) - colour).max() <= 2


def test_transparency_is_laid_over_white():
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGBA", (2, 1), (0, 0, 0, 128)).save(out, "PNG")
    assert np.abs(decode_rgb(out.getvalue()).astype(int) - 127).max() <= 1


def test_a_jpeg_cut_anywhere_in_its_pixels_is_refused_by_the_check_and_by_decoding():
    from PIL import Image

    from fnpipe.pipeline.images.decode import inspect_image

    generator = np.random.default_rng(0)
    out = io.BytesIO()
    Image.fromarray(generator.integers(0, 256, (64, 64, 3), np.uint8)).save(out, "JPEG")
    data = out.getvalue()
    inspect_image(data)
    for length in range(700, len(data) - 2, 97):
        for look in (inspect_image, decode_rgb):
            with pytest.raises(BadImage, match="decode-error"):
                look(data[:length])
