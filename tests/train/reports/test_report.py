"""Runs side by side: what is read of them, what the page says, and that the page needs nothing and runs nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from browser import browse, find_browser
from conftest import MakeWorkspace
from fnpipe.cli.main import run as run_cli
from fnpipe.mining.plans.config import GroupConfig
from fnpipe.mining.plans.stage import group
from fnpipe.train.methods import train
from fnpipe.train.reports.chart import Curve, line_chart, ticks
from fnpipe.train.reports.comparisons import by_space, by_time, minutes_until
from fnpipe.train.reports.page import render_report as render_report_bytes
from fnpipe.train.reports.page import write_report
from fnpipe.train.reports.parts import Cell
from fnpipe.train.reports.report import Report, Series, read_report, read_run, summarise, thinned

NASTY = '</title><script>alert("x")</script>&amp;\'" <b>'


def make_run(
    directory: Path,
    *,
    steps: int = 40,
    epochs: int = 4,
    complete: bool = True,
    config: dict[str, Any] | None = None,
    inputs: dict[str, str] | None = None,
    more: dict[str, float] | None = None,
    evaluate: bool = True,
    level: float = 0.0,
) -> Path:
    """A run as training leaves it, with numbers from a formula: the loss falls from 4, R@1 rises by epoch."""
    directory.mkdir(parents=True)
    chosen = {"method": "grit", "model": "fnpipe-tiny", "epochs": epochs, "batch_size": 8, "accumulate": 1, "seed": 0}
    chosen |= {"evaluate_on": "test", "evaluate_images": 100, "lr": 0.001, **(config or {})}
    lines = []
    per_epoch = steps // epochs
    for step in range(1, steps + 1):
        epoch = (step - 1) // per_epoch
        loss = 4 - 3 * step / steps + level
        line = {"kind": "step", "step": step, "epoch": epoch, "batch": (step - 1) % per_epoch, "loss": loss}
        lines.append({**line, "itc": loss / 2, "lr": 0.001, "images_per_s": 100.0 + level, **(more or {})})
        if evaluate and step % per_epoch == 0:
            figures = {"dual_tr_r1": 10.0 * (epoch + 1) + level, "dual_ir_r1": 5.0 * (epoch + 1)}
            lines.append({"kind": "evaluation", "step": step, "epoch": epoch, **figures, "dual_rsum": 300.0})
    result = {"seconds": 12.5, "images_seen": steps * 8, "losses": {"loss": 1.0, "itc": 0.5}}
    record: dict[str, Any] = {"format": 1, "complete": complete, "config": chosen, "asked": {}, "torch": "2"}
    record |= {"inputs": inputs or {"pairs": "a" * 64}, "data": {"processes": 1}, "model": {"architecture": "tiny"}}
    (directory / "config.json").write_text(json.dumps({**record, **({"result": result} if complete else {})}))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def render_report(report: Report) -> str:
    return render_report_bytes(report).decode()


class Reader(HTMLParser):
    """The elements of a page, their attributes, and the words in it."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def said(self) -> str:
        return " ".join(" ".join(self.words).split())


def test_the_summary_is_what_the_logs_say(tmp_path: Path):
    paths = [make_run(tmp_path / "a"), make_run(tmp_path / "b", level=1.0, config={"lr": 0.01, "method": "mafa"})]
    first, second = summarise(read_report(paths))["runs"]
    assert (first["run"], first["method"], first["complete"], first["steps"]) == ("a", "grit", True, 40)
    # The mean of the last two of forty steps.
    assert first["end"]["loss"] == pytest.approx(4 - 3 * (39 + 40) / 2 / 40)
    assert second["end"]["loss"] == pytest.approx(first["end"]["loss"] + 1)
    assert first["evaluation"] == {"dual_tr_r1": 40, "dual_ir_r1": 20, "dual_rsum": 300}
    assert second["evaluation"]["dual_tr_r1"] == 41
    assert first["step_seconds"] == pytest.approx(40 * 8 / 100)
    assert (first["images_per_s"], first["seconds"], first["evaluated_epoch"]) == (100, 12.5, 4)


def test_only_keys_that_differ_are_differences(tmp_path: Path):
    a = make_run(tmp_path / "a", inputs={"pairs": "a" * 64, "groups/g": "c" * 64})
    b = make_run(tmp_path / "b", config={"lr": 0.01, "tau_low": None}, inputs={"pairs": "a" * 64, "groups/g": "d" * 64})
    report = read_report([a, b])
    assert report.differences == {
        "config.lr": [0.001, 0.01],
        "inputs.groups/g": ["c" * 64, "d" * 64],
        "config.tau_low": ["(none)", None],
    }
    said = Reader(render_report(report)).said
    assert "config.lr 0.001 0.01" in said
    assert "Keys that only some of them have: 1 a b config.tau_low no such key null" in said
    assert "config.seed" not in said
    assert read_report([a]).differences == {}


def test_a_workspace_stands_for_its_runs_and_equal_names_get_their_workspaces(tmp_path: Path):
    for root in ("one", "two"):
        make_run(tmp_path / root / "runs" / "same")
        (tmp_path / root / "fnpipe.json").write_text("{}")
    make_run(tmp_path / "two" / "runs" / "other")
    report = read_report([tmp_path / "one", tmp_path / "two", tmp_path / "one" / "runs" / "same"])
    assert [run.name for run in report.runs] == ["one/same", "other", "two/same"]


def test_an_unfinished_run_is_shown_as_one_up_to_its_last_whole_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    torn = make_run(tmp_path / "torn", complete=False)
    lines = (torn / "metrics.jsonl").read_bytes()
    (torn / "metrics.jsonl").write_bytes(lines[: lines.index(b'"step": 15') + 5])
    none = make_run(tmp_path / "none", complete=False)
    (none / "metrics.jsonl").unlink()
    report = read_report([torn, none])
    assert [(run["steps"], run["last_epoch"]) for run in summarise(report)["runs"]] == [(14, 2), (0, 0)]
    said = Reader(render_report(report)).said
    assert "unfinished: in epoch 2 of 4" in said
    assert "unfinished: no step logged yet" in said
    assert run_cli(["report", str(torn), str(none)]) == 0
    assert "epoch 2 of 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("no config", "no run (it holds no config.json)"),
        ("torn config", "config.json: damaged"),
        ("empty config", "damaged (no 'config')"),
        ("middle line", "metrics.jsonl: line 3 is damaged"),
        ("no kind", "metrics.jsonl: line 3 is damaged"),
        ("torn last line", "metrics.jsonl: line 44 is damaged"),
        ("misspelt", "no such run; did you mean 'good'?"),
        ("no runs", "a workspace without runs"),
    ],
)
def test_damage_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str, words: str
):
    good = make_run(tmp_path / "runs" / "good")
    bad = make_run(tmp_path / "runs" / "bad")
    log = (bad / "metrics.jsonl").read_text().splitlines(keepends=True)
    if damage == "no config":
        (bad / "config.json").unlink()
    elif damage == "torn config":
        (bad / "config.json").write_text('{"complete": tr')
    elif damage == "empty config":
        (bad / "config.json").write_text("{}")
    elif damage in ("middle line", "no kind"):
        log[2] = '{"kind": "step", \n' if damage == "middle line" else '{"loss": 3}\n'
        (bad / "metrics.jsonl").write_text("".join(log))
    elif damage == "torn last line":
        (bad / "metrics.jsonl").write_text("".join(log)[:-9])
    elif damage == "misspelt":
        bad = tmp_path / "runs" / "goood"
    else:
        bad = tmp_path / "ws"
        bad.mkdir()
        (bad / "fnpipe.json").write_text("{}")
    assert run_cli(["report", str(good), str(bad), "--html", str(tmp_path / "r.html")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert words in said
    assert not (tmp_path / "r.html").exists()


def test_names_and_values_reach_the_page_as_text(tmp_path: Path):
    make_run(tmp_path / NASTY.replace("/", "-"), config={"method": NASTY, "groups": NASTY}, more={NASTY: 1.0})
    make_run(tmp_path / "plain", config={"groups": [NASTY, None]}, inputs={NASTY: NASTY})
    page = render_report(read_report(sorted(tmp_path.iterdir())))
    read = Reader(page)
    assert not {"script", "b"} & set(read.tags[: read.tags.index("main")])
    assert "script" not in read.tags
    assert {tag for tag in read.tags if tag not in KNOWN_TAGS} == set()
    assert read.said.count("<script>alert(") >= 4
    assert not [name for name, _ in read.attributes if name.startswith("on")]


KNOWN_TAGS = {
    *("html", "head", "meta", "title", "style", "body", "header", "main", "footer", "section", "h1", "h2", "h3", "p"),
    *("div", "table", "thead", "tbody", "tr", "th", "td", "span", "code", "b", "pre", "details", "summary"),
    *("svg", "g", "path", "text", "circle"),
}


def test_the_page_loads_nothing_and_its_style_is_the_one_it_allows(tmp_path: Path):
    path = tmp_path / "r.html"
    size = write_report(read_report([make_run(tmp_path / "a")]), path)
    page = path.read_text(encoding="utf-8")
    assert size == len(page.encode())
    assert not re.search(r"https?:|//[a-z]|url\(|@import", page)
    assert not [name for name, _ in Reader(page).attributes if name in ("src", "href", "style")]
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)[1]  # type: ignore[index]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'sha256-{digest}'" in page


def test_every_measure_that_a_run_logs_is_on_the_page_whatever_its_method(tmp_path: Path):
    make_run(tmp_path / "a", more={"q": 0.97, "coverage": 0.9, "agreement": 0.8, "false_negatives": 0.3})
    make_run(tmp_path / "b", more={"recon": 0.5, "something_new": 7.0}, config={"method": "new", "model": None})
    said = Reader(render_report(read_report([tmp_path / "a", tmp_path / "b"]))).said
    for words in ("q, the quantile", "coverage:", "agreement", "share of false negatives", "VACSR", "something_new"):
        assert words in said
    assert re.search(r"something_new [\d ,]+step b end lowest to highest step b 7\.000 7\.000 to 7\.000", said)


def test_the_best_figure_is_marked_only_where_the_question_is_the_same(tmp_path: Path):
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", level=2.0)
    page = render_report(read_report([a, b]))
    assert "<td>40.00</td><td><b>42.00</b></td>" in page
    other = make_run(tmp_path / "c", level=3.0, config={"evaluate_on": "val"})
    report = read_report([a, b, other])
    assert report.incomparable == ["config.evaluate_on"]
    page = render_report(report)
    assert "<b>" not in page
    assert "different questions: the runs differ in evaluate_on" in page


def test_steps_of_different_sizes_are_drawn_over_images(tmp_path: Path):
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", steps=20, config={"batch_size": 16})
    both, one = render_report(read_report([a, b])), render_report(read_report([a]))
    assert (">images</text>" in both, ">step</text>" in both) == (True, False)
    assert (">images</text>" in one, ">step</text>" in one) == (False, True)
    # 40 steps of 8 and 20 of 16 end at the same place: 320 images.
    loss = both[both.index("loss, the sum") :]
    ends = [
        re.findall(r"[\d.]+ [\d.]+", d)[-1].split()[0] for d in re.findall(r'class="line" d="(M[^"]+L[^"]+)"', loss)
    ]
    assert ends[0] == ends[1]


@settings(max_examples=60)
@given(
    low=st.floats(-1e4, 1e4, allow_nan=False),
    size=st.floats(1e-3, 1e4, allow_nan=False),
    n=st.integers(2, 30),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_curve_lies_where_its_axis_says(low: float, size: float, n: int, seed: int):
    rng = np.random.default_rng(seed)
    x, y = np.sort(rng.uniform(0, 50, n)), low + size * rng.random(n)
    chart = line_chart([Curve("r", 0, x, y)], "title", "step", 50.0)
    # Two ticks of each axis say what a place on the paper means.
    label = r'<text x="([\d.-]+)" y="([\d.-]+)" text-anchor="{}">([^<]+)</text>'
    across = [(float(a), float(c.replace(",", ""))) for a, _, c in re.findall(label.format("middle"), chart.svg)[:-1]]
    down = [(float(b) - 3.5, float(c.replace(",", ""))) for _, b, c in re.findall(label.format("end"), chart.svg)]
    places = [tuple(map(float, p.split())) for p in re.search(r'class="line" d="M([^"]+)"', chart.svg)[1].split("L")]  # type: ignore[index]
    for axis, values, coordinate in ((across, x, 0), (down, y, 1)):
        (p0, v0), (p1, v1) = axis[0], axis[-1]
        read = [v0 + (place[coordinate] - p0) * (v1 - v0) / (p1 - p0) for place in places]
        # A tenth of a unit of the paper, and the rounding of a label.
        tolerance = abs((v1 - v0) / (p1 - p0)) * 0.2 + 1e-3 * max(abs(v0), abs(v1))
        assert read == pytest.approx(values.tolist(), abs=tolerance)
    lowest, highest = down[0][1], down[-1][1]
    if y.min() > 0 and chart.cut_at is None:
        assert lowest == 0
    if chart.cut_at is not None:
        assert chart.cut_at == pytest.approx(lowest, rel=1e-3)
        assert y.max() - y.min() < 0.25 * y.max()
    assert highest >= y.max() - 1e-3 * abs(highest)


def test_an_axis_that_does_not_begin_at_0_says_so(tmp_path: Path):
    page = Reader(render_report(read_report([make_run(tmp_path / "a", more={"coverage": 0.97})]))).said
    assert "not at 0" not in page
    lines = (tmp_path / "a" / "metrics.jsonl").read_text().replace('"coverage": 0.97', '"coverage": 0.95', 3)
    (tmp_path / "a" / "metrics.jsonl").write_text(lines)
    page = Reader(render_report(read_report([tmp_path / "a"]))).said
    assert re.search(r"The axis begins at 0\.\d+, not at 0", page)


@settings(max_examples=60)
@given(low=st.floats(-1e6, 1e6), size=st.floats(1e-6, 1e6))
def test_ticks_are_even_and_reach_both_ends(low: float, size: float):
    high = low + size
    if not high > low or size < 1e-9 * abs(low):
        return
    found = ticks(low, high)
    slack = 1e-6 * (abs(low) + size)
    assert found[0] <= low + slack
    assert found[-1] >= high - slack
    assert 2 <= len(found) <= 8
    assert np.diff(found) == pytest.approx(found[1] - found[0], rel=1e-3)


@settings(max_examples=60)
@given(n=st.integers(1, 300), points=st.integers(1, 40), seed=st.integers(0, 2**32 - 1))
def test_a_thinned_curve_is_the_means_of_equal_stretches(n: int, points: int, seed: int):
    rng = np.random.default_rng(seed)
    steps = np.sort(rng.choice(np.arange(1, 1000), n, replace=False)).astype(float)
    series = Series(steps, np.ones(n), rng.normal(size=n))
    last = steps[-1]
    x, y = thinned(series, points)
    cells: dict[int, list[int]] = {}
    for i, step in enumerate(steps):
        cells.setdefault(min(math.floor((step - 1) / last * points), points - 1), []).append(i)
    expected = [(np.mean(steps[rows]), np.mean(series.value[rows])) for _, rows in sorted(cells.items())]
    assert np.stack([x, y], 1) == pytest.approx(np.array(expected))
    assert len(x) <= points


def test_many_runs_stay_apart_in_colour_or_stroke(tmp_path: Path):
    page = render_report(read_report([make_run(tmp_path / f"r{i:02d}", evaluate=False) for i in range(12)]))
    looks = re.findall(r'<svg class="swatch".*?</svg>', page)
    assert len(set(looks)) == 12


def test_the_command_prints_a_table_and_its_json_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", level=1.0, config={"lr": 0.1})
    assert run_cli(["report", str(a), str(b)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"dual TR R@1 +40\.00 +41\.00", said)
    assert "Their configurations differ in lr." in said
    assert "--html report.html" in said
    page = tmp_path / "r.html"
    assert run_cli(["report", str(a), str(b), "--html", str(page), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["html"] == {"path": str(page), "size_bytes": page.stat().st_size}
    assert summary["differences"] == {"config.lr": [0.001, 0.1]}
    assert [run["evaluation"]["dual_tr_r1"] for run in summary["runs"]] == [40, 41]


def test_a_run_of_the_trainer_is_read_whole(make_workspace: MakeWorkspace):
    workspace = make_workspace(12, captions=1, splits=["train"] * 8 + ["test"] * 4)
    values = {"method": "albef", "epochs": 2, "batch_size": 4, "device": "cpu", "threads": 1, "tensorboard": False}
    result = train(workspace, values, run="r")
    report = read_report([workspace.root])
    (found,) = summarise(report)["runs"]
    assert (found["steps"], found["last_epoch"], found["complete"]) == (4, 2, True)
    assert found["end"]["loss"] == pytest.approx(result["losses"]["loss"])
    assert {"dual_rsum", "itm_rsum"} <= set(found["evaluation"])
    assert found["evaluation"]["dual_rsum"] == pytest.approx(result["evaluation"]["dual_rsum"])
    assert 0 < found["step_seconds"] <= result["seconds"] + 1
    said = Reader(render_report(report)).said
    assert "finished, 2 epochs" in said
    assert "norm of the gradient" in said
    assert "Retrieval by time" in said
    both = [panel.title for panel in by_time(report.runs)]
    assert both == ["two towers: R@1, mean of both directions", "re-ranked by ITM: R@1, mean of both directions"]


BROWSER = find_browser()


def test_retrieval_is_drawn_over_the_minutes_that_the_steps_took(tmp_path: Path):
    make_run(tmp_path / "runs" / "one", more={"images_per_s": 4.0})
    run = read_run(tmp_path / "runs" / "one", "one")
    # Steps of 8 images at 4 a second take two seconds each; an epoch ends after its last step.
    per_epoch = run.last_step // 4
    minutes = minutes_until(run, run.evaluations["dual_tr_r1"])
    assert minutes is not None
    assert minutes.tolist() == pytest.approx([2 * per_epoch * epoch / 60 for epoch in (1, 2, 3, 4)])


def test_runs_that_differ_in_their_search_space_are_drawn_over_it(make_workspace: MakeWorkspace):
    rng = np.random.default_rng(0)
    workspace = make_workspace(64, embeddings=(rng.normal(size=(64, 4)), rng.normal(size=(64, 4))))
    for space in (16, 32):
        group(workspace, GroupConfig(batch_size=8, search_space=space, name=f"m{space}"))
    group(workspace, GroupConfig(batch_size=8, search_space=16, quantile=0.9, name="quantile"))
    for name, plan, more in (("a", "m16", 0.1), ("b", "m16", 0.2), ("c", "m32", 0.3), ("q", "quantile", 0.05)):
        make_run(
            workspace.root / "runs" / name, config={"groups": plan}, more={"false_negatives": more}, level=100 * more
        )
    make_run(workspace.root / "runs" / "drawn", config={"groups": None})
    report = read_report([workspace.root])
    said = Reader(render_report(report)).said
    assert "By the search space of their batches" in said
    # One run alone at its quantile makes no line, and random batches have no M.
    (panel, *_) = by_space(report.runs)
    rows = [[row[0].text, *row[1:]] for row in panel.table.rows if isinstance(row[0], Cell)]
    assert rows == [["grit", "16", "0.1"], ["grit", "16", "0.2"], ["grit", "32", "0.3"]]
    # Two runs of one M are one point.
    assert panel.chart.svg.count("<circle") == 2
    one = read_report([workspace.root / "runs" / "a", workspace.root / "runs" / "q"])
    assert by_space(one.runs) == []


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_a_browser_shows_the_page_in_light_and_dark_and_on_a_phone(tmp_path: Path):
    runs = [make_run(tmp_path / NASTY.replace("/", "-")), make_run(tmp_path / "b", level=0.5, config={"lr": 0.1})]
    write_report(read_report(runs), tmp_path / "r.html")
    assert BROWSER is not None
    with browse(BROWSER) as page:
        page.size(1280, 900)
        page.dark(False)
        page.open((tmp_path / "r.html").as_uri())
        colours = "[getComputedStyle(document.body), getComputedStyle(document.querySelector('.c0'))].map(s => s.%s)"
        light = page.run(colours % "backgroundColor")[0], page.run(colours % "color")[1]
        page.dark(True)
        dark = page.run(colours % "backgroundColor")[0], page.run(colours % "color")[1]
        assert light[0] != dark[0]
        assert light[1] != dark[1]
        assert page.run("document.querySelectorAll('.panel svg .line').length") >= 8
        assert page.run("document.querySelectorAll('script').length") == 0
        width = page.run("document.querySelector('.panel svg').getBoundingClientRect().width")
        assert width > 300
        page.size(390, 800, mobile=True)
        assert page.run("document.documentElement.scrollWidth") <= 390
        told = [event for event in page.events if event.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown")]
        assert told == []
