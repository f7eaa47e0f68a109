"""Answers that people gave in Label Studio, to the tasks of ``fnpipe export --to label-studio``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fnpipe.mining.data.keys import combination_keys, contains
from fnpipe.mining.edges.reader import read_judged
from fnpipe.mining.review.answers import add_answer
from fnpipe.mining.review.config import REVIEWER, ReviewConfig
from fnpipe.mining.review.schema import VERDICTS
from fnpipe.mining.review.session import open_review
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.workspace.workspace import Stage, Workspace


class Taken(NamedTuple):
    client_id: str
    image_id: int
    pair_id: int
    reviewer: str
    verdict: str


def take_answers(workspace: Workspace, edges: Stage, config: ReviewConfig, path: str) -> int:
    """Add the answers of Label Studio's JSON export to those about ``edges``; taken over again, they are the same.

    Raises:
        InputError: the file is no such export, or is about other edges.
    """
    answers = list(_answers_in(path))
    table, n_pairs = read_judged(edges, ["image_id", "pair_id"]), workspace.n_pairs
    judged = np.sort(combination_keys(table["image_id"].to_numpy(), table["pair_id"].to_numpy(), n_pairs))
    ids = np.array([(answer.image_id, answer.pair_id) for answer in answers], np.int64).reshape(-1, 2)
    images, pairs = ids.T
    known = (pairs >= 0) & (pairs < n_pairs) & contains(judged, combination_keys(images, pairs, n_pairs))
    if not known.all():
        image, pair = ids[np.argmin(known)]
        raise InputError(f"{path}: image {image} with pair {pair} is no edge that {edges.name} judged")
    kept = open_review(workspace, edges, config).path
    for answer in answers:
        add_answer(kept, *answer)
    return len(answers)


def _answers_in(path: str) -> Iterator[Taken]:
    try:
        tasks = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except ValueError:
        raise InputError(f"{path}: no JSON; export from Label Studio as JSON") from None
    try:
        for task in tasks:
            about = task["data"]
            image, pair = (_whole(about[name]) for name in ("image_id", "pair_id"))
            for annotation in task["annotations"]:
                verdicts = [
                    verdict for result in annotation["result"] for verdict in result["value"].get("choices", [])
                ]
                # Skipped, or without a choice: no answer.
                if annotation.get("was_cancelled") or not verdicts:
                    continue
                (verdict,) = verdicts
                if verdict not in VERDICTS:
                    raise ValueError(verdict)
                # Changed there, it is another answer.
                number = f"label-studio-{_whole(annotation['id'])}-{annotation.get('updated_at', '')}"
                yield Taken(number, image, pair, _reviewer(annotation.get("completed_by")), verdict)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{path}: no JSON export (not JSON-MIN) of the tasks of `fnpipe export --to label-studio` "
            f"({type(error).__name__}: {error})"
        ) from None


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is no whole number")
    return value


def _reviewer(completed_by: Any) -> str:
    """Label Studio names people by a number, or by an object with their address."""
    name = completed_by.get("email") or completed_by.get("id") if isinstance(completed_by, dict) else completed_by
    name = f"label-studio {name}" if isinstance(name, int) else str(name or "label-studio")
    return name if re.fullmatch(REVIEWER, name) else "label-studio"
