"""The commands ``mine-connections``, ``inspect`` and ``relabel`` from the outside."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import MakeWorkspace
from fnpipe.cli.main import run
from fnpipe.mining.connections.stage import MineConfig, mine_connections
from fnpipe.mining.edges.reader import read_edges
from fnpipe.mining.plans.config import GroupConfig
from fnpipe.mining.plans.stage import group
from fnpipe.pipeline.workspace.embeddings import Embeddings
from fnpipe.pipeline.workspace.workspace import Workspace


def build(make_workspace: MakeWorkspace) -> Workspace:
    """40 images in pairs of equal meaning; the caption of one is true of the other."""
    rng = np.random.default_rng(0)
    meaning = np.repeat(rng.normal(size=(20, 12)), 2, axis=0)
    arrays = (meaning + 0.5 * rng.normal(size=meaning.shape), meaning + 0.5 * rng.normal(size=meaning.shape))
    texts = [f"[bold]thing[/bold] {i // 2} seen {'once' if i % 2 else 'twice'}" for i in range(40)]
    workspace = make_workspace(40, texts=texts, embeddings=arrays, images_per_shard=15)
    group(workspace, GroupConfig(batch_size=10, search_space=20, epochs=2))
    return workspace


@pytest.fixture
def mined(make_workspace: MakeWorkspace, capsys):
    workspace = build(make_workspace)
    assert run(["mine-connections", str(workspace.root), "--discriminator", "clip", "--positive-share", "0.05"]) == 0
    capsys.readouterr()
    return workspace


@pytest.fixture
def truth(tmp_path):
    path = tmp_path / "truth.parquet"
    pq.write_table(pa.table({"image": [f"{i}.png" for i in range(40)], "concept": [i // 2 for i in range(40)]}), path)
    return str(path)


def answer(capsys, *arguments):
    """The JSON that a command prints."""
    assert run([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_plan_then_pass_agree_and_the_summary_adds_up(make_workspace: MakeWorkspace, capsys):
    root = build(make_workspace).root
    command = ["mine-connections", root, "--discriminator", "clip", "--candidates", "3"]
    plan = answer(capsys, *command, "--plan")
    assert not (root / "edges").exists()
    summary = answer(capsys, *command)
    assert summary["edges"] == "clip"
    assert summary["unique_combinations"] == plan["unique_combinations"] == sum(plan["new_per_source"].values())
    assert summary["judgements"] == plan["judgements"] == sum(summary["labels"].values()) - summary["identity"]
    assert run([*map(str, command), "--plan"]) == 0
    assert "unique combinations of 40 images" in capsys.readouterr().out


def test_clip_without_a_share_says_that_it_is_too_sure(make_workspace: MakeWorkspace, capsys):
    root = str(build(make_workspace).root)
    assert run(["mine-connections", root, "--discriminator", "clip"]) == 0
    assert "--positive-share" in capsys.readouterr().out


def test_clip_can_be_fitted_on_edges_and_on_truth(make_workspace: MakeWorkspace, truth, capsys):
    workspace = build(make_workspace)

    def judge(*options):
        answer(capsys, "mine-connections", workspace.root, "--discriminator", "clip", *options)

    judge("--name", "raw")
    judge("--name", "on-truth", "--calibrate-on", truth)
    judge("--name", "on-edges", "--calibrate-on", "on-truth")
    errors = {}
    for name in ("raw", "on-truth", "on-edges"):
        view = answer(capsys, "inspect", workspace.root, "--edges", name, "--truth", truth)
        errors[name] = view["accuracy"]["ece"]
    assert errors["on-truth"] < 0.5 * errors["raw"]
    assert errors["on-edges"] == pytest.approx(errors["on-truth"], abs=0.02)
    command = [
        "mine-connections",
        str(workspace.root),
        "--discriminator",
        "clip",
        "--name",
        "x",
        "--calibrate-on",
        "no",
    ]
    assert run(command) == 2
    assert "neither a truth file nor edges" in capsys.readouterr().err


def test_inspect_lists_the_most_probable_and_marks_what_is_true(mined, truth, capsys):
    view = answer(capsys, "inspect", mined.root, "--label", "positive", "--limit", "5", "--truth", truth)
    assert len(view["rows"]) == 5
    p = [row["match_probability"] for row in view["rows"]]
    assert p == sorted(p, reverse=True)
    for row in view["rows"]:
        assert row["label"] == "positive"
        assert row["true"] == (row["image_id"] // 2 == row["pair_id"] // 2)
        assert row["image"] == f"{row['image_id']}.png"
        assert f"thing[/bold] {row['image_id'] // 2} " in row["recorded"][0]
    table = read_edges(mined.stage("edges/clip")).to_pylist()
    best = max(row["match_probability"] for row in table)
    assert p[0] == pytest.approx(best)
    assert view["matching"] == view["labels"]["positive"] == sum(row["label"] == "positive" for row in table)
    assert view["accuracy"]["precision"] > 0.5
    assert run(["inspect", str(mined.root), "--limit", "3", "--truth", truth]) == 0
    printed = capsys.readouterr().out
    assert "[bold]thing[/bold]" in printed, "captions are text, never markup"
    assert "precision" in printed


def test_inspect_lists_a_caption_once_that_several_pairs_have(make_workspace: MakeWorkspace, capsys):
    rng = np.random.default_rng(0)
    texts = [f"thing {i // 4}" for i in range(24)]
    workspace = make_workspace(24, texts=texts, embeddings=(rng.normal(size=(24, 8)), rng.normal(size=(24, 8))))
    group(workspace, GroupConfig(batch_size=12, search_space=24, epochs=3))
    answer(capsys, "mine-connections", workspace.root, "--discriminator", "clip", "--positive-share", "0.5")
    found: dict[tuple[int, str], list[float]] = {}
    for row in read_edges(workspace.stage("edges/clip")).to_pylist():
        found.setdefault((row["image_id"], row["caption"]), []).append(row["match_probability"])
    view = answer(capsys, "inspect", workspace.root, "--limit", "1000")
    listed = {(row["image_id"], row["caption"]): (row["match_probability"], row["pairs"]) for row in view["rows"]}
    assert len(listed) == len(view["rows"])
    assert listed == {key: (pytest.approx(max(p)), len(p)) for key, p in found.items()}
    assert sum(row["pairs"] for row in view["rows"]) == view["matching"]
    assert max(row["pairs"] for row in view["rows"]) > 1
    assert run(["inspect", str(workspace.root), "--limit", "1000"]) == 0
    assert " pairs)" in capsys.readouterr().out
    nothing = answer(capsys, "inspect", workspace.root, "--tau-low", "0", "--tau-high", "1", "--label", "negative")
    assert (nothing["rows"], nothing["matching"]) == ([], 0)


def test_other_thresholds_can_be_seen_and_then_kept(mined, capsys):
    before = answer(capsys, "inspect", mined.root)["labels"]
    seen = answer(capsys, "inspect", mined.root, "--tau-low", "0.3", "--tau-high", "0.4")["labels"]
    assert seen["positive"] > before["positive"]
    assert answer(capsys, "inspect", mined.root)["labels"] == before
    kept = answer(capsys, "relabel", mined.root, "--tau-low", "0.3", "--tau-high", "0.4")
    assert kept["labels"] == seen == answer(capsys, "inspect", mined.root)["labels"]


def test_inspect_writes_the_page(mined, tmp_path, capsys):
    page = tmp_path / "report.html"
    summary = answer(capsys, "inspect", mined.root, "--html", page)
    assert summary["html"]["shown"] > 0
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mine-connections", "--discriminator", "clap"], "did you mean 'clip'"),
        (["mine-connections", "--discriminator", "clip:x"], "did you mean 'clip'"),
        (["mine-connections", "--discriminator", "itm:none"], "no run 'none'"),
        (["mine-connections", "--discriminator", "clip", "--groups", "nope"], "no groups 'nope'"),
        (["mine-connections", "--discriminator", "clip", "--graph", "4"], "no graph 'clip'"),
        (["mine-connections", "--discriminator", "clip", "--tau-low", "0.9"], "tau_low <= tau_high"),
        (["mine-connections", "--discriminator", "itm:demo", "--calibrate-on", "x"], "fits clip"),
        (
            ["mine-connections", "--discriminator", "clip", "--positive-share", "0.1", "--tau-high", "0.8"],
            "leave --tau-high 0.8 out",
        ),
        (
            ["relabel", "--positive-share", "0.1", "--tau-low", "0.2", "--tau-high", "0.9"],
            "leave --tau-low 0.2 and --tau-high 0.9 out",
        ),
        (["inspect"], "no edges yet"),
        (["inspect", "--edges", "itm"], "no edges 'itm'"),
        (["inspect", "--label", "postive"], "did you mean 'positive'"),
        (["relabel"], "no edges yet"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_two(make_workspace: MakeWorkspace, capsys, arguments, message):
    root = str(build(make_workspace).root)
    assert run([arguments[0], root, *arguments[1:]]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_graph_alone_proposes_the_nearest_unrecorded(make_workspace: MakeWorkspace, capsys):
    workspace = build(make_workspace)
    assert run(["build-graph", str(workspace.root), "--k", "6"]) == 0
    capsys.readouterr()
    command = ["mine-connections", workspace.root, "--discriminator", "clip", "--candidates", "0", "--graph"]
    summary = answer(capsys, *command, "2", "--name", "g")
    embeddings = Embeddings.open(workspace)
    images, texts = (rows.take(np.arange(40)) for rows in (embeddings.images, embeddings.texts))
    similarity = images @ texts.T
    np.fill_diagonal(similarity, -np.inf)
    expected = {(i, int(j)) for i in range(40) for j in np.argsort(-similarity[i])[:2]}
    expected |= {(int(i), j) for j in range(40) for i in np.argsort(-similarity[:, j])[:2]}
    rows = read_edges(workspace.stage("edges/g")).to_pylist()
    assert {(row["image_id"], row["pair_id"]) for row in rows} == expected
    assert {row["rank_i2t"] for row in rows} | {row["rank_t2i"] for row in rows} == {0, 1, None}
    assert summary["new_per_source"] == {"graph/clip": len(expected)}
    assert run([*map(str, command), "7", "--name", "h"]) == 2
    assert "has 6 neighbours" in capsys.readouterr().err


def test_a_trained_matching_head_judges_alike_in_any_block(make_workspace: MakeWorkspace):
    import torch

    from fnpipe.train.judges.itm import ItmDiscriminator
    from fnpipe.train.model.build import build_model
    from fnpipe.train.model.config import ModelConfig

    torch.manual_seed(0)
    con_d = ItmDiscriminator(build_model(ModelConfig()), encode_batch=5, fuse_batch=7)
    workspace = build(make_workspace)
    tables = {}
    for name, size in (("one", 1), ("seven", 7), ("all", 100)):
        mine_connections(workspace, MineConfig(name=name, block_images=size, candidates=3), con_d)
        tables[name] = read_edges(workspace.stage(f"edges/{name}")).sort_by(
            [("image_id", "ascending"), ("pair_id", "ascending")]
        )
    for name in ("seven", "all"):
        assert tables[name]["pair_id"].equals(tables["one"]["pair_id"])
        p = [tables[which]["match_probability"].to_numpy() for which in (name, "one")]
        np.testing.assert_allclose(*p, atol=1e-5)
