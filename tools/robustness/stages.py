"""Every stage as a command, in the order of the chain; how one is run in a process of its own, stopped, and compared.

A process is forked from this one, which has imported the libraries before: a run of a small stage takes a fraction of
a second. An audit hook counts its changes to the file system (a rename, a removal, a new directory, a file opened for
writing), and ends or halts it just before the one that is asked for.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import io
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
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
_CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link")


@dataclass(frozen=True)
class StageRun:
    """A command under test.

    Attributes:
        words: as on the command line; ROOT stands for the directory that holds ``source``, ``ws`` and exports.
        needs: the names of the runs that come before, which it reads.
        again: what a run repeated after its last moment may say instead of finishing, with exit code 2.
        other: words that make another stage of it, for it to overwrite; none where it takes no ``--overwrite``.
        shared: two of it may be at work at once.
    """

    words: tuple[str, ...]
    needs: tuple[str, ...] = ()
    again: str | None = None
    other: tuple[str, ...] = ()
    shared: bool = False

    def command(self, root: Path, *more: str) -> list[str]:
        """The words of the run, with ``more``, whose flags stand for those of the run that take one value."""
        words = list(self.words)
        for flag in (word for word in more if word.startswith("--") and word != "--set" and word in words):
            at = words.index(flag)
            del words[at : at + 2]
        return [word.replace("ROOT", str(root)) for word in (*words, *more)]

    def fine(self, code: int, said: str) -> bool:
        """Whether this is how it may end that is run again after its last moment."""
        return code == 0 or (code == 2 and self.again is not None and self.again in said)


_SHARD = ("shard", "ROOT/source/pairs.json", "ROOT/ws", "--images-per-shard", "10", "--holdout", "0.1", "--seed", "3")
_EMBED = ("embed", "ROOT/ws", "--threads", "1", "--workers", "0", "--batch-size", "8", "--model")
_GRAPH = ("build-graph", "ROOT/ws", "--embeddings", "demo", "--k", "8", "--index")
_GROUP = ("group", "ROOT/ws", "--embeddings", "demo", "--batch-size", "4", "--epochs", "2")
_SPACE = ("--search-space", "8", "--name")
_MINE = ("mine-connections", "ROOT/ws", "--embeddings", "demo", "--candidates", "2", "--groups", "m", "--threads", "1")
_EXPORT = ("export", "ROOT/ws", "--edges", "itm", "--to")
_TRAIN = ("train", "ROOT/ws", "--epochs", "2", "--threads", "1", "--set", "tensorboard=false", "--run")
_FEW = ("--set", "evaluate_every=1", "--set", "checkpoint_steps=2")
_BATCH = ("--set", "batch_size=4")
_ON = ("--embeddings", "demo")
_SEED = ("--set", "seed=9")
_HOLDS = "holds something already"

STAGES = {
    "shard": StageRun((*_SHARD, "--workers", "1", "--shuffle-captions", "0.2"), other=("--seed", "4")),
    "embed": StageRun((*_EMBED, "demo", "--name", "demo"), ("shard",), other=("--batch-size", "3")),
    "graph-exact": StageRun((*_GRAPH, "exact"), ("embed",), other=("--k", "4")),
    "graph-ivf": StageRun((*_GRAPH, "ivf"), ("embed",), other=("--k", "4")),
    "graph-hnsw": StageRun((*_GRAPH, "HNSW16,SQfp16", "--keep-index"), ("embed",), other=("--k", "4")),
    "group-M": StageRun((*_GROUP, *_SPACE, "m"), ("embed",), other=("--seed", "9")),
    "group-all": StageRun((*_GROUP, "--search-space", "all", "--name", "all"), ("graph-exact",), other=("--seed", "9")),
    "group-random": StageRun((*_GROUP[:2], *_GROUP[4:], "--sampling", "random"), ("shard",), other=("--seed", "9")),
    "materialize": StageRun((*_GROUP, *_SPACE, "m", "--materialize", "ROOT/out"), ("group-M",)),
    "mine-connections": StageRun(
        (*_MINE, "--discriminator", "itm:demo", "--graph", "2", "--score-recorded", "--name", "itm"),
        ("group-M", "graph-exact"),
        other=("--tau-high", "0.9"),
    ),
    "group-edges": StageRun(
        (*_GROUP, *_SPACE, "known", "--edges", "itm"), ("mine-connections",), other=("--seed", "9")
    ),
    "relabel": StageRun(
        ("relabel", "ROOT/ws", "--edges", "itm", "--tau-high", "0.9", "--tau-low", "0.3"), ("mine-connections",)
    ),
    "prepare": StageRun(
        (
            *("prepare", "ROOT/ws", "--embeddings", "demo", "--recipe", "avoid", "--discriminator", "itm:demo"),
            *("--batch-size", "4", "--search-space", "8", "--epochs", "2", "--name", "apart"),
        ),
        ("embed",),
        other=("--seed", "9"),
    ),
    "export-open_clip": StageRun((*_EXPORT, "open_clip", "ROOT/out"), ("mine-connections",), _HOLDS, shared=True),
    "export-st": StageRun((*_EXPORT, "sentence-transformers", "ROOT/out"), ("mine-connections",), _HOLDS, shared=True),
    "export-hf": StageRun((*_EXPORT, "hf", "ROOT/out"), ("mine-connections",), _HOLDS, shared=True),
    "export-label-studio": StageRun(
        (*_EXPORT, "label-studio", "--count", "20", "ROOT/out"), ("mine-connections",), _HOLDS, shared=True
    ),
    "export-fiftyone": StageRun((*_EXPORT, "fiftyone", "ROOT/out"), ("mine-connections",), _HOLDS, shared=True),
    "train-itc": StageRun((*_TRAIN, "itc", "--method", "itc", *_FEW, *_BATCH), ("shard",), other=_SEED),
    "train-mafa": StageRun(
        (*_TRAIN, "mafa", "--method", "mafa", "--init", "run:itc", "--groups", "m", "--edges", "itm", *_FEW),
        ("mine-connections", "train-itc"),
        other=_SEED,
    ),
    "train-falcon": StageRun(
        (*_TRAIN, "falcon", "--method", "falcon", "--init", "demo", *_ON, *_FEW, *_BATCH), ("embed",), other=_SEED
    ),
    "train-adapter": StageRun(
        (*_TRAIN, "adapter", "--method", "adapter", *_ON, *_FEW, *_BATCH), ("embed",), other=_SEED
    ),
    "train-vacsr": StageRun((*_TRAIN, "vacsr", "--method", "vacsr", *_ON, *_FEW, *_BATCH), ("embed",), other=_SEED),
    "embed-run": StageRun((*_EMBED, "run:itc", "--name", "own"), ("train-itc",), other=("--batch-size", "3")),
    "embed-adapter": StageRun(
        (*_EMBED, "run:adapter", "--name", "turned"), ("train-adapter",), other=("--batch-size", "3")
    ),
    "mine-vacsr": StageRun(
        (*_MINE, "--discriminator", "vacsr:vacsr", "--calibrate-on", "itm", "--name", "vacsr"),
        ("mine-connections", "train-vacsr"),
        other=("--tau-high", "0.9"),
    ),
    "mine-known": StageRun(
        (*_MINE, "--discriminator", "itm:demo", "--graph", "4", "--known", "itm", "--name", "more"),
        ("mine-connections",),
        other=("--tau-high", "0.9"),
    ),
    "evaluate": StageRun(("evaluate", "ROOT/ws", "--run", "itc"), ("train-itc",), shared=True),
    "evaluate-adapter": StageRun(("evaluate", "ROOT/ws", "--run", "adapter"), ("train-adapter",), shared=True),
    "export-model": StageRun(
        ("export-model", "ROOT/ws", "ROOT/out", "--run", "itc"), ("train-itc",), _HOLDS, shared=True
    ),
}


class Chain:
    """The files that the stages leave one after the other, each state made once, by runs left alone."""

    def __init__(self, root: Path, scenes: int) -> None:
        import_all()
        from fnpipe.mining.graph import search as searches
        from fnpipe.pipeline.scenes.dataset import write_scenes

        # So that a graph of this size is made of several blocks, as a large one is.
        searches.EXACT_BLOCK = searches.IVF_BLOCK_LEAST = searches.IVF_BLOCK_MOST = max(8, scenes // 5)
        self.root = root
        self.place = root / "place"
        self.log = root / "log"
        write_scenes(root / "start" / "source", scenes, 0, size=32)
        (root / "start" / "source" / "pictures" / "00007.png").write_bytes(b"broken")
        self.changes: dict[str, int] = {}

    def before(self, name: str) -> None:
        """Put ``place`` to where the stage ``name`` can start."""
        needs = STAGES[name].needs
        for need in needs:
            self.after(need)
        self._put(*(needs or ("start",)))

    def after(self, name: str) -> Path:
        """What the stage ``name``, left alone, leaves."""
        if not (self.root / name).exists():
            self.before(name)
            self._keep(name, STAGES[name].command(self.place))
        return self.root / name

    def finished(self, name: str) -> None:
        """Put ``place`` to where the stage ``name`` is finished."""
        self.after(name)
        self._put(name)

    def before_overwriting(self, name: str) -> dict[str, str]:
        """Put ``place`` to where the stage ``name`` is there with other parameters; what is there then."""
        kept = f"{name}.other"
        if not (self.root / kept).exists():
            self.before(name)
            self._keep(kept, STAGES[name].command(self.place, *STAGES[name].other))
            # How many changes it is to overwrite it.
            self._run(kept, STAGES[name].command(self.place, "--overwrite"))
        self._put(kept)
        return contents(self.place)

    def _keep(self, name: str, words: list[str]) -> None:
        self._run(name, words)
        shutil.copytree(self.place, self.root / name)

    def _run(self, name: str, words: list[str]) -> None:
        """Run a command to its end, count its changes, and import what it imported, for all that follow."""
        noted = self.root / "noted"
        code, said = finish(start_run(words, self.log, noted=noted))
        if code:
            raise SystemExit(f"{name}: {said}")
        facts = json.loads(noted.read_text())
        self.changes[name] = facts["changes"]
        for module in facts["modules"]:
            if module not in sys.modules:
                with suppress(Exception):
                    importlib.import_module(module)
        _settle()

    def _put(self, *states: str) -> None:
        # The place itself may be where a disk is mounted.
        self.place.mkdir(exist_ok=True)
        for path in self.place.iterdir():
            shutil.rmtree(path)
        for state in states:
            shutil.copytree(self.root / state, self.place, dirs_exist_ok=True)


def import_all() -> None:
    """What the commands import when they run, once for all that are forked from here."""
    for name in (
        *("pipeline.shard.stage", "pipeline.embed.stage", "pipeline.embed.load", "pipeline.embed.open_clip"),
        *("mining.graph.stage", "mining.plans.stage", "mining.plans.materialize", "mining.connections.stage"),
        *("mining.edges.relabel", "mining.exports.stage", "mining.views.audit", "mining.views.inspection"),
        *("mining.recipes.prepare", "train.judges.specs", "train.judges.itm"),
        *("train.methods", "train.model.export_open_clip", "train.status", "train.evaluation.both_scores"),
    ):
        importlib.import_module(f"fnpipe.{name}")
    # Imported by its name alone it may take other kernels than the stage, which notes those it had.
    importlib.import_module("fnpipe.mining.graph.load_faiss").load_faiss()
    # It makes the commands of all flags, which every fork would make anew.
    with redirect_stdout(io.StringIO()):
        run_command(["--version"])
    _settle()


def _settle() -> None:
    """Have no fork's garbage collector go through what is imported: every page that it touches is copied first."""
    gc.collect()
    gc.freeze()


# Running and ending


@dataclass
class Run:
    """A run in work: its process, and where what it says goes."""

    process: int
    log: Path


def start_run(
    words: list[str],
    log: Path,
    *,
    stop_at: int | None = None,
    stop_by: int = signal.SIGKILL,
    noted: Path | None = None,
) -> Run:
    """Fork a process that runs one command.

    Args:
        stop_at: let it send itself ``stop_by`` just before this change to the file system.
        noted: where it says how many changes it made, and what it has imported, as JSON.
    """
    sys.stdout.flush()
    process = os.fork()
    if process:
        return Run(process, log)
    code = 1
    try:
        code = _child(words, log, stop_at, stop_by, noted)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _child(words: list[str], log: Path, stop_at: int | None, stop_by: int, noted: Path | None) -> int:
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    seen = watch_changes(stop_at, stop_by)
    code = run_command(words)
    if noted is not None:
        noted.write_text(json.dumps({"changes": seen(), "modules": sorted(sys.modules)}))
    return code


def watch_changes(stop_at: int | None, stop_by: int = signal.SIGKILL) -> Callable[[], int]:
    """Count changes to the file system from now on, and stop before the one of this number.

    Returns:
        What says how many there were so far.
    """
    seen = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        opened = event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES
        # Compiled code is kept by the first run of a program alone, beside its modules.
        if (opened or event in _CHANGES) and "__pycache__" not in str(arguments[0]):
            seen += 1
            if seen == stop_at:
                os.kill(os.getpid(), stop_by)

    sys.addaudithook(watch)
    return lambda: seen


def killed_at(words: list[str], log: Path, at: int) -> bool:
    """Run a command and kill it before change number ``at``; False if it was done before."""
    return finish(start_run(words, log, stop_at=at))[0] == -signal.SIGKILL


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


def one_line(code: int, said: str) -> bool:
    """Whether a command ended as it does for a user's mistake: exit code 2 and, in the end, one line that says why."""
    lines = [line for line in said.splitlines() if line.strip()]
    return code == 2 and bool(lines) and lines[-1].startswith("fnpipe:") and "Traceback" not in said


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
