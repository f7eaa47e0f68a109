"""The workspace's laws: atomic files, no silent mixing, stale inputs refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from conftest import MakeWorkspace, write_embeddings
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import atomic
from fnpipe.pipeline.files.ranges import read_ranges
from fnpipe.pipeline.workspace.embeddings import Embeddings
from fnpipe.pipeline.workspace.manifest import write_manifest
from fnpipe.pipeline.workspace.workspace import Workspace, reading


def test_a_write_that_fails_leaves_the_old_file_and_no_temporary(tmp_path):
    path = tmp_path / "table.bin"
    atomic.write_bytes(path, b"old")
    with pytest.raises(RuntimeError), atomic.replacing(path) as temporary:
        temporary.write_bytes(b"half")
        raise RuntimeError
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["table.bin"]


def test_sweep_removes_leftovers_and_nothing_else(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / ".tmp-left.npy").write_bytes(b"x")
    (tmp_path / "deep" / "kept.npy").write_bytes(b"x")
    atomic.sweep(tmp_path)
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["kept.npy"]


def test_opening_what_is_no_workspace_names_the_way_out(tmp_path):
    with pytest.raises(InputError, match="fnpipe shard"):
        Workspace.open(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"no fnpipe\.json"):
        Workspace.open(tmp_path)


def test_pairs_come_in_pair_id_order_and_filter_by_split(make_workspace: MakeWorkspace):
    workspace = make_workspace(7, captions=[1, 2, 1, 3, 1, 1, 2], splits=["train", "test"] * 3 + ["train"])
    assert workspace.read_pairs(["pair_id"])["pair_id"].to_pylist() == list(range(11))
    test = workspace.read_pairs(["image_id"], split="test")
    assert test.column_names == ["image_id"]
    assert test["image_id"].to_pylist() == [1, 1, 3, 3, 3, 5]


def test_every_stage_decodes_under_the_limit_that_the_pictures_were_kept_under(make_workspace: MakeWorkspace):
    from test_connections import TableDiscriminator, stable_p

    from fnpipe.mining.connections.judge import Judge
    from fnpipe.mining.views.gallery import thumbnail
    from fnpipe.train.data.pictures import Samples

    root = make_workspace(3, images_per_shard=2, embeddings=(np.eye(3), np.eye(3))).root
    manifest = json.loads((root / "fnpipe.json").read_bytes())
    for limit, kept in ((64, True), (63, False)):  # the pictures have 8 x 8 pixels
        write_manifest(root, {**manifest, "params": {"max_pixels": limit}})
        workspace = Workspace.open(root)
        samples = Samples.of(workspace)
        (data,) = samples.read(np.array([2]))
        assert (samples.decoded(data) is not None) == kept
        assert bool(thumbnail(data, max_pixels=workspace.max_pixels)) == kept
        con_d = TableDiscriminator(stable_p)
        judge = Judge(workspace, Embeddings.open(workspace), con_d, block_images=2, workers=1)
        assert np.isnan(judge.probabilities(np.array([0, 2]), np.array([2, 1]))).any() != kept


def test_images_know_their_shards(make_workspace: MakeWorkspace):
    workspace = make_workspace(7, images_per_shard=3)
    assert workspace.shards_of(np.arange(7)).tolist() == [0, 0, 0, 1, 1, 1, 2]


def test_a_finished_stage_has_nothing_to_do_and_other_parameters_are_refused(make_workspace: MakeWorkspace):
    stage = make_workspace().stage("groups/g")
    assert stage.begin({"search_space": 96}, {"pairs": "a"})
    assert stage.begin({"search_space": 96}, {"pairs": "a"}), "a begun stage goes on"
    atomic.write_bytes(stage.path / "out", b"1")
    stage.finish(["out"])
    assert not stage.begin({"search_space": 96}, {"pairs": "a"})
    with pytest.raises(InputError, match="started with search_space 96, now 192"):
        stage.begin({"search_space": 192}, {"pairs": "a"})
    with pytest.raises(InputError, match="started from another state of pairs"):
        stage.begin({"search_space": 96}, {"pairs": "b"})
    with pytest.raises(InputError, match="started with input edges/e nothing, now b"):
        stage.begin({"search_space": 96}, {"pairs": "a", "edges/e": "b"})
    assert stage.begin({"search_space": 192}, {"pairs": "a"}, overwrite=True)
    assert not (stage.path / "out").exists()


def test_what_differs_is_said_in_words_and_digests_are_not_shown(make_workspace: MakeWorkspace):
    stage = make_workspace().stage("edges/e")
    digests = ["a" * 64, "b" * 64]
    params = {"graph": {"16": digests[0]}, "discriminator": {"kind": "itm", "weights": digests[0]}}
    stage.begin(params, {})
    for other, words in (
        ({"graph": {"16": digests[1]}}, r"started with another state of graph \(16\); use"),
        ({"graph": {"8": digests[0]}}, "started with graph 16, now 8; use"),
        ({"graph": None}, "started with graph 16, now nothing; use"),
        (
            {"discriminator": {"kind": "blip", "weights": digests[0]}},
            "started with discriminator kind itm, now blip; use",
        ),
    ):
        with pytest.raises(InputError, match=words):
            stage.begin({**params, **other}, {})


def test_an_overwritten_stage_goes_out_of_the_way_whole_and_what_is_left_of_it_is_swept(
    make_workspace: MakeWorkspace, monkeypatch
):
    stage = make_workspace().stage("groups/g")
    stage.begin({"seed": 1}, {})
    atomic.write_bytes(stage.path / "out", b"1")
    stage.finish(["out"])
    with monkeypatch.context() as patched:  # a kill before the first byte of the new one
        patched.setattr(atomic, "write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            stage.begin({"seed": 2}, {}, overwrite=True)
    assert list(stage.path.iterdir()) == []
    assert stage.workspace.names("groups") == []
    assert stage.begin({"seed": 2}, {})
    assert [path.name for path in stage.path.parent.iterdir()] == ["g"]
    assert [path.name for path in stage.path.iterdir()] == ["meta.json"]


def test_files_without_their_record_are_refused_and_overwritten_on_request(make_workspace: MakeWorkspace):
    stage = make_workspace().stage("edges/e")
    stage.begin({}, {})
    atomic.write_bytes(stage.path / "part-00000.parquet", b"1")
    stage.record.unlink()
    with pytest.raises(InputError, match=r"holds part-00000.parquet but no meta.json.*--overwrite"):
        stage.begin({}, {})
    assert stage.begin({}, {}, overwrite=True)
    assert sorted(path.name for path in stage.path.parent.iterdir()) == [".e.record", "e"]
    assert list(stage.path.iterdir()) == []


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_edges_are_the_old_ones_or_new_ones_wherever_overwriting_them_was_killed(
    make_workspace: MakeWorkspace, monkeypatch, renames: int
):
    stage = make_workspace().stage("edges/e")
    stage.begin({"seed": 1}, {})
    for name in ("part-00000.parquet", "recorded/part-00000.parquet"):
        atomic.write_bytes(stage.place(name), b"1")
    stage.finish(["part-00000.parquet", "recorded/part-00000.parquet"])
    rename, done = Path.rename, []

    def killed(path: Path, target: Path) -> None:
        if len(done) == renames:
            raise KeyboardInterrupt
        done.append(rename(path, target))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killed)
        patched.setattr(atomic, "write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            stage.begin({"seed": 2}, {}, overwrite=True)
    if renames:
        assert stage.workspace.names("edges") == []
        assert stage.begin({"seed": 2}, {})
        assert sorted(path.name for path in stage.path.parent.rglob("*")) == [".e.record", "e", "meta.json"]
    else:
        assert not stage.begin({"seed": 1}, {})
        assert [path.is_file() for path in stage.outputs()] == [True, True]


def test_edges_whose_directory_was_removed_are_made_anew(make_workspace: MakeWorkspace):
    workspace = make_workspace()
    stage = workspace.stage("edges/e")
    stage.begin({"seed": 1}, {})
    atomic.write_bytes(stage.place("trust/pairs.parquet"), b"of the old ones")
    stage.finish([])
    shutil.rmtree(stage.path)
    assert workspace.names("edges") == []
    assert stage.begin({"seed": 2}, {})
    assert [path.name for path in stage.beside.iterdir()] == ["meta.json"]


def test_a_link_in_the_place_of_a_stage_is_not_overwritten(make_workspace: MakeWorkspace, tmp_path):
    stage = make_workspace().stage("groups/g")
    stage.begin({}, {})
    stage.path.rename(tmp_path / "elsewhere")
    stage.path.symlink_to(tmp_path / "elsewhere")
    assert stage.begin({}, {})
    with pytest.raises(InputError, match=r"groups/g: a link to .*elsewhere"):
        stage.begin({}, {}, overwrite=True)
    assert (tmp_path / "elsewhere/meta.json").is_file()


def test_a_name_that_no_file_system_takes_is_refused(make_workspace: MakeWorkspace):
    with pytest.raises(InputError, match="too long a name for runs; at most 240 bytes"):
        make_workspace().stage(f"runs/{'ä' * 121}")


def test_a_stage_that_is_read_is_not_overwritten_meanwhile(make_workspace: MakeWorkspace):
    workspace = make_workspace()
    stage = workspace.stage("groups/g")
    stage.begin({}, {})
    stage.finish([])
    inputs = {"pairs": workspace.digest, stage.name: stage.digest}
    at_work = pytest.raises(InputError, match=r"groups/g: `fnpipe (train|export)` .* is at work here")
    trains, exports = (reading(workspace, inputs, f"fnpipe {command}") for command in ("train", "export"))
    with trains, exports, at_work, stage.alone():
        pass
    with stage.alone(), pytest.raises(InputError, match="at work"), reading(workspace, inputs, "fnpipe train"):
        pass
    with pytest.raises(InputError, match="changed"), reading(workspace, {stage.name: "other"}, "fnpipe train"):
        pass


def test_a_stage_made_from_embeddings_that_changed_is_stale(make_workspace: MakeWorkspace):
    rng = np.random.default_rng(0)
    workspace = make_workspace(6, embeddings=(rng.normal(size=(6, 4)), rng.normal(size=(6, 4))))
    source = workspace.stage("embeddings/clip")
    graph = workspace.stage("graph/clip")
    graph.begin({}, {"pairs": workspace.digest, source.name: source.digest})
    graph.finish([])
    graph.require()
    write_embeddings_again = (rng.normal(size=(6, 4)), rng.normal(size=(6, 4)))
    shutil.rmtree(source.path)
    write_embeddings(workspace, "clip", *write_embeddings_again)
    with pytest.raises(InputError, match="made from other embeddings/clip"):
        graph.require()


def test_embedding_rows_come_by_id_across_shards(make_workspace: MakeWorkspace):
    rng = np.random.default_rng(1)
    images, texts = rng.normal(size=(11, 6)), rng.normal(size=(22, 6))
    texts[4] = 0
    embeddings = Embeddings.open(make_workspace(11, captions=2, embeddings=(images, texts)))
    unit = images / np.linalg.norm(images, axis=1, keepdims=True)
    ids = np.array([10, 0, 5, 5, 4])
    np.testing.assert_allclose(embeddings.images.take(ids), unit[ids], atol=1e-3)
    assert embeddings.images.take(ids).dtype == np.float32
    np.testing.assert_allclose(embeddings.images.slice(3, 11), unit[3:11], atol=1e-3)
    assert embeddings.bad_pairs.tolist() == [4]
    assert embeddings.bad_images.tolist() == []


def test_several_embeddings_and_no_name_are_named(make_workspace: MakeWorkspace):
    rng = np.random.default_rng(2)
    arrays = (rng.normal(size=(6, 4)), rng.normal(size=(6, 4)))
    workspace = make_workspace(6, embeddings=arrays)
    write_embeddings(workspace, "other", *arrays)
    with pytest.raises(InputError, match=r"several embeddings \(clip, other\)"):
        Embeddings.open(workspace)
    with pytest.raises(InputError, match="did you mean 'other'"):
        Embeddings.open(workspace, "othr")


def test_ranges_are_read_in_order_locally_and_from_any_file_system(tmp_path):
    import fsspec

    content = bytes(range(256))
    path = tmp_path / "a.tar"
    path.write_bytes(content)
    with fsspec.open("memory://ranges/a.tar", "wb") as file:
        file.write(content)
    urls = [str(path), "memory://ranges/a.tar", str(path)]
    assert read_ranges(urls, [3, 10, 250], [2, 4, 6]) == [content[3:5], content[10:14], content[250:256]]
    with pytest.raises(OSError, match="ends inside"):
        read_ranges([str(path)], [250], [7])


def test_outputs_may_be_names_or_paths_also_in_a_relative_workspace(make_workspace: MakeWorkspace, monkeypatch):
    root = make_workspace().root
    monkeypatch.chdir(root.parent)
    stage = Workspace.open(root.name).stage("groups/g")
    stage.begin({}, {})
    atomic.write_bytes(stage.path / "out", b"1")
    assert stage.finish(["out"])["digest"] == stage.finish([stage.path / "out"])["digest"]
