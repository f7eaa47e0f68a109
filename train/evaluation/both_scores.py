"""A run's figures by the dual encoder, by the ITM head, and by both scores, weighed as given or as fitted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fnpipe.mining.data.truth import Truth
from fnpipe.pipeline.machine.device import pick_device
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.data.pictures import Samples
from fnpipe.train.evaluation.queries import Queries
from fnpipe.train.evaluation.retrieval import TOP_K, Measure, evaluate_model
from fnpipe.train.model.load import load_run
from fnpipe.train.model.model import VLModel
from fnpipe.train.runs.directory import find_run, read_run_config

# Weights of the dual encoder's score beside the head's that are tried on a validation split.
DUAL_WEIGHTS = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


def evaluate_run(
    workspace: Workspace,
    run: str,
    queries: Queries,
    truth: Truth | None = None,
    *,
    checkpoint: str = "best-or-last",
    top_k: int | Sequence[int] = TOP_K,
    dual_weight: float | Queries | None = None,
    device: str = "auto",
    measure: Measure | None = None,
) -> dict[str, Any]:
    """`evaluate_model` of a run's checkpoint; re-ranked where the run trained its ITM head.

    Args:
        dual_weight: as in `evaluate_by_both`.

    Raises:
        InputError: no such run, checkpoint or device.
    """
    directory = find_run(workspace, run)
    rerank = bool(read_run_config(directory)["config"]["itm"])
    model = load_run(directory, checkpoint).to(pick_device(device))
    of_lists: dict[str, Any] = {"rerank": rerank, "top_k": top_k, "dual_weight": dual_weight, "measure": measure}
    return evaluate_by_both(workspace, model, queries, truth, **of_lists)


def evaluate_by_both(
    workspace: Workspace,
    model: VLModel,
    queries: Queries,
    truth: Truth | None = None,
    *,
    top_k: int | Sequence[int] = TOP_K,
    dual_weight: float | Queries | None,
    **of_model: Any,
) -> dict[str, Any]:
    """`evaluate_model`, re-ranked also by both scores.

    Args:
        dual_weight: of the dual encoder's score; queries: the weight that `fit_dual_weight` finds on these, at the
            first ``top_k``.

    Returns:
        As `evaluate_model`, with a weight also ``both`` in the place of ``by_weight``, and ``dual_weight``.
    """
    if isinstance(dual_weight, Queries):
        samples = of_model.get("samples")
        first = top_k if isinstance(top_k, int) else top_k[0]
        dual_weight = fit_dual_weight(workspace, model, dual_weight, truth, first, samples)
    weights = () if dual_weight is None else (dual_weight,)
    found = evaluate_model(workspace, model, queries, truth, top_k=top_k, dual_weights=weights, **of_model)
    if dual_weight is not None:
        for lists in (found, *found.get("by_top_k", {}).values()):
            lists["both"] = lists.pop("by_weight")[dual_weight]
        found["dual_weight"] = dual_weight
    return found


def fit_dual_weight(
    workspace: Workspace,
    model: VLModel,
    queries: Queries,
    truth: Truth | None = None,
    top_k: int = TOP_K,
    samples: Samples | None = None,
) -> float:
    """The weight of `DUAL_WEIGHTS` by which both scores rank ``queries`` best, by mAP@R or RSUM; of equal the least.

    The queries should not be those that are reported on.
    """
    of_lists: dict[str, Any] = {"rerank": True, "top_k": top_k, "dual_weights": DUAL_WEIGHTS, "quiet": True}
    found = evaluate_model(workspace, model, queries, truth, samples=samples, **of_lists)["by_weight"]
    return max(DUAL_WEIGHTS, key=lambda weight: found[weight].get("map_at_r", found[weight]["rsum"]))
