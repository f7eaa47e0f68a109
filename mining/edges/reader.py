"""Edges: judged connections on disk, their labels, and looking them up by the million."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from fnpipe.mining.data.identity import IDENTITY_BOUND
from fnpipe.mining.edges.labels import IDENTITY, REVIEW, UNSCORED, codes_in
from fnpipe.mining.edges.thresholds import LABELS, SOURCES, check_thresholds
from fnpipe.mining.edges.trust import Trust
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import atomic, tables
from fnpipe.pipeline.workspace.workspace import Stage

NOT_MEASURED = "whether the discriminator can be trusted was not measured"

_NAMES = pa.dictionary(pa.int32(), pa.string())

EDGES_SCHEMA = pa.schema(
    [
        ("image_id", pa.int64()),
        ("pair_id", pa.int64()),
        ("image_key", pa.string()),
        ("caption", pa.string()),
        ("rank_i2t", pa.int16()),
        ("rank_t2i", pa.int16()),
        ("similarity", pa.float32()),
        ("match_probability", pa.float32()),
        ("uncertainty", pa.float32()),
        ("label", _NAMES),
        ("source", _NAMES),
    ]
)

_FILLED = tuple(name for name in EDGES_SCHEMA.names if name not in ("rank_i2t", "rank_t2i", "uncertainty"))

# Edges that nobody reviewed say nothing of reviews.
_UNASKED = SOURCES[:REVIEW]
_PART = "part-"
# The recorded pairs' scores.
RECORDED = "recorded"
RECORDED_OF_0_1_0 = "recorded.parquet"

RECORDED_SCHEMA = pa.schema([("pair_id", pa.int64()), ("match_probability", pa.float32())])


@dataclass(frozen=True)
class EdgesInfo:
    """What finished edges say of themselves; whoever wants to know reads it here.

    A label is what the column ``label`` says. The thresholds are those it was given by: where the most probable share
    was labelled positive, they are not the ones that ``params`` names.

    Attributes:
        name: of ``edges/<name>``. kind: of the discriminator. discriminator: its description.
        tau_low, tau_high: the thresholds in force. positive_share: the share they were chosen for, or None.
        identity_bound: of the identity rule; 0: it was not applied.
        judgements, identity: rows by source; what people answered was judged before. labels: rows by label.
        positives: positive rows by source, people's answers only where there are some.
        histogram: of p over 20 equal bins, of what was judged. reviewed: rows labelled as people answered.
        trust: None where it was not measured, as by 0.1.0. notes: sentences.
    """

    name: str
    kind: str
    discriminator: Mapping[str, Any]
    tau_low: float
    tau_high: float
    positive_share: float | None
    identity_bound: int
    judgements: int
    identity: int
    labels: Mapping[str, int]
    positives: Mapping[str, int]
    histogram: tuple[int, ...]
    reviewed: int
    trust: Trust | None
    notes: tuple[str, ...]

    @classmethod
    def read(cls, stage: Stage) -> EdgesInfo:
        """Read the record of ``stage``.

        Raises:
            InputError: the stage is missing, unfinished or stale, or its record is damaged.
        """
        meta = stage.require()
        try:
            discriminator = meta["params"].get("discriminator", {})
            reviewed = int(meta.get("reviewed", 0))
            return cls(
                name=stage.name.partition("/")[2],
                kind=str(discriminator.get("kind", "")),
                discriminator=discriminator,
                tau_low=float(meta["tau_low"]),
                tau_high=float(meta["tau_high"]),
                positive_share=meta["params"].get("positive_share"),
                identity_bound=int(meta.get("identity_bound", IDENTITY_BOUND)),
                judgements=int(meta["judgements"]),
                identity=int(meta["identity"]),
                labels={label: int(meta["labels"][label]) for label in LABELS},
                positives={name: int(meta["positives"][name]) for name in SOURCES if reviewed or name in _UNASKED},
                histogram=tuple(map(int, meta["histogram"]["counts"])),
                reviewed=reviewed,
                trust=Trust(**meta["trust"]["figures"]) if meta.get("trust") else None,
                notes=tuple(meta.get("notes", [NOT_MEASURED])),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise InputError(f"{stage.record}: damaged ({what}); run `{stage.command}` with --overwrite") from None

    def other_thresholds(self, tau_low: float | None, tau_high: float | None) -> tuple[float, float] | None:
        """The thresholds to label by instead, one that is None as in force; None where both are: the stored labels.

        Raises:
            InputError: they are no thresholds.
        """
        if tau_low is None and tau_high is None:
            return None
        low = self.tau_low if tau_low is None else tau_low
        high = self.tau_high if tau_high is None else tau_high
        check_thresholds(low, high)
        return low, high


def edge_parts(stage: Stage) -> list[Path]:
    """The parts of ``edges/<name>/``, as its record lists them: in image_id order."""
    return [path for path in stage.outputs() if path.parent == stage.path and path.name.startswith(_PART)]


def part_path(stage: Stage, shard: int) -> Path:
    return stage.path / f"{_PART}{shard:05d}.parquet"


def shard_of_part(path: Path) -> int:
    """The shard whose images a part judges; where the part stands in a list says nothing of it."""
    return int(path.stem.removeprefix(_PART))


def recorded_path(stage: Stage, shard: int) -> Path:
    return stage.beside / RECORDED / part_path(stage, shard).name


def recorded_parts(stage: Stage) -> list[Path]:
    """The files with the recorded pairs' scores; none where these were not judged."""
    return [path for path in stage.outputs() if path.parent.name == RECORDED or path.name == RECORDED_OF_0_1_0]


def read_recorded(stage: Stage) -> pa.Table:
    """The discriminator's view of the recorded pairs (``RECORDED_SCHEMA``), in pair_id order.

    Raises:
        InputError: they were not scored.
    """
    stage.require()
    parts = recorded_parts(stage)
    if not parts:
        raise InputError(f"{stage.path}: recorded pairs were not judged; run `{stage.command}` with --score-recorded")
    names = RECORDED_SCHEMA.names
    spans = {"pair_id": (0, stage.workspace.n_pairs)}
    return pa.concat_tables(tables.read_table(path, names, RECORDED_SCHEMA, names, spans) for path in parts)


def read_part(stage: Stage, path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """One part of ``edges/<name>/``: the columns asked for (all without ``columns``), typed as in ``EDGES_SCHEMA``.

    Raises:
        InputError: it is damaged: other columns, nulls, ids that the workspace has not, a p outside of [0, 1].
    """
    workspace, number = stage.workspace, path.stem.rpartition("-")[2]
    # A part holds the images of one shard; by its number, one that changed places with another is found.
    mine = slice(int(number), int(number) + 2) if number.isdigit() and int(number) < workspace.n_shards else slice(None)
    first, *_, stop = workspace.image_starts[mine].tolist()
    spans = {"image_id": (first, stop), "pair_id": (0, workspace.n_pairs)}
    table = tables.read_table(path, columns, EDGES_SCHEMA, filled=_FILLED, spans=spans)
    if len(table) and "match_probability" in table.column_names:
        p = table["match_probability"].to_numpy()
        # A NaN fails this comparison as well.
        if not 0 <= p.min() <= p.max() <= 1:
            raise atomic.damaged(path, "match_probability outside of 0 to 1")
    for name, known in (("label", LABELS), ("source", SOURCES)):
        if name in table.column_names and (codes_in(table[name], known) == UNSCORED).any():
            raise atomic.damaged(path, f"an unknown {name}")
    return table


def read_judged(stage: Stage, columns: Sequence[str]) -> pa.Table:
    """`read_edges` of what the discriminator judged, whatever people answered since; without the column ``source``."""
    table = read_edges(stage, [*columns, "source"])
    judged = codes_in(table["source"], SOURCES) != IDENTITY
    return table.drop_columns(["source"]).filter(pa.array(judged))


def read_edges(stage: Stage, columns: Sequence[str] | None = None) -> pa.Table:
    """All judged connections, sorted by image_id, then match_probability descending.

    Returns:
        The columns asked for (all without ``columns``), typed as in ``EDGES_SCHEMA``.

    Raises:
        InputError: the stage is missing, unfinished or stale.
    """
    stage.require()
    names = list(columns) if columns is not None else EDGES_SCHEMA.names
    schema = pa.schema([EDGES_SCHEMA.field(name) for name in names])
    parts = [read_part(stage, path, names) for path in edge_parts(stage)]
    # Every part brings its own dictionary; one for all lets a caller compare indices.
    return pa.concat_tables(parts).unify_dictionaries() if parts else schema.empty_table()
