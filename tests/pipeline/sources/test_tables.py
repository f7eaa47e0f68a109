"""CSV and TSV as other programs write them: line breaks and quotes inside quotes, lone quotes, very long fields."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_shard_sources import captions_of

from conftest import TESTS
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import text as files

CASES = TESTS / "cases2"
TWO_LINES = "A red house.\nIt has no door."
CELLS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=8)


def written(path: Path, text: str) -> Path:
    path.write_text(text, newline="")
    return path


def test_a_quoted_line_break_in_a_tsv_is_read_on():
    rows = captions_of(CASES / "12-quoted-line-breaks" / "pairs.tsv")
    assert rows == [("a.png", [TWO_LINES]), ("b.png", ["plain"]), ("c.png", ["left\tright"])]


@pytest.mark.parametrize("sign", [",", "\t"])
def test_a_quoted_line_break_before_the_path_is_read_on(sign: str, tmp_path: Path):
    name = "pairs.csv" if sign == "," else "pairs.tsv"
    rows = f'"{TWO_LINES}"{sign}a.png\nplain{sign}b.png\n'
    wanted = [("a.png", [TWO_LINES]), ("b.png", ["plain"])]
    assert captions_of(written(tmp_path / name, f"title{sign}filepath\n{rows}")) == wanted
    assert captions_of(written(tmp_path / name, rows), header=False) == wanted


def test_a_header_of_two_lines_is_one_header(tmp_path: Path):
    path = written(tmp_path / "pairs.csv", 'image,"caption","asked\nlast"\na.png,one,x\n')
    assert captions_of(path) == [("a.png", ["one"])]


@pytest.mark.parametrize("sign", [",", "\t"])
@pytest.mark.parametrize("rows", ['a.png{0}"He said "hi"\nand left."\n', 'a.png{0}"He said "hi"\nand\nleft."\n'])
def test_a_caption_that_is_quoted_wrongly_is_never_kept_by_half(sign: str, rows: str, tmp_path: Path):
    name = "pairs.csv" if sign == "," else "pairs.tsv"
    text = f"image{sign}caption\nz.png{sign}first\n{rows.format(sign)}b.png{sign}last\n"
    kept = [row for row in captions_of(written(tmp_path / name, text)) if row[1] != "bad-row"]
    assert kept == [("z.png", ["first"]), ("b.png", ["last"])]


@pytest.mark.parametrize("sign", [",", "\t"])
def test_the_second_half_of_a_caption_that_is_quoted_wrongly_is_not_kept(sign: str, tmp_path: Path):
    name = "pairs.csv" if sign == "," else "pairs.tsv"
    text = f'caption{sign}image\n"He said "hi"\nand left."{sign}a.png\nlast{sign}b.png\n'
    kept = [row for row in captions_of(written(tmp_path / name, text)) if row[1] != "bad-row"]
    assert kept == [("b.png", ["last"])]


def test_lone_quotes_in_rows_of_a_tsv_do_not_hold_them_together(tmp_path: Path):
    path = written(tmp_path / "pairs.tsv", 'filepath\ttitle\na.png\t"so it begins\nb.png\tthe 12"\nc.png\tlast\n')
    assert captions_of(path) == [("a.png", ['"so it begins']), ("b.png", ['the 12"']), ("c.png", ["last"])]


def test_rows_behind_a_stray_quote_are_read_by_their_own_quotes(tmp_path: Path):
    path = written(tmp_path / "pairs.csv", 'image,caption\na.png,"lone\nb.png,plain\nc.png,"one, two"\n')
    assert captions_of(path)[1:] == [("b.png", ["plain"]), ("c.png", ["one, two"])]


def test_quotes_escaped_by_backslash_are_read_as_spark_means_them():
    rows = captions_of(CASES / "13-backslash-quotes" / "spark.csv")
    assert rows == [("a.png", ['a "big" dog']), ("b.png", ['a "big" dog, running']), ("c.png", ["plain"])]


@pytest.mark.parametrize("sign", [",", "\t"])
@pytest.mark.parametrize(
    ("cell", "caption"),
    [
        (r'"\"big\" dog"', '"big" dog'),
        (r'"a dog, \"big\""', 'a dog, "big"'),
        ('"a \\"big\\"\ndog, too"', 'a "big"\ndog, too'),
        (r'"C:\dogs are \"big\""', r'C:\dogs are "big"'),
    ],
)
def test_backslash_and_quote_anywhere_in_a_quoted_field(sign: str, cell: str, caption: str, tmp_path: Path):
    name = "pairs.csv" if sign == "," else "pairs.tsv"
    path = written(tmp_path / name, f"image{sign}caption\na.png{sign}{cell}\nb.png{sign}plain\n")
    assert captions_of(path) == [("a.png", [caption]), ("b.png", ["plain"])]


def test_a_field_that_ends_with_a_backslash_is_read_by_the_usual_rule(tmp_path: Path):
    path = written(tmp_path / "pairs.csv", 'image,caption,folder\na.png,one,"C:\\x, y\\"\nb.png,two,z\n')
    assert captions_of(path) == [("a.png", ["one"]), ("b.png", ["two"])]


@pytest.mark.parametrize("page", [", ".join(["word"] * 40_000), "a line\n" * 40_000], ids=["one line", "many lines"])
def test_a_long_field_of_another_column_costs_no_row(page: str, tmp_path: Path):
    path = tmp_path / "pairs.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("file_name", "caption", "page"), ("a.png", "one", page), ("b.png", "two", "x")])
    assert captions_of(path) == [("a.png", ["one"]), ("b.png", ["two"])]


@pytest.mark.parametrize("name", ["pairs.csv", "pairs.tsv", "pairs.jsonl"])
def test_a_line_without_end_is_one_message(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "_LONGEST_LINE", 1000)
    path = written(tmp_path / name, "image,caption\n" * name.endswith("csv") + "x" * 3000)
    with pytest.raises(InputError, match="a line of more than 1,000 characters"):
        captions_of(path, "albef" if name.endswith("jsonl") else "auto")


@given(st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=6))
@settings(max_examples=80)
def test_a_tsv_with_quoted_line_breaks_comes_back_row_by_row(tmp_path_factory: pytest.TempPathFactory, cells):
    cells = [(a.replace("\t", " "), b.replace("\t", " ")) for a, b in cells]
    path = tmp_path_factory.mktemp("tsv") / "pairs.tsv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, "excel-tab").writerows([("image", "caption"), *cells])
    assert captions_of(path) == [(image, [caption]) for image, caption in cells]
