"""Evaluation: the figures of a model and of stored embeddings, against a plain computation."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import TESTS, MakeWorkspace, flat_colour, png, write_embeddings
from fnpipe.cli.main import run as run_cli
from fnpipe.mining.data.truth import Truth
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.images.transform import Transform
from fnpipe.pipeline.workspace.embeddings import Embeddings
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.data.pictures import Samples
from fnpipe.train.evaluation import both_scores
from fnpipe.train.evaluation import retrieval as evaluate
from fnpipe.train.evaluation.queries import read_queries, usable_queries
from fnpipe.train.evaluation.retrieval import evaluate_embeddings, evaluate_model, true_pairs
from fnpipe.train.model.build import build_model
from fnpipe.train.model.config import ModelConfig
from fnpipe.train.model.model import VLModel


@pytest.fixture(scope="module")
def model() -> VLModel:
    torch.manual_seed(0)
    return build_model(ModelConfig()).eval()


class SameTokens:
    """A tokenizer that does not read exclamation marks."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer = tokenizer

    def __call__(self, captions):
        return self.tokenizer([caption.replace("!", "") for caption in captions])

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)


def noise_pictures(n: int) -> list[bytes]:
    """Pictures that a fresh model tells apart better than flat ones."""
    import io

    from PIL import Image

    rng = np.random.default_rng(0)
    out = []
    for _ in range(n):
        buffer = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8)).save(buffer, "PNG")
        out.append(buffer.getvalue())
    return out


@torch.inference_mode()
def plain_scores(workspace: Workspace, model: VLModel) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and ITM logits of every (image, caption), one at a time."""
    samples = Samples.of(workspace)
    transform = Transform.of(dict(model.config.preprocess or {}))
    texts = samples.captions.to_pylist()
    cosines = np.zeros((workspace.n_images, workspace.n_pairs))
    logits = np.zeros_like(cosines)
    for i, data in enumerate(samples.read(np.arange(workspace.n_images))):
        rgb = samples.decoded(data)
        assert rgb is not None
        tokens, image = model.encode_image(transform.normalise(transform(rgb)[None]))
        keys = model.image_keys(tokens)
        for j, caption in enumerate(texts):
            ids = model.tokenizer([caption])
            text_tokens, text = model.encode_text(ids)
            fused = model.fuse(text_tokens, model.text_mask(ids), keys, torch.tensor([0]))
            one = model.itm_logits(fused)[0]
            cosines[i, j], logits[i, j] = float((image @ text.T)[0, 0]), float(one[1] - one[0])
    return cosines, logits


def recall(order: list[list[int]], own: list[set[int]], k: int) -> float:
    return 100 * float(np.mean([bool(set(row[:k]) & mine) for row, mine in zip(order, own, strict=True)]))


@pytest.mark.parametrize("top_k", [2, 5])
def test_figures_of_a_model_are_those_of_one_pair_at_a_time(make_workspace: MakeWorkspace, model: VLModel, top_k: int):
    words = ["red", "blue", "round", "small", "dog", "house", "tree", "car", "north", "seven"]
    texts = [f"{words[i % 10]} {words[(3 * i + 1) % 10]} {'very ' * (i % 4)}thing {i}" for i in range(14)]
    workspace = make_workspace(7, captions=2, texts=texts, pictures=noise_pictures(7))
    queries = read_queries(workspace, "all")
    found = evaluate_model(
        workspace, model, queries, rerank=True, top_k=top_k, dual_weights=both_scores.DUAL_WEIGHTS, quiet=True
    )
    cosines, logits = plain_scores(workspace, model)
    both = {weight: logits + weight * cosines / model.temp.item() for weight in both_scores.DUAL_WEIGHTS}
    assert found["by_weight"][0.0] == found["itm"]
    by_rsum = {weight: figures["rsum"] for weight, figures in found["by_weight"].items()}
    fitted = both_scores.fit_dual_weight(workspace, model, queries, top_k=top_k)
    assert fitted == min(weight for weight in by_rsum if by_rsum[weight] == max(by_rsum.values()))
    own = [{2 * i, 2 * i + 1} for i in range(7)]
    owner = [{j // 2} for j in range(14)]
    for side, sims, itm, mine in (("tr", cosines, logits, own), ("ir", cosines.T, logits.T, owner)):
        dual = [sorted(range(len(row)), key=lambda c, row=row: -row[c]) for row in sims]
        again = [sorted(o[:top_k], key=lambda c, r=r: -itm[r][c]) + o[top_k:] for r, o in enumerate(dual)]
        for k in (1, 5, 10):
            assert found["dual"][f"{side}_r{k}"] == pytest.approx(recall(dual, mine, k))
            assert found["itm"][f"{side}_r{k}"] == pytest.approx(recall(again, mine, k))
        for weight, score in both.items():
            summed = score if side == "tr" else score.T
            again = [sorted(o[:top_k], key=lambda c, r=r: -summed[r][c]) + o[top_k:] for r, o in enumerate(dual)]
            for k in (1, 5, 10):
                assert found["by_weight"][weight][f"{side}_r{k}"] == pytest.approx(recall(again, mine, k))


def test_several_lists_are_judged_once_and_measured_as_each_alone(
    make_workspace: MakeWorkspace, model: VLModel, monkeypatch: pytest.MonkeyPatch
):
    workspace = make_workspace(7, captions=2, pictures=noise_pictures(7))
    queries, asked = read_queries(workspace, "all"), {"rerank": True, "dual_weights": (0.5,), "quiet": True}
    alone = {k: evaluate_model(workspace, model, queries, top_k=k, **asked) for k in (2, 5, 3)}
    judged = []
    match = evaluate._Encoder.match
    monkeypatch.setattr(evaluate._Encoder, "match", lambda *given: judged.append(len(given[2])) or match(*given))
    found = evaluate_model(workspace, model, queries, top_k=(2, 5, 3), **asked)
    assert judged == [5 * (7 + 14)]
    assert found["top_k"] == 2
    for kind in ("dual", "itm", "by_weight"):
        assert found[kind] == alone[2][kind]
    assert found["by_top_k"] == {str(k): {kind: one[kind] for kind in ("itm", "by_weight")} for k, one in alone.items()}


def test_equal_pictures_and_equal_captions_are_ties_whatever_batch_they_stand_in(
    make_workspace: MakeWorkspace, model: VLModel, monkeypatch: pytest.MonkeyPatch
):
    # Four pictures that differ in bytes alone, with one caption of four spellings: chance decides among them.
    pictures = [png(flat_colour(1)) + bytes(i) for i in range(4)]
    workspace = make_workspace(4, texts=[f"the same{'!' * i} words" for i in range(4)], pictures=pictures)
    monkeypatch.setattr(evaluate, "ENCODE_BATCH", 3)
    monkeypatch.setattr(model, "tokenizer", SameTokens(model.tokenizer))
    found = evaluate_model(workspace, model, read_queries(workspace), rerank=True, quiet=True)
    assert found["dual"]["tr_r1"] == found["itm"]["tr_r1"] == pytest.approx(25)
    assert found["dual"]["ir_r1"] == found["itm"]["ir_r1"] == pytest.approx(25)


def test_copies_of_a_picture_and_of_a_text_are_right_with_what_any_of_them_is_recorded_with(
    make_workspace: MakeWorkspace, model: VLModel
):
    # Images 0 and 2 are one picture; "b" is recorded with it and with image 3.
    pictures = [png(flat_colour(i)) for i in (0, 1, 0, 2)]
    workspace = make_workspace(4, texts=["a", "c", "b ", "b"], pictures=pictures)
    queries = read_queries(workspace, "all")
    assert (queries.image_ids.tolist(), queries.image_rows.tolist()) == ([0, 1, 3], [0, 1, 0, 2])
    assert (queries.copies.tolist(), queries.copy_rows.tolist()) == ([2], [0])
    recorded = queries.recorded
    assert [recorded.items[a:b].tolist() for a, b in pairwise(recorded.starts)] == [[0, 2, 3], [1], [2, 3]]
    found = evaluate_model(workspace, model, queries, rerank=False, quiet=True)
    assert (found["images"], found["captions"], found["copies"]) == (3, 4, 1)
    assert found["notes"] == [
        "1 of the images of all repeat another's bytes; images of equal bytes count as one picture: 3 pictures",
        "1 of the 4 captions of all repeat another's text; a text is right for every picture that it is recorded with",
    ]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 7), bad=st.booleans())
def test_recorded_and_true_agree_with_the_rule_in_its_own_words(
    make_workspace: MakeWorkspace, tmp_path_factory: pytest.TempPathFactory, seed: int, n: int, bad: bool
):
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 4, n)
    owners = np.repeat(np.arange(n), counts)
    pictures, texts = rng.integers(0, 4, n), rng.integers(0, 5, len(owners))
    vectors = rng.normal(size=(n, 3)), rng.normal(size=(len(owners), 3))
    for rows in vectors if bad else ():
        rows[rng.random(len(rows)) < 0.3] = 0
    workspace = make_workspace(
        n,
        captions=counts.tolist(),
        texts=[f"text {t}{' ' * int(rng.integers(0, 2))}" for t in texts],
        pictures=[png(flat_colour(int(p))) for p in pictures],
        embeddings=vectors,
        folder=str(tmp_path_factory.mktemp("queries") / "ws"),
    )
    concepts = rng.integers(0, 3, n)
    table = {"image": [f"{i}.png" for i in range(n)], "concept": [str(c) for c in concepts]}
    path = workspace.root / "truth.parquet"
    pq.write_table(pa.table(table), path)
    embeddings, everything = Embeddings.open(workspace), read_queries(workspace, "all")
    good_images, good_pairs = (rows.any(1) for rows in vectors)
    seen, read = {pictures[i] for i in range(n) if good_images[i]}, {pictures[i] for i in owners[good_pairs]}
    if not seen & read:
        with pytest.raises(InputError, match="no usable embedding"):
            usable_queries(embeddings, everything)
        return
    queries = usable_queries(embeddings, everything)
    assert good_images[queries.image_ids].all()
    assert sorted(pictures[queries.image_ids]) == sorted(seen & read)
    kept_pairs = queries.pair_ids.tolist()
    for found, is_right in (
        (queries.recorded, lambda image, pair: owners[pair] == image),
        (
            true_pairs(queries, Truth.read(path, workspace)),
            lambda image, pair: concepts[owners[pair]] == concepts[image],
        ),
    ):
        for row, image in enumerate(queries.image_ids):
            copies = [i for i in range(n) if pictures[i] == pictures[image]]
            said = {texts[p] for p in kept_pairs for i in copies if is_right(i, p)}
            expected = [at for at, p in enumerate(kept_pairs) if texts[p] in said]
            assert found.items[found.starts[row] : found.starts[row + 1]].tolist() == expected


CASE = TESTS / "cases2/04-repeated-pictures-in-evaluation"


@pytest.mark.parametrize("layout", ["rows", "lists", "duplicates"])
def test_perfect_vectors_are_perfect_however_the_pairs_are_laid_out(
    make_workspace: MakeWorkspace, tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str
):
    ws = str(tmp_path / "ws")
    if layout == "duplicates":
        # Ten pictures, and each caption is recorded with two of them.
        axes = np.eye(10)
        ws = str(make_workspace(10, texts=[f"text {i // 2}" for i in range(10)], embeddings=(axes, axes)).root)
        write_embeddings(Workspace.open(ws), "clip", axes, np.repeat(axes[::2] + axes[1::2], 2, axis=0))
    else:
        assert run_cli(["shard", str(CASE / f"{layout}.parquet"), ws]) == 0
        assert run_cli(["embed", ws, "--import", str(CASE / f"cr_{layout}")]) == 0
    capsys.readouterr()
    assert run_cli(["evaluate", ws, "--embeddings", "clip", "--on", "all", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["dual"]["rsum"] == 600
    assert (found["images"], found["captions"]) == (10, 10 if layout == "duplicates" else 50)
    assert found["copies"] == (40 if layout == "rows" else 0)


def test_truth_makes_more_items_right_and_never_fewer(make_workspace: MakeWorkspace, model: VLModel, tmp_path: Path):
    workspace = make_workspace(6)
    pq.write_table(
        pa.table({"image": [f"{i}.png" for i in range(6)], "concept": ["a", "a", "b", "b", "b", "c"]}),
        tmp_path / "t.parquet",
    )
    truth = Truth.read(tmp_path / "t.parquet", workspace)
    queries = read_queries(workspace, "all")
    true = true_pairs(queries, truth)
    assert true is not None
    assert np.diff(true.starts).tolist() == [2, 2, 3, 3, 3, 1]
    assert true.items.tolist() == [0, 1, 0, 1, 2, 3, 4, 2, 3, 4, 2, 3, 4, 5]
    found = evaluate_model(workspace, model, queries, truth, rerank=False, quiet=True)
    assert 0 <= found["dual"]["map_at_r"] <= found["dual"]["rp"] <= 100
    assert "itm" not in found


def test_the_default_is_the_test_split_or_everything(make_workspace: MakeWorkspace):
    split = make_workspace(6, captions=2, splits=["train", "test"] * 3)
    assert read_queries(split).on == "test"
    assert read_queries(split).image_ids.tolist() == [1, 3, 5]
    assert read_queries(split).pair_ids.tolist() == [2, 3, 6, 7, 10, 11]
    assert read_queries(split).image_rows.tolist() == [0, 0, 1, 1, 2, 2]
    assert len(read_queries(split, "all").image_ids) == 6
    with pytest.raises(InputError, match=r"no split 'tset' .* did you mean 'test'"):
        read_queries(split, "tset")
    assert read_queries(make_workspace(2, folder="other")).on == "all"


def test_a_limit_draws_images_with_all_their_captions(make_workspace: MakeWorkspace):
    queries = read_queries(make_workspace(9, captions=2), "all", limit=4, seed=1)
    assert len(queries.image_ids) == 4
    assert queries.pair_ids.tolist() == [p for i in queries.image_ids for p in (2 * i, 2 * i + 1)]
    assert queries.image_rows.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_an_unreadable_picture_is_left_out_with_its_captions(make_workspace: MakeWorkspace, model: VLModel):
    workspace = make_workspace(5, captions=2)
    samples = Samples.of(workspace)
    with Path(samples.urls[0]).open("r+b") as file:
        file.seek(int(samples.offset[2]))
        file.write(bytes(int(samples.size[2])))
    found = evaluate_model(workspace, model, read_queries(workspace), rerank=True, quiet=True)
    assert (found["images"], found["captions"], found["left_out"]) == (4, 8, 1)


def test_stored_embeddings_are_evaluated_without_their_bad_rows(make_workspace: MakeWorkspace):
    rng = np.random.default_rng(0)
    images = rng.normal(size=(6, 8))
    texts = np.repeat(images, 2, axis=0) + 0.01 * rng.normal(size=(12, 8))
    images[1] = 0  # a bad image: it and its captions go
    texts[4] = 0  # a bad caption goes alone
    texts[6] = texts[7] = 0  # an image without any caption left goes
    workspace = make_workspace(6, captions=2, embeddings=(images, texts))
    found = evaluate_embeddings(Embeddings.open(workspace), read_queries(workspace))
    assert (found["images"], found["captions"], found["left_out"]) == (4, 7, 2)
    assert found["dual"]["rsum"] == 600


def test_the_command_prints_what_it_measured_on_what(make_workspace: MakeWorkspace, capsys: pytest.CaptureFixture[str]):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(6, 8))
    workspace = make_workspace(6, embeddings=(rows, rows), splits=["test"] * 2 + ["train"] * 4)
    assert run_cli(["evaluate", str(workspace.root), "--embeddings", "clip", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["on"], summary["images"], summary["dual"]["r1"]) == ("test", 2, 100)
    assert run_cli(["evaluate", str(workspace.root), "--embeddings", "clip", "--on", "train"]) == 0
    said = capsys.readouterr().out
    assert "On train: 4 images, 4 captions" in said
    assert "RSUM dual encoder 600.0" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "one of --run NAME and --embeddings NAME"),
        (["--run", "a", "--embeddings", "b"], "no run 'a'"),
        (["--run", "none"], "no run 'none'"),
        (["--embeddings", "none"], "embeddings"),
        (["--embeddings", "clip", "--truth", "none.parquet"], "none.parquet"),
        (["--embeddings", "clip", "--on", "val"], "no split 'val'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    make_workspace: MakeWorkspace, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
):
    rows = np.random.default_rng(0).normal(size=(3, 4))
    workspace = make_workspace(3, embeddings=(rows, rows))
    assert run_cli(["evaluate", str(workspace.root), *arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert words in said
