"""What the tables of a workspace take in a process that plans, mines, trains or evaluates: seconds, and bytes a pair.

    python benchmarks/speed/tables.py --pairs 1000000

The workspace holds nothing but its tables: one caption a picture, of ten words and a number. Every part is read in a
process of its own; its anonymous memory is that beyond the program's. The last line is JSON.

Measured: see docs/performance/rehearsal.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from synthetic import write_manifest

from fnpipe.pipeline.files import tables
from fnpipe.pipeline.workspace.schemas import IMAGES_SCHEMA, PAIRS_SCHEMA
from fnpipe.pipeline.workspace.workspace import Workspace

WORDS = tuple("a the red small dog street man two with on of in white sitting table near large green old bus".split())  # noqa: SIM905
PAIRS_PER_SHARD = 1000
PARTS = ("members", "identity", "samples")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1_000_000)
    parser.add_argument("--part", nargs=2, metavar=("PART", "WORKSPACE"), help="read one part, and nothing else")
    chosen = parser.parse_args()
    if chosen.part:
        print(json.dumps(measure(chosen.part[0], Workspace.open(chosen.part[1]))))
        return
    found: dict[str, Any] = {"pairs": chosen.pairs}
    with tempfile.TemporaryDirectory() as directory:
        make_workspace(Path(directory), chosen.pairs)
        for part in PARTS:
            command = [sys.executable, __file__, "--part", part, directory]
            said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            found[part] = json.loads(said)
            print(f"{part}: {found[part]}", flush=True)
    print(json.dumps(found))


def measure(part: str, workspace: Workspace) -> dict[str, float]:
    """CPU seconds, and bytes a pair at the peak and afterwards."""
    read = reader(part)
    before = anonymous()
    seen, stop = [before], threading.Event()

    def watch() -> None:
        while not stop.wait(0.02):
            seen.append(anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.process_time()
    held = read(workspace)
    seconds = time.process_time() - began
    stop.set()
    watcher.join()
    stays = anonymous() - before
    del held
    peak = max(seen) - before
    return {
        "cpu_seconds": round(seconds, 2),
        "peak_bytes_a_pair": round(peak / workspace.n_pairs),
        "bytes_a_pair": round(stays / workspace.n_pairs),
    }


def reader(part: str) -> Callable[[Workspace], object]:
    """What reads a part: who takes part in plans, the identity rule, and where the pictures and captions lie."""
    from fnpipe.mining.data.identity import Identity
    from fnpipe.mining.data.train_pairs import read_train_pairs
    from fnpipe.train.data.pictures import Samples

    return {"members": read_train_pairs, "identity": Identity.of, "samples": Samples.of}[part]


def anonymous() -> int:
    """Bytes of anonymous memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def make_workspace(root: Path, pairs: int) -> None:
    """Write the tables of ``pairs`` pairs in shards of a thousand."""
    rng, counts = np.random.default_rng(0), []
    for shard, start in enumerate(range(0, pairs, PAIRS_PER_SHARD)):
        ids = np.arange(start, min(start + PAIRS_PER_SHARD, pairs))
        counts.append(len(ids))
        words = np.array(WORDS)[rng.integers(0, len(WORDS), (len(ids), 10))]
        same = {"source": "pairs.json", "split": "train"}
        columns = {name: pa.repeat(value, len(ids)) for name, value in same.items()} | {
            "pair_id": ids,
            "image_id": ids,
            "shard": np.full(len(ids), shard, np.int32),
            "key": [f"{i:08d}" for i in ids],
            "caption": [" ".join([*line, str(i)]) for line, i in zip(words.tolist(), ids, strict=True)],
            "width": np.full(len(ids), 500, np.int32),
            "height": np.full(len(ids), 375, np.int32),
            "image_sha256": [rng.bytes(32).hex() for _ in ids],
            "image_offset": 512 + 38_000 * np.arange(len(ids)),
            "image_size": np.full(len(ids), 37_000),
            "image": [f"pictures/{i // 1000:05d}/{i:09d}.jpg" for i in ids],
        }
        for kind, schema in (("pairs", PAIRS_SCHEMA), ("images", IMAGES_SCHEMA)):
            table = pa.table({name: columns[name] for name in schema.names}, schema)
            tables.write_table(root / kind / f"{shard:05d}.parquet", table)
    write_manifest(root, counts)


if __name__ == "__main__":
    main()
