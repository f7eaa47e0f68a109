"""How hard should batches be, and what does FALCON's scheduler learn about it? Retrieval after training at each way.

    python experiments/falcon/falcon_study.py DIR  # all rows, one to three minutes each on an idle core
    python experiments/falcon/falcon_study.py DIR fixed-0.99-1024 fixed-1-1024

Drawn scenes, 8,192 to train on and 1,000 to test; every row starts from the shipped encoder and trains for five epochs
(640 steps of 64), without gradient clipping. A row is a fixed quantile, or the scheduler on the log-rank scale: learned
for a whole batch, learned per anchor, or frozen as it starts. Stopped and run again, it goes on. The table's shares of
false negatives are of the hardest in-batch negatives, by the exact truth; mAP@R is the mean of both directions. The
last line is JSON, and stands in DIR/falcon_study.json as well.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from fnpipe.mining.data.train_pairs import read_train_pairs
from fnpipe.mining.data.truth import Truth
from fnpipe.pipeline.embed.stage import EmbedConfig, embed
from fnpipe.pipeline.files import atomic
from fnpipe.pipeline.scenes.dataset import write_scenes
from fnpipe.pipeline.shard.stage import ShardConfig, shard
from fnpipe.pipeline.workspace.embeddings import Embeddings
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.falcon.chain import Constant, construct, pair_similarities
from fnpipe.train.judges.encoder import load_encoder
from fnpipe.train.methods import train
from fnpipe.train.runs.log import read_metrics

TRAIN, TEST, BATCH = 8192, 1000, 64
SMALL, LARGE = 1024, 4096
QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.975, 0.99, 0.999, 1.0)


def rows() -> dict[str, dict[str, Any]]:
    """Every row's keys, the ones that something is expected of first."""
    found: dict[str, dict[str, Any]] = {}
    for space in (SMALL, LARGE):
        for quantile in (0.99, 1):
            found[f"fixed-{quantile}-{space}"] = {"quantile": float(quantile), "search_space": space}
    for space in (SMALL, LARGE):
        learned = {"quantile_scale": "log-rank", "search_space": space}
        found[f"batch-{space}"] = {**learned, "policy_level": "batch"}
        found[f"frozen-batch-{space}"] = {**learned, "policy_level": "batch", "policy_lr": 0.0}
        found[f"anchor-{space}"] = learned
    found["softening-1024"] = {"scheduler": "softening", "quantile_scale": "log-rank", "search_space": SMALL}
    found["hardening-1024"] = {"scheduler": "hardening", "quantile_scale": "log-rank", "search_space": SMALL}
    found["batch-clip-5-1024"] = {**found["batch-1024"], "clip_norm": 5.0}
    return found


def prepare(root: Path) -> tuple[Workspace, Path]:
    """The workspace, sharded and embedded by the shipped encoder, and its truth."""
    scenes = root / "scenes"
    if not (scenes / "pairs.json").exists():
        write_scenes(scenes, TRAIN + TEST, 1)
    shard([str(scenes / "pairs.json")], str(root / "ws"), ShardConfig(holdout=TEST, workers=1))
    workspace = Workspace.open(root / "ws")
    embed(workspace, load_encoder("demo", workspace), EmbedConfig(name="demo", threads=1))
    return workspace, scenes / "truth.parquet"


def shares(workspace: Workspace, truth: Truth, batches: int = 64) -> dict[str, dict[str, float]]:
    """False negatives among the hardest, by quantile, on the frozen embeddings of the shipped encoder."""
    members, embeddings = read_train_pairs(workspace), Embeddings.open(workspace)
    pair_ids = members.captions_of_epoch(0, 0)
    found: dict[str, dict[str, float]] = {}
    for space in (SMALL, LARGE):
        for quantile in QUANTILES:
            rng = np.random.default_rng(0)
            order, met = rng.permutation(len(members.images)), []
            for begin in range(0, len(order), space):
                rows = np.sort(order[begin : begin + space])
                images, pairs = members.images[rows], pair_ids[rows]
                features = embeddings.images.take(images), embeddings.texts.take(pairs)
                sims, unused = pair_similarities(*features), np.arange(len(rows))
                while len(unused) >= BATCH and len(met) < batches:
                    chosen = construct(sims, unused, int(rng.choice(unused)), BATCH, Constant(quantile, False))
                    unused = np.setdiff1d(unused, chosen)
                    sim_i2t = features[0][chosen] @ features[1][chosen].T
                    np.fill_diagonal(sim_i2t, -np.inf)
                    own, texts, others = np.arange(BATCH), sim_i2t.argmax(1), sim_i2t.argmax(0)
                    hits = [truth.matches(images[chosen[own]], pairs[chosen[texts]])]
                    hits.append(truth.matches(images[chosen[others]], pairs[chosen[own]]))
                    met.append(float(np.mean(hits)))
            found.setdefault(str(space), {})[str(quantile)] = 100 * float(np.mean(met))
    return found


def run(workspace: Workspace, truth: Path, name: str, keys: dict[str, Any], seed: int) -> dict[str, Any]:
    """Train a row, or find it trained; its figures."""
    values = {"method": "falcon", "init": "demo", "epochs": 5, "batch_size": BATCH, "lr": 1.5e-3, "warmup_steps": 50}
    fixed = {"truth": str(truth), "evaluate_every": 5, "evaluate_images": TEST, "threads": 1, "tensorboard": False}
    summary = train(workspace, {**values, **fixed, **keys, "seed": seed}, run=f"{name}-seed-{seed}")
    steps = read_metrics(workspace.root / "runs" / f"{name}-seed-{seed}", "step")
    evaluation = summary["evaluation"]
    tenths = np.array_split(np.arange(len(steps)), 10)
    path = "policy_mean" if "policy_mean" in steps[0] else "q"
    return {
        "false_negatives": 100 * float(np.mean([line["false_negatives"] for line in steps])),
        "false_negatives_last_epoch": 100 * float(np.mean([line["false_negatives"] for line in steps[-128:]])),
        "dual": evaluation["dual_map_at_r"],
        "itm": evaluation["itm_map_at_r"],
        "path": [round(float(np.mean([steps[i][path] for i in tenth])), 3) for tenth in tenths],
        "reward": float(np.mean([line["reward"] for line in steps])) if "reward" in steps[0] else None,
        "grad_norm": float(np.median([line["grad_norm"] for line in steps])),
        "seconds": summary["seconds"],
    }


def show(found: dict[str, dict[str, Any]]) -> None:
    print(f"{'row':20} {'FN %':>6} {'last':>6} {'dual':>6} {'ITM':>6} {'norm':>6}  mean u or q, by tenths of the run")
    for name, row in found.items():
        path = " ".join(f"{value:.2f}" for value in row["path"])
        counts = f"{row['false_negatives']:6.1f} {row['false_negatives_last_epoch']:6.1f}"
        print(f"{name:20} {counts} {row['dual']:6.1f} {row['itm']:6.1f} {row['grad_norm']:6.1f}  {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(rows())}; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shares", action="store_true", help="only false negatives by quantile, without training")
    arguments = parser.parse_args()
    workspace, truth = prepare(arguments.directory)
    report = arguments.directory / "falcon_study.json"
    if arguments.shares:
        found = shares(workspace, Truth.read(truth, workspace))
        for space, by_quantile in found.items():
            print(f"M={space}: " + ", ".join(f"q {q} {share:.1f} %" for q, share in by_quantile.items()))
        print(json.dumps(found))
        return
    figures: dict[str, Any] = {}
    for name, keys in rows().items():
        if not arguments.rows or name in arguments.rows:
            figures[name] = run(workspace, truth, name, keys, arguments.seed)
            show({name: figures[name]})
    for space in (SMALL, LARGE):
        soft, hard = figures.get(f"fixed-0.99-{space}"), figures.get(f"fixed-1-{space}")
        if soft and hard:
            figures |= {f"{kind}_gain_{space}": soft[kind] - hard[kind] for kind in ("itm", "dual")}
    show({name: row for name, row in figures.items() if isinstance(row, dict)})
    atomic.write_json(report, figures)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
