"""How fast ``fnpipe embed`` is against a plain PyTorch loop over the same pictures and captions.

    python benchmarks/speed/embed.py          2,000 pictures of 500 x 375 and 2,000 captions, about 8 minutes on 2 cores
    python benchmarks/speed/embed.py --quick  64 pictures and 256 captions, without the memory part, under a minute

ViT-B-32 with random weights, which compute as long as trained ones. The loops are what one would write: a DataLoader
with open_clip's transform, batches of 64, all 77 tokens; in fp32, and in the precision that fnpipe picks. The time of
``fnpipe embed`` is that of the whole stage but for the loading of the model, which the loops are spared too: reading,
decoding, encoding, writing with fsync, digests. Its time for the pictures is that of pictures and captions minus that
of the captions alone (the same captions on one picture). The last line is JSON.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from fnpipe.pipeline.embed.open_clip import load_open_clip
from fnpipe.pipeline.embed.stage import EmbedConfig, embed
from fnpipe.pipeline.images.decode import decode_rgb
from fnpipe.pipeline.images.transform import Transform
from fnpipe.pipeline.machine.device import pick_precision
from fnpipe.pipeline.shard.stage import ShardConfig, shard
from fnpipe.pipeline.workspace.workspace import Workspace

MODEL = "ViT-B-32"
LOOP_BATCH = 64

# How many of COCO's captions have 7, 8, ... words, in percent; 10.5 on average.
COCO_WORDS = {7: 1, 8: 12, 9: 22, 10: 24, 11: 17, 12: 10, 13: 6, 14: 3, 15: 2, 16: 1, 18: 1, 22: 1}
WORDS = (
    "a man riding wave on top of surfboard in the ocean two dogs laying couch with remote red bus parked street next "
    "to tall building woman holding tennis racket court group people standing around table filled food small kitchen "
    "white stove wooden cabinets young boy playing baseball field clock tower against cloudy blue sky cat sitting "
    "window looking outside giraffe eating leaves from tree zoo enclosure plate broccoli cheese sandwich bathroom sink"
)


def draw_picture(rng: np.random.Generator) -> bytes:
    """A JPEG of about 500 x 375 and 40 KB: smooth shapes under fine grain, as in photographs."""
    width, height = (500, 375) if rng.random() < 0.75 else (375, 500)
    coarse = Image.fromarray(rng.integers(0, 256, (9, 12, 3), dtype=np.uint8)).resize((width, height))
    grain = rng.normal(0, 9, (height, width, 1))
    rgb = (np.asarray(coarse) + grain).clip(0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(rgb).save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


def draw_caption(rng: np.random.Generator) -> str:
    counts = np.array(list(COCO_WORDS.values()))
    return " ".join(rng.choice(WORDS.split(), rng.choice(list(COCO_WORDS), p=counts / counts.sum())))


def make_workspace(root: Path, jpegs: list[Path], captions: list[list[str]], per_shard: int) -> Workspace:
    """Shard pictures with their captions as a user would."""
    rows = [{"image": path.name, "caption": texts} for path, texts in zip(jpegs, captions, strict=True)]
    pairs = root.with_suffix(".json")
    pairs.write_text(json.dumps(rows))
    with redirect_stderr(io.StringIO()):
        shard([str(pairs)], str(root), ShardConfig(images_per_shard=per_shard))
    return Workspace.open(root)


def fnpipe_seconds(workspace: Workspace, encoder: Any) -> float:
    start = time.perf_counter()
    with redirect_stderr(io.StringIO()):
        embed(workspace, encoder, EmbedConfig(overwrite=True))
    return time.perf_counter() - start


class Pictures(Dataset[Any]):
    def __init__(self, paths: list[Path], transform: Callable[[Image.Image], torch.Tensor]) -> None:
        self.paths, self.transform = paths, transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, row: int) -> torch.Tensor:
        return self.transform(Image.open(self.paths[row]))


@torch.inference_mode()
def loop_over_images(paths: list[Path], model: Any, transform: Any, dtype: torch.dtype, device: str) -> float:
    """Pictures per second of the plain loop."""
    start = time.perf_counter()
    for batch in DataLoader(Pictures(paths, transform), batch_size=LOOP_BATCH, num_workers=1):
        rows = model.encode_image(batch.to(device, dtype))
        (rows / rows.norm(dim=-1, keepdim=True)).float().cpu().numpy()
    return len(paths) / (time.perf_counter() - start)


@torch.inference_mode()
def loop_over_texts(captions: list[str], model: Any, device: str) -> float:
    """Captions per second of the plain loop."""
    tokenizer = open_clip.get_tokenizer(MODEL)
    start = time.perf_counter()
    for low in range(0, len(captions), LOOP_BATCH):
        rows = model.encode_text(tokenizer(captions[low : low + LOOP_BATCH]).to(device))
        (rows / rows.norm(dim=-1, keepdim=True)).float().cpu().numpy()
    return len(captions) / (time.perf_counter() - start)


def transforms_compared(jpegs: list[bytes], theirs: Any, ours: Transform) -> dict[str, float]:
    """Decode + transform on one core, and how far the pixels are apart (in steps of 8 bits)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        start = time.process_time()
        slow = [theirs(Image.open(io.BytesIO(data))) for data in jpegs]
        middle = time.process_time()
        fast = [ours.normalise(ours(decode_rgb(data))[None])[0] for data in jpegs]
        end = time.process_time()
    finally:
        torch.set_num_threads(threads)
    std = torch.tensor(ours.std).view(3, 1, 1)
    steps = [((a - b).abs() * std * 255) for a, b in zip(slow, fast, strict=True)]
    return {
        "pillow_per_second": len(jpegs) / (middle - start),
        "fnpipe_per_second": len(jpegs) / (end - middle),
        "largest_difference": max(float(s.max()) for s in steps),
        "mean_difference": statistics.fmean(float(s.mean()) for s in steps),
    }


def peak_rate(dtype: torch.dtype, device: str, size: int = 4096) -> float:
    """Floating-point operations per second of a large matrix product, the best of several."""
    size = size if device != "cpu" else size // 2
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return max(2 * size**3 / seconds for seconds in timed(lambda: a @ b, 6, device))


def encoder_rate(encoder: Any, batch_size: int, device: str) -> float:
    """Floating-point operations per second of the image encoder on prepared batches, the best of several."""
    batch = torch.randint(0, 256, (batch_size, 3, 224, 224), dtype=torch.uint8)
    return max(batch_size * image_operations() / s for s in timed(lambda: encoder.encode_images(batch), 4, device))


def image_operations(tokens: int = 50, width: int = 768, layers: int = 12, patch: int = 32) -> int:
    """Of ViT-B/32 on one picture: multiplications and additions of its matrix products."""
    per_layer = 2 * tokens * 12 * width * width + 2 * 2 * tokens * tokens * width
    return layers * per_layer + 2 * (tokens - 1) * 3 * patch * patch * width + 2 * width * 512


def timed(work: Callable[[], Any], repeats: int, device: str) -> list[float]:
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        if device != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    # The first one pays for allocation.
    return seconds[1:]


def _peak_memory(root: Path, checkpoint: Path, answers: Any) -> None:
    logging.disable()
    encoder = load_open_clip(MODEL, str(checkpoint))
    with redirect_stderr(io.StringIO()):
        embed(Workspace.open(root), encoder, EmbedConfig(overwrite=True))
    # Not getrusage's figure: that one outlives exec and would be this benchmark's own.
    high_water = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    answers.put(int(high_water.split()[1]) / 1024)


def peak_memory(workspace: Workspace, checkpoint: Path) -> float:
    """MiB of a fresh process that loads the model and embeds the workspace."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=_peak_memory, args=(workspace.root, checkpoint, answers))
    process.start()
    peak: float = answers.get()
    process.join()
    return peak


def run(n: int, directory: Path, device: str, small: int, texts_per_picture: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    encoded = [draw_picture(rng) for _ in range(n)]
    jpegs = [directory / f"{i:05d}.jpg" for i in range(n)]
    for path, data in zip(jpegs, encoded, strict=True):
        path.write_bytes(data)
    captions = list(dict.fromkeys(draw_caption(rng) for _ in range(n * texts_per_picture)))
    kilobytes = sum(map(len, encoded)) / n / 1000
    print(f"{n:,} JPEGs of {kilobytes:.0f} KB on average, {len(captions):,} captions", file=sys.stderr)

    torch.manual_seed(0)
    model, _, transform = open_clip.create_model_and_transforms(MODEL)
    checkpoint = directory / "random.pt"
    torch.save(model.state_dict(), checkpoint)
    model.eval()
    encoder = load_open_clip(MODEL, str(checkpoint), device)
    precision = pick_precision("auto", torch.device(device))
    result: dict[str, Any] = {"device": device, "threads": torch.get_num_threads(), "precision": precision, "n": n}

    whole = make_workspace(directory / "whole", jpegs, [captions[i::n] for i in range(n)], 500)
    texts = make_workspace(directory / "texts", jpegs[:1], [captions], 500)
    # Once through for the page cache, the compiled kernels and the allocator.
    warm = make_workspace(directory / "warm", jpegs[:8], [[c] for c in captions[:8]], 500)
    fnpipe_seconds(warm, encoder)
    text_seconds = fnpipe_seconds(texts, encoder)
    result["fnpipe_texts_per_second"] = len(captions) / text_seconds
    result["fnpipe_images_per_second"] = n / (fnpipe_seconds(whole, encoder) - text_seconds)

    model = model.to(device)
    for name, dtype in (("fp32", torch.float32), ("same_precision", encoder.dtype)):
        model = model.to(dtype)
        result[f"{name}_loop_images_per_second"] = loop_over_images(jpegs, model, transform, dtype, device)
        result[f"{name}_loop_texts_per_second"] = loop_over_texts(captions[:n], model, device)
        for kind in ("images", "texts"):
            ratio = result[f"fnpipe_{kind}_per_second"] / result[f"{name}_loop_{kind}_per_second"]
            result[f"{kind}_vs_{name}" + ("_loop" if name == "fp32" else "")] = ratio

    compared = transforms_compared(encoded[:small], transform, encoder.transform)
    result["transform_vs_pillow"] = compared["fnpipe_per_second"] / compared["pillow_per_second"]
    result.update({f"transform_{key}": value for key, value in compared.items()})

    batch_size = 32 if device == "cpu" else 512
    peak = peak_rate(encoder.dtype, device)
    reached = encoder_rate(encoder, batch_size, device)
    peak = max(peak, peak_rate(encoder.dtype, device))
    result["peak_gflops"], result["encoder_gflops"] = peak / 1e9, reached / 1e9
    result["peak_share"] = reached / peak

    for shards in () if n < 1000 else (2, 20):  # the quick form has no minute for it
        pictures = shards * 3
        some = make_workspace(directory / f"memory-{shards}", jpegs[:pictures], [[c] for c in captions[:pictures]], 3)
        result[f"peak_mib_{shards}_shards"] = peak_memory(some, checkpoint)
    return result


def report(result: dict[str, Any]) -> None:
    print(
        f"\n{MODEL}, random weights, {result['n']:,} pictures, {result['device']}, "
        f"{result['threads']} threads, {result['precision']}"
    )
    print(f"{'':24}{'images/s':>12}{'texts/s':>12}")
    for name, label in (
        ("fnpipe", "fnpipe embed"),
        ("fp32_loop", "plain loop, fp32"),
        ("same_precision_loop", f"plain loop, {result['precision']}"),
    ):
        images, texts = (result[f"{name}_{kind}_per_second"] for kind in ("images", "texts"))
        print(f"{label:24}{images:>12.1f}{texts:>12.1f}")
    for key, aim in (
        ("images_vs_fp32_loop", "1.7"),
        ("images_vs_same_precision", "1"),
        ("texts_vs_fp32_loop", "4"),
        ("texts_vs_same_precision", "2"),
        ("transform_vs_pillow", "2.5"),
    ):
        print(f"{key:28}{result[key]:8.2f}   (at least {aim})")
    transform = {key: result[f"transform_{key}"] for key in ("fnpipe_per_second", "pillow_per_second")}
    largest, mean = result["transform_largest_difference"], result["transform_mean_difference"]
    print(
        f"decode + transform on one core: {transform['fnpipe_per_second']:,.0f}/s against Pillow's "
        f"{transform['pillow_per_second']:,.0f}/s; pixels differ by {largest:.2f} steps of 8 bits at most, "
        f"{mean:.5f} on average"
    )
    print(
        f"the encoder reaches {result['encoder_gflops']:,.0f} of {result['peak_gflops']:,.0f} GFLOP/s: "
        f"{result['peak_share']:.0%} (aim 80 %)"
    )
    if "peak_mib_2_shards" in result:
        print(
            f"peak memory: {result['peak_mib_2_shards']:,.0f} MiB for 2 shards, "
            f"{result['peak_mib_20_shards']:,.0f} MiB for 20"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under a minute, with a small part of the data")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    logging.disable()
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as directory:
        n = 64 if arguments.quick else 2000
        result = run(n, Path(directory), arguments.device, 40 if arguments.quick else 400, 4 if arguments.quick else 1)
    report(result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
