"""The labels of finished edges: counted, and moved to other thresholds without judging again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from fnpipe.mining.data.identity import identity_notes
from fnpipe.mining.data.keys import combination_keys, contains
from fnpipe.mining.edges.labels import (
    DISCRIMINATOR,
    IDENTITY,
    POSITIVE,
    REVIEW,
    UNSCORED,
    codes_in,
    label_candidates,
    labels_of,
    named,
    named_sources,
    share_threshold,
)
from fnpipe.mining.edges.reader import EDGES_SCHEMA, NOT_MEASURED, edge_parts, read_part, recorded_parts
from fnpipe.mining.edges.thresholds import LABELS, SOURCES, check_thresholds
from fnpipe.mining.edges.trust import measure_trust, trust_file
from fnpipe.pipeline.errors import InputError, counted
from fnpipe.pipeline.files import tables
from fnpipe.pipeline.workspace.workspace import Stage, Workspace

HISTOGRAM_BINS = 20
# What no label changes.
_CARRIED = ("unique_combinations", "undecodable", "new_per_source")
# The same, which 0.1.0 did not record.
_CARRIED_IF_THERE = ("identity_bound", "identity_beyond", "known")


@dataclass(frozen=True)
class Reviewed:
    """What people say of edges.

    Attributes:
        keys: (m,) int64, ascending `combination_keys`.
        labels: (m,) int8; `UNSCORED` where every answer was taken back, so that the thresholds decide again.
    """

    keys: np.ndarray
    labels: np.ndarray


def relabel_parts(stage: Stage, tau_low: float, tau_high: float, reviewed: Reviewed | None = None) -> None:
    """Rewrite the labels of every part; identity stays positive, and what people answered stands as they did."""
    for path in edge_parts(stage):
        table = read_part(stage, path)
        labels, sources = labels_of(table, (tau_low, tau_high)), codes_in(table["source"], SOURCES)
        if reviewed is not None:
            keys = combination_keys(table["image_id"].to_numpy(), table["pair_id"].to_numpy(), stage.workspace.n_pairs)
            rows = np.flatnonzero(contains(reviewed.keys, keys) & (sources != IDENTITY))
            said = reviewed.labels[np.searchsorted(reviewed.keys, keys[rows])]
            by_p = label_candidates(table["match_probability"].to_numpy()[rows], tau_low, tau_high)
            labels[rows] = np.where(said == UNSCORED, by_p, said)
            sources[rows] = np.where(said == UNSCORED, DISCRIMINATOR, REVIEW)
        for name, column in (("label", named(labels, LABELS)), ("source", named_sources(sources))):
            field = EDGES_SCHEMA.field(name)
            at = EDGES_SCHEMA.get_field_index(name)
            table = table.set_column(at, field, pa.chunked_array([column], field.type))
        tables.write_table(path, table)


def judged_probabilities(stage: Stage) -> np.ndarray:
    """(n,) float32: p of every combination that the discriminator judged, whatever people answered since."""
    parts = [np.empty(0, np.float32)]
    for path in edge_parts(stage):
        table = read_part(stage, path, ["match_probability", "source"])
        judged = codes_in(table["source"], SOURCES) != IDENTITY
        parts.append(table["match_probability"].to_numpy()[judged])
    return np.concatenate(parts)


def count_labels(stage: Stage) -> dict[str, Any]:
    """What ``meta.json`` says of the parts: judgements, counts by label and source, a histogram of the judged p."""
    table = np.zeros((len(SOURCES), len(LABELS)), np.int64)
    histogram = np.zeros(HISTOGRAM_BINS, np.int64)
    for path in edge_parts(stage):
        part = read_part(stage, path, ["match_probability", "label", "source"])
        sources, labels = codes_in(part["source"], SOURCES), codes_in(part["label"], LABELS)
        np.add.at(table, (sources, labels), 1)
        p = part["match_probability"].to_numpy()[sources != IDENTITY]
        histogram += np.histogram(p, HISTOGRAM_BINS, (0, 1))[0]
    reviewed = int(table[REVIEW].sum())
    by_source = dict(zip(SOURCES, table[:, POSITIVE].tolist(), strict=True))
    return {
        "judgements": int(table[DISCRIMINATOR].sum()) + reviewed,
        "identity": int(table[IDENTITY].sum()),
        "labels": dict(zip(LABELS, table.sum(axis=0).tolist(), strict=True)),
        # Edges that nobody reviewed say nothing of it.
        "positives": by_source if reviewed else {name: by_source[name] for name in SOURCES[:REVIEW]},
        **({"reviewed": reviewed} if reviewed else {}),
        "histogram": {"from": 0, "to": 1, "counts": histogram.tolist()},
    }


def relabel(
    workspace: Workspace,
    name: str | None,
    tau_low: float,
    tau_high: float,
    positive_share: float | None = None,
    *,
    reviewed: Reviewed | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Stage:
    """Move the thresholds of finished edges without judging again; killed in the middle, run it again.

    Args:
        positive_share: label this share of the judged, the most probable, as positive instead, and the rest negative.
        reviewed: what people say of some of them, whatever the thresholds. facts: to be recorded beside the labels.

    Raises:
        InputError: there are no such edges, they are unfinished, or the thresholds are no thresholds.
    """
    check_thresholds(tau_low, tau_high)
    if positive_share is not None and not 0 < positive_share < 1:
        raise InputError(f"--positive-share {positive_share}: a share between 0 and 1")
    stage = workspace.stage(f"edges/{name or workspace.only('edges', '--edges')}")
    asked = {"tau_low": tau_low, "tau_high": tau_high, "positive_share": positive_share}
    with stage.alone():
        _relabel(stage, asked, reviewed, facts or {})
    return stage


def _relabel(stage: Stage, asked: dict[str, Any], reviewed: Reviewed | None, facts: Mapping[str, Any]) -> None:
    meta = stage.meta()
    if meta is None or meta.get("complete") or not meta.keys() >= set(_CARRIED):
        # Neither finished nor left by a relabelling that was killed, which alone has these without being finished.
        meta = stage.workspace.resolve("edges", stage.name.partition("/")[2], "--edges").require()
    stage.sweep()
    # Without thresholds the edges belong to no pass: one that comes between says so, instead of finishing a mixture.
    params = {**meta["params"], **dict.fromkeys(asked)}
    begun = {
        "format": meta["format"],
        "inputs": meta["inputs"],
        **{key: meta[key] for key in (*_CARRIED, *_CARRIED_IF_THERE) if key in meta},
        "complete": False,
        # Relabelled again after a kill, the edges must still be all that were judged.
        "outputs": {stage.listed_as(path): None for path in stage.outputs()},
    }
    stage.require_outputs()
    stage.write_meta({**begun, "params": params})
    taus = asked["tau_low"], asked["tau_high"]
    if asked["positive_share"] is not None:
        taus = (share_threshold(judged_probabilities(stage), asked["positive_share"]),) * 2
    relabel_parts(stage, *taus, reviewed)
    stage.write_meta({**begun, "params": {**params, **asked}})
    finish_edges(stage, *taus, **facts)


def finish_edges(stage: Stage, tau_low: float, tau_high: float, **facts: Any) -> None:
    """Count the labels and mark the edges as finished."""
    counts = count_labels(stage)
    found = (counts["labels"]["positive"] - counts["positives"]["identity"]) / max(counts["judgements"], 1)
    trust = measure_trust(stage, tau_high, found)
    begun = {**(stage.meta() or {}), **facts}
    notes = identity_notes(begun.get("identity_bound", 0), begun.get("identity_beyond", (0, 0)))
    notes.append(NOT_MEASURED if trust is None else trust.sentence)
    if count := counts.get("reviewed"):
        notes.append(f"{counted(count, 'edge')} labelled as people answered")
    told = None if trust is None else {"figures": asdict(trust), "trusted": trust.trusted}
    facts |= {"tau_low": tau_low, "tau_high": tau_high, **counts, "trust": told, "notes": notes}
    stage.finish(edge_parts(stage), [*recorded_parts(stage), *trust_file(stage)], **facts)
