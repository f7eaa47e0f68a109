"""Plans: every image once, chains as defined, batches shuffled whole."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from conftest import MakeWorkspace
from fnpipe.mining.data.train_pairs import read_train_pairs
from fnpipe.mining.graph.stage import GraphConfig, build_graph
from fnpipe.mining.plans.chain import grit_order
from fnpipe.mining.plans.config import GroupConfig, parse_search_space
from fnpipe.mining.plans.plan import PLAN_SCHEMA, plan_epochs, read_plan
from fnpipe.mining.plans.stage import group
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.workspace.embeddings import Embeddings
from fnpipe.pipeline.workspace.workspace import Workspace


@pytest.fixture
def clustered(make_workspace: MakeWorkspace) -> Workspace:
    """50 images in 5 topics, one to three captions each, the last two of another split."""
    rng = np.random.default_rng(0)
    captions = rng.integers(1, 4, 50).tolist()
    topics = rng.normal(size=(5, 16))
    topic = rng.integers(0, 5, 50)
    images = topics[topic] + 0.5 * rng.normal(size=(50, 16))
    texts = topics[np.repeat(topic, captions)] + 0.5 * rng.normal(size=(sum(captions), 16))
    splits = ["train"] * 48 + ["test"] * 2
    return make_workspace(50, captions=captions, embeddings=(images, texts), splits=splits, images_per_shard=7)


def plan_of(workspace: Workspace, epoch: int = 0, **config):
    summary = group(workspace, GroupConfig(**config))
    return read_plan(workspace.stage(f"groups/{summary.groups}"), epoch)


def batches_of(plan, column="image_id"):
    number = plan["batch"].to_numpy()
    return [plan[column].to_numpy()[number == b].tolist() for b in range(number.max() + 1)]


@pytest.mark.parametrize("config", [
    {"sampling": "random"}, {"search_space": 12}, {"search_space": 24}, {"search_space": 96}, {"search_space": "all"},
])  # fmt: skip
@pytest.mark.parametrize("keep_last", [False, True])
def test_a_plan_holds_every_train_image_once_with_one_of_its_captions(clustered, config, keep_last):
    if config.get("search_space") == "all":
        build_graph(clustered, GraphConfig(k=4))
    plan = plan_of(clustered, batch_size=5 if config.get("sampling") else 6, keep_last=keep_last, **config)
    assert plan.schema.equals(PLAN_SCHEMA)
    images = plan["image_id"].to_pylist()
    assert len(set(images)) == len(images)
    expected = 48 if keep_last or not config.get("sampling") else 45
    assert len(images) == expected
    assert set(images) <= set(range(48))
    own = clustered.read_pairs(["pair_id", "image_id"])
    image_of = dict(zip(own["pair_id"].to_pylist(), own["image_id"].to_pylist(), strict=True))
    assert [image_of[p] for p in plan["pair_id"].to_pylist()] == images
    sizes = [len(batch) for batch in batches_of(plan)]
    assert sizes[:-1] == [sizes[0]] * (len(sizes) - 1)
    slots = plan["slot"].to_pylist()
    assert slots == [slot for size in sizes for slot in range(size)]


def test_one_search_space_of_everything_is_the_chain_cut_into_batches(clustered):
    plan = plan_of(clustered, batch_size=6, search_space=48)
    embeddings = Embeddings.open(clustered)
    ids = np.arange(48)
    pair_of = dict(zip(plan["image_id"].to_pylist(), plan["pair_id"].to_pylist(), strict=True))
    images = embeddings.images.take(ids)
    texts = embeddings.texts.take(np.array([pair_of[i] for i in range(48)]))
    chains = [grit_order(images, texts, start=start).reshape(-1, 6).tolist() for start in range(48)]
    planned = batches_of(plan)
    matching = [chain for chain in chains if sorted(chain) == sorted(planned)]
    assert len(matching) == 1, "the batches are those of the chain from one start"
    assert planned not in matching, "and their order is shuffled"


def test_search_spaces_do_not_mix(clustered):
    small = batches_of(plan_of(clustered, batch_size=12, search_space=12))
    random = batches_of(plan_of(clustered, batch_size=12, sampling="random"))
    assert sorted(map(sorted, small)) == sorted(map(sorted, random)), "same shuffle, same spaces"


def test_how_many_rows_are_read_at_a_time_changes_no_plan(clustered, monkeypatch):
    whole = plan_of(clustered, batch_size=6, search_space=12)
    monkeypatch.setattr("fnpipe.mining.plans.search_spaces._READ_ROWS", 12)
    assert plan_of(clustered, batch_size=6, search_space=12, name="in-parts").equals(whole)


def similarity_of_neighbours(workspace, plan):
    embeddings = Embeddings.open(workspace)
    images, texts = (
        embeddings.images.take(plan["image_id"].to_numpy()),
        embeddings.texts.take(plan["pair_id"].to_numpy()),
    )
    return float((images[:-1] * texts[1:]).sum(axis=1).mean())


def test_larger_search_spaces_put_more_similar_pairs_side_by_side(clustered):
    build_graph(clustered, GraphConfig(k=8))
    random, small, every = (
        similarity_of_neighbours(clustered, plan_of(clustered, batch_size=12, **config))
        for config in ({"sampling": "random"}, {"search_space": 12}, {"search_space": "all"})
    )
    assert random + 0.1 < small < every


def test_epochs_differ_and_the_same_seed_gives_the_same_bytes(clustered):
    config = {"batch_size": 6, "search_space": 12, "epochs": 3}
    group(clustered, GroupConfig(name="a", **config))
    group(clustered, GroupConfig(name="b", **config))
    group(clustered, GroupConfig(name="c", seed=1, **config))
    a, b, c = (clustered.stage(f"groups/{name}") for name in "abc")
    assert a.digest == b.digest != c.digest
    assert plan_epochs(a) == 3
    assert len({tuple(read_plan(a, epoch)["image_id"].to_pylist()) for epoch in range(3)}) == 3
    assert read_plan(a, 4).equals(read_plan(a, 1)), "training goes round the planned epochs"
    # A digit that changed on disk leaves no epoch out without a word.
    meta = a.require()
    a.write_meta({**meta, "params": {**meta["params"], "epochs": 2}})
    with pytest.raises(InputError, match=r"damaged \(2 epochs, and 3 listed\)"):
        plan_epochs(a)


@pytest.mark.parametrize("sampling", ["random", "grit"])
def test_the_order_of_images_is_drawn_by_seed_and_epoch(make_workspace: MakeWorkspace, sampling: str):
    rng = np.random.default_rng(0)
    # One caption an image, so that nothing else differs from epoch to epoch.
    workspace = make_workspace(24, embeddings=(rng.normal(size=(24, 4)), rng.normal(size=(24, 4))))
    config = {"sampling": sampling, "batch_size": 4, "search_space": 8, "epochs": 2}
    orders = {
        tuple(plan_of(workspace, epoch, name=f"s{seed}", seed=seed, **config)["image_id"].to_pylist())
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(orders) == 4


def test_captions_take_turns_evenly(clustered):
    group(clustered, GroupConfig(name="g", batch_size=6, search_space=12, epochs=6))
    stage = clustered.stage("groups/g")
    seen = Counter(p for epoch in range(6) for p in read_plan(stage, epoch)["pair_id"].to_pylist())
    counts = Counter(clustered.read_pairs(["image_id"], split="train")["image_id"].to_pylist())
    image_of = clustered.read_pairs(["pair_id", "image_id"], split="train")
    for pair, image in zip(image_of["pair_id"].to_pylist(), image_of["image_id"].to_pylist(), strict=True):
        assert seen[pair] == 6 // counts[image]


@pytest.mark.parametrize("config", [
    {"sampling": "random"}, {"search_space": 12}, {"search_space": 12, "quantile": 0.9}, {"search_space": "all"},
])  # fmt: skip
def test_all_captions_are_planned_once_and_no_batch_holds_an_image_twice(clustered, config):
    if config.get("search_space") == "all":
        build_graph(clustered, GraphConfig(k=4))
    summary = group(clustered, GroupConfig(name="g", captions="all", batch_size=4, epochs=3, **config))
    pairs = clustered.read_pairs(["pair_id", "image_id"], split="train").to_pydict()
    image_of = dict(zip(pairs["pair_id"], pairs["image_id"], strict=True))
    counts = Counter(pairs["image_id"])
    # Round after round, an image with n captions is in the first n; what fills no batch of a round is left over.
    rounds = [sum(count > n for count in counts.values()) for n in range(max(counts.values()))]
    planned = sum(size // 4 * 4 for size in rounds)
    assert (summary.images, summary.planned, summary.dropped) == (48, planned, len(image_of) - planned)
    stage, seen = clustered.stage("groups/g"), Counter[int]()
    for epoch in range(3):
        plan = read_plan(stage, epoch)
        chosen = plan["pair_id"].to_pylist()
        assert len(set(chosen)) == len(chosen) == planned
        assert plan["image_id"].to_pylist() == [image_of[pair] for pair in chosen]
        assert all(len(set(batch)) == 4 for batch in batches_of(plan))
        seen.update(chosen)
    assert set(seen) == set(image_of), "what one epoch leaves over another one has"


def test_all_captions_and_an_incomplete_batch_do_not_go_together():
    with pytest.raises(InputError, match="an image twice"):
        GroupConfig(captions="all", keep_last=True)
    with pytest.raises(InputError, match="one of one, all"):
        GroupConfig(captions="both")


def test_the_first_epoch_shows_any_of_an_images_captions(make_workspace: MakeWorkspace):
    members = read_train_pairs(make_workspace(200, captions=3))
    shown = members.captions_of_epoch(0, seed=0) % 3
    assert min(np.bincount(shown, minlength=3)) > 40
    assert (members.captions_of_epoch(0, seed=1) % 3 != shown).any()


def test_random_plans_need_no_embeddings_and_grit_plans_do(make_workspace: MakeWorkspace):
    workspace = make_workspace(10)
    assert group(workspace, GroupConfig(sampling="random", batch_size=4)).dropped == 2
    with pytest.raises(InputError, match="fnpipe embed"):
        group(workspace, GroupConfig(batch_size=4, search_space=8))


def test_bad_embeddings_are_not_planned(make_workspace: MakeWorkspace):
    images, texts = np.ones((8, 4)), np.ones((8, 4))
    images[2] = texts[5] = 0
    workspace = make_workspace(8, embeddings=(images, texts))
    planned = plan_of(workspace, batch_size=2, search_space=4)["image_id"].to_pylist()
    assert sorted(planned) == [0, 1, 3, 4, 6, 7]


def test_a_killed_plan_goes_on_and_ends_in_the_same_bytes(clustered):
    config = GroupConfig(batch_size=6, search_space=12, epochs=3)
    group(clustered, config)
    stage = clustered.stage("groups/grit-12")
    digest, second = stage.digest, (stage.path / "epoch-001.parquet")
    second.unlink()
    (stage.path / "meta.json").write_text(
        (stage.path / "meta.json").read_text().replace('"complete": true', '"complete": false')
    )
    group(clustered, config)
    assert stage.digest == digest


@pytest.mark.parametrize(("space", "near"), [(1900, "1792 and 1920"), (5, "128 and 256"), (130, "128 and 256")])
def test_a_search_space_that_is_no_multiple_of_the_batch_names_the_two_nearest(space, near):
    with pytest.raises(InputError, match=near):
        GroupConfig(search_space=space, batch_size=128)


def test_a_search_space_that_does_not_fit_into_memory_is_refused(clustered, monkeypatch):
    from fnpipe.mining.plans import stage as grouping

    monkeypatch.setattr(grouping, "total_memory", lambda: 2 * 4 * 47**2)
    with pytest.raises(InputError, match="or all, which walks"):
        group(clustered, GroupConfig(batch_size=6, search_space=48))
    assert group(clustered, GroupConfig(batch_size=6, search_space=42)).images == 48


def test_batches_of_one_pair_are_refused():
    with pytest.raises(InputError, match="--batch-size 1: at least 2"):
        GroupConfig(sampling="random", batch_size=1)


def test_a_walk_that_does_not_fit_into_memory_is_refused(clustered, monkeypatch):
    from fnpipe.mining.plans import stage as grouping
    from fnpipe.mining.plans.graph_walk import walk_bytes

    build_graph(clustered, GraphConfig(k=5))
    config = GroupConfig(batch_size=6, search_space="all")
    needed = walk_bytes(48, 5, Embeddings.open(clustered).width)
    monkeypatch.setattr(grouping, "total_memory", lambda: needed - 1)
    with pytest.raises(InputError, match=r"the walk over 48 images takes about .* GiB of memory, and there are"):
        group(clustered, config)
    assert not clustered.names("groups")
    monkeypatch.setattr(grouping, "total_memory", lambda: needed)
    assert group(clustered, config).images == 48


@pytest.mark.parametrize("text", ["0", "-4", "many", "1.5", "²"])
def test_a_search_space_that_is_no_number_is_refused(text):
    with pytest.raises(InputError, match="number of pairs, or all"):
        parse_search_space(text)


def test_fewer_images_than_a_batch_takes_is_refused_before_anything_is_written(make_workspace: MakeWorkspace):
    workspace = make_workspace(5)
    with pytest.raises(InputError, match="5 images make no batch of 8"):
        group(workspace, GroupConfig(sampling="random", batch_size=8))
    assert not (workspace.root / "groups").exists()
    assert group(workspace, GroupConfig(sampling="random", batch_size=8, keep_last=True)).batches == 1
