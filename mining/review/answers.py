"""Answers of people to mined connections: kept in one SQLite file, appended to and never changed.

An answer is in the file, on the disk, before `add_answer` returns: the journal is a write-ahead log that is synced at
every commit. Any number of processes may write; each waits for the others.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from fnpipe.mining.review.schema import REVIEWS_SCHEMA, VERDICTS
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.workspace.workspace import Workspace

# The verdict that takes the one before it back.
UNDO = "undo"
# A combination that is answered, but no longer in the sample.
NO_STRATUM = -1
_WAIT_SECONDS = 30

# `drawn` holds every sample ever drawn, so that p is known of whatever was answered; the last draw is the one in force.
_TABLES = """
CREATE TABLE IF NOT EXISTS draws (
    draw INTEGER PRIMARY KEY, pairs TEXT NOT NULL, edges TEXT NOT NULL, count INTEGER NOT NULL, strata TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS drawn (
    draw INTEGER, position INTEGER, image_id INTEGER NOT NULL, pair_id INTEGER NOT NULL, p REAL NOT NULL,
    stratum INTEGER NOT NULL, PRIMARY KEY (draw, position), UNIQUE (image_id, pair_id, draw));
CREATE TABLE IF NOT EXISTS answers (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, client_id TEXT NOT NULL UNIQUE, image_id INTEGER NOT NULL,
    pair_id INTEGER NOT NULL, reviewer TEXT NOT NULL, verdict TEXT NOT NULL,
    answered_at INTEGER NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)));
CREATE INDEX IF NOT EXISTS by_reviewer ON answers (reviewer, image_id, pair_id, seq);
"""
_IN_FORCE = "(SELECT max(draw) FROM draws)"
_LAST = "(SELECT max(seq) FROM answers GROUP BY reviewer, image_id, pair_id)"


@dataclass(frozen=True)
class Asked:
    """The sample in force, in the order in which it is asked.

    Attributes:
        image_id, pair_id: (n,) int64. p: (n,) float32. stratum: (n,) int16.
        bounds, sizes: of the strata: their edges in p, ascending, and the edges that each holds in all.
    """

    image_id: np.ndarray
    pair_id: np.ndarray
    p: np.ndarray
    stratum: np.ndarray
    bounds: tuple[float, ...]
    sizes: tuple[int, ...]


def answers_path(workspace: Workspace, name: str) -> Path:
    return workspace.root / "reviews" / name / "answers.sqlite"


@contextmanager
def opened(path: Path, *, create: bool = False) -> Iterator[sqlite3.Connection]:
    """A connection in autocommit mode.

    Raises:
        InputError: the file is damaged, or no database.
    """
    if create:
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        address = f"{path.absolute().as_uri()}?mode={'rwc' if create else 'rw'}"
        with closing(sqlite3.connect(address, uri=True, timeout=_WAIT_SECONDS, isolation_level=None)) as db:
            if create:
                db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
            yield db
    except sqlite3.OperationalError as error:
        raise InputError(f"{path}: {error}; look at the disk and the rights, then run the command again") from None
    except sqlite3.IntegrityError:
        raise
    except sqlite3.DatabaseError as error:
        raise InputError(f"{path}: damaged ({error}); put a copy back, or move it away to start afresh") from None


def write_sample(path: Path, pairs: str, edges: str, count: int, asked: Asked) -> None:
    """Put a sample into force; what was answered stays.

    Args:
        pairs, edges: the digests of what it was drawn from. count: how many were to be drawn.
    """
    strata = json.dumps({"bounds": asked.bounds, "sizes": asked.sizes})
    columns = (asked.image_id, asked.pair_id, asked.p.astype(np.float64), asked.stratum)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    with opened(path, create=True) as db, _transaction(db):
        # Of two that start at once, the second finds the sample of the first.
        if _drawn_from(db) == (pairs, edges, count):
            return
        draw = db.execute("SELECT coalesce(max(draw), 0) + 1 FROM draws").fetchone()[0]
        db.execute("INSERT INTO draws VALUES (?, ?, ?, ?, ?)", (draw, pairs, edges, count, strata))
        numbered = ((draw, position, *row) for position, row in enumerate(rows))
        db.executemany("INSERT INTO drawn VALUES (?, ?, ?, ?, ?, ?)", numbered)


def sample_is_of(path: Path, pairs: str, edges: str, count: int) -> bool:
    """Whether the sample in force is ``count`` of these edges; the tables are made where they are missing.

    Raises:
        InputError: the answers are about other pairs: their ids mean something else by now.
    """
    with opened(path, create=True) as db:
        with _transaction(db):
            for statement in _TABLES.split(";\n"):
                db.execute(statement)
        found = _drawn_from(db)
    _require_same_pairs(path, found, pairs)
    return found == (pairs, edges, count)


def _drawn_from(db: sqlite3.Connection) -> tuple[str, str, int] | None:
    return db.execute(f"SELECT pairs, edges, count FROM draws WHERE draw = {_IN_FORCE}").fetchone()


def _require_same_pairs(path: Path, found: tuple[str, str, int] | None, pairs: str) -> None:
    if found is not None and found[0] != pairs:
        raise InputError(f"{path}: answers about other pairs than the workspace holds now; move the file away")


def read_asked(path: Path) -> Asked:
    """The sample in force."""
    query = f"SELECT image_id, pair_id, p, stratum FROM drawn WHERE draw = {_IN_FORCE} ORDER BY position"
    with opened(path) as db:
        rows = db.execute(query).fetchall()
        strata = json.loads(db.execute(f"SELECT strata FROM draws WHERE draw = {_IN_FORCE}").fetchone()[0])
    columns = list(zip(*rows, strict=True)) or [()] * 4
    return Asked(
        np.array(columns[0], np.int64),
        np.array(columns[1], np.int64),
        np.array(columns[2], np.float32),
        np.array(columns[3], np.int16),
        tuple(strata["bounds"]),
        tuple(strata["sizes"]),
    )


def add_answer(path: Path, client_id: str, image_id: int, pair_id: int, reviewer: str, verdict: str) -> bool:
    """Append an answer, or `UNDO`; when this returns, it is on the disk.

    Args:
        client_id: chosen by who sends it; sent again, the answer is the same one and not a second.

    Returns:
        Whether it stands there now; False: the client_id belongs to another answer.
    """
    row = (client_id, image_id, pair_id, reviewer, verdict)
    with opened(path) as db:
        db.execute(
            "INSERT OR IGNORE INTO answers (client_id, image_id, pair_id, reviewer, verdict) VALUES (?, ?, ?, ?, ?)",
            row,
        )
        query = "SELECT client_id, image_id, pair_id, reviewer, verdict FROM answers WHERE client_id = ?"
        return bool(db.execute(query, (client_id,)).fetchone() == row)


def answered_by(path: Path, reviewer: str) -> list[tuple[int, str]]:
    """(position in the sample, verdict) of what a reviewer has answered of it, in the order of the answers."""
    query = f"""SELECT position, verdict FROM answers JOIN drawn USING (image_id, pair_id)
        WHERE draw = {_IN_FORCE} AND reviewer = ? AND verdict != '{UNDO}' AND seq IN {_LAST} ORDER BY seq"""
    with opened(path) as db:
        return db.execute(query, (reviewer,)).fetchall()


def read_answers(workspace: Workspace, name: str) -> pa.Table:
    """What people answered about ``edges/<name>``.

    Returns:
        ``REVIEWS_SCHEMA``: the last answer of each reviewer to each combination, by image_id, pair_id and reviewer;
        without those that were taken back. p is that of the last sample that held the combination, null where none
        did; the stratum is -1 where that is not the sample in force.

    Raises:
        InputError: the file is damaged, or its answers are about other pairs.
    """
    query = f"""SELECT image_id, pair_id, p, CASE draw WHEN {_IN_FORCE} THEN stratum ELSE {NO_STRATUM} END, reviewer,
            verdict, answered_at
        FROM answers LEFT JOIN drawn USING (image_id, pair_id)
        WHERE seq IN {_LAST} AND verdict != '{UNDO}'
            AND draw IS (SELECT max(draw) FROM drawn AS d
                WHERE (d.image_id, d.pair_id) = (answers.image_id, answers.pair_id))
        ORDER BY image_id, pair_id, reviewer"""
    return _table(_rows(workspace, name, query))


def ever_answered(workspace: Workspace, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The (n,) int64 image_id and pair_id of all that was answered about ``edges/<name>``, taken back or not.

    Raises:
        InputError: as `read_answers`.
    """
    rows = _rows(workspace, name, "SELECT DISTINCT image_id, pair_id FROM answers")
    images, pairs = np.array(rows, np.int64).reshape(-1, 2).T
    return images, pairs


def _rows(workspace: Workspace, name: str, query: str) -> list[tuple[object, ...]]:
    """What a query finds; nothing where nobody was ever asked."""
    path = answers_path(workspace, name)
    if not path.is_file():
        return []
    with opened(path) as db:
        if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'answers'").fetchone():
            return []
        _require_same_pairs(path, _drawn_from(db), workspace.digest)
        return db.execute(query).fetchall()


def _table(rows: Sequence[tuple[object, ...]]) -> pa.Table:
    columns: list[Sequence[object]] = list(zip(*rows, strict=True)) or [()] * len(REVIEWS_SCHEMA)
    arrays = []
    for field, values in zip(REVIEWS_SCHEMA, columns, strict=True):
        if field.name == "verdict":
            codes = pa.array([VERDICTS.index(str(v)) for v in values], field.type.index_type)
            arrays.append(pa.DictionaryArray.from_arrays(codes, pa.array(VERDICTS, pa.string())))
        else:
            arrays.append(pa.array(values, field.type))
    return pa.Table.from_arrays(arrays, schema=REVIEWS_SCHEMA)


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")
