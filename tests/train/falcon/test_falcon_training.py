"""FALCON in a run: its batches, their timing, its reward, and what a resumed run remembers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_falcon import chain_by_loop
from test_train_loop import FAST, Killed, equal, kill_after, logged, weights, write_edges

from conftest import MakeWorkspace, flat_colour, png, write_embeddings
from fnpipe.mining.data.train_pairs import train_pairs_of
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.falcon import batches as falcon_batches
from fnpipe.train.falcon.batches import EmbeddingCache, EpochConstruction, FalconBatches, FalconSource
from fnpipe.train.falcon.chain import Chooser, Constant
from fnpipe.train.falcon.policy import Snapshot
from fnpipe.train.learners.keys import TrainConfig
from fnpipe.train.methods import train
from fnpipe.train.model.load import load_run, starting_model

IMAGES = 26


@pytest.fixture
def workspace(make_workspace: MakeWorkspace) -> Workspace:
    rng = np.random.default_rng(0)
    made = rng.normal(size=(IMAGES, 5)), rng.normal(size=(2 * IMAGES, 5))
    return make_workspace(IMAGES, captions=2, embeddings=made)


# Six steps an epoch, in search spaces of 12, 12 and 2; a policy that moves with its first reward.
FALCON: dict[str, Any] = {**FAST, "method": "falcon", "batch_size": 4, "search_space": 12}
EAGER: dict[str, Any] = {**FALCON, "baseline": "none", "policy_lr": 0.1}


# ---------------------------------------------------------------------------------------------------- construction
@dataclass
class StoredRows:
    """Stands for the rows of an embedding."""

    array: np.ndarray

    def take(self, ids: np.ndarray) -> np.ndarray:
        return self.array[ids]


@dataclass
class Stored:
    """Stands for stored embeddings."""

    images: StoredRows
    texts: StoredRows


def made_source(count: int, batch: int, space: int, seed: int) -> FalconSource:
    """One caption an image; pair p belongs to image 2 p, so that ids and rows differ."""
    rng = np.random.default_rng(seed)
    stored = Stored(
        StoredRows(rng.normal(size=(2 * count, 3)).astype(np.float32)),
        StoredRows(rng.normal(size=(count, 3)).astype(np.float32)),
    )
    members = train_pairs_of(np.arange(count), 2 * np.arange(count))
    return FalconSource(members, stored, batch, space, seed)  # type: ignore[arg-type]


@settings(max_examples=40)
@given(
    count=st.integers(2, 60),
    batch=st.integers(2, 7),
    spaces=st.integers(1, 4),
    seed=st.integers(0, 1000),
    most_open=st.integers(1, 3),
)
def test_every_pair_is_used_once_and_batches_at_one_are_the_slow_chain(
    count: int, batch: int, spaces: int, seed: int, most_open: int
):
    source = made_source(count, batch, spaces * batch, seed)
    construction = EpochConstruction(source, EmbeddingCache(source, 3), 0, np.zeros(count, bool))
    construction.most_open = most_open
    stored: Any = source.embeddings
    unused = {tuple(space): space.tolist() for space in source.spaces(0)}
    taken: list[int] = []
    for number in range(source.batches_per_epoch):
        rows = construction.construct(number, Constant(1.0, log_scale=False)).tolist()
        (space,) = (space for space in unused if set(rows) <= set(space))
        # S by its definition: image i with text j, plus image j with text i.
        sims = np.array([[0.0] * count for _ in range(count)], np.float32)
        for i in space:
            for j in space:
                images, texts = stored.images.array, stored.texts.array
                sims[i, j] = images[2 * i] @ texts[j] + images[2 * j] @ texts[i]
        assert rows == chain_by_loop(sims, unused[space], rows[0], source.batch_size, 1.0)
        unused[space] = [row for row in unused[space] if row not in rows]
        taken += rows
    assert len(set(taken)) == len(taken) == count // source.batch_size * source.batch_size


def test_the_first_anchor_is_uniform():
    first = []
    for seed in range(400):
        source = made_source(8, 4, 8, seed)
        construction = EpochConstruction(source, EmbeddingCache(source, 3), 0, np.zeros(8, bool))
        first.append(int(construction.construct(0, Constant(1.0, log_scale=False))[0]))
    assert np.bincount(first, minlength=8).min() > 25


def test_search_spaces_are_drawn_anew_in_every_epoch_and_alike_in_every_run():
    spaces = [[tuple(space) for space in made_source(20, 2, 6, 1).spaces(epoch)] for epoch in (0, 0, 1)]
    assert spaces[0] == spaces[1] != spaces[2]
    assert [len(space) for space in spaces[0]] == [6, 6, 6, 2]
    assert sorted(row for space in spaces[0] for row in space) == list(range(20))


def test_a_search_space_that_does_not_fit_into_memory_is_refused(monkeypatch: pytest.MonkeyPatch):
    sizes = {"SC_PAGE_SIZE": 16, "SC_PHYS_PAGES": 19**2}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    made_source(40, 2, 19, 0)
    made_source(19, 2, 5000, 0)
    with pytest.raises(InputError, match="search_space 20: half of the memory is enough for 19"):
        made_source(40, 2, 20, 0)


class StubLoader:
    """Loads nothing; a batch is its number."""

    workers = 0

    def pixels(self, epoch: int, image_ids: np.ndarray) -> tuple[None, None]:
        return None, None

    def collate_rows(self, image_ids: np.ndarray, pair_ids: np.ndarray, *, number: int, **_: Any) -> int:
        assert (image_ids == 2 * pair_ids).all()
        return number


def made_batches(
    ahead: int, snapshot: Callable[[], Any], seen: dict[int, Any], rank: int = 0, world: int = 1
) -> FalconBatches:
    source = made_source(40, 4, 8, 0)

    def make_chooser(number: int, rng: np.random.Generator, drawn_with: Snapshot | None) -> Chooser:
        seen[number] = drawn_with
        return Constant(0.9, log_scale=False)

    loader: Any = StubLoader()
    return FalconBatches(
        source, EmbeddingCache(source, 3), loader, make_chooser, snapshot, ahead=ahead, rank=rank, world=world
    )


def test_processes_construct_the_same_rounds_and_load_their_own():
    ranks = [list(made_batches(2, lambda: None, {}, rank=rank, world=3).rest_of_epoch(1, 0)) for rank in range(3)]
    alone = list(made_batches(2, lambda: None, {}).rest_of_epoch(1, 0))
    # Ten batches make three rounds of three.
    assert [[made.batch for made in rank] for rank in ranks] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    for number, rounds in enumerate(zip(*ranks, strict=True)):
        expected = np.concatenate([made.rows for made in alone[3 * number : 3 * number + 3]])
        assert all((made.rows == expected).all() for made in rounds)
        assert all(made.draws.q.shape == (3,) for made in rounds)


@pytest.mark.parametrize("ahead", [0, 1, 3, 20])
def test_a_batch_is_drawn_with_the_policy_of_exactly_so_many_steps_before(ahead: int):
    steps, seen = [0], dict[int, Any]()
    batches = made_batches(ahead, lambda: steps[0], seen)
    for epoch in range(2):
        for made in batches.rest_of_epoch(epoch, 0):
            # Long enough for the thread to do all that it may.
            time.sleep(0.005)
            batches.commit(made)
            steps[0] += 1
    # An epoch's first batches are drawn with the policy at its start: before it their embeddings are not known.
    assert [seen[k] for k in range(20)] == [max(k // 10 * 10, k - ahead) for k in range(20)]


def test_a_caller_that_stops_leaves_no_thread_behind():
    import threading

    before = threading.active_count()
    batches = made_batches(3, lambda: None, {}).rest_of_epoch(0, 0)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


# ---------------------------------------------------------------------------------------------------- runs
# Six steps an epoch: 3 stops between checkpoints, 4 at one, 6 at the end of an epoch, 9 in the second one.
@pytest.mark.parametrize(
    ("stop", "ahead", "level"), [(3, 4, "anchor"), (4, 0, "batch"), (6, 2, "batch"), (9, 2, "anchor")]
)
def test_a_killed_run_goes_on_to_the_same_weights_policy_and_log(
    workspace: Workspace, stop: int, ahead: int, level: str
):
    values = {**EAGER, "ahead": ahead, "policy_level": level, "checkpoint_steps": 2}
    train(workspace, values, run="whole")
    with pytest.raises(Killed):
        train(workspace, values, run="killed", after_step=kill_after(stop))
    summary = train(workspace, {}, run="killed", resume=True)
    assert summary["steps"] == 12
    assert logged(workspace, "killed") == logged(workspace, "whole")
    assert equal(weights(workspace, "killed"), weights(workspace, "whole"))
    assert equal(policy_of(workspace, "killed"), policy_of(workspace, "whole"))


def state_of(workspace: Workspace, run: str) -> dict[str, Any]:
    path = workspace.root / "runs" / run / "checkpoints/last.state"
    state: dict[str, Any] = torch.load(path, weights_only=True)["falcon"]
    return state


def policy_of(workspace: Workspace, run: str) -> dict[str, torch.Tensor]:
    policy: dict[str, torch.Tensor] = state_of(workspace, run)["scheduler"]["policy"]
    return policy


def test_the_policy_moves_and_with_it_the_batches(workspace: Workspace):
    for run, lr in (("moving", 0.1), ("frozen", 0.0)):
        train(workspace, {**EAGER, "policy_lr": lr, "ahead": 0}, run=run)
    moving, frozen = (logged(workspace, run) for run in ("moving", "frozen"))
    assert len({line["policy_mean"] for line in moving}) == 12
    assert [line["policy_mean"] for line in frozen] == pytest.approx([5.5 / 6.7] * 12)
    assert moving[0]["loss"] == frozen[0]["loss"]
    assert moving[-1]["loss"] != frozen[-1]["loss"]
    assert "reward" not in frozen[0]
    assert (workspace.root / "runs/moving/quantiles.png").stat().st_size > 1000


def test_the_speed_of_construction_decides_nothing(workspace: Workspace, monkeypatch: pytest.MonkeyPatch):
    train(workspace, EAGER, run="quick")
    real = falcon_batches.construct

    def slow(*arguments: Any) -> np.ndarray:
        time.sleep(0.05)
        return real(*arguments)

    monkeypatch.setattr(falcon_batches, "construct", slow)
    train(workspace, EAGER, run="slow")
    assert logged(workspace, "quick") == logged(workspace, "slow")
    assert equal(weights(workspace, "quick"), weights(workspace, "slow"))


def test_the_next_epoch_looks_through_the_embeddings_of_this_ones_forward_passes(workspace: Workspace):
    train(workspace, {**FALCON, "lr": 0.0, "augment": "none", "epochs": 1, "quantile": 0.9}, run="r")
    state = state_of(workspace, "r")["batches"]
    model = load_run(workspace.root / "runs/r").eval()
    used = state["used"].numpy()
    # 26 images make six batches of four.
    assert used.sum() == 24
    colours = np.array([flat_colour(i) for i in range(IMAGES)], np.uint8)
    pixels = torch.stack([model.transform(np.tile(c, (8, 8, 1))) for c in colours])
    with torch.no_grad():
        expected = model.encode_image(model.transform.normalise(pixels))[1].half()
    assert torch.allclose(state["images"][used].float(), expected[used].float(), atol=2e-3)
    assert not state["images"][~used].any()
    pairs = train_pairs_of(np.arange(2 * IMAGES), np.arange(2 * IMAGES) // 2).captions_of_epoch(0, 0)
    captions = [f"picture {pair // 2} caption {pair % 2}" for pair in pairs]
    with torch.no_grad():
        expected = model.embed_texts(model.tokenizer(captions)).half()
    assert torch.allclose(state["texts"][used].float(), expected[used].float(), atol=2e-3)


def test_without_a_step_there_is_no_reward(workspace: Workspace):
    """The loss after the step is that of the same pairs under the same masks: with a rate of 0 nothing decreases."""
    write_edges(
        workspace, [(i, 2 * j, 0.95) for i in range(IMAGES) for j in range(IMAGES) if (i + j) % 3 == 0 and i != j]
    )
    train(workspace, {**EAGER, "lr": 0.0, "edges": "made"}, run="r")
    lines = logged(workspace, "r")
    assert max(abs(line["reward"]) for line in lines) < 1e-5
    assert sum(line["mlm_joined"] for line in lines) > 0


def test_a_step_on_the_masked_tokens_is_rewarded(workspace: Workspace):
    train(workspace, {**EAGER, "lr": 3e-3, "itm": False, "warmup_steps": 0, "augment": "none"}, run="r")
    assert np.mean([line["reward"] for line in logged(workspace, "r")]) > 0.01


def test_edges_are_treated_as_by_mafa(workspace: Workspace):
    write_edges(
        workspace, [(i, 2 * j + c, 0.95) for i in range(IMAGES) for j in range(IMAGES) for c in (0, 1) if i != j]
    )
    values = {**FALCON, "quantile": 1.0, "epochs": 1, "smoothing": 0.0}
    train(workspace, values, run="plain")
    train(workspace, {**values, "edges": "made"}, run="edges")
    plain, edges = logged(workspace, "plain"), logged(workspace, "edges")
    assert all(line["mined_share"] == 1.0 and line["coverage"] == 1.0 for line in edges)
    assert "mined_share" not in plain[0]
    assert plain[0]["itc"] != edges[0]["itc"]
    assert plain[0]["q"] == edges[0]["q"] == 1.0
    assert TrainConfig(method="falcon", edges="made").method_losses.ecm
    assert not TrainConfig(method="falcon").method_losses.ecm


def test_mined_pairs_are_never_joined_and_what_is_forced_is_logged(workspace: Workspace):
    # Every image matches those of its own third; in search spaces of 12 a batch of 4 must take two of one.
    known = [
        (i, 2 * j + c, 0.6) for i in range(IMAGES) for j in range(IMAGES) for c in (0, 1) if i != j and i % 3 == j % 3
    ]
    write_edges(workspace, known)
    values = {**FALCON, "quantile": 1.0, "epochs": 1, "smoothing": 0.0, "edges": "made"}
    train(workspace, values, run="plain")
    train(workspace, {**values, "skip_mined": True}, run="three")
    train(workspace, {**values, "skip_mined": True, "batch_size": 3}, run="apart")
    assert "forced" not in logged(workspace, "plain")[0]
    assert all(line["forced"] >= 1 for line in logged(workspace, "three"))
    assert sum(line["forced"] for line in logged(workspace, "apart")) < 8
    assert logged(workspace, "apart")[0]["forced"] == 0
    # Above the thresholds of this run nothing is known.
    train(workspace, {**values, "skip_mined": True, "tau_low": 0.7, "tau_high": 0.7}, run="none")
    assert {line["forced"] for line in logged(workspace, "none")} == {0}
    with pytest.raises(InputError, match="skip_mined is true, and no edges are named"):
        TrainConfig(method="falcon", skip_mined=True)
    with pytest.raises(InputError, match="skip_mined is True, which only falcon has"):
        TrainConfig(method="grit", skip_mined=True)


def test_ramps_run_over_the_whole_run(workspace: Workspace):
    q = {}
    for scheduler in ("hardening", "softening"):
        train(workspace, {**FALCON, "scheduler": scheduler, "quantile_scale": "rank"}, run=scheduler)
        q[scheduler] = [line["q"] for line in logged(workspace, scheduler)]
        assert "reward" not in logged(workspace, scheduler)[0]
    assert q["hardening"][0] == pytest.approx(0.5, abs=0.1)
    assert q["hardening"][-1] == q["softening"][0] == 1.0
    # The very last pair of a search space has no choice.
    assert q["softening"][-1] < 0.85


def test_batches_of_an_accumulated_step_are_each_rewarded_and_resume(workspace: Workspace):
    values = {**EAGER, "accumulate": 2, "checkpoint_steps": 1, "ahead": 3}
    train(workspace, values, run="whole")
    with pytest.raises(Killed):
        train(workspace, values, run="killed", after_step=kill_after(4))
    train(workspace, {}, run="killed", resume=True)
    assert len(logged(workspace, "whole")) == 6
    assert logged(workspace, "killed") == logged(workspace, "whole")
    assert equal(weights(workspace, "killed"), weights(workspace, "whole"))


def test_a_loss_that_is_no_number_leaves_the_state_before_it(workspace: Workspace, monkeypatch: pytest.MonkeyPatch):
    from fnpipe.train.objectives import step

    real, calls = step.itc_loss, list[int]()

    def breaks_in_the_fourth(*arguments: Any) -> torch.Tensor:
        calls.append(1)
        return real(*arguments) * (torch.nan if len(calls) == 4 else 1.0)

    monkeypatch.setattr(step, "itc_loss", breaks_in_the_fourth)
    with pytest.raises(InputError, match=r"step 4, batch 3 \(pair_ids \d+ \d+ \d+ \d+\)"):
        train(workspace, EAGER, run="r")
    monkeypatch.setattr(step, "itc_loss", real)
    train(workspace, {}, run="r", resume=True)
    train(workspace, EAGER, run="whole")
    assert equal(weights(workspace, "r"), weights(workspace, "whole"))


def test_a_picture_that_cannot_be_read_keeps_its_row_and_nothing_else_moves(make_workspace: MakeWorkspace):
    rng = np.random.default_rng(0)
    pictures = [png(flat_colour(i)) for i in range(8)]
    pictures[3] = pictures[3][:30] + bytes(len(pictures[3]) - 30)
    workspace = make_workspace(
        8, pictures=[png(flat_colour(i)) for i in range(8)], embeddings=tuple(rng.normal(size=(2, 8, 4)))
    )  # type: ignore[arg-type]
    broken = make_workspace(8, folder="broken", embeddings=tuple(rng.normal(size=(2, 8, 4))))  # type: ignore[arg-type]
    tar = broken.root / "shards/00000.tar"
    data = tar.read_bytes()
    tar.write_bytes(data.replace(png(flat_colour(3)), pictures[3]))
    assert workspace.n_images == broken.n_images
    train(broken, {**FALCON, "epochs": 2, "search_space": 8}, run="r")
    assert sum(line.get("unreadable", 0) for line in logged(broken, "r")) == 2
    state = state_of(broken, "r")["batches"]
    assert [bool(row.any()) for row in state["images"]] == [i != 3 for i in range(8)]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"groups": "grit-8"}, "groups is grit-8, and falcon constructs its own batches"),
        ({"scheduler": "fixed"}, "say at which quantile"),
        ({"scheduler": "hardening", "quantile": 0.5}, "quantile is 0.5"),
        ({"quantile": 0.5, "policy_level": "batch"}, "policy_level is batch, and a fixed scheduler has no policy"),
        ({"mlm": False}, "mlm is off"),
        ({"search_space": 10}, "no multiple of batch_size 4; the nearest are 8 and 12"),
        ({"quantile": 1.5}, "quantile is 1.5; it must lie between 0.0 and 1.0"),
        ({"policy_alpha": 0.5}, "policy_alpha is 0.5; it must exceed policy_floor"),
        ({"method": "albef", "search_space": None, "quantile": 0.5}, "quantile is 0.5, which only falcon has"),
        ({"embeddings": "none"}, "none"),
        ({"batch_size": 1, "search_space": 4}, "batch_size is 1; it must be at least 2"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(workspace: Workspace, values: dict[str, Any], words: str):
    with pytest.raises(InputError, match=words) as error:
        train(workspace, {**FALCON, **values}, run="r")
    assert "\n" not in str(error.value)
    assert not (workspace.root / "runs").exists()


def test_without_embeddings_it_says_how_to_make_some(make_workspace: MakeWorkspace):
    with pytest.raises(
        InputError, match="no embeddings, which falcon's first epoch looks through; make some with `fnpipe embed"
    ):
        train(make_workspace(8), {**FALCON, "search_space": None}, run="r")


def test_with_several_embeddings_one_must_be_chosen(workspace: Workspace):
    write_embeddings(workspace, "other", np.eye(IMAGES), np.ones((2 * IMAGES, IMAGES)))
    with pytest.raises(InputError, match="clip"):
        train(workspace, FALCON, run="r")
    train(workspace, {**FALCON, "embeddings": "other", "epochs": 1}, run="r")


def test_doubted_pairs_are_left_out(workspace: Workspace):
    import pyarrow as pa

    from fnpipe.pipeline.files import tables

    write_edges(workspace, [(0, 2, 0.9)])
    stage = workspace.stage("edges/made")
    table = {
        "pair_id": np.arange(2 * IMAGES),
        "match_probability": np.repeat(np.arange(IMAGES) >= 10, 2).astype(np.float32),
    }
    scores = stage.place("recorded/part-00000.parquet")
    tables.write_table(scores, pa.table(table))
    stage.list_beside([scores])
    values = {**FALCON, "edges": "made", "min_recorded_probability": 0.5, "epochs": 1, "search_space": 16}
    train(workspace, values, run="r")
    assert len(logged(workspace, "r")) == 4


@pytest.mark.slow
def test_processes_agree_on_the_batches_and_the_policy(workspace: Workspace):
    """Two processes make the two batches of a step; the policy is one. What one of them saved, both go on from."""
    flags = [f"--set={k}={json.dumps(v)}" for k, v in EAGER.items() if k not in ("method", "epochs", "threads")]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv_backend=c10d"]
    command += ["--rdzv_endpoint=localhost:0", "-m", "--", "fnpipe.cli", "train", str(workspace.root)]
    command += ["--method=falcon", "--epochs=2", "--threads=1", "--run=two", *flags]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    lines = logged(workspace, "two")
    assert [line["batch"] for line in lines] == [0, 2, 4] * 2
    state = state_of(workspace, "two")
    assert state["batches"]["used"].sum() == 24
    # The embeddings of both processes' pairs are in the cache of the one that saves.
    assert (state["batches"]["images"].any(1).numpy() >= state["batches"]["used"].numpy()).all()
    assert starting_model(workspace, None, "run:two").training


@pytest.mark.slow
def test_hardness_lies_in_the_last_part_of_the_plain_quantile():
    """Share of true ones among the hardest in-batch negatives, by quantile, on the shipped encoder's embeddings."""
    from fnpipe.pipeline.scenes.dataset import draw
    from fnpipe.train.falcon.chain import construct, pair_similarities
    from fnpipe.train.model.build import load_model
    from fnpipe.train.model.load import SHIPPED

    count, batch = 4096, 64
    scenes, model = draw(count, 5), load_model(SHIPPED["demo"])
    pictures = torch.from_numpy(scenes.pictures()).permute(0, 3, 1, 2)
    with torch.no_grad():
        images = torch.cat([model.encode_image(model.transform.normalise(p))[1] for p in pictures.split(256)]).numpy()
        texts = torch.cat([model.embed_texts(t) for t in model.tokenizer(scenes.captions).split(256)]).numpy()
    true = np.zeros((count, count), bool)
    captions, pictures_of = scenes.truth()
    true[pictures_of, captions] = True

    def share(space: int, q: float) -> float:
        rng, met = np.random.default_rng(0), list[float]()
        for rows in np.split(rng.permutation(count), count // space):
            sims, unused = pair_similarities(images[rows], texts[rows]), np.arange(space)
            for _ in range(16):
                taken = construct(sims, unused, int(rng.choice(unused)), batch, Constant(q, log_scale=False))
                unused = np.setdiff1d(unused, taken)
                ids = rows[taken]
                sim_i2t = images[ids] @ texts[ids].T
                np.fill_diagonal(sim_i2t, -np.inf)
                met.append(float(np.mean(true[ids, ids[sim_i2t.argmax(1)]])))
                met.append(float(np.mean(true[ids[sim_i2t.argmax(0)], ids])))
        return float(np.mean(met))

    for space, least in ((1024, 0.20), (4096, 0.35)):
        shares = {q: share(space, q) for q in (0.25, 0.5, 0.75, 0.9, 0.95, 0.975, 0.99, 0.999, 1.0)}
        assert max(shares[q] for q in (0.25, 0.5, 0.75, 0.9, 0.95)) < 0.08, shares
        assert shares[0.975] < shares[0.99] < shares[0.999] < shares[1.0], shares
        assert shares[1.0] >= least, shares
