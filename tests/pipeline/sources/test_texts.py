"""What a text of a source stands for: one caption, a caption on every line, a list of captions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import TESTS, png
from fnpipe.cli.main import run
from fnpipe.pipeline.sources.captions import clean_caption, read_texts
from fnpipe.pipeline.sources.rows import RowBuilder

CASE = TESTS / "cases2" / "15-several-captions-in-one-text"
THREE = ["A man runs.", "Somebody in a park.", "A runner at dawn."]
LISTED = ["A red box.", "A small box, on green."]


def rows_of(*captions: object) -> pa.Table:
    rows = RowBuilder(0)
    for number, caption in enumerate(captions):
        rows.add(f"{number}.png", caption)
    return rows.table()


def sharded(source: Path, workspace: Path, *flags: str) -> tuple[list[str], list[str]]:
    """The captions and the notes of a source; ``status`` repeats the notes."""
    assert run(["shard", str(source), str(workspace), "--workers", "1", *flags]) == 0
    notes = json.loads((workspace / "fnpipe.json").read_bytes())["notes"]
    return pq.read_table(workspace / "pairs")["caption"].to_pylist(), notes


@pytest.mark.parametrize("name", ["lines", "lines.tar"])
def test_a_text_of_several_lines_is_one_caption_and_a_note_or_a_caption_a_line(name: str, tmp_path: Path, capsys):
    captions, notes = sharded(CASE / name, tmp_path / "one")
    assert captions == [" ".join(THREE)]
    assert notes == [
        f"{name}: 1 text has several lines, and each became one caption; --captions lines takes every line as one"
    ]
    capsys.readouterr()
    assert run(["status", str(tmp_path / "one")]) == 0
    assert f"note: {notes[0]}" in capsys.readouterr().out
    assert sharded(CASE / name, tmp_path / "lines", "--captions", "lines") == (THREE, [])


def test_a_list_of_captions_in_a_table_is_one_caption_and_a_note_or_its_captions(tmp_path: Path):
    flags = ("--image-column", "filename", "--caption-column", "raw")
    captions, notes = sharded(CASE / "list.csv", tmp_path / "one", *flags)
    assert json.dumps(LISTED) in captions
    assert any("2 texts are lists, and each became one caption; --captions json" in note for note in notes)
    captions, notes = sharded(CASE / "list.csv", tmp_path / "json", *flags, "--captions", "json")
    assert set(LISTED) < set(captions)
    assert not any("captions" in note for note in notes)


@pytest.mark.parametrize("form", ["albef", "coco", "parquet", "hf", "jsonl"])
def test_every_form_of_source_reads_lines_as_captions(form: str, tmp_path: Path):
    (tmp_path / "a.png").write_bytes(png((1, 2, 3)))
    row = {"image": "a.png", "caption": "\n".join(THREE)}
    path = tmp_path / f"pairs.{'parquet' if form == 'parquet' else 'json'}"
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist([row]), path)
    elif form == "hf":
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / "train-00000-of-00001.parquet")
        path = tmp_path
    elif form == "coco":
        annotation = {"id": 1, "image_id": 1, "caption": row["caption"]}
        path.write_text(json.dumps({"images": [{"id": 1, "file_name": "a.png"}], "annotations": [annotation]}))
    else:
        path.write_text(json.dumps(row if form == "jsonl" else [row]))
    workspace = tmp_path.parent / f"{tmp_path.name}-workspace"
    try:
        assert sharded(path, workspace, "--captions", "lines") == (THREE, [])
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


@pytest.mark.parametrize(
    ("text", "captions"),
    [
        ('["one", "two"]', ["one", "two"]),
        (' [\n "one",\n "it\'s"\n]\n', ["one", "it's"]),
        ("['one', \"it's\"]", ["one", "it's"]),
        ("a plain text", ["a plain text"]),
        ("[sic] as it says", ["[sic] as it says"]),
        ("['one' 'two']", ["['one' 'two']"]),  # a NumPy array: Python would read one text of both
        ('["one", 2, null]', ["one"]),
    ],
)
def test_captions_of_a_list_written_as_text(text: str, captions: list[str]):
    table, _ = read_texts(rows_of(text), "json")
    assert table["captions"].to_pylist() == [captions]


def test_a_list_without_a_text_is_set_aside_for_what_it_is():
    table, _ = read_texts(rows_of("[]", "[1, 2]", '["one"]', "\n"), "json")
    assert table["reason"].to_pylist() == ["empty-caption", "bad-caption-type", None, None]
    assert read_texts(rows_of(" \n "), "lines")[0]["reason"].to_pylist() == ["empty-caption"]


def test_what_is_no_list_after_all_is_said():
    assert read_texts(rows_of("['one' 'two']"), "json")[1] == [
        "1 text looks like a list, but neither as JSON nor as Python writes them; each is one caption"
    ]


def test_a_way_that_there_is_not_is_one_line(tmp_path: Path, capsys):
    assert run(["shard", str(CASE / "lines"), str(tmp_path / "w"), "--captions", "csv"]) == 2
    assert "--captions csv: one of text, lines, json" in capsys.readouterr().err


def has_several_lines(text: str) -> bool:
    return len([line for line in text.replace("\r", "\n").split("\n") if line.strip(" \t\n")]) > 1


@given(st.lists(st.one_of(st.text("ab \n\r[]\"'é"), st.lists(st.text("a\n"), min_size=1, max_size=3))))
def test_texts_of_several_lines_are_counted_as_a_loop_counts_them(captions: list[object]):
    expected = sum(has_several_lines(text) for one in captions for text in ([one] if isinstance(one, str) else one))
    notes = [note for note in read_texts(rows_of(*captions), None)[1] if "lines" in note]
    said = "1 text has" if expected == 1 else f"{expected} texts have"
    assert notes == [] if not expected else notes[0].startswith(f"{said} several lines")


@given(st.lists(st.text(min_size=1), min_size=2), st.booleans())
def test_a_list_comes_back_whatever_is_in_it(captions: list[str], as_json: bool):
    text = json.dumps(captions) if as_json else repr(captions)
    table, _ = read_texts(rows_of(text), "json")
    found = table["captions"].to_pylist()[0] if table["reason"][0].as_py() is None else []
    assert [clean_caption(caption) for caption in found] == [clean_caption(caption) for caption in captions]
