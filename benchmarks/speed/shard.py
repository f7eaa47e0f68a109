"""How fast `fnpipe shard` is against a plain loop of Pillow and WebDataset's ShardWriter, and how much memory it takes.

    python benchmarks/speed/shard.py [--images 120000 --large 10000 --rows 2000000]

The last line of the output is one JSON object: ``ratio_vs_shardwriter`` (the smaller of those at 64 pixels and at
640x480), ``ratio_in_place`` (headers only), ``ratio_in_place_verified`` (all decoded), ``rows_per_s`` and ``peak_gib``
(of the parent, over one JSON list of synthetic rows).
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import webdataset
from PIL import Image

SIZES = {"64": (64, 64), "640x480": (640, 480)}
# Rows of the memory run name these many pictures, so that a data set of millions needs no millions of files.
ROW_PICTURES = 2000


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument(
        "--images",
        type=int,
        default=120_000,
        help="at 64 pixels; a run starts in about a second, whatever their number",
    )
    options.add_argument("--large", type=int, default=10_000, help="at 640x480")
    options.add_argument("--rows", type=int, default=2_000_000, help="of the memory run; 0 leaves it out")
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--workers", type=int, default=2)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="fnpipe-bench-") as directory:
        report = measure(Path(directory), chosen)
    print(json.dumps(report))


def measure(root: Path, chosen: argparse.Namespace) -> dict[str, object]:
    report: dict[str, object] = {"workers": chosen.workers, "cpus": os.cpu_count(), "load": os.getloadavg()[0]}
    ratios, in_place, verified = [], [], []
    for name, count in (("64", chosen.images), ("640x480", chosen.large)):
        source = root / name
        write_pictures(source, SIZES[name], count)
        seconds: dict[str, list[float]] = {"plain": [], "shard": [], "in_place": [], "verified": []}
        for _ in range(chosen.repeats):
            # The ways take turns, so that a busy machine is busy for all of them.
            seconds["plain"].append(timed(partial(plain_loop, source, root / "plain")))
            flags = ["--workers", str(chosen.workers)]
            seconds["shard"].append(fnpipe_seconds(root, [str(source / "pairs.json")], flags))
            tars = [str(root / "plain")]
            seconds["in_place"].append(fnpipe_seconds(root, tars, [*flags, "--in-place"]))
            seconds["verified"].append(fnpipe_seconds(root, tars, [*flags, "--in-place", "--verify"]))
        middle = {way: statistics.median(values) for way, values in seconds.items()}
        rates = {f"images_per_s_{way}_{name}": round(count / value) for way, value in middle.items()}
        spread = {f"spread_{way}_{name}": round(max(values) / min(values), 2) for way, values in seconds.items()}
        print(f"{name}: {rates} {spread}", flush=True)
        report |= rates | spread
        ratios.append(middle["plain"] / middle["shard"])
        in_place.append(middle["plain"] / middle["in_place"])
        verified.append(middle["plain"] / middle["verified"])
        shutil.rmtree(source)
    report |= {
        "ratio_vs_shardwriter": round(min(ratios), 2),
        "ratio_vs_shardwriter_64": round(ratios[0], 2),
        "ratio_vs_shardwriter_640x480": round(ratios[1], 2),
        "ratio_in_place": round(min(in_place), 2),
        "ratio_in_place_verified": round(min(verified), 2),
    }
    return report | (measure_rows(root, chosen.rows, chosen.workers) if chosen.rows else {})


def write_pictures(root: Path, size: tuple[int, int], count: int) -> None:
    """JPEGs with the detail of photographs (smooth shapes and some noise), and an ALBEF list of pairs."""
    (root / "pictures").mkdir(parents=True)
    generator = np.random.default_rng(0)
    distinct = min(count, 200)
    contents = []
    for _ in range(distinct):
        rough = Image.fromarray(generator.integers(0, 256, (12, 16, 3), np.uint8)).resize(
            size, Image.Resampling.BICUBIC
        )
        noisy = np.asarray(rough).astype(np.int16) + generator.integers(-12, 13, (size[1], size[0], 3))
        out = io.BytesIO()
        Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8)).save(out, "JPEG", quality=85)
        contents.append(out.getvalue())
    rows = []
    for i in range(count):
        name = f"pictures/{i:06d}.jpg"
        if i < distinct:
            (root / name).write_bytes(contents[i])
        else:  # as another file of the same bytes, without the disk's room
            os.link(root / f"pictures/{i % distinct:06d}.jpg", root / name)
        rows.append({"image": name, "caption": f"a drawn picture number {i} with a few more words in its caption"})
    (root / "pairs.json").write_text(json.dumps(rows))


def plain_loop(source: Path, target: Path) -> None:
    """What one writes by hand: decode each picture to see that it is whole, and write it with its caption."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    with webdataset.ShardWriter(str(target / "%05d.tar"), maxcount=1000, verbose=0) as writer:
        for i, row in enumerate(json.loads((source / "pairs.json").read_text())):
            data = (source / row["image"]).read_bytes()
            Image.open(io.BytesIO(data)).load()
            writer.write({"__key__": f"{i:08d}", "jpg": data, "txt": row["caption"], "json": row})


def fnpipe_seconds(root: Path, sources: list[str], flags: list[str]) -> float:
    """Seconds of one run, the start of the program included."""
    workspace = root / "workspace"
    shutil.rmtree(workspace, ignore_errors=True)
    command = [sys.executable, "-m", "fnpipe.cli", "shard", *sources, str(workspace), *flags, "--json"]
    quiet = subprocess.DEVNULL
    return timed(partial(subprocess.run, command, check=True, stdout=quiet, stderr=quiet))


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure_rows(root: Path, rows: int, workers: int) -> dict[str, object]:
    """Shard one JSON list of ``rows`` rows over a few thousand small pictures."""
    source = root / "rows"
    write_pictures(source, (16, 16), min(rows, ROW_PICTURES))
    with (source / "pairs.json").open("w") as file:
        for i in range(rows):
            row = {
                "image": f"pictures/{i % ROW_PICTURES:06d}.jpg",
                "caption": f"synthetic caption {i} of a small picture",
            }
            file.write(("[" if i == 0 else ",\n") + json.dumps(row))
        file.write("]")
    workspace = root / "workspace"
    shutil.rmtree(workspace, ignore_errors=True)
    command = [sys.executable, "-m", "fnpipe.cli", "shard", str(source / "pairs.json"), str(workspace), "--json"]
    start = time.perf_counter()
    process = subprocess.Popen([*command, "--workers", str(workers)], stdout=subprocess.DEVNULL)
    # Of this process or any that it waited for, whichever was largest: an upper bound on the parent.
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if status:
        raise RuntimeError(f"{command} ended with {status}")
    return {"rows": rows, "rows_per_s": round(rows / seconds), "peak_gib": round(usage.ru_maxrss / 2**20, 2)}


if __name__ == "__main__":
    main()
