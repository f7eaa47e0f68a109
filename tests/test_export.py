"""Edges for other libraries: what each of them reads back."""

from __future__ import annotations

import csv
import io

import pyarrow.parquet as pq
import pytest
from PIL import Image
from test_gallery import write_edges

from conftest import MakeWorkspace, flat_colour
from fnpipe.cli.app import run
from fnpipe.mining.export import export
from fnpipe.pipeline.errors import InputError


@pytest.fixture
def mined(make_workspace: MakeWorkspace):
    """Images 0 to 5, the last one held out; image 0 has two mined captions, one of them by two pairs."""
    texts = ["a dog, red", "a cat", "a bird", "a cat", "a fish", "a test"]
    workspace = make_workspace(6, texts=texts, images_per_shard=4, splits=["train"] * 5 + ["test"])
    rows = [
        (0, 1, 0.9, False),
        (0, 3, 0.9, False),
        (0, 2, 0.85, False),
        (0, 4, 0.3, False),
        (1, 3, 1.0, True),  # by identity: the words are recorded already
        (2, 0, 0.6, False),
        (4, 0, 0.95, False),
        (4, 1, 0.2, False),
        (4, 2, 0.1, False),
    ]
    return workspace, write_edges(workspace, rows)


def colour(data: bytes):
    return Image.open(io.BytesIO(data)).convert("RGB").getpixel((0, 0))


def test_open_clip_gets_a_csv_with_mined_pairs_as_rows(mined, tmp_path):
    workspace, stage = mined
    summary = export(workspace, stage, "open_clip", tmp_path / "out")
    with (tmp_path / "out/pairs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    found = {}
    for row in rows:
        picture = colour((tmp_path / "out" / row["filepath"]).read_bytes())
        image = next(i for i in range(6) if flat_colour(i) == picture)
        found.setdefault(image, []).append((row["title"], row["source"]))
    assert found == {
        0: [("a dog, red", "recorded"), ("a cat", "mined"), ("a bird", "mined")],
        1: [("a cat", "recorded")],
        2: [("a bird", "recorded")],
        3: [("a cat", "recorded")],
        4: [("a fish", "recorded"), ("a dog, red", "mined")],
    }
    assert (summary.images, summary.recorded, summary.mined, summary.rows) == (5, 5, 3, {"pairs.csv": 8})


def test_sentence_transformers_gets_labelled_pairs_and_triplets(mined, tmp_path):
    workspace, stage = mined
    export(workspace, stage, "sentence-transformers", tmp_path / "out")
    pairs = pq.read_table(tmp_path / "out/pairs.parquet").to_pylist()
    assert {(p["caption"], p["label"], p["source"]) for p in pairs if "00000004" in p["image"]} == {
        ("a fish", 1, "recorded"),
        ("a dog, red", 1, "mined"),
        ("a cat", 0, "judged"),
        ("a bird", 0, "judged"),
    }
    assert all((tmp_path / "out" / p["image"]).exists() for p in pairs)
    triplets = pq.read_table(tmp_path / "out/triplets.parquet").to_pylist()
    assert [(t["positive"], t["negative"]) for t in triplets] == [
        ("a dog, red", "a fish"),
        ("a cat", "a fish"),
        ("a bird", "a fish"),
        ("a fish", "a cat"),  # the most probable of the negatives
        ("a dog, red", "a cat"),
    ]


def test_hugging_face_reads_one_row_per_image_with_all_captions(mined, tmp_path):
    datasets = pytest.importorskip("datasets")
    workspace, stage = mined
    export(workspace, stage, "hf", tmp_path / "out")
    loaded = datasets.load_dataset(str(tmp_path / "out"), split="train", cache_dir=str(tmp_path / "cache"))
    assert len(loaded) == 5
    first = loaded[0]
    assert first["image"].convert("RGB").getpixel((0, 0)) == flat_colour(0)
    assert first["captions"] == ["a dog, red", "a cat", "a bird"]
    assert first["mined"] == [False, True, True]
    assert first["match_probability"] == [None, pytest.approx(0.9), pytest.approx(0.85)]


def test_the_command_counts_and_refuses_what_it_must(mined, tmp_path, capsys):
    workspace, stage = mined
    command = ["export", str(workspace.root), str(tmp_path / "out"), "--to", "open_clip"]
    assert run(command) == 0
    assert "5 recorded pairs and 3 mined, 5 images" in capsys.readouterr().out
    assert run(command) == 2
    assert "holds something already" in capsys.readouterr().err
    with pytest.raises(InputError, match="did you mean 'hf'"):
        export(workspace, stage, "hff", tmp_path / "other")
