"""Damage to the files of a workspace is noticed by whoever reads them, in one line that says what makes them again."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import ROOT, TESTS, MakePairs, MakeWorkspace
from fnpipe.cli.main import run
from fnpipe.mining.graph.graph import Graph
from fnpipe.mining.plans.plan import PLAN_SCHEMA, plan_path, read_plan
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import arrays, tables
from fnpipe.pipeline.files.destination import destination, new_directory
from fnpipe.pipeline.made_by import make_again
from fnpipe.pipeline.shard.stage import ShardConfig, shard
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.status import status


def flip(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def swap(one: Path, other: Path) -> None:
    mine, theirs = one.read_bytes(), other.read_bytes()
    one.write_bytes(theirs)
    other.write_bytes(mine)


def test_a_flipped_bit_never_gives_other_values(tmp_path: Path):
    path = tmp_path / "edges" / "itm" / "part-00000.parquet"
    # Random numbers are stored as they are, so that every bit of the page makes another number.
    table = pa.table({"p": np.random.default_rng(0).random(500)})
    tables.write_table(path, table)
    said = []
    for at in range(4, path.stat().st_size - 8, 53):
        flip(path, at, bit=at % 8)
        try:
            # What is no page (statistics, say) carries no checksum.
            assert tables.read_table(path)["p"].equals(table["p"])
        except InputError as error:
            said.append(str(error))
        flip(path, at, bit=at % 8)
    assert len(said) > 80
    assert all(re.search(r"part-00000\.parquet: damaged .*mine-connections .* --name itm", line) for line in said)


def test_a_column_outside_of_its_span_is_damage_whether_it_is_read_or_not(tmp_path: Path):
    path = tmp_path / "t.parquet"
    tables.write_table(path, pa.table({"a": [3, 5], "b": [0, 1]}))
    for columns in (["a"], ["b"]):
        assert len(tables.read_table(path, columns, spans={"a": (3, 6)})) == 2
        for span in ((4, 6), (0, 5)):
            with pytest.raises(InputError, match=r"damaged \(a 3 to 5, outside"):
                tables.read_table(path, columns, spans={"a": span})
    tables.write_table(path, pa.table({"a": pa.array([None], pa.int64())}))
    assert len(tables.read_table(path, spans={"a": (0, 1)})) == 1


@pytest.mark.parametrize("kind", ["pairs", "images"])
def test_tables_that_changed_places_are_found_by_every_choice_of_columns(kind: str, make_workspace: MakeWorkspace):
    workspace = make_workspace(10)
    swap(workspace.root / kind / "00000.parquet", workspace.root / kind / "00001.parquet")
    read = workspace.read_pairs if kind == "pairs" else workspace.read_images
    for columns in (None, ["image_id"], ["key"]):
        with pytest.raises(InputError, match=rf"{kind}/00000\.parquet: damaged .*fnpipe shard"):
            read(columns)


def test_a_table_with_a_row_less_or_in_another_order_is_damaged(make_workspace: MakeWorkspace):
    workspace = make_workspace(10)
    path = workspace.pairs_path(1)
    table = pq.read_table(path)
    for wrong in (table.slice(0, 4), table.take([0, 2, 1, 3, 4]), pa.concat_tables([table, table.slice(4)])):
        tables.write_table(path, wrong)
        with pytest.raises(InputError, match=r"pairs/00001\.parquet: damaged"):
            workspace.read_pairs(["pair_id", "caption"])


def a_graph(workspace: Workspace) -> Path:
    stage = workspace.stage("graph/clip")
    stage.begin({"k": 2}, {"pairs": workspace.digest})
    for direction, rows in (("i2t", workspace.n_images), ("t2i", workspace.n_pairs)):
        ids = np.stack([np.roll(np.arange(rows), 1), np.full(rows, -1)], axis=1)
        arrays.write_array(stage.path / f"{direction}.ids.npy", ids)
        arrays.write_array(stage.path / f"{direction}.sims.npy", np.zeros((rows, 2), np.float16))
    stage.finish([f"{d}.{part}.npy" for d in ("i2t", "t2i") for part in ("ids", "sims")])
    return stage.path


@pytest.mark.parametrize(("value", "fine"), [(9, True), (10, False), (-1, True), (-2, False), (1 << 40, False)])
def test_an_id_of_a_graph_that_there_is_not_is_damage(value: int, fine: bool, make_workspace: MakeWorkspace):
    workspace = make_workspace(10)
    path = a_graph(workspace) / "t2i.ids.npy"
    ids = np.load(path)
    ids[7, 1] = value
    arrays.write_array(path, ids)
    if fine:
        assert Graph.open(workspace).t2i_ids[7, 1] == value
        return
    with pytest.raises(InputError, match=r"t2i\.ids\.npy: damaged .*fnpipe build-graph .* --embeddings clip"):
        Graph.open(workspace)


@pytest.mark.parametrize(
    "wrong", [{"batch": 1}, {"slot": 0}, {"slot": 2}, {"image_id": 10}, {"pair_id": -1}, {"pair_id": 9}]
)
def test_a_plan_whose_batches_do_not_count_on_or_whose_pairs_are_others_is_damaged(
    wrong: dict[str, int], make_workspace: MakeWorkspace
):
    workspace = make_workspace(10)
    rows = [{"batch": i // 2, "slot": i % 2, "image_id": i, "pair_id": i} for i in range(4)]
    stage = workspace.stage("groups/g")
    stage.begin({"epochs": 1}, {"pairs": workspace.digest})
    tables.write_table(plan_path(stage, 0), pa.Table.from_pylist(rows, PLAN_SCHEMA))
    stage.finish([plan_path(stage, 0)])
    assert read_plan(stage, 0).to_pylist() == rows
    rows[1] |= wrong
    tables.write_table(plan_path(stage, 0), pa.Table.from_pylist(rows, PLAN_SCHEMA))
    with pytest.raises(InputError, match=r"epoch-000\.parquet: damaged .*fnpipe group .* --name g"):
        read_plan(stage, 0)


@pytest.mark.parametrize(
    ("path", "command"),
    [
        ("graph/ws/pairs/00001.parquet", "fnpipe shard SOURCE graph/ws --overwrite"),
        ("ws/embeddings/a b/bad.parquet", "fnpipe embed ws --name 'a b' --overwrite"),
        ("ws/runs/mafa/config.json", "fnpipe train ws --run mafa --overwrite"),
        ("other.parquet", "make it again with --overwrite"),
    ],
)
def test_the_way_out_of_damage_is_the_command_that_makes_the_file(path: str, command: str):
    assert command in make_again(Path(path))


# Tars

CASES = TESTS / "cases2" / "05-stale-in-place"


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tar indexed where it lies, with embeddings and a random plan; copied by who changes it."""
    root = tmp_path_factory.mktemp("indexed")
    shutil.copy(CASES / "before.tar", root / "x.tar")
    for words in (["shard", str(root / "x.tar"), str(root / "ws"), "--in-place", "--verify"], *READS[:2]):
        assert run([word.replace("ROOT", str(root)) for word in words]) == 0
    return root


READS = [
    ["embed", "ROOT/ws", "--model", "demo", "--name", "demo", "--workers", "0"],
    ["group", "ROOT/ws", "--sampling", "random", "--batch-size", "2", "--name", "r"],
    ["embed", "ROOT/ws", "--model", "demo", "--name", "other", "--workers", "0"],
    ["group", "ROOT/ws", "--sampling", "random", "--batch-size", "2", "--name", "r", "--materialize", "ROOT/out"],
    ["mine-connections", "ROOT/ws", "--embeddings", "demo", "--discriminator", "itm:demo", "--candidates", "1"],
    ["train", "ROOT/ws", "--method", "itc", "--run", "t", "--groups", "r", "--epochs", "1"],
]


def test_a_tar_that_was_written_anew_in_place_is_refused_by_whoever_reads_pictures(
    indexed: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.copy(CASES / "after.tar", indexed / "x.tar")
    for words in READS[2:]:
        assert run([word.replace("ROOT", str(indexed)) for word in words]) == 2, words
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fnpipe: ")]
        assert re.search(r"x\.tar: not the tar that was sharded .*fnpipe shard. again with --overwrite", line)
    # Workspaces of 0.1.0 know size and time of their inputs alone.
    opened = Workspace.open(indexed / "ws")
    older = Workspace(opened.root, {key: value for key, value in opened.manifest.items() if key != "tars"})
    with pytest.raises(InputError, match="not the tar that was sharded"):
        older.tar(0)
    # A copy of the same bytes, of another time, is the same tar.
    shutil.copy(CASES / "before.tar", indexed / "x.tar")
    assert opened.tar(0) == older.tar(0) == str(indexed / "x.tar")


def test_tars_that_changed_places_or_length_are_refused_and_looked_at_once(make_pairs: MakePairs, tmp_path: Path):
    shard([str(make_pairs(6))], str(tmp_path / "ws"), ShardConfig(images_per_shard=2, workers=1))
    tars = [tmp_path / "ws" / "shards" / f"{number:05d}.tar" for number in range(3)]
    known = Workspace.open(tmp_path / "ws")
    assert [entry["crc32"] for entry in known.manifest["tars"]] == [zlib.crc32(tar.read_bytes()) for tar in tars]
    assert [known.tar(number) for number in range(3)] == [str(tar) for tar in tars]
    swap(tars[0], tars[1])
    os.truncate(tars[2], 1024)
    for number, what in ((0, "first member is '00000002.png', not '00000000.png'"), (2, "size in bytes is 1,024")):
        with pytest.raises(InputError, match=what):
            Workspace.open(tmp_path / "ws").tar(number)
        assert known.tar(number) == str(tars[number])


@pytest.mark.slow
def test_of_random_damages_none_ends_in_a_fault_or_in_another_result_that_a_cheap_check_could_have_told():
    scripts, light = ROOT / "tools" / "robustness", ("group 32", "inspect", "export", "status")
    command = [sys.executable, str(scripts / "damage.py"), "--cells", "8", "--scenes", "45", "--commands", *light]
    found = subprocess.run(command, capture_output=True, text=True, cwd=scripts)
    assert found.returncode == 0, f"{found.stdout}\n{found.stderr}"


# What a user names for output


def test_links_are_followed_and_stay(tmp_path: Path):
    (tmp_path / "page.html").write_text("old")
    (tmp_path / "link").symlink_to("page.html")
    (tmp_path / "new").symlink_to("made.html")
    assert destination(tmp_path / "link") == tmp_path / "page.html"
    assert destination(tmp_path / "new") == tmp_path / "made.html"


def test_devices_pipes_directories_and_missing_folders_are_no_place_for_a_file(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "null").symlink_to("/dev/null")
    (tmp_path / "loop").symlink_to("loop")
    for path, why in (
        ("/dev/null", "a device"),
        (tmp_path / "null", "a device"),
        (tmp_path / "pipe", "a pipe"),
        (tmp_path, "a directory"),
        (tmp_path / "no" / "page.html", "there is no folder"),
        (tmp_path / ("n" * 300), "too long"),
        (tmp_path / "loop", "link"),
        ("a\0b", "cannot be written"),
    ):
        with pytest.raises(InputError, match=why):
            destination(path)
    assert not Path("/dev/null").is_file()


def test_a_new_directory_is_whole_or_not_there(tmp_path: Path):
    with pytest.raises(RuntimeError), new_directory(tmp_path / "out", "fnpipe export") as directory:
        (directory / "half").touch()
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "empty").mkdir()
    (tmp_path / "out").symlink_to("empty")
    with new_directory(tmp_path / "out", "fnpipe export") as directory:
        (directory / "whole").touch()
    assert (tmp_path / "empty" / "whole").is_file()
    assert (tmp_path / "out").is_symlink()
    with pytest.raises(InputError, match="holds something"), new_directory(tmp_path / "out", "fnpipe export"):
        pass


def test_status_says_what_helps_where_a_tar_is_another(make_pairs: MakePairs, tmp_path: Path):
    source = make_pairs(4)
    shard([str(source)], str(tmp_path / "ws"), ShardConfig())
    tar = tmp_path / "ws" / "shards" / "00000.tar"
    tar.write_bytes(tar.read_bytes() + b"\0" * 512)
    found = status(str(tmp_path / "ws"))
    assert found["state"].startswith(f"sharded, but {tar}: ")
    assert found["next"] == f"fnpipe shard {source} {tmp_path / 'ws'} --overwrite"
