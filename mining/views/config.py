"""What ``fnpipe audit`` and ``fnpipe inspect`` are asked: their flags, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from fnpipe.mining.edges.thresholds import LABELS, SOURCES, TAU_HIGH
from fnpipe.mining.plans.config import GroupConfig, parse_search_space
from fnpipe.pipeline.errors import InputError, nearest
from fnpipe.pipeline.flags import flag

SearchSpace: TypeAlias = int | Literal["all"]


@dataclass(frozen=True, kw_only=True)
class AuditConfig:
    """How ``fnpipe audit`` looks: one field per flag.

    Attributes:
        search_space: one after the other; none stands for 5, 10, 20 and 50 batches and ``all``, as far as the data set
            and the graph allow.
        edges: with some the finished plans of the workspace are looked at as well, and what they know is said of all.
    """

    embeddings: str | None = flag(None, "Which embeddings; the only ones there are if not given.")
    batch_size: int = flag(GroupConfig.batch_size, "Pairs per batch.")
    search_space: tuple[SearchSpace, ...] = flag(
        (), "Again for each; by default 5, 10, 20, 50 batches, all.", metavar="M|all", parse=parse_search_space
    )
    batches: int = flag(1000, "Batches to look at, about, per search space.")
    truth: str | None = flag(None, "Known truth (Parquet: image, concept or caption).", metavar="FILE")
    discriminator: str | None = flag(
        None, "Let it judge too: itm:RUN, vacsr:RUN, blip:MODEL, clip, or another.", metavar="SPEC"
    )
    tau_high: float | None = flag(None, "What it finds above this counts as true. Default: 0.8.")
    edges: str | None = flag(
        None, "Say what these know of the hardest negatives; of all plans there are too.", metavar="EDGES"
    )
    plot: str | None = flag(None, "Write a plot: .png or .html.", metavar="FILE")
    seed: int = flag(0, "Seed of everything drawn.")

    def __post_init__(self) -> None:
        if self.tau_high is not None and self.discriminator is None:
            raise InputError(f"--tau-high {self.tau_high:g} cuts a discriminator's p; name one with --discriminator")
        if self.batch_size < 2:
            raise InputError(f"--batch-size {self.batch_size}: a batch of one pair has no negatives")
        if self.batches < 1:
            raise InputError(f"--batches {self.batches}: at least 1")
        for space in self.search_space:
            GroupConfig(batch_size=self.batch_size, search_space=space)

    @property
    def threshold(self) -> float:
        """The discriminator's p above which a combination counts as true."""
        return TAU_HIGH if self.tau_high is None else self.tau_high


@dataclass(frozen=True, kw_only=True)
class InspectConfig:
    """Which edges to list, and how to see them: one field per flag."""

    edges: str | None = flag(None, "Which edges; the only ones there are if not given.")
    label: str | None = flag(None, "Only positive, ambiguous or negative.")
    source: str | None = flag(None, "Only discriminator, identity or review (answered by people).")
    limit: int = flag(20, "Rows in the terminal, the most probable first.")
    truth: str | None = flag(None, "Mark rows as true or false, and measure all edges.", metavar="FILE")
    tau_high: float | None = flag(None, "See the labels of another threshold.")
    tau_low: float | None = flag(None, "See the labels of another threshold.")
    html: str | None = flag(None, "Write what was found as one page with pictures.", metavar="FILE")

    def __post_init__(self) -> None:
        for name, value, known in (("--label", self.label, LABELS), ("--source", self.source, SOURCES)):
            if value is not None and value not in known:
                raise InputError(f"{name} {value}: one of {', '.join(known)}{nearest(value, list(known))}")
        if self.limit < 1:
            raise InputError(f"--limit {self.limit}: at least 1")
