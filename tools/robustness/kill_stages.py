"""Kill every stage at random moments, run it again to the end, and compare every byte with a run left alone.

    python tools/robustness/kill_stages.py [--kills 100 --scenes 300 --stages shard embed ... --seed 0 --place DIR]
    python tools/robustness/kill_stages.py --first 40 --later 20 [--overwrite] [...]

A round starts from the files that the stages before it left. Its run is killed (SIGKILL) at a random moment: half of
the rounds after a random time, the other half just before a random change to the file system (a rename, a removal, a
new directory, a file opened for writing), where a moment of chance would hardly ever fall. Then it is run again;
every third time it is killed once more. In the end all files must be those of the run that was left alone, with
nothing beside them. The last line of the output is one JSON object; ``identical`` counts the rounds where that held.

With ``--first`` every one of the first changes is a round, and ``--later`` random ones after them. With
``--overwrite`` as well, a round starts from the stage finished with other parameters, and what is killed has
``--overwrite``; the command that is run again has not. It must leave the new stage, or end in one line and the old
stage, whole, or in one line that asks for ``--overwrite``, with which the new one comes.

Every run is a process of its own, forked from this one, which has imported the libraries before.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# One thread: a fork of a process that has computed with several would wait for ever for those it has not.
os.environ["OMP_NUM_THREADS"] = "1"

import torch

from fnpipe.cli.main import run as run_command

# A stage of this size takes seconds; one that takes longer than this hangs.
PATIENCE = 300
# What a run measures of itself.
_TIMES = ("images_per_s", "wait_share", "seconds")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass(frozen=True)
class StageRun:
    """A command under test.

    Attributes:
        words: as on the command line; ROOT stands for the directory that holds ``source``, ``ws`` and exports.
        needs: the names of the runs that come before.
        again: what a run repeated after its last moment may say instead of finishing, with exit code 2.
        other: words that make another stage of it, for it to overwrite; none where it takes no ``--overwrite``.
    """

    words: tuple[str, ...]
    needs: tuple[str, ...] = ()
    again: str | None = None
    other: tuple[str, ...] = ()

    def command(self, root: Path, *more: str) -> list[str]:
        return [word.replace("ROOT", str(root)) for word in (*self.words, *more)]


_SHARD = ("shard", "ROOT/source/pairs.json", "ROOT/ws", "--images-per-shard", "40", "--holdout", "0.1", "--seed", "3")
_GROUP = ("group", "ROOT/ws", "--batch-size", "16", "--epochs", "3")
_EXPORT = ("export", "ROOT/ws", "--edges", "itm", "--to")
_TRAIN = ("train", "ROOT/ws", "--epochs", "2", "--threads", "1", "--set", "tensorboard=false", "--run")
_FEW = ("--set", "evaluate_every=1", "--set", "checkpoint_steps=4", "--set", "batch_size=16")
_SEED = ("--set", "seed=9")
_HOLDS = "holds something already"

STAGES = {
    "shard": StageRun((*_SHARD, "--workers", "2", "--shuffle-captions", "0.2"), other=("--seed", "4")),
    "embed": StageRun(
        ("embed", "ROOT/ws", "--model", "demo", "--name", "demo", "--threads", "1", "--workers", "0"),
        ("shard",),
        other=("--batch-size", "3"),
    ),
    "graph-exact": StageRun(("build-graph", "ROOT/ws", "--index", "exact", "--k", "8"), ("embed",), other=("--k", "4")),
    "graph-ivf": StageRun(("build-graph", "ROOT/ws", "--index", "ivf", "--k", "8"), ("embed",), other=("--k", "4")),
    "graph-hnsw": StageRun(
        ("build-graph", "ROOT/ws", "--index", "HNSW16,SQfp16", "--keep-index", "--k", "8"),
        ("embed",),
        other=("--k", "4"),
    ),
    "group-M": StageRun((*_GROUP, "--search-space", "64", "--name", "m"), ("embed",), other=("--seed", "9")),
    "group-all": StageRun((*_GROUP, "--search-space", "all", "--name", "all"), ("graph-exact",), other=("--seed", "9")),
    "materialize": StageRun(
        (*_GROUP, "--search-space", "64", "--name", "m", "--materialize", "ROOT/out"), ("group-M",)
    ),
    "mine-connections": StageRun(
        (
            *("mine-connections", "ROOT/ws", "--discriminator", "itm:demo", "--groups", "m", "--graph", "2"),
            *("--candidates", "2", "--score-recorded", "--name", "itm", "--threads", "1", "--block-images", "32"),
        ),
        ("group-M", "graph-exact"),
        other=("--tau-high", "0.9", "--block-images", "16"),
    ),
    "relabel": StageRun(
        ("relabel", "ROOT/ws", "--edges", "itm", "--tau-high", "0.9", "--tau-low", "0.3"), ("mine-connections",)
    ),
    "prepare": StageRun(
        (
            *("prepare", "ROOT/ws", "--recipe", "avoid", "--discriminator", "itm:demo", "--batch-size", "16"),
            *("--search-space", "64", "--epochs", "2", "--name", "apart"),
        ),
        ("embed",),
        other=("--seed", "9"),
    ),
    "export-open_clip": StageRun((*_EXPORT, "open_clip", "ROOT/out"), ("mine-connections",), _HOLDS),
    "export-st": StageRun((*_EXPORT, "sentence-transformers", "ROOT/out"), ("mine-connections",), _HOLDS),
    "export-hf": StageRun((*_EXPORT, "hf", "ROOT/out"), ("mine-connections",), _HOLDS),
    "train-itc": StageRun((*_TRAIN, "itc", "--method", "itc", *_FEW), ("embed",), other=_SEED),
    "train-mafa": StageRun(
        (*_TRAIN, "mafa", "--method", "mafa", "--init", "demo", "--groups", "m", "--edges", "itm", *_FEW[:4]),
        ("mine-connections",),
        other=_SEED,
    ),
    "train-falcon": StageRun(
        (*_TRAIN, "falcon", "--method", "falcon", "--init", "demo", *_FEW), ("embed",), other=_SEED
    ),
    "train-adapter": StageRun((*_TRAIN, "adapter", "--method", "adapter", *_FEW), ("embed",), other=_SEED),
    "train-vacsr": StageRun((*_TRAIN, "vacsr", "--method", "vacsr", *_FEW), ("embed",), other=_SEED),
    "export-model": StageRun(("export-model", "ROOT/ws", "ROOT/out", "--run", "itc"), ("train-itc",), _HOLDS),
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kills", type=int, default=100)
    options.add_argument("--scenes", type=int, default=300)
    options.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES))
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--place", help="a directory on the file system under test")
    options.add_argument("--first", type=int, help="kill before every one of so many first changes")
    options.add_argument("--later", type=int, default=0, help="and before so many random later ones")
    options.add_argument("--overwrite", action="store_true", help="kill what overwrites a finished stage")
    chosen = options.parse_args()
    draws = random.Random(chosen.seed)
    with tempfile.TemporaryDirectory(prefix="fnpipe-kill-", dir=chosen.place) as directory:
        chain = Chain(Path(directory), chosen.scenes)
        if chosen.first is None:
            report = kill(chain, chosen.stages, chosen.kills, draws)
        else:
            stages = [name for name in chosen.stages if STAGES[name].other or not chosen.overwrite]
            report = kill_in_turn(chain, stages, chosen.first, chosen.later, draws, overwrite=chosen.overwrite)
    print(json.dumps(report))
    sys.exit(0 if report["identical"] == report["rounds"] else 1)


class Chain:
    """The files that the stages leave one after the other, each state made once, by runs left alone."""

    def __init__(self, root: Path, scenes: int) -> None:
        import_all()
        from fnpipe.mining.graph import search as searches
        from fnpipe.pipeline.scenes.dataset import write_scenes

        # So that a graph of this size is made of several blocks, as a large one is.
        searches.EXACT_BLOCK = searches.IVF_BLOCK_LEAST = searches.IVF_BLOCK_MOST = 64
        self.root = root
        self.place = root / "place"
        write_scenes(root / "start" / "source", scenes, 0, size=32)
        (root / "start" / "source" / "pictures" / "00007.png").write_bytes(b"broken")
        self.seconds: dict[str, float] = {}
        self.changes: dict[str, int] = {}

    def before(self, name: str) -> None:
        """Put ``place`` to where the stage ``name`` can start."""
        needs = STAGES[name].needs
        for need in needs:
            self.after(need)
        self._clear()
        for state in needs or ("start",):
            shutil.copytree(self.root / state, self.place, dirs_exist_ok=True)

    def before_overwriting(self, name: str) -> dict[str, str]:
        """Put ``place`` to where the stage ``name`` is there with other parameters; what is there then."""
        kept = self.root / f"{name}.other"
        if not kept.exists():
            self.before(name)
            code, said = finish(start_run(STAGES[name].command(self.place, *STAGES[name].other), self.root / "log"))
            if code:
                raise SystemExit(f"{name}: {said}")
            shutil.copytree(self.place, kept)
            counter = self.root / f"{name}.count"
            finish(start_run(STAGES[name].command(self.place, "--overwrite"), self.root / "log", count=counter))
            self.changes[f"{name}.other"] = int(counter.read_text())
        self._clear()
        shutil.copytree(kept, self.place, dirs_exist_ok=True)
        return contents(self.place)

    def _clear(self) -> None:
        # The place itself may be where a disk is mounted.
        self.place.mkdir(exist_ok=True)
        for path in self.place.iterdir():
            shutil.rmtree(path)

    def after(self, name: str) -> Path:
        """What the stage ``name``, left alone, leaves."""
        kept = self.root / name
        if not kept.exists():
            self.before(name)
            counter = self.root / f"{name}.count"
            start = time.monotonic()
            code, said = finish(start_run(STAGES[name].command(self.place), self.root / "log", count=counter))
            if code:
                raise SystemExit(f"{name}: {said}")
            self.seconds[name] = time.monotonic() - start
            self.changes[name] = int(counter.read_text())
            shutil.copytree(self.place, kept)
        return kept


def import_all() -> None:
    """What the commands import when they run, once for all that are forked from here."""
    for name in (
        *("pipeline.shard.stage", "pipeline.embed.stage", "pipeline.embed.load", "pipeline.embed.open_clip"),
        *("mining.graph.stage", "mining.plans.stage", "mining.plans.materialize", "mining.connections.stage"),
        *("mining.edges.relabel", "mining.exports.stage", "mining.views.audit", "mining.views.inspection"),
        *("mining.recipes.prepare",),
        *("train.judges.specs", "train.judges.itm"),
        *("train.methods", "train.model.export_open_clip", "train.status", "train.evaluation.retrieval"),
    ):
        importlib.import_module(f"fnpipe.{name}")


def kill(chain: Chain, stages: Sequence[str], kills: int, draws: random.Random) -> dict[str, Any]:
    """Rounds of the stages in turn, until there were so many kills."""
    killed: Counter[str] = Counter()
    identical: Counter[str] = Counter()
    rounds: Counter[str] = Counter()
    while killed.total() < kills:
        name = stages[rounds.total() % len(stages)]
        whole = contents(chain.after(name))
        chain.before(name)
        words, log = STAGES[name].command(chain.place), chain.root / "log"
        happened = []
        for _ in range(2 if draws.random() < 1 / 3 else 1):
            at = (
                draws.uniform(0, chain.seconds[name]) if draws.random() < 0.5 else draws.randint(1, chain.changes[name])
            )
            died = killed_at(words, log, at)
            killed[name] += died
            happened.append(f"{at:.2f} s" if isinstance(at, float) else f"change {at} of {chain.changes[name]}")
            happened[-1] += "" if died else " (too late)"
        code, said = finish(start_run(words, log))
        fine = code == 0 or (code == 2 and STAGES[name].again is not None and str(STAGES[name].again) in said)
        differing = difference(whole, contents(chain.place))
        rounds[name] += 1
        identical[name] += fine and not differing
        verdict = "same bytes" if fine and not differing else f"OTHER: code {code}, {differing[:5]}, {said[-500:]}"
        print(f"{name}, killed at {' and '.join(happened)}: {verdict}", flush=True)
    return {
        "kills": killed.total(),
        "rounds": rounds.total(),
        "identical": identical.total(),
        "kills_by_stage": dict(killed),
    }


def kill_in_turn(
    chain: Chain, stages: Sequence[str], first: int, later: int, draws: random.Random, *, overwrite: bool
) -> dict[str, Any]:
    """A round for each of the ``first`` changes of every stage, and for ``later`` random ones after them."""
    outcomes: dict[str, Counter[str]] = {name: Counter() for name in stages}
    for name in stages:
        whole = contents(chain.after(name))
        if overwrite:
            chain.before_overwriting(name)
        changes = chain.changes[f"{name}.other" if overwrite else name]
        after = range(first + 1, changes + 1)
        for at in [*range(1, min(first, changes) + 1), *sorted(draws.sample(after, min(later, len(after))))]:
            old = chain.before_overwriting(name) if overwrite else chain.before(name)
            found = outcome(chain, name, at, whole, old)
            outcomes[name][found.partition(":")[0]] += 1
            print(f"{name}, killed at change {at} of {changes}: {found}", flush=True)
    total = sum(outcomes.values(), Counter())
    return {
        "kills": total.total() - total["too late"],
        "rounds": total.total(),
        "identical": total.total() - total["OTHER"],
        "outcomes": {name: dict(counts) for name, counts in outcomes.items()},
    }


def outcome(chain: Chain, name: str, at: int, whole: dict[str, str], old: dict[str, str] | None) -> str:
    """What a stage is after it was killed before change ``at`` and its command was run again.

    Args:
        whole: the contents that the stage leaves. old: those of the one that it overwrites; None where there is none.

    Returns:
        ``new``, ``old``, ``refused``, ``too late`` (it was finished before), or ``OTHER: ...``.
    """
    stage, log = STAGES[name], chain.root / "log"
    words = stage.command(chain.place)
    overwriting = [*words, "--overwrite"]
    died = killed_at(overwriting if old is not None else words, log, at)
    code, said = finish(start_run(words, log))
    found = contents(chain.place)
    fine = code == 0 or (code == 2 and stage.again is not None and stage.again in said)
    if fine and not difference(whole, found):
        return "new" if died else "too late"
    lines = [line for line in said.splitlines() if line.strip()]
    if code == 2 and lines and lines[-1].startswith("fnpipe:") and old is not None:
        if not difference(old, {name: digest for name, digest in found.items() if "/.tmp-" not in f"/{name}"}):
            return "old"
        code, said = finish(start_run(overwriting, log))
        found = contents(chain.place)
        if code == 0 and not difference(whole, found):
            return "refused"
    return f"OTHER: code {code}, {difference(whole, found)[:5]}, {said[-500:]}"


# Running and killing


@dataclass
class Run:
    """A run in work: its process, and where what it says goes."""

    process: int
    log: Path


def start_run(words: list[str], log: Path, *, stop_at: int | None = None, count: Path | None = None) -> Run:
    """Fork a process that runs one command.

    Args:
        stop_at: let it kill itself just before this change to the file system. count: where it notes how many it made.
    """
    sys.stdout.flush()
    process = os.fork()
    if process:
        return Run(process, log)
    try:
        code = _child(words, log, stop_at, count)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _child(words: list[str], log: Path, stop_at: int | None, count: Path | None) -> int:
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    seen = watch_changes(stop_at)
    code = run_command(words)
    if count is not None:
        count.write_text(str(seen()))
    return code


def watch_changes(stop_at: int | None) -> Callable[[], int]:
    """Count changes to the file system from now on, and die before the one of this number; returns the count so far."""
    seen = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        opened = event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES
        if opened or event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link"):
            seen += 1
            if seen == stop_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    return lambda: seen


def killed_at(words: list[str], log: Path, at: float | int) -> bool:
    """Run a command and kill it after ``at`` seconds, or before change number ``at``; False if it was done before."""
    if isinstance(at, int):
        return finish(start_run(words, log, stop_at=at))[0] == -signal.SIGKILL
    run = start_run(words, log)
    time.sleep(at)
    os.kill(run.process, signal.SIGKILL)
    return finish(run)[0] == -signal.SIGKILL


def finish(run: Run) -> tuple[int, str]:
    """Wait for the end of a run: its exit code (minus the signal's number), and what it said."""
    deadline = time.monotonic() + PATIENCE
    while True:
        done, status = os.waitpid(run.process, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return code, run.log.read_text(errors="replace") if run.log.exists() else ""
        if time.monotonic() > deadline:
            os.kill(run.process, signal.SIGKILL)
            os.waitpid(run.process, 0)
            raise SystemExit(f"a run hangs: {run.log.read_text()[-500:]}")
        time.sleep(0.005)


# Comparing


def contents(root: Path) -> dict[str, str]:
    """The digest of every file, without what may differ: times in the manifest and in a run's records."""
    return {str(p.relative_to(root)): _digest(p) for p in sorted(root.rglob("*")) if p.is_file()}


def difference(whole: dict[str, str], found: dict[str, str]) -> list[str]:
    return sorted(name for name in whole.keys() | found.keys() if whole.get(name) != found.get(name))


def _digest(path: Path) -> str:
    data = path.read_bytes()
    if path.name == "fnpipe.json":
        data = json.dumps({**json.loads(data), "inputs": [], "sources": []}).encode()
    elif path.name == "metrics.jsonl":
        lines = map(json.loads, data.splitlines())
        data = json.dumps([_without(line, *_TIMES) for line in lines]).encode()
    elif path.name == "config.json" and path.parent.parent.name == "runs":
        record = json.loads(data)
        data = json.dumps({**record, "result": _without(record.get("result", {}), *_TIMES)}).encode()
    elif path.suffix == ".state":
        # The archive's name inside the file is that of the temporary file.
        state = torch.load(path, weights_only=True)
        state["position"].pop("log_bytes")  # times take more digits or fewer
        data = repr(_plain(state)).encode()
    return hashlib.sha256(data).hexdigest()


def _without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in names}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest())
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value


if __name__ == "__main__":
    main()
