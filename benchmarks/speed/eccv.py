"""How long do the figures of COCO's 5k test take, how much memory, and are they those of the `eccv_caption` package?

    python benchmarks/speed/eccv.py            needs fnpipe[eval]; COCO itself is not needed

Embeddings of 5,000 images and 25,000 captions are drawn, so that a part of the captions finds its image, and measured
as `fnpipe evaluate --eccv` does: the whole block of both directions under COCO's 1k and 5k, CxC and ECCV Caption.
"Re-ranked" is the same with each query's best 24 in another order, as the ITM head gives it (float64). Then the package
ranks the same scores with its own functions; for them the scores are made free of ties, and a query's best 1,000 items
are listed, which its folds of 1k do not exhaust. The last line is JSON.

Measured (Xeon, 2.1 GHz, torch 2.14, width 512, one thread of a busy machine): 5.5 s of CPU, 1.2 GiB; re-ranked 1.3 GiB;
24 figures, the largest difference from the package 1.4e-14 percent.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from typing import Any

import numpy as np
import torch

from fnpipe.train.evaluation.eccv import CocoTest, read_coco_test
from fnpipe.train.evaluation.metrics import Scores, cosine_scores, reranked_scores, top_items

TOP_K = 24
LISTED = 1000
NOISE = 5.0


def drawn_embeddings(test: CocoTest, width: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(images, width) and (captions, width) float32, normalised: a caption is its image and noise."""
    rng = np.random.default_rng(seed)
    images = rng.normal(size=(len(test.image_ids), width)).astype(np.float32)
    texts = np.repeat(images, test.caption_ids.shape[1], axis=0)
    texts += NOISE * rng.normal(size=texts.shape).astype(np.float32)
    norms = [np.linalg.norm(rows, axis=1, keepdims=True) for rows in (images, texts)]
    return torch.from_numpy(images / norms[0]), torch.from_numpy(texts / norms[1])


def peak_gib() -> float:
    """Of this process since it started, with all its libraries."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)


def timed(test: CocoTest, i2t: Scores, t2i: Scores) -> tuple[float, float, dict[str, dict[str, float]]]:
    """Seconds of the clock, seconds of all cores together, and the figures."""
    start, busy = time.perf_counter(), time.process_time()
    found = test.measure(i2t, t2i)
    return round(time.perf_counter() - start, 1), round(time.process_time() - busy, 1), found


def without_ties(scores: Scores, n_queries: int, n_items: int) -> np.ndarray:
    """(queries, items) float32: the places from the bottom, those of tied items by their rows."""
    out = np.empty((n_queries, n_items), np.float32)
    for start in range(0, n_queries, 500):
        block = scores(start, min(start + 500, n_queries)).numpy()
        order = np.argsort(-block, axis=1, kind="stable")
        np.put_along_axis(out[start : start + 500], order, np.arange(n_items, 0, -1, np.float32)[None, :], axis=1)
    return out


def figures_of_the_package(test: CocoTest, i2t: np.ndarray, t2i: np.ndarray) -> tuple[float, dict[str, float]]:
    """Seconds, and ``coco_1k/tr_r1`` and so on in percent, by the package's own functions."""
    import eccv_caption

    start = time.perf_counter()
    captions = test.caption_ids.ravel()
    lists = []
    for scores, queries, items in ((i2t, test.image_ids, captions), (t2i, captions, test.image_ids)):
        best = np.argsort(-scores, axis=1)[:, :LISTED]
        lists.append({int(q): items[row].tolist() for q, row in zip(queries, best, strict=True)})
    wanted = ("eccv_r1", "eccv_map_at_r", "eccv_rprecision", "coco_1k_recalls", "coco_5k_recalls", "cxc_recalls")
    found: dict[str, Any] = eccv_caption.Metrics().compute_all_metrics(*lists, target_metrics=wanted, Ks=(1, 5, 10))
    out = {}
    for key, sides in found.items():
        name, figure = key.split("_", 1) if key.startswith("eccv_") else key.rsplit("_", 1)
        figure = "rp" if figure == "rprecision" else figure
        out |= {f"{name}/{side}_{figure}": 100 * float(sides[way]) for side, way in (("tr", "i2t"), ("ir", "t2i"))}
    return round(time.perf_counter() - start, 1), out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=512, help="of the embeddings")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-package", action="store_true", help="measure time and memory alone")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    start = time.perf_counter()
    test = read_coco_test()
    result: dict[str, Any] = {"width": arguments.width, "seed": arguments.seed, "threads": arguments.threads}
    result["read_seconds"] = round(time.perf_counter() - start, 1)
    images, texts = drawn_embeddings(test, arguments.width, arguments.seed)
    i2t, t2i = cosine_scores(images, texts), cosine_scores(texts, images)
    result["seconds"], result["cpu_seconds"], found = timed(test, i2t, t2i)
    result["peak_gib"] = peak_gib()
    seconds, busy = result["seconds"], result["cpu_seconds"]
    print(
        f"5,000 x 25,000, width {arguments.width}: {seconds} s, {busy} s of CPU, {result['peak_gib']} GiB", flush=True
    )

    again = []
    for scores, queries, items in ((i2t, images, texts), (t2i, texts, images)):
        best = top_items(scores, len(queries), len(items), TOP_K)
        logits = torch.randn(best.shape, generator=torch.Generator().manual_seed(arguments.seed))
        again.append(reranked_scores(scores, best, logits))
    result["reranked_seconds"], result["reranked_cpu_seconds"], _ = timed(test, again[0], again[1])
    result["reranked_peak_gib"] = peak_gib()
    seconds, busy = result["reranked_seconds"], result["reranked_cpu_seconds"]
    print(f"re-ranked: {seconds} s, {busy} s of CPU, {result['reranked_peak_gib']} GiB", flush=True)
    for name, figures in found.items():
        print(f"{name}: {', '.join(f'{key} {value:.2f}' for key, value in figures.items())}")

    if not arguments.no_package:
        strict = without_ties(i2t, len(images), len(texts)), without_ties(t2i, len(texts), len(images))
        ours = test.measure(*(lambda start, stop, m=m: torch.from_numpy(m[start:stop]) for m in strict))
        result["package_seconds"], theirs = figures_of_the_package(test, *strict)
        flat = {f"{name}/{k}": v for name, figures in ours.items() for k, v in figures.items() if k != "rsum"}
        assert flat.keys() == theirs.keys()
        result["figures"] = len(flat)
        result["largest_difference"] = max(abs(flat[key] - theirs[key]) for key in flat)
        print(f"{len(flat)} figures differ from the package's by {result['largest_difference']:.1e} at most (percent)")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
