"""What an evaluation asks: pictures and captions of a split, and which of them belong together."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fnpipe.mining.data.keys import combination_keys
from fnpipe.pipeline.errors import InputError, counted
from fnpipe.pipeline.files.tables import codes_of
from fnpipe.pipeline.workspace.embeddings import Embeddings
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.evaluation.metrics import Positives
from fnpipe.train.evaluation.named import chosen_split


@dataclass(frozen=True)
class Queries:
    """What is evaluated: pictures with all their captions.

    Images of equal bytes are one picture with the captions of all of them, as if the data set had listed them so.
    Captions of equal text stay apart; one is right where any of them is.

    Attributes:
        on: the split, or ``all``. image_ids: (N,) int64, the first image of each picture.
        pair_ids: (K,) int64, ascending. image_rows: (K,) int64, the row of each caption's picture in ``image_ids``.
        caption_codes: (K,) int64, equal for equal captions (trimmed).
        copies: (C,) int64, the image_ids that are left out of ``image_ids``. copy_rows: (C,) int64, their pictures.
    """

    on: str
    image_ids: np.ndarray
    pair_ids: np.ndarray
    image_rows: np.ndarray
    caption_codes: np.ndarray
    copies: np.ndarray
    copy_rows: np.ndarray

    def every_image(self) -> tuple[np.ndarray, np.ndarray]:
        """(N + C,) int64 each: all image_ids, copies too, and the rows of their pictures."""
        rows = np.concatenate([np.arange(len(self.image_ids)), self.copy_rows])
        return np.concatenate([self.image_ids, self.copies]), rows

    @property
    def recorded(self) -> Positives:
        """For every picture its recorded captions, and those of equal text."""
        return self.right(self.image_rows, np.arange(len(self.pair_ids)))

    def right(self, image_rows: np.ndarray, text_rows: np.ndarray) -> Positives:
        """From (n,) picture rows and (n,) caption rows: for every picture its captions, and all of equal text."""
        _, codes = np.unique(self.caption_codes, return_inverse=True)
        by_code = np.argsort(codes, kind="stable")
        counts = np.bincount(codes)
        first = np.cumsum(counts) - counts
        pictures, texts = np.divmod(np.unique(combination_keys(image_rows, codes[text_rows], len(counts))), len(counts))
        repeats = counts[texts]
        within = np.arange(repeats.sum()) - np.repeat(np.cumsum(repeats) - repeats, repeats)
        items = by_code[np.repeat(first[texts], repeats) + within]
        return Positives.from_pairs(np.repeat(pictures, repeats), items, len(self.image_ids), len(self.pair_ids))

    @property
    def notes(self) -> list[str]:
        """What repeats, in sentences."""
        notes = []
        if len(self.copies):
            notes.append(
                f"{len(self.copies):,} of the images of {self.on} repeat another's bytes; "
                f"images of equal bytes count as one picture: {counted(len(self.image_ids), 'picture')}"
            )
        repeated = len(self.caption_codes) - len(np.unique(self.caption_codes))
        if repeated:
            notes.append(
                f"{repeated:,} of the {counted(len(self.pair_ids), 'caption')} of {self.on} repeat another's text; "
                "a text is right for every picture that it is recorded with"
            )
        return notes

    def some(self, images: np.ndarray, pairs: np.ndarray) -> Queries:
        """Of the picture rows and caption rows in two bool masks; a caption goes with its picture."""
        rows = np.cumsum(images) - 1
        pairs = pairs & images[self.image_rows]
        copies = images[self.copy_rows]
        return Queries(
            on=self.on,
            image_ids=self.image_ids[images],
            pair_ids=self.pair_ids[pairs],
            image_rows=rows[self.image_rows[pairs]],
            caption_codes=self.caption_codes[pairs],
            copies=self.copies[copies],
            copy_rows=rows[self.copy_rows[copies]],
        )

    def of_images(self, kept: np.ndarray) -> Queries:
        """The same, of the picture rows in the (N,) bool mask alone."""
        return self.some(kept, np.ones(len(self.pair_ids), bool))


def read_queries(workspace: Workspace, on: str | None = None, limit: int | None = None, seed: int = 0) -> Queries:
    """The pictures and captions of a split (``all``: of every split).

    Args:
        on: as `chosen_split` takes it. limit: so many pictures at most, drawn with ``seed``.

    Raises:
        InputError: there is no such split.
    """
    on = chosen_split(workspace, on)
    columns = ["pair_id", "image_id", "image_sha256", "caption"]
    queries = _queries(on, workspace.read_pairs(columns, split=None if on == "all" else on))
    n_images = len(queries.image_ids)
    if limit is None or n_images <= limit:
        return queries
    kept = np.zeros(n_images, bool)
    kept[np.random.default_rng([seed, 0xE7]).permutation(n_images)[:limit]] = True
    return queries.of_images(kept)


def _queries(on: str, pairs: pa.Table) -> Queries:
    """The queries of a table of pairs."""
    owners, pictures = pairs["image_id"].to_numpy(), codes_of(pairs["image_sha256"])
    first = np.full(pictures.max(initial=-1) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, pictures, owners)
    image_ids, image_rows = np.unique(first[pictures], return_inverse=True)
    images, at = np.unique(owners, return_index=True)
    copy = ~np.isin(images, image_ids)
    return Queries(
        on=on,
        image_ids=image_ids,
        pair_ids=pairs["pair_id"].to_numpy(),
        image_rows=image_rows.reshape(-1),
        caption_codes=codes_of(pc.utf8_trim_whitespace(pairs["caption"])),
        copies=images[copy],
        copy_rows=image_rows.reshape(-1)[at[copy]],
    )


def usable_queries(embeddings: Embeddings, queries: Queries) -> Queries:
    """The queries without the images and captions that have no embedding, and without images that lose all captions.

    Raises:
        InputError: nothing is left.
    """
    good_pairs = ~np.isin(queries.pair_ids, embeddings.bad_pairs)
    with_caption = np.zeros(len(queries.image_ids), bool)
    with_caption[queries.image_rows[good_pairs]] = True
    # Imported vectors of equal pictures may differ, and be there for some of them alone.
    image_ids, image_rows = queries.every_image()
    good = ~np.isin(image_ids, embeddings.bad_images)
    first = np.full(len(queries.image_ids), np.iinfo(np.int64).max)
    np.minimum.at(first, image_rows[good], image_ids[good])
    copy = image_ids != first[image_rows]
    usable = replace(queries, image_ids=first, copies=image_ids[copy], copy_rows=image_rows[copy])
    kept = usable.some(np.isin(first, image_ids) & with_caption, good_pairs)
    if not len(kept.image_ids):
        raise InputError(f"{embeddings.stage.path}: no usable embedding of a pair of {queries.on}; see bad.parquet")
    return kept
