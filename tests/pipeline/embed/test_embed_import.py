"""Taking over a clip-retrieval folder: rows are found by name, and what does not fit is named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import TESTS
from fnpipe.cli.main import run
from fnpipe.pipeline.workspace.embeddings import Embeddings
from fnpipe.pipeline.workspace.workspace import Workspace

CASES = TESTS / "cases" / "embeddings"

Row = tuple[str, str, np.ndarray, np.ndarray]


def rows_of(workspace: Workspace, width: int = 6, seed: int = 0) -> list[Row]:
    """One row per pair: image path, caption, and vectors that tell it from the others."""
    rng = np.random.default_rng(seed)
    images = workspace.read_images()["image"].to_pylist()
    vectors = rng.normal(size=(len(images), width)).astype(np.float32)
    pairs = workspace.read_pairs(["image_id", "caption"]).to_pylist()
    return [
        (images[p["image_id"]], p["caption"], vectors[p["image_id"]], rng.normal(size=width).astype(np.float32))
        for p in pairs
    ]


def write_folder(directory: Path, rows: list[Row], parts: int = 1, *, digits: int = 0) -> Path:
    """clip-retrieval's layout."""
    for kind in ("img_emb", "text_emb", "metadata"):
        (directory / kind).mkdir(parents=True)
    for number, at in enumerate(np.array_split(np.arange(len(rows)), parts)):
        mine = [rows[i] for i in at]
        part = str(number).zfill(digits)
        np.save(directory / "img_emb" / f"img_emb_{part}.npy", np.stack([row[2] for row in mine]))
        np.save(directory / "text_emb" / f"text_emb_{part}.npy", np.stack([row[3] for row in mine]))
        table = pa.table({"image_path": [row[0] for row in mine], "caption": [row[1] for row in mine]})
        pq.write_table(table, directory / "metadata" / f"metadata_{part}.parquet")
    return directory


def take_over(workspace: Workspace, folder: Path) -> int:
    return run(["embed", str(workspace.root), "--import", str(folder)])


def unit(vectors: list[np.ndarray]) -> np.ndarray:
    rows = np.stack(vectors).astype(np.float64)
    return rows / np.sqrt((rows * rows).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("prefix", ["", "/data/coco/", "s3://bucket/pictures/"])
@pytest.mark.parametrize("parts", [1, 12])
def test_rows_in_any_order_and_any_number_of_parts_reach_their_ids(make_workspace, tmp_path, prefix, parts):
    workspace = make_workspace(13, captions=2)
    rows = rows_of(workspace)
    shuffled = [(prefix + rows[i][0], *rows[i][1:]) for i in np.random.default_rng(3).permutation(len(rows))]
    assert take_over(workspace, write_folder(tmp_path / "folder", shuffled, parts)) == 0
    found = Embeddings.open(workspace, "clip")
    np.testing.assert_allclose(found.texts.take(np.arange(26)), unit([row[3] for row in rows]), atol=1e-3)
    np.testing.assert_allclose(found.images.take(np.arange(13)), unit([row[2] for row in rows[::2]]), atol=1e-3)


def test_rows_named_by_the_keys_of_our_own_shards_are_found(make_workspace, tmp_path):
    workspace = make_workspace(7)
    keys = workspace.read_images()["key"].to_pylist()
    rows = [(key, *row[1:]) for key, row in zip(keys, rows_of(workspace), strict=True)]
    assert take_over(workspace, write_folder(tmp_path / "folder", rows[::-1])) == 0
    found = Embeddings.open(workspace, "clip").images.take(np.arange(7))
    np.testing.assert_allclose(found, unit([row[2] for row in rows]), atol=1e-3)


def test_images_and_pairs_without_a_row_are_counted_and_the_first_named(make_workspace, tmp_path, capsys):
    workspace = make_workspace(9)
    rows = rows_of(workspace)
    rows[4] = ("elsewhere.png", *rows[4][1:])
    rows[6] = (rows[6][0], "another caption", *rows[6][2:])
    assert take_over(workspace, write_folder(tmp_path / "folder", rows)) == 2
    error = capsys.readouterr().err
    assert "1 of 9 images (first: image_id 4, '4.png')" in error
    assert "2 of 9 pairs (first: pair_id 4" in error
    assert error.count("\n") == 1
    assert not (workspace.root / "embeddings").exists()


def test_rows_that_the_workspace_lacks_are_counted_and_named(make_workspace, tmp_path, capsys):
    workspace = make_workspace(5)
    extra = ("gone.png", "a picture that was quarantined", np.ones(6, np.float32), np.ones(6, np.float32))
    folder = write_folder(tmp_path / "folder", [extra, *rows_of(workspace)])
    assert run(["embed", str(workspace.root), "--import", str(folder), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["rows"], summary["unused"]) == (6, 1)
    assert "gone.png" in summary["examples"][0]


def test_one_path_with_two_different_vectors_is_refused(make_workspace, tmp_path, capsys):
    workspace = make_workspace(5, captions=2)
    rows = rows_of(workspace)
    rows[7] = (*rows[7][:2], -rows[7][2], rows[7][3])
    assert take_over(workspace, write_folder(tmp_path / "folder", rows)) == 2
    assert "'3.png'" in capsys.readouterr().err


def test_a_path_that_means_another_picture_in_another_source_matches_neither(make_workspace, tmp_path, capsys):
    workspace = make_workspace(6, images_per_shard=6)
    table = workspace.read_images()
    names = table["image"].to_pylist()
    names[5] = names[2]
    pq.write_table(table.set_column(3, "image", [names]), workspace.images_path(0))
    rows = [(name, *row[1:]) for name, row in zip(names, rows_of(workspace), strict=True)][:5]
    assert take_over(workspace, write_folder(tmp_path / "folder", rows)) == 2
    assert "2 of 6 images (first: image_id 2, '2.png')" in capsys.readouterr().err


def test_an_import_again_changes_nothing_and_another_folder_is_refused(make_workspace, tmp_path, capsys):
    workspace = make_workspace(6)
    folder = write_folder(tmp_path / "one", rows_of(workspace))
    assert take_over(workspace, folder) == 0
    before = {p: p.stat().st_mtime_ns for p in (workspace.root / "embeddings").rglob("*")}
    assert take_over(workspace, folder) == 0
    assert {p: p.stat().st_mtime_ns for p in (workspace.root / "embeddings").rglob("*")} == before
    assert take_over(workspace, write_folder(tmp_path / "two", rows_of(workspace, seed=1))) == 2
    assert "--overwrite" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda d: (d / "text_emb" / "text_emb_1.npy").unlink(), "part 1 is missing"),
        (lambda d: np.save(d / "text_emb" / "text_emb_0.npy", np.ones((3, 5), np.float32)), "5 numbers"),
        (lambda d: np.save(d / "img_emb" / "img_emb_0.npy", np.ones((3, 6), np.int64)), "int64"),
        (lambda d: (d / "img_emb" / "img_emb_0.npy").write_bytes(b"x"), "img_emb_0.npy"),
        (lambda d: (d / "metadata" / "metadata_0.parquet").write_bytes(b"x"), "metadata_0.parquet"),
        (
            lambda d: pq.write_table(pa.table({"image_path": ["a"] * 3}), d / "metadata" / "metadata_0.parquet"),
            "no column 'caption'",
        ),
        (lambda d: (d / "img_emb" / "img_emb_0.npy").rename(d / "img_emb" / "first.npy"), "first.npy"),
        (lambda d: np.save(d / "img_emb" / "img_emb_00.npy", np.ones((3, 6), np.float32)), "same part"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused_in_one_line(make_workspace, tmp_path, capsys, damage, says):
    workspace = make_workspace(6)
    folder = write_folder(tmp_path / "folder", rows_of(workspace), parts=2)
    damage(folder)
    assert take_over(workspace, folder) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_a_directory_of_another_kind_is_refused(make_workspace, tmp_path, capsys):
    assert take_over(make_workspace(3), tmp_path) == 2
    assert "img_emb" in capsys.readouterr().err


def case_rows(workspace: Workspace, images: np.ndarray) -> list[Row]:
    """The vectors of a case as the image side of one row per pair."""
    paths = workspace.read_images()["image"].to_pylist()
    texts = workspace.read_pairs(["caption"])["caption"].to_pylist()
    ones = np.ones(images.shape[1], np.float32)
    return list(zip(paths, texts, images, [ones] * len(images), strict=True))


def test_case_rows_without_a_direction_are_left_out_and_tiny_and_large_ones_kept(make_workspace, tmp_path):
    images = np.load(CASES / "mixed_fp16.npy")
    workspace = make_workspace(48, images_per_shard=20)
    assert take_over(workspace, write_folder(tmp_path / "folder", case_rows(workspace, images))) == 0
    found = Embeddings.open(workspace, "clip")
    bad = pq.read_table(workspace.root / "embeddings/clip/bad.parquet").to_pylist()
    assert [(row["image_id"], row["reason"]) for row in bad] == [(7, "not-finite"), (11, "not-finite"), (15, "zero")]
    lengths = np.linalg.norm(found.images.take(np.arange(48)), axis=1)
    assert (lengths[[7, 11, 15]] == 0).all()
    np.testing.assert_allclose(np.delete(lengths, [7, 11, 15]), 1, atol=2e-3)
    equal = found.images.take(np.arange(20, 30))
    assert (equal == equal[0]).all()


def test_case_parts_are_read_in_the_order_of_their_numbers(make_workspace, tmp_path):
    workspace = make_workspace(12)
    folder = tmp_path / "folder"
    for kind in ("img_emb", "text_emb", "metadata"):
        (folder / kind).mkdir(parents=True)
    paths, texts = workspace.read_images()["image"], workspace.read_pairs(["caption"])["caption"]
    start = 0
    for number in (0, 1, 2, 10):
        part = np.load(CASES / "parts" / f"img_emb_{number}.npy")
        np.save(folder / "img_emb" / f"img_emb_{number}.npy", part)
        np.save(folder / "text_emb" / f"text_emb_{number}.npy", part)
        rows = {"image_path": paths.slice(start, len(part)), "caption": texts.slice(start, len(part))}
        pq.write_table(pa.table(rows), folder / "metadata" / f"metadata_{number}.parquet")
        start += len(part)
    assert take_over(workspace, folder) == 0
    found = Embeddings.open(workspace, "clip").images.take(np.arange(12))
    np.testing.assert_allclose(found[:, 0] / found[:, 1], np.arange(12), rtol=2e-3)


def test_case_of_more_vectors_than_names_says_both_files_and_both_counts(make_workspace, tmp_path, capsys):
    workspace = make_workspace(9)
    folder = write_folder(tmp_path / "folder", case_rows(workspace, np.ones((9, 8), np.float32)))
    np.save(folder / "img_emb" / "img_emb_0.npy", np.load(CASES / "short" / "emb.npy"))
    np.save(folder / "text_emb" / "text_emb_0.npy", np.load(CASES / "short" / "emb.npy"))
    assert take_over(workspace, folder) == 2
    error = capsys.readouterr().err
    assert "img_emb_0.npy has 10 vectors" in error
    assert "metadata_0.parquet has 9 rows" in error


def test_case_of_five_double_precision_vectors_is_taken_over_in_single(make_workspace, tmp_path):
    workspace = make_workspace(5)
    images = np.load(CASES / "few.npy")
    assert take_over(workspace, write_folder(tmp_path / "folder", case_rows(workspace, images))) == 0
    found = Embeddings.open(workspace, "clip").images.take(np.arange(5))
    np.testing.assert_allclose(found, unit(list(images)), atol=1e-3)


def test_our_own_folder_read_file_by_file_in_name_order_is_in_id_order(make_workspace, tmp_path):
    """What autofaiss and clip-retrieval's indexers do with a folder: the sorted ``.npy`` files, one after the other."""
    workspace = make_workspace(26, captions=2, images_per_shard=2)
    rows = rows_of(workspace)
    assert take_over(workspace, write_folder(tmp_path / "folder", rows)) == 0
    for kind, expected in (("img_emb", [row[2] for row in rows[::2]]), ("text_emb", [row[3] for row in rows])):
        files = sorted((workspace.root / "embeddings/clip" / kind).iterdir())
        assert [file.name for file in files] == [f"{kind}_{number:05d}.npy" for number in range(13)]
        np.testing.assert_allclose(np.concatenate([np.load(file) for file in files]), unit(expected), atol=1e-3)
