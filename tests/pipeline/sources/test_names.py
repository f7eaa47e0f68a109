"""Names of files as other systems write them: two Unicode forms, resource forks, odd digits, ranges, URLs."""

from __future__ import annotations

import io
import json
import tarfile
import unicodedata
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_shard_sources import captions_of

from conftest import TESTS, png
from fnpipe.cli.main import run
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files.urls import expand_braces, natural
from fnpipe.pipeline.images import reader as images
from fnpipe.pipeline.images.reader import ImageReader, ImageRequest

CASES = TESTS / "cases2"
NAME = "café_übung"
FORMS = ["NFC", "NFD"]


def form_of(form: str, name: str = NAME) -> str:
    return unicodedata.normalize(form, name)


@pytest.mark.parametrize("on_disk", FORMS)
@pytest.mark.parametrize("named", FORMS)
def test_a_picture_is_found_by_the_other_form_of_its_name(on_disk: str, named: str, tmp_path: Path):
    folder = tmp_path / form_of(on_disk)
    folder.mkdir()
    (folder / f"{form_of(on_disk)}.png").write_bytes(png((1, 2, 3)))
    image = f"{form_of(named)}/{form_of(named)}.png"
    assert ImageReader(str(tmp_path)).read([ImageRequest(image)]) == [png((1, 2, 3))]


def test_the_exact_name_comes_first_and_a_link_outside_is_refused_in_any_form(tmp_path: Path):
    root = tmp_path / "root"
    root.mkdir()
    for number, form in enumerate(FORMS):
        (root / f"{form_of(form)}.png").write_bytes(png((number, 0, 0)))
    reader = ImageReader(str(root))
    requests = [ImageRequest(f"{form_of(form)}.png") for form in FORMS]
    assert reader.read(requests) == [png((0, 0, 0)), png((1, 0, 0))]
    (tmp_path / "outside.png").write_bytes(png((9, 9, 9)))
    (root / f"{form_of('NFD', 'öde')}.png").symlink_to(tmp_path / "outside.png")
    (bad,) = reader.read([ImageRequest(f"{form_of('NFC', 'öde')}.png")])
    assert getattr(bad, "reason", "") == "path-escape"


def test_a_picture_in_memory_is_found_by_the_other_form_of_its_name():
    import fsspec

    fsspec.filesystem("memory").pipe_file(f"/names/{form_of('NFD')}.png", png((1, 2, 3)))
    found = ImageReader("memory://names").read([ImageRequest(f"{form_of('NFC')}.png"), ImageRequest("none_é.png")])
    assert found[0] == png((1, 2, 3))
    assert getattr(found[1], "reason", "") == "missing-file"


@pytest.mark.parametrize("suffix", [".txt", ".caption", ".json"])
def test_a_text_belongs_to_a_picture_whose_name_is_written_in_the_other_form(suffix: str, tmp_path: Path):
    (tmp_path / f"{form_of('NFD')}.png").write_bytes(png((1, 2, 3)))
    text = json.dumps({"caption": "one"}) if suffix == ".json" else "one"
    (tmp_path / f"{form_of('NFC')}{suffix}").write_text(text)
    assert captions_of(tmp_path, "folder") == [(f"{form_of('NFD')}.png", ["one"])]


def test_members_of_a_tar_belong_together_in_either_form(tmp_path: Path):
    path = tmp_path / "0.tar"
    with tarfile.open(path, "w") as tar:
        for name, data in ((f"{form_of('NFD')}.png", png((1, 2, 3))), (f"{form_of('NFC')}.txt", b"one")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    assert [captions for _, captions in captions_of(path)] == [["one"]]


def test_a_picture_named_in_the_other_form_is_not_counted_as_without_a_caption(tmp_path: Path):
    source = tmp_path / "source"
    source.mkdir()
    (source / f"{form_of('NFD')}.png").write_bytes(png((1, 2, 3)))
    (source / "metadata.jsonl").write_text(json.dumps({"file_name": f"{form_of('NFC')}.png", "caption": "one"}))
    assert run(["shard", str(source), str(tmp_path / "w"), "--workers", "1"]) == 0
    manifest = json.loads((tmp_path / "w" / "fnpipe.json").read_bytes())
    assert (manifest["counts"]["kept"], manifest["notes"]) == (1, [])


def test_a_resource_fork_beside_tars_is_no_tar(tmp_path: Path):
    rows = captions_of(CASES / "21-resource-forks-beside-shards" / "tars")
    assert rows
    assert all(isinstance(captions, list) for _, captions in rows)


def test_a_resource_fork_beside_parquet_files_is_no_parquet_file(tmp_path: Path):
    name = "train-00000-of-00001.parquet"
    pq.write_table(pa.table({"image": ["a.png"], "caption": ["one"]}), tmp_path / name)
    (tmp_path / f"._{name}").write_bytes(b"\0\5\x16\7Mac OS X")
    assert captions_of(tmp_path) == [("a.png", ["one"])]


def test_names_with_digits_that_are_no_decimals_have_an_order(tmp_path: Path):
    names = ["part-10.tar", "part-2.tar", "1²2.tar", "1٣.tar", "①.tar"]
    assert sorted(names, key=natural).index("part-2.tar") < sorted(names, key=natural).index("part-10.tar")
    with tarfile.open(tmp_path / "1²2.tar", "w") as tar:
        for name, data in (("a.png", png((1, 2, 3))), ("a.txt", b"one")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    assert [captions for _, captions in captions_of(tmp_path)] == [["one"]]


@pytest.mark.parametrize(
    "pattern",
    ["{0..9999999999}.tar", "{0..9999}/{0..9999}.tar", "{9999999999..0}.tar", "{0.." + "9" * 5000 + "}.tar"],
)
def test_a_range_of_too_many_files_is_one_message(pattern: str):
    with pytest.raises(InputError, match="stands for more than 1,000,000 files"):
        expand_braces(pattern)


class KeepsScheme:
    """A file system whose paths are whole URLs, as fsspec's for HTTP."""

    files = {"http://host/pictures/a.png": png((1, 2, 3)), "http://host/b.png": png((4, 5, 6))}  # noqa: RUF012

    def cat(self, paths: list[str], on_error: str) -> dict[str, bytes | Exception]:
        return {path: self.files.get(path, FileNotFoundError(path)) for path in paths}


def test_pictures_are_read_below_a_root_that_keeps_its_scheme(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(images, "filesystem", lambda url: (KeepsScheme(), url))
    requests = [ImageRequest(name) for name in ("./a.png", "sub/../a.png", "none.png", "../b.png", "../../x/b.png")]
    *found, missing, above, far = ImageReader("http://host/pictures").read(requests)
    assert found == [png((1, 2, 3))] * 2
    assert [getattr(bad, "reason", "") for bad in (missing, above, far)] == [
        "missing-file",
        "path-escape",
        "path-escape",
    ]
