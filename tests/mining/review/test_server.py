"""The page of a review: who is let in, and how it behaves in a browser."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import uvicorn
from test_answers import kept
from test_gallery import NASTY, WORSE, write_edges
from workspaces import png

from browser import browse, find_browser
from conftest import MakeWorkspace
from fnpipe.mining.review.answers import read_answers
from fnpipe.mining.review.config import ReviewConfig
from fnpipe.mining.review.server import MAX_BODY, Door, listen, review_app
from fnpipe.mining.review.session import Review, open_review

BROWSER = find_browser()


@dataclass
class Served:
    review: Review
    door: Door

    def ask(self, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> tuple[int, bytes, Any]:
        """A request as the page makes it, but for ``headers``; one that is empty is left out."""
        address = f"127.0.0.1:{self.door.port}"
        sent = {"Host": address, "Cookie": f"{self.door.cookie}={self.door.token}"}
        if method == "POST":
            sent |= {"Origin": f"http://{address}", "Content-Type": "application/json"}
        sent |= {name.replace("_", "-").title(): value for name, value in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self.door.port, timeout=20)
        connection.putrequest(method, path, skip_host=True)
        for name, value in sent.items():
            if value:
                connection.putheader(name, value)
        if body is not None and "Transfer-Encoding" not in sent:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders()
        # It may be refused before it is read to its end.
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.send(body or b"")
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers

    def answer(self, **changed: Any) -> bytes:
        return json.dumps({"id": "client-0001", "position": 0, "reviewer": "ann", "verdict": "yes"} | changed).encode()


@contextmanager
def serving(review: Review, *, known: bool = True) -> Iterator[Served]:
    listening = listen("127.0.0.1", 0)
    door = Door("the-token", "127.0.0.1", listening.getsockname()[1])
    app = review_app(review, door, "ann", known=known)
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="error", lifespan="off", ws="none", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield Served(review, door)
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def served(make_workspace: MakeWorkspace) -> Iterator[Served]:
    """Six images, of which the last does not decode; six edges of images 0 to 5, two with markup for a caption."""
    pictures = [png((40 * i, 90, 200 - 30 * i), (64, 48)) for i in range(5)] + [png((0, 0, 0))[:48].ljust(400, b"\0")]
    workspace = make_workspace(6, texts=["a red dog", NASTY, WORSE, "a cat", "a bird", "a tree"], pictures=pictures)
    stage = write_edges(workspace, [(i, (i + 1) % 6, 0.1 + 0.15 * i, False) for i in range(6)])
    with serving(open_review(workspace, stage, ReviewConfig())) as found:
        yield found


def test_hostile_requests_are_refused_and_write_nothing(served: Served):
    port, good = served.door.port, served.answer()
    post = {"path": "/answers", "method": "POST", "body": good}
    chunked = b"".join(b"10000\r\n" + b"a" * 0x10000 + b"\r\n" for _ in range(2)) + b"0\r\n\r\n"
    hostile: list[dict[str, Any]] = [
        post | {"host": f"evil.example:{port}"},
        post | {"host": "127.0.0.1"},
        {"path": "/", "host": f"evil.example:{port}"},
        post | {"origin": "http://evil.example"},
        post | {"origin": f"https://127.0.0.1:{port}"},
        post | {"origin": "null"},
        post | {"origin": ""},
        {"path": "/items?reviewer=ann&after=-1&count=5", "origin": "http://evil.example"},
        post | {"cookie": ""},
        post | {"cookie": f"{served.door.cookie}=the-tokem"},
        {"path": "/?token=wrong", "cookie": ""},
        {"path": "/pictures/0", "cookie": ""},
        {"path": "/summary", "cookie": ""},
        {"path": "/pictures/../../fnpipe.json"},
        {"path": "/pictures/%2e%2e%2ffnpipe.json"},
        {"path": "/pictures/99999999999999999999999"},
        {"path": "/pictures/-1"},
        {"path": "/fnpipe.json"},
        {"path": "/items?reviewer=%3Cscript%3E&after=-1&count=5"},
        {"path": "/items?reviewer=ann&after=x&count=5"},
        {"path": "/answers"},
        post | {"path": "/"},
        post | {"method": "PUT"},
        post | {"method": "DELETE"},
        post | {"content_type": "text/plain"},
        post | {"body": b"{"},
        post | {"body": b"\xff\xfe"},
        post | {"body": b"[" * 60_000},
        post | {"body": b"[]"},
        post | {"body": served.answer(reviewer=NASTY)},
        post | {"body": served.answer(reviewer="ann\n")},
        post | {"body": served.answer(reviewer="a" * 81)},
        post | {"body": served.answer(verdict="maybe")},
        post | {"body": served.answer(verdict=["yes"])},
        post | {"body": served.answer(position=6)},
        post | {"body": served.answer(position=-1)},
        post | {"body": served.answer(position=True)},
        post | {"body": served.answer(position=1e300)},
        post | {"body": served.answer(id="../../etc")},
        post | {"body": served.answer(id="a" * 65)},
        post | {"body": served.answer(more=1)},
        post | {"body": b" " * (MAX_BODY + 1)},
        post | {"body": chunked, "transfer_encoding": "chunked"},
    ]
    for request in hostile:
        status, _, headers = served.ask(**request)
        assert 400 <= status < 500, request
        if "server" not in headers:
            assert headers["x-content-type-options"] == "nosniff"
    assert kept(served.review.path) == []
    assert served.ask(**post)[0] == 200
    assert [row[1:] for row in kept(served.review.path)] == [
        (int(served.review.asked.image_id[0]), int(served.review.asked.pair_id[0]), "ann", "yes")
    ]


def test_the_page_is_kept_nowhere_and_runs_nothing_but_its_own(served: Served):
    status, page, headers = served.ask("/?token=the-token", cookie="")
    assert status == 200
    assert headers["cache-control"] == "no-store"
    assert {"HttpOnly", "SameSite=strict"} <= set(headers["set-cookie"].split("; "))
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert b"script-src &#39;sha256-" in page or b"script-src 'sha256-" in page
    assert b"unsafe-inline" not in page
    assert b"the-token" not in page


def test_pictures_are_small_and_one_that_does_not_decode_is_said(served: Served):
    status, data, headers = served.ask("/pictures/0")
    assert (status, headers["content-type"], data[:2]) == (200, "image/jpeg", b"\xff\xd8")
    status, data, _ = served.ask("/pictures/5")
    assert (status, json.loads(data)["error"]) == (404, "the picture does not decode")


def press(page: Any, keys: str) -> None:
    for key in keys:
        page.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=key)
        page.call("Input.dispatchKeyEvent", type="keyUp", key=key)


def text(page: Any, name: str) -> str:
    return page.run(f"document.getElementById('{name}').textContent")


def wait(page: Any, expression: str) -> None:
    """Until an expression is true."""
    script = (
        f"new Promise(done => {{ const look = () => ({expression}) ? done(true) : setTimeout(look, 20); look(); }})"
    )
    page.run(f"Promise.race([{script}, new Promise((_, no) => setTimeout(() => no(new Error('never')), 15000))])")


def reopen(page: Any, url: str) -> None:
    page.events.clear()
    page.open(url)
    wait(page, "!document.getElementById('question').hidden || !document.getElementById('done').hidden")


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
def test_keys_answer_and_take_back_and_a_reload_goes_on(served: Served):
    review = served.review
    address = f"http://127.0.0.1:{served.door.port}/"
    with browse(BROWSER) as page:
        reopen(page, served.door.url)
        assert page.run("location.href") == address
        assert text(page, "caption") == review.mined[0]
        assert text(page, "p") == ""
        press(page, "ynzu")
        wait(page, "unsent === 0")
        assert text(page, "count") == "2 of 6"
        assert [row[4] for row in kept(review.path)] == ["yes", "no", "undo", "unsure"]
        reopen(page, address)
        assert (text(page, "count"), text(page, "caption")) == ("2 of 6", review.mined[2])
        press(page, "z")
        assert text(page, "caption") == review.mined[1]
        page.run("document.getElementById('toggle').click()")
        assert text(page, "p") == f"p = {review.asked.p[1]:.4f}"
        press(page, "nyyyyyy")
        wait(page, "document.getElementById('summary').rows.length > 0")
        head, *lines = page.run("document.getElementById('summary').innerText").split("\n")
        assert head.split("\t") == ["p above", "edges", "asked", "right, %", "with 95 %"]
        # Everything is answered, so that nothing is left open.
        said = {
            float(row["match_probability"]): row["verdict"]
            for row in read_answers(review.workspace, "made").to_pylist()
        }
        for line, (threshold, mark) in zip(lines, {0.0: "0", 0.5: "0.5", 0.8: "0.8 (labels)"}.items(), strict=True):
            above = [verdict for p, verdict in said.items() if p > threshold]
            right = f"{100 * above.count('yes') / len(above):.1f}"
            assert line.split("\t") == [mark, str(len(above)), str(len(above)), right, f"{right} to {right}"]
        assert text(page, "totals") == "6 answers to 6 edges, by ann."
        # Markup in captions was seen on the way, and stayed text.
        assert page.run("document.querySelectorAll('main script, main img[onerror]').length") == 0
        bad = [e for e in page.events if e.get("method") == "Runtime.exceptionThrown"]
        assert bad == []
    answers = read_answers(review.workspace, review.name)
    assert sorted(answers["verdict"].to_pylist()) == ["no", "yes", "yes", "yes", "yes", "yes"]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
def test_on_a_phone_nothing_is_wider_than_the_screen_and_a_name_is_asked_once(served: Served):
    with serving(served.review, known=False) as asking, browse(BROWSER) as page:
        page.size(390, 844, mobile=True)
        page.open(asking.door.url)
        assert page.run("document.getElementById('name').value") == "ann"
        page.run("document.getElementById('name').value = '<b>'; document.querySelector('#who button').click()")
        wait(page, "!document.getElementById('trouble').hidden")
        page.run("document.getElementById('name').value = 'Åsa B.'; document.querySelector('#who button').click()")
        wait(page, "!document.getElementById('question').hidden")
        assert page.run("document.documentElement.scrollWidth") <= 390
        box = page.run("JSON.stringify(document.querySelector('[data-verdict=unsure]').getBoundingClientRect())")
        assert json.loads(box)["height"] >= 44
        assert json.loads(box)["bottom"] <= 844
        page.run("document.querySelector('[data-verdict=no]').click()")
        wait(page, "unsent === 0")
        assert [row[3:] for row in kept(served.review.path)] == [("Åsa B.", "no")]
        for _ in range(5):
            page.run("document.querySelector('[data-verdict=yes]').click()")
        wait(page, "document.getElementById('summary').rows.length > 0")
        assert page.run("document.documentElement.scrollWidth") <= 390
        widest = (
            "Math.max(...[...document.querySelectorAll('#summary td')].map(cell => cell.getBoundingClientRect().right))"
        )
        assert page.run(widest) <= page.run("document.getElementById('done').getBoundingClientRect().right")


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
def test_of_two_tabs_that_answer_the_same_both_answers_are_kept_and_the_later_counts(served: Served):
    with browse(BROWSER) as one, browse(BROWSER) as other:
        for page in (one, other):
            reopen(page, served.door.url)
        press(one, "yy")
        wait(one, "unsent === 0")
        press(other, "n")
        wait(other, "unsent === 0")
        assert [row[4] for row in kept(served.review.path)] == ["yes", "yes", "no"]
        assert sorted(read_answers(served.review.workspace, "made")["verdict"].to_pylist()) == ["no", "yes"]
        reopen(other, f"http://127.0.0.1:{served.door.port}/")
        assert (text(other, "count"), text(other, "caption")) == ("2 of 6", served.review.mined[2])


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
def test_a_key_costs_no_more_with_many_edges(make_workspace: MakeWorkspace):
    """Of 10,000 edges the page holds few, so that a key's work does not grow with them."""
    workspace = make_workspace(101)
    rng = np.random.default_rng(0)
    rows = [(i, j, float(rng.random()), False) for i in range(101) for j in range(101) if i != j][:10_000]
    review = open_review(workspace, write_edges(workspace, rows), ReviewConfig(count=10_000))
    with serving(review) as served, browse(BROWSER) as page:
        reopen(page, served.door.url)
        assert text(page, "count") == "0 of 10,000"
        for _ in range(4):
            press(page, "y" * 10)
            wait(page, "unsent === 0 && !loading")
        assert text(page, "count") == "40 of 10,000"
        assert page.run("queue.length + preloaded.size") <= 80
        assert page.run("document.querySelectorAll('*').length") <= 100
