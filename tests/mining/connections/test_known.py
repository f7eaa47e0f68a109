"""Verdicts taken over from other edges, against one pass over all candidates."""

from __future__ import annotations

import json
import shutil
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from test_connections import TableDiscriminator, parts_of, stable_p, write_plan

from conftest import MakeWorkspace
from fnpipe.cli.main import run
from fnpipe.mining.connections import trust
from fnpipe.mining.connections.forecast import plan_mining
from fnpipe.mining.connections.stage import MineConfig, mine_connections
from fnpipe.mining.edges.reader import part_path, read_edges
from fnpipe.mining.edges.relabel import relabel
from fnpipe.mining.graph.stage import GraphConfig, build_graph
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.status import status

N = 30


@pytest.fixture(autouse=True)
def _no_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "SAMPLE", 0)


@pytest.fixture
def workspace(make_workspace: MakeWorkspace) -> Workspace:
    """30 images, of which some share captions; a graph, and two plans of two epochs."""
    rng = np.random.default_rng(3)
    texts = [f"card {i - (i % 5 == 1)}" for i in range(N)]
    made = make_workspace(
        N, texts=texts, images_per_shard=12, embeddings=(rng.normal(size=(N, 6)), rng.normal(size=(N, 6)))
    )
    build_graph(made, GraphConfig(k=8))
    for name in ("a", "b"):
        orders = [rng.permutation(N) for _ in range(2)]
        write_plan(
            made, name, [[[(int(i), int(i)) for i in order[s : s + 6]] for s in range(0, N, 6)] for order in orders]
        )
    return made


def mine(workspace: Workspace, name: str, **fields) -> tuple[TableDiscriminator, MineConfig]:
    """Mine afresh under ``name``; what judged."""
    con_d, config = TableDiscriminator(stable_p), MineConfig(name=name, overwrite=True, **fields)
    mine_connections(workspace, config, con_d)
    return con_d, config


def rows_of(workspace: Workspace, name: str, *, ranks: bool = True) -> list[dict]:
    table = read_edges(workspace.stage(f"edges/{name}"))
    return (table if ranks else table.drop_columns(["rank_i2t", "rank_t2i"])).to_pylist()


# How one pass, and then the union of two, is asked for.
GRAPH = {"candidates": 0, "graph": 4}
PLAN = {"candidates": 2, "groups": ("a",)}


@settings(max_examples=5, phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    first=st.sampled_from([GRAPH, PLAN, {**GRAPH, **PLAN}]),
    candidates=st.integers(0, 4),
    graph=st.integers(0, 6),
    groups=st.sampled_from([("a",), ("b",), ("a", "b")]),
    identity=st.booleans(),
    block=st.sampled_from([1, 4, 100]),
)
def test_what_is_taken_over_and_what_is_new_are_what_one_pass_over_both_gives(
    workspace, first, candidates, graph, groups, identity, block
):
    if not candidates and not graph:
        return
    before, _ = mine(workspace, "near", **first, identity=identity)
    second = {"candidates": candidates, "graph": graph, **({"groups": groups} if candidates else {})}
    new, config = mine(workspace, "all", **second, known="near", block_images=block, tau_low=0.3, tau_high=0.6)
    sources = [one for one in (first, second) if one["candidates"]]
    union = {
        "candidates": max(one["candidates"] for one in (first, second)),
        "graph": max(one.get("graph", 0) for one in (first, second)),
        "groups": tuple(dict.fromkeys(name for one in sources for name in one["groups"])),
    }
    # One pass takes as many of every plan, so the plans must ask for equally many to be the union.
    if len({one["candidates"] for one in sources}) > 1 or (first.get("graph") and graph and graph < first["graph"]):
        union = None
    if union:
        whole, _ = mine(workspace, "whole", **union, tau_low=0.3, tau_high=0.6)
        # The ranks of edges that plans and the graph proposed are not told apart.
        ranks = not (first["candidates"] and first.get("graph"))
        assert rows_of(workspace, "all", ranks=ranks) == rows_of(workspace, "whole", ranks=ranks)
        assert Counter(new.judged) == Counter(whole.judged) - Counter(before.judged)
    planned = plan_mining(workspace, config, TableDiscriminator(stable_p))
    assert planned.judgements == len(new.judged)
    told = mine_connections(workspace, MineConfig(**{**vars(config), "overwrite": False}), new)
    assert told.known == planned.known == told.judgements - planned.judgements
    assert told.unique_combinations == planned.unique_combinations == len(rows_of(workspace, "all"))


def test_the_record_names_what_was_taken_over_and_other_verdicts_are_refused(workspace: Workspace):
    mine(workspace, "near", **GRAPH)
    mine(workspace, "all", **PLAN, known="near")
    assert workspace.stage("edges/all").require()["params"]["known"] == {"near": workspace.stage("edges/near").digest}
    assert "known" not in workspace.stage("edges/near").require()["params"]
    made_from = {stage["name"]: stage["made_from"] for stage in status(str(workspace.root))["stages"]}
    assert {"edges/near", *(f"groups/{name}" for name in PLAN["groups"])} <= set(made_from["edges/all"].split(", "))
    relabel(workspace, "all", 0.2, 0.3)
    assert workspace.stage("edges/all").require()["known"] > 0
    # The thresholds of the known edges change their digest, and with it what a pass is begun with.
    relabel(workspace, "near", 0.2, 0.3)
    with pytest.raises(InputError, match="started with another state of known"):
        mine_connections(
            workspace,
            MineConfig(name="all", **PLAN, known="near", tau_low=0.2, tau_high=0.3),
            TableDiscriminator(stable_p),
        )
    other = TableDiscriminator(stable_p)
    other.description = {"kind": "table", "weights": "2"}
    with pytest.raises(InputError, match="--known near: judged with weights None, this discriminator has 2"):
        mine_connections(workspace, MineConfig(name="else", **PLAN, known="near"), other)
    with pytest.raises(InputError, match="--known near: judged with"):
        plan_mining(workspace, MineConfig(name="else", **PLAN, known="near"), other)
    assert "else" not in workspace.names("edges")
    with pytest.raises(InputError, match="--known all: the edges that are to be made"):
        mine_connections(workspace, MineConfig(name="all", **PLAN, known="all"), other)


def test_stale_edges_are_not_taken_over(workspace: Workspace):
    mine(workspace, "near", **GRAPH)
    stage = workspace.stage("edges/near")
    meta = json.loads(stage.record.read_bytes())
    stage.write_meta({**meta, "inputs": {"pairs": "another"}})
    with pytest.raises(InputError, match="made from other pairs"):
        mine(workspace, "all", **PLAN, known="near")
    stage.write_meta(meta)
    part_path(stage, 1).unlink()
    with pytest.raises(InputError, match=r"part-00001\.parquet: "):
        mine(workspace, "all", **PLAN, known="near")


def test_a_pass_with_known_edges_killed_at_any_part_ends_with_the_same_bytes(workspace: Workspace, monkeypatch):
    mine(workspace, "near", **GRAPH)
    mine(workspace, "all", **PLAN, known="near")
    whole = parts_of(workspace, "all")
    for parts in range(workspace.n_shards):
        stage = workspace.stage("edges/all")
        shutil.rmtree(stage.path)
        shutil.rmtree(stage.beside)
        con_d = TableDiscriminator(stable_p)
        calls = []

        def dies(*asked, judged=TableDiscriminator.score_pairs, con_d=con_d, calls=calls, parts=parts):
            calls.append(asked)
            if len(calls) > parts:
                raise KeyboardInterrupt
            return judged(con_d, *asked)

        monkeypatch.setattr(con_d, "score_pairs", dies)
        with pytest.raises(KeyboardInterrupt):
            mine_connections(workspace, MineConfig(name="all", **PLAN, known="near"), con_d)
        mine_connections(workspace, MineConfig(name="all", **PLAN, known="near"), TableDiscriminator(stable_p))
        assert parts_of(workspace, "all") == whole


def test_the_command_says_how_much_was_taken_over(workspace: Workspace, capsys):
    line = ["mine-connections", str(workspace.root), "--discriminator", "clip"]
    assert run([*line, "--candidates", "0", "--graph", "4", "--name", "near"]) == 0
    again = [*line, "--groups", "a", "--groups", "b", "--known", "near", "--name", "all"]
    assert run([*again, "--plan"]) == 0
    known = [line for line in capsys.readouterr().out.splitlines() if line.endswith(" known")]
    assert len(known) == 1
    assert run(again) == 0
    assert " taken over + " in capsys.readouterr().out
    assert run([*line, "--known", "nera", "--name", "all"]) == 2
    assert "did you mean" in capsys.readouterr().err
