"""Truth files: both forms, blocks, and what is refused."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import MakeWorkspace
from fnpipe.mining.data.truth import Truth
from fnpipe.pipeline.errors import InputError

ONE_FIXTURE = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write(path, /, **columns):
    pq.write_table(pa.table(columns), path)
    return path


def test_images_of_one_concept_share_their_captions_and_recorded_pairs_are_true(
    make_workspace: MakeWorkspace, tmp_path
):
    workspace = make_workspace(5, captions=[1, 2, 1, 1, 1])  # pairs 0 | 1 2 | 3 | 4 | 5
    path = write(tmp_path / "t.parquet", image=["0.png", "1.png", "3.png", "9.png"], concept=["a", "b", "a", "b"])
    truth = Truth.read(path, workspace)
    block = truth.matches(np.arange(5)[:, None], np.arange(6)[None, :])
    assert np.argwhere(block).tolist() == [[0, 0], [0, 4], [1, 1], [1, 2], [2, 3], [3, 0], [3, 4], [4, 5]]
    assert truth.matches(np.array([0, 1, 2]), np.array([4, 4, 3])).tolist() == [True, False, True]
    assert truth.form == "concept"
    assert truth.known_images.tolist() == [True, True, False, True, False]
    assert truth.unknown_rows == 1


def test_two_images_without_a_known_concept_do_not_match(make_workspace: MakeWorkspace, tmp_path):
    truth = Truth.read(write(tmp_path / "t.parquet", image=["0.png"], concept=["a"]), make_workspace(3))
    assert not truth.matches(np.array([1]), np.array([2]))[0]


def test_listed_captions_are_true_wherever_the_same_text_is_recorded(make_workspace: MakeWorkspace, tmp_path):
    texts = ["a dog", "an animal", "a cat", " a dog "]
    workspace = make_workspace(4, texts=texts)
    path = write(tmp_path / "t.parquet", image=["0.png", "2.png"], caption=["an animal", "an animal"])
    block = Truth.read(path, workspace).matches(np.arange(4)[:, None], np.arange(4)[None, :])
    # Image 0 and image 3 both record "a dog", so that each matches the other's pair as well.
    assert np.argwhere(block).tolist() == [[0, 0], [0, 1], [0, 3], [1, 1], [2, 1], [2, 2], [3, 0], [3, 3]]


@ONE_FIXTURE
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 9))
def test_both_forms_agree_with_sets(make_workspace: MakeWorkspace, tmp_path_factory, seed, n):
    rng = np.random.default_rng(seed)
    folder = tmp_path_factory.mktemp("truth")
    counts = rng.integers(1, 4, n).tolist()
    owners = np.repeat(np.arange(n), counts)
    texts = [f"text {k}" for k in rng.integers(0, 6, len(owners))]
    workspace = make_workspace(n, captions=counts, texts=texts, folder=str(folder / "ws"))
    images, pairs = np.arange(n)[:, None], np.arange(len(owners))[None, :]

    concepts = rng.integers(0, 3, n)
    path = write(folder / "c.parquet", image=[f"{i}.png" for i in range(n)], concept=concepts)
    expected = [[concepts[i] == concepts[owner] for owner in owners] for i in range(n)]
    assert Truth.read(path, workspace).matches(images, pairs).tolist() == expected

    listed = [(int(i), f"text {k}") for i, k in zip(rng.integers(0, n, 7), rng.integers(0, 8, 7), strict=True)]
    path = write(folder / "l.parquet", image=[f"{i}.png" for i, _ in listed], caption=[c for _, c in listed])
    true = set(listed) | set(zip(owners.tolist(), texts, strict=True))
    expected = [[(i, text) in true for text in texts] for i in range(n)]
    assert Truth.read(path, workspace).matches(images, pairs).tolist() == expected


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"path": ["0.png"], "concept": ["a"]}, "columns path, concept"),
        ({"image": ["0.png"], "label": ["a"]}, "image and concept, or image and caption"),
        ({"image": ["x/0.png"], "concept": ["a"]}, "none of its 1 images"),
        ({"image": pa.array([], pa.string()), "concept": pa.array([], pa.string())}, "none of its 0 images"),
        ({"image": ["0.png", "1.png"], "concept": ["a", None]}, "concept is null in row 1"),
        ({"image": ["0.png", "0.png"], "concept": ["a", "b"]}, "'0.png' has two concepts"),
    ],
)
def test_a_file_that_is_no_truth_of_this_workspace_is_refused(
    make_workspace: MakeWorkspace, tmp_path, columns, message
):
    path = write(tmp_path / "t.parquet", **columns)
    with pytest.raises(InputError, match=message):
        Truth.read(path, make_workspace(2))


def test_a_missing_or_foreign_file_is_refused(make_workspace: MakeWorkspace, tmp_path):
    workspace = make_workspace(2)
    with pytest.raises(InputError, match="no such truth file"):
        Truth.read(tmp_path / "no.parquet", workspace)
    (tmp_path / "t.csv").write_text("image,concept\n0.png,a\n")
    with pytest.raises(InputError, match="not a Parquet file"):
        Truth.read(tmp_path / "t.csv", workspace)


def test_a_path_that_two_sources_share_needs_the_source(make_workspace: MakeWorkspace, tmp_path):
    workspace = make_workspace(2)
    images = pq.read_table(workspace.images_path(0)).to_pylist()
    rows = [{**images[0], "source": "coco"}, {**images[1], "source": "vg", "image": "0.png"}]
    pq.write_table(pa.Table.from_pylist(rows, pq.read_schema(workspace.images_path(0))), workspace.images_path(0))
    with pytest.raises(InputError, match="several images"):
        Truth.read(write(tmp_path / "a.parquet", image=["0.png"], concept=["a"]), workspace)
    told = write(tmp_path / "b.parquet", image=["0.png", "0.png"], concept=["a", "a"], source=["coco", "vg"])
    assert Truth.read(told, workspace).matches(np.array([0]), np.array([1]))[0]
