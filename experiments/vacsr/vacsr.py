"""Does a small network on frozen embeddings pay: VACSR and its readings, tower adapters, and what they must beat?

    python experiments/vacsr/vacsr.py DIR                     # drawn scenes: an hour of a core; goes on where it was
    python experiments/vacsr/vacsr.py DIR --emoji EMOJI       # real pictures too: pairs.json and truth.parquet
    python experiments/vacsr/vacsr.py DIR --quick             # fewer pairs and rows, one seed: 2 minutes
    python experiments/vacsr/vacsr.py DIR --seeds 1 --only foreign  # some of it; --report trains nothing

Four kinds of frozen embeddings. *In-domain*: the encoder that ships with fnpipe, trained on scenes like these.
*Restyled*: an encoder trained on scenes in another style (`FOREIGN` in `fnpipe.pipeline.scenes.dataset`: other shades,
half of the backgrounds, captions that say less); it is trained once, four minutes of one core. *Foreign*: the same
encoder, which here sees every picture under bluish light, so that no colour is one whose name it has learned. Of seven
lights, gammas and contrasts it is the one under which the cosine falls most, to about half; it was chosen by the cosine
alone, after one seed on the restyled features had shown that these are not foreign enough for any adapter to gain 0.15
in AUROC, and before any network was trained under it. *Emoji*: the pictures of ``--emoji``, embedded by
``--emoji-encoder`` (a checkpoint of `fnpipe train`; default: the shipped encoder, which has never seen one). All but
the last also with a fifth of the train captions shuffled among each other.

Candidates are the hardest unrecorded combinations by the frozen cosine: in the test split each caption's ten nearest
images, in train the nearest one in pools of 1,024. AUROC and AP say how well true ones are told from false ones; ECE
how far p is from a probability; R@1 and mAP@R (exact truth) are of the test split, both directions.

Gates, on foreign features: VACSR's test AUROC at least 0.15 and its mAP@R at least 3 above cosine's; with shuffled
captions at most 15 % of its mAP@R lost. In-domain there is none. The last line printed is JSON.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

# The models are trained as the shipped ones are.
sys.path.append(str(Path(__file__).parents[2] / "tools"))
from demo_checkpoints import Recipe, normalised, pretrain, warm_up

from fnpipe.mining.connections.judge import Judge
from fnpipe.mining.data.ranking import auroc, average_precision
from fnpipe.mining.data.train_pairs import read_train_pairs
from fnpipe.mining.data.truth import Truth
from fnpipe.mining.discriminators.similarity import ClipDiscriminator, cosine, fit_on_recorded
from fnpipe.mining.views.accuracy import edges_against_truth
from fnpipe.pipeline.embed.stage import EmbedConfig, embed
from fnpipe.pipeline.files import atomic
from fnpipe.pipeline.scenes.dataset import draw, write_scenes
from fnpipe.pipeline.scenes.graphs import FOREIGN
from fnpipe.pipeline.shard.stage import ShardConfig, shard
from fnpipe.pipeline.workspace.embeddings import Embeddings
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.evaluation.on_embeddings import adapted_rows
from fnpipe.train.evaluation.queries import read_queries
from fnpipe.train.evaluation.retrieval import evaluate_embeddings
from fnpipe.train.judges.encoder import RunEncoder
from fnpipe.train.judges.itm import load_discriminator
from fnpipe.train.judges.vacsr import VacsrDiscriminator
from fnpipe.train.methods import train
from fnpipe.train.model.adapter import AdapterNet
from fnpipe.train.model.build import build_model, load_model, save_model
from fnpipe.train.model.config import ModelConfig
from fnpipe.train.model.frozen_files import load_frozen_run
from fnpipe.train.model.load import SHIPPED
from fnpipe.train.model.model import VLModel

IN_DOMAIN, RESTYLED, FOREIGN_DOMAIN, EMOJI = "in-domain", "restyled", "foreign", "emoji"
SHUFFLED = 0.2
# What is left of red, green and blue.
BLUISH = [0.6, 0.8, 1.0]
NEAREST, POOL = 10, 1024
FOREIGN_SEED, FOREIGN_DATA_SEED, FOREIGN_SCENES, FOREIGN_EPOCHS = 5, 31, 8192, 12
GATES = {"auroc_over_cosine": 0.15, "map_over_cosine": 3.0, "loss_by_shuffling": 0.15}

ADAPTERS: dict[str, dict[str, Any]] = {
    f"{kind}, {loss}": {"method": "adapter", "map": kind, "loss": loss}
    for kind in ("linear", "two-layer")
    for loss in ("infonce", "sigmoid")
}
VACSR: dict[str, Any] = {"method": "vacsr"}
# The same network without noise, KL and L_sigma: the gradient of binary cross-entropy.
MLP = {"method": "vacsr", "noise": False, "kl_weight": 0.0, "sigma_weight": 0.0, "recon_weight": "none"}
# The logit begins with ten times the cosine, which need not be learned again.
SKIP: dict[str, Any] = {**VACSR, "cosine_weight": 10.0}
TRAINED: dict[str, dict[str, Any]] = {"vacsr": VACSR, "vacsr, skip": SKIP, **ADAPTERS, "mlp, bce": MLP}
FIXED = ("cosine", "clip", "itm:demo")
# The scores of the other rows are cosines.
PROBABILITIES = ("clip", "itm:demo", "mlp, bce", "vacsr", "vacsr, skip")


@dataclass(frozen=True)
class Plan:
    """How much is run."""

    train: int
    test: int
    seeds: tuple[int, ...]
    trained: tuple[str, ...]
    noisy: tuple[str, ...]
    foreign_epochs: int
    epochs: int | None


FULL = Plan(8192, 1000, (0, 1, 2), tuple(TRAINED), tuple(TRAINED), FOREIGN_EPOCHS, None)
QUICK = Plan(2048, 500, (0,), ("vacsr", "two-layer, infonce"), ("vacsr",), 0, 4)


@dataclass(frozen=True)
class Setting:
    """Embeddings with their candidates.

    Attributes:
        truth_path: what evaluation is told. candidates: by ``train`` and ``test``: image_ids, pair_ids, true.
    """

    name: str
    workspace: Workspace
    embeddings: Embeddings
    truth_path: Path
    candidates: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]


# A judge of (n,) combinations: p, and uncertainty where there is one.
Judged = tuple[np.ndarray, np.ndarray | None]


class BluishEncoder(RunEncoder):
    """A model that sees every picture under bluish light."""

    def __init__(self, model: VLModel) -> None:
        super().__init__(model)
        self.description = {**self.description, "light": BLUISH}
        usual = model.transform

        def prepare(rgb: np.ndarray) -> torch.Tensor:
            return usual((rgb * np.array(BLUISH)).round().astype(np.uint8))

        self.prepare_image = prepare  # type: ignore[assignment]


# ---------------------------------------------------------------------------------------------------- data
def foreign_encoder(path: Path, epochs: int) -> Path:
    """The checkpoint of an encoder that has seen scenes of the foreign style alone; trained if it is not there."""
    if path.exists():
        return path
    recipe = Recipe("foreign", seed=FOREIGN_SEED, epochs=epochs)
    torch.manual_seed(0)
    scenes = draw(FOREIGN_SCENES, FOREIGN_DATA_SEED, style=FOREIGN)
    model = build_model(ModelConfig())
    pixels = normalised(model, scenes)
    warm_up(model, pixels, scenes.graphs, recipe)
    torch.manual_seed(recipe.seed)
    pretrain(model, pixels, model.tokenizer(scenes.captions), recipe)
    save_model(model, path)
    return path


def scenes_workspace(root: Path, plan: Plan, shuffled: float | None) -> tuple[Workspace, Path]:
    """The drawn scenes as a workspace, and their truth."""
    source = root / "scenes"
    if not (source / "pairs.json").exists():
        write_scenes(source, plan.train + plan.test, seed=1)
    directory = root / ("shuffled" if shuffled else "clean")
    shard([str(source / "pairs.json")], str(directory), ShardConfig(holdout=plan.test, shuffle_captions=shuffled))
    return Workspace.open(directory), source / "truth.parquet"


def settings(root: Path, plan: Plan, only: str | None, emoji: Path | None, emoji_encoder: Path) -> Iterator[Setting]:
    """Every kind of embeddings, the gated ones first."""
    for name in (FOREIGN_DOMAIN, IN_DOMAIN, RESTYLED):
        if only not in (None, name) or (name != IN_DOMAIN and not plan.foreign_epochs):
            continue
        file = SHIPPED["demo"]
        if name != IN_DOMAIN:
            file = foreign_encoder(root / "foreign.safetensors", plan.foreign_epochs)
        for shuffled in (None, SHUFFLED):
            workspace, truth = scenes_workspace(root, plan, shuffled)
            bluish = name == FOREIGN_DOMAIN
            yield embedded(f"{name}, shuffled" if shuffled else name, workspace, truth, file, name, bluish=bluish)
    if emoji is not None and only in (None, EMOJI):
        directory = root / "emoji"
        shard([str(emoji / "pairs.json")], str(directory), ShardConfig(holdout=1000))
        yield embedded(EMOJI, Workspace.open(directory), emoji / "truth.parquet", emoji_encoder, EMOJI)


def embedded(label: str, workspace: Workspace, truth: Path, file: Path, name: str, *, bluish: bool = False) -> Setting:
    encoder = BluishEncoder(load_model(file)) if bluish else RunEncoder(load_model(file))
    embed(workspace, encoder, EmbedConfig(name=name, batch_size=128, threads=1, workers=0))
    opened = Embeddings.open(workspace, name)
    known = Truth.read(truth, workspace)
    return Setting(
        label, workspace, opened, truth, {split: hardest(opened, known, split) for split in ("train", "test")}
    )


def hardest(embeddings: Embeddings, truth: Truth, split: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The captions' nearest unrecorded images: image_ids, pair_ids, and which are true."""
    workspace = embeddings.workspace
    if split == "train":
        members, nearest, pool = read_train_pairs(workspace, embeddings), 1, POOL
        image_ids, pair_ids = members.images, members.captions_of_epoch(0, 0)
    else:
        queries, nearest = read_queries(workspace, split), NEAREST
        image_ids, pair_ids = queries.image_ids[queries.image_rows], queries.pair_ids
        pool = len(pair_ids)
    order = np.random.default_rng(0).permutation(len(pair_ids))
    images, pairs = [], []
    for low in range(0, max(len(order) - pool, 0) + 1, pool):
        rows = order[low : low + pool]
        own = np.unique(image_ids[rows])
        similarity = embeddings.texts.take(pair_ids[rows]) @ embeddings.images.take(own).T
        similarity[image_ids[rows][:, None] == own] = -np.inf
        best = np.argsort(-similarity, axis=1)[:, :nearest]
        images.append(own[best].ravel())
        pairs.append(np.repeat(pair_ids[rows], nearest))
    chosen = np.concatenate(images), np.concatenate(pairs)
    return (*chosen, truth.matches(*chosen))


# ---------------------------------------------------------------------------------------------------- figures
def candidate_figures(setting: Setting, judge: Callable[[np.ndarray, np.ndarray], Judged]) -> dict[str, float | None]:
    """How well true candidates are told from false ones."""
    out: dict[str, float | None] = {}
    for split, (image_ids, pair_ids, true) in setting.candidates.items():
        p, unsure = judge(image_ids, pair_ids)
        out |= {f"{split}_auroc": auroc(p, true), f"{split}_ap": average_precision(p, true)}
        if float(p.min()) >= 0 and float(p.max()) <= 1:
            none = np.zeros(len(p), np.int8)
            out[f"{split}_ece"] = edges_against_truth(p, none, none, true).ece
        if unsure is not None:
            out[f"{split}_auroc_certainty"] = auroc(-unsure, true)
            out[f"{split}_mean_uncertainty_true"] = float(unsure[true].mean())
            out[f"{split}_mean_uncertainty_false"] = float(unsure[~true].mean())
    return out


def fixed_row(setting: Setting, name: str) -> dict[str, Any]:
    """A judge that is not trained on these embeddings."""
    embeddings, workspace = setting.embeddings, setting.workspace
    if name == "itm:demo":
        con_d = load_discriminator(name, workspace)
        judge = Judge(workspace, embeddings, con_d, block_images=128, workers=1)
        return candidate_figures(setting, lambda images, pairs: (judge.probabilities(images, pairs), None))
    if name == "clip":
        clip = ClipDiscriminator(embeddings, fit_on_recorded(workspace, embeddings))
        return candidate_figures(setting, by_rows(embeddings, clip.score_embeddings))
    truth = Truth.read(setting.truth_path, workspace)
    dual = evaluate_embeddings(embeddings, read_queries(workspace), truth)["dual"]
    figures = candidate_figures(setting, by_rows(embeddings, lambda images, texts: (cosine(images, texts), None)))
    return {**figures, "r1": dual["r1"], "map_at_r": dual["map_at_r"]}


def by_rows(
    embeddings: Embeddings, score: Callable[[np.ndarray, np.ndarray], Judged]
) -> Callable[[np.ndarray, np.ndarray], Judged]:
    return lambda images, pairs: score(embeddings.images.take(images), embeddings.texts.take(pairs))


def trained_row(setting: Setting, name: str, seed: int, epochs: int | None) -> dict[str, Any]:
    """Train a network and measure it."""
    run = f"{setting.embeddings.name}-{name.replace(', ', '-')}-{seed}"
    values = {
        **TRAINED[name],
        "embeddings": setting.embeddings.name,
        "truth": str(setting.truth_path),
        "seed": seed,
        "threads": 1,
        "tensorboard": False,
        **({} if epochs is None else {"epochs": epochs}),
    }
    start = time.process_time()
    result = train(setting.workspace, values, run=run)
    seconds = time.process_time() - start
    model = load_frozen_run(setting.workspace, run)
    net = model.net
    score: Callable[[np.ndarray, np.ndarray], Judged]
    if isinstance(net, AdapterNet):
        adapter = net

        def score(images: np.ndarray, texts: np.ndarray) -> Judged:
            return cosine(*adapted_rows(adapter, images, texts)), None
    else:
        score = VacsrDiscriminator(net).score_embeddings
    figures = candidate_figures(setting, by_rows(setting.embeddings, score))
    dual = {key: result["evaluation"][f"dual_{key}"] for key in ("r1", "map_at_r")}
    size = sum(parameter.numel() for parameter in net.parameters())
    return {**figures, **dual, "cpu_seconds": round(seconds, 1), "steps": result["steps"], "parameters": size}


# ---------------------------------------------------------------------------------------------------- the table
def rows_of(setting: Setting, plan: Plan) -> list[tuple[str, int | None]]:
    trained = plan.noisy if setting.name.endswith("shuffled") else plan.trained
    return [(name, None) for name in FIXED] + [(name, seed) for name in trained for seed in plan.seeds]


def fill(root: Path, setting: Setting, plan: Plan) -> None:
    """Make every row of a setting that is not there."""
    for name, seed in rows_of(setting, plan):
        path = root / "rows" / f"{setting.name} {name}{'' if seed is None else f' {seed}'}.json".replace(", ", "-")
        if path.exists():
            continue
        found = fixed_row(setting, name) if seed is None else trained_row(setting, name, seed, plan.epochs)
        atomic.write_json(path, {"setting": setting.name, "row": name, "seed": seed, **found})
        print(f"{setting.name}: {name} {'' if seed is None else seed}: {json.dumps(found)}", flush=True)


def read_rows(root: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((root / "rows").glob("*.json"))]


COLUMNS = ("train_ap", "test_auroc", "test_ap", "test_auroc_certainty", "test_ece", "r1", "map_at_r")
TITLES = ("train AP", "test AUROC", "test AP", "AUROC by certainty", "ECE", "R@1", "mAP@R")


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a line per setting and row, the mean over seeds, and their spread (highest less lowest) behind it."""
    lines = [f"| features | row | seeds | {' | '.join(TITLES)} |", f"| --- | --- | ---: |{' ---: |' * len(TITLES)}"]
    names = dict.fromkeys((row["setting"], row["row"]) for row in sorted(rows, key=_place))
    for setting, name in names:
        mine = [row for row in rows if (row["setting"], row["row"]) == (setting, name)]
        shown = [c for c in COLUMNS if c != "test_ece" or name in PROBABILITIES]
        cells = [_cell([row[c] for row in mine if c in shown and row.get(c) is not None], c) for c in COLUMNS]
        lines.append(f"| {setting} | {name} | {len(mine)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _place(row: dict[str, Any]) -> tuple[int, int]:
    order = [f"{name}{noise}" for name in (IN_DOMAIN, RESTYLED, FOREIGN_DOMAIN, EMOJI) for noise in ("", ", shuffled")]
    return order.index(row["setting"]), [*FIXED, *ADAPTERS, "mlp, bce", "vacsr", "vacsr, skip"].index(row["row"])


def _cell(values: list[float], column: str) -> str:
    if not values:
        return "-"
    form = ".1f" if column in ("r1", "map_at_r") else ".3f"
    spread = f" ({max(values) - min(values):{form}})" if len(values) > 1 else ""
    return f"{np.mean(values):{form}}{spread}"


def gates(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What is asked of VACSR on foreign features, for the mean over seeds; None where rows are missing."""

    def mean(setting: str, name: str, column: str) -> float | None:
        values = [row[column] for row in rows if (row["setting"], row["row"]) == (setting, name)]
        return float(np.mean(values)) if values else None

    cosines = {c: mean(FOREIGN_DOMAIN, "cosine", c) for c in ("test_auroc", "map_at_r")}
    vacsr = {c: mean(FOREIGN_DOMAIN, "vacsr", c) for c in ("test_auroc", "map_at_r")}
    noisy = mean(f"{FOREIGN_DOMAIN}, shuffled", "vacsr", "map_at_r")
    out: dict[str, Any] = dict.fromkeys(GATES)
    if vacsr["test_auroc"] is not None and cosines["test_auroc"] is not None:
        out["auroc_over_cosine"] = vacsr["test_auroc"] - cosines["test_auroc"]
    if vacsr["map_at_r"] is not None and cosines["map_at_r"] is not None:
        out["map_over_cosine"] = vacsr["map_at_r"] - cosines["map_at_r"]
    if vacsr["map_at_r"] is not None and noisy is not None:
        out["loss_by_shuffling"] = 1 - noisy / vacsr["map_at_r"]
    met = {
        "auroc_over_cosine": lambda value: value >= GATES["auroc_over_cosine"],
        "map_over_cosine": lambda value: value >= GATES["map_over_cosine"],
        "loss_by_shuffling": lambda value: value <= GATES["loss_by_shuffling"],
    }
    return {**out, "met": {key: None if out[key] is None else bool(met[key](out[key])) for key in GATES}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--emoji", type=Path, metavar="DIR", help="holds pairs.json and truth.parquet")
    parser.add_argument("--emoji-encoder", type=Path, default=SHIPPED["demo"], metavar="CHECKPOINT")
    parser.add_argument("--seeds", type=int, default=len(FULL.seeds), help="only the first so many")
    parser.add_argument("--only", metavar="SETTING", help="in-domain, restyled, foreign or emoji")
    parser.add_argument("--report", action="store_true", help="show what is there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    plan = QUICK if arguments.quick else FULL
    plan = replace(plan, seeds=plan.seeds[: arguments.seeds])
    root = arguments.directory
    if not arguments.report:
        for setting in settings(root, plan, arguments.only, arguments.emoji, arguments.emoji_encoder):
            fill(root, setting, plan)
    rows = read_rows(root)
    text = table(rows)
    atomic.write_bytes(root / "vacsr.md", (text + "\n").encode())
    print(text)
    print(json.dumps({"rows": rows, "foreign": gates(rows)}))


if __name__ == "__main__":
    main()
