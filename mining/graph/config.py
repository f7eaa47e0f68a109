"""What ``fnpipe build-graph`` is asked: its flags, and what they allow."""

from __future__ import annotations

from dataclasses import dataclass

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.flags import flag
from fnpipe.pipeline.machine.device import check_device, check_engine, pick_device

# More are no neighbours any more, and their table would outgrow the embeddings.
MOST_NEIGHBOURS = 4096


@dataclass(frozen=True, kw_only=True)
class GraphConfig:
    """How ``fnpipe build-graph`` searches: one field per flag.

    Attributes:
        index: ``auto``, ``exact``, or a string that ``faiss.index_factory`` knows (``IVF4096,SQfp16``).
        keep_index: leave FAISS's indexes beside the lists.
        engine: ``local``, or ``ray``: blocks of queries for each worker of the cluster at ``ray_address`` (None starts
            a cluster on this machine). The workspace must lie at the same path on all of them, and be writable.
    """

    embeddings: str | None = flag(None, "Which embeddings; the only ones there are if not given.")
    k: int = flag(32, "Neighbours per image and per caption.")
    index: str = flag("auto", "auto, exact, or a string for faiss.index_factory, such as HNSW32,SQfp16.")
    keep_index: bool = flag(False, "Leave i2t.faiss and t2i.faiss, which FAISS opens and searches.")
    device: str = flag("auto", "auto, cpu or cuda.")
    recall_check: int = flag(1000, "Random rows to check against exact search; 0 for none.")
    seed: int = flag(0, "Seed of everything drawn.")
    engine: str = flag("local", "local, or ray.")
    ray_address: str | None = flag(None, "Of the Ray cluster (HOST:PORT or auto); one is started here if not given.")
    overwrite: bool = flag(False, "Throw away what is there and start afresh.")

    def __post_init__(self) -> None:
        check_engine(self.engine)
        if not 1 <= self.k <= MOST_NEIGHBOURS:
            raise InputError(f"--k {self.k}: from 1 to {MOST_NEIGHBOURS:,} neighbours")
        check_device(self.device, self.engine)
        pick_device(self.device)
        if self.recall_check < 0:
            raise InputError(f"--recall-check {self.recall_check}: a number of rows, 0 for none")
