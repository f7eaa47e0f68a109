"""Edges for other libraries: what each of them reads back, and trains on."""

from __future__ import annotations

import csv
import io
import json
import os
import shlex
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from other_packages import beside, run_script
from PIL import Image
from test_gallery import write_edges

from conftest import MakeWorkspace, flat_colour
from fnpipe.cli.main import run
from fnpipe.mining.exports import datasets as export_datasets
from fnpipe.mining.exports import stage as exporting
from fnpipe.mining.exports.config import ExportConfig
from fnpipe.mining.exports.open_clip import known_false_negatives
from fnpipe.mining.exports.records import ImageRecord, runs_of
from fnpipe.mining.exports.stage import ExportSummary
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.workspace.workspace import Stage, Workspace


def export(workspace: Workspace, edges: Stage, form: str, directory: Path, **flags: Any) -> ExportSummary:
    return exporting.export(workspace, ExportConfig(to=form, edges=edges.path.name, **flags), directory)


PANDAS_MISSING = ["null", "NA", "None", "nan", "N/A", "NaN", "NULL", "n/a", "<NA>"]


@pytest.fixture
def mined(make_workspace: MakeWorkspace):
    """Images 0 to 5, the last one held out; image 0 has two mined captions, one of them by two pairs."""
    texts = ["a dog, red", "a cat", "a bird", "a cat", "a fish", "a test"]
    workspace = make_workspace(6, texts=texts, images_per_shard=4, splits=["train"] * 5 + ["test"])
    rows = [
        (0, 1, 0.9, False),
        (0, 3, 0.9, False),
        (0, 2, 0.85, False),
        (0, 4, 0.04, False),
        (1, 3, 1.0, True),  # by identity: the words are recorded already
        (1, 4, 1.0, True),
        (2, 0, 0.6, False),
        (3, 0, 0.3, False),  # judged negative, but not surely
        (4, 0, 0.95, False),
        (4, 1, 0.02, False),
        (4, 2, 0.03, False),
        (4, 3, 0.2, False),  # the words of pair 1, by which they are surely none
    ]
    return workspace, write_edges(workspace, rows)


def colour(data: bytes):
    return Image.open(io.BytesIO(data)).convert("RGB").getpixel((0, 0))


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def load(directory: Path, name: str | None = None, split: str = "train"):
    return datasets.load_dataset(str(directory), name, split=split, cache_dir=str(directory.parent / "cache"))


def test_open_clip_gets_a_csv_with_mined_pairs_as_rows(mined, tmp_path):
    workspace, stage = mined
    summary = export(workspace, stage, "open_clip", tmp_path / "out")
    found = {}
    for row in rows_of(tmp_path / "out/pairs.csv"):
        assert Path(row["filepath"]).is_absolute()
        picture = colour(Path(row["filepath"]).read_bytes())
        image = next(i for i in range(6) if flat_colour(i) == picture)
        found.setdefault(image, []).append((row["title"], row["source"]))
    assert found == {
        0: [("a dog, red", "recorded"), ("a cat", "discriminator"), ("a bird", "discriminator")],
        1: [("a cat", "recorded"), ("a fish", "identity")],
        2: [("a bird", "recorded")],
        3: [("a cat", "recorded")],
        4: [("a fish", "recorded"), ("a dog, red", "discriminator")],
    }
    assert (summary.images, summary.recorded, summary.mined, summary.by_identity) == (5, 5, 4, 1)
    assert summary.rows == {"pairs.csv": 9, "one-per-image.csv": 5}


def test_one_row_per_image_is_one_of_its_true_captions(mined, tmp_path):
    workspace, stage = mined
    export(workspace, stage, "open_clip", tmp_path / "out")
    every = {(row["filepath"], row["title"]) for row in rows_of(tmp_path / "out/pairs.csv")}
    chosen = [(row["filepath"], row["title"]) for row in rows_of(tmp_path / "out/one-per-image.csv")]
    assert set(chosen) <= every
    assert len({path for path, _ in chosen}) == len(chosen) == 5


def test_without_identity_its_positives_are_left_out_and_make_no_negatives(mined, tmp_path):
    workspace, stage = mined
    summary = export(workspace, stage, "sentence-transformers", tmp_path / "out", identity=False)
    assert (summary.mined, summary.by_identity) == (3, 0)
    pairs = load(tmp_path / "out", "pairs")
    captions = [
        (p["caption"], p["label"]) for p in pairs if p["image"].convert("RGB").getpixel((0, 0)) == flat_colour(1)
    ]
    assert captions == [("a cat", 1)]


def test_sentence_transformers_gets_labelled_pairs_and_triplets_with_pictures(mined, tmp_path, monkeypatch):
    workspace, stage = mined
    summary = export(workspace, stage, "sentence-transformers", tmp_path / "out")
    monkeypatch.chdir("/")
    pairs, about = load(tmp_path / "out", "pairs"), load(tmp_path / "out", "about-pairs")
    assert pairs.column_names == ["image", "caption", "label"]
    rows = [
        (pair["caption"], pair["label"], fact["source"])
        for pair, fact in zip(pairs, about, strict=True)
        if fact["image_id"] == 4
    ]
    assert rows == [
        ("a fish", 1, "recorded"),
        ("a dog, red", 1, "discriminator"),
        ("a bird", 0, "discriminator"),
        ("a cat", 0, "discriminator"),
    ]
    triplets, about = load(tmp_path / "out"), load(tmp_path / "out", "about-triplets")
    assert triplets.column_names == ["anchor", "positive", "negative"]
    assert [(t["positive"], t["negative"]) for t in triplets] == [
        ("a dog, red", "a fish"),
        ("a cat", "a fish"),
        ("a bird", "a fish"),
        ("a fish", "a bird"),  # the most similar of the sure negatives
        ("a dog, red", "a bird"),
    ]
    assert [t["anchor"].convert("RGB").getpixel((0, 0)) for t in triplets] == [
        flat_colour(i) for i in about["image_id"]
    ]
    last = about[4]
    assert last["source"] == "discriminator"
    assert [last[name] for name in ("match_probability", "similarity", "negative_match_probability")] == [
        pytest.approx(0.95),
        pytest.approx(0.475),
        pytest.approx(0.03),
    ]
    assert any(note.startswith("3 of 5 images stand in no triplet") for note in summary.notes)


def test_hugging_face_reads_one_row_per_image_with_all_captions(mined, tmp_path):
    workspace, stage = mined
    export(workspace, stage, "hf", tmp_path / "out")
    loaded = load(tmp_path / "out")
    assert len(loaded) == 5
    first = loaded[0]
    assert first["image"].convert("RGB").getpixel((0, 0)) == flat_colour(0)
    assert first["captions"] == ["a dog, red", "a cat", "a bird"]
    assert first["mined"] == [False, True, True]
    assert first["source"] == ["recorded", "discriminator", "discriminator"]
    assert first["match_probability"] == [None, pytest.approx(0.9), pytest.approx(0.85)]
    assert loaded[1]["source"] == ["recorded", "identity"]


@pytest.mark.parametrize("form", ["hf", "sentence-transformers"])
def test_types_are_those_that_every_allowed_version_of_datasets_knows(form, mined, tmp_path):
    workspace, stage = mined
    export(workspace, stage, form, tmp_path / "out")
    for path in (tmp_path / "out").rglob("*.parquet"):
        features = json.loads(pq.read_schema(path).metadata[b"huggingface"])["info"]["features"]
        # `List` came with datasets 4.
        assert {feature["_type"] for feature in features.values()} <= {"Image", "LargeList", "Value"}


def test_large_pictures_are_cut_into_row_groups_and_files_by_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(export_datasets, "_GROUP_BYTES", 3000)
    monkeypatch.setattr(export_datasets, "_FILE_BYTES", 5500)
    records = (ImageRecord(i, bytes(1000), [], []) for i in range(12))
    assert export_datasets.write_hf(records, tmp_path) == {"data/train-*.parquet": 12}
    files = [pq.ParquetFile(path) for path in sorted((tmp_path / "data").iterdir())]
    groups = [[f.metadata.row_group(g).num_rows for g in range(f.metadata.num_row_groups)] for f in files]
    assert groups == [[3, 2], [3, 2], [2]]


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 20))
def test_runs_hold_every_size_once_and_no_more_than_the_limit(sizes, limit):
    runs = list(runs_of(sizes, limit))
    assert [i for start, stop in runs for i in range(start, stop)] == list(range(len(sizes)))
    assert all(stop - start == 1 or sum(sizes[start:stop]) <= limit for start, stop in runs)


@pytest.mark.parametrize("texts", [[*PANDAS_MISSING, "a cat"], ["007", "1.50", "1e3", "True", "-nan", "inf"]])
def test_captions_that_pandas_takes_for_something_else_reach_open_clip_as_they_are(
    texts, make_workspace: MakeWorkspace, tmp_path
):
    import open_clip

    workspace = make_workspace(len(texts), texts=texts)
    summary = export(workspace, write_edges(workspace, []), "open_clip", tmp_path / "out")
    titles = pandas.read_csv(tmp_path / "out/pairs.csv", sep="\t")["title"].tolist()
    assert [str(title).strip() for title in titles] == texts
    tokenize = open_clip.get_tokenizer("ViT-B-32")
    assert tokenize([str(title) for title in titles]).equal(tokenize(texts))
    changed = sum(text != "a cat" for text in texts)
    assert any(note.startswith(f"{changed} captions that pandas") for note in summary.notes)


def test_no_folder_holds_more_than_a_thousand_pictures(make_workspace: MakeWorkspace, tmp_path, monkeypatch):
    monkeypatch.setattr("fnpipe.mining.exports.open_clip._PER_FOLDER", 4)
    workspace = make_workspace(9)
    export(workspace, write_edges(workspace, []), "open_clip", tmp_path / "out")
    folders = sorted((tmp_path / "out/images").iterdir())
    assert [len(list(folder.iterdir())) for folder in folders] == [4, 4, 1]


@given(st.integers(2, 12), st.integers(0, 2**32 - 1))
def test_known_false_negatives_are_those_of_all_batches_counted_out(n, seed):
    rng = np.random.default_rng(seed)
    true = np.unique(rng.integers(0, 4, (30, 2)), axis=0)
    rows = true[rng.integers(0, len(true), n)]
    together = {tuple(pair) for pair in true.tolist()}
    both = sum(
        (int(rows[a, 0]), int(rows[b, 1])) in together for a in range(n) for b in range(n) if a != b
    )  # what a batch of all rows holds
    assert known_false_negatives(rows[:, 0], rows[:, 1], true[:, 0], true[:, 1], n) == pytest.approx(both)
    assert known_false_negatives(rows[:, 0], rows[:, 1], true[:, 0], true[:, 1], 2) == pytest.approx(
        2 * both / (n * (n - 1))
    )


@pytest.mark.parametrize("form", ["open_clip", "sentence-transformers", "hf"])
def test_tars_with_folders_inside_and_a_damaged_picture_are_exported(form, tmp_path):
    import tarfile

    members = {}
    for i in range(8):
        members[f"tra/train/{i:04d}.png"] = picture(i)
        members[f"tra/train/{i:04d}.txt"] = f"caption {i}".encode()
    # The header is whole, what follows is not.
    members["tra/train/0007.png"] = members["tra/train/0007.png"][:-30]
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    assert run(["shard", str(tmp_path / "0.tar"), str(tmp_path / "ws"), "--in-place"]) == 0
    workspace = Workspace.open(tmp_path / "ws")
    summary = export(workspace, write_edges(workspace, [(0, 1, 0.9, False)]), form, tmp_path / "out")
    assert summary.images == 7
    assert "1 train images are left out: their pictures cannot be decoded" in summary.notes


def picture(seed: int) -> bytes:
    out = io.BytesIO()
    noise = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), np.uint8)
    Image.fromarray(noise).save(out, "PNG")
    return out.getvalue()


def test_a_part_that_is_gone_is_not_taken_for_its_neighbour(mined, tmp_path):
    workspace, stage = mined
    (stage.path / "part-00000.parquet").unlink()
    with pytest.raises(InputError, match="gone"):
        export(workspace, stage, "hf", tmp_path / "out")


def test_the_command_counts_and_refuses_what_it_must(mined, tmp_path, capsys, monkeypatch):
    workspace, stage = mined
    command = ["export", str(workspace.root), str(tmp_path / "out"), "--to", "open_clip"]
    assert run(command) == 0
    out = capsys.readouterr().out
    assert "5 recorded pairs and 4 mined (1 by identity), 5 images" in out
    assert f"--train-data {shlex.quote(str(tmp_path / 'out' / 'pairs.csv'))}" in out
    assert run(command) == 2
    assert "holds something already" in capsys.readouterr().err
    with pytest.raises(InputError, match="did you mean 'hf'"):
        export(workspace, stage, "hff", tmp_path / "other")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    for form, name, said in (
        ("hf", "me/pairs", "no token"),
        ("hf", "pairs", "not OWNER/NAME"),
        ("open_clip", "a/b", "only"),
    ):
        with pytest.raises(InputError, match=said):
            export(workspace, stage, form, tmp_path / "other", push=name)
    assert not (tmp_path / "other").exists()


def test_push_uploads_the_folder_whose_card_loads_it_by_name(mined, tmp_path, monkeypatch):
    import huggingface_hub

    calls = []

    class Hub:
        def create_repo(self, name, **kwargs):
            calls.append(name)

        def upload_folder(self, *, folder_path, repo_id, repo_type):
            calls.append((sorted(os.listdir(folder_path)), repo_id, repo_type))

    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "token")
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    workspace, stage = mined
    export(workspace, stage, "hf", tmp_path / "out", push="me/pairs")
    assert calls == ["me/pairs", (["README.md", "data"], "me/pairs", "dataset")]
    card = (tmp_path / "out/README.md").read_text()
    assert "load_dataset('me/pairs', split=\"train\")" in card
    assert str(tmp_path) not in card


@pytest.mark.slow
def test_sentence_transformers_trains_on_pictures_from_another_directory(mined, tmp_path):
    pytest.importorskip("sentence_transformers")
    pytest.importorskip("accelerate")
    workspace, stage = mined
    export(workspace, stage, "sentence-transformers", tmp_path / "out")
    (tmp_path / "elsewhere").mkdir()
    said = run_script(
        "train_sentence_transformers.py", str(tmp_path / "out"), str(tmp_path / "work"), cwd=tmp_path / "elsewhere"
    )
    result = json.loads(next(line for line in said.splitlines() if line.startswith('{"loss"')))
    # Pictures and not their paths; the two columns of texts are one look each.
    assert {(kind, "pixel_values" in keys) for kind, keys in result["given"]} == {
        ("PngImageFile", True),
        ("str", False),
    }
    assert any("vision" in name for name in result["moved"])
    assert any("text" in name for name in result["moved"])


@pytest.mark.slow
def test_open_clip_trains_on_either_csv_from_another_directory(mined, tmp_path):
    pytest.importorskip("open_clip_train.main")
    workspace, stage = mined
    summary = export(workspace, stage, "open_clip", tmp_path / "out")
    arguments = []
    for file in ("pairs.csv", "one-per-image.csv"):
        words = shlex.split(summary.load.replace("pairs.csv", file))
        assert words[:3] == ["python", "-m", "open_clip_train.main"]
        arguments += ["--", *words[3 : words.index("--model")], "--batch-size", "2"]
    (tmp_path / "work").mkdir()
    run_script("train_open_clip.py", str(tmp_path / "work"), *arguments[1:], cwd=tmp_path / "work")
    logs = [log.read_text() for log in (tmp_path / "work" / "logs").glob("*/out.log")]
    assert len(logs) == 2
    assert all("Train Epoch: 0" in log and "(100%)" in log for log in logs)


@pytest.mark.slow
def test_open_clip_trains_on_shards_by_the_webdataset_that_it_asks_for(make_workspace: MakeWorkspace, tmp_path):
    pytest.importorskip("open_clip_train.main")
    make_pairs = [{"image": f"{i}.png", "caption": f"caption {i}"} for i in range(8)]
    for i in range(8):
        (tmp_path / f"{i}.png").write_bytes(picture(i))
    (tmp_path / "pairs.json").write_text(json.dumps(make_pairs))
    assert run(["shard", str(tmp_path / "pairs.json"), str(tmp_path / "ws"), "--images-per-shard", "4"]) == 0
    arguments = ["--dataset-type", "webdataset", "--train-data", str(tmp_path / "ws/shards/{00000..00001}.tar")]
    said = run_script(
        "train_open_clip.py",
        str(tmp_path),
        *arguments,
        *["--train-num-samples", "8", "--batch-size", "4"],
        cwd=tmp_path,
        path=beside("webdataset==0.2.86", "braceexpand"),
    )
    assert "(100%)" in said


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.6.0"])
@pytest.mark.parametrize(("form", "name"), [("hf", "default"), ("sentence-transformers", "triplets")])
def test_an_older_datasets_loads_it(version, form, name, mined, tmp_path):
    workspace, stage = mined
    export(workspace, stage, form, tmp_path / "out")
    where = [str(tmp_path / "out"), name, str(tmp_path / "cache")]
    said = run_script("load_dataset.py", *where, cwd=tmp_path, path=beside(f"datasets=={version}"))
    found = json.loads(next(line for line in said.splitlines() if line.startswith('{"version"')))
    assert found["version"] == version
    first = found["first"]
    if form == "hf":
        assert first["captions"] == ["a dog, red", "a cat", "a bird"]
        assert first["image"] == list(flat_colour(0))
    else:
        assert first == {"anchor": list(flat_colour(0)), "positive": "a dog, red", "negative": "a fish"}
