"""The golden record: what a small chain over all stages leaves and prints, to hold a change of structure against.

A change that only moves code leaves every file, every help text and every JSON key as it was. Digests depend on the
processor and on torch, so a record is made and compared on one machine:

    python tools/golden.py record before.json      # at the commit before
    python tools/golden.py compare before.json     # at the commit after; exit code 1 and a list where something differs

``compare --free NAME ...`` leaves out entries that a change means to alter (a prefix of their names, as printed).
"""

from __future__ import annotations

import os

# Before anything that could start threads: a process that has some cannot be forked safely.
os.environ |= {"COLUMNS": "100", "OMP_NUM_THREADS": "1"}

import argparse
import hashlib
import importlib
import json
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fnpipe.cli.main import run
from fnpipe.pipeline.scenes.dataset import write_scenes

SCENES = 300
WORK = "work"

# Every stage, in an order in which each finds what it needs; `{exports}` and pages go beside the workspace.
CHAIN: dict[str, str] = {
    "shard": "shard scenes/pairs.json work --image-root scenes --holdout 60 --images-per-shard 64 --workers 1",
    "embed": "embed work --model demo --name demo --threads 1 --workers 1",
    "build-graph": "build-graph work --k 16",
    "group random": "group work --sampling random --batch-size 16 --epochs 2 --name random",
    "group": "group work --sampling grit --batch-size 16 --search-space 112 --epochs 2 --name m",
    "group all": "group work --sampling grit --batch-size 16 --search-space all --epochs 1 --materialize tars",
    "audit": "audit work --batch-size 16 --truth scenes/truth.parquet --search-space 112 --plot audit.html",
    "mine-connections": "mine-connections work --groups m --graph 4 --discriminator itm:demo --score-recorded "
    "--threads 1",
    "mine-connections clip": "mine-connections work --groups m --discriminator clip --positive-share 0.02 --name share "
    "--threads 1",
    "relabel": "relabel work --edges itm --tau-high 0.7 --tau-low 0.4",
    "inspect": "inspect work --edges itm --label positive --truth scenes/truth.parquet --html gallery.html",
    "train albef": "train work --method albef --run albef --init demo --groups random --epochs 2 --threads 1 "
    "--truth scenes/truth.parquet",
    "train grit": "train work --method grit --run grit --init demo --groups m --epochs 1 --threads 1",
    "train mafa": "train work --method mafa --run mafa --init demo --groups m --edges itm --epochs 2 --threads 1 "
    "--set smoothing=0.1",
    "train falcon": "train work --method falcon --run falcon --init demo --epochs 1 --threads 1 "
    "--set search_space=112 --set batch_size=16",
    "train adapter": "train work --method adapter --run adapter --epochs 2 --threads 1 --edges itm",
    "train vacsr": "train work --method vacsr --run vacsr --epochs 2 --threads 1",
    "embed run": "embed work --model run:mafa --name mafa --threads 1 --workers 1",
    "evaluate": "evaluate work --run mafa --truth scenes/truth.parquet --on test",
    "evaluate embeddings": "evaluate work --embeddings demo --on test",
    "evaluate vacsr": "evaluate work --run vacsr --on test",
    "report": "report work/runs/albef work/runs/mafa --html runs.html",
    "export open_clip": "export work open_clip --edges itm --to open_clip",
    "export sentence-transformers": "export work triplets --edges itm --to sentence-transformers",
    "export hf": "export work hf --edges itm --to hf",
    "export-model": "export-model work model --run mafa",
    "status": "status work",
}
METHODS = ("mafa", "falcon", "adapter", "vacsr")
# Imported once, for all forks.
LARGE = ("datasets", "faiss", "open_clip", "torch", "fnpipe.mining.plans.stage", "fnpipe.train.methods")
# What tells the time, or how long something took.
_TIMES = re.compile(r"second|time|rate|_s$|speed|waited|memory|load|path|created")
_UNEQUAL = re.compile(r"fnpipe\.json$|metrics\.jsonl$|tensorboard|\.lock$|\.png$|\.html$|lock")


def main() -> int:
    """Record, or compare with a record; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--free", nargs="*", default=[], help="Prefixes of entries that may differ.")
    parser.add_argument("--keep", type=Path, help="Work here, and leave what the chain made.")
    arguments = parser.parse_args()
    work = arguments.keep or Path(tempfile.mkdtemp(prefix="golden-"))
    work.mkdir(parents=True, exist_ok=True)
    try:
        made = record(work.resolve())
    finally:
        if arguments.keep is None:
            shutil.rmtree(work, ignore_errors=True)
    if arguments.what == "record":
        arguments.file.write_text(json.dumps(made, indent=1, sort_keys=True) + "\n")
        return 0
    before = json.loads(arguments.file.read_text())
    found = [line for line in differences(before, made) if not line.startswith(tuple(arguments.free) or ("\0",))]
    print("\n".join(found) or "equal")
    for name, seconds in before["seconds"].items():
        print(f"{name}: {seconds:.2f} s before, {made['seconds'].get(name, float('nan')):.2f} s now (CPU)")
    return bool(found)


def record(work: Path) -> dict[str, Any]:
    """Run the chain in ``work``: digests of files, keys of summaries, help texts, CPU seconds."""
    write_scenes(work / "scenes", SCENES, 1)
    for name in LARGE:
        importlib.import_module(name)
    summaries, seconds = {}, {}
    for name, line in CHAIN.items():
        print(name, file=sys.stderr)
        done, seconds[name] = _fnpipe([*line.split(), "--json"], work)
        summaries[name] = _without_times(json.loads(done))
    return {
        "files": {str(path.relative_to(work)): _digest(path) for path in sorted(work.rglob("*")) if _counts(path)},
        "summaries": summaries,
        "help": {name: _fnpipe([*name.split(), "--help"], work)[0] for name in ["", *_commands(work)]},
        "keys": {m: _fnpipe(["train", "--method", m, "--keys"], work)[0] for m in METHODS},
        "seconds": seconds,
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """A line for everything that is not as it was, but the seconds."""
    found = []
    for part in ("files", "summaries", "help", "keys"):
        old, new = before[part], after[part]
        found += [f"{part} {name}: gone" for name in sorted(old.keys() - new.keys())]
        found += [f"{part} {name}: new" for name in sorted(new.keys() - old.keys())]
        for name in sorted(old.keys() & new.keys()):
            if old[name] != new[name]:
                keys = [k for k in old[name] if old[name][k] != new[name].get(k)] if part == "summaries" else ""
                found.append(f"{part} {name}: differs {keys or ''}".rstrip())
    return found


def _fnpipe(words: list[str], work: Path) -> tuple[str, float]:
    """What a command prints, and its CPU seconds: it runs in a fork of this process, which has the large libraries."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if child == 0:
            code = 70
            try:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                os.chdir(work)
                code = run(words)
                sys.stdout.flush()
            finally:
                # Whatever happens, the fork must not go on as the parent.
                os._exit(code)
        _, status, used = os.wait4(child, 0)
        out.seek(0)
        err.seek(0)
        if status:
            raise SystemExit(f"fnpipe {' '.join(words)}: exit code {os.waitstatus_to_exitcode(status)}\n{err.read()}")
        return out.read(), used.ru_utime + used.ru_stime


def _commands(work: Path) -> list[str]:
    """Every command that the help lists."""
    lines = _fnpipe(["--help"], work)[0].partition("Commands")[2].splitlines()
    return [found[1] for line in lines if (found := re.match(r"│ ([a-z][a-z-]+) ", line))]


def _counts(path: Path) -> bool:
    return path.is_file() and "scenes/" not in path.as_posix() and not _UNEQUAL.search(path.as_posix())


def _digest(path: Path) -> str:
    data = path.read_bytes()
    if path.suffix == ".json":
        data = json.dumps(_without_times(json.loads(data))).encode()
    return hashlib.sha256(data).hexdigest()


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_times(entry) for key, entry in value.items() if not _TIMES.search(key)}
    return [_without_times(entry) for entry in value] if isinstance(value, list) else value


if __name__ == "__main__":
    started = time.monotonic()
    code = main()
    print(f"{time.monotonic() - started:.0f} s", file=sys.stderr)
    sys.exit(code)
