"""COCO's test under the labels of `eccv_caption`: its own functions on the same rankings, and finding the test set."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import MakeWorkspace, write_embeddings
from fnpipe.cli.main import run as run_cli
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import tables
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.data.pictures import Samples
from fnpipe.train.evaluation import eccv, metrics
from fnpipe.train.evaluation.coco import coco_queries, image_name
from fnpipe.train.evaluation.eccv import CocoTest, read_coco_test
from fnpipe.train.evaluation.metrics import Scores, precision_of_block, recall_of_block
from fnpipe.train.evaluation.retrieval import evaluate_model
from fnpipe.train.model.build import build_model
from fnpipe.train.model.config import ModelConfig

Table = dict[int, list[int]]
Labels = dict[str, dict[str, Table]]


def made_labels(n: int, seed: int, unreachable: int = 0) -> tuple[np.ndarray, np.ndarray, Labels]:
    """Image ids, caption ids (n, 5), and the three sets of labels in the form in which the package has them."""
    rng = np.random.default_rng(seed)
    images = rng.choice(100_000, n, replace=False)
    captions = np.sort(rng.choice(900_000, n * 5, replace=False).reshape(n, 5), axis=1)
    flat = captions.ravel()
    original = {
        "i2t": {int(i): rng.permutation(row).tolist() for i, row in zip(images, captions, strict=True)},
        "t2i": {int(c): [int(i)] for i, row in zip(images, captions, strict=True) for c in row},
    }
    labels: Labels = {"original": original}
    for name in ("cxc", "eccv"):
        labels[name] = {}
        for way, queries, items in (("i2t", images, flat), ("t2i", flat, images)):
            asked = rng.permutation(queries)[: max(1, round(len(queries) * rng.uniform(0.3, 1)))]
            # From a single right item to all of them.
            sizes = [1, len(items), *rng.integers(1, len(items) + 1, len(asked))]
            labels[name][way] = {
                int(q): rng.choice(items, size, replace=False).tolist() for q, size in zip(asked, sizes, strict=False)
            }
    # The package cannot count a query that asks for more items than there are.
    for row in [row for row in labels["eccv"]["i2t"].values() if len(row) < len(flat)][:unreachable]:
        row.append(1_000_000 + int(rng.integers(3)))
    return images, captions, labels


def write_data(directory: Path, captions: np.ndarray, labels: Labels) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    np.save(directory / "coco_test_ids.npy", captions.ravel())
    for name, ways in labels.items():
        (directory / f"{name}_image_to_caption.json").write_text(json.dumps(ways["i2t"]))
        (directory / f"{name}_caption_to_image.json").write_text(json.dumps(ways["t2i"]))
    return directory


def as_scores(matrix: np.ndarray) -> Scores:
    return lambda start, stop: torch.from_numpy(np.ascontiguousarray(matrix[start:stop]))


def the_package() -> Any:
    """`eccv_caption`, without the progress bar that it shows whatever it is told."""
    package: Any = pytest.importorskip("eccv_caption")
    package._metrics.tqdm = lambda items, **how: items
    return package


def figures_of_the_package(
    i2t: np.ndarray, t2i: np.ndarray, images: np.ndarray, captions: np.ndarray, labels: Labels
) -> dict[str, float]:
    """What `eccv_caption` makes of the ranking that the scores give, as ``coco_1k/tr_r1``; in percent."""
    package = the_package()
    flat = captions.ravel()
    ranked = [
        {int(q): items[np.argsort(-row, kind="stable")].tolist() for q, row in zip(queries, scores, strict=True)}
        for scores, queries, items in ((i2t, images, flat), (t2i, flat, images))
    ]
    judge = package.Metrics.__new__(package.Metrics)
    judge.verbose, judge.pm_gts, judge.coco_ids = False, {}, flat
    judge.coco_gts, judge.cxc_gts, judge.eccv_gts = labels["original"], labels["cxc"], labels["eccv"]
    wanted = ("eccv_r1", "eccv_map_at_r", "eccv_rprecision", "coco_1k_recalls", "coco_5k_recalls", "cxc_recalls")
    found = judge.compute_all_metrics(*ranked, target_metrics=wanted, Ks=(1, 5, 10), verbose=False)
    out = {}
    for key, sides in found.items():
        name, _, figure = key.rpartition("_") if not key.startswith("eccv_") else ("eccv", "_", key[len("eccv_") :])
        figure = {"rprecision": "rp"}.get(figure, figure)
        out |= {f"{name}/{side}_{figure}": 100 * float(sides[way]) for side, way in (("tr", "i2t"), ("ir", "t2i"))}
    return out


def flat_figures(found: dict[str, dict[str, float]]) -> dict[str, float]:
    return {f"{name}/{k}": v for name, figures in found.items() for k, v in figures.items() if k != "rsum"}


def rankings(kind: str, n: int, captions: np.ndarray, labels: Labels, images: np.ndarray, seed: int):
    """Scores without ties whose order is drawn, or as good or as bad as ECCV's truth allows."""
    rng = np.random.default_rng(seed)
    flat = captions.ravel()
    i2t = rng.permutation(n * len(flat)).reshape(n, len(flat)).astype(np.float64)
    t2i = rng.permutation(n * len(flat)).reshape(len(flat), n).astype(np.float64)
    sign = {"random": 0, "best": 1, "worst": -1, "nearly": 1}[kind]
    for scores, way, queries, items in ((i2t, "i2t", images, flat), (t2i, "t2i", flat, images)):
        row_of = {int(q): row for row, q in enumerate(queries)}
        for query, right in labels["eccv"][way].items():
            scores[row_of[query], np.isin(items, right)] += sign * 10 * n * len(flat)
        if kind == "nearly":
            # One wrong item before all others.
            for row in scores:
                row[rng.integers(len(row))] = row.max() + 1
    return i2t, t2i


@pytest.mark.parametrize("kind", ["random", "best", "worst", "nearly"])
@settings(max_examples=12)
@given(folds=st.integers(1, 3), seed=st.integers(0, 2**32 - 1), unreachable=st.integers(0, 2))
def test_every_figure_equals_that_of_the_package_on_the_same_ranking(
    kind: str, folds: int, seed: int, unreachable: int, tmp_path_factory: pytest.TempPathFactory
):
    images, captions, labels = made_labels(5 * folds, seed, unreachable)
    test = CocoTest.read(write_data(tmp_path_factory.mktemp("data"), captions, labels))
    i2t, t2i = rankings(kind, 5 * folds, captions, labels, images, seed)
    found = flat_figures(test.measure(as_scores(i2t), as_scores(t2i)))
    assert found == pytest.approx(figures_of_the_package(i2t, t2i, images, captions, labels), abs=1e-9)


@settings(max_examples=40)
@given(items=st.integers(1, 6), levels=st.integers(1, 3), seed=st.integers(0, 2**32 - 1))
def test_tied_items_get_the_mean_of_the_package_over_every_order_of_them(items: int, levels: int, seed: int):
    package = the_package()._metrics
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, levels, items).astype(np.float32)
    right = rng.choice(items, rng.integers(1, items + 1), replace=False)
    orders = [
        list(order)
        for order in itertools.permutations(range(items))
        if all(scores[a] >= scores[b] for a, b in itertools.pairwise(order))
    ]
    said = [package.compute_eccv_metrics({0: order}, {0: right.tolist()}) for order in orders]
    block, rows = torch.from_numpy(scores)[None], torch.from_numpy(np.sort(right))[None]
    mask = torch.ones_like(rows, dtype=torch.bool)
    precision, mean_precision = precision_of_block(block, rows, mask)[0].tolist()
    assert precision == pytest.approx(np.mean([s["eccv_rprecision"] for s in said]), abs=1e-9)
    assert mean_precision == pytest.approx(np.mean([s["eccv_map_at_r"] for s in said]), abs=1e-9)
    for k in (1, 2, 5):
        hits = [package.compute_r_at_k({0: order}, {0: right.tolist()}, K=k) for order in orders]
        assert recall_of_block(block, rows, mask, (k,))[0, 0].item() == pytest.approx(np.mean(hits), abs=1e-9)


@pytest.mark.parametrize("elements", [1, 40, 10**6])
def test_the_size_of_the_tiles_changes_no_figure(elements: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    images, captions, labels = made_labels(10, 3, unreachable=1)
    test = CocoTest.read(write_data(tmp_path, captions, labels))
    i2t, t2i = (np.round(m / 40) for m in rankings("random", 10, captions, labels, images, 3))
    whole = test.measure(as_scores(i2t), as_scores(t2i))
    monkeypatch.setattr(metrics, "BLOCK_ELEMENTS", elements)
    assert flat_figures(test.measure(as_scores(i2t), as_scores(t2i))) == pytest.approx(flat_figures(whole), abs=1e-9)


def test_rsum_is_the_sum_of_the_recalls_of_both_directions(tmp_path: Path):
    images, captions, labels = made_labels(10, 4)
    test = CocoTest.read(write_data(tmp_path, captions, labels))
    i2t, t2i = rankings("random", 10, captions, labels, images, 4)
    found = test.measure(as_scores(i2t), as_scores(t2i))
    for name in ("coco_1k", "coco_5k"):
        six = [found[name][f"{side}_r{k}"] for side in ("tr", "ir") for k in (1, 5, 10)]
        assert found[name]["rsum"] == pytest.approx(sum(six))
    assert found["coco_1k"]["ir_r1"] > found["coco_5k"]["ir_r1"]


def test_the_data_of_the_package_are_those_of_karpathys_test_split():
    pytest.importorskip("eccv_caption")
    test = read_coco_test()
    assert test.caption_ids.shape == (5000, 5)
    assert test.image_ids[0] == 391895
    assert test.caption_ids[0].tolist() == [770337, 771687, 772707, 776154, 781998]
    assert int((np.diff(test.i2t.eccv.starts) > 0).sum()) == 1261
    assert int((np.diff(test.t2i.eccv.starts) > 0).sum()) == 1332
    assert (len(test.i2t.eccv.items), len(test.t2i.eccv.items)) == (22550, 11279)
    # Two captions are right that are not among the first five of their images.
    assert test.i2t.eccv.n_items == 25002


def with_names(workspace: Workspace, names: list[str]) -> Workspace:
    """The same images under other names."""
    start = 0
    for shard in range(workspace.n_shards):
        table = tables.read_table(workspace.images_path(shard))
        mine = names[start : start + len(table)]
        start += len(table)
        at = table.schema.get_field_index("image")
        tables.write_table(workspace.images_path(shard), table.set_column(at, "image", pa.array(mine, pa.string())))
    return Workspace.open(workspace.root)


class Coco:
    """A test set of five images, laid out in a workspace in another order, among other images."""

    def __init__(self, make: MakeWorkspace, directory: Path, n: int = 5, extra: int = 2, **more: Any) -> None:
        self.images, self.captions, self.labels = made_labels(n, 1)
        self.data = write_data(directory / "eccv_caption" / "data", self.captions, self.labels)
        (directory / "eccv_caption" / "__init__.py").touch()
        self.test = CocoTest.read(self.data)
        self.order = np.random.default_rng(5).permutation(n).tolist()
        self.texts = [[f"picture {i} seen as  {c} " for c in range(5)] for i in range(n)]
        clean = [" ".join(t.split()) for i in self.order for t in self.texts[i]]
        other = [f"other {k}" for k in range(extra)]
        names = [f"val2014/{image_name(int(self.images[i]))}" for i in self.order]
        names += [f"train2014/COCO_train2014_{k:012d}.jpg" for k in range(extra)]
        workspace = make(n + extra, captions=[5] * n + [1] * extra, texts=clean + other, **more)
        self.workspace = with_names(workspace, names)

    def expected(self) -> np.ndarray:
        """The pair_ids of every image's five captions, in the order of the test set."""
        return np.array([[5 * self.order.index(i) + c for c in range(5)] for i in range(len(self.images))])

    def annotations(self, path: Path, shuffled: bool = True) -> Path:
        """COCO's captions file."""
        rows = [
            {"image_id": int(image), "id": int(number), "caption": text}
            for image, numbers, texts in zip(self.images, self.captions, self.texts, strict=True)
            for number, text in zip(numbers, texts, strict=True)
        ]
        if shuffled:
            np.random.default_rng(0).shuffle(rows)  # type: ignore[arg-type]
        images = [{"id": int(i), "file_name": image_name(int(i))} for i in self.images]
        path.write_text(json.dumps({"info": {}, "images": images, "annotations": rows}))
        return path

    def karpathy(self, path: Path) -> Path:
        images = [
            {
                "filepath": "val2014",
                "filename": image_name(int(image)),
                "split": "test",
                "sentences": [
                    {"raw": text, "sentid": int(number)} for number, text in zip(numbers, texts, strict=True)
                ],
            }
            for image, numbers, texts in zip(self.images, self.captions, self.texts, strict=True)
        ]
        path.write_text(json.dumps({"images": images, "dataset": "coco"}))
        return path


@pytest.mark.parametrize("form", ["annotations", "karpathy"])
def test_captions_are_found_by_their_text_whatever_their_order(
    make_workspace: MakeWorkspace, tmp_path: Path, form: str
):
    coco = Coco(make_workspace, tmp_path)
    # Two texts of one image change places: the file knows whose is whose.
    coco.texts[2][0], coco.texts[2][3] = coco.texts[2][3], coco.texts[2][0]
    file = getattr(coco, form)(tmp_path / "captions.json")
    queries, by = coco_queries(coco.workspace, coco.test, str(file))
    expected = coco.expected()
    expected[2, [0, 3]] = expected[2, [3, 0]]
    assert by == "text"
    assert queries.pair_ids.reshape(-1, 5).tolist() == expected.tolist()
    assert queries.image_ids.tolist() == [coco.order.index(i) for i in range(5)]
    assert queries.image_rows.tolist() == [i for i in range(5) for _ in range(5)]


def test_without_a_file_captions_are_taken_in_the_order_of_the_source(make_workspace: MakeWorkspace, tmp_path: Path):
    coco = Coco(make_workspace, tmp_path)
    queries, by = coco_queries(coco.workspace, coco.test)
    assert by == "order"
    assert queries.pair_ids.reshape(-1, 5).tolist() == coco.expected().tolist()


def test_the_file_that_the_workspace_was_sharded_from_gives_the_captions_their_ids(
    make_workspace: MakeWorkspace, tmp_path: Path
):
    coco = Coco(make_workspace, tmp_path)
    file = coco.karpathy(tmp_path / "dataset_coco.json")
    coco.workspace.manifest["sources"] = [{"name": "d", "format": "coco", "path": str(file)}]
    assert coco_queries(coco.workspace, coco.test)[1] == "text"
    file.unlink()
    assert coco_queries(coco.workspace, coco.test)[1] == "order"


def test_a_caption_that_coco_lists_twice_is_one_pair_and_two_queries(make_workspace: MakeWorkspace, tmp_path: Path):
    images, captions, labels = made_labels(5, 1)
    test = CocoTest.read(write_data(tmp_path / "data", captions, labels))
    texts = [f"picture {i}, {c}" for i in range(5) for c in range(5)]
    kept = [t for k, t in enumerate(texts) if k != 7]
    workspace = with_names(
        make_workspace(5, captions=[5, 4, 5, 5, 5], texts=kept), [image_name(int(i)) for i in images]
    )
    texts[7] = texts[6]
    rows = [{"id": int(c), "image_id": 0, "caption": t} for c, t in zip(captions.ravel(), texts, strict=True)]
    file = tmp_path / "captions.json"
    file.write_text(json.dumps({"annotations": rows, "images": []}))
    queries, _ = coco_queries(workspace, test, str(file))
    assert queries.pair_ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 6, 7, 8, *range(9, 24)]
    with pytest.raises(InputError, match=r"1 image has fewer than 5 captions .* has 4.*--coco-captions"):
        coco_queries(workspace, test)


def test_missing_images_and_captions_are_counted_and_refused(make_workspace: MakeWorkspace, tmp_path: Path):
    coco = Coco(make_workspace, tmp_path)
    names = coco.workspace.read_images(["image"])["image"].to_pylist()
    fewer = with_names(coco.workspace, ["a.jpg", "b.jpg", *names[2:]])
    with pytest.raises(InputError, match=r"2 of the 5 images of COCO's 5k test are missing, such as COCO_val2014_"):
        coco_queries(fewer, coco.test)
    twice = with_names(coco.workspace, [*names[:-1], f"copy/{names[0].rpartition('/')[2]}"])
    with pytest.raises(InputError, match="are the same COCO image"):
        coco_queries(twice, coco.test)
    workspace = with_names(coco.workspace, names)
    coco.texts[1][1] = "words that nobody kept"
    file = coco.annotations(tmp_path / "captions.json")
    with pytest.raises(InputError, match=r"1 of the 25 captions .* such as 'words that nobody kept' of COCO_val2014"):
        coco_queries(workspace, coco.test, str(file))
    cut = {"annotations": json.loads(file.read_text())["annotations"][:20]}
    file.write_text(json.dumps(cut))
    with pytest.raises(InputError, match="holds 20 of the 25 captions"):
        coco_queries(workspace, coco.test, str(file))
    file.write_text("[]")
    with pytest.raises(InputError, match="neither COCO's captions file nor Karpathy's"):
        coco_queries(workspace, coco.test, str(file))


def test_the_order_of_shuffled_captions_is_not_trusted(make_workspace: MakeWorkspace, tmp_path: Path):
    coco = Coco(make_workspace, tmp_path)
    coco.workspace.manifest["params"] = {"shuffle_captions": 0.2}
    with pytest.raises(InputError, match=r"shuffled.*--coco-captions"):
        coco_queries(coco.workspace, coco.test)


def test_an_image_is_known_by_its_name_in_either_year(make_workspace: MakeWorkspace, tmp_path: Path):
    coco = Coco(make_workspace, tmp_path, extra=0)
    for form in ("{:012d}.jpg", "x/COCO_val2014_{:012d}.jpg", "COCO_val2014_{:012d}", "a.b/{:012d}.png"):
        named = with_names(coco.workspace, [form.format(int(coco.images[i])) for i in coco.order])
        assert coco_queries(named, coco.test)[0].image_ids.tolist() == [coco.order.index(i) for i in range(5)]


def test_a_model_is_measured_by_its_towers_and_by_its_matching_head(make_workspace: MakeWorkspace, tmp_path: Path):
    coco = Coco(make_workspace, tmp_path)
    torch.manual_seed(0)
    model = build_model(ModelConfig()).eval()
    queries, _ = coco_queries(coco.workspace, coco.test)
    measured = evaluate_model(
        coco.workspace, model, queries, rerank=True, top_k=3, quiet=True, measure=coco.test.figures
    )
    assert (measured["images"], measured["captions"], measured["left_out"]) == (5, 25, 0)
    for name in ("dual", "itm"):
        assert {k: set(v) for k, v in measured[name].items()} == {
            labels: {f"{side}_{key}" for side in ("tr", "ir") for key in keys}
            | ({"rsum"} if labels.startswith("coco") else set())
            for labels, keys in eccv.FIGURES.items()
        }
    samples = Samples.of(coco.workspace)
    with Path(samples.urls[0]).open("r+b") as file:
        file.seek(int(samples.offset[2]))
        file.write(bytes(int(samples.size[2])))
    with pytest.raises(InputError, match=r"1 of the 5 images and 5 of the 25 captions .* no readable picture"):
        evaluate_model(coco.workspace, model, queries, rerank=False, quiet=True, measure=coco.test.figures)


@pytest.fixture
def installed(make_workspace: MakeWorkspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Coco:
    """A small `eccv_caption` in the place of the real one, and a workspace with embeddings that rank perfectly."""
    coco = Coco(make_workspace, tmp_path / "packages")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    monkeypatch.delitem(sys.modules, "eccv_caption", raising=False)
    images = np.eye(7)
    texts = np.repeat(images, [5] * 5 + [1] * 2, axis=0)
    write_embeddings(coco.workspace, "clip", images, texts)
    return coco


def test_the_command_measures_stored_embeddings(installed: Coco, capsys: pytest.CaptureFixture[str]):
    root = str(installed.workspace.root)
    assert run_cli(["evaluate", root, "--embeddings", "clip", "--eccv", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["dual"]["coco_5k"]["rsum"] == summary["dual"]["coco_1k"]["rsum"] == 600
    assert (summary["on"], summary["images"], summary["captions"]) == ("COCO's 5k test", 5, 25)
    assert summary["captions_by"] == "order"
    assert run_cli(["evaluate", root, "--embeddings", "clip", "--eccv"]) == 0
    said = capsys.readouterr().out
    for words in ("COCO 1k", "COCO 5k", "CxC", "ECCV Caption", "mAP@R", "600.0", "taken in the order of the source"):
        assert words in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--on", "test"], "leave --on and --truth out"),
        (["--truth", "t.parquet"], "leave --on and --truth out"),
        (["--coco-captions", "none.json"], "none.json"),
    ],
)
def test_a_mistake_with_eccv_is_one_line(
    installed: Coco, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
):
    command = ["evaluate", str(installed.workspace.root), "--embeddings", "clip", "--eccv", *arguments]
    assert run_cli(command) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert words in said


def test_coco_captions_without_eccv_is_a_mistake(installed: Coco, capsys: pytest.CaptureFixture[str]):
    command = ["evaluate", str(installed.workspace.root), "--embeddings", "clip", "--coco-captions", "x.json"]
    assert run_cli(command) == 2
    assert "goes with --eccv" in capsys.readouterr().err


def test_embeddings_that_are_none_are_refused_not_left_out(installed: Coco, capsys: pytest.CaptureFixture[str]):
    images = np.eye(7)
    images[0] = 0
    write_embeddings(installed.workspace, "holes", images, np.repeat(np.eye(7), [5] * 5 + [1] * 2, axis=0))
    assert run_cli(["evaluate", str(installed.workspace.root), "--embeddings", "holes", "--eccv"]) == 2
    assert "1 of the 5 images and 5 of the 25 captions" in capsys.readouterr().err


def test_without_the_package_the_way_to_it_is_said(
    installed: Coco, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(eccv.importlib.util, "find_spec", lambda name: None)
    assert run_cli(["evaluate", str(installed.workspace.root), "--embeddings", "clip", "--eccv"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "pip install fnpipe[eval]" in said


def test_a_damaged_package_is_said_to_be_one(installed: Coco, capsys: pytest.CaptureFixture[str]):
    (installed.data / "cxc_image_to_caption.json").write_text('{"5": [1]}')
    assert run_cli(["evaluate", str(installed.workspace.root), "--embeddings", "clip", "--eccv"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "not the data of eccv_caption" in said
