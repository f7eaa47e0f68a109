"""Planned batches and pairs in torch's own loader: what they hold, and that a resumed loop sees every batch once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from conftest import MakeWorkspace, flat_colour
from fnpipe.mining.plans.config import GroupConfig
from fnpipe.mining.plans.plan import read_plan
from fnpipe.mining.plans.stage import group
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import tables
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.data.sampler import PairDataset, PlanBatchSampler


def pixels(picture):
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def lengths(texts):
    return torch.tensor([[len(text), sum(text.encode())] for text in texts])


def planned(workspace: Workspace, name: str = "g", **config):
    group(workspace, GroupConfig(sampling="random", batch_size=3, name=name, **config))
    return workspace.stage(f"groups/{name}")


@pytest.fixture
def plan(make_workspace: MakeWorkspace):
    """Seven batches of three, in each of two epochs."""
    return planned(make_workspace(21, captions=2), epochs=2)


def by_batch(plan, epoch):
    """The plan's pair_ids, a list for each batch."""
    rows = read_plan(plan, epoch).to_pylist()
    return [[r["pair_id"] for r in rows if r["batch"] == b] for b in range(rows[-1]["batch"] + 1)]


def test_every_process_takes_its_batches_of_the_epoch(plan):
    first, second = (PlanBatchSampler(plan, rank, 2) for rank in range(2))
    assert (len(first), len(second), first.batch_size) == (3, 3, 3)
    for epoch in (0, 1, 3):
        for sampler in (first, second):
            sampler.set_epoch(epoch)
        wanted = by_batch(plan, epoch % 2)
        assert list(first) == wanted[0:6:2]
        assert list(second) == wanted[1:6:2]
    assert list(first) == wanted[0:6:2]
    with pytest.raises(InputError, match="too few for 8 processes"):
        PlanBatchSampler(plan, 7, 8)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_gives_pictures_captions_and_ids(plan, workers: int):
    workspace = plan.workspace
    sampler = PlanBatchSampler(plan)
    dataset = PairDataset(workspace, pixels, lengths)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=workers)
    assert (len(dataset), len(loader)) == (42, 7)
    captions = workspace.read_pairs(["caption"])["caption"].to_pylist()
    for wanted, (pictures, tokens, image_ids, pair_ids) in zip(by_batch(plan, 0), loader, strict=True):
        assert pair_ids.tolist() == wanted
        assert image_ids.tolist() == [pair_id // 2 for pair_id in wanted]
        assert [tuple(p) for p in pictures[:, :, 0, 0].tolist()] == [flat_colour(pair_id // 2) for pair_id in wanted]
        assert torch.equal(tokens, lengths([captions[pair_id] for pair_id in wanted]))
    assert PairDataset(workspace, pixels)[5][1:] == (captions[5], 2, 5)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(epoch=st.integers(0, 2), stop=st.integers(0, 7), again=st.integers(0, 7), world=st.integers(1, 2))
def test_a_loop_that_stops_anywhere_goes_on_with_the_next_batch(plan, epoch, stop, again, world):
    wanted = by_batch(plan, epoch % 2)[: 7 // world * world : world]
    seen, state = [], None
    for steps in (stop, again, 8):
        sampler = PlanBatchSampler(plan, 0, world)
        if state is not None:
            sampler.load_state_dict(state)
        sampler.set_epoch(epoch)
        for batch in sampler.counted(ahead(sampler)):
            seen.append(batch)
            state = sampler.state_dict()
            steps -= 1
            if steps <= 0:
                break
        else:
            state = sampler.state_dict()
    assert seen == wanted
    sampler.set_epoch(epoch + 1)
    assert list(sampler) == by_batch(plan, (epoch + 1) % 2)[: 7 // world * world : world]


def ahead(batches):
    """A loader that has asked for everything before it gives anything."""
    return iter(list(batches))


def test_the_state_counts_what_the_loop_took_and_not_what_workers_fetched(plan):
    sampler = PlanBatchSampler(plan)
    loader = DataLoader(PairDataset(plan.workspace, pixels), batch_sampler=sampler, num_workers=2)
    batches = sampler.counted(loader)
    taken = [next(batches)[3].tolist() for _ in range(2)]
    state = sampler.state_dict()
    batches.close()
    later = PlanBatchSampler(plan)
    later.load_state_dict(state)
    assert [*taken, *later] == by_batch(plan, 0)
    iter(loader)
    with pytest.raises(RuntimeError, match="counted"):
        sampler.state_dict()


def test_a_state_of_another_plan_or_world_is_refused(plan):
    state = PlanBatchSampler(plan).state_dict()
    with pytest.raises(InputError, match="world 1, not 2"):
        PlanBatchSampler(plan, 0, 2).load_state_dict(state)
    with pytest.raises(InputError, match="the state is of plan"):
        PlanBatchSampler(planned(plan.workspace, "other", seed=9)).load_state_dict(state)


def test_a_picture_that_cannot_be_decoded_is_named(make_workspace: MakeWorkspace):
    workspace = make_workspace(3)
    table = tables.read_table(workspace.root / "pairs" / "00000.parquet")
    offset, size = (table[name][1].as_py() for name in ("image_offset", "image_size"))
    tar = workspace.root / "shards" / "00000.tar"
    data = bytearray(tar.read_bytes())
    data[offset : offset + size] = bytes(size)
    tar.write_bytes(data)
    dataset = PairDataset(Workspace.open(workspace.root), pixels)
    with pytest.raises(InputError, match=r"00000\.tar: the picture of image 1 cannot be decoded"):
        dataset[1]


@pytest.mark.parametrize("one_text", [str.lower, lambda text: text.strip()])
def test_a_tokenizer_of_one_text_is_refused_in_one_line(plan, one_text):
    with pytest.raises(InputError, match=r"tokenizer does not take a list of captions \(.*\); it is asked for a whole"):
        PairDataset(plan.workspace, pixels, one_text)[5]
