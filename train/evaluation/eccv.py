"""``fnpipe evaluate --eccv``: COCO's 5k test under four sets of labels, those of the `eccv_caption` package.

=========  ==================================================================================================
coco_5k    COCO's own captions (Karpathy's test split: 5,000 images, the first five captions of each)
coco_1k    the same, the mean over five folds of 1,000 images, each searched alone
cxc        Crisscrossed Captions (EACL 2021, arXiv:2004.15020): more captions and images are right
eccv       ECCV Caption (ECCV 2022, arXiv:2204.03359): 1,261 images and 1,332 captions with human-verified truth
=========  ==================================================================================================

The package brings the labels; the figures are ours, and equal those of its own functions on every ranking. Where it
needs a ranking, and takes tied items as they happen to stand, ours are the mean over all their orders. A query that a
set of labels does not list is no query of it.
"""

from __future__ import annotations

import importlib.util
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fnpipe.pipeline.errors import InputError
from fnpipe.train.evaluation.metrics import (
    RECALL_AT,
    Positives,
    Scores,
    precision_of_block,
    query_blocks,
    recall_of_block,
)
from fnpipe.train.evaluation.queries import Queries
from fnpipe.train.evaluation.retrieval import Figures

ON = "COCO's 5k test"
FOLDS = 5
# What `figures` gives of every set of labels.
RECALLS = tuple(f"r{k}" for k in RECALL_AT)
FIGURES: Mapping[str, tuple[str, ...]] = {
    "coco_1k": RECALLS,
    "coco_5k": RECALLS,
    "cxc": RECALLS,
    "eccv": ("r1", "rp", "map_at_r"),
}


@dataclass(frozen=True)
class Direction:
    """What counts as right for the queries of one direction; queries and items are rows of `CocoTest`.

    Attributes:
        recorded, cxc, eccv: over the same queries. ``n_items`` of one may be larger than the number of items: captions
            that are right and not among those searched (ECCV Caption names two) count as never found.
    """

    recorded: Positives
    cxc: Positives
    eccv: Positives


@dataclass(frozen=True)
class CocoTest:
    """COCO's test images and captions in Karpathy's order, whose fifths are the folds, and what is right of them.

    Attributes:
        image_ids: (N,) int64, COCO's. caption_ids: (N, 5) int64, COCO's, ascending in every row.
    """

    image_ids: np.ndarray
    caption_ids: np.ndarray
    i2t: Direction
    t2i: Direction

    @classmethod
    def read(cls, directory: Path) -> CocoTest:
        """From the JSON files of the package's ``data`` directory.

        Raises:
            InputError: they are not what this reads.
        """
        try:
            ids = np.load(directory / "coco_test_ids.npy").reshape(-1, 5)
            tables = {
                (name, way): json.loads((directory / f"{name}_{way}.json").read_bytes())
                for name in ("original", "cxc", "eccv")
                for way in ("image_to_caption", "caption_to_image")
            }
            images = np.array([tables["original", "caption_to_image"][str(row[0])][0] for row in ids], np.int64)
            directions = [
                Direction(*(_positives(tables[name, way], queries, items) for name in ("original", "cxc", "eccv")))
                for way, queries, items in (
                    ("image_to_caption", images, ids.ravel()),
                    ("caption_to_image", ids.ravel(), images),
                )
            ]
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise InputError(
                f"{directory}: not the data of eccv_caption 0.1 ({type(error).__name__}: {error}); "
                "run `pip install --force-reinstall fnpipe[eval]`"
            ) from None
        return cls(images, ids, *directions)

    def figures(self, queries: Queries) -> Figures:
        """How to measure scores of ``queries``, which must be `coco_queries` with nothing left out.

        Raises:
            InputError: pictures or captions were left out; the published figures are of all.
        """
        images, captions = self.caption_ids.shape[0] - len(queries.image_ids), self.caption_ids.size
        if images or captions != len(queries.pair_ids):
            raise InputError(
                f"--eccv: {images:,} of the {len(self.image_ids):,} images and {captions - len(queries.pair_ids):,} of "
                f"the {captions:,} captions of {ON} have no readable picture or no embedding, and its figures are of "
                "all; look at quarantine.parquet and bad.parquet"
            )
        return self.measure

    def measure(self, i2t: Scores, t2i: Scores) -> dict[str, dict[str, float]]:
        """All figures, in percent.

        Args:
            i2t: scores of (images, captions) in the order of ``image_ids`` and of ``caption_ids``. t2i: the other way.

        Returns:
            By the name of the labels (`FIGURES`): ``tr_...`` (image to text) and ``ir_...`` (text to image); under
            COCO's own labels also ``rsum``.
        """
        n_images, n_captions = len(self.image_ids), self.caption_ids.size
        out: dict[str, dict[str, float]] = {name: {} for name in FIGURES}
        ways = (("tr", i2t, self.i2t, n_captions), ("ir", t2i, self.t2i, n_images))
        for side, scores, right, n_items in ways:
            for name, values in measure_direction(scores, right, n_items).items():
                out[name] |= {f"{side}_{key}": value for key, value in zip(FIGURES[name], values, strict=True)}
        for name in ("coco_1k", "coco_5k"):
            out[name]["rsum"] = sum(out[name].values())
        return out


def measure_direction(scores: Scores, right: Direction, n_items: int) -> dict[str, list[float]]:
    """The means over the queries of one direction, in percent, in the order of `FIGURES`; scores are read once."""
    found: dict[str, list[torch.Tensor]] = defaultdict(list)
    fold_queries, fold_items = len(right.recorded) // FOLDS, n_items // FOLDS
    blocks = [(fold, *block) for fold in range(FOLDS) for block in query_blocks(fold_queries, n_items)]
    for fold, start, stop in blocks:
        start, stop = start + fold * fold_queries, stop + fold * fold_queries
        block, first = scores(start, stop), fold * fold_items
        items, mask = right.recorded.padded(start, stop)
        found["coco_5k"].append(recall_of_block(block, items, mask))
        in_fold = block[:, first : first + fold_items]
        found["coco_1k"].append(recall_of_block(in_fold, (items - first).clamp(min=0), mask))
        for name, positives in (("cxc", right.cxc), ("eccv", right.eccv)):
            items, mask = positives.padded(start, stop)
            asked = mask.any(1)
            if not bool(asked.any()):
                continue
            listed = block if bool(asked.all()) else block[asked]
            if unreachable := positives.n_items - n_items:
                listed = torch.nn.functional.pad(listed, (0, unreachable), value=-torch.inf)
            found[name].append(_of_labels(name, listed, items[asked], mask[asked]))
    return {name: (100 * torch.cat(found[name]).mean(0)).tolist() for name in FIGURES}


def _of_labels(name: str, block: torch.Tensor, items: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if name == "cxc":
        return recall_of_block(block, items, mask)
    return torch.cat([recall_of_block(block, items, mask, (1,)), precision_of_block(block, items, mask)], 1)


def _positives(table: Mapping[str, Sequence[int]], queries: np.ndarray, items: np.ndarray) -> Positives:
    """From ids to rows; items that are not among those searched get rows after them."""
    wanted = np.array([item for row in table.values() for item in row], np.int64)
    beyond = np.setdiff1d(wanted, items)
    query_row = {int(query): row for row, query in enumerate(queries)}
    item_row = {int(item): row for row, item in enumerate(np.concatenate([items, beyond]))}
    asked = np.repeat([query_row[int(query)] for query in table], [len(row) for row in table.values()])
    rows = np.array([item_row[int(item)] for item in wanted], np.int64)
    return Positives.from_pairs(asked, rows, len(queries), len(item_row))


def read_coco_test() -> CocoTest:
    """The labels of the installed `eccv_caption` package.

    Raises:
        InputError: it is not installed.
    """
    # Its data alone: importing it would warn of two packages that only its own functions use.
    spec = importlib.util.find_spec("eccv_caption")
    if spec is None or not spec.submodule_search_locations:
        raise InputError("--eccv takes COCO's labels from the eccv_caption package; run `pip install fnpipe[eval]`")
    return CocoTest.read(Path(spec.submodule_search_locations[0]) / "data")
