"""What a command reads is held against being made anew meanwhile: the stages, and the workspace itself."""

from __future__ import annotations

import pytest
from test_connections import TableDiscriminator, build, stable_p

from conftest import MakeWorkspace
from fnpipe.cli.main import run
from fnpipe.mining.connections.stage import MineConfig, mine_connections
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import lock
from fnpipe.pipeline.shard.resume import alone
from fnpipe.pipeline.workspace.workspace import Workspace, reading
from fnpipe.train.runs.directory import reading_runs

READERS = {
    "build-graph": (["build-graph", "ROOT", "--k", "2", "--overwrite"], "embeddings"),
    "group": (["group", "ROOT", "--batch-size", "4", "--search-space", "8", "--name", "new"], "embeddings"),
    "audit": (["audit", "ROOT", "--batch-size", "4", "--search-space", "8"], "embeddings"),
    "evaluate": (["evaluate", "ROOT", "--embeddings", "EMBEDDINGS"], "embeddings"),
    "inspect": (["inspect", "ROOT", "--edges", "e"], "edges"),
}


@pytest.fixture
def workspace(make_workspace: MakeWorkspace) -> Workspace:
    made = build(make_workspace)
    mine_connections(made, MineConfig(name="e"), TableDiscriminator(stable_p))
    return made


@pytest.mark.parametrize("command", READERS)
def test_a_reader_waits_for_no_stage_and_no_sharding_that_is_being_made(
    workspace: Workspace, capsys: pytest.CaptureFixture[str], command: str
):
    words, kind = READERS[command]
    name = workspace.only(kind, "")
    words = [{"ROOT": str(workspace.root), "EMBEDDINGS": name}.get(word, word) for word in words]
    for held in (lock.beside(workspace.stage(f"{kind}/{name}").path, "fnpipe other"), alone(workspace.root)):
        with held:
            assert run(words) == 2
        assert "is at work here" in capsys.readouterr().err
    assert run(words) == 0, capsys.readouterr().err


@pytest.mark.parametrize("kind", ["embeddings", "groups"])
def test_mining_holds_what_proposes(workspace: Workspace, kind: str):
    stage = workspace.stage(f"{kind}/{workspace.only(kind, '')}")

    def judged(colour: object, caption: str) -> float:
        for made_anew in (stage.alone(), alone(workspace.root)):
            with pytest.raises(InputError, match="is at work here"), made_anew:
                pass
        return 0.5

    mine_connections(workspace, MineConfig(name="new"), TableDiscriminator(judged))


def test_a_workspace_that_was_sharded_anew_before_it_was_held_is_refused(workspace: Workspace):
    workspace.manifest["digest"] = "another"
    with (
        pytest.raises(InputError, match="sharded anew while `fnpipe inspect` began"),
        reading(workspace, {}, "fnpipe inspect"),
    ):
        pass


@pytest.mark.parametrize("kind", ["run", "itm", "vacsr"])
def test_a_run_that_is_read_may_be_trained_but_not_overwritten(workspace: Workspace, kind: str):
    stage = workspace.stage("runs/r")
    stage.start({"params": {}, "inputs": {}}, overwrite=False)
    for model in (f"{kind}:r", f"{kind}:{stage.path}"):
        with stage.alone(), reading_runs(workspace, [model, None, "demo", "run:never"], "fnpipe evaluate"):
            with reading_runs(workspace, [model], "fnpipe embed"):
                pass
            with pytest.raises(InputError, match=r"runs/r: `fnpipe e.*` .* is at work here"):
                stage.start({"params": {}, "inputs": {}}, overwrite=True)
    stage.start({"params": {}, "inputs": {}}, overwrite=True)
    assert [path.name for path in stage.path.parent.iterdir()] == ["r"]
