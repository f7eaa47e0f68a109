"""How the split of a row is found: by column, folder and file, as `datasets` finds it, and never above the source."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from test_shard_sources import tar_bytes

from conftest import TESTS, flat_colour, png
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files.ranges import read_ranges
from fnpipe.pipeline.shard.stage import ShardConfig, shard
from fnpipe.pipeline.sources.splits import _PERHAPS, is_split, named_splits, split_of_value
from fnpipe.pipeline.workspace.workspace import Workspace

CASES = TESTS / "cases2"
HELD_OUT = CASES / "01-held-out-becomes-train"


def shard_pairs(source: Path, tmp_path: Path, **options: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """The pairs that sharding makes, in the order of their captions, and its notes."""
    root = tmp_path / "workspace"
    summary = shard([str(source)], str(root), ShardConfig(workers=1, **options), overwrite=root.exists())
    return sorted(Workspace.open(root).read_pairs().to_pylist(), key=lambda pair: pair["caption"]), summary["notes"]


def splits_of(source: Path, tmp_path: Path, **options: Any) -> dict[str, list[str]]:
    pairs, _ = shard_pairs(source, tmp_path, **options)
    found: dict[str, list[str]] = {}
    for pair in pairs:
        found.setdefault(pair["split"], []).append(pair["caption"])
    return found


def write_parquet(path: Path, captions: list[str], start: int = 0, **columns: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pictures = [{"bytes": png(flat_colour(start + i)), "path": f"{start + i}.png"} for i in range(len(captions))]
    pq.write_table(pa.table({"image": pictures, "caption": captions, **columns}), path)


# Names and values


WORDS = st.sampled_from(
    ["train", "training", "test", "testing", "eval", "evaluation", "dev", "val", "valid", "validation", "data", "x"]
)
PARTS = st.tuples(WORDS, st.sampled_from(["", "-", "_", ".", " ", "7", "s"]), WORDS | st.just("")).map("".join)
NAMES = st.lists(PARTS, min_size=1, max_size=3).map(lambda parts: "/".join(parts) + "-00000-of-00001.parquet")


@given(st.lists(NAMES, min_size=1, max_size=4, unique=True))
@settings(max_examples=60)
def test_names_tell_the_split_that_datasets_finds(tmp_path_factory: pytest.TempPathFactory, names: list[str]):
    from datasets.data_files import DataFilesDict, get_data_patterns

    root = tmp_path_factory.mktemp("names")
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    try:
        patterns = get_data_patterns(str(root))
    except ValueError:
        reject()  # a name that is a split to its pattern, and none to its check
    theirs: dict[str, set[str]] = {name: set() for name in names}
    for split, files in DataFilesDict.from_local_or_remote(patterns, base_path=str(root)).items():
        for file in files:
            theirs[str(Path(file).relative_to(root))].add(str(split_of_value(str(split))))
    for name, split in named_splits(names).of.items():
        # Where nothing tells a split, all is `train` to both; a file of two splits is taken for the held-out one.
        if len(theirs[name]) < 2:
            assert {split} - {None} == theirs[name] or (split is None and theirs[name] == {"train"})
        else:
            assert split in theirs[name]
            assert split != "train"


def test_no_keyword_of_datasets_escapes_the_quick_look():
    from datasets.data_files import SPLIT_KEYWORDS

    assert all(_PERHAPS.search(word) for words in SPLIT_KEYWORDS.values() for word in words)


@pytest.mark.parametrize(
    ("value", "split"),
    [
        ("train", "train"),
        ("Training ", "train"),
        ("dev", "validation"),
        ("val", "validation"),
        ("eval", "test"),
        ("restval", "restval"),
        ("fold 3", "fold 3"),
        ("", None),
        (None, None),
        (7, None),
    ],
)
def test_a_value_of_a_column_names_a_split(value: object, split: str | None):
    assert split_of_value(value) == split


def test_a_split_is_asked_for_by_any_of_its_names():
    assert is_split("validation", "val")
    assert is_split("val", "validation")
    assert is_split(None, "train")
    assert not is_split(None, "test")


def test_names_that_are_no_split_are_told_when_they_look_like_one():
    assert "'Test/a.tar'" in named_splits(["Test/a.tar", "b.tar"]).notes[0]
    assert "test and train" in named_splits(["train-test.tar"]).notes[0]
    assert named_splits(["latest/a.tar", "contest.tar"]).notes == []


# Sources


def test_parquet_files_called_after_splits(tmp_path: Path):
    assert set(splits_of(HELD_OUT / "plain", tmp_path)) == {"train", "test", "validation"}
    assert set(splits_of(HELD_OUT / "dirs", tmp_path)) == {"train", "test"}


def test_parquet_files_whose_names_begin_with_a_split(tmp_path: Path):
    for number, name in enumerate(("train2014", "val2017", "test_1k")):
        write_parquet(tmp_path / "set" / f"{name}-00000-of-00001.parquet", [name], number)
    wanted = {"train": ["train2014"], "validation": ["val2017"], "test": ["test_1k"]}
    assert splits_of(tmp_path / "set", tmp_path) == wanted
    assert splits_of(tmp_path / "set", tmp_path, split="val") == {"validation": ["val2017"]}


def test_one_metadata_table_over_pictures_in_folders(tmp_path: Path):
    assert {split: len(captions) for split, captions in splits_of(HELD_OUT / "root-metadata", tmp_path).items()} == {
        "train": 2,
        "test": 1,
    }


def test_folders_with_their_other_names(tmp_path: Path):
    for number, name in enumerate(("training", "testing", "eval", "deep/dev")):
        folder = tmp_path / "set" / name
        folder.mkdir(parents=True)
        (folder / "a.png").write_bytes(png(flat_colour(number)))
        (folder / "metadata.jsonl").write_text(json.dumps({"file_name": "a.png", "text": name}))
    wanted = {"train": ["training"], "test": ["eval", "testing"], "validation": ["deep/dev"]}
    assert splits_of(tmp_path / "set", tmp_path) == wanted
    assert splits_of(tmp_path / "set", tmp_path, split="test") == {"test": ["eval", "testing"]}


def test_text_files_in_folders(tmp_path: Path):
    for number, name in enumerate(("train", "test")):
        (tmp_path / "set" / name).mkdir(parents=True)
        (tmp_path / "set" / name / "a.png").write_bytes(png(flat_colour(number)))
        (tmp_path / "set" / name / "a.txt").write_text(name)
    assert splits_of(tmp_path / "set", tmp_path) == {"train": ["train"], "test": ["test"]}


@pytest.mark.parametrize("in_place", [False, True])
def test_tars(tmp_path: Path, in_place: bool):
    (tmp_path / "set").mkdir()
    for number, name in enumerate(("train-000000", "test-000000")):
        data = tar_bytes([("a.png", png(flat_colour(number))), ("a.txt", name.encode())])
        (tmp_path / "set" / f"{name}.tar").write_bytes(data)
    options = {"in_place": in_place}
    assert splits_of(tmp_path / "set", tmp_path, **options) == {"train": ["train-000000"], "test": ["test-000000"]}
    assert splits_of(tmp_path / "set", tmp_path, split="test", **options) == {"test": ["test-000000"]}


@pytest.mark.parametrize("form", ["csv", "tsv", "json", "jsonl", "parquet"])
def test_a_column(form: str, tmp_path: Path):
    rows = [("a.png", "first", "train"), ("b.png", "second", "test"), ("a.png", "third", "")]
    path = tmp_path / "set" / f"pairs.{form}"
    path.parent.mkdir()
    for name in ("a.png", "b.png"):
        shutil.copy(HELD_OUT / name, path.parent)
    dicts = [dict(zip(("image", "caption", "split"), row, strict=True)) for row in rows]
    if form in ("csv", "tsv"):
        path.write_text("\n".join(({"csv": ",", "tsv": "\t"}[form]).join(row) for row in [tuple(dicts[0]), *rows]))
    elif form == "parquet":
        pq.write_table(pa.Table.from_pylist(dicts), path)
    else:
        path.write_text(json.dumps(dicts) if form == "json" else "\n".join(map(json.dumps, dicts)))
    assert splits_of(path, tmp_path) == {"train": ["first", "third"], "test": ["second"]}
    assert splits_of(path, tmp_path, split="test") == {"test": ["second"]}
    with pytest.raises(InputError, match=r"no split 'val' \(it has test, train\)"):
        splits_of(path, tmp_path, split="val")


def test_a_column_that_contradicts_the_file_s_name_counts_and_is_told(tmp_path: Path):
    write_parquet(tmp_path / "test.parquet", ["a", "b"], split=["train", "test"])
    pairs, notes = shard_pairs(tmp_path / "test.parquet", tmp_path)
    assert [pair["split"] for pair in pairs] == ["train", "test"]
    assert any("1 row has another split in the column" in note for note in notes)


def test_a_folder_above_the_source_tells_nothing(tmp_path: Path):
    source = CASES / "02-split-by-a-parent-folder" / "test" / "data-set"
    assert sum(map(len, splits_of(source, tmp_path, split="test").values())) == 2
    assert {split: len(captions) for split, captions in splits_of(source, tmp_path).items()} == {"train": 3, "test": 2}


def test_folders_in_the_paths_of_a_table_are_told(tmp_path: Path):
    for folder in ("train", "test"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.png").write_bytes(png(flat_colour(len(folder))))
    (tmp_path / "pairs.csv").write_text("image,caption\ntrain/a.png,one\ntest/a.png,two\n")
    pairs, notes = shard_pairs(tmp_path / "pairs.csv", tmp_path)
    assert {pair["split"] for pair in pairs} == {"train"}
    assert any(note.startswith("pairs.csv: 1 row counts as train") for note in notes)


def test_a_source_that_is_all_held_out_says_so(tmp_path: Path):
    write_parquet(tmp_path / "test.parquet", ["a", "b"])
    _, notes = shard_pairs(tmp_path / "test.parquet", tmp_path)
    assert "no pair is in the split 'train': all are in test" in notes


def test_a_holdout_is_drawn_from_what_the_source_trains_on(tmp_path: Path):
    write_parquet(tmp_path / "set" / "train.parquet", ["a", "b", "c", "d"])
    write_parquet(tmp_path / "set" / "val.parquet", ["e", "f"], 4)
    found = splits_of(tmp_path / "set", tmp_path, holdout=2)
    assert {split: len(captions) for split, captions in found.items()} == {"train": 2, "test": 2, "validation": 2}


# The same picture in several splits


def test_copies_of_a_picture_in_two_splits_are_told(tmp_path: Path):
    _, notes = shard_pairs(CASES / "16-pictures-of-two-splits" / "copies", tmp_path)
    assert "1 picture stands in the splits test and train at once (equal bytes)" in notes


def test_every_caption_of_a_picture_keeps_its_split(tmp_path: Path):
    for name in ("a.png", "b.png"):
        shutil.copy(HELD_OUT / name, tmp_path)
    for name in ("train", "test"):
        table = pa.table({"image": ["a.png", "b.png"], "caption": [f"{name} a", f"{name} b"]})
        pq.write_table(table, tmp_path / f"{name}-00000-of-00001.parquet")
    paths = str(tmp_path / "{train,test}-00000-of-00001.parquet")
    root = tmp_path / "workspace"
    summary = shard([paths], str(root), ShardConfig(workers=1))
    assert Counter(Workspace.open(root).read_pairs()["split"].to_pylist()) == {"train": 2, "test": 2}
    assert summary["images"] == 2
    assert "2 pictures stand in the splits test and train at once (equal bytes)" in summary["notes"]


# Two files of a source, one name in the spool


def test_two_parquet_files_of_like_paths_keep_their_pictures(tmp_path: Path):
    source = CASES / "03-two-files-one-spool" / "parquet"
    pairs, _ = shard_pairs(source, tmp_path)
    wanted = {}
    for path in source.rglob("*.parquet"):
        for row in pq.read_table(path).to_pylist():
            wanted[row["caption"]] = hashlib.sha256(row["image"]).hexdigest()
    assert {pair["caption"]: pair["image_sha256"] for pair in pairs} == wanted


def test_two_packed_tars_of_like_paths_keep_their_samples(tmp_path: Path):
    wanted = {}
    for number, folder in enumerate(("en/us", "en_us")):
        path = tmp_path / "set" / folder / "0.tar.gz"
        path.parent.mkdir(parents=True)
        picture, caption = png(flat_colour(number)), f"colour {number}"
        data = tar_bytes([("a.png", picture), ("a.txt", caption.encode())])
        path.write_bytes(gzip.compress(data, mtime=0).ljust(2000, b"\0"))
        wanted[caption] = picture
    pairs, _ = shard_pairs(tmp_path / "set", tmp_path)
    assert pictures_of(tmp_path / "workspace", pairs) == wanted


def pictures_of(root: Path, pairs: list[dict[str, Any]]) -> dict[str, bytes]:
    """The bytes of each pair's picture, by its caption."""
    workspace = Workspace.open(root)
    urls = [workspace.shard_url(pair["shard"]) for pair in pairs]
    places = np.array([(pair["image_offset"], pair["image_size"]) for pair in pairs])
    contents = read_ranges(urls, places[:, 0], places[:, 1])
    return {pair["caption"]: content for pair, content in zip(pairs, contents, strict=True)}


# Types of columns


def test_lists_of_fixed_size_and_of_dictionaries_are_captions(tmp_path: Path):
    for name in ("fixed", "dictionary-list"):
        path = CASES / "23-column-types" / f"{name}.parquet"
        pairs, _ = shard_pairs(path, tmp_path)
        wanted = sorted({text for row in pq.read_table(path)["caption"].to_pylist() for text in row})
        assert [pair["caption"] for pair in pairs] == wanted


def test_views_of_lists_are_captions_and_dictionaries_of_bytes_are_pictures(tmp_path: Path):
    pictures = [png(flat_colour(i)) for i in range(2)]
    captions = pa.array([["one", "two"], None, ["three"]], pa.list_view(pa.string()))
    images = pa.array([pictures[0], pictures[0], pictures[1]]).dictionary_encode()
    pq.write_table(pa.table({"image": images, "caption": captions}), tmp_path / "views.parquet")
    pairs, _ = shard_pairs(tmp_path / "views.parquet", tmp_path)
    wanted = {"one": pictures[0], "two": pictures[0], "three": pictures[1]}
    assert pictures_of(tmp_path / "workspace", pairs) == wanted
