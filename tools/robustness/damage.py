"""Damage every file of a workspace in five ways, and see which command notices.

    python tools/robustness/damage.py [--scenes 60 --cells 400 --commands mine-connections ... --seed 0]

A cell is one file, one damage and one command. The command runs on a damaged copy of a sound workspace, in a process
of its own, and what it prints and leaves is compared with what it does on the sound one:

    refused    one line and exit code 2
    same       exit code 0 and the same result: the damage did not reach it
    other      exit code 0 and another result, without a word
    told       exit code 0, another result, and a line about the damage (`status`)
    fault      a traceback, a signal, or exit code 1

``status --verify`` runs once for every damage; of the cells that end as ``other``, those count as ``noticeable`` whose
damage shows by a cheap check: anything but a bit flipped inside a plain array, a checkpoint or a log, or two of these
that changed places. The last line of the output is one JSON object with the counts by command.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

# One thread: a fork of a process that has computed with several would wait for ever for those it has not.
os.environ["OMP_NUM_THREADS"] = "1"

from stages import finish, import_all, start_run

_GROUP = ("--batch-size", "16", "--epochs", "1", "--search-space")
_JUDGE = ("--discriminator", "itm:demo", "--groups", "m", "--graph", "2", "--candidates", "2", "--threads", "1")
_TRAIN = ("--method", "mafa", "--init", "demo", "--groups", "m", "--edges", "itm", "--epochs", "1", "--threads", "1")
_FEW = ("--set", "tensorboard=false", "--set", "batch_size=16")

# How the sound workspace is made; ROOT stands for the directory that holds it.
CHAIN = (
    ("shard", "ROOT/source/pairs.json", "ROOT/ws", "--images-per-shard", "20", "--holdout", "0.2", "--workers", "1"),
    ("embed", "ROOT/ws", "--model", "demo", "--name", "demo", "--threads", "1", "--workers", "0"),
    ("build-graph", "ROOT/ws", "--index", "exact", "--k", "8"),
    ("group", "ROOT/ws", "--batch-size", "16", "--epochs", "2", "--search-space", "32", "--name", "m"),
    ("mine-connections", "ROOT/ws", *_JUDGE, "--score-recorded", "--name", "itm"),
    ("train", "ROOT/ws", "--run", "mafa", *_TRAIN, *_FEW),
)

# What is run on every damage: it makes something new from what is there.
COMMANDS = {
    "embed": ("embed", "ROOT/ws", "--model", "demo", "--name", "new", "--threads", "1", "--workers", "0"),
    "build-graph": ("build-graph", "ROOT/ws", "--embeddings", "demo", "--index", "exact", "--k", "6", "--overwrite"),
    "group all": ("group", "ROOT/ws", "--embeddings", "demo", *_GROUP, "all", "--name", "new"),
    "group 32": ("group", "ROOT/ws", "--embeddings", "demo", *_GROUP, "32", "--name", "new"),
    "mine-connections": ("mine-connections", "ROOT/ws", "--embeddings", "demo", *_JUDGE, "--name", "new"),
    "inspect": ("inspect", "ROOT/ws", "--edges", "itm", "--json"),
    "audit": ("audit", "ROOT/ws", "--embeddings", "demo", "--batch-size", "16", "--json"),
    "export": ("export", "ROOT/ws", "--edges", "itm", "--to", "hf", "ROOT/out"),
    "train": ("train", "ROOT/ws", "--run", "new", *_TRAIN, *_FEW),
    "evaluate": ("evaluate", "ROOT/ws", "--run", "mafa", "--json"),
    "status": ("status", "ROOT/ws"),
}
VERIFY = ("status", "ROOT/ws", "--verify", "--all")

# Where nothing but a digest of the whole file could tell.
_PLAIN = (".npy", ".safetensors", ".state", ".jsonl")
# What a command leaves beside its records, which hold times.
_RESULTS = (".npy", ".parquet", ".safetensors")


def truncated(path: Path, _: random.Random) -> None:
    os.truncate(path, path.stat().st_size // 2)


def emptied(path: Path, _: random.Random) -> None:
    os.truncate(path, 0)


def deleted(path: Path, _: random.Random) -> None:
    path.unlink()


def swapped(path: Path, _: random.Random) -> None:
    """With the next file of its directory, of the same kind and other content."""
    mine = path.read_bytes()
    around = [p for p in sorted(path.parent.iterdir()) if p.suffix == path.suffix and p.is_file()]
    around = around[around.index(path) + 1 :] + around[: around.index(path)]
    other = next((p for p in around if p.read_bytes() != mine), None)
    if other is not None:
        theirs = other.read_bytes()
        other.write_bytes(mine)
        path.write_bytes(theirs)


def flipped(path: Path, draws: random.Random) -> None:
    """One bit of it."""
    data = bytearray(path.read_bytes())
    if data:
        data[draws.randrange(len(data))] ^= 1 << draws.randrange(8)
        path.write_bytes(data)


DAMAGES: tuple[Callable[[Path, random.Random], None], ...] = (truncated, emptied, deleted, swapped, flipped)


class Place:
    """A directory in which the sound workspace, or a damaged copy of it, stands."""

    def __init__(self, root: Path, scenes: int) -> None:
        import_all()
        from fnpipe.pipeline.scenes.dataset import write_scenes

        self.root, self.sound, self.log = root / "place", root / "sound", root / "log"
        write_scenes(self.root / "source", scenes, 0, size=32)
        for words in CHAIN:
            code, said, _ = self.run(words)
            if code:
                raise SystemExit(f"{words[0]}: {said}")
        shutil.rmtree(self.root / "ws" / "runs" / "mafa" / "tensorboard", ignore_errors=True)
        shutil.copytree(self.root, self.sound)
        self.results: dict[str, Any] = {}

    def reset(self) -> None:
        shutil.rmtree(self.root)
        shutil.copytree(self.sound, self.root)

    def files(self) -> list[Path]:
        """Every file of the sound workspace, from its root: of numbered ones the first, the second and the last."""
        found = sorted(p.relative_to(self.sound) for p in (self.sound / "ws").rglob("*") if p.is_file())
        numbered = {p: [q for q in found if q.parent == p.parent and q.suffix == p.suffix] for p in found}
        some = {p for p, alike in numbered.items() if p in (alike[0], alike[min(1, len(alike) - 1)], alike[-1])}
        return [p for p in found if (len(numbered[p]) < 6 or p in some) and not p.name.endswith(".lock")]

    def run(self, words: tuple[str, ...]) -> tuple[int, str, str]:
        """The exit code of a command, all that it printed, and its results: stdout and files that were not there."""
        before = set(self.root.rglob("*"))
        code, said = finish(start_run([word.replace("ROOT", str(self.root)) for word in words], self.log))
        found = [p for p in self.root.rglob("*") if p.is_file() and p.suffix in _RESULTS]
        made = [p for p in found if p not in before or ("build-graph" in words and p.parent.parent.name == "graph")]
        digests = {str(p.relative_to(self.root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(made)}
        told = "".join(line for line in said.splitlines(True) if line.startswith("{")) if "--json" in words else ""
        if words[0] == "status":
            told = said
        return code, said, told + json.dumps(digests)

    def outcome(self, command: str, words: tuple[str, ...]) -> tuple[str, str]:
        """How a command ends on what stands here, and what it said."""
        if command not in self.results:
            kept = self.root.rename(self.root.with_name("kept"))
            shutil.copytree(self.sound, self.root)
            self.results[command] = self.run(words)[2]
            shutil.rmtree(self.root)
            kept.rename(self.root)
        code, said, result = self.run(words)
        lines = said.strip().splitlines()
        if code not in (0, 2) or "Traceback" in said or (code == 2 and not said.strip()):
            return "fault", said
        if code == 2:
            one = sum(line.startswith("fnpipe: ") for line in lines) == 1 or command == "verify"
            return ("refused" if one else "fault"), said
        if _timeless(result) == _timeless(self.results[command]):
            return "same", said
        return ("told" if command == "status" else "other"), said


def _timeless(result: str) -> str:
    """Without the figures that differ from run to run."""
    import re

    return re.sub(r'"(seconds|images_per_s|captions_per_s)": [0-9.e-]+', "", result)


def is_plain(file: Path, how: str) -> bool:
    """Whether only a digest of the whole file can tell of the damage."""
    return how in ("flipped", "swapped") and (file.suffix in _PLAIN or (file.suffix == ".tar" and how == "flipped"))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--scenes", type=int, default=60)
    options.add_argument("--cells", type=int, default=None, help="so many, drawn; default: all")
    options.add_argument("--commands", nargs="+", choices=list(COMMANDS), default=list(COMMANDS))
    options.add_argument("--no-verify", action="store_true", help="for versions without `status --verify`")
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="fnpipe-damage-") as directory:
        place = Place(Path(directory), chosen.scenes)
        report = damage(place, chosen.commands, chosen.cells, chosen.seed, verify=not chosen.no_verify)
    print(json.dumps(report))
    sys.exit(1 if any(counts.get("fault") or counts.get("noticeable") for counts in report["commands"].values()) else 0)


def damage(place: Place, commands: list[str], cells: int | None, seed: int, *, verify: bool) -> dict[str, Any]:
    """Run the cells, and count how they end."""
    every = [(file, how) for file in place.files() for how in DAMAGES]
    drawn = [(file, how, command) for file, how in every for command in commands]
    if cells is not None:
        drawn = random.Random(seed).sample(drawn, min(cells, len(drawn)))
    counts: dict[str, Counter[str]] = {name: Counter() for name in [*commands, "verify"]}
    seen: tuple[Path, Any] | None = None
    for file, how, command in drawn:
        todo = [(command, COMMANDS[command])]
        if verify and seen != (file, how):
            todo.insert(0, ("verify", VERIFY))
        seen = (file, how)
        for name, words in todo:
            place.reset()
            how(place.root / file, random.Random(f"{seed} {file} {how.__name__}"))
            unchanged = (place.root / file).is_file() and (place.root / file).read_bytes() == (
                place.sound / file
            ).read_bytes()
            if unchanged:
                continue
            ended, said = place.outcome(name, words)
            counts[name][ended] += 1
            if ended == "other" and not is_plain(file, how.__name__):
                counts[name]["noticeable"] += 1
            line = " ".join(said.split())[-300:] if ended == "fault" else " ".join(said.split())[:100]
            print(f"{file} {how.__name__}, {name}: {ended} {'' if ended == 'same' else line}", flush=True)
    return {"damages": len(every), "cells": len(drawn), "commands": {name: dict(c) for name, c in counts.items()}}


if __name__ == "__main__":
    main()
