"""The life of a directory that one command fills, and the record in it of what was made from what.

The record, ``meta.json``, says with which parameters and from which inputs (by digest) the files beside it were made.
It carries two laws: a finished directory filled again does not change, and one that was begun is never continued with
other parameters or inputs. Nothing here knows a workspace.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from string import hexdigits
from typing import Any

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import atomic
from fnpipe.pipeline.files.digests import content_digest, digest_listed
from fnpipe.pipeline.made_by import MADE_BY

# Of ``fnpipe.json`` and of every ``meta.json``.
FORMAT_VERSION = 1
META = "meta.json"
RUN_CONFIG = "config.json"
LOCK = ".lock"

_META_KEYS: dict[str, type] = {"params": dict, "inputs": dict, "digest": str}


@dataclass(frozen=True)
class RecordedDirectory:
    """A directory such as ``.../embeddings/clip``, filled by one command and described by its ``meta.json``."""

    path: Path

    @property
    def kind(self) -> str:
        """What it holds: ``embeddings``, ``graph``, ``groups``, ``edges`` or ``runs``."""
        return self.path.parent.name

    @property
    def name(self) -> str:
        """Its name inside the workspace, such as ``embeddings/clip``."""
        return f"{self.kind}/{self.path.name}"

    @property
    def command(self) -> str:
        """The command that fills it."""
        return f"fnpipe {MADE_BY.get(self.kind, self.name)}"

    @property
    def beside(self) -> Path:
        """The folder of the record and of whatever is no part of the stage's table.

        It is the stage's own directory but for edges. Theirs opens as one table in other programs, and polars refuses
        a folder with anything else in it.
        """
        return self.path.with_name(f".{self.path.name}.record") if self.kind == "edges" else self.path

    @property
    def record(self) -> Path:
        """Where the stage's record is, or will be; that of edges of 0.1.0 stands among their parts."""
        path, old = self._new_record, self.path / META
        return path if path.exists() or not old.exists() else old

    @property
    def _new_record(self) -> Path:
        return self.beside / (RUN_CONFIG if self.kind == "runs" else META)

    def meta(self) -> dict[str, Any] | None:
        """What the record says, or None where the stage was never begun, or its directory was removed.

        Raises:
            InputError: it is damaged.
        """
        meta = read_object(self.record) if self.path.is_dir() else None
        if meta is not None:
            for key in _META_KEYS if meta.get("complete") else ("params", "inputs"):
                if not isinstance(meta.get(key), _META_KEYS[key]):
                    raise InputError(f"{self.record}: damaged (no {key!r}); run `{self.command}` with --overwrite")
        return meta

    def write_meta(self, meta: Mapping[str, Any]) -> None:
        """Write the record, in the place of one that 0.1.0 left elsewhere."""
        atomic.write_json(self._new_record, meta)
        if self.beside != self.path:
            (self.path / META).unlink(missing_ok=True)

    @property
    def digest(self) -> str:
        """The digest of what the finished stage holds: equal bytes, equal digest."""
        meta = self.meta()
        if meta is None or not meta.get("complete"):
            raise InputError(f"{self.path}: not finished; run `{self.command}` again")
        return str(meta["digest"])

    def begin(self, params: Mapping[str, Any], inputs: Mapping[str, str], *, overwrite: bool = False) -> bool:
        """Start or continue the stage; True when there is work to do, False when it is finished already.

        Args:
            params: every parameter that changes the bytes, as JSON values.
            inputs: what it is made from: ``{"pairs": workspace.digest, "embeddings/clip": stage.digest}``.
            overwrite: throw away what is there and start afresh.

        Raises:
            InputError: the stage was begun with other parameters or from other inputs.
        """
        made_with = json.loads(json.dumps({"params": dict(params), "inputs": dict(inputs)}))
        meta = None if overwrite else self.meta()
        if meta is None:
            self.start({"format": FORMAT_VERSION, **made_with, "complete": False}, overwrite=overwrite)
            return True
        self._remove_replaced()
        self._refuse_mixing(meta, made_with)
        if meta.get("complete"):
            return False
        self.sweep()
        return True

    def start(self, record: Mapping[str, Any], *, overwrite: bool) -> None:
        """Write the first record of the stage; with ``overwrite`` in the place of all that is there.

        What is there goes out of the way in one step: killed at any moment, the stage is the old one, whole, or a new
        one that has begun, never a part of the old.

        Raises:
            InputError: files are there without a record, or the directory is a link.
        """
        self._remove_replaced()
        self.refuse_unrecorded(overwrite=overwrite)
        if self.path.is_symlink() and overwrite:
            target = self.path.resolve()
            raise InputError(f"{self.path}: a link to {target}, which --overwrite leaves alone; remove it yourself")
        if overwrite or not self.path.exists():
            self._set_aside()
        self.path.mkdir(parents=True, exist_ok=True)
        self.write_meta(record)
        self._remove_replaced()
        self.sweep()

    def refuse_unrecorded(self, *, overwrite: bool) -> None:
        """Refuse files that no record speaks of: nobody knows what they were made from.

        Raises:
            InputError: there are such, and they are not to be overwritten.
        """
        if overwrite or self.record.exists() or not self.path.is_dir():
            return
        files = (path for path in self.path.iterdir() if not path.name.startswith(atomic.TEMPORARY_PREFIX))
        if file := next(files, None):
            raise InputError(
                f"{self.path}: holds {file.name} but no {self.record.name}, which says what it was made from; bring "
                "that back, or --overwrite to start afresh"
            )

    @property
    def _replaced(self) -> Path:
        """Where a stage that is overwritten goes, until it is removed."""
        return self.path.with_name(f".{self.path.name}.replaced")

    def _set_aside(self) -> None:
        # The record goes first: without it, and with one that is set aside, what is left belongs to the old stage.
        if self.beside.exists():
            self.beside.rename(self._replaced)
        if self.path.exists():
            self.path.rename(self._replaced / "parts" if self._replaced.exists() else self._replaced)

    def _remove_replaced(self) -> None:
        if self._replaced.exists():
            if not self.record.exists() and self.path.exists():
                shutil.rmtree(self.path)
            shutil.rmtree(self._replaced)

    def sweep(self) -> None:
        """Remove what killed writers left behind."""
        for folder in {self.path, self.beside}:
            atomic.sweep(folder)

    def finish(
        self, outputs: Sequence[str | Path], beside: Sequence[str | Path] = (), /, **facts: Any
    ) -> dict[str, Any]:
        """Mark the stage as finished: list its ``outputs`` with their digests, and record ``facts``.

        Args:
            outputs: names inside the stage, or whole paths, hashed in this order.
            beside: further ones, which are listed, but are no part of the stage's own digest.
        """
        made = self.digests(outputs)
        listed = {**made, **self.digests(beside)}
        meta = {**facts, **(self.meta() or {}), "complete": True, "digest": digest_listed(made), "outputs": listed}
        self.write_meta(meta)
        return meta

    def outputs(self) -> list[Path]:
        """The files of the stage in the order of its record; by rule where that lists none, as in 0.1.0."""
        meta = self.meta() or {}
        names = meta.get("outputs")
        return [self.place(name) for name in (names if isinstance(names, dict) else self.unlisted(meta))]

    def place(self, name: str | Path) -> Path:
        """Where an output of this name is: the parts in the stage's directory, what has a folder of its own beside."""
        return (self.beside if len(Path(name).parts) > 1 else self.path) / name

    def listed_as(self, output: Path) -> str:
        """The name of an output in the record."""
        return output.relative_to(self.path if output.is_relative_to(self.path) else self.beside).as_posix()

    def digests(self, outputs: Sequence[str | Path]) -> dict[str, str]:
        """sha256 by name of outputs, given by their names or as whole paths, in their order."""
        # A workspace may be named by a relative path; a whole path then begins with it and must not get it twice.
        whole = [Path(output) for output in outputs]
        paths = [p if p.is_relative_to(self.path) or p.is_relative_to(self.beside) else self.place(p) for p in whole]
        return {self.listed_as(path): content_digest(path) for path in paths}

    def missing(self) -> list[Path]:
        """The outputs that are not there."""
        outputs = self.outputs()
        # One look at each folder instead of one at each file, of which there may be thousands.
        there = {folder: _files(folder) for folder in {path.parent for path in outputs}}
        return [path for path in outputs if path.name not in there[path.parent]]

    def require_outputs(self) -> None:
        """Refuse a stage of which a file is gone: with what is left, later stages would be made of less."""
        if missing := self.missing():
            raise atomic.gone(missing[0])

    def unlisted(self, meta: Mapping[str, Any]) -> list[str]:
        """The names of the files that a record speaks of without listing them."""
        return []

    def _refuse_mixing(self, meta: Mapping[str, Any], wanted: Mapping[str, Mapping[str, Any]]) -> None:
        for part in ("params", "inputs"):
            before, now = meta[part], wanted[part]
            for key in sorted(before.keys() | now.keys()):
                if before.get(key) != now.get(key):
                    # A graph is named after its embeddings; everything else has a name of its own.
                    other = "" if self.name.startswith("graph/") else "use another --name, or "
                    what = _difference(key, before.get(key), now.get(key), of_input=part == "inputs")
                    raise InputError(f"{self.path}: {what}; {other}--overwrite to start afresh")


def _files(folder: Path) -> set[str]:
    try:
        with os.scandir(folder) as entries:
            return {entry.name for entry in entries if entry.is_file()}
    except (FileNotFoundError, NotADirectoryError):
        return set()


def read_object(path: Path) -> dict[str, Any] | None:
    """The object that a JSON file of ours holds; None where there is no file.

    Raises:
        InputError: it is damaged.
    """
    try:
        facts = path.stat()
        # A copy, because the parsed object is kept for the next one who asks: some records list thousands of files.
        return dict(_parsed(path, (facts.st_mtime_ns, facts.st_size, facts.st_ino)))
    except (FileNotFoundError, NotADirectoryError):
        return None


@lru_cache(maxsize=32)
def _parsed(path: Path, state: tuple[int, int, int]) -> dict[str, Any]:
    """The object in a JSON file whose time, size and inode are those of ``state``."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: damaged ({error}); delete it and run the stage again") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: damaged (not an object); delete it and run the stage again")
    return value


def _difference(key: str, before: Any, now: Any, *, of_input: bool) -> str:
    """What is another than a stage was started with; of digests, which say nothing to people, whose they are."""
    if of_input and None not in (before, now):
        return f"started from another state of {key}"
    if isinstance(before, dict) and isinstance(now, dict) and before.keys() == now.keys():
        changed = next(name for name in before if before[name] != now[name])
        if all(_is_digest(value) for value in (before[changed], now[changed])):
            return f"started with another state of {key} ({changed})"
        return f"started with {key} {changed} {_show(before[changed])}, now {_show(now[changed])}"
    return f"started with {'input ' if of_input else ''}{key} {_show(before)}, now {_show(now)}"


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and len(value) >= 32 and set(value) <= set(hexdigits)


def _show(value: Any) -> str:
    if isinstance(value, dict):
        value = ", ".join(map(str, value)) or None
    text = "nothing" if value is None else "another" if _is_digest(value) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
