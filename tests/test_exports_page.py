"""docs/exports.md: its commands and its Python run as they stand."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from test_gallery import write_edges

from conftest import MakeWorkspace
from fnpipe.cli.main import run
from fnpipe.mining.exports.card import loading
from fnpipe.mining.exports.open_clip import training_command
from fnpipe.mining.plans.config import GroupConfig
from fnpipe.mining.plans.materialize import materialize
from fnpipe.mining.plans.stage import group

PAGE = (Path(__file__).parent.parent / "docs" / "exports.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_s_lines_run_in_order(make_workspace: MakeWorkspace, tmp_path, monkeypatch):
    workspace = make_workspace(8)
    write_edges(workspace, [(0, 1, 0.9, False), (0, 2, 0.01, False), (3, 4, 1.0, True)])
    group(workspace, GroupConfig(sampling="random", batch_size=4, name="g"))
    materialize(workspace, workspace.stage("groups/g"), tmp_path / "planned")
    (tmp_path / "work").symlink_to(workspace.root)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for command in "".join(blocks("sh")).splitlines():
        assert run(shlex.split(command)[1:]) == 0, command
    scope: dict[str, object] = {}
    values = []
    for code in blocks("python"):
        exec(compile(code, "docs/exports.md", "exec"), scope)
        values.append(dict(scope))
    assert [about["source"] for about in values[0]["about"]] == ["recorded", "discriminator"]
    assert len(values[0]["recorded"]) == 1
    assert [source for _, source, _ in values[1]["pairs"]] == ["recorded", "discriminator"]
    assert (values[2]["batch"], values[2]["slot"]) == (1, 3)


def test_the_page_shows_the_command_that_is_printed():
    shown = " ".join(PAGE.replace("\\\n", " ").split())
    assert " ".join(training_command("/path/for-open-clip").split()) in shown
    assert loading("hf", "for-hf").splitlines()[2].replace("'", '"') in PAGE
