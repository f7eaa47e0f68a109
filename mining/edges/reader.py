"""Edges: judged connections on disk, their labels, and looking them up by the million."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fnpipe.mining.data.identity import IDENTITY_BOUND, combination_keys
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import atomic
from fnpipe.pipeline.workspace.record import META, Stage
from fnpipe.pipeline.workspace.workspace import Workspace

UNSCORED, NEGATIVE, AMBIGUOUS, POSITIVE = -1, 0, 1, 2
# The position in each tuple is the code.
LABELS = ("negative", "ambiguous", "positive")
SOURCES = ("discriminator", "identity")
DISCRIMINATOR, IDENTITY = 0, 1
# MAFA's thresholds.
TAU_LOW, TAU_HIGH = 0.5, 0.8
# Below these a discriminator is called doubtful. Matching heads that find what is true order over 95 % of such pairs.
TRUSTED_AUROC, TRUSTED_PRECISION = 0.9, 0.5
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

_PART = "part-"
# The recorded pairs' scores. Programs that read a folder as one table pass over folders (pyarrow) and files (polars)
# whose names begin with an underscore.
RECORDED = "_recorded"
RECORDED_OF_0_1_0 = "recorded.parquet"

RECORDED_SCHEMA = pa.schema([("pair_id", pa.int64()), ("match_probability", pa.float32())])


def check_thresholds(tau_low: float, tau_high: float) -> None:
    """Raise InputError unless ``0 <= tau_low <= tau_high <= 1``."""
    if not 0 <= tau_low <= tau_high <= 1:
        raise InputError(f"need 0 <= tau_low <= tau_high <= 1, got {tau_low} and {tau_high}")


def label_candidates(match_probability: np.ndarray, tau_low: float, tau_high: float) -> np.ndarray:
    """Sort candidate connections into negative (0), ambiguous (1) and positive (2).

    Positive lies above ``tau_high``, negative below ``tau_low``; the thresholds themselves are ambiguous (the
    released code compares strictly on both sides, so that they fall in no class).
    Source: efficient connection mining, MAFA (CVPR 2024, arXiv:2312.06112).

    Args:
        match_probability: (n,) float32, the discriminator's probability of "matched", in [0, 1].
        tau_low, tau_high: probabilities, 0 <= tau_low <= tau_high <= 1.

    Returns:
        (n,) int8, in the order of the input.

    Raises:
        ValueError: an entry is NaN or infinite; the message gives the first one's index.
    """
    p = np.asarray(match_probability, np.float32)
    finite = np.isfinite(p)
    if not finite.all():
        # NaN fails both comparisons below and would leave here as a confident negative.
        first = int(np.argmin(finite))
        raise ValueError(f"match_probability[{first}] is {p[first]}")
    # Both sides in float32, so that a p stored as 0.8 equals a threshold written as 0.8.
    labels: np.ndarray = (p >= np.float32(tau_low)).astype(np.int8) + (p > np.float32(tau_high))
    return labels


def named(codes: np.ndarray, names: Sequence[str]) -> pa.DictionaryArray:
    """Codes as a dictionary column: code ``c`` reads as ``names[c]``."""
    return pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), pa.array(names, pa.string()))


def codes_in(column: pa.ChunkedArray, names: Sequence[str]) -> np.ndarray:
    """The reverse of `named`: (n,) int8, whatever dictionary the file brought."""
    values = pa.array(names, pa.string())
    found = pc.index_in(pc.cast(column, pa.string()), value_set=values)
    codes: np.ndarray = found.fill_null(UNSCORED).to_numpy().astype(np.int8)
    return codes


def labels_of(table: pa.Table, thresholds: tuple[float, float] | None) -> np.ndarray:
    """(n,) codes of a part's labels: the stored ones, which are the truth about it, or those by other thresholds.

    Args:
        table: with the column ``label`` and, for other thresholds, ``source`` and ``match_probability``.
        thresholds: (low, high), or None. Identity stays positive whatever they are.
    """
    stored = codes_in(table["label"], LABELS)
    if thresholds is None:
        return stored
    identical = codes_in(table["source"], SOURCES) == IDENTITY
    return np.where(identical, stored, label_candidates(table["match_probability"].to_numpy(), *thresholds))


@dataclass(frozen=True)
class Trust:
    """How well a discriminator tells recorded pairs from random ones; see `fnpipe.mining.connections.trust`.

    Attributes:
        recorded, random: pairs judged. recorded_above, random_above: shares of them above ``tau_high``.
        auroc: the probability that a recorded pair has a higher p than a random one.
        precision_at_most: of what was found; None where nothing was.
    """

    recorded: int
    random: int
    recorded_above: float
    random_above: float
    auroc: float
    precision_at_most: float | None

    @property
    def is_chance(self) -> bool:
        """Whether three standard errors do not tell ``auroc`` from 0.5."""
        error = np.sqrt((self.recorded + self.random + 1) / (12 * self.recorded * self.random))
        return bool(self.auroc < 0.5 + 3 * error)

    @property
    def trusted(self) -> bool:
        """Whether the positives are worth training with, as far as this can tell."""
        sure = self.precision_at_most is None or self.precision_at_most >= TRUSTED_PRECISION
        return not self.is_chance and self.auroc >= TRUSTED_AUROC and sure

    @property
    def sentence(self) -> str:
        """The figures, and what they mean."""
        figures = (
            f"{self.recorded_above:.1%} of {self.recorded:,} recorded pairs and {self.random_above:.1%} of "
            f"{self.random:,} random ones lie above the threshold; a recorded one has the higher p in {self.auroc:.1%} "
            "of comparisons"
        )
        if self.precision_at_most is not None:
            figures += f"; at most {self.precision_at_most:.0%} of what it found is true"
        if self.is_chance:
            return f"the discriminator is no better than chance: {figures}"
        return f"trust: {figures}" if self.trusted else f"the discriminator is doubtful: {figures}"


@dataclass(frozen=True)
class EdgesInfo:
    """What finished edges say of themselves; whoever wants to know reads it here.

    A label is what the column ``label`` says. The thresholds are those it was given by: where the most probable share
    was labelled positive, they are not the ones that ``params`` names.

    Attributes:
        name: of ``edges/<name>``. kind: of the discriminator. discriminator: its description.
        tau_low, tau_high: the thresholds in force. positive_share: the share they were chosen for, or None.
        identity_bound: of the identity rule; 0: it was not applied.
        judgements, identity: rows by source. labels: rows by label. positives: positive rows by source.
        histogram: of p over 20 equal bins, of what was judged.
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
                positives={source: int(meta["positives"][source]) for source in SOURCES},
                histogram=tuple(map(int, meta["histogram"]["counts"])),
                trust=Trust(**meta["trust"]["figures"]) if meta.get("trust") else None,
                notes=tuple(meta.get("notes", [NOT_MEASURED])),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise InputError(f"{stage.path / META}: damaged ({what}); run `{stage.command}` with --overwrite") from None

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
    return stage.path / RECORDED / f"_{part_path(stage, shard).name}"


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
    return pa.concat_tables(atomic.read_table(path, names, RECORDED_SCHEMA, names, spans) for path in parts)


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
    table = atomic.read_table(path, columns, EDGES_SCHEMA, filled=_FILLED, spans=spans)
    if len(table) and "match_probability" in table.column_names:
        p = table["match_probability"].to_numpy()
        # A NaN fails this comparison as well.
        if not 0 <= p.min() <= p.max() <= 1:
            raise atomic.damaged(path, "match_probability outside of 0 to 1")
    for name, known in (("label", LABELS), ("source", SOURCES)):
        if name in table.column_names and (codes_in(table[name], known) == UNSCORED).any():
            raise atomic.damaged(path, f"an unknown {name}")
    return table


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


class EdgeLookup:
    """The judged connections of a workspace, found by (image_id, pair_id); 13 bytes an edge in memory.

    Attributes:
        keys: (n,) int64, ascending: ``image_id * n_pairs + pair_id``.
        match_probability: (n,) float32. labels: (n,) int8, NEGATIVE, AMBIGUOUS or POSITIVE; both in key order.
    """

    def __init__(self, n_pairs: int, keys: np.ndarray, match_probability: np.ndarray, labels: np.ndarray) -> None:
        if (keys[1:] < keys[:-1]).any():
            order = np.argsort(keys, kind="stable")
            keys, match_probability, labels = keys[order], match_probability[order], labels[order]
        self.n_pairs = n_pairs
        self.keys = keys
        self.match_probability = match_probability
        self.labels = labels

    @classmethod
    def open(cls, workspace: Workspace, name: str | None = None) -> EdgeLookup:
        """Open the edges ``name``; without a name the only ones there are (InputError names several)."""
        return cls.read(workspace.resolve("edges", name, "--edges"))

    @classmethod
    def read(cls, stage: Stage, thresholds: tuple[float, float] | None = None) -> EdgeLookup:
        """Read the finished edges of ``stage``; beside what stays, one part is held at a time.

        Args:
            thresholds: (low, high) to label by instead of the stored labels.
        """
        stage.require()
        columns = ["image_id", "pair_id", "match_probability", "label", *(["source"] if thresholds else [])]
        n_pairs = stage.workspace.n_pairs
        if stage.workspace.n_images * n_pairs >= 2**63:
            raise InputError(f"{stage.path}: {stage.workspace.n_images:,} images x {n_pairs:,} pairs overflow 64 bits")
        parts = edge_parts(stage)
        ends = np.cumsum([0, *(len(atomic.read_table(path, columns=[])) for path in parts)])
        keys = np.empty(ends[-1], np.int64)
        match_probability, labels = np.empty(ends[-1], np.float32), np.empty(ends[-1], np.int8)
        for path, first, end in zip(parts, ends[:-1], ends[1:], strict=True):
            table = read_part(stage, path, columns)
            found = combination_keys(table["image_id"].to_numpy(), table["pair_id"].to_numpy(), n_pairs)
            # Images ascend from part to part, so that this puts all of them in order.
            order = np.argsort(found)
            keys[first:end] = found[order]
            match_probability[first:end] = table["match_probability"].to_numpy()[order]
            labels[first:end] = labels_of(table, thresholds)[order]
        return cls(n_pairs, keys, match_probability, labels)

    def __len__(self) -> int:
        return len(self.keys)

    def find(self, image_ids: np.ndarray, pair_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Look combinations up.

        Args:
            image_ids, pair_ids: integers, broadcast against each other as numpy does.

        Returns:
            match_probability, float32, NaN where the combination was not judged; label, int8, UNSCORED there. Both
            in the broadcast shape.
        """
        keys = combination_keys(image_ids, pair_ids, self.n_pairs)
        p = np.full(keys.shape, np.nan, np.float32)
        label = np.full(keys.shape, UNSCORED, np.int8)
        if len(self.keys):
            at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
            found = self.keys[at] == keys
            p[found] = self.match_probability[at[found]]
            label[found] = self.labels[at[found]]
        return p, label
