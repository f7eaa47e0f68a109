"""The page of a review, served to the browser of who answers.

It is meant for one machine, and guarded as if it were not: other pages of the same browser can reach it as well. Every
request carries a token that was drawn at the start, names one of the server's own addresses as its host, and comes from
no other origin.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fnpipe.mining.review.answers import UNDO
from fnpipe.mining.review.config import REVIEWER
from fnpipe.mining.review.schema import VERDICTS
from fnpipe.mining.review.session import Review
from fnpipe.mining.views.pages import render_page
from fnpipe.pipeline.errors import InputError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

TEMPLATE = Path(__file__).with_name("review.html")
MAX_BODY = 64 * 1024
MAX_ITEMS = 50
_CLIENT_ID = r"[0-9a-zA-Z-]{8,64}"
_HEADERS = {
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
}
# What is no page runs and loads nothing; the page says for itself which of its own style and script may apply.
_NOTHING = {"content-security-policy": "default-src 'none'; frame-ancestors 'none'"}
_PAGE = {"content-security-policy": "frame-ancestors 'none'; base-uri 'none'; form-action 'none'; object-src 'none'"}


@dataclass(frozen=True)
class Door:
    """Who is let in.

    Attributes:
        token: drawn at the start. host, port: where the server listens.
    """

    token: str
    host: str
    port: int

    @property
    def cookie(self) -> str:
        # Cookies of one machine are shared by its ports; of two reviews, each has its own.
        return "fnpipe-review-" + hashlib.sha256(self.token.encode()).hexdigest()[:12]

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/?token={self.token}"

    def refuses(self, request: Request) -> str | None:
        """Why a request is not answered; None where it is."""
        host = request.headers.get("host", "")
        if not self._is_ours(host):
            return "another host"
        origin = request.headers.get("origin")
        if origin != f"http://{host}" and (origin is not None or request.method not in ("GET", "HEAD")):
            return "another origin"
        given = request.query_params.get("token") or request.cookies.get(self.cookie, "")
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            return "no token, or another; open the address that fnpipe printed"
        return None

    def _is_ours(self, host: str) -> bool:
        name, _, port = host.rpartition(":")
        name = name.removeprefix("[").removesuffix("]")
        if port != str(self.port):
            return False
        if name in (self.host, "127.0.0.1", "localhost", "::1"):
            return True
        # On every address of the machine: a name could be another site's that leads here, an address cannot.
        return self.host in ("0.0.0.0", "::") and (_is_address(name) or name == socket.gethostname())


def review_app(review: Review, door: Door, reviewer: str, *, known: bool) -> ASGIApp:
    """The application.

    Args:
        reviewer: who answers, as the page suggests; known: and does not ask.
    """
    asked = set(review.asked.image_id.tolist())

    def page(request: Request) -> Response:
        return _page(review, door, reviewer, known)

    def items(request: Request) -> Response:
        after, count = (_number(request.query_params.get(name)) for name in ("after", "count"))
        return JSONResponse(review.items(_reviewer(request.query_params.get("reviewer")), after, min(count, MAX_ITEMS)))

    def picture(request: Request) -> Response:
        image_id = request.path_params["image_id"]
        if image_id not in asked:
            raise HTTPException(404, "no picture that is asked about")
        found = review.picture(image_id)
        if found is None:
            raise HTTPException(404, "the picture does not decode")
        # The address holds no secret, and the picture never changes: it may stay as long as the page.
        return Response(found, media_type="image/jpeg", headers={"cache-control": "private, max-age=3600"})

    async def answers(request: Request) -> Response:
        given = _answer(await _body(request), len(review.mined))
        if not await run_in_threadpool(review.answer, *given):
            raise HTTPException(409, "this id belongs to another answer")
        return JSONResponse({"kept": True})

    def summary(request: Request) -> Response:
        found = review.findings()
        return JSONResponse({key: found[key] for key in ("answers", "edges", "reviewers", "tau_high", "told")})

    routes = [
        Route("/", page),
        Route("/items", items),
        Route("/pictures/{image_id:int}", picture),
        Route("/answers", answers, methods=["POST"]),
        Route("/summary", summary),
    ]
    handlers: dict[Any, Any] = {HTTPException: _refused, InputError: _broken, OSError: _broken}
    return _guarded(Starlette(routes=routes, exception_handlers=handlers), door)


def _page(review: Review, door: Door, reviewer: str, known: bool) -> Response:
    data = {"edges": review.name, "workspace": review.workspace.root.resolve().name, "reviewer": reviewer}
    html = render_page(TEMPLATE, "Review", served=True, data={**data, "known": known})
    response = Response(html, media_type="text/html", headers=_PAGE)
    response.set_cookie(door.cookie, door.token, httponly=True, samesite="strict")
    return response


def _guarded(app: ASGIApp, door: Door) -> ASGIApp:
    """Let in who may come, and put the headers on every answer."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                has = {name.lower() for name, _ in message["headers"]}
                added = {k: v for k, v in (_HEADERS | _NOTHING).items() if k.encode() not in has}
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in added.items())]
            await send(message)

        if scope["type"] != "http":
            return
        why = door.refuses(Request(scope))
        inner = app if why is None else JSONResponse({"error": why}, 403)
        await inner(scope, receive, send_with_headers)

    return guarded


async def _body(request: Request) -> Any:
    """The JSON of a request, of which no more is read than is allowed, whatever length it names."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise HTTPException(415, "not application/json")
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise HTTPException(413, f"more than {MAX_BODY} bytes")
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise HTTPException(400, "no JSON") from None


def _answer(given: Any, asked: int) -> tuple[str, int, str, str]:
    """(client_id, position, reviewer, verdict) of a body."""
    if not isinstance(given, dict) or given.keys() != {"id", "position", "reviewer", "verdict"}:
        raise HTTPException(422, "an answer has id, position, reviewer and verdict")
    position, verdict = given["position"], given["verdict"]
    if type(position) is not int or not 0 <= position < asked:
        raise HTTPException(422, "no position in the sample")
    if verdict not in (*VERDICTS, UNDO):
        raise HTTPException(422, f"verdict: one of {', '.join(VERDICTS)}, {UNDO}")
    if not isinstance(given["id"], str) or not re.fullmatch(_CLIENT_ID, given["id"]):
        raise HTTPException(422, "id: 8 to 64 letters, digits and -")
    return given["id"], position, _reviewer(given["reviewer"]), verdict


def _reviewer(name: Any) -> str:
    if not isinstance(name, str) or not re.fullmatch(REVIEWER, name):
        raise HTTPException(422, "reviewer: at most 80 letters, digits, blanks and . , @ + ' -")
    return name


def _number(text: str | None) -> int:
    if text is None or not re.fullmatch(r"-1|[0-9]{1,9}", text, re.ASCII):
        raise HTTPException(422, "after, count: numbers, after from -1")
    return int(text)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _refused(request: Request, error: HTTPException) -> Response:
    return JSONResponse({"error": error.detail}, error.status_code, headers=error.headers)


def _broken(request: Request, error: Exception) -> Response:
    """What is broken on the disk; the page says it."""
    return JSONResponse({"error": str(error)}, 500)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
        InputError: the address is none of this machine, or taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(64)
    except OSError as error:
        raise InputError(f"--host {host} --port {port}: {error.strerror}; choose others, or leave them out") from None
    return listening


def serve(app: ASGIApp, listening: socket.socket) -> None:
    """Answer requests until Ctrl-C or SIGTERM."""
    settings: dict[str, Any] = {"log_level": "error", "access_log": False, "server_header": False, "lifespan": "off"}
    server = uvicorn.Server(uvicorn.Config(app, ws="none", timeout_graceful_shutdown=2, **settings))
    # uvicorn raises it again when it has stopped; what was answered is on the disk.
    with suppress(KeyboardInterrupt):
        server.run(sockets=[listening])
