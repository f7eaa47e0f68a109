"""The whole chain on drawn scenes, through the functions that the commands call; ``fnpipe demo`` runs it.

The size of everything (`DemoConfig`) and every seed were fixed before the first run; the figures are what they are.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fnpipe.mining.recipes.config import PrepareConfig
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.machine.progress import part_of

if TYPE_CHECKING:
    from fnpipe.mining.data.truth import Truth
    from fnpipe.pipeline.workspace.workspace import Workspace


Say = Callable[[str], None]

SCENES = "scenes"

REPORT = "report.html"

FIGURES = "demo.json"

ENCODER, CON_D = "demo", "itm:demo"

EMBEDDINGS, EDGES, RANDOM = "demo", "itm", "random"

# Of the dual encoder's score beside the matching head's; fixed before the first run.
DUAL_WEIGHT = 0.5

# The bytes of embeddings and edges depend on it, so it must not follow the machine. The models are so small that a
# second thread gains little, and on a busy machine it costs several times the work in waiting.
THREADS = 1


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """How large the demo is; where nothing is said, a stage runs by its defaults.

    Attributes:
        scenes: pictures drawn, with one caption each. holdout: of them, for the split ``test``.
        seed: of the drawing.
        batch_size, search_space: B and M of the GRIT plan.
        epochs: planned, and trained.
        candidates: per anchor, direction and planned batch, for the discriminator.
        smoothing: weight of S-ITC for mafa, from the second epoch on. The paper's 0.5 is meant for pretraining on
            millions of noisy pairs; on a few thousand clean ones it costs more than it gives.
        recipe: of ``fnpipe prepare``, for a plan that knows the connections; mafa trains on it without smoothing.
    """

    scenes: int = 9192
    holdout: int = 1000
    seed: int = 1
    batch_size: int = 64
    search_space: int = 4096
    epochs: int = 3
    candidates: int = 8
    smoothing: float = 0.1
    recipe: str = PrepareConfig.recipe

    @property
    def grit(self) -> str:
        """The name of the GRIT plan."""
        return f"grit-{self.search_space}"


def run_demo(directory: str | Path, config: DemoConfig, say: Say = lambda line: None) -> dict[str, Any]:
    """Run every stage that is not finished yet.

    Args:
        say: takes a human-readable line after every stage.

    Returns:
        The counts of every stage, and the figures.

    Raises:
        InputError: the directory holds something else.
    """
    root = Path(directory)
    if root.exists() and (not root.is_dir() or (any(root.iterdir()) and not (root / SCENES).is_dir())):
        raise InputError(f"{root}: holds something else than a demo; give a new directory")
    try:
        return _run_chain(root, config, _Stages(say, len(_BESIDE_TRAINING) + len(_rows(config, ""))))
    except InputError as error:
        # The stages propose flags that this command does not have.
        raise InputError(f"{error} (here: delete {root} and run the demo again)") from error


def _run_chain(root: Path, config: DemoConfig, stages: _Stages) -> dict[str, Any]:
    from fnpipe.mining.data.truth import Truth
    from fnpipe.pipeline.workspace.workspace import Workspace

    stages.run("draw", lambda: _draw(root / SCENES, config))
    stages.run("shard", lambda: _shard(root, config))
    workspace = Workspace.open(root)
    truth_file = root / SCENES / "truth.parquet"
    truth = Truth.read(truth_file, workspace)
    stages.run("embed", lambda: _embed(workspace))
    stages.run("build-graph", lambda: _build_graph(workspace))
    stages.run("group", lambda: _group(workspace, config))
    mined = stages.run("mine-connections", lambda: _mine(workspace, truth, config))
    stages.run("prepare", lambda: _prepare(workspace, config))
    rows = _rows(config, str(truth_file))
    met = {run: stages.run(f"train {run}", partial(_train, workspace, run, values)) for run, values in rows.items()}
    retrieval = stages.run("evaluate", lambda: _evaluate(workspace, truth, list(rows)))["retrieval"]
    stages.run("report", lambda: _gallery(workspace, truth))
    return {
        "directory": str(root),
        "stages": stages.done,
        "false_negatives": {row["groups"]: row["false_negatives"] for run, row in met.items() if run != "mafa"},
        "mined": {key: mined[key] for key in ("judged", "positives", "precision", "recall")},
        "coverage": met["mafa"]["coverage"],
        "smoothing": config.smoothing,
        "recipe": config.recipe,
        "dual_weight": DUAL_WEIGHT,
        "retrieval": retrieval,
        "mafa_over_grit_itm_map": retrieval["mafa"]["itm_map_at_r"] - retrieval["grit"]["itm_map_at_r"],
        "edges": str(root / "edges" / EDGES),
        "report": str(root / REPORT),
    }


def _rows(config: DemoConfig, truth_file: str) -> dict[str, dict[str, Any]]:
    """What each run is told, by its name."""
    common = {"epochs": config.epochs, "truth": truth_file}
    grit = {**common, "method": "grit", "groups": config.grit}
    mafa = {**grit, "method": "mafa", "edges": EDGES, "smoothing": config.smoothing}
    aware = {**mafa, "groups": config.recipe, "edges": config.recipe, "smoothing": 0.0}
    return {"albef": {**common, "method": "albef", "groups": RANDOM}, "grit": grit, "mafa": mafa, config.recipe: aware}


# Each run is one more.
_BESIDE_TRAINING = (
    *("draw", "shard", "embed", "build-graph", "group"),
    *("mine-connections", "prepare", "evaluate", "report"),
)


class _Stages:
    """Runs the stages, keeps what each did, and says it with the time it took."""

    def __init__(self, say: Say, total: int) -> None:
        self.say = say
        self.total = total
        self.done: dict[str, dict[str, Any]] = {}

    def run(self, name: str, work: Callable[[], tuple[str, dict[str, Any]]]) -> dict[str, Any]:
        """``work`` returns a human-readable line, and the facts, which this returns."""
        start = time.monotonic()
        with part_of(len(self.done) + 1, self.total):
            text, facts = work()
        seconds = time.monotonic() - start
        self.say(f"{name:<17} {text} ({seconds:.0f} s)")
        self.done[name] = {**facts, "seconds": round(seconds, 1)}
        return facts


# Every stage below returns a human-readable line and its facts. A stage that is finished already is quick.
Done = tuple[str, dict[str, Any]]


def _draw(scenes: Path, config: DemoConfig) -> Done:
    import pyarrow.parquet as pq

    from fnpipe.pipeline.scenes.dataset import write_scenes

    if not (scenes / "pairs.json").exists():
        write_scenes(scenes, config.scenes, config.seed)
    captions = len({row["caption"] for row in json.loads((scenes / "pairs.json").read_bytes())})
    unrecorded = pq.read_metadata(scenes / "truth.parquet").num_rows - config.scenes
    share = unrecorded / (config.scenes * (captions - 1))
    text = f"{config.scenes:,} scenes, one caption each; {unrecorded:,} unrecorded combinations are true ({share:.3%})"
    return text, {"scenes": config.scenes, "captions": captions, "true_unrecorded": unrecorded}


def _shard(root: Path, config: DemoConfig) -> Done:
    from fnpipe.pipeline.shard.config import ShardConfig
    from fnpipe.pipeline.shard.stage import shard

    made = shard([str(root / SCENES / "pairs.json")], str(root), ShardConfig(holdout=config.holdout))
    quarantined = sum(made["quarantined"].values())
    splits = ", ".join(f"{count:,} {name}" for name, count in sorted(made["splits"].items(), reverse=True))
    text = f"{made['rows']:,} rows = {made['kept']:,} kept + {quarantined:,} quarantined; {splits}"
    facts = {key: made[key] for key in ("rows", "kept", "images", "pairs", "shards", "splits")}
    return text, {**facts, "quarantined": quarantined}


def _embed(workspace: Workspace) -> Done:
    from fnpipe.pipeline.embed.config import EmbedConfig
    from fnpipe.pipeline.embed.stage import embed
    from fnpipe.train.judges.encoder import load_encoder

    made = embed(workspace, load_encoder(ENCODER, workspace), EmbedConfig(name=EMBEDDINGS, threads=THREADS))
    bad = sum(made.bad.values())
    text = f"{made.images:,} pictures and {made.pairs:,} captions, width {made.width}, {bad} bad"
    return text, {"images": made.images, "pairs": made.pairs, "bad": bad}


def _build_graph(workspace: Workspace) -> Done:
    from fnpipe.mining.graph.config import GraphConfig
    from fnpipe.mining.graph.stage import build_graph

    made = build_graph(workspace, GraphConfig(embeddings=EMBEDDINGS))
    text = f"{made.k} neighbours each of {made.images:,} pictures and {made.pairs:,} captions"
    return text, {"k": made.k, "images": made.images, "pairs": made.pairs}


def _group(workspace: Workspace, config: DemoConfig) -> Done:
    from fnpipe.mining.plans.config import GroupConfig
    from fnpipe.mining.plans.stage import group

    plans = [
        group(
            workspace,
            GroupConfig(
                sampling=sampling,
                name=name,
                batch_size=config.batch_size,
                search_space=config.search_space,
                epochs=config.epochs,
                embeddings=EMBEDDINGS,
            ),
        )
        for sampling, name in (("random", RANDOM), ("grit", config.grit))
    ]
    batches = plans[0].batches
    names = " and ".join(plan.groups for plan in plans)
    text = f"{names}: {config.epochs} epochs of {batches} batches of {config.batch_size} each"
    return text, {"plans": [plan.groups for plan in plans], "batches": batches, "epochs": config.epochs}


def _mine(workspace: Workspace, truth: Truth, config: DemoConfig) -> Done:
    from fnpipe.mining.connections.config import MineConfig
    from fnpipe.mining.connections.stage import mine_connections
    from fnpipe.mining.views.accuracy import stage_against_truth
    from fnpipe.train.judges.itm import load_discriminator

    mine = MineConfig(candidates=config.candidates, groups=(config.grit,), name=EDGES, threads=THREADS)
    made = mine_connections(workspace, mine, load_discriminator(CON_D, workspace))
    found = stage_against_truth(workspace.stage(f"edges/{EDGES}"), truth)
    labels = ", ".join(f"{count:,} {label}" for label, count in made.labels.items())
    text = f"{made.unique_combinations:,} combinations: {labels}, {made.identity:,} of these by equal captions"
    facts = {key: getattr(found, key) for key in ("judged", "true", "positives", "precision", "recall", "identity")}
    return text, {**facts, "labels": dict(made.labels)}


def _prepare(workspace: Workspace, config: DemoConfig) -> Done:
    from fnpipe.mining.recipes.prepare import prepare
    from fnpipe.train.judges.itm import load_discriminator

    asked = PrepareConfig(
        recipe=config.recipe,
        batch_size=config.batch_size,
        search_space=config.search_space,
        epochs=config.epochs,
        embeddings=EMBEDDINGS,
        threads=THREADS,
    )
    made = prepare(workspace, asked, load_discriminator(CON_D, workspace))
    text = f"a plan by the recipe {config.recipe}, and its edges: {', '.join(one.stage for one in made)}"
    return text, {"recipe": config.recipe, "stages": [one.stage for one in made]}


def _train(workspace: Workspace, run: str, values: Mapping[str, Any]) -> Done:
    import numpy as np

    from fnpipe.train.methods import train
    from fnpipe.train.runs.log import read_metrics

    # Nothing is chosen by the test split: the last weights are the run's result.
    fixed = {"method": values["method"], "init": ENCODER, "evaluate_every": 0, "threads": THREADS}
    made = train(workspace, {**fixed, **values}, run=run)
    steps = read_metrics(workspace.root / "runs" / run, "step")
    means: dict[str, float] = {
        key: float(np.mean([step[key] for step in steps])) for key in ("false_negatives", "coverage") if key in steps[0]
    }
    text = f"{made['steps']} steps on {values['groups']} batches"
    if "coverage" in means:
        text += f"; {means['coverage']:.0%} of the hardest negatives had been judged"
    return text, {"steps": made["steps"], "groups": values["groups"], **means}


def _evaluate(workspace: Workspace, truth: Truth, runs: Sequence[str]) -> Done:
    """Figures of the start and of every run, kept by the digest of the weights."""
    from fnpipe.pipeline.files import atomic
    from fnpipe.pipeline.files.digests import file_digest
    from fnpipe.train.model.load import model_file
    from fnpipe.train.runs.directory import checkpoint_path

    kept = workspace.root / FIGURES
    known = json.loads(kept.read_bytes()) if kept.exists() else {}
    files = {"start": model_file(ENCODER)}
    files |= {run: checkpoint_path(workspace.root / "runs" / run, "last") for run in runs}
    figures = {}
    for name, file in files.items():
        digest = file_digest(file)
        kept_figures = known.get(digest, {})
        figures[name] = kept_figures if "both_r1" in kept_figures else _retrieval(workspace, truth, file)
        known[digest] = figures[name]
    atomic.write_json(kept, known)
    text = f"{len(figures)} models on the {workspace.splits()['test']:,} pairs of the split test"
    return text, {"retrieval": figures}


def _retrieval(workspace: Workspace, truth: Truth, checkpoint: Path) -> dict[str, float]:
    """R@1 and mAP@R in percent, means of both directions: of the dual encoder, re-ranked by ITM, and by both scores."""
    from fnpipe.train.evaluation.both_scores import evaluate_by_both
    from fnpipe.train.evaluation.queries import read_queries
    from fnpipe.train.model.load import load_run

    model, queries = load_run(checkpoint), read_queries(workspace, "test")
    found = evaluate_by_both(workspace, model, queries, truth, rerank=True, dual_weight=DUAL_WEIGHT)
    return {f"{kind}_{key}": found[kind][key] for kind in ("dual", "itm", "both") for key in ("r1", "map_at_r")}


def _gallery(workspace: Workspace, truth: Truth) -> Done:
    from fnpipe.mining.views.gallery import write_gallery

    made = write_gallery(workspace, workspace.stage(f"edges/{EDGES}"), workspace.root / REPORT, truth)
    return f"{made.shown:,} mined connections with their pictures: {made.path}", {"shown": made.shown}
