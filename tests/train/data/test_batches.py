"""Batches: what they hold, and that neither workers, caches nor interruptions change them."""

from __future__ import annotations

from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import MakeWorkspace, flat_colour, png
from fnpipe.mining.data.identity import Identity
from fnpipe.mining.data.train_pairs import read_train_pairs, train_pairs_of
from fnpipe.mining.edges.labels import AMBIGUOUS, POSITIVE, UNSCORED
from fnpipe.mining.edges.lookup import EdgeLookup
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.data.augment import augment_tiny, make_augment, random_resized_crop
from fnpipe.train.data.batches import Batch, DecodingLoader, FittedLoader, Loader, picture_rng
from fnpipe.train.data.pictures import FittedPictures, Samples, is_tar_header
from fnpipe.train.data.plans import RandomBatches, batches_of_rank


def fit(rgb: np.ndarray) -> torch.Tensor:
    """The picture's corner, as a stand-in for resizing."""
    return torch.from_numpy(np.array(rgb[:8, :8])).permute(2, 0, 1)


def tokenize(captions: Any) -> torch.Tensor:
    return torch.tensor([[len(text), sum(text.encode())] for text in captions])


def make_loader(workspace: Workspace, *, workers: int = 0, plain: bool = False, **parts: Any) -> Loader:
    samples = Samples.of(workspace)
    if "pixels" not in parts:
        pictures = FittedPictures(samples, fit, 8, np.arange(workspace.n_images), 1 << 20)
        parts["pixels"] = FittedLoader(pictures, 0, flip=False, plain=plain)
    return Loader(samples=samples, tokenize=tokenize, workers=workers, **{"edges": None, "identity": None, **parts})


def same(a: Batch, b: Batch) -> bool:
    return (
        (a.epoch, a.number) == (b.epoch, b.number)
        and np.array_equal(a.pair_ids, b.pair_ids)
        and torch.equal(a.pixels, b.pixels)
        and torch.equal(a.ids, b.ids)
    )


def test_a_batch_holds_the_pictures_and_captions_of_its_rows(make_workspace: MakeWorkspace):
    workspace = make_workspace(7, captions=2)
    source = RandomBatches(read_train_pairs(workspace), 3, seed=5)
    plan = source.epoch(0)
    batches = list(make_loader(workspace, plain=True).batches(plan, 0, range(len(plan))))
    assert [len(b) for b in batches] == [3, 3]
    for batch in batches:
        for row, (image_id, pair_id) in enumerate(zip(batch.image_ids, batch.pair_ids, strict=True)):
            assert pair_id // 2 == image_id
            assert tuple(batch.pixels[row, :, 0, 0].tolist()) == flat_colour(int(image_id))
        expected = tokenize(workspace.read_pairs(["caption"])["caption"].take(batch.pair_ids.tolist()).to_pylist())
        assert torch.equal(batch.ids, expected)
        assert batch.label is None
        assert torch.equal(batch.recorded, torch.eye(3, dtype=torch.bool))


@pytest.mark.parametrize("workers", [0, 2])
def test_loading_may_begin_at_any_batch_with_any_number_of_workers(make_workspace: MakeWorkspace, workers: int):
    workspace = make_workspace(12)
    plan = RandomBatches(read_train_pairs(workspace), 3, seed=5).epoch(4)
    whole = list(make_loader(workspace).batches(plan, 4, range(4)))
    rest = list(make_loader(workspace, workers=workers).batches(plan, 4, range(2, 4)))
    assert len(rest) == 2
    assert all(same(a, b) for a, b in zip(whole[2:], rest, strict=True))


def test_processes_that_decode_end_well(make_workspace: MakeWorkspace, monkeypatch: pytest.MonkeyPatch):
    """The loader's guard of its processes stops a run whenever it happens to see one that ended with an error."""
    started: list[ForkProcess] = []
    start = ForkProcess.start
    monkeypatch.setattr(ForkProcess, "start", lambda process: started.append(process) or start(process))
    plan = RandomBatches(read_train_pairs(workspace := make_workspace(12)), 3, seed=5).epoch(4)
    assert len(list(make_loader(workspace, workers=2).batches(plan, 4, range(4)))) == 4
    assert [process.exitcode for process in started] == [0, 0]


def test_random_batches_of_all_captions_hold_each_once_and_no_image_twice():
    members = train_pairs_of(np.arange(21), np.sort(np.arange(21) % 9))
    plan = RandomBatches(members, 4, seed=1, captions="all").epoch(3)
    # 9 images have two captions at least, 3 of them a third: 2 + 2 + 0 batches.
    assert [len(set(plan.batch(b)[0])) for b in range(len(plan))] == [4, 4, 4, 4]
    assert len(set(plan.pair_ids)) == 16
    assert members.batches_of_rounds(4) == 4
    assert np.array_equal(members.image_ids[plan.pair_ids], plan.image_ids)


def test_random_batches_show_every_caption_in_turn_and_differ_by_epoch():
    members = train_pairs_of(np.arange(20), np.arange(20) // 2)
    source = RandomBatches(members, 4, seed=1)
    first, second = source.epoch(0), source.epoch(1)
    assert len(first) == 2
    assert len(set(first.image_ids)) == 8
    assert not np.array_equal(first.image_ids, second.image_ids)
    both = {(i, p) for e in (first, second) for i, p in zip(e.image_ids, e.pair_ids, strict=True)}
    repeated = set(first.image_ids) & set(second.image_ids)
    assert all(sum(image == i for i, _ in both) == 2 for image in repeated)
    assert np.array_equal(RandomBatches(members, 4, seed=1).epoch(1).pair_ids, second.pair_ids)
    assert not np.array_equal(RandomBatches(members, 4, seed=2).epoch(1).pair_ids, second.pair_ids)


def test_fewer_images_than_a_batch_make_one_batch():
    source = RandomBatches(train_pairs_of(np.arange(3), np.arange(3)), 64, seed=0)
    assert source.batch_size == 3
    assert sorted(source.epoch(0).batch(0)[0]) == [0, 1, 2]


@given(n=st.integers(0, 40), world=st.integers(1, 9))
def test_ranks_share_the_batches_evenly_and_none_twice(n: int, world: int):
    parts = [batches_of_rank(n, rank, world) for rank in range(world)]
    assert len({len(p) for p in parts}) == 1
    together = sorted(b for p in parts for b in p)
    assert together == list(range(n - n % world))


def test_a_kept_picture_equals_a_decoded_one_and_is_decoded_once(make_workspace: MakeWorkspace):
    samples = Samples.of(make_workspace(9))
    calls = []

    def counted(rgb: np.ndarray) -> torch.Tensor:
        calls.append(1)
        return fit(rgb)

    kept = FittedPictures(samples, counted, 8, np.arange(9), 9 * 192)
    ids = np.array([4, 8, 4, 0])
    first, second = kept.take(ids), kept.take(ids)
    assert len(calls) == 3
    beyond = FittedPictures(samples, counted, 8, np.arange(9), 9 * 192 - 1)
    assert torch.equal(first, second)
    assert torch.equal(first, beyond.take(ids))
    assert len(calls) == 7


@pytest.mark.parametrize("kind", ["tiny", "full"])
def test_an_undecodable_picture_leaves_its_batch_and_is_counted(make_workspace: MakeWorkspace, kind: str):
    pictures = [png(flat_colour(i)) for i in range(6)]
    pictures[2] = pictures[2][:30]
    workspace = make_workspace(5, pictures=[*pictures[:2], png((1, 2, 3)), *pictures[3:]])
    damage(workspace, image_id=2)
    plan = RandomBatches(read_train_pairs(workspace), 5, seed=0).epoch(0)
    parts: dict[str, Any] = {}
    if kind == "full":
        parts["pixels"] = DecodingLoader(Samples.of(workspace), 8, make_augment("albef", 8, True, fit), 0)
    (batch,) = make_loader(workspace, **parts).batches(plan, 0, [0])
    assert sorted(batch.image_ids) == [0, 1, 3, 4]
    assert batch.unreadable == 1
    assert batch.pixels.shape[0] == batch.ids.shape[0] == 4


def damage(workspace: Workspace, image_id: int) -> None:
    """Overwrite a picture's bytes in its tar."""
    samples = Samples.of(workspace)
    with Path(samples.urls[samples.shard[image_id]]).open("r+b") as file:
        file.seek(int(samples.offset[image_id]))
        file.write(b"\0" * int(samples.size[image_id]))


def test_a_batch_without_any_readable_picture_is_the_inputs_fault(make_workspace: MakeWorkspace):
    workspace = make_workspace(2)
    damage(workspace, 0)
    damage(workspace, 1)
    plan = RandomBatches(read_train_pairs(workspace), 2, seed=0).epoch(0)
    with pytest.raises(InputError, match="batch 0"):
        list(make_loader(workspace).batches(plan, 0, [0]))


def test_labels_come_with_the_batch_and_what_is_identical_counts_as_recorded(make_workspace: MakeWorkspace):
    pictures = [png(flat_colour(i)) for i in (0, 0, 2, 3)]
    workspace = make_workspace(4, pictures=pictures, texts=["a", "b", "c", "a "])
    # Image 1 is image 0's picture, so "a" is true of it; pair 3's text is "a" as well, so it is true of both.
    lookup = EdgeLookup(
        4, np.array([2 * 4 + 0, 3 * 4 + 1]), np.array([0.6, 0.9], np.float32), np.array([1, 2], np.int8)
    )
    plan = RandomBatches(read_train_pairs(workspace), 4, seed=0).epoch(0)
    loader = make_loader(workspace, edges=lookup, identity=Identity.of(workspace))
    (batch,) = loader.batches(plan, 0, [0])
    place = {int(i): row for row, i in enumerate(batch.image_ids)}
    assert batch.label is not None
    found = {
        (i, j): int(batch.label[place[i], place[j]])
        for i in range(4)
        for j in range(4)
        if int(batch.label[place[i], place[j]]) != UNSCORED
    }
    assert found == {
        (2, 0): AMBIGUOUS,
        (3, 1): POSITIVE,
    }
    # Without edges as with them.
    (plain,) = make_loader(workspace, identity=Identity.of(workspace)).batches(plan, 0, [0])
    for recorded in (batch.recorded, plain.recorded):
        marked = {(int(batch.image_ids[i]), int(batch.pair_ids[j])) for i, j in recorded.nonzero().tolist()}
        assert marked == {*((i, i) for i in range(4)), (1, 0), (0, 1), (0, 3), (1, 3), (3, 0)}


def test_two_captions_of_one_image_in_a_batch_are_recorded_not_mined(make_workspace: MakeWorkspace):
    workspace = make_workspace(2, captions=2)
    loader = make_loader(workspace, edges=EdgeLookup(4, *no_edges()), identity=Identity.of(workspace))
    plan = RandomBatches(read_train_pairs(workspace), 2, seed=0).epoch(0)
    batch = loader.collate(
        type(plan)(np.array([0, 2]), np.array([1, 1]), np.array([2, 3])),
        0,
        0,
        torch.zeros(2, 3, 8, 8),
        np.ones(2, bool),
    )
    assert bool(batch.recorded.all())
    assert batch.label is not None
    assert bool((batch.label == UNSCORED).all())


def no_edges() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.int8)


def test_a_damaged_or_missing_shard_is_found_before_training(make_workspace: MakeWorkspace):
    workspace = make_workspace(12)
    samples = Samples.of(workspace)
    samples.check(workspace)
    last = Path(samples.urls[2])
    whole = last.read_bytes()
    last.write_bytes(whole[:700])
    with pytest.raises(InputError, match=r"00002\.tar: damaged"):
        samples.check(workspace)
    last.write_bytes(whole[512:] + bytes(512))
    with pytest.raises(InputError, match=r"00002\.tar: damaged"):
        samples.check(workspace)
    last.unlink()
    with pytest.raises(InputError, match=r"00002\.tar: cannot be read"):
        samples.check(workspace)


def test_a_tar_header_is_known_by_its_checksum_and_size(make_workspace: MakeWorkspace):
    samples = Samples.of(make_workspace(1))
    block = Path(samples.urls[0]).read_bytes()[:512]
    size = int(samples.size[0])
    assert is_tar_header(block, size)
    assert not is_tar_header(block, size + 1)
    assert not is_tar_header(bytes(512), 0)
    assert not is_tar_header(b"x" + block[1:], size)


@pytest.mark.parametrize("kind", ["albef", "open-clip", "none"])
@pytest.mark.parametrize("shape", [(40, 30), (7, 200), (1, 1)])
def test_augmenting_gives_the_input_size_and_depends_on_its_generator_alone(kind: str, shape: tuple[int, int]):
    rgb = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)

    def resize(picture: np.ndarray) -> torch.Tensor:
        return torch.full((3, 16, 16), int(picture[0, 0, 0]), dtype=torch.uint8)

    augment = make_augment(kind, 16, True, resize)
    for epoch in range(4):
        torch.manual_seed(epoch)
        first, second = (augment(rgb, picture_rng(1, epoch, 7)) for _ in range(2))
        assert first.shape == (3, 16, 16)
        assert first.dtype == torch.uint8
        assert torch.equal(first, second)


def test_the_tiny_augmentation_is_mild_and_mirrors_only_when_asked():
    picture = torch.zeros((1, 3, 32, 32), dtype=torch.uint8)
    picture[:, 0, :, :16], picture[:, 2, :, 16:] = 200, 200
    rngs = [picture_rng(0, 0, i) for i in range(64)]
    out = augment_tiny(picture.expand(64, -1, -1, -1), rngs, flip=False).float()
    assert bool((out[:, 0, :, :10].mean((1, 2)) > 130).all())
    assert bool((out[:, 2, :, 22:].mean((1, 2)) > 130).all())
    mirrored = augment_tiny(
        picture.expand(64, -1, -1, -1), [picture_rng(0, 0, i) for i in range(64)], flip=True
    ).float()
    share_mirrored = float((mirrored[:, 2, :, :10].mean((1, 2)) > 130).float().mean())
    assert 0.25 < share_mirrored < 0.75


@settings(max_examples=20)
@given(height=st.integers(1, 60), width=st.integers(1, 60), seed=st.integers(0, 1000))
def test_a_crop_of_any_picture_has_the_size_asked_for(height: int, width: int, seed: int):
    picture = torch.zeros((3, height, width), dtype=torch.uint8)
    out = random_resized_crop(picture, 12, (0.2, 1.0), np.random.default_rng(seed))
    assert out.shape == (3, 12, 12)
