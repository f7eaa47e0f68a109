"""docs/guide/own-trainer.md: its Python runs as it stands, over tiny models, in the loops of other packages."""

from __future__ import annotations

import json
import re
from pathlib import Path

import open_clip
import pytest
import torch
from other_packages import run_script
from test_gallery import write_edges
from train_open_clip import TINY

import fnpipe
from conftest import MakeWorkspace
from fnpipe.mining.plans.config import GroupConfig
from fnpipe.mining.plans.plan import read_plan
from fnpipe.mining.plans.stage import group

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "own-trainer.md"


@pytest.fixture
def work(make_workspace: MakeWorkspace, tmp_path: Path, monkeypatch) -> Path:
    """Eight images, of which 2k and 2k + 1 match each other's captions, in two planned batches of four."""
    workspace = make_workspace(8)
    write_edges(workspace, [(i, j, 0.9 if j == i ^ 1 else 0.1, False) for i in range(8) for j in range(8) if i != j])
    group(workspace, GroupConfig(sampling="random", batch_size=4, name="hard"))
    (tmp_path / "work").symlink_to(workspace.root)
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    open_clip.add_model_config(tmp_path / "tiny.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.filterwarnings("ignore:Device cuda was not available")
def test_open_clip_s_own_loop_trains_on_planned_batches_with_mined_positives(work: Path, monkeypatch):
    judged = []
    of_batch = fnpipe.MinedClipLoss._targets

    def noting(self, logits, ids):
        targets = of_batch(self, logits, ids)
        judged.append((ids[0], targets.i2t))
        return targets

    monkeypatch.setattr(fnpipe.MinedClipLoss, "_targets", noting)
    scope: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text().partition("## Arrays alone")[0], re.DOTALL):
        exec(compile(code.replace("ViT-B-32", "tiny"), str(PAGE), "exec"), scope)
    # Two epochs of two batches in open_clip's loop, then two in the loop of the page.
    assert len(judged) == 6
    for image_ids, targets in judged:
        known = (image_ids[:, None] == image_ids) | (image_ids[:, None] == image_ids ^ 1)
        torch.testing.assert_close(targets, known / known.sum(1, keepdim=True))
    assert any((targets == 0.5).any() for _, targets in judged)
    optimizer = scope["optimizer"]
    assert {float(state["step"]) for state in optimizer.state.values()} == {4}
    assert scope["edges"].find(0, 3)[1] == 2


def test_sentence_transformers_trains_on_planned_batches_with_its_ranking_loss_where_nothing_is_mined(
    work: Path, monkeypatch
):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(work / "cache"))
    printed = run_script("own_trainer_sentence_transformers.py", str(PAGE), "made", cwd=work)
    found = json.loads(next(line for line in printed.splitlines() if line.startswith('{"steps"')))
    assert found["steps"] == 2
    plan = read_plan(fnpipe.open("work").stage("groups/hard"), 0)["pair_id"].to_pylist()
    assert found["seen"] == [plan[:4], plan[4:]]
    assert max(found["apart"]) < 1e-6
    assert abs(found["mined"]) > 1e-3
