"""The chain behind `effect.py`: every function makes one thing, or finds it made, through fnpipe's own stages.

DIR/regime.json                  what all of it was made with
DIR/backbone.safetensors         the warmed-up image tower; init-<seed>.safetensors: with fresh weights around it
DIR/scenes-<d>/, DIR/data-<d>/   a data set as drawn, and its workspace
DIR/results/<run>/*.json         what was measured
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from effect_regime import RANDOM, Regime, Row, Run

# The models are trained as the shipped ones are.
sys.path.append(str(Path(__file__).parents[2] / "tools"))
import demo_checkpoints

from fnpipe.mining.connections.judge import Judge
from fnpipe.mining.connections.stage import MineConfig, mine_connections
from fnpipe.mining.data.train_pairs import read_train_pairs
from fnpipe.mining.data.truth import Truth
from fnpipe.mining.discriminators.protocol import Discriminator
from fnpipe.mining.edges.labels import DISCRIMINATOR, label_candidates
from fnpipe.mining.graph.stage import GraphConfig, build_graph
from fnpipe.mining.plans.config import ALL, GroupConfig
from fnpipe.mining.plans.stage import group, plan_epoch
from fnpipe.mining.views.accuracy import edges_against_truth
from fnpipe.mining.views.audit import audit
from fnpipe.mining.views.config import AuditConfig
from fnpipe.mining.views.hardest import hardest_negatives
from fnpipe.pipeline.embed.stage import EmbedConfig, embed
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import atomic
from fnpipe.pipeline.images.decode import decode_rgb
from fnpipe.pipeline.scenes.dataset import draw, write_scenes
from fnpipe.pipeline.shard.stage import ShardConfig, shard
from fnpipe.pipeline.workspace.embeddings import Embeddings
from fnpipe.pipeline.workspace.manifest import read_manifest
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.data.pictures import Samples
from fnpipe.train.evaluation.queries import read_queries
from fnpipe.train.evaluation.retrieval import evaluate_model
from fnpipe.train.judges.encoder import load_encoder
from fnpipe.train.judges.itm import load_discriminator
from fnpipe.train.methods import train
from fnpipe.train.model.build import build_model, load_model, save_model
from fnpipe.train.model.config import ModelConfig
from fnpipe.train.model.load import load_run, model_file
from fnpipe.train.runs.log import read_metrics

# More threads give other last bits, and gain little on models this small.
THREADS = 1
Figures = dict[str, Any]


class Chain:
    """One run of a regime: its data set, its warm start, its branches; what several runs share is made once."""

    def __init__(self, root: Path, regime: Regime, run: Run, say: Callable[[str], None] = print) -> None:
        self.root, self.regime, self.run, self.say = root, regime, run, say
        root.mkdir(parents=True, exist_ok=True)
        claim(root, regime)
        self.workspace, self.truth_file = self._data()
        self.truth = Truth.read(self.truth_file, self.workspace)
        self.start = "demo" if regime.shipped else f"run:{self._start(run.model)}"
        self.embeddings = self._embed()

    # ------------------------------------------------------------------------------------------- shared by several runs
    def _data(self) -> tuple[Workspace, Path]:
        regime, seed = self.regime, self.run.data
        source = Path(regime.emoji) if regime.emoji else self.root / f"scenes-{seed}"
        target = self.root / f"data-{seed}"
        with held(target):
            if not regime.emoji and not (source / "pairs.json").exists():
                write_scenes(source, regime.train + regime.test, seed)
            # Sharding wants a workspace for itself, even to find that it has been done; another run may be at work.
            if not (read_manifest(target) or {}).get("complete"):
                config = ShardConfig(holdout=regime.test, workers=1, shuffle_captions=regime.noise or None)
                shard([str(source / "pairs.json")], str(target), config)
        return Workspace.open(target), source / "truth.parquet"

    def _backbone(self, seed: int) -> Path:
        """A model with the warmed-up image tower and, around it, fresh weights of ``seed``."""
        tower, path = self.root / "backbone.safetensors", self.root / f"init-{seed}.safetensors"
        with held(tower):
            if not tower.exists():
                self.say("warming up the image tower")
                warm_up_tower(tower, self.regime.backbone_steps)
            if not path.exists():
                torch.manual_seed(seed)
                model = build_model(ModelConfig())
                model.clip.visual.load_state_dict(load_model(tower).clip.visual.state_dict())
                save_model(model, path)
        return path

    def _trained(self, name: str, init: str | None, seed: int, epochs: int) -> str:
        """A run on random batches of this data set; its name."""
        values = {"method": "albef", "seed": seed, "epochs": epochs, "lr": self.regime.start_lr}
        with held(self.workspace.root / "runs" / name):
            if init == "backbone":
                init = str(self._backbone(seed))
            self._train({**values, "init": init, "batch_size": self.regime.batch_size}, name)
        return name

    def _start(self, seed: int) -> str:
        return self._trained(f"start-{seed}", self.regime.start_init, seed, self.regime.start_epochs)

    def con_d_run(self, kind: str) -> str:
        """What judges as ``learned`` or ``weak``: ``itm:demo``, or ``itm:RUN`` of a run that is trained if need be."""
        regime = self.regime
        if kind == "weak":
            return f"itm:{self._start(weak_seed(regime, self.run))}"
        if regime.shipped_con_d:
            return "itm:demo"
        return f"itm:{self._trained('con-d', regime.con_d_init, regime.con_d_seed, regime.con_d_epochs)}"

    # ------------------------------------------------------------------------------------------- of this run
    def _embed(self) -> str:
        name = f"start-{self.run.model}"
        embed(self.workspace, load_encoder(self.start, self.workspace), EmbedConfig(name=name, threads=THREADS))
        return name

    def plan(self, what: str | int) -> str:
        """The plan of a branch; its name."""
        sampling = {"sampling": RANDOM} if what == RANDOM else {"sampling": "grit", "search_space": what}
        name = f"{sampling['sampling']}-{self.run.model}" if what == RANDOM else f"grit-{what}-{self.run.model}"
        fixed = {"batch_size": self.regime.batch_size, "epochs": self.regime.epochs, "seed": self.run.model}
        group(self.workspace, GroupConfig(name=name, embeddings=self.embeddings, **sampling, **fixed))  # type: ignore[arg-type]
        return name

    def discriminator(self, kind: str) -> Discriminator:
        if kind == "oracle":
            return Oracle(self.workspace, self.truth)
        return load_discriminator(self.con_d_run(kind), self.workspace)

    def edges(self, kind: str, plan: str) -> str:
        """What ``kind`` says of the candidates of a plan; the edges' name."""
        name = f"{kind}-{plan}"
        config = MineConfig(
            candidates=self.regime.candidates,
            groups=(plan,),
            embeddings=self.embeddings,
            name=name,
            threads=THREADS,
            workers=1,
        )
        mine_connections(self.workspace, config, self.discriminator(kind))
        return name

    def _train(self, values: Mapping[str, Any], name: str) -> None:
        # Nothing is chosen by the test split: the last weights are the run's result.
        fixed = {"evaluate_every": 0, "threads": THREADS, "workers": 0, "tensorboard": False}
        if not self.regime.mlm:
            fixed["mlm"] = False
        warm_up = {"warmup_steps": self.regime.warm_up_steps}
        train(self.workspace, {**fixed, **warm_up, **values}, run=name)

    # ------------------------------------------------------------------------------------------- what is measured
    def measured(self, name: str, measure: Callable[[], Figures]) -> Figures:
        """What ``measure`` returned when it was first asked for ``name``."""
        path = self.root / "results" / self.run.name / f"{name}.json"
        if not path.exists():
            began = time.monotonic()
            figures = measure()
            atomic.write_json(path, figures)
            self.say(f"{self.run.name} {name}: {time.monotonic() - began:.0f} s")
        found: Figures = json.loads(path.read_bytes())
        return found

    def fn_share(self) -> Figures:
        """Share of true ones among the hardest in-batch negatives, by search space; no training."""
        return self.measured("fn-share", self._fn_share)

    def _fn_share(self) -> Figures:
        build_graph(self.workspace, GraphConfig(embeddings=self.embeddings))
        images = self.workspace.splits()["train"]
        spaces = [m for m in self.regime.spaces if m <= images]
        config = AuditConfig(
            embeddings=self.embeddings, batch_size=self.regime.batch_size, search_space=(*spaces, ALL), seed=0
        )
        rows = audit(self.workspace, config, self.truth).rows
        return {str(row.search_space or RANDOM): row.judged["truth"] for row in rows}

    def start_figures(self) -> Figures:
        return self.measured("start", lambda: self._retrieval(self.start))

    def con_d_figures(self, kind: str) -> Figures:
        """Con-D's own retrieval, and how it judges the warm start's nearest neighbours."""
        return self.measured(f"con-d-{kind}", lambda: self._con_d_figures(kind))

    def _con_d_figures(self, kind: str) -> Figures:
        spec = self.con_d_run(kind)
        name = spec if spec == "itm:demo" else f"run:{spec.partition(':')[2]}"
        figures = {**self._retrieval(name), "neighbours": {}}
        for space in (self.regime.small, self.regime.large):
            figures["neighbours"][str(space)] = self._neighbours(self.discriminator(kind), space)
        return figures

    def _neighbours(self, con_d: Discriminator, space: int) -> Figures:
        """A random batch of M pairs is a random search space, and its hardest negatives the nearest neighbours."""
        embeddings = Embeddings.open(self.workspace, self.embeddings)
        members = read_train_pairs(self.workspace, embeddings)
        plan = plan_epoch(members, GroupConfig(sampling=RANDOM, batch_size=space, keep_last=True), 0)
        found = hardest_negatives(plan, embeddings)
        p = Judge(self.workspace, embeddings, con_d, block_images=128, workers=1).probabilities(
            found.image_ids, found.pair_ids
        )
        true = self.truth.matches(found.image_ids, found.pair_ids)
        labels, sources = label_candidates(p, 0.5, 0.8), np.full(len(p), DISCRIMINATOR, np.int8)
        said = edges_against_truth(p, labels, sources, true, similarity=found.sims)
        kept = ("auroc", "average_precision", "precision", "recall", "similarity_auroc", "similarity_average_precision")
        return {"true": float(true.mean()), **{key: getattr(said, key) for key in kept}}

    def _retrieval(self, model: str, *, rerank: bool = True) -> Figures:
        """R@k, R-Precision and mAP@R on the split test; of the dual encoder, and re-ranked by ITM."""
        loaded = load_run(model_file(model, self.workspace))
        queries = read_queries(self.workspace, "test")
        found = evaluate_model(self.workspace, loaded, queries, self.truth, rerank=rerank, quiet=True)
        return {kind: found[kind] for kind in ("dual", "itm") if kind in found}

    def branch(self, name: str, row: Row) -> Figures:
        """Train one row from the warm start, and measure it."""
        return self.measured(name, lambda: self._branch(name, row))

    def _branch(self, name: str, row: Row) -> Figures:
        values: dict[str, Any] = {
            "method": row.method,
            "init": self.start,
            "epochs": self.regime.epochs,
            "lr": self.regime.lr,
            "seed": self.run.model,
            "truth": str(self.truth_file),
            **row.values,
        }
        if row.plan is None:
            values |= {"embeddings": self.embeddings, "batch_size": self.regime.batch_size}
        else:
            values["groups"] = self.plan(row.plan)
        if row.edges is not None:
            values["edges"] = self.edges(row.edges, values.get("groups") or self.plan(self.regime.large))
        run = f"{name}-{self.run.model}"
        began = time.monotonic()
        self._train(values, run)
        seconds = time.monotonic() - began
        steps = read_metrics(self.workspace.root / "runs" / run, "step")
        retrieval = self._retrieval(f"run:{run}", rerank=row.method != "itc")
        return {
            "steps": len(steps),
            "train_seconds": round(seconds, 1),
            **trajectory(steps, self.regime.batch_size),
            **retrieval,
        }


def trajectory(steps: Sequence[Mapping[str, Any]], batch_size: int) -> Figures:
    """What the steps of a branch met: means, the last fifth's share of false negatives; falcon's q and u by epoch.

    ``positives`` and ``ambiguous`` are shares of the hardest negatives of batches of ``batch_size``.
    """
    figures: Figures = {}
    for key in ("false_negatives", "coverage"):
        if key in steps[0]:
            figures[key] = float(np.mean([step[key] for step in steps]))
    last = steps[-max(1, len(steps) // 5) :]
    figures["false_negatives_at_the_end"] = float(np.mean([step["false_negatives"] for step in last]))
    for key in ("positives", "ambiguous"):
        if key in steps[0]:
            figures[key] = float(np.mean([step[key] for step in steps])) / (2 * batch_size)
    for key in ("q", "u"):
        if key in steps[0]:
            # Within an epoch both follow what is left of the search spaces.
            figures[key] = by_epoch(steps, key)
    return figures


def by_epoch(steps: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """The mean of every epoch."""
    epochs = sorted({step["epoch"] for step in steps})
    return [float(np.mean([step[key] for step in steps if step["epoch"] == epoch])) for epoch in epochs]


class Oracle:
    """A discriminator that knows: p is 1 where the truth file says so, else 0."""

    def __init__(self, workspace: Workspace, truth: Truth) -> None:
        self._truth = truth
        self.description = {"kind": "oracle", "pairs": workspace.digest}
        samples = Samples.of(workspace)
        self._image_of = {
            self._digest(decode_rgb(data)): image_id
            for image_id, data in enumerate(samples.read(np.arange(workspace.n_images)))
        }
        # Equal captions need not be true of the same pictures where truth goes by concept.
        self._pairs_of: dict[str, list[int]] = {}
        for pair_id, caption in enumerate(samples.captions.to_pylist()):
            self._pairs_of.setdefault(caption, []).append(pair_id)

    @staticmethod
    def _digest(rgb: np.ndarray) -> bytes:
        return hashlib.sha256(np.ascontiguousarray(rgb).tobytes() + str(rgb.shape).encode()).digest()

    def prepare_images(self, rgbs: Sequence[np.ndarray], /) -> np.ndarray:
        """(n,) int64 image_ids; of equal pictures the last one's."""
        return np.array([self._image_of[self._digest(rgb)] for rgb in rgbs], np.int64)

    def prepare_texts(self, captions: Sequence[str], /) -> np.ndarray:
        """(n, k) int64, the pair_ids with each caption, the last one repeated."""
        pairs = [self._pairs_of[caption] for caption in captions]
        width = max(map(len, pairs), default=1)
        return np.array([row + row[-1:] * (width - len(row)) for row in pairs], np.int64).reshape(-1, width)

    def score_pairs(
        self, images: np.ndarray, image_rows: np.ndarray, texts: np.ndarray, text_rows: np.ndarray, /
    ) -> np.ndarray:
        """(n,) float32, 1 or 0."""
        true = self._truth.matches(images[image_rows][:, None], texts[text_rows]).any(axis=1)
        p: np.ndarray = true.astype(np.float32)
        return p


def weak_seed(regime: Regime, run: Run) -> int:
    """Another model seed, whose warm start is no better trained than this run's; one that is there anyhow, if any."""
    others = [r.model for r in regime.runs if r.data == run.data and r.model != run.model]
    return min(others, default=0 if run.model else 1)


def warm_up_tower(path: Path, steps: int) -> None:
    """The image tower of the shipped checkpoints, before their training: it has learnt to say what stands where."""
    recipe = demo_checkpoints.Recipe("backbone", seed=demo_checkpoints.WARM_UP_SEED, epochs=0)
    torch.manual_seed(demo_checkpoints.WARM_UP_SEED)
    scenes = draw(demo_checkpoints.N_PRETRAIN, demo_checkpoints.DATA_SEED)
    model = build_model(ModelConfig())
    demo_checkpoints.WARM_UP_STEPS = steps
    demo_checkpoints.warm_up(model, demo_checkpoints.normalised(model, scenes), scenes.graphs, recipe)
    save_model(model, path)


def claim(root: Path, regime: Regime) -> None:
    """Bind a directory to a regime.

    Raises:
        InputError: it belongs to another one.
    """
    path, now = root / "regime.json", json.loads(json.dumps(dataclasses.asdict(regime)))
    if path.exists():
        before = json.loads(path.read_bytes())
        differing = sorted(key for key in now if before.get(key) != now[key])
        if differing:
            raise InputError(f"{path}: made with other {', '.join(differing)}; use another directory")
    else:
        atomic.write_json(path, now)


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Nobody else makes ``path`` meanwhile."""
    lock = path.with_name(f".effect-{path.name}.lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
