"""How much faster one pass judges than judging every combination from scratch.

    python benchmarks/speed/mine.py                       # ALBEF's proportions: ViT-B/16 at 256 px, 6 + 6 text layers
    python benchmarks/speed/mine.py --device cuda --images 2000 --batch 100 --scratch 512

The same model with random weights judges the same combinations twice: by `mine_connections` (every picture and caption
encoded once a block, cross-attention keys once a picture), and each by itself, pictures and captions encoded every
time, in batches. About eight unique combinations an image; captions of COCO's length (8 to 14 words). The last line is
JSON. ``ratio_vs_from_scratch`` compares wall clocks on a GPU and CPU seconds on a CPU, which other jobs do not disturb.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from PIL import Image

from fnpipe.mining.connections.stage import MineConfig, mine_connections
from fnpipe.mining.edges.reader import read_edges
from fnpipe.mining.plans.config import GroupConfig
from fnpipe.mining.plans.stage import group
from fnpipe.pipeline.files import arrays, tables
from fnpipe.pipeline.files.ranges import read_ranges
from fnpipe.pipeline.images.decode import decode_rgb
from fnpipe.pipeline.shard.stage import ShardConfig, shard
from fnpipe.pipeline.workspace.embeddings import image_array_path, text_array_path
from fnpipe.pipeline.workspace.schemas import BAD_SCHEMA
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.judges.itm import ItmDiscriminator
from fnpipe.train.model.build import build_model
from fnpipe.train.model.config import ModelConfig

WORDS = [
    *(
        "a",
        "the",
        "of",
        "on",
        "in",
        "with",
        "and",
        "man",
        "woman",
        "dog",
        "cat",
        "two",
        "standing",
        "sitting",
        "riding",
    ),
    *("street", "table", "red", "white", "small", "large", "next", "to", "holding", "plate", "food", "train", "beach"),
]


def main() -> None:
    arguments = _arguments()
    torch.manual_seed(0)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    model = build_model(ModelConfig(architecture=arguments.model)).to(arguments.device)
    with tempfile.TemporaryDirectory() as folder:
        workspace = make_workspace(Path(folder), arguments.images, arguments.batch)
        con_d = CountingDiscriminator(model, fuse_batch=arguments.fuse_batch)
        warm_up(con_d)
        config = MineConfig(
            candidates=arguments.candidates,
            name="pass",
            block_images=arguments.block_images,
            threads=arguments.threads,
        )
        wall, cpu = time.perf_counter(), time.process_time()
        summary = mine_connections(workspace, config, con_d)
        pass_wall, pass_cpu = time.perf_counter() - wall, time.process_time() - cpu
        judgements = con_d.judgements
        table = read_edges(workspace.stage("edges/pass"))
        sample = np.sort(np.random.default_rng(0).permutation(len(table))[: arguments.scratch])
        wall, cpu = time.perf_counter(), time.process_time()
        scores = from_scratch(workspace, con_d, table.take(pa.array(sample)), arguments.scratch_batch)
        scratch_wall, scratch_cpu = time.perf_counter() - wall, time.process_time() - cpu
    difference = float(np.abs(scores - table["match_probability"].to_numpy()[sample]).max())
    rates = {
        "pass_per_second": judgements / pass_wall,
        "scratch_per_second": len(sample) / scratch_wall,
        "pass_per_cpu_second": judgements / pass_cpu,
        "scratch_per_cpu_second": len(sample) / scratch_cpu,
    }
    kind = "second" if arguments.device.startswith("cuda") else "cpu_second"
    result = {
        "model": arguments.model,
        "device": arguments.device,
        "threads": torch.get_num_threads(),
        "images": arguments.images,
        "unique_combinations": summary.unique_combinations,
        "judgements": judgements,
        "combinations_per_image": round(summary.unique_combinations / arguments.images, 2),
        "ratio_vs_from_scratch": round(rates[f"pass_per_{kind}"] / rates[f"scratch_per_{kind}"], 2),
        "ratio_by_wall_clock": round(rates["pass_per_second"] / rates["scratch_per_second"], 2),
        **{name: round(rate, 3) for name, rate in rates.items()},
        "largest_difference_of_p": difference,
    }
    assert judgements == summary.judgements == summary.unique_combinations - summary.identity
    print(json.dumps(result))


class CountingDiscriminator(ItmDiscriminator):
    """Counts its judgements."""

    judgements = 0

    def score_pairs(self, images, image_rows, texts, text_rows, /):  # type: ignore[no-untyped-def]
        self.judgements += len(image_rows)
        return super().score_pairs(images, image_rows, texts, text_rows)


def warm_up(con_d: CountingDiscriminator) -> None:
    """Pay for caches, threads and kernels before the clock runs."""
    pictures, captions = [np.zeros((256, 256, 3), np.uint8)] * 2, ["a dog on a street", "two people near a red bus"]
    rows = np.arange(2)
    con_d.score_pairs(con_d.prepare_images(pictures), rows, con_d.prepare_texts(captions), rows)
    con_d.judgements = 0


def from_scratch(workspace: Workspace, con_d: ItmDiscriminator, table: pa.Table, batch: int) -> np.ndarray:
    """(n,) float32: every combination with its own picture and caption encoded for it alone."""
    pairs = workspace.read_pairs(["image_id", "shard", "image_offset", "image_size"]).to_pylist()
    where = {pair["image_id"]: pair for pair in pairs}
    # Sorted by length, as the pass does, so that padding costs neither side more.
    captions = table["caption"].to_pylist()
    order = np.argsort([len(caption) for caption in captions], kind="stable")
    image_ids = table["image_id"].to_numpy()
    out = np.empty(len(captions), np.float32)
    for first in range(0, len(order), batch):
        rows = order[first : first + batch]
        found = [where[int(image_ids[row])] for row in rows]
        data = read_ranges(
            [workspace.shard_url(one["shard"]) for one in found],
            [one["image_offset"] for one in found],
            [one["image_size"] for one in found],
        )
        images = con_d.prepare_images([decode_rgb(one) for one in data])
        texts = con_d.prepare_texts([captions[row] for row in rows])
        at = np.arange(len(rows))
        out[rows] = con_d.score_pairs(images, at, texts, at)
    return out


def make_workspace(folder: Path, n: int, batch: int) -> Workspace:
    """A workspace of noise pictures and random captions, with random embeddings and one planned epoch."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(n):
        pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((256, 256), Image.Resampling.BICUBIC).save(folder / f"{i}.jpg", quality=90)
        words = rng.choice(WORDS, rng.integers(8, 15))
        rows.append({"image": f"{i}.jpg", "caption": " ".join([*words, str(i)])})
    (folder / "pairs.json").write_text(json.dumps(rows))
    shard([str(folder / "pairs.json")], str(folder / "work"), ShardConfig())
    workspace = Workspace.open(folder / "work")
    stage = workspace.stage("embeddings/clip")
    stage.begin({"model": "random"}, {"pairs": workspace.digest})
    outputs = []
    for starts, path_of in ((workspace.image_starts, image_array_path), (workspace.pair_starts, text_array_path)):
        for number, size in enumerate(np.diff(starts)):
            array = rng.normal(size=(size, 64))
            outputs.append(path_of(stage.path, number))
            arrays.write_array(outputs[-1], (array / np.linalg.norm(array, axis=1, keepdims=True)).astype(np.float16))
    tables.write_table(stage.path / "bad.parquet", BAD_SCHEMA.empty_table())
    stage.finish(outputs, width=64, normalised=True)
    group(workspace, GroupConfig(sampling="random", batch_size=batch))
    return workspace


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--model", default="albef-base")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="default: torch's own choice; 1 where other jobs run beside it")
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--batch", type=int, default=24, help="pairs per planned batch")
    parser.add_argument("--candidates", type=int, default=7, help="7 make about 8 unique combinations an image")
    parser.add_argument("--scratch", type=int, default=48, help="combinations to judge from scratch")
    parser.add_argument("--scratch-batch", type=int, default=16)
    parser.add_argument("--fuse-batch", type=int, default=64)
    parser.add_argument("--block-images", type=int, default=128)
    return parser.parse_args()


if __name__ == "__main__":
    main()
