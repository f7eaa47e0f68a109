"""`fnpipe shard` and `fnpipe status` as a whole: what a workspace holds, and what killing and repeating do to it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem
from PIL import Image

from conftest import MakePairs, flat_colour, png
from fnpipe.cli.main import run
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files.digests import digest_files
from fnpipe.pipeline.files.ranges import read_ranges
from fnpipe.pipeline.images.decode import decode_rgb
from fnpipe.pipeline.shard import assign_ids as finishing
from fnpipe.pipeline.shard import write_shard as parts
from fnpipe.pipeline.shard.stage import ShardConfig, shard
from fnpipe.pipeline.workspace.manifest import write_manifest
from fnpipe.pipeline.workspace.schemas import IMAGES_SCHEMA, PAIRS_SCHEMA
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.status import status

Shard = Callable[..., Workspace]


@pytest.fixture
def shard_to(tmp_path: Path) -> Shard:
    """Shard sources with small shards in this process, and open the workspace."""

    def to(name: str, *sources: Path | str, **options: Any) -> Workspace:
        config = ShardConfig(**{"workers": 1, "images_per_shard": 5, **options})
        shard([str(source) for source in sources], str(tmp_path / name), config)
        return Workspace.open(tmp_path / name)

    return to


def tables_and_tars(workspace: Path) -> dict[str, str]:
    """The digest of every file of a workspace but the manifest, which may hold times."""
    return {
        path.relative_to(workspace).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(workspace.rglob("*"))
        if path.is_file() and path.name != "fnpipe.json"
    }


def pictures_of(workspace: Workspace) -> list[bytes]:
    """The bytes of the image of every pair, read by offset."""
    pairs = workspace.read_pairs()
    urls = [workspace.shard_url(number) for number in pairs["shard"].to_pylist()]
    return read_ranges(urls, pairs["image_offset"].to_pylist(), pairs["image_size"].to_pylist())


# What a workspace holds


def test_every_pair_of_the_source_is_there_with_its_own_picture(make_pairs: MakePairs, shard_to: Shard):
    source = make_pairs(12, captions=2)
    workspace = shard_to("workspace", source)
    rows = json.loads(source.read_text())
    contents = {row["image"]: (source.parent / row["image"]).read_bytes() for row in rows}
    wanted = {text: (row["image"], contents[row["image"]]) for row in rows for text in row["caption"]}
    pairs, images = workspace.read_pairs(), workspace.read_images()
    assert pairs.schema.equals(PAIRS_SCHEMA)
    assert images.schema.equals(IMAGES_SCHEMA)
    assert pairs["pair_id"].to_pylist() == list(range(24))
    assert images["image_id"].to_pylist() == list(range(12))
    names = images["image"].to_pylist()
    for pair, data in zip(pairs.to_pylist(), pictures_of(workspace), strict=True):
        assert wanted.pop(pair["caption"]) == (names[pair["image_id"]], data)
        assert pair["image_sha256"] == hashlib.sha256(data).hexdigest()
        assert (pair["width"], pair["height"], pair["split"]) == (8, 8, "train")
    assert not wanted
    assert workspace.image_starts.tolist() == [0, 5, 10, 12]
    assert workspace.pair_starts.tolist() == [0, 10, 20, 24]
    assert workspace.digest == digest_files(sorted((workspace.root / "pairs").iterdir()), workspace.root)


def test_a_tar_holds_picture_first_caption_and_description(make_pairs: MakePairs, shard_to: Shard):
    workspace = shard_to("workspace", make_pairs(3, captions=2))
    with tarfile.open(workspace.shard_url(0)) as tar:
        members = {member.name: tar.extractfile(member).read() for member in tar}
    pairs = workspace.read_pairs().to_pylist()
    for pair in pairs[::2]:
        both = [other["caption"] for other in pairs if other["image_id"] == pair["image_id"]]
        assert members[f"{pair['key']}.txt"].decode() == both[0]
        described = json.loads(members[f"{pair['key']}.json"])
        assert described["captions"] == both
        assert described["sha256"] == pair["image_sha256"]
        assert f"{pair['key']}.png" in members
    assert len(members) == 9


def test_images_are_shuffled_by_the_seed_before_they_are_cut(make_pairs: MakePairs, shard_to: Shard):
    source = make_pairs(40)
    orders = {seed: shard_to(f"w{seed}", source, seed=seed).read_images()["image"].to_pylist() for seed in (0, 1)}
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1] != sorted(orders[1])


def test_rows_of_one_file_are_one_image_and_a_repeated_row_is_set_aside(tmp_path: Path, shard_to: Shard):
    (tmp_path / "a.png").write_bytes(png((9, 9, 9)))
    (tmp_path / "b.png").write_bytes(png((9, 9, 9)))
    rows = [("a.png", "one"), ("b.png", "one"), ("./a.png", "two"), ("a.png", " one "), ("a.png", ["two", "three"])]
    (tmp_path / "pairs.json").write_text(json.dumps([{"image": image, "caption": text} for image, text in rows]))
    workspace = shard_to("workspace", tmp_path / "pairs.json")
    images = workspace.read_images()["image"].to_pylist()
    pairs = [(images[pair["image_id"]], pair["caption"]) for pair in workspace.read_pairs().to_pylist()]
    assert sorted(pairs) == [("a.png", "one"), ("a.png", "three"), ("a.png", "two"), ("b.png", "one")]
    assert len(set(workspace.read_pairs()["image_sha256"].to_pylist())) == 1
    assert workspace.manifest["counts"] == {
        "rows": 5,
        "kept": 4,
        "quarantined": {"duplicate-pair": 1},
        "captions_dropped": 1,
    }
    (row,) = pq.read_table(workspace.root / "quarantine.parquet").to_pylist()
    assert (row["source"], row["row"], row["image"]) == ("pairs.json", 3, "a.png")


def test_an_image_with_many_captions_costs_batches_and_not_rows(tmp_path: Path, shard_to: Shard, monkeypatch):
    monkeypatch.setattr("fnpipe.pipeline.files.tables.BATCH_ROWS", 7)
    (tmp_path / "a.png").write_bytes(png((1, 2, 3)))
    rows = [{"image": "a.png", "caption": f"caption {i}"} for i in range(100)]
    (tmp_path / "pairs.json").write_text(json.dumps(rows))
    assert shard_to("workspace", tmp_path / "pairs.json").read_pairs()["caption"].to_pylist() == [
        row["caption"] for row in rows
    ]


def test_a_shard_of_which_nothing_is_kept_is_passed_over(make_pairs: MakePairs, shard_to: Shard):
    source = make_pairs(20)
    whole = shard_to("whole", source)
    lost = set(whole.read_images()["image"].to_pylist()[5:10])
    for name in lost:
        (source.parent / name).write_bytes(b"broken")
    workspace = shard_to("workspace", source)
    assert workspace.n_shards == 3
    assert [Path(workspace.shard_url(n)).name for n in range(3)] == ["00000.tar", "00002.tar", "00003.tar"]
    assert workspace.read_pairs()["shard"].to_pylist() == [0] * 5 + [1] * 5 + [2] * 5
    assert workspace.read_pairs()["pair_id"].to_pylist() == list(range(15))
    # The others keep their keys: these come from the position, not from what was kept.
    kept = [row for row in whole.read_images().to_pylist() if row["image"] not in lost]
    assert workspace.read_images()["key"].to_pylist() == [row["key"] for row in kept]
    assert not (workspace.root / "shards" / "00001.tar").exists()


@pytest.mark.parametrize(("holdout", "count"), [(0.25, 5), (7, 7)])
def test_holdout_draws_pictures_by_their_bytes(make_pairs: MakePairs, shard_to: Shard, holdout: float, count: int):
    source = make_pairs(20, captions=2)
    rows = json.loads(source.read_text())
    for i in range(20):  # every picture a second time under another name
        shutil.copy(source.parent / rows[i]["image"], source.parent / f"copy{i}.png")
        rows.append({"image": f"copy{i}.png", "caption": f"copy {i}"})
    source.write_text(json.dumps(rows))
    pairs = shard_to("workspace", source, holdout=holdout).read_pairs().to_pylist()
    held = {pair["image_sha256"] for pair in pairs if pair["split"] == "test"}
    assert len(held) == count
    assert held.isdisjoint(pair["image_sha256"] for pair in pairs if pair["split"] == "train")
    assert shard_to("again", source, holdout=holdout).splits() == {"test": 3 * count, "train": 60 - 3 * count}


def test_a_validation_split_is_drawn_beside_the_test_split(make_pairs: MakePairs, shard_to: Shard):
    source = make_pairs(20)
    rows = json.loads(source.read_text())
    for i in range(20):  # every picture a second time under another name
        shutil.copy(source.parent / rows[i]["image"], source.parent / f"copy{i}.png")
        rows.append({"image": f"copy{i}.png", "caption": f"copy {i}"})
    source.write_text(json.dumps(rows))
    splits_of: dict[str, dict[str, set[str]]] = {}
    for name, flags in {"one": {}, "both": {"validation": 0.1}}.items():
        pairs = shard_to(name, source, holdout=0.2, **flags).read_pairs().to_pylist()
        splits_of[name] = {
            split: {pair["image_sha256"] for pair in pairs if pair["split"] == split}
            for split in ("train", "validation", "test")
        }
    one, both = splits_of["one"], splits_of["both"]
    assert {split: len(pictures) for split, pictures in both.items()} == {"train": 14, "validation": 2, "test": 4}
    assert both["test"] == one["test"]
    assert both["train"] | both["validation"] == one["train"]
    assert not both["train"] & both["validation"]


def test_a_workspace_without_a_validation_split_records_no_such_parameter(make_pairs: MakePairs, shard_to: Shard):
    source = make_pairs(8)
    assert "validation" not in shard_to("without", source).manifest["params"]
    assert shard_to("with", source, validation=2).manifest["params"]["validation"] == 2
    with pytest.raises(InputError, match="started with --validation 2, now not given"):
        shard_to("with", source)


def test_what_others_are_writing_below_the_folder_of_the_shards_stays(
    make_pairs: MakePairs, shard_to: Shard, tmp_path: Path
):
    left, other = tmp_path / "tars" / ".tmp-left.tar", tmp_path / "tars" / "other" / ".tmp-other.tar"
    other.parent.mkdir(parents=True)
    left.touch()
    other.touch()
    shard_to("workspace", make_pairs(4), shards=str(tmp_path / "tars"))
    assert not left.exists()
    assert other.exists()


def test_a_split_of_the_source_stays_and_the_rest_is_drawn(tmp_path: Path, shard_to: Shard):
    images = []
    for i in range(12):
        (tmp_path / f"{i}.png").write_bytes(png(flat_colour(i)))
        split = {"split": "val"} if i < 4 else {}
        images.append({"filename": f"{i}.png", "sentences": [{"raw": f"card {i}"}], **split})
    (tmp_path / "dataset.json").write_text(json.dumps({"images": images}))
    workspace = shard_to("workspace", tmp_path / "dataset.json", holdout=0.5)
    assert workspace.splits() == {"test": 4, "train": 4, "val": 4}


def test_resize_shrinks_large_pictures_and_leaves_small_ones_alone(tmp_path: Path, shard_to: Shard):
    sizes = {"large": (120, 60), "tall": (30, 300), "small": (20, 16), "sliver": (1, 900)}
    for i, (name, size) in enumerate(sizes.items()):
        (tmp_path / f"{name}.png").write_bytes(png(flat_colour(i), size))
    rows = [{"image": f"{name}.png", "caption": name} for name in sizes]
    (tmp_path / "pairs.json").write_text(json.dumps(rows))
    workspace = shard_to("workspace", tmp_path / "pairs.json", resize=24)
    for pair, data in zip(workspace.read_pairs().to_pylist(), pictures_of(workspace), strict=True):
        source = (tmp_path / f"{pair['caption']}.png").read_bytes()
        picture = decode_rgb(data)
        assert picture.shape == (pair["height"], pair["width"], 3)
        assert pair["image_sha256"] == hashlib.sha256(source).hexdigest()
        wanted = {"large": (48, 24), "tall": (24, 240)}.get(pair["caption"])
        if wanted:
            assert (pair["width"], pair["height"]) == wanted
            assert data[:2] == b"\xff\xd8"
            assert np.abs(picture.astype(int) - decode_rgb(source)[0, 0]).max() <= 3
        else:
            assert data == source


def test_a_form_that_shards_do_not_hold_is_stored_as_png(tmp_path: Path, shard_to: Shard):
    Image.new("RGB", (6, 4), (10, 200, 30)).save(tmp_path / "a.bmp")
    (tmp_path / "pairs.json").write_text('[{"image": "a.bmp", "caption": "green"}]')
    workspace = shard_to("workspace", tmp_path / "pairs.json")
    (data,) = pictures_of(workspace)
    assert data.startswith(b"\x89PNG")
    assert (decode_rgb(data) == (10, 200, 30)).all()
    wanted = hashlib.sha256((tmp_path / "a.bmp").read_bytes()).hexdigest()
    assert workspace.read_pairs()["image_sha256"].to_pylist() == [wanted]


def test_several_sources_keep_their_names_rows_and_quarantine_apart(make_pairs: MakePairs, shard_to: Shard):
    first, second = make_pairs(6, folder="first"), make_pairs(4, folder="second")
    rows = [*json.loads(second.read_text()), {"image": "gone.png", "caption": "x"}]
    second.write_text(json.dumps(rows))
    workspace = shard_to("workspace", first, second)
    sources = workspace.read_images()["source"].to_pylist()
    assert (sources.count("first/pairs.json"), sources.count("second/pairs.json")) == (6, 4)
    (row,) = pq.read_table(workspace.root / "quarantine.parquet").to_pylist()
    assert (row["source"], row["row"], row["reason"]) == ("second/pairs.json", 4, "missing-file")
    assert [(s["rows"], s["kept"]) for s in workspace.manifest["sources"]] == [(6, 6), (5, 4)]


# Tars that exist already


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    """Two tars whose samples have the same keys, one of them with a picture cut short."""
    root = tmp_path / "tars"
    root.mkdir()
    for shard_number in range(2):
        with tarfile.open(root / f"{shard_number:05d}.tar", "w") as tar:
            for i in range(4):
                data = png(flat_colour(10 * shard_number + i), (8 + i, 9))
                if shard_number == 1 and i == 2:
                    data = data[:50]
                for name, content in ((f"{i:04d}.png", data), (f"{i:04d}.txt", f"card {shard_number} {i}".encode())):
                    info = tarfile.TarInfo(name)
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    return root


@pytest.mark.parametrize("verify", [False, True])
def test_in_place_copies_nothing_and_keeps_the_order(tars: Path, shard_to: Shard, verify: bool):
    before = tables_and_tars(tars)
    workspace = shard_to("workspace", tars, in_place=True, verify=verify)
    assert tables_and_tars(tars) == before
    assert not (workspace.root / "shards").exists()
    assert [workspace.shard_url(n) for n in range(2)] == [str(tars / "00000.tar"), str(tars / "00001.tar")]
    pairs = workspace.read_pairs().to_pylist()
    order = [(s, i) for s in range(2) for i in range(4) if not (verify and (s, i) == (1, 2))]
    assert [pair["caption"] for pair in pairs] == [f"card {s} {i}" for s, i in order]
    assert len({pair["key"] for pair in pairs}) == len(pairs)
    for (s, i), pair, data in zip(order, pairs, pictures_of(workspace), strict=True):
        assert (pair["width"], pair["height"]) == (8 + i, 9)
        if (s, i) != (1, 2):
            assert (decode_rgb(data) == flat_colour(10 * s + i)).all()
    quarantined = workspace.manifest["counts"]["quarantined"]
    assert quarantined == ({"decode-error": 1} if verify else {})


def test_an_empty_tar_among_others_is_noted_and_one_of_no_bytes_reported(tars: Path, shard_to: Shard):
    (tars / "00002.tar").write_bytes(bytes(10240))
    (tars / "00003.tar").write_bytes(b"")
    workspace = shard_to("workspace", tars)
    assert [note for note in workspace.manifest["notes"] if "00002.tar holds no samples" in note]
    assert workspace.manifest["counts"]["quarantined"] == {"decode-error": 1, "truncated-shard": 1}


def test_in_place_keeps_keys_that_are_unique(tars: Path, shard_to: Shard):
    workspace = shard_to("workspace", tars / "00000.tar", in_place=True)
    assert workspace.read_pairs()["key"].to_pylist() == ["0000", "0001", "0002", "0003"]


def test_in_place_refuses_what_it_cannot_index(tars: Path, make_pairs: MakePairs, shard_to: Shard):
    import gzip

    packed = tars.parent / "packed.tar"
    packed.write_bytes(gzip.compress((tars / "00000.tar").read_bytes()))
    with pytest.raises(InputError, match=r"packed\.tar: compressed tars cannot be read in place"):
        shard_to("workspace", packed, in_place=True)
    with pytest.raises(InputError, match="--in-place indexes tars"):
        shard_to("workspace", make_pairs(2), in_place=True)


def test_our_own_shards_sharded_again_keep_all_captions(make_pairs: MakePairs, shard_to: Shard):
    first = shard_to("first", make_pairs(7, captions=3))
    second = shard_to("second", first.root / "shards")
    for column in ("caption", "image_sha256"):
        before, after = (workspace.read_pairs()[column].to_pylist() for workspace in (first, second))
        assert sorted(after) == sorted(before)


def test_a_brace_range_and_a_folder_hold_the_same(tars: Path, shard_to: Shard):
    folder = shard_to("folder", tars)
    ranged = shard_to("ranged", f"{tars}/{{00000..00001}}.tar")
    drop = ["source"]
    assert folder.read_pairs().drop_columns(drop).equals(ranged.read_pairs().drop_columns(drop))


# Remote storage


class Vault(LocalFileSystem):
    """Local files under another protocol: what a remote store looks like to the program."""

    protocol = "vault"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return LocalFileSystem._strip_protocol(str(path).removeprefix("vault://"))


@pytest.fixture
def vault() -> None:
    fsspec.register_implementation("vault", Vault, clobber=True)


def test_sources_and_shards_may_lie_in_remote_storage(
    vault: None, make_pairs: MakePairs, shard_to: Shard, tmp_path: Path
):
    source = make_pairs(12, captions=2)
    (source.parent / "pictures" / "0003.png").unlink()
    rows = [*json.loads(source.read_text()), {"image": "../secret.png", "caption": "x"}]
    source.write_text(json.dumps(rows))
    (source.parent.parent / "secret.png").write_bytes(png((0, 0, 0)))
    (tmp_path / "bucket").mkdir()
    here = shard_to("here", source)
    there = shard_to("there", f"vault://{source}", shards=f"vault://{tmp_path}/bucket")
    assert there.shard_url(0) == f"vault://{tmp_path}/bucket/00000.tar"
    assert not (there.root / "shards").exists()
    assert there.read_pairs().equals(here.read_pairs())
    assert pictures_of(there) == pictures_of(here)
    assert there.manifest["counts"]["quarantined"] == {"missing-file": 1, "path-escape": 1}


def test_tars_in_remote_storage_can_be_indexed_in_place(vault: None, tars: Path, shard_to: Shard):
    local = shard_to("local", tars, in_place=True)
    remote = shard_to("remote", f"vault://{tars}", in_place=True)
    assert remote.shard_url(0) == f"vault://{tars}/00000.tar"
    assert remote.read_pairs().equals(local.read_pairs())
    assert pictures_of(remote) == pictures_of(local)


# Killed, repeated, and done otherwise


def test_one_worker_and_two_write_the_same_bytes(make_pairs: MakePairs, shard_to: Shard, tmp_path: Path):
    source = make_pairs(30, captions=2)
    (source.parent / "pictures" / "0004.png").write_bytes(b"broken")
    for workers in (1, 2):
        shard_to(f"w{workers}", source, workers=workers, holdout=0.2)
    assert tables_and_tars(tmp_path / "w1") == tables_and_tars(tmp_path / "w2")


class Killed(BaseException):
    """Stands for the moment of a kill inside one process."""


@pytest.mark.parametrize("after", range(0, 24, 3))
def test_stopped_at_any_write_and_run_again_gives_the_same_bytes(
    make_pairs: MakePairs, shard_to: Shard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
):
    source = make_pairs(17, captions=2)
    (source.parent / "pictures" / "0004.png").write_bytes(b"broken")
    shard_to("whole", source, holdout=0.2)
    writes = 0
    real = os.replace

    def dying(*arguments: Any, **options: Any) -> None:
        nonlocal writes
        if writes == after:
            raise Killed
        writes += 1
        real(*arguments, **options)

    monkeypatch.setattr(os, "replace", dying)
    with pytest.raises(Killed):
        shard_to("killed", source, holdout=0.2)
    monkeypatch.setattr(os, "replace", real)
    with pytest.raises(InputError, match=r"not (finished|a workspace)"):
        Workspace.open(tmp_path / "killed")
    shard_to("killed", source, holdout=0.2)
    assert tables_and_tars(tmp_path / "killed") == tables_and_tars(tmp_path / "whole")


def command(source: Path, workspace: Path) -> list[str]:
    flags = ["--images-per-shard", "20", "--workers", "2", "--holdout", "0.1"]
    return [sys.executable, "-m", "fnpipe.cli", "shard", str(source), str(workspace), *flags]


def test_killed_by_the_system_and_run_again_gives_the_same_bytes(make_pairs: MakePairs, tmp_path: Path):
    source = make_pairs(400, captions=2)
    subprocess.run(command(source, tmp_path / "whole"), check=True, capture_output=True)
    whole = tables_and_tars(tmp_path / "whole")
    killed = tmp_path / "killed"
    for wanted in (2, 9, 15):
        process = subprocess.Popen(command(source, killed), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and len(list(killed.glob("parts/*.parquet"))) < wanted:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
    again = subprocess.run(command(source, killed), check=True, capture_output=True, text=True)
    assert "rows read 400 = kept 400 + quarantined 0" in again.stdout
    assert tables_and_tars(killed) == whole


def test_workers_of_a_killed_run_end_with_it(make_pairs: MakePairs, tmp_path: Path):
    source = make_pairs(600)
    quiet = subprocess.DEVNULL
    words = command(source, tmp_path / "workspace")
    process = subprocess.Popen(words, stdout=quiet, stderr=quiet, start_new_session=True)
    while process.poll() is None and not list(tmp_path.glob("workspace/parts/*.parquet")):
        time.sleep(0.001)
    process.kill()
    process.wait()
    for _ in range(6000):
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    raise AssertionError("a worker outlived the run")


def test_a_finished_run_repeated_changes_nothing(make_pairs: MakePairs, shard_to: Shard, tmp_path: Path):
    source = make_pairs(8)
    shard_to("workspace", source)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "workspace").rglob("*")}
    assert shard([str(source)], str(tmp_path / "workspace"), ShardConfig(workers=2, images_per_shard=5))[
        "already_finished"
    ]
    os.utime(source)  # touched, but the same
    shard_to("workspace", source)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "workspace").rglob("*")} == before
    source.unlink()
    with pytest.raises(InputError, match="no such file"):
        shard_to("workspace", source)


def test_another_source_or_flag_is_refused_and_overwrite_starts_afresh(
    make_pairs: MakePairs, shard_to: Shard, tmp_path: Path
):
    source, other = make_pairs(8), make_pairs(3, folder="other")
    shard_to("workspace", source)
    before = tables_and_tars(tmp_path / "workspace")
    with pytest.raises(InputError, match="started with --seed 0, now 1; use another workspace, or --overwrite"):
        shard_to("workspace", source, seed=1)
    with pytest.raises(InputError, match=r"started with sources .*pairs\.json, now .*other/pairs\.json"):
        shard_to("workspace", other)
    rows = json.loads(source.read_text())
    source.write_text(json.dumps(rows[:-1]))
    with pytest.raises(InputError, match="the sources have changed"):
        shard_to("workspace", source)
    assert tables_and_tars(tmp_path / "workspace") == before
    config = ShardConfig(workers=1, images_per_shard=5)
    assert shard([str(other)], str(tmp_path / "workspace"), config, overwrite=True)["images"] == 3
    shard_to("fresh", other)
    assert tables_and_tars(tmp_path / "workspace") == tables_and_tars(tmp_path / "fresh")


def test_a_wrong_image_root_leaves_nothing_in_the_way(make_pairs: MakePairs, shard_to: Shard, tmp_path: Path):
    source = make_pairs(4)
    with pytest.raises(InputError, match=r"none of its 4 rows .*/0000\.png.*--image-root"):
        shard_to("workspace", source, image_root=str(tmp_path))
    assert not (tmp_path / "workspace").exists()
    shard_to("workspace", source)


def test_a_folder_with_other_things_in_it_is_no_workspace(make_pairs: MakePairs, shard_to: Shard, tmp_path: Path):
    source = make_pairs(4)
    (source.parent / "images").mkdir()
    with pytest.raises(InputError, match=r"holds 'images' but no fnpipe\.json"):
        shard_to("source", source)
    assert (source.parent / "images").exists()


def test_leftovers_of_a_killed_run_are_swept(make_pairs: MakePairs, shard_to: Shard, tmp_path: Path, monkeypatch):
    source = make_pairs(4)
    monkeypatch.setattr(finishing, "write_tables", None)
    monkeypatch.setattr("fnpipe.pipeline.shard.stage.write_tables", None)
    with pytest.raises(TypeError):
        shard_to("workspace", source)
    (tmp_path / "workspace" / "shards" / ".tmp-half.tar").write_bytes(b"half")
    (tmp_path / "workspace" / ".tmp-abcd1234.json").write_bytes(b"{")
    monkeypatch.undo()
    shard_to("workspace", source)
    assert not list((tmp_path / "workspace").rglob(".tmp-*"))
    assert not (tmp_path / "workspace" / "parts").exists()


def test_nothing_is_written_where_a_source_lies(tars: Path, shard_to: Shard, tmp_path: Path):
    with pytest.raises(InputError, match="lies inside the source"):
        shard_to("tars/workspace", tars)
    for source in (tars, tars / "00000.tar"):
        with pytest.raises(InputError, match=r"--shards .* lies inside the source"):
            shard_to("workspace", source, shards=str(tars))
    shard_to("first", tars, shards=str(tmp_path / "elsewhere"))
    with pytest.raises(InputError, match="of another workspace"):
        shard_to("second", tars, shards=str(tmp_path / "elsewhere"))
    assert not (tmp_path / "second").exists()
    # Nor does a workspace that is sharded anew, into another place, write over them.
    before = (tmp_path / "elsewhere" / "00000.tar").read_bytes()
    shard_to("third", tars)
    config = ShardConfig(workers=1, images_per_shard=2, shards=str(tmp_path / "elsewhere"))
    with pytest.raises(InputError, match="of another workspace"):
        shard([str(tars)], str(tmp_path / "third"), config, overwrite=True)
    assert (tmp_path / "elsewhere" / "00000.tar").read_bytes() == before
    assert Workspace.open(tmp_path / "third").n_images


def test_pictures_that_came_later_are_spoken_of_where_nothing_is_read_again(make_pairs: MakePairs, tmp_path: Path):
    source = make_pairs(4)
    picture = source.parent / "pictures/0001.png"
    data = picture.read_bytes()
    picture.unlink()
    words = [str(source)], str(tmp_path / "workspace"), ShardConfig(workers=1)
    assert shard(*words)["kept"] == 3
    picture.write_bytes(data)
    again = shard(*words)
    assert again["already_finished"]
    note = "1 row was left out; if their files are there now, --overwrite reads them again"
    assert again["notes"][-1] == note
    assert status(str(tmp_path / "workspace"))["counts"]["notes"] == [note]
    assert shard(*words, overwrite=True)["kept"] == 4


def test_parts_that_a_kill_left_behind_a_finished_run_are_removed(make_pairs: MakePairs, shard_to: Shard):
    source = make_pairs(4)
    workspace = shard_to("workspace", source)
    (workspace.root / "parts").mkdir()
    (workspace.root / "parts" / "rows.arrow").write_bytes(b"left")
    shard_to("workspace", source)
    assert not (workspace.root / "parts").exists()


def test_a_holdout_of_everything_is_refused(make_pairs: MakePairs, shard_to: Shard, tmp_path: Path):
    source = make_pairs(4)
    with pytest.raises(InputError, match="--holdout 4: there are 4 images"):
        shard_to("workspace", source, holdout=4)
    with pytest.raises(InputError, match=r"--holdout 0\.5 and --validation 2: there are 4 images"):
        shard_to("workspace", source, holdout=0.5, validation=2)
    assert not (tmp_path / "workspace").exists()


def test_a_second_run_beside_a_first_is_turned_away(make_pairs: MakePairs, shard_to: Shard, monkeypatch):
    source = make_pairs(4)
    seen = []

    def second(*arguments: Any, **options: Any) -> None:
        with pytest.raises(InputError, match=r"`fnpipe shard` .* is at work here"):
            shard_to("workspace", source)
        seen.append(arguments)

    with monkeypatch.context() as patch:
        patch.setattr("fnpipe.pipeline.shard.stage.write_tables", second)
        with pytest.raises(AttributeError):
            shard_to("workspace", source)
    assert seen
    shard_to("workspace", source)


def test_a_tar_written_anew_at_its_old_place_is_read_anew(make_pairs: MakePairs, shard_to: Shard, tmp_path: Path):
    source, other = make_pairs(6), make_pairs(3, folder="other")
    first = pictures_of(shard_to("workspace", source))
    shard([str(other)], str(tmp_path / "workspace"), ShardConfig(workers=1), overwrite=True)
    second = pictures_of(Workspace.open(tmp_path / "workspace"))
    assert set(second) == {path.read_bytes() for path in (other.parent / "pictures").iterdir()}
    assert len(first) == 6


@pytest.mark.parametrize(
    "options",
    [
        {"images_per_shard": 0},
        {"holdout": 0},
        {"holdout": 1.5},
        {"validation": 0},
        {"seed": -1},
        {"verify": True},
        {"workers": 0},
    ],
)
def test_a_flag_out_of_range_is_refused(options: dict[str, Any]):
    with pytest.raises(InputError, match="--"):
        ShardConfig(**options)


# Read back by others


@pytest.fixture
def read_back(tmp_path: Path, shard_to: Shard) -> Workspace:
    return mixed_forms(tmp_path, shard_to, ("a.png", "b.jpg", "c.webp", "d.png"))


def mixed_forms(tmp_path: Path, shard_to: Shard, names: tuple[str, ...]) -> Workspace:
    for i, name in enumerate(names):
        Image.new("RGB", (10, 8), flat_colour(i)).save(tmp_path / name)
    rows = [{"image": name, "caption": [f"picture {name}", "more"]} for name in names]
    (tmp_path / "pairs.json").write_text(json.dumps(rows))
    return shard_to("workspace", tmp_path / "pairs.json", images_per_shard=2)


def first_captions(workspace: Workspace) -> list[str]:
    return workspace.read_pairs()["caption"].to_pylist()[::2]


def test_webdataset_reads_the_shards(read_back: Workspace):
    import webdataset

    urls = [read_back.shard_url(n) for n in range(read_back.n_shards)]
    samples = list(webdataset.WebDataset(urls, shardshuffle=False).decode("pil"))
    assert [sample["txt"] for sample in samples] == first_captions(read_back)
    for sample in samples:
        (picture,) = (sample[name] for name in ("jpg", "png", "webp") if name in sample)
        assert picture.size == (10, 8)
        assert sample["json"]["captions"][0] == sample["txt"]


def test_open_clip_s_training_loader_reads_the_shards(read_back: Workspace):
    import webdataset

    urls = [read_back.shard_url(n) for n in range(read_back.n_shards)]
    loader = webdataset.DataPipeline(
        webdataset.SimpleShardList(urls),
        webdataset.tarfile_to_samples(),
        webdataset.decode("pilrgb"),
        webdataset.rename(image="jpg;png;jpeg;webp", text="txt"),
        webdataset.map_dict(image=np.asarray, text=str),
        webdataset.to_tuple("image", "text"),
        webdataset.batched(2),
    )
    texts = [text for _, batch in loader for text in batch]
    assert texts == first_captions(read_back)


def test_datasets_reads_the_shards_of_pictures_of_one_form(tmp_path: Path, shard_to: Shard):
    import datasets

    # `datasets` itself wants the same extensions in every sample of a data set.
    workspace = mixed_forms(tmp_path, shard_to, ("a.jpg", "b.jpg", "c.jpg"))
    files = {"train": [workspace.shard_url(n) for n in range(workspace.n_shards)]}
    cache = str(tmp_path / "cache")
    data = datasets.load_dataset("webdataset", data_files=files, split="train", cache_dir=cache)
    assert list(data["txt"]) == first_captions(workspace)
    assert [row["captions"][0] for row in data["json"]] == first_captions(workspace)
    assert [picture.size for picture in data["jpg"]] == [(10, 8)] * 3


# Status and the command line


def test_status_of_every_state_names_the_next_command(make_pairs: MakePairs, tmp_path: Path, monkeypatch):
    workspace = tmp_path / "workspace"
    with pytest.raises(InputError, match="no such directory"):
        status(str(workspace))
    workspace.mkdir()
    assert status(str(workspace))["next"] == f"fnpipe shard SOURCE {workspace}"
    source = make_pairs(12)
    config = ShardConfig(workers=1, images_per_shard=5, holdout=2, follow_links=True)
    with monkeypatch.context() as patch:
        patch.setattr("fnpipe.pipeline.shard.stage.write_tables", None)
        with pytest.raises(TypeError):
            shard([str(source)], str(workspace), config)
    unfinished = status(str(workspace))
    assert "3 of 3 shards are done" in unfinished["state"]
    assert unfinished["next"] == (f"fnpipe shard {source} {workspace} --holdout 2 --images-per-shard 5 --follow-links")
    assert run(unfinished["next"].split()[1:]) == 0
    finished = status(str(workspace))
    assert finished["counts"]["splits"] == {"test": 2, "train": 10}
    assert finished["next"] == f"fnpipe embed {workspace} --model ViT-B-32 --pretrained laion2b_s34b_b79k"


def test_status_tells_of_a_tar_and_a_table_that_are_gone(make_workspace, capsys):
    workspace = make_workspace(12)
    (workspace.root / "shards" / "00001.tar").unlink()
    (workspace.root / "images" / "00000.parquet").unlink()
    lost = status(str(workspace.root))["lost"]
    assert lost == [str(workspace.root / "shards" / "00001.tar"), str(workspace.root / "images" / "00000.parquet")]
    assert run(["status", str(workspace.root)]) == 0
    printed = capsys.readouterr().out
    assert "LOST: 2 files that sharding made are gone, the first " in printed
    source = workspace.manifest["sources"][0]["path"]
    assert f"next: fnpipe shard {source} {workspace.root} --images-per-shard 5 --overwrite\n" in printed
    manifest = json.loads((workspace.root / "fnpipe.json").read_text())
    write_manifest(workspace.root, {**manifest, "params": {"in_place": True}})
    assert status(str(workspace.root))["next"].startswith(f"bring {lost[0]} back")


def test_status_sees_that_arrays_of_finished_embeddings_were_deleted(make_workspace):
    workspace = make_workspace(6, embeddings=(np.eye(6, 4) + 0.1, np.eye(6, 4) + 0.2))
    (workspace.root / "embeddings" / "clip" / "text_emb" / "text_emb_00001.npy").unlink()
    found = status(str(workspace.root))
    assert found["stages"][0]["state"] == "files are gone"
    again = f"fnpipe embed {workspace.root} --name clip --overwrite, with the flags it was begun with"
    assert found["next"] == again


def test_status_says_which_discriminator_made_the_edges(make_workspace):
    workspace = make_workspace(6)
    for name, con_d in (("a", {"kind": "clip", "slope": 1.0}), ("b", {"kind": "blip", "model": "org/blip"})):
        stage = workspace.stage(f"edges/{name}")
        stage.begin({"candidates": 8, "discriminator": con_d}, {"pairs": workspace.digest})
        stage.finish([])
    made_by = [stage["made_with"] for stage in status(str(workspace.root))["stages"]]
    assert made_by == ["discriminator clip, candidates 8", "discriminator blip (org/blip), candidates 8"]


def test_status_of_a_folder_that_is_no_workspace_says_so(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("x")
    assert "no workspace" in status(str(tmp_path))["state"]


def test_status_lists_stages_and_what_became_of_them(make_workspace):
    workspace = make_workspace(6, embeddings=(np.eye(6, 4) + 0.1, np.eye(6, 4) + 0.2))
    stages = status(str(workspace.root))["stages"]
    assert [(stage["name"], stage["state"]) for stage in stages] == [("embeddings/clip", "finished")]
    assert status(str(workspace.root))["next"] == f"fnpipe build-graph {workspace.root}"
    manifest = json.loads((workspace.root / "fnpipe.json").read_text())
    write_manifest(workspace.root, {**manifest, "digest": "other"})
    outdated = status(str(workspace.root))
    assert outdated["stages"][0]["state"] == "out of date"
    again = f"fnpipe embed {workspace.root} --name clip --overwrite, with the flags it was begun with"
    assert outdated["next"] == again


def test_status_tells_a_finished_run_from_one_that_goes_on_and_proposes_its_matching_head(make_workspace):
    workspace = make_workspace(6, embeddings=(np.eye(6, 4) + 0.1, np.eye(6, 4) + 0.2))
    for name in ("graph/clip", "groups/g"):
        stage = workspace.stage(name)
        stage.begin({}, {"pairs": workspace.digest})
        stage.finish([])
    assert status(str(workspace.root))["next"].endswith("--discriminator clip --positive-share 0.02")
    config = workspace.root / "runs" / "con-d" / "config.json"
    config.parent.mkdir(parents=True)
    record = {"inputs": {"pairs": workspace.digest}, "asked": {"method": "albef", "epochs": 3}}
    for complete, state in ((False, "not finished"), (True, "finished")):
        config.write_text(json.dumps({**record, "complete": complete}))
        run = status(str(workspace.root))["stages"][-1]
        assert (run["name"], run["state"]) == ("runs/con-d", state)
        assert run["made_with"] == "method albef, epochs 3"
    assert status(str(workspace.root))["next"].endswith("--discriminator itm:con-d")
    for method in ("itc", "vacsr"):
        later = {"complete": True, "inputs": {"pairs": workspace.digest}, "asked": {"method": method}}
        config = workspace.root / "runs" / f"later-{method}" / "config.json"
        config.parent.mkdir()
        config.write_text(json.dumps(later))
    assert status(str(workspace.root))["next"].endswith("--discriminator itm:con-d")


def test_status_names_one_of_several_stages_and_embeds_with_a_run_that_is_there(make_workspace):
    workspace = make_workspace(6)
    run_of = {"complete": True, "inputs": {"pairs": workspace.digest}, "asked": {"method": "albef"}}
    (workspace.root / "runs" / "con-d").mkdir(parents=True)
    (workspace.root / "runs" / "con-d" / "config.json").write_text(json.dumps(run_of))
    assert status(str(workspace.root))["next"] == f"fnpipe embed {workspace.root} --model run:con-d"
    for name in ("embeddings/a", "embeddings/b", "graph/a", "groups/g", "groups/h"):
        stage = workspace.stage(name)
        stage.begin({"sampling": "grit"}, {"pairs": workspace.digest})
        stage.finish([])
    mine = status(str(workspace.root))["next"]
    assert mine.endswith("--discriminator itm:con-d --groups h --embeddings b")
    (workspace.root / "runs" / "con-d" / "config.json").unlink()
    (workspace.root / "runs" / "con-d").rmdir()
    for name in ("edges/x", "edges/y"):
        stage = workspace.stage(name)
        stage.begin({}, {"pairs": workspace.digest})
        stage.finish([])
    assert status(str(workspace.root))["next"].endswith("--method mafa --run mafa --groups h --edges y")


def test_the_commands_print_counts_examples_and_json(make_pairs: MakePairs, tmp_path: Path, capsys):
    source = make_pairs(5)
    rows = [
        *json.loads(source.read_text()),
        {"image": "gone.png", "caption": "x"},
        {"image": "pictures/0001.png", "caption": ""},
    ]
    source.write_text(json.dumps(rows))
    words = ["shard", str(source), str(tmp_path / "workspace"), "--workers", "1"]
    assert run(words) == 0
    printed = capsys.readouterr().out
    assert "albef, 7 rows" in printed
    assert "rows read 7 = kept 5 + quarantined 2" in printed
    assert f"next: fnpipe embed {tmp_path / 'workspace'}" in printed
    assert run([*words, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["already_finished"]
    assert summary["rows"] == summary["kept"] + sum(summary["quarantined"].values())
    assert run(["status", str(tmp_path / "workspace"), "--quarantine"]) == 0
    listed = capsys.readouterr().out
    assert re.search(r"missing-file:\n  pairs\.json row 5 gone\.png: .*gone\.png: no such file", listed)
    assert "empty-caption:" in listed
    assert run(["status", str(tmp_path / "workspace"), "--quarantine", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["quarantine"]) == {"missing-file", "empty-caption"}


@pytest.mark.parametrize(
    "words",
    [
        ["shard"],
        ["shard", "only-one"],
        ["shard", "gone.json", "w"],
        ["shard", ".", "w", "--format", "abef"],
        ["status", "gone"],
    ],
)
def test_a_user_s_mistake_is_one_line_and_exit_code_2(words: list[str], capsys, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(words) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_one_part_says_what_became_of_each_of_its_rows(make_pairs: MakePairs, tmp_path: Path, monkeypatch):
    source = make_pairs(3)
    monkeypatch.setattr("fnpipe.pipeline.shard.stage.write_tables", None)
    with pytest.raises(TypeError):
        shard([str(source)], str(tmp_path / "workspace"), ShardConfig(workers=1))
    tally = parts.read_tally(tmp_path / "workspace" / "parts", 0)
    assert (dict(tally.kept), tally.captions_dropped, tally.images) == ({0: 3}, 0, 3)
