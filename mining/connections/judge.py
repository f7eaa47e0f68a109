"""Judging combinations a block at a time: features of pictures and captions once, the combining per combination."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from fnpipe.mining.connections.candidates import NOT_PROPOSED, Candidates
from fnpipe.mining.connections.known import KnownEdges
from fnpipe.mining.data.identity import IDENTITY_BOUND, Identity
from fnpipe.mining.data.keys import combination_keys
from fnpipe.mining.discriminators.protocol import AnyDiscriminator, Discriminator, EmbeddingDiscriminator
from fnpipe.mining.discriminators.similarity import cosine
from fnpipe.mining.edges.labels import (
    DISCRIMINATOR,
    IDENTITY,
    POSITIVE,
    REVIEW,
    UNSCORED,
    label_candidates,
    named,
    named_sources,
)
from fnpipe.mining.edges.reader import EDGES_SCHEMA, RECORDED_SCHEMA
from fnpipe.mining.edges.thresholds import LABELS
from fnpipe.pipeline.machine.progress import Advance
from fnpipe.pipeline.workspace.embeddings import Embeddings
from fnpipe.pipeline.workspace.workspace import Workspace

# Embeddings are gathered so many combinations at a time.
_ROWS = 1 << 16


@dataclass(frozen=True)
class Verdicts:
    """What a discriminator said of (n,) combinations.

    Attributes:
        p: float32; meaningless where ``judged`` is False. uncertainty: float32, or None.
        judged: bool; False where the picture could not be decoded.
    """

    p: np.ndarray
    uncertainty: np.ndarray | None
    judged: np.ndarray


@dataclass(frozen=True)
class _Pictures:
    """A block of decoded pictures: the images that decoded, ascending, and their pixels."""

    image_ids: np.ndarray
    rgbs: list[np.ndarray]


class Judge:
    """A discriminator with the workspace that it judges.

    Raises:
        InputError: ``known`` holds verdicts of another discriminator.
    """

    def __init__(
        self,
        workspace: Workspace,
        embeddings: Embeddings,
        con_d: AnyDiscriminator,
        *,
        block_images: int,
        workers: int,
        identity_bound: int = IDENTITY_BOUND,
        known: KnownEdges | None = None,
    ) -> None:
        if known is not None:
            known.require_judged_by(con_d)
        self.workspace = workspace
        self.embeddings = embeddings
        self.con_d = con_d
        self.block_images = block_images
        self.workers = workers
        self.known = known
        by_pictures = () if isinstance(con_d, EmbeddingDiscriminator) else ("places",)
        # Candidates of one shard take captions from all of them.
        workspace.pairs.load("image_of", "train", "picture_codes", "caption_codes", "captions", *by_pictures)
        self.identity = Identity.of(workspace, identity_bound)
        self._captions = workspace.pairs.captions

    def edges(self, shard: int, candidates: Candidates, tau_low: float, tau_high: float, advance: Advance) -> pa.Table:
        """Judge the candidates of ``shard``'s images.

        Returns:
            ``EDGES_SCHEMA``, sorted by image_id, then match_probability descending, then pair_id. Identical
            combinations are positive with p = 1 and are not judged, nor are those with a known verdict; those whose
            picture does not decode are left out.
        """
        same, p, uncertainty, people = self.settled(shard, candidates)
        new = np.isnan(p)
        judged = candidates.take(new)
        verdicts = self.verdicts(shard, judged.image_ids, judged.pair_ids, advance)
        p[new] = verdicts.p
        if verdicts.uncertainty is not None:
            uncertainty[new] = verdicts.uncertainty
        kept = np.ones(len(candidates), bool)
        kept[new] = verdicts.judged
        p, uncertainty, same, people = p[kept], uncertainty[kept], same[kept], people[kept]
        labels = np.where(same, POSITIVE, np.where(people == UNSCORED, label_candidates(p, tau_low, tau_high), people))
        sources = np.where(same, IDENTITY, np.where(people == UNSCORED, DISCRIMINATOR, REVIEW))
        return self._table(shard, candidates.take(kept), p, uncertainty, labels, sources)

    def settled(self, shard: int, candidates: Candidates) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """What of ``shard``'s candidates needs no judging.

        Returns:
            (n,) bool, what the identity rule calls true; (n,) float32 p: 1 there, the verdict that is known, or NaN;
            (n,) float32, the uncertainty of that verdict, or NaN; (n,) int8, the label by people, or UNSCORED.
        """
        p, uncertainty = np.full((2, len(candidates)), np.nan, np.float32)
        people = np.full(len(candidates), UNSCORED, np.int8)
        if self.known is not None:
            p, uncertainty, people = self.known.find(shard, candidates)
        same = self.identity.matches(candidates.image_ids, candidates.pair_ids)
        p[same], uncertainty[same] = 1, np.nan
        return same, p, uncertainty, people

    def recorded(self, shard: int, advance: Advance) -> pa.Table:
        """The discriminator's view of the recorded pairs of a shard: ``RECORDED_SCHEMA``, train split, by pair_id."""
        first, end = self.workspace.pair_starts[shard : shard + 2]
        pairs = first + np.flatnonzero(self.workspace.pairs.train[first:end])
        image_ids = self.workspace.pairs.image_of[pairs]
        usable = self.embeddings.usable(image_ids, pairs)
        verdicts = self.verdicts(shard, image_ids[usable], pairs[usable], advance)
        kept = verdicts.judged
        return pa.table([pairs[usable][kept], verdicts.p[kept]], schema=RECORDED_SCHEMA)

    def probabilities(self, image_ids: np.ndarray, pair_ids: np.ndarray) -> np.ndarray:
        """Judge any (n,) combinations, in any order, each different one once; an audit asks like this.

        Returns:
            (n,) float32, NaN where the picture does not decode. Identity is not applied.
        """
        n_pairs = self.workspace.n_pairs
        keys, at = np.unique(combination_keys(image_ids, pair_ids, n_pairs), return_inverse=True)
        images, pairs = np.divmod(keys, n_pairs)
        p = np.full(len(keys), np.nan, np.float32)
        shards = self.workspace.shards_of(images)
        for shard in np.unique(shards).tolist():
            rows = np.flatnonzero(shards == shard)
            found = self.verdicts(shard, images[rows], pairs[rows], lambda _: None)
            p[rows[found.judged]] = found.p[found.judged]
        return p[at]

    def verdicts(self, shard: int, image_ids: np.ndarray, pair_ids: np.ndarray, advance: Advance) -> Verdicts:
        """Judge (n,) combinations of images of ``shard``, ascending, with any pairs."""
        if isinstance(self.con_d, EmbeddingDiscriminator):
            return self._by_embeddings(self.con_d, image_ids, pair_ids, advance)
        return self._by_pictures(self.con_d, shard, image_ids, pair_ids, advance)

    def _by_embeddings(
        self, con_d: EmbeddingDiscriminator, image_ids: np.ndarray, pair_ids: np.ndarray, advance: Advance
    ) -> Verdicts:
        p = np.empty(len(image_ids), np.float32)
        uncertainty: np.ndarray | None = None
        for first in range(0, len(image_ids), _ROWS):
            rows = slice(first, first + _ROWS)
            images = self.embeddings.images.take(image_ids[rows])
            p[rows], unsure = con_d.score_embeddings(images, self.embeddings.texts.take(pair_ids[rows]))
            if unsure is not None:
                uncertainty = np.empty(len(p), np.float32) if uncertainty is None else uncertainty
                uncertainty[rows] = unsure
            advance(len(images))
        return Verdicts(p, uncertainty, np.ones(len(p), bool))

    def _by_pictures(
        self, con_d: Discriminator, shard: int, image_ids: np.ndarray, pair_ids: np.ndarray, advance: Advance
    ) -> Verdicts:
        p = np.empty(len(image_ids), np.float32)
        judged = np.zeros(len(image_ids), bool)
        for block in self._pictures(shard, np.unique(image_ids)):
            if not len(block.image_ids):
                continue
            first, last = np.searchsorted(image_ids, [block.image_ids[0], block.image_ids[-1] + 1])
            rows = np.arange(first, last)
            # The images that did not decode stand between the others.
            rows = rows[np.isin(image_ids[rows], block.image_ids)]
            p[rows] = self._score_block(con_d, block, image_ids[rows], pair_ids[rows])
            judged[rows] = True
            advance(len(rows))
        return Verdicts(p, None, judged)

    def _score_block(
        self, con_d: Discriminator, block: _Pictures, image_ids: np.ndarray, pair_ids: np.ndarray
    ) -> np.ndarray:
        # Equal captions of different pairs share one row.
        _, first, text_rows = np.unique(self.identity.caption_codes[pair_ids], return_index=True, return_inverse=True)
        captions = self._captions.take(pa.array(pair_ids[first])).to_pylist()
        by_length = sorted(range(len(captions)), key=lambda row: (len(captions[row]), captions[row]))
        place = np.empty(len(captions), np.int64)
        place[by_length] = np.arange(len(captions))
        text_rows = place[text_rows]
        image_rows = np.searchsorted(block.image_ids, image_ids)
        images = con_d.prepare_images(block.rgbs)
        texts = con_d.prepare_texts([captions[row] for row in by_length])
        # By text, so that a batch of combinations holds captions of like length.
        order = np.lexsort((image_rows, text_rows))
        scores = np.empty(len(pair_ids), np.float32)
        scores[order] = con_d.score_pairs(images, image_rows[order], texts, text_rows[order])
        return scores

    def _pictures(self, shard: int, image_ids: np.ndarray) -> Iterator[_Pictures]:
        """The pictures of ``image_ids`` (ascending) block by block, the next block read and decoded meanwhile."""
        blocks = [image_ids[first : first + self.block_images] for first in range(0, len(image_ids), self.block_images)]
        if not blocks:
            return
        self.workspace.tar(shard)
        pictures = self.workspace.pictures

        def read(number: int) -> _Pictures:
            decoded = list(decoders.map(pictures.decoded, pictures.read(blocks[number])))
            good = np.array([rgb is not None for rgb in decoded], bool)
            return _Pictures(blocks[number][good], [rgb for rgb in decoded if rgb is not None])

        with ThreadPoolExecutor(self.workers) as decoders, ThreadPoolExecutor(1) as reader:
            ahead: Future[_Pictures] = reader.submit(read, 0)
            for number in range(len(blocks)):
                block = ahead.result()
                if number + 1 < len(blocks):
                    ahead = reader.submit(read, number + 1)
                yield block

    def _keys_of(self, shard: int, image_ids: np.ndarray) -> pa.ChunkedArray:
        """The keys of (n,) images of ``shard``."""
        keys = self.workspace.read_images(["key"], shard=shard)["key"]
        return keys.take(pa.array(image_ids - self.workspace.image_starts[shard]))

    def _table(
        self,
        shard: int,
        candidates: Candidates,
        p: np.ndarray,
        uncertainty: np.ndarray,
        labels: np.ndarray,
        sources: np.ndarray,
    ) -> pa.Table:
        order = np.lexsort((candidates.pair_ids, -p, candidates.image_ids))
        candidates, p, uncertainty = candidates.take(order), p[order], uncertainty[order]
        columns = {
            "image_id": candidates.image_ids,
            "pair_id": candidates.pair_ids,
            "image_key": self._keys_of(shard, candidates.image_ids),
            "caption": self._captions.take(pa.array(candidates.pair_ids)).cast(pa.string()),
            "rank_i2t": pa.array(candidates.rank_i2t, mask=candidates.rank_i2t == NOT_PROPOSED),
            "rank_t2i": pa.array(candidates.rank_t2i, mask=candidates.rank_t2i == NOT_PROPOSED),
            "similarity": self._similarity(candidates),
            "match_probability": p,
            "uncertainty": pa.array(uncertainty, mask=np.isnan(uncertainty)),
            "label": named(labels[order], LABELS),
            "source": named_sources(sources[order]),
        }
        return pa.table(columns, schema=EDGES_SCHEMA)

    def _similarity(self, candidates: Candidates) -> np.ndarray:
        out = np.empty(len(candidates), np.float32)
        for first in range(0, len(out), _ROWS):
            rows = slice(first, first + _ROWS)
            images = self.embeddings.images.take(candidates.image_ids[rows])
            out[rows] = cosine(images, self.embeddings.texts.take(candidates.pair_ids[rows]))
        return out
