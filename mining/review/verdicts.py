"""People's verdicts brought to the edges: what they say of all of them, and labels as people answered."""

from __future__ import annotations

from dataclasses import asdict
from itertools import combinations
from typing import Any

import numpy as np
import pyarrow as pa

from fnpipe.mining.data.keys import combination_keys
from fnpipe.mining.edges.labels import AMBIGUOUS, NEGATIVE, POSITIVE, UNSCORED, codes_in
from fnpipe.mining.edges.reader import EdgesInfo, read_judged
from fnpipe.mining.edges.relabel import Reviewed, relabel
from fnpipe.mining.edges.sample import numbers
from fnpipe.mining.review.answers import ever_answered, read_answers
from fnpipe.mining.review.estimate import (
    GRID,
    NO,
    NOT_ANSWERED,
    UNSURE,
    YES,
    Answers,
    Precision,
    calibrated,
    kappa,
    lowest_threshold,
    precision_above,
)
from fnpipe.mining.review.schema import VERDICTS
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.workspace.workspace import Stage, Workspace

# What a person is told of, beside the upper threshold in force.
_TOLD = (0.0, 0.5, 0.8, 0.9, 0.95)
# Labels by verdict; what people do not agree on is as unsure as what they are unsure about.
_LABELS = np.empty(len(VERDICTS), np.int8)
_LABELS[[NO, YES, UNSURE]] = NEGATIVE, POSITIVE, AMBIGUOUS


def majority(keys: np.ndarray, verdict: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One verdict for each combination: yes or no where more people say so than the other; else unsure.

    Args:
        keys: (n,) int64, `combination_keys`, one entry for each person. verdict: (n,) codes of ``VERDICTS``.

    Returns:
        (m,) int64 keys, ascending, each once, and (m,) int8.
    """
    each, at = np.unique(keys, return_inverse=True)
    votes = np.bincount(at, weights=(verdict == YES).astype(float) - (verdict == NO), minlength=len(each))
    return each, np.where(votes > 0, YES, np.where(votes < 0, NO, UNSURE)).astype(np.int8)


def answers_about(stage: Stage) -> Answers:
    """Finished edges that the discriminator judged, with people's answers to them."""
    workspace = stage.workspace
    table = read_judged(stage, ["image_id", "pair_id", "match_probability"])
    image_id, pair_id, p = (table[name].to_numpy() for name in ("image_id", "pair_id", "match_probability"))
    answered, said = majority(*_keys_and_verdicts(workspace, read_answers(workspace, stage.name.partition("/")[2])))
    verdict = np.full(len(p), NOT_ANSWERED, np.int8)
    if len(answered):
        keys = combination_keys(image_id, pair_id, workspace.n_pairs)
        at = np.minimum(np.searchsorted(answered, keys), len(answered) - 1)
        verdict = np.where(answered[at] == keys, said[at], NOT_ANSWERED).astype(np.int8)
    return Answers.of(p, numbers(image_id, pair_id), verdict)


def findings(stage: Stage) -> dict[str, Any]:
    """What the answers say of finished edges.

    Returns:
        ``edges``, ``answers``, ``reviewers``: how many were answered, how often, by whom; ``tau_high``: the threshold
        in force; ``told``: the precision above it and above a few others (`Precision`, with ``yes_at``, the share of
        yes at that p by `calibrated`); ``precision``: above every threshold of `GRID`; ``calibration``: [p, share of
        yes], ascending; ``waiting``: answers that do not count yet; ``agreement``: of any two reviewers.
    """
    answers, table = answers_about(stage), read_answers(stage.workspace, stage.name.partition("/")[2])
    tau_high, (p, share) = EdgesInfo.read(stage).tau_high, calibrated(answers)

    def share_at(threshold: float) -> float | None:
        at = int(np.searchsorted(p, np.float32(threshold), side="right")) - 1
        return float(share[at]) if at >= 0 else None

    return {
        "edges": len(table.group_by(["image_id", "pair_id"]).aggregate([])),
        "answers": len(table),
        "reviewers": sorted(set(table["reviewer"].to_pylist())),
        "tau_high": tau_high,
        "told": [
            {**asdict(precision_above(answers, threshold)), "yes_at": share_at(threshold)}
            for threshold in sorted({*_TOLD, tau_high})
        ],
        "precision": [asdict(precision_above(answers, threshold)) for threshold in GRID],
        "calibration": [[round(float(x), 4), round(float(y), 4)] for x, y in zip(p, share, strict=True)],
        "waiting": answers.waiting,
        "agreement": agreement(stage.workspace, table),
    }


def agreement(workspace: Workspace, answers: pa.Table) -> list[dict[str, Any]]:
    """Of any two reviewers in ``REVIEWS_SCHEMA``: their names, the edges that both answered, and Cohen's kappa."""
    keys, verdict = _keys_and_verdicts(workspace, answers)
    reviewer = np.array(answers["reviewer"].to_pylist(), object)
    found = []
    for first, second in combinations(sorted(set(reviewer.tolist())), 2):
        ours, theirs = reviewer == first, reviewer == second
        both, left, right = np.intersect1d(keys[ours], keys[theirs], assume_unique=True, return_indices=True)
        if len(both):
            kappa_ = kappa(verdict[ours][left], verdict[theirs][right])
            found.append({"reviewers": [first, second], "edges": len(both), "kappa": kappa_})
    return found


def relabel_by_people(
    workspace: Workspace,
    name: str | None,
    tau_low: float,
    tau_high: float,
    positive_share: float | None = None,
    target_precision: float | None = None,
) -> tuple[Stage, Precision | None]:
    """`relabel`, where edges that people answered are labelled as they did.

    Args:
        target_precision: take the lowest upper threshold above which the precision is estimated to be this or more,
            instead of ``tau_high``; ``tau_low`` falls with it.

    Returns:
        The edges, and what was estimated of the threshold that was looked for.

    Raises:
        InputError: as `relabel`; the target is no precision, nobody answered, or no threshold reaches it.
    """
    found = None
    stage = workspace.stage(f"edges/{name or workspace.only('edges', '--edges')}")
    if target_precision is not None:
        found = _threshold_for(workspace.resolve("edges", stage.name.partition("/")[2], "--edges"), target_precision)
        tau_low, tau_high = min(tau_low, found.threshold), found.threshold
    facts = {} if found is None else {"target_precision": {"target": target_precision, **asdict(found)}}
    reviewed = _reviewed(workspace, stage.name.partition("/")[2])
    return relabel(workspace, name, tau_low, tau_high, positive_share, reviewed=reviewed, facts=facts), found


def _threshold_for(stage: Stage, target: float) -> Precision:
    if not 0 < target < 1:
        raise InputError(f"--target-precision {target:g}: a share between 0 and 1")
    answers, ask = answers_about(stage), f"`fnpipe review {stage.workspace.root} --edges {stage.path.name}`"
    if not (answers.verdict != UNSURE).any():
        raise InputError(f"--target-precision {target:g}: nobody has answered about {stage.name}; ask with {ask}")
    found = lowest_threshold(answers, target)
    if found is None:
        best = max((precision_above(answers, each) for each in GRID), key=lambda each: each.precision or 0.0)
        raise InputError(
            f"--target-precision {target:g}: no threshold of {stage.name} reaches it; the best is "
            f"{best.precision:.3f} above p = {best.threshold:g}; judge with another discriminator, or ask for less"
        )
    return found


def _reviewed(workspace: Workspace, name: str) -> Reviewed | None:
    """The labels of everything that was ever answered; None where nothing was."""
    images, pairs = ever_answered(workspace, name)
    if not len(images):
        return None
    keys = np.unique(combination_keys(images, pairs, workspace.n_pairs))
    labels = np.full(len(keys), UNSCORED, np.int8)
    answered, said = majority(*_keys_and_verdicts(workspace, read_answers(workspace, name)))
    labels[np.searchsorted(keys, answered)] = _LABELS[said]
    return Reviewed(keys, labels)


def _keys_and_verdicts(workspace: Workspace, answers: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    keys = combination_keys(answers["image_id"].to_numpy(), answers["pair_id"].to_numpy(), workspace.n_pairs)
    return keys, codes_in(answers["verdict"], VERDICTS)
