"""How hard in-batch negatives are, by sampling and search space, and how many of the hardest are false.

For every anchor of a planned batch the most similar other pair of the batch is its hardest negative, in both
directions. Hard batches make the hardest negatives more similar, and more of them true: that is what this measures,
by the similarities alone, and by whoever can judge a combination (known truth, the identity rule, a discriminator).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from fnpipe.mining.connections import judge as judging
from fnpipe.mining.data.identity import Identity
from fnpipe.mining.data.train_pairs import TrainPairs, read_train_pairs
from fnpipe.mining.data.truth import Truth
from fnpipe.mining.discriminators.protocol import AnyDiscriminator
from fnpipe.mining.graph.graph import Graph
from fnpipe.mining.plans.config import ALL, GroupConfig
from fnpipe.mining.plans.plan import read_plan
from fnpipe.mining.plans.stage import plan_epoch
from fnpipe.mining.views.config import AuditConfig, SearchSpace
from fnpipe.mining.views.hardest import Hardest, hardest_negatives
from fnpipe.mining.views.known_shares import Shares, shares_by_edges
from fnpipe.pipeline.errors import InputError, counted
from fnpipe.pipeline.workspace.embeddings import Embeddings
from fnpipe.pipeline.workspace.workspace import Stage, Workspace, reading

# Judges (image_ids, pair_ids), both (n,): 1.0 true, 0.0 false, NaN unknown.
Verdict = Callable[[np.ndarray, np.ndarray], np.ndarray]

# Search spaces of the default audit, in batches.
_SPACES_IN_BATCHES = (5, 10, 20, 50)
_QUANTILES = (5, 25, 50, 75, 95)
_BINS = np.linspace(-1, 1, 201)
# Pictures whose features a discriminator holds at a time, and threads that decode them.
_JUDGED_AT_ONCE, _DECODERS = 128, 4


@dataclass(frozen=True)
class AuditRow:
    """What one way of filling batches gives.

    Attributes:
        above_recorded: share of hardest negatives more similar to the anchor than its own partner is.
        judged: per judge, the share of the hardest negatives it knows that it calls true.
        histogram: counts over 200 equal bins from -1 to 1.
        plan: the name of a plan of the workspace; None: batches that were filled to be looked at.
        known: the shares of the hardest negatives that edges call positive, ambiguous and negative, and that are
            unknown to them; None without edges.
        forced: pairs of the plan that stand beside a known match; None where the plan avoids none.
    """

    sampling: str
    search_space: SearchSpace | None
    batches: int
    hardest: int
    mean: float
    quantiles: dict[str, float]
    above_recorded: float
    judged: dict[str, float | None]
    histogram: list[int]
    plan: str | None = None
    known: dict[str, float] | None = None
    forced: int | None = None

    @property
    def label(self) -> str:
        """How people call it: the plan, or how batches were filled."""
        filled = self.sampling if self.search_space is None else f"{self.sampling} M = {self.search_space}"
        return self.plan or filled


@dataclass(frozen=True)
class Audit:
    """The rows, random first; the similarity of recorded pairs; the search spaces that were left out, with why.

    Attributes:
        notes: on GRIT's batches that are no harder than random ones.
    """

    embeddings: str
    batch_size: int
    images: int
    rows: list[AuditRow]
    recorded: dict[str, Any]
    skipped: dict[str, str]
    notes: list[str]


def audit(
    workspace: Workspace, config: AuditConfig, truth: Truth | None = None, judges: Mapping[str, Verdict] | None = None
) -> Audit:
    """Fill batches in every way asked for, and look at their hardest negatives.

    Args:
        truth: known truth, which adds the judges ``truth`` and ``identity``. judges: further ones, by name.

    Raises:
        InputError: no embeddings or edges; a search space asked for that is larger than the data, or ``all`` without a
            graph.
    """
    embeddings = Embeddings.open(workspace, config.embeddings)
    train_pairs = read_train_pairs(workspace, embeddings)
    every = {**(_truth_judges(workspace, truth) if truth else {}), **(judges or {})}
    spaces, skipped = _choose_spaces(workspace, config, embeddings.name, len(train_pairs.images))
    rows, recorded = [], np.empty(0, np.float32)
    edges = workspace.resolve("edges", config.edges, "--edges") if config.edges is not None else None
    known = shares_by_edges(edges) if edges is not None else None
    stages = [
        embeddings.stage,
        *([edges] if edges is not None else []),
        *([workspace.stage(f"graph/{embeddings.name}")] if ALL in spaces else []),
    ]
    with reading(workspace, {stage.name: stage.digest for stage in stages}, "fnpipe audit"):
        for space in (None, *spaces):
            hardest = hardest_negatives(_plan(workspace, config, train_pairs, embeddings, space), embeddings)
            recorded = hardest.recorded if space is None else recorded
            rows.append(_row(hardest, "random" if space is None else "grit", space, config.batch_size, every, known))
    for name in workspace.names("groups") if known is not None else ():
        if why := _why_not(workspace, name):
            skipped[f"groups/{name}"] = why
        else:
            rows.append(_plan_row(workspace.stage(f"groups/{name}"), config.batches, embeddings, every, known))
    return Audit(
        embeddings=embeddings.name,
        batch_size=config.batch_size,
        images=len(train_pairs.images),
        rows=rows,
        recorded={"mean": float(recorded.mean()), "quantiles": _quantiles(recorded), "histogram": _histogram(recorded)},
        skipped=skipped,
        notes=_no_harder(rows, config.batch_size),
    )


def _no_harder(rows: Sequence[AuditRow], batch_size: int) -> list[str]:
    """Notes on rows whose hardest negatives are no harder than those of random batches, the first row.

    By chance the anchor's partner is the most similar of a batch of B once in B times. An encoder that finds it less
    than half as often again does not know what is hard.
    """
    random, *others = rows
    grouped = [row for row in others if row.sampling == "grit"]
    notes = [
        f"{row.label}: the {row.hardest:,} hardest negatives are no harder than those of random batches (mean "
        f"similarity {row.mean:.3f} against {random.mean:.3f})"
        for row in grouped
        if row.mean <= random.mean
    ]
    if grouped and random.above_recorded >= 1 - 1.5 / batch_size:
        notes.append(
            f"{random.above_recorded:.1%} of the {random.hardest:,} hardest negatives of random batches are more "
            "similar to their anchor than its partner, as by chance: these embeddings tell no pair from others, and "
            "batches that are grouped by them are no harder"
        )
    return notes


def discriminator_judge(
    workspace: Workspace, embeddings: str | None, con_d: AnyDiscriminator, tau_high: float = 0.8
) -> Verdict:
    """A judge that calls true what ``con_d`` finds above ``tau_high``: MAFA's count of false negatives (table 1)."""
    judge = judging.Judge(
        workspace, Embeddings.open(workspace, embeddings), con_d, block_images=_JUDGED_AT_ONCE, workers=_DECODERS
    )

    def says(image_ids: np.ndarray, pair_ids: np.ndarray) -> np.ndarray:
        p = judge.probabilities(image_ids, pair_ids)
        return np.where(np.isnan(p), np.nan, p > np.float32(tau_high))

    return says


def _truth_judges(workspace: Workspace, truth: Truth) -> dict[str, Verdict]:
    identity = Identity.of(workspace)

    def by_truth(image_ids: np.ndarray, pair_ids: np.ndarray) -> np.ndarray:
        return np.where(truth.known_images[image_ids], truth.matches(image_ids, pair_ids), np.nan)

    def by_identity(image_ids: np.ndarray, pair_ids: np.ndarray) -> np.ndarray:
        return identity.matches(image_ids, pair_ids).astype(float)

    return {"truth": by_truth, "identity": by_identity}


def _choose_spaces(
    workspace: Workspace, config: AuditConfig, name: str, images: int
) -> tuple[list[SearchSpace], dict[str, str]]:
    """The search spaces to look at, and those left out by name, with the reason."""
    default = [n * config.batch_size for n in _SPACES_IN_BATCHES]
    wanted: tuple[SearchSpace, ...] = config.search_space or (*default, ALL)
    if images < config.batch_size:
        raise InputError(
            f"{workspace.root}: {counted(images, 'image makes', 'images make')} no batch of "
            f"{config.batch_size}; use --batch-size"
        )
    spaces: list[SearchSpace] = []
    skipped = {}
    for space in wanted:
        if space == ALL and name not in workspace.names("graph"):
            skipped[str(space)] = f"there is no graph {name!r}; run `fnpipe build-graph {workspace.root}`"
        elif space != ALL and space > images:
            skipped[str(space)] = f"larger than the {counted(images, 'image')}"
        else:
            spaces.append(space)
    if config.search_space and skipped:
        first, why = next(iter(skipped.items()))
        raise InputError(f"--search-space {first}: {why}")
    return spaces, skipped


def _plan(
    workspace: Workspace,
    config: AuditConfig,
    train_pairs: TrainPairs,
    embeddings: Embeddings,
    space: SearchSpace | None,
) -> pa.Table:
    """About ``config.batches`` batches: search spaces are sampled whole; only the chain over all needs all pairs."""
    sampling = "random" if space is None else "grit"
    plan = GroupConfig(
        sampling=sampling, batch_size=config.batch_size, search_space=space or config.batch_size, seed=config.seed
    )
    if space == ALL:
        graph = Graph.open(workspace, embeddings.name)
        return _first_batches(plan_epoch(train_pairs, plan, 0, embeddings, graph), config.batches)
    unit = space or config.batch_size
    size = min(len(train_pairs.images), -(-config.batches * config.batch_size // unit) * unit)
    drawn = np.random.default_rng([config.seed, unit]).choice(len(train_pairs.images), size, replace=False)
    return plan_epoch(train_pairs.some(np.sort(drawn)), plan, 0, embeddings)


def _first_batches(plan: pa.Table, batches: int) -> pa.Table:
    return plan.slice(0, int((plan["batch"].to_numpy() < batches).sum()))


def _why_not(workspace: Workspace, name: str) -> str | None:
    """Why a plan of the workspace is not looked at: it is unfinished, or stale."""
    try:
        workspace.stage(f"groups/{name}").require()
    except InputError as error:
        return str(error)
    return None


def _plan_row(
    stage: Stage, batches: int, embeddings: Embeddings, judges: Mapping[str, Verdict], known: Shares | None
) -> AuditRow:
    """The row of the first epoch of a plan of the workspace."""
    meta = stage.require()
    with reading(stage.workspace, {stage.name: stage.digest}, "fnpipe audit"):
        hardest = hardest_negatives(_first_batches(read_plan(stage, 0), batches), embeddings)
    made = meta["params"]
    row = _row(hardest, made["sampling"], made["search_space"], stage.number("params", "batch_size"), judges, known)
    return replace(row, plan=stage.name, forced=meta.get("steps", {}).get("forced"))


def _row(
    hardest: Hardest,
    sampling: str,
    space: SearchSpace | None,
    batch_size: int,
    judges: Mapping[str, Verdict],
    known: Shares | None,
) -> AuditRow:
    return AuditRow(
        sampling=sampling,
        search_space=space,
        batches=len(hardest.sims) // (2 * batch_size),
        hardest=len(hardest.sims),
        mean=float(hardest.sims.mean()),
        quantiles=_quantiles(hardest.sims),
        above_recorded=float((hardest.sims > hardest.recorded).mean()),
        judged={name: _share(judge(hardest.image_ids, hardest.pair_ids)) for name, judge in judges.items()},
        histogram=_histogram(hardest.sims),
        known=known(hardest.image_ids, hardest.pair_ids) if known else None,
    )


def _share(verdicts: np.ndarray) -> float | None:
    known = verdicts[~np.isnan(verdicts)]
    return float(known.mean()) if len(known) else None


def _quantiles(sims: np.ndarray) -> dict[str, float]:
    return {f"p{q}": float(value) for q, value in zip(_QUANTILES, np.percentile(sims, _QUANTILES), strict=True)}


def _histogram(sims: np.ndarray) -> list[int]:
    return np.histogram(np.clip(sims, -1, 1), _BINS)[0].tolist()
