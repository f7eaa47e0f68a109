"""The HTML page: what is in it, and how it behaves in a browser."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jinja2 import UndefinedError

from browser import browse, find_browser
from conftest import MakeWorkspace
from fnpipe.mining.data.truth import Truth
from fnpipe.mining.edges.labels import label_candidates, named, named_sources
from fnpipe.mining.edges.reader import EDGES_SCHEMA
from fnpipe.mining.edges.relabel import finish_edges
from fnpipe.mining.edges.thresholds import LABELS
from fnpipe.mining.views.gallery import TEMPLATE, write_gallery
from fnpipe.mining.views.pages import render_page
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import tables
from fnpipe.pipeline.workspace.workspace import Stage, Workspace

NASTY = "<script>alert(1)</script>"
WORSE = "</script><img src=x onerror=alert(2)><!-- \u2028 'quoted' & \"more\""


def write_edges(workspace: Workspace, rows) -> Stage:
    """Finished edges ``edges/made`` of ``(image_id, pair_id, p, identical)`` rows; similarity is p / 2."""
    stage = workspace.stage("edges/made")
    params = {"discriminator": {"kind": "made"}, "tau_low": 0.5, "tau_high": 0.8}
    stage.begin(params, {"pairs": workspace.digest})
    captions = workspace.read_pairs(["caption"])["caption"].to_pylist()
    rows = sorted(rows, key=lambda row: (row[0], -row[2], row[1]))
    images, pairs = (np.array([row[c] for row in rows], np.int64) for c in (0, 1))
    p, identical = np.array([row[2] for row in rows], np.float32), np.array([row[3] for row in rows], bool)
    none = pa.nulls(len(rows), pa.int16())
    columns = {
        "image_id": images,
        "pair_id": pairs,
        "image_key": [f"{i:08d}" for i in images],
        "caption": [captions[j] for j in pairs],
        "rank_i2t": none,
        "rank_t2i": none,
        "similarity": p / 2,
        "match_probability": p,
        "uncertainty": pa.nulls(len(rows), pa.float32()),
        "label": named(np.where(identical, 2, label_candidates(p, 0.5, 0.8)), LABELS),
        "source": named_sources(identical.astype(int)),
    }
    table = pa.table(columns, schema=EDGES_SCHEMA)
    shards = np.searchsorted(workspace.image_starts, images, side="right") - 1
    for shard in range(workspace.n_shards):
        part = table.filter(pa.array(shards == shard))
        tables.write_table(stage.path / f"part-{shard:05d}.parquet", part)
    finish_edges(stage, 0.5, 0.8, unique_combinations=len(rows), undecodable=0, new_per_source={})
    return stage


def data_of(page: str):
    """The data as a browser reads it: up to the first end of the element."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


@pytest.fixture
def small(make_workspace: MakeWorkspace):
    """Six images; image 0 has two positives of equal words, an ambiguous one and one by identity."""
    texts = ["a red dog", "a cat", NASTY, WORSE, "a cat", "a bird"]
    workspace = make_workspace(6, texts=texts)
    rows = [(0, 1, 0.9, False), (0, 4, 0.9, False), (0, 2, 0.6, False), (0, 5, 1.0, True), (0, 3, 0.1, False)]
    return workspace, write_edges(workspace, [*rows, (3, 2, 0.95, False), (5, 1, 0.2, False)])


def test_the_page_holds_what_is_positive_or_ambiguous_and_counts_everything(small, tmp_path):
    workspace, stage = small
    summary = write_gallery(workspace, stage, tmp_path / "r.html")
    data = data_of((tmp_path / "r.html").read_text())
    assert [image["id"] for image in data["images"]] == [0, 3]
    first, second = data["images"]
    assert first["name"] == "0.png"
    assert first["recorded"] == ["a red dog"]
    assert first["src"].startswith("data:image/")
    # kind, caption, p, similarity, truth, how many pairs have these words
    assert first["found"] == [
        [0, "a cat", 0.9, 0.45, None, 2],
        [1, NASTY, 0.6, 0.3, None, 1],
        [2, "a bird", 1.0, 0.5, None, 1],
    ]
    assert second["found"] == [[0, NASTY, 0.95, 0.475, None, 1]]
    assert second["recorded"] == [WORSE]
    assert (data["judgements"], data["counts"]) == (6, {"positive": 3, "ambiguous": 1, "identity": 1})
    assert sum(data["histogram"]) == 6
    assert [(top["name"], top["count"]) for top in data["topImages"]] == [("0.png", 2), ("3.png", 1)]
    assert data["topCaptions"][0] == {"caption": "a cat", "count": 2}
    assert (summary.shown, summary.connections, summary.images) == (5, 5, 2)
    assert summary.size_bytes == (tmp_path / "r.html").stat().st_size


def test_truth_marks_connections_and_adds_figures(small, tmp_path):
    workspace, stage = small
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"image": ["0.png"], "caption": ["a cat"]}), path)
    write_gallery(workspace, stage, tmp_path / "r.html", Truth.read(path, workspace))
    data = data_of((tmp_path / "r.html").read_text())
    assert [entry[4] for entry in data["images"][0]["found"]] == [1, 0, 0]
    assert data["truth"]["precision"] == pytest.approx(2 / 3)
    assert data["truth"]["recall"] == 1


def test_of_too_many_connections_an_even_sample_is_shown(make_workspace: MakeWorkspace, tmp_path):
    workspace = make_workspace(30)
    rows = [(i, j, 0.81 + 0.0002 * (i * 30 + j), False) for i in range(30) for j in range(30) if i != j]
    stage = write_edges(workspace, rows)
    summary = write_gallery(workspace, stage, tmp_path / "r.html", max_edges=50)
    assert (summary.shown, summary.connections) == (50, 870)
    p = sorted(e[2] for image in data_of((tmp_path / "r.html").read_text())["images"] for e in image["found"])
    assert p[0] == pytest.approx(0.8102, abs=1e-3)
    assert p[-1] == pytest.approx(0.9896, abs=1e-3)
    assert np.diff(p).max() < 2.2 * np.diff(p).mean()


def test_no_string_ends_the_element_that_holds_it():
    values = [NASTY, WORSE, "\ud800", "é 日本"]
    page = render_page(TEMPLATE, NASTY, data={"images": values}).decode()
    assert data_of(page)["images"] == values
    assert page.count("<script") == 2
    assert f"<title>{html.escape(NASTY)}</title>" in page
    text = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1]
    assert not set(text) & set("<>&\u2028\u2029")


def test_the_policy_lets_only_the_page_s_own_style_and_script_apply():
    page = render_page(TEMPLATE, "t", data={}).decode()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    style, script = (
        base64.b64encode(hashlib.sha256(re.search(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)[1].encode()).digest())
        for tag in ("style", "script")
    )
    assert policy.split("; ") == [
        "default-src 'none'",
        f"style-src 'sha256-{style.decode()}'",
        f"script-src 'sha256-{script.decode()}'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]


def test_a_template_that_is_given_too_little_is_a_fault_and_no_page(tmp_path):
    (tmp_path / "t.html").write_text('{% extends "page.html" %}{% block body %}{{ missing }}{% endblock %}')
    (tmp_path / "t.css").write_text("")
    with pytest.raises(UndefinedError, match="missing"):
        render_page(tmp_path / "t.html", "t")


def test_the_page_can_be_seen_under_other_thresholds(small, tmp_path):
    workspace, stage = small
    write_gallery(workspace, stage, tmp_path / "r.html", thresholds=(0.15, 0.92))
    data = data_of((tmp_path / "r.html").read_text())
    assert data["counts"] == {"positive": 1, "ambiguous": 4, "identity": 1}
    assert data["tau"] == [0.15, 0.92]


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ({"label": "ambiguous"}, {"ambiguous"}),
        ({"label": "positive"}, {"positive", "identity"}),
        ({"source": "identity"}, {"identity"}),
        ({"label": "positive", "source": "discriminator"}, {"positive"}),
    ],
)
def test_the_page_holds_the_label_and_source_that_were_asked_for_and_counts_all(small, tmp_path, asked, shown):
    workspace, stage = small
    write_gallery(workspace, stage, tmp_path / "r.html", **asked)
    data = data_of((tmp_path / "r.html").read_text())
    assert data["counts"] == {"positive": 3, "ambiguous": 1, "identity": 1}
    kinds = {("positive", "ambiguous", "identity")[entry[0]] for image in data["images"] for entry in image["found"]}
    assert kinds == shown
    assert data["total"] == data["shown"] == sum(data["counts"][kind] for kind in shown)


def test_a_page_of_what_was_not_found_is_refused(small, tmp_path):
    workspace, stage = small
    with pytest.raises(InputError, match="--label negative"):
        write_gallery(workspace, stage, tmp_path / "r.html", label="negative")
    with pytest.raises(InputError, match="--label ambiguous --source identity"):
        write_gallery(workspace, stage, tmp_path / "r.html", label="ambiguous", source="identity")
    assert not (tmp_path / "r.html").exists()


def test_nothing_found_makes_a_page_too(make_workspace: MakeWorkspace, tmp_path):
    workspace = make_workspace(2)
    summary = write_gallery(workspace, write_edges(workspace, [(0, 1, 0.1, False)]), tmp_path / "r.html")
    assert (summary.shown, summary.images) == (0, 0)


BROWSER = find_browser()
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")


def texts(page, selector):
    return page.run(f"[...document.querySelectorAll({selector!r})].map(e => e.textContent)")


def set_value(page, element, value, event):
    page.run(
        f"document.getElementById({element!r}).value = {json.dumps(value)};"
        f"document.getElementById({element!r}).dispatchEvent(new Event({event!r}))"
    )


def visible(page):
    """How many connections and images the page says it shows."""
    return [
        int(n) for n in re.findall(r"\d+", page.run("document.getElementById('state').textContent").replace(",", ""))
    ]


def wait_for(page, expression):
    deadline = time.monotonic() + 60
    while not page.run(expression):
        assert time.monotonic() < deadline, expression
        time.sleep(0.02)


@needs_browser
def test_captions_stay_text_and_nothing_is_loaded_or_run(small, tmp_path):
    workspace, stage = small
    write_gallery(workspace, stage, tmp_path / "r.html")
    with browse(BROWSER) as page:
        page.open((tmp_path / "r.html").as_uri())
        assert NASTY in texts(page, ".found .words")
        assert texts(page, ".recorded li")[1] == WORSE.replace("\u2028", "\u2028")
        assert page.run("document.querySelectorAll('.card script, .card img[onerror]').length") == 0
        assert page.run("[...document.querySelectorAll('.card img')].every(i => i.naturalWidth > 0)")
        methods = [event["method"] for event in page.events]
        assert "Page.javascriptDialogOpening" not in methods
        assert "Runtime.exceptionThrown" not in methods
        urls = [e["params"]["request"]["url"] for e in page.events if e["method"] == "Network.requestWillBeSent"]
        assert all(url.startswith(("file:", "data:")) for url in urls)
        # The policy holds: a script that got in would not run.
        page.run(
            "const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s)"
        )
        assert page.run("window.ran") is None


@needs_browser
def test_images_that_only_the_identity_rule_connects_stand_last(make_workspace: MakeWorkspace, tmp_path):
    workspace = make_workspace(6)
    rows = [(0, j, 1.0, True) for j in (1, 2, 3)] + [(1, 0, 0.7, False), (1, 2, 0.6, False), (2, 0, 0.9, False)]
    stage = write_edges(workspace, rows)
    stage.write_meta({**stage.require(), "notes": ["trust: a sentence"]})
    write_gallery(workspace, stage, tmp_path / "r.html")
    with browse(BROWSER) as page:
        page.open((tmp_path / "r.html").as_uri())
        wait_for(page, "document.documentElement.dataset.ready")
        orders = {"count": "210", "high": "210", "low": "120", "id": "012"}
        for order, expected in orders.items():
            set_value(page, "order", order, "change")
            assert texts(page, ".name") == [f"{number}.png" for number in expected]
        assert texts(page, "#notes .note") == ["trust: a sentence"]
        assert "Same picture and caption" in texts(page, ".found .kind")


@needs_browser
def test_filters_search_order_and_pages_work_with_ten_thousand_edges(make_workspace: MakeWorkspace, tmp_path):
    n, per = 400, 25
    fifth = n * per // 5
    rng = np.random.default_rng(0)
    workspace = make_workspace(n, texts=[f"thing number {i}" for i in range(n)], images_per_shard=1000)
    rows = []
    for i in range(n):
        for k, j in enumerate(rng.choice(n - 1, per, replace=False)):
            p = (0.99, 0.9, 0.85, 0.7, 1.0)[k % 5] - (i * 1e-5 if k % 5 == 0 else 0)
            rows.append((i, int(j + (j >= i)), p, k % 5 == 4))
    stage = write_edges(workspace, rows)
    assert write_gallery(workspace, stage, tmp_path / "r.html").shown == n * per
    with browse(BROWSER) as page:
        page.size(1300, 900)
        page.open((tmp_path / "r.html").as_uri())
        wait_for(page, "document.documentElement.dataset.ready")
        assert visible(page) == [n * per, n]
        assert len(texts(page, ".card")) == 24

        page.run("document.querySelector('.toggle.identity').click()")
        assert visible(page) == [fifth * 4, n]
        assert texts(page, ".found.identity") == []
        page.run("document.querySelector('.toggle.ambiguous').click()")
        assert visible(page) == [fifth * 3, n]
        set_value(page, "least", "0.88", "input")
        assert visible(page) == [fifth * 2, n]
        set_value(page, "most", "0.95", "input")
        assert visible(page) == [fifth, n]
        set_value(page, "most", "1", "input")
        set_value(page, "least", "0", "input")

        set_value(page, "order", "high", "change")
        assert texts(page, ".name")[:3] == ["0.png", "1.png", "2.png"]
        page.run("document.querySelector('#pager-top button:last-child').click()")
        assert texts(page, ".name")[:2] == ["24.png", "25.png"]
        assert page.run("document.querySelector('#pager-top span').textContent") == "2 of 17"

        set_value(page, "search", "number 234", "input")
        wait_for(page, "document.querySelectorAll('mark').length")
        found = [row for row in rows if row[2] > 0.8 and not row[3] and (row[1] == 234 or row[0] == 234)]
        assert visible(page) == [len(found), len({row[0] for row in found})]
        set_value(page, "search", "no such words", "input")
        wait_for(page, "!!document.querySelector('.nothing')")

        page.size(390, 800, mobile=True)
        assert page.run("document.documentElement.scrollWidth") == 390
