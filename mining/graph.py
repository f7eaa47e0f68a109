"""The neighbour graph: for every image its most similar unrecorded captions, and for every caption its images.

``graph/<name>/`` holds, per direction, ``ids`` (int64) and ``sims`` (float16) of k columns: ``i2t`` has one row per
image with pair_ids, ``t2i`` one row per pair with image_ids. Best first; -1 pads; rows of pairs that take no part
(other splits, bad embeddings) are all pads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fnpipe.mining.exact import exact_nearest
from fnpipe.mining.members import Members, read_members
from fnpipe.pipeline import atomic
from fnpipe.pipeline.embeddings import Embeddings, Rows
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.progress import progress
from fnpipe.pipeline.workspace import Stage, Workspace

DIRECTIONS = ("i2t", "t2i")
INDEXES = ("auto", "exact", "ivf")


@dataclass(frozen=True, kw_only=True)
class GraphConfig:
    """How ``fnpipe build-graph`` searches: one field per flag."""

    embeddings: str | None = None
    k: int = 32
    index: str = "auto"
    recall_check: int = 1000
    seed: int = 0
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.k < 1:
            raise InputError(f"--k {self.k}: at least 1 neighbour is needed")
        if self.index not in INDEXES:
            raise InputError(f"--index {self.index}: one of {', '.join(INDEXES)}")
        if self.recall_check < 0:
            raise InputError(f"--recall-check {self.recall_check}: a number of rows, 0 for none")


@dataclass(frozen=True)
class GraphSummary:
    """What ``build_graph`` made."""

    graph: str
    index: str
    k: int
    images: int
    pairs: int
    recall: dict[str, float]


class Graph:
    """A finished ``graph/<name>/``, memory-mapped.

    Attributes:
        i2t_ids, i2t_sims: (images, k) int64 pair_ids and float16 similarities.
        t2i_ids, t2i_sims: (pairs, k) int64 image_ids and float16 similarities.
        k: columns.
    """

    def __init__(self, stage: Stage) -> None:
        self.meta = stage.require()
        self.stage = stage
        self.k = int(self.meta["params"]["k"])
        self.i2t_ids, self.i2t_sims = _mapped(stage.path, "i2t")
        self.t2i_ids, self.t2i_sims = _mapped(stage.path, "t2i")

    @classmethod
    def open(cls, workspace: Workspace, name: str | None = None) -> Graph:
        """Open the graph ``name``; without a name the only one there is (InputError names several)."""
        return cls(workspace.resolve("graph", name, "--embeddings"))


def _mapped(directory: Path, direction: str) -> tuple[np.ndarray, np.ndarray]:
    ids, sims = (np.load(path, mmap_mode="r") for path in _paths(directory, direction))
    return ids, sims


def _paths(directory: Path, direction: str) -> tuple[Path, Path]:
    return directory / f"{direction}.ids.npy", directory / f"{direction}.sims.npy"


@dataclass(frozen=True)
class Side:
    """The members of one modality: their embeddings, and the image that each belongs to.

    ``owners`` is what tells a query's recorded partners apart: image and caption of the same image share it.
    """

    rows: Rows
    ids: np.ndarray
    owners: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Members ``start .. stop - 1`` as (n, d) float32."""
        return self.rows.take(self.ids[start:stop])


def sides(embeddings: Embeddings, members: Members) -> dict[str, tuple[Side, Side]]:
    """Queries and candidates of each direction."""
    images = Side(embeddings.images, members.images, members.images)
    texts = Side(embeddings.texts, members.pair_ids, members.image_ids)
    return {"i2t": (images, texts), "t2i": (texts, images)}


# Searches queries start .. stop - 1: row numbers and similarities of candidates, (n, k), padded with -1 and -inf.
Search = Callable[[int, int], tuple[np.ndarray, np.ndarray]]

# Queries whose lists are written at a time; a killed run loses at most one such block.
_BLOCK = 32768


def build_graph(workspace: Workspace, config: GraphConfig) -> GraphSummary:
    """Search both directions and write ``graph/<name>/``, named after the embeddings.

    Query blocks are written as they finish, so that a killed run goes on where it was.

    Raises:
        InputError: no embeddings, several and no name, or a graph begun with other parameters.
    """
    embeddings = Embeddings.open(workspace, config.embeddings)
    members = read_members(workspace, embeddings)
    stage = workspace.stage(f"graph/{embeddings.name}")
    index = "exact"
    params = {"k": config.k, "index": index, "recall_check": config.recall_check, "seed": config.seed}
    inputs = {"pairs": workspace.digest, embeddings.stage.name: embeddings.stage.digest}
    if stage.begin(params, inputs, overwrite=config.overwrite):
        for direction, (queries, candidates) in sides(embeddings, members).items():
            _write_direction(stage, direction, queries, candidates, config)
        recall = _check_recall(stage.path, embeddings, members, config)
        outputs = [path.name for direction in DIRECTIONS for path in _paths(stage.path, direction)]
        stage.finish(outputs, recall=recall, images=len(members.images), pairs=len(members.pair_ids))
        _remove_blocks(stage.path)
    meta = stage.require()
    return GraphSummary(embeddings.name, index, config.k, meta["images"], meta["pairs"], meta["recall"])


def _write_direction(stage: Stage, direction: str, queries: Side, candidates: Side, config: GraphConfig) -> None:
    if _paths(stage.path, direction)[1].exists():
        return
    search = _exact_search(queries, candidates, config.k)
    with progress(f"graph {direction}", len(queries), "rows") as advance:
        for start in range(0, len(queries), _BLOCK):
            stop = min(start + _BLOCK, len(queries))
            ids_path, sims_path = _block_paths(stage.path, direction, start)
            if not sims_path.exists():
                found, sims = search(start, stop)
                atomic.write_array(ids_path, np.where(found < 0, -1, candidates.ids[found]))
                atomic.write_array(sims_path, sims.astype(np.float16))
            advance(stop - start)
    _join_blocks(stage.path, direction, queries, config.k)


def _exact_search(queries: Side, candidates: Side, k: int) -> Search:
    def search(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        owners = queries.owners[start:stop]
        return exact_nearest(queries.read(start, stop), owners, candidates.read, candidates.owners, k)

    return search


def _block_paths(directory: Path, direction: str, start: int) -> tuple[Path, Path]:
    blocks = directory / "blocks"
    return blocks / f"{direction}-{start:010d}.ids.npy", blocks / f"{direction}-{start:010d}.sims.npy"


def _join_blocks(directory: Path, direction: str, queries: Side, k: int) -> None:
    """Put the blocks of the members into the rows of all; the similarities come last and mark the direction done."""
    for part, dtype, pad in ((0, np.int64, -1), (1, np.float16, -np.inf)):
        with atomic.replacing(_paths(directory, direction)[part]) as temporary:
            out = np.lib.format.open_memmap(temporary, "w+", dtype, (len(queries.rows), k))
            out[:] = pad
            for start in range(0, len(queries), _BLOCK):
                out[queries.ids[start : start + _BLOCK]] = np.load(_block_paths(directory, direction, start)[part])
            out.flush()


def _remove_blocks(directory: Path) -> None:
    blocks = directory / "blocks"
    for path in sorted(blocks.glob("*.npy")):
        path.unlink()
    blocks.rmdir()


def _check_recall(directory: Path, embeddings: Embeddings, members: Members, config: GraphConfig) -> dict[str, float]:
    """Recall at k of random rows against exact search, by direction: the share of the true lists that was found."""
    recall = {}
    for direction, (queries, candidates) in sides(embeddings, members).items():
        count = min(config.recall_check, len(queries))
        if not count:
            continue
        rows = np.sort(np.random.default_rng(config.seed).choice(len(queries), count, replace=False))
        exact, _ = exact_nearest(
            queries.rows.take(queries.ids[rows]), queries.owners[rows], candidates.read, candidates.owners, config.k
        )
        true_ids = np.where(exact < 0, -1, candidates.ids[exact])
        ids = np.load(_paths(directory, direction)[0], mmap_mode="r")[queries.ids[rows]]
        recall[f"{direction}@{config.k}"] = share_found(ids, true_ids)
        recall[f"{direction}@10"] = share_found(ids[:, :10], true_ids[:, :10])
    return recall


def share_found(ids: np.ndarray, true_ids: np.ndarray) -> float:
    """The share of ``true_ids`` (n, k) that stands in the same row of ``ids`` (n, k); -1 pads do not count."""
    wanted = true_ids >= 0
    found = (true_ids[:, :, None] == ids[:, None, :]).any(axis=2) & wanted
    return float(found.sum() / max(1, wanted.sum()))
