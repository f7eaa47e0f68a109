"""How a plan is asked for: the flags of ``fnpipe group``, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.flags import flag

SAMPLINGS = ("grit", "random")
CAPTIONS = ("one", "all")
ALL: Literal["all"] = "all"


def parse_search_space(text: str) -> int | Literal["all"]:
    """The value of ``--search-space``: a number of pairs, or ``all``."""
    if text == ALL:
        return ALL
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"--search-space {text}: a number of pairs, or {ALL}")
    return int(text)


@dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """How ``fnpipe group`` fills batches: one field per flag, the released values as defaults.

    Attributes:
        quantile: below 1, every next pair stands at this quantile of similarity instead of being the nearest.
        edges: mined connections that a batch must not hold. avoid_above: those with a higher probability (None: the
            ``tau_low`` of the edges).
    """

    sampling: str = flag("grit", "grit or random.")
    batch_size: int = flag(128, "Pairs per batch.")
    search_space: int | Literal["all"] = flag(
        1920, "Pairs that one chain looks through.", metavar="M|all", parse=parse_search_space
    )
    epochs: int = flag(1, "Different plans to make.")
    seed: int = flag(0, "Seed of everything drawn.")
    name: str | None = flag(None, "Name of the plan; SAMPLING-M if not given.")
    embeddings: str | None = flag(None, "Which embeddings; the only ones there are if not given.")
    captions: str = flag(
        "one", "one: every image once an epoch, with another caption each time. all: once with each of its captions."
    )
    keep_last: bool = flag(False, "Keep the incomplete batch at the end.")
    quantile: float = flag(
        1.0, "Below 1: the next pair stands at this quantile of similarity, not nearest.", metavar="Q"
    )
    edges: str | None = flag(None, "Mined edges: no batch holds a pair of them that is known to match.")
    avoid_above: float | None = flag(None, "Which edges: above this probability. Default: their tau_low.", metavar="P")
    overwrite: bool = flag(False, "Throw away what is there and start afresh.")

    def __post_init__(self) -> None:
        if self.sampling not in SAMPLINGS:
            raise InputError(f"--sampling {self.sampling}: one of {', '.join(SAMPLINGS)}")
        if self.captions not in CAPTIONS:
            raise InputError(f"--captions {self.captions}: one of {', '.join(CAPTIONS)}")
        if self.captions == "all" and self.keep_last:
            raise InputError("--keep-last: with --captions all a batch could hold an image twice; leave it out")
        if self.batch_size < 2:
            raise InputError(
                f"--batch-size {self.batch_size}: at least 2, because the others of a batch are its negatives"
            )
        if self.epochs < 1:
            raise InputError(f"--epochs {self.epochs}: at least 1")
        if self.seed < 0:
            raise InputError(f"--seed {self.seed}: a number from 0")
        # Random batches look through nothing.
        if self.sampling == "grit" and self.search_space != ALL:
            _require_multiple(self.search_space, self.batch_size)
        if not 0 < self.quantile <= 1:
            raise InputError(f"--quantile {self.quantile:g}: above 0, at most 1")
        if self.quantile < 1 and (self.sampling != "grit" or self.search_space == ALL):
            what = f"--sampling {self.sampling}" if self.sampling != "grit" else f"--search-space {ALL}"
            raise InputError(f"--quantile {self.quantile:g}: ranks the pairs of a search space, and {what} has none")
        if self.edges is not None and self.sampling != "grit":
            raise InputError(f"--edges {self.edges}: {self.sampling} batches avoid nothing; use --sampling grit")
        if self.avoid_above is not None:
            if self.edges is None:
                raise InputError(f"--avoid-above {self.avoid_above:g}: of which edges? name them with --edges")
            if not 0 <= self.avoid_above <= 1:
                raise InputError(f"--avoid-above {self.avoid_above:g}: a probability from 0 to 1")

    @property
    def plan_name(self) -> str:
        """SAMPLING-M, and what makes the plan another one than GRIT's."""
        quantile = f"-q{self.quantile:g}" if self.quantile < 1 else ""
        avoiding = f"-avoid-{self.edges}" if self.edges is not None else ""
        captions = "-all-captions" if self.captions == "all" else ""
        return self.name or f"{self.sampling}-{self.search_space}{quantile}{avoiding}{captions}"


def _require_multiple(search_space: int, batch_size: int) -> None:
    if search_space >= batch_size and search_space % batch_size == 0:
        return
    below = max(1, search_space // batch_size) * batch_size
    raise InputError(
        f"--search-space {search_space} is no multiple of --batch-size {batch_size}; "
        f"the nearest are {below} and {below + batch_size}"
    )
