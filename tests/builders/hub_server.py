"""A stand-in of the Hugging Face Hub: one data set, served from a folder over HTTP to the real client libraries."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

REVISION = "0123456789abcdef0123456789abcdef01234567"


class _Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    folder: Path
    name: str
    asked: list[str]
    watch: Callable[[int], None]

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.asked.append(f"{self.command} {self.path}")
        self.watch(len(self.asked))
        api = f"/api/datasets/{self.name}"
        if path in (api, f"{api}/revision/main", f"{api}/revision/{REVISION}"):
            files = [{"rfilename": entry["path"]} for entry in self._entries("", True) if entry["type"] == "file"]
            self._json({"id": self.name, "sha": REVISION, "siblings": files, "private": False, "gated": False})
        elif found := re.match(rf"{api}/tree/([^/]+)/?(.*)$", path):
            if not (self.folder / found[2]).is_dir():
                return self._json({"error": "not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            self._json(self._entries(found[2], "recursive=true" in self.path.lower()))
        elif found := re.match(rf"/datasets/{self.name}/resolve/([^/]+)/(.+)$", path):
            self._file(self.folder / found[2])
        else:
            self._json({"error": "not found"}, 404, {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self.asked.append(f"POST {self.path}")
        sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            wanted = json.loads(sent)["paths"]
        except (ValueError, KeyError):
            wanted = [unquote(part.partition("=")[2]) for part in sent.decode().split("&") if part.startswith("paths")]
        entries = {entry["path"]: entry for entry in self._entries("", True)}
        self._json([entries[path] for path in wanted if path in entries])

    def _entries(self, below: str, recursive: bool) -> list[dict[str, Any]]:
        start = self.folder / below
        found = sorted(start.rglob("*") if recursive else start.iterdir())
        return [self._entry(path) for path in found]

    def _entry(self, path: Path) -> dict[str, Any]:
        name = path.relative_to(self.folder).as_posix()
        kind = "directory" if path.is_dir() else "file"
        size = 0 if path.is_dir() else path.stat().st_size
        return {"type": kind, "path": name, "size": size, "oid": hashlib.sha1(name.encode()).hexdigest()}

    def _file(self, path: Path) -> None:
        if not path.is_file():
            return self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
        data = path.read_bytes()
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": REVISION, "Accept-Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not wanted:
            return self._answer(data, 200, headers)
        first, last = int(wanted[1]), min(int(wanted[2] or len(data) - 1), len(data) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        self._answer(data[first : last + 1], 206, headers)

    def _json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._answer(json.dumps(value).encode(), status, {"Content-Type": "application/json", **(headers or {})})

    def _answer(self, data: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def hub_of(
    folder: Path, watch: Callable[[int], None] = lambda asked: None, name: str = "owner/set"
) -> Iterator[tuple[str, list[str]]]:
    """Serve ``folder`` as the data set ``name``; gives the endpoint, and what was asked of it so far.

    Args:
        watch: called with the number of questions so far, before each is answered.
    """
    asked: list[str] = []
    handler = type("Handler", (_Hub,), {"folder": folder, "name": name, "asked": asked, "watch": staticmethod(watch)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()


def start(endpoint: str, home: Path, *arguments: str) -> subprocess.Popen[str]:
    """A command against a hub, in a process of its own: the client reads the endpoint when it is loaded."""
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-m", "fnpipe.cli", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def fnpipe(endpoint: str, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command against a hub to its end."""
    process = start(endpoint, home, *arguments)
    out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
