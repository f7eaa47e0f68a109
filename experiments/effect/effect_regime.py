"""What `effect.py` runs: sizes, seeds and rows. All of it was fixed before the first run, and is not searched over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

RANDOM = "random"


@dataclass(frozen=True)
class Run:
    """One repetition: the seed of the drawn scenes, and that of everything the student draws."""

    data: int
    model: int

    @property
    def name(self) -> str:
        return f"data-{self.data}-model-{self.model}"


@dataclass(frozen=True, kw_only=True)
class Regime:
    """How large everything is; a directory holds one regime.

    Attributes:
        runs: the repetitions. train, test: pictures, with one caption each.
        emoji: the pictures come from this directory (``pairs.json``, ``truth.parquet``) instead of being drawn; then
            ``train`` and ``runs``' data seeds say nothing.
        shipped: start from the encoder that ships with fnpipe instead of a warm start of one's own.
        shipped_con_d: judge with the Con-D that ships with fnpipe: 26 epochs, from its own seed, on other scenes.
        noise: share of the training pairs whose captions change places.
        backbone_steps: of the image tower's warm-up, on other scenes; one for all runs, as a downloaded one would be.
        start_init, con_d_init: ``backbone``, that tower and else fresh weights; ``demo``; None: fresh weights.
        start_epochs, start_lr: of the warm start, on random batches: where every branch of a run begins.
        con_d_epochs, con_d_seed: else Con-D is trained apart, on random batches of the same pairs, at ``start_lr``.
        mlm: train masked tokens.
        small, large: M of the two search spaces that are trained on. spaces: M where only false negatives are counted.
        epochs, lr, warm_up_steps: of a branch. candidates: per anchor, direction and planned batch, to be judged.
    """

    runs: tuple[Run, ...]
    train: int = 8192
    test: int = 1000
    emoji: str | None = None
    shipped: bool = False
    shipped_con_d: bool = True
    noise: float = 0.0
    backbone_steps: int = 1200
    start_init: str | None = "backbone"
    con_d_init: str | None = "backbone"
    start_epochs: int = 14
    start_lr: float = 2e-3
    con_d_epochs: int = 26
    con_d_seed: int = 77
    mlm: bool = True
    batch_size: int = 64
    small: int = 1024
    large: int = 4096
    spaces: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)
    epochs: int = 5
    lr: float = 1.5e-3
    warm_up_steps: int = 50
    candidates: int = 8


@dataclass(frozen=True)
class Row:
    """One branch: the batches it trains on, the edges it looks up, and what else `fnpipe train` is told.

    Attributes:
        plan: ``random``, or the M of a GRIT plan; None: the method makes its own batches.
        edges: whose judgements: ``oracle``, ``learned`` (Con-D), ``weak`` (a warm start from another seed).
        seeds: how many of the runs have it, from the first on; None: all.
    """

    method: str
    plan: str | int | None
    edges: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    seeds: int | None = None


def ecm(plan: int, edges: str, seeds: int | None = None, **values: Any) -> Row:
    """MAFA's connection mining alone, unless ``values`` say more."""
    return Row("mafa", plan, edges, {"smoothing": 0.0, **values}, seeds)


def smoothed(plan: str | int, weight: float, seeds: int | None = None) -> Row:
    """S-ITC alone. The warm start is what comes before it, so it begins with the branch."""
    return Row("grit" if plan != RANDOM else "albef", plan, None, smoothing(weight), seeds)


def falcon(space: int, edges: str | None = None, seeds: int | None = None, **values: Any) -> Row:
    """Batches constructed during training: by the learned scheduler, unless ``values`` say otherwise."""
    return Row("falcon", None, edges, {"search_space": space, "smoothing": 0.0, **values}, seeds)


def smoothing(weight: float) -> dict[str, Any]:
    return {"smoothing": weight, "smoothing_start_epoch": 0}


def main_rows(regime: Regime) -> dict[str, Row]:
    """The table, the rows that orderings are expected of first."""
    small, large = regime.small, regime.large
    return {
        f"grit-{large}": Row("grit", large),
        f"oracle-{large}": ecm(large, "oracle"),
        f"learned-{large}": ecm(large, "learned"),
        f"drop-{large}": ecm(large, "learned", false_negatives="drop"),
        RANDOM: Row("albef", RANDOM),
        f"grit-{small}": Row("grit", small),
        f"weak-{large}": ecm(large, "weak"),
        f"learned-{small}": ecm(small, "learned"),
        f"mafa-0.1-{large}": ecm(large, "learned", **smoothing(0.1)),
        f"mafa-0.5-{large}": ecm(large, "learned", **smoothing(0.5)),
        f"sitc-0.1-{large}": smoothed(large, 0.1),
        f"sitc-0.5-{large}": smoothed(large, 0.5),
        f"falcon-{large}": falcon(large),
        f"falcon-learned-{large}": falcon(large, "learned"),
        f"falcon-0.99-{large}": falcon(large, quantile=0.99),
        f"falcon-frozen-{large}": falcon(large, policy_lr=0.0),
        "itc": Row("itc", RANDOM),
        f"oracle-{small}": ecm(small, "oracle"),
        f"sitc-0.25-{large}": smoothed(large, 0.25, seeds=1),
        f"sitc-0.05-{large}": smoothed(large, 0.05, seeds=1),
        f"falcon-per-batch-{large}": falcon(large, seeds=1, policy_level="batch"),
        f"ignore-{large}": ecm(large, "learned", seeds=1, false_negatives="ignore"),
    }


def quick_rows(regime: Regime) -> dict[str, Row]:
    wanted = (RANDOM, *(f"{kind}-{regime.large}" for kind in ("grit", "oracle", "learned", "drop")))
    every = main_rows(regime)
    return {name: every[name] for name in wanted}


def smoothing_rows(regime: Regime) -> dict[str, Row]:
    """Where S-ITC's claim is looked for: it helps GRIT batches and harms random ones (MAFA, table 6)."""
    large = regime.large
    return {
        f"grit-{large}": Row("grit", large),
        f"sitc-0.5-{large}": smoothed(large, 0.5),
        RANDOM: Row("albef", RANDOM),
        f"sitc-0.5-{RANDOM}": smoothed(RANDOM, 0.5),
        f"learned-{large}": ecm(large, "learned"),
        f"mafa-0.5-{large}": ecm(large, "learned", **smoothing(0.5)),
    }


def emoji_rows(regime: Regime) -> dict[str, Row]:
    every = main_rows(regime)
    wanted = (f"grit-{regime.large}", RANDOM, f"learned-{regime.large}", f"oracle-{regime.large}")
    return {name: every[name] for name in wanted}


FULL = Regime(runs=(Run(1, 0), Run(2, 1), Run(1, 2)))
QUICK = Regime(
    runs=(Run(1, 0),), train=4096, test=500, shipped=True, epochs=3, small=1024, spaces=(256, 1024, 4096), large=4096
)
# Exploratory, one seed each, from the shipped encoder: wrong captions; twice the steps; large batches, in which the
# uniform part of S-ITC weighs less on each negative.
NOISY = Regime(runs=(Run(1, 0),), shipped=True, noise=0.2)
LONG = replace(NOISY, epochs=10)
LARGE_BATCHES = replace(NOISY, epochs=20, batch_size=256)
EXPLORED = {"noise": NOISY, "noise-long": LONG, "noise-large-batches": LARGE_BATCHES}


def emoji(directory: str) -> Regime:
    """The emoji pairs: real pictures, few per concept. Masked tokens find nothing there, and are left out."""
    return Regime(
        runs=(Run(0, 0),),
        emoji=directory,
        test=500,
        start_init="demo",
        shipped_con_d=False,
        con_d_init=None,
        start_epochs=20,
        start_lr=1.5e-3,
        con_d_epochs=100,
        mlm=False,
        small=320,
        large=960,
        spaces=(320, 960, 1920),
        epochs=8,
    )
