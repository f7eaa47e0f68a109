"""Hugging Face data sets as `datasets` finds them: on a stand-in of the Hub, saved, in folders with a data card."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import REVISION, fnpipe, hub_of, start
from test_splits import pictures_of, shard_pairs, splits_of, write_parquet

from conftest import flat_colour, png
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.shard.stage import ShardConfig, shard
from fnpipe.pipeline.sources import parquet
from fnpipe.pipeline.workspace.workspace import Workspace


def captions_by_split(root: Path) -> dict[str, list[str]]:
    pairs = Workspace.open(root).read_pairs()
    found: dict[str, list[str]] = {}
    for caption, split in sorted(zip(pairs["caption"].to_pylist(), pairs["split"].to_pylist(), strict=True)):
        found.setdefault(split, []).append(caption)
    return found


def files_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_data_set_of_the_hub_is_read_at_one_revision(tmp_path: Path):
    import datasets

    features = datasets.Features(
        {"photo": datasets.Image(), "text": datasets.Value("string"), "sound": datasets.Audio(16_000)}
    )
    for split, numbers in (("train", range(3)), ("test", range(3, 5))):
        pictures = [{"bytes": png(flat_colour(i)), "path": None} for i in numbers]
        sounds = [{"bytes": b"no sound", "path": None} for _ in numbers]
        table = pa.table({"photo": pictures, "text": [f"{split} {i}" for i in numbers], "sound": sounds})
        path = tmp_path / "set" / "data" / f"{split}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table.cast(features.arrow_schema), path)
    root = tmp_path / "workspace"
    command = ("shard", "hf:owner/set", str(root), "--json", "--workers", "1")
    with hub_of(tmp_path / "set") as (endpoint, asked):
        done = fnpipe(endpoint, tmp_path / "home", *command)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["sources"][0]["revision"] == REVISION
        assert captions_by_split(root) == {"train": ["train 0", "train 1", "train 2"], "test": ["test 3", "test 4"]}
        pairs = Workspace.open(root).read_pairs().to_pylist()
        wanted = {pair["caption"]: png(flat_colour(int(pair["caption"][-1]))) for pair in pairs}
        assert pictures_of(root, pairs) == wanted
        assert all(REVISION in line for line in asked if "/resolve/" in line)
    # Without the Hub: what is finished is known to be what it was, and anything else is one line.
    assert json.loads(fnpipe(endpoint, tmp_path / "home", *command).stdout)["already_finished"]
    refused = fnpipe(endpoint, tmp_path / "home", "shard", "hf:owner/set", str(tmp_path / "other"))
    assert refused.returncode == 2
    assert refused.stderr.startswith("fnpipe: hf:owner/set: the Hub cannot be reached (ConnectError")
    assert refused.stderr.count("\n") == 1


def test_a_sharding_of_the_hub_that_was_killed_ends_with_the_same_bytes(tmp_path: Path):
    for number, name in enumerate(("train-0", "train-1", "test-0")):
        write_parquet(tmp_path / "set" / "data" / f"{name}.parquet", [f"{name} {i}" for i in range(3)], 3 * number)
    command = ("shard", "hf:owner/set", "--workers", "1", "--images-per-shard", "2")
    with hub_of(tmp_path / "set") as (endpoint, asked):
        fnpipe(endpoint, tmp_path / "home-alone", *command, str(tmp_path / "alone"))
        questions = len(asked)
    reached, killed = threading.Event(), threading.Event()

    def hold(asked: int) -> None:
        if asked >= 0.9 * questions:  # while the last file is read
            reached.set()
            killed.wait(300)

    with hub_of(tmp_path / "set", hold) as (endpoint, _):
        process = start(endpoint, tmp_path / "home", *command, str(tmp_path / "killed"))
        assert reached.wait(300)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        killed.set()
        with pytest.raises(InputError):
            Workspace.open(tmp_path / "killed")
        done = fnpipe(endpoint, tmp_path / "home", *command, str(tmp_path / "killed"))
        assert done.returncode == 0, done.stderr
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "alone")


def test_a_folder_of_pictures_on_the_hub_is_streamed_with_its_metadata(tmp_path: Path):
    for number, split in enumerate(("train", "test")):
        folder = tmp_path / "set" / split
        folder.mkdir(parents=True)
        (folder / "a.png").write_bytes(png(flat_colour(number)))
        (folder / "metadata.jsonl").write_text(json.dumps({"file_name": "a.png", "text": split}) + "\n")
    root = tmp_path / "workspace"
    with hub_of(tmp_path / "set") as (endpoint, _):
        done = fnpipe(endpoint, tmp_path / "home", "shard", "hf:owner/set", str(root), "--workers", "1")
        assert done.returncode == 0, done.stderr
    assert captions_by_split(root) == {"train": ["train"], "test": ["test"]}
    pairs = Workspace.open(root).read_pairs().to_pylist()
    assert pictures_of(root, pairs) == {"train": png(flat_colour(0)), "test": png(flat_colour(1))}


CARD = """---
configs:
- config_name: english
  default: true
  data_files:
  - split: train
    path: one/a.parquet
  - split: test
    path: two/b.parquet
- config_name: french
  data_files: two/c.parquet
---
# A data set
"""


def test_a_data_card_says_what_the_splits_and_configurations_of_a_folder_are(tmp_path: Path):
    for number, name in enumerate(("one/a", "two/b", "two/c")):
        write_parquet(tmp_path / "set" / f"{name}.parquet", [name], number)
    (tmp_path / "set" / "README.md").write_text(CARD)
    before = sorted(path.relative_to(tmp_path) for path in (tmp_path / "set").rglob("*"))
    assert splits_of(tmp_path / "set", tmp_path) == {"train": ["one/a"], "test": ["two/b"]}
    assert splits_of(tmp_path / "set", tmp_path, split="test") == {"test": ["two/b"]}
    root = str(tmp_path / "french")
    shard([f"hf:{tmp_path / 'set'}:french"], root, ShardConfig(workers=1))
    assert captions_by_split(Path(root)) == {"train": ["two/c"]}
    with pytest.raises(InputError, match=r"finds no data set in it .*german"):
        shard([f"hf:{tmp_path / 'set'}:german"], str(tmp_path / "german"), ShardConfig(workers=1))
    assert sorted(path.relative_to(tmp_path) for path in (tmp_path / "set").rglob("*")) == before


def test_other_forms_that_a_data_card_names_are_streamed(tmp_path: Path):
    folder = tmp_path / "set"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.png").write_bytes(png(flat_colour(number)))
    lines = [{"image": f"{number}.png", "caption": f"card {number}"} for number in range(3)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "README.md").write_text("---\nconfigs:\n- config_name: x\n  data_files: pairs.jsonl\n---\n")
    pairs, _ = shard_pairs(folder, tmp_path)
    assert [pair["caption"] for pair in pairs] == ["card 0", "card 1", "card 2"]


def test_the_cache_of_datasets_is_read_without_its_copies(tmp_path: Path):
    import datasets

    files = {}
    for number, split in enumerate(("train", "test")):
        files[split] = str(tmp_path / f"{split}.parquet")
        write_parquet(Path(files[split]), [f"{split} {i}" for i in range(2)], number * 2)
    data = datasets.load_dataset("parquet", data_files=files, cache_dir=str(tmp_path / "cache"))
    data["train"].map(lambda row: {"caption": row["caption"].upper()})
    folder = Path(data["train"].cache_files[0]["filename"]).parent
    assert any(path.name.startswith("cache-") for path in folder.iterdir())
    assert splits_of(folder, tmp_path) == {"train": ["train 0", "train 1"], "test": ["test 0", "test 1"]}


@pytest.mark.parametrize("damage", ["gone", "cut", "outside"])
def test_a_saved_data_set_that_is_damaged_is_one_line(damage: str, tmp_path: Path):
    import datasets

    pictures = [{"bytes": png(flat_colour(i)), "path": None} for i in range(2)]
    data = datasets.Dataset.from_dict({"image": pictures, "text": ["a", "b"]})
    data.save_to_disk(str(tmp_path / "set"))
    (file,) = (tmp_path / "set").glob("*.arrow")
    if damage == "gone":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-300])
    else:
        file.rename(tmp_path / "secret.arrow")
        state = json.loads((tmp_path / "set" / "state.json").read_bytes())
        state["_data_files"] = [{"filename": "../secret.arrow"}]
        (tmp_path / "set" / "state.json").write_text(json.dumps(state))
    with pytest.raises(InputError, match="set"):
        shard([str(tmp_path / "set")], str(tmp_path / "workspace"), ShardConfig(workers=1))


# Row groups of many bytes


def big_parquet(path: Path, rows: int, size: int, groups: int = 1) -> None:
    """Pictures padded with zeros, which pack to next to nothing."""
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    schema = pa.schema([("image", kind), ("caption", pa.string())])
    with pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=False, write_statistics=False) as writer:
        for group in range(groups):
            pictures = [{"bytes": png(flat_colour(i)) + bytes(size), "path": f"{group}-{i}.png"} for i in range(rows)]
            captions = [f"caption {group} {i}" for i in range(rows)]
            writer.write_table(pa.table({"image": pa.array(pictures, kind), "caption": captions}, schema))


MEASURE = """
import resource, sys
from pathlib import Path
from test_shard_sources import read_rows
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
rows = len(read_rows(Path(sys.argv[1])))
print(rows, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before >> 10)
"""


def test_a_row_group_is_never_held_whole(tmp_path: Path):
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    picture = {"bytes": png(flat_colour(1)) + bytes(2 << 20), "path": "1.png"}
    batch = pa.record_batch([pa.array([picture] * 8, kind), pa.array(["caption"] * 8)], ["image", "caption"])
    table = pa.Table.from_batches([batch] * 24)
    pq.write_table(table, tmp_path / "a.parquet", 192, use_dictionary=False, compression="none")
    assert pq.ParquetFile(tmp_path / "a.parquet").num_row_groups == 1
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "a.parquet")]
    said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=100).stdout
    rows, peak_mib = map(int, said.split())
    assert rows == 192
    assert peak_mib < 300  # of 384 MiB of pictures


def test_batches_are_cut_by_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    big_parquet(tmp_path / "a.parquet", rows=7, size=1000, groups=2)
    monkeypatch.setattr(parquet, "_BATCH_BYTES", 3500)
    seen: list[int] = []
    add = parquet.add_columns

    def watched(rows: Any, images: pa.Array, *rest: Any, **named: Any) -> None:
        seen.append(len(images))
        add(rows, images, *rest, **named)

    monkeypatch.setattr(parquet, "add_columns", watched)
    pairs, _ = shard_pairs(tmp_path / "a.parquet", tmp_path)
    assert sorted(pair["caption"] for pair in pairs) == sorted(f"caption {g} {i}" for g in range(2) for i in range(7))
    assert max(seen) == 3
    assert sum(seen) == 14


def test_rows_of_uneven_sizes_are_read_one_by_one_where_together_they_are_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    big_parquet(tmp_path / "a.parquet", rows=7, size=1000)
    monkeypatch.setattr(parquet, "_BATCH_BYTES", 3500)
    group = parquet._Reader._group

    def refusing(self: Any, number: int, columns: list[str], rows: int) -> Any:
        for seen, batch in enumerate(group(self, number, columns, rows)):
            if seen == 1 and rows > 1:
                raise pa.ArrowNotImplementedError("Nested data conversions not implemented for chunked array outputs")
            yield batch

    monkeypatch.setattr(parquet._Reader, "_group", refusing)
    pairs, _ = shard_pairs(tmp_path / "a.parquet", tmp_path)
    assert [pair["caption"] for pair in pairs] == [f"caption 0 {i}" for i in range(7)]


def test_a_sharding_that_goes_on_reads_the_revision_that_it_began_with(monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub

    from fnpipe.pipeline.shard.stage import _pin
    from fnpipe.pipeline.sources.source import Source

    class Hub:
        def dataset_info(self, name: str, *, revision: str | None, timeout: float) -> SimpleNamespace:
            return SimpleNamespace(sha=revision or "newest")

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    source = Source("hf:owner/set", "set", "hf")
    for before, revision in ({}, "newest"), ({"sources": [{"revision": REVISION}]}, REVISION):
        begun: dict[str, Any] = {"sources": [{}]}
        _pin([source], before, begun)
        assert source.revision == begun["sources"][0]["revision"] == revision


@pytest.mark.parametrize("name", ["hf:", "hf:a/b/c", "hf:owner/na me"])
def test_what_is_no_name_of_a_data_set_is_told_without_asking_the_hub(name: str, tmp_path: Path):
    with pytest.raises(InputError, match="no name of a data set"):
        shard([name], str(tmp_path / "workspace"), ShardConfig(workers=1))
    assert not (tmp_path / "workspace").exists()
