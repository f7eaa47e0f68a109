"""``fnpipe evaluate``."""

from __future__ import annotations

from typing import Any

from fnpipe.cli.app import JsonFlag, WorkspaceArgument, emit
from fnpipe.cli.options import Given, flags_of
from fnpipe.pipeline.errors import counted
from fnpipe.train.evaluation.config import EvaluateConfig

_COLUMNS = (("R@1", "r1"), ("R@5", "r5"), ("R@10", "r10"), ("R-Precision", "rp"), ("mAP@R", "map_at_r"))
_DIRECTIONS = (("tr", "image to text"), ("ir", "text to image"))


@flags_of(EvaluateConfig)
def evaluate_command(workspace: WorkspaceArgument, *, given: Given, json_: JsonFlag = False) -> None:
    """Measure retrieval in both directions, by the two towers alone and re-ranked by the ITM head.

    Equal scores count as ties: every figure is the mean over their orders. --eccv takes COCO's 5,000 test images by
    their file names, and their captions by COCO's captions file (or Karpathy's): --coco-captions, or what the
    workspace was made from; without one, by their order in the source.

    Example: fnpipe evaluate ws --run mafa --on test --truth truth.parquet
    """
    config = EvaluateConfig(**given)
    from fnpipe.pipeline.workspace.workspace import Workspace
    from fnpipe.train.methods import evaluate

    summary = evaluate(Workspace.open(workspace), config)
    emit(summary, json_, lambda: _print_eccv(summary) if config.eccv else _print_figures(summary))


def _print_figures(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, soft_wrap=True)
    why = " (the default)" if summary["default_split"] else ""
    console.print(
        f"On {summary['on']}{why}: {counted(summary['images'], 'image')}, {counted(summary['captions'], 'caption')}."
    )
    if summary["left_out"]:
        console.print(f"Left out, without a usable picture or embedding: {counted(summary['left_out'], 'image')}.")
    for note in summary["notes"]:
        console.print(note)
    columns = [(title, key) for title, key in _COLUMNS if f"tr_{key}" in summary["dual"]]
    table = Table("", "direction", *(title for title, _ in columns), box=None)
    lists = _lists(summary)
    for name, found in lists.items():
        for side, direction in _DIRECTIONS:
            cells = [f"{found[f'{side}_{key}']:.2f}" for _, key in columns]
            table.add_row(name if side == "tr" else "", direction, *cells)
    console.print(table)
    console.print(", ".join(f"RSUM {name} {found['rsum']:.1f}" for name, found in lists.items()))


def _lists(summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The figures of every ranked list that was measured, by what it is called."""
    lists = {summary.get("method", "dual encoder"): summary["dual"]}
    for k, reranked in summary.get("by_top_k", {summary.get("top_k"): summary}).items():
        named = {"itm": f"ITM, top {k}", "both": f"ITM + {summary.get('dual_weight')} x dual encoder, top {k}"}
        lists |= {name: reranked[key] for key, name in named.items() if key in reranked}
    frozen = {"frozen": f"embeddings/{summary.get('frozen_embeddings')}"}
    return lists | {name: summary[key] for key, name in frozen.items() if key in summary}


def _print_eccv(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, soft_wrap=True)
    by = {"text": "known by their text", "order": "taken in the order of the source"}[summary["captions_by"]]
    console.print(
        f"On {summary['on']}: {counted(summary['images'], 'image')}, {counted(summary['captions'], 'caption')}, {by}."
    )
    titles = {"coco_1k": "COCO 1k", "coco_5k": "COCO 5k", "cxc": "CxC", "eccv": "ECCV Caption"}
    for title_of_list, measured in _lists(summary).items():
        table = Table(title_of_list, "direction", *(title for title, _ in _COLUMNS), "RSUM", box=None)
        for labels, title in titles.items():
            found = measured[labels]
            for side, direction in _DIRECTIONS:
                cells = [f"{found[k]:.2f}" if (k := f"{side}_{key}") in found else "" for _, key in _COLUMNS]
                rsum = f"{found['rsum']:.1f}" if side == "ir" and "rsum" in found else ""
                table.add_row(title if side == "tr" else "", direction, *cells, rsum)
        console.print(table)
