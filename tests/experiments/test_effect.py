"""The evidence benchmark in a minimal form: what it makes, that it goes on where it stopped, and what it concludes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import ROOT
from fnpipe.mining.edges.labels import codes_in
from fnpipe.mining.edges.reader import read_edges
from fnpipe.mining.edges.thresholds import LABELS
from fnpipe.pipeline.errors import InputError
from fnpipe.train.learners.keys import TrainConfig, make_config
from fnpipe.train.model.build import load_model

SCRIPTS = ROOT / "experiments" / "effect"
sys.path[:0] = [str(SCRIPTS), str(ROOT / "tools")]  # where the script's modules look for each other

import demo_checkpoints  # noqa: E402
import effect  # noqa: E402
import effect_chain  # noqa: E402
import effect_report  # noqa: E402
from effect_chain import Chain, Oracle, by_epoch, weak_seed  # noqa: E402
from effect_regime import (  # noqa: E402
    EXPLORED,
    FULL,
    QUICK,
    RANDOM,
    Regime,
    Run,
    emoji,
    emoji_rows,
    main_rows,
    quick_rows,
    smoothing_rows,
)
from effect_report import Measured, Ordering, Results, markdown, orderings, summary  # noqa: E402

MINIMAL = Regime(
    runs=(Run(1, 0),), shipped=True, train=192, test=40, batch_size=16, epochs=1, small=64, large=192, spaces=(64, 192)
)
ROWS = {name: row for name, row in main_rows(MINIMAL).items() if name in (RANDOM, "grit-192", "oracle-192")}


def run_minimal(root: Path) -> dict[str, Any]:
    effect.work(root, MINIMAL, ROWS, [0], [])
    effect.report(root, MINIMAL, ROWS)
    told: dict[str, Any] = json.loads((root / "effect.json").read_bytes())
    return told


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("effect")
    return root, run_minimal(root)


def test_the_json_has_false_negatives_by_search_space_and_retrieval_by_row(finished: tuple[Path, dict[str, Any]]):
    _, told = finished
    assert list(told["fn_share"]) == [RANDOM, "64", "192", "all"]
    for metric in ("itm_map", "dual_map"):
        assert list(told[metric]) == ["start", *ROWS]
        for value in told[metric].values():
            assert value["mean"] == pytest.approx(value["per_seed"]["data-1-model-0"])
            assert value["se"] is None
    assert told["fn_share"]["192"]["mean"] > told["fn_share"][RANDOM]["mean"]


def test_every_row_takes_the_same_number_of_steps(finished: tuple[Path, dict[str, Any]]):
    root, _ = finished
    results = root / "results" / "data-1-model-0"
    steps = {name: json.loads((results / f"{name}.json").read_bytes())["steps"] for name in ROWS}
    assert set(steps.values()) == {12}


def test_the_tables_name_every_row_and_the_plots_are_there(finished: tuple[Path, dict[str, Any]]):
    root, _ = finished
    tables = (root / "effect.md").read_text()
    assert all(f"| {row} |" in tables for row in ROWS)
    assert "| (B) ITM mAP@R, M = 192: oracle ECM at least +3 over GRIT |" in tables
    assert sorted(path.name for path in root.glob("*.png")) == ["effect-fn.png", "effect-retrieval.png"]


def test_a_finished_benchmark_measures_nothing_again(
    finished: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    root, told = finished

    def refuse(*arguments: object, **named: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(effect_chain, "train", refuse)
    monkeypatch.setattr(effect_chain, "evaluate_model", refuse)
    assert run_minimal(root) == told


def test_what_is_missing_is_measured_again_and_comes_out_as_before(finished: tuple[Path, dict[str, Any]]):
    root, told = finished
    for name in ("start", "oracle-192"):
        (root / "results" / "data-1-model-0" / f"{name}.json").unlink()
    again = run_minimal(root)
    assert without_seconds(again) == without_seconds(told)


def test_two_directories_come_to_the_same_figures(finished: tuple[Path, dict[str, Any]], tmp_path: Path):
    assert without_seconds(run_minimal(tmp_path)) == without_seconds(finished[1])


def without_seconds(told: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in told.items() if key != "train_seconds"}


def test_a_directory_of_another_regime_is_refused(finished: tuple[Path, dict[str, Any]]):
    with pytest.raises(InputError, match=r"regime\.json: made with other epochs; use another directory"):
        Chain(finished[0], replace(MINIMAL, epochs=2), Run(1, 0))


def test_the_oracles_edges_are_positive_exactly_where_the_truth_says_so(finished: tuple[Path, dict[str, Any]]):
    chain = Chain(finished[0], MINIMAL, Run(1, 0))
    edges = read_edges(chain.workspace.stage("edges/oracle-grit-192-0"))
    true = chain.truth.matches(edges["image_id"].to_numpy(), edges["pair_id"].to_numpy())
    assert 0.005 < true.mean() < 0.6
    assert (codes_in(edges["label"], LABELS) == np.where(true, 2, 0)).all()


def test_the_oracle_knows_a_caption_by_its_words_and_a_picture_by_its_pixels(finished: tuple[Path, dict[str, Any]]):
    chain = Chain(finished[0], MINIMAL, Run(1, 0))
    oracle = Oracle(chain.workspace, chain.truth)
    pairs = chain.workspace.read_pairs(["pair_id", "image_id", "caption"]).slice(0, 30)
    images = pairs["image_id"].to_numpy()
    texts = oracle.prepare_texts(pairs["caption"].to_pylist())
    rows = np.repeat(np.arange(30), 30), np.tile(np.arange(30), 30)
    said = oracle.score_pairs(images, rows[0], texts, rows[1])
    assert (said == chain.truth.matches(images[rows[0]], pairs["pair_id"].to_numpy()[rows[1]])).all()
    assert said.reshape(30, 30).diagonal().all()


def test_ignoring_what_was_mined_is_plain_grit(finished: tuple[Path, dict[str, Any]]):
    chain = Chain(finished[0], MINIMAL, Run(1, 0))
    ignoring = main_rows(MINIMAL)["ignore-192"]
    figures = chain.branch("ignore", replace(ignoring, edges="oracle"))
    runs = chain.workspace.root / "runs"
    ours, plain = (load_model(runs / f"{name}-0/checkpoints/last.safetensors") for name in ("ignore", "grit-192"))
    assert figures["positives"] > 0
    assert all((a == b).all() for a, b in zip(ours.state_dict().values(), plain.state_dict().values(), strict=True))


def test_runs_on_the_same_data_share_con_d_and_the_image_tower_but_not_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(demo_checkpoints, "N_PRETRAIN", 120)
    monkeypatch.setattr(demo_checkpoints, "WARM_UP_STEPS", 2)
    runs = (Run(1, 0), Run(1, 2))
    sizes = {"train": 64, "small": 32, "large": 64, "spaces": (32,), "backbone_steps": 2}
    regime = replace(MINIMAL, runs=runs, shipped=False, shipped_con_d=False, start_epochs=1, con_d_epochs=1, **sizes)
    rows = {name: row for name, row in main_rows(regime).items() if name in ("learned-64", "weak-64")}
    effect.work(tmp_path, regime, rows, [0, 2], [])
    names = sorted(path.name for path in (tmp_path / "data-1" / "runs").iterdir() if not path.name.startswith("."))
    assert names == ["con-d", "learned-64-0", "learned-64-2", "start-0", "start-2", "weak-64-0", "weak-64-2"]
    towers, embeddings = [], []
    for seed in (0, 2):
        init = load_model(tmp_path / f"init-{seed}.safetensors")
        towers.append(init.clip.visual.state_dict())
        embeddings.append(init.clip.text.token_embedding.weight)
    assert all((towers[0][key] == towers[1][key]).all() for key in towers[0])
    assert not (embeddings[0] == embeddings[1]).all()
    # One's warm start judges for the other: trained as long, on the same pairs.
    for seed, other in ((0, 2), (2, 0)):
        config = json.loads((tmp_path / f"data-1/edges/.weak-grit-64-{seed}.record/meta.json").read_bytes())
        chain = Chain(tmp_path, regime, Run(1, seed))
        assert config["params"]["discriminator"] == chain.discriminator("weak").description
        assert chain.con_d_run("weak") == f"itm:start-{other}"
    assert {path.stem for path in (tmp_path / "results" / "data-1-model-2").iterdir()} >= {
        "con-d-weak",
        "con-d-learned",
    }


@pytest.mark.parametrize("run", FULL.runs, ids=lambda run: run.name)
def test_the_weak_discriminator_is_never_the_students_own_start(run: Run):
    assert weak_seed(FULL, run) != run.model


@pytest.mark.parametrize(
    ("regime", "rows"),
    [
        (FULL, main_rows(FULL)),
        (QUICK, quick_rows(QUICK)),
        *((regime, smoothing_rows(regime)) for regime in EXPLORED.values()),
        (emoji("emoji"), emoji_rows(emoji("emoji"))),
    ],
)
def test_every_row_says_what_training_understands_and_has_its_plain_grit(regime: Regime, rows: dict[str, Any]):
    for name, row in rows.items():
        config = make_config({"method": row.method, **row.values})
        assert isinstance(config, TrainConfig)
        assert row.plan is None or row.plan == RANDOM or row.plan % regime.batch_size == 0
        assert row.edges in (None, "oracle", "learned", "weak")
        assert f"grit-{regime.large}" in rows, name


def test_the_regime_is_the_one_that_was_fixed():
    assert [(run.data, run.model) for run in FULL.runs] == [(1, 0), (2, 1), (1, 2)]
    assert FULL.train // FULL.batch_size * FULL.epochs == 640


@given(st.dictionaries(st.text(min_size=1), st.floats(-100, 100), min_size=2, max_size=6))
def test_the_standard_error_is_that_of_the_mean(per_seed: dict[str, float]):
    measured = Measured.of(per_seed)
    values = list(per_seed.values())
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    assert measured.mean == pytest.approx(mean, abs=1e-9)
    assert measured.se == pytest.approx((variance / len(values)) ** 0.5, abs=1e-6)


def test_a_difference_is_paired_and_over_the_runs_that_both_have():
    one, two = Measured.of({"a": 5.0, "b": 9.0, "c": 1.0}), Measured.of({"b": 8.0, "a": 3.0})
    difference = one.minus(two)
    assert difference is not None
    assert difference.per_seed == {"a": 2.0, "b": 1.0}
    assert one.minus(Measured.of({"d": 1.0})) is None


def test_an_ordering_of_the_mean_forgives_a_single_run():
    margins = Measured.of({"a": 2.0, "b": -1.0})
    assert Ordering("x", margins, everywhere=False).holds
    assert not Ordering("x", margins, everywhere=True).holds
    assert not Ordering("x", Measured.of({"a": 2.0, "b": -3.0}), everywhere=False).holds


def branch(itm_map: float, dual_map: float = 50.0, **facts: Any) -> dict[str, Any]:
    kinds = {"dual": dual_map, "itm": itm_map}
    return {"false_negatives": 0.4, **facts, **{k: {"r1": 40.0, "map_at_r": v} for k, v in kinds.items()}}


def written(root: Path, by_run: dict[str, dict[str, Any]]) -> Results:
    for run, files in by_run.items():
        (root / "results" / run).mkdir(parents=True)
        for name, figures in files.items():
            (root / "results" / run / f"{name}.json").write_text(json.dumps(figures))
    return Results(root, FULL, main_rows(FULL))


def test_each_expected_ordering_is_reported_with_its_margin_whether_it_holds_or_not(tmp_path: Path):
    shares = {RANDOM: 0.04, "1024": 0.25, "4096": 0.5}
    neighbours = {"1024": {"auroc": 0.9, "precision": 0.5, "recall": 0.7, "similarity_auroc": 0.7}}
    one = {
        "fn-share": shares,
        "grit-4096": branch(50.0, 58.0),
        "oracle-4096": branch(56.0),
        "learned-4096": branch(51.0),
        "drop-4096": branch(52.0),
        RANDOM: branch(60.0, 56.0),
        "con-d-learned": {**branch(80.0), "neighbours": neighbours},
    }
    two = {**one, "drop-4096": branch(49.5), "learned-4096": branch(55.0)}
    found = {o.name: o for o in orderings(written(tmp_path, {"data-1-model-0": one, "data-2-model-1": two}))}
    margins = {name: [round(v, 6) for v in o.margins.per_seed.values()] for name, o in found.items()}
    assert margins["(A) random: 2 to 6 %"] == [2, 2]
    assert margins["(A) M = 4096: 30 to 48 %"] == [-2, -2]
    assert margins["(A) rises with M: smallest step"] == [21, 21]
    assert margins["(B) ITM mAP@R, M = 4096: oracle ECM at least +3 over GRIT"] == [3, 3]
    assert margins["(B) ITM mAP@R, M = 4096: learned ECM at least +2 over GRIT"] == [-1, 3]
    assert margins["(B) ITM mAP@R: converting above dropping, mean"] == [-1, 5.5]
    assert margins["(B) dual mAP@R: GRIT (M = 4096) above random"] == [2, 2]
    assert margins["(C) its AUROC at least 0.1 over the similarity's"] == [0.1, 0.1]
    assert {name for name, o in found.items() if not o.holds} == {
        "(A) M = 4096: 30 to 48 %",
        "(B) ITM mAP@R, M = 4096: learned ECM at least +2 over GRIT",
        "(C) Con-D, nearest neighbours of M = 1024: precision at least 0.6",
    }


def test_differences_are_to_plain_grit_of_the_same_search_space(tmp_path: Path):
    files = {
        "grit-4096": branch(50.0),
        "grit-1024": branch(60.0),
        "learned-1024": branch(63.0),
        "drop-4096": branch(52.0),
        "itc": {"false_negatives": 0.1, "dual": {"r1": 1.0, "map_at_r": 49.0}},
    }
    over = summary(written(tmp_path, {"data-1-model-0": files}))["over_plain"]
    assert over["learned-1024"]["against"] == "grit-1024"
    assert over["learned-1024"]["itm_map"]["mean"] == 3
    assert over["drop-4096"]["itm_map"]["mean"] == 2
    assert over["itc"]["dual_map"]["mean"] == -1
    assert "itm_map" not in over["itc"]
    assert "grit-1024" not in over


def test_smoothing_on_random_batches_is_held_against_random_batches(tmp_path: Path):
    files = {"grit-4096": branch(50.0), RANDOM: branch(60.0), "sitc-0.5-random": branch(61.5)}
    (tmp_path / "results" / "data-1-model-0").mkdir(parents=True)
    for name, figures in files.items():
        (tmp_path / "results" / "data-1-model-0" / f"{name}.json").write_text(json.dumps(figures))
    over = summary(Results(tmp_path, EXPLORED["noise"], smoothing_rows(EXPLORED["noise"])))["over_plain"]
    assert over["sitc-0.5-random"]["against"] == RANDOM
    assert over["sitc-0.5-random"]["itm_map"]["mean"] == 1.5


def test_q_over_time_is_told_and_drawn_where_a_row_has_it(tmp_path: Path):
    results = written(tmp_path, {"data-1-model-0": {RANDOM: branch(1.0, q=[0.9, 0.8, 0.7])}})
    assert summary(results)["q"] == {RANDOM: {"data-1-model-0": [0.9, 0.8, 0.7]}}
    assert [path.name for path in effect_report.plots(results, tmp_path)] == ["effect-q.png"]


def test_tables_of_nothing_are_empty(tmp_path: Path):
    assert markdown(Results(tmp_path, FULL, main_rows(FULL))).strip() == ""


def test_q_is_averaged_epoch_by_epoch():
    steps = [{"epoch": epoch, "q": q} for epoch, q in ((0, 0.5), (0, 0.7), (1, 0.9), (2, 0.1), (2, 0.2), (2, 0.3))]
    assert by_epoch(steps, "q") == pytest.approx([0.6, 0.9, 0.2])
