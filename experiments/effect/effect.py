"""What do false negatives do to training, and what do fnpipe's methods do about them? On pairs whose truth is known.

python experiments/effect/effect.py DIR                  # the whole table: hours of one core; goes on where it stopped
python experiments/effect/effect.py DIR --quick          # fewer rows, one seed, smaller: 5 minutes
python experiments/effect/effect.py DIR --explore noise  # where S-ITC's claim is looked for; see --help
python experiments/effect/effect.py DIR --emoji EMOJI    # on real pictures: pairs.json and truth.parquet
"""

from __future__ import annotations

import os

# Sums over several threads differ in their last bits; this must stand before numpy is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from effect_chain import Chain
from effect_regime import EXPLORED, FULL, QUICK, Regime, Row, emoji, emoji_rows, main_rows, quick_rows, smoothing_rows
from effect_report import Results, markdown, orderings, plots, summary

from fnpipe.pipeline.files import atomic


def chosen(arguments: argparse.Namespace) -> tuple[Regime, dict[str, Row]]:
    """The regime and its rows."""
    if arguments.quick:
        return QUICK, quick_rows(QUICK)
    if arguments.explore:
        regime = EXPLORED[arguments.explore]
        return regime, smoothing_rows(regime)
    if arguments.emoji:
        regime = emoji(arguments.emoji)
        return regime, emoji_rows(regime)
    return FULL, main_rows(FULL)


def work(root: Path, regime: Regime, rows: dict[str, Row], seeds: list[int], only: list[str]) -> None:
    """Every row of every run, rows first, so that what is missing after an interruption are the last rows."""
    torch.set_num_threads(1)
    runs = [run for run in regime.runs if run.model in seeds]
    chains = {run: Chain(root, regime, run) for run in runs}
    for chain in chains.values():
        chain.start_figures()
        chain.fn_share()
    for name, row in rows.items():
        if only and name not in only:
            continue
        for run, chain in chains.items():
            if row.seeds is None or run in regime.runs[: row.seeds]:
                chain.branch(name, row)
    for kind in dict.fromkeys(row.edges for row in rows.values() if row.edges not in (None, "oracle")):
        if not only or any(rows[name].edges == kind for name in only):
            for chain in chains.values():
                chain.con_d_figures(str(kind))


def report(root: Path, regime: Regime, rows: dict[str, Row]) -> None:
    """Write and print what is known so far."""
    results = Results(root, regime, rows)
    told, tables = summary(results), markdown(results)
    atomic.write_json(root / "effect.json", told)
    atomic.write_bytes(root / "effect.md", tables.encode())
    plots(results, root)
    print(tables)
    failed = [ordering.name for ordering in orderings(results) if not ordering.holds]
    print(json.dumps({"json": str(root / "effect.json"), "does_not_hold": failed}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--quick", action="store_true")
    kind.add_argument("--explore", choices=list(EXPLORED))
    kind.add_argument("--emoji", metavar="DIR")
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW", help="these rows alone")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", help="the runs with these model seeds alone")
    parser.add_argument("--report", action="store_true", help="run nothing, and make the tables of what is there")
    parser.add_argument("--jobs", type=int, default=1, help="processes, for a seed each; no figure depends on it")
    arguments = parser.parse_args()
    regime, rows = chosen(arguments)
    if unknown := sorted(set(arguments.only) - set(rows)):
        parser.error(f"no row {', '.join(unknown)}; choose from {', '.join(rows)}")
    root, seeds = arguments.directory, arguments.seeds or [run.model for run in regime.runs]
    jobs = 0 if arguments.report else min(arguments.jobs, len(seeds))
    shares = [seeds[k::jobs] for k in range(jobs)]
    if len(shares) == 1:
        work(root, regime, rows, seeds, arguments.only)
    elif shares:
        with ProcessPoolExecutor(len(shares), mp_context=get_context("spawn")) as pool:
            list(pool.map(partial(work, root, regime, rows, only=arguments.only), shares))
    report(root, regime, rows)


if __name__ == "__main__":
    main()
