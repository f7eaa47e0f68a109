"""What is said where a source has several places that an image or a caption could be read from."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import flat_colour, png
from fnpipe.cli.main import run
from fnpipe.pipeline.sources.source import ReadOptions, fields_left

ROWS = [
    {"image": f"{n}.png", "caption": f"picture {n}", "texts": f"other {n}", "url": f"http://x/{n}"} for n in range(3)
]
LEFT = [
    "in 3 rows the image is taken from 'image', not from 'url'; --image-column names another",
    "in 3 rows the caption is taken from 'caption', not from 'texts'; --caption-column names another",
]


def notes_of(source: Path, *flags: str) -> list[str]:
    workspace = source.with_name("ws")
    assert run(["shard", str(source), str(workspace), "--workers", "1", *flags]) == 0
    notes = json.loads((workspace / "fnpipe.json").read_bytes())["notes"]
    return [note.removeprefix(f"{source.name}: ") for note in notes]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.png").write_bytes(png(flat_colour(number)))
    return folder


def write_csv(path: Path) -> None:
    path.write_text("\n".join(",".join(row) for row in [list(ROWS[0]), *(row.values() for row in ROWS)]))


WRITERS = {
    "rows.json": lambda path: path.write_text(json.dumps(ROWS)),
    "rows.jsonl": lambda path: path.write_text("\n".join(map(json.dumps, ROWS))),
    "rows.csv": write_csv,
    "rows.parquet": lambda path: pq.write_table(pa.Table.from_pylist(ROWS), path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_fields_that_might_have_been_meant_are_a_counted_note(name: str, folder: Path):
    WRITERS[name](folder / name)
    assert notes_of(folder / name) == LEFT


@pytest.mark.parametrize("name", WRITERS)
def test_fields_that_flags_name_are_no_choice(name: str, folder: Path):
    WRITERS[name](folder / name)
    assert notes_of(folder / name, "--image-column", "image", "--caption-column", "texts") == []


def test_saved_arrow_files_say_what_was_left(folder: Path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS).save_to_disk(str(folder / "saved"))
    assert notes_of(folder / "saved", "--image-root", str(folder)) == LEFT


def test_a_folder_says_which_table_and_which_fields_were_left(folder: Path):
    rows = [{"file_name": row["image"], "caption": row["caption"], "title": "a title"} for row in ROWS]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "captions.txt").write_text("image,caption\n")
    assert notes_of(folder) == [
        "1 tables of captions were left, the first 'captions.txt': 'metadata.jsonl' is read",
        "in 3 rows the caption is taken from 'caption', not from 'title'; --caption-column names another",
    ]


def test_a_picture_with_two_text_files_is_counted(folder: Path):
    for number in range(3):
        (folder / f"{number}.txt").write_text(f"picture {number}")
    (folder / "1.json").write_text(json.dumps({"caption": "another"}))
    assert notes_of(folder) == [
        "in 1 row the caption is taken from the .txt file, and another text file has that name too"
    ]


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def sample(number: int, **described: object) -> dict[str, bytes]:
    described = {"width": 8, "caption": f"picture {number}", **described}
    return {
        f"{number}.png": png(flat_colour(number)),
        f"{number}.txt": f"picture {number}".encode(),
        f"{number}.json": json.dumps(described).encode(),
    }


def test_tars_whose_texts_agree_are_no_choice(tmp_path: Path):
    write_tar(tmp_path / "a.tar", sample(0) | sample(1))
    assert notes_of(tmp_path / "a.tar") == []


def test_tars_say_what_else_their_samples_hold(tmp_path: Path):
    write_tar(tmp_path / "a.tar", sample(0, syn_text=["a red box"]) | {"0.jpg": png(flat_colour(9))} | sample(1))
    assert notes_of(tmp_path / "a.tar") == [
        "in 1 row the image is taken from .png, not from .jpg",
        "in 2 rows the caption is taken from the .txt, not from the .json's 'syn_text'; "
        "--caption-column json:FIELD names another",
    ]


def test_annotations_beside_sentences_are_counted(folder: Path):
    images = [{"filename": row["image"], "sentences": [{"raw": row["caption"]}], "split": "train"} for row in ROWS]
    document = {"images": images, "annotations": [{"id": 1, "image_id": 1, "caption": "another"}]}
    (folder / "split.json").write_text(json.dumps(document))
    assert notes_of(folder / "split.json") == ["1 annotations were left: the captions are the images' sentences"]


@pytest.mark.parametrize(
    ("names", "left"),
    [
        (["image", "caption", "image_id", "caption_id", "width", "text_length", "license_url"], []),
        (["image", "caption", "TEXT", "alt_text", "caption_2"], ["'TEXT' or 'alt_text' or 'caption_2'"]),
        (["image", "caption", "caption"], ["the second 'caption'"]),
        (["image", "caption", *(f"caption_{n}" for n in range(7))], ["'caption_4' (and 2 more);"]),
    ],
)
def test_what_might_hold_a_caption_goes_by_its_name(names: list[str], left: list[str]):
    said = fields_left(names, ReadOptions(), "image", "caption")
    assert len(said) == len(left)
    assert all(part in sentence for part, sentence in zip(left, said, strict=True))
