"""`fnpipe shard --shuffle-captions`: wrong pairs on purpose, and what still counts as true."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import MakePairs
from fnpipe.cli.main import run
from fnpipe.mining.data.truth import Truth
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.shard import assign_ids as finishing
from fnpipe.pipeline.shard.stage import ShardConfig, shard
from fnpipe.pipeline.shard.swap_captions import shuffle_captions
from fnpipe.pipeline.workspace.schemas import SHUFFLED, SHUFFLED_SCHEMA
from fnpipe.pipeline.workspace.workspace import Workspace


def sharded(source: Path, workspace: Path, **options: object) -> Workspace:
    config = ShardConfig(**{"workers": 1, "images_per_shard": 5, **options})
    shard([str(source)], str(workspace), config)
    return Workspace.open(workspace)


def contents(workspace: Workspace) -> dict[str, str]:
    files = (path for path in workspace.root.rglob("*") if path.is_file() and path.name != "fnpipe.json")
    return {str(path.relative_to(workspace.root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("share", [0.2, 1.0])
def test_a_share_of_the_train_pairs_gets_captions_of_other_pictures_and_all_else_stays(
    make_pairs: MakePairs, tmp_path: Path, share: float
):
    source = make_pairs(40, captions=2)
    clean = sharded(source, tmp_path / "clean", holdout=0.25)
    noisy = sharded(source, tmp_path / "noisy", holdout=0.25, shuffle_captions=share)
    before, after = clean.read_pairs().to_pylist(), noisy.read_pairs().to_pylist()
    listed = {row["pair_id"]: row for row in pq.read_table(noisy.root / SHUFFLED).to_pylist()}
    changed = [new["pair_id"] for old, new in zip(before, after, strict=True) if old["caption"] != new["caption"]]
    assert changed == list(listed)
    assert len(changed) == round(share * 60) == noisy.manifest["counts"]["shuffled"]
    assert {before[pair]["split"] for pair in changed} == {"train"}
    for pair, row in listed.items():
        giver = before[row["caption_pair_id"]]
        assert after[pair]["caption"] == giver["caption"]
        assert (row["image_id"], row["caption_image_id"]) == (before[pair]["image_id"], giver["image_id"])
        assert row["image_id"] != row["caption_image_id"]
    assert Counter(row["caption"] for row in after) == Counter(row["caption"] for row in before)
    assert [{**row, "caption": ""} for row in after] == [{**row, "caption": ""} for row in before]
    there, kept = contents(noisy), contents(clean)
    assert all(there[name] == kept[name] for name in kept if not name.startswith("pairs/"))


def test_the_seed_decides_which_and_neither_workers_nor_a_kill_do(make_pairs: MakePairs, tmp_path: Path, monkeypatch):
    source = make_pairs(30)
    whole = sharded(source, tmp_path / "whole", shuffle_captions=0.5)
    other = sharded(source, tmp_path / "other", shuffle_captions=0.5, seed=1)
    assert pq.read_table(whole.root / SHUFFLED)["pair_id"] != pq.read_table(other.root / SHUFFLED)["pair_id"]
    write, calls = finishing.tables.write_table, 0

    def dying(path: Path, table: pa.Table) -> None:
        nonlocal calls
        calls += path.parent.name == "pairs"
        if calls == 3:
            raise KeyboardInterrupt
        write(path, table)

    with monkeypatch.context() as patch:
        patch.setattr(finishing.tables, "write_table", dying)
        with pytest.raises(KeyboardInterrupt):
            sharded(source, tmp_path / "killed", shuffle_captions=0.5)
    again = sharded(source, tmp_path / "killed", shuffle_captions=0.5, workers=2)
    assert contents(again) == contents(whole)


def test_another_share_is_refused_and_overwrite_without_it_leaves_no_list(make_pairs: MakePairs, tmp_path: Path):
    source = make_pairs(12)
    workspace = sharded(source, tmp_path / "w", shuffle_captions=0.5)
    with pytest.raises(InputError, match=r"--shuffle-captions 0\.5, now not given"):
        sharded(source, workspace.root)
    shard([str(source)], str(workspace.root), ShardConfig(workers=1), overwrite=True)
    assert not (workspace.root / SHUFFLED).exists()


@pytest.mark.parametrize("share", ["0", "-1", "1.5", "nan"])
def test_a_share_that_is_none_is_refused(share: str, make_pairs: MakePairs, tmp_path: Path, capsys):
    assert run(["shard", str(make_pairs(3)), str(tmp_path / "w"), "--shuffle-captions", share]) == 2
    assert "--shuffle-captions" in capsys.readouterr().err


def test_truth_follows_a_caption_to_the_picture_it_was_written_for(make_pairs: MakePairs, tmp_path: Path):
    source = make_pairs(12, captions=2)
    clean = sharded(source, tmp_path / "clean")
    noisy = sharded(source, tmp_path / "noisy", shuffle_captions=0.5)
    names = clean.read_images()["image"].to_pylist()
    captions = clean.read_pairs(["caption"])["caption"].to_pylist()
    concepts = {"image": names, "concept": [f"c{i % 4}" for i in range(12)]}
    listed = {"image": [names[3], names[5]], "caption": [captions[0], captions[9]]}
    texts = [clean.read_pairs()["caption"].to_pylist(), noisy.read_pairs()["caption"].to_pylist()]
    assert texts[0] != texts[1]
    for number, columns in enumerate((concepts, listed)):
        path = tmp_path / f"truth{number}.parquet"
        pq.write_table(pa.table(columns), path)
        grid = np.arange(12)[:, None], np.arange(24)[None, :]
        blocks = [Truth.read(path, workspace).matches(*grid) for workspace in (clean, noisy)]
        # By text, which tells every pair of the source apart, both say the same.
        found = [dict(zip(t, block.T.tolist(), strict=True)) for t, block in zip(texts, blocks, strict=True)]
        assert found[0] == found[1]


def test_the_commands_say_how_many_pairs_were_made_wrong(make_pairs: MakePairs, tmp_path: Path, capsys):
    words = ["shard", str(make_pairs(10)), str(tmp_path / "w"), "--workers", "1", "--shuffle-captions", "0.4"]
    assert run([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["shuffled"] == 4
    assert run(["status", str(tmp_path / "w")]) == 0
    assert "wrong pairs made by --shuffle-captions: 4" in capsys.readouterr().out


@settings(max_examples=150)
@given(
    codes=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 8)), min_size=1, max_size=30),
    share=st.floats(0.05, 1),
    seed=st.integers(0, 2**63 - 1),
)
def test_chosen_captions_change_places_and_wrong_means_unrecorded(codes, share, seed):
    pictures, captions = (np.array(column, np.int64) for column in zip(*codes, strict=True))
    candidates = np.flatnonzero(np.arange(len(codes)) % 3 != 1)
    pair_ids, givers, wrong = shuffle_captions(pictures, captions, candidates, share, seed)
    assert len(pair_ids) == round(share * len(candidates))
    assert sorted(givers) == sorted(pair_ids) == list(pair_ids)
    assert set(pair_ids) <= set(candidates)
    recorded = set(codes)
    for pair, giver, is_wrong in zip(pair_ids, givers, wrong, strict=True):
        assert is_wrong == ((pictures[pair], captions[giver]) not in recorded)


@settings(max_examples=50)
@given(n=st.integers(2, 60), seed=st.integers(0, 2**63 - 1))
def test_where_all_pictures_and_captions_differ_nobody_keeps_their_own(n, seed):
    codes = np.arange(n)
    _, _, wrong = shuffle_captions(codes, codes, codes, 1.0, seed)
    assert wrong.all()


def test_a_table_of_no_wrong_pairs_has_its_columns(make_pairs: MakePairs, tmp_path: Path):
    workspace = sharded(make_pairs(3), tmp_path / "w", shuffle_captions=0.4)  # one pair, and nobody to swap with
    table = pq.read_table(workspace.root / SHUFFLED)
    assert table.schema.equals(SHUFFLED_SCHEMA)
    assert len(table) == workspace.manifest["counts"]["shuffled"] == 0
