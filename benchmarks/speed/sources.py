"""How fast the readers kept by hand are beside `datasets`, over the same files, and how much memory each takes.

    python benchmarks/speed/sources.py [--rows 4000 --kilobytes 40 --gigabytes 3]

Three forms of one data set: Parquet as the Hub holds it, what ``save_to_disk`` writes, and a folder of pictures with
its table. Both sides see every caption and every picture's bytes, undecoded (`datasets` streams, except from what was
saved, which it maps), each in a process of its own. ``--gigabytes`` is one Parquet file whose pictures are a single
row group. The last line is JSON: wall and CPU seconds, the peak of anonymous memory beyond what the libraries take,
and how many times the CPU seconds of the reader `datasets` takes.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

WAYS = ("ours", "datasets")
KIND = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rows", type=int, default=4000)
    options.add_argument("--kilobytes", type=int, default=40, help="of a picture")
    options.add_argument("--gigabytes", type=float, default=0, help="of one row group of large pictures; 0: none")
    options.add_argument("--only", nargs=3, metavar=("FORM", "WAY", "PATH"), help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.only:
        print(json.dumps(measure(*chosen.only)))
        return
    found: dict[str, object] = {"rows": chosen.rows, "kilobytes": chosen.kilobytes}
    with tempfile.TemporaryDirectory(prefix="fnpipe-bench-") as directory:
        root = Path(directory)
        forms = {"parquet": write_parquet, "saved": write_saved, "folder": write_folder}
        for form, write in forms.items():
            write(root / form, chosen.rows, chosen.kilobytes << 10)
            found[form] = compare(form, root / form)
            shutil.rmtree(root / form)
        if chosen.gigabytes:
            size = 9 << 20
            write_parquet(root / "large", int(chosen.gigabytes * 2**30 / size), size)
            found["row_group"] = compare("parquet", root / "large")
    print(json.dumps(found))


def compare(form: str, path: Path) -> dict[str, object]:
    """Both ways over one data set; a way that fails says how."""
    result: dict[str, object] = {}
    for way in WAYS:
        command = [sys.executable, __file__, "--only", form, way, str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        last = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()[-1]
        result[way] = json.loads(last) if done.returncode == 0 else last
        print(f"{form} {way}: {result[way]}", flush=True)
    if all(isinstance(result[way], dict) for way in WAYS):
        ours, theirs = (result[way] for way in WAYS)
        result["ratio"] = round(theirs["cpu_seconds"] / ours["cpu_seconds"], 2)  # type: ignore[index]
    return result


def measure(form: str, way: str, path: str) -> dict[str, float]:
    """Seconds and memory of one way in this process."""
    import datasets  # noqa: F401  (both ways ask it what there is: loading it is no part of either)

    read = {"ours": read_ours, "datasets": read_datasets}[way](form, Path(path))
    before = anonymous()
    seen, stop = [before], threading.Event()

    def watch() -> None:
        while not stop.wait(0.02):
            seen.append(anonymous())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    began, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    rows, size = read()
    wall, now = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    stop.set()
    watcher.join()
    cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    mib = round((max(seen) - before) / 2**20)
    return {"seconds": round(wall, 2), "cpu_seconds": round(cpu, 2), "peak_mib": mib, "rows": rows, "bytes": size}


def anonymous() -> int:
    """Bytes of anonymous memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def read_ours(form: str, path: Path) -> Callable[[], tuple[int, int]]:
    """The reader of the product, and then every picture's bytes by the place that it gives."""
    from fnpipe.pipeline.images.reader import ImageReader, ImageRequest
    from fnpipe.pipeline.sources.open import READERS, open_sources
    from fnpipe.pipeline.sources.rows import RowBuilder
    from fnpipe.pipeline.sources.source import ReadOptions, Tools

    def read() -> tuple[int, int]:
        with tempfile.TemporaryDirectory(dir=path.parent) as spool:
            (source,) = open_sources([str(path)], "auto")
            rows = RowBuilder(0)
            tools = Tools(lambda function, items: map(function, items), Path(spool))
            READERS[source.format](source, ReadOptions(), rows, tools)
            table = rows.table()
            reader = ImageReader(source.root, source.files)
            size = 0
            for batch in table.select(["image", "file", "offset", "size"]).to_batches(16):
                size += sum(map(len, reader.read([ImageRequest(**row) for row in batch.to_pylist()])))
            return len(table), size

    return read


def read_datasets(form: str, path: Path) -> Callable[[], tuple[int, int]]:
    """`datasets`, whose pictures stay undecoded."""
    import datasets

    def read() -> tuple[int, int]:
        if form == "saved":
            data = datasets.load_from_disk(str(path))
        else:
            name = "imagefolder" if form == "folder" else "parquet"
            data = datasets.load_dataset(name, data_dir=str(path), split="train", streaming=True)
        data = data.cast_column("image", datasets.Image(decode=False))
        rows = size = 0
        for row in data:
            picture = row["image"]
            size += len(picture["bytes"] or Path(picture["path"]).read_bytes())
            rows += bool(row["caption"])
        return rows, size

    return read


def pictures(rows: int, size: int) -> list[bytes]:
    """Pictures that start as a JPEG does, and are noise."""
    random = np.random.default_rng(0)
    return [b"\xff\xd8\xff\xe0" + random.bytes(size - 4) for _ in range(rows)]


def write_parquet(path: Path, rows: int, size: int) -> None:
    """One row group, uncompressed; its pictures lie in memory piece by piece, since a column of bytes ends at 2 GiB."""
    path.mkdir()
    random, piece = np.random.default_rng(0), max(1, (64 << 20) // size)
    fields = pa.schema([("image", KIND), ("caption", pa.string())])
    batches = []
    for start in range(0, rows, piece):
        numbers = range(start, min(rows, start + piece))
        values = [{"bytes": random.bytes(size), "path": f"{i}.jpg"} for i in numbers]
        columns = [pa.array(values, KIND), pa.array([f"a caption {i}" for i in numbers])]
        batches.append(pa.record_batch(columns, schema=fields))
    name = path / "train-00000-of-00001.parquet"
    pq.write_table(pa.Table.from_batches(batches), name, rows, compression="none", use_dictionary=False)
    assert pq.ParquetFile(name).num_row_groups == 1


def write_saved(path: Path, rows: int, size: int) -> None:
    import datasets

    values = [{"bytes": data, "path": None} for data in pictures(rows, size)]
    columns = {"image": values, "caption": [f"a caption {i}" for i in range(rows)]}
    features = datasets.Features({"image": datasets.Image(), "caption": datasets.Value("string")})
    datasets.Dataset.from_dict(columns, features).save_to_disk(str(path))


def write_folder(path: Path, rows: int, size: int) -> None:
    (path / "train").mkdir(parents=True)
    lines = []
    for number, data in enumerate(pictures(rows, size)):
        (path / "train" / f"{number:06d}.jpg").write_bytes(data)
        lines.append(json.dumps({"file_name": f"{number:06d}.jpg", "caption": f"a caption {number}"}))
    (path / "train" / "metadata.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
